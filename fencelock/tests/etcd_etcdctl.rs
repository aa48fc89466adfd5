//! `etcdctl lock`, which is Go's `concurrency` package, and fencelock on the same lock: they stand in one line and exclude each
//! other, in both directions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "etcd")]

use fencelock::{Client, Guard, Mode};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::etcd::EtcdCluster;
use fencelock_testkit::wait::{at_once, eventually, until_free, until_line};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
/// What `etcdctl` calls it: the URL's prefix, which is `fencelock/` here, and the name.
const KEY: &str = "fencelock/invoice:42";
const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];

/// An `etcdctl lock` that holds the lock, once it has it, until it is told to end. It is killed when this is dropped.
struct Foreign {
    child: Child,
    held: oneshot::Receiver<String>,
}

impl Foreign {
    fn start(cluster: &EtcdCluster) -> Self {
        let mut command = cluster.ctl_command(&["lock", "--ttl", "2", KEY]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (tell, held) = oneshot::channel();
        // It prints its key when it holds.
        std::thread::spawn(move || {
            if let Some(Ok(key)) = lines.next() {
                let _ = tell.send(key);
            }
        });
        Self { child, held }
    }

    async fn holds(&mut self) -> String {
        at_once("etcdctl holds", &mut self.held).await.unwrap()
    }

    fn waits(&mut self) -> bool {
        self.held.try_recv().is_err()
    }

    fn signal(&mut self, signal: Signal) {
        let id = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(id, signal).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(mode: Mode) -> Ask<'static> {
    Ask { name: NAME, mode, ttl: LONG, label: "ours", owner: None }
}

async fn hold(client: &Client, mode: Mode) -> Guard {
    at_once("it is free", ask(mode).of(client, Patience::Endless)).await.unwrap().unwrap()
}

fn queue(client: &Client, mode: Mode) -> JoinHandle<Guard> {
    let client = client.clone();
    tokio::spawn(async move { ask(mode).of(&client, Patience::Endless).await.unwrap().unwrap() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_etcdctl_holds_is_busy_for_us_until_it_unlocks_or_dies() {
    let cluster = EtcdCluster::start(1);
    let client = cluster.client().await;
    for mode in MODES {
        for (ends, signal) in [("unlocks", Signal::INT), ("dies", Signal::KILL)] {
            let mut foreign = Foreign::start(&cluster);
            let key = foreign.holds().await;
            assert!(key.starts_with(&format!("{KEY}/")), "{key}");
            assert!(ask(mode).of(&client, Patience::None).await.unwrap().is_none(), "{mode}");
            let waiter = queue(&client, mode);
            until_line(&client, NAME, 1, 1).await;
            let status = client.status(NAME).await.unwrap();
            assert_eq!(status.holders[0].label, "a client that is not fencelock");
            let revision = status.holders[0].token;
            assert!(!waiter.is_finished());
            foreign.signal(signal);
            let guard = at_once(&format!("{mode}: it {ends}, and we follow"), waiter).await.unwrap();
            assert!(guard.token() > revision, "one order of tokens for all");
            guard.release().await.unwrap();
            until_free(&client, NAME).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_we_hold_etcdctl_waits_for() {
    let cluster = EtcdCluster::start(1);
    let client = cluster.client().await;
    for mode in MODES {
        let guard = hold(&client, mode).await;
        let mut foreign = Foreign::start(&cluster);
        until_line(&client, NAME, 1, 1).await;
        assert!(foreign.waits(), "{mode}");
        assert!(ask(mode).of(&client, Patience::None).await.unwrap().is_none(), "it is not overtaken");
        guard.release().await.unwrap();
        foreign.holds().await;
        foreign.signal(Signal::INT);
        until_free(&client, NAME).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_stand_in_one_line() {
    let cluster = EtcdCluster::start(1);
    let client = cluster.client().await;
    let first = hold(&client, Mode::Exclusive).await;
    let mut second = Foreign::start(&cluster);
    until_line(&client, NAME, 1, 1).await;
    let third = queue(&client, Mode::Exclusive);
    until_line(&client, NAME, 1, 2).await;
    let mut fourth = Foreign::start(&cluster);
    until_line(&client, NAME, 1, 3).await;
    first.release().await.unwrap();
    second.holds().await;
    assert!(!third.is_finished() && fourth.waits());
    second.signal(Signal::INT);
    let third = at_once("then the third", third).await.unwrap();
    assert!(fourth.waits());
    third.release().await.unwrap();
    fourth.holds().await;
    // Somebody takes it away from etcdctl, which learns nothing of it; but the lock is free.
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    let next = hold(&client, Mode::Exclusive).await;
    fourth.signal(Signal::INT);
    assert!(next.is_valid());
    eventually("its late unlock leaves us alone", async || {
        client.status(NAME).await.unwrap().holders.iter().any(|holder| holder.token == next.token())
    })
    .await;
    next.release().await.unwrap();
}
