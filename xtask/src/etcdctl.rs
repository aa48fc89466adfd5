//! Runs `etcdctl lock`, which comes with the servers that the tests need, against fencelock.

use crate::cargo;

pub(crate) fn etcdctl() -> bool {
    let test = ["test", "-p", "fencelock", "--all-features", "--test", "etcd_etcdctl", "--", "--nocapture"];
    cargo("fencelock and etcdctl lock", &test)
}
