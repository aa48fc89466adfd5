//! What a URL says: `zk://[user:password@]host[:port],…[/path][?option=value&…]`, `zks://` for TLS.

use crate::client::DEFAULT_TTL;
use crate::url::{Url, decode};
use crate::{Error, Result};
use rustls::crypto::CryptoProvider;
use std::time::Duration;
use zookeeper_client::{Acls, Client, Connector, TlsOptions};

const OPTIONS: [&str; 6] = ["ttl", "timeout", "acl", "ca", "cert", "key"];

/// Where and how to connect.
pub(super) struct Settings {
    /// The servers, as the client wants them.
    hosts: String,
    /// The directory of all locks; `/` or without a slash at its end.
    pub(super) root: String,
    /// `user:password`.
    credentials: Option<String>,
    tls: Option<TlsOptions>,
    /// How long the servers may take to answer one who does not want to wait.
    pub(super) patience: Duration,
    /// The lease of locks that ask for no other.
    pub(super) ttl: Duration,
    /// Who may use what is made here.
    pub(super) acls: Acls<'static>,
    /// For messages: without secrets.
    pub(super) address: String,
}

impl Settings {
    /// Reads the URL. Touches nothing but the files that it names.
    pub(super) fn read(url: &Url, text: &str) -> Result<Self> {
        let secure = url.scheme == "zks";
        let mut url = url.clone();
        let patience = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(5));
        if patience.is_zero() {
            return Err(Error::invalid(
                "option timeout=0s: no server answers in no time; give it some, as in timeout=5s",
            ));
        }
        let (ca, cert, key) = (file(&mut url, "ca")?, file(&mut url, "cert")?, file(&mut url, "key")?);
        let acl = url.take("acl");
        url.finish(&OPTIONS)?;
        let place = Place::read(text, &url.scheme)?;
        let tls = tls(secure, ca, cert, key)?;
        let acls = match (acl.as_deref(), &place.credentials) {
            (None, None) | (Some("open"), _) => Acls::anyone_all(),
            (None | Some("creator"), Some(_)) => Acls::creator_all(),
            (Some("creator"), None) => {
                return Err(Error::invalid("option acl=creator needs a user; write user:password@ before the hosts"));
            }
            (Some(other), _) => {
                return Err(Error::invalid(format!("option acl={other}: write open (anyone) or creator (this user)")));
            }
        };
        // The client takes this option out before the engine sees it.
        let ttl = Url::parse(text)?.take_duration("ttl")?.unwrap_or(DEFAULT_TTL);
        let path = if place.root == "/" { "" } else { &place.root };
        let address = format!("{}://{}{path}", url.scheme, place.hosts);
        Ok(Self {
            hosts: place.hosts,
            root: place.root,
            credentials: place.credentials,
            tls,
            patience,
            ttl,
            acls,
            address,
        })
    }

    /// After so long a silence, a server is left for another one: several can be tried while the session lasts.
    fn idle(timeout: Duration) -> Duration {
        let at_least = (timeout * 2 / 5).min(Duration::from_millis(800));
        (timeout / 6).clamp(at_least, Duration::from_secs(2))
    }

    /// At most so much time passes between two heartbeats of a session of this length.
    pub(super) fn heartbeats(timeout: Duration) -> Duration {
        Self::idle(timeout) * 3 / 8
    }

    /// Opens a session that outlives its last heartbeat by about this long.
    pub(super) async fn connect(&self, timeout: Duration) -> Result<Client, zookeeper_client::Error> {
        let mut connector: Connector =
            Client::connector().with_session_timeout(timeout).with_connection_timeout(Self::idle(timeout));
        if let Some(credentials) = &self.credentials {
            connector = connector.with_auth("digest", credentials.as_bytes());
        }
        match &self.tls {
            Some(tls) => connector.with_tls(tls.clone()).secure_connect(&self.hosts).await,
            None => connector.connect(&self.hosts).await,
        }
    }
}

/// The part of a URL between the scheme and the question mark.
struct Place {
    hosts: String,
    root: String,
    credentials: Option<String>,
}

