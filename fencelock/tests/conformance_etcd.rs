//! The etcd engine keeps every promise, on one server and on three.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "etcd")]

mod one_server {
    fencelock_testkit::conformance!(fencelock_testkit::etcd::EtcdSubject::on(1));
}

mod three_servers {
    fencelock_testkit::conformance!(fencelock_testkit::etcd::EtcdSubject::on(3));
}
