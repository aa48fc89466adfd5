//! The memory engine keeps every promise.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

fencelock_testkit::conformance!(fencelock_testkit::Subject::memory());
