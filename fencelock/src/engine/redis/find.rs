//! How the server is found: it has a fixed address, or Sentinels know who is the master.

use super::fault::{Fault, fault};
use crate::{Error, ErrorKind};
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, PushInfo, PushKind, TlsCertificates, Value,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// Where to connect to.
pub(super) enum Finder {
    Fixed(Client),
    Sentinel(Sentinel),
}

impl Finder {
    /// The server that is to be used at this moment.
    pub(super) async fn server(&self, timeout: Duration) -> Result<Client, Fault> {
        match self {
            Finder::Fixed(client) => Ok(client.clone()),
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
    pub(super) sentinels: Vec<Client>,
    /// What the Sentinels call the master.
    pub(super) name: String,
    /// Settings for the master; its address is the Sentinels' part.
    pub(super) info: ConnectionInfo,
    pub(super) tls: Option<TlsCertificates>,
    /// Which Sentinel is asked first: the one that answered last.
    pub(super) first: AtomicUsize,
}

impl Sentinel {
    async fn master(&self, timeout: Duration) -> Result<Client, Fault> {
        let mut answers = Vec::new();
        let first = self.first.load(Ordering::Relaxed);
        for step in 0..self.sentinels.len() {
            let number = (first + step) % self.sentinels.len();
            match self.ask(&self.sentinels[number], timeout).await {
                Ok(Some((host, port))) => {
                    self.first.store(number, Ordering::Relaxed);
                    return self.client(host, port);
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

    async fn ask(&self, sentinel: &Client, timeout: Duration) -> Result<Option<(String, u16)>, Fault> {
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(timeout)).set_response_timeout(Some(timeout));
        let asking = async {
            let mut connection = sentinel.get_multiplexed_async_connection_with_config(&config).await?;
            let mut command = redis::cmd("SENTINEL");
            command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
            command.query_async::<Option<(String, u16)>>(&mut connection).await
        };
        asking.await.map_err(|error| fault(error, false))
    }

    fn client(&self, host: String, port: u16) -> Result<Client, Fault> {
        let addr = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let info = self.info.clone().set_addr(addr);
        let client = match &self.tls {
            Some(tls) => Client::build_with_tls(info, tls.clone()),
            None => Client::open(info),
        };
        client.map_err(|error| fault(error, false))
    }

    /// Listens to all Sentinels: those that are cut off themselves tell nothing.
    async fn switched(&self) {
        let (tell, mut told) = mpsc::unbounded_channel();
        let mut listening = Vec::new();
        loop {
            listening.clear();
            for sentinel in &self.sentinels {
                let (tell, name) = (tell.clone(), self.name.clone());
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(Duration::from_secs(2)))
                    .set_push_sender(move |push: PushInfo| {
                        if push.kind == PushKind::Disconnection || is_switch(&push, &name) {
                            let _ = tell.send(push.kind != PushKind::Disconnection);
                        }
                        Ok::<(), redis::aio::SendError>(())
                    });
                if let Ok(mut connection) = sentinel.get_multiplexed_async_connection_with_config(&config).await
                    && connection.subscribe("+switch-master").await.is_ok()
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

fn is_switch(push: &PushInfo, name: &str) -> bool {
    let Some(Value::BulkString(message)) = push.data.get(1) else { return false };
    push.kind == PushKind::Message && message.starts_with(name.as_bytes()) && message.get(name.len()) == Some(&b' ')
}
