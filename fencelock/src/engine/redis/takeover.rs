//! Quarantine: a server process that took over from another one grants nothing to new owners until every lease that its
//! predecessor granted can have ended. Checked when a connection is made; costs nothing afterwards.

use super::fault::{Fault, fault};
use super::key::{GRANTING, NEWEST, QUARANTINE};
use super::wire::Wire;
use crate::{Clock, Error, ErrorKind, Moment};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long the name of the granting process is kept after the last connection. Tokens, which are refreshed with every grant,
/// tell of a predecessor after that; on a cluster, that it is young and has data.
const KEPT: Duration = Duration::from_secs(90 * 24 * 3600);

/// Which servers must wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Policy {
    /// None.
    Off,
    /// Those that took over from another process.
    Auto,
    /// Those that are younger than the lease as well: they may have lost all they knew.
    Strict,
}

impl Policy {
    pub(super) fn read(text: Option<&str>) -> crate::Result<Self> {
        match text {
            None | Some("auto") => Ok(Policy::Auto),
            Some("strict") => Ok(Policy::Strict),
            Some("off") => Ok(Policy::Off),
            Some(other) => Err(Error::invalid(format!("option quarantine={other}: choose auto, strict or off"))),
        }
    }
}

/// Until when a server grants nothing to new owners, and why.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quarantine {
    pub(super) until: Moment,
    after_predecessor: bool,
}

impl Quarantine {
    pub(super) fn left(&self) -> Duration {
        self.until.since(Clock::Boot.now())
    }

    pub(super) fn reason(&self) -> &'static str {
        if self.after_predecessor {
            "the server took over from another one, whose holders may still believe in their leases"
        } else {
            "the server has started lately, and may have forgotten who holds"
        }
    }
}

/// What a connection knows of the quarantine of its server.
#[derive(Debug, Default)]
pub(super) struct Sign {
    /// In ns of the clock since boot; 0 when there is none.
    until: AtomicU64,
    after_predecessor: AtomicBool,
}

impl Sign {
    pub(super) fn put(&self, quarantine: Option<Quarantine>) {
        let after_predecessor = quarantine.is_some_and(|quarantine| quarantine.after_predecessor);
        self.after_predecessor.store(after_predecessor, Ordering::Relaxed);
        self.until.store(quarantine.map_or(0, |quarantine| quarantine.until.as_nanos()), Ordering::Release);
    }

    /// Also when it is over by what was known.
    pub(super) fn read(&self) -> Option<Quarantine> {
        let until = self.until.load(Ordering::Acquire);
        let after_predecessor = self.after_predecessor.load(Ordering::Relaxed);
        (until > 0).then(|| Quarantine { until: Moment::from_nanos(until), after_predecessor })
    }
}

/// What a server tells about itself.
pub(super) struct Server {
    run: String,
    version: u32,
    age: Duration,
    has_data: bool,
    history: History,
}

impl Server {
    /// Whether it has channels that belong to a slot.
    pub(super) fn sharded_channels(&self) -> bool {
        self.version >= 7
    }

    pub(super) fn history(&self) -> &History {
        &self.history
    }
}

/// Whose writes a server has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct History {
    id: String,
    /// It has followed another master before.
    promoted: bool,
}

impl History {
    /// An error when it is not that of a master.
    fn read(info: &str) -> Result<Self, Fault> {
        if field(info, "role") == Some("slave") {
            let text = "the server is a read-only replica; name its master in the URL";
            return Err(Fault { broken: true, ..Fault::passing(Error::new(ErrorKind::Unavailable, text)) });
        }
        Ok(Self {
            id: field(info, "master_replid").unwrap_or("0").to_owned(),
            promoted: field(info, "master_replid2").is_some_and(|id| id.bytes().any(|digit| digit != b'0')),
        })
    }

    /// Whether it has followed somebody else since then. A master that nobody follows may rename its history, and forgets the old name.
    pub(super) fn has_turned_since(&self, then: &History) -> bool {
        self.promoted && self.id != then.id
    }
}

/// Asks a server about itself. An error when it is not a master.
pub(super) async fn look(connection: &mut Wire) -> Result<Server, Fault> {
    let info: String = redis::cmd("INFO").query_async(connection).await.map_err(|error| fault(error, false))?;
    let number = |name| field(&info, name).and_then(|text| text.split('.').next()?.parse::<u32>().ok());
    Ok(Server {
        run: field(&info, "run_id").unwrap_or("0").to_owned(),
        version: number("redis_version").unwrap_or(0),
        age: Duration::from_secs(number("uptime_in_seconds").unwrap_or(0).into()),
        has_data: info.lines().any(|line| line.starts_with("db") && line.contains(":keys=")),
        history: History::read(&info)?,
    })
}

