//! Waiting for changes of keys: one stream for each runtime carries all watches of its waiters.
//!
//! Each watch is good for one event. When the stream breaks, all that are left start again on the next one from the revision
//! that they began with, so nothing is missed; what the server has forgotten by then (compaction) is told as such.

use super::link::{Home, Link, lock};
use super::proto::{WatchCancelRequest, WatchCreateRequest, WatchOrder, WatchRequest, WatchResponse};
use futures_util::stream;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tonic::Streaming;

/// What a watch tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// It began while the store was further than its revision: what happened before is told late (within 100 ms). Who is in a
    /// hurry looks.
    Behind,
    /// Something happened. The last note.
    Happened,
    /// What happened since the revision is not known any more. The last note.
    Missed,
}

enum Order {
    Watch(WatchCreateRequest, mpsc::UnboundedSender<Note>),
    Forget(i64),
}

/// The watches of one runtime.
pub(super) struct Watcher {
    orders: mpsc::UnboundedSender<Order>,
    next: AtomicI64,
}

/// One watch. It ends when this is dropped.
pub(super) struct Watching {
    id: i64,
    watcher: Arc<Watcher>,
    notes: mpsc::UnboundedReceiver<Note>,
    /// The last note has come.
    over: bool,
}

impl Watcher {
    /// Starts to watch on the present runtime.
    pub(super) fn begin(link: &Arc<Link>, mut request: WatchCreateRequest) -> Watching {
        let watcher = Self::of(link, &link.home());
        let id = watcher.next.fetch_add(1, Ordering::Relaxed);
        request.watch_id = id;
        let (tell, notes) = mpsc::unbounded_channel();
        let _ = watcher.orders.send(Order::Watch(request, tell));
        Watching { id, watcher, notes, over: false }
    }

    fn of(link: &Arc<Link>, home: &Arc<Home>) -> Arc<Self> {
        let mut slot = lock(&home.watcher);
        let watcher = slot.get_or_insert_with(|| {
            let (orders, taken) = mpsc::unbounded_channel();
            let task = Task {
                link: Arc::downgrade(link),
                given_up: home.given_up.subscribe(),
                orders: taken,
                watches: HashMap::new(),
                spent: Vec::new(),
            };
            tokio::spawn(task.run());
            Arc::new(Self { orders, next: AtomicI64::new(1) })
        });
        Arc::clone(watcher)
    }
}

impl Watching {
    /// The next note. `None` when the runtime is going away.
    pub(super) async fn next(&mut self) -> Option<Note> {
        let note = self.notes.recv().await;
        self.over = note != Some(Note::Behind);
        note
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.watcher.orders.send(Order::Forget(self.id));
        }
    }
}

struct Task {
    /// Weak: the link owns the watcher.
    link: Weak<Link>,
    given_up: watch::Receiver<u64>,
    orders: mpsc::UnboundedReceiver<Order>,
    watches: HashMap<i64, (WatchCreateRequest, mpsc::UnboundedSender<Note>)>,
    /// Watches that have told what they were for, and that the server still has.
    spent: Vec<i64>,
}

/// How long the server keeps a watch that is spent: it is not bothered while the one who was told asks.
const SPENT: Duration = Duration::from_millis(100);

/// Why a stream came to its end.
enum End {
    /// The connection; another one is made.
    Broken,
    /// Nobody is left who could give orders.
    Over,
}

impl Task {
    async fn run(mut self) {
        let mut pause = Duration::from_millis(20);
        loop {
            while self.watches.is_empty() {
                match self.orders.recv().await {
                    Some(order) => drop(self.take(order)),
                    None => return,
                }
            }
            let started = Instant::now();
            match self.stream().await {
                End::Over => return,
                End::Broken if started.elapsed() > Duration::from_secs(1) => pause = Duration::from_millis(20),
                End::Broken => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
            }
        }
    }

