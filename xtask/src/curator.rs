//! Brings Curator, the Java client of ZooKeeper, to this machine, below the target directory, and runs it against fencelock.

use crate::interop::{root, target};
use crate::{cargo_command, install, run};
use std::fs;
use std::path::Path;
use std::process::Command;

pub(crate) fn curator() -> bool {
    let (wanted, jars) = (root().join("interop/curator/pom.xml"), target().join("interop/curator"));
    install::what_is_missing(install::JAVA) && bring(&wanted, &jars) && play(&jars)
}

/// Copies the jars that the project file names, unless they are there.
fn bring(wanted: &Path, jars: &Path) -> bool {
    // It is put beside them when they are all there.
    let there = jars.join("pom.xml");
    if matches!((fs::read(wanted), fs::read(&there)), (Ok(wanted), Ok(there)) if wanted == there) {
        return true;
    }
    let _ = fs::remove_dir_all(jars);
    let mut maven = Command::new("mvn");
    maven.args(["--quiet", "--batch-mode", "dependency:copy-dependencies", "--file"]).arg(wanted);
    maven.arg(format!("-DoutputDirectory={}", jars.display()));
    run("Curator", &mut maven)
        && fs::copy(wanted, &there).inspect_err(|error| eprintln!("xtask: {}: {error}", there.display())).is_ok()
}

fn play(jars: &Path) -> bool {
    let test = ["test", "-p", "fencelock", "--all-features", "--test", "zookeeper_curator", "--", "--ignored"];
    let mut test = cargo_command(&test);
    run("fencelock and Curator", test.arg("--nocapture").env("FENCELOCK_CURATOR", jars).current_dir(root()))
}
