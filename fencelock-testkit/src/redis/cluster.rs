//! A Redis Cluster: three masters, each with a replica.

use super::{PATIENCE, RedisOptions, RedisServer, free_port};
use crate::Subject;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MASTERS: usize = 3;
const SLOTS: usize = 16_384;

/// Six servers. All are killed when this is dropped.
#[derive(Debug)]
pub struct RedisCluster {
    /// The masters, then their replicas in the same order; at the beginning.
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts all six, and waits until they are a cluster.
    ///
    /// # Panics
    /// When they cannot be started.
    pub fn start() -> Self {
        let all = Self { nodes: (0..2 * MASTERS).map(|_| start_node()).collect() };
        for (number, node) in all.nodes.iter().enumerate() {
            node.run(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            if number < MASTERS {
                let (first, last) = (SLOTS * number / MASTERS, SLOTS * (number + 1) / MASTERS - 1);
                node.run(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            }
            all.introduce(node);
        }
        all.until("all know each other", || all.all_know_each_other());
        for number in 0..MASTERS {
            let id: String = all.nodes[number].ask(&["CLUSTER", "MYID"]);
            all.nodes[number + MASTERS].run(&["CLUSTER", "REPLICATE", &id]);
        }
        all.until("it is a cluster", || all.nodes.iter().all(is_ready));
        all
    }

    fn introduce(&self, node: &RedisServer) {
        let first = &self.nodes[0];
        let (port, bus) = (first.port().to_string(), first.bus_port().to_string());
        node.run(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
    }

    fn all_know_each_other(&self) -> bool {
        let count = self.nodes.len();
        self.nodes.iter().all(|node| node.ask::<String>(&["CLUSTER", "NODES"]).lines().count() == count)
    }

    /// Another node, which serves nothing yet. It is the last of the nodes.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn add_node(&mut self) {
        let node = start_node();
        self.introduce(&node);
        self.nodes.push(node);
        let joined = || self.nodes.last().is_some_and(is_serving) && self.all_know_each_other();
        self.until("it is one of them", joined);
    }

    /// Starts a node again that hears nothing of the others from now on, nor they of it. It tells clients what it knew before.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn cut_off(&mut self, node: usize) {
        let others: Vec<_> = self.nodes.iter().map(|other| format!("@{}", other.bus_port())).collect();
        let node = &mut self.nodes[node];
        node.kill();
        // It looks for the others where nobody is, and they look for it where it is not any more.
        let nobody = format!("@{}", free_port());
        let path = node.file("nodes.conf");
        let known = std::fs::read_to_string(&path).expect("it has written down whom it knows");
        let changed = others.iter().fold(known, |known, other| known.replace(other, &nobody));
        std::fs::write(&path, changed).expect("the file can be written");
        node.begin_again(&[("cluster-port", &free_port().to_string())]);
        assert!(node.answers(), "it does not start again: {}", node.log());
    }

    /// Waits for something about the cluster.
    ///
    /// # Panics
    /// When it does not happen.
    pub fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < until, "waited in vain: {what}; {}", self.nodes[0].log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where clients connect to, with these options.
    pub fn url(&self, options: &str) -> String {
        let hosts: Vec<_> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}{options}", hosts.join(","))
    }

    /// The slot of a lock's name.
    ///
    /// # Panics
    /// When the cluster does not answer.
    pub fn slot(&self, name: &str) -> usize {
        self.nodes[0].ask(&["CLUSTER", "KEYSLOT", name])
    }

    /// The master that serves a slot at the beginning.
    pub fn master_of(&self, slot: usize) -> usize {
        (0..MASTERS).find(|number| slot < SLOTS * (number + 1) / MASTERS).unwrap_or(0)
    }

    /// Moves a slot with its keys to another master, one key at a time, as a reshard does. `halfway` runs when the slot is on its
    /// way and half of its keys have gone.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub fn migrate(&self, slot: usize, from: usize, to: usize, halfway: impl FnOnce()) {
        let mut half: Vec<String> = self.nodes[from].ask(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"]);
        half.truncate(half.len() / 2);
        self.migrate_first(slot, from, to, |key| half.iter().any(|one| one == key), halfway);
    }

    /// The same; these keys go first, and then `halfway` is called.
    ///
    /// # Panics
    /// When the cluster refuses.
    pub fn migrate_first(
        &self,
        slot: usize,
        from: usize,
        to: usize,
        first: impl Fn(&str) -> bool,
        halfway: impl FnOnce(),
    ) {
        let id = |node: usize| self.nodes[node].ask::<String>(&["CLUSTER", "MYID"]);
        let (slot_text, from_id, to_id) = (slot.to_string(), id(from), id(to));
        self.nodes[to].run(&["CLUSTER", "SETSLOT", &slot_text, "IMPORTING", &from_id]);
        self.nodes[from].run(&["CLUSTER", "SETSLOT", &slot_text, "MIGRATING", &to_id]);
        let keys = || self.nodes[from].ask::<Vec<String>>(&["CLUSTER", "GETKEYSINSLOT", &slot_text, "1000"]);
        let port = self.nodes[to].port().to_string();
        let carry = |key: &String| self.nodes[from].run(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
        keys().iter().filter(|key| first(key)).for_each(carry);
        halfway();
        loop {
            let left = keys();
            if left.is_empty() {
                break;
            }
            left.iter().for_each(carry);
        }
        for node in [to, from] {
            self.nodes[node].run(&["CLUSTER", "SETSLOT", &slot_text, "NODE", &to_id]);
        }
    }

    fn flush(&self) -> bool {
        self.nodes.iter().take(MASTERS).all(|node| node.try_ask::<()>(&["FLUSHALL"]).is_ok())
    }
}

fn start_node() -> RedisServer {
    RedisOptions::default()
        .set("cluster-enabled", "yes")
        .set("cluster-node-timeout", "1000")
        .set("cluster-replica-validity-factor", "0")
        .set("repl-diskless-sync-delay", "0")
        .cluster_port()
        .start()
}

fn is_serving(node: &RedisServer) -> bool {
    node.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
}

fn is_ready(node: &RedisServer) -> bool {
    let replication: String = node.ask(&["INFO", "replication"]);
    is_serving(node) && (replication.contains("master_link_status:up") || replication.contains("connected_slaves:1"))
}

/// Clusters that no check uses at the moment.
static IDLE: Mutex<Vec<RedisCluster>> = Mutex::new(Vec::new());

/// An empty cluster as the subject of a conformance check.
#[derive(Debug)]
pub struct ClusterSubject {
    subject: Subject,
    cluster: Option<RedisCluster>,
}

impl ClusterSubject {
    /// A cluster that no other check uses.
    ///
    /// # Panics
    /// When the servers cannot be started.
    #[expect(clippy::new_without_default, reason = "starting servers is no default")]
    pub fn new() -> Self {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let cluster = idle.unwrap_or_else(RedisCluster::start);
        Self { subject: Subject::at(cluster.url("")), cluster: Some(cluster) }
    }
}

impl Deref for ClusterSubject {
    type Target = Subject;

    fn deref(&self) -> &Subject {
        &self.subject
    }
}

impl Drop for ClusterSubject {
    fn drop(&mut self) {
        // What a check that failed left behind would spoil the next one.
        if let Some(cluster) = self.cluster.take().filter(|cluster| !std::thread::panicking() && cluster.flush()) {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(cluster);
        }
    }
}
