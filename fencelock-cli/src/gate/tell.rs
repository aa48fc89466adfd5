//! What the gate says: for people on stderr, or with `--json` one object per line on stdout. Paths are told, queries and headers
//! never are: they can hold secrets.

use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// How many lines may wait for a slow reader; what comes on top is dropped, because requests do not wait for the log.
const WAITING: usize = 4096;

#[derive(Debug, Clone)]
pub(crate) struct Tell {
    json: bool,
    quiet: bool,
    verbose: bool,
    lines: SyncSender<Line>,
}

#[derive(Debug)]
enum Line {
    Text(String),
    /// All before it has been written.
    Mark(SyncSender<()>),
}

impl Tell {
    pub(crate) fn new(json: bool, quiet: bool, verbose: bool) -> Self {
        let (lines, queue) = sync_channel(WAITING);
        std::thread::spawn(move || {
            for line in queue {
                let line = match line {
                    Line::Text(line) => line,
                    Line::Mark(written) => {
                        let _ = written.send(());
                        continue;
                    }
                };
                let _ =
                    if json { writeln!(std::io::stdout(), "{line}") } else { writeln!(std::io::stderr(), "{line}") };
            }
        });
        Self { json, quiet, verbose, lines }
    }

    /// Waits until what was said is written, or until the reader does not read.
    pub(crate) fn flush(&self) {
        let (written, told) = sync_channel(1);
        if self.lines.try_send(Line::Mark(written)).is_ok() {
            let _ = told.recv_timeout(Duration::from_millis(500));
        }
    }

    fn say(&self, event: &str, text: &str, fields: Value) {
        if self.quiet {
            return;
        }
        let line = if self.json {
            let mut object = json!({ "event": event });
            if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
                object.extend(fields);
            }
            object.to_string()
        } else {
            format!("fencelock: gate: {}", crate::text::plain(text))
        };
        let _ = self.lines.try_send(Line::Text(line));
    }

    /// Said at any volume: somebody waits for it.
    pub(crate) fn ready(&self, listen: &str, upstream: &str, store: &str, resources: u64) {
        let text = format!("listening on {listen} for {upstream}; {resources} resources known in {store}");
        let fields = json!({ "listen": listen, "upstream": upstream, "store": store, "resources": resources });
        Self { quiet: self.quiet && !self.json, ..self.clone() }.say("ready", &text, fields);
    }

    pub(crate) fn passed(&self, method: &Method, path: &str, status: StatusCode) {
        if self.verbose {
            let text = format!("{method} {path}: {status}");
            self.say("passed", &text, json!({ "method": method.as_str(), "path": path, "status": status.as_u16() }));
        }
    }

    pub(crate) fn refused(&self, method: &Method, path: &str, status: StatusCode, code: &str, why: &str) {
        let text = format!("{method} {path}: {} {why}", status.as_u16());
        let fields = json!({ "method": method.as_str(), "path": path, "status": status.as_u16(), "error": code, "message": why });
        self.say("refused", &text, fields);
    }

    pub(crate) fn cut(&self, resource: &str) {
        let text = format!("{resource}: requests of an older token took longer than --drain and were cut off");
        self.say("cut_off", &text, json!({ "resource": resource }));
    }

    pub(crate) fn trouble(&self, what: &str, why: &str) {
        self.say("trouble", &format!("{what} ({why})"), json!({ "message": what, "cause": why }));
    }

    pub(crate) fn ending(&self, text: &str) {
        self.say("ending", text, json!({ "message": text }));
    }
}