/// Asks a server for its history only.
pub(super) async fn look_at_history(connection: &mut Wire) -> Result<History, Fault> {
    let info = redis::cmd("INFO").arg("replication").query_async::<String>(connection).await;
    History::read(&info.map_err(|error| fault(error, false))?)
}

/// Finds out whether the server must wait. `places` tell the nodes of a cluster apart; elsewhere there is one, and it is empty. Several
/// say the same, each in a slot of its own: one may be on its way to another node.
pub(super) async fn check(
    connection: &mut Wire,
    server: &Server,
    policy: Policy,
    longest: Duration,
    places: &[String],
) -> Result<Option<Quarantine>, Fault> {
    let question = Question { server, policy, longest };
    // Who knows is asked first.
    let (mut found, mut failed) = (None, None);
    let passes = if places.len() > 1 { &[Known::PerhapsElsewhere, Known::Nowhere][..] } else { &[Known::Nowhere] };
    let asked: Vec<_> = passes.iter().flat_map(|known| places.iter().map(|place| (place, *known))).collect();
    for (place, known) in asked {
        match question.ask(connection, place, known).await {
            Ok(Found { left: ..0, .. }) => {}
            Ok(answer) => {
                found = Some((place, answer));
                break;
            }
            Err(fault) if fault.redirect.is_some() => failed = Some(fault),
            Err(fault) => return Err(fault),
        }
    }
    let Some((place, found)) = found else { return Err(failed.unwrap_or_else(Fault::unreadable)) };
    let mut longest = found;
    for other in places {
        if other == place {
            continue;
        }
        match question.ask(connection, other, Known::Elsewhere(found)).await {
            Ok(answer) if answer.left > longest.left => longest = answer,
            Ok(_) => {}
            Err(fault) => tracing::debug!("who grants cannot be noted at {other}: {}", fault.error),
        }
    }
    let until = |found: Found| Quarantine {
        until: Clock::Boot.now().after(Duration::from_millis(found.left.unsigned_abs())),
        after_predecessor: found.after_predecessor == 1,
    };
    Ok(Some(longest).filter(|found| found.left > 0).map(until))
}

/// The answer of `takeover.lua`.
#[derive(Debug, Clone, Copy)]
struct Found {
    left: i64,
    after_predecessor: u8,
}

/// What is known already.
#[derive(Debug, Clone, Copy)]
enum Known {
    /// Another place may know who grants.
    PerhapsElsewhere,
    Nowhere,
    /// Another place knew.
    Elsewhere(Found),
}

struct Question<'a> {
    server: &'a Server,
    policy: Policy,
    longest: Duration,
}

impl Question<'_> {
    async fn ask(&self, connection: &mut Wire, place: &str, known: Known) -> Result<Found, Fault> {
        let Self { server, policy, longest } = self;
        let younger_than_lease = longest.saturating_sub(server.age);
        let young = if *policy == Policy::Strict { younger_than_lease } else { Duration::ZERO };
        // On a cluster tokens are kept by slot, and slots move, the one with the marker too.
        let in_cluster = !place.is_empty();
        let keys = if in_cluster { vec![GRANTING, QUARANTINE] } else { vec![GRANTING, QUARANTINE, NEWEST] };
        let younger = if in_cluster && server.has_data { younger_than_lease } else { Duration::ZERO };
        let mut script = redis::cmd("EVAL");
        script.arg(include_str!("takeover.lua")).arg(keys.len());
        for key in keys {
            script.arg(format!("{key}{place}"));
        }
        script.arg(&server.run).arg(&server.history.id).arg(u8::from(server.history.promoted));
        for span in [*longest, KEPT, young, younger] {
            script.arg(millis(span));
        }
        match known {
            Known::PerhapsElsewhere => drop(script.arg("?")),
            Known::Nowhere => {}
            Known::Elsewhere(found) => drop(script.arg(found.left).arg(found.after_predecessor)),
        }
        let answer = script.query_async(connection).await;
        let (left, after_predecessor) = answer.map_err(|error| fault(error, false))?;
        Ok(Found { left, after_predecessor })
    }
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
