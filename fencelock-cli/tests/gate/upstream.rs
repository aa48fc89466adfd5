//! Upstreams that close, break off, hurry or dawdle, and what the gate's clients see of it.

use crate::harness::{DEADLINE, Gate, until};
use fencelock_testkit::redis::certificate;
use fencelock_testkit::web;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const KEPT: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nkept";

/// A gate before an upstream that follows a script.
struct Scene {
    gate: Gate,
    /// The upstream's port.
    port: u16,
    /// How many connections the upstream was asked for.
    connections: Arc<AtomicUsize>,
    /// The starts of the requests that it read, in their order.
    seen: Arc<Mutex<Vec<String>>>,
    _dir: TempDir,
}

/// One connection, as the upstream sees it.
struct Caller<S> {
    stream: S,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    /// The script is told the number of its connection, from 0.
    fn new(arguments: &[&str], script: impl Fn(usize, Caller<TcpStream>) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!("http://127.0.0.1:{port}");
        let (connections, seen) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<String>>>::default());
        let (counter, script) = (Arc::clone(&connections), Arc::new(script));
        let caller_sees = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                let number = counter.fetch_add(1, Ordering::AcqRel);
                let (script, seen) = (Arc::clone(&script), Arc::clone(&caller_sees));
                std::thread::spawn(move || script(number, Caller { stream, seen }));
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|&word| word.to_owned()).collect();
        let gate = Gate::start(&url, dir.path().join("gate.redb"), &arguments);
        Self { gate, port, connections, seen, _dir: dir }
    }

    /// Waits until the gate's side has been told that the upstream closed its connections: a busy machine takes its time for that, and a
    /// request that is sent before may have arrived, as far as the gate can know.
    fn told_of_the_end(&self) {
        let to_upstream = format!(":{:04X} 01 ", self.port);
        until("the end of the connections", || {
            let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
            // Remote address and state: 01 is a connection without an end so far.
            (!sockets.lines().any(|line| line.contains(&to_upstream))).then_some(())
        });
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }

    fn put(&self, token: u64) -> web::Reply {
        web::send(&self.gate.address, "PUT", "/a", &[("Fencing-Token", &token.to_string())], b"x").unwrap()
    }

    /// A request on a thread of its own.
    fn put_later(&self, token: u64) -> std::thread::JoinHandle<web::Reply> {
        let address = self.gate.address.clone();
        let send = move || web::send(&address, "PUT", "/a", &[("Fencing-Token", &token.to_string())], b"x").unwrap();
        std::thread::spawn(send)
    }

    /// Waits until requests with an older token than this one are refused.
    fn announced(&self, token: u64) {
        until("the newer one's announcement", || self.put(0).text().contains(&format!("token {token}")).then_some(()));
    }
}

impl<S: Read + Write> Caller<S> {
    /// Everything up to the empty line; nothing when the gate closed the connection.
    fn head(&mut self) -> Option<String> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) => head.push(byte[0]),
                _ => return None,
            }
        }
        let head = String::from_utf8(head).unwrap();
        self.seen.lock().unwrap().push(head.lines().next().unwrap().to_owned());
        Some(head)
    }

    fn body(&mut self, length: usize) -> Vec<u8> {
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        body
    }

    /// Reads a whole request.
    fn request(&mut self) -> Option<String> {
        let head = self.head()?;
        let length =
            head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        self.body(length.unwrap_or(0));
        Some(head)
    }

    fn say(&mut self, text: &[u8]) {
        let _ = self.stream.write_all(text);
        let _ = self.stream.flush();
    }

    /// Answers requests until the gate closes the connection.
    fn go_on(&mut self) {
        while self.request().is_some() {
            self.say(KEPT);
        }
    }
}

/// A client's connection that stays open.
struct Client(TcpStream);

