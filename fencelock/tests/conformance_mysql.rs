//! The MySQL engine keeps every promise, also between processes. (The server is MariaDB, where that is what is installed.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "mysql")]

fencelock_testkit::conformance!(fencelock_testkit::mysql::MysqlSubject::new());
