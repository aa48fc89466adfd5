//! Real MariaDB (or MySQL) servers for tests: each on a port of its own, in a directory of its own, gone with the test.

use crate::Subject;
use crate::daemon::{Directory, User};
use crate::redis::child::Program;
use crate::redis::{certificate, free_port};
use crate::sql::{SqlBase, SqlServer};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, OptsBuilder, Row, Value};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const USER: User = User("mysql");
/// How long a server may take to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The user that clients connect as, and the one that asks what happened.
const USERS: &str = "CREATE USER IF NOT EXISTS fencelock@'127.0.0.1';\nGRANT ALL ON *.* TO fencelock@'127.0.0.1';\n\
     CREATE USER IF NOT EXISTS admin@'127.0.0.1';\nGRANT ALL ON *.* TO admin@'127.0.0.1' WITH GRANT OPTION;\n\
     CREATE DATABASE IF NOT EXISTS locks;\n";

fn program(name: &str) -> String {
    let dirs = ["/usr/sbin", "/usr/bin", "/usr/local/bin"].map(PathBuf::from);
    let found = dirs.into_iter().map(|dir| dir.join(name)).find(|path| path.is_file());
    found.map_or_else(|| name.to_owned(), |path| path.display().to_string())
}

/// How a server is to be configured; [`start`](MysqlOptions::start) starts it.
#[derive(Debug, Clone, Default)]
pub struct MysqlOptions {
    arguments: Vec<String>,
    tls: bool,
}

impl MysqlOptions {
    /// An argument of the server, `--so=so`.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Offers TLS; see [`MysqlServer::tls_url`].
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Starts the server, and waits until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(self) -> MysqlServer {
        for _ in 0..5 {
            let mut server = MysqlServer::prepare(&self);
            server.launch();
            if server.answers() {
                return server;
            }
        }
        panic!("mariadbd does not start");
    }
}

/// A running server. It is killed when this is dropped, and when the test process ends in whatever way.
#[derive(Debug)]
pub struct MysqlServer {
    program: Option<Program>,
    port: u16,
    arguments: Vec<String>,
    dir: Directory,
}