impl Client {
    fn new(scene: &Scene) -> Self {
        let stream = TcpStream::connect(&scene.gate.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(stream)
    }

    fn ask(&mut self, start: &str, headers: &str, body: &str) -> web::Reply {
        let length = body.len();
        let head =
            format!("{start} HTTP/1.1\r\nHost: x\r\nFencing-Token: 1\r\nContent-Length: {length}\r\n{headers}\r\n");
        self.0.write_all(format!("{head}{body}").as_bytes()).unwrap();
        web::answer(&mut self.0).unwrap()
    }

    fn put(&mut self) -> web::Reply {
        self.ask("PUT /a", "", "x")
    }
}

fn gates<T: Send + 'static>() -> (Sender<T>, Mutex<Receiver<T>>) {
    let (open, wait) = channel();
    (open, Mutex::new(wait))
}

fn wait<T>(receiver: &Mutex<Receiver<T>>) -> T {
    receiver.lock().unwrap().recv_timeout(DEADLINE).unwrap()
}

#[test]
fn a_connection_to_the_upstream_serves_one_request_after_the_other() {
    let scene = Scene::new(&[], |_, mut caller| caller.go_on());
    let mut client = Client::new(&scene);
    for _ in 0..50 {
        assert_eq!(client.put().text(), "kept");
    }
    assert_eq!(scene.connections.load(Ordering::Acquire), 1);
    assert_eq!(scene.seen().len(), 50);
}

#[test]
fn a_request_is_sent_over_another_connection_when_the_old_one_had_been_closed() {
    let (closed, told) = channel();
    let scene = Scene::new(&[], move |_, mut caller| {
        caller.request();
        caller.say(KEPT);
        drop(caller);
        let _ = closed.send(());
    });
    let mut client = Client::new(&scene);
    for number in 1..=20 {
        assert_eq!(client.put().text(), "kept");
        told.recv_timeout(DEADLINE).unwrap();
        scene.told_of_the_end();
        assert_eq!(scene.connections.load(Ordering::Acquire), number);
    }
    assert_eq!(scene.seen().len(), 20, "each arrived once");
}

#[test]
fn a_connection_that_the_upstream_closed_is_let_go_of() {
    let (closed, told) = channel();
    let scene = Scene::new(&[], move |_, mut caller| {
        caller.request();
        caller.say(KEPT);
        caller.stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Resolves when the gate closes its side as well.
        let _ = closed.send(caller.stream.read(&mut [0]).unwrap());
    });
    assert_eq!(scene.put(1).status, 200);
    assert_eq!(told.recv_timeout(DEADLINE).unwrap(), 0);
}

#[test]
fn a_request_that_may_have_arrived_is_not_sent_twice() {
    // The second request of each connection is read, and never answered.
    let scene = Scene::new(&[], |_, mut caller| {
        caller.request();
        caller.say(KEPT);
        caller.request();
    });
    let mut client = Client::new(&scene);
    assert_eq!(client.put().status, 200);
    let reply = client.put();
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains("the outcome is not known"), "{}", reply.text());
    assert_eq!(scene.seen().len(), 2, "{:?}", scene.seen());
    assert_eq!(client.put().status, 200, "the next one has another connection");

    // The same over a new connection, and with nonsense for an answer.
    for nonsense in
        [&b""[..], b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nkept"]
    {
        let scene = Scene::new(&[], move |_, mut caller| {
            caller.request();
            caller.say(nonsense);
        });
        assert_eq!(scene.put(1).status, 502, "{}", String::from_utf8_lossy(nonsense));
        assert_eq!(scene.seen().len(), 1);
    }
}

#[test]
fn an_answer_that_comes_before_the_end_of_the_body_does_not_end_the_request() {
    let (arrived, whole) = channel();
    let scene = Scene::new(&["--drain", "60s"], move |number, mut caller| {
        if number > 0 {
            return caller.go_on();
        }
        caller.head();
        caller.say(KEPT);
        let _ = arrived.send(caller.body(10));
        // A connection that is closed just when the next request is sent would be another story.
        caller.go_on();
    });
    let mut old = web::begin(&scene.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(10)).unwrap();
    old.write_all(b"01234").unwrap();
    assert_eq!(web::answer(&mut old).unwrap().text(), "kept");
    let newer = scene.put_later(2);
    scene.announced(2);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!newer.is_finished() && scene.seen().len() == 1, "the old body is still on its way");
    old.write_all(b"56789").unwrap();
    assert_eq!(whole.recv_timeout(DEADLINE).unwrap(), b"0123456789");
    assert_eq!(newer.join().unwrap().status, 200);
}

