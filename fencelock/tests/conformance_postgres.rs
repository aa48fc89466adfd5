//! The PostgreSQL engine keeps every promise, also between processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "postgres")]

fencelock_testkit::conformance!(fencelock_testkit::postgres::PostgresSubject::new());
