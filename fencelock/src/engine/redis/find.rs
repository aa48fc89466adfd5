//! How the server is found: it has a fixed address, or Sentinels know who is the master.

use super::fault::{Fault, fault};
use super::link::confirmed;
use super::target::Target;
use super::wire::Wire;
use crate::{Error, ErrorKind};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{FromRedisValue, RedisError, RedisResult, Value};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// When most have answered, the others have so much longer.
const MOMENT: Duration = Duration::from_millis(100);
/// How long a Sentinel that is listened to may take for an answer.
const ANSWER: Duration = Duration::from_secs(2);
/// A Sentinel that says nothing is asked after this time: it may be cut off.
const SILENCE: Duration = Duration::from_secs(10);
/// A Sentinel that went away may be back soon.
const BACK: Duration = Duration::from_secs(1);

/// Where to connect to.
pub(super) enum Finder {
    Fixed(Target),
    Sentinel(Sentinel),
}

impl Finder {
    /// The server that is to be used at this moment.
    pub(super) async fn server(&self, timeout: Duration) -> Result<Target, Fault> {
        match self {
            Finder::Fixed(target) => Ok(target.clone()),
            Finder::Sentinel(sentinel) => sentinel.master(timeout).await,
        }
    }

    /// Resolves when another server has become the master, as far as anybody tells.
    pub(super) async fn moved(&self) {
        match self {
            Finder::Fixed(_) => std::future::pending().await,
            Finder::Sentinel(sentinel) => sentinel.switched().await,
        }
    }
}

/// A master that Sentinels watch over.
pub(super) struct Sentinel {
    sentinels: Vec<Target>,
    /// What the Sentinels call the master.
    name: String,
    /// Settings for the master; its address is the Sentinels' part.
    target: Target,
    /// The master that was found last.
    in_use: Mutex<Option<Address>>,
}

type Address = (String, u16);

impl Sentinel {
    pub(super) fn new(sentinels: Vec<Target>, name: String, target: Target) -> Self {
        Self { sentinels, name, target, in_use: Mutex::default() }
    }