impl MysqlServer {
    /// A server as it comes, with a user `fencelock` who may do everything and needs no password.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start() -> Self {
        Self::options().start()
    }

    /// A server that is not as it comes.
    pub fn options() -> MysqlOptions {
        MysqlOptions::default()
    }

    fn prepare(options: &MysqlOptions) -> Self {
        let dir = Directory::new("fencelock-mysql-", USER);
        let (data, temporary) =
            (format!("--datadir={}/data", dir.path().display()), format!("--tmpdir={}", dir.path().display()));
        let arguments =
            ["--no-defaults", &data, &temporary, "--auth-root-authentication-method=normal", "--skip-test-db"];
        USER.run(&program("mariadb-install-db"), &arguments, dir.path());
        std::fs::write(dir.path().join("users.sql"), USERS).expect("the directory can be written to");
        let mut arguments = options.arguments.clone();
        if options.tls {
            certificate::write(dir.path());
            USER.own(dir.path());
            for (argument, file) in [("ssl-ca", "ca.pem"), ("ssl-cert", "server.pem"), ("ssl-key", "server.key")] {
                arguments.push(format!("--{argument}={}", dir.path().join(file).display()));
            }
        }
        Self { program: None, port: free_port(), arguments, dir }
    }

    fn launch(&mut self) {
        let dir = self.dir.path().display();
        let mut arguments = vec![
            "--no-defaults".to_owned(),
            format!("--datadir={dir}/data"),
            format!("--tmpdir={dir}"),
            format!("--socket={dir}/socket"),
            format!("--pid-file={dir}/pid"),
            format!("--log-error={dir}/server.log"),
            format!("--init-file={dir}/users.sql"),
            format!("--port={}", self.port),
            "--bind-address=127.0.0.1".to_owned(),
            "--skip-name-resolve".to_owned(),
            "--max-connections=500".to_owned(),
            "--innodb-buffer-pool-size=64M".to_owned(),
            "--innodb-log-file-size=32M".to_owned(),
            // The machine does not crash here, only processes do: what was written is not lost.
            "--innodb-flush-log-at-trx-commit=2".to_owned(),
            "--debug-no-sync=1".to_owned(),
        ];
        arguments.extend(self.arguments.iter().cloned());
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let started = USER.start(&program("mariadbd"), &arguments);
        self.program = Some(started.unwrap_or_else(|error| {
            panic!("mariadbd cannot be started ({error}); `cargo xtask test` installs what the tests need")
        }));
    }

    /// Waits until the server serves. False when it has ended: somebody else has the port.
    fn answers(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        let own = format!("{}/data/", self.dir.path().display());
        loop {
            if self.program.as_mut().is_some_and(|program| program.ended().is_some()) {
                return false;
            }
            if self.try_ask("", "SELECT @@datadir").is_ok_and(|rows| rows[0][0] == own) {
                return true;
            }
            assert!(Instant::now() < until, "mariadbd does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What the server wrote to its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default()
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        self.url_as("fencelock", "locks")
    }

    /// Where clients connect to as this user (and password), to this database.
    pub fn url_as(&self, user: &str, database: &str) -> String {
        format!("mysql://{user}@127.0.0.1:{}/{database}", self.port)
    }

    /// Where clients connect to with TLS.
    pub fn tls_url(&self) -> String {
        format!("{}?ca={}/ca.pem", self.url(), self.dir.path().display())
    }

    /// Runs SQL, statements separated by semicolons, as an administrator, and returns the rows of the first one as texts.
    ///
    /// # Panics
    /// When the server does not answer, or with an error.
    pub fn ask(&self, database: &str, sql: &str) -> Vec<Vec<String>> {
        self.try_ask(database, sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    fn try_ask(&self, database: &str, sql: &str) -> Result<Vec<Vec<String>>, mysql_async::Error> {
        let opts = OptsBuilder::default()
            .ip_or_hostname("127.0.0.1")
            .tcp_port(self.port)
            .user(Some("admin"))
            .prefer_socket(false)
            .db_name(Some(database).filter(|database| !database.is_empty()));
        std::thread::scope(|scope| scope.spawn(|| ask(opts, sql)).join().expect("asking does not panic"))
    }

    /// Runs a script as the `mysql` program does.
    ///
    /// # Panics
    /// When it fails.
    pub fn run_script(&self, database: &str, script: &str) {
        use std::io::Write as _;
        use std::process::{Command, Stdio};
        let mut command = Command::new(program("mariadb"));
        command.args(["--no-defaults", "-h", "127.0.0.1", "-u", "admin", "-P", &self.port.to_string(), database]);
        let mut child = command.stdin(Stdio::piped()).spawn().expect("the mariadb program is there");
        child.stdin.take().expect("it is piped").write_all(script.as_bytes()).expect("it reads");
        assert!(child.wait().expect("it ends").success(), "the script is refused");
    }

    /// A variable of `SHOW GLOBAL STATUS`.
    ///
    /// # Panics
    /// As [`ask`](MysqlServer::ask).
    pub fn status(&self, variable: &str) -> usize {
        let rows = self.ask("", &format!("SHOW GLOBAL STATUS LIKE '{variable}'"));
        rows[0][1].parse().expect("a number")
    }

    fn clients(&self, database: &str) -> Vec<String> {
        let sql =
            format!("SELECT id FROM information_schema.processlist WHERE user = 'fencelock' AND db = '{database}'");
        self.ask("", &sql).into_iter().map(|mut row| row.remove(0)).collect()
    }

    fn end_clients(&self, database: &str) {
        for id in self.clients(database) {
            // It may have gone by itself.
            let _ = self.try_ask("", &format!("KILL {id}"));
        }
    }
}

fn ask(opts: OptsBuilder, sql: &str) -> Result<Vec<Vec<String>>, mysql_async::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be made");
    let text = |value: Value| match value {
        Value::NULL => String::new(),
        Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        other => other.as_sql(true),
    };
    runtime.block_on(async {
        let mut conn = Conn::new(opts).await?;
        let rows: Vec<Row> = conn.query(sql).await?;
        conn.disconnect().await?;
        Ok(rows.into_iter().map(|row| row.unwrap().into_iter().map(text).collect()).collect())
    })
}

/// The server that the tests of one program share.
pub fn shared() -> &'static MysqlServer {
    static SERVER: OnceLock<MysqlServer> = OnceLock::new();
    SERVER.get_or_init(MysqlServer::start)
}

/// A database of its own on the shared server.
#[derive(Debug)]
pub struct MysqlDatabase {
    name: String,
}

impl MysqlDatabase {
    /// One with nothing in it.
    ///
    /// # Panics
    /// When it cannot be made.
    #[expect(clippy::new_without_default, reason = "a server's database is no default")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("subject_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        shared().ask("", &format!("CREATE DATABASE {name}"));
        Self { name }
    }

    /// Where clients connect to.
    pub fn url(&self) -> String {
        shared().url_as("fencelock", &self.name)
    }

    /// Runs SQL in it.
    ///
    /// # Panics
    /// As [`MysqlServer::ask`].
    pub fn ask(&self, sql: &str) -> Vec<Vec<String>> {
        shared().ask(&self.name, sql)
    }
}

