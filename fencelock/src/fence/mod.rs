//! The resource side: what refuses a holder that does not know yet that it lost the lock.
//!
//! A fence keeps the highest [`Token`] that it has seen for a resource. A write with a lower one is refused with
//! [`ErrorKind::Fenced`], and changes nothing.
//!
//! | the resource | use |
//! | --- | --- |
//! | a row with a column for the token | [`sql::Row`]: `write` in the module of your database |
//! | anything else in the database | [`sql::Guard`], a table of tokens |
//! | a row, and no counter to compare | [`sql::Row`]: `mark` and `write_marked`, compare-and-set on the owner id |
//! | a value in Redis | `redis::RedisFence` (feature `redis`) |
//! | a file | [`file::FencedFile`] |
//! | an HTTP API, object storage | the proxy `fencelock gate` |
//! | a value, and no lock at all | `modify`, in the module of your database and in `redis`: the optimistic lock, with [`Retry`] |
//!
//! # Announce yourself before you read
//! Who reads, computes and writes back must show its token to the fence *before it reads*: only then can no older
//! holder write between the two. Every fence has a step for that (`raise`), and it is all that must be
//! remembered: raise, read, write.

#[cfg(unix)]
pub mod file;
#[cfg(feature = "redis")]
pub mod redis;
pub mod retry;
pub mod sql;

pub use retry::Retry;

use crate::{Error, ErrorKind, Token};

/// The one answer to an older token, whatever the resource.
pub(crate) fn fenced(resource: &str, token: Token, newest: Token) -> Error {
    Error::new(
        ErrorKind::Fenced,
        format!(
            "{resource} refused token {token}: it has seen the newer token {newest}, so this lock was lost; nothing was changed"
        ),
    )
    .during("write")
}
