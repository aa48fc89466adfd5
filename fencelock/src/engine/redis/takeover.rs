//! Quarantine: a server process that took over from another one grants nothing to new owners until every lease that its
//! predecessor granted can have ended. Checked when a connection is made; costs nothing afterwards.

use super::fault::{Fault, fault};
use super::key::{GRANTING, NEWEST, QUARANTINE};
use super::wire::Wire;
use crate::{Clock, Error, ErrorKind, Moment};
use std::time::Duration;

/// How long the name of the granting process is kept after the last connection. Tokens, which are refreshed with every grant,
/// tell of a predecessor after that.
const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

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

/// What a server tells about itself.
pub(super) struct Server {
    run: String,
    version: u32,
    age: Duration,
    promoted: bool,
}

impl Server {
    /// Whether it has channels that belong to a slot.
    pub(super) fn sharded_channels(&self) -> bool {
        self.version >= 7
    }
}

/// Asks a server about itself. An error when it is not a master.
pub(super) async fn look(connection: &mut Wire) -> Result<Server, Fault> {
    let told = |error| fault(error, false);
    let server: String = redis::cmd("INFO").arg("server").query_async(connection).await.map_err(told)?;
    let replication: String = redis::cmd("INFO").arg("replication").query_async(connection).await.map_err(told)?;
    if field(&replication, "role") == Some("slave") {
        return Err(Fault::passing(Error::new(
            ErrorKind::Unavailable,
            "the server is a read-only replica; name its master in the URL",
        )));
    }
    let number = |name| field(&server, name).and_then(|text| text.split('.').next()?.parse::<u32>().ok());
    Ok(Server {
        run: field(&server, "run_id").unwrap_or("0").to_owned(),
        version: number("redis_version").unwrap_or(0),
        age: Duration::from_secs(number("uptime_in_seconds").unwrap_or(0).into()),
        promoted: field(&replication, "master_replid2").is_some_and(|id| id.bytes().any(|digit| digit != b'0')),
    })
}

/// Finds out whether the server must wait. `place` tells the nodes of a cluster apart; it is empty elsewhere.
pub(super) async fn check(
    connection: &mut Wire,
    server: &Server,
    policy: Policy,
    longest: Duration,
    place: &str,
) -> Result<Option<Quarantine>, Fault> {
    let young = if policy == Policy::Strict { longest.saturating_sub(server.age) } else { Duration::ZERO };
    // On a cluster tokens are kept by slot, and slots move.
    let keys = if place.is_empty() { vec![GRANTING, QUARANTINE, NEWEST] } else { vec![GRANTING, QUARANTINE] };
    let mut script = redis::cmd("EVAL");
    script.arg(include_str!("takeover.lua")).arg(keys.len());
    for key in keys {
        script.arg(format!("{key}{place}"));
    }
    script.arg(&server.run).arg(u8::from(server.promoted));
    script.arg(millis(longest)).arg(millis(KEPT)).arg(millis(young));
    let answer = script.query_async(connection).await;
    let (left, after_predecessor): (u64, u8) = answer.map_err(|error| fault(error, false))?;
    let until = Clock::Boot.now().after(Duration::from_millis(left));
    Ok((left > 0).then_some(Quarantine { until, after_predecessor: after_predecessor == 1 }))
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
