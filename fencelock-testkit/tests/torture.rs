//! The torture finds nothing wrong with the engines, and something wrong with every engine that breaks a promise.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fencelock::{Client, connect};
use fencelock_testkit::history::Kind;
use fencelock_testkit::relay::Relay;
use fencelock_testkit::sabotage::{self, Sabotage};
use fencelock_testkit::torture::{self, Connect, Plan, Verdict, Workers};
use fencelock_testkit::{Subject, probe};
use std::sync::Arc;
use std::time::Duration;

fn plan(subject: &Subject) -> Plan {
    let mut plan = Plan::new(subject.url());
    plan.lasts = Duration::from_secs(2);
    plan.processes = 2;
    plan.workers = 5;
    plan.names = 4;
    plan
}

/// Short leases, so that what depends on their end shows; little patience, since waiting in vain is expected.
fn hasty(subject: &Subject) -> Plan {
    let mut plan = plan(subject);
    plan.ttl = Duration::from_millis(200);
    plan.patience = Duration::from_secs(2);
    plan
}

async fn run(plan: &Plan, workers: Workers) -> Verdict {
    let verdict = torture::run(plan, workers, |_| {}).await.unwrap();
    println!("{verdict}");
    verdict
}

async fn processes(arguments: &[&str]) -> Workers {
    let mut command = vec![probe::path().await.as_os_str().to_owned(), "torture-worker".into()];
    command.extend(arguments.iter().map(Into::into));
    Workers::Processes(command)
}

fn good(verdict: &Verdict) {
    assert!(verdict.ok, "{verdict}");
    assert!(verdict.grants > 100, "hardly anything happened: {verdict}");
    assert!(verdict.cancelled > 0 && verdict.busy > 0 && verdict.timeouts > 0, "{verdict}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_engine_withstands_torture() {
    let subject = Subject::memory();
    good(&run(&plan(&subject), Workers::Here(torture::by_url())).await);
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_engine_withstands_torture() {
    let subject = Subject::file();
    good(&run(&plan(&subject), processes(&[]).await).await);
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_engine_withstands_torture_with_killed_processes() {
    let subject = Subject::file();
    let mut plan = plan(&subject);
    plan.kill = true;
    plan.lasts = Duration::from_secs(4);
    plan.processes = 3;
    let verdict = run(&plan, processes(&[]).await).await;
    good(&verdict);
    assert!(verdict.kills > 2, "{verdict}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrapped_engine_that_breaks_nothing_withstands_torture() {
    let subject = Subject::memory();
    let honest: Connect =
        Arc::new(|url| Box::pin(async move { Ok(Client::with_engine(Arc::new(Relay::new(connect(&url).await?)))) }));
    good(&run(&plan(&subject), Workers::Here(honest)).await);
}

/// By which violations each sabotage shows.
fn shows(sabotage: Sabotage) -> &'static [Kind] {
    match sabotage {
        Sabotage::GrantsWhileHeld => &[Kind::Exclusion, Kind::Clash],
        Sabotage::RepeatsTokens => &[Kind::Token],
        Sabotage::LastComeFirstServed => &[Kind::Order],
        Sabotage::ForgetsReleases => &[Kind::Stuck],
        Sabotage::HidesLosses => &[Kind::Exclusion],
    }
}

fn bad(sabotage: Sabotage, verdict: &Verdict) {
    assert!(!verdict.ok);
    for kind in shows(sabotage) {
        assert!(verdict.shows(*kind), "{sabotage:?} should show by {kind:?}: {verdict}");
    }
}

macro_rules! sabotages {
    ($($test:ident $sabotage:ident)*) => {
        mod in_one_process {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let (subject, sabotage) = (Subject::memory(), Sabotage::$sabotage);
                    bad(sabotage, &run(&hasty(&subject), Workers::Here(sabotage::connector(sabotage))).await);
                }
            )*
        }

        #[cfg(target_os = "linux")]
        mod in_several_processes {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let (subject, sabotage) = (Subject::file(), Sabotage::$sabotage);
                    let workers = processes(&[stringify!($sabotage)]).await;
                    bad(sabotage, &run(&hasty(&subject), workers).await);
                }
            )*
        }
    };
}

sabotages! {
    granting_a_held_lock_is_found GrantsWhileHeld
    repeating_a_token_is_found RepeatsTokens
    serving_the_last_comer_first_is_found LastComeFirstServed
    forgetting_a_release_is_found ForgetsReleases
    hiding_a_loss_is_found HidesLosses
}
