//! Real Redis servers for tests: each on a port of its own, in a directory of its own, gone with the test.

pub mod certificate;
pub(crate) mod child;
mod cluster;
mod sentinel;

pub use cluster::{ClusterSubject, RedisCluster};
pub use sentinel::{MASTER, RedisSentinels, SentinelSubject};

use crate::Subject;
use ::redis::FromRedisValue;
use child::Program;
use fencelock::{Client, connect};
use rustix::process::Signal;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a server may take to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A port of the loopback that nobody uses.
///
/// It is not one of those that the system gives to outgoing connections: while a server is down, a client that tries to
/// reach it could otherwise be connected to itself.
///
/// # Panics
/// When there is none.
pub fn free_port() -> u16 {
    const FIRST: u16 = 12_000;
    const COUNT: u16 = 20_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Processes that start one after the other look in different places.
    let start = u16::try_from(std::process::id().wrapping_mul(2_654_435_761) >> 16).expect("16 bits are left");
    for _ in 0..COUNT {
        let step = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + step % COUNT;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

/// How a server is to be configured; [`start`](RedisOptions::start) starts it.
#[derive(Debug, Clone, Default)]
pub struct RedisOptions {
    settings: Vec<(String, String)>,
    password: Option<String>,
    tls: bool,
    unix_socket: bool,
    sentinel: bool,
    in_cluster: bool,
}

impl RedisOptions {
    /// A line of the configuration file.
    #[must_use]
    pub fn set(mut self, setting: &str, value: impl Into<String>) -> Self {
        self.settings.push((setting.to_owned(), value.into()));
        self
    }

    /// The default user's password.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// A user with these rights, in the words of `ACL SETUSER`.
    #[must_use]
    pub fn user(self, name: &str, rights: &str) -> Self {
        self.set("user", format!("{name} on {rights}"))
    }

    /// Keeps its data over a restart, and over a kill.
    #[must_use]
    pub fn durable(self) -> Self {
        self.set("appendonly", "yes").set("appendfsync", "always")
    }

    /// Tells of keys that are deleted or expire.
    #[must_use]
    pub fn notifying(self) -> Self {
        self.set("notify-keyspace-events", "Kgx")
    }

    /// Listens on a socket of the file system as well; see [`RedisServer::unix_url`].
    #[must_use]
    pub fn unix_socket(mut self) -> Self {
        self.unix_socket = true;
        self
    }

    /// Listens with TLS as well; see [`RedisServer::tls_url`].
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// It watches over others.
    #[must_use]
    pub(super) fn sentinel(mut self) -> Self {
        self.sentinel = true;
        self
    }

    /// It talks to the other nodes of a cluster on a port of its own.
    #[must_use]
    pub(super) fn cluster_port(mut self) -> Self {
        self.in_cluster = true;
        self
    }

    /// Starts the server, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(self) -> RedisServer {
        // Somebody else may take the port between our looking and the server's binding it.
        for _ in 0..5 {
            let mut server = RedisServer::prepare(&self);
            server.launch();
            if server.answers() {
                return server;
            }
        }
        panic!("redis-server does not start");
    }

    fn configuration(&self, dir: &Path, port: u16, tls_port: u16, bus_port: u16) -> String {
        let mut text = format!("bind 127.0.0.1\nport {port}\ndir {}\n", dir.display());
        text.push_str("logfile server.log\n");
        if !self.sentinel {
            text.push_str("save \"\"\n");
        }
        if self.in_cluster {
            let _ = writeln!(text, "cluster-port {bus_port}");
        }
        if self.tls {
            let _ = writeln!(text, "tls-port {tls_port}\ntls-auth-clients no\ntls-ca-cert-file ca.pem");
            let _ = writeln!(text, "tls-cert-file server.pem\ntls-key-file server.key");
        }
        if self.unix_socket {
            text.push_str("unixsocket server.sock\n");
        }
        if let Some(password) = &self.password {
            let _ = writeln!(text, "requirepass {password}");
        }
        for (setting, value) in &self.settings {
            let _ = writeln!(text, "{setting} {value}");
        }
        text
    }
}

/// A running `redis-server`. It is killed when this is dropped, and when the test process ends in whatever way.
#[derive(Debug)]
pub struct RedisServer {
    program: Option<Program>,
    port: u16,
    tls_port: u16,
    bus_port: u16,
    sentinel: bool,
    password: Option<String>,
    dir: TempDir,
}

/// The crate tells the kind of an input/output error only in its text.
fn is_interruption(error: &::redis::RedisError) -> bool {
    error.is_io_error()
        && error.to_string().contains(&io::Error::from_raw_os_error(rustix::io::Errno::INTR.raw_os_error()).to_string())
}

impl RedisServer {
    /// A server as it comes: no password, no persistence.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start() -> Self {
        Self::options().start()
    }

    /// A server that is not as it comes.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    fn prepare(options: &RedisOptions) -> Self {
        let dir = tempfile::Builder::new().prefix("fencelock-redis-").tempdir().expect("a directory for the server");
        let (port, tls_port) = (free_port(), if options.tls { free_port() } else { 0 });
        if options.tls {
            certificate::write(dir.path());
        }
        let bus_port = if options.in_cluster { free_port() } else { 0 };
        let text = options.configuration(dir.path(), port, tls_port, bus_port);
        std::fs::write(dir.path().join("redis.conf"), text).expect("the configuration can be written");
        let (sentinel, password) = (options.sentinel, options.password.clone());
        Self { program: None, port, tls_port, bus_port, sentinel, password, dir }
    }

    /// `FENCELOCK_REDIS_SERVER` names another program than the `redis-server` of the path: an older version, say.
    fn launch(&mut self) {
        let program = std::env::var("FENCELOCK_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let configuration = self.file("redis.conf");
        let configuration = configuration.to_str().expect("the directory has a plain name");
        let arguments = if self.sentinel { vec![configuration, "--sentinel"] } else { vec![configuration] };
        self.program = match Program::start(&program, &arguments) {
            Ok(program) => Some(program),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                panic!("{program} is not installed; `cargo xtask test` installs what the tests need")
            }
            Err(error) => panic!("{program} cannot be started: {error}"),
        };
    }

    /// Waits until the server serves. False when it has ended: somebody else has the port.
    fn answers(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            // It answers this also while it reads its data; a Sentinel has none.
            if let Ok(info) = self.try_ask::<String>(&["INFO"]) {
                let own = format!("process_id:{}\r", self.program().id());
                if info.contains(&own) && !info.contains("\nloading:1\r") {
                    return true;
                }
            }
            if self.program.as_mut().is_some_and(|program| program.ended().is_some()) {
                return false;
            }
            assert!(Instant::now() < until, "redis-server does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn program(&self) -> &Program {
        self.program.as_ref().expect("the server runs")
    }

    /// What the server wrote to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("server.log")).unwrap_or_default()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The port of its plain connections.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port on which it talks to other nodes of a cluster.
    pub(super) fn bus_port(&self) -> u16 {
        self.bus_port
    }

    /// Where clients connect to; without a password.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Where clients connect to as this user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}", self.port)
    }

    /// Where clients connect to with TLS.
    pub fn tls_url(&self) -> String {
        format!("rediss://127.0.0.1:{}?ca={}", self.tls_port, self.file("ca.pem").display())
    }

    /// Where clients connect to over the socket of the file system.
    pub fn unix_url(&self) -> String {
        format!("redis+unix://{}", self.file("server.sock").display())
    }

    /// A client of its own, as another program would have it.
    ///
    /// # Panics
    /// When the server does not let it in.
    pub async fn client(&self) -> Client {
        connect(self.url()).await.expect("the server can be used")
    }

    /// Sends a command as the default user, and returns the answer.
    ///
    /// # Panics
    /// When the server does not answer, or with an error.
    pub fn ask<T: FromRedisValue>(&self, command: &[&str]) -> T {
        self.try_ask(command).unwrap_or_else(|error| panic!("{}: {error}", command.join(" ")))
    }

    /// Sends a command whose answer does not matter.
    ///
    /// # Panics
    /// As [`ask`](RedisServer::ask).
    pub fn run(&self, command: &[&str]) {
        let _: ::redis::Value = self.ask(command);
    }

    /// The same, where an answer cannot be counted on.
    ///
    /// # Errors
    /// What went wrong.
    ///
    /// # Panics
    /// When the command is empty.
    pub fn try_ask<T: FromRedisValue>(&self, command: &[&str]) -> ::redis::RedisResult<T> {
        loop {
            match self.ask_once(command) {
                // A signal, as a rule of a child that stopped or ended; a socket with a timeout does not go on by itself.
                Err(error) if is_interruption(&error) => {}
                outcome => return outcome,
            }
        }
    }

    fn ask_once<T: FromRedisValue>(&self, command: &[&str]) -> ::redis::RedisResult<T> {
        let credentials = self.password.as_ref().map_or_else(String::new, |password| format!(":{password}@"));
        let client = ::redis::Client::open(format!("redis://{credentials}127.0.0.1:{}", self.port))?;
        let mut connection = client.get_connection_with_timeout(Duration::from_secs(5))?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let (name, arguments) = command.split_first().expect("a command has a name");
        ::redis::cmd(name).arg(arguments).query(&mut connection)
    }

    /// Sends these bytes on a connection of its own, and waits until the server has answered something.
    ///
    /// # Panics
    /// When the server does not answer.
    pub fn send_raw(&self, bytes: &[u8]) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream.write_all(bytes).expect("the server reads");
        assert!(stream.read(&mut [0; 1024]).expect("the server answers") > 0, "the server answers");
    }

    /// How often these commands were carried out so far, in scripts and outside of them; all commands when none is named.
    ///
    /// # Panics
    /// As [`ask`](RedisServer::ask).
    pub fn calls(&self, commands: &[&str]) -> u64 {
        let statistics: String = self.ask(&["INFO", "commandstats"]);
        let count = |line: &str| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let counts = commands.is_empty() || commands.contains(&name);
            counts.then(|| rest.split(',').next()?.parse::<u64>().ok())?
        };
        statistics.lines().filter_map(count).sum()
    }

    /// All keys with their times to live in milliseconds; -1 for a key that stays for ever.
    ///
    /// # Panics
    /// As [`ask`](RedisServer::ask).
    pub fn keys(&self) -> Vec<(String, i64)> {
        let keys: Vec<String> = self.ask(&["KEYS", "*"]);
        let with_life = |key: String| {
            let life = self.ask(&["PTTL", &key]);
            (key, life)
        };
        keys.into_iter().map(with_life).filter(|(_, life)| *life != -2).collect()
    }

    /// Ends it on the spot, as `kill -9` does.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        drop(self.program.take().expect("the server runs"));
    }

    /// Lets it end in an orderly way.
    ///
    /// # Panics
    /// When it does not run.
    pub fn shut_down(&mut self) {
        let program = self.program.take().expect("the server runs");
        program.signal(Signal::TERM);
        program.wait();
    }

    /// Stops it where it is: connections stay open, nothing is answered.
    ///
    /// # Panics
    /// When it does not run.
    pub fn freeze(&self) {
        self.program().signal(Signal::STOP);
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn thaw(&self) {
        self.program().signal(Signal::CONT);
    }

    /// Starts it again on the same port, with the data that it kept, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_again(&mut self) {
        self.begin_again(&[]);
        assert!(self.answers(), "redis-server does not start again: {}", self.log());
    }

    /// Starts it again with further settings, and does not wait until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn begin_again(&mut self, settings: &[(&str, &str)]) {
        let path = self.file("redis.conf");
        let mut text = std::fs::read_to_string(&path).expect("the configuration can be read");
        for (setting, value) in settings {
            let _ = writeln!(text, "{setting} {value}");
        }
        std::fs::write(&path, text).expect("the configuration can be written");
        self.launch();
    }
}

