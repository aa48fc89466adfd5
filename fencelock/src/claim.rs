//! The words that the client and the engines exchange: mode, owner, claim, grant, hold.

use crate::{Error, Moment, Name, Result, Token};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// How a lock is held. Mutex, read/write lock and semaphore are only modes of one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other readers.
    Shared,
    /// As one of at most `of` holders.
    Permit {
        /// How many may hold at the same time; the same for all who use the name.
        of: u32,
    },
}

impl Mode {
    /// Whether a holder in this mode may do what a holder in `wanted` may: decides on re-entry.
    pub fn covers(self, wanted: Mode) -> bool {
        self == Mode::Exclusive || self == wanted
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Permit { of } => write!(f, "one of {of}"),
        }
    }
}

/// The unguessable id of one acquisition.
///
/// It makes every operation idempotent, and whoever knows it can re-enter the hold (see
/// [`Mutex::owner`](crate::Mutex::owner)), also from another process. `Display` prints all of it, to be handed on
/// and parsed again; `Debug` prints only its beginning, as logs should.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(u128);

impl Owner {
    /// A new, random owner.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        // Without a source of randomness two holders could pass for one: there is no safe way to go on.
        getrandom::fill(&mut bytes).expect("the operating system has a source of randomness");
        Self(u128::from_le_bytes(bytes))
    }

    /// The first eight digits: enough to tell owners apart in a listing, too little to re-enter.
    pub fn short(self) -> String {
        format!("{:08x}", self.0 >> 96)
    }

    /// All of it, as [`Display`](fmt::Display) prints it; for those who do it often.
    pub(crate) fn to_hex(self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut hex = [0; 32];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(self.0.to_be_bytes()) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        hex
    }

    pub(crate) const fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    pub(crate) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.to_hex()).unwrap_or_default())
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({}…)", self.short())
    }
}

impl FromStr for Owner {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        digits.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(Self).ok_or_else(|| {
            Error::invalid("an owner is 32 hexadecimal digits, as FENCELOCK_OWNER or Guard::owner() give it")
        })
    }
}

/// A request for a lock.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Claim {
    /// What is to be locked.
    pub name: Name,
    /// How.
    pub mode: Mode,
    /// For whom: one acquisition.
    pub owner: Owner,
    /// How long the engine keeps the grant alive without a renewal.
    pub ttl: Duration,
    /// Who asks, for people who look at the line.
    pub label: Arc<str>,
    /// An exclusive claim was made as that of a writer among readers. To the line it is one like any other; other programs, with
    /// which an engine shares its layout, may have a recipe of its own for it.
    pub writer: bool,
}

impl Claim {
    /// The longest label, in bytes; a longer one is cut.
    pub const LABEL_MAX: usize = 120;
}

/// The engine's answer to a claim: it is held.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Grant {
    /// Greater than every token granted before for this name.
    pub token: Token,
    /// The mode that is held.
    pub mode: Mode,
    /// When the lease began, on the local clock, or earlier: when the request that it answers was *sent*.
    pub from: Moment,
    /// Where the engine keeps the claim; means something to the engine only.
    pub seat: u64,
    /// How long the lease is until the first renewal, if shorter than the claim's ttl: then it is renewed at once.
    pub provisional: Option<Duration>,
}

impl Grant {
    /// A grant of `token`, whose lease began at `from`.
    pub fn new(token: Token, mode: Mode, from: Moment, seat: u64) -> Self {
        Self { token, mode, from, seat, provisional: None }
    }

    /// The same grant, good for `lease` only until it is renewed.
    #[must_use]
    pub fn provisional(self, lease: Duration) -> Self {
        Self { provisional: Some(lease), ..self }
    }
}

/// A claim that was granted, as the engine gets to see it again in renewals and the release.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Hold {
    /// What is locked.
    pub name: Name,
    /// By whom.
    pub owner: Owner,
    /// How long each renewal lasts.
    pub ttl: Duration,
    /// [`Grant::seat`]; `None` when the claim was given up before its answer was seen.
    pub seat: Option<u64>,
    /// [`Grant::token`], likewise. An owner may hold again after it lost the lock: what is meant is the hold with this token.
    pub token: Option<Token>,
    /// How it was asked for.
    pub mode: Mode,
    /// For a release: an earlier attempt may have been carried out, or the lock lost before. What the engine still knows of this hold
    /// does not prove then that nobody else holds.
    pub again: bool,
}

impl Hold {
    pub(crate) fn of(claim: &Claim, grant: Option<&Grant>) -> Self {
        Self {
            name: claim.name.clone(),
            owner: claim.owner,
            ttl: claim.ttl,
            seat: grant.map(|grant| grant.seat),
            token: grant.map(|grant| grant.token),
            mode: claim.mode,
            again: false,
        }
    }
}

/// What a renewal found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// The lease was extended; it runs from this moment of the local clock (when the request was sent).
    Extended {
        /// Start of the extended lease.
        from: Moment,
    },
    /// This owner does not hold the lock any more.
    Gone,
    /// The engine could not tell for this hold; it is asked again.
    Unknown,
}

/// What a release found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// It was held and is free now.
    Freed,
    /// It was waiting in line and has left it.
    Withdrawn,
    /// There was nothing of this owner: released before, expired, or taken away.
    NotHeld,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_survives_printing_and_hides_in_debug() {
        let owner = Owner::random();
        assert_eq!(owner.to_string().parse::<Owner>().unwrap(), owner);
        assert!(!format!("{owner:?}").contains(&owner.to_string()));
        for bad in ["", "xyz", "+0000000000000000000000000000001", &"0".repeat(33)] {
            assert!(bad.parse::<Owner>().is_err(), "{bad}");
        }
    }
}
