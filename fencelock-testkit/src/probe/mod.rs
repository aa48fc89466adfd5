//! A process of its own that holds locks, so that a check can kill, stop and continue it.
//!
//! The process is the binary `fencelock-probe`; it takes a [`Request`] per line and gives a [`Reply`] per line.

mod binary;
mod serve;

pub use binary::path;
pub use serve::serve;

use fencelock::{Mode, Owner};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;

/// What a probe is asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Connect to an engine.
    Connect {
        /// Its URL.
        url: String,
    },
    /// Acquire a lock.
    Acquire {
        /// Which one.
        name: String,
        /// How.
        mode: Mode,
        /// With which lease.
        ttl: Duration,
        /// Whether to wait in line.
        wait: bool,
        /// As which owner; re-enters if that one holds the lock.
        owner: Option<String>,
    },
    /// Tell about a guard, asking nobody.
    Look {
        /// Its number.
        guard: u64,
    },
    /// Watch a guard all the time; `Look` tells afterwards when it was last seen valid.
    Watch {
        /// Its number.
        guard: u64,
    },
    /// Wait until the lock is lost.
    Lost {
        /// The guard's number.
        guard: u64,
    },
    /// Release a lock.
    Release {
        /// The guard's number.
        guard: u64,
    },
    /// Start a child that inherits whatever children inherit, and lives on.
    Spawn,
    /// End without releasing anything.
    Exit,
}

/// What a probe answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It is done.
    Done,
    /// The lock is held.
    Granted(Granted),
    /// The lock is busy.
    Busy,
    /// What a guard says.
    Look(Look),
    /// The lock is lost, for this reason.
    Lost(String),
    /// A child runs under this process id.
    Child(i32),
    /// It failed.
    Failed {
        /// The kind of the error.
        kind: String,
        /// Its text.
        message: String,
    },
}

/// A hold of a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// The number by which further requests name the guard.
    pub guard: u64,
    /// The fencing token.
    pub token: u64,
    /// The owner id.
    pub owner: String,
    /// Whether it is somebody else's hold, re-entered.
    pub borrowed: bool,
    /// When the grant was seen, in nanoseconds since boot.
    pub at: u64,
}

/// What a guard of a probe says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Whether it is valid.
    pub valid: bool,
    /// Why it was lost, if it was.
    pub loss: Option<String>,
    /// When it was last seen valid, in nanoseconds since boot, if it is being watched.
    pub last_valid: Option<u64>,
}

/// A numbered line in either direction.
#[derive(Debug, Serialize, Deserialize)]
struct Line<T> {
    id: u64,
    body: T,
}

type Pending = Arc<Mutex<HashMap<u64, oneshot::Sender<Reply>>>>;

/// A running probe. It is killed when this is dropped.
#[derive(Debug)]
pub struct Probe {
    child: Child,
    stdin: tokio::sync::Mutex<ChildStdin>,
    pending: Pending,
    next: AtomicU64,
}

impl Probe {
    /// Starts a probe and connects it to the engine.
    ///
    /// # Panics
    /// When it cannot be started or cannot connect.
    pub async fn connect(url: &str) -> Self {
        let probe = Self::start().await;
        let reply = probe.ask(Request::Connect { url: url.to_owned() }).await;
        assert_eq!(reply, Reply::Done, "the probe connects");
        probe
    }

    async fn start() -> Self {
        let mut child = Command::new(path().await)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the probe starts");
        let stdin = child.stdin.take().expect("the probe has an input");
        let stdout = child.stdout.take().expect("the probe has an output");
        let pending = Pending::default();
        tokio::spawn(distribute(stdout, Arc::clone(&pending)));
        Self { child, stdin: tokio::sync::Mutex::new(stdin), pending, next: AtomicU64::new(0) }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Panics
    /// When the probe is gone.
    pub async fn ask(&self, request: Request) -> Reply {
        let answer = self.send(request).await;
        answer.await.expect("the probe lives")
    }

    /// Puts a question into the probe's input, which it may read much later. The answer fails when the probe dies.
    ///
    /// # Panics
    /// When the probe is gone already.
    pub async fn send(&self, request: Request) -> oneshot::Receiver<Reply> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).insert(id, tell);
        let mut line = serde_json::to_vec(&Line { id, body: request }).expect("a request can be written as JSON");
        line.push(b'\n');
        self.stdin.lock().await.write_all(&line).await.expect("the probe listens");
        answer
    }

    /// Waits in line for an exclusive lock.
    ///
    /// # Panics
    /// When the probe fails to get it.
    pub async fn acquire(&self, name: &str, ttl: Duration) -> Granted {
        match self.ask(exclusive(name, ttl, true, None)).await {
            Reply::Granted(granted) => granted,
            other => panic!("the probe did not acquire {name:?}: {other:?}"),
        }
    }

    /// Begins to wait in line for an exclusive lock.
    ///
    /// # Panics
    /// When the probe is gone.
    pub async fn start_acquire(&self, name: &str, ttl: Duration) -> oneshot::Receiver<Reply> {
        self.send(exclusive(name, ttl, true, None)).await
    }

    /// Acquires as this owner, without waiting.
    ///
    /// # Panics
    /// When the probe is gone.
    pub async fn reenter(&self, name: &str, ttl: Duration, owner: Owner) -> Reply {
        self.ask(exclusive(name, ttl, false, Some(owner.to_string()))).await
    }

    /// Releases a lock.
    ///
    /// # Panics
    /// When the probe is gone.
    pub async fn release(&self, granted: &Granted) -> Reply {
        self.ask(Request::Release { guard: granted.guard }).await
    }

    /// What a guard says about itself.
    ///
    /// # Panics
    /// When the probe is gone.
    pub async fn look(&self, granted: &Granted) -> Look {
        match self.ask(Request::Look { guard: granted.guard }).await {
            Reply::Look(look) => look,
            other => panic!("not an answer: {other:?}"),
        }
    }

    /// Ends it on the spot, as `kill -9` does, and waits until it is gone.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub async fn kill(mut self) {
        self.child.kill().await.expect("the probe can be killed");
    }

    /// Waits until it has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    pub async fn ended(mut self) {
        self.child.wait().await.expect("the probe ends");
    }

    /// Stops it where it is: its clock runs, its code does not. Returns when it stands still.
    ///
    /// # Panics
    /// When it cannot be stopped.
    pub async fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.pid());
        let stopped = async || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('T'))
        };
        crate::wait::eventually("the probe stands still", stopped).await;
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// When it cannot be continued.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid()).expect("a process id is not 0");
        kill_process(pid, signal).expect("the probe can be signalled");
    }

    fn pid(&self) -> i32 {
        let id = self.child.id().expect("the probe has not been waited for");
        i32::try_from(id).expect("a process id is small")
    }
}

fn exclusive(name: &str, ttl: Duration, wait: bool, owner: Option<String>) -> Request {
    Request::Acquire { name: name.to_owned(), mode: Mode::Exclusive, ttl, wait, owner }
}

/// Carries answers to those who asked. When the probe dies, all who still wait learn it.
async fn distribute(stdout: ChildStdout, pending: Pending) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let line: Line<Reply> = serde_json::from_str(&line).expect("the probe answers in JSON");
        if let Some(tell) = pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&line.id) {
            let _ = tell.send(line.body);
        }
    }
    pending.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
