//! Operations, what nodes answer to them, and how the answers are counted.
//!
//! Operations that many tasks issue at the same time travel in one batch, which all nodes get. Each operation is decided as soon as
//! the answers that are in decide it; nobody waits for a slow node whose answer cannot change anything.

use super::mail::{Addressee, Mail};
use crate::engine::redis::Packer;
use crate::{Moment, Name, Owner};
use redis::{Script, Value};
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How long a handed-over lock is held before its new holder has reacted.
const WINDOW: Duration = Duration::from_secs(2);
/// How long a token is remembered after the longest lease that may begin with it; later ones are above it by the nodes' clocks.
const REMEMBER: Duration = Duration::from_secs(600);
/// How long waiters' records and the marks of given-up claims outlive the last sign of life, at least.
const LINGER: Duration = Duration::from_secs(60);
const SOURCE: &str = include_str!("vote.lua");

static VOTE: LazyLock<Script> = LazyLock::new(|| Script::new(SOURCE));

/// An operation of `vote.lua`. In this order they stand in a batch: a claim before its own release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Code {
    /// Acquire or wait.
    Acquire,
    /// Acquire or leave it.
    Try,
    Renew,
    /// Renew, and bring back what a node has lost.
    Restore,
    /// Take back a proposal: the votes for it, and its place in line.
    Undo,
    Release,
    /// Release whatever there is of an owner, also what is on its way.
    GiveUp,
    /// Take the lock away from this proposal.
    Evict,
    /// Take it away from a client of another kind.
    EvictForeign,
    Inspect,
}

impl Code {
    /// `distinct`: for names that all differ.
    fn letter(self, distinct: bool) -> &'static str {
        match self {
            Code::Acquire if distinct => "A",
            Code::Acquire => "a",
            Code::Try if distinct => "T",
            Code::Try => "t",
            Code::Renew => "n",
            Code::Restore => "c",
            Code::Undo => "u",
            Code::Release => "r",
            Code::GiveUp => "x",
            Code::Evict => "v",
            Code::EvictForeign => "o",
            Code::Inspect => "i",
        }
    }

    fn claims(self) -> bool {
        matches!(self, Code::Acquire | Code::Try)
    }

    /// Whether what is noted of the owner goes along: a node writes it down, or compares all of it at once.
    fn has_note(self) -> bool {
        self.claims() || matches!(self, Code::Restore | Code::Release)
    }

    /// Decided when every node has answered; otherwise as soon as a majority has, or cannot any more.
    fn asks_all(self) -> bool {
        matches!(self, Code::Restore | Code::Undo | Code::Evict | Code::EvictForeign | Code::Inspect)
    }

    /// Something that must reach every node in the end, since it makes room for others.
    pub(super) fn is_debt(self) -> bool {
        matches!(self, Code::Undo | Code::Release | Code::GiveUp)
    }
}

/// A proposal: a token for an owner. What a node keeps under the lock's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Who {
    pub(super) token: u64,
    pub(super) owner: Owner,
}

impl Who {
    /// Tokens have 16 digits, so that they compare as texts: times in µs from 2001 to 2286.
    pub(super) const LEAST: u64 = 1_000_000_000_000_000;

    /// From what is kept under the lock's name: it is followed by what is noted of the owner.
    pub(super) fn read(text: &str) -> Option<Self> {
        let proposal = text.split_once('\n').map_or(text, |(proposal, _)| proposal);
        let (token, owner) = proposal.split_once(':')?;
        Some(Self { token: token.parse().ok()?, owner: read_owner(owner)? }).filter(|_| token.len() == 16)
    }
}

/// Six bits each.
const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// An owner as nodes know it, in 22 letters: a script costs a node time for every letter that it sees.
pub(super) fn spell(owner: Owner) -> impl Iterator<Item = char> {
    let bits = u128::from_le_bytes(owner.to_bytes());
    (0..22).map(move |at| char::from(LETTERS[(bits >> (6 * at)) as usize & 63]))
}

pub(super) fn read_owner(text: &str) -> Option<Owner> {
    let value = |letter: u8| LETTERS.iter().position(|known| *known == letter);
    let bits = text.bytes().rev().try_fold(0_u128, |bits, letter| Some(bits << 6 | value(letter)? as u128))?;
    let owner = Owner::from_bytes(bits.to_le_bytes());
    spell(owner).eq(text.chars()).then_some(owner)
}

/// One operation, and whom to tell.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) code: Code,
    pub(super) name: Name,
    pub(super) who: Who,
    pub(super) ttl: Duration,
    /// What nodes note of the owner.
    pub(super) note: Arc<str>,
    pub(super) tell: Option<Addressee>,
}

