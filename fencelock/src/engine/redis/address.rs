//! Reads the URLs of the Redis engines: one server, a master that Sentinels watch over, a cluster.

use super::cluster::Cluster;
use super::fault::fault;
use super::find::{Finder, Sentinel};
use super::link::{Link, Plan, Push};
use super::node::{Node, Nodes};
use super::post::Rules;
use super::takeover::Policy;
use super::target::{Certificates, Target};
use super::{RedisEngine, Waiting};
use crate::url::{Url, decode};
use crate::{Clock, Error, Owner, Result};
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use rustls::ClientConfig;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;

const OPTIONS: [&str; 10] =
    ["ttl", "timeout", "patience", "quarantine", "replicas", "ca", "cert", "key", "sentinel_user", "sentinel_password"];
const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
/// The lease of locks that ask for no other, as in the client.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// All that the links of one client have in common.
pub(super) struct Common {
    pub(super) session: Arc<str>,
    timeout: Duration,
    policy: Policy,
    longest: Arc<AtomicU64>,
    pushes: mpsc::UnboundedSender<(u64, Push)>,
    pub(super) rules: Rules,
    /// Settings for every server; the address differs.
    target: Target,
}

impl Common {
    /// A node, however it is found. There is one place, without a name, except on a cluster.
    pub(super) fn node(&self, finder: Finder, places: Vec<String>) -> Arc<Node> {
        let link = Link::new(Plan {
            finder,
            session: Arc::clone(&self.session),
            timeout: self.timeout,
            policy: self.policy,
            longest: Arc::clone(&self.longest),
            places: Mutex::new(places),
            pushes: self.pushes.clone(),
        });
        Arc::new(Node::new(link, self.rules))
    }

    /// The server at this address, with the settings that are the same for all.
    pub(super) fn target(&self, host: &str, port: u16) -> Target {
        self.target.at(host, port)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// Opens what the URL names, and makes sure that it answers.
pub(crate) async fn open(url: &Url, text: &str) -> Result<RedisEngine> {
    let mut url = url.clone();
    // The client has taken it out.
    let ttl = Url::parse(text)?.take_duration("ttl")?.unwrap_or(DEFAULT_TTL);
    let options = Options::take(&mut url)?;
    url.finish(&OPTIONS)?;
    let scheme = url.scheme.as_str();
    let several = matches!(scheme, "redis+sentinel" | "rediss+sentinel" | "redis+cluster" | "rediss+cluster");
    let (info, address, hosts) = if several {
        several_hosts(scheme, text)?
    } else {
        let (info, address) = connection_info(&url, text)?;
        (info, address, Hosts::default())
    };
    let db = info.redis_settings().db();
    let target = Target::new(info, options.tls.clone());
    let in_cluster = scheme.ends_with("+cluster");
    let (pushes, arrived) = mpsc::unbounded_channel();
    let common = Common {
        session: Owner::random().to_string().into(),
        timeout: options.timeout,
        policy: options.policy,
        longest: Arc::new(AtomicU64::new(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX))),
        pushes,
        // On a cluster it is not the node that is tried again, but whichever serves the slot by then.
        rules: Rules {
            patience: if in_cluster { Duration::ZERO } else { options.patience },
            replicas: options.replicas,
            by_slot: in_cluster,
        },
        target: target.clone(),
    };
    let session = Arc::clone(&common.session);
    let nodes = if scheme.ends_with("+sentinel") {
        let sentinels = options.sentinels(&target, &hosts.addresses);
        let sentinel = Sentinel::new(sentinels, hosts.master, target);
        Nodes::One(common.node(Finder::Sentinel(sentinel), vec![String::new()]))
    } else if in_cluster {
        Nodes::Cluster(Arc::new(Cluster::new(common, hosts.addresses, options.patience)))
    } else {
        Nodes::One(common.node(Finder::Fixed(target), vec![String::new()]))
    };
    let engine = RedisEngine {
        nodes,
        session,
        waiting: Mutex::new(Waiting::default()),
        arrived: tokio::sync::Mutex::new(arrived),
        note: Mutex::new((String::new(), "".into())),
        doubt: tokio::sync::Notify::new(),
        address,
        db,
    };
    let give_up = Clock::Boot.now().after(options.patience);
    while let Err(fault) = engine.nodes.connect().await {
        // The master that the Sentinels name is gone, or is none yet: they may be about to name another one.
        let in_failover = scheme.ends_with("+sentinel") && fault.broken && fault.passing;
        if !in_failover || Clock::Boot.now() >= give_up {
            return Err(fault.error.at_engine(&engine.address));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(engine)
}

struct Options {
    timeout: Duration,
    patience: Duration,
    policy: Policy,
    replicas: usize,
    tls: Option<Arc<ClientConfig>>,
    sentinel_user: Option<String>,
    sentinel_password: Option<String>,
}

impl Options {
    fn take(url: &mut Url) -> Result<Self> {
        let replicas = url.take("replicas").map(|text| {
            text.parse::<usize>().map_err(|_| Error::invalid(format!("option replicas={text}: write a number")))
        });
        let options = Self {
            timeout: url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2)),
            patience: url.take_duration("patience")?.unwrap_or(Duration::from_secs(5)),
            policy: Policy::read(url.take("quarantine").as_deref())?,
            replicas: replicas.transpose()?.unwrap_or(0),
            tls: tls(url)?,
            sentinel_user: url.take("sentinel_user"),
            sentinel_password: url.take("sentinel_password"),
        };
        let of_sentinel = options.sentinel_user.is_some() || options.sentinel_password.is_some();
        if of_sentinel && !url.scheme.ends_with("+sentinel") {
            return Err(Error::invalid("options sentinel_user and sentinel_password need redis+sentinel://"));
        }
        Ok(options)
    }

    fn sentinels(&self, target: &Target, addresses: &[(String, u16)]) -> Vec<Target> {
        let mut settings = RedisConnectionInfo::default();
        if let Some(user) = &self.sentinel_user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.sentinel_password {
            settings = settings.set_password(password);
        }
        let target = target.sentinel(settings);
        addresses.iter().map(|(host, port)| target.at(host, *port)).collect()
    }
}

/// Takes the options of TLS. `None` if the URL does not ask for it.
pub(in crate::engine) fn tls(url: &mut Url) -> Result<Option<Arc<ClientConfig>>> {
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
    let client = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => return Err(Error::invalid("options cert and key go together: the client's certificate and its key")),
    };
    if !url.scheme.starts_with("rediss") {
        if ca.is_some() || client.is_some() {
            return Err(Error::invalid(
                "options ca, cert and key need TLS; write rediss in place of redis (redlocks of redlock) in the URL",
            ));
        }
        return Ok(None);
    }
    Certificates { ca, client }.config().map(Some)
}

