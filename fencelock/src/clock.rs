//! The local clock by which a holder knows, without asking anybody, that its lease is over.
//!
//! It counts the time that the machine was suspended (CLOCK_BOOTTIME on Linux): a laptop lid or a VM
//! snapshot must not prolong a lease. The in-process engine uses tokio's clock instead, so that tests can
//! pause and advance it.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A point on a [`Clock`], in nanoseconds. Comparable only with moments of the same clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(u64);

impl Moment {
    /// Later than everything.
    pub const NEVER: Moment = Moment(u64::MAX);

    /// The moment with this many nanoseconds on its clock.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds on its clock.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// This much later.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }

    /// How long from `earlier` until this moment; zero when `earlier` is later.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Where moments come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Clock {
    /// The machine's clock since boot, suspend included. The same for all processes of the machine.
    Boot,
    /// Tokio's clock, which tests can pause. The same for one process only.
    Tokio,
}

/// The longest nap of [`Clock::sleep_until`] on the boot clock: tokio's timers stand still while the machine is
/// suspended, so a sleeper looks again this often.
const NAP: Duration = Duration::from_secs(1);

impl Clock {
    /// The present moment.
    pub fn now(self) -> Moment {
        match self {
            Clock::Boot => boot_now(),
            Clock::Tokio => tokio_now(),
        }
    }

    /// Sleeps until `moment`; returns at once when it has passed.
    ///
    /// # Cancellation safety
    /// Dropping the future has no effect.
    pub async fn sleep_until(self, moment: Moment) {
        if moment == Moment::NEVER {
            std::future::pending::<()>().await;
        }
        loop {
            let left = moment.since(self.now());
            if left.is_zero() {
                return;
            }
            match self {
                Clock::Boot => tokio::time::sleep(left.min(NAP)).await,
                Clock::Tokio => tokio::time::sleep(left).await,
            }
        }
    }
}

fn boot_now() -> Moment {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let id = rustix::time::ClockId::Boottime;
    // CLOCK_MONOTONIC counts suspend on macOS.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let id = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(id);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    Moment(seconds.saturating_mul(1_000_000_000).saturating_add(rest))
}

fn tokio_now() -> Moment {
    // A runtime with a paused clock may lie before or after the first use of this function: the offset
    // leaves room on both sides.
    const MIDDLE: u64 = 1 << 62;
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    let now = tokio::time::Instant::now().into_std();
    Moment(match now.checked_duration_since(start) {
        Some(after) => MIDDLE.saturating_add(nanos(after)),
        None => MIDDLE.saturating_sub(nanos(start.duration_since(now))),
    })
}

/// What the holder's own deadline stays short of the engine's: clock drift and rounding.
pub(crate) fn margin(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// Relates a server's clock to the local one.
#[cfg(any(feature = "redis", feature = "postgres", feature = "mysql"))]
#[derive(Debug, Default)]
pub(crate) struct ServerTime(std::sync::Mutex<Option<(Moment, u64)>>);

#[cfg(any(feature = "redis", feature = "postgres", feature = "mysql"))]
impl ServerTime {
    /// Notes that the server's clock showed `server` µs after `sent`.
    pub(crate) fn note(&self, sent: Moment, server: u64) {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((sent, server));
    }

    /// A moment of the local clock that is not later than that server time, whether that lies before or after the one noted.
    pub(crate) fn local(&self, server: u64) -> Moment {
        let now = Clock::Boot.now();
        let noted = *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some((sent, then)) = noted else { return now };
        if server < then {
            let earlier = Duration::from_micros(then - server).as_nanos();
            let earlier = u64::try_from(earlier).unwrap_or(u64::MAX);
            return Moment::from_nanos(sent.as_nanos().saturating_sub(earlier)).min(now);
        }
        sent.after(Duration::from_micros(server - then)).min(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_do_not_overflow() {
        assert_eq!(Moment::NEVER.after(Duration::MAX), Moment::NEVER);
        assert_eq!(Moment(5).since(Moment(9)), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn the_tokio_clock_follows_paused_time() {
        let start = Clock::Tokio.now();
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(Clock::Tokio.now().since(start), Duration::from_secs(60));
    }

    #[tokio::test]
    async fn the_boot_clock_runs_and_sleeps() {
        let start = Clock::Boot.now();
        Clock::Boot.sleep_until(start.after(Duration::from_millis(5))).await;
        assert!(Clock::Boot.now() >= start.after(Duration::from_millis(5)));
    }

    #[cfg(any(feature = "redis", feature = "postgres", feature = "mysql"))]
    #[test]
    fn an_old_server_time_is_not_taken_for_a_later_one() {
        let time = ServerTime::default();
        let sent = Clock::Boot.now();
        time.note(sent, 5_000_000);
        assert_eq!(time.local(5_000_000), sent);
        assert_eq!(time.local(4_999_000), Moment::from_nanos(sent.as_nanos() - 1_000_000));
        // Nothing lies in the future.
        assert!(time.local(u64::MAX / 2) <= Clock::Boot.now());
    }
}
