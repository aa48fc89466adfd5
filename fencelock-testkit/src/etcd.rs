//! Real etcd servers for tests, alone and in clusters: on ports of their own, in directories of their own, gone with the test.

use crate::Subject;
use crate::redis::child::Program;
use crate::redis::{certificate, free_port};
use fencelock::{Client, connect};
use rustix::process::Signal;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a server may take to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a cluster is to be configured; [`start`](EtcdOptions::start) starts it.
#[derive(Debug, Clone, Default)]
pub struct EtcdOptions {
    servers: usize,
    tls: bool,
    client_certificates: bool,
    arguments: Vec<String>,
}

impl EtcdOptions {
    /// Clients must speak TLS.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Clients must speak TLS, and show a certificate.
    #[must_use]
    pub fn client_certificates(mut self) -> Self {
        self.client_certificates = true;
        self.tls()
    }

    /// A further argument of the program.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Starts all servers, and waits until they serve.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start(self) -> EtcdCluster {
        // Somebody else may take a port before its server does: then all are tried again, on others.
        let mut log = String::new();
        for _ in 0..5 {
            let mut cluster = EtcdCluster::prepare(&self);
            cluster.servers.iter_mut().for_each(EtcdServer::launch);
            if cluster.servers.iter_mut().all(EtcdServer::answers) {
                return cluster;
            }
            log = cluster.first().log();
        }
        panic!("etcd does not start: {log}");
    }
}

/// The servers of one cluster; also one alone. They are killed when this is dropped.
#[derive(Debug)]
pub struct EtcdCluster {
    servers: Vec<EtcdServer>,
    tls: bool,
    dir: TempDir,
}

/// One server of a cluster.
#[derive(Debug)]
pub struct EtcdServer {
    program: Option<Program>,
    port: u16,
    /// Where health and counters are asked for: without a certificate.
    metrics: u16,
    arguments: Vec<String>,
    log: PathBuf,
}

/// In memory, if the machine offers that: what a disk costs is not what is tested.
fn directory() -> TempDir {
    let mut builder = tempfile::Builder::new();
    builder.prefix("fencelock-etcd-");
    let memory = Path::new("/dev/shm");
    let made =
        if memory.is_dir() { builder.tempdir_in(memory).or_else(|_| builder.tempdir()) } else { builder.tempdir() };
    made.expect("a directory for the servers")
}

