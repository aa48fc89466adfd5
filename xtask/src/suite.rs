//! Runs the test programs of the workspace, several at a time: most of them wait for leases to end, not for the processor.

use crate::{cargo, cargo_command};
use serde_json::Value;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// So many test programs at a time, and so many tests in each.
const PROGRAMS: usize = 3;
const THREADS: &str = "3";

/// What needs the machine for itself: thousands of waiters, or servers that are killed while many processes work. They come last,
/// one at a time.
const ALONE: [&str; 12] = [
    "conformance_mysql",
    "conformance_postgres",
    "etcd_faults",
    "etcd_torture",
    "redis_ha_torture",
    "redlock_faults",
    "redlock_nodes",
    "redlock_torture",
    "sql_faults",
    "sql_torture",
    "zookeeper_faults",
    "zookeeper_torture",
];

/// What takes nearly as long as the rest together. `cargo xtask long` runs them, one at a time; `cargo xtask test` does not.
const LONG: [&str; 3] = ["conformance_etcd", "conformance_redlock", "conformance_zookeeper"];

/// A test program, and the directory of its package.
struct Program {
    name: String,
    path: PathBuf,
    dir: PathBuf,
}

impl Program {
    fn is_one_of(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.name.ends_with(&format!("/{name}")))
    }
}

/// All but the long ones, several at a time; then the examples in the documentation.
pub(crate) fn usual() -> bool {
    let Some(mut programs) = build() else { return false };
    programs.retain(|program| !program.is_one_of(&LONG));
    let (alone, together) = programs.into_iter().partition(|program| program.is_one_of(&ALONE));
    let done = [play_all(together, PROGRAMS), play_all(alone, 1)] == [true; 2];
    cargo("examples in the documentation", &["test", "--quiet", "--workspace", "--all-features", "--doc"]) && done
}

/// The long ones.
pub(crate) fn long() -> bool {
    let Some(mut programs) = build() else { return false };
    programs.retain(|program| program.is_one_of(&LONG));
    play_all(programs, 1)
}

fn play_all(programs: Vec<Program>, at_a_time: usize) -> bool {
    let start = Instant::now();
    let queue = Mutex::new(VecDeque::from(programs));
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().ok().and_then(|mut queue| queue.pop_front());
                    let Some(program) = next else { return };
                    if !play(&program)
                        && let Ok(mut failed) = failed.lock()
                    {
                        failed.push(program.name);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    eprintln!("xtask: these test programs took {:.0?}", start.elapsed());
    if !failed.is_empty() {
        eprintln!("xtask: FAILED: {}", failed.join(", "));
    }
    failed.is_empty()
}

fn build() -> Option<Vec<Program>> {
    let args = ["test", "--workspace", "--all-features", "--no-run", "--message-format", "json-render-diagnostics"];
    eprintln!("xtask: building the tests: cargo {}", args.join(" "));
    let output = cargo_command(&args).stderr(Stdio::inherit()).output().ok()?;
    if !output.status.success() {
        eprintln!("xtask: the tests cannot be built");
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Some(text.lines().filter_map(|line| program(&serde_json::from_str(line).ok()?)).collect())
}

fn program(message: &Value) -> Option<Program> {
    message["profile"]["test"].as_bool().filter(|is_test| *is_test)?;
    let path = PathBuf::from(message["executable"].as_str()?);
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let dir = manifest.parent()?.to_owned();
    let package = dir.file_name()?.to_string_lossy().into_owned();
    Some(Program { name: format!("{package}/{}", message["target"]["name"].as_str()?), path, dir })
}

fn play(program: &Program) -> bool {
    let start = Instant::now();
    let mut command = Command::new(&program.path);
    command.current_dir(&program.dir).env("CARGO_MANIFEST_DIR", &program.dir).env("RUST_TEST_THREADS", THREADS);
    let (done, said) = match command.output() {
        Ok(output) => (output.status.success(), [output.stdout, output.stderr].concat()),
        Err(error) => (false, error.to_string().into_bytes()),
    };
    let said = String::from_utf8_lossy(&said);
    let took = Duration::from_secs(start.elapsed().as_secs());
    let result = said.lines().find_map(|line| line.strip_prefix("test result: ")).unwrap_or("no result");
    let result = result.split("; 0 measured").next().unwrap_or(result);
    if done {
        eprintln!("xtask: {} {result}; {took:?}", program.name);
    } else {
        // In one piece: several programs run at the same time.
        eprintln!("{said}\nxtask: {} FAILED after {took:?}: {result}", program.name);
    }
    done
}