#[test]
fn an_upload_that_the_upstream_stops_to_take_after_its_answer_is_cut_off() {
    for arguments in [&["--drain", "100ms"][..], &["--timeout", "200ms", "--drain", "60s"]] {
        let (open, more) = gates::<()>();
        let scene = Scene::new(arguments, move |number, mut caller| {
            if number > 0 {
                return caller.go_on();
            }
            caller.head();
            caller.say(KEPT);
            // For longer than the client would wait.
            let _ = more.lock().unwrap().recv();
        });
        let length = 100 << 20;
        let mut old = web::begin(&scene.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(length)).unwrap();
        let mut upload = old.try_clone().unwrap();
        let upload = std::thread::spawn(move || upload.write_all(&vec![b'x'; length]));
        assert_eq!(web::answer(&mut old).unwrap().text(), "kept");
        assert_eq!(scene.put(2).status, 200, "{arguments:?}");
        assert!(upload.join().unwrap().is_err(), "the old upload never came to its end");
        open.send(()).unwrap();
    }
}

#[test]
fn an_answer_that_does_not_get_on_is_cut_off() {
    // The upstream falls silent in the middle of its answer; or the client takes nothing of an answer that does not end.
    for client_reads in [true, false] {
        let (closed, told) = channel();
        let scene = Scene::new(&["--drain", "100ms"], move |number, mut caller| {
            if number > 0 {
                return caller.go_on();
            }
            caller.request();
            // Waits for longer than the client would.
            caller.stream.set_read_timeout(None).unwrap();
            caller.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
            let piece = vec![b'x'; if client_reads { 1 } else { 1 << 20 }];
            while caller.stream.write_all(&piece).is_ok() && !client_reads {}
            let _ = closed.send(caller.stream.read(&mut [0]));
        });
        let old = web::begin(&scene.gate.address, "GET", "/a", &[("Fencing-Token", "1")], Some(0)).unwrap();
        assert_eq!(old.peek(&mut [0]).unwrap(), 1, "the answer has begun");
        let mut reader = old.try_clone().unwrap();
        let reader = client_reads.then(|| std::thread::spawn(move || web::answer(&mut reader)));
        assert_eq!(scene.put(2).status, 200, "client reads: {client_reads}");
        let closed = told.recv_timeout(DEADLINE).unwrap();
        assert!(matches!(closed, Ok(0) | Err(_)), "the upstream's connection was closed");
        assert!(reader.is_none_or(|reader| reader.join().unwrap().is_err()), "the answer does not look whole");
    }
}

#[test]
fn an_answer_streams_and_counts_as_under_way_when_the_client_went_away() {
    let (open, more) = gates::<()>();
    let scene = Scene::new(&["--drain", "60s"], move |number, mut caller| {
        if number > 0 {
            return caller.go_on();
        }
        caller.request();
        caller.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n");
        wait(&more);
        caller.say(b"3\r\ntwo\r\n");
        wait(&more);
        caller.say(b"0\r\n\r\n");
        caller.go_on();
    });
    let mut old = web::begin(&scene.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(0)).unwrap();
    let mut told = String::new();
    let mut read = |old: &mut TcpStream, what: &str| {
        while !told.contains(what) {
            let mut piece = [0; 1024];
            let length = old.read(&mut piece).unwrap();
            assert!(length > 0, "{told}");
            told.push_str(&String::from_utf8_lossy(&piece[..length]));
        }
    };
    read(&mut old, "one");
    open.send(()).unwrap();
    read(&mut old, "two");
    drop(old);
    let newer = scene.put_later(2);
    scene.announced(2);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!newer.is_finished() && scene.seen().len() == 1, "the upstream is still at work on the old one");
    open.send(()).unwrap();
    assert_eq!(newer.join().unwrap().status, 200);
}

