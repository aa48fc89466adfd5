//! ZooKeeper: a line is a directory of ephemeral sequential nodes, laid out as Curator's recipes do.
//!
//! * `settings`: what a URL says.
//! * `session`: what keeps entries alive, and for how long.
//! * `path`: the names of directories and entries.
//! * `line`: reading a line.
//! * `fault`: what an error means.
//! * here: the store, over which `engine::line::ahead` waits and grants.
//!
//! See `docs/engines/zookeeper.md`.

mod fault;
mod line;
mod path;
mod session;
mod settings;

use self::line::Line;
use self::path::{Recipe, entry_prefix};
use self::session::{Creating, Session, lock};
use self::settings::Settings;
use super::line::ahead::{self, AheadEngine, Entry, Joined, Left, Ordered, Place, Until, View};
use super::{Capability, Purpose};
use crate::url::Url;
use crate::{Claim, Clock, Error, ErrorKind, Hold, Mode, Moment, Name, Owner, Renewal, Result, Token};
use futures_util::future::{join, join_all, select_all};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use zookeeper_client::{Client, CreateMode, Error as Fault, EventType, Stat};

/// Connects to the servers that the URL names.
pub(crate) async fn open(url: &Url, text: &str) -> Result<AheadEngine<Store>> {
    let settings = Settings::read(url, text)?;
    let store = Store {
        settings: Arc::new(settings),
        sessions: tokio::sync::Mutex::default(),
        all: Mutex::default(),
        leases: Mutex::default(),
    };
    store.session_for(store.settings.ttl).await.map_err(|error| error.at_engine(&store.settings.address))?;
    Ok(AheadEngine::new(store))
}

/// Lines in ZooKeeper.
pub(crate) struct Store {
    settings: Arc<Settings>,
    /// One for each length of lease that is in use; mostly there is one. Held while one is opened.
    sessions: tokio::sync::Mutex<()>,
    /// All sessions of this client, those that are over too.
    all: Mutex<Sessions>,
    /// How long the leases under a session are, as its entries tell.
    leases: Mutex<HashMap<u64, Duration>>,
}

#[derive(Default)]
struct Sessions {
    open: Vec<Arc<Session>>,
    /// Entries of these are removed, not adopted.
    over: HashSet<u64>,
    closed: bool,
}

impl Store {
    /// A session that covers leases of this length, opened on first use.
    async fn session_for(&self, ttl: Duration) -> Result<Arc<Session>> {
        if let Some(session) = self.known_session(ttl) {
            return Ok(session);
        }
        let _turn = self.sessions.lock().await;
        if let Some(session) = self.known_session(ttl) {
            return Ok(session);
        }
        if lock(&self.all).closed {
            return Err(closed());
        }
        let session = Session::open(&self.settings, ttl).await?;
        if session.lease < ttl {
            let (most, session) = (session.lease, session.length);
            return Err(Error::invalid(format!(
                "a ttl of {ttl:?} is too long: the servers allow sessions of {session:?}, which cover {most:?}; choose a shorter \
                 ttl, or raise maxSessionTimeout of the servers"
            )));
        }
        let mut all = lock(&self.all);
        if all.closed {
            return Err(closed());
        }
        all.open.push(Arc::clone(&session));
        Ok(session)
    }

    /// One that is open and neither too short nor much too long: a dead holder is noticed when its session ends.
    fn known_session(&self, ttl: Duration) -> Option<Arc<Session>> {
        let mut all = lock(&self.all);
        let over: Vec<u64> = all.open.iter().filter(|session| session.is_over()).map(|session| session.id).collect();
        all.open.retain(|session| !over.contains(&session.id));
        all.over.extend(over);
        let fits = |session: &&Arc<Session>| session.lease >= ttl && session.wanted <= longest(ttl);
        all.open.iter().find(fits).cloned()
    }

    /// Any session, to ask with.
    async fn some_session(&self) -> Result<Arc<Session>> {
        let known = lock(&self.all).open.iter().find(|session| !session.is_over()).cloned();
        match known {
            Some(session) => Ok(session),
            None => self.session_for(self.settings.ttl).await,
        }
    }

