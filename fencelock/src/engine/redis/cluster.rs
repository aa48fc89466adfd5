//! A Redis Cluster: which node serves which slot, and what to do when that changes. Each node has a connection and a post of its
//! own, as if it were alone.

use super::address::{Common, host_and_port};
use super::fault::{Fault, Redirect, fault};
use super::find::{Finder, ask_several};
use super::key::{SLOTS, tag_of};
use super::link::Open;
use super::node::Node;
use super::post::{Answer, Op, Outcome};
use crate::{Clock, Error, ErrorKind, Moment};
use redis::{Cmd, FromRedisValue, Value};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// So many nodes are asked for the map at the same time: some may not answer.
const AT_ONCE: usize = 3;

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
    /// Why there is no new map.
    trouble: Mutex<Option<String>>,
    /// Only one task asks for the map.
    asking: tokio::sync::Mutex<()>,
    /// Each time others are asked first.
    turn: AtomicUsize,
}

impl Cluster {
    pub(super) fn new(common: Common, seeds: Vec<(String, u16)>, patience: Duration) -> Self {
        Self {
            common,
            seeds,
            patience,
            map: Mutex::default(),
            trouble: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            turn: AtomicUsize::new(0),
        }
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

    /// Why a slot cannot be asked for, if that is known. While its server can be asked, it is no matter who tells of the others.
    pub(super) fn trouble(&self, slot: u16) -> Option<String> {
        let node = self.known(slot);
        if node.as_ref().is_some_and(|node| node.link.is_open()) {
            return None;
        }
        let of_node = node.and_then(|node| node.link.trouble());
        of_node.or_else(|| self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone())
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
        let view = self.best_view().await;
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) =
            view.as_ref().err().map(|fault| fault.error.to_string());
        self.adopt(&view?.ranges);
        Ok(())
    }

    async fn best_view(&self) -> Result<View, Fault> {
        let mut best: Option<View> = None;
        let mut without = Vec::new();
        for (round, some) in self.whom_to_ask().chunks(AT_ONCE).enumerate() {
            let asking = some.iter().map(|(host, port)| self.ask_for_view(host, *port));
            for (place, answer) in ask_several(asking, 1).await {
                let (host, port) = &some[place];
                match answer {
                    Ok(view) if view.ranges.is_empty() => {
                        let text = "serves no slots, and knows of nobody who does; see CLUSTER INFO";
                        without
                            .push((format!("{host}:{port}"), Fault::passing(Error::new(ErrorKind::Unavailable, text))));
                    }
                    Ok(view) if best.as_ref().is_some_and(|best| best.standing >= view.standing) => {}
                    Ok(view) => best = Some(view),
                    Err(fault) => without.push((format!("{host}:{port}"), fault)),
                }
            }
            // When all of some say that the cluster is down, it is.
            if best.as_ref().is_some_and(|best| best.standing.is_well || round >= 2) {
                break;
            }
        }
        best.ok_or_else(|| {
            let before = !self.map().nodes.is_empty();
            Fault::of_several("no node of the cluster tells who serves what", without, before)
        })
    }

    /// The nodes that are known, then the seeds. Others come first each time: no single one decides what is believed.
    fn whom_to_ask(&self) -> Vec<(String, u16)> {
        let mut addresses: Vec<_> = self.map().nodes.keys().filter_map(|address| host_and_port(address, 0)).collect();
        addresses.sort();
        let mut seeds: Vec<_> = self.seeds.iter().filter(|seed| !addresses.contains(seed)).cloned().collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        for list in [&mut addresses, &mut seeds] {
            let first = turn % list.len().max(1);
            list.rotate_left(first);
        }
        addresses.append(&mut seeds);
        addresses
    }

    async fn ask_for_view(&self, host: &str, port: u16) -> Result<View, Fault> {
        let target = self.common.target(host, port);
        let mut questions = redis::pipe();
        questions.cmd("CLUSTER").arg("SLOTS");
        questions.cmd("CLUSTER").arg("INFO");
        let asking = async {
            let mut answers =
                target.connect_to_ask(self.common.timeout()).await?.call_all(&questions).await?.into_iter();
            let slots = answers.next().unwrap_or(Value::Nil).extract_error()?;
            // A user who may not ask for it is told nothing, and goes by anybody's view.
            let info = answers.next().and_then(|info| String::from_redis_value(info).ok()).unwrap_or_default();
            Ok(View { ranges: read_ranges(&slots, host), standing: Standing::read(&info) })
        };
        asking.await.map_err(|error| fault(error, false))
    }

    fn adopt(&self, ranges: &[Range]) {
        let mut map = self.map();
        map.edition += 1;
        let mut slots: Vec<Arc<str>> = vec!["".into(); usize::from(SLOTS)];
        let mut served: HashMap<&str, (u16, u16)> = HashMap::new();
        for range in ranges {
            let address: Arc<str> = range.address.as_str().into();
            for slot in range.first..=range.last {
                if let Some(place) = slots.get_mut(usize::from(slot)) {
                    *place = Arc::clone(&address);
                }
            }
            let (lowest, highest) = served.entry(&range.address).or_insert((range.first, range.last));
            (*lowest, *highest) = (range.first.min(*lowest), range.last.max(*highest));
        }
        map.slots = slots;
        map.nodes.retain(|address, node| {
            let serves = served.contains_key(address.as_str());
            if !serves {
                node.link.drop_connection();
            }
            serves
        });
        for (address, (lowest, highest)) in served {
            // The shard's markers, in slots that it serves; two, since one may be on its way to another node. A replica that is promoted
            // finds its predecessor's there.
            let places = vec![tag_of(lowest), tag_of(highest)];
            if let Some(node) = map.nodes.get(address) {
                node.link.move_to(places);
            } else if let Some((host, port)) = host_and_port(address, 0) {
                let target = self.common.target(&host, port);
                map.nodes.insert(address.to_owned(), self.common.node(Finder::Fixed(target), places));
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

/// What a node says about the cluster.
struct View {
    ranges: Vec<Range>,
    standing: Standing,
}

/// How much a node's view is worth: one that is cut off from most of the others goes by what it knew before.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Standing {
    is_well: bool,
    epoch: u64,
}

impl Standing {
    /// From the answer to CLUSTER INFO.
    fn read(info: &str) -> Self {
        let field = |name| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        Self {
            is_well: field("cluster_state") != Some("fail"),
            epoch: field("cluster_current_epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0),
        }
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
