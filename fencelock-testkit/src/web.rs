//! HTTP for checks of the gate: a small server with a memory, and a client that says exactly what it is told to say.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a check waits for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request as the server saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// `PUT`, say.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// How much of the body arrived.
    pub length: usize,
    /// Whether all of it did.
    pub complete: bool,
}

impl Seen {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

#[derive(Default)]
struct State {
    values: HashMap<String, Vec<u8>>,
    seen: Vec<Seen>,
    /// How many heads of requests arrived.
    begun: usize,
    /// Paths whose requests are not answered for now.
    held: HashSet<String>,
}

/// A server that keeps what is PUT and gives it back. `GET /big/N` answers with N bytes. It ends with the test's process.
#[derive(Clone)]
pub struct WebServer {
    port: u16,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl WebServer {
    /// A server on a port of its own.
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("it has an address").port();
        let server = Self { port, state: Arc::default() };
        let serving = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = serving.clone();
                std::thread::spawn(move || _ = server.serve(stream));
            }
        });
        server
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests so far, in the order in which their ends arrived.
    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    /// How many requests have begun to arrive.
    pub fn begun(&self) -> usize {
        self.state().begun
    }

    /// What is kept under a path.
    pub fn value(&self, path: &str) -> Option<Vec<u8>> {
        self.state().values.get(path).cloned()
    }

    /// Keeps something under a path.
    pub fn put(&self, path: &str, value: &[u8]) {
        self.state().values.insert(path.to_owned(), value.to_vec());
    }

    /// Requests to this path are received, and neither carried out nor answered, until [`let_go`](WebServer::let_go).
    pub fn hold(&self, path: &str) {
        self.state().held.insert(path.to_owned());
    }

    /// Carries out and answers what was held.
    pub fn let_go(&self, path: &str) {
        self.state().held.remove(path);
        self.state.1.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut stream = stream;
        while let Some((start, headers)) = head(&mut reader)? {
            self.state().begun += 1;
            let (mut seen, body) = request(&mut reader, &start, headers);
            seen.length = body.as_ref().map_or_else(|part| part.len(), Vec::len);
            seen.complete = body.is_ok();
            let mut state = self.state();
            state.seen.push(seen.clone());
            let Ok(body) = body else { return Ok(()) };
            while state.held.contains(&seen.path) {
                state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let (status, answer) = carry_out(&mut state, &seen, body);
            drop(state);
            let mut reply = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", answer.len()).into_bytes();
            reply.extend_from_slice(b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nX-Kept: yes\r\n\r\n");
            if seen.method != "HEAD" {
                reply.extend_from_slice(&answer);
            }
            stream.write_all(&reply)?;
        }
        Ok(())
    }
}

fn carry_out(state: &mut State, seen: &Seen, body: Vec<u8>) -> (&'static str, Vec<u8>) {
    let big = seen.path.strip_prefix("/big/").and_then(|length| length.parse().ok());
    match (seen.method.as_str(), big) {
        ("GET", Some(length)) => ("200 OK", vec![b'x'; length]),
        ("PUT" | "POST", _) => {
            state.values.insert(seen.path.clone(), body);
            ("200 OK", b"kept".to_vec())
        }
        ("DELETE", _) => {
            state.values.remove(&seen.path);
            ("200 OK", b"gone".to_vec())
        }
        _ => match state.values.get(&seen.path) {
            Some(value) => ("200 OK", value.clone()),
            None => ("404 Not Found", b"nothing".to_vec()),
        },
    }
}

type Headers = Vec<(String, String)>;

/// The start line and the headers; `None` when the other side is done.
fn head(reader: &mut impl BufRead) -> io::Result<Option<(String, Headers)>> {
    let mut start = String::new();
    if reader.read_line(&mut start)? == 0 {
        return Ok(None);
    }
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => return Ok(Some((start.trim_end().to_owned(), headers))),
        }
    }
}

/// A body as the headers announce it; what arrived of it when it broke off.
fn body(reader: &mut impl BufRead, headers: &Headers, to_the_end: bool) -> Result<Vec<u8>, Vec<u8>> {
    let find = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let mut data = Vec::new();
    if find("transfer-encoding").is_some() {
        loop {
            let mut line = String::new();
            let size = match reader.read_line(&mut line) {
                Ok(1..) => usize::from_str_radix(line.trim(), 16).ok(),
                _ => None,
            };
            let Some(size) = size else { return Err(data) };
            let mut chunk = vec![0; size + 2];
            if reader.read_exact(&mut chunk).is_err() {
                return Err(data);
            }
            data.extend_from_slice(&chunk[..size]);
            if size == 0 {
                return Ok(data);
            }
        }
    }
    let length = find("content-length").and_then(|length| length.parse().ok());
    let limit = length.unwrap_or(if to_the_end { u64::MAX } else { 0 });
    let read = reader.take(limit).read_to_end(&mut data);
    let whole = read.is_ok() && length.is_none_or(|length| data.len() as u64 == length);
    if whole { Ok(data) } else { Err(data) }
}

fn request(reader: &mut impl BufRead, start: &str, headers: Headers) -> (Seen, Result<Vec<u8>, Vec<u8>>) {
    let mut words = start.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let body = body(reader, &headers, false);
    (Seen { method, path, headers, length: 0, complete: false }, body)
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// 200, say.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Sends a request on a connection of its own.
///
/// # Errors
/// When the connection cannot be made or breaks.
pub fn send(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Reply> {
    let mut stream = begin(address, method, path, headers, Some(body.len()))?;
    // The server may answer, and close, before it has read all of a body that it does not want.
    let _ = stream.write_all(body);
    answer(&mut stream)
}

/// Sends a request's head; its body, of this length or in chunks, is up to the caller.
///
/// # Errors
/// When the connection cannot be made.
pub fn begin(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    length: Option<usize>,
) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\n");
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    let _ = match length {
        Some(length) => write!(head, "Content-Length: {length}\r\n\r\n"),
        None => write!(head, "Transfer-Encoding: chunked\r\n\r\n"),
    };
    stream.write_all(head.as_bytes())?;
    Ok(stream)
}

/// Reads an answer.
///
/// # Errors
/// When the connection breaks before all of it is there.
pub fn answer(stream: &mut TcpStream) -> io::Result<Reply> {
    let mut reader = BufReader::new(stream);
    let eof = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (start, headers) = head(&mut reader)?.ok_or_else(eof)?;
    let status = start.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(eof)?;
    let body = body(&mut reader, &headers, true).map_err(|_| eof())?;
    Ok(Reply { status, headers, body })
}
