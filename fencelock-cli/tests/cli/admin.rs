//! `status`, `list`, `break` and `completions`.

use crate::harness::{Place, code, text};
use std::process::Stdio;

#[test]
fn status_shows_who_holds_and_who_waits() {
    let place = Place::new();
    let free = place.run(&["status", "x"]);
    assert_eq!(code(free.status), 0);
    assert!(text(&free.stdout).contains("free"));
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo $FENCELOCK_TOKEN > token; sleep 1000"]);
    let token = place.line("token");
    let second = place.start(&["run", "--shared", "x", "--", "true"]);
    place.until_standing("x", 1, 1);
    let held = place.run(&["status", "x"]);
    let told = text(&held.stdout);
    assert_eq!(code(held.status), 0);
    for word in [&format!(":{} sh", first.id()), &token, "exclusive", &format!(":{} true", second.id()), "shared"] {
        assert!(told.contains(word), "{word} is missing:\n{told}");
    }
}

#[test]
fn list_shows_the_locks_in_use() {
    let place = Place::new();
    assert_eq!(text(&place.run(&["list"]).stdout), "");
    assert_eq!(text(&place.run(&["list", "--json"]).stdout).trim(), "[]");
    let name = "shop:\u{1b}[31m\nred";
    let running = place.start(&["run", "-a", "blog", name, "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    let all = text(&place.run(&["list"]).stdout);
    assert_eq!(all.lines().count(), 3, "{all}");
    assert!(!all.contains('\u{1b}'), "{all:?}");
    assert_eq!(text(&place.run(&["status"]).stdout).lines().count(), 3);
    assert_eq!(text(&place.run(&["list", "shop"]).stdout).lines().count(), 2);
    let json: serde_json::Value = serde_json::from_slice(&place.run(&["list", "--json", "shop"]).stdout).unwrap();
    assert_eq!(json[0]["name"], name);
    assert_eq!(json[0]["holders"][0]["mode"], "exclusive");
    drop(running);
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let place = Place::new();
    for arguments in [&["list", "--json"][..], &["completions", "zsh"], &["--help"]] {
        let mut child = place.tool(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((code(output.status), text(&output.stderr).as_str()), (0, ""), "{arguments:?}");
    }
}

#[test]
fn breaking_what_nobody_holds_is_fine() {
    let place = Place::new();
    let output = place.run(&["break", "x", "--yes"]);
    assert_eq!(code(output.status), 0);
    assert!(text(&output.stdout).contains("nobody held \"x\""));
}

#[test]
fn completions_know_the_commands() {
    let script = text(&Place::new().run(&["completions", "bash"]).stdout);
    assert!(script.contains("--min-hold") && !script.contains("__supervise"));
}

#[test]
fn migrate_prints_what_an_administrator_runs() {
    let place = Place::new();
    for (engine, word) in
        [("postgres", "CREATE SCHEMA"), ("mysql", "CREATE TABLE"), ("postgres://a:s3cret@h/db", "GRANT")]
    {
        let printed = place.run(&["migrate", "--print", engine]);
        assert_eq!(code(printed.status), 0);
        assert!(text(&printed.stdout).contains(word) && !text(&printed.stdout).contains("s3cret"));
    }
    let refused = place.run(&["migrate", "--print", "file:/tmp/x"]);
    assert_eq!(code(refused.status), 64);
    assert!(text(&refused.stderr).contains("postgres and mysql"), "{}", text(&refused.stderr));
}
