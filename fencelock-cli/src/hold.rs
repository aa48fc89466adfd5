//! What the tool holds, and how it gets it: the locks of one `run`, re-entry included.

use crate::args::Run;
use crate::exit::Failure;
use fencelock::{Client, Guard, Loss, Owner, Result, Token};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Longer than this is for ever; far beyond it, clocks overflow.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The locks that the command runs under. Two guards when an outer hold is re-entered and others are held with it.
pub(crate) struct Holding {
    first: Guard,
    also: Option<Guard>,
    pub(crate) since: Instant,
}

impl Holding {
    pub(crate) fn new(first: Guard, also: Option<Guard>) -> Self {
        Self { first, also, since: Instant::now() }
    }

    fn guards(&self) -> impl Iterator<Item = &Guard> {
        std::iter::once(&self.first).chain(&self.also)
    }

    pub(crate) fn name(&self) -> &str {
        self.first.name()
    }

    pub(crate) fn token(&self) -> Token {
        self.first.token()
    }

    pub(crate) fn owner(&self) -> Owner {
        self.first.owner()
    }

    /// Everything that is held here, for those who run inside.
    pub(crate) fn held(&self, url: &str) -> Vec<Held> {
        let of_guard = |guard: &Guard| -> Vec<Held> {
            let owner = guard.owner().to_string();
            let held = |name: &str| {
                let token = guard.token_of(name)?.as_u64();
                Some(Held { name: name.to_owned(), token, owner: owner.clone(), url: url.to_owned() })
            };
            guard.names().filter_map(held).collect()
        };
        self.guards().flat_map(of_guard).collect()
    }

    pub(crate) fn is_borrowed(&self) -> bool {
        self.first.is_borrowed()
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.guards().map(Guard::valid_for).min().unwrap_or_default()
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.guards().all(Guard::is_valid)
    }

    /// Makes sure that more than this is left of the lease: a lock that was just handed over has little of it.
    pub(crate) async fn last(&self, least: Duration) -> Result<()> {
        if self.valid_for() <= least {
            for guard in self.guards() {
                guard.confirm().await?;
            }
        }
        Ok(())
    }

    /// Resolves when one of the locks is lost.
    pub(crate) fn lost(&self) -> impl Future<Output = Loss> + use<> {
        let first = self.first.lost();
        let also = self.also.as_ref().map(Guard::lost);
        async {
            let also = async {
                match also {
                    Some(lost) => lost.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                loss = first => loss,
                loss = also => loss,
            }
        }
    }

    pub(crate) async fn release(self) -> Result<()> {
        let also = match self.also {
            Some(guard) => guard.release().await,
            None => Ok(()),
        };
        self.first.release().await.and(also)
    }
}

/// How long to stand in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    None,
    AtMost(Duration),
    Endless,
}

impl Patience {
    pub(crate) fn of(run: &Run) -> Self {
        match run.wait {
            _ if run.no_wait => Patience::None,
            None => Patience::Endless,
            // No time at all is not enough even for a free lock; what is meant is: do not stand in line.
            Some(Duration::ZERO) => Patience::None,
            Some(span) if span > FOR_EVER => Patience::Endless,
            Some(span) => Patience::AtMost(span),
        }
    }
}

/// What to acquire, and as whom.
pub(crate) struct Wanted<'a> {
    pub(crate) client: &'a Client,
    pub(crate) run: &'a Run,
    pub(crate) ttl: Duration,
    pub(crate) label: &'a str,
    pub(crate) outer: Option<Outer>,
    pub(crate) patience: Patience,
}

