//! The servers behind an engine: one, or the nodes of a cluster. Which of them a lock lives on is decided here.

use super::cluster::Cluster;
use super::fault::Fault;
use super::key::Key;
use super::link::{Link, Open};
use super::post::{Op, Outcome, Post, Rules};
use super::takeover::Quarantine;
use redis::{Cmd, Value};
use std::sync::Arc;
use std::time::Duration;

/// One server.
pub(super) struct Node {
    pub(super) link: Arc<Link>,
    pub(super) post: Arc<Post>,
}

impl Node {
    pub(super) fn new(link: Link, rules: Rules) -> Self {
        let link = Arc::new(link);
        Self { post: Arc::new(Post::new(Arc::clone(&link), rules)), link }
    }

    /// Nothing that depends on a runtime that is going away may hold up the last releases, which another one carries.
    pub(super) fn orphan(&self) {
        self.link.drop_connection();
        self.post.orphan();
    }
}

pub(super) enum Nodes {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl Nodes {
    pub(super) fn are_a_cluster(&self) -> bool {
        matches!(self, Nodes::Cluster(_))
    }

    /// Makes sure that there is somebody to talk to.
    pub(super) async fn connect(&self) -> Result<(), Fault> {
        match self {
            Nodes::One(node) => node.link.open().await.map(drop),
            Nodes::Cluster(cluster) => cluster.connect().await,
        }
    }

    pub(super) async fn submit(&self, op: &Op) -> Outcome {
        match self {
            Nodes::One(node) => node.post.submit(op).await,
            Nodes::Cluster(cluster) => Box::pin(cluster.submit(op)).await,
        }
    }

    pub(super) async fn submit_all(&self, ops: &[Op]) -> Vec<Outcome> {
        match self {
            Nodes::One(node) => node.post.submit_all(ops).await,
            Nodes::Cluster(cluster) => cluster.submit_all(ops).await,
        }
    }

    /// Asks the server of this key something that changes nothing.
    pub(super) async fn ask(&self, key: &Key, command: impl Fn(&Open) -> Cmd + Send + Sync) -> Result<Value, Fault> {
        match self {
            Nodes::One(node) => node.post.ask(command).await,
            Nodes::Cluster(cluster) => cluster.ask(key.slot, command).await,
        }
    }

    /// For how long nothing is granted on the lock's server, and why.
    pub(super) fn quarantine(&self, key: &Key) -> Option<Quarantine> {
        match self {
            Nodes::One(node) => node.link.quarantine(),
            Nodes::Cluster(cluster) => cluster.known(key.slot)?.link.quarantine(),
        }
    }

    /// Why the server of this key cannot be asked, if that is known.
    pub(super) fn trouble(&self, key: &Key) -> Option<String> {
        match self {
            Nodes::One(node) => node.link.trouble(),
            Nodes::Cluster(cluster) => cluster.trouble(key.slot),
        }
    }

    /// The server of this key, as far as it is known.
    pub(super) fn of(&self, key: &Key) -> Option<Arc<Node>> {
        match self {
            Nodes::One(node) => Some(Arc::clone(node)),
            Nodes::Cluster(cluster) => cluster.known(key.slot),
        }
    }

    /// All that serve at this moment.
    pub(super) async fn serving(&self) -> Result<Vec<Arc<Node>>, Fault> {
        if let Nodes::Cluster(cluster) = self {
            cluster.learn_anew().await?;
        }
        Ok(self.all())
    }

    /// How long something is tried again while nobody serves.
    pub(super) fn patience(&self) -> Duration {
        match self {
            // Its post tries again.
            Nodes::One(_) => Duration::ZERO,
            Nodes::Cluster(cluster) => cluster.patience(),
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Node>> {
        match self {
            Nodes::One(node) => vec![Arc::clone(node)],
            Nodes::Cluster(cluster) => cluster.all(),
        }
    }

    /// How many replicas must have a grant before it counts.
    pub(super) fn replicas(&self) -> usize {
        match self {
            Nodes::One(node) => node.post.replicas(),
            Nodes::Cluster(cluster) => cluster.replicas(),
        }
    }

    /// Resolves when other servers are to be talked to.
    pub(super) async fn moved(&self) {
        match self {
            Nodes::One(node) => {
                node.link.moved().await;
                node.link.drop_connection();
            }
            Nodes::Cluster(_) => std::future::pending().await,
        }
    }
}
