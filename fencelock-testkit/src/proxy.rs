//! The network between a client and a server, with faults: a TCP proxy that can be told what goes wrong.
//!
//! It does nothing that TCP would not let happen: a stream has no holes. A connection on which an answer was swallowed never
//! carries another one, and is cut in the end; what a partition held back arrives when it heals, however late.

use crate::redis::free_port;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The direction in which bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// What happens to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Passes,
    /// Kept until it passes again.
    Held,
    /// Gone for good.
    Swallowed,
    /// The connection is no more.
    Cut,
}

/// What goes wrong at present. Connections are numbered.
#[derive(Debug, Clone, Default)]
struct Faults {
    refuse: bool,
    delay: Duration,
    /// Connections below this number are cut.
    cut_below: u64,
    /// Connections below this number get no answers.
    mute_below: u64,
    /// Requests of connections below this number are held back.
    hold_below: u64,
    /// Nothing passes in either direction.
    partition: bool,
    /// So many seconds the server's clock seems to be ahead.
    ahead: u64,
}

impl Faults {
    fn flow(&self, number: u64, way: Way) -> Flow {
        match way {
            _ if number < self.cut_below => Flow::Cut,
            Way::ToClient if number < self.mute_below => Flow::Swallowed,
            Way::ToServer if number < self.hold_below => Flow::Held,
            _ if self.partition => Flow::Held,
            _ => Flow::Passes,
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    /// Numbers of connections.
    next: AtomicU64,
    /// So many answers are still to be lost.
    to_lose: AtomicU64,
    /// So many come through before that.
    to_spare: AtomicU64,
    /// So many were.
    lost: AtomicU64,
    cut: AtomicU64,
    /// What was sent to the server since somebody began to listen.
    overheard: Mutex<Option<Vec<u8>>>,
}

impl Counters {
    fn overheard(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.overheard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A proxy in front of a server. Its connections end when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    /// Where new connections lead to.
    server: Arc<AtomicU16>,
    faults: Arc<watch::Sender<Faults>>,
    counters: Arc<Counters>,
    _runtime: tokio::sync::oneshot::Sender<()>,
}

impl Proxy {
    /// A proxy in front of the server on this port of the loopback.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn to(server: u16) -> Self {
        let port = free_port();
        let (faults, seen) = watch::channel(Faults::default());
        let (keep, end) = tokio::sync::oneshot::channel::<()>();
        let counters = Arc::new(Counters::default());
        let server = Arc::new(AtomicU16::new(server));
        let listening = Listening { port, server: Arc::clone(&server), faults: seen, counters: Arc::clone(&counters) };
        let (ready, is_ready) = std::sync::mpsc::channel();
        // A thread of its own: whatever the test does with its runtime, the network goes on.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime can be made");
            runtime.block_on(async {
                let listener = listening.bind().await;
                let _ = ready.send(());
                tokio::select! {
                    () = listening.run(listener) => {}
                    _ = end => {}
                }
            });
        });
        is_ready.recv().expect("the proxy listens");
        Self { port, server, faults: Arc::new(faults), counters, _runtime: keep }
    }

    /// The port to connect to instead of the server's.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a Redis server behind it.
    pub fn redis_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn change(&self, change: impl FnOnce(&mut Faults, u64)) {
        let next = self.counters.next.load(Ordering::SeqCst);
        self.faults.send_modify(|faults| change(faults, next));
    }

    /// New connections lead to another server; the present ones stay.
    pub fn lead_to(&self, server: u16) {
        self.server.store(server, Ordering::SeqCst);
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        self.counters.cut.fetch_add(1, Ordering::Relaxed);
        self.change(|faults, next| faults.cut_below = next);
    }

    /// Refuses new connections; those that there are go on.
    pub fn refuse(&self) {
        self.change(|faults, _| faults.refuse = true);
    }

    /// Swallows all answers, also those on new connections. The connections stay open.
    pub fn mute(&self) {
        self.change(|faults, _| faults.mute_below = u64::MAX);
    }

    /// Swallows all answers on the present connections, which stay open; new ones work.
    pub fn mute_present(&self) {
        self.change(|faults, next| faults.mute_below = next);
    }

    /// Loses the next `count` answers, each with its connection: the server has done what it was asked, nobody hears of it.
    pub fn lose_answers(&self, count: u64) {
        self.counters.to_lose.fetch_add(count, Ordering::SeqCst);
    }

    /// Loses one answer in the same way, after so many others.
    pub fn lose_answer_after(&self, spared: u64) {
        self.counters.to_spare.store(spared, Ordering::SeqCst);
        self.lose_answers(1);
    }

    /// Holds back what is sent to the server on the present connections; new ones work. [`heal`](Proxy::heal) delivers it,
    /// also when its sender is gone by then.
    pub fn hold_present_requests(&self) {
        self.change(|faults, next| faults.hold_below = next);
    }

    /// Nothing passes in either direction, though all connections stay open, and new ones are taken. What was sent arrives after
    /// [`heal`](Proxy::heal), when new connections get to the server too.
    pub fn partition(&self) {
        self.change(|faults, _| faults.partition = true);
    }

    /// Everything takes this much longer, in each direction.
    pub fn delay(&self, span: Duration) {
        self.change(|faults, _| faults.delay = span);
    }

    /// The server's clock seems to have jumped ahead: the times in µs with which its scripts' answers begin are changed.
    pub fn shift_clock(&self, seconds: u64) {
        self.change(|faults, _| faults.ahead = seconds);
    }

    /// All is well again. Connections on which answers were swallowed are cut.
    pub fn heal(&self) {
        self.counters.to_spare.store(0, Ordering::SeqCst);
        self.counters.to_lose.store(0, Ordering::SeqCst);
        self.change(|faults, _| *faults = Faults { cut_below: faults.cut_below, ..Faults::default() });
    }

