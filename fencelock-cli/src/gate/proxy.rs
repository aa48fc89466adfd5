//! One request through the gate: judged, let in, handed to the upstream, and its answer handed back.

use super::admit::{Admission, Answer, Flight};
use super::body::{Body, BodyError, Course, Reason, Relay};
use super::rule::{Demand, Refusal, Rule};
use super::tell::Tell;
use super::wire::{Rest, Wire, Wires};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use serde_json::json;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// What belongs to one connection and is not handed on; besides these, what `Connection` names.
static HOP_BY_HOP: [HeaderName; 9] = [
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
const OURSELVES: HeaderValue = HeaderValue::from_static("1.1 fencelock");

/// Where requests go.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    /// What is put in front of every path; no slash at its end.
    pub(crate) base: String,
    /// Its name, as it stands in requests.
    pub(crate) host: HeaderValue,
}

pub(crate) struct Gate {
    pub(crate) rule: Rule,
    pub(crate) admission: Arc<Admission>,
    pub(crate) upstream: Upstream,
    pub(crate) wires: Arc<Wires>,
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
    /// Answers one request of a client, whose address is given.
    pub(crate) async fn handle(self: &Arc<Self>, request: Request<Incoming>, peer: HeaderValue) -> Response<Body> {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        match self.serve(request, peer).await {
            Ok(response) => {
                self.tell.passed(&method, uri.path(), response.status());
                response
            }
            Err(word) => {
                self.tell.refused(&method, uri.path(), word.status, word.code, &word.text);
                self.answer(&word)
            }
        }
    }

    async fn serve(self: &Arc<Self>, request: Request<Incoming>, peer: HeaderValue) -> Result<Response<Body>, Word> {
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
        // When the client goes away, the upstream may still be at work, and a newer token must wait for that.
        Steadfast(Some(Box::pin(Arc::clone(self).exchange(request, peer, flight)))).await
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
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: HeaderValue,
        flight: Option<Flight>,
    ) -> Result<Response<Body>, Word> {
        let (parts, body) = request.into_parts();
        let (upload, course) = Relay::upload(body, flight.clone(), self.max_body, self.patience);
        let mut outgoing = Request::new(Box::new(upload));
        *outgoing.method_mut() = parts.method;
        *outgoing.headers_mut() = self.outgoing_headers(parts.headers, &parts.uri, peer);
        *outgoing.uri_mut() = self.target(parts.uri)?;
        let outcome = self.ask(outgoing, flight.as_ref(), &course).await;
        // The upload knows better what went wrong than the connection that broke because of it.
        let outcome = match (outcome, course.reason()) {
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
        let (response, wire) = outcome?;
        let (mut parts, body) = response.into_parts();
        strip(&mut parts.headers);
        parts.version = Version::HTTP_11;
        append(&mut parts.headers, header::VIA, OURSELVES);
        let relay = Relay::answer(body, flight, Rest::of(wire, &self.wires, &course), self.patience);
        Ok(Response::from_parts(parts, Body::Relayed(Box::new(relay))))
    }

    /// Sends a request to the upstream, and waits until its answer begins. One that cannot have been sent, because the connection had been closed
    /// since it was used last, is sent over another; no request is sent twice.
    async fn ask(
        &self,
        mut request: Request<Box<Relay>>,
        flight: Option<&Flight>,
        course: &Course,
    ) -> Result<(Response<Incoming>, Box<Wire>), Word> {
        let mut cut = pin!(maybe(flight.map(Flight::cut)));
        loop {
            let (mut wire, used) = match self.wires.again() {
                Some(wire) => (wire, true),
                None => tokio::select! {
                    // Not often, and long: it is kept out of the way of those who need no new one.
                    wire = Box::pin(self.wires.connect()) => (wire.map_err(|error| self.unreachable(error))?, false),
                    () = &mut cut => return Err(cut_off()),
                    () = tokio::time::sleep_until(course.due(self.patience)) => return Err(self.late()),
                },
            };
            let mut answer = pin!(wire.send(request));
            let outcome = poll_fn(|cx| {
                wire.advance(cx);
                if let Poll::Ready(outcome) = answer.as_mut().poll(cx) {
                    return Poll::Ready(Ok(outcome));
                }
                if cut.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Err(cut_off()));
                }
                wire.poll_overdue(cx, || course.due(self.patience)).map(|()| Err(self.late()))
            });
            match outcome.await? {
                Ok(response) => return Ok((response, wire)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) if used => request = unsent,
                    _ => return Err(self.broken(&error.into_error())),
                },
            }
        }
    }

    fn target(&self, uri: Uri) -> Result<Uri, Word> {
        let wrong = || Word::new(StatusCode::BAD_REQUEST, "malformed", "the request's path cannot be handed on");
        let asked = uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let path = match self.upstream.base.as_str() {
            "" => asked,
            base => PathAndQuery::try_from(format!("{base}{asked}")).map_err(|_| wrong())?,
        };
        let mut parts = hyper::http::uri::Parts::default();
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).map_err(|_| wrong())
    }

    fn outgoing_headers(&self, mut headers: HeaderMap, uri: &Uri, peer: HeaderValue) -> HeaderMap {
        strip(&mut headers);
        let asked = uri.authority().and_then(|authority| authority.as_str().parse().ok());
        let asked = asked.or_else(|| headers.get(header::HOST).cloned());
        let host = asked.as_ref().filter(|_| self.keep_host).unwrap_or(&self.upstream.host);
        headers.insert(header::HOST, host.clone());
        if let Some(asked) = asked {
            headers.entry(FORWARDED_HOST).or_insert(asked);
        }
        append(&mut headers, FORWARDED_FOR, peer);
        append(&mut headers, header::VIA, OURSELVES);
        headers
    }

    fn unreachable(&self, error: BodyError) -> Word {
        let place = format!("{}://{}", self.upstream.scheme, self.upstream.authority);
        let text = format!("cannot connect to the upstream {place}; nothing was done; is it running?");
        self.tell.trouble(&text, &causes(&*error));
        Word::new(StatusCode::BAD_GATEWAY, "unreachable", text)
    }

    fn broken(&self, error: &hyper::Error) -> Word {
        let place = format!("{}://{}", self.upstream.scheme, self.upstream.authority);
        let text = format!("the upstream {place} broke the connection before it answered; the outcome is not known");
        self.tell.trouble(&text, &causes(error));
        Word::new(StatusCode::BAD_GATEWAY, "broken_upstream", text)
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

fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    all.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

async fn maybe(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// A request on its way. It goes on when nobody waits for its outcome any more.
struct Steadfast<F: Future<Output: Send> + Send + 'static>(Option<Pin<Box<F>>>);

impl<F: Future<Output = Result<Response<Body>, Word>> + Send> Future for Steadfast<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(future) = &mut self.0 else { return Poll::Pending };
        let outcome = match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(outcome)) => outcome,
            Err(_) => Err(Word::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal",
                "the gate failed; the outcome is not known",
            )),
        };
        self.0 = None;
        Poll::Ready(outcome)
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Steadfast<F> {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// Adds to a list that one header holds.
fn append(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) {
    let Some(before) = headers.get(&name) else {
        headers.insert(name, value);
        return;
    };
    let all = [before.as_bytes(), b", ", value.as_bytes()].concat();
    if let Ok(all) = HeaderValue::from_bytes(&all) {
        headers.insert(name, all);
    }
}

/// Takes out what belongs to one connection.
fn strip(headers: &mut HeaderMap) {
    if !headers.keys().any(|name| HOP_BY_HOP.contains(name)) {
        return;
    }
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
