//! Real PostgreSQL servers for tests: each on a port of its own, in a directory of its own, gone with the test.

use crate::Subject;
use crate::daemon::{Directory, User};
use crate::redis::child::Program;
use crate::redis::{certificate, free_port};
use crate::sql::{SqlBase, SqlServer};
use fencelock::connect;
use rustix::process::Signal;
use std::fmt::Write as _;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_postgres::{NoTls, SimpleQueryMessage};

const USER: User = User("postgres");
/// How long a server may take to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the programs of PostgreSQL are: Debian keeps them out of the path.
fn program(name: &str) -> String {
    let mut versions: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|dir| dir.filter_map(Result::ok).map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    let found = versions.iter().rev().map(|bin| bin.join(name)).find(|path| path.is_file());
    found.map_or_else(|| name.to_owned(), |path| path.display().to_string())
}

/// How a server is to be configured; [`start`](PostgresOptions::start) starts it.
#[derive(Debug, Clone, Default)]
pub struct PostgresOptions {
    settings: Vec<(String, String)>,
    tls: bool,
    /// Lines before those of `pg_hba.conf` that let everybody in.
    admission: Vec<String>,
    replica_of: Option<u16>,
}

impl PostgresOptions {
    /// A line of the configuration file.
    #[must_use]
    pub fn set(mut self, setting: &str, value: impl Into<String>) -> Self {
        self.settings.push((setting.to_owned(), value.into()));
        self
    }

    /// Writes every statement of every client into its log; see [`SqlServer::statements`].
    #[must_use]
    pub fn telling(self) -> Self {
        self.set("log_statement", "all").set("log_line_prefix", "<%a> ")
    }

    /// This user needs a password.
    #[must_use]
    pub fn password_for(mut self, user: &str) -> Self {
        self.admission.push(format!("host all {user} 127.0.0.1/32 scram-sha-256"));
        self
    }

    /// Listens with TLS as well; see [`PostgresServer::tls_url`].
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Starts the server, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(self) -> PostgresServer {
        for _ in 0..5 {
            let mut server = PostgresServer::prepare(&self);
            server.launch();
            if server.answers() {
                return server;
            }
        }
        panic!("postgres does not start");
    }

    fn configuration(&self, port: u16) -> String {
        let mut text = format!("listen_addresses = '127.0.0.1'\nport = {port}\nmax_connections = 300\n");
        text.push_str("unix_socket_directories = ''\nlogging_collector = off\nlc_messages = 'C'\n");
        text.push_str("shared_buffers = 64MB\nmax_wal_size = 256MB\n");
        // The machine does not crash here, only processes do: what was written is not lost.
        text.push_str("fsync = off\nfull_page_writes = off\n");
        if self.tls {
            text.push_str("ssl = on\nssl_cert_file = 'server.pem'\nssl_key_file = 'server.key'\n");
        }
        for (setting, value) in &self.settings {
            let _ = writeln!(text, "{setting} = '{value}'");
        }
        text
    }
}

/// A running `postgres`. It is killed when this is dropped, and when the test process ends in whatever way.
#[derive(Debug)]
pub struct PostgresServer {
    program: Option<Program>,
    port: u16,
    dir: Directory,
}

