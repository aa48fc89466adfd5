//! `fencelock gate`: a reverse proxy that is the fence of an HTTP API which has none.
//!
//! * `rule`: which requests need a token, and for which resource. `admit`: who is let in. `ledger`: what survives a crash.
//! * `proxy`: one request. `body`: what streams. `wire`: connections to the upstream. `tell`: the log. Here: the command line, the listener,
//!   the end.

mod admit;
mod body;
mod ledger;
mod proxy;
mod rule;
mod tell;
mod wire;

use crate::args::Volume;
use crate::exit::{Exit, Failure, UNAVAILABLE};
use crate::signals::Signals;
use admit::Admission;
use body::{Body, Leash};
use clap::Args;
use fencelock::parse_duration;
use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};
use hyper::http::uri::Scheme;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use ledger::Ledger;
use proxy::{Gate, Upstream};
use rule::{Resource, Rule, canonical};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tell::Tell;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use wire::{Connector, TICK, Wires};

const EXAMPLES: &str = "\
Examples:
  fencelock gate --listen 127.0.0.1:8080 --upstream http://storage.internal:9000
  fencelock gate --listen :8080 --upstream https://api.example --protect /v1/orders --resource path:3
  curl -T report.csv -H \"Fencing-Token: $FENCELOCK_TOKEN\" http://127.0.0.1:8080/reports/today.csv

Answers: 412 an older token, 428 none, 400 a malformed one, 413 too long, 409 cut off,
  408 and 504 too slow, 502 the upstream cannot be reached, 503 the store fails; others are the upstream's.";

/// Stands before an HTTP API, and lets a request in only with a token that is not older than the newest
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GateArgs {
    /// Where to listen: an address and a port; port 0 takes a free one, and :8080 means every address
    #[arg(long, value_name = "ADDR")]
    listen: String,
    /// Where requests go: http://host:port or https://host, with a path in front of theirs if there is one
    #[arg(long, value_name = "URL")]
    // Read later: what clap refuses, it repeats, and this may hold a password.
    upstream: String,
    /// Trust an https upstream by the authorities in this PEM file, instead of the well-known ones
    #[arg(long, value_name = "FILE")]
    upstream_ca: Option<PathBuf>,
    /// The file that keeps the newest tokens [default: one per upstream, in this user's state directory]
    #[arg(long, value_name = "FILE")]
    store: Option<PathBuf>,
    /// What a request belongs to: path, path:N (its first N parts), header:NAME, or one
    #[arg(long, value_name = "RULE", default_value = "path")]
    resource: Resource,
    /// Only requests below this path need a token; others pass as they are (repeatable) [default: /]
    #[arg(long, value_name = "PREFIX", value_parser = parse_prefix)]
    protect: Vec<String>,
    /// GET, HEAD and OPTIONS pass without a token
    #[arg(long)]
    reads_pass: bool,
    /// The header that carries the token
    #[arg(long, value_name = "NAME", default_value = "fencing-token")]
    token_header: HeaderName,
    /// The longest body of a request: bytes, or 64k, 10m, 1g
    #[arg(long, value_name = "SIZE", default_value = "1g", value_parser = parse_size)]
    max_body: u64,
    /// How long a newer token waits for older requests that are on their way, before they are cut off
    #[arg(long, value_name = "DUR", default_value = "10s", value_parser = parse_duration)]
    drain: Duration,
    /// How long the upstream may take to answer, and a body may stall
    #[arg(long, value_name = "DUR", default_value = "60s", value_parser = parse_duration)]
    timeout: Duration,
    /// How long requests may take to come to their end when the gate is told to end
    #[arg(long, value_name = "DUR", default_value = "10s", value_parser = parse_duration)]
    grace: Duration,
    /// Hand on the Host header as it came (for signed requests) instead of the upstream's name
    #[arg(long)]
    keep_host: bool,
    /// Connections at a time; more have to wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_connections: u32,
    /// Print one JSON object per line on stdout: readiness, refusals, trouble
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) volume: Volume,
}

