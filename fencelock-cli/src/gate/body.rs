//! Bodies that stream through the gate: with a limit, a patience, and an end when the request is cut off.

use super::admit::Flight;
use super::wire::Rest;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// What the gate answers with: its own words, or what streams from the upstream.
pub(crate) enum Body {
    Own(Option<Bytes>),
    Relayed(Box<Relay>),
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Body::Own(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Body::Relayed(relay) => Pin::new(relay).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Own(text) => text.is_none(),
            Body::Relayed(relay) => relay.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Own(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Body::Relayed(relay) => relay.size_hint(),
        }
    }
}

type Cut = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What a client's connection and the answer on it share. While the client takes nothing, nobody asks the answer for more, nor whether it was cut
/// off; so the connection asks here.
#[derive(Default)]
pub(crate) struct Leash(Mutex<Option<Cut>>);

impl Leash {
    /// Resolves when the answer that is on its way was cut off.
    pub(crate) fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.lock().as_mut().map_or(Poll::Pending, |cut| cut.as_mut().poll(cx))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Cut>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far an upload is, and why it did not come to its end; kept where the one who waits for the answer can see it.
#[derive(Debug)]
pub(crate) struct Course {
    begun: Instant,
    /// When something came last, in milliseconds since then.
    last: AtomicU64,
    /// Nothing is left to come.
    ended: AtomicBool,
    reason: AtomicU8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    TooLong = 1,
    Stalled = 2,
    Broken = 3,
    Cut = 4,
}

impl Reason {
    fn error(self) -> BodyError {
        match self {
            Reason::TooLong => "the body is longer than --max-body",
            Reason::Stalled => "the body has stalled for longer than --timeout",
            Reason::Broken => "the body broke off",
            Reason::Cut => "cut off, because a newer token was let in",
        }
        .into()
    }
}

impl Course {
    fn new(ended: bool) -> Self {
        let (last, ended, reason) = (AtomicU64::new(0), AtomicBool::new(ended), AtomicU8::new(0));
        Self { begun: Instant::now(), last, ended, reason }
    }

    fn came(&self, ended: bool) {
        let span = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(span, Ordering::Relaxed);
        self.ended.store(ended, Ordering::Relaxed);
    }

    /// When the answer is overdue. While a body is on its way it watches over that itself; but not when it is the upstream that does not
    /// take it.
    pub(crate) fn due(&self, patience: Duration) -> Instant {
        let last = self.begun + Duration::from_millis(self.last.load(Ordering::Relaxed));
        last + if self.ended.load(Ordering::Relaxed) { patience } else { patience * 2 }
    }

    pub(crate) fn reason(&self) -> Option<Reason> {
        match self.reason.load(Ordering::Acquire) {
            1 => Some(Reason::TooLong),
            2 => Some(Reason::Stalled),
            3 => Some(Reason::Broken),
            4 => Some(Reason::Cut),
            _ => None,
        }
    }
}

/// A body on its way through, in either direction.
pub(crate) struct Relay {
    /// Taken out only when this is dropped.
    inner: Option<Incoming>,
    /// The request is not over while its bodies stream.
    flight: Option<Flight>,
    /// Made when there is something to wait for.
    cut: Option<Cut>,
    left: u64,
    patience: Duration,
    /// Runs while nothing comes.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Of an upload: for whoever waits for the answer.
    course: Option<Arc<Course>>,
    /// Of an answer: the connection that it comes from, until it has done all that the request needs.
    rest: Option<Rest>,
    /// Of an answer: that of the client's connection, and whether it holds this one.
    leash: Option<Arc<Leash>>,
    leashed: bool,
    ended: bool,
    failed: bool,
    /// Nobody wants it any more.
    alone: bool,
}

impl Relay {
    /// The body of a request.
    pub(crate) fn upload(
        inner: Incoming,
        flight: Option<Flight>,
        limit: u64,
        patience: Duration,
    ) -> (Self, Arc<Course>) {
        let course = Arc::new(Course::new(inner.is_end_stream()));
        let flight = flight.filter(|_| !inner.is_end_stream());
        let mut relay = Self::new(inner, flight, limit, patience);
        relay.course = Some(Arc::clone(&course));
        (relay, course)
    }

    /// The body of an answer. It is read to its end also when nobody wants it any more: only then is the upstream done.
    pub(crate) fn answer(inner: Incoming, flight: Option<Flight>, rest: Option<Rest>, patience: Duration) -> Self {
        let flight = flight.filter(|_| !inner.is_end_stream() || rest.is_some());
        let mut relay = Self::new(inner, flight, u64::MAX, patience);
        relay.rest = rest;
        relay
    }

