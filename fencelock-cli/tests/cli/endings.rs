//! Every exit code.

use crate::harness::{Place, code, text};
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[test]
fn the_exit_code_is_the_commands_own() {
    let place = Place::new();
    for (script, expected) in
        [("true", 0), ("exit 1", 1), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -TERM $$", 143)]
    {
        let output = place.run(&["run", "x", "--", "sh", "-c", script]);
        assert_eq!(code(output.status), expected, "{script}");
        assert_eq!(text(&output.stderr), "", "{script}");
    }
}

#[test]
fn a_command_that_does_not_exist_is_noticed_before_the_lock_is_touched() {
    let place = Place::new();
    for command in ["no-such-command", "./no-such-command", ""] {
        let output = place.run(&["run", "x", "--", command]);
        assert_eq!(code(output.status), 127, "{command}");
        assert!(text(&output.stderr).contains("command not found"), "{}", text(&output.stderr));
    }
    fs::write(place.path("data"), "").unwrap();
    for command in ["./data", "/"] {
        let output = place.run(&["run", "x", "--", command]);
        assert_eq!(code(output.status), 126, "{command}");
        assert_eq!(text(&output.stderr).lines().count(), 1);
    }
    assert!(!place.locks().exists());
}

#[test]
fn a_command_that_cannot_be_executed_frees_the_lock_at_once() {
    let place = Place::new();
    let script = place.path("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let output = place.run(&["run", "--min-hold", "1h", "x", "--", "./script"]);
    assert_eq!(code(output.status), 127);
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn an_engine_that_cannot_be_used_is_69() {
    let place = Place::new();
    for arguments in [&["run", "x", "--", "true"][..], &["status", "x"], &["list"], &["elect", "x", "--", "true"]] {
        let output = place.run(&[&["-u", "file:/proc/no/such/place"], arguments].concat());
        assert_eq!(code(output.status), 69, "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr).lines().count(), 1);
    }
}

#[test]
fn a_busy_lock_is_75_and_the_holder_is_named() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    for arguments in [&["-n"][..], &["-w", "50ms"], &["-w", "0s"]] {
        let output = place.run(&[&["run"], arguments, &["x", "--", "true"]].concat());
        assert_eq!(code(output.status), 75, "{arguments:?}");
        let told = text(&output.stderr);
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(told.contains(&format!(":{} sh", first.id())), "{told}");
    }
    let quiet = place.run(&["run", "-nq", "x", "--", "true"]);
    assert_eq!((code(quiet.status), text(&quiet.stderr).as_str()), (75, ""));
    assert_eq!(place.standing("x"), (1, 0));
}
