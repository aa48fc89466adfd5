//! Several Redis servers that know nothing of each other, for Redlock.

use crate::Subject;
use crate::redis::{RedisOptions, RedisServer};
use fencelock::{Client, connect};
use std::ops::Deref;
use std::time::{Duration, Instant};

/// Independent servers. They end when this is dropped.
#[derive(Debug)]
pub struct Nodes {
    /// The servers, in the order of the URL.
    pub servers: Vec<RedisServer>,
}

impl Nodes {
    /// So many servers as they come.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start(count: usize) -> Self {
        Self::start_with(count, &RedisServer::options())
    }

    /// So many servers with these options.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start_with(count: usize, options: &RedisOptions) -> Self {
        Self { servers: (0..count).map(|_| options.clone().start()).collect() }
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        url(&self.servers.iter().map(RedisServer::port).collect::<Vec<_>>())
    }

    /// The servers' own URLs, for other libraries.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(RedisServer::url).collect()
    }

    /// A client of its own, as another program would have it.
    ///
    /// # Panics
    /// When the servers cannot be used.
    pub async fn client(&self) -> Client {
        connect(self.url()).await.expect("the servers can be used")
    }

    /// On how many nodes this key is there.
    ///
    /// # Panics
    /// When a server does not answer.
    pub fn holding(&self, key: &str) -> usize {
        self.servers.iter().filter(|server| server.ask::<u64>(&["EXISTS", key]) == 1).count()
    }

    /// Lets a majority have accepted this token.
    ///
    /// # Panics
    /// When a server does not answer.
    pub fn note_token(&self, name: &str, token: u64) {
        let record = value(token, "A");
        for server in &self.servers[..=self.servers.len() / 2] {
            let since: String = server.ask::<Option<String>>(&["HGET", TOKENS, ""]).unwrap_or("0".repeat(16));
            server.run(&["HSET", TOKENS, "", &format!("{}{record}", &since[..16]), name, &record]);
        }
    }

    /// Lets the notes of all nodes be old.
    ///
    /// # Panics
    /// When a server does not answer.
    pub fn age(&self) {
        for server in &self.servers {
            if let Some(head) = server.ask::<Option<String>>(&["HGET", TOKENS, ""]) {
                server.run(&["HSET", TOKENS, "", &format!("{}{}", "0".repeat(16), &head[16..])]);
            }
        }
    }
}

/// Where a node notes what it accepted.
pub const TOKENS: &str = "fencelock:redlock:tokens";

/// What a node notes of an owner.
pub const NOTE: &str = "\nthe-session\nlabel";

/// A proposal, as nodes know it; the owner is this letter.
pub fn who(token: u64, owner: &str) -> String {
    format!("{token:016}:{}", owner.repeat(22))
}

/// What is under a lock's name while this proposal holds.
pub fn value(token: u64, owner: &str) -> String {
    format!("{}{NOTE}", who(token, owner))
}

/// The URL of Redlock over servers (or proxies) on these ports of the loopback.
pub fn url(ports: &[u16]) -> String {
    let nodes: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redlock://{}", nodes.join(","))
}

/// Five servers of their own as the subject of a conformance check.
#[derive(Debug)]
pub struct RedlockSubject {
    subject: Subject,
    nodes: Nodes,
}

impl RedlockSubject {
    /// Five empty servers.
    ///
    /// # Panics
    /// When they cannot be started.
    #[expect(clippy::new_without_default, reason = "starting servers is no default")]
    pub fn new() -> Self {
        let nodes = Nodes::start(5);
        Self { subject: Subject::at(nodes.url()), nodes }
    }
}

impl Deref for RedlockSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}

impl Drop for RedlockSubject {
    /// Clients that are about to end may say good-bye: without servers, that would take them seconds.
    fn drop(&mut self) {
        let until = Instant::now() + Duration::from_millis(500);
        let alone = |server: &RedisServer| server.ask::<String>(&["INFO", "clients"]).contains("connected_clients:1\r");
        while Instant::now() < until && !self.nodes.servers.iter().all(alone) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