impl EtcdCluster {
    /// So many servers as they come.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start(servers: usize) -> Self {
        Self::options(servers).start()
    }

    /// So many servers that are not as they come.
    pub fn options(servers: usize) -> EtcdOptions {
        EtcdOptions { servers, ..EtcdOptions::default() }
    }

    fn prepare(options: &EtcdOptions) -> Self {
        let dir = directory();
        if options.tls {
            certificate::write(dir.path());
        }
        let ports: Vec<[u16; 3]> = (0..options.servers).map(|_| [free_port(), free_port(), free_port()]).collect();
        let peers: Vec<String> = ports
            .iter()
            .enumerate()
            .map(|(number, [_, peer, _])| format!("n{number}=http://127.0.0.1:{peer}"))
            .collect();
        let server = |(number, ports): (usize, &[u16; 3])| {
            let arguments = arguments(options, dir.path(), number, *ports, &peers.join(","));
            let log = dir.path().join(format!("n{number}.log"));
            EtcdServer { program: None, port: ports[0], metrics: ports[2], arguments, log }
        };
        let servers = ports.iter().enumerate().map(server).collect();
        Self { servers, tls: options.tls, dir }
    }

    /// The servers.
    pub fn servers(&mut self) -> &mut [EtcdServer] {
        &mut self.servers
    }

    /// One of the servers.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn server(&mut self, number: usize) -> &mut EtcdServer {
        &mut self.servers[number]
    }

    /// The first server.
    ///
    /// # Panics
    /// Never: a cluster has one.
    pub fn first(&self) -> &EtcdServer {
        &self.servers[0]
    }

    /// The port of the first server.
    pub fn port(&self) -> u16 {
        self.servers[0].port
    }

    fn hosts(&self) -> String {
        let hosts: Vec<String> = self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        hosts.join(",")
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        let scheme = if self.tls { "etcds" } else { "etcd" };
        format!("{scheme}://{}", self.hosts())
    }

    /// Where clients connect to as this user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("etcd://{user}:{password}@{}", self.hosts())
    }

    /// A file beside the servers' own: `ca.pem`, `server.pem`, `server.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A client of its own, as another program would have it.
    ///
    /// # Panics
    /// When the servers do not let it in.
    pub async fn client(&self) -> Client {
        connect(self.url()).await.expect("the cluster can be used")
    }

    /// Runs `etcdctl` against the servers, and returns what it prints.
    ///
    /// # Panics
    /// When it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.try_ctl(arguments).unwrap_or_else(|error| panic!("etcdctl {}: {error}", arguments.join(" ")))
    }

    /// The same; the error is what it printed.
    ///
    /// # Errors
    /// When it fails.
    pub fn try_ctl(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.ctl_command(arguments).output().map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// An `etcdctl` that is to be started.
    pub fn ctl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg("--endpoints").arg(self.hosts()).args(["--command-timeout", "10s"]);
        if self.tls {
            command.arg("--cacert").arg(self.file("ca.pem"));
        }
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// All keys, in order.
    ///
    /// # Panics
    /// As [`ctl`](EtcdCluster::ctl).
    pub fn keys(&self) -> Vec<String> {
        let listed = self.ctl(&["get", "", "--from-key", "--keys-only"]);
        listed.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// The keys of all entries of locks, in order. Notes that end by themselves are left out: of claims that were given up, and of
    /// who held last.
    ///
    /// # Panics
    /// As [`ctl`](EtcdCluster::ctl).
    pub fn entries(&self) -> Vec<String> {
        self.keys().into_iter().filter(|key| !(key.contains("%x/") || key.contains("%h/"))).collect()
    }

    /// All leases there are.
    ///
    /// # Panics
    /// As [`ctl`](EtcdCluster::ctl).
    pub fn leases(&self) -> Vec<String> {
        let listed = self.ctl(&["lease", "list"]);
        listed.lines().skip(1).map(str::to_owned).collect()
    }

    /// The number of the server that leads, by its own word; `None` while none does.
    pub fn leader(&mut self) -> Option<usize> {
        self.servers
            .iter_mut()
            .position(|server| server.program.is_some() && server.metric("etcd_server_is_leader") == Some(1.0))
    }

    /// The same, when there is one.
    ///
    /// # Panics
    /// When none leads for long.
    pub fn wait_for_leader(&mut self) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(leader) = self.leader() {
                return leader;
            }
            assert!(Instant::now() < until, "no server leads");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The sum of a counter over all servers.
    ///
    /// # Panics
    /// When a server does not answer.
    pub fn count(&mut self, metric: &str) -> f64 {
        self.servers.iter_mut().map(|server| server.metric(metric).expect("a server tells its counters")).sum()
    }

    /// Waits until every server serves: until then a majority may not.
    ///
    /// # Panics
    /// When they do not.
    pub fn wait_until_well(&mut self) {
        assert!(self.servers.iter_mut().all(EtcdServer::answers), "a server has ended");
    }
}

fn arguments(options: &EtcdOptions, dir: &Path, number: usize, ports: [u16; 3], cluster: &str) -> Vec<String> {
    let [port, peer, metrics] = ports;
    let scheme = if options.tls { "https" } else { "http" };
    let client = format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer}");
    let data = dir.join(format!("n{number}"));
    let log = dir.join(format!("n{number}.log"));
    // Alone, nobody's heartbeat can be late. Together, elections are quick, yet survive the pauses of a busy machine.
    let (heartbeat, election) = if options.servers == 1 { ("10", "100") } else { ("100", "1000") };
    let mut arguments: Vec<String> = [
        ("--name", format!("n{number}")),
        ("--data-dir", data.display().to_string()),
        ("--listen-client-urls", client.clone()),
        ("--advertise-client-urls", client),
        ("--listen-peer-urls", peer.clone()),
        ("--initial-advertise-peer-urls", peer),
        ("--initial-cluster", cluster.to_owned()),
        ("--initial-cluster-state", "new".to_owned()),
        ("--heartbeat-interval", heartbeat.to_owned()),
        ("--election-timeout", election.to_owned()),
        ("--listen-metrics-urls", format!("http://127.0.0.1:{metrics}")),
        ("--logger", "zap".to_owned()),
        ("--log-level", "warn".to_owned()),
        ("--log-outputs", log.display().to_string()),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_owned(), value])
    .collect();
    if options.tls {
        let file = |name: &str| dir.join(name).display().to_string();
        arguments.extend(["--cert-file".to_owned(), file("server.pem"), "--key-file".to_owned(), file("server.key")]);
        if options.client_certificates {
            arguments.extend(["--client-cert-auth".to_owned(), "--trusted-ca-file".to_owned(), file("ca.pem")]);
        }
    }
    arguments.extend(options.arguments.iter().cloned());
    arguments
}

