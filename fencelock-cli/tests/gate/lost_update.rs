//! The lost-update experiment behind the gate: straight to the upstream, updates are lost; through the gate, none is.
//!
//! Short here; `FENCELOCK_LOST_UPDATE_SECONDS=60 cargo test -p fencelock-cli --test gate lost_update -- --nocapture` is the long one.

use crate::harness::Place;
use fencelock_testkit::lost_update::{Plan, run};

#[tokio::test(flavor = "multi_thread")]
async fn no_update_is_lost_behind_the_gate() {
    let place = Place::new(&["--reads-pass", "-q"]);
    let dir = tempfile::tempdir().unwrap();
    let locks = |name: &str| format!("file:{}", dir.path().join(name).display());
    let straight = format!("{}/without", place.upstream.url());
    let without = run(&Plan::new(straight, locks("without"), false)).await;
    println!("HTTP, no gate:   {without}");
    let gated = format!("http://{}/with", place.gate.address);
    let with = run(&Plan::new(gated, locks("with"), true)).await;
    println!("HTTP, with gate: {with}");
    assert!(without.stops > 0 && with.stops > 0, "holders were stopped");
    assert!(without.lost() > 0, "nothing was lost without the gate, so this proves nothing: {without}");
    assert_eq!(with.lost(), 0, "{with}");
    assert!(with.number <= with.tally.done + with.tally.unknown, "more than was written: {with}");
    assert!(with.tally.refused > 0, "the gate had nothing to do: {with}");
}
