//! Reads an engine's URL: `scheme:rest?option=value&…`. Every option must be known, or it is an error.

use crate::{Error, Result};
use std::time::Duration;

/// A parsed URL, not yet understood by its engine.
#[derive(Clone)]
pub(crate) struct Url {
    pub(crate) scheme: String,
    /// What stands between the scheme's colon and the question mark, percent-decoded.
    pub(crate) rest: String,
    options: Vec<(String, String)>,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once(':').ok_or_else(|| {
            Error::invalid(format!(
                "{} is not an engine's URL; it starts with a scheme, as in file:/path or redis://host",
                shown(text)
            ))
        })?;
        let known = |b: u8| b.is_ascii_alphanumeric() || b == b'+' || b == b'-' || b == b'.';
        if scheme.is_empty() || !scheme.bytes().all(known) {
            return Err(Error::invalid(format!(
                "{} is not a scheme; an engine's URL looks like file:/path or redis://host",
                shown(scheme)
            )));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let key = decode(key)?;
            if options.iter().any(|(known, _)| *known == key) {
                return Err(Error::invalid(format!("option {} stands twice in the engine's URL", shown(&key))));
            }
            options.push((key, decode(value)?));
        }
        Ok(Self { scheme: scheme.to_ascii_lowercase(), rest: decode(rest)?, options })
    }

    /// Takes an option out, so that what is left at the end is unknown.
    pub(crate) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.options.iter().position(|(known, _)| known == key)?;
        Some(self.options.remove(at).1)
    }

    /// Takes an option that is a span of time.
    pub(crate) fn take_duration(&mut self, key: &str) -> Result<Option<Duration>> {
        self.take(key)
            .map(|text| parse_duration(&text).map_err(|error| Error::invalid(format!("option {key}={text}: {error}"))))
            .transpose()
    }

    /// An error when an option is left that nobody took.
    pub(crate) fn finish(&self, known: &[&str]) -> Result<()> {
        match self.options.first() {
            None => Ok(()),
            Some((key, _)) => Err(Error::invalid(format!(
                "unknown option {} in the URL of the {} engine; it knows {}{}",
                shown(key),
                self.scheme,
                known.join(", "),
                if key.contains('@') { "; write ? in a password as %3F" } else { "" }
            ))),
        }
    }
}

/// A part of a URL in an error. What stands before an @ may be a password: it is not shown.
fn shown(text: &str) -> String {
    match text.rsplit_once('@') {
        Some((_, rest)) => format!("\"***@{}\"", rest.escape_debug()),
        None => format!("{text:?}"),
    }
}

pub(crate) fn decode(text: &str) -> Result<String> {
    // The text may hold a password: it is not shown.
    let bad = || Error::invalid("the engine's URL has a bad percent escape; write % as %25");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16)).ok_or_else(bad);
        let value = digit()? * 16 + digit()?;
        bytes.push(u8::try_from(value).map_err(|_| bad())?);
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// Reads a span of time such as `250ms`, `30s`, `5m` or `1h30m`.
///
/// # Errors
/// A sentence that names the text and the form that is expected.
///
/// ```
/// use std::time::Duration;
/// assert_eq!(fencelock::parse_duration("1h30m")?, Duration::from_secs(5400));
/// assert_eq!(fencelock::parse_duration("1.5s")?, Duration::from_millis(1500));
/// assert!(fencelock::parse_duration("10").is_err());
/// # Ok::<(), fencelock::Error>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad =
        || Error::invalid(format!("{text:?} is not a span of time; write a number and a unit: 250ms, 30s, 5m, 1h30m"));
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, tail) = rest.split_at(digits);
        let unit_end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let seconds = match unit.trim() {
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return Err(bad()),
        };
        let number: f64 = number.parse().map_err(|_| bad())?;
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| bad())?;
        // Floating point leaves 1.5 ms at 1499999 ns: round to the microsecond.
        let micros = (part.as_secs_f64() * 1e6).round();
        let part = Duration::try_from_secs_f64(micros / 1e6).map_err(|_| bad())?;
        total = total.checked_add(part).ok_or_else(bad)?;
        rest = tail;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_split_and_decoded() {
        let mut url = Url::parse("file:/tmp/a%20b?ttl=10s&network=allow").unwrap();
        assert_eq!((url.scheme.as_str(), url.rest.as_str()), ("file", "/tmp/a b"));
        assert_eq!(url.take_duration("ttl").unwrap(), Some(Duration::from_secs(10)));
        let error = url.finish(&["ttl"]).unwrap_err().to_string();
        assert!(error.contains("network"), "{error}");
        assert_eq!(url.take("network").as_deref(), Some("allow"));
        url.finish(&["ttl"]).unwrap();
    }

    #[test]
    fn a_password_in_the_wrong_place_is_not_shown() {
        let refused = |text: &str| match Url::parse(text) {
            Ok(url) => url.finish(&["ttl"]).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        for text in [
            "redis://bob:a?secret@host",
            "redis://bob:a?x&secret@host&secret@host",
            "secret@host",
            "bob/secret@host:6379",
            "redis://bob:a?secret@host=1",
        ] {
            let error = refused(text);
            assert!(!error.contains("secret"), "{text}: {error}");
        }
        assert!(refused("redis://bob:a?secret@host").contains("%3F"));
    }

    #[test]
    fn bad_urls_are_refused() {
        for bad in ["", "nothing", ":x", "f%ile:x", "file:/a%zz", "file:/a%2", "file:/a?x=1&x=2", "file:%ff"] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_read() {
        for (text, millis) in [
            ("0s", 0),
            ("250ms", 250),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("2m5s", 125_000),
            ("1.5s", 1500),
            ("1d", 86_400_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
        for bad in ["", "5", "s", "-5s", "5 parsecs", "1e9h", "5s5", "99999999999999999999d", "nan s", "1..5s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