fn parse_upstream(text: &str) -> Result<Upstream, Failure> {
    let wrong = |why: &str| Failure::usage(format!("--upstream: {why}; write http://host:port or https://host"));
    let uri: Uri = text.parse().map_err(|_| wrong("this is no URL"))?;
    let scheme = uri.scheme().filter(|scheme| **scheme == Scheme::HTTP || **scheme == Scheme::HTTPS).cloned();
    let scheme = scheme.ok_or_else(|| wrong("it starts with neither http:// nor https://"))?;
    let authority = uri.authority().filter(|authority| !authority.host().is_empty()).cloned();
    let authority = authority.ok_or_else(|| wrong("it names no host"))?;
    if authority.as_str().contains('@') {
        return Err(wrong("it holds a user or a password; clients send their own Authorization"));
    }
    if uri.query().is_some() {
        return Err(wrong("it has a query"));
    }
    let usual = if scheme == Scheme::HTTP { 80 } else { 443 };
    let host = match authority.port_u16().filter(|port| *port != usual) {
        Some(port) => format!("{}:{port}", authority.host()),
        None => authority.host().to_owned(),
    };
    let host = HeaderValue::try_from(host).map_err(|_| wrong("its host cannot stand in a header"))?;
    Ok(Upstream { scheme, authority, base: uri.path().trim_end_matches('/').to_owned(), host })
}

fn parse_prefix(text: &str) -> Result<String, String> {
    if text.starts_with('/') {
        Ok(canonical(text))
    } else {
        Err("a path prefix starts with a slash, as /v1".to_owned())
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => 0,
    };
    let size = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).filter(|_| factor > 0);
    size.ok_or_else(|| "write a number of bytes, or 64k, 10m, 1g".to_owned())
}

pub(crate) async fn run(args: &GateArgs) -> Result<Exit, Failure> {
    let upstream = parse_upstream(&args.upstream)?;
    let connector = connector(args, &upstream)?;
    let mut signals = Signals::listen()?;
    let tell = Tell::new(args.json, args.volume.quiet, args.volume.verbose);
    let listener = listen(&args.listen).await?;
    let address = listener.local_addr().map_err(|error| Failure::new(UNAVAILABLE, error.to_string()))?;
    let store = args.store.clone().map_or_else(|| default_store(&upstream), Ok)?;
    let ledger = Ledger::open(&store).map_err(|error| Failure::new(UNAVAILABLE, error))?;
    let known = ledger.len().map_err(|error| Failure::new(UNAVAILABLE, error))?;
    let cut = tell.clone();
    let admission = Admission::new(ledger, args.drain, move |resource| cut.cut(resource));
    let (stage, _) = watch::channel(Stage::Open);
    let (busy, mut idle) = mpsc::channel::<Infallible>(1);
    let places = Arc::new(Semaphore::new(args.max_connections as usize));
    let failed = |error: std::io::Error| Failure::new(UNAVAILABLE, format!("cannot start a thread: {error}"));
    let listener = listener.into_std().map_err(failed)?;
    let mut workers = Vec::new();
    for number in 0..std::thread::available_parallelism().map_or(1, usize::from) {
        let worker = Worker {
            listener: listener.try_clone().map_err(failed)?,
            gate: Arc::new(gate(args, upstream.clone(), connector.clone(), Arc::clone(&admission), tell.clone())?),
            places: Arc::clone(&places),
            stage: stage.subscribe(),
            busy: busy.clone(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let thread = std::thread::Builder::new().name(format!("gate-{number}"));
        let work = move || {
            runtime.block_on(worker.run());
            // A name that is being looked up does not hold up the end.
            runtime.shutdown_background();
        };
        workers.push(thread.spawn(work).map_err(failed)?);
    }
    drop((listener, busy));
    let place = format!("{}://{}{}", upstream.scheme, upstream.authority, upstream.base);
    tell.ready(&address.to_string(), &place, &store.display().to_string(), known);

    signals.ending().await;
    stage.send_replace(Stage::Ending);
    tell.ending("told to end; requests on their way come to their end");
    tokio::select! {
        _ = idle.recv() => {}
        () = tokio::time::sleep(args.grace) => tell.ending("requests took longer than --grace and were cut off"),
        _ = signals.ending() => tell.ending("told to end once more; requests were cut off"),
    }
    stage.send_replace(Stage::Over);
    for worker in workers {
        // One that panicked has told it already.
        let _ = worker.join();
    }
    tell.flush();
    Ok(Exit::OK)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    /// No connection is taken any more; requests come to their end.
    Ending,
    Over,
}

/// One thread with a runtime and connections to the upstream of its own: a request does not change threads on its way, which costs more
/// than all the rest.
struct Worker {
    listener: std::net::TcpListener,
    gate: Arc<Gate>,
    places: Arc<Semaphore>,
    stage: watch::Receiver<Stage>,
    /// Dropped when its requests have come to their end.
    busy: mpsc::Sender<Infallible>,
}

impl Worker {
    async fn run(self) {
        let Self { listener, gate, places, mut stage, busy } = self;
        let graceful = GracefulShutdown::new();
        // The runtime wakes itself up whenever a timer is set that ends before all others. With one that always ends sooner, those of
        // requests do not.
        let wires = Arc::clone(&gate.wires);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(TICK).await;
                wires.tidy();
            }
        });
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                tokio::select! {
                    () = accept(&listener, &gate, &graceful, &places) => {}
                    _ = stage.wait_for(|stage| *stage != Stage::Open) => {}
                }
            }
            Err(error) => gate.tell.trouble("cannot listen", &error.to_string()),
        }
        tokio::select! {
            () = graceful.shutdown() => {}
            _ = stage.wait_for(|stage| *stage == Stage::Over) => {}
        }
        drop(busy);
        // Requests whose clients went away may still be on their way to the upstream, and whoever waits for them is at another thread.
        let _ = stage.wait_for(|stage| *stage == Stage::Over).await;
    }
}

