//! Lines of claims: the rule, the steps of a line, and the engine that waits in them.
//!
//! * `rule`: who of a line may hold; pure.
//! * [`Line`] (here): joining, leaving, renewing, reaping the dead, handing over; over any [`Shelf`] that can keep entries.
//! * `wait`: the engine over a store of lines: join, wait to be told, watch the one ahead.
//! * `ahead`: the engine over stores whose entries order themselves: join, look ahead, wait for the one that blocks.
//!
//! Every step touches a bounded number of entries, however long the line is.

#[cfg_attr(not(any(feature = "etcd", feature = "zookeeper")), allow(dead_code, reason = "its engines are features"))]
pub(crate) mod ahead;
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
    /// How many of `first..end` are gone.
    pub(crate) gone: u64,
    /// How many hold, and how.
    pub(crate) holding: u32,
    pub(crate) mode: Option<Mode>,
    /// The newest token of this line.
    pub(crate) token: u64,
}

impl Head {
    /// In which mode how many hold, as the rule wants to know it.
    fn held(&self) -> Option<(Mode, u32)> {
        self.mode.filter(|_| self.holding > 0).map(|mode| (mode, self.holding))
    }
}

/// So many entries that are gone may stand in a line, beside as many as are not, before they are weeded out.
const WEEDS: u64 = 64;

/// Keeps the entries of one line.
pub(crate) trait Shelf {
    fn head(&mut self) -> &mut Head;
    fn get(&mut self, number: u64) -> Result<Entry>;
    fn put(&mut self, number: u64, entry: &Entry) -> Result<()>;
    /// Forgets all entries: nobody is left, and numbers start again.
    fn clear(&mut self);
}

