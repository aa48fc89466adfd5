//! A master with two replicas, and three Sentinels that watch over it.

use super::{PATIENCE, RedisOptions, RedisServer};
use crate::Subject;
use std::ops::Deref;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What the Sentinels call the master.
pub const MASTER: &str = "locks";

/// Three servers, one of which is the master, and three Sentinels. All are killed when this is dropped.
#[derive(Debug)]
pub struct RedisSentinels {
    /// The servers; the first one is the master at the beginning.
    pub servers: Vec<RedisServer>,
    /// Those who watch.
    pub sentinels: Vec<RedisServer>,
}

impl RedisSentinels {
    /// Starts all six, and waits until they know each other.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start() -> Self {
        Self::with_passwords(None)
    }

    /// The same with a password for the servers and another one for the Sentinels.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn with_passwords(passwords: Option<(&str, &str)>) -> Self {
        let server = |master: Option<u16>| {
            let mut options = RedisOptions::default().set("databases", "1000").set("repl-diskless-sync-delay", "0");
            if let Some((password, _)) = passwords {
                options = options.password(password).set("masterauth", password);
            }
            if let Some(port) = master {
                options = options.set("replicaof", format!("127.0.0.1 {port}"));
            }
            options.start()
        };
        let master = server(None);
        let port = master.port();
        let servers = vec![master, server(Some(port)), server(Some(port))];
        let sentinel = || {
            let mut options = RedisOptions::default()
                .sentinel()
                .set("sentinel", format!("monitor {MASTER} 127.0.0.1 {port} 2"))
                .set("sentinel", format!("down-after-milliseconds {MASTER} 700"))
                .set("sentinel", format!("failover-timeout {MASTER} 3000"));
            if let Some((password, own)) = passwords {
                options = options.set("sentinel", format!("auth-pass {MASTER} {password}")).password(own);
                options = options.set("sentinel", format!("sentinel-pass {own}"));
            }
            options.start()
        };
        let sentinels = vec![sentinel(), sentinel(), sentinel()];
        let all = Self { servers, sentinels };
        all.until("all know each other", || all.sentinels.iter().all(knows_all));
        all
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < until, "waited in vain: {what}; {}", self.sentinels[0].log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where clients connect to, with these options.
    pub fn url(&self, options: &str) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("redis+sentinel://{}/{MASTER}{options}", hosts.join(","))
    }

    /// Another Sentinel, which takes this server for the master and knows nobody else, if the server is down: as one that was cut
    /// off before a switch.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn cut_off_sentinel(&self, master: usize) -> RedisServer {
        let port = self.servers[master].port();
        RedisOptions::default().sentinel().set("sentinel", format!("monitor {MASTER} 127.0.0.1 {port} 2")).start()
    }

    /// The one that the Sentinels name as the master at the moment.
    ///
    /// # Panics
    /// When no Sentinel answers.
    pub fn master(&self) -> usize {
        let ask = |sentinel: &RedisServer| {
            sentinel.try_ask::<(String, u16)>(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).ok()
        };
        let (_, port) = self.sentinels.iter().find_map(ask).expect("a Sentinel answers");
        self.servers.iter().position(|server| server.port() == port).expect("it is one of them")
    }

    /// Waits until another one than `old` is the master, and says which.
    ///
    /// # Panics
    /// When that does not happen.
    pub fn until_failover(&self, old: usize) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            let new = self.master();
            let serves = |server: &RedisServer| {
                server.program.is_some()
                    && server.try_ask::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("role:master"))
            };
            if new != old && serves(&self.servers[new]) {
                return new;
            }
            assert!(Instant::now() < until, "no failover: {}", self.sentinels[0].log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn knows_all(sentinel: &RedisServer) -> bool {
    let state = sentinel.try_ask::<Vec<String>>(&["SENTINEL", "MASTER", MASTER]).unwrap_or_default();
    let number = |name: &str| state.iter().position(|word| word == name).and_then(|at| state.get(at + 1)).cloned();
    let replicas = sentinel.try_ask::<Vec<Vec<String>>>(&["SENTINEL", "REPLICAS", MASTER]).unwrap_or_default();
    let linked = replicas.iter().filter(|replica| replica.windows(2).any(|pair| pair == ["master-link-status", "ok"]));
    number("num-slaves").as_deref() == Some("2")
        && number("num-other-sentinels").as_deref() == Some("2")
        && number("flags").as_deref() == Some("master")
        && linked.count() == 2
}

/// One set of servers for all checks of a test program; each check has a database of its own.
static SHARED: LazyLock<RedisSentinels> = LazyLock::new(RedisSentinels::start);

/// An empty database of a watched master as the subject of a conformance check.
#[derive(Debug)]
pub struct SentinelSubject(Subject);

impl SentinelSubject {
    /// A database that nobody has used.
    ///
    /// # Panics
    /// When the servers cannot be started.
    #[expect(clippy::new_without_default, reason = "starting servers is no default")]
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self(Subject::at(SHARED.url(&format!("/{}", NEXT.fetch_add(1, Ordering::Relaxed)))))
    }
}

impl Deref for SentinelSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.0
    }
}
