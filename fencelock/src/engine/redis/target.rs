//! A server to connect to.

use super::fault::{IS_SENTINEL, NO_SENTINEL, NO_TLS};
use super::link::text;
use super::wire::{Listener, Stream, Wire};
use crate::{Error, Result};
use futures_util::future::select_ok;
use redis::{ConnectionAddr, ConnectionInfo, FromRedisValue, RedisConnectionInfo, RedisResult, Value};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_rustls::TlsConnector;

/// Where a server is, and how to introduce oneself.
#[derive(Clone)]
pub(in crate::engine) struct Target {
    info: ConnectionInfo,
    tls: Option<Arc<ClientConfig>>,
    is_sentinel: bool,
}

impl Target {
    /// `tls` is there if the address asks for TLS.
    pub(in crate::engine) fn new(info: ConnectionInfo, tls: Option<Arc<ClientConfig>>) -> Self {
        Self { info, tls, is_sentinel: false }
    }

    /// A Sentinel at the same address, with credentials of its own.
    pub(super) fn sentinel(&self, settings: RedisConnectionInfo) -> Self {
        Self { info: self.info.clone().set_redis_settings(settings), is_sentinel: true, ..self.clone() }
    }

    /// The same with another address.
    pub(super) fn at(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let addr = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Self { info: self.info.clone().set_addr(addr), ..self.clone() }
    }

    /// For people.
    pub(super) fn address(&self) -> String {
        self.info.addr().to_string()
    }

    /// Connects and introduces itself. Nothing may take longer than `timeout`, neither now nor later.
    pub(in crate::engine) async fn connect(&self, timeout: Duration, listener: Listener) -> RedisResult<Wire> {
        let connecting = async {
            let stream = self.stream().await?;
            let wire = Wire::new(stream, timeout, self.info.redis_settings().db(), listener);
            self.greet(&wire).await?;
            Ok(wire)
        };
        match tokio::time::timeout(timeout, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        }
    }

    /// For those who do not care for news.
    pub(super) async fn connect_to_ask(&self, timeout: Duration) -> RedisResult<Wire> {
        self.connect(timeout, Box::new(|_| {})).await
    }

    async fn stream(&self) -> RedisResult<Box<dyn Stream>> {
        Ok(match self.info.addr() {
            ConnectionAddr::Tcp(host, port) => Box::new(tcp(host, *port).await?),
            ConnectionAddr::TcpTls { host, port, .. } => {
                let Some(tls) = &self.tls else { return Err(io::Error::other("TLS is not set up").into()) };
                let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
                let stream = tcp(host, *port).await?;
                let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await;
                Box::new(
                    stream.map_err(|error| redis::make_extension_error(NO_TLS.to_owned(), Some(error.to_string())))?,
                )
            }
            ConnectionAddr::Unix(path) => Box::new(UnixStream::connect(path).await?),
            _ => return Err((redis::ErrorKind::InvalidClientConfig, "this kind of address is not known").into()),
        })
    }

    async fn greet(&self, wire: &Wire) -> RedisResult<()> {
        let settings = self.info.redis_settings();
        let mut greeting = redis::pipe();
        greeting.cmd("HELLO").arg(3);
        if let Some(password) = settings.password() {
            greeting.arg("AUTH").arg(settings.username().unwrap_or("default")).arg(password);
        }
        if settings.db() != 0 {
            greeting.cmd("SELECT").arg(settings.db());
        }
        let needed = greeting.len();
        // For whoever looks at the server's list of clients. Servers before 7.2 do not know it.
        greeting.cmd("CLIENT").arg("SETINFO").arg("LIB-NAME").arg("fencelock");
        greeting.cmd("CLIENT").arg("SETINFO").arg("LIB-VER").arg(env!("CARGO_PKG_VERSION"));
        let answers = wire.call_all(&greeting).await?;
        for (place, answer) in answers.into_iter().take(needed).enumerate() {
            let answer = answer.extract_error().map_err(|error| match error.code() {
                Some("NOPROTO") => too_old(),
                Some("ERR") if error.detail().is_some_and(|text| text.contains("unknown command")) => too_old(),
                _ => error,
            })?;
            if place == 0 {
                self.check_mode(answer)?;
            }
        }
        Ok(())
    }

    /// Who is something else than the URL says will not understand what it is told.
    fn check_mode(&self, hello: Value) -> RedisResult<()> {
        let about = HashMap::<String, Value>::from_redis_value(hello).unwrap_or_default();
        let mode = about.get("mode").and_then(text).unwrap_or_default();
        match (self.is_sentinel, mode) {
            (false, "sentinel") => Err(redis::make_extension_error(IS_SENTINEL.to_owned(), None)),
            (true, "standalone" | "cluster") => Err(redis::make_extension_error(NO_SENTINEL.to_owned(), None)),
            _ => Ok(()),
        }
    }
}

fn too_old() -> redis::RedisError {
    (redis::ErrorKind::RESP3NotSupported, "the server does not know HELLO 3").into()
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let attempts: Vec<_> =
        lookup_host((host, port)).await?.map(|address| Box::pin(TcpStream::connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    // All at once: an address that does not answer must not keep the others waiting.
    let (stream, _) = select_ok(attempts).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Certificates that a URL names.
#[derive(Default)]
pub(in crate::engine) struct Certificates {
    /// Who vouches for the server; those whom browsers trust if there is none.
    pub(super) ca: Option<Vec<u8>>,
    /// The client's own, and its key.
    pub(super) client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    pub(in crate::engine) fn config(&self) -> Result<Arc<ClientConfig>> {
        let bad = |option: &str| Error::invalid(format!("option {option}: the file cannot be used; it must be PEM"));
        let roots = match &self.ca {
            None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate = certificate.map_err(|error| bad("ca").caused_by(error))?;
                    roots.add(certificate).map_err(|error| bad("ca").caused_by(error))?;
                }
                if roots.is_empty() {
                    return Err(bad("ca").caused_by("no certificate is in it"));
                }
                roots
            }
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid("TLS cannot be used").caused_by(error))?
            .with_root_certificates(roots);
        let config = match &self.client {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                let chain = CertificateDer::pem_slice_iter(certificates).collect::<Result<Vec<_>, _>>();
                let chain = chain.map_err(|error| bad("cert").caused_by(error))?;
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| bad("key").caused_by(error))?;
                builder.with_client_auth_cert(chain, key).map_err(|error| bad("cert and key").caused_by(error))?
            }
        };
        Ok(Arc::new(config))
    }
}
