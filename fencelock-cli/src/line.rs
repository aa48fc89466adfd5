//! Standing in line: who is ahead, shown while waiting; and signals, which end it.

use crate::console::Console;
use crate::signals::{Signals, is_ending};
use crate::terminal;
use crate::text::{plain, span};
use fencelock::{Client, Status};
use signal_hook::consts::signal::SIGTSTP;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// A lock that is free is granted sooner than this: no need to show anything.
const FIRST_LOOK: Duration = Duration::from_millis(250);
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Whoever has waited for long enough is not kept waiting by an engine that does not answer.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// What can be seen of the lines that we stand in.
pub(crate) struct View<'a> {
    pub(crate) client: &'a Client,
    pub(crate) names: Vec<&'a str>,
    /// Our own label, to find our place.
    pub(crate) label: &'a str,
    pub(crate) console: &'a Console,
}

/// Waits for an acquisition, and shows what it waits for. `Err` is the signal that ended it; then nothing stays in the line.
pub(crate) async fn stand<T>(
    acquire: impl Future<Output = T>,
    view: &View<'_>,
    signals: &mut Signals,
) -> Result<T, i32> {
    let mut acquire = pin!(acquire);
    let mut show = pin!(view.show());
    let outcome = loop {
        tokio::select! {
            biased;
            granted = &mut acquire => break Ok(granted),
            signal = signals.next() => match signal {
                signal if is_ending(signal) => break Err(signal),
                SIGTSTP => {
                    view.console.clear();
                    terminal::suspend();
                }
                _ => {}
            },
            () = &mut show => {}
        }
    };
    view.console.clear();
    outcome
}

impl View<'_> {
    /// Shows, about once per second, who is ahead. On a terminal in one place; otherwise, with `-v`, when it changes. That the engine grants
    /// nothing at present is said in any case: nobody expects that.
    async fn show(&self) {
        let started = Instant::now();
        let mut told = String::new();
        sleep(FIRST_LOOK).await;
        loop {
            let live = self.console.is_live() && terminal::is_foreground();
            let obstacle = if live || self.console.verbose {
                self.obstacle().await
            } else {
                self.engine_obstacle().map(Obstacle::Engine)
            };
            match obstacle {
                Some(obstacle) if live => {
                    self.console.show(&format!("{}; waiting for {}", obstacle.text(), span(started.elapsed())));
                }
                Some(obstacle) if told != obstacle.sign() => {
                    self.console.say(&format!("waiting: {}", obstacle.text()));
                    told = obstacle.sign();
                }
                Some(_) => {}
                None => told.clear(),
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    /// The same when nobody waits any more, in words.
    pub(crate) async fn last_obstacle(&self) -> String {
        match timeout(LAST_LOOK, self.obstacle()).await {
            Ok(Some(obstacle)) => obstacle.text(),
            Ok(None) => format!("{:?} was busy, and is not any more", self.names.first().unwrap_or(&"")),
            Err(_) => self.engine_obstacle().unwrap_or_else(|| "the engine does not answer".to_owned()),
        }
    }

    /// Why the engine grants nothing, as far as it is known without asking.
    fn engine_obstacle(&self) -> Option<String> {
        self.names.iter().find_map(|name| self.client.obstacle(name))
    }

    /// What stands between us and the locks, if it can be seen.
    async fn obstacle(&self) -> Option<Obstacle> {
        let mut found = None;
        for name in &self.names {
            let status = match self.client.status(name).await {
                Ok(status) => status,
                Err(error) => return Some(Obstacle::Engine(error.to_string())),
            };
            let place = status.waiters.iter().position(|waiter| waiter.label == self.label);
            // Of several locks, the one that we wait for; while we wait for none, one that is held by somebody else.
            let others = status.holders.iter().any(|holder| holder.label != self.label);
            if place.is_some() || found.is_none() && (others || status.obstacle.is_some()) {
                found = Some(match &status.obstacle {
                    Some(obstacle) if !others => Obstacle::Engine(obstacle.clone()),
                    _ => Obstacle::Holder(Ahead::new(&status, place)),
                });
            }
            if place.is_some() {
                break;
            }
        }
        found
    }
}

/// Why we wait.
enum Obstacle {
    Holder(Ahead),
    /// The engine grants nothing at present, in its words.
    Engine(String),
}

impl Obstacle {
    fn text(&self) -> String {
        match self {
            Obstacle::Holder(ahead) => ahead.text(),
            Obstacle::Engine(text) => text.clone(),
        }
    }

    /// Differs when there is something new to tell; how much time has passed is nothing new.
    fn sign(&self) -> String {
        match self {
            Obstacle::Holder(ahead) => ahead.holder.clone(),
            Obstacle::Engine(text) => {
                let words = text.split(' ').filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
                words.collect::<Vec<_>>().join(" ")
            }
        }
    }
}

/// Who holds the lock that we want.
struct Ahead {
    name: String,
    holder: String,
    held_for: Duration,
    more_holders: usize,
    waiting_ahead: usize,
}

impl Ahead {
    fn new(status: &Status, place: Option<usize>) -> Self {
        let longest = status.holders.iter().max_by_key(|holder| holder.held_for);
        Self {
            name: status.name.clone(),
            holder: longest.map(|holder| plain(&holder.label)).unwrap_or_default(),
            held_for: longest.map(|holder| holder.held_for).unwrap_or_default(),
            more_holders: status.holders.len().saturating_sub(1),
            waiting_ahead: place.unwrap_or(status.waiters.len()),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{:?} is ", self.name);
        match self.holder.as_str() {
            "" => text.push_str("changing hands"),
            holder => text.push_str(&format!("held by {holder} for {}", span(self.held_for))),
        }
        if self.more_holders > 0 {
            text.push_str(&format!(" and {} more", self.more_holders));
        }
        if self.waiting_ahead > 0 {
            text.push_str(&format!(", {} ahead in line", self.waiting_ahead));
        }
        text
    }
}
