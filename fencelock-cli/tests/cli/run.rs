//! `fencelock run`: waiting, signals, the command's surroundings, and the kinds of locks.

use crate::harness::{Place, Running, code, runs, text, until, until_dead};
use rustix::process::Signal;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Holds `x` until it is killed, with a grandchild, and writes down both process ids.
const FAMILY: &str = "sleep 1000 & echo $! > grandchild; echo $$ > child; wait";

#[test]
fn the_command_finds_its_lock_in_the_environment() {
    let place = Place::new();
    let before = u128::from(now_ms());
    let output = place.run(&["run", "--ttl", "10s", "a b", "--", "env"]);
    let environment = text(&output.stdout);
    let get = |key: &str| environment.lines().find_map(|line| line.strip_prefix(&format!("FENCELOCK_{key}="))).unwrap();
    assert_eq!(get("NAME"), "a b");
    assert_eq!(get("URL"), place.url());
    assert_eq!(get("OWNER").len(), 32);
    let deadline: u128 = get("DEADLINE").parse().unwrap();
    assert!((before + 9_000..before + 15_000).contains(&deadline), "{before} {deadline}");
    let token: u64 = get("TOKEN").parse().unwrap();
    let again = place.run(&["run", "a b", "--", "printenv", "FENCELOCK_TOKEN"]);
    assert!(text(&again.stdout).trim().parse::<u64>().unwrap() > token);
}

fn now_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

#[test]
fn a_relative_url_reaches_the_command_as_an_absolute_one() {
    let place = Place::new();
    let output = place.run(&["run", "-u", "file:locks?ttl=5s", "x", "--", "printenv", "FENCELOCK_URL"]);
    assert_eq!(text(&output.stdout).trim(), format!("{}?ttl=5s", place.url()));
}

#[test]
fn input_and_output_pass_through() {
    let place = Place::new();
    let mut tool = place.tool(&["run", "x", "--", "sh", "-c", "tr a-z A-Z; echo told >&2"]);
    let mut child = tool.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("HELLO".to_owned(), "told\n".to_owned()));
}

#[test]
fn the_command_leads_its_own_process_group() {
    let place = Place::new();
    let output = place.run(&["run", "x", "--", "sh", "-c", "echo $$; cut -d' ' -f5 /proc/$$/stat"]);
    let told = text(&output.stdout);
    assert_eq!(told.lines().next(), told.lines().nth(1), "{told}");
}

#[test]
fn no_descriptor_of_ours_leaks_into_the_command() {
    let place = Place::new();
    let list = ["ls", "/proc/self/fd"];
    let bare = Command::new(list[0]).arg(list[1]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(text(&place.run(&[&["run", "x", "--"], &list[..]].concat()).stdout), text(&bare.stdout));
}

#[test]
fn the_second_starts_right_after_the_end_of_the_first() {
    let place = Place::new();
    let mut tool = place.tool(&["run", "x", "--", "sh", "-c", "echo > started; cat; date +%s%N > ended"]);
    let mut first = tool.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    place.line("started");
    let second = place.start(&["run", "-w", "10s", "x", "--", "sh", "-c", "date +%s%N > began"]);
    place.until_standing("x", 1, 1);
    assert!(!place.has("began"));
    drop(first.stdin.take());
    first.wait().unwrap();
    assert_eq!(second.code(), 0);
    let (ended, began): (i64, i64) = (place.line("ended").parse().unwrap(), place.line("began").parse().unwrap());
    let gap = Duration::from_nanos(u64::try_from(began - ended).unwrap());
    assert!(gap < Duration::from_millis(500), "{gap:?}");
}

#[test]
fn a_killed_tool_frees_the_lock_and_takes_its_family_with_it() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", FAMILY]);
    let (child, grandchild) = (place.pid("child"), place.pid("grandchild"));
    let second = place.start(&["run", "x", "--", "sh", "-c", "echo > second"]);
    place.until_standing("x", 1, 1);
    let killed = Instant::now();
    first.send(Signal::KILL);
    assert_eq!(second.code(), 0);
    until_dead(child);
    until_dead(grandchild);
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
}

