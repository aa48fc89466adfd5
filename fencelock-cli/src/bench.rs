//! `fencelock bench`: how fast this engine is from here.

use crate::admin;
use crate::args::parse_span;
use crate::exit::{Exit, Failure};
use clap::Args;
use fencelock::parse_duration;
use fencelock_testkit::measure::{self, Latency, Pairs};
use serde::Serialize;
use std::process::Command;
use std::time::Duration;

/// Measures throughput and latency of the engine from here.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Tasks that work at the same time, each on a lock of its own
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    tasks: u16,
    /// How long each of the two measurements lasts
    #[arg(long = "for", value_name = "DUR", default_value = "3s", value_parser = parse_span)]
    span: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One process of the hand-over measurement.
#[derive(Debug, Args)]
pub(crate) struct BenchPeer {
    name: String,
    #[arg(value_parser = parse_duration)]
    span: Duration,
}

#[derive(Serialize)]
struct Report<'a> {
    engine: &'a str,
    url: &'a str,
    #[serde(flatten)]
    pairs: Pairs,
    /// `null` on an engine that only one process sees.
    hand_over: Option<Latency>,
}

pub(crate) async fn run(args: &Bench, url: &str) -> Result<Exit, Failure> {
    let client = fencelock::connect(url).await?;
    let prefix = format!("fencelock-bench-{}-", std::process::id());
    let pairs = measure::pairs(&client, &prefix, args.tasks.into(), args.span).await?;
    let hand_over = if client.capability().processes { Some(hand_over(args, url, &prefix).await?) } else { None };
    let report = Report { engine: client.capability().engine, url: client.address(), pairs, hand_over };
    if args.json {
        admin::print(&format!("{}\n", serde_json::to_string_pretty(&report).expect("a report is plain data")))?;
    } else {
        admin::print(&text(&report))?;
    }
    client.close().await?;
    Ok(Exit::OK)
}

async fn hand_over(args: &Bench, url: &str, prefix: &str) -> fencelock::Result<Latency> {
    let failed = |error: std::io::Error| {
        fencelock::Error::new(fencelock::ErrorKind::Engine, format!("cannot measure the hand-over: {error}"))
    };
    let program = std::env::current_exe().map_err(failed)?;
    let (url, name, span) = (url.to_owned(), format!("{prefix}hand-over"), format!("{}ms", args.span.as_millis()));
    let work = move || {
        measure::hand_overs(|_| {
            let mut peer = Command::new(&program);
            peer.args(["bench-peer", "--url", &url, &name, &span]);
            peer
        })
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| failed(error.into()))?.map_err(failed)
}

pub(crate) async fn run_peer(args: &BenchPeer, url: &str) -> Result<Exit, Failure> {
    let client = fencelock::connect(url).await?;
    measure::peer(&client, &args.name, 1, args.span).await?;
    client.close().await?;
    Ok(Exit::OK)
}

fn text(report: &Report<'_>) -> String {
    let mut lines = vec![
        format!("engine     {} ({})", report.engine, report.url),
        format!("tasks      {}, each on a lock of its own", report.pairs.tasks),
        format!("pairs      {:.0} per second (acquire + release)", report.pairs.per_second),
        String::new(),
        format!("{:<10} {:>10} {:>10} {:>10} {:>12}", "", "p50", "p99", "p99.9", "measured"),
        row("acquire", &report.pairs.acquire),
        row("release", &report.pairs.release),
    ];
    lines.push(match &report.hand_over {
        Some(latency) => row("hand-over", latency),
        None => "hand-over  only one process can see this engine".to_owned(),
    });
    lines.join("\n") + "\n"
}

fn row(what: &str, latency: &Latency) -> String {
    let us = |value: f64| format!("{value:.1} µs");
    let (p50, p99, p999) = (us(latency.p50_us), us(latency.p99_us), us(latency.p999_us));
    format!("{what:<10} {p50:>10} {p99:>10} {p999:>10} {:>12}", latency.count)
}
