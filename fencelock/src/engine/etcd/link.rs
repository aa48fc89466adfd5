//! The way to the cluster: which server is asked, over which connection, as whom; and asking again.
//!
//! A connection is driven by the runtime that it was made on, so every runtime that uses the engine has its own. A server that
//! does not answer is left for the next one of the URL.

use super::fault::{Fault, fault};
use super::proto::{AuthenticateRequest, AuthenticateResponse, WatchRequest, WatchResponse};
use super::watch::Watcher;
use crate::{Clock, Error, ErrorKind, Moment, Result};
use futures_util::Stream;
use prost::Message;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::{Handle, Id};
use tokio::sync::watch;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

/// So many requests of a client are under way at the same time; more wait here, where no timeout runs. A crowd that arrives at
/// once would otherwise time out, ask again, and keep the servers from ever catching up.
const AT_ONCE: usize = 128;
/// The largest answer that is read: a listing of many thousand locks.
const LARGEST: usize = 256 << 20;

/// Who we are for the cluster.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
}

/// An answer, and what is known about its question.
#[derive(Debug)]
pub(super) struct Answer<T> {
    pub(super) body: T,
    /// When the question that was answered was sent.
    pub(super) sent: Moment,
    /// So many earlier attempts may have been carried out as well.
    pub(super) unanswered: u32,
}

/// The token by which the servers know us.
type Pass = MetadataValue<Ascii>;

pub(super) struct Link {
    servers: Vec<Endpoint>,
    /// The server that is asked.
    current: AtomicUsize,
    homes: Arc<Homes>,
    login: Option<Login>,
    pass: Mutex<Option<Pass>>,
    /// Only one task logs in.
    logging_in: tokio::sync::Mutex<()>,
    /// Places for requests under way.
    places: tokio::sync::Semaphore,
    /// How long one attempt may take.
    timeout: Duration,
    /// How long attempts go on.
    patience: Duration,
}

/// What one runtime drives.
pub(super) struct Home {
    channels: Mutex<Channels>,
    /// Told when a connection was given up: what it carried must go elsewhere.
    pub(super) given_up: watch::Sender<u64>,
    pub(super) watcher: Mutex<Option<Arc<Watcher>>>,
}

#[derive(Default)]
struct Channels {
    /// By server.
    open: HashMap<usize, (u64, Channel)>,
    next: u64,
}

type Homes = Mutex<HashMap<Id, Arc<Home>>>;

/// A runtime that may go away.
struct Leaves {
    homes: Weak<Homes>,
    id: Id,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        let left = self.homes.upgrade().and_then(|homes| lock(&homes).remove(&self.id));
        drop(left);
    }
}

/// A connection in use.
struct Way {
    home: Arc<Home>,
    channel: Channel,
    server: usize,
    number: u64,
}

impl Link {
    pub(super) fn new(
        servers: Vec<Endpoint>,
        first: usize,
        login: Option<Login>,
        timeout: Duration,
        patience: Duration,
    ) -> Self {
        Self {
            servers,
            current: AtomicUsize::new(first),
            homes: Arc::default(),
            login,
            pass: Mutex::default(),
            logging_in: tokio::sync::Mutex::default(),
            places: tokio::sync::Semaphore::new(AT_ONCE),
            timeout,
            patience,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether there is one server only.
    pub(super) fn is_alone(&self) -> bool {
        self.servers.len() == 1
    }

    /// What belongs to the present runtime.
    pub(super) fn home(&self) -> Arc<Home> {
        let runtime = Handle::current();
        let id = runtime.id();
        let mut homes = lock(&self.homes);
        if let Some(home) = homes.get(&id) {
            return Arc::clone(home);
        }
        let (given_up, mut changes) = watch::channel(0);
        let home = Arc::new(Home { channels: Mutex::default(), given_up, watcher: Mutex::default() });
        homes.insert(id, Arc::clone(&home));
        drop(homes);
        // Ends with the home, or is dropped with the runtime, and takes the home along.
        let leaves = Leaves { homes: Arc::downgrade(&self.homes), id };
        runtime.spawn(async move {
            let _leaves = leaves;
            while changes.changed().await.is_ok() {}
        });
        home
    }

    /// The runtime goes away, and takes along what it drove.
    pub(super) fn forget_home(&self, runtime: Id) {
        let left = lock(&self.homes).remove(&runtime);
        drop(left);
    }

    fn way(&self) -> Way {
        let home = self.home();
        let server = self.current.load(Ordering::Acquire) % self.servers.len();
        let mut channels = lock(&home.channels);
        let next = channels.next;
        let (number, channel) =
            channels.open.entry(server).or_insert_with(|| (next, self.servers[server].connect_lazy())).clone();
        channels.next = next.max(number + 1);
        drop(channels);
        Way { home, channel, server, number }
    }

    /// Gives up a connection, if it is still the one in use, and turns to the next server.
    fn give_up(&self, way: &Way) {
        let mut channels = lock(&way.home.channels);
        if channels.open.get(&way.server).is_none_or(|(number, _)| *number != way.number) {
            return;
        }
        channels.open.remove(&way.server);
        drop(channels);
        let next = (way.server + 1) % self.servers.len();
        let _ = self.current.compare_exchange(way.server, next, Ordering::AcqRel, Ordering::Acquire);
        way.home.given_up.send_modify(|count| *count += 1);
    }

    /// One attempt.
    pub(super) async fn attempt<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        limit: Duration,
    ) -> std::result::Result<A, Fault>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let way = self.way();
        let exchange = async {
            let pass = self.pass().await?;
            let mut grpc = grpc(&way.channel).await?;
            let codec = ProstCodec::<Q, A>::default();
            grpc.unary(sign(Request::new(request), pass), PathAndQuery::from_static(path), codec).await.map_err(fault)
        };
        let outcome = tokio::time::timeout(limit, exchange).await;
        let outcome = outcome.unwrap_or_else(|_| Err(Fault::silence()));
        outcome.map(tonic::Response::into_inner).inspect_err(|fault| {
            if fault.broken {
                self.give_up(&way);
            }
        })
    }