impl Place {
    fn read(text: &str, scheme: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!(
                "not a ZooKeeper URL: {why}; write {scheme}://[user:password@]host[:port][,host…][/path]"
            ))
        };
        let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
        let bare = bare.split_once(':').and_then(|(_, rest)| rest.strip_prefix("//"));
        let bare = bare.ok_or_else(|| bad("after the scheme comes //"))?;
        let (servers, path) = bare.find('/').map_or((bare, "/"), |at| bare.split_at(at));
        let (credentials, hosts) = match servers.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(decode(credentials)?), hosts),
            None => (None, servers),
        };
        if credentials.as_ref().is_some_and(|credentials| !credentials.contains(':')) {
            return Err(bad("a user needs a password"));
        }
        for host in hosts.split(',') {
            check_host(host).map_err(|why| bad(&why))?;
        }
        let root = decode(path)?;
        let root = if root.len() > 1 { root.strip_suffix('/').unwrap_or(&root) } else { &root };
        // The client knows which characters ZooKeeper allows.
        if root.split('/').skip(1).any(|part| [".", ".."].contains(&part) || (part.is_empty() && root.len() > 1)) {
            return Err(bad(&format!("{root:?} is not a path")));
        }
        if root.chars().any(|c| c.is_control() || super::path::encode(&c.to_string()).starts_with('%') && c != '/') {
            return Err(bad(&format!("{root:?} has characters that ZooKeeper does not allow")));
        }
        Ok(Self { hosts: hosts.to_owned(), root: root.to_owned(), credentials })
    }
}

fn check_host(host: &str) -> std::result::Result<(), String> {
    let (name, port) = match host.strip_prefix('[') {
        Some(address) => {
            let (address, port) = address.split_once(']').ok_or_else(|| format!("{host:?} lacks a ]"))?;
            (address, port)
        }
        None => host.find(':').map_or((host, ""), |at| host.split_at(at)),
    };
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(if host.is_empty() { "a host is missing".to_owned() } else { format!("{host:?} is not a host") });
    }
    match port.strip_prefix(':').map(str::parse::<u16>) {
        None if port.is_empty() => Ok(()),
        Some(Ok(port)) if port > 0 => Ok(()),
        _ => Err(format!("{host:?} has a bad port")),
    }
}

fn file(url: &mut Url, option: &str) -> Result<Option<String>> {
    let Some(path) = url.take(option) else { return Ok(None) };
    let text = std::fs::read_to_string(&path);
    text.map(Some)
        .map_err(|error| Error::invalid(format!("option {option}={path}: cannot read the file")).caused_by(error))
}

fn tls(secure: bool, ca: Option<String>, cert: Option<String>, key: Option<String>) -> Result<Option<TlsOptions>> {
    if !secure {
        return match (ca, cert, key) {
            (None, None, None) => Ok(None),
            _ => Err(Error::invalid("options ca, cert and key need TLS; write zks://")),
        };
    }
    let ca = ca.ok_or_else(|| {
        Error::invalid(
            "TLS needs the option ca: the file with the certificate of the authority that signed the servers'",
        )
    })?;
    if CryptoProvider::get_default().is_none() {
        // TLS panics in a program that has chosen no cryptography. Somebody else may choose at the same moment: that is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let bad = |what: &'static str| {
        move |error: zookeeper_client::Error| {
            Error::invalid(format!("option {what}: the file has nothing of the kind in PEM form")).caused_by(error)
        }
    };
    let options = TlsOptions::new().with_pem_ca(&ca).map_err(bad("ca"))?;
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(options.with_pem_identity(&cert, &key).map_err(bad("cert, key"))?)),
        (None, None) => Ok(Some(options)),
        _ => Err(Error::invalid("options cert and key go together: the client's certificate and its key")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Settings> {
        let mut url = Url::parse(text)?;
        url.take("ttl");
        Settings::read(&url, text)
    }

    #[test]
    fn urls_are_understood() {
        let settings = read("zk://user:p%40ss@h1,h2:2182,[::1]:2183/a/b/?ttl=10s&timeout=1s").unwrap();
        assert_eq!((settings.hosts.as_str(), settings.root.as_str()), ("h1,h2:2182,[::1]:2183", "/a/b"));
        assert_eq!(settings.credentials.as_deref(), Some("user:p@ss"));
        assert_eq!((settings.ttl, settings.patience), (Duration::from_secs(10), Duration::from_secs(1)));
        assert_eq!(settings.address, "zk://h1,h2:2182,[::1]:2183/a/b");
        assert_eq!(read("zk://h").unwrap().root, "/");
        assert_eq!(read("zk://h/").unwrap().address, "zk://h");
    }

    #[test]
    fn bad_urls_are_refused_without_their_secrets() {
        for bad in [
            "zk:h1",
            "zk://",
            "zk:///a",
            "zk://h1,,h2",
            "zk://h1:0",
            "zk://h1:x",
            "zk://[::1",
            "zk://secret@h",
            "zk://h/a//b",
            "zk://h/../x",
            "zk://h/%01",
            "zk://h?ca=/nowhere",
            "zks://h",
            "zk://h?acl=creator",
            "zk://u:secret@h?acl=x",
            "zk://h?color=red",
            "zk://h?timeout=0s",
            "zk://u:secret@h:99999",
            "zk://h/%F0%9F%94%92",
        ] {
            let error = read(bad).err().unwrap_or_else(|| panic!("{bad}"));
            assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{bad}: {error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