    fn session(&self, id: u64) -> Option<Arc<Session>> {
        lock(&self.all).open.iter().find(|session| session.id == id).cloned()
    }

    fn is_mine(&self, id: u64) -> bool {
        let all = lock(&self.all);
        all.over.contains(&id) || all.open.iter().any(|session| session.id == id)
    }

    fn directory(&self, name: &Name) -> String {
        self.below_root(&path::encode(name.as_str()))
    }

    fn below_root(&self, component: &str) -> String {
        match self.settings.root.as_str() {
            "/" => format!("/{component}"),
            root => format!("{root}/{component}"),
        }
    }

    /// An answer, or an error when the servers take too long for one who does not want to wait.
    async fn patiently<T>(&self, answer: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout(self.settings.patience, answer).await.unwrap_or_else(|_| {
            let span = self.settings.patience;
            Err(Error::new(
                ErrorKind::Unavailable,
                format!("ZooKeeper did not answer within {span:?}; are the servers up, and a majority of them?"),
            ))
        })
    }

    /// Makes the directory of a lock. It is a container: the servers remove it when it has been empty for a while.
    async fn make_directory(&self, client: &Client, directory: &str) -> Result<(), Fault> {
        let container = CreateMode::Container.with_acls(self.settings.acls);
        let persistent = CreateMode::Persistent.with_acls(self.settings.acls);
        let mut outcome = client.create(directory, &[], &container).await;
        if outcome == Err(Fault::NoNode) {
            client.mkdir(&self.settings.root, &persistent).await?;
            outcome = client.create(directory, &[], &container).await;
        }
        if outcome == Err(Fault::Unimplemented) {
            outcome = client.create(directory, &[], &persistent).await;
        }
        match outcome {
            Ok(_) | Err(Fault::NodeExists) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Creates an entry and reads the line, in one round trip.
    async fn create(&self, session: &Arc<Session>, claim: &Claim, directory: &str) -> Result<Created, Fault> {
        let client = session.client().map_err(|_| Fault::SessionExpired)?;
        let prefix = format!("{directory}/{}", entry_prefix(claim.owner, Recipe::of(claim.mode, claim.writer)));
        let data = line::data(claim, false);
        let options = CreateMode::EphemeralSequential.with_acls(self.settings.acls);
        let container = CreateMode::Container.with_acls(self.settings.acls);
        let sent = Clock::Boot.now();
        // Requests are sent in this order, whenever their answers are awaited.
        let making = (!session.knows(directory)).then(|| client.create(directory, &[], &container));
        let creating = Creating::send(session, (claim.owner, directory.to_owned()), {
            let client = Arc::clone(&client);
            async move {
                let (stat, sequence) = client.create(&prefix, &data, &options).await?;
                Ok((stat.czxid.cast_unsigned(), format!("{prefix}{sequence}")))
            }
        });
        let after = session.number();
        // Many who join at once share what they read; one alone reads right away.
        let reading = session.reads(directory);
        let turn = reading.reads.try_lock().ok();
        let number = session.number();
        let listing = turn.is_some().then(|| client.list_children(directory));
        if let Some(making) = making
            && matches!(making.await, Ok(_) | Err(Fault::NodeExists))
        {
            session.learn(directory);
        }
        let (created, line) = join(creating, async {
            if let (Some(listing), Some(mut turn)) = (listing, turn) {
                let line = Arc::new(Line::of(listing.await?));
                *turn = Some((number, Arc::clone(&line)));
                return Ok::<_, Fault>(line);
            }
            let mut turn = reading.reads.lock().await;
            if let Some((number, line)) = &*turn
                && *number > after
            {
                return Ok(Arc::clone(line));
            }
            let number = session.number();
            let line = Arc::new(Line::of(client.list_children(directory).await?));
            *turn = Some((number, Arc::clone(&line)));
            Ok(line)
        })
        .await;
        let (token, path) = created?;
        session.heard(sent);
        session.add(token, (claim.owner, directory.to_owned()), path.clone());
        let key = path[directory.len() + 1..].to_owned();
        let place = Place { key, order: token, token, session: session.id, seat: token };
        Ok(Created { place, line: line.ok(), sent })
    }

    /// One attempt to join. `None` when it is worth another one.
    async fn try_join(&self, session: &Arc<Session>, claim: &Claim, directory: &str) -> Result<Option<Joined>> {
        session.care();
        let created = match self.create(session, claim, directory).await {
            Ok(created) => created,
            Err(Fault::NoNode) => {
                // The directory was never there, or it was empty for so long that the servers removed it.
                session.forget(directory);
                let client = session.client()?;
                return match self.make_directory(&client, directory).await {
                    Err(fault) if !fault::is_lost(&fault) => Err(fault::error(&fault, false)),
                    _ => Ok(None),
                };
            }
            Err(fault) if fault::is_lost(&fault) => return self.recover(session, claim, directory).await,
            Err(fault) if fault::is_over(&fault) && fault != Fault::AuthFailed => return Ok(None),
            Err(fault) => return Err(fault::error(&fault, true)),
        };
        let place = created.place;
        let line = match created.line {
            Some(line) => line,
            None => Arc::new(Line::of(self.list(session, directory).await?)),
        };
        let asked = created.sent;
        let line = self.without_remains(session, claim.owner, &place, directory, line).await?;
        Ok(self.view(session, claim, &place, directory, line, asked).await?.map(|view| Joined::In(place, view)))
    }

    async fn list(&self, session: &Session, directory: &str) -> Result<Vec<String>> {
        loop {
            let client = session.client()?;
            match client.list_children(directory).await {
                Ok(names) => return Ok(names),
                Err(Fault::NoNode) => return Ok(Vec::new()),
                // The next request waits until there is a connection again.
                Err(fault) if fault::is_lost(&fault) => {}
                Err(fault) => return Err(fault::error(&fault, false)),
            }
        }
    }

    /// As [`list`](Store::list), but not older than the question: the server asks the leader first.
    async fn list_now(&self, session: &Session, directory: &str) -> Result<Vec<String>> {
        loop {
            let client = session.client()?;
            let syncing = client.sync(directory);
            let listing = client.list_children(directory);
            let (synced, listed) = join(syncing, listing).await;
            match (synced, listed) {
                (Err(fault), _) | (_, Err(fault)) if fault::is_lost(&fault) => {}
                (_, Err(Fault::NoNode)) => return Ok(Vec::new()),
                (Err(fault), _) | (_, Err(fault)) => return Err(fault::error(&fault, false)),
                (Ok(()), Ok(names)) => return Ok(names),
            }
        }
    }

    /// The answer to a request to create an entry was lost. If the entry is there, it is this claim's, unless it belongs to
    /// another session, which is dying. If it is not there, it will not come: the servers take nothing from the old connection of
    /// a session that has a new one.
    async fn recover(&self, session: &Arc<Session>, claim: &Claim, directory: &str) -> Result<Option<Joined>> {
        let asked = Clock::Boot.now();
        let line = Arc::new(Line::of(self.list_now(session, directory).await?));
        let recipe = Recipe::of(claim.mode, claim.writer);
        let mut found = line.of_owner(claim.owner).filter(|entry| entry.recipe == recipe);
        let Some(entry) = found.next().map(|entry| entry.name.clone()) else { return Ok(None) };
        drop(found);
        let path = format!("{directory}/{entry}");
        let Some(stat) = self.stat(session, &path).await? else { return Ok(None) };
        let id = stat.ephemeral_owner.cast_unsigned();
        if id != session.id {
            if self.is_mine(id) {
                self.delete(session, &path).await?;
            }
            return Ok(None);
        }
        let token = stat.czxid.cast_unsigned();
        let claimed = (claim.owner, directory.to_owned());
        drop(session.unheard(&claimed));
        session.add(token, claimed, path);
        let place = Place { key: entry, order: token, token, session: session.id, seat: token };
        let line = self.without_remains(session, claim.owner, &place, directory, line).await?;
        Ok(self.view(session, claim, &place, directory, line, asked).await?.map(|view| Joined::In(place, view)))
    }

    /// Removes what is left of earlier attempts of this claim, so that it does not wait for itself: entries of the same owner
    /// that belong to a session of this client and that nobody else of this client is about to use.
    async fn without_remains(
        &self,
        session: &Arc<Session>,
        owner: Owner,
        place: &Place,
        directory: &str,
        mut line: Arc<Line>,
    ) -> Result<Arc<Line>> {
        let remains: Vec<String> =
            line.of_owner(owner).filter(|entry| entry.name != place.key).map(|entry| entry.name.clone()).collect();
        for name in remains {
            let path = format!("{directory}/{name}");
            let stat = self.stat(session, &path).await?;
            let mine = stat.is_none_or(|stat| self.is_mine(stat.ephemeral_owner.cast_unsigned()));
            if mine {
                self.delete(session, &path).await?;
                Arc::make_mut(&mut line).remove(&name);
            }
        }
        Ok(line)
    }

    /// What this claim sees ahead. `None` when its own entry is not in the line.
    async fn view(
        &self,
        session: &Arc<Session>,
        claim: &Claim,
        place: &Place,
        directory: &str,
        mut line: Arc<Line>,
        asked: Moment,
    ) -> Result<Option<View>> {
        if line.is_doubtful() {
            self.order_by_czxid(session, directory, Arc::make_mut(&mut line)).await?;
        }
        let ahead = line.ahead_of(&place.key, claim.mode);
        if let (Mode::Exclusive, Some(1), Some([one])) = (claim.mode, line.count_ahead(&place.key), ahead.as_deref()) {
            session.is_second(place.seat, format!("{directory}/{}", one.key));
        }
        // The watch that follows is asked for through the same session.
        Ok(ahead.map(|ahead| View { ahead, as_of: session.id, asked }))
    }

    async fn order_by_czxid(&self, session: &Session, directory: &str, line: &mut Line) -> Result<()> {
        let paths: Vec<String> = line.names().map(|name| format!("{directory}/{name}")).collect();
        let stats = join_all(paths.iter().map(|path| self.stat(session, path))).await;
        let mut order = HashMap::new();
        for (name, stat) in line.names().zip(stats) {
            if let Some(stat) = stat? {
                order.insert(name.to_owned(), stat.czxid);
            }
        }
        line.order_by(&order);
        Ok(())
    }

    /// What there is at a path, however often the connection is lost meanwhile.
    async fn stat(&self, session: &Session, path: &str) -> Result<Option<Stat>> {
        loop {
            let client = session.client()?;
            match client.check_stat(path).await {
                Ok(stat) => return Ok(stat),
                Err(fault) if fault::is_lost(&fault) => {}
                Err(fault) => return Err(fault::error(&fault, false)),
            }
        }
    }

    /// As [`stat`](Store::stat), with the data.
    async fn data(&self, session: &Session, path: String) -> Result<Option<(Vec<u8>, Stat)>> {
        loop {
            let client = session.client()?;
            match client.get_data(&path).await {
                Ok(found) => return Ok(Some(found)),
                Err(Fault::NoNode) => return Ok(None),
                Err(fault) if fault::is_lost(&fault) => {}
                Err(fault) => return Err(fault::error(&fault, false)),
            }
        }
    }

    /// Deletes a node, however often the connection is lost meanwhile.
    async fn delete(&self, session: &Session, path: &str) -> Result<Left> {
        self.delete_again(session, path, false).await
    }

    /// As [`delete`](Store::delete); an earlier attempt, whose answer was lost, may have deleted it.
    async fn delete_again(&self, session: &Session, path: &str, mut repeated: bool) -> Result<Left> {
        loop {
            let client = session.client()?;
            match client.delete(path, None).await {
                Ok(()) => return Ok(Left::Gone),
                Err(Fault::NoNode) if repeated => return Ok(Left::Perhaps),
                Err(Fault::NoNode) => return Ok(Left::Nothing),
                Err(fault) if fault::is_lost(&fault) => repeated = true,
                Err(fault) => return Err(fault::error(&fault, true)),
            }
        }
    }

    /// Deletes the entry of one that held, and says so in the same step: its name becomes the data of the directory.
    async fn delete_with_last_word(&self, session: &Session, path: &str) -> Result<Left> {
        let Some((directory, name)) = path.rsplit_once('/') else { return self.delete(session, path).await };
        let client = session.client()?;
        let outcome = async {
            let mut writer = client.new_multi_writer();
            writer.add_delete(path, None)?;
            writer.add_set_data(directory, name.as_bytes(), None)?;
            writer.commit().await.map_err(Fault::from)
        };
        match outcome.await {
            Ok(_) => Ok(Left::Gone),
            // The word is a favour; the directory may belong to somebody who does not want it.
            Err(fault) => self.delete_again(session, path, fault::is_lost(&fault)).await,
        }
    }

    /// Whether the last word of a holder of this line was that of the given entry, and the own entry stands.
    async fn is_next(&self, session: &Session, directory: &str, place: &Place, after: &Entry) -> bool {
        let Ok(client) = session.client() else { return false };
        let own = format!("{directory}/{}", place.key);
        let (said, stands) = join(client.get_data(directory), client.check_stat(&own)).await;
        matches!(said, Ok((name, _)) if name == after.key.as_bytes()) && matches!(stands, Ok(Some(_)))
    }

    async fn leave_known(&self, session: &Arc<Session>, seat: u64, path: &str, held: bool) -> Result<Left> {
        let left = if session.is_over() {
            // It is gone or about to go; another session makes sure.
            let other = self.some_session().await?;
            self.delete(&other, path).await?
        } else {
            let sent = Clock::Boot.now();
            let left = if held {
                self.delete_with_last_word(session, path).await?
            } else {
                self.delete(session, path).await?
            };
            session.heard(sent);
            left
        };
        session.remove(seat);
        Ok(left)
    }

    /// Removes all entries of an owner that belong to this client.
    async fn leave_by_owner(&self, hold: &Hold) -> Result<Left> {
        let directory = self.directory(&hold.name);
        let open: Vec<Arc<Session>> = lock(&self.all).open.clone();
        // Through the session that the claim used: should its request be under way, these follow it.
        let session = match self.known_session(hold.ttl) {
            Some(session) => session,
            None => self.some_session().await?,
        };
        let claimed = (hold.owner, directory.clone());
        let answers: Result<Vec<_>, Fault> = join_all(session.unheard(&claimed)).await.into_iter().collect();
        let mut known = session.entries_of(&claimed);
        // Where every answer came, and there was no older session, this is all there is of the claim.
        if let Ok(heard) = answers
            && lock(&self.all).over.is_empty()
        {
            known.extend(heard);
            let mut left = Left::Nothing;
            for (czxid, path) in &known {
                left = self.delete(&session, path).await?;
                session.remove(*czxid);
            }
            if !known.is_empty() {
                return Ok(left);
            }
        }
        let line = Line::of(self.list_now(&session, &directory).await?);
        let mut left = Left::Nothing;
        for entry in line.of_owner(hold.owner) {
            let path = format!("{directory}/{}", entry.name);
            let Some(stat) =
                self.stat(&session, &path).await?.filter(|stat| self.is_mine(stat.ephemeral_owner.cast_unsigned()))
            else {
                continue;
            };
            let token = stat.czxid.cast_unsigned();
            if hold.token.is_some_and(|wanted| wanted.as_u64() != token) {
                continue;
            }
            if self.delete(&session, &path).await? != Left::Nothing {
                left = Left::Gone;
            }
            for session in &open {
                session.remove(token);
            }
        }
        Ok(left)
    }

    /// The entries of a line with all that is known of them.
    async fn read(&self, session: &Session, directory: &str, line: Line) -> Result<Vec<Entry>> {
        let asked = line.names().map(|name| self.data(session, format!("{directory}/{name}")));
        let mut entries = Vec::new();
        for (entry, answer) in line.entries().zip(join_all(asked).await) {
            let Some((data, stat)) = answer? else { continue };
            let (entry, lease) = line::entry(entry, &data, &stat);
            if let Some(lease) = lease {
                self.note_lease(entry.session, lease);
            }
            entries.push(entry);
        }
        // Of entries that are there at the same time, an older one is ahead.
        entries.sort_by_key(|entry| entry.token);
        Ok(entries)
    }

    fn note_lease(&self, session: u64, lease: Duration) {
        const KNOWN: usize = 4096;
        let mut leases = lock(&self.leases);
        if leases.len() >= KNOWN {
            leases.clear();
        }
        leases.insert(session, lease);
    }

    /// Resolves when the node is gone or its data satisfies `enough`.
    async fn until(&self, session: &Session, path: &str, enough: impl Fn(&[u8]) -> bool) -> Result<()> {
        loop {
            let client = session.client()?;
            let answer = client.get_and_watch_data(path).await;
            drop(client);
            let watcher = match answer {
                Ok((data, ..)) if enough(&data) => return Ok(()),
                Ok((_, _, watcher)) => watcher,
                Err(Fault::NoNode) => return Ok(()),
                Err(fault) => return Err(fault::error(&fault, false)),
            };
            match watcher.changed().await.event_type {
                EventType::NodeDeleted => return Ok(()),
                EventType::Session => return Err(fault::error(&Fault::SessionExpired, false)),
                _ => {}
            }
        }
    }

    /// Keeps a session for as long as somebody waits with it.
    async fn caring<T>(&self, session: &Session, wait: impl Future<Output = T>) -> T {
        let care = async {
            loop {
                session.care();
                tokio::time::sleep(session.length / 3).await;
            }
        };
        tokio::select! {
            out = wait => out,
            never = care => never,
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "this client was closed; connect again")
}

/// The longest session that is used for leases of this length.
fn longest(ttl: Duration) -> Duration {
    session::length_for(ttl) * 3 / 2
}

/// An entry that was created just now.
struct Created {
    place: Place,
    /// What was in the directory right afterwards; `None` when that answer was lost.
    line: Option<Arc<Line>>,
    sent: Moment,
}

impl Ordered for Store {
    fn address(&self) -> &str {
        &self.settings.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "zookeeper",
            processes: true,
            machines: true,
            shared: true,
            permits: true,
            ordered: true,
            push: true,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Correctness,
            survives: "crashed and stopped clients, lost connections and replies, the loss of servers as long as a majority is left, \
                       a restart of all of them",
            beware: "without a majority nothing can be acquired, and holders lose their locks; a holder that stands still can wake \
                     after its lease and write, so let the resource compare tokens",
        }
    }

    async fn join(&self, claim: &Claim, wait: bool) -> Result<Joined> {
        let directory = self.directory(&claim.name);
        if !wait {
            // An entry, if only for a moment, would be in the way of others who do not want to wait either.
            let look = async {
                let session = self.session_for(claim.ttl).await?;
                let names = self.list_now(&session, &directory).await?;
                let mut line = Line::of(names);
                if line.is_doubtful() {
                    self.order_by_czxid(&session, &directory, &mut line).await?;
                }
                Ok(ahead::blocked(&line.all_ahead(), claim.mode)?.is_some())
            };
            if self.patiently(look).await? {
                return Ok(Joined::Busy);
            }
        }
        let attempts = async {
            loop {
                let session = self.session_for(claim.ttl).await?;
                match self.try_join(&session, claim, &directory).await {
                    Ok(Some(joined)) => return Ok(joined),
                    Ok(None) => {}
                    Err(error) if !session.is_over() => return Err(error),
                    // Another session, another attempt.
                    Err(_) => {}
                }
            }
        };
        self.patiently(attempts).await
    }

    async fn look(&self, claim: &Claim, place: &Place, after: Option<&Entry>) -> Result<Option<View>> {
        let Some(session) = self.session(place.session).filter(|session| !session.is_over()) else { return Ok(None) };
        session.care();
        let directory = self.directory(&claim.name);
        let asked = Clock::Boot.now();
        // Where the only one ahead is gone, that the own entry stands is the session's word; if somebody took it away just now, the
        // holder is told.
        let mut first = session.is_first(place.seat);
        if let (false, Some(after)) = (first, after) {
            first = self.is_next(&session, &directory, place, after).await;
        }
        if first {
            return Ok(Some(View { ahead: Vec::new(), as_of: session.id, asked }));
        }
        let line = Arc::new(Line::of(self.list(&session, &directory).await?));
        let view = self.view(&session, claim, place, &directory, line, asked).await?;
        if view.is_none() {
            session.remove(place.seat);
        }
        Ok(view)
    }

    async fn wait(&self, name: &Name, until: Until<'_>, as_of: u64) -> Result<()> {
        let Some(session) = self.session(as_of) else { return Ok(()) };
        let directory = self.directory(name);
        let path = |entry: &Entry| format!("{directory}/{}", entry.key);
        let waiting = async {
            match until {
                Until::Gone(entry) => {
                    let path = path(entry);
                    self.until(&session, &path, |_| false).await.inspect(|()| session.deleted(&path))
                }
                Until::Passed(entry) => self.until(&session, &path(entry), line::holds).await,
                Until::AnyGone(entries) => {
                    let paths: Vec<String> = entries.iter().map(path).collect();
                    let each = paths.iter().map(|path| Box::pin(self.until(&session, path, |_| false)));
                    select_all(each).await.0
                }
            }
        };
        let outcome = self.caring(&session, waiting).await;
        // The next look finds out.
        if session.is_over() { Ok(()) } else { outcome }
    }

    async fn mark(&self, claim: &Claim, place: &Place) -> Result<bool> {
        let Some(session) = self.session(place.session) else { return Ok(false) };
        let Ok(client) = session.client() else { return Ok(false) };
        let path = format!("{}/{}", self.directory(&claim.name), place.key);
        let sent = Clock::Boot.now();
        match client.set_data(&path, &line::data(claim, true), None).await {
            Ok(_) => {
                session.heard(sent);
                Ok(true)
            }
            Err(Fault::NoNode) => Ok(false),
            Err(fault) if fault::is_over(&fault) => Ok(false),
            Err(fault) => Err(fault::error(&fault, true)),
        }
    }

    async fn gone(&self, name: &Name, place: &Place) {
        let path = format!("{}/{}", self.directory(name), place.key);
        while let Some(session) = self.session(place.session).filter(|session| !session.is_over()) {
            if self.until(&session, &path, |_| false).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn leave(&self, hold: &Hold, held: Option<&Place>) -> Result<Left> {
        let known = hold.seat.and_then(|seat| {
            let all = lock(&self.all);
            all.open.iter().find_map(|session| Some((Arc::clone(session), seat, session.path_of(seat)?)))
        });
        match known {
            Some((session, seat, path)) => {
                self.patiently(self.leave_known(&session, seat, &path, held.is_some())).await
            }
            None => self.patiently(self.leave_by_owner(hold)).await,
        }
    }

    fn is_alive(&self) -> bool {
        lock(&self.all).open.iter().any(|session| !session.is_over())
    }

    fn good_until(&self, session: ahead::Session) -> Moment {
        self.session(session).map_or_else(Moment::default, |session| session.good_until())
    }

    async fn beat(&self, session: ahead::Session) -> Result<Option<Moment>> {
        match self.session(session) {
            Some(session) => session.beat().await,
            None => Ok(None),
        }
    }

    async fn renew_borrowed(&self, hold: &Hold) -> Result<Renewal> {
        let from = Clock::Boot.now();
        let line = self.patiently(self.entries(&hold.name)).await?;
        let stands = line.iter().any(|entry| {
            entry.owner == Some(hold.owner) && hold.token.is_none_or(|token| token == Token::new(entry.token))
        });
        Ok(if stands { Renewal::Extended { from } } else { Renewal::Gone })
    }

    async fn entries(&self, name: &Name) -> Result<Vec<Entry>> {
        self.patiently(async {
            let session = self.some_session().await?;
            let directory = self.directory(name);
            let line = Line::of(self.list_now(&session, &directory).await?);
            self.read(&session, &directory, line).await
        })
        .await
    }

    async fn lines(&self, prefix: &str) -> Result<Vec<(Name, Vec<Entry>)>> {
        /// So many questions are under way at once.
        const BATCH: usize = 256;
        let session = self.some_session().await?;
        let components = self.patiently(self.list_now(&session, &self.settings.root)).await?;
        let mut names: Vec<Name> = Vec::new();
        for component in components {
            let name = path::decode(&component).filter(|name| name.starts_with(prefix));
            names.extend(name.and_then(|name| Name::new(name).ok()));
        }
        let mut lines = Vec::new();
        for batch in names.chunks(BATCH) {
            let asked = batch.iter().map(|name| async {
                let directory = self.directory(name);
                let line = Line::of(self.list(&session, &directory).await?);
                Ok::<_, Error>((name.clone(), self.read(&session, &directory, line).await?))
            });
            for line in self.patiently(async { Ok(join_all(asked).await) }).await? {
                lines.push(line?);
            }
        }
        lines.retain(|(_, line)| !line.is_empty());
        Ok(lines)
    }

    async fn lease_left(&self, sessions: &BTreeSet<ahead::Session>) -> Result<HashMap<ahead::Session, Duration>> {
        let now = Clock::Boot.now();
        let leases = lock(&self.leases);
        let left = |id: &u64| {
            // When the last heartbeat of others was, only the leader knows: at most so much is left.
            let lease = *leases.get(id)?;
            let own = self.session(*id).map(|session| session.good_until().since(now));
            Some((*id, own.map_or(lease, |left| left.min(lease))))
        };
        Ok(sessions.iter().filter_map(left).collect())
    }

    async fn remove(&self, name: &Name, entries: &[Entry]) -> Result<usize> {
        let directory = self.directory(name);
        let session = self.some_session().await?;
        let removing = entries.iter().map(|entry| {
            let path = format!("{directory}/{}", entry.key);
            let session = &session;
            async move { self.delete(session, &path).await }
        });
        let outcomes = self.patiently(async { Ok(join_all(removing).await) }).await?;
        let mut count = 0;
        for outcome in outcomes {
            count += usize::from(outcome? != Left::Nothing);
        }
        Ok(count)
    }

    async fn drive(&self) {
        loop {
            let open: Vec<Arc<Session>> = lock(&self.all).open.clone();
            let mut pause = Duration::from_secs(1);
            for session in &open {
                session.care();
                pause = pause.min(session.lease / 8);
            }
            // Those who wait have a fresh word of the leader when their turn comes. One slow session holds up no other.
            let now = Clock::Boot.now();
            let stale = open.iter().filter(|session| {
                let fresh = session.good_until() >= now.after(session.lease * 3 / 4);
                session.is_in_use() && !session.is_over() && !fresh
            });
            let beats = join_all(stale.map(|session| session.beat()));
            let _ = tokio::time::timeout(pause.max(Duration::from_millis(50)), beats).await;
            tokio::time::sleep(pause).await;
        }
    }

    async fn close(&self) -> Result<()> {
        let open = {
            let mut all = lock(&self.all);
            all.closed = true;
            std::mem::take(&mut all.open)
        };
        let ends = join_all(open.iter().map(|session| session.end()));
        let _ = tokio::time::timeout(Duration::from_secs(2), ends).await;
        Ok(())
    }
}
