//! What proves the promises of fencelock, on every engine alike.
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`mod@conformance`] | the suite; [`conformance!`] instantiates all of it for one engine |
//! | [`probe`] | a process of its own that holds locks, to be killed, stopped and continued |
//! | [`history`] | a record of what happened to locks, and a checker that finds what must not have happened |
//! | [`torture`] | processes that hammer an engine under the eyes of the checker; `fencelock torture` |
//! | [`sabotage`] | engines that break one promise each: they prove that suite and checker can fail |
//! | [`redis`] | real Redis servers, which can be stopped, killed and started again |
//! | [`redlock`] | several of them, independent of each other |
//! | [`etcd`] | real etcd servers, alone and in clusters, likewise |
//! | [`zookeeper`] | real ZooKeeper servers, alone and in ensembles, likewise |
//! | [`mysql`] | real MariaDB or MySQL servers |
//! | [`postgres`] | real PostgreSQL servers, and PgBouncer |
//! | [`sql`] | what tests need of a database, whichever it is |
//! | [`proxy`] | the network between a client and a server, with faults |
//! | [`measure`] | throughput and latency; `fencelock bench` |
//! | [`rule`] | an engine beside the pure line rule, by random steps |
//! | `lost_update` | writers that are stopped past their lease, with a fence and without (feature `lost-update`) |
//! | [`web`] | an HTTP server with a memory, and a client, for the gate |
//! | [`scripted`] | an engine that answers as it is told: late, never, wrongly; for the keeper |

#![forbid(unsafe_code)]

pub mod ask;
pub mod conformance;
mod daemon;
pub mod etcd;
pub mod history;
pub mod kind;
#[cfg(feature = "lost-update")]
pub mod lost_update;
pub mod measure;
pub mod mysql;
pub mod postgres;
pub mod probe;
pub mod proxy;
pub mod redis;
pub mod redlock;
pub mod relay;
pub mod rng;
pub mod rule;
pub mod sabotage;
pub mod scripted;
pub mod sql;
pub mod stepped;
pub mod subject;
pub mod torture;
pub mod wait;
pub mod web;
pub mod zookeeper;

pub use kind::{Kind, Lock};
pub use probe::Probe;
pub use subject::Subject;
