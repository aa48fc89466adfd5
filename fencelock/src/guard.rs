//! What the user holds while it holds a lock.

use crate::client::Client;
use crate::engine::EntryKey;
use crate::keeper::{Held, Loss, first_loss};
use crate::{Error, ErrorKind, Hold, Mode, Owner, Release, Result, Token};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A held lock.
///
/// While [`is_valid`](Guard::is_valid), the engine has promised that nobody else holds the lock against it. The promise
/// ends at a local deadline, which is computed from the moment the request was *sent*, so it ends here before it ends
/// there. The client's keeper moves the deadline forward, at a third of the ttl, for as long as the guard lives.
///
/// A guard can stand for several locks at once ([`Client::all`]): it is valid while all of them are, and lost when
/// one of them is.
///
/// # Dropping
/// Dropping the guard releases the lock in the background, also outside of a runtime and during a panic.
/// [`release`](Guard::release) does the same, waits for it, and tells whether the lock was ours to the end.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let guard = locks.mutex("invoice:42").acquire().await?;
/// println!("token {}, good for {:?}", guard.token(), guard.valid_for());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard {
    /// Never empty; in the order in which the caller named the locks. Emptied by `release`.
    parts: Vec<Arc<Held>>,
    client: Client,
}

impl Guard {
    pub(crate) fn new(client: Client, parts: Vec<Arc<Held>>) -> Self {
        Self { parts, client }
    }

    fn first(&self) -> &Held {
        // `parts` is emptied only by methods that consume the guard.
        self.parts.first().expect("a guard stands for at least one lock")
    }

    /// The fencing token: greater than every token granted before for this name. With several locks, that of the
    /// first name; see [`token_of`](Guard::token_of).
    pub fn token(&self) -> Token {
        self.first().token
    }

    /// The token of one of the names that this guard stands for.
    pub fn token_of(&self, name: &str) -> Option<Token> {
        self.parts.iter().find(|held| held.hold.name.as_str() == name).map(|held| held.token)
    }

    /// The id of this acquisition. Who knows it can re-enter the hold, also from another process.
    pub fn owner(&self) -> Owner {
        self.first().hold.owner
    }

    /// The name of the lock; with several, the first one.
    pub fn name(&self) -> &str {
        self.first().hold.name.as_str()
    }

