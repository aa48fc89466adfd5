//! Hand-made histories, good and bad: each kind of violation is found, and none where there is none.

use super::*;
use Mode::{Exclusive, Shared};

/// Writes a history in milliseconds.
#[derive(Default)]
struct Tale(Vec<Event>);

/// A claim in a tale: its number is also its process, so that each stands alone.
struct Teller<'a>(&'a mut Tale, u64);

impl Tale {
    fn claim(&mut self, claim: u64, at: u64, mode: Mode) -> Teller<'_> {
        Teller(self, claim).say(at, What::Waits { name: "a".into(), mode, ttl_ms: 100 })
    }

    /// A whole hold: came, was granted, was valid until, released.
    fn hold(&mut self, claim: u64, mode: Mode, came: u64, granted: u64, until: u64, token: u64) -> &mut Self {
        self.claim(claim, came, mode).granted(granted, token).valid(until).say(until, What::Ended(Ended::Released));
        self
    }

    fn evicted(&mut self, claim: u64, from: u64, until: u64) -> &mut Self {
        Teller(self, claim).say(from, What::Evicts { name: "a".into() }).say(until, What::Evicted);
        self
    }

    fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = check(&self.0).violations.iter().map(|violation| violation.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }
}

impl Teller<'_> {
    fn say(self, at: u64, what: What) -> Self {
        self.0.0.push(Event { at: at * 1_000_000, process: self.1, claim: 1, what });
        self
    }

    fn in_line(self, at: u64) -> Self {
        self.say(at, What::InLine { asked: (at - 1) * 1_000_000 })
    }

    fn granted(self, at: u64, token: u64) -> Self {
        self.say(at, What::Granted { token })
    }

    fn valid(self, at: u64) -> Self {
        self.say(at, What::StillValid)
    }
}

#[test]
fn a_good_history_shows_nothing() {
    let mut tale = Tale::default();
    tale.hold(1, Exclusive, 0, 1, 10, 5).hold(2, Exclusive, 2, 11, 20, 6);
    tale.hold(3, Shared, 3, 21, 40, 7).hold(4, Shared, 4, 22, 45, 8);
    tale.claim(5, 5, Exclusive).in_line(6).say(50, What::GaveUp(GaveUp::Timeout));
    let report = check(&tale.0);
    assert_eq!(report.violations, []);
    assert_eq!((report.grants, report.timeouts, report.waits.len()), (4, 1, 4));
}

#[test]
fn two_exclusive_holders_at_a_time_are_found() {
    let mut tale = Tale::default();
    tale.hold(1, Exclusive, 0, 1, 10, 5).hold(2, Exclusive, 2, 9, 20, 6);
    assert_eq!(tale.kinds(), [Kind::Exclusion]);
}

#[test]
fn a_reader_beside_a_writer_is_found() {
    let mut tale = Tale::default();
    tale.hold(1, Shared, 0, 1, 10, 5).hold(2, Shared, 0, 2, 12, 6).hold(3, Exclusive, 2, 11, 20, 7);
    assert_eq!(tale.kinds(), [Kind::Exclusion]);
}

#[test]
fn one_permit_too_many_is_found() {
    let two = Mode::Permit { of: 2 };
    let mut tale = Tale::default();
    tale.hold(1, two, 0, 1, 10, 5).hold(2, two, 0, 2, 12, 6).hold(3, two, 0, 11, 20, 7);
    assert_eq!(tale.kinds(), []);
    tale.hold(4, two, 0, 11, 20, 8);
    assert_eq!(tale.kinds(), [Kind::Exclusion]);
}

#[test]
fn a_hold_that_was_not_seen_valid_proves_nothing() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).granted(1, 5).valid(4).say(50, What::Ended(Ended::Dropped));
    tale.hold(2, Exclusive, 2, 9, 20, 6);
    assert_eq!(tale.kinds(), []);
}

#[test]
fn a_token_that_is_given_twice_is_found() {
    let mut tale = Tale::default();
    tale.hold(1, Shared, 0, 1, 10, 5).hold(2, Shared, 0, 2, 10, 5);
    assert_eq!(tale.kinds(), [Kind::Token]);
}

#[test]
fn a_token_below_one_that_was_seen_before_the_claim_is_found() {
    let mut tale = Tale::default();
    tale.hold(1, Shared, 0, 1, 10, 5).hold(2, Shared, 2, 3, 10, 4);
    assert_eq!(tale.kinds(), [Kind::Token]);
}

#[test]
fn readers_that_came_together_may_see_their_grants_in_any_order() {
    let mut tale = Tale::default();
    tale.hold(1, Shared, 0, 4, 10, 5).hold(2, Shared, 2, 3, 10, 6);
    assert_eq!(tale.kinds(), []);
}

#[test]
fn a_token_that_falls_from_one_holder_to_the_next_is_found() {
    let mut tale = Tale::default();
    tale.hold(1, Exclusive, 0, 2, 10, 6).hold(2, Exclusive, 1, 11, 20, 5);
    assert_eq!(tale.kinds(), [Kind::Token]);
}

