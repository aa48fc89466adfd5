//! The project's chores: `cargo xtask test` and friends. Needs nothing but Rust's toolchain; the rest is installed.

mod curator;
mod etcdctl;
mod install;
mod interop;

use std::process::{Command, ExitCode};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask COMMAND

  test [ARGS…]   run every test of the workspace, after installing the servers they need; ARGS go to cargo test
  interop        foreign clients (Redis: Python, Node, Rust; ZooKeeper: Java) and fencelock on the same lock, after installing them
  lint           formatting, clippy and documentation, warnings are errors
  bench          compare the file engine with raw system calls, and print ratios";

/// One step of a chore: what it is for, and the arguments of cargo.
type Step<'a> = (&'a str, Vec<&'a str>);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let steps: Vec<Step<'_>> = match args.first().map(String::as_str) {
        Some("test") => test(&rest),
        Some("interop") if rest.is_empty() => return verdict(interop::interop() && curator::curator()),
        Some("lint") if rest.is_empty() => lint(),
        Some("bench") if rest.is_empty() => vec![("benchmark", vec!["bench", "-p", "fencelock", "--bench", "file"])],
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(64);
        }
    };
    let ready = args[0] != "test" || install::what_is_missing(install::SERVERS);
    verdict(ready && steps.iter().all(|(what, args)| cargo(what, args)))
}

fn verdict(done: bool) -> ExitCode {
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).env("RUSTDOCFLAGS", "-D warnings");
    // What cargo tells this program about its own package would pass for news, and make dependencies build again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    run(what, &mut command)
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