/// The replicas of this server, which has no password, get nothing from now on, for as long as it lives. Clients that are connected
/// stay so; nobody else can connect.
///
/// # Panics
/// When the server does not answer.
pub fn deafen_replicas(master: &RedisServer) {
    let replicas: String = master.ask(&["CLIENT", "LIST", "TYPE", "REPLICA"]);
    let client = ::redis::Client::open(format!("redis://:changed@127.0.0.1:{}", master.port())).expect("a URL");
    // They cannot come back: they do not know the new password.
    master.run(&["CONFIG", "SET", "requirepass", "changed"]);
    let mut connection = client.get_connection_with_timeout(PATIENCE).expect("the password is right");
    for replica in replicas.lines() {
        let id = replica.split([' ', '=']).nth(1).expect("it has an id");
        let _ = ::redis::cmd("CLIENT").arg("KILL").arg("ID").arg(id).exec(&mut connection);
    }
}

/// A master and a replica that nobody watches over.
#[derive(Debug)]
pub struct RedisPair {
    /// At first.
    pub master: RedisServer,
    /// At first.
    pub replica: RedisServer,
}

impl RedisPair {
    /// Starts both, and waits until the one follows the other.
    pub async fn start() -> Self {
        let master = RedisServer::options().set("repl-diskless-sync-delay", "0").start();
        let replica = RedisServer::options().set("repl-diskless-sync-delay", "0").start();
        let pair = Self { master, replica };
        pair.replica.follow(&pair.master).await;
        pair
    }

