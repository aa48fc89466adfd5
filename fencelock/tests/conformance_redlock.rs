//! Redlock keeps every promise that it makes, also between processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redlock")]

fencelock_testkit::conformance!(fencelock_testkit::redlock::RedlockSubject::new());
