//! The file engine keeps every promise, also between processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "file", target_os = "linux"))]

fencelock_testkit::conformance!(fencelock_testkit::Subject::file());
