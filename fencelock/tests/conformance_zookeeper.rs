//! The ZooKeeper engine keeps every promise, on one server and on an ensemble of three, also between processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "zookeeper")]

mod one {
    fencelock_testkit::conformance!(fencelock_testkit::zookeeper::ZooKeeperSubject::one());
}

mod three {
    fencelock_testkit::conformance!(fencelock_testkit::zookeeper::ZooKeeperSubject::three());
}