impl Wanted<'_> {
    /// Stands in line. None when there was no patience, and the lock is busy.
    pub(crate) async fn acquire(&self) -> Result<Option<Holding>> {
        let started = Instant::now();
        let Some(outer) = &self.outer else {
            return Ok(self.first(None, self.patience).await?.map(|guard| Holding::new(guard, None)));
        };
        let Some(first) = self.first(Some(outer.owner), self.patience).await? else { return Ok(None) };
        if self.run.also.is_empty() {
            return Ok(Some(Holding::new(first, None)));
        }
        // The others are our own: to hold them as the outer owner would let siblings share them.
        let left = match self.patience {
            Patience::AtMost(span) => Patience::AtMost(span.saturating_sub(started.elapsed())),
            patience => patience,
        };
        let also = self.all(&self.run.also, left).await?;
        Ok(also.map(|also| Holding::new(first, Some(also))))
    }

    async fn first(&self, owner: Option<Owner>, patience: Patience) -> Result<Option<Guard>> {
        let run = self.run;
        if !run.also.is_empty() && owner.is_none() {
            let names: Vec<String> = std::iter::once(&run.name).chain(&run.also).cloned().collect();
            return self.all(&names, patience).await;
        }
        if let Some(slots) = run.slots {
            let mut semaphore = self.client.semaphore(&run.name, slots).ttl(self.ttl).label(self.label);
            if let Some(owner) = owner {
                semaphore = semaphore.owner(owner);
            }
            return match patience {
                Patience::None => semaphore.try_acquire().await,
                Patience::AtMost(span) => semaphore.acquire_timeout(span).await.map(Some),
                Patience::Endless => semaphore.acquire().await.map(Some),
            };
        }
        let mut lock = self.client.rwlock(&run.name).ttl(self.ttl).label(self.label);
        if let Some(owner) = owner {
            lock = lock.owner(owner);
        }
        match (run.shared, patience) {
            (true, Patience::None) => lock.try_read().await,
            (true, Patience::AtMost(span)) => lock.read_timeout(span).await.map(Some),
            (true, Patience::Endless) => lock.read().await.map(Some),
            (false, Patience::None) => lock.try_write().await,
            (false, Patience::AtMost(span)) => lock.write_timeout(span).await.map(Some),
            (false, Patience::Endless) => lock.write().await.map(Some),
        }
    }

    async fn all(&self, names: &[String], patience: Patience) -> Result<Option<Guard>> {
        let all = self.client.all(names).ttl(self.ttl).label(self.label);
        match patience {
            Patience::None => all.try_acquire().await,
            Patience::AtMost(span) => all.acquire_timeout(span).await.map(Some),
            Patience::Endless => all.acquire().await.map(Some),
        }
    }
}

/// A lock that a `fencelock run` around us holds, as `FENCELOCK_HELD` lists them, the innermost last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Held {
    name: String,
    token: u64,
    owner: String,
    url: String,
}

impl Held {
    /// What the environment says. One that cannot be read is not ours.
    pub(crate) fn outer() -> Vec<Held> {
        let text = std::env::var("FENCELOCK_HELD").unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

/// A hold of the same lock by a `fencelock run` around us, which can be re-entered.
pub(crate) struct Outer {
    owner: Owner,
}

impl Outer {
    /// Looks into the environment, and then whether that very grant still stands.
    ///
    /// The variables can outlive the hold (in a daemon, or a terminal multiplexer). Acquiring as an owner of the past would
    /// let two such leftovers take each other for one.
    pub(crate) async fn find(client: &Client, url: &str, name: &str) -> Result<Option<Self>, Failure> {
        // Who does not want to re-enter takes this variable out.
        if std::env::var_os("FENCELOCK_OWNER").is_none() {
            return Ok(None);
        }
        let here =
            |outer: &str| outer == url || same_place(outer.split('?').next().unwrap_or_default(), client.address());
        let mut claims: Vec<Held> = Held::outer();
        claims.extend(innermost());
        claims.retain(|held| held.name == name && here(&held.url));
        if claims.is_empty() {
            return Ok(None);
        }
        let status = client.status(name).await?;
        for held in claims.iter().rev() {
            let Ok(owner) = held.owner.parse::<Owner>() else { continue };
            let token = Token::new(held.token);
            if status.holders.iter().any(|holder| holder.token == token && holder.owner == owner.short()) {
                return Ok(Some(Self { owner }));
            }
        }
        Ok(None)
    }
}

/// Whether two addresses lead to the same engine; a directory may have several paths.
fn same_place(one: &str, other: &str) -> bool {
    let real = |address: &str| std::fs::canonicalize(address.strip_prefix("file:")?).ok();
    one == other || real(one).is_some_and(|path| Some(path) == real(other))
}

/// The hold that the plain variables describe, for those who pass only these on.
fn innermost() -> Option<Held> {
    let variable = |key: &str| std::env::var(key).ok();
    Some(Held {
        name: variable("FENCELOCK_NAME")?,
        token: variable("FENCELOCK_TOKEN")?.parse().ok()?,
        owner: variable("FENCELOCK_OWNER")?,
        url: variable("FENCELOCK_URL")?,
    })
}

/// The URL that leads a command to the same engine from everywhere: a path is made absolute.
pub(crate) fn url_for_others(client: &Client, url: &str) -> String {
    let is_file = url.split_once(':').is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("file"));
    match url.split_once('?') {
        _ if !is_file => url.to_owned(),
        Some((_, options)) => format!("{}?{options}", client.address()),
        None => client.address().to_owned(),
    }
}

/// The lease that the engine's URL asks for, if it does.
pub(crate) fn ttl_of(url: &str) -> Option<Duration> {
    let (_, options) = url.split_once('?')?;
    let ttl = options.split('&').find_map(|option| option.strip_prefix("ttl="))?;
    fencelock::parse_duration(ttl).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_may_bring_a_ttl() {
        assert_eq!(ttl_of("file:/x?network=allow&ttl=5s"), Some(Duration::from_secs(5)));
        assert_eq!(ttl_of("file:/x"), None);
    }
}
