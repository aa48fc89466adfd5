//! Bodies that stream through the gate: with a limit, a patience, and an end when the request is cut off.

use super::admit::Flight;
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::watch;
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

/// Why a body did not come to its end; kept where the one who answers the request can see it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending(Arc<AtomicU8>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    TooLong = 1,
    Stalled = 2,
    Broken = 3,
    Cut = 4,
}

impl Ending {
    fn set(&self, reason: Reason) -> BodyError {
        self.0.store(reason as u8, Ordering::Release);
        match reason {
            Reason::TooLong => "the body is longer than --max-body",
            Reason::Stalled => "the body has stalled for longer than --timeout",
            Reason::Broken => "the body broke off",
            Reason::Cut => "cut off, because a newer token was let in",
        }
        .into()
    }

    pub(crate) fn reason(&self) -> Option<Reason> {
        match self.0.load(Ordering::Acquire) {
            1 => Some(Reason::TooLong),
            2 => Some(Reason::Stalled),
            3 => Some(Reason::Broken),
            4 => Some(Reason::Cut),
            _ => None,
        }
    }
}

/// How far an upload is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) last: Instant,
    pub(crate) ended: bool,
}

/// A body on its way through, in either direction.
pub(crate) struct Relay {
    /// Taken out only when this is dropped.
    inner: Option<Incoming>,
    /// The request is not over while its bodies stream.
    flight: Option<Flight>,
    /// Made when there is something to wait for.
    cut: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    left: u64,
    patience: Duration,
    /// Runs while nothing comes.
    stalled: Option<Pin<Box<Sleep>>>,
    ending: Ending,
    /// When something came last, until there is nothing to come; for whoever waits for the answer.
    progress: Option<watch::Sender<Progress>>,
    /// It is read to its end also when nobody wants it any more: only then is the upstream done.
    to_the_end: bool,
    ended: bool,
}

impl Relay {
    pub(crate) fn new(inner: Incoming, flight: Option<Flight>, limit: u64, patience: Duration) -> Self {
        let ended = inner.is_end_stream();
        let (cut, stalled, ending) = (None, None, Ending::default());
        let (inner, progress) = (Some(inner), None);
        Self { inner, flight, cut, left: limit, patience, stalled, ending, progress, to_the_end: false, ended }
    }

    /// Reads on after the reader went away.
    pub(crate) fn read_to_the_end(mut self) -> Self {
        self.to_the_end = true;
        self
    }

    /// Tells when something came.
    pub(crate) fn telling(mut self, progress: watch::Sender<Progress>) -> Self {
        self.progress = Some(progress);
        self
    }

    pub(crate) fn ending(&self) -> Ending {
        self.ending.clone()
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(flight) = &self.flight else { return Poll::Pending };
        self.cut.get_or_insert_with(|| Box::pin(flight.cut())).as_mut().poll(cx)
    }
}

impl HttpBody for Relay {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        // Also when there is data: after the cut not a byte goes on.
        if this.flight.as_ref().is_some_and(Flight::is_cut) {
            return Poll::Ready(Some(Err(this.ending.set(Reason::Cut))));
        }
        let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
        let Poll::Ready(frame) = Pin::new(&mut *inner).poll_frame(cx) else {
            if this.poll_cut(cx).is_ready() {
                return Poll::Ready(Some(Err(this.ending.set(Reason::Cut))));
            }
            let patience = this.patience;
            let stalled = this.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
            ready!(stalled.as_mut().poll(cx));
            return Poll::Ready(Some(Err(this.ending.set(Reason::Stalled))));
        };
        this.stalled = None;
        if let Some(progress) = &this.progress {
            progress.send_replace(Progress { last: Instant::now(), ended: frame.is_none() || inner.is_end_stream() });
        }
        let frame = match frame {
            None => {
                this.ended = true;
                this.flight = None;
                return Poll::Ready(None);
            }
            Some(Err(error)) => {
                let _ = this.ending.set(Reason::Broken);
                return Poll::Ready(Some(Err(error.into())));
            }
            Some(Ok(frame)) => frame,
        };
        let length = frame.data_ref().map_or(0, |data| data.len() as u64);
        let Some(left) = this.left.checked_sub(length) else {
            return Poll::Ready(Some(Err(this.ending.set(Reason::TooLong))));
        };
        this.left = left;
        if inner.is_end_stream() {
            this.ended = true;
            this.flight = None;
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
        let failed = self.ending.reason().is_some();
        if !self.to_the_end || self.ended || failed || self.flight.is_none() {
            return;
        }
        let (Ok(runtime), Some(inner)) = (tokio::runtime::Handle::try_current(), self.inner.take()) else { return };
        let mut rest = Relay::new(inner, self.flight.take(), u64::MAX, self.patience);
        runtime.spawn(async move {
            while let Some(Ok(_)) = std::future::poll_fn(|cx| Pin::new(&mut rest).poll_frame(cx)).await {}
        });
    }
}
