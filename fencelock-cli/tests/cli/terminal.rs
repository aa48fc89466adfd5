//! On a terminal: the display while waiting, Ctrl-C, Ctrl-Z, and commands that read from it.

use crate::harness::{Place, code, text, until};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

/// A terminal with a program in it, as the leader of its session.
struct Screen {
    keyboard: File,
    seen: Arc<Mutex<Vec<u8>>>,
    program: Child,
}

impl Screen {
    fn new(place: &Place, program: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let side =
            || File::options().read(true).write(true).open(std::ffi::OsStr::from_bytes(path.as_bytes())).unwrap();
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", "env", "--default-signal=INT,QUIT"])
            .args(program)
            .current_dir(place.path(""));
        command
            .env("FENCELOCK_URL", place.url())
            .env("PS1", "ready> ")
            .env("fencelock", env!("CARGO_BIN_EXE_fencelock"));
        let program = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sees = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                sees.lock().unwrap().extend(&bytes[..length]);
            }
        });
        Self { keyboard, seen, program }
    }

    fn shell(place: &Place) -> Self {
        Self::new(place, &["bash", "--norc", "--noprofile", "-i"])
    }

    fn keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        text(&self.seen.lock().unwrap())
    }

    /// Waits until something is on the screen, and forgets all that was before it.
    fn sees(&self, word: &str) {
        until(&format!("{word:?} on the screen"), || {
            let at = self.text().find(word)?;
            let mut seen = self.seen.lock().unwrap();
            let rest = String::from_utf8_lossy(&seen)[at + word.len()..].as_bytes().to_vec();
            *seen = rest;
            Some(())
        });
    }

    /// Waits for the end; the exit code.
    fn end(&mut self) -> i32 {
        code(until("the program's end", || self.program.try_wait().unwrap()))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn the_holder_is_shown_while_waiting_and_the_line_is_cleared() {
    let place = Place::new();
    let mut first = place.tool(&["run", "x", "--", "sh", "-c", "echo > started; cat"]);
    let mut first = first.stdin(std::process::Stdio::piped()).spawn().unwrap();
    place.line("started");
    let mut second = Screen::new(&place, &[env!("CARGO_BIN_EXE_fencelock"), "run", "x", "--", "echo", "mine"]);
    second.sees(&format!(":{} sh for ", first.id()));
    second.sees("waiting for ");
    drop(first.stdin.take());
    second.sees("\r\x1b[K");
    second.sees("mine");
    assert_eq!(second.end(), 0);
    first.wait().unwrap();
}

#[test]
fn ctrl_c_ends_the_command_and_the_script_around_it() {
    let place = Place::new();
    let script =
        "for i in 1 2 3; do $fencelock run x -- sh -c 'echo run-$0; exec sleep 1000' $i; done; echo not reached";
    let mut screen = Screen::new(&place, &["bash", "-c", script]);
    screen.sees("run-1");
    screen.keys("\x03");
    assert_eq!(screen.end(), 130);
    assert!(!screen.text().contains("run-2"), "{}", screen.text());
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn ctrl_c_ends_the_waiting_and_the_script_around_it() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    let mut screen = Screen::new(&place, &["bash", "-c", "$fencelock run x -- true; echo not reached"]);
    screen.sees("waiting for ");
    screen.keys("\x03");
    assert_eq!(screen.end(), 130);
    assert_eq!(place.standing("x"), (1, 0));
    drop(first);
}

#[test]
fn an_interactive_shell_runs_under_the_lock_and_gives_the_terminal_back() {
    let place = Place::new();
    let mut screen = Screen::shell(&place);
    screen.sees("ready> ");
    screen.keys("$fencelock run x -- bash --norc --noprofile -i\r");
    screen.sees("ready> ");
    screen.keys("echo in-$FENCELOCK_NAME\r");
    screen.sees("in-x");
    assert_eq!(place.standing("x"), (1, 0));
    // A job of the inner shell, ended by Ctrl-C: the inner shell goes on.
    screen.keys("sleep 1000\r");
    screen.sees("sleep 1000\r\n");
    until("the job in the foreground", || has_foreground(&place, "sleep"));
    screen.keys("\x03");
    screen.sees("ready> ");
    screen.keys("exit 3\r");
    screen.sees("ready> ");
    screen.keys("echo back-$?\r");
    screen.sees("back-3");
    assert_eq!(place.standing("x"), (0, 0));
    screen.keys("exit\r");
    screen.end();
}

/// Whether a process of this name, in this place, is in the foreground of its terminal.
fn has_foreground(place: &Place, name: &str) -> Option<()> {
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let here = std::fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd == place.path("").canonicalize().unwrap());
        let stat = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
        let Some((start, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        if here && start.ends_with(&format!("({name}")) && fields[2] == fields[5] {
            return Some(());
        }
    }
    None
}

#[test]
fn ctrl_z_suspends_the_job_and_fg_continues_it() {
    let place = Place::new();
    let mut screen = Screen::shell(&place);
    screen.sees("ready> ");
    screen.keys("$fencelock run x -- sh -c 'echo begun; read line; echo got-$line'\r");
    screen.sees("begun\r\n");
    until("the job in the foreground", || has_foreground(&place, "sh"));
    screen.keys("\x1a");
    screen.sees("suspended");
    screen.sees("ready> ");
    assert_eq!(place.standing("x"), (1, 0));
    screen.keys("fg\r");
    until("the job in the foreground", || has_foreground(&place, "sh"));
    screen.keys("hello\r");
    screen.sees("got-hello");
    screen.sees("ready> ");
    screen.keys("exit\r");
    screen.end();
}

#[test]
fn a_command_in_a_pipeline_leaves_the_terminal_to_the_rest_of_it() {
    let place = Place::new();
    // The last part reads from the terminal while the command runs.
    let script = "$fencelock run x -- sh -c 'echo > started; sleep 1000' | { read line </dev/tty; echo got-$line; }";
    let mut screen = Screen::new(&place, &["bash", "-c", script]);
    place.line("started");
    screen.keys("hello\r");
    screen.sees("got-hello");
    screen.keys("\x03");
    screen.end();
    assert_eq!(place.standing("x"), (0, 0));
}

#[test]
fn break_asks_and_shows_the_holder() {
    let place = Place::new();
    let first = place.start(&["run", "x", "--", "sh", "-c", "echo > started; sleep 1000"]);
    place.line("started");
    let tool = env!("CARGO_BIN_EXE_fencelock");
    let mut refused = Screen::new(&place, &[tool, "break", "x"]);
    refused.sees(&format!(":{} sh", first.id()));
    refused.sees("[y/N]");
    refused.keys("n\r");
    refused.sees("left alone");
    assert_eq!(refused.end(), 1);
    assert_eq!(place.standing("x"), (1, 0));
    let mut agreed = Screen::new(&place, &[tool, "break", "x"]);
    agreed.sees("[y/N]");
    agreed.keys("y\r");
    agreed.sees("1 holder");
    assert_eq!(agreed.end(), 0);
    assert_eq!(first.code(), 74);
}
