//! The client: connects by URL, turns claims into guards, and answers questions about lines.

use crate::engine::{self, Capability, Engine};
use crate::guard::Ending;
use crate::keeper::{Held, Keeper, cannot_tell};
use crate::primitive::{All, Election, Mutex, RwLock, Semaphore};
use crate::url::Url;
use crate::{Claim, Error, ErrorKind, Grant, Hold, Mode, Name, Owner, Renewal, Result, Status};
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// Connects to the engine that a URL names.
///
/// | URL | engine |
/// | --- | --- |
/// | `memory:` | in this process, private to this client and its clones |
/// | `memory:shared-name` | in this process, shared by all who use the name |
/// | `file:/path`, `file:relative`, `file:` | a directory on this machine (`file:` alone: the user's state directory) |
/// | `etcd://host,host/prefix`, `etcds://…` | etcd, with the cargo feature `etcd` |
/// | `zk://host,host/path`, `zks://…` | ZooKeeper, with the cargo feature `zookeeper` |
///
/// Every engine takes the option `ttl` (`file:/path?ttl=10s`): the default lease. An unknown option is an error.
///
/// # Errors
/// `Invalid` for a URL that cannot be understood, `Unavailable` when the engine cannot be reached or used.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let guard = locks.mutex("invoice:42").acquire().await?;
/// assert!(guard.is_valid());
/// # Ok(()) }
/// ```
pub async fn connect(url: impl AsRef<str>) -> Result<Client> {
    let text = url.as_ref();
    let mut url = Url::parse(text).map_err(|error| error.during("connect"))?;
    let ttl = url.take_duration("ttl").map_err(|error| error.during("connect"))?;
    if let Some(ttl) = ttl {
        check_ttl(ttl).map_err(|error| error.during("connect"))?;
    }
    let engine = engine::open(&url, text).await.map_err(|error| error.during("connect"))?;
    Ok(Client::build(engine, ttl.unwrap_or(DEFAULT_TTL)))
}

/// The lease of a lock that asks for no other.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// The shortest lease.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// The longest lease.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// A connection to an engine. Cheap to clone; all clones share one keeper.
///
/// When the last clone and the last guard are gone, the client says good-bye to the engine in the background;
/// [`close`](Client::close) waits for that.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    engine: Arc<dyn Engine>,
    keeper: Arc<Keeper>,
    ttl: Duration,
    /// The label of claims that bring none: machine and process.
    label: Arc<str>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.keeper.end();
    }
}

/// How long an acquire may wait.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    No,
    AtMost(Duration),
    Forever,
}

/// What a primitive asks for.
pub(crate) struct Request {
    pub(crate) claim: Claim,
    pub(crate) max_hold: Option<Duration>,
    /// The owner was given by the user: it may hold already, and then re-enters.
    pub(crate) reenter: bool,
}

impl Client {
    /// A client of an engine that was not made by a URL.
    pub fn with_engine(engine: Arc<dyn Engine>) -> Self {
        Self::build(engine, DEFAULT_TTL)
    }

    fn build(engine: Arc<dyn Engine>, ttl: Duration) -> Self {
        let keeper = Keeper::new(Arc::clone(&engine));
        Self(Arc::new(Inner { engine, keeper, ttl, label: fit_label(&own_label()).into() }))
    }

    /// A mutex: one holder at a time.
    pub fn mutex(&self, name: impl AsRef<str>) -> Mutex {
        Mutex::new(self, name.as_ref())
    }