impl Op {
    /// The same with another purpose and nobody to tell.
    pub(super) fn turned_into(&self, code: Code) -> Self {
        Self { code, name: self.name.clone(), who: self.who, ttl: self.ttl, note: Arc::clone(&self.note), tell: None }
    }
}

/// What a node says of the one who holds on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) value: String,
    /// `None` when it stays for ever.
    pub(super) left: Option<Duration>,
}

/// What a node answers to one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Granted,
    Busy(Holder),
    Waits {
        holder: Holder,
        ahead: u64,
    },
    TooLow(u64),
    GivenUp,
    Renewed,
    /// Nobody holds.
    Missing,
    /// Somebody else holds.
    Others,
    Freed,
    Withdrawn,
    Nothing,
    Seen(Seen),
    /// The node refused this operation.
    Refused(Arc<str>),
    /// The node cannot be reached, or did not answer. `true`: it may have carried it out.
    Failed(Arc<str>, bool),
}

/// A lock as one node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Seen {
    /// What is under its name: who holds, and what is noted of the owner.
    pub(super) value: String,
    pub(super) left: Option<Duration>,
    pub(super) waiters: Vec<String>,
    /// The node's time in µs.
    pub(super) now: u64,
}

/// One node's answer, and whether it counts as a vote.
#[derive(Debug, Clone)]
pub(super) struct Voice {
    pub(super) node: usize,
    pub(super) votes: bool,
    pub(super) answer: Answer,
}

/// How an operation was decided.
#[derive(Debug)]
pub(super) struct Outcome {
    /// A majority granted, renewed, freed.
    pub(super) won: bool,
    /// When the first request was sent.
    pub(super) sent: Moment,
    /// What was answered by then; nothing for somebody whom a majority has granted, renewed or freed.
    pub(super) voices: Vec<Voice>,
}

/// A node's reply to a batch.
#[derive(Debug)]
pub(super) struct Reply {
    /// The node's time in µs; `None` if it told neither that nor whether it votes.
    pub(super) now: Option<u64>,
    /// Why the node does not vote, as it says itself, and for how long.
    pub(super) out: Option<(String, Duration)>,
    pub(super) answers: Vec<Answer>,
}

#[derive(Debug)]
struct Tally {
    /// Counted votes.
    yes: usize,
    /// Nodes that said no for good.
    no: usize,
    tell: Option<Addressee>,
    decided: Option<bool>,
    /// What follows from a late answer was done.
    followed: bool,
}

/// What one node said to all of a batch.
#[derive(Debug)]
struct Heard {
    node: usize,
    /// Only proposals above this one are votes; `None`: none is.
    floor: Option<u64>,
    answers: Vec<Answer>,
}

impl Heard {
    fn votes(&self, op: &Op) -> bool {
        self.floor.is_some_and(|floor| op.who.token > floor)
    }
}

#[derive(Debug)]
struct Count {
    heard: Vec<Heard>,
    tallies: Vec<Tally>,
}

impl Count {
    /// What was said to one operation so far.
    fn voices(heard: &[Heard], op: &Op, at: usize) -> Vec<Voice> {
        let voice = |heard: &Heard| {
            let answer = heard.answers.get(at)?.clone();
            Some(Voice { node: heard.node, votes: heard.votes(op), answer })
        };
        heard.iter().filter_map(voice).collect()
    }
}

/// Operations that travel together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) ops: Vec<Op>,
    /// The longest lease that anybody uses.
    longest: Duration,
    sent: Moment,
    nodes: usize,
    majority: usize,
    packed: OnceLock<Vec<u8>>,
    count: Mutex<Count>,
}

/// What is to be done after an answer was counted.
#[derive(Debug, Default)]
pub(super) struct Next {
    pub(super) ops: Vec<Op>,
    /// Whom to tell.
    pub(super) mail: Mail,
    /// A majority has answered: there is room for another batch.
    pub(super) room: bool,
}

impl Batch {
    pub(super) fn new(mut ops: Vec<Op>, longest: Duration, sent: Moment, nodes: usize) -> Self {
        // Nodes need not look up what they have accepted as long as proposals ascend, and rely on it where a group says so.
        ops.sort_by_key(|op| (op.code, op.who.token));
        let tally = |op: &mut Op| Tally { yes: 0, no: 0, tell: op.tell.take(), decided: None, followed: false };
        let tallies = ops.iter_mut().map(tally).collect();
        Self {
            ops,
            longest,
            sent,
            nodes,
            majority: nodes / 2 + 1,
            packed: OnceLock::new(),
            count: Mutex::new(Count { heard: Vec::with_capacity(nodes), tallies }),
        }
    }

    /// The command that carries it, as it is sent; made once for all nodes.
    pub(super) fn packed(&self) -> &[u8] {
        self.packed.get_or_init(|| self.pack(true))
    }

    /// For a node that does not know the script.
    pub(super) fn packed_with_source(&self) -> Vec<u8> {
        self.pack(false)
    }

