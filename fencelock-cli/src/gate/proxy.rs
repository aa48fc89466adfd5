//! One request through the gate: judged, let in, handed to the upstream, and its answer handed back.

use super::admit::{Admission, Answer, Flight};
use super::body::{Body, Progress, Reason, Relay};
use super::rule::{Demand, Refusal, Rule};
use super::tell::Tell;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::json;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// What belongs to one connection and is not handed on; besides these, what `Connection` names.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

pub(crate) type Upstreams = Client<HttpsConnector<HttpConnector>, Relay>;

/// Where requests go.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    /// What is put in front of every path; no slash at its end.
    pub(crate) base: String,
}

pub(crate) struct Gate {
    pub(crate) rule: Rule,
    pub(crate) admission: Arc<Admission>,
    pub(crate) upstream: Upstream,
    pub(crate) client: Upstreams,
    pub(crate) max_body: u64,
    /// How long a body or an answer may keep us waiting.
    pub(crate) patience: Duration,
    pub(crate) keep_host: bool,
    pub(crate) tell: Tell,
}

/// An answer of the gate's own.
struct Word {
    status: StatusCode,
    code: &'static str,
    text: String,
    newest: Option<u64>,
}

impl Word {
    fn new(status: StatusCode, code: &'static str, text: impl Into<String>) -> Self {
        Self { status, code, text: text.into(), newest: None }
    }
}