    /// Asks until there is an answer, within the patience.
    pub(super) async fn ask<Q, A>(&self, path: &'static str, request: &Q) -> std::result::Result<Answer<A>, Fault>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.ask_counting(path, request, || {}).await
    }

    /// The same, and tells before each attempt that it is about to be sent.
    pub(super) async fn ask_counting<Q, A>(
        &self,
        path: &'static str,
        request: &Q,
        mut sending: impl FnMut(),
    ) -> std::result::Result<Answer<A>, Fault>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut until = Moment::NEVER;
        let mut pause = Duration::from_millis(20);
        let mut unanswered = 0;
        let mut renewed_pass = false;
        loop {
            let place = self.places.acquire().await;
            let sent = Clock::Boot.now();
            until = until.min(sent.after(self.patience));
            sending();
            let mut fault = match self.attempt(path, request.clone(), self.timeout).await {
                Ok(body) => return Ok(Answer { body, sent, unanswered }),
                Err(fault) => fault,
            };
            drop(place);
            unanswered += u32::from(fault.sent);
            if fault.stale_token && self.login.is_some() && !renewed_pass {
                renewed_pass = true;
                self.log_in_again();
                continue;
            }
            let over = Clock::Boot.now().after(pause) >= until;
            if !fault.passing || fault.no_lease || fault.stale_token || over {
                if unanswered > 0 && fault.error.kind() == ErrorKind::Unavailable {
                    fault.error = Error::new(ErrorKind::Ambiguous, "the connection broke, and nobody answers since")
                        .caused_by(fault.error);
                }
                fault.sent = unanswered > 0;
                return Err(fault);
            }
            tracing::debug!("trying again: {}", fault.error);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// A stream of watches. It ends by itself when its server loses the cluster.
    pub(super) async fn watch(
        &self,
        requests: impl Stream<Item = WatchRequest> + Send + 'static,
    ) -> std::result::Result<Streaming<WatchResponse>, Fault> {
        let way = self.way();
        let open = async {
            let pass = self.pass().await?;
            let mut grpc = grpc(&way.channel).await?;
            let mut request = sign(Request::new(requests), pass);
            request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
            let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
            let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
            grpc.streaming(request, path, codec).await.map_err(fault)
        };
        let outcome = tokio::time::timeout(self.timeout, open).await.unwrap_or_else(|_| Err(Fault::silence()));
        outcome.map(tonic::Response::into_inner).inspect_err(|fault| {
            if fault.broken {
                self.give_up(&way);
            }
        })
    }

    /// The token, if users are known by one.
    async fn pass(&self) -> std::result::Result<Option<Pass>, Fault> {
        let Some(login) = &self.login else { return Ok(None) };
        if let Some(pass) = lock(&self.pass).clone() {
            return Ok(Some(pass));
        }
        let _one = self.logging_in.lock().await;
        if let Some(pass) = lock(&self.pass).clone() {
            return Ok(Some(pass));
        }
        let request = AuthenticateRequest { name: login.user.clone(), password: login.password.clone() };
        let way = self.way();
        let path = PathAndQuery::from_static("/etcdserverpb.Auth/Authenticate");
        let codec = ProstCodec::<AuthenticateRequest, AuthenticateResponse>::default();
        let answer = grpc(&way.channel).await?.unary(Request::new(request), path, codec).await.map_err(fault);
        let answer = answer.map_err(|fault| Fault { sent: false, ..fault })?;
        let mut pass: Pass = answer.into_inner().token.parse().map_err(|_| Fault::silence())?;
        pass.set_sensitive(true);
        *lock(&self.pass) = Some(pass.clone());
        Ok(Some(pass))
    }

    /// The servers do not know this token any more.
    pub(super) fn log_in_again(&self) {
        *lock(&self.pass) = None;
    }
}

async fn grpc(channel: &Channel) -> std::result::Result<Grpc<Channel>, Fault> {
    let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(LARGEST);
    let ready = grpc.ready().await;
    // Nothing was sent.
    ready.map_err(|error| Fault { sent: false, ..fault(tonic::Status::from_error(Box::new(error))) })?;
    Ok(grpc)
}

fn sign<T>(mut request: Request<T>, pass: Option<Pass>) -> Request<T> {
    if let Some(pass) = pass {
        request.metadata_mut().insert("token", pass);
    }
    request
}

/// An error for the user, with the fault's meaning.
pub(super) fn told<T>(outcome: std::result::Result<T, Fault>) -> Result<T> {
    outcome.map_err(|fault| fault.error)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
