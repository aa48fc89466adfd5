//! The library's log on stderr, in the same form as the tool's own messages.
//!
//! Errors are shown, `-v` shows more, `-q` nothing. `FENCELOCK_LOG` overrides (`debug`, or `fencelock::keeper=trace`).

use crate::exit::Failure;
use std::fmt;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, layer};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

pub(crate) fn start(quiet: bool, verbose: bool) -> Result<(), Failure> {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::OFF,
        (_, true) => LevelFilter::DEBUG,
        // What the tool has to say of a loss, it says itself.
        _ => LevelFilter::ERROR,
    };
    let filter = match std::env::var("FENCELOCK_LOG") {
        Ok(text) if !text.is_empty() => text.parse().map_err(|_| {
            Failure::usage(format!(
                "FENCELOCK_LOG={text:?} is not understood; write a level such as debug, or target=level"
            ))
        })?,
        _ => Targets::new().with_target("fencelock", level),
    };
    let lines = layer().with_writer(std::io::stderr).with_ansi(false).event_format(OneLine);
    // Fails only when a log was started before, which then stands.
    let _ = tracing_subscriber::registry().with(lines.with_filter(filter)).try_init();
    Ok(())
}

struct OneLine;

impl<S, N> FormatEvent<S, N> for OneLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(to, "fencelock: ")?;
        context.format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}