    /// One stream, from its beginning to its end.
    async fn stream(&mut self) -> End {
        let Some(link) = self.link.upgrade() else { return End::Over };
        self.given_up.borrow_and_update();
        self.spent.clear();
        let (to_server, mut requests) = mpsc::unbounded_channel();
        for (request, _) in self.watches.values() {
            let _ = to_server.send(create(request.clone()));
        }
        let requests = stream::poll_fn(move |context| requests.poll_recv(context));
        let opened = {
            let mut opening = pin!(link.watch(requests));
            loop {
                tokio::select! {
                    opened = &mut opening => break opened,
                    order = self.orders.recv() => match order {
                        Some(order) => send(&to_server, self.take(order)),
                        None => return End::Over,
                    },
                }
            }
        };
        drop(link);
        match opened {
            Ok(stream) => self.follow(stream, &to_server).await,
            Err(fault) => {
                if fault.stale_token
                    && let Some(link) = self.link.upgrade()
                {
                    link.log_in_again();
                }
                tracing::debug!("watching: {}", fault.error);
                End::Broken
            }
        }
    }

    async fn follow(
        &mut self,
        mut stream: Streaming<WatchResponse>,
        to_server: &mpsc::UnboundedSender<WatchRequest>,
    ) -> End {
        let mut tidy = pin!(tokio::time::sleep(SPENT));
        loop {
            tokio::select! {
                answer = stream.message() => match answer {
                    Ok(Some(answer)) => {
                        if self.spent.is_empty() {
                            tidy.as_mut().reset(Instant::now() + SPENT);
                        }
                        send(to_server, self.hear(&answer));
                    }
                    Ok(None) => return End::Broken,
                    Err(status) => {
                        tracing::debug!("watching: {}", status.message());
                        return End::Broken;
                    }
                },
                order = self.orders.recv() => match order {
                    Some(order) => send(to_server, self.take(order)),
                    None => return End::Over,
                },
                () = &mut tidy, if !self.spent.is_empty() => {
                    for id in self.spent.drain(..) {
                        send(to_server, Some(cancel(id)));
                    }
                }
                changed = self.given_up.changed() => return if changed.is_ok() { End::Broken } else { End::Over },
            }
        }
    }

    /// Notes an order. What the server is to be told of it.
    fn take(&mut self, order: Order) -> Option<WatchRequest> {
        match order {
            Order::Watch(request, tell) => {
                self.watches.insert(request.watch_id, (request.clone(), tell));
                Some(create(request))
            }
            Order::Forget(id) => self.watches.remove(&id).map(|_| cancel(id)),
        }
    }

    /// Passes on what the server says. What it is to be told in return.
    fn hear(&mut self, answer: &WatchResponse) -> Option<WatchRequest> {
        let id = answer.watch_id;
        if answer.canceled {
            // The server has ended the watch: what it was to tell is lost to it. Who waits looks for itself.
            let (_, tell) = self.watches.remove(&id)?;
            if answer.compact_revision == 0 {
                tracing::debug!("a watch was cancelled: {}", answer.cancel_reason);
            }
            let _ = tell.send(Note::Missed);
            return None;
        }
        let (request, tell) = self.watches.get(&id)?;
        if answer.created {
            let revision = answer.header.as_ref().map_or(0, |header| header.revision);
            if revision >= request.start_revision {
                let _ = tell.send(Note::Behind);
            }
        }
        if answer.events.is_empty() {
            return None;
        }
        let _ = tell.send(Note::Happened);
        let (request, _) = self.watches.remove(&id)?;
        if !request.range_end.is_empty() {
            // Of several keys there would be more to tell.
            return Some(cancel(id));
        }
        self.spent.push(id);
        None
    }
}

fn send(to_server: &mpsc::UnboundedSender<WatchRequest>, request: Option<WatchRequest>) {
    if let Some(request) = request {
        let _ = to_server.send(request);
    }
}

fn create(request: WatchCreateRequest) -> WatchRequest {
    WatchRequest { request_union: Some(WatchOrder::Create(request)) }
}

fn cancel(watch_id: i64) -> WatchRequest {
    WatchRequest { request_union: Some(WatchOrder::Cancel(WatchCancelRequest { watch_id })) }
}
