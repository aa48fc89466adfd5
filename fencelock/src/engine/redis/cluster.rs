//! A Redis Cluster: which node serves which slot, and what to do when that changes. Each node has a connection and a post of its
//! own, as if it were alone.

use super::address::{Common, host_and_port};
use super::fault::{Fault, Redirect, fault};
use super::find::Finder;
use super::key::{SLOTS, tag_of};
use super::link::Open;
use super::node::Node;
use super::post::{Answer, Op, Outcome};
use crate::{Clock, Error, ErrorKind, Moment};
use redis::{Cmd, Value};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Which node serves which slots.
#[derive(Default)]
struct Map {
    /// By address.
    nodes: HashMap<String, Arc<Node>>,
    /// Addresses by slot; empty where nobody serves.
    slots: Vec<Arc<str>>,
    /// Counts the changes, so that several who stumble over the same one ask once.
    edition: u64,
}

pub(super) struct Cluster {
    common: Common,
    /// Where to ask first.
    seeds: Vec<(String, u16)>,
    /// How long an operation is tried again while nobody serves its slot.
    patience: Duration,
    map: Mutex<Map>,
    /// Only one task asks for the map.
    asking: tokio::sync::Mutex<()>,
}

impl Cluster {
    pub(super) fn new(common: Common, seeds: Vec<(String, u16)>, patience: Duration) -> Self {
        Self { common, seeds, patience, map: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    pub(super) fn replicas(&self) -> usize {
        self.common.rules.replicas
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn connect(&self) -> Result<(), Fault> {
        self.learn_anew().await
    }

    pub(super) async fn learn_anew(&self) -> Result<(), Fault> {
        let edition = self.map().edition;
        self.learn(edition).await
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// The node that serves this slot, as far as it is known.
    pub(super) fn known(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.map();
        map.slots.get(usize::from(slot)).and_then(|address| map.nodes.get(&**address)).map(Arc::clone)
    }

    pub(super) fn all(&self) -> Vec<Arc<Node>> {
        self.map().nodes.values().map(Arc::clone).collect()
    }

    async fn node(&self, slot: u16) -> Result<Arc<Node>, Fault> {
        if let Some(node) = self.known(slot) {
            return Ok(node);
        }
        self.learn_anew().await?;
        self.known(slot).ok_or_else(|| {
            let text = format!("no node of the cluster serves slot {slot}; see CLUSTER INFO");
            Fault::passing(Error::new(ErrorKind::Unavailable, text))
        })
    }

    pub(super) async fn submit(&self, op: &Op) -> Outcome {
        let mut way = Way::to(self, op.key.slot);
        let mut repeated = false;
        loop {
            let again;
            let op = if repeated {
                again = op.again();
                &again
            } else {
                op
            };
            match way.node().await?.post.submit(op).await {
                Ok(answer) => return Ok(Answer { repeated: answer.repeated | repeated, ..answer }),
                Err(fault) => {
                    repeated |= fault.error.kind() == ErrorKind::Ambiguous;
                    way.goes_on(fault).await?;
                }
            }
        }
    }

    /// Those of one slot travel together.
    pub(super) async fn submit_all(&self, ops: &[Op]) -> Vec<Outcome> {
        futures_util::future::join_all(ops.iter().map(|op| self.submit(op))).await
    }

    pub(super) async fn ask(&self, slot: u16, command: impl Fn(&Open) -> Cmd + Send + Sync) -> Result<Value, Fault> {
        let mut way = Way::to(self, slot);
        loop {
            match way.node().await?.post.ask(&command).await {
                Err(fault) if !fault.no_script => way.goes_on(fault).await?,
                answer => return answer,
            }
        }
    }

    /// Asks the cluster who serves what, unless somebody has since `edition`.
    async fn learn(&self, edition: u64) -> Result<(), Fault> {
        let _alone = self.asking.lock().await;
        if self.map().edition != edition {
            return Ok(());
        }
        let mut addresses: Vec<(String, u16)> =
            self.map().nodes.keys().filter_map(|address| host_and_port(address, 0)).collect();
        addresses.extend(self.seeds.iter().cloned());
        let mut answers = Vec::new();
        for (host, port) in addresses {
            match self.ask_for_slots(&host, port).await {
                Ok(ranges) if !ranges.is_empty() => {
                    self.adopt(&ranges);
                    return Ok(());
                }
                Ok(_) => answers.push(format!("{host}:{port} serves no slots")),
                Err(fault) => answers.push(format!("{host}:{port}: {}", fault.error)),
            }
        }
        let error = Error::new(ErrorKind::Unavailable, "no node of the cluster tells who serves what");
        Err(Fault::passing(error.caused_by(answers.join("; "))))
    }

    async fn ask_for_slots(&self, host: &str, port: u16) -> Result<Vec<Range>, Fault> {
        let target = self.common.target(host, port);
        let asking = async {
            let mut connection = target.connect_to_ask(self.common.timeout()).await?;
            redis::cmd("CLUSTER").arg("SLOTS").query_async::<Value>(&mut connection).await
        };
        let value = asking.await.map_err(|error| fault(error, false))?;
        Ok(read_ranges(&value, host))
    }

    fn adopt(&self, ranges: &[Range]) {
        let mut map = self.map();
        map.edition += 1;
        let mut slots: Vec<Arc<str>> = vec!["".into(); usize::from(SLOTS)];
        let mut lowest: HashMap<&str, u16> = HashMap::new();
        for range in ranges {
            let address: Arc<str> = range.address.as_str().into();
            for slot in range.first..=range.last {
                if let Some(place) = slots.get_mut(usize::from(slot)) {
                    *place = Arc::clone(&address);
                }
            }
            let first = lowest.entry(&range.address).or_insert(range.first);
            *first = range.first.min(*first);
        }
        map.slots = slots;
        map.nodes.retain(|address, node| {
            let serves = lowest.contains_key(address.as_str());
            if !serves {
                node.link.drop_connection();
            }
            serves
        });
        for (address, slot) in lowest {
            // The shard's marker, in a slot that it serves. A replica that is promoted finds its predecessor's there.
            let place = tag_of(slot);
            if let Some(node) = map.nodes.get(address) {
                node.link.move_to(place);
            } else if let Some((host, port)) = host_and_port(address, 0) {
                let target = self.common.target(&host, port);
                map.nodes.insert(address.to_owned(), self.common.node(Finder::Fixed(target), place));
            }
        }
    }
}

/// The way to the node that serves a slot, wherever it leads.
struct Way<'a> {
    cluster: &'a Cluster,
    slot: u16,
    give_up: Moment,
    /// Of the map that the last attempt went by.
    edition: u64,
    /// It was sent elsewhere before.
    moved: bool,
    pause: Duration,
}

impl<'a> Way<'a> {
    fn to(cluster: &'a Cluster, slot: u16) -> Self {
        let give_up = Clock::Boot.now().after(cluster.patience);
        Self { cluster, slot, give_up, edition: 0, moved: false, pause: Duration::from_millis(10) }
    }

    /// Whom to ask next.
    async fn node(&mut self) -> Result<Arc<Node>, Fault> {
        self.edition = self.cluster.map().edition;
        self.cluster.node(self.slot).await
    }

    /// Finds out where to go on after a fault; the fault itself when there is nowhere.
    async fn goes_on(&mut self, fault: Fault) -> Result<(), Fault> {
        // A node that is gone may have a successor.
        let elsewhere = fault.redirect.is_some() || fault.broken || fault.passing;
        if !elsewhere || Clock::Boot.now() >= self.give_up {
            return Err(fault.on_cluster());
        }
        tracing::debug!("looking for the node of slot {}: {}", self.slot, fault.error);
        let known = fault.redirect == Some(Redirect::OnItsWay) || self.cluster.learn(self.edition).await.is_ok();
        let at_once = known && fault.redirect == Some(Redirect::Moved) && !self.moved;
        self.moved |= at_once;
        if !at_once {
            // Nobody may have taken over yet, or the slot has not arrived, or not all know where.
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(Duration::from_millis(200));
        }
        Ok(())
    }
}

/// Slots that one node serves.
struct Range {
    first: u16,
    last: u16,
    address: String,
}

/// Reads the answer to CLUSTER SLOTS, which `asked` gave: a node that does not know its own address leaves it out.
fn read_ranges(value: &Value, asked: &str) -> Vec<Range> {
    let Value::Array(ranges) = value else { return Vec::new() };
    let read = |range: &Value| {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = parts.as_slice() else { return None };
        let [host, Value::Int(port), ..] = master.as_slice() else { return None };
        let host = text(host).filter(|host| !host.is_empty() && host != "?").unwrap_or_else(|| asked.to_owned());
        Some(Range {
            first: u16::try_from(*first).ok()?,
            last: u16::try_from(*last).ok()?,
            address: if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") },
        })
    };
    ranges.iter().filter_map(read).collect()
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}
