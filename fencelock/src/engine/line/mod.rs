//! Lines of claims: the rule, the steps of a line, and the engine that waits in them.
//!
//! * `rule`: who of a line may hold; pure.
//! * [`Line`] (here): joining, leaving, renewing, reaping the dead, handing over; over any [`Shelf`] that can keep entries.
//! * `wait`: the engine over a store of lines: join, wait to be told, watch the one ahead.
//!
//! Every step touches a bounded number of entries, however long the line is.

pub mod rule;
pub(crate) mod wait;

use crate::{Claim, Error, Mode, Moment, Owner, Result};
use rule::admits;
use std::time::Duration;

/// The client to which an entry belongs; the store can tell whether it lives.
pub(crate) type Session = u64;

/// Where a claim in the line has got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Holding,
    /// Left, died, expired or evicted.
    Gone,
}

/// A claim in the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) state: State,
    pub(crate) mode: Mode,
    pub(crate) owner: Owner,
    pub(crate) session: Session,
    pub(crate) ttl: Duration,
    /// Of the grant; 0 while waiting.
    pub(crate) token: u64,
    /// End of the lease; meaningless while waiting.
    pub(crate) deadline: Moment,
    /// When it joined, or, once it holds, when it was granted.
    pub(crate) since: Moment,
    pub(crate) label: String,
}

/// What a line knows without looking at its entries. Entries are numbered; the line is `first..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Head {
    /// Everything before is gone.
    pub(crate) first: u64,
    /// Everything before holds or is gone; the first one that may wait.
    pub(crate) waiting: u64,
    /// The number that the next one gets.
    pub(crate) end: u64,
    /// How many hold, and how.
    pub(crate) holding: u32,
    pub(crate) mode: Option<Mode>,
    /// The newest token of this line.
    pub(crate) token: u64,
}

/// Keeps the entries of one line.
pub(crate) trait Shelf {
    fn head(&mut self) -> &mut Head;
    fn get(&mut self, number: u64) -> Result<Entry>;
    fn put(&mut self, number: u64, entry: &Entry) -> Result<()>;
}

/// What a step needs to know of the world outside of the line.
pub(crate) trait World {
    fn now(&self) -> Moment;
    /// A token above `last` and above every token that this line or an earlier line of the name ever had.
    fn token(&self, last: u64) -> Result<u64>;
    fn alive(&self, session: Session) -> bool;
    /// This owner is about to join. The store may keep a second record of who is in line.
    fn enter(&self, _owner: Owner) -> Result<()> {
        Ok(())
    }
    /// This owner is out of the line for good. Said at least once, possibly more often.
    fn exit(&self, _owner: Owner) {}
}

/// Somebody to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) to: Session,
    pub(crate) owner: Owner,
    pub(crate) news: News,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    Granted(Place),
    Lost,
}

/// A grant in terms of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) number: u64,
    pub(crate) token: u64,
    pub(crate) from: Moment,
    pub(crate) mode: Mode,
}

/// What an owner finds when it looks where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Standing {
    Holds(Place),
    /// Waits: behind whom, and when to look again if nobody says anything.
    Waits { watch: Vec<Session>, look_again: Moment },
    Gone,
}

/// The steps of one line.
pub(crate) struct Line<'a, S, W> {
    shelf: &'a mut S,
    world: &'a W,
    /// Whom to tell once the step is written down.
    pub(crate) words: Vec<Word>,
}

impl<'a, S: Shelf, W: World> Line<'a, S, W> {
    pub(crate) fn new(shelf: &'a mut S, world: &'a W) -> Self {
        Self { shelf, world, words: Vec::new() }
    }

    pub(crate) fn is_empty(&mut self) -> bool {
        let head = self.shelf.head();
        head.first == head.end
    }

    /// Puts a claim at the end of the line, and tells where it stands. Its own grant is not among the words.
    pub(crate) fn join(&mut self, claim: &Claim, session: Session) -> Result<(u64, Standing)> {
        let now = self.world.now();
        if self.reap()? {
            self.settle()?;
        }
        self.check_permits(claim.mode)?;
        self.world.enter(claim.owner)?;
        let number = self.shelf.head().end;
        let entry = Entry {
            state: State::Waiting,
            mode: claim.mode,
            owner: claim.owner,
            session,
            ttl: claim.ttl,
            token: 0,
            deadline: now,
            since: now,
            label: claim.label.clone(),
        };
        self.shelf.put(number, &entry)?;
        self.shelf.head().end = number + 1;
        self.settle()?;
        self.words.retain(|word| word.owner != claim.owner);
        let standing = self.look(number, claim.owner)?;
        Ok((number, standing))
    }

