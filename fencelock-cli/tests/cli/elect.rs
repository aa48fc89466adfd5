//! `fencelock elect`.

use crate::harness::{Place, Running, code, text, until};
use rustix::process::Signal;

/// Writes down which candidate leads, and leads until it is stopped.
fn lead(who: &str) -> String {
    format!("echo {who} >> leaders; exec sleep 1000")
}

fn leaders(place: &Place) -> Vec<String> {
    let text = std::fs::read_to_string(place.path("leaders")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn until_led_by(place: &Place, expected: &[&str]) {
    until(&format!("leaders {expected:?}"), || (leaders(place) == expected).then_some(()));
}

#[test]
fn the_next_candidate_leads_when_the_leader_dies() {
    let place = Place::new();
    let one = place.start(&["elect", "x", "--", "sh", "-c", &lead("one")]);
    until_led_by(&place, &["one"]);
    let two = place.start(&["elect", "x", "--", "sh", "-c", &lead("two")]);
    place.until_standing("x", 1, 1);
    one.send(Signal::KILL);
    until_led_by(&place, &["one", "two"]);
    two.send(Signal::TERM);
    assert_eq!(two.code(), 143);
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn a_leader_that_lost_stops_its_command_and_stands_again() {
    let place = Place::new();
    let one = place.start(&["elect", "x", "--", "sh", "-c", &lead("one")]);
    until_led_by(&place, &["one"]);
    let two = place.start(&["elect", "x", "--", "sh", "-c", &lead("two")]);
    place.until_standing("x", 1, 1);
    assert_eq!(code(place.run(&["break", "x", "--yes"]).status), 0);
    until_led_by(&place, &["one", "two"]);
    place.until_standing("x", 1, 1);
    two.send(Signal::KILL);
    until_led_by(&place, &["one", "two", "one"]);
    one.send(Signal::TERM);
    let output = one.end();
    assert_eq!(code(output.status), 143);
    assert!(text(&output.stderr).contains("standing again"), "{}", text(&output.stderr));
}

#[test]
fn a_command_that_ends_by_itself_resigns() {
    let place = Place::new();
    let output = place.run(&["elect", "x", "--", "sh", "-c", "printenv FENCELOCK_NAME; exit 6"]);
    assert_eq!((code(output.status), text(&output.stdout).trim()), (6, "x"));
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn a_candidate_that_waits_ends_at_once() {
    let place = Place::new();
    let leader = place.start(&["elect", "x", "--", "sh", "-c", &lead("one")]);
    until_led_by(&place, &["one"]);
    let other = Running::start(&mut place.interruptible(&["elect", "x", "--", "sh", "-c", &lead("two")]));
    place.until_standing("x", 1, 1);
    other.send(Signal::INT);
    assert_eq!(other.code(), 130);
    assert_eq!(place.standing("x"), (1, 0));
    drop(leader);
}