async fn listen(text: &str) -> Result<TcpListener, Failure> {
    // Every address: that of IPv6 takes IPv4 as well, where there is IPv6.
    let places = if text.starts_with(':') {
        vec![format!("[::]{text}"), format!("0.0.0.0{text}")]
    } else {
        vec![text.to_owned()]
    };
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for place in places {
        addresses.extend(tokio::net::lookup_host(place).await.into_iter().flatten());
    }
    if addresses.is_empty() {
        return Err(Failure::usage(format!(
            "--listen {text:?} is no address with a port; write 127.0.0.1:8080, or :8080 for every address"
        )));
    }
    TcpListener::bind(&addresses[..]).await.map_err(|error| {
        Failure::new(UNAVAILABLE, format!("cannot listen on {text}: {error}; is another program listening there?"))
    })
}

/// One file per upstream, so that two gates of one user do not meet.
fn default_store(upstream: &Upstream) -> Result<PathBuf, Failure> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    let state = state.ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set; give --store FILE"))?;
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' };
    let name: String =
        format!("{}-{}{}", upstream.scheme, upstream.authority, upstream.base).chars().map(plain).collect();
    Ok(state.join("fencelock").join(format!("gate-{name}.redb")))
}

fn connector(args: &GateArgs, upstream: &Upstream) -> Result<Connector, Failure> {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(args.timeout.min(Duration::from_secs(10))));
    let provider = rustls::crypto::ring::default_provider();
    let no_tls = |error: rustls::Error| Failure::new(UNAVAILABLE, format!("cannot set up TLS: {error}"));
    let builder = match &args.upstream_ca {
        None => HttpsConnectorBuilder::new().with_provider_and_webpki_roots(provider).map_err(no_tls)?,
        Some(_) if upstream.scheme != Scheme::HTTPS => {
            return Err(Failure::usage("--upstream-ca is for an --upstream that starts with https://"));
        }
        Some(file) => {
            let config = ClientConfig::builder_with_provider(Arc::new(provider)).with_safe_default_protocol_versions();
            let config = config.map_err(no_tls)?.with_root_certificates(authorities(file)?).with_no_client_auth();
            HttpsConnectorBuilder::new().with_tls_config(config)
        }
    };
    Ok(builder.https_or_http().enable_http1().wrap_connector(tcp))
}

