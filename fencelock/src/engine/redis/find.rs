//! How the server is found: it has a fixed address, or Sentinels know who is the master.

use super::fault::{Fault, fault};
use super::link::text;
use super::target::Target;
use super::wire::{News, answered};
use crate::{Error, ErrorKind};
use redis::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// Where to connect to.
pub(super) enum Finder {
    Fixed(Target),
    Sentinel(Sentinel),
}

impl Finder {
    /// The server that is to be used at this moment.
    pub(super) async fn server(&self, timeout: Duration) -> Result<Target, Fault> {
        match self {
            Finder::Fixed(target) => Ok(target.clone()),
            Finder::Sentinel(sentinel) => sentinel.master(timeout).await,
        }
    }

    /// Resolves when another server has become the master, as far as anybody tells.
    pub(super) async fn moved(&self) {
        match self {
            Finder::Fixed(_) => std::future::pending().await,
            Finder::Sentinel(sentinel) => sentinel.switched().await,
        }
    }
}

/// A master that Sentinels watch over.
pub(super) struct Sentinel {
    pub(super) sentinels: Vec<Target>,
    /// What the Sentinels call the master.
    pub(super) name: String,
    /// Settings for the master; its address is the Sentinels' part.
    pub(super) target: Target,
    /// Which Sentinel is asked first: the one that answered last.
    pub(super) first: AtomicUsize,
}

impl Sentinel {
    async fn master(&self, timeout: Duration) -> Result<Target, Fault> {
        let mut answers = Vec::new();
        let first = self.first.load(Ordering::Relaxed);
        for step in 0..self.sentinels.len() {
            let number = (first + step) % self.sentinels.len();
            match self.ask(&self.sentinels[number], timeout).await {
                Ok(Some((host, port))) => {
                    self.first.store(number, Ordering::Relaxed);
                    return Ok(self.target.at(&host, port));
                }
                Ok(None) => answers.push(format!("Sentinel {} does not know it", number + 1)),
                Err(fault) => answers.push(format!("Sentinel {}: {}", number + 1, fault.error)),
            }
        }
        let error = Error::new(
            ErrorKind::Unavailable,
            format!("no Sentinel tells who is the master {:?}; check the name and the Sentinels' addresses", self.name),
        );
        Err(Fault::passing(error.caused_by(answers.join("; "))))
    }

    async fn ask(&self, sentinel: &Target, timeout: Duration) -> Result<Option<(String, u16)>, Fault> {
        let asking = async {
            let mut connection = sentinel.connect_to_ask(timeout).await?;
            let mut command = redis::cmd("SENTINEL");
            command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
            command.query_async::<Option<(String, u16)>>(&mut connection).await
        };
        asking.await.map_err(|error| fault(error, false))
    }

    /// Listens to all Sentinels: those that are cut off themselves tell nothing.
    async fn switched(&self) {
        let (tell, mut told) = mpsc::unbounded_channel();
        let mut listening = Vec::new();
        loop {
            listening.clear();
            for sentinel in &self.sentinels {
                let (tell, name) = (tell.clone(), self.name.clone());
                let listener = Box::new(move |news| match news {
                    News::Broken => drop(tell.send(false)),
                    News::Push(values) if is_switch(&values, &name) => drop(tell.send(true)),
                    News::Push(_) => {}
                });
                if let Ok(connection) = sentinel.connect(Duration::from_secs(2), listener).await
                    && let Ok(answer) = answered(connection.subscribe("SUBSCRIBE", "+switch-master")).await
                    && answer.is_empty()
                {
                    listening.push(connection);
                }
            }
            // A Sentinel that went away may be back soon; the others are asked again as well.
            let again = Duration::from_secs(if listening.len() == self.sentinels.len() { 3600 } else { 5 });
            match tokio::time::timeout(again, told.recv()).await {
                Ok(Some(true)) => return,
                Ok(_) => tokio::time::sleep(Duration::from_millis(500)).await,
                Err(_) => {}
            }
        }
    }
}

fn is_switch(push: &[Value], name: &str) -> bool {
    let [kind, _, message] = push else { return false };
    let (Some("message"), Some(message)) = (text(kind), text(message)) else { return false };
    message.strip_prefix(name).is_some_and(|rest| rest.starts_with(' '))
}
