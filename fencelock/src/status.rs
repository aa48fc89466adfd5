//! What `status` and `list` tell: who holds a lock and who waits.

use crate::{Mode, Token};
use serde::Serialize;
use std::time::Duration;

/// A line as it stood when the engine was asked.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// The lock's name.
    pub name: String,
    /// Who holds it; empty when it is free.
    pub holders: Vec<Holder>,
    /// Who waits, the next one first.
    pub waiters: Vec<Waiter>,
    /// What else is in the way of whoever wants it, in words: a server that must not grant anything yet, nodes that are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

impl Status {
    /// A line with nobody in it.
    pub fn free(name: impl Into<String>) -> Self {
        Self { name: name.into(), holders: Vec::new(), waiters: Vec::new(), obstacle: None }
    }

    /// Whether somebody holds the lock.
    pub fn is_held(&self) -> bool {
        !self.holders.is_empty()
    }
}

/// One who holds a lock.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// How it is held.
    pub mode: Mode,
    /// The grant's fencing token.
    pub token: Token,
    /// The first digits of the owner's id.
    pub owner: String,
    /// Who it is, in its own words.
    pub label: String,
    /// How long it has been held.
    #[serde(rename = "held_ms", serialize_with = "millis")]
    pub held_for: Duration,
    /// Until the lease ends, if it is not renewed.
    #[serde(rename = "lease_left_ms", serialize_with = "millis")]
    pub lease_left: Duration,
}

/// One who waits for a lock.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Waiter {
    /// How it wants to hold.
    pub mode: Mode,
    /// The first digits of the owner's id.
    pub owner: String,
    /// Who it is, in its own words.
    pub label: String,
    /// How long it has been waiting.
    #[serde(rename = "waiting_ms", serialize_with = "millis")]
    pub waiting_for: Duration,
}

fn millis<S: serde::Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}