impl PostgresServer {
    /// A server as it comes, with a superuser `postgres` who needs no password.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start() -> Self {
        Self::options().start()
    }

    /// A server that is not as it comes.
    pub fn options() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// A read-only replica of this one.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn replica(&self) -> Self {
        PostgresOptions { replica_of: Some(self.port), ..PostgresOptions::default() }.start()
    }

    fn prepare(options: &PostgresOptions) -> Self {
        let dir = Directory::new("fencelock-postgres-", USER);
        let data = dir.path().join("data");
        let data = data.to_str().expect("the directory has a plain name").to_owned();
        match options.replica_of {
            Some(primary) => {
                let primary = primary.to_string();
                let arguments = ["-h", "127.0.0.1", "-p", &primary, "-U", "postgres", "-D", &data, "-R", "--no-sync"];
                USER.run(&program("pg_basebackup"), &[&arguments[..], &["-c", "fast"]].concat(), dir.path());
            }
            None => {
                let arguments = ["-D", &data, "-U", "postgres", "-A", "trust", "--no-sync", "--locale=C.UTF-8"];
                USER.run(&program("initdb"), &arguments, dir.path());
            }
        }
        let port = free_port();
        let path = dir.path().join("data");
        if options.tls {
            certificate::write(&path);
            let key = path.join("server.key");
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(key, private).expect("the key can be made private");
        }
        let admission = path.join("pg_hba.conf");
        let lets_in = std::fs::read_to_string(&admission).expect("initdb has written it");
        let text = format!("{}\n{lets_in}", options.admission.join("\n"));
        std::fs::write(&admission, text).expect("the directory can be written to");
        std::fs::write(path.join("postgresql.conf"), options.configuration(port)).expect("the same");
        USER.own(&path);
        Self { program: None, port, dir }
    }

    fn launch(&mut self) {
        let data = self.dir.path().join("data");
        let data = data.to_str().expect("the directory has a plain name");
        // The shell takes its log to a file, and becomes the server.
        let log = self.dir.path().join("server.log");
        let script = format!("exec {} -D '{data}' >>'{}' 2>&1", program("postgres"), log.display());
        let started = USER.start("/bin/sh", &["-c", &script]);
        self.program = Some(started.unwrap_or_else(|error| panic!("postgres cannot be started: {error}")));
    }

    /// Waits until the server serves. False when it has ended: somebody else has the port, or an earlier one lives.
    fn answers(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            if self.program.as_mut().is_some_and(|program| program.ended().is_some()) {
                return false;
            }
            if self.try_ask("postgres", "SHOW data_directory").is_ok_and(|rows| rows[0][0] == self.data()) {
                return true;
            }
            assert!(Instant::now() < until, "postgres does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn data(&self) -> String {
        self.dir.path().join("data").display().to_string()
    }

    /// What the server wrote to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    /// How many statements of fencelock the log tells of that contain this text.
    fn told(&self, text: &str) -> usize {
        let log = self.log();
        let sent = |line: &&str| {
            line.starts_with("<fencelock> LOG:  statement: ") || line.starts_with("<fencelock> LOG:  execute ")
        };
        log.lines().filter(sent).filter(|line| line.contains(text)).count()
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// Where clients of this database connect to.
    pub fn url_of(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Where clients connect to with TLS.
    pub fn tls_url(&self) -> String {
        format!("{}?ca={}/ca.pem", self.url(), self.data())
    }

    /// Runs SQL as the superuser, and returns the rows of all its statements as texts.
    ///
    /// # Panics
    /// When the server does not answer, or with an error.
    pub fn ask(&self, database: &str, sql: &str) -> Vec<Vec<String>> {
        self.try_ask(database, sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    /// The number that a query gives.
    ///
    /// # Panics
    /// As [`ask`](PostgresServer::ask).
    pub fn number(&self, sql: &str) -> u64 {
        let rows = self.ask("postgres", sql);
        rows.first().and_then(|row| row.first()?.parse().ok()).unwrap_or_else(|| panic!("{sql} gives no number"))
    }

    fn try_ask(&self, database: &str, sql: &str) -> Result<Vec<Vec<String>>, tokio_postgres::Error> {
        let config = format!("host=127.0.0.1 port={} user=postgres dbname={database} connect_timeout=5", self.port);
        std::thread::scope(|scope| scope.spawn(|| ask(&config, sql)).join().expect("asking does not panic"))
    }

    /// Lets it end in an orderly way, without waiting for clients.
    ///
    /// # Panics
    /// When it does not run.
    pub fn shut_down(&mut self) {
        let program = self.program.take().expect("the server runs");
        program.signal(Signal::INT);
        program.wait();
    }

    fn restart(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            self.launch();
            // After a kill, it refuses until the last process of the one before has ended.
            if self.answers() {
                return;
            }
            assert!(Instant::now() < until, "postgres does not start again: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn ask(config: &str, sql: &str) -> Result<Vec<Vec<String>>, tokio_postgres::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(config, NoTls).await?;
        let driver = tokio::spawn(connection);
        let messages = client.simple_query(sql).await?;
        driver.abort();
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|index| row.get(index).unwrap_or_default().to_owned()).collect())
            }
            _ => None,
        });
        Ok(rows.collect())
    })
}

/// The server that the tests of one program share.
pub fn shared() -> &'static PostgresServer {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    SERVER.get_or_init(|| {
        let server = PostgresServer::start();
        // Databases are made after this one: with the tables in it.
        connect_once(&server.url_of("template1"));
        server
    })
}

/// Makes the tables, as the first client does.
fn connect_once(url: &str) {
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { connect(url).await.expect("the server can be used").close().await.expect("closes") });
    };
    std::thread::scope(|scope| scope.spawn(work).join().expect("it does not panic"));
}

/// A database of its own on the shared server.
#[derive(Debug)]
pub struct PostgresDatabase {
    name: String,
}

