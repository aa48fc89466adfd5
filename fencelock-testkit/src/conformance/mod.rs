//! The suite that every engine must pass: plain functions over a [`Subject`], one scenario each.
//!
//! [`conformance!`](crate::conformance!) turns all of them into tests. What holds for a mutex must hold for everything that
//! can serve as one, so the checks of `exclusive` run for each [`Kind`]. No engine is treated specially: what
//! a check needs and an engine may not have stands in its capability.

#![allow(clippy::unwrap_used, reason = "a check fails by panicking")]

pub mod ending;
pub mod exclusive;
pub mod input;
pub mod names;
pub mod others;
pub mod processes;
pub mod semaphore;
pub mod several;
pub mod sharing;
pub mod with;

use crate::ask::{Ask, Patience};
use crate::{Kind, Subject};
use fencelock::{Client, ErrorKind, Mode};
use std::future::Future;
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The lock that most checks are about.
pub(crate) const NAME: &str = "invoice:42";
/// A lease that ends soon, and yet survives the pauses of a busy machine.
pub(crate) const SHORT: Duration = Duration::from_millis(600);
/// A lease that never ends during a check: what happens before is not because it did.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Runs a check, which must come to an end.
///
/// # Panics
/// When the check does, and when it takes longer than a minute.
pub async fn run(check: impl Future<Output = ()>) {
    let limit = Duration::from_secs(60);
    assert!(tokio::time::timeout(limit, check).await.is_ok(), "the check hangs");
}

/// Whether the engine offers what a check is about. What it does not offer, it must refuse and say why.
///
/// # Panics
/// When it says that it does not offer something, and does not refuse it.
pub async fn applies(subject: &Subject, check: &str, kind: Option<Kind>) -> bool {
    let (modes, ordered) = needs(check, kind);
    let client = subject.client().await;
    let capability = client.capability();
    for mode in modes {
        let offered = match mode {
            Mode::Exclusive => true,
            Mode::Shared => capability.shared,
            Mode::Permit { .. } => capability.permits,
        };
        if !offered {
            let ask = Ask { name: NAME, mode, ttl: SHORT, label: "", owner: None };
            let error = ask.of(&client, Patience::Endless).await.expect_err("it is not offered");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(capability.engine), "{error}");
            assert_eq!(crate::wait::line(&client, NAME).await, (0, 0), "nothing was touched");
            return false;
        }
    }
    capability.ordered || !ordered
}

/// The modes that a check needs, and whether it needs first come, first served.
fn needs(check: &str, kind: Option<Kind>) -> (Vec<Mode>, bool) {
    let (module, name) = check.rsplit_once("::").unwrap_or(("", check));
    let ordered = [
        "first_come_first_served",
        "try_acquire_does_not_overtake_a_waiter",
        "a_second_claim_of_a_waiting_owner_does_no_harm",
        "processes_take_turns_in_order",
    ];
    let permits = ["what_nobody_renews_is_free_after_its_lease", "a_line_goes_on_after_all_its_holders_expired"];
    let mut modes = Vec::new();
    if module == "sharing" || name == "a_killed_reader_lets_the_writer_in" {
        modes.push(Mode::Shared);
    }
    if module == "semaphore"
        || kind == Some(Kind::OnePermit)
        || permits.contains(&name)
        || name == "a_permit_of_a_killed_process_comes_back"
    {
        modes.push(Mode::Permit { of: 2 });
    }
    (modes, ordered.contains(&name))
}

/// A client whose keeper, which also takes in what the engine says, runs on a thread of its own and can be held up.
pub(crate) async fn held_up(subject: &Subject) -> (Client, mpsc::Sender<()>) {
    let url = subject.url().to_owned();
    let (tell, told) = oneshot::channel();
    let (go_on, wait) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = fencelock::connect(url).await.unwrap();
            drop(client.mutex("first use").acquire().await.unwrap());
            client.settled().await;
            tell.send(client).unwrap();
            // Nothing runs here until the first word, and nothing more after the second.
            wait.recv().unwrap();
            while wait.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    });
    (told.await.unwrap(), go_on)
}