    /// A semaphore has one size.
    fn check_permits(&mut self, mode: Mode) -> Result<()> {
        let Mode::Permit { of } = mode else { return Ok(()) };
        let head = *self.shelf.head();
        let mut in_use = Vec::new();
        if head.holding > 0 {
            in_use.extend(head.mode);
        }
        if head.end > head.first {
            let last = self.shelf.get(head.end - 1)?;
            if last.state != State::Gone {
                in_use.push(last.mode);
            }
        }
        for known in in_use {
            if let Mode::Permit { of: known } = known
                && known != of
            {
                return Err(Error::invalid(format!(
                    "this semaphore is in use with {known} slots, not {of}; all who use it must give the same number"
                )));
            }
        }
        Ok(())
    }

    /// Removes who is dead or over, hands over, and tells where this owner stands then.
    pub(crate) fn check(&mut self, number: u64, owner: Owner) -> Result<Standing> {
        self.reap()?;
        self.settle()?;
        self.words.retain(|word| word.owner != owner);
        self.look(number, owner)
    }

    /// Where this owner stands at this number.
    pub(crate) fn look(&mut self, number: u64, owner: Owner) -> Result<Standing> {
        let head = *self.shelf.head();
        if !(head.first..head.end).contains(&number) {
            return Ok(Standing::Gone);
        }
        let entry = self.shelf.get(number)?;
        if entry.owner != owner {
            return Ok(Standing::Gone);
        }
        match entry.state {
            State::Gone => Ok(Standing::Gone),
            State::Holding => Ok(Standing::Holds(place(number, &entry))),
            State::Waiting => self.watch(number),
        }
    }

    /// The first one that waits watches those who hold; everybody else watches the one directly ahead. So one death wakes
    /// one waiter, not all.
    fn watch(&mut self, number: u64) -> Result<Standing> {
        let now = self.world.now();
        let head = *self.shelf.head();
        for ahead in (head.waiting..number).rev() {
            let mut entry = self.shelf.get(ahead)?;
            if entry.state == State::Waiting && !self.world.alive(entry.session) {
                entry.state = State::Gone;
                self.shelf.put(ahead, &entry)?;
            }
            if entry.state == State::Waiting {
                // It may come to hold without our knowing. Looking three times per lease finds that out before the lease ends.
                let look_again = now.after(entry.ttl / 3);
                return Ok(Standing::Waits { watch: vec![entry.session], look_again });
            }
        }
        let mut watch = Vec::new();
        let mut look_again = Moment::NEVER;
        for holder in head.first..head.waiting {
            let entry = self.shelf.get(holder)?;
            if entry.state == State::Holding {
                look_again = look_again.min(entry.deadline);
                if !watch.contains(&entry.session) {
                    watch.push(entry.session);
                }
            }
        }
        Ok(Standing::Waits { watch, look_again })
    }

    /// Removes holders that are dead or whose lease is over. True if there were any.
    pub(crate) fn reap(&mut self) -> Result<bool> {
        let now = self.world.now();
        let head = *self.shelf.head();
        let mut found = false;
        for number in head.first..head.waiting {
            let entry = self.shelf.get(number)?;
            if entry.state != State::Holding {
                continue;
            }
            let alive = self.world.alive(entry.session);
            if !alive || entry.deadline <= now {
                self.remove_holder(number, entry, alive)?;
                found = true;
            }
        }
        Ok(found)
    }

    fn remove_holder(&mut self, number: u64, mut entry: Entry, tell: bool) -> Result<()> {
        entry.state = State::Gone;
        if tell {
            self.words.push(Word { to: entry.session, owner: entry.owner, news: News::Lost });
        }
        self.shelf.put(number, &entry)?;
        self.shelf.head().holding -= 1;
        Ok(())
    }

