//! Starts the tool and waits for things to happen. Nothing here sleeps for a fixed time and hopes.

use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Far more than anything here takes; only a failing test waits for so long.
const DEADLINE: Duration = Duration::from_secs(20);

/// A place for one test: a directory for its locks, unless they are elsewhere, and for what its commands write.
pub(crate) struct Place {
    dir: TempDir,
    elsewhere: Option<String>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), elsewhere: None }
    }

    /// With its locks behind this URL.
    pub(crate) fn at(url: &str) -> Self {
        Self { elsewhere: Some(url.to_owned()), ..Self::new() }
    }

    pub(crate) fn locks(&self) -> PathBuf {
        self.path("locks")
    }

    pub(crate) fn url(&self) -> String {
        self.elsewhere.clone().unwrap_or_else(|| format!("file:{}", self.locks().display()))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The tool with these arguments, its commands running in this place.
    pub(crate) fn tool(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fencelock"));
        self.furnish(&mut command);
        command.args(arguments);
        command
    }

    /// The same, with signals in their default state: a test that runs as a background job of a script, or under nohup, inherits some
    /// ignored.
    pub(crate) fn interruptible(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("env");
        self.furnish(&mut command);
        command.args(["--default-signal=HUP,INT,QUIT", env!("CARGO_BIN_EXE_fencelock")]).args(arguments);
        command
    }

    fn furnish(&self, command: &mut Command) {
        for variable in ["NAME", "TOKEN", "OWNER", "DEADLINE", "LOG"] {
            command.env_remove(format!("FENCELOCK_{variable}"));
        }
        command.current_dir(self.dir.path()).env("FENCELOCK_URL", self.url()).stdin(Stdio::null());
    }

    /// Runs the tool to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.tool(arguments).output().unwrap()
    }

    /// Starts the tool.
    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        Running::start(&mut self.tool(arguments))
    }

    /// What a command has written to a file, once that is a whole line.
    pub(crate) fn line(&self, name: &str) -> String {
        let path = self.path(name);
        let read = || fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n'));
        until(&format!("a line in {name}"), read).trim_end().to_owned()
    }

    pub(crate) fn pid(&self, name: &str) -> i32 {
        self.line(name).parse().unwrap()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// How many hold and how many wait.
    pub(crate) fn standing(&self, name: &str) -> (usize, usize) {
        let output = self.run(&["status", name, "--json"]);
        assert_eq!(code(output.status), 0, "{}", text(&output.stderr));
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (status["holders"].as_array().unwrap().len(), status["waiters"].as_array().unwrap().len())
    }

    pub(crate) fn until_standing(&self, name: &str, holders: usize, waiters: usize) {
        until(&format!("{holders} holding and {waiters} waiting for {name}"), || {
            (self.standing(name) == (holders, waiters)).then_some(())
        });
    }
}

/// A tool that runs. Ends with the test, whatever happens.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    pub(crate) fn id(&self) -> i32 {
        i32::try_from(self.0.as_ref().unwrap().id()).unwrap()
    }

    pub(crate) fn send(&self, signal: Signal) {
        send(self.id(), signal);
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Waits for the end.
    pub(crate) fn end(mut self) -> Output {
        until("the tool's end", || self.has_ended().then_some(()));
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Waits for the end; the exit code.
    pub(crate) fn code(self) -> i32 {
        code(self.end().status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The exit code as a shell sees it.
pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap()
}

pub(crate) fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
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

/// Whether a process runs. One that has ended and was not collected yet does not.
pub(crate) fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub(crate) fn until_dead(pid: i32) {
    until(&format!("the end of process {pid}"), || (!runs(pid)).then_some(()));
}
