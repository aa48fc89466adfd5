//! The lock is lost while the command runs: taken away, or its lease ran out.

use crate::harness::{Place, code, runs, text, until, until_dead};
use rustix::process::Signal;
use std::fs::{self, File};
use std::time::{Duration, Instant};

const BREAK: [&str; 3] = ["break", "x", "--yes"];

#[test]
fn a_command_whose_lock_is_taken_away_is_told_to_stop() {
    let place = Place::new();
    let script = "trap 'echo > told; exit 0' TERM; echo > started; while :; do sleep 0.01; done";
    let tool = place.start(&["run", "x", "--", "sh", "-c", script]);
    place.line("started");
    let broken = place.run(&BREAK);
    assert_eq!(code(broken.status), 0);
    assert!(text(&broken.stdout).contains("1 holder"), "{}", text(&broken.stdout));
    let output = tool.end();
    assert_eq!(code(output.status), 74);
    assert!(text(&output.stderr).contains("\"x\" was lost"), "{}", text(&output.stderr));
    assert!(place.has("told"));
}

#[test]
fn a_command_that_does_not_stop_is_killed_after_the_grace() {
    let place = Place::new();
    let script =
        "trap '' TERM; (trap '' TERM; echo $$ > ignored; sleep 1000) & echo $! > grandchild; echo > started; wait";
    let tool = place.start(&["run", "--grace", "300ms", "x", "--", "sh", "-c", script]);
    place.line("started");
    let grandchild = place.pid("grandchild");
    let broken = Instant::now();
    place.run(&BREAK);
    assert_eq!(tool.code(), 74);
    assert!((Duration::from_millis(300)..Duration::from_secs(3)).contains(&broken.elapsed()), "{:?}", broken.elapsed());
    until_dead(grandchild);
}

#[test]
fn a_grandchild_has_its_grace_when_the_child_is_gone() {
    let place = Place::new();
    let script =
        "sh -c 'trap \"sleep 0.2; echo > cleaned; exit\" TERM; echo > started; while :; do sleep 0.01; done' & wait";
    let tool = place.start(&["run", "--grace", "10s", "x", "--", "sh", "-c", script]);
    place.line("started");
    place.run(&BREAK);
    assert_eq!(tool.code(), 74);
    assert!(place.has("cleaned"));
}

#[test]
fn on_lost_kill_does_not_ask() {
    let place = Place::new();
    let script = "trap 'echo > told' TERM; echo $$ > child; while :; do sleep 0.01; done";
    let tool = place.start(&["run", "--on-lost", "kill", "x", "--", "sh", "-c", script]);
    let child = place.pid("child");
    place.run(&BREAK);
    assert_eq!(tool.code(), 74);
    assert!(!runs(child) && !place.has("told"));
}

#[test]
fn on_lost_warn_lets_the_command_run() {
    for (ending, volume, expected) in [("0", "-v", 74), ("9", "-v", 9), ("0", "-q", 74)] {
        let place = Place::new();
        let script = format!("echo > started; while ! [ -e go ]; do sleep 0.01; done; echo > ended; exit {ending}");
        let mut tool = place.tool(&["run", volume, "--on-lost", "warn", "x", "--", "sh", "-c", &script]);
        let told = place.path("told");
        let mut tool = tool.stderr(File::create(&told).unwrap()).spawn().unwrap();
        place.line("started");
        place.run(&BREAK);
        until("the warning", || fs::read_to_string(&told).unwrap().contains("the command runs on").then_some(()));
        fs::write(place.path("go"), "").unwrap();
        assert_eq!(code(tool.wait().unwrap()), expected);
        assert!(place.has("ended"));
    }
}

#[test]
fn which_of_several_locks_was_lost_is_told() {
    let place = Place::new();
    let tool = place.start(&["run", "-a", "x", "accounts", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    place.run(&BREAK);
    let output = tool.end();
    assert_eq!(code(output.status), 74);
    assert!(text(&output.stderr).contains("\"x\" was lost"), "{}", text(&output.stderr));
}

#[test]
fn the_next_in_line_follows_when_a_lock_is_taken_away() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    let second = place.start(&["run", "x", "--", "true"]);
    place.until_standing("x", 1, 1);
    place.run(&BREAK);
    assert_eq!((first.code(), second.code()), (74, 0));
}

/// The tool is paused past its lease (as by a VM snapshot, or a debugger). It cannot stop the command; the supervisor does, and
/// before the lease ends.
#[test]
fn a_command_is_stopped_in_time_when_the_tool_is_paused() {
    let place = Place::new();
    let script =
        "trap 'date +%s%3N > told; exit 0' TERM; echo $FENCELOCK_DEADLINE > deadline; while :; do sleep 0.01; done";
    let tool = place.start(&["run", "--ttl", "1200ms", "--grace", "500ms", "x", "--", "sh", "-c", script]);
    place.line("deadline");
    tool.send(Signal::STOP);
    let paused_until_told = Instant::now();
    place.line("told");
    assert!(paused_until_told.elapsed() < Duration::from_millis(1200), "{:?}", paused_until_told.elapsed());
    tool.send(Signal::CONT);
    assert_eq!(tool.code(), 74);
}

#[test]
fn a_long_command_outlives_many_leases() {
    let place = Place::new();
    let output = place.run(&["run", "--ttl", "200ms", "x", "--", "sleep", "1"]);
    assert_eq!((code(output.status), text(&output.stderr).as_str()), (0, ""));
}