impl Gate {
    pub(crate) async fn handle(self: &Arc<Self>, request: Request<Incoming>, peer: IpAddr) -> Response<Body> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        match self.serve(request, peer).await {
            Ok(response) => {
                self.tell.passed(&method, &path, response.status());
                response
            }
            Err(word) => {
                self.tell.refused(&method, &path, word.status, word.code, &word.text);
                self.answer(&word)
            }
        }
    }

    async fn serve(self: &Arc<Self>, request: Request<Incoming>, peer: IpAddr) -> Result<Response<Body>, Word> {
        if *request.method() == Method::CONNECT {
            return Err(Word::new(StatusCode::METHOD_NOT_ALLOWED, "method", "the gate makes no tunnels"));
        }
        let demand = self.rule.demand(request.method(), request.uri(), request.headers());
        let demand = demand.map_err(|refusal| self.turn_down(refusal))?;
        if request.body().size_hint().lower() > self.max_body {
            return Err(self.too_long());
        }
        let flight = match demand {
            Demand::None => None,
            Demand::Token { resource, token } => Some(self.let_in(&resource, token).await?),
        };
        // On a task of its own: when the client goes away, the upstream may still be at work, and a newer token must wait for that.
        let gate = Arc::clone(self);
        let exchange = tokio::spawn(async move { gate.exchange(request, peer, flight).await });
        match exchange.await {
            Ok(outcome) => outcome,
            Err(_) => Err(Word::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                "the gate failed; the outcome is not known",
            )),
        }
    }

    fn turn_down(&self, refusal: Refusal) -> Word {
        match refusal {
            Refusal::NoToken => Word::new(
                StatusCode::PRECONDITION_REQUIRED,
                "token_required",
                format!("this resource is fenced: send the lock's token in the header {}", self.rule.header),
            ),
            Refusal::Malformed(text) => Word::new(StatusCode::BAD_REQUEST, "malformed", text),
        }
    }

    fn too_long(&self) -> Word {
        let text = format!("the body is longer than the {} bytes that --max-body allows", self.max_body);
        Word::new(StatusCode::PAYLOAD_TOO_LARGE, "too_long", text)
    }

    async fn let_in(&self, resource: &str, token: u64) -> Result<Flight, Word> {
        match self.admission.ask(resource, token).await {
            Answer::Admitted(flight) => Ok(flight),
            Answer::Old { newest } => Err(Word {
                newest: Some(newest),
                ..Word::new(
                    StatusCode::PRECONDITION_FAILED,
                    "fenced",
                    format!(
                        "{resource} refused token {token}: it has seen the newer token {newest}, so this lock was lost; nothing was done"
                    ),
                )
            }),
            Answer::NotKept(error) => {
                self.tell.trouble("the store cannot keep a token, so nobody is let in with it", &error);
                let text = "the gate cannot keep this token, so it lets nobody in with it; nothing was done";
                Err(Word::new(StatusCode::SERVICE_UNAVAILABLE, "store", text))
            }
        }
    }

    async fn exchange(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        flight: Option<Flight>,
    ) -> Result<Response<Body>, Word> {
        let (parts, body) = request.into_parts();
        let bodiless = body.is_end_stream();
        let (sender, progress) = watch::channel(Progress { last: Instant::now(), ended: bodiless });
        let mut upload = Relay::new(body, flight.clone().filter(|_| !bodiless), self.max_body, self.patience);
        if !bodiless {
            upload = upload.telling(sender);
        }
        let ending = upload.ending();
        let mut outgoing = Request::new(upload);
        *outgoing.method_mut() = parts.method;
        *outgoing.uri_mut() = self.target(&parts.uri)?;
        *outgoing.headers_mut() = self.outgoing_headers(parts.headers, &parts.uri, peer);
        let cut = flight.as_ref().map(Flight::cut);
        let outcome = {
            let answer = self.client.request(outgoing);
            tokio::pin!(answer);
            tokio::select! {
                outcome = &mut answer => outcome.map_err(|error| self.failed(&error)),
                () = maybe(cut) => Err(cut_off()),
                () = overdue(progress, self.patience) => Err(self.late()),
            }
        };
        // The upload knows better what went wrong than the connection that broke because of it.
        let outcome = match (outcome, ending.reason()) {
            (Err(_), Some(Reason::TooLong)) => Err(self.too_long()),
            (Err(_), Some(Reason::Stalled)) => {
                Err(Word::new(StatusCode::REQUEST_TIMEOUT, "stalled", "the body stalled for longer than --timeout"))
            }
            (Err(_), Some(Reason::Broken)) => Err(Word::new(
                StatusCode::BAD_REQUEST,
                "broken",
                "the body broke off; the upstream did not get all of it",
            )),
            (Err(_), Some(Reason::Cut)) => Err(cut_off()),
            (outcome, _) => outcome,
        };
        let (mut parts, body) = outcome?.into_parts();
        strip(&mut parts.headers);
        parts.version = Version::HTTP_11;
        append(&mut parts.headers, header::VIA, "1.1 fencelock");
        let relay = Relay::new(body, flight, u64::MAX, self.patience).read_to_the_end();
        Ok(Response::from_parts(parts, Body::Relayed(Box::new(relay))))
    }

    fn target(&self, uri: &Uri) -> Result<Uri, Word> {
        let wrong = || Word::new(StatusCode::BAD_REQUEST, "malformed", "the request's path cannot be handed on");
        let asked = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let path = match self.upstream.base.as_str() {
            "" => uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")),
            base => PathAndQuery::try_from(format!("{base}{asked}")).map_err(|_| wrong())?,
        };
        let mut parts = hyper::http::uri::Parts::default();
        parts.scheme = Some(self.upstream.scheme.clone());
        parts.authority = Some(self.upstream.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).map_err(|_| wrong())
    }

    fn outgoing_headers(&self, mut headers: HeaderMap, uri: &Uri, peer: IpAddr) -> HeaderMap {
        strip(&mut headers);
        let host = uri.authority().and_then(|authority| authority.as_str().parse().ok());
        let host = host.or_else(|| headers.get(header::HOST).cloned());
        // Without one, the client writes that of the upstream.
        headers.remove(header::HOST);
        if let Some(host) = host {
            if self.keep_host {
                headers.insert(header::HOST, host.clone());
            }
            headers.entry(FORWARDED_HOST).or_insert(host);
        }
        append(&mut headers, FORWARDED_FOR, &peer.to_string());
        append(&mut headers, header::VIA, "1.1 fencelock");
        headers
    }

    fn failed(&self, error: &hyper_util::client::legacy::Error) -> Word {
        let mut causes = Vec::new();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let place = format!("{}://{}", self.upstream.scheme, self.upstream.authority);
        let text = if error.is_connect() {
            format!("cannot connect to the upstream {place}; nothing was done; is it running?")
        } else {
            format!("the upstream {place} broke the connection before it answered; the outcome is not known")
        };
        self.tell.trouble(&text, &causes.join(": "));
        Word::new(StatusCode::BAD_GATEWAY, if error.is_connect() { "unreachable" } else { "broken_upstream" }, text)
    }

    fn late(&self) -> Word {
        let text = format!("the upstream did not answer within {:?}; the outcome is not known", self.patience);
        self.tell.trouble(&text, "--timeout");
        Word::new(StatusCode::GATEWAY_TIMEOUT, "late_upstream", text)
    }

    fn answer(&self, word: &Word) -> Response<Body> {
        let mut text = json!({ "error": word.code, "message": word.text });
        if let Some(newest) = word.newest {
            text["newest"] = newest.into();
        }
        let mut response = Response::new(Body::Own(Some(Bytes::from(format!("{text}\n")))));
        *response.status_mut() = word.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(newest) = word.newest {
            headers.insert(self.rule.header.clone(), newest.into());
        }
        if word.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

fn cut_off() -> Word {
    let text = "cut off, because a newer token is to be let in; the upstream may have carried it out or not";
    Word::new(StatusCode::CONFLICT, "cut_off", text)
}

async fn maybe(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Resolves when nothing has happened for so long. While a body is on its way it watches over that itself; but not when it is the upstream
/// that does not take it.
async fn overdue(progress: watch::Receiver<Progress>, patience: Duration) {
    loop {
        let now = *progress.borrow();
        let due = now.last + if now.ended { patience } else { patience * 2 };
        if due <= Instant::now() {
            return;
        }
        tokio::time::sleep_until(due).await;
    }
}

fn append(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    let before = headers.get(&name).and_then(|before| before.to_str().ok());
    let all = before.map_or_else(|| value.to_owned(), |before| format!("{before}, {value}"));
    if let Ok(all) = all.parse() {
        headers.insert(name, all);
    }
}

/// Takes out what belongs to one connection.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}
