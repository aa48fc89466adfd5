//! The memory engine keeps every promise.

fencelock_testkit::conformance!(fencelock_testkit::Subject::memory());