    fn pack(&self, by_hash: bool) -> Vec<u8> {
        let alike =
            |a: &Op, b: &Op| a.code == b.code && a.ttl == b.ttl && (a.code != Code::Inspect || a.note == b.note);
        let groups = self.ops.chunk_by(alike).count();
        let mut packed = Vec::with_capacity(self.ops.len() * 160 + 256);
        let mut packer = Packer(&mut packed);
        packer.head('*', 3 + 3 + 3 * groups + 2 * self.ops.len());
        packer.text(if by_hash { "EVALSHA" } else { "EVAL" });
        packer.text(if by_hash { VOTE.get_hash() } else { SOURCE });
        packer.number(0);
        packer.number(millis(self.longest + REMEMBER));
        packer.number(millis(WINDOW));
        packer.number(millis(LINGER));
        let mut what = String::with_capacity(128);
        for group in self.ops.chunk_by(alike) {
            let [first, ..] = group else { continue };
            packer.text(first.code.letter(first.code.claims() && all_differ(group)));
            packer.number(group.len() as u64);
            match first.code {
                Code::Inspect => packer.text(&*first.note),
                _ => packer.number(millis(first.ttl)),
            }
            // Claims as the node writes them, each with its name; for all others, the names come first.
            let together = first.code.claims();
            if !together {
                for op in group {
                    packer.text(op.name.as_str());
                }
            }
            for op in group {
                if together {
                    packer.text(op.name.as_str());
                }
                what.clear();
                // Writing to a text cannot fail.
                let _ = write!(what, "{:016}:", op.who.token);
                what.extend(spell(op.who.owner));
                if op.code.has_note() {
                    what.push_str(&op.note);
                }
                packer.text(&what);
            }
        }
        packed
    }

    /// Counts a node's reply. Proposals up to `floor` are no votes; `None`: the node does not vote at all.
    pub(super) fn count(&self, node: usize, floor: Option<u64>, answers: Vec<Answer>) -> Next {
        let mut next = Next::default();
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let Count { heard, tallies } = &mut *count;
        heard.push(Heard { node, floor, answers });
        next.room = heard.len() == self.majority;
        for (at, (op, tally)) in self.ops.iter().zip(tallies).enumerate() {
            self.count_one(at, op, tally, heard, &mut next);
        }
        next
    }

    /// Counts a node that cannot be reached.
    pub(super) fn count_failed(&self, node: usize, why: &Arc<str>, sent: bool) -> Next {
        let answers = self.ops.iter().map(|_| Answer::Failed(Arc::clone(why), sent)).collect();
        self.count(node, None, answers)
    }

    /// Counts what the node that was heard last says to one operation.
    fn count_one(&self, at: usize, op: &Op, tally: &mut Tally, heard: &[Heard], next: &mut Next) {
        let Some((last, answer)) = heard.last().and_then(|last| Some((last, last.answers.get(at)?))) else { return };
        match answer {
            Answer::Granted if last.votes(op) => tally.yes += 1,
            // A node that does not vote on claims still tells the truth about a hold.
            Answer::Renewed | Answer::Freed => tally.yes += 1,
            // It can change nothing, and yet whoever is told that it was not enough wants to know what the others say.
            Answer::Failed(..) => {}
            _ => tally.no += 1,
        }
        let told = if tally.decided.is_none() {
            tally.decided = self.decide(op.code, tally, heard.len());
            // Whatever was said so far counts for what follows; later on, only what is new.
            heard
        } else {
            std::slice::from_ref(last)
        };
        let Some(won) = tally.decided else { return };
        let any = |what: fn(&Answer) -> bool| told.iter().filter_map(|heard| heard.answers.get(at)).any(what);
        // A lost vote is taken back; a renewed hold is brought back where it is missing.
        let follows = match op.code {
            _ if tally.followed => None,
            Code::Try if !won && any(|answer| matches!(answer, Answer::Granted | Answer::Failed(_, true))) => {
                Some(Code::Undo)
            }
            Code::Renew if won && any(|answer| *answer == Answer::Missing) => Some(Code::Restore),
            _ => None,
        };
        if let Some(code) = follows {
            tally.followed = true;
            next.ops.push(op.turned_into(code));
        }
        if let Some(tell) = tally.tell.take() {
            // Who has won needs no reasons.
            let voices = if won && !op.code.asks_all() { Vec::new() } else { Count::voices(heard, op, at) };
            next.mail.push((tell, Outcome { won, sent: self.sent, voices }));
        }
    }

    fn decide(&self, code: Code, tally: &Tally, heard: usize) -> Option<bool> {
        let (won, all) = (tally.yes >= self.majority, heard == self.nodes);
        let decided = all || !code.asks_all() && (won || tally.no > self.nodes - self.majority);
        decided.then_some(won)
    }
}