impl EtcdServer {
    /// `FENCELOCK_ETCD` names another program than the `etcd` of the path: another version, say.
    fn launch(&mut self) {
        let program = std::env::var("FENCELOCK_ETCD").unwrap_or_else(|_| "etcd".to_owned());
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        self.program = match Program::start(&program, &arguments) {
            Ok(program) => Some(program),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                panic!("{program} is not installed; `cargo xtask test` installs what the tests need")
            }
            Err(error) => panic!("{program} cannot be started: {error}"),
        };
    }

    /// Waits until it serves. False when it has ended: somebody else has the port.
    fn answers(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            if self.get("/health").is_some_and(|answer| answer.contains("\"true\"")) {
                return true;
            }
            if self.program.as_mut().is_some_and(|program| program.ended().is_some()) {
                return false;
            }
            assert!(Instant::now() < until, "etcd does not serve: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.metrics)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// A counter of the server, summed over its labels.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let text = self.get("/metrics")?;
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            (rest.starts_with(' ') || rest.starts_with('{')).then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.reduce(|one, other| one + other)
    }

    /// What it wrote to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The port for clients.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn program(&self) -> &Program {
        self.program.as_ref().expect("the server runs")
    }

    /// Ends it on the spot, as `kill -9` does.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        drop(self.program.take().expect("the server runs"));
    }

    /// Whether it was started and not killed.
    pub fn runs(&self) -> bool {
        self.program.is_some()
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

    /// Starts it again on the same ports, with the data that it kept. It does not wait until it serves: that takes a majority.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_again(&mut self) {
        self.launch();
    }
}

/// A place in a cluster as the subject of a conformance check. Checks that run at the same time share the servers.
#[derive(Debug)]
pub struct EtcdSubject {
    subject: Subject,
    _cluster: Arc<EtcdCluster>,
}

impl EtcdSubject {
    /// An empty place in a cluster of so many servers.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn on(servers: usize) -> Self {
        static SHARED: Mutex<Vec<(usize, Weak<EtcdCluster>)>> = Mutex::new(Vec::new());
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|(_, cluster)| cluster.strong_count() > 0);
        let known = shared.iter().find(|(count, _)| *count == servers).and_then(|(_, cluster)| cluster.upgrade());
        let cluster = known.unwrap_or_else(|| {
            let cluster = Arc::new(EtcdCluster::start(servers));
            shared.push((servers, Arc::downgrade(&cluster)));
            cluster
        });
        let place = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { subject: Subject::at(format!("{}/place-{place}", cluster.url())), _cluster: cluster }
    }
}

impl Deref for EtcdSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}