#[test]
fn a_waiter_that_is_overtaken_is_found() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).in_line(5).granted(30, 9).valid(40).say(41, What::Ended(Ended::Released));
    tale.hold(2, Exclusive, 6, 10, 20, 8);
    assert_eq!(tale.kinds(), [Kind::Order]);
}

#[test]
fn a_writer_that_still_waits_when_a_later_reader_has_got_in_was_overtaken() {
    let mut tale = Tale::default();
    tale.hold(1, Shared, 0, 1, 50, 3);
    tale.claim(2, 2, Exclusive).in_line(5).in_line(25).say(30, What::GaveUp(GaveUp::Cancelled));
    tale.hold(3, Shared, 6, 20, 40, 4);
    assert_eq!(tale.kinds(), [Kind::Order]);
}

#[test]
fn who_gave_up_may_have_been_granted_without_knowing() {
    let mut tale = Tale::default();
    tale.claim(1, 2, Shared).in_line(5).say(30, What::GaveUp(GaveUp::Cancelled));
    tale.hold(2, Shared, 6, 20, 40, 4);
    assert_eq!(tale.kinds(), []);
}

#[test]
fn who_was_not_seen_in_line_may_have_come_later() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).in_line(7).granted(30, 9).valid(40);
    tale.hold(2, Exclusive, 6, 10, 20, 8);
    assert_eq!(tale.kinds(), []);
}

#[test]
fn a_waiter_that_slept_through_its_turn_was_not_overtaken() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).in_line(5).say(25, What::Stalled { since: 6 }).granted(30, 9).valid(40);
    tale.hold(2, Exclusive, 6, 10, 20, 8);
    let mut asleep = tale.0.clone();
    asleep.iter_mut().filter(|event| matches!(event.what, What::Stalled { .. })).for_each(|event| event.claim = 0);
    assert_eq!(check(&asleep).violations, []);
}

#[test]
fn a_lock_lost_for_no_reason_is_found() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).granted(1, 5).valid(40).say(50, What::Ended(Ended::Lost));
    assert_eq!(tale.kinds(), [Kind::Lost]);
    tale.evicted(9, 44, 45);
    assert_eq!(tale.kinds(), []);
}

#[test]
fn an_evicted_holder_may_believe_for_one_lease_and_no_longer() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).granted(1, 5).valid(90).say(95, What::Ended(Ended::Lost));
    tale.evicted(9, 10, 12).hold(2, Exclusive, 5, 13, 300, 6);
    assert_eq!(tale.kinds(), []);
    tale.claim(3, 0, Exclusive).granted(2, 4).valid(150).say(151, What::Ended(Ended::Lost));
    assert_eq!(tale.kinds(), [Kind::Exclusion]);
}

#[test]
fn an_eviction_does_not_excuse_who_came_after_it() {
    let mut tale = Tale::default();
    tale.evicted(9, 10, 12).hold(1, Exclusive, 13, 14, 30, 5).hold(2, Exclusive, 13, 20, 40, 6);
    assert_eq!(tale.kinds(), [Kind::Exclusion]);
}

#[test]
fn a_claim_that_waits_in_vain_is_found() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).say(9_000, What::GaveUp(GaveUp::Stuck));
    assert_eq!(tale.kinds(), [Kind::Stuck]);
}

#[test]
fn an_error_of_the_engine_is_found() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).say(3, What::Failed { message: "disk full".into() });
    assert_eq!(tale.kinds(), [Kind::Failed]);
}

#[test]
fn somebody_inside_is_found_unless_it_says_itself_that_it_overstayed() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).granted(1, 5).valid(2).say(30, What::Ended(Ended::Dropped));
    tale.claim(2, 2, Exclusive).granted(10, 6).say(11, What::Clash).say(12, What::Ended(Ended::Released));
    assert_eq!(tale.kinds(), [Kind::Clash]);
    tale.0.retain(|event| event.what != What::Ended(Ended::Dropped));
    Teller(&mut tale, 1).say(30, What::Ended(Ended::Lost));
    assert_eq!(tale.kinds(), [Kind::Lost]);
}

#[test]
fn somebody_inside_who_is_just_being_killed_is_forgiven() {
    let mut tale = Tale::default();
    tale.claim(1, 0, Exclusive).granted(1, 5).valid(2);
    tale.claim(2, 2, Exclusive).granted(10, 6).say(11, What::Clash).say(12, What::Ended(Ended::Released));
    assert_eq!(tale.kinds(), [Kind::Clash]);
    Teller(&mut tale, 0).say(12, What::Killed { process: 1, since: 9_000_000 });
    assert_eq!(tale.kinds(), []);
    tale.0.last_mut().unwrap().at = 10_500_000;
    assert_eq!(tale.kinds(), [Kind::Clash], "it was gone before");
}

#[test]
fn spans_are_cut() {
    assert_eq!(without((0, 10), (3, 5)), [(0, 3), (5, 10)]);
    assert_eq!(without((0, 10), (10, 12)), [(0, 10)]);
    assert_eq!(without((4, 10), (2, 12)), []);
}
