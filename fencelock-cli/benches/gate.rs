//! The gate beside its upstream, in one run: `cargo bench -p fencelock-cli --bench gate`.
//!
//! Starts a server, the gate before it, and a load generator with connections that stay open, all on loopback and on the same
//! cores. Prints the share of the direct throughput that is left, since the figures themselves are the machine's. Twice: with a
//! server that keeps what it gets in a file, as one does that is worth a fence, and with one that does nothing at all, so that all
//! that is left is the cost of the way.

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_secs(4);
const CONNECTIONS: usize = 32;

/// The benchmark starts itself as the upstream, so that it is a process of its own as upstreams are.
fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let Some(at) = words.iter().position(|word| word == "--upstream") {
        return upstream(words.get(at + 1).map(PathBuf::from));
    }
    println!("{CONNECTIONS} connections, PUT of 1 KiB, requests per second");
    let dir = tempfile::tempdir().expect("a directory");
    compare("an upstream that keeps each body in a file", Some(dir.path()));
    compare("an upstream that does nothing", None);
}

fn compare(what: &str, keeps: Option<&Path>) {
    println!("  {what}");
    let mut upstream = Running::start(
        Command::new(std::env::current_exe().expect("a path")).arg("--upstream").args(keeps.map(Path::as_os_str)),
    );
    let direct = upstream.line();
    let dir = tempfile::tempdir().expect("a directory");
    let mut gate = Command::new(env!("CARGO_BIN_EXE_fencelock"));
    gate.args(["gate", "--json", "--listen", "127.0.0.1:0", "--upstream", &format!("http://{direct}"), "--store"]);
    gate.arg(dir.path().join("gate.redb"));
    let mut gate = Running::start(&mut gate);
    let ready: serde_json::Value = serde_json::from_str(&gate.line()).expect("a line of JSON");
    let gated = ready["listen"].as_str().expect("an address").to_owned();
    let same = |_: u64| 7;
    // Three rounds of each in turn, so that a busy moment of the machine hits both.
    let (mut straight, mut through) = (0.0, 0.0);
    for _ in 0..3 {
        straight += load(&direct, same) / 3.0;
        through += load(&gated, same) / 3.0;
    }
    println!("    direct                              {straight:>8.0}");
    println!("    through the gate, one token         {through:>8.0}   {:.2} of direct", through / straight);
    // Every request brings a newer token, of a resource per connection: each must be on the disk first.
    let next = AtomicU64::new(8);
    let fresh = load(&gated, |_| next.fetch_add(1, Ordering::Relaxed));
    println!("    through the gate, a new token each  {fresh:>8.0}   {:.2} of direct", fresh / straight);
}

struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts"))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.0.stdout.as_mut().expect("a pipe");
        BufReader::with_capacity(1, stdout).read_line(&mut line).expect("it says where it is");
        line.trim().to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::main(worker_threads = 2)]
async fn upstream(keeps: Option<PathBuf>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    println!("{}", listener.local_addr().expect("an address"));
    let keeps = Arc::new(keeps);
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let keeps = Arc::clone(&keeps);
        let service = service_fn(move |request| keep(request, Arc::clone(&keeps)));
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn keep(request: Request<Incoming>, keeps: Arc<Option<PathBuf>>) -> Result<Response<String>, Infallible> {
    let name = request.uri().path().trim_matches('/').to_owned();
    let (mut body, mut whole) = (request.into_body(), Vec::new());
    while let Some(Ok(frame)) =
        std::future::poll_fn(|cx| hyper::body::Body::poll_frame(std::pin::Pin::new(&mut body), cx)).await
    {
        whole.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
    }
    if let Some(dir) = keeps.as_deref() {
        // As a store of objects does: a new file takes the place of the old one.
        let new = dir.join(format!("{name}.new"));
        std::fs::write(&new, &whole).and_then(|()| std::fs::rename(&new, dir.join(name))).expect("it can be kept");
    }
    Ok(Response::new("kept".to_owned()))
}

/// Requests per second over connections that stay open, each with one request at a time.
fn load(address: &str, token: impl Fn(u64) -> u64 + Sync) -> f64 {
    let start = Instant::now();
    let (total, token) = (AtomicU64::new(0), &token);
    std::thread::scope(|scope| {
        for number in 0..CONNECTIONS {
            let total = &total;
            scope.spawn(move || {
                let mut stream = TcpStream::connect(address).expect("it listens");
                stream.set_nodelay(true).expect("an option");
                let mut count = 0;
                let mut answer = [0; 4096];
                while start.elapsed() < SPAN {
                    let head = format!(
                        "PUT /{number} HTTP/1.1\r\nHost: x\r\nFencing-Token: {}\r\nContent-Length: 1024\r\n\r\n",
                        token(count)
                    );
                    let mut request = head.into_bytes();
                    request.resize(request.len() + 1024, b'x');
                    stream.write_all(&request).expect("it takes a request");
                    let mut length = 0;
                    while !answer[..length].ends_with(b"kept") {
                        let read = stream.read(&mut answer[length..]).expect("it answers");
                        assert!(read > 0, "the connection was closed: {}", String::from_utf8_lossy(&answer[..length]));
                        length += read;
                        assert!(length < answer.len(), "{}", String::from_utf8_lossy(&answer));
                    }
                    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..length]));
                    count += 1;
                }
                total.fetch_add(count, Ordering::Relaxed);
            });
        }
    });
    #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
    let total = total.into_inner() as f64;
    total / start.elapsed().as_secs_f64()
}