impl Drop for MysqlDatabase {
    fn drop(&mut self) {
        // Clients that are about to end may say good-bye first.
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until && !shared().clients(&self.name).is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        shared().end_clients(&self.name);
        let _ = shared().try_ask("", &format!("DROP DATABASE {}", self.name));
    }
}

impl SqlBase for MysqlDatabase {
    fn make() -> Self {
        Self::new()
    }

    fn port(&self) -> u16 {
        shared().port
    }

    fn url_through(&self, port: u16) -> String {
        format!("mysql://fencelock@127.0.0.1:{port}/{}", self.name)
    }

    fn table(&self, name: &str) -> String {
        format!("fencelock_{name}")
    }

    fn sql(&self, sql: &str) -> Vec<Vec<String>> {
        self.ask(sql)
    }

    fn nap(seconds: f64) -> String {
        format!("DO SLEEP({seconds})")
    }

    fn connections(&self) -> usize {
        shared().clients(&self.name).len()
    }

    fn cut_connections(&self) {
        shared().end_clients(&self.name);
    }
}

impl SqlBase for MysqlServer {
    fn make() -> Self {
        Self::options().argument("--general-log=1").argument("--general-log-file=../statements.log").start()
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn url_through(&self, port: u16) -> String {
        format!("mysql://fencelock@127.0.0.1:{port}/locks")
    }

    fn table(&self, name: &str) -> String {
        format!("fencelock_{name}")
    }

    fn sql(&self, sql: &str) -> Vec<Vec<String>> {
        self.ask("locks", sql)
    }

    fn nap(seconds: f64) -> String {
        format!("DO SLEEP({seconds})")
    }

    fn connections(&self) -> usize {
        self.clients("locks").len()
    }

    fn cut_connections(&self) {
        self.end_clients("locks");
    }
}

impl SqlServer for MysqlServer {
    fn kill(&mut self) {
        drop(self.program.take().expect("the server runs"));
    }

    fn start_again(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            self.launch();
            if self.answers() {
                return;
            }
            assert!(Instant::now() < until, "mariadbd does not start again: {}", self.log());
        }
    }

    fn statements(&self) -> (usize, usize) {
        // The log tells what clients send, not what procedures do.
        let log = std::fs::read_to_string(self.dir.path().join("statements.log")).unwrap_or_default();
        (log.matches("CALL fencelock_act").count(), log.matches("\tQuery\t").count() + log.matches(" Query\t").count())
    }
}

/// A database of its own as the subject of a conformance check.
#[derive(Debug)]
pub struct MysqlSubject {
    subject: Subject,
    _database: MysqlDatabase,
}

impl MysqlSubject {
    /// An empty database.
    ///
    /// # Panics
    /// When it cannot be made.
    #[expect(clippy::new_without_default, reason = "a server's database is no default")]
    pub fn new() -> Self {
        let database = MysqlDatabase::new();
        Self { subject: Subject::at(database.url()), _database: database }
    }
}

impl Deref for MysqlSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}
