//! Words for people: spans of time, names that may contain anything, and tables.

use std::time::Duration;

/// A span of time, as short as it can be read: `250ms`, `12s`, `3m05s`, `2h10m`, `4d3h`.
pub(crate) fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match seconds {
        0 => format!("{}ms", span.as_millis()),
        1..10 if span.subsec_millis() >= 50 => format!("{:.1}s", span.as_secs_f64()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{minutes}m{:02}s", seconds % 60),
        3_600..86_400 => format!("{hours}h{minutes:02}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Text from elsewhere, on one line and without power over the terminal: control characters are escaped.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Rows under a head, in columns as wide as their widest cell.
pub(crate) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = head.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let mut line = |cells: [&str; N]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count()) + 2));
        }
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(head);
    for row in rows {
        line(row.each_ref().map(String::as_str));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short() {
        for (millis, text) in [
            (0, "0ms"),
            (250, "250ms"),
            (3_000, "3s"),
            (3_200, "3.2s"),
            (9_990, "10.0s"),
            (12_700, "12s"),
            (185_000, "3m05s"),
            (7_800_000, "2h10m"),
            (356_400_000, "4d3h"),
        ] {
            assert_eq!(span(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(plain("a\nb\u{1b}[2Jü"), "a\\nb\\u{1b}[2Jü");
    }

    #[test]
    fn columns_line_up() {
        let rows = [["ä".to_owned(), "1".to_owned()], ["long".to_owned(), String::new()]];
        assert_eq!(table(["N", "X"], &rows), "N     X\nä     1\nlong\n");
    }
}