/// The servers that a URL names.
#[derive(Default)]
struct Hosts {
    addresses: Vec<(String, u16)>,
    /// What the Sentinels call the master.
    master: String,
}

/// What to connect to, and the address to show: without secrets.
pub(in crate::engine) fn connection_info(url: &Url, text: &str) -> Result<(ConnectionInfo, String)> {
    let scheme = &url.scheme;
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let bare = bare.strip_prefix("redis+").unwrap_or(bare);
    let bad = |what: &str| {
        let form = match scheme.as_str() {
            "redlock" | "redlocks" => "host[:port],host[:port],…[/db]",
            _ => "host[:port][/db], or redis+unix:///path",
        };
        Error::invalid(format!("{what}; write {scheme}://[user:password@]{form}"))
    };
    if !bare.starts_with("unix:") {
        check_parts(bare).map_err(bad)?;
    }
    let info = bare.into_connection_info().map_err(|error| {
        bad("not a Redis URL").caused_by(error.detail().unwrap_or("it cannot be parsed").to_owned())
    })?;
    if matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }) {
        return Err(Error::invalid(
            "#insecure: a server that proves nothing can be anybody; write ?ca=file with its CA",
        ));
    }
    let db = match info.redis_settings().db() {
        0 => String::new(),
        db => format!("/{db}"),
    };
    let address = match info.addr() {
        ConnectionAddr::Tcp(host, port) => format!("redis://{host}:{port}{db}"),
        ConnectionAddr::TcpTls { host, port, .. } => format!("rediss://{host}:{port}{db}"),
        ConnectionAddr::Unix(path) => format!("redis+unix://{}", path.display()),
        _ => scheme.clone(),
    };
    Ok((info, address))
}

