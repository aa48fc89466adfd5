//! What the tool holds, and how it gets it: the locks of one `run`, re-entry included.

use crate::args::Run;
use crate::exit::Failure;
use fencelock::{Client, ErrorKind, Guard, Holder, Loss, Owner, Result, Token};
use serde::{Deserialize, Serialize};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Longer than this is for ever; far beyond it, clocks overflow.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The locks that the command runs under: several guards when holds around us are re-entered and others are held with them.
pub(crate) struct Holding {
    /// The first one is that of the first name.
    guards: Vec<Guard>,
    pub(crate) since: Instant,
}

impl Holding {
    /// # Panics
    /// Without any guard.
    pub(crate) fn new(guards: Vec<Guard>) -> Self {
        assert!(!guards.is_empty(), "at least one lock is held");
        Self { guards, since: Instant::now() }
    }

    fn first(&self) -> &Guard {
        &self.guards[0]
    }

    pub(crate) fn name(&self) -> &str {
        self.first().name()
    }

    /// The lock that was lost, or if none is known to be, the first one.
    pub(crate) fn lost_name(&self) -> &str {
        self.guards.iter().find_map(Guard::lost_name).unwrap_or_else(|| self.name())
    }

    pub(crate) fn token(&self) -> Token {
        self.first().token()
    }

    pub(crate) fn owner(&self) -> Owner {
        self.first().owner()
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
        self.guards.iter().flat_map(of_guard).collect()
    }

    pub(crate) fn is_borrowed(&self) -> bool {
        self.first().is_borrowed()
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.guards.iter().map(Guard::valid_for).min().unwrap_or_default()
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.guards.iter().all(Guard::is_valid)
    }

    /// Makes sure that more than this is left of the lease: a lock that was just handed over has little of it.
    pub(crate) async fn last(&self, least: Duration) -> Result<()> {
        if self.valid_for() <= least {
            for guard in &self.guards {
                guard.confirm().await?;
            }
        }
        Ok(())
    }

    /// Resolves when one of the locks is lost.
    pub(crate) fn lost(&self) -> impl Future<Output = Loss> + use<> {
        let mut lost: Vec<_> = self.guards.iter().map(|guard| Box::pin(guard.lost())).collect();
        std::future::poll_fn(move |context| {
            let mut ready = lost.iter_mut().map(|lost| lost.as_mut().poll(context));
            ready.find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
    }

    /// Releases all of them. Of several errors, a loss is told.
    pub(crate) async fn release(self) -> Result<()> {
        let mut outcome = Ok(());
        for guard in self.guards.into_iter().rev() {
            match guard.release().await {
                Err(error) if outcome.is_ok() || error.kind() == ErrorKind::Lost => outcome = Err(error),
                _ => {}
            }
        }
        outcome
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
    /// The locks, the first one first; with the owner as whom to re-enter those that a `fencelock run` around us holds.
    pub(crate) names: Vec<(&'a str, Option<Owner>)>,
    pub(crate) patience: Patience,
}

impl Wanted<'_> {
    /// Stands in line. None when there was no patience, and the lock is busy.
    pub(crate) async fn acquire(&self) -> Result<Option<Holding>> {
        let started = Instant::now();
        let mut guards = Vec::new();
        for (name, owner) in &self.names {
            if owner.is_some() {
                let Some(guard) = self.one(name, *owner, self.left(started)).await? else { return Ok(None) };
                guards.push(guard);
            }
        }
        // The others are our own: to hold them as the outer owner would let siblings share them.
        let others: Vec<&str> = self.names.iter().filter(|(_, owner)| owner.is_none()).map(|(name, _)| *name).collect();
        let rest = match (others.as_slice(), self.run.also.as_slice()) {
            ([], _) => return Ok(Some(Holding::new(guards))),
            ([name], []) => self.one(name, None, self.left(started)).await?,
            (names, _) => self.all(names, self.left(started)).await?,
        };
        let Some(rest) = rest else { return Ok(None) };
        let first_is_ours = self.names.first().is_some_and(|(_, owner)| owner.is_none());
        guards.insert(if first_is_ours { 0 } else { guards.len() }, rest);
        Ok(Some(Holding::new(guards)))
    }

    fn left(&self, started: Instant) -> Patience {
        match self.patience {
            Patience::AtMost(span) => Patience::AtMost(span.saturating_sub(started.elapsed())),
            patience => patience,
        }
    }

    async fn one(&self, name: &str, owner: Option<Owner>, patience: Patience) -> Result<Option<Guard>> {
        let run = self.run;
        if let Some(slots) = run.slots {
            let mut semaphore = self.client.semaphore(name, slots).ttl(self.ttl).label(self.label);
            if let Some(owner) = owner {
                semaphore = semaphore.owner(owner);
            }
            return match patience {
                Patience::None => semaphore.try_acquire().await,
                Patience::AtMost(span) => semaphore.acquire_timeout(span).await.map(Some),
                Patience::Endless => semaphore.acquire().await.map(Some),
            };
        }
        let mut lock = self.client.rwlock(name).ttl(self.ttl).label(self.label);
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

    async fn all(&self, names: &[&str], patience: Patience) -> Result<Option<Guard>> {
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

/// The owner of a hold of this lock by a `fencelock run` around us, which can be re-entered.
///
/// Looks into the environment, and then whether that very grant still stands: the variables can outlive the hold (in a daemon,
/// or a terminal multiplexer), and acquiring as an owner of the past would let two such leftovers take each other for one.
pub(crate) async fn outer_owner(client: &Client, url: &str, name: &str) -> Result<Option<Owner>, Failure> {
    // Who does not want to re-enter takes this variable out.
    if std::env::var_os("FENCELOCK_OWNER").is_none() {
        return Ok(None);
    }
    let here = |outer: &str| outer == url || same_place(outer.split('?').next().unwrap_or_default(), client.address());
    let mut claims: Vec<Held> = Held::outer();
    claims.extend(innermost());
    claims.retain(|held| held.name == name && here(&held.url));
    if claims.is_empty() {
        return Ok(None);
    }
    let status = client.status(name).await?;
    let stands = |held: &Held| {
        let owner = held.owner.parse::<Owner>().ok()?;
        let token = Token::new(held.token);
        let same = |holder: &Holder| holder.token == token && holder.owner == owner.short();
        status.holders.iter().any(same).then_some(owner)
    };
    Ok(claims.iter().rev().find_map(stands))
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
