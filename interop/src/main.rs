//! fencelock and foreign clients of the common recipe (`SET key id NX PX ttl`, compare and delete) on the same key of one Redis
//! server: they exclude each other in both directions, and nobody removes the other's lock.
//!
//! `cargo xtask interop` installs the foreign clients and runs this. Arguments: the Python and the Node program to use, and the
//! directory with Node's packages.

mod foreign;

use fencelock::{Client, ErrorKind, Guard, connect};
use fencelock_testkit::redis::RedisServer;
use foreign::{Foreign, Kind};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
/// Never ends during a check.
const LONG: Duration = Duration::from_secs(60);
const LONG_MS: u32 = 60_000;
/// Within this time a foreign release is noticed by a server that tells nobody of it.
const SOON: Duration = Duration::from_millis(1_000);
/// And by one that does.
const AT_ONCE: Duration = Duration::from_millis(250);

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what: &str| arguments.next().unwrap_or_else(|| panic!("missing argument: {what}"));
    let (python, node, packages) = (next("python"), next("node"), next("the directory of Node's packages"));
    let here = env!("CARGO_MANIFEST_DIR");
    let script = |file: &str| format!("{here}/{file}");
    // Node looks for packages beside its script.
    let in_packages = format!("{packages}/redlock_client.js");
    std::fs::copy(script("redlock_client.js"), &in_packages)
        .expect("the directory of Node's packages can be written to");
    let own = std::env::current_exe().expect("this program has a path").with_file_name("rslock-client");
    let kinds = [
        Kind { name: "redis-py", command: vec![python.clone(), script("redis_py_client.py")] },
        Kind { name: "redlock-py", command: vec![python, script("redlock_py_client.py")] },
        Kind { name: "node redlock", command: vec![node, in_packages] },
        Kind { name: "rslock", command: vec![own.display().to_string()] },
    ];
    let mut checks = Checks::default();
    for kind in &kinds {
        for notifying in [false, true] {
            Scene::open(kind, notifying).await.play(&mut checks).await;
        }
    }
    println!("{} passed, {} failed", checks.passed, checks.failed);
    if checks.failed == 0 && checks.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[derive(Default)]
struct Checks {
    passed: u32,
    failed: u32,
}

impl Checks {
    fn note(&mut self, who: &str, what: &str, holds: bool, found: &str) {
        if holds {
            self.passed += 1;
            println!("ok      {who}: {what} ({found})");
        } else {
            self.failed += 1;
            println!("FAILED  {who}: {what} ({found})");
        }
    }
}

fn short(outcome: &fencelock::Result<()>) -> String {
    outcome.as_ref().map_or_else(|error| format!("{:?}", error.kind()), |()| "ok".to_owned())
}

/// In which way fencelock asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Exclusive,
    Shared,
    Permit,
}

impl Way {
    const ALL: [Way; 3] = [Way::Exclusive, Way::Shared, Way::Permit];

    async fn take(self, client: &Client) -> fencelock::Result<Guard> {
        match self {
            Way::Exclusive => client.mutex(NAME).ttl(LONG).acquire().await,
            Way::Shared => client.rwlock(NAME).ttl(LONG).read().await,
            Way::Permit => client.semaphore(NAME, 2).ttl(LONG).acquire().await,
        }
    }

    async fn try_take(self, client: &Client) -> fencelock::Result<Option<Guard>> {
        match self {
            Way::Exclusive => client.mutex(NAME).try_acquire().await,
            Way::Shared => client.rwlock(NAME).try_read().await,
            Way::Permit => client.semaphore(NAME, 2).try_acquire().await,
        }
    }
}

/// One foreign client, fencelock and a server of their own.
struct Scene {
    who: String,
    notifying: bool,
    server: RedisServer,
    client: Client,
    foreign: Foreign,
}

impl Scene {
    async fn open(kind: &Kind, notifying: bool) -> Self {
        let options = RedisServer::options();
        let server = if notifying { options.notifying().start() } else { options.start() };
        let client = connect(server.url()).await.expect("the server can be used");
        let foreign = Foreign::start(kind, server.port());
        let who = format!("{}{}", kind.name, if notifying { ", notifications on" } else { "" });
        Self { who, notifying, server, client, foreign }
    }

    async fn play(&mut self, checks: &mut Checks) {
        for way in Way::ALL {
            self.foreign_holds(checks, way).await;
            self.we_hold(checks, way).await;
        }
        self.the_foreign_one_is_late(checks).await;
        self.we_are_late(checks).await;
    }

