//! Connections to the upstream. Each thread of the gate has its own, and whoever sends a request moves its connection along: there is no task
//! between the two, and no thread to wait for.

use super::body::{BodyError, Course, Relay};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper::{Request, Response, Uri};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

/// How often somebody has a look at the connections without a request.
pub(crate) const TICK: Duration = Duration::from_millis(500);
/// For how many of these times they are kept.
const IDLE: u64 = 180;

pub(crate) type Connector = HttpsConnector<HttpConnector>;
type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// The connections of one thread.
pub(crate) struct Wires {
    connector: Connector,
    /// Where they lead to.
    place: Uri,
    /// How long to wait between two looks at what is overdue.
    patience: Duration,
    /// Those without a request, and since which tick; the one used last is at the end. The lock is there for the compiler: no other thread comes
    /// here.
    idle: Mutex<Vec<(Box<Wire>, u64)>>,
    ticks: AtomicU64,
}

impl Wires {
    pub(crate) fn new(connector: Connector, place: Uri, patience: Duration) -> Arc<Self> {
        Arc::new(Self { connector, place, patience, idle: Mutex::default(), ticks: AtomicU64::new(0) })
    }

    /// A connection that was used before, if there is one.
    pub(crate) fn again(&self) -> Option<Box<Wire>> {
        self.idle().pop().map(|(wire, _)| wire)
    }

    /// A new connection.
    pub(crate) async fn connect(&self) -> Result<Box<Wire>, BodyError> {
        let mut connector = self.connector.clone();
        poll_fn(|cx| connector.poll_ready(cx)).await?;
        let stream = connector.call(self.place.clone()).await?;
        // Head and body leave together.
        let (sender, connection) = http1::Builder::new().writev(false).handshake(stream).await?;
        let alarm = Box::pin(tokio::time::sleep(self.patience));
        Ok(Box::new(Wire { sender, connection: Some(connection), alarm, patience: self.patience }))
    }

    /// Keeps a connection for the next request, if it has come to the end of this one; gives it back if not. One that was closed is gone.
    fn keep(&self, wire: Box<Wire>) -> Option<Box<Wire>> {
        let (open, ready) = (wire.connection.is_some(), wire.sender.is_ready());
        if open && ready {
            self.idle().push((wire, self.ticks.load(Ordering::Relaxed)));
            return None;
        }
        Some(wire).filter(|_| open)
    }

    /// Lets go of connections that nobody needs any more, or that the upstream has closed. To be called at every tick.
    pub(crate) fn tidy(&self) {
        let now = self.ticks.fetch_add(1, Ordering::Relaxed);
        let mut cx = Context::from_waker(Waker::noop());
        self.idle().retain_mut(|(wire, since)| {
            wire.advance(&mut cx);
            wire.connection.is_some() && now - *since < IDLE
        });
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Box<Wire>, u64)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection to the upstream.
pub(crate) struct Wire {
    sender: SendRequest<Box<Relay>>,
    /// None when it has come to its end.
    connection: Option<Connection<Stream, Box<Relay>>>,
    /// Goes off from time to time while an answer is awaited. It is not set anew for each request, which would cost more than it does.
    alarm: Pin<Box<Sleep>>,
    patience: Duration,
}

impl Wire {
    /// Hands a request over. Nothing happens until the connection moves.
    pub(crate) fn send(
        &mut self,
        request: Request<Box<Relay>>,
    ) -> impl Future<Output = Result<Response<Incoming>, TrySendError<Request<Box<Relay>>>>> + use<> {
        self.sender.try_send_request(request)
    }

    /// Moves what can be moved, in both directions.
    pub(crate) fn advance(&mut self, cx: &mut Context<'_>) {
        // What went wrong is told to the one who waits for the answer, or for its body.
        if self.connection.as_mut().is_some_and(|connection| Pin::new(connection).poll(cx).is_ready()) {
            self.connection = None;
        }
    }

    /// Resolves when it is later than what is due, which may be put off meanwhile.
    pub(crate) fn poll_overdue(&mut self, cx: &mut Context<'_>, due: impl Fn() -> Instant) -> Poll<()> {
        while self.alarm.as_mut().poll(cx).is_ready() {
            let (now, due) = (Instant::now(), due());
            if due <= now {
                return Poll::Ready(());
            }
            // What is due may be put forward as well: an upload ends. Never sleep for longer than the shortest time.
            self.alarm.as_mut().reset(due.min(now + self.patience));
        }
        Poll::Pending
    }
}

/// A connection that is still at work for a request whose answer has begun.
pub(crate) struct Rest {
    wire: Option<Box<Wire>>,
    home: Arc<Wires>,
    /// That of the upload.
    course: Arc<Course>,
}

impl Rest {
    /// None if nothing is left to do.
    pub(crate) fn of(wire: Box<Wire>, home: &Arc<Wires>, course: &Arc<Course>) -> Option<Self> {
        let wire = home.keep(wire)?;
        Some(Self { wire: Some(wire), home: Arc::clone(home), course: Arc::clone(course) })
    }

    /// Resolves when the upstream has taken nothing of the upload for too long.
    pub(crate) fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(wire) = &mut self.wire else { return Poll::Pending };
        wire.poll_overdue(cx, || self.course.due(self.home.patience))
    }

    /// Moves on. Resolves when nothing is left to do.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(mut wire) = self.wire.take() {
            wire.advance(cx);
            self.wire = self.home.keep(wire);
        }
        if self.wire.is_some() { Poll::Pending } else { Poll::Ready(()) }
    }
}
