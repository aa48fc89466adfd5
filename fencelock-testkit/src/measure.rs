//! Measures an engine: pairs of acquire and release without contention, and hand-overs between two processes.
//!
//! A hand-over is timed from the moment one process *starts* its release to the moment another process, which was waiting
//! in line, knows that it holds; both read the machine's clock since boot.

use fencelock::{Client, Clock, Result};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long each holder keeps the lock in a hand-over measurement: enough for the others to be in line.
const HOLD: Duration = Duration::from_micros(300);

/// How far apart the tasks of a process come to the line.
const APART: Duration = Duration::from_millis(1);
/// How long the first of many holds at least.
const GATHER: Duration = Duration::from_secs(1);

/// Percentiles of a latency, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    /// How many were measured.
    pub count: u64,
    /// The median.
    pub p50_us: f64,
    /// 99 of 100 were faster.
    pub p99_us: f64,
    /// 999 of 1000 were faster.
    pub p999_us: f64,
}

impl Latency {
    /// The percentiles of a histogram of nanoseconds.
    pub fn of(histogram: &Histogram<u64>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a latency fit")]
        let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
        Self { count: histogram.len(), p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999) }
    }
}

/// A histogram of nanoseconds, up to a minute.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are in order")
}

fn record(histogram: &mut Histogram<u64>, span: Duration) {
    histogram.saturating_record(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
}

/// What [`pairs`] measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pairs {
    /// Tasks that worked at the same time, each on a name of its own.
    pub tasks: usize,
    /// Acquires with their releases, per second, all tasks together.
    pub per_second: f64,
    /// From asking to holding.
    pub acquire: Latency,
    /// From releasing to the engine's confirmation.
    pub release: Latency,
}

