//! `fencelock elect`: runs the command while being the leader, and stands again when leadership is lost.

use crate::args::{Elect, OnLost};
use crate::command::{self, environment};
use crate::console::Console;
use crate::exit::{Exit, Failure, LOST};
use crate::hold::{Holding, ttl_of, url_for_others};
use crate::line::{View, stand};
use crate::run::{close, connect, ended_by, release};
use crate::signals::Signals;
use crate::under::Duty;
use fencelock::{Client, DEFAULT_TTL, ErrorKind};
use std::time::Duration;

/// How long to wait before standing again when the engine cannot be reached.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn elect(url: &str, elect: &Elect) -> Result<Exit, Failure> {
    elect.check()?;
    let ttl = elect.lease.ttl.or_else(|| ttl_of(url)).unwrap_or(DEFAULT_TTL);
    let grace = elect.lease.grace(ttl)?;
    command::check(&elect.command)?;
    let console = Console::new(elect.volume.quiet, elect.volume.verbose);
    let mut signals = Signals::listen()?;
    let client = match connect(url, &mut signals).await? {
        Ok(client) => client,
        Err(exit) => return Ok(exit),
    };
    let candidate = Candidate { client: &client, url, elect, ttl, grace, console: &console };
    let outcome = candidate.stand(&mut signals).await;
    close(&client).await;
    outcome
}

struct Candidate<'a> {
    client: &'a Client,
    url: &'a str,
    elect: &'a Elect,
    ttl: Duration,
    grace: Duration,
    console: &'a Console,
}

impl Candidate<'_> {
    /// Campaigns and leads, until the command ends by itself or a signal ends us.
    async fn stand(&self, signals: &mut Signals) -> Result<Exit, Failure> {
        let mut has_led = false;
        loop {
            let holding = match self.campaign(signals, has_led).await? {
                Ok(holding) => holding,
                Err(exit) => return Ok(exit),
            };
            has_led = true;
            if let Some(exit) = self.lead(holding, signals).await? {
                return Ok(exit);
            }
            self.console.say(&format!("the leadership of {:?} was lost; standing again", self.elect.name));
        }
    }

    /// Waits to be the leader. Who has led before goes on when the engine fails: that may be how leadership was lost.
    async fn campaign(&self, signals: &mut Signals, persistent: bool) -> Result<Result<Holding, Exit>, Failure> {
        let label = command::label(&self.elect.command);
        let view = View { client: self.client, names: vec![&self.elect.name], label: &label, console: self.console };
        let election = self.client.election(&self.elect.name).ttl(self.ttl).label(&label);
        loop {
            let error = match stand(election.campaign(), &view, signals).await {
                Ok(Ok(guard)) => return Ok(Ok(Holding::new(vec![guard]))),
                Ok(Err(error)) => error,
                Err(signal) => return Ok(Err(ended_by(signal))),
            };
            if !persistent || matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) {
                return Err(error.into());
            }
            self.console.say(&format!("{error}; standing again"));
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                signal = signals.ending() => return Ok(Err(ended_by(signal))),
            }
        }
    }

    /// Runs the command as the leader. None when leadership was lost, and we should stand again.
    async fn lead(&self, holding: Holding, signals: &mut Signals) -> Result<Option<Exit>, Failure> {
        self.console.note(&format!("leading {:?}, token {}", self.elect.name, holding.token()));
        if let Err(error) = holding.last(self.grace).await {
            self.console.say(&format!("{error}; standing again"));
            release(holding, true, self.console).await;
            return Ok(None);
        }
        let url = url_for_others(self.client, self.url);
        let duty = Duty {
            command: &self.elect.command,
            environment: environment(&holding, &url),
            on_lost: OnLost::Term,
            ttl: self.ttl,
            grace: self.grace,
        };
        let ended = duty.run(&holding, signals, self.console).await;
        let ours = release(holding, ended.as_ref().is_ok_and(|ended| ended.lost), self.console).await;
        let ended = ended?;
        Ok(match ended {
            ended if !ended.lost && ended.interrupted => Some(Exit::Interrupted),
            ended if !ended.lost && ours => Some(ended.status.exit()),
            ended if ended.asked_to_end => Some(Exit::Code(LOST)),
            _ => None,
        })
    }
}
