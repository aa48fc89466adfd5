//! The Redis engine keeps every promise, also between processes.

#![cfg(feature = "redis")]

fencelock_testkit::conformance!(fencelock_testkit::redis::RedisSubject::new());
