//! Brings Curator, the Java client of ZooKeeper, to this machine, below the target directory, and runs it against fencelock.

use crate::interop::{root, target};
use crate::{install, run};
use std::process::Command;

pub(crate) fn curator() -> bool {
    if !(install::what_is_missing(install::SERVERS) && install::what_is_missing(install::JAVA)) {
        return false;
    }
    let jars = target().join("interop/curator");
    let there = std::fs::read_dir(&jars).is_ok_and(|mut files| files.next().is_some());
    let mut maven = Command::new("mvn");
    maven.args(["--quiet", "--batch-mode", "dependency:copy-dependencies", "--file"]);
    maven.arg(root().join("interop/curator/pom.xml")).arg(format!("-DoutputDirectory={}", jars.display()));
    if !there && !run("Curator", &mut maven) {
        // What is there may not be all.
        let _ = std::fs::remove_dir_all(&jars);
        return false;
    }
    let mut test = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    test.args(["test", "-p", "fencelock", "--all-features", "--test", "zookeeper_curator", "--", "--ignored"]);
    test.args(["--nocapture"]).env("FENCELOCK_CURATOR", jars).current_dir(root());
    run("fencelock and Curator", &mut test)
}
