//! What `status` and `list` see in Redis.

use super::key::{Keys, TOKEN_PATTERN, name_of};
use super::post::{Post, number};
use crate::{Error, ErrorKind, Grant, Holder, Mode, Moment, Owner, Result, Status, Token, Waiter};
use redis::{Script, Value};
use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

static INSPECT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("inspect.lua")));

/// A line as the server showed it.
#[derive(Debug, Default)]
pub(super) struct Seen {
    holders: Vec<(Option<Owner>, Holder)>,
    waiters: Vec<Waiter>,
}

impl Seen {
    pub(super) fn status(self, name: &str) -> Status {
        let mut status = Status::free(name);
        status.holders = self.holders.into_iter().map(|(_, holder)| holder).collect();
        status.waiters = self.waiters;
        status
    }

    pub(super) fn grant_of(&self, owner: Owner, now: Moment) -> Option<Grant> {
        let (_, holder) = self.holders.iter().find(|(known, _)| *known == Some(owner))?;
        Some(Grant::new(holder.token, holder.mode, now, super::seat(holder.token, false)))
    }
}

pub(super) async fn inspect(post: &Post, keys: &Keys, waiters: usize) -> Result<Seen> {
    let ask = |source: bool| {
        let mut command = redis::cmd(if source { "EVAL" } else { "EVALSHA" });
        command.arg(if source { include_str!("inspect.lua") } else { INSPECT.get_hash() }).arg(5);
        command.arg(&keys.main).arg(&keys.token).arg(&keys.queue).arg(&keys.records).arg(&keys.deadlines);
        command.arg(waiters).to_owned()
    };
    let answer = match post.ask(&ask(false)).await {
        Err(fault) if fault.no_script => post.ask(&ask(true)).await,
        answer => answer,
    };
    let value = answer.map_err(|fault| fault.error)?;
    read(&value)
        .ok_or_else(|| Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this"))
}

fn read(value: &Value) -> Option<Seen> {
    let Value::Array(parts) = value else { return None };
    let [now, current, left, token, together, waiters] = parts.as_slice() else { return None };
    let now = number(now)?;
    let mut seen = Seen::default();
    let (Value::Array(together), Value::Array(waiters)) = (together, waiters) else { return None };
    for part in together.chunks_exact(3) {
        let (owner, end, record) = (text(&part[0])?, text(&part[1])?, text(&part[2])?);
        let end: f64 = end.parse().ok()?;
        seen.holders.extend(holder_together(&owner, end, &record, now));
    }
    if let (Some(current), true) = (text(current), seen.holders.is_empty()) {
        let left = number(left).map_or(Duration::MAX, Duration::from_millis);
        seen.holders.push(holder_alone(&current, left, token, now));
    }
    for part in waiters.chunks_exact(2) {
        seen.waiters.extend(waiter(&text(&part[0])?, &text(&part[1])?, now));
    }
    Some(seen)
}

fn holder_together(owner: &str, end: f64, record: &str, now: u64) -> Option<(Option<Owner>, Holder)> {
    let mut parts = record.strip_prefix("h\n")?.splitn(6, '\n');
    // A token is the time of its grant.
    let token: u64 = parts.next()?.parse().ok()?;
    let mode = mode(parts.next()?, parts.next()?)?;
    let (_owner, _session, label) = (parts.next()?, parts.next()?, parts.next()?.to_owned());
    let owner: Owner = owner.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "microseconds of a date fit")]
    let lease_left = micros((end as u64).saturating_sub(now));
    let held_for = micros(now.saturating_sub(token));
    let holder = Holder { mode, token: Token::new(token), owner: owner.short(), label, held_for, lease_left };
    Some((Some(owner), holder))
}

/// The exclusive holder; a client of the common recipe has no record.
fn holder_alone(current: &str, lease_left: Duration, token: &Value, now: u64) -> (Option<Owner>, Holder) {
    let mode = Mode::Exclusive;
    let read = |(owner, token): (&str, &str)| Some((owner.parse::<Owner>().ok()?, token.parse::<u64>().ok()?));
    let held = current.split_once(':').and_then(read);
    let known = match held {
        Some((owner, number)) => {
            // The note may have been evicted; then only its label is missing.
            let note = text(token).unwrap_or_default();
            let mut parts = note.splitn(4, '\n').skip(1);
            let noted = parts.next() == Some(owner.to_string().as_str());
            let label = parts.nth(1).filter(|_| noted).unwrap_or_default().to_owned();
            let held_for = micros(now.saturating_sub(number));
            Holder { mode, token: Token::new(number), owner: owner.short(), label, held_for, lease_left }
        }
        None => Holder {
            mode,
            token: Token::new(0),
            owner: current.chars().take(8).collect(),
            label: "a client that is not fencelock".to_owned(),
            held_for: Duration::ZERO,
            lease_left,
        },
    };
    (held.map(|(owner, _)| owner), known)
}

fn waiter(owner: &str, record: &str, now: u64) -> Option<Waiter> {
    let mut parts = record.strip_prefix("w\n")?.splitn(7, '\n');
    let mode = mode(parts.next()?, parts.next()?)?;
    let _ttl = parts.next()?;
    let since: u64 = parts.next()?.parse().ok()?;
    let (_owner, _session, label) = (parts.next()?, parts.next()?, parts.next()?.to_owned());
    let owner = owner.parse::<Owner>().ok()?.short();
    Some(Waiter { mode, owner, label, waiting_for: micros(now.saturating_sub(since)) })
}

fn mode(tag: &str, permits: &str) -> Option<Mode> {
    match tag {
        "e" => Some(Mode::Exclusive),
        "s" => Some(Mode::Shared),
        "p" => Some(Mode::Permit { of: permits.parse().ok()? }),
        _ => None,
    }
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        Value::Double(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The names of locks that were used lately, by their token keys: a scan in small steps.
pub(super) async fn names(post: &Post, prefix: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let mut cursor = "0".to_owned();
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor).arg("MATCH").arg(TOKEN_PATTERN).arg("COUNT").arg(1_000);
        let value = post.ask(&scan).await.map_err(|fault| fault.error)?;
        let Value::Array(parts) = value else { break };
        let [next, Value::Array(keys)] = parts.as_slice() else { break };
        for key in keys.iter().filter_map(text) {
            names.extend(name_of(&key).filter(|name| name.starts_with(prefix)).map(str::to_owned));
        }
        match text(next) {
            Some(next) if next != "0" => cursor = next,
            _ => break,
        }
    }
    Ok(names)
}