/// Whether these are several, and each of another lock.
fn all_differ(ops: &[Op]) -> bool {
    let mut names = HashSet::with_capacity(ops.len());
    ops.len() > 1 && ops.iter().all(|op| names.insert(op.name.as_str()))
}

pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Reads what `vote.lua` returned.
pub(super) fn read(value: Value, count: usize) -> Option<Reply> {
    let Value::Array(values) = value else { return None };
    let mut values = values.into_iter();
    let now = number(&values.next()?)?;
    let Value::BulkString(letters) = values.next()? else { return None };
    let (letters, rest) = letters.split_at_checked(count)?;
    let answers: Option<Vec<Answer>> = letters.iter().map(|letter| answer(*letter, &mut values, now)).collect();
    let rest = String::from_utf8_lossy(rest);
    let out = rest.strip_prefix('\n').and_then(|rest| {
        let (why, ms) = rest.rsplit_once('\n')?;
        Some((why.to_owned(), ms.parse().map_or(Duration::MAX, Duration::from_millis)))
    });
    Some(Reply { now: Some(now).filter(|now| *now > 0), out, answers: answers? })
}

fn answer(letter: u8, extras: &mut impl Iterator<Item = Value>, now: u64) -> Option<Answer> {
    Some(match letter {
        b'g' => Answer::Granted,
        b'y' => Answer::Renewed,
        b'f' => Answer::Freed,
        b'd' => Answer::Withdrawn,
        b'0' => Answer::Nothing,
        b'm' => Answer::Missing,
        b'n' => Answer::Others,
        b'x' => Answer::GivenUp,
        b'l' => Answer::TooLow(text(&extras.next()?)?.parse().ok()?),
        b'e' => Answer::Refused(text(&extras.next()?)?.into()),
        b'b' | b'w' | b'i' => {
            let Value::Array(parts) = extras.next()? else { return None };
            detail(letter, &parts, now)?
        }
        _ => return None,
    })
}

fn detail(letter: u8, parts: &[Value], now: u64) -> Option<Answer> {
    let value = text(parts.first()?)?;
    // Negative: it has no end.
    let left = number(parts.get(1)?).map(Duration::from_millis);
    Some(match letter {
        b'b' => Answer::Busy(Holder { value, left }),
        b'w' => Answer::Waits { holder: Holder { value, left }, ahead: number(parts.get(2)?)? },
        _ => {
            let Value::Array(waiters) = parts.get(2)? else { return None };
            let waiters = waiters.iter().filter_map(text).collect();
            Answer::Seen(Seen { value, left, waiters, now })
        }
    })
}

pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => text(value)?.parse().ok(),
    }
}

pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_spelled_and_read() {
        for bits in [0, 1, u128::MAX, u128::MAX - 1, 1 << 127, 0x0123_4567_89ab_cdef_0123_4567_89ab_cdef] {
            let owner = Owner::from_bytes(bits.to_le_bytes());
            let text: String = spell(owner).collect();
            assert_eq!(text.len(), 22);
            assert_eq!(read_owner(&text), Some(owner));
        }
        let most = "_".repeat(21);
        for wrong in ["", "A", "+AAAAAAAAAAAAAAAAAAAAA", &format!("{most}E"), &format!("{most}DA"), &most] {
            assert_eq!(read_owner(wrong), None, "{wrong}");
        }
    }

    /// Nodes take the last one of a group for the highest: were it not, they would accept a lower token later on.
    #[test]
    fn the_claims_of_a_batch_ascend() {
        let claim = |token: u64| Op {
            code: Code::Try,
            name: Name::new(format!("k{token}")).expect("a name"),
            who: Who { token: Who::LEAST + token, owner: Owner::random() },
            ttl: Duration::from_secs(30),
            note: "\nsession\n".into(),
            tell: None,
        };
        let batch = Batch::new([3, 1, 2].map(claim).into(), Duration::from_secs(300), Moment::NEVER, 3);
        let packed = String::from_utf8_lossy(batch.packed()).into_owned();
        let at = |text: &str| packed.find(text).expect("it is in it");
        assert!(at("\r\nT\r\n") < at("k1") && at("k1") < at("k2") && at("k2") < at("k3"), "{packed}");
    }

    #[test]
    fn what_others_write_is_no_proposal() {
        let owner: String = spell(Owner::random()).collect();
        let known = format!("1800000000000000:{owner}\nsession\nlabel");
        assert_eq!(Who::read(&known).map(|who| who.token), Some(1_800_000_000_000_000));
        for wrong in ["somebody", "", "1800000000000000", &format!("18:{owner}"), &format!("x800000000000000:{owner}")]
        {
            assert_eq!(Who::read(wrong), None, "{wrong}");
        }
    }
}
