//! The project's chores: `cargo xtask test` and friends. Needs nothing but Rust's toolchain; the rest is installed.

use std::process::{Command, ExitCode};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask COMMAND

  test [ARGS…]   run every test of the workspace, after installing the servers they need; ARGS go to cargo test
  lint           formatting, clippy and documentation, warnings are errors
  bench          compare the file engine with raw system calls, and print ratios";

/// What the tests run beside Rust: the program, and the Debian package that brings it.
const PROGRAMS: [(&str, &str); 1] = [("redis-server", "redis-server")];

/// One step of a chore: what it is for, and the arguments of cargo.
type Step<'a> = (&'a str, Vec<&'a str>);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let steps: Vec<Step<'_>> = match args.first().map(String::as_str) {
        Some("test") => test(&rest),
        Some("lint") if rest.is_empty() => lint(),
        Some("bench") if rest.is_empty() => vec![("benchmark", vec!["bench", "-p", "fencelock", "--bench", "file"])],
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(64);
        }
    };
    if args[0] == "test" && !install_what_is_missing() {
        return ExitCode::FAILURE;
    }
    for (what, args) in steps {
        if !cargo(what, &args) {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Installs the servers that the tests start, with the system's package manager.
fn install_what_is_missing() -> bool {
    let missing: Vec<&str> =
        PROGRAMS.iter().filter(|(program, _)| !is_installed(program)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return true;
    }
    eprintln!("xtask: installing {}", missing.join(" "));
    let install = format!(
        "set -e; as_root=; [ \"$(id -u)\" = 0 ] || as_root=sudo; export DEBIAN_FRONTEND=noninteractive; \
         $as_root apt-get update -qq; $as_root apt-get install -y -qq --no-install-recommends {}",
        missing.join(" ")
    );
    let done = Command::new("sh").args(["-c", &install]).status().is_ok_and(|status| status.success());
    if !done {
        eprintln!("xtask: cannot install {0}; install it by hand, then try again", missing.join(" "));
    }
    done
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn test<'a>(rest: &[&'a str]) -> Vec<Step<'a>> {
    let mut all = vec!["test", "--workspace", "--all-features"];
    all.extend(rest);
    vec![
        // Every feature must also build without the others.
        (
            "the library without any engine's feature",
            vec!["check", "--quiet", "-p", "fencelock", "--no-default-features"],
        ),
        // Tests ask cargo for it; then it is there, whatever the machine has to do besides.
        (
            "the process that tests kill",
            vec!["build", "--quiet", "-p", "fencelock-testkit", "--bin", "fencelock-probe"],
        ),
        ("all tests", all),
    ]
}

fn lint<'a>() -> Vec<Step<'a>> {
    vec![
        ("formatting", vec!["fmt", "--all", "--check"]),
        ("clippy", vec!["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]),
        ("documentation", vec!["doc", "--workspace", "--no-deps", "--all-features", "--document-private-items"]),
    ]
}

fn cargo(what: &str, args: &[&str]) -> bool {
    eprintln!("xtask: {what}: cargo {}", args.join(" "));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let start = Instant::now();
    let status = Command::new(cargo).args(args).env("RUSTDOCFLAGS", "-D warnings").status();
    let done = matches!(&status, Ok(status) if status.success());
    let verdict = match &status {
        Ok(_) if done => "ok".to_owned(),
        Ok(status) => format!("FAILED ({status})"),
        Err(error) => format!("cannot run cargo: {error}"),
    };
    eprintln!("xtask: {what}: {verdict} after {:.0?}", start.elapsed());
    done
}