#[test]
fn a_grandchild_in_another_session_dies_with_the_tool() {
    let place = Place::new();
    let script = "setsid sh -c 'echo $$ > grandchild; sleep 1000' & echo $$ > child; exec sleep 1000";
    let tool = place.start(&["run", "x", "--", "sh", "-c", script]);
    let (child, grandchild) = (place.pid("child"), place.pid("grandchild"));
    tool.send(Signal::KILL);
    until_dead(child);
    until_dead(grandchild);
}

#[test]
fn the_family_dies_with_its_supervisor_too() {
    let place = Place::new();
    let tool = place.start(&["run", "x", "--", "sh", "-c", FAMILY]);
    let (child, grandchild) = (place.pid("child"), place.pid("grandchild"));
    crate::harness::send(parent(child), Signal::KILL);
    assert_eq!(tool.code(), 137);
    until_dead(child);
    until_dead(grandchild);
}

fn parent(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn what_the_command_leaves_behind_on_purpose_lives() {
    let place = Place::new();
    let output = place.run(&["run", "x", "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $! > daemon"]);
    assert_eq!(code(output.status), 0);
    let daemon = place.pid("daemon");
    assert!(runs(daemon));
    crate::harness::send(daemon, Signal::KILL);
}

#[test]
fn a_signal_ends_the_waiting_at_once_and_leaves_nobody_in_line() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    for (signal, expected) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let second = Running::start(&mut place.interruptible(&["run", "x", "--", "touch", "second"]));
        place.until_standing("x", 1, 1);
        let sent = Instant::now();
        second.send(signal);
        assert_eq!(second.code(), expected);
        assert!(sent.elapsed() < Duration::from_secs(1));
        assert_eq!(place.standing("x"), (1, 0));
    }
    drop(first);
    assert!(!place.has("second"));
}

