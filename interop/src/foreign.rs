//! A foreign client: a process that takes one command per line and gives one answer per line.
//!
//! | command | answer |
//! | --- | --- |
//! | `lock NAME MILLISECONDS` | `locked`, or `busy`, without waiting |
//! | `extend` | `extended`, or `lost`; `cannot` where the client has no such thing |
//! | `unlock` | `unlocked`, or `lost` where the client can tell |

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A program that speaks for a foreign client.
pub struct Kind {
    pub name: &'static str,
    pub command: Vec<String>,
}

/// Such a program at work. It is killed when this is dropped.
pub struct Foreign {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Foreign {
    /// Starts it for the server on this port.
    pub fn start(kind: &Kind, port: u16) -> Self {
        let (program, arguments) = kind.command.split_first().expect("a program");
        let mut child = Command::new(program)
            .args(arguments)
            .arg(port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}"));
        let input = child.stdin.take().expect("it is piped");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { child, input, output }
    }

    pub fn lock(&mut self, name: &str, milliseconds: u32) -> String {
        self.ask(&format!("lock {name} {milliseconds}"))
    }

    pub fn extend(&mut self) -> String {
        self.ask("extend")
    }

    pub fn unlock(&mut self) -> String {
        self.ask("unlock")
    }

    fn ask(&mut self, question: &str) -> String {
        let mut answer = String::new();
        writeln!(self.input, "{question}").expect("the client lives");
        self.output.read_line(&mut answer).expect("the client answers");
        answer.trim_end().to_owned()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
