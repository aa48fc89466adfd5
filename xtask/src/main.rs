//! The project's chores: `cargo xtask test` and friends. Needs nothing but Rust's toolchain; the rest is installed.

mod curator;
mod etcdctl;
mod install;
mod interop;
mod suite;

use std::process::{Command, ExitCode};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask COMMAND

  test [ARGS…]   run every test of the workspace, after installing the servers they need; ARGS go to cargo test
  long           conformance of etcd and ZooKeeper, torture of ZooKeeper, all of Redlock: about a quarter of an hour
  interop        foreign clients (Redis: Python, Node, Rust; etcdctl; Curator) and fencelock on the same lock, after installing them
  lint           formatting, clippy and documentation, warnings are errors
  bench          compare the file engine with raw system calls, and print ratios";

/// One step of a chore: what it is for, and the arguments of cargo.
type Step<'a> = (&'a str, Vec<&'a str>);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let steps: Vec<Step<'_>> = match args.first().map(String::as_str) {
        Some("test") => return verdict(test(&rest)),
        Some("long") if rest.is_empty() => {
            return verdict(install::what_is_missing(install::SERVERS) && suite::long());
        }
        Some("interop") if rest.is_empty() => return verdict(interop::interop()),
        Some("lint") if rest.is_empty() => lint(),
        Some("bench") if rest.is_empty() => vec![("benchmark", vec!["bench", "-p", "fencelock", "--bench", "file"])],
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(64);
        }
    };
    verdict(steps.iter().all(|(what, args)| cargo(what, args)))
}

fn verdict(done: bool) -> ExitCode {
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn test(rest: &[&str]) -> bool {
    let mut named = vec!["test", "--workspace", "--all-features"];
    named.extend(rest);
    install::what_is_missing(install::SERVERS)
        // Every feature must also build without the others.
        && cargo("the library without any engine", &["check", "--quiet", "-p", "fencelock", "--no-default-features"])
        // Tests ask cargo for it; then it is there, whatever the machine has to do besides.
        && cargo("the process that tests kill", &["build", "--quiet", "-p", "fencelock-testkit", "--bin", "fencelock-probe"])
        && if rest.is_empty() { suite::usual() } else { cargo("tests", &named) }
}

fn lint<'a>() -> Vec<Step<'a>> {
    vec![
        ("formatting", vec!["fmt", "--all", "--check"]),
        ("clippy", vec!["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]),
        ("documentation", vec!["doc", "--workspace", "--no-deps", "--all-features", "--document-private-items"]),
    ]
}

fn cargo(what: &str, args: &[&str]) -> bool {
    run(what, &mut cargo_command(args))
}

fn cargo_command(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).env("RUSTDOCFLAGS", "-D warnings");
    // What cargo tells this program about its own package would pass for news, and make dependencies build again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a program, and tells what it is for, how it ended and how long it took.
fn run(what: &str, command: &mut Command) -> bool {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    eprintln!("xtask: {what}: {} {}", command.get_program().to_string_lossy(), words.join(" "));
    let start = Instant::now();
    let status = command.status();
    let done = matches!(&status, Ok(status) if status.success());
    let verdict = match &status {
        Ok(_) if done => "ok".to_owned(),
        Ok(status) => format!("FAILED ({status})"),
        Err(error) => format!("cannot be run: {error}"),
    };
    eprintln!("xtask: {what}: {verdict} after {:.0?}", start.elapsed());
    done
}
