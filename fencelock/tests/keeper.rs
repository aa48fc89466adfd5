//! The keeper and the guard do not trust an engine: whatever it answers, late, never or wrongly, a holder never believes
//! for longer than its lease, and nothing is left behind. Time is tokio's, paused, so every moment is exact.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fencelock::{Client, ErrorKind, Guard, Loss, Mutex};
use fencelock_testkit::scripted::{Answer, Operation, Scripted};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, advance, sleep, sleep_until, timeout};

const TTL: Duration = Duration::from_secs(3);
/// What a holder's own deadline stays short of the engine's, at most.
const MARGIN: Duration = Duration::from_millis(50);

struct Stage {
    engine: Arc<Scripted>,
    client: Client,
}

impl Stage {
    async fn new() -> Self {
        let engine = Scripted::new().await;
        Self { client: Client::with_engine(engine.clone()), engine }
    }

    fn mutex(&self) -> Mutex {
        self.client.mutex("a").ttl(TTL)
    }

    async fn guard(&self) -> Guard {
        self.mutex().acquire().await.unwrap()
    }

    fn calls(&self, operation: Operation) -> usize {
        self.engine.calls(operation).len()
    }
}

#[tokio::test(start_paused = true)]
async fn renewals_begin_at_a_third_of_the_lease() {
    let stage = Stage::new().await;
    let _guard = stage.guard().await;
    let acquired = stage.engine.calls(Operation::Acquire)[0].at;
    sleep(TTL).await;
    let first = stage.engine.calls(Operation::Renew)[0].at.since(acquired);
    assert!(first <= TTL / 3 && first > TTL / 5, "{first:?}");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_hangs_ends_in_a_loss_at_the_deadline() {
    let stage = Stage::new().await;
    stage.engine.always(Operation::Renew, Answer::Never);
    let started = Instant::now();
    let guard = stage.guard().await;
    assert_eq!(guard.lost().await, Loss::Deadline);
    assert!(started.elapsed() <= TTL && started.elapsed() >= TTL - MARGIN, "{:?}", started.elapsed());
    assert!(!guard.is_valid());
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn the_loss_is_declared_also_when_nobody_listens() {
    let stage = Stage::new().await;
    stage.engine.always(Operation::Renew, Answer::Never);
    let guard = stage.guard().await;
    sleep(TTL - MARGIN).await;
    assert!(guard.is_valid());
    sleep(MARGIN).await;
    assert!(!guard.is_valid());
    assert_eq!(guard.loss(), Some(Loss::Deadline));
    stage.client.settled().await;
    assert_eq!(stage.calls(Operation::Release), 1, "whatever the engine still keeps must go");
}

#[tokio::test(start_paused = true)]
async fn no_failure_lets_a_holder_believe_for_longer_than_its_lease() {
    let kinds = [Answer::Never, Answer::Fails, Answer::FailsAfterwards, Answer::Late(TTL * 2), Answer::Panics];
    for answer in kinds {
        for ttl in [100, 333, 1_000, 30_000, 600_000].map(Duration::from_millis) {
            let stage = Stage::new().await;
            stage.engine.always(Operation::Renew, answer);
            if answer == Answer::Late(TTL * 2) {
                stage.engine.always(Operation::Renew, Answer::Late(ttl * 2));
            }
            let started = Instant::now();
            let guard = stage.client.mutex("a").ttl(ttl).acquire().await.unwrap();
            guard.lost().await;
            assert!(started.elapsed() <= ttl, "{answer:?}: {ttl:?} became {:?}", started.elapsed());
            assert!(
                started.elapsed() >= ttl - ttl / 50 - Duration::from_millis(5),
                "{answer:?}: {ttl:?} was cut short"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn renewals_that_fail_a_few_times_are_tried_again() {
    let stage = Stage::new().await;
    let guard = stage.guard().await;
    for failures in [
        vec![Answer::Fails; 5],
        vec![Answer::Never],
        vec![Answer::FailsAfterwards, Answer::Fails],
        vec![Answer::Late(TTL)],
    ] {
        stage.engine.next(Operation::Renew, failures.clone());
        sleep(TTL * 4).await;
        assert!(guard.is_valid(), "lost by {failures:?}");
    }
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_lease_counts_from_when_the_request_was_sent() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Acquire, [Answer::Late(TTL / 2)]);
    let guard = stage.guard().await;
    assert!(guard.valid_for() <= TTL / 2, "{:?}", guard.valid_for());
    stage.engine.always(Operation::Renew, Answer::Late(TTL / 4));
    let renewed = loop {
        sleep(Duration::from_millis(10)).await;
        if guard.valid_for() > TTL / 2 {
            break stage.engine.calls(Operation::Renew)[0].at;
        }
    };
    let until = fencelock::Clock::Tokio.now().after(guard.valid_for());
    assert!(until.since(renewed) <= TTL, "{:?} from when it was sent", until.since(renewed));
}

#[tokio::test(start_paused = true)]
async fn an_answer_later_than_its_lease_is_no_acquisition() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Acquire, [Answer::Late(TTL), Answer::Late(TTL * 5)]);
    let guard = stage.guard().await;
    assert!(guard.is_valid());
    assert_eq!((stage.calls(Operation::Acquire), stage.calls(Operation::Release)), (3, 2), "each was given back");

    stage.engine.next(Operation::Acquire, [Answer::Late(TTL)]);
    assert!(stage.mutex().try_acquire().await.unwrap().is_none());
    stage.client.settled().await;
    assert_eq!(stage.calls(Operation::Release), 3);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_withdraws_the_claim() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Acquire, [Answer::Never]);
    let error = stage.mutex().acquire_timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    stage.client.settled().await;
    let (asked, withdrawn) = (stage.engine.calls(Operation::Acquire), stage.engine.calls(Operation::Release));
    assert_eq!((withdrawn.len(), withdrawn[0].owner), (1, asked[0].owner));
}

#[tokio::test(start_paused = true)]
async fn a_grant_whose_reply_was_lost_is_given_back() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Acquire, [Answer::FailsAfterwards]);
    let error = stage.mutex().acquire().await.unwrap_err();
    assert_eq!((error.kind(), error.name(), error.engine()), (ErrorKind::Ambiguous, Some("a"), Some("scripted:")));
    stage.client.settled().await;
    assert_eq!(stage.engine.calls(Operation::Release)[0].owner, stage.engine.calls(Operation::Acquire)[0].owner);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawal_is_repeated_until_it_succeeds() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Acquire, [Answer::FailsAfterwards]);
    stage.engine.next(Operation::Release, [Answer::Fails, Answer::FailsAfterwards, Answer::Never, Answer::Fails]);
    stage.mutex().acquire().await.unwrap_err();
    stage.client.settled().await;
    assert_eq!(stage.calls(Operation::Release), 5);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_reported_and_goes_on() {
    let stage = Stage::new().await;
    let guard = stage.guard().await;
    stage.engine.next(Operation::Release, [Answer::Fails]);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Unavailable);
    stage.client.settled().await;
    assert_eq!(stage.calls(Operation::Release), 2);
}