/// Acquires and releases without contention, for `span`.
///
/// # Errors
/// What the engine reports.
pub async fn pairs(client: &Client, prefix: &str, tasks: usize, span: Duration) -> Result<Pairs> {
    let start = Instant::now();
    let until = start + span;
    let workers: Vec<_> = (0..tasks)
        .map(|task| {
            let mutex = client.mutex(format!("{prefix}{task}"));
            tokio::spawn(async move {
                let (mut acquire, mut release) = (histogram(), histogram());
                while Instant::now() < until {
                    let asked = Instant::now();
                    let guard = mutex.acquire().await?;
                    let held = Instant::now();
                    guard.release().await?;
                    record(&mut acquire, held - asked);
                    record(&mut release, held.elapsed());
                }
                Ok((acquire, release))
            })
        })
        .collect();
    let (mut acquire, mut release) = (histogram(), histogram());
    for worker in workers {
        let (a, r) = worker.await.expect("a worker does not panic")?;
        acquire.add(a).expect("the same bounds");
        release.add(r).expect("the same bounds");
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of seconds' work fits")]
    let per_second = acquire.len() as f64 / start.elapsed().as_secs_f64();
    Ok(Pairs { tasks, per_second, acquire: Latency::of(&acquire), release: Latency::of(&release) })
}

/// As many tasks as asked for, each doing pairs on a name of its own; the number per second. For what is compared with others,
/// which are measured in the same way.
///
/// # Panics
/// If a pair does.
pub async fn rate<F: Future<Output = ()> + Send + 'static>(
    tasks: usize,
    span: Duration,
    pair: impl Fn(usize) -> F + Clone + Send + 'static,
) -> f64 {
    let start = Instant::now();
    let workers: Vec<_> = (0..tasks)
        .map(|task| {
            let pair = pair.clone();
            tokio::spawn(async move {
                let mut count = 0_u32;
                while start.elapsed() < span {
                    pair(task).await;
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut total = 0.0;
    for worker in workers {
        total += f64::from(worker.await.expect("a worker does not panic"));
    }
    total / start.elapsed().as_secs_f64()
}

/// The same for our own locks.
///
/// # Panics
/// If the locks do not work.
pub async fn our_rate(url: &str, prefix: &str, tasks: usize, span: Duration) -> f64 {
    let client = fencelock::connect(url).await.expect("the server is there");
    let locks = client.clone();
    let prefix = prefix.to_owned();
    let pair = move |task| {
        let mutex = locks.mutex(format!("{prefix}{task}"));
        async move {
            let guard = mutex.acquire().await.expect("free");
            guard.release().await.expect("released");
        }
    };
    let ours = rate(tasks, span, pair).await;
    client.close().await.expect("closing works");
    ours
}

/// How many times `ours` is `theirs`: the median of what was measured in the same round.
#[must_use]
pub fn times(ours: &[f64], theirs: &[f64]) -> f64 {
    median(&ratios(ours, theirs))
}

/// Between which two ratios the middle half of the rounds lies: how much the median is to be trusted.
#[must_use]
pub fn middle_half(ours: &[f64], theirs: &[f64]) -> (f64, f64) {
    let ratios = ratios(ours, theirs);
    (part(&ratios, 1, 4), part(&ratios, 3, 4))
}

fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

/// The middle one.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    part(values, 1, 2)
}

/// The one below which so many parts of all are.
fn part(values: &[f64], parts: usize, all: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() * parts / all).copied().unwrap_or(0.0)
}

/// One hold of a peer, in nanoseconds of the clock since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    /// Puts the turns in order: the token, or the time of the grant where there is none.
    order: u64,
    asked: u64,
    granted: u64,
    released: u64,
}

/// The part of one process in a hand-over measurement: `tasks` tasks take one lock in turns. Prints a line per turn.
///
/// Several come one after the other, so that those of both processes mix in the line, and take one turn each, so that nothing but
/// hand-overs happens; the first one holds until all are there.
///
/// # Errors
/// What the engine reports.
pub async fn peer(client: &Client, name: &str, tasks: usize, span: Duration) -> Result<()> {
    let until = Instant::now() + span;
    let gathering = u32::try_from(tasks).unwrap_or(u32::MAX);
    let workers: Vec<_> = (0..tasks)
        .zip(1..)
        .map(|(_, place)| {
            let mutex = client.mutex(name);
            tokio::spawn(async move {
                tokio::time::sleep(APART * place).await;
                let mut turns = Vec::new();
                while tasks > 1 || Instant::now() < until {
                    let asked = now();
                    let guard = mutex.acquire().await?;
                    let granted = now();
                    if tasks > 1 && place == 1 {
                        tokio::time::sleep(GATHER.max(APART * 2 * gathering)).await;
                    } else {
                        std::thread::sleep(HOLD);
                    }
                    turns.push(Turn { order: guard.token().as_u64(), asked, granted, released: now() });
                    guard.release().await?;
                    if tasks > 1 {
                        break;
                    }
                }
                Ok(turns)
            })
        })
        .collect();
    for worker in workers {
        print_turns(&worker.await.expect("a worker does not panic")?);
    }
    Ok(())
}

/// The same with nothing but a blocking `flock` on `path`, to compare with.
///
/// # Errors
/// What the file system reports.
pub fn raw_peer(path: &std::path::Path, span: Duration) -> std::io::Result<()> {
    let file = std::fs::File::options().create(true).append(true).open(path)?;
    let until = Instant::now() + span;
    let mut turns = Vec::new();
    while Instant::now() < until {
        let asked = now();
        file.lock()?;
        let granted = now();
        std::thread::sleep(HOLD);
        turns.push(Turn { order: granted, asked, granted, released: now() });
        file.unlock()?;
        // flock is not fair: without this, the same process takes it again.
        std::thread::sleep(HOLD / 2);
    }
    print_turns(&turns);
    Ok(())
}

fn now() -> u64 {
    Clock::Boot.now().as_nanos()
}

fn print_turns(turns: &[Turn]) {
    for turn in turns {
        println!("turn {} {} {} {}", turn.order, turn.asked, turn.granted, turn.released);
    }
}

/// Runs two processes that play [`peer`] (or [`raw_peer`]) and times the hand-overs from one to the other.
///
/// # Errors
/// When a process cannot be run or fails.
pub fn hand_overs(mut peer: impl FnMut(usize) -> Command) -> std::io::Result<Latency> {
    let mut children = Vec::new();
    for index in 0..2 {
        children.push(peer(index).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?);
    }
    let readers: Vec<_> = children
        .iter_mut()
        .enumerate()
        .map(|(index, child)| {
            let out = child.stdout.take().expect("the output is piped");
            std::thread::spawn(move || read_turns(BufReader::new(out), index))
        })
        .collect();
    let mut turns = Vec::new();
    for reader in readers {
        turns.extend(reader.join().expect("the reader does not panic"));
    }
    for mut child in children {
        let status = child.wait()?;
        if !status.success() {
            return Err(std::io::Error::other(format!("a process of the measurement failed: {status}")));
        }
    }
    Ok(Latency::of(&between_processes(turns)))
}

fn read_turns(out: impl BufRead, process: usize) -> Vec<(Turn, usize)> {
    out.lines()
        .map_while(std::io::Result::ok)
        .filter_map(|line| {
            let mut words = line.strip_prefix("turn ")?.split(' ').map(str::parse::<u64>);
            let mut next = || words.next()?.ok();
            Some((Turn { order: next()?, asked: next()?, granted: next()?, released: next()? }, process))
        })
        .collect()
}

/// Keeps the hand-overs from one process to another that was waiting when the release began.
fn between_processes(mut turns: Vec<(Turn, usize)>) -> Histogram<u64> {
    turns.sort_by_key(|(turn, _)| turn.order);
    let mut latencies = histogram();
    for pair in turns.windows(2) {
        let [(from, before), (to, after)] = pair else { continue };
        if before != after && to.asked < from.released {
            latencies.saturating_record(to.granted.saturating_sub(from.released));
        }
    }
    latencies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hand_overs_to_a_waiting_process_count() {
        let turn = |order, asked, granted, released| Turn { order, asked, granted, released };
        let latencies = between_processes(vec![
            (turn(1, 0, 10, 100), 0),
            (turn(2, 50, 140, 200), 1),  // waited: 40
            (turn(3, 150, 250, 300), 1), // the same process
            (turn(4, 310, 320, 400), 0), // came later
        ]);
        assert_eq!((latencies.len(), latencies.max()), (1, 40));
    }

    #[test]
    fn turns_are_read_back() {
        let text = "noise\nturn 1 2 3 4\nturn x\n";
        assert_eq!(read_turns(text.as_bytes(), 1), [(Turn { order: 1, asked: 2, granted: 3, released: 4 }, 1)]);
    }
}