    /// The master dies, and the replica is promoted.
    pub fn fail_over(&mut self) {
        self.master.kill();
        self.replica.promote();
    }
}

impl RedisServer {
    /// Becomes a replica of another server, and waits until it follows.
    pub async fn follow(&self, master: &RedisServer) {
        self.run(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
        let linked = || self.ask::<String>(&["INFO", "replication"]).contains("master_link_status:up");
        crate::wait::eventually("the replica follows", async || linked()).await;
    }

    /// Waits until it has all that was written to the server that it follows.
    pub async fn catch_up_with(&self, master: &RedisServer) {
        let offset = |server: &RedisServer, what: &str| {
            let info = server.ask::<String>(&["INFO", "replication"]);
            info.lines().find_map(|line| line.strip_prefix(what)).and_then(|text| text.trim().parse::<u64>().ok())
        };
        crate::wait::eventually("the replica has it", async || {
            offset(self, "slave_repl_offset:") >= offset(master, "master_repl_offset:")
        })
        .await;
    }

    /// Becomes a master.
    pub fn promote(&self) {
        self.run(&["REPLICAOF", "NO", "ONE"]);
    }
}

/// A server of its own as the subject of a conformance check.
#[derive(Debug)]
pub struct RedisSubject {
    subject: Subject,
    server: RedisServer,
}

impl RedisSubject {
    /// An empty server.
    ///
    /// # Panics
    /// When it cannot be started.
    #[expect(clippy::new_without_default, reason = "starting a server is no default")]
    pub fn new() -> Self {
        let server = RedisServer::start();
        Self { subject: Subject::at(server.url()), server }
    }
}

impl Deref for RedisSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}

impl Drop for RedisSubject {
    /// Clients that are about to end may say good-bye: without a server, that would take them seconds.
    fn drop(&mut self) {
        let until = Instant::now() + Duration::from_millis(500);
        let alone = |info: String| info.contains("connected_clients:1\r");
        while Instant::now() < until && !self.server.try_ask(&["INFO", "clients"]).is_ok_and(alone) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
