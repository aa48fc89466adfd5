//! Where the binary of the probe is. Cargo tells only the tests of its own package, and it may be out of date: so cargo
//! is asked to build it, once per test process, which costs nothing when it is fresh.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tokio::sync::OnceCell;

const NAME: &str = "fencelock-probe";

/// The path of a binary that is up to date.
///
/// # Panics
/// When it cannot be built.
pub async fn path() -> &'static Path {
    static PATH: OnceCell<PathBuf> = OnceCell::const_new();
    PATH.get_or_init(async || tokio::task::spawn_blocking(build).await.expect("building does not panic")).await
}

fn build() -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| env!("CARGO").to_owned());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--bin", NAME, "--message-format", "json-render-diagnostics"]);
    command.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
    // What cargo tells this test about its own package would pass for news, and make dependencies build again.
    for (name, _) in std::env::vars_os() {
        let of_package =
            ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.to_string_lossy().starts_with(start));
        if of_package {
            command.env_remove(name);
        }
    }
    let own = std::env::current_exe().unwrap_or_default();
    // The same place and profile as the test itself, so that hardly anything needs to be built.
    if let Some(target) = own.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()) {
        command.arg("--target-dir").arg(target);
    }
    // …/<profile>/deps/<test>
    match own.ancestors().nth(2).and_then(Path::file_name).and_then(|profile| profile.to_str()) {
        None | Some("debug") => {}
        Some(profile) => _ = command.args(["--profile", profile]),
    }
    let output = command.output().expect("cargo can be run");
    executable(&output).unwrap_or_else(|| panic!("{NAME} was not built: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Cargo names the file it made, one JSON message per line.
fn executable(output: &Output) -> Option<PathBuf> {
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let made = messages.filter_map(|message| message.get("executable")?.as_str().map(PathBuf::from)).next_back();
    made.filter(|_| output.status.success())
}