    /// All the names that this guard stands for, in the order in which they were asked for.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|held| held.hold.name.as_str())
    }

    /// How the lock is held.
    pub fn mode(&self) -> Mode {
        self.first().mode
    }

    /// Where the engine keeps this hold, if a transaction at the engine itself can compare it; with several locks, that of the
    /// first name. On etcd: a write that is to happen only while the lock is held goes into a transaction that compares the
    /// create revision of this key with this revision. Then no pause, however long, lets a late write through.
    ///
    /// `None` on engines without such transactions.
    pub fn entry_key(&self) -> Option<EntryKey> {
        let held = self.first();
        self.client.engine().entry_key(&held.hold.name, held.hold.owner, held.mode, held.token)
    }

    /// Whether this is somebody else's hold, re-entered by its owner id. Its release frees nothing.
    pub fn is_borrowed(&self) -> bool {
        self.first().borrowed
    }

    /// Whether the lock is still ours, by the local clock and all that is known. Asks nobody and never blocks.
    pub fn is_valid(&self) -> bool {
        !self.valid_for().is_zero()
    }

    /// How long the lock is ours even if no renewal succeeds any more. Zero when it is not.
    pub fn valid_for(&self) -> Duration {
        self.parts.iter().map(|held| held.valid_for()).min().unwrap_or_default()
    }

    /// Why the lock was lost, if it was.
    pub fn loss(&self) -> Option<Loss> {
        self.parts.iter().find_map(|held| held.loss())
    }

    /// Which lock was lost, if one was; with several, the first of them.
    pub fn lost_name(&self) -> Option<&str> {
        self.parts.iter().find(|held| held.loss().is_some()).map(|held| held.hold.name.as_str())
    }

    /// Resolves when the lock is lost: by the local deadline, or by the engine's word. It never resolves after a clean
    /// release. The future does not borrow the guard, so it can be spawned.
    ///
    /// # Cancellation safety
    /// Dropping the future has no effect.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> fencelock::Result<()> {
    /// # async fn work() {}
    /// let locks = fencelock::connect("memory:").await?;
    /// let guard = locks.mutex("job").acquire().await?;
    /// tokio::select! {
    ///     () = work() => guard.release().await?,
    ///     why = guard.lost() => eprintln!("stop: {why}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + 'static + use<> {
        first_loss(self.parts.clone())
    }

    /// Asks the engine, now, whether the lock is still ours, and renews its lease if so: before a step that cannot be undone, or
    /// that needs a whole lease. (A lock that was just handed over may be good for two seconds only, until the keeper has renewed
    /// it for the first time.)
    ///
    /// # Errors
    /// * `Lost`: it is not ours any more.
    /// * Any other: the engine did not tell. The lock is ours for [`valid_for`](Guard::valid_for) all the same.
    ///
    /// # Cancellation safety
    /// Dropping the future has no effect.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> fencelock::Result<()> {
    /// # async fn send_money() {}
    /// let locks = fencelock::connect("memory:").await?;
    /// let guard = locks.mutex("payout:7").acquire().await?;
    /// guard.confirm().await?;
    /// send_money().await;
    /// # Ok(()) }
    /// ```
    pub async fn confirm(&self) -> Result<()> {
        for held in &self.parts {
            self.confirm_part("confirm", held).await?;
        }
        Ok(())
    }

    async fn confirm_part(&self, what: &'static str, held: &Arc<Held>) -> Result<()> {
        let told = |error: Error| self.client.tell(what, held.hold.name.as_str(), error);
        self.client.keeper().confirm(held).await.map_err(told)
    }

    /// Enters the same hold once more: for a function under the lock that takes the lock itself. Only the last of the
    /// guards to go frees the lock.
    ///
    /// # Errors
    /// `Lost` when the engine, which is asked, says that the hold does not stand any more.
    pub async fn reenter(&self) -> Result<Guard> {
        let mut again = Guard::new(self.client.clone(), Vec::with_capacity(self.parts.len()));
        for held in &self.parts {
            self.confirm_part("re-enter", held).await?;
            if !held.enter() {
                let error = Error::new(ErrorKind::NotHeld, "the lock is being released");
                return Err(self.client.tell("re-enter", held.hold.name.as_str(), error));
            }
            again.parts.push(Arc::clone(held));
        }
        Ok(again)
    }

    /// Releases the lock and tells whether it was ours to the end.
    ///
    /// # Errors
    /// * `Lost`: it was not ours any more. Nobody else's lock was touched.
    /// * `Unavailable`, `Ambiguous`, `Engine`: the engine did not confirm. The release goes on in the background.
    ///
    /// # Cancellation safety
    /// Dropping the future halfway lets the release go on in the background.
    pub async fn release(mut self) -> Result<()> {
        let mut outcome = Ok(());
        // What is not popped yet when this future is dropped is released by the guard's own drop.
        while let Some(held) = self.parts.pop() {
            if let Err(error) = self.release_part(&held).await {
                outcome = Err(error);
            }
        }
        outcome
    }

    async fn release_part(&self, held: &Held) -> Result<()> {
        let told = |error: Error| self.client.tell("release", held.hold.name.as_str(), error);
        let lost = |why: Loss| {
            told(Error::new(
                ErrorKind::Lost,
                format!("the lock was lost before its release: {why}; check what was done under token {}", held.token),
            ))
        };
        let Some(ending) = self.count_out(held) else {
            return held.loss().map_or(Ok(()), |loss| Err(lost(loss)));
        };
        match (ending.finish().await, held.loss()) {
            (_, Some(loss)) => Err(lost(loss)),
            (Ok(Release::Freed), None) => Ok(()),
            (Ok(_), None) => Err(lost(Loss::Taken)),
            (Err(error), None) => Err(told(error)),
        }
    }

    /// Gives up this guard without releasing: its share has passed to another guard.
    pub(crate) fn defuse(mut self) {
        self.parts.clear();
    }

    /// Counts one share out. If it was the last one of a lock that is ours, what is left to do is to tell the engine.
    fn count_out(&self, held: &Held) -> Option<Ending> {
        if !held.exit() {
            return None;
        }
        let cared_for = self.client.keeper().forget(held);
        // A loss that the keeper has not dealt with yet: nobody else tells the engine.
        let lost = held.mark_released().is_err();
        let ours = (!lost || cared_for) && !held.borrowed;
        ours.then(|| Ending::new(self.client.clone(), Hold { again: lost, ..held.hold.clone() }))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        while let Some(held) = self.parts.pop() {
            drop(self.count_out(&held));
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Guard");
        out.field("names", &self.names().collect::<Vec<_>>());
        if !self.parts.is_empty() {
            out.field("token", &self.token()).field("owner", &self.owner());
        }
        out.field("valid_for", &self.valid_for()).finish()
    }
}

/// A claim that must go, whatever happens: until the engine has confirmed it, dropping this hands it to the keeper.
pub(crate) struct Ending {
    client: Client,
    hold: Option<Hold>,
}

impl Ending {
    pub(crate) fn new(client: Client, hold: Hold) -> Self {
        Self { client, hold: Some(hold) }
    }

    /// Nothing needs to go after all.
    pub(crate) fn call_off(mut self) {
        self.hold = None;
    }

    /// Tells the engine, and what it answered.
    pub(crate) async fn finish(mut self) -> Result<Release> {
        let Some(kept) = &mut self.hold else { return Ok(Release::NotHeld) };
        let hold = kept.clone();
        kept.again = true;
        let answer = self.client.engine().release(&hold).await?;
        self.hold = None;
        Ok(answer)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.client.keeper().release_later(hold);
        }
    }
}
