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
use tokio::time::{Instant, sleep};

/// A lock that is free is granted sooner than this: no need to show anything.
const FIRST_LOOK: Duration = Duration::from_millis(250);
const LOOK_AGAIN: Duration = Duration::from_secs(1);

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
    /// Shows, about once per second, who is ahead. On a terminal in one place; otherwise, with `-v`, when it changes.
    async fn show(&self) {
        let started = Instant::now();
        let mut told = String::new();
        sleep(FIRST_LOOK).await;
        loop {
            let live = self.console.is_live() && terminal::is_foreground();
            if (live || self.console.verbose)
                && let Some(obstacle) = self.obstacle().await
            {
                if live {
                    self.console.show(&format!("{}; waiting for {}", obstacle.text(), span(started.elapsed())));
                } else if told != obstacle.holder {
                    self.console.note(&format!("waiting: {}", obstacle.text()));
                    told = obstacle.holder;
                }
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    /// What stands between us and the locks, if it can be seen.
    pub(crate) async fn obstacle(&self) -> Option<Obstacle> {
        let mut found = None;
        for name in &self.names {
            let Ok(status) = self.client.status(name).await else { continue };
            let place = status.waiters.iter().position(|waiter| waiter.label == self.label);
            // Of several locks, the one that we wait for; while we wait for none, one that is held by somebody else.
            if place.is_some() || found.is_none() && status.holders.iter().any(|holder| holder.label != self.label) {
                found = Some(Obstacle::new(&status, place));
            }
            if place.is_some() {
                break;
            }
        }
        found
    }
}

/// Who holds the lock that we want.
pub(crate) struct Obstacle {
    name: String,
    holder: String,
    held_for: Duration,
    more_holders: usize,
    waiting_ahead: usize,
}

impl Obstacle {
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

    pub(crate) fn text(&self) -> String {
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