    /// Begins to write down what is sent to the server.
    pub fn listen(&self) {
        *self.counters.overheard() = Some(Vec::new());
    }

    /// What was sent to the server since [`listen`](Proxy::listen), to be sent once more.
    pub fn overheard(&self) -> Vec<u8> {
        self.counters.overheard().take().unwrap_or_default()
    }

    /// How many connections were made so far.
    pub fn connections(&self) -> u64 {
        self.counters.next.load(Ordering::SeqCst)
    }

    /// How many answers were lost by [`lose_answers`](Proxy::lose_answers).
    pub fn lost_answers(&self) -> u64 {
        self.counters.lost.load(Ordering::SeqCst)
    }

    /// How often all connections were cut.
    pub fn cuts(&self) -> u64 {
        self.counters.cut.load(Ordering::SeqCst)
    }
}

struct Listening {
    port: u16,
    server: Arc<AtomicU16>,
    faults: watch::Receiver<Faults>,
    counters: Arc<Counters>,
}

impl Listening {
    async fn bind(&self) -> TcpListener {
        TcpListener::bind(("127.0.0.1", self.port)).await.expect("the port is free")
    }

    async fn run(mut self, first: TcpListener) {
        let mut listener = Some(first);
        loop {
            if self.faults.borrow_and_update().refuse {
                listener = None;
            } else if listener.is_none() {
                listener = Some(self.bind().await);
            }
            let accept = async {
                match &listener {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.faults.changed() => if changed.is_err() { return },
                accepted = accept => if let Ok((client, _)) = accepted {
                    let number = self.counters.next.fetch_add(1, Ordering::SeqCst);
                    let faults = self.faults.clone();
                    let connection = Connection { number, faults, counters: Arc::clone(&self.counters), holed: AtomicBool::new(false) };
                    tokio::spawn(connection.run(client, SocketAddr::from(([127, 0, 0, 1], self.server.load(Ordering::SeqCst)))));
                },
            }
        }
    }
}

struct Connection {
    number: u64,
    faults: watch::Receiver<Faults>,
    counters: Arc<Counters>,
    /// An answer was swallowed: nothing can follow it.
    holed: AtomicBool,
}

impl Connection {
    /// Dropping the sockets is what cuts a connection.
    async fn run(self, client: TcpStream, server: SocketAddr) {
        if self.faults.clone().wait_for(|faults| !faults.partition).await.is_err() {
            return;
        }
        let Ok(server) = TcpStream::connect(server).await else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let requests = async {
            // When the client has nothing more to say, the server may still answer.
            if self.pump(from_client, to_server, Way::ToServer).await.is_some() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = requests => {}
            _ = self.pump(from_server, to_client, Way::ToClient) => {}
        }
    }

    fn flow(&self, faults: &watch::Receiver<Faults>, way: Way) -> Flow {
        let flow = faults.borrow().flow(self.number, way);
        if flow == Flow::Passes && self.holed.load(Ordering::SeqCst) { Flow::Cut } else { flow }
    }

    /// Carries bytes in one direction. `None` when the connection is to be cut.
    async fn pump(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: Way) -> Option<()> {
        let mut faults = self.faults.clone();
        let mut kept = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        let mut ended = false;
        loop {
            faults.borrow_and_update();
            match self.flow(&faults, way) {
                Flow::Cut => return None,
                Flow::Passes => {
                    if !kept.is_empty() {
                        to.write_all(&std::mem::take(&mut kept)).await.ok()?;
                    }
                    if ended {
                        return to.shutdown().await.ok();
                    }
                }
                Flow::Held | Flow::Swallowed => {}
            }
            let count = tokio::select! {
                changed = faults.changed() => {
                    changed.ok()?;
                    continue;
                }
                read = from.read(&mut buffer), if !ended => read.unwrap_or(0),
            };
            ended = count == 0;
            if way == Way::ToClient && count > 0 && self.lose() {
                return None;
            }
            if way == Way::ToServer
                && let Some(overheard) = &mut *self.counters.overheard()
            {
                overheard.extend_from_slice(&buffer[..count]);
            }
            let ahead = faults.borrow().ahead;
            if way == Way::ToClient && ahead > 0 {
                shift_times(&mut buffer[..count], ahead * 1_000_000);
            }
            let delay = faults.borrow().delay;
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            match self.flow(&faults, way) {
                Flow::Swallowed => self.holed.store(count > 0 || self.holed.load(Ordering::SeqCst), Ordering::SeqCst),
                _ => kept.extend_from_slice(&buffer[..count]),
            }
        }
    }

    /// Whether the answer that is on its way is one of those to be lost.
    fn lose(&self) -> bool {
        let one_less = |left: &AtomicU64| {
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
        };
        let lose = !one_less(&self.counters.to_spare) && one_less(&self.counters.to_lose);
        if lose {
            self.counters.lost.fetch_add(1, Ordering::SeqCst);
        }
        lose
    }
}

/// Adds this many µs to each time of 16 digits that is the first element of an array.
fn shift_times(bytes: &mut [u8], micros: u64) {
    const MARK: &[u8] = b"\r\n$16\r\n";
    let mut from = 0;
    while let Some(found) = bytes[from..].windows(MARK.len()).position(|window| window == MARK) {
        let (head, digits) = (from + found, from + found + MARK.len());
        from = digits;
        let first = bytes[..head].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let time =
            bytes.get(digits..digits + 16).and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u64>().ok());
        if let (Some(b'*'), Some(time)) = (bytes.get(first), time) {
            bytes[digits..digits + 16].copy_from_slice(format!("{:016}", time + micros).as_bytes());
        }
    }
}
