//! Real ZooKeeper servers for tests: one or several that form an ensemble, each on ports of its own, in a directory of its own,
//! gone with the test. They can be killed, stopped, continued and started again.

use crate::Subject;
use crate::redis::certificate;
use crate::redis::child::Program;
use crate::redis::free_port;
use fencelock::{Client, connect};
use rustix::process::Signal;
use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long servers may take to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The class that runs a server, alone or in an ensemble.
const MAIN: &str = "org.apache.zookeeper.server.quorum.QuorumPeerMain";

/// How servers are to be configured; [`start`](ZooKeeperOptions::start) starts them.
#[derive(Debug, Clone)]
pub struct ZooKeeperOptions {
    nodes: usize,
    tls: bool,
    settings: Vec<(String, String)>,
    properties: Vec<String>,
}

impl ZooKeeperOptions {
    /// How many servers form the ensemble.
    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Serves TLS too, with a certificate for 127.0.0.1.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// A line of the configuration file.
    #[must_use]
    pub fn set(mut self, setting: &str, value: impl Into<String>) -> Self {
        self.settings.push((setting.to_owned(), value.into()));
        self
    }

    /// A system property of the server's Java machine.
    #[must_use]
    pub fn property(mut self, name: &str, value: &str) -> Self {
        self.properties.push(format!("-D{name}={value}"));
        self
    }

    /// Starts them and waits until they serve.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start(self) -> ZooKeeper {
        // A port that was free may be taken by somebody else before the server has it.
        for _ in 0..5 {
            let mut ensemble = ZooKeeper::prepare(&self);
            for node in &mut ensemble.nodes {
                node.launch();
            }
            if ensemble.nodes.iter_mut().all(Node::serves) {
                return ensemble;
            }
        }
        panic!("the ZooKeeper servers do not start");
    }

    fn configuration(&self, dir: &Path, ports: Ports, peers: &[Ports]) -> String {
        let mut text = format!("dataDir={}\nclientPort={}\n", dir.join("data").display(), ports.client);
        // Short ticks allow for short sessions. Sessions may also be as long as the longest lease of a test.
        text.push_str("clientPortAddress=127.0.0.1\ntickTime=100\ninitLimit=200\nsyncLimit=20\nmaxClientCnxns=0\n");
        text.push_str("maxSessionTimeout=600000\nadmin.enableServer=false\n4lw.commands.whitelist=*\n");
        if self.tls {
            let _ = writeln!(text, "secureClientPort={}\nsecureClientPortAddress=127.0.0.1", ports.secure);
            text.push_str("serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n");
            let _ = writeln!(text, "ssl.keyStore.location={}", dir.join("identity.pem").display());
            let _ = writeln!(text, "ssl.keyStore.type=PEM\nssl.trustStore.type=PEM");
            let _ = writeln!(text, "ssl.trustStore.location={}\nssl.clientAuth=want", dir.join("ca.pem").display());
        }
        if peers.len() > 1 {
            for (index, peer) in peers.iter().enumerate() {
                let _ = writeln!(text, "server.{}=127.0.0.1:{}:{}", index + 1, peer.quorum, peer.election);
            }
        }
        for (setting, value) in &self.settings {
            let _ = writeln!(text, "{setting}={value}");
        }
        text
    }
}

#[derive(Debug, Clone, Copy)]
struct Ports {
    client: u16,
    secure: u16,
    quorum: u16,
    election: u16,
}

impl Ports {
    fn free() -> Self {
        Self { client: free_port(), secure: free_port(), quorum: free_port(), election: free_port() }
    }
}

/// Running ZooKeeper servers. They are killed when this is dropped, and when the test process ends in whatever way.
#[derive(Debug)]
pub struct ZooKeeper {
    nodes: Vec<Node>,
    dir: TempDir,
}

