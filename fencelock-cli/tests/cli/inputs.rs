//! Bad input: one line that says what to do, exit code 64, and nothing was touched or started.

use crate::harness::{Place, code, text};

#[test]
fn bad_input_is_refused_in_one_line_before_anything_is_touched() {
    let long = "x".repeat(513);
    let touch = ["--", "touch", "started"];
    let table: &[(&[&str], &str)] = &[
        (&["run", "--slots", "0", "x"], "'--slots <N>': write how many"),
        (&["run", "--slots", "many", "x"], "'--slots <N>': write how many"),
        (&["run", "--slots", "-1", "x"], "'--slots <N>': write how many"),
        (&["run", ""], "empty"),
        (&["run", &long], "513 bytes"),
        (&["run", "-a", "", "x"], "empty"),
        (&["run", "--ttl", "0s", "x"], "100ms to 24h"),
        (&["run", "--ttl", "365d", "x"], "100ms to 24h"),
        (&["run", "--ttl", "5", "x"], "number and a unit"),
        (&["run", "--ttl", "10s", "--grace", "10s", "x"], "--grace"),
        (&["run", "--ttl", "10s", "--grace", "1h", "x"], "--grace"),
        (&["run", "--grace", "30s", "x"], "--grace"),
        (&["run", "-w", "soon", "x"], "--wait"),
        (&["run", "-n", "-w", "5s", "x"], "cannot be used with"),
        (&["run", "-q", "-v", "x"], "cannot be used with"),
        (&["run", "-a", "y", "--shared", "x"], "--also holds all its locks alone"),
        (&["run", "-a", "y", "--slots", "3", "x"], "--also holds all its locks alone"),
        (&["run", "--shared", "--slots", "3", "x"], "--shared"),
        (&["run", "--on-lost", "pray", "x"], "term, kill, warn"),
        (&["run", "--min-hold", "-1s", "x"], "\"-1s\" is not a span of time"),
        (&["run", "-w", "-1s", "x"], "\"-1s\" is not a span of time"),
        (&["run", "--no-such-option", "x"], "--no-such-option"),
        (&["run"], "NAME"),
        (&["run", "-u", "nosuch:thing", "x"], "nosuch"),
        (&["run", "-u", "nothing", "x"], "nothing"),
        (&["run", "-u", "file:locks?colour=red", "x"], "colour"),
        (&["run", "-u", "file:locks?ttl=0s", "x"], "ttl"),
        (&["elect", ""], "empty"),
        (&["elect", "--ttl", "0s", "x"], "100ms to 24h"),
    ];
    for (arguments, expected) in table {
        let place = Place::new();
        let output = place.run(&[arguments, &touch[..]].concat());
        check(&place, &output, arguments, expected);
        assert!(!place.has("started"), "{arguments:?} started the command");
    }
}

#[test]
fn bad_input_of_the_other_commands_is_refused_too() {
    let table: &[(&[&str], &str)] = &[
        (&[], "fencelock run"),
        (&["nonsense"], "nonsense"),
        (&["lst"], "did you mean list?"),
        (&["run", "--share", "x", "--", "true"], "did you mean --shared?"),
        (&["run", "x"], "COMMAND"),
        (&["run", "x", "true"], "after two dashes"),
        (&["run", "x", "--"], "COMMAND"),
        (&["elect", "x"], "COMMAND"),
        (&["status", ""], "empty"),
        (&["break", "", "--yes"], "empty"),
        (&["break", "x"], "--yes"),
        (&["list", "a", "b"], "'b'"),
        (&["completions", "cmd.exe"], "bash"),
        (&["torture", "--for", "0s"], "100ms at least"),
        (&["torture", "--ttl", "0s"], "100ms to 24h"),
        (&["bench", "--for", "1ms"], "100ms at least"),
        (&["__supervise", "x"], "fencelock run"),
    ];
    for (arguments, expected) in table {
        let place = Place::new();
        check(&place, &place.run(arguments), arguments, expected);
    }
}

fn check(place: &Place, output: &std::process::Output, arguments: &[&str], expected: &str) {
    let told = text(&output.stderr);
    assert_eq!(code(output.status), 64, "{arguments:?}: {told}");
    assert_eq!(told.lines().count(), 1, "{arguments:?}: {told}");
    assert!(told.starts_with("fencelock: "), "{arguments:?}: {told}");
    assert!(told.contains(expected), "{arguments:?} does not mention {expected}: {told}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(!place.locks().exists(), "{arguments:?} touched the locks");
}

#[test]
fn help_and_version_are_no_errors() {
    let place = Place::new();
    for arguments in
        [&["--help"][..], &["-h"], &["--version"], &["run", "--help"], &["elect", "-h"], &["completions", "bash"]]
    {
        let output = place.run(arguments);
        assert_eq!(code(output.status), 0, "{arguments:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{arguments:?}");
    }
    assert!(text(&place.run(&["run", "--help"]).stdout).contains("fencelock run backup -- ./backup.sh"));
}