impl PostgresDatabase {
    /// One with fencelock's tables, and nothing in them.
    ///
    /// # Panics
    /// When it cannot be made.
    #[expect(clippy::new_without_default, reason = "a server's database is no default")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("subject_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let until = Instant::now() + PATIENCE;
        // Whoever still is connected to the template, the server's own processes included, is in the way.
        while let Err(error) = shared().try_ask("postgres", &format!("CREATE DATABASE {name}")) {
            assert!(Instant::now() < until, "no database can be made: {error:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { name }
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        shared().url_of(&self.name)
    }

    /// Runs SQL in it.
    ///
    /// # Panics
    /// As [`PostgresServer::ask`].
    pub fn ask(&self, sql: &str) -> Vec<Vec<String>> {
        shared().ask(&self.name, sql)
    }
}

impl Drop for PostgresDatabase {
    fn drop(&mut self) {
        // Clients that are about to end may say good-bye first.
        let others = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{}'", self.name);
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until && shared().try_ask("postgres", &others).is_ok_and(|rows| rows[0][0] != "0") {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = shared().try_ask("postgres", &format!("DROP DATABASE {} WITH (FORCE)", self.name));
    }
}

fn connections(server: &PostgresServer, database: &str, what: &str) -> String {
    let rows = server.ask(
        "postgres",
        &format!("SELECT {what} FROM pg_stat_activity WHERE datname = '{database}' AND application_name = 'fencelock'"),
    );
    rows[0][0].clone()
}

impl SqlBase for PostgresDatabase {
    fn make() -> Self {
        Self::new()
    }

    fn port(&self) -> u16 {
        shared().port
    }

    fn url_through(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/{}", self.name)
    }

    fn table(&self, name: &str) -> String {
        format!("fencelock.{name}")
    }

    fn sql(&self, sql: &str) -> Vec<Vec<String>> {
        self.ask(sql)
    }

    fn nap(seconds: f64) -> String {
        format!("SELECT pg_sleep({seconds})")
    }

    fn connections(&self) -> usize {
        connections(shared(), &self.name, "count(*)").parse().expect("a number")
    }

    fn cut_connections(&self) {
        connections(shared(), &self.name, "count(pg_terminate_backend(pid))");
    }
}

impl SqlBase for PostgresServer {
    fn make() -> Self {
        Self::options().telling().start()
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn url_through(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/postgres")
    }

    fn table(&self, name: &str) -> String {
        format!("fencelock.{name}")
    }

    fn sql(&self, sql: &str) -> Vec<Vec<String>> {
        self.ask("postgres", sql)
    }

    fn nap(seconds: f64) -> String {
        format!("SELECT pg_sleep({seconds})")
    }

    fn connections(&self) -> usize {
        connections(self, "postgres", "count(*)").parse().expect("a number")
    }

    fn cut_connections(&self) {
        connections(self, "postgres", "count(pg_terminate_backend(pid))");
    }
}

impl SqlServer for PostgresServer {
    fn kill(&mut self) {
        drop(self.program.take().expect("the server runs"));
    }

    fn start_again(&mut self) {
        self.restart();
    }

    fn statements(&self) -> (usize, usize) {
        (self.told("fencelock.act"), self.told(""))
    }
}

/// A database of its own as the subject of a conformance check.
#[derive(Debug)]
pub struct PostgresSubject {
    subject: Subject,
    _database: PostgresDatabase,
}

impl PostgresSubject {
    /// An empty database.
    ///
    /// # Panics
    /// When it cannot be made.
    #[expect(clippy::new_without_default, reason = "a server's database is no default")]
    pub fn new() -> Self {
        let database = PostgresDatabase::new();
        Self { subject: Subject::at(database.url()), _database: database }
    }
}

impl Deref for PostgresSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}

/// PgBouncer in transaction mode, in front of a server.
#[derive(Debug)]
pub struct PgBouncer {
    _program: Program,
    port: u16,
    _dir: Directory,
}

impl PgBouncer {
    /// Starts one, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn to(server: &PostgresServer) -> Self {
        let dir = Directory::new("fencelock-pgbouncer-", USER);
        let port = free_port();
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\n\
             unix_socket_dir =\npool_mode = transaction\ndefault_pool_size = 4\nmax_client_conn = 2000\n\
             ignore_startup_parameters = extra_float_digits\n[users]\n",
            server.port
        );
        let text = text.replacen("* = host=127.0.0.1", "* = user=postgres host=127.0.0.1", 1);
        let path = dir.path().join("pgbouncer.ini");
        std::fs::write(&path, text).expect("the directory can be written to");
        USER.own(dir.path());
        let bouncer =
            ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"].into_iter().find(|path| PathBuf::from(path).is_file());
        let started = USER.start(bouncer.unwrap_or("pgbouncer"), &[path.to_str().expect("a plain name")]);
        let program = started.unwrap_or_else(|error| panic!("pgbouncer cannot be started: {error}"));
        let until = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "pgbouncer does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { _program: program, port, _dir: dir }
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres?notify=off", self.port)
    }
}