fn authorities(file: &Path) -> Result<RootCertStore, Failure> {
    let wrong = |why: String| {
        Failure::usage(format!("--upstream-ca {}: {why}; give a file of PEM certificates", file.display()))
    };
    let mut authorities = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))? {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        authorities.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    if authorities.is_empty() {
        return Err(wrong("no certificate is in it".to_owned()));
    }
    Ok(authorities)
}

fn gate(
    args: &GateArgs,
    upstream: Upstream,
    connector: Connector,
    admission: Arc<Admission>,
    tell: Tell,
) -> Result<Gate, Failure> {
    let place =
        Uri::builder().scheme(upstream.scheme.clone()).authority(upstream.authority.clone()).path_and_query("/");
    let place = place.build().map_err(|error| Failure::usage(format!("--upstream: {error}")))?;
    let protect = if args.protect.is_empty() { vec!["/".to_owned()] } else { args.protect.clone() };
    Ok(Gate {
        rule: Rule {
            resource: args.resource.clone(),
            protect,
            reads_pass: args.reads_pass,
            header: args.token_header.clone(),
        },
        admission,
        upstream,
        wires: Wires::new(connector, place, args.timeout),
        max_body: args.max_body,
        patience: args.timeout,
        keep_host: args.keep_host,
        tell,
    })
}

/// Takes connections until the end of time.
async fn accept(listener: &TcpListener, gate: &Arc<Gate>, graceful: &GracefulShutdown, places: &Arc<Semaphore>) {
    loop {
        // Nobody closes the semaphore.
        let Ok(place) = Arc::clone(places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let connection = serve(Arc::clone(gate), stream, peer, graceful);
                tokio::spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                // Too many open files, say: others may close some.
                gate.tell.trouble("cannot accept a connection", &error.to_string());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn serve(
    gate: Arc<Gate>,
    stream: TcpStream,
    peer: SocketAddr,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + 'static + use<> {
    let _ = stream.set_nodelay(true);
    let patience = gate.patience;
    let peer = HeaderValue::try_from(peer.ip().to_canonical().to_string());
    let peer = peer.unwrap_or_else(|_| HeaderValue::from_static("unknown"));
    let leash = Arc::<Leash>::default();
    let answers = Arc::clone(&leash);
    let service = service_fn(move |request| {
        let (gate, peer, leash) = (Arc::clone(&gate), peer.clone(), Arc::clone(&answers));
        async move {
            let mut response = gate.handle(request, peer).await;
            if let Body::Relayed(relay) = response.body_mut() {
                relay.leave_by(leash);
            }
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(64 * 1024)
        // Head and body leave together.
        .writev(false)
        .serve_connection(TokioIo::new(stream), service);
    let connection = graceful.watch(connection);
    async move {
        tokio::select! {
            // In this order: an answer that is being written puts itself on the leash.
            biased;
            // A client that went away, or spoke something else than HTTP; hyper has answered what can be answered.
            _ = connection => {}
            () = poll_fn(|cx| leash.poll_cut(cx)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_upstreams_are_read_or_refused() {
        for (text, size) in [("0", 0), ("100", 100), ("64k", 65_536), ("10M", 10 << 20), ("1g", 1 << 30)] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for bad in ["", "k", "-1", "1t", "99999999999g", "1 k", "1.5m"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        let upstream = parse_upstream("http://127.0.0.1:9000/base/").unwrap();
        assert_eq!((upstream.authority.as_str(), upstream.base.as_str()), ("127.0.0.1:9000", "/base"));
        for bad in ["", "/x", "ftp://x", "host:1", "http://", "http://user:secret@x", "http://x?q=1"] {
            let error = parse_upstream(bad).unwrap_err();
            assert!(!error.text.contains("secret"), "{error}");
        }
    }
}
