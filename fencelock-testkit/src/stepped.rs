//! A future under manual control: it is polled only when the test says so, and can be dropped at every point where it
//! waits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use tokio::sync::Notify;

/// After this long without being woken, a future waits for something that does not come by itself.
const CALM: Duration = Duration::from_millis(50);

/// A future that is polled by hand.
pub struct Stepped<F: Future> {
    future: Pin<Box<F>>,
    bell: Arc<Bell>,
}

#[derive(Default)]
struct Bell(Notify);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

impl<F: Future> Stepped<F> {
    /// Takes a future under control. Nothing of it has run yet.
    pub fn new(future: F) -> Self {
        Self { future: Box::pin(future), bell: Arc::default() }
    }

    /// Polls once.
    pub fn poll(&mut self) -> Option<F::Output> {
        let waker = Waker::from(Arc::clone(&self.bell));
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(out) => Some(out),
            Poll::Pending => None,
        }
    }

    /// Waits until the future wants to be polled again; false if it seems to wait for something that does not come by
    /// itself.
    pub async fn woken(&self) -> bool {
        tokio::time::timeout(CALM, self.bell.0.notified()).await.is_ok()
    }

    /// Polls so many times, each time after it was woken. The output if it was done by then.
    pub async fn steps(&mut self, polls: usize) -> Option<F::Output> {
        for _ in 0..polls {
            if let Some(out) = self.poll() {
                return Some(out);
            }
            self.woken().await;
        }
        None
    }

    /// Polls until it waits for something that does not come by itself. The output if it never does.
    pub async fn until_parked(&mut self) -> Option<F::Output> {
        loop {
            if let Some(out) = self.poll() {
                return Some(out);
            }
            if !self.woken().await {
                return None;
            }
        }
    }

    /// Lets it run to its end.
    pub async fn finish(self) -> F::Output {
        self.future.await
    }
}