/// What a step needs to know of the world outside of the line.
pub(crate) trait World {
    /// Names this line among all lines.
    fn line(&self) -> u64;
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
    /// Which line it is about: an owner can stand in several.
    pub(crate) line: u64,
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
    Waits {
        watch: Vec<Session>,
        look_again: Moment,
    },
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
        let head = *self.shelf.head();
        // Whoever fits in need not know whether all the holders are alive.
        if !(head.waiting == head.end && admits(head.held(), claim.mode)) && self.reap()? {
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
            label: claim.label.to_string(),
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
        if let Some((Mode::Permit { of: known }, _)) = head.held() {
            return if known == of { Ok(()) } else { Err(other_permits(known, of)) };
        }
        // In a line of mixed modes, the nearest one ahead tells; far ahead nobody looks.
        for number in (head.first..head.end).rev().take(256) {
            let entry = self.shelf.get(number)?;
            if let (Mode::Permit { of: known }, true) = (entry.mode, entry.state != State::Gone) {
                return if known == of { Ok(()) } else { Err(other_permits(known, of)) };
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
        let Some(number) = self.find(Some(number), owner)? else { return Ok(Standing::Gone) };
        let entry = self.shelf.get(number)?;
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
            let entry = self.shelf.get(ahead)?;
            if entry.state == State::Waiting && !self.world.alive(entry.session) {
                self.mark_gone(ahead, entry)?;
            } else if entry.state == State::Waiting {
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

    fn remove_holder(&mut self, number: u64, entry: Entry, tell: bool) -> Result<()> {
        if tell {
            self.tell(&entry, News::Lost);
        }
        self.mark_gone(number, entry)?;
        self.shelf.head().holding -= 1;
        Ok(())
    }

    fn tell(&mut self, entry: &Entry, news: News) {
        self.words.push(Word { to: entry.session, owner: entry.owner, line: self.world.line(), news });
    }

    fn mark_gone(&mut self, number: u64, mut entry: Entry) -> Result<()> {
        entry.state = State::Gone;
        self.shelf.put(number, &entry)?;
        self.shelf.head().gone += 1;
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
                if !admits(head.held(), entry.mode) {
                    break;
                }
                if self.world.alive(entry.session) {
                    entry.state = State::Holding;
                    entry.token = self.world.token(head.token)?;
                    entry.deadline = now.after(entry.ttl);
                    entry.since = now;
                    let news = News::Granted(place(head.waiting, &entry));
                    self.tell(&entry, news);
                    let head = self.shelf.head();
                    head.token = entry.token;
                    head.holding += 1;
                    head.mode = Some(entry.mode);
                    let number = head.waiting;
                    self.shelf.put(number, &entry)?;
                } else {
                    self.mark_gone(head.waiting, entry)?;
                }
            }
            self.shelf.head().waiting += 1;
        }
        self.forget_gone()
    }

    fn forget_gone(&mut self) -> Result<()> {
        let mut head = *self.shelf.head();
        while head.first < head.waiting && self.shelf.get(head.first)?.state == State::Gone {
            head.first += 1;
            head.gone -= 1;
        }
        while head.first < head.end && self.shelf.get(head.end - 1)?.state == State::Gone {
            head.end -= 1;
            head.gone -= 1;
        }
        head.waiting = head.waiting.clamp(head.first, head.end);
        if head.first == head.end {
            // Numbers start again; the token does not.
            self.shelf.clear();
            head = Head { token: head.token, ..Head::default() };
        }
        *self.shelf.head() = head;
        if head.gone > WEEDS + (head.end - head.first) / 2 { self.weed() } else { Ok(()) }
    }

    /// Closes the gaps that those in the middle left. The others get new numbers; they are found by their owner.
    fn weed(&mut self) -> Result<()> {
        let mut head = *self.shelf.head();
        let (mut to, mut waiting) = (head.first, head.first);
        for from in head.first..head.end {
            let entry = self.shelf.get(from)?;
            if entry.state == State::Gone {
                continue;
            }
            if from != to {
                self.shelf.put(to, &entry)?;
            }
            to += 1;
            if from < head.waiting {
                waiting = to;
            }
        }
        head.end = to;
        head.waiting = waiting;
        head.gone = 0;
        *self.shelf.head() = head;
        Ok(())
    }

    /// The number of this owner's entry: the one that is remembered, unless the line was weeded since; then a search.
    pub(crate) fn find(&mut self, remembered: Option<u64>, owner: Owner) -> Result<Option<u64>> {
        let head = *self.shelf.head();
        if let Some(number) = remembered
            && (head.first..head.end).contains(&number)
            && self.shelf.get(number)?.owner == owner
        {
            return Ok(remembered);
        }
        for number in head.first..head.end {
            let entry = self.shelf.get(number)?;
            if entry.owner == owner && entry.state != State::Gone {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Takes this owner out of the line; hands over if it held. Tells in which state it was. With a token, only the hold with
    /// that token is meant.
    pub(crate) fn leave(&mut self, number: Option<u64>, owner: Owner, token: Option<u64>) -> Result<State> {
        let was = match self.find(number, owner)? {
            Some(number) if self.is_hold(number, token)? => self.take_out(number)?,
            // It is the same owner's next hold: not to be touched, and its record not either.
            Some(_) => return Ok(State::Gone),
            None => State::Gone,
        };
        self.world.exit(owner);
        Ok(was)
    }

    /// Whether the entry is the hold with this token; without one, any will do.
    fn is_hold(&mut self, number: u64, token: Option<u64>) -> Result<bool> {
        Ok(match token {
            Some(token) => self.shelf.get(number)?.token == token,
            None => true,
        })
    }

    fn take_out(&mut self, number: u64) -> Result<State> {
        let entry = self.shelf.get(number)?;
        let was = entry.state;
        match was {
            State::Gone => return Ok(was),
            State::Holding => self.remove_holder(number, entry, false)?,
            State::Waiting => self.mark_gone(number, entry)?,
        }
        self.settle()?;
        Ok(was)
    }

    /// Extends the lease of a holder, never shortens it. False if it does not hold.
    pub(crate) fn renew(&mut self, number: u64, owner: Owner, token: Option<u64>, ttl: Duration) -> Result<bool> {
        if let Some(number) = self.find(Some(number), owner)? {
            if !self.is_hold(number, token)? {
                return Ok(false);
            }
            let mut entry = self.shelf.get(number)?;
            if entry.state == State::Holding {
                entry.deadline = entry.deadline.max(self.world.now().after(ttl));
                self.shelf.put(number, &entry)?;
                return Ok(true);
            }
        }
        self.world.exit(owner);
        Ok(false)
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

/// A semaphore has one size at a time.
pub(crate) fn other_permits(known: u32, of: u32) -> Error {
    Error::invalid(format!(
        "this semaphore is in use with {known} slots, not {of}; all who use it must give the same number"
    ))
}
