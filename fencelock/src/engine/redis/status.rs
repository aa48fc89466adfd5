//! What `status` and `list` see in Redis.

use super::fault::{Fault, told};
use super::key::{Key, NEWEST, NOBODY, QUEUES, name_of, pattern_of, tag_of};
use super::link::Open;
use super::node::{Node, Nodes};
use super::post::number;
use crate::{Clock, Error, ErrorKind, Grant, Holder, Mode, Moment, Owner, Result, Status, Token, Waiter};
use futures_util::future::try_join_all;
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

pub(super) async fn inspect(nodes: &Nodes, key: &Key, waiters: usize) -> Result<Seen> {
    let tag = if nodes.are_a_cluster() { tag_of(key.slot) } else { String::new() };
    let ask = |source: bool| {
        let tag = &tag;
        move |open: &Open| {
            let mut command = redis::cmd(if source { "EVAL" } else { "EVALSHA" });
            command.arg(if source { include_str!("inspect.lua") } else { INSPECT.get_hash() }).arg(3);
            command.arg(key.name.as_str()).arg(format!("{NOBODY}{tag}")).arg(format!("{NEWEST}{tag}"));
            command.arg(waiters).arg(open.inbox_suffix(tag)).to_owned()
        }
    };
    let answer = match nodes.ask(key, ask(false)).await {
        Err(fault) if fault.no_script => nodes.ask(key, ask(true)).await,
        answer => answer,
    };
    read(&answer.map_err(told)?)
        .ok_or_else(|| Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this"))
}

fn read(value: &Value) -> Option<Seen> {
    let Value::Array(parts) = value else { return None };
    let [now, current, left, together, waiters] = parts.as_slice() else { return None };
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
        seen.holders.push(holder_alone(&current, left, now));
    }
    for part in waiters.chunks_exact(2) {
        seen.waiters.extend(waiter(&text(&part[0])?, &text(&part[1])?, now));
    }
    Some(seen)
}

fn holder_together(owner: &str, end: f64, record: &str, now: u64) -> Option<(Option<Owner>, Holder)> {
    let mut parts = record.strip_prefix("h\n")?.splitn(5, '\n');
    // A token is the time of its grant.
    let token: u64 = parts.next()?.parse().ok()?;
    let mode = mode(parts.next()?, parts.next()?)?;
    let (_session, label) = (parts.next()?, parts.next()?.to_owned());
    let owner: Owner = owner.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "microseconds of a date fit")]
    let lease_left = micros((end as u64).saturating_sub(now));
    let held_for = micros(now.saturating_sub(token));
    let holder = Holder { mode, token: Token::new(token), owner: owner.short(), label, held_for, lease_left };
    Some((Some(owner), holder))
}

/// The exclusive holder; of a client of the common recipe nothing is known.
fn holder_alone(current: &str, lease_left: Duration, now: u64) -> (Option<Owner>, Holder) {
    let mode = Mode::Exclusive;
    match own_value(current) {
        Some((owner, token, label)) => {
            let held_for = micros(now.saturating_sub(token));
            let (token, label) = (Token::new(token), label.to_owned());
            (Some(owner), Holder { mode, token, owner: owner.short(), label, held_for, lease_left })
        }
        None => {
            let holder = Holder {
                mode,
                token: Token::new(0),
                owner: current.chars().take(8).collect(),
                label: "a client that is not fencelock".to_owned(),
                held_for: Duration::ZERO,
                lease_left,
            };
            (None, holder)
        }
    }
}

/// What fencelock writes into the key of a lock that is held alone: owner, token, label. (The byte 1 at its end says that somebody
/// waits.)
fn own_value(value: &str) -> Option<(Owner, u64, &str)> {
    let (owner, rest) = value.split_once(':')?;
    let mut parts = rest.splitn(3, '\n');
    let token = parts.next()?.parse().ok()?;
    let _session = parts.next()?;
    Some((owner.parse().ok()?, token, parts.next()?.trim_end_matches('\u{1}')))
}

fn waiter(owner: &str, record: &str, now: u64) -> Option<Waiter> {
    let mut parts = record.strip_prefix("w\n")?.splitn(6, '\n');
    let mode = mode(parts.next()?, parts.next()?)?;
    let _ttl = parts.next()?;
    let since: u64 = parts.next()?.parse().ok()?;
    let (_session, label) = (parts.next()?, parts.next()?.to_owned());
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

/// The names of locks that are held by fencelock, or waited for: a scan in small steps.
pub(super) async fn names(nodes: &Nodes, prefix: &str) -> Result<BTreeSet<String>> {
    let give_up = Clock::Boot.now().after(nodes.patience());
    loop {
        let names = try_names(nodes, prefix).await;
        match if nodes.are_a_cluster() { names.map_err(Fault::on_cluster) } else { names } {
            // A node that is gone may have a successor soon.
            Err(fault) if fault.passing && Clock::Boot.now() < give_up => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            outcome => return outcome.map_err(told),
        }
    }
}

async fn try_names(nodes: &Nodes, prefix: &str) -> Result<BTreeSet<String>, Fault> {
    let mut names = BTreeSet::new();
    for node in nodes.serving().await? {
        for queues in [true, false] {
            let pattern = pattern_of(if queues { QUEUES } else { prefix });
            let mut cursor = "0".to_owned();
            loop {
                let scan = |_: &Open| {
                    let mut scan = redis::cmd("SCAN");
                    scan.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(1_000);
                    scan.arg("TYPE").arg(if queues { "zset" } else { "string" }).to_owned()
                };
                let value = node.post.ask(scan).await?;
                let Value::Array(parts) = value else { break };
                let [next, Value::Array(keys)] = parts.as_slice() else { break };
                let keys: Vec<String> = keys.iter().filter_map(text).collect();
                if queues {
                    let waited_for = keys.iter().filter_map(|key| name_of(key, nodes.are_a_cluster()));
                    names.extend(waited_for.filter(|name| name.starts_with(prefix)).map(str::to_owned));
                } else {
                    names.extend(ours(&node, keys).await?);
                }
                match text(next) {
                    Some(next) if next != "0" => cursor = next,
                    _ => break,
                }
            }
        }
    }
    Ok(names)
}

/// Those of these keys that fencelock holds. Others' strings may be large: only their beginnings are read.
async fn ours(node: &Node, keys: Vec<String>) -> Result<Vec<String>, Fault> {
    let read = |key: &String| redis::cmd("GETRANGE").arg(key).arg(0).arg(255).to_owned();
    let values = try_join_all(keys.iter().map(|key| node.post.ask(move |_| read(key)))).await?;
    let is_ours = |value: &Value| {
        let value = text(value).unwrap_or_default();
        let together = ["fencelock:shared", "fencelock:permit:"];
        own_value(&value).is_some() || together.iter().any(|start| value.starts_with(start))
    };
    Ok(keys.into_iter().zip(values).filter(|(_, value)| is_ours(value)).map(|(key, _)| key).collect())
}