/// Returns when the client's keeper has gone its round a few times: each of these releases passes through it.
pub(crate) async fn keeper_has_run(client: &Client) {
    for _ in 0..5 {
        drop(client.mutex("passing through the keeper").acquire().await.unwrap());
        client.settled().await;
    }
}

/// Instantiates every check as a test of its own. The expression makes a fresh [`Subject`].
///
/// ```no_run
/// mod suite {
///     fencelock_testkit::conformance!(fencelock_testkit::Subject::memory());
/// }
/// ```
#[macro_export]
macro_rules! conformance {
    ($subject:expr) => {
        $crate::conformance! { @each_kind $subject;
            one_holder_at_a_time
            first_come_first_served
            tokens_grow_from_holder_to_holder
            try_acquire_takes_what_is_free_and_nothing_else
            try_acquire_does_not_overtake_a_waiter
            polling_a_held_lock_does_not_make_it_slow
            waiters_that_gave_up_do_not_make_it_slow
            a_timeout_leaves_no_waiter
            a_timeout_that_is_long_enough_acquires
            a_dropped_acquire_leaves_no_trace
            a_dropped_waiter_leaves_no_trace
            a_waiter_dropped_while_its_grant_arrives_strands_nothing
            a_dropped_guard_frees_the_lock
            a_guard_dropped_outside_of_a_runtime_frees_the_lock
            a_guard_dropped_after_its_runtime_is_gone_frees_the_lock
            a_release_dropped_halfway_is_finished
            a_late_release_says_lost_and_leaves_the_successor_alone
            a_late_drop_leaves_the_successor_alone
            a_late_release_leaves_the_next_hold_of_the_same_owner_alone
            an_evicted_holder_learns_it_at_once_and_the_next_one_follows
            an_eviction_while_the_grant_arrives_is_told
            an_eviction_right_after_the_first_acquire_is_told
            a_clean_release_is_no_loss_and_ends_the_renewals
            the_lock_outlives_its_lease_by_renewals
            the_holder_knows_of_the_end_before_the_engine_does
            max_hold_ends_a_stuck_hold
            max_hold_frees_the_lock_also_when_its_loss_is_awaited
            only_the_last_of_nested_holds_frees
            nested_holds_end_in_any_order
            re_entering_a_lost_hold_says_lost
            confirming_gives_a_whole_lease_or_says_lost
            an_owner_re_enters_from_another_client
            a_borrowed_hold_ends_with_the_real_one
            an_owner_that_holds_nothing_waits_like_everybody
            a_second_claim_of_a_waiting_owner_does_no_harm
            a_thousand_tasks_take_turns
            clients_of_two_runtimes_take_turns
        }
        $crate::conformance! { @plain $subject; sharing
            readers_share
            a_writer_is_alone
            a_waiting_writer_is_not_overtaken
            readers_behind_a_writer_enter_together
            a_mutex_and_a_writer_are_the_same_thing
            readers_and_writers_never_meet
            an_owner_cannot_turn_from_reader_to_writer
            tokens_of_readers_grow
            a_long_reader_does_not_make_the_lock_slow
            overlapping_readers_do_not_make_the_lock_slow
        }
        $crate::conformance! { @plain $subject; semaphore
            at_most_n_hold
            permits_are_given_in_the_order_of_arrival
            another_number_of_permits_is_refused
            the_number_may_change_when_nobody_is_left
            a_dropped_permit_comes_back
            eviction_takes_all_permits_away
        }
        $crate::conformance! { @plain $subject; several
            opposite_orders_do_not_deadlock
            try_takes_all_or_nothing
            a_timeout_takes_all_or_nothing
            a_dropped_acquire_of_several_leaves_no_trace
            each_lock_has_its_token
            the_loss_of_one_is_the_loss_of_all
            several_locks_are_re_entered_by_their_owner
            a_name_that_stands_twice_is_taken_once
            late_news_of_one_lock_is_not_taken_for_another
        }
        $crate::conformance! { @plain $subject; with
            the_value_of_the_body_comes_back_and_the_lock_is_free
            a_panic_inside_releases
            a_body_is_stopped_when_the_lock_is_lost
            a_body_can_run_in_a_spawned_task
            a_body_that_is_dropped_releases
        }
        $crate::conformance! { @plain $subject; others
            the_leader_is_known_and_another_follows
            an_evicted_leader_is_followed
            status_tells_who_holds_and_who_waits
            ten_thousand_locks_at_once
            a_thousand_leases_are_renewed_in_time
        }
        $crate::conformance! { @plain $subject; ending
            close_gives_everything_back
            a_closed_client_acquires_nothing
            close_ends_a_waiting_acquire
            close_leaves_other_clients_alone
            a_client_outlives_the_runtime_that_it_was_first_used_on
            a_client_that_goes_away_leaves_nothing
            what_nobody_renews_is_free_after_its_lease
            a_line_goes_on_after_all_its_holders_expired
        }
        $crate::conformance! { @plain $subject; names
            awkward_names_do_not_collide
            list_gives_back_every_name_in_order
            list_knows_prefixes
        }
        $crate::conformance! { @plain $subject; input
            bad_input_is_refused_in_one_line
            bad_urls_are_refused_in_one_line
            outside_of_a_runtime_there_is_an_error_and_no_panic
        }
        $crate::conformance! { @plain $subject; processes
            a_killed_holder_frees_the_lock
            a_process_that_exits_without_a_word_frees_the_lock
            a_child_of_a_killed_holder_does_not_keep_the_lock
            a_killed_waiter_is_skipped
            a_stopped_holder_is_fenced_off
            a_stopped_waiter_is_skipped_and_comes_back
            tokens_grow_across_processes_and_restarts
            processes_take_turns_in_order
            an_owner_re_enters_from_another_process
            eviction_reaches_another_process_at_once
            a_killed_reader_lets_the_writer_in
            a_permit_of_a_killed_process_comes_back
        }
    };
    (@each_kind $subject:expr; $($check:ident)*) => {
        $crate::conformance! { @kind $subject; as_mutex Mutex; $($check)* }
        $crate::conformance! { @kind $subject; as_writer Writer; $($check)* }
        $crate::conformance! { @kind $subject; as_one_permit OnePermit; $($check)* }
        $crate::conformance! { @kind $subject; as_all_of_one AllOfOne; $($check)* }
    };
    (@kind $subject:expr; $module:ident $kind:ident; $($check:ident)*) => {
        mod $module {
            #[allow(unused_imports, reason = "the subject may need them")]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $check() {
                    let subject = $subject;
                    let name = concat!("exclusive::", stringify!($check));
                    if $crate::conformance::applies(&subject, name, Some($crate::Kind::$kind)).await {
                        let check = $crate::conformance::exclusive::$check(&subject, $crate::Kind::$kind);
                        $crate::conformance::run(check).await;
                    }
                }
            )*
        }
    };
    (@plain $subject:expr; $module:ident $($check:ident)*) => {
        mod $module {
            #[allow(unused_imports, reason = "the subject may need them")]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $check() {
                    let subject = $subject;
                    let name = concat!(stringify!($module), "::", stringify!($check));
                    if $crate::conformance::applies(&subject, name, None).await {
                        $crate::conformance::run($crate::conformance::$module::$check(&subject)).await;
                    }
                }
            )*
        }
    };
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// A check that nobody instantiates proves nothing.
    #[test]
    fn every_check_is_instantiated() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/conformance");
        let list = std::fs::read_to_string(dir.join("mod.rs")).unwrap();
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let source = std::fs::read_to_string(&path).unwrap();
            for check in source.lines().filter_map(|line| line.strip_prefix("pub async fn ")) {
                let name = check.split('(').next().unwrap();
                let listed = name == "run" || name == "applies" || list.lines().any(|line| line.trim() == name);
                assert!(listed, "{name} of {} is not in the list of conformance!", path.display());
            }
        }
    }
}
