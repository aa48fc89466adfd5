//! The fencing token: the number by which a resource tells a newer holder from an older one.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A number greater than every token granted before for the same name.
///
/// Send it along with every write; the resource keeps the highest it has seen and refuses lower ones. A holder
/// that was paused past its lease is then harmless, whatever it believes.
///
/// Tokens of different names cannot be compared. Tokens grow, but not by one.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let first = locks.mutex("row:7").acquire().await?;
/// let old = first.token();
/// first.release().await?;
/// let second = locks.mutex("row:7").acquire().await?;
/// assert!(second.token() > old);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(u64);

impl Token {
    /// The token with this number; for resources that read one back.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number itself.
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> u64 {
        token.0
    }
}