    fn new(inner: Incoming, flight: Option<Flight>, limit: u64, patience: Duration) -> Self {
        let ended = inner.is_end_stream();
        Self {
            inner: Some(inner),
            flight,
            cut: None,
            left: limit,
            patience,
            stalled: None,
            course: None,
            rest: None,
            leash: None,
            leashed: false,
            ended,
            failed: false,
            alone: false,
        }
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(flight) = &self.flight else { return Poll::Pending };
        self.cut.get_or_insert_with(|| Box::pin(flight.cut())).as_mut().poll(cx)
    }

    /// Of an answer: the connection that it leaves by.
    pub(crate) fn leave_by(&mut self, leash: Arc<Leash>) {
        self.leash = Some(leash);
    }

    /// From here on the client may keep the answer waiting. Short ones never come here.
    fn put_on_leash(&mut self) {
        if let (Some(leash), Some(flight), false) = (&self.leash, &self.flight, self.leashed) {
            *leash.lock() = Some(Box::pin(flight.cut()));
            self.leashed = true;
        }
    }

    fn fail(&mut self, reason: Reason) {
        self.failed = true;
        if let Some(course) = &self.course {
            course.reason.store(reason as u8, Ordering::Release);
        }
    }

    fn end(&mut self) {
        self.ended = true;
        if self.rest.is_none() {
            self.flight = None;
        }
    }

    /// Reads what is left, and lets the connection do what is left to do.
    async fn run_out(mut self) {
        while !self.ended && !self.failed {
            let _ = poll_fn(|cx| Pin::new(&mut self).poll_frame(cx)).await;
        }
        if let Some(mut rest) = self.rest.take().filter(|_| !self.failed) {
            // The upstream may have stopped to take the upload: then nobody asks the upload whether it was cut off.
            poll_fn(|cx| {
                let over = rest.poll(cx).is_ready() || self.poll_cut(cx).is_ready() || rest.poll_overdue(cx).is_ready();
                if over { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
    }
}

impl HttpBody for Relay {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let failed = |this: &mut Self, reason: Reason| {
            this.fail(reason);
            Poll::Ready(Some(Err(reason.error())))
        };
        // Also when there is data: after the cut not a byte goes on.
        if this.flight.as_ref().is_some_and(Flight::is_cut) {
            return failed(this, Reason::Cut);
        }
        if this.rest.as_mut().is_some_and(|rest| rest.poll(cx).is_ready()) {
            this.rest = None;
        }
        let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
        let Poll::Ready(frame) = Pin::new(&mut *inner).poll_frame(cx) else {
            if this.poll_cut(cx).is_ready() {
                return failed(this, Reason::Cut);
            }
            let patience = this.patience;
            let stalled = this.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
            ready!(stalled.as_mut().poll(cx));
            return failed(this, Reason::Stalled);
        };
        let ended = frame.is_none() || inner.is_end_stream();
        this.stalled = None;
        if let Some(course) = &this.course {
            course.came(ended);
        }
        let frame = match frame {
            None => {
                this.end();
                return Poll::Ready(None);
            }
            Some(Err(error)) => {
                this.fail(Reason::Broken);
                return Poll::Ready(Some(Err(error.into())));
            }
            Some(Ok(frame)) => frame,
        };
        let length = frame.data_ref().map_or(0, |data| data.len() as u64);
        let Some(left) = this.left.checked_sub(length) else { return failed(this, Reason::TooLong) };
        this.left = left;
        if ended {
            this.end();
        } else {
            this.put_on_leash();
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map(Incoming::size_hint).unwrap_or_default()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(leash) = self.leash.take().filter(|_| self.leashed) {
            *leash.lock() = None;
        }
        // The upstream is still at work: on an answer that a newer token has to wait for, or on an upload that it answered before its end.
        let at_work = if self.ended { self.rest.is_some() } else { self.flight.is_some() };
        if self.course.is_some() || self.failed || self.alone || !at_work {
            return;
        }
        let (Ok(runtime), Some(inner)) = (tokio::runtime::Handle::try_current(), self.inner.take()) else { return };
        let mut left = Relay::answer(inner, self.flight.take(), self.rest.take(), self.patience);
        left.alone = true;
        runtime.spawn(left.run_out());
    }
}