#[test]
fn an_answer_that_breaks_off_does_not_look_whole() {
    for part in [
        &b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nkept"[..],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nkept\r\n",
    ] {
        let scene = Scene::new(&[], move |_, mut caller| {
            caller.request();
            caller.say(part);
        });
        let mut stream = web::begin(&scene.gate.address, "PUT", "/a", &[("Fencing-Token", "1")], Some(0)).unwrap();
        assert!(web::answer(&mut stream).is_err());
    }
}

#[test]
fn a_request_that_waits_for_its_answer_is_cut_off_as_well() {
    let (closed, told) = channel();
    let scene = Scene::new(&["--drain", "100ms"], move |number, mut caller| {
        if number > 0 {
            return caller.go_on();
        }
        caller.request();
        let _ = closed.send(caller.stream.read(&mut [0]).unwrap());
    });
    let old = scene.put_later(1);
    until("the old request at the upstream", || (scene.seen().len() == 1).then_some(()));
    assert_eq!(scene.put(2).status, 200);
    assert_eq!(old.join().unwrap().status, 409);
    assert_eq!(told.recv_timeout(DEADLINE).unwrap(), 0, "its connection was closed");
}

#[test]
fn answers_without_a_body_leave_the_connection_as_it_should_be() {
    let scene = Scene::new(&[], |_, mut caller| {
        while let Some(head) = caller.request() {
            match head.split(' ').nth(1).unwrap() {
                "/204" => caller.say(b"HTTP/1.1 204 No Content\r\n\r\n"),
                "/304" => caller.say(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
                "/100" => caller.say(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nkept"),
                "/close" => {
                    return caller.say(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nkept");
                }
                "/end" => return caller.say(b"HTTP/1.1 200 OK\r\n\r\nkept"),
                _ if head.starts_with("HEAD") => caller.say(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
                _ => caller.say(KEPT),
            }
        }
    });
    let mut client = Client::new(&scene);
    for _ in 0..3 {
        for (start, status) in [("PUT /204", "204"), ("GET /304", "304"), ("HEAD /a", "200")] {
            let head = format!("{start} HTTP/1.1\r\nHost: x\r\nFencing-Token: 1\r\nContent-Length: 0\r\n\r\n");
            client.0.write_all(head.as_bytes()).unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                client.0.read_exact(&mut byte).unwrap();
                answer.push(byte[0]);
            }
            assert!(answer.starts_with(format!("HTTP/1.1 {status}").as_bytes()), "{start}");
        }
        assert_eq!(client.put().text(), "kept");
        assert_eq!(client.ask("PUT /100", "", "x").text(), "kept");
    }
    assert_eq!(scene.connections.load(Ordering::Acquire), 1);
    assert_eq!(client.ask("PUT /close", "", "x").text(), "kept", "the client's connection stays open");
    let reply = client.ask("PUT /a", "", "x");
    assert_eq!((reply.status, scene.connections.load(Ordering::Acquire)), (200, 2));
    let end = client.ask("PUT /end", "Connection: close\r\n", "x");
    assert_eq!(end.text(), "kept", "an answer that ends with its connection");
}

#[test]
fn a_client_that_asks_before_it_sends_the_body_is_told_to_go_on() {
    let scene = Scene::new(&[], |_, mut caller| caller.go_on());
    let mut client = Client::new(&scene);
    client
        .0
        .write_all(
            b"PUT /a HTTP/1.1\r\nHost: x\r\nFencing-Token: 1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n",
        )
        .unwrap();
    let mut told = [0; 25];
    client.0.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.0.write_all(b"x").unwrap();
    assert_eq!(web::answer(&mut client.0).unwrap().text(), "kept");
}

#[test]
fn requests_that_come_at_once_are_answered_in_their_order() {
    let scene = Scene::new(&[], |_, mut caller| {
        while let Some(head) = caller.request() {
            let path = head.split(' ').nth(1).unwrap();
            caller.say(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}", path.len()).as_bytes());
        }
    });
    let mut client = Client::new(&scene);
    let request =
        |path: &str| format!("PUT {path} HTTP/1.1\r\nHost: x\r\nFencing-Token: 1\r\nContent-Length: 3\r\n\r\nabc");
    let all: String = (0..30).map(|number| request(&format!("/number-{number}"))).collect();
    client.0.write_all(all.as_bytes()).unwrap();
    let (mut told, mut piece) = (String::new(), [0; 4096]);
    while !told.ends_with("/number-29") {
        let length = client.0.read(&mut piece).unwrap();
        assert!(length > 0, "{told}");
        told.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    let order: Vec<&str> = told.lines().filter_map(|line| line.strip_prefix("/number-")).collect();
    let numbers = order.iter().map(|rest| rest.split("HTTP").next().unwrap().parse::<usize>().unwrap());
    assert!(numbers.eq(0..30), "{told}");
}

/// An upstream that speaks TLS, and the directory that holds its certificates.
fn https(
    script: impl Fn(Caller<StreamOwned<ServerConnection, TcpStream>>) + Send + Sync + 'static,
) -> (String, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    certificate::write(dir.path());
    let chain = CertificateDer::pem_file_iter(dir.path().join("server.pem")).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(dir.path().join("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let (config, script) = (Arc::new(config), Arc::new(script));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            let stream = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), stream);
            let script = Arc::clone(&script);
            std::thread::spawn(move || script(Caller { stream, seen: Arc::default() }));
        }
    });
    (url, dir)
}

#[test]
fn an_https_upstream_is_trusted_by_its_authority_and_by_no_other() {
    let (url, dir) = https(|mut caller| caller.go_on());
    let send =
        |gate: &Gate, body: &[u8]| web::send(&gate.address, "PUT", "/a", &[("Fencing-Token", "1")], body).unwrap();
    let trusting = |file: &Path| vec!["--upstream-ca".to_owned(), file.to_str().unwrap().to_owned()];
    let gate = Gate::start(&url, dir.path().join("trusted"), &trusting(&dir.path().join("ca.pem")));
    for _ in 0..5 {
        assert_eq!(send(&gate, &vec![b'x'; 300_000]).text(), "kept");
    }
    let other = tempfile::tempdir().unwrap();
    certificate::write(other.path());
    for arguments in [vec![], trusting(&other.path().join("ca.pem"))] {
        let gate = Gate::start(&url, dir.path().join("not trusted"), &arguments);
        let reply = send(&gate, b"x");
        assert_eq!(reply.status, 502, "{arguments:?}");
        assert!(reply.text().contains("nothing was done"), "{}", reply.text());
        let trouble = gate.says("trouble");
        assert!(trouble["cause"].as_str().unwrap().contains("certificate"), "{trouble}");
    }
}

#[test]
fn a_bad_authority_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    let store = dir.path().join("store");
    for (file, upstream, expected) in [
        (dir.path().join("missing"), "https://127.0.0.1:1", "missing"),
        (file("empty", ""), "https://127.0.0.1:1", "no certificate"),
        (
            file("nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "https://127.0.0.1:1",
            "nonsense",
        ),
        (file("unused", ""), "http://127.0.0.1:1", "https://"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_fencelock"))
            .args(["gate", "--listen", "127.0.0.1:0", "--upstream", upstream, "--store"])
            .arg(&store)
            .arg("--upstream-ca")
            .arg(&file)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{told}");
        assert!(told.lines().count() == 1 && told.contains("--upstream-ca") && told.contains(expected), "{told}");
    }
    assert!(!store.exists(), "nothing was touched");
}