#[test]
fn signals_reach_the_command() {
    let place = Place::new();
    let script = "trap 'echo usr1 >> got' USR1; trap 'echo usr2 >> got' USR2; trap 'echo hup >> got' HUP
                  trap 'echo winch >> got' WINCH; trap 'exit 7' TERM
                  echo > started; while :; do sleep 0.01; done";
    let tool = Running::start(&mut place.interruptible(&["run", "x", "--", "sh", "-c", script]));
    place.line("started");
    for (signal, word) in
        [(Signal::USR1, "usr1"), (Signal::USR2, "usr2"), (Signal::HUP, "hup"), (Signal::WINCH, "winch")]
    {
        tool.send(signal);
        until(word, || std::fs::read_to_string(place.path("got")).unwrap_or_default().contains(word).then_some(()));
    }
    tool.send(Signal::TERM);
    assert_eq!(tool.code(), 7);
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn a_signal_that_kills_the_command_is_the_exit_code() {
    let place = Place::new();
    let tool = place.start(&["run", "x", "--", "sh", "-c", FAMILY]);
    let (child, grandchild) = (place.pid("child"), place.pid("grandchild"));
    tool.send(Signal::TERM);
    assert_eq!(tool.code(), 143);
    assert!(!runs(child));
    until_dead(grandchild);
}

#[test]
fn an_ignored_signal_stays_ignored() {
    let place = Place::new();
    let tool = place.tool(&["run", "x", "--", "sh", "-c", "echo > started; read line; echo $line > got"]);
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(tool.get_program()).args(tool.get_args());
    nohup.current_dir(place.path("")).env("FENCELOCK_URL", place.url());
    let mut child = nohup.stdin(Stdio::piped()).spawn().unwrap();
    place.line("started");
    crate::harness::send(i32::try_from(child.id()).unwrap(), Signal::HUP);
    child.stdin.take().unwrap().write_all(b"still here\n").unwrap();
    assert_eq!(code(child.wait().unwrap()), 0);
    assert_eq!(place.line("got"), "still here");
}

#[test]
fn a_nested_run_of_the_same_lock_re_enters() {
    let place = Place::new();
    let inner = format!("{} run -n x -- sh -c 'echo $FENCELOCK_TOKEN; exit 5'", env!("CARGO_BIN_EXE_fencelock"));
    let script =
        format!("echo $FENCELOCK_TOKEN; {inner}; echo $?; {} status x --json", env!("CARGO_BIN_EXE_fencelock"));
    let output = place.run(&["run", "x", "--", "sh", "-c", &script]);
    let told = text(&output.stdout);
    let mut lines = told.lines();
    assert_eq!(lines.next(), lines.next(), "the same token: {told}");
    assert_eq!(lines.next(), Some("5"));
    assert!(told.contains("\"owner\""), "the inner end did not free the outer hold: {told}");
}

#[test]
fn nested_runs_re_enter_over_another_lock_and_locks_held_as_well() {
    let place = Place::new();
    let tool = env!("CARGO_BIN_EXE_fencelock");
    let deep = format!("{tool} run b -- {tool} run -n a -- sh -c 'exit 6'");
    assert_eq!(place.run(&["run", "a", "--", "sh", "-c", &deep]).status.code(), Some(6));
    let also = format!("{tool} run -n ledger -- sh -c 'exit 7'");
    assert_eq!(place.run(&["run", "accounts", "-a", "ledger", "--", "sh", "-c", &also]).status.code(), Some(7));
}

#[test]
fn the_command_is_told_the_token_of_every_lock() {
    let place = Place::new();
    let output = place.run(&["run", "accounts", "-a", "ledger", "--", "sh", "-c", "echo $FENCELOCK_HELD"]);
    let told = text(&output.stdout);
    for name in ["accounts", "ledger"] {
        assert!(told.contains(&format!("\"name\":\"{name}\",\"token\":1")), "{told}");
    }
}

#[test]
fn an_engine_that_one_process_sees_is_refused() {
    let place = Place::new();
    for command in [&["run", "x", "--", "true"][..], &["elect", "x", "--", "true"], &["status", "x"], &["list"]] {
        let mut args = vec!["-u", "memory:x"];
        args.extend(command);
        let output = place.run(&args);
        assert_eq!(output.status.code(), Some(64), "{command:?}");
        assert!(text(&output.stderr).contains("one process"), "{command:?}");
    }
}

#[test]
fn a_nested_run_of_another_lock_or_engine_does_not_re_enter() {
    let place = Place::new();
    let tool = env!("CARGO_BIN_EXE_fencelock");
    let script = format!("{tool} run -n y -- true && {tool} run -n -u file:other x -- true");
    assert_eq!(code(place.run(&["run", "x", "--", "sh", "-c", &script]).status), 0);
    let busy = format!("env -u FENCELOCK_OWNER {tool} run -n x -- true");
    assert_eq!(code(place.run(&["run", "x", "--", "sh", "-c", &busy]).status), 75);
}

#[test]
fn leftovers_of_an_outer_run_that_has_ended_exclude_each_other() {
    let place = Place::new();
    let output = place.run(&["run", "x", "--", "env"]);
    let environment = text(&output.stdout);
    let stale =
        environment.lines().filter_map(|line| line.split_once('=')).filter(|(key, _)| key.starts_with("FENCELOCK_"));
    let stale: Vec<(&str, &str)> = stale.collect();
    let first = Running::start(
        place.tool(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]).envs(stale.iter().copied()),
    );
    place.line("started");
    let second = place.tool(&["run", "-n", "x", "--", "true"]).envs(stale).output().unwrap();
    assert_eq!(code(second.status), 75);
    drop(first);
}

#[test]
fn a_nested_run_with_more_locks_re_enters_one_and_takes_the_others() {
    let place = Place::new();
    let tool = env!("CARGO_BIN_EXE_fencelock");
    let script = format!("{tool} run -n -a y x -- sh -c '{tool} list'; {tool} list y");
    let output = place.run(&["run", "x", "--", "sh", "-c", &script]);
    let told = text(&output.stdout);
    assert_eq!(told.lines().filter(|line| line.contains("held")).count(), 2, "{told}");
}

