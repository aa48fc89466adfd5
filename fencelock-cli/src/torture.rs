//! `fencelock torture`: hammers the engine and tells whether it kept its promises. What is done and how it is judged is in
//! the test kit; here are the command line, the progress on a terminal and the verdict.

use crate::admin;
use crate::args::{parse_span, parse_ttl};
use crate::exit::{Exit, Failure};
use clap::Args;
use fencelock::{Error, ErrorKind, connect};
use fencelock_testkit::torture::{self, Plan, Progress, Verdict, Workers};
use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

/// The hidden command that starts one process of a torture; it calls [`run_worker`].
pub(crate) const WORKER: &str = "torture-worker";

/// Hammers the engine from many processes and checks exclusion, order and tokens
#[derive(Debug, Args)]
pub(crate) struct Torture {
    /// How long
    #[arg(long = "for", value_name = "DUR", default_value = "10s", value_parser = parse_span)]
    span: Duration,
    /// Workers in each process
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    workers: u32,
    /// Processes; on an engine that only one process sees, clients
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    processes: u32,
    /// Locks: the fewer, the more contention
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    names: u32,
    /// The lease of the locks
    #[arg(long, value_name = "DUR", default_value = "3s", value_parser = parse_ttl)]
    ttl: Duration,
    /// Kill processes at random, as kill -9 does, and start others
    #[arg(long)]
    kill: bool,
    /// Print the verdict as JSON
    #[arg(long)]
    json: bool,
}

impl Torture {
    fn plan(&self, url: &str) -> Plan {
        let mut plan = Plan::new(url);
        (plan.lasts, plan.ttl, plan.kill) = (self.span, self.ttl, self.kill);
        (plan.processes, plan.workers, plan.names) = (self.processes, self.workers, self.names);
        plan.patience = Duration::from_secs(20) + self.ttl * 5;
        plan
    }
}

/// Ends with 0 when every promise was kept, with 1 when one was broken.
pub(crate) async fn run(args: &Torture, url: &str) -> Result<Exit, Failure> {
    let workers = workers(args, url).await?;
    let live = !args.json && stderr().is_terminal();
    let verdict = torture::run(&args.plan(url), workers, |progress| {
        if live {
            show(progress, args.span);
        }
    })
    .await?;
    if live {
        let _ = write!(stderr(), "\r\x1b[K");
    }
    print(args, &verdict)?;
    Ok(Exit::Code(u8::from(!verdict.ok)))
}

/// The work of one process, which it reads from standard input.
pub(crate) async fn run_worker() -> Result<Exit, Failure> {
    torture::work(torture::by_url()).await?;
    Ok(Exit::OK)
}

async fn workers(args: &Torture, url: &str) -> fencelock::Result<Workers> {
    let client = connect(url).await?;
    let capability = client.capability();
    if capability.processes {
        client.close().await?;
        let program = std::env::current_exe().map_err(|error| {
            Error::new(ErrorKind::Unavailable, "cannot find the program to start more of it").caused_by(error)
        })?;
        return Ok(Workers::Processes(vec![program.into(), WORKER.into()]));
    }
    if args.kill {
        let text = format!("--kill needs an engine that several processes see; {} is seen by one", capability.engine);
        return Err(Error::new(ErrorKind::Invalid, text).during("torture"));
    }
    Ok(Workers::Here(torture::by_client(client)))
}

fn show(progress: Progress, span: Duration) {
    let (elapsed, span) = (progress.elapsed.as_secs_f64(), span.as_secs_f64());
    let kills = if progress.kills > 0 { format!(", {} killed", progress.kills) } else { String::new() };
    let _ = write!(stderr(), "\r{elapsed:.0} of {span:.0} s: {} grants{kills}\x1b[K", progress.grants);
    let _ = stderr().flush();
}

fn print(args: &Torture, verdict: &Verdict) -> Result<Exit, Failure> {
    if args.json {
        admin::print(&format!("{}\n", serde_json::to_string_pretty(verdict).expect("a verdict is plain data")))
    } else {
        admin::print(&format!("{verdict}\n"))
    }
}