impl ZooKeeper {
    /// One server.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start() -> Self {
        Self::options().start()
    }

    /// An ensemble of three.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn three() -> Self {
        Self::options().nodes(3).start()
    }

    /// Servers that are not as they come.
    pub fn options() -> ZooKeeperOptions {
        ZooKeeperOptions { nodes: 1, tls: false, settings: Vec::new(), properties: Vec::new() }
    }

    /// One server, shared by all who ask for one while somebody has it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn shared(nodes: usize) -> Arc<Self> {
        static SHARED: Mutex<[Weak<ZooKeeper>; 4]> = Mutex::new([const { Weak::new() }; 4]);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut shared[nodes];
        slot.upgrade().unwrap_or_else(|| {
            let fresh = Arc::new(Self::options().nodes(nodes).start());
            *slot = Arc::downgrade(&fresh);
            fresh
        })
    }

    fn prepare(options: &ZooKeeperOptions) -> Self {
        let dir =
            tempfile::Builder::new().prefix("fencelock-zookeeper-").tempdir().expect("a directory for the servers");
        let ports: Vec<Ports> = (0..options.nodes).map(|_| Ports::free()).collect();
        let node = |(index, own): (usize, &Ports)| {
            let dir = dir.path().join(format!("node-{}", index + 1));
            std::fs::create_dir_all(dir.join("data")).expect("a directory for the server");
            if options.tls {
                certificate::write(&dir);
                let read = |file: &str| std::fs::read_to_string(dir.join(file)).expect("it was written");
                let identity = read("server.key") + &read("server.pem");
                std::fs::write(dir.join("identity.pem"), identity).expect("the directory can be written to");
            }
            std::fs::write(dir.join("data/myid"), (index + 1).to_string()).expect("the directory can be written to");
            let text = options.configuration(&dir, *own, &ports);
            std::fs::write(dir.join("zoo.cfg"), text).expect("the configuration can be written");
            Node { program: None, ports: *own, dir, properties: options.properties.clone() }
        };
        let nodes = ports.iter().enumerate().map(node).collect();
        Self { nodes, dir }
    }

    /// The servers, in the order of their numbers.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One of them, to be killed or started.
    pub fn node(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// Which one leads at present.
    ///
    /// # Panics
    /// When none does for long.
    pub fn leader(&self) -> usize {
        self.with_mode(|mode| mode == "leader" || mode == "standalone")
    }

    /// One that follows at present.
    ///
    /// # Panics
    /// When none does for long.
    pub fn follower(&self) -> usize {
        self.with_mode(|mode| mode == "follower")
    }

    fn with_mode(&self, wanted: impl Fn(&str) -> bool) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            let found = self.nodes.iter().position(|node| node.mode().is_some_and(|mode| wanted(&mode)));
            if let Some(index) = found {
                return index;
            }
            assert!(Instant::now() < until, "no server has that role: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What the servers wrote to their logs.
    pub fn log(&self) -> String {
        self.nodes.iter().map(Node::log).collect()
    }

    /// The addresses of all servers, as a connect string has them.
    pub fn hosts(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.ports.client)).collect();
        hosts.join(",")
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        format!("zk://{}", self.hosts())
    }

    /// Where clients connect to that have this path for themselves.
    pub fn url_below(&self, path: &str) -> String {
        format!("zk://{}{path}", self.hosts())
    }

    /// Where clients connect to with TLS.
    pub fn tls_url(&self) -> String {
        let node = &self.nodes[0];
        format!("zks://127.0.0.1:{}?ca={}", node.ports.secure, node.dir.join("ca.pem").display())
    }

    /// A file of the first server's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.nodes[0].dir.join(name)
    }

    /// A client of its own, as another program would have it.
    ///
    /// # Panics
    /// When the servers do not let it in.
    pub async fn client(&self) -> Client {
        connect(self.url()).await.expect("the servers can be used")
    }

    /// A plain client, which knows nothing of locks.
    ///
    /// # Panics
    /// When the servers do not let it in.
    pub async fn plain(&self) -> zookeeper_client::Client {
        zookeeper_client::Client::connect(&self.hosts()).await.expect("the servers can be used")
    }

    /// The paths of all nodes below this one, those of the server itself left out.
    ///
    /// # Panics
    /// When the servers do not answer.
    pub async fn paths_below(&self, path: &str) -> Vec<String> {
        let client = self.plain().await;
        client.sync("/").await.expect("the servers answer");
        let mut found = Vec::new();
        let mut open = vec![path.to_owned()];
        while let Some(path) = open.pop() {
            let children = match client.list_children(&path).await {
                Ok(children) => children,
                Err(zookeeper_client::Error::NoNode) => continue,
                Err(error) => panic!("{path}: {error}"),
            };
            let base = if path == "/" { "" } else { path.as_str() };
            for child in children.iter().filter(|child| !(base.is_empty() && *child == "zookeeper")) {
                found.push(format!("{base}/{child}"));
                open.push(format!("{base}/{child}"));
            }
        }
        found.sort();
        found
    }

    /// The paths of all ephemeral nodes, of whatever session.
    ///
    /// # Panics
    /// When the servers do not answer.
    pub fn ephemerals(&self) -> Vec<String> {
        let text = self.nodes[self.leader()].ask("dump").expect("the leader answers");
        let paths = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
        paths.map(str::to_owned).collect()
    }

    /// A number from the statistics of all servers, added up.
    ///
    /// # Panics
    /// When a server does not answer.
    pub fn statistic(&self, name: &str) -> u64 {
        let one = |node: &Node| {
            let text = node.ask("mntr").expect("the server answers");
            let value =
                text.lines().find_map(|line| line.strip_prefix(name)?.trim().split('.').next()?.parse::<u64>().ok());
            value.unwrap_or_else(|| panic!("the server has no statistic {name}: {text}"))
        };
        self.nodes.iter().map(one).sum()
    }

    /// The directory of all servers.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// One server of an ensemble.
