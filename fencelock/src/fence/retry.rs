//! How often, and after what pauses, an optimistic read-modify-write is tried again.

use crate::{Error, ErrorKind};
use std::time::Duration;

/// The patience of an optimistic lock: attempts, and pauses between them that grow and are drawn at random, so that those who
/// collided once do not collide again.
///
/// ```
/// # use fencelock::fence::Retry;
/// # use std::time::Duration;
/// let patient = Retry::default().attempts(100).longest_pause(Duration::from_millis(50));
/// # let _ = patient;
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Retry {
    attempts: u32,
    first: Duration,
    longest: Duration,
}

impl Default for Retry {
    /// 30 attempts, with pauses of up to 2 ms at first and of up to 250 ms later: five seconds altogether, or less.
    fn default() -> Self {
        Self { attempts: 30, first: Duration::from_millis(2), longest: Duration::from_millis(250) }
    }
}

impl Retry {
    /// How often it is tried; at least once.
    pub fn attempts(self, attempts: u32) -> Self {
        Self { attempts: attempts.max(1), ..self }
    }

    /// The longest that the first pause can be; each later one can be twice as long.
    pub fn first_pause(self, pause: Duration) -> Self {
        Self { first: pause, ..self }
    }

    /// The longest that any pause can be.
    pub fn longest_pause(self, pause: Duration) -> Self {
        Self { longest: pause, ..self }
    }

    /// The pause after this many failed attempts, or the error when there were enough.
    #[cfg_attr(not(any(feature = "redis", feature = "fence-postgres")), allow(dead_code, reason = "used by executors"))]
    pub(crate) fn pause_after(&self, failed: u32, what: &str) -> Result<Duration, Error> {
        if failed >= self.attempts {
            let text = format!(
                "{what} was changed by others in each of {failed} attempts; try again later, with more attempts, or take a lock"
            );
            return Err(Error::new(ErrorKind::Conflict, text).during("modify"));
        }
        let most = self.first.saturating_mul(1 << failed.saturating_sub(1).min(20)).min(self.longest);
        Ok(most.mul_f64(random_share()))
    }
}

/// Between 0 and 1. Without randomness of the system, half: the pauses grow all the same.
fn random_share() -> f64 {
    let number = getrandom::u32().unwrap_or(u32::MAX / 2);
    f64::from(number) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest_and_end_with_the_attempts() {
        let retry = Retry::default().attempts(40).longest_pause(Duration::from_millis(50));
        for failed in 1..40 {
            let most = Duration::from_millis(2 << (failed - 1).min(30)).min(Duration::from_millis(50));
            assert!(retry.pause_after(failed, "x").unwrap() <= most, "after {failed}");
        }
        let error = retry.pause_after(40, "the row").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains("the row was changed by others in each of 40 attempts"), "{error}");
    }
}
