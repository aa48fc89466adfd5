//! Reads `etcd://[user:password@]host[:port][,host…][/prefix]?…` and makes the link from it.

use super::link::{Link, Login};
use crate::url::{Url, decode};
use crate::{Error, Result};
use rustls::crypto::CryptoProvider;
use std::time::Duration;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

const OPTIONS: [&str; 6] = ["ttl", "timeout", "patience", "ca", "cert", "key"];
const PORT: &str = "2379";
/// Where locks are kept unless the URL says otherwise.
const PREFIX: &str = "fencelock/";

/// What a URL says.
pub(super) struct Target {
    pub(super) link: Link,
    /// The URL without secrets.
    pub(super) address: String,
    /// What all keys start with.
    pub(super) prefix: String,
}

pub(super) fn read(url: &Url, text: &str) -> Result<Target> {
    let mut url = url.clone();
    let timeout = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2));
    let patience = url.take_duration("patience")?.unwrap_or(Duration::from_secs(5));
    let tls = tls(&mut url)?;
    url.finish(&OPTIONS)?;
    let Parts { login, hosts, path } = parts(&url.scheme, text)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let server = |host: &String| endpoint(&format!("{scheme}://{host}"), tls.as_ref(), timeout);
    let servers = hosts.iter().map(server).collect::<Result<Vec<_>>>()?;
    // Many clients with the same URL spread over the servers.
    let mut dice = [0];
    getrandom::fill(&mut dice).map_err(|_| Error::invalid("the operating system has no source of randomness"))?;
    let first = usize::from(dice[0]) % servers.len();
    let prefix = prefix(&path);
    let shown = if path.is_empty() { String::new() } else { format!("/{path}") };
    let address = format!("{}://{}{shown}", url.scheme, hosts.join(","));
    Ok(Target { link: Link::new(servers, first, login, timeout, patience), address, prefix })
}

fn prefix(path: &str) -> String {
    match path {
        "" => PREFIX.to_owned(),
        path if path.ends_with('/') => path.to_owned(),
        path => format!("{path}/"),
    }
}

struct Parts {
    login: Option<Login>,
    hosts: Vec<String>,
    path: String,
}

/// Takes the text apart before it is decoded: a password may hold any sign.
fn parts(scheme: &str, text: &str) -> Result<Parts> {
    let bad = |what: &str| {
        Error::invalid(format!("{what}; write {scheme}://[user:password@]host[:port][,host[:port]…][/prefix]"))
    };
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let (_, rest) = bare.split_once("://").ok_or_else(|| bad("the URL names no server"))?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if path.contains('@') && !authority.contains('@') {
        // Otherwise a part of the password would pass for a server's name, and be shown.
        return Err(bad("write / as %2F and @ as %40 in user, password and prefix"));
    }
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => {
            (Some(read_login(login).ok_or_else(|| bad("user and password cannot be read"))?), hosts)
        }
        None => (None, authority),
    };
    let hosts: Vec<String> = hosts.split(',').map(with_port).collect();
    if hosts.iter().any(|host| host.starts_with(':') || host.contains(char::is_whitespace)) {
        return Err(bad("a server's name is missing in the URL"));
    }
    Ok(Parts { login, hosts, path: decode(path)? })
}

fn read_login(text: &str) -> Option<Login> {
    let (user, password) = text.split_once(':')?;
    let (user, password) = (decode(user).ok()?, decode(password).ok()?);
    (!user.is_empty()).then_some(Login { user, password })
}

fn with_port(host: &str) -> String {
    let numeric = |port: &str| !port.is_empty() && port.bytes().all(|digit| digit.is_ascii_digit());
    match host.rsplit_once(':') {
        Some((name, port)) if numeric(port) && (!name.contains(':') || name.ends_with(']')) => host.to_owned(),
        _ => format!("{host}:{PORT}"),
    }
}

fn endpoint(address: &str, tls: Option<&ClientTlsConfig>, timeout: Duration) -> Result<Endpoint> {
    let bad = |error: tonic::transport::Error| {
        Error::invalid(format!("{address} is not the address of a server")).caused_by(error)
    };
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(bad)?;
    let endpoint = endpoint
        .connect_timeout(timeout)
        .tcp_nodelay(true)
        .buffer_size(4096)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(8 << 20)
        .user_agent(concat!("fencelock/", env!("CARGO_PKG_VERSION")))
        .map_err(bad)?;
    match tls {
        Some(tls) => {
            let bad = |error: tonic::transport::Error| {
                Error::invalid("the certificates of the options ca, cert and key cannot be used").caused_by(error)
            };
            endpoint.tls_config(tls.clone()).map_err(bad)
        }
        None => Ok(endpoint),
    }
}

fn tls(url: &mut Url) -> Result<Option<ClientTlsConfig>> {
    let mut read = |option: &str| {
        url.take(option)
            .map(|path| {
                std::fs::read(&path).map_err(|error| {
                    Error::invalid(format!("option {option}={path}: cannot read the file")).caused_by(error)
                })
            })
            .transpose()
    };
    let (ca, cert, key) = (read("ca")?, read("cert")?, read("key")?);
    let asked = ca.is_some() || cert.is_some() || key.is_some();
    if url.scheme != "etcds" {
        return if asked { Err(Error::invalid("options ca, cert and key need TLS; write etcds://")) } else { Ok(None) };
    }
    if CryptoProvider::get_default().is_none() {
        // TLS panics in a program that has chosen no cryptography. Somebody else may choose at the same moment: that is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let config = ClientTlsConfig::new();
    let config = match ca {
        Some(ca) => config.ca_certificate(Certificate::from_pem(ca)),
        None => config.with_webpki_roots(),
    };
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some(config.identity(Identity::from_pem(cert, key)))),
        (None, None) => Ok(Some(config)),
        _ => Err(Error::invalid("options cert and key go together: the client's certificate and its key")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<Target> {
        read(&Url::parse(text)?, text)
    }

    #[test]
    fn servers_prefix_and_login_are_read() {
        let parts = parts("etcd", "etcd://me:a%40b%2Fc@h1,h2:99,[::1],[::1]:7/locks%20a").unwrap();
        assert_eq!(parts.hosts, ["h1:2379", "h2:99", "[::1]:2379", "[::1]:7"]);
        assert_eq!(parts.path, "locks a");
        let login = parts.login.unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("me", "a@b/c"));
        assert_eq!(prefix(""), "fencelock/");
        assert_eq!(prefix("a"), "a/");
        assert_eq!(prefix("/a/"), "/a/");
    }

    #[tokio::test]
    async fn bad_urls_are_refused_without_their_secrets() {
        for bad in [
            "etcd:",
            "etcd://",
            "etcd://,h",
            "etcd://:secret@h",
            "etcd://me:secret/word@h",
            "etcd://u@h",
            "etcd://h?ca=/nowhere",
            "etcds://h?cert=/x",
            "etcd://h?what=1",
            "etcd://a b",
        ] {
            let Err(error) = target(bad) else { panic!("{bad} was accepted") };
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let target = target("etcd://u:secret@h1,h2/p?timeout=1s").unwrap();
        assert_eq!(target.address, "etcd://h1:2379,h2:2379/p");
    }
}