#[derive(Debug)]
pub struct Node {
    program: Option<Program>,
    ports: Ports,
    dir: PathBuf,
    properties: Vec<String>,
}

impl Node {
    /// `FENCELOCK_ZOOKEEPER_CLASSPATH` names other jars than those of the Debian package: another version, say.
    fn launch(&mut self) {
        let classpath = std::env::var("FENCELOCK_ZOOKEEPER_CLASSPATH").unwrap_or_else(|_| {
            "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar:/usr/share/java/netty-codec.jar".to_owned()
        });
        let log = format!("-Dorg.slf4j.simpleLogger.logFile={}", self.dir.join("server.log").display());
        let configuration = self.dir.join("zoo.cfg");
        let configuration = configuration.to_str().expect("the directory has a plain name");
        // A test's server lives for seconds: little memory, no late optimisation, no waiting for the disk.
        let mut arguments = vec!["-Xmx64m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];
        arguments.extend([
            "-Dzookeeper.forceSync=no",
            "-Dzookeeper.preAllocSize=1024",
            "-Dzookeeper.jmx.log4j.disable=true",
        ]);
        arguments.extend(["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", &log]);
        arguments.extend(self.properties.iter().map(String::as_str));
        arguments.extend(["-cp", &classpath, MAIN, configuration]);
        self.program = match Program::start("java", &arguments) {
            Ok(program) => Some(program),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                panic!("java is not installed; `cargo xtask test` installs what the tests need")
            }
            Err(error) => panic!("java cannot be started: {error}"),
        };
    }

    /// Waits until it serves. False when it has ended: somebody else has a port, or the jars are not there.
    fn serves(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.mode().is_none() {
            if self.program.as_mut().is_some_and(|program| program.ended().is_some()) {
                return false;
            }
            assert!(Instant::now() < until, "the ZooKeeper server does not serve: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// `standalone`, `leader` or `follower`; nothing while it does not serve.
    pub fn mode(&self) -> Option<String> {
        let text = self.ask("srvr").ok()?;
        text.lines().find_map(|line| Some(line.strip_prefix("Mode: ")?.to_owned()))
    }

    /// The answer to one of the four-letter words.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn ask(&self, word: &str) -> io::Result<String> {
        let address = SocketAddr::from(([127, 0, 0, 1], self.ports.client));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(word.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    /// The port of its plain connections.
    pub fn port(&self) -> u16 {
        self.ports.client
    }

    /// Whether it was started and not killed since.
    pub fn runs(&self) -> bool {
        self.program.is_some()
    }

    /// What it wrote to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("server.log")).unwrap_or_default()
    }

    /// Ends it on the spot, as `kill -9` does.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        drop(self.program.take().expect("the server runs"));
    }

    /// Stops it where it is: connections stay open, nothing is answered.
    ///
    /// # Panics
    /// When it does not run.
    pub fn freeze(&self) {
        self.program.as_ref().expect("the server runs").signal(Signal::STOP);
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn thaw(&self) {
        self.program.as_ref().expect("the server runs").signal(Signal::CONT);
    }

    /// Starts it again on the same port, with the data that it kept, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_again(&mut self) {
        self.begin_again();
        assert!(self.serves(), "the ZooKeeper server does not start again: {}", self.log());
    }

    /// Starts it again, and does not wait until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn begin_again(&mut self) {
        self.launch();
    }
}

/// A path of its own on servers that several checks share.
#[derive(Debug)]
pub struct ZooKeeperSubject {
    subject: Subject,
    _servers: Arc<ZooKeeper>,
}

impl ZooKeeperSubject {
    /// An empty path on one server.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn one() -> Self {
        Self::on(1)
    }

    /// An empty path on an ensemble of three.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn three() -> Self {
        Self::on(3)
    }

    fn on(nodes: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let servers = ZooKeeper::shared(nodes);
        let path = format!("/check-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Self { subject: Subject::at(servers.url_below(&path)), _servers: servers }
    }
}

impl Deref for ZooKeeperSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}
