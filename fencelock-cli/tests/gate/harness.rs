//! Starts the gate, before a server of the test kit.

use fencelock_testkit::web::{self, Reply, WebServer};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Far more than anything here takes; only a failing test waits for so long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A gate, its upstream, and a directory for its store. Ends with the test, whatever happens.
pub(crate) struct Place {
    pub(crate) upstream: WebServer,
    pub(crate) gate: Gate,
    dir: TempDir,
    arguments: Vec<String>,
}

impl Place {
    pub(crate) fn new(arguments: &[&str]) -> Self {
        let upstream = WebServer::start();
        let dir = tempfile::tempdir().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
        let gate = Gate::start(&upstream.url(), dir.path().join("gate.redb"), &arguments);
        Self { upstream, gate, dir, arguments }
    }

    /// Kills the gate as `kill -9` does, and starts it again on its store.
    pub(crate) fn crash(&mut self) {
        self.gate.kill();
        self.gate = Gate::start(&self.upstream.url(), self.store(), &self.arguments);
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.dir.path().join("gate.redb")
    }

    pub(crate) fn send(&self, method: &str, path: &str, token: Option<&str>, body: &[u8]) -> Reply {
        let headers: Vec<(&str, &str)> = token.iter().map(|token| ("Fencing-Token", *token)).collect();
        web::send(&self.gate.address, method, path, &headers, body).unwrap()
    }

    pub(crate) fn put(&self, path: &str, token: u64, body: &str) -> Reply {
        self.send("PUT", path, Some(&token.to_string()), body.as_bytes())
    }
}

pub(crate) struct Gate {
    child: Child,
    pub(crate) address: String,
    /// What it says after its first line.
    said: mpsc::Receiver<serde_json::Value>,
}

impl Gate {
    pub(crate) fn start(upstream: &str, store: PathBuf, arguments: &[String]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_fencelock"))
            .args(["gate", "--json", "--listen", "127.0.0.1:0", "--upstream", upstream, "--store"])
            .arg(store)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, said) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = tell.send(serde_json::from_str(&line).unwrap());
            }
        });
        let mut gate = Self { child, address: String::new(), said };
        let ready = gate.says("ready");
        gate.address = ready["listen"].as_str().unwrap().to_owned();
        gate
    }

    /// Waits until it tells of an event.
    pub(crate) fn says(&self, event: &str) -> serde_json::Value {
        let end = Instant::now() + DEADLINE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.said.recv_timeout(left).unwrap_or_else(|error| panic!("waited for {event}: {error}"));
            if line["event"] == event {
                return line;
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls for a condition, and fails the test if it does not come true.
pub(crate) fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
