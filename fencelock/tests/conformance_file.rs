//! The file engine keeps every promise, also between processes.

#![cfg(all(feature = "file", target_os = "linux"))]

fencelock_testkit::conformance!(fencelock_testkit::Subject::file());
