//! What a client asks of the functions in the database, and what they answer. See the head of `act` in `postgres/line.sql`.

use crate::{Claim, Hold, Mode, Moment, Name, Owner};
use std::time::Duration;

/// One operation of `act`.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    pub(crate) code: &'static str,
    pub(crate) name: Name,
    pub(crate) owner: Owner,
    pub(crate) ttl: Duration,
    pub(crate) mode: Mode,
    /// When a waiter came, if it has been in line before; 0 otherwise.
    pub(crate) arrival: u64,
    /// The hold that is meant, 0 if it is not known; of an eviction the newest.
    pub(crate) token: u64,
    pub(crate) label: String,
}

impl Op {
    pub(super) fn claim(claim: &Claim, wait: bool) -> Self {
        Self {
            code: if wait { "a" } else { "t" },
            name: claim.name.clone(),
            owner: claim.owner,
            ttl: claim.ttl,
            mode: claim.mode,
            arrival: 0,
            token: 0,
            label: claim.label.to_string(),
        }
    }

    /// For this hold, and no other one of the same owner.
    pub(super) fn hold(code: &'static str, hold: &Hold) -> Self {
        let token = hold.seat.map_or(0, |seat| seat >> 1);
        Self { token, ..Self::plain(code, &hold.name, hold.owner, hold.ttl) }
    }

    pub(super) fn plain(code: &'static str, name: &Name, owner: Owner, ttl: Duration) -> Self {
        let (mode, arrival, token) = (Mode::Exclusive, 0, 0);
        Self { code, name: name.clone(), owner, ttl, mode, arrival, token, label: String::new() }
    }

    /// Whether it is a release.
    pub(super) fn gives_back(&self) -> bool {
        matches!(self.code, "r" | "x")
    }

    /// The letter of the mode.
    pub(crate) fn mode_letter(&self) -> &'static str {
        match self.mode {
            Mode::Exclusive => "e",
            Mode::Shared => "s",
            Mode::Permit { .. } => "p",
        }
    }

    /// How many may hold; 0 where that is no question.
    pub(crate) fn permits(&self) -> u32 {
        if let Mode::Permit { of } = self.mode { of } else { 0 }
    }

    pub(crate) fn ttl_millis(&self) -> i64 {
        i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX)
    }
}

/// The mode that a letter and a number stand for.
pub(crate) fn mode(letter: &str, permits: i64) -> Option<Mode> {
    match letter {
        "e" => Some(Mode::Exclusive),
        "s" => Some(Mode::Shared),
        "p" => Some(Mode::Permit { of: u32::try_from(permits).ok()? }),
        _ => None,
    }
}

/// What `act` answers to one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Held { token: u64 },
    Waits { arrival: u64, look: Duration },
    Busy,
    Released(u64),
    Renewed(bool),
    OtherPermits(u64),
    GivenUp,
    Evicted(u64),
}

impl Reply {
    /// A row of the reply: its kind and two numbers.
    pub(crate) fn read(kind: i64, a: Option<i64>, b: Option<i64>) -> Option<Self> {
        let number = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok());
        Some(match kind {
            1 => Reply::Held { token: number(a)? },
            2 => Reply::Waits { arrival: number(a)?, look: Duration::from_millis(number(b)?) },
            3 => Reply::Busy,
            4 => Reply::Released(number(a)?),
            5 => Reply::Renewed(number(a)? == 1),
            6 => Reply::OtherPermits(number(a)?),
            7 => Reply::GivenUp,
            8 => Reply::Evicted(number(a)?),
            _ => return None,
        })
    }
}

/// A reply, and what is known about how it came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    /// When the request that it answers was sent.
    pub(crate) sent: Moment,
    /// An earlier attempt may have been carried out without our seeing the answer.
    pub(crate) repeated: bool,
}

/// What arrives without having been asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Push {
    /// Granted to a waiter: token, server time of the grant in µs, provisional lease.
    Granted { owner: Owner, name: Name, token: u64, at: u64, lease: Duration },
    /// This waiter is the first in line now; the holders can stay for this long.
    First { owner: Owner, name: Name, left: Duration },
    /// Taken away from its holder.
    Lost { owner: Owner },
    /// The connection broke: words may have been missed.
    Broken,
}

impl Push {
    /// Reads a word; see `tell` in `postgres/line.sql`.
    pub(crate) fn read(word: &str) -> Option<Self> {
        let mut parts = word.split(' ');
        let kind = parts.next()?;
        let owner = owner(&unhex(parts.next()?)?)?;
        let mut part = || parts.next();
        Some(match kind {
            "g" => {
                let (token, at, lease) = (part()?.parse().ok()?, part()?.parse().ok()?, part()?.parse().ok()?);
                Push::Granted { owner, name: name(part()?)?, token, at, lease: Duration::from_millis(lease) }
            }
            "h" => {
                let left = Duration::from_millis(part()?.parse().ok()?);
                Push::First { owner, name: name(part()?)?, left }
            }
            "l" => Push::Lost { owner },
            _ => return None,
        })
    }
}

fn name(digits: &str) -> Option<Name> {
    Name::new(String::from_utf8(unhex(digits)?).ok()?).ok()
}

/// An owner as the database keeps it.
pub(crate) fn owner(bytes: &[u8]) -> Option<Owner> {
    bytes.try_into().ok().map(Owner::from_bytes)
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pair = |pair: &[u8]| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?);
    digits.as_bytes().chunks(2).map(pair).collect()
}

/// Hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read() {
        let owner = Owner::random();
        let name = Name::new("a b\n\0ü").unwrap();
        let (who, what) = (hex(&owner.to_bytes()), hex(name.as_str().as_bytes()));
        let granted = Push::Granted { owner, name: name.clone(), token: 7, at: 8, lease: Duration::from_millis(900) };
        assert_eq!(Push::read(&format!("g {who} 7 8 900 {what}")), Some(granted));
        let first = Push::First { owner, name, left: Duration::from_millis(5) };
        assert_eq!(Push::read(&format!("h {who} 5 {what}")), Some(first));
        assert_eq!(Push::read(&format!("l {who}")), Some(Push::Lost { owner }));
        for bad in ["", "g", "g 12", "x 00", "l zz", &format!("g {who} 7 8"), &format!("g {who} 7 8 9 c3")] {
            assert_eq!(Push::read(bad), None, "{bad}");
        }
    }
}