    /// A read/write lock: many readers or one writer, first come, first served.
    pub fn rwlock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(self, name.as_ref())
    }

    /// A semaphore: at most `permits` holders. All who use the name must give the same number.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(self, name.as_ref(), permits)
    }

    /// Several mutexes at once, without the danger of a deadlock.
    pub fn all(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> All {
        All::new(self, names)
    }

    /// An election: one leader at a time, the others stand by.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self, name.as_ref())
    }

    /// Who holds the lock and who waits for it.
    ///
    /// # Errors
    /// `Invalid` for a bad name, `Unavailable` or `Engine` when the engine cannot tell.
    pub async fn status(&self, name: impl AsRef<str>) -> Result<Status> {
        let name = Name::new(name).map_err(|error| error.during("status"))?;
        let answer = self.0.engine.inspect(&name).await;
        let status = answer.map_err(|error| self.tell("status", name.as_str(), error))?;
        Ok(Status { obstacle: self.0.engine.obstacle(&name), ..status })
    }

    /// What keeps new holders out apart from those who hold, in words: a server that must not grant anything yet, nodes that are missing.
    /// As far as this client knows; nobody is asked. `None` is not "free".
    pub fn obstacle(&self, name: impl AsRef<str>) -> Option<String> {
        Name::new(name).ok().and_then(|name| self.0.engine.obstacle(&name))
    }

    /// All locks in use whose names start with `prefix`, in the order of their names.
    ///
    /// # Errors
    /// `Unavailable` or `Engine` when the engine cannot tell.
    pub async fn list(&self, prefix: impl AsRef<str>) -> Result<Vec<Status>> {
        let answer = self.0.engine.list(prefix.as_ref()).await;
        answer.map_err(|error| error.during("list").at_engine(self.0.engine.address()))
    }

    /// Takes the lock away from those who hold it at this moment, who are told that they lost it. Waiters follow at once. Tells how many
    /// holders there were; 0 also if they have released it before they could be told.
    ///
    /// # Errors
    /// `Invalid` for a bad name, `Unavailable` or `Engine` when the engine cannot do it.
    pub async fn evict(&self, name: impl AsRef<str>) -> Result<usize> {
        let name = Name::new(name).map_err(|error| error.during("evict"))?;
        let answer = self.0.engine.evict(&name).await;
        answer.map_err(|error| self.tell("evict", name.as_str(), error))
    }

    /// What the engine does, and what it survives.
    pub fn capability(&self) -> Capability {
        self.0.engine.capability()
    }

    /// The engine's address, without secrets.
    pub fn address(&self) -> &str {
        self.0.engine.address()
    }

    /// Waits until every release that goes on in the background (dropped guards, abandoned acquires) is done.
    ///
    /// # Cancellation safety
    /// Dropping the future has no effect.
    pub async fn settled(&self) {
        self.0.keeper.settled().await;
    }

    /// Releases what is still held (those guards are lost), finishes what goes on in the background, and says good-bye to
    /// the engine. Afterwards this client and its clones acquire nothing.
    ///
    /// # Errors
    /// None at present; later engines may not be reachable.
    pub async fn close(&self) -> Result<()> {
        self.0.keeper.close().await
    }

    pub(crate) fn engine(&self) -> &Arc<dyn Engine> {
        &self.0.engine
    }

    pub(crate) fn keeper(&self) -> &Arc<Keeper> {
        &self.0.keeper
    }

    /// The lease of locks that ask for no other: the URL's `ttl`, or 30 s.
    pub fn default_ttl(&self) -> Duration {
        self.0.ttl
    }

    pub(crate) fn default_label(&self) -> &Arc<str> {
        &self.0.label
    }

    /// Completes an error with what was being done, on which lock, where.
    pub(crate) fn tell(&self, operation: &'static str, name: &str, error: Error) -> Error {
        error.during(operation).of_lock(name).at_engine(self.0.engine.address())
    }

    /// The one way to a lease: every primitive ends here.
    pub(crate) async fn acquire(&self, request: &Request, wait: Wait) -> Result<Option<Arc<Held>>> {
        let claim = &request.claim;
        let told = |error| self.tell("acquire", claim.name.as_str(), error);
        check(claim).map_err(told)?;
        check_max_hold(request.max_hold).map_err(told)?;
        self.0.keeper.ensure().map_err(told)?;
        if request.reenter
            && let Some(held) = Box::pin(self.borrow(request)).await.map_err(told)?
        {
            return Ok(Some(held));
        }
        // Pinned once, and not moved from one future into the next; what is rarely needed is boxed. Thousands of tasks may wait here
        // at the same time.
        let claim = pin!(self.claim(request, !matches!(wait, Wait::No)));
        let claim = self.0.keeper.unless_closed(claim);
        match wait {
            Wait::No | Wait::Forever => claim.await.map_err(told),
            Wait::AtMost(span) => match Box::pin(tokio::time::timeout(span, claim)).await {
                Ok(answer) => answer.map_err(told),
                Err(_) => {
                    let name = &request.claim.name;
                    let why = self.0.engine.obstacle(name);
                    let why = why.as_deref().unwrap_or("see `fencelock status` for who holds it");
                    let span =
                        Duration::from_millis(u64::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX));
                    Err(told(Error::new(ErrorKind::Timeout, format!("not acquired within {span:?}; {why}"))))
                }
            },
        }
    }

    /// Re-entry by owner id: if that owner holds the lock, this is the same hold, borrowed.
    async fn borrow(&self, request: &Request) -> Result<Option<Arc<Held>>> {
        let claim = &request.claim;
        let Some(grant) = self.0.engine.standing(&claim.name, claim.owner).await? else {
            return Ok(None);
        };
        if !grant.mode.covers(claim.mode) {
            return Err(Error::invalid(format!(
                "this owner holds the lock as {}; it cannot re-enter as {}: release it first",
                grant.mode, claim.mode
            )));
        }
        // How much is left of the outer hold's lease is not known here: extending it tells, and makes sure that it stands.
        let hold = Hold::of(claim, Some(&grant));
        let answers = self.0.engine.renew(std::slice::from_ref(&hold)).await?;
        let from = match answers.first() {
            Some(Renewal::Extended { from }) => *from,
            Some(Renewal::Gone) => return Ok(None),
            Some(Renewal::Unknown) | None => return Err(cannot_tell()),
        };
        let grant = Grant { from, ..grant };
        Ok(self.0.keeper.keep(hold, &grant, request.max_hold, true))
    }

    async fn claim(&self, request: &Request, wait: bool) -> Result<Option<Arc<Held>>> {
        let mut claim = request.claim.clone();
        loop {
            // Whatever ends this future early (a timeout, a drop, an error after the request was sent) leaves nothing behind.
            let ending = Ending::new(self.clone(), Hold::of(&claim, None));
            let grant = match self.0.engine.acquire(&claim, wait).await {
                Ok(Some(grant)) => grant,
                Ok(None) => {
                    ending.call_off();
                    return Ok(None);
                }
                Err(error) => {
                    // A claim that was refused has left nothing; giving it up would hit another one of the same owner.
                    if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) {
                        ending.call_off();
                    }
                    return Err(error);
                }
            };
            ending.call_off();
            let hold = Hold::of(&claim, Some(&grant));
            if let Some(held) = self.0.keeper.keep(hold.clone(), &grant, request.max_hold, false) {
                return Ok(Some(held));
            }
            // The answer took longer than the lease, or the lock was taken away meanwhile: it counts as not acquired, and goes
            // back. After an error the release goes on in the background.
            let given_back = Box::pin(Ending::new(self.clone(), hold).finish()).await;
            if !wait {
                return Ok(None);
            }
            // The next round is another acquisition: a late release of this one must not hit it. An owner that the user gave
            // stays the same, so there it must be over.
            if request.reenter {
                given_back?;
            } else {
                claim.owner = Owner::random();
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("engine", &self.0.engine.address()).finish()
    }
}

fn check(claim: &Claim) -> Result<()> {
    check_ttl(claim.ttl)?;
    if let Mode::Permit { of: 0 } = claim.mode {
        return Err(Error::invalid("a semaphore of 0 permits lets nobody in; give it at least 1"));
    }
    Ok(())
}

fn check_ttl(ttl: Duration) -> Result<()> {
    if (MIN_TTL..=MAX_TTL).contains(&ttl) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a ttl of {ttl:?} is out of range; choose 100ms to 24h (the lease is renewed while the lock is held, so it need \
         not cover the whole work)"
    )))
}

fn check_max_hold(max_hold: Option<Duration>) -> Result<()> {
    match max_hold {
        Some(span) if span.is_zero() => {
            Err(Error::invalid("max_hold of 0 holds nothing; give it a span of time, or leave it out"))
        }
        _ => Ok(()),
    }
}

fn own_label() -> String {
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{node}:{}", std::process::id())
}

/// Cuts a label to what engines keep, at a character boundary.
pub(crate) fn fit_label(label: &str) -> String {
    let mut end = label.len().min(Claim::LABEL_MAX);
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    label[..end].to_owned()
}
