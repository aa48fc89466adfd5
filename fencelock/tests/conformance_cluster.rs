//! The Redis engine keeps every promise on a cluster of six nodes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

fencelock_testkit::conformance!(fencelock_testkit::redis::ClusterSubject::new());
