//! Fencing tokens that grow over restarts and power losses without a write to disk per grant.
//!
//! Within one start of the machine, a token is the machine's clock since boot, in microseconds, plus a base: all processes
//! agree on it without talking. What is kept on disk, and flushed, is a bound that no token has reached; the next start
//! begins above it. The bound is an hour ahead, so it is flushed about once per hour of use.

use super::page::Boot;
use super::root::{Root, create};
use crate::{Clock, Result};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// How far ahead the bound is set, in microseconds.
const AHEAD: u64 = 3_600_000_000;
const MAGIC: &[u8; 8] = b"FNCTOKN1";

pub(super) struct Tokens {
    boot: Boot,
    base: AtomicU64,
    /// No token of ours may reach this; 0 before the file was read.
    bound: AtomicU64,
}

impl Tokens {
    pub(super) fn new(boot: Boot) -> Self {
        Self { boot, base: AtomicU64::new(0), bound: AtomicU64::new(0) }
    }

    /// Whether it is time to set the bound further ahead, which takes a flush.
    pub(super) fn low(&self) -> bool {
        let newest = self.base.load(Ordering::Acquire).wrapping_add(now());
        newest.saturating_add(AHEAD / 2) >= self.bound.load(Ordering::Acquire)
    }

    /// A token above `last`, and above all that any process took from this directory for a line that is gone.
    pub(super) fn next(&self, root: &Root, last: u64) -> Result<u64> {
        loop {
            let token = self.base.load(Ordering::Acquire).wrapping_add(now()).max(last + 1);
            if token < self.bound.load(Ordering::Acquire) {
                return Ok(token);
            }
            self.refill(root, token)?;
        }
    }

    /// Makes sure that the bound on disk is well above the clock and above `token`. Blocks on the disk.
    pub(super) fn refill(&self, root: &Root, token: u64) -> Result<()> {
        self.refill_file(root, token).map_err(|errno| root.explain(errno))
    }

    fn refill_file(&self, root: &Root, token: u64) -> Result<(), Errno> {
        let file = create(&root.top, "tokens", root.mode)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        let mut record = [0; 40];
        let length = rustix::io::pread(&file, &mut record, 0)?;
        let known = length == record.len() && &record[..8] == MAGIC;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&record[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let old_bound = if known { word(32) } else { 0 };
        let same_boot = known && record[8..24] == self.boot;
        let base = if same_boot {
            word(24)
        } else {
            // The wall clock is only a help for a directory whose tokens were thrown away; the bound is what counts.
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| span.as_micros());
            let start = old_bound.max(u64::try_from(wall).unwrap_or(0)).saturating_add(1);
            start.wrapping_sub(now())
        };
        let newest = base.wrapping_add(now()).max(if same_boot { token } else { 0 });
        let mut bound = old_bound;
        if newest.saturating_add(AHEAD / 2) >= bound || !same_boot {
            bound = newest.saturating_add(AHEAD);
            record[..8].copy_from_slice(MAGIC);
            record[8..24].copy_from_slice(&self.boot);
            record[24..32].copy_from_slice(&base.to_le_bytes());
            record[32..40].copy_from_slice(&bound.to_le_bytes());
            rustix::io::pwrite(&file, &record, 0)?;
            rustix::fs::fdatasync(&file)?;
            if !known {
                rustix::fs::fsync(&root.top)?;
            }
        }
        self.base.store(base, Ordering::Release);
        self.bound.store(bound, Ordering::Release);
        Ok(())
    }
}

fn now() -> u64 {
    Clock::Boot.now().as_nanos() / 1_000
}

/// What identifies this start of the machine.
pub(super) fn boot_id() -> Boot {
    let mut id = [0; 16];
    if let Ok(text) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).unwrap_or("0");
            *byte = u8::from_str_radix(pair, 16).unwrap_or(0);
        }
    }
    id
}
