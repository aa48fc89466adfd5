//! Servers that refuse to run as root, that keep their data in a directory, and that many tests of one program share.

use crate::redis::child::Program;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// Whose servers these are when root runs the tests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User(pub(crate) &'static str);

impl User {
    fn switches() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// The words before a command that make it this user's.
    fn words(self) -> Vec<String> {
        if !Self::switches() {
            return Vec::new();
        }
        let words = ["setpriv", "--reuid", self.0, "--regid", self.0, "--clear-groups", "--pdeathsig", "KILL"];
        words.map(str::to_owned).to_vec()
    }

    /// Starts a server as this user.
    pub(crate) fn start(self, program: &str, arguments: &[&str]) -> io::Result<Program> {
        let words = self.words();
        let mut all: Vec<&str> = words.iter().map(String::as_str).collect();
        all.push(program);
        all.extend(arguments);
        let (first, rest) = all.split_first().expect("there is a program");
        Program::start(first, rest)
    }

    /// Runs a program to its end as this user.
    ///
    /// # Panics
    /// When it fails.
    pub(crate) fn run(self, program: &str, arguments: &[&str], dir: &Path) {
        let words = self.words();
        let mut all: Vec<&str> = words.iter().map(String::as_str).collect();
        all.push(program);
        all.extend(arguments);
        let output = Command::new(all[0]).args(&all[1..]).current_dir(dir).stdin(Stdio::null()).output();
        let output = output.unwrap_or_else(|error| {
            panic!("{program} cannot be run ({error}); `cargo xtask test` installs what the tests need")
        });
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Gives a file or directory to this user.
    ///
    /// # Panics
    /// When that fails.
    pub(crate) fn own(self, path: &Path) {
        if Self::switches() {
            let status = Command::new("chown").arg("-R").arg(self.0).arg(path).status();
            assert!(status.is_ok_and(|status| status.success()), "{} cannot be given to {}", path.display(), self.0);
        }
    }
}

/// A directory that goes away when the process does, however that ends: what is kept in a static is never dropped.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Removes it when its standard input is closed.
    remover: Mutex<Child>,
}

impl Directory {
    /// A new one, for this user.
    ///
    /// # Panics
    /// When it cannot be made.
    pub(crate) fn new(prefix: &str, user: User) -> Self {
        let dir = tempfile::Builder::new().prefix(prefix).tempdir().expect("a directory for the server");
        let path = dir.keep();
        user.own(&path);
        // A moment later, when the server has ended as well.
        let remove = "read -r _; sleep 1; exec rm -rf -- \"$1\"";
        let mut remover = Command::new("sh");
        remover.args(["-c", remove, "sh"]).arg(&path).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let remover = remover.spawn().expect("a shell");
        Self { path, remover: Mutex::new(remover) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Ok(remover) = self.remover.get_mut() {
            drop(remover.stdin.take());
        }
    }
}
