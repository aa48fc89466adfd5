//! The inside of a probe: reads requests, holds guards, answers.
//!
//! Requests are read by a thread of its own, which answers `Look` itself: that must not depend on whether the runtime
//! makes progress.

use super::{Granted, Line, Look, Reply, Request};
use crate::ask::{Ask, Patience};
use fencelock::{Client, Clock, Error, Guard, Mode, Owner, Result};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Serves requests from standard input until it ends. Nothing is released then: it is the sudden end that counts.
pub fn serve() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    let probe = Arc::new(Served::default());
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let Line { id, body } = serde_json::from_str::<Line<Request>>(&line).expect("requests are JSON");
        match body {
            Request::Look { guard } => answer(id, probe.look(guard)),
            Request::Exit => std::process::exit(0),
            request => {
                let probe = Arc::clone(&probe);
                runtime.spawn(async move { answer(id, probe.serve(request).await) });
            }
        }
    }
    std::process::exit(0);
}

fn answer(id: u64, body: Reply) {
    let line = serde_json::to_string(&Line { id, body }).expect("a reply can be written as JSON");
    // Whoever asked may be gone.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

#[derive(Default)]
struct Served {
    client: Mutex<Option<Client>>,
    guards: Mutex<HashMap<u64, Arc<Kept>>>,
    next: AtomicU64,
}

struct Kept {
    guard: Mutex<Option<Guard>>,
    watched: AtomicBool,
    last_valid: AtomicU64,
}

impl Served {
    async fn serve(&self, request: Request) -> Reply {
        let reply = match request {
            Request::Connect { url } => self.connect(&url).await,
            Request::Acquire { name, mode, ttl, wait, owner } => self.acquire(&name, mode, ttl, wait, owner).await,
            Request::Watch { guard } => Ok(self.watch(guard)),
            Request::Lost { guard } => Ok(self.lost(guard).await),
            Request::Release { guard } => self.release(guard).await,
            Request::Spawn => Ok(spawn_child()),
            Request::Look { .. } | Request::Exit => Ok(Reply::Done),
        };
        reply.unwrap_or_else(|error| failed(&error))
    }

    async fn connect(&self, url: &str) -> Result<Reply> {
        let client = fencelock::connect(url).await?;
        *locked(&self.client) = Some(client);
        Ok(Reply::Done)
    }

    fn client(&self) -> Client {
        locked(&self.client).clone().expect("the probe was connected")
    }

    async fn acquire(&self, name: &str, mode: Mode, ttl: Duration, wait: bool, owner: Option<String>) -> Result<Reply> {
        let client = self.client();
        let owner = owner.map(|owner| owner.parse::<Owner>()).transpose()?;
        let patience = if wait { Patience::Endless } else { Patience::None };
        let guard = Ask { name, mode, ttl, label: "probe", owner }.of(&client, patience).await?;
        Ok(guard.map_or(Reply::Busy, |guard| self.keep(guard)))
    }

    fn keep(&self, guard: Guard) -> Reply {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let granted = Granted {
            guard: number,
            token: guard.token().as_u64(),
            owner: guard.owner().to_string(),
            borrowed: guard.is_borrowed(),
            at: Clock::Boot.now().as_nanos(),
        };
        let kept =
            Kept { guard: Mutex::new(Some(guard)), watched: AtomicBool::new(false), last_valid: AtomicU64::new(0) };
        locked(&self.guards).insert(number, Arc::new(kept));
        Reply::Granted(granted)
    }

    fn kept(&self, guard: u64) -> Arc<Kept> {
        Arc::clone(locked(&self.guards).get(&guard).expect("a guard that was granted"))
    }

    fn look(&self, guard: u64) -> Reply {
        let kept = self.kept(guard);
        let guard = locked(&kept.guard);
        let watched = kept.watched.load(Ordering::Acquire);
        Reply::Look(Look {
            valid: guard.as_ref().is_some_and(Guard::is_valid),
            loss: guard.as_ref().and_then(Guard::loss).map(|loss| loss.to_string()),
            last_valid: watched.then(|| kept.last_valid.load(Ordering::Acquire)),
        })
    }

    /// Looks at the guard all the time, from a thread that the runtime cannot hold up.
    fn watch(&self, guard: u64) -> Reply {
        let kept = self.kept(guard);
        kept.watched.store(true, Ordering::Release);
        std::thread::spawn(move || {
            loop {
                // The time is taken first: the guard was valid at least until then.
                let now = Clock::Boot.now().as_nanos();
                match &*locked(&kept.guard) {
                    Some(guard) if guard.is_valid() => kept.last_valid.store(now, Ordering::Release),
                    _ => return,
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Reply::Done
    }

    async fn lost(&self, guard: u64) -> Reply {
        let kept = self.kept(guard);
        let lost = locked(&kept.guard).as_ref().map(Guard::lost);
        match lost {
            Some(lost) => Reply::Lost(lost.await.to_string()),
            None => Reply::Done,
        }
    }

    async fn release(&self, guard: u64) -> Result<Reply> {
        let guard = locked(&self.kept(guard).guard).take();
        if let Some(guard) = guard {
            guard.release().await?;
        }
        Ok(Reply::Done)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that outlives the probe; whoever asked for it ends it.
fn spawn_child() -> Reply {
    let child = std::process::Command::new("sleep").arg("60").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    match child {
        Ok(child) => Reply::Child(i32::try_from(child.id()).unwrap_or(0)),
        Err(error) => Reply::Failed { kind: "Spawn".to_owned(), message: error.to_string() },
    }
}

fn failed(error: &Error) -> Reply {
    Reply::Failed { kind: format!("{:?}", error.kind()), message: error.to_string() }
}
