//! fencelock and Curator's recipes (Java) on the same path: they exclude each other in both directions, and take turns in the order
//! of their arrival.
//!
//! `cargo xtask interop` brings Curator and runs this; `FENCELOCK_CURATOR` is the directory with its jars.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "zookeeper")]

use fencelock::{Client, Guard, connect};
use fencelock_testkit::wait::{at_once, eventually, line, until_line};
use fencelock_testkit::zookeeper::ZooKeeper;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const NAME: &str = "invoice:42";
const PATH: &str = "/locks/invoice:42";
const LONG: Duration = Duration::from_secs(60);

/// A Java process with a client of Curator. It is killed when this is dropped.
struct Curator {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Curator {
    fn start(server: &ZooKeeper) -> Self {
        let jars = std::env::var("FENCELOCK_CURATOR").expect("FENCELOCK_CURATOR is the directory with Curator's jars");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../interop/curator/CuratorClient.java");
        let mut child = Command::new("java")
            .args(["-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", &format!("{jars}/*")])
            .arg(source)
            .arg(server.hosts())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("java is installed");
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    fn ask(&mut self, question: &str) -> String {
        let mut answer = String::new();
        writeln!(self.input, "{question}").expect("the Java process lives");
        self.output.read_line(&mut answer).expect("the Java process answers");
        answer.trim_end().to_owned()
    }

    /// Without waiting.
    fn lock(&mut self, recipe: &str) -> bool {
        match self.ask(&format!("lock {recipe} {PATH}")).as_str() {
            "locked" => true,
            "busy" => false,
            other => panic!("Curator answers {other:?}"),
        }
    }

    fn wait(&mut self, recipe: &str) {
        assert_eq!(self.ask(&format!("wait {recipe} {PATH}")), "waiting");
    }

    fn holds(&mut self) -> bool {
        self.ask("state") == "held"
    }

    fn unlock(&mut self) {
        assert_eq!(self.ask("unlock"), "unlocked");
    }
}

impl Drop for Curator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How fencelock asks, and what that is called at Curator.
#[derive(Debug, Clone, Copy)]
enum Way {
    Mutex,
    Read,
    Write,
}

impl Way {
    async fn attempt(self, client: &Client) -> Option<Guard> {
        match self {
            Way::Mutex => client.mutex(NAME).ttl(LONG).try_acquire().await.unwrap(),
            Way::Read => client.rwlock(NAME).ttl(LONG).try_read().await.unwrap(),
            Way::Write => client.rwlock(NAME).ttl(LONG).try_write().await.unwrap(),
        }
    }

    async fn acquire(self, client: &Client) -> Guard {
        match self {
            Way::Mutex => client.mutex(NAME).ttl(LONG).acquire().await.unwrap(),
            Way::Read => client.rwlock(NAME).ttl(LONG).read().await.unwrap(),
            Way::Write => client.rwlock(NAME).ttl(LONG).write().await.unwrap(),
        }
    }

    fn recipe(self) -> &'static str {
        match self {
            Way::Mutex => "mutex",
            Way::Read => "read",
            Way::Write => "write",
        }
    }
}

/// Those who share a path use the same recipe: the mutex, or readers and writers.
const PAIRS: [(Way, Way); 5] = [
    (Way::Mutex, Way::Mutex),
    (Way::Write, Way::Write),
    (Way::Write, Way::Read),
    (Way::Read, Way::Write),
    (Way::Read, Way::Read),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Curator: cargo xtask interop"]
async fn curator_and_fencelock_exclude_each_other() {
    let server = ZooKeeper::start();
    let client = connect(server.url_below("/locks")).await.unwrap();
    let (mut one, mut two) = (Curator::start(&server), Curator::start(&server));
    for (ours, theirs) in PAIRS {
        let told = format!("fencelock {ours:?}, Curator {theirs:?}");
        let share = matches!((ours, theirs), (Way::Read, Way::Read));
        println!("{told}");

        // Ours first.
        let guard = ours.acquire(&client).await;
        assert_eq!(one.lock(theirs.recipe()), share, "{told}: ours first");
        if share {
            one.unlock();
        }
        guard.release().await.unwrap();
        assert!(one.lock(theirs.recipe()), "{told}: ours was released");

        // Theirs first.
        let status = client.status(NAME).await.unwrap();
        assert_eq!(status.holders.len(), 1, "{told}: {status:?}");
        let attempt = ours.attempt(&client).await;
        assert_eq!(attempt.is_some(), share, "{told}: theirs first");
        drop(attempt);
        client.settled().await;
        one.unlock();
        let guard = ours.attempt(&client).await.unwrap_or_else(|| panic!("{told}: theirs was released"));
        guard.release().await.unwrap();
        if share {
            continue;
        }

        // They wait for ours.
        let guard = ours.acquire(&client).await;
        one.wait(theirs.recipe());
        until_line(&client, NAME, 1, 1).await;
        assert!(!one.holds(), "{told}");
        guard.release().await.unwrap();
        eventually("Curator's turn", async || one.holds()).await;

        // We wait for theirs, and somebody else of theirs waits behind us.
        let waiter = tokio::spawn({
            let client = client.clone();
            async move { ours.acquire(&client).await }
        });
        until_line(&client, NAME, 1, 1).await;
        two.wait(if matches!(ours, Way::Mutex) { "mutex" } else { "write" });
        until_line(&client, NAME, 1, 2).await;
        one.unlock();
        let guard = at_once("our turn", waiter).await.unwrap();
        assert!(guard.is_valid() && !two.holds(), "{told}: out of order");
        guard.release().await.unwrap();
        eventually("then theirs", async || two.holds()).await;
        two.unlock();
        assert_eq!(line(&client, NAME).await, (0, 0), "{told}");
    }
    client.close().await.unwrap();
}