    /// Hands over to those whom the rule lets hold now, skipping the dead; then forgets what is gone at the front.
    pub(crate) fn settle(&mut self) -> Result<()> {
        let now = self.world.now();
        loop {
            let head = *self.shelf.head();
            if head.waiting == head.end {
                break;
            }
            let mut entry = self.shelf.get(head.waiting)?;
            if entry.state == State::Waiting {
                let held = head.mode.filter(|_| head.holding > 0).map(|mode| (mode, head.holding));
                if !admits(held, entry.mode) {
                    break;
                }
                if self.world.alive(entry.session) {
                    entry.state = State::Holding;
                    entry.token = self.world.token(head.token)?;
                    entry.deadline = now.after(entry.ttl);
                    entry.since = now;
                    let news = News::Granted(place(head.waiting, &entry));
                    self.words.push(Word { to: entry.session, owner: entry.owner, news });
                    let head = self.shelf.head();
                    head.token = entry.token;
                    head.holding += 1;
                    head.mode = Some(entry.mode);
                } else {
                    entry.state = State::Gone;
                }
                self.shelf.put(head.waiting, &entry)?;
            }
            self.shelf.head().waiting += 1;
        }
        self.forget_gone()
    }

    fn forget_gone(&mut self) -> Result<()> {
        loop {
            let head = *self.shelf.head();
            if head.first == head.waiting || self.shelf.get(head.first)?.state != State::Gone {
                break;
            }
            self.shelf.head().first += 1;
        }
        let head = self.shelf.head();
        if head.first == head.end {
            // Numbers start again; the token does not.
            *head = Head { token: head.token, ..Head::default() };
        }
        Ok(())
    }

    /// The number of this owner's entry, if it is not known: a search.
    pub(crate) fn find(&mut self, owner: Owner) -> Result<Option<u64>> {
        let head = *self.shelf.head();
        for number in head.first..head.end {
            let entry = self.shelf.get(number)?;
            if entry.owner == owner && entry.state != State::Gone {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Takes this owner out of the line; hands over if it held. Tells in which state it was.
    pub(crate) fn leave(&mut self, number: Option<u64>, owner: Owner) -> Result<State> {
        let number = match number {
            Some(number) => Some(number),
            None => self.find(owner)?,
        };
        let was = match number {
            Some(number) => self.take_out(number, owner)?,
            None => State::Gone,
        };
        self.world.exit(owner);
        Ok(was)
    }

    fn take_out(&mut self, number: u64, owner: Owner) -> Result<State> {
        let head = *self.shelf.head();
        if !(head.first..head.end).contains(&number) {
            return Ok(State::Gone);
        }
        let mut entry = self.shelf.get(number)?;
        if entry.owner != owner {
            return Ok(State::Gone);
        }
        let was = entry.state;
        match was {
            State::Gone => return Ok(was),
            State::Holding => self.remove_holder(number, entry, false)?,
            State::Waiting => {
                entry.state = State::Gone;
                self.shelf.put(number, &entry)?;
            }
        }
        self.settle()?;
        Ok(was)
    }

    /// Extends the lease of a holder, never shortens it. False if it does not hold.
    pub(crate) fn renew(&mut self, number: u64, owner: Owner, ttl: Duration) -> Result<bool> {
        let Standing::Holds(_) = self.look(number, owner)? else {
            self.world.exit(owner);
            return Ok(false);
        };
        let mut entry = self.shelf.get(number)?;
        entry.deadline = entry.deadline.max(self.world.now().after(ttl));
        self.shelf.put(number, &entry)?;
        Ok(true)
    }

    /// Takes the lock away from all who hold it, and hands over. Tells how many there were.
    pub(crate) fn evict(&mut self) -> Result<usize> {
        self.reap()?;
        let head = *self.shelf.head();
        let mut count = 0;
        for number in head.first..head.waiting {
            let entry = self.shelf.get(number)?;
            if entry.state == State::Holding {
                self.remove_holder(number, entry, true)?;
                count += 1;
            }
        }
        self.settle()?;
        Ok(count)
    }

    /// The living entries, in order.
    pub(crate) fn entries(&mut self) -> Result<Vec<Entry>> {
        let head = *self.shelf.head();
        let now = self.world.now();
        let mut entries = Vec::new();
        for number in head.first..head.end {
            let entry = self.shelf.get(number)?;
            let over = entry.state == State::Holding && entry.deadline <= now;
            if entry.state != State::Gone && !over && self.world.alive(entry.session) {
                entries.push(entry);
            }
        }
        Ok(entries)
    }
}

fn place(number: u64, entry: &Entry) -> Place {
    Place { number, token: entry.token, from: entry.since, mode: entry.mode }
}