#[test]
fn a_nested_run_re_enters_what_it_asks_for_as_well() {
    let place = Place::new();
    let tool = env!("CARGO_BIN_EXE_fencelock");
    for inner in ["-a x y", "-a y x", "-a y -a z x", "-a x z -a y", "-a x x"] {
        let script = format!("{tool} run -n {inner} -- {tool} list; {tool} list");
        let output = place.run(&["run", "x", "-a", "y", "--", "sh", "-c", &script]);
        let told = text(&output.stdout);
        let held = |lock: &str| told.lines().filter(|line| line.starts_with(lock) && line.contains("held")).count();
        let during = usize::from(inner.contains('z'));
        assert_eq!((held("x"), held("y"), held("z")), (2, 2, during), "{inner}: {told}{}", text(&output.stderr));
    }
    assert_eq!(text(&place.run(&["list"]).stdout), "");
}

#[test]
fn also_holds_several_locks_and_all_of_them_are_freed() {
    let place = Place::new();
    let first = place.start(&["run", "-a", "b", "--also", "c", "a", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    for name in ["a", "b", "c"] {
        assert_eq!(code(place.run(&["run", "-n", name, "--", "true"]).status), 75, "{name}");
    }
    // The other way round: would deadlock if locks were taken as named.
    let second = place.start(&["run", "-a", "a", "b", "--", "true"]);
    place.until_standing("a", 1, 1);
    first.send(Signal::TERM);
    assert_eq!((first.code(), second.code()), (143, 0));
    for name in ["a", "b", "c"] {
        assert_eq!(place.standing(name), (0, 0), "{name}");
    }
}

#[test]
fn readers_share_and_writers_do_not() {
    let place = Place::new();
    let reader = place.start(&["run", "--shared", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    assert_eq!(code(place.run(&["run", "-n", "--shared", "x", "--", "true"]).status), 0);
    assert_eq!(code(place.run(&["run", "-n", "x", "--", "true"]).status), 75);
    drop(reader);
}

#[test]
fn slots_limit_the_number_of_holders() {
    let place = Place::new();
    let hold = |number: &str| {
        let running =
            place.start(&["run", "--slots", "2", "x", "--", "sh", "-c", &format!("echo > {number}; sleep 1000")]);
        place.line(number);
        running
    };
    let (one, two) = (hold("one"), hold("two"));
    assert_eq!(code(place.run(&["run", "-n", "--slots", "2", "x", "--", "true"]).status), 75);
    let other_size = place.run(&["run", "-n", "--slots", "3", "x", "--", "true"]);
    assert_eq!(code(other_size.status), 64);
    one.send(Signal::TERM);
    assert_eq!(one.code(), 143);
    assert_eq!(code(place.run(&["run", "-n", "--slots", "2", "x", "--", "true"]).status), 0);
    drop(two);
}

#[test]
fn min_hold_keeps_the_lock_after_a_short_command() {
    let place = Place::new();
    let started = Instant::now();
    let mut tool = place.start(&["run", "--min-hold", "600ms", "x", "--", "sh", "-c", "echo > done; exit 4"]);
    place.line("done");
    assert!(!tool.has_ended());
    assert_eq!(code(place.run(&["run", "-n", "x", "--", "true"]).status), 75);
    assert_eq!(tool.code(), 4);
    assert!(started.elapsed() >= Duration::from_millis(600));
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn a_signal_ends_min_hold() {
    let place = Place::new();
    let tool = place.start(&["run", "--min-hold", "1h", "x", "--", "sh", "-c", "echo $$ > done; exit 4"]);
    until_dead(place.pid("done"));
    tool.send(Signal::TERM);
    assert_eq!(tool.code(), 4);
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn verbose_tells_about_waiting_and_timing() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 0.6"]);
    place.line("started");
    let output = place.run(&["run", "-v", "x", "--", "true"]);
    let told = text(&output.stderr);
    assert!(told.contains(&format!("held by {}", label(first.id()))), "{told}");
    assert!(told.contains("acquired \"x\" after ") && told.contains("held \"x\" for "), "{told}");
}

fn label(pid: i32) -> String {
    let user = std::env::var("USER")
        .or(std::env::var("LOGNAME"))
        .unwrap_or_else(|_| text(&Command::new("id").arg("-un").output().unwrap().stdout).trim().to_owned());
    let host = text(&Command::new("uname").arg("-n").output().unwrap().stdout).trim().to_owned();
    format!("{user}@{host}:{pid} sh")
}