/// Where entries live as long as a session does, not as long as a lease, a release is not given up before that has ended.
#[tokio::test(start_paused = true)]
async fn a_release_is_not_given_up_while_a_session_keeps_the_entry() {
    let stage = Stage::new().await;
    let long = TTL * 100;
    for lingers in [false, true] {
        stage.engine.linger(lingers);
        let guard = stage.guard().await;
        stage.engine.always(Operation::Release, Answer::Fails);
        guard.release().await.unwrap_err();
        assert_eq!(timeout(long, stage.client.settled()).await.is_err(), lingers);
        stage.engine.always(Operation::Release, Answer::Yes);
        timeout(TTL, stage.client.settled()).await.expect("it is done");
    }
    // The session comes to its end, or the client.
    stage.engine.always(Operation::Release, Answer::Fails);
    stage.guard().await.release().await.unwrap_err();
    timeout(long, stage.client.settled()).await.unwrap_err();
    stage.engine.linger(false);
    timeout(TTL, stage.client.settled()).await.expect("it ends by itself");
    stage.engine.linger(true);
    stage.guard().await.release().await.unwrap_err();
    timeout(TTL * 10, stage.client.close()).await.expect("closing ends all sessions").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_does_not_cost_the_value_of_the_body() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Release, [Answer::Fails, Answer::Fails]);
    assert_eq!(stage.mutex().with(async |_| 42).await.unwrap(), 42);
    stage.engine.next(Operation::Release, [Answer::No]);
    assert_eq!(stage.mutex().with(async |_| 43).await.unwrap(), 43, "it was valid when the body was done");
    stage.client.settled().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_renewed_after_the_release() {
    let stage = Stage::new().await;
    let guard = stage.guard().await;
    sleep(TTL * 2).await;
    guard.release().await.unwrap();
    drop(stage.guard().await);
    stage.client.settled().await;
    let renewals = stage.calls(Operation::Renew);
    sleep(TTL * 20).await;
    assert_eq!(stage.calls(Operation::Renew), renewals);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_in_flight_does_not_bring_a_released_lock_back() {
    let stage = Stage::new().await;
    let guard = stage.guard().await;
    stage.engine.next(Operation::Renew, [Answer::Late(TTL / 4)]);
    while stage.calls(Operation::Renew) == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    let listener = tokio::spawn(guard.lost());
    guard.release().await.unwrap();
    sleep(TTL * 10).await;
    assert_eq!(stage.calls(Operation::Renew), 1);
    assert!(!listener.is_finished(), "a clean release is no loss");
}

#[tokio::test(start_paused = true)]
async fn a_late_renewal_does_not_revive_a_lost_lock() {
    let stage = Stage::new().await;
    stage.engine.always(Operation::Renew, Answer::Late(TTL / 3 - Duration::from_millis(1)));
    stage.engine.next(Operation::Renew, [Answer::Never, Answer::Late(TTL)]);
    let guard = stage.guard().await;
    guard.lost().await;
    sleep(TTL * 5).await;
    assert!(!guard.is_valid());
    let renewals = stage.calls(Operation::Renew);
    sleep(TTL * 5).await;
    assert_eq!(stage.calls(Operation::Renew), renewals);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_gone_is_lost_at_the_next_renewal() {
    let stage = Stage::new().await;
    stage.engine.always(Operation::Renew, Answer::No);
    let started = Instant::now();
    let guard = stage.guard().await;
    assert_eq!(guard.lost().await, Loss::Taken);
    assert!(started.elapsed() <= TTL / 3 + MARGIN, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_engines_word_is_enough() {
    let stage = Stage::new().await;
    let (guard, other) = (stage.guard().await, stage.client.mutex("b").acquire().await.unwrap());
    sleep(Duration::from_millis(1)).await;
    let started = Instant::now();
    stage.engine.take_away(guard.owner());
    assert_eq!(guard.lost().await, Loss::Taken);
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert!(other.is_valid(), "nobody else is concerned");
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_engine_costs_no_more_than_the_lease() {
    let stage = Stage::new().await;
    stage.engine.next(Operation::Renew, [Answer::Panics]);
    let guard = stage.guard().await;
    timeout(TTL, guard.lost()).await.expect("it is lost at its deadline");
    let next = stage.guard().await;
    sleep(TTL * 3).await;
    assert!(next.is_valid(), "the keeper is at work again");
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn max_hold_is_kept_to_the_moment_and_gives_the_lock_back() {
    for listeners in [0, 1, 3] {
        let stage = Stage::new().await;
        let cap = TTL * 4 + TTL / 7;
        let started = Instant::now();
        let guard = stage.mutex().max_hold(cap).acquire().await.unwrap();
        let listeners: Vec<_> = (0..listeners).map(|_| tokio::spawn(guard.lost())).collect();
        sleep_until(started + cap - Duration::from_millis(10)).await;
        assert!(guard.is_valid());
        sleep_until(started + cap).await;
        assert!(!guard.is_valid());
        for listener in listeners {
            assert_eq!(listener.await.unwrap(), Loss::MaxHold);
        }
        sleep(Duration::from_millis(10)).await;
        stage.client.settled().await;
        assert_eq!(stage.calls(Operation::Release), 1, "the engine must be told");
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_gives_the_lock_back_whoever_noticed_it_first() {
    let stage = Stage::new().await;
    stage.engine.always(Operation::Renew, Answer::Never);
    let guard = stage.guard().await;
    guard.lost().await;
    sleep(Duration::from_millis(10)).await;
    stage.client.settled().await;
    assert_eq!(stage.calls(Operation::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_ever_for_a_silent_engine() {
    let stage = Stage::new().await;
    let _guard = stage.guard().await;
    stage.engine.always(Operation::Release, Answer::Never);
    timeout(TTL * 10, stage.client.close()).await.expect("it gives up when the lease has ended by itself").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_was_stopped_knows_at_once() {
    let stage = Stage::new().await;
    let guard = stage.guard().await;
    let renewals = stage.calls(Operation::Renew);
    // Nothing runs between the jump of the clock and the question: what is known is known by the clock alone.
    let mut jump = std::pin::pin!(advance(TTL * 2));
    let _ = futures_poll_once(jump.as_mut()).await;
    assert!(!guard.is_valid());
    assert_eq!(stage.calls(Operation::Renew), renewals, "nobody was asked");
    jump.await;
    assert_eq!(guard.lost().await, Loss::Deadline);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

async fn futures_poll_once<F: Future + Unpin>(mut future: F) -> Option<F::Output> {
    std::future::poll_fn(|context| match std::pin::Pin::new(&mut future).poll(context) {
        std::task::Poll::Ready(out) => std::task::Poll::Ready(Some(out)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}
