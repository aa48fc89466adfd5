//! Brings the foreign clients of `interop/` to this machine, below the target directory, and runs them against fencelock.

use crate::{cargo, curator, etcdctl, install, run};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn interop() -> bool {
    let (sources, place) = (root().join("interop"), target().join("interop"));
    let (venv, node) = (place.join("venv"), place.join("node"));
    if !(install::what_is_missing(install::SERVERS) && install::what_is_missing(install::RUNTIMES)) {
        return false;
    }
    if let Err(error) = fs::create_dir_all(&node) {
        eprintln!("xtask: {}: {error}", node.display());
        return false;
    }
    let driver = place.join("rust");
    python(&sources, &venv)
        && packages(&sources, &node)
        && build(&sources, &driver)
        && play(&driver, &venv, &node)
        && etcdctl::etcdctl()
        && curator::curator()
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

fn python(sources: &Path, venv: &Path) -> bool {
    // Debian's Python comes without the part that fills a new environment.
    let complete = || Command::new("python3").args(["-c", "import ensurepip, venv"]).output();
    if !complete().is_ok_and(|output| output.status.success())
        && !install::packages(&["python3-venv"], "Python has no venv")
    {
        return false;
    }
    let there = venv.join("bin/pip").is_file();
    (there || run("Python environment", Command::new("python3").args(["-m", "venv"]).arg(venv)))
        && run(
            "Python clients",
            Command::new(venv.join("bin/pip"))
                .args(["install", "--quiet", "--disable-pip-version-check", "-r"])
                .arg(sources.join("requirements.txt")),
        )
}

fn packages(sources: &Path, node: &Path) -> bool {
    let (wanted, there) = (sources.join("package.json"), node.join("package.json"));
    let same = matches!((fs::read(&wanted), fs::read(&there)), (Ok(wanted), Ok(there)) if wanted == there);
    if same && node.join("node_modules/redlock").is_dir() {
        return true;
    }
    if let Err(error) = fs::copy(&wanted, &there) {
        eprintln!("xtask: {}: {error}", there.display());
        return false;
    }
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix"]).arg(node).current_dir(node);
    run("Node clients", &mut npm)
}

fn build(sources: &Path, driver: &Path) -> bool {
    let manifest = sources.join("Cargo.toml").display().to_string();
    let driver = driver.display().to_string();
    cargo("the driver", &["build", "--quiet", "--bins", "--manifest-path", &manifest, "--target-dir", &driver])
}

fn play(driver: &Path, venv: &Path, node: &Path) -> bool {
    let mut interop = Command::new(driver.join("debug/interop"));
    run("fencelock and foreign clients", interop.arg(venv.join("bin/python")).arg("node").arg(node))
}