    fn in_use(&self) -> MutexGuard<'_, Option<Address>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_in_use(&self, address: &Address) -> bool {
        self.in_use().as_ref() == Some(address)
    }

    async fn master(&self, timeout: Duration) -> Result<Target, Fault> {
        let (host, port) = self.newest(timeout).await?;
        let target = self.target.at(&host, port);
        *self.in_use() = Some((host, port));
        Ok(target)
    }

    /// What the Sentinels say that have heard of the latest switch. One that is cut off, or is told later than others, names the
    /// old master.
    async fn newest(&self, timeout: Duration) -> Result<Address, Fault> {
        let asking = self.sentinels.iter().map(|sentinel| self.ask(sentinel, timeout));
        let mut votes: HashMap<(u64, Address), usize> = HashMap::new();
        let mut without = Vec::new();
        for (number, answer) in ask_several(asking, self.sentinels.len() / 2 + 1).await {
            match answer {
                Ok(named) => *votes.entry(named).or_default() += 1,
                Err(fault) => without.push((self.sentinels[number].address(), fault)),
            }
        }
        // Where nothing else tells, nobody moves.
        let weight = |((epoch, address), votes): &((u64, Address), usize)| (*epoch, *votes, self.is_in_use(address));
        let newest = votes.into_iter().max_by_key(weight);
        newest.map(|((_, address), _)| address).ok_or_else(|| {
            let text = format!("no Sentinel tells who is the master {:?}", self.name);
            Fault::of_several(text, without, self.in_use().is_some())
        })
    }

    async fn ask(&self, sentinel: &Target, timeout: Duration) -> Result<(u64, Address), Fault> {
        let asking = async {
            let sentinel = sentinel.connect_to_ask(timeout).await?;
            match self.ask_over(&sentinel).await? {
                Some(named) => Ok(Ok(named)),
                None => Ok(Err(masters(&sentinel).await)),
            }
        };
        asking.await.map_err(of_sentinel)?.map_err(|masters| {
            // Not everybody may ask for all of them.
            let known = masters.map(|masters| if masters.is_empty() { "none".to_owned() } else { masters.join(", ") });
            let known = known.map(|known| format!("; it knows {known}")).unwrap_or_default();
            let text = format!("the Sentinel watches over no master of this name{known}");
            Fault { passing: false, ..Fault::passing(Error::new(ErrorKind::Invalid, text)) }
        })
    }

    /// The master, and the number of the switch that made it the master: 0 if this user may not ask for that.
    async fn ask_over(&self, sentinel: &Wire) -> RedisResult<Option<(u64, Address)>> {
        let mut questions = redis::pipe();
        questions.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        questions.cmd("SENTINEL").arg("MASTER").arg(&self.name);
        let mut answers = sentinel.call_all(&questions).await?.into_iter();
        let address = answers.next().unwrap_or(Value::Nil).extract_error()?;
        let about = answers.next().and_then(|about| HashMap::<String, String>::from_redis_value(about).ok());
        let epoch = about.and_then(|about| about.get("config-epoch")?.parse().ok()).unwrap_or(0);
        Ok(Option::from_redis_value(address)?.map(|address| (epoch, address)))
    }

    /// Resolves when another one than the one in use has become the master. Listens to all Sentinels: those that are cut off
    /// themselves tell nothing.
    async fn switched(&self) {
        let other = Notify::new();
        let listening = join_all(self.sentinels.iter().map(|sentinel| self.listen(sentinel, &other)));
        let switched = async {
            loop {
                other.notified().await;
                // It may be the one that is wrong.
                if let Ok(newest) = self.newest(ANSWER).await
                    && !self.is_in_use(&newest)
                {
                    // Said once: whoever connects next asks for itself.
                    *self.in_use() = Some(newest);
                    return;
                }
            }
        };
        tokio::select! {
            _ = listening => {}
            () = switched => {}
        }
    }

    /// Tells whenever this Sentinel names another master than the one in use. Each is listened to by itself: one that is away
    /// does not interrupt the others.
    async fn listen(&self, sentinel: &Target, other: &Notify) {
        loop {
            let Err(error) = self.listen_once(sentinel, other).await;
            tracing::debug!("the Sentinel {} cannot be listened to: {error}", sentinel.address());
            tokio::time::sleep(BACK).await;
        }
    }

    async fn listen_once(&self, sentinel: &Target, other: &Notify) -> RedisResult<Infallible> {
        let news = Arc::new(Notify::new());
        let heard = Arc::clone(&news);
        let connection = sentinel.connect(ANSWER, Box::new(move |_| heard.notify_one())).await?;
        confirmed(connection.subscribe("SUBSCRIBE", "+switch-master")).await?;
        loop {
            // At first for what was said while nobody listened.
            if let Some((_, named)) = self.ask_over(&connection).await?
                && !self.is_in_use(&named)
            {
                other.notify_one();
            }
            let _ = tokio::time::timeout(SILENCE, news.notified()).await;
        }
    }
}

/// The names of all masters that a Sentinel watches over.
async fn masters(sentinel: &Wire) -> RedisResult<Vec<String>> {
    let masters = sentinel.call(redis::cmd("SENTINEL").arg("MASTERS")).await?.extract_error()?;
    let masters = Vec::<HashMap<String, String>>::from_redis_value(masters)?;
    Ok(masters.into_iter().filter_map(|mut master| master.remove("name")).collect())
}

/// What an error of a Sentinel means: it has users and passwords of its own.
fn of_sentinel(error: RedisError) -> Fault {
    let text = match error.code() {
        Some("NOAUTH") => "the Sentinel wants a password; add sentinel_password=… to the URL",
        Some("WRONGPASS") => {
            "the Sentinel refused user or password; check sentinel_user= and sentinel_password= in the URL"
        }
        Some("NOPERM") => {
            "the Sentinel's ACL does not let this user ask; docs/engines/redis-ha.md lists what is needed"
        }
        _ => return fault(error, false),
    };
    let fault = fault(error, false);
    Fault { error: Error::new(ErrorKind::Invalid, text), ..fault }
}

/// Asks several at once, and returns what those say that have answered by the time `enough` of them have, and a moment later;
/// with their places.
pub(super) async fn ask_several<T>(
    asking: impl Iterator<Item = impl Future<Output = Result<T, Fault>>>,
    enough: usize,
) -> Vec<(usize, Result<T, Fault>)> {
    let mut asking: FuturesUnordered<_> =
        asking.enumerate().map(|(place, answer)| async move { (place, answer.await) }).collect();
    let mut answers = Vec::new();
    let mut good = 0;
    loop {
        let next = if good < enough {
            asking.next().await
        } else {
            tokio::time::timeout(MOMENT, asking.next()).await.ok().flatten()
        };
        let Some((place, answer)) = next else { return answers };
        good += usize::from(answer.is_ok());
        answers.push((place, answer));
    }
}