    fn value(&self) -> Option<String> {
        // Some foreign values are not text.
        let value: Option<Vec<u8>> = self.server.ask(&["GET", NAME]);
        value.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn foreign_holds(&mut self, checks: &mut Checks, way: Way) {
        let answer = self.foreign.lock(NAME, LONG_MS);
        checks.note(&self.who, "locks a free key", answer == "locked", &answer);
        let value = self.value();
        let taken = way.try_take(&self.client).await;
        let busy = matches!(taken, Ok(None));
        checks.note(&self.who, &format!("holds, {way:?} try is busy"), busy, &format!("{taken:?}"));
        let client = self.client.clone();
        let waiter: JoinHandle<_> = tokio::spawn(async move { way.take(&client).await });
        // Long enough for the waiter to have looked and to wait for its next look.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let untouched = self.value() == value && !waiter.is_finished();
        checks.note(&self.who, &format!("holds, {way:?} waits"), untouched, "the key is untouched");
        let extended = self.foreign.extend();
        checks.note(&self.who, "extends while we wait", extended != "lost", &extended);
        let released = self.foreign.unlock();
        let start = Instant::now();
        let limit = if self.notifying { AT_ONCE } else { SOON };
        let outcome = tokio::time::timeout(limit + SOON, waiter).await;
        let waited = start.elapsed();
        let in_time = matches!(&outcome, Ok(Ok(Ok(_)))) && waited <= limit && released == "unlocked";
        checks.note(
            &self.who,
            &format!("releases, {way:?} follows within {limit:?}"),
            in_time,
            &format!("{waited:.1?}"),
        );
        if let Ok(Ok(Ok(guard))) = outcome {
            let released = guard.release().await;
            checks.note(&self.who, "our release", released.is_ok(), &short(&released));
        }
    }

    async fn we_hold(&mut self, checks: &mut Checks, way: Way) {
        let guard = way.take(&self.client).await.expect("it is free");
        let value = self.value();
        for _ in 0..2 {
            let answer = self.foreign.lock(NAME, LONG_MS);
            checks.note(&self.who, &format!("is kept out while we hold, {way:?}"), answer == "busy", &answer);
        }
        checks.note(&self.who, "leaves our key alone", self.value() == value && guard.is_valid(), "unchanged");
        let released = guard.release().await;
        checks.note(&self.who, "we release", released.is_ok() && self.value().is_none(), &short(&released));
        let answer = self.foreign.lock(NAME, LONG_MS);
        checks.note(&self.who, "locks after us", answer == "locked", &answer);
        self.foreign.unlock();
    }

    /// Its lock has expired and is ours when it unlocks and extends.
    async fn the_foreign_one_is_late(&mut self, checks: &mut Checks) {
        let answer = self.foreign.lock(NAME, 300);
        checks.note(&self.who, "locks for a short time", answer == "locked", &answer);
        let guard = Way::Exclusive.take(&self.client).await.expect("it expires");
        let value = self.value();
        let answer = self.foreign.extend();
        checks.note(&self.who, "cannot extend what is ours", answer != "extended" && self.value() == value, &answer);
        let answer = self.foreign.unlock();
        let untouched = self.value() == value && guard.is_valid();
        checks.note(&self.who, "cannot unlock what is ours", untouched, &answer);
        let renewed = guard.reenter().await.map(drop);
        checks.note(&self.who, "we still hold", renewed.is_ok(), &short(&renewed));
        guard.release().await.expect("it is ours");
    }

    /// Our key is gone and theirs is there when we renew and release.
    async fn we_are_late(&mut self, checks: &mut Checks) {
        for way in Way::ALL {
            let guard = way.take(&self.client).await.expect("it is free");
            self.server.run(&["DEL", NAME]);
            let answer = self.foreign.lock(NAME, LONG_MS);
            checks.note(&self.who, "locks after our key was deleted", answer == "locked", &answer);
            let value = self.value();
            let renewed = guard.reenter().await.map(drop);
            let lost = renewed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Lost) && self.value() == value;
            checks.note(&self.who, &format!("we cannot renew what is theirs, {way:?}"), lost, &short(&renewed));
            let released = guard.release().await;
            self.client.settled().await;
            let lost = released.as_ref().is_err_and(|error| error.kind() == ErrorKind::Lost) && self.value() == value;
            checks.note(&self.who, &format!("we cannot release what is theirs, {way:?}"), lost, &short(&released));
            self.foreign.unlock();
        }
    }
}