/// What is wrong with `scheme://[user:password@]host[:port][/db]`. Nothing of it is shown: if a part is missing, a password may
/// stand anywhere.
fn check_parts(bare: &str) -> Result<(), &'static str> {
    let (_, rest) = bare.split_once("://").ok_or("the URL has no //")?;
    let (host, db) = rest.split_once('/').unwrap_or((rest, ""));
    if db.contains('@') || rest.contains('#') && !rest.ends_with("#insecure") {
        return Err("the URL cannot be taken apart: in a password, / is written as %2F and # as %23");
    }
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    if host.is_empty() || host.starts_with(':') {
        return Err("the URL names no host");
    }
    if host_and_port(host, PORT).is_none_or(|(_, port)| port == 0) {
        return Err("the port in the URL is no number from 1 to 65535");
    }
    let db = db.trim_end_matches("#insecure").trim_end_matches('/');
    if !db.is_empty() && !db.parse::<i64>().is_ok_and(|db| db >= 0) {
        return Err("the database in the URL is no number");
    }
    Ok(())
}

/// `[user:password@]host[:port],host[:port],…`, for Sentinels followed by `/master-name[/db]`.
fn several_hosts(scheme: &str, text: &str) -> Result<(ConnectionInfo, String, Hosts)> {
    let of_sentinels = scheme.ends_with("+sentinel");
    let form = if of_sentinels { "s1,s2,s3/master-name[/db]" } else { "n1,n2,n3" };
    let bad = |what: &str| Error::invalid(format!("{what}; write {scheme}://[user:password@]{form}"));
    let rest = text.split_once("://").map(|(_, rest)| rest).ok_or_else(|| bad("the URL has no //"))?;
    let rest = rest.split_once('?').map_or(rest, |(rest, _)| rest);
    let (user, rest) = rest.rsplit_once('@').map_or((None, rest), |(user, rest)| (Some(user), rest));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let port = if of_sentinels { SENTINEL_PORT } else { PORT };
    let addresses: Vec<(String, u16)> = hosts
        .split(',')
        .map(|host| host_and_port(host, port))
        .collect::<Option<_>>()
        .ok_or_else(|| bad("a host is missing or its port is no number"))?;
    let mut settings = RedisConnectionInfo::default();
    if let Some(user) = user {
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        if !name.is_empty() {
            settings = settings.set_username(decode(name)?);
        }
        settings = settings.set_password(decode(password)?);
    }
    let (master, db) = path.split_once('/').unwrap_or((path, ""));
    if of_sentinels && master.is_empty() {
        return Err(bad("the URL does not say what the Sentinels call the master"));
    }
    if !of_sentinels && !path.is_empty() {
        return Err(bad("a cluster has no databases and no master's name"));
    }
    if !db.is_empty() {
        settings = settings.set_db(db.parse().map_err(|_| bad("the database is no number"))?);
    }
    let (host, port) = addresses[0].clone();
    let addr = if scheme.starts_with("rediss") {
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host, port)
    };
    let info = addr.into_connection_info().map_err(|error| fault(error, false).error)?.set_redis_settings(settings);
    let address = format!("{scheme}://{hosts}{}{path}", if path.is_empty() { "" } else { "/" });
    Ok((info, address, Hosts { addresses, master: decode(master)? }))
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`.
pub(super) fn host_and_port(text: &str, usual: u16) -> Option<(String, u16)> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse().ok()?),
        _ => (text, usual),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_which_part_of_the_url_is_wrong_and_shows_no_password() {
        for (bad, named) in [
            ("redis:host", "//"),
            ("redis://", "no host"),
            ("redis://:6379", "no host"),
            ("redis://bob:secret@", "no host"),
            ("redis://bob:secret@:6379", "no host"),
            ("redis://host:99999", "port"),
            ("redis://host:0", "port"),
            ("redis://bob:secret", "port"),
            ("redis://host/abc", "database"),
            ("redis://host/-1", "database"),
            ("redis://bob:a/secret@host", "%2F"),
            ("redis://bob:a#secret@host", "%23"),
            ("rediss://host#insecure", "ca="),
        ] {
            let error = connection_info(&Url::parse(bad).unwrap(), bad).err().unwrap_or_else(|| panic!("{bad}"));
            let error = format!("{error:?} {error}");
            assert!(error.contains(named) && !error.contains("secret"), "{bad}: {error}");
        }
        for (good, address) in [
            ("redis://bob:secret@host/2", "redis://host:6379/2"),
            ("redis://host/", "redis://host:6379"),
            ("redis://[::1]:7000", "redis://::1:7000"),
            ("redis://bob:a%2Fb%23c%3Fd%40e@host:7000", "redis://host:7000"),
            ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock"),
        ] {
            assert_eq!(connection_info(&Url::parse(good).unwrap(), good).unwrap().1, address, "{good}");
        }
    }
}
