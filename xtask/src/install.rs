//! What the tests run beside Rust, and how it comes to this machine.

use std::process::Command;

/// A program, and the Debian package that brings it.
pub(crate) struct Program {
    name: &'static str,
    package: &'static str,
}

/// The servers that the tests start. A new engine adds a line.
pub(crate) const SERVERS: &[Program] = &[
    Program { name: "redis-server", package: "redis-server" },
    Program { name: "java", package: "default-jre-headless" },
    // Without the package that would run it as a service.
    Program { name: "/usr/share/java/zookeeper.jar", package: "zookeeper" },
];

/// The runtimes of foreign clients.
pub(crate) const RUNTIMES: &[Program] = &[
    Program { name: "python3", package: "python3" },
    Program { name: "node", package: "nodejs" },
    Program { name: "npm", package: "npm" },
];

/// What brings and runs foreign clients in Java.
pub(crate) const JAVA: &[Program] =
    &[Program { name: "javac", package: "default-jdk-headless" }, Program { name: "mvn", package: "maven" }];

/// Installs those of these programs that are not there. False, after saying why, when that fails.
pub(crate) fn what_is_missing(programs: &[Program]) -> bool {
    let missing: Vec<&Program> = programs.iter().filter(|program| !is_installed(program.name)).collect();
    let names: Vec<&str> = missing.iter().map(|program| program.name).collect();
    let packages: Vec<&str> = missing.iter().map(|program| program.package).collect();
    packages.is_empty() || self::packages(&packages, &format!("{} not found", names.join(", ")))
}

/// Installs Debian packages.
pub(crate) fn packages(packages: &[&str], why: &str) -> bool {
    let packages = packages.join(" ");
    let by_hand = |reason: &str| {
        eprintln!("xtask: {why}, and {reason}; install it by hand (Debian: {packages}), then try again");
        false
    };
    if !is_installed("apt-get") {
        return by_hand("there is no apt-get here");
    }
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let sudo = match (root, is_installed("sudo")) {
        (true, _) => "",
        (false, true) => "sudo",
        (false, false) => return by_hand("only root may install it"),
    };
    eprintln!("xtask: {why}: installing {packages}");
    let install = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; {sudo} apt-get update -qq >&2; \
         {sudo} apt-get install -y -qq --no-install-recommends {packages} >&2"
    );
    let installed = Command::new("sh").args(["-c", &install]).status().is_ok_and(|status| status.success());
    installed || by_hand("apt-get failed")
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}
