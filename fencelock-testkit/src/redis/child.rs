//! Programs that a test starts and that end with it, also when the test itself is killed.

use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// The kernel ends a child when the *thread* that started it ends, so all are started by one that never does.
static STARTER: LazyLock<Mutex<mpsc::Sender<Order>>> = LazyLock::new(|| {
    let (order, orders) = mpsc::channel::<Order>();
    std::thread::spawn(move || {
        for (mut command, answer) in orders {
            let _ = answer.send(command.spawn());
        }
    });
    Mutex::new(order)
});

/// A running program. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Program(Child);

impl Program {
    /// Starts a program by its name or path. `NotFound` when there is none.
    pub(crate) fn start(program: &str, arguments: &[&str]) -> io::Result<Self> {
        let path = find(program).ok_or(io::ErrorKind::NotFound)?;
        // Linux only: setpriv asks the kernel to kill the program with its parent, and becomes the program.
        let mut command = if cfg!(target_os = "linux") {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL"]).arg(path);
            command
        } else {
            Command::new(path)
        };
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (tell, told) = mpsc::channel();
        let sent = STARTER.lock().unwrap_or_else(PoisonError::into_inner).send((command, tell));
        sent.map_err(|_| io::Error::other("the thread that starts programs is gone"))?;
        told.recv().map_err(io::Error::other)?.map(Self)
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.0.id()).expect("a process id is small");
        let id = Pid::from_raw(id).expect("a process id is not 0");
        kill_process(id, signal).expect("the program has not been waited for");
    }

    /// The status, if it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("a child can be waited for")
    }

    /// Waits until it has ended.
    pub(crate) fn wait(mut self) {
        self.0.wait().expect("a child can be waited for");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn find(program: &str) -> Option<std::path::PathBuf> {
    if program.contains('/') {
        return Some(program.into()).filter(|path: &std::path::PathBuf| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file())
}
