//! The command line: what can be said, and what is refused before anything is touched.

use crate::bench::{Bench, BenchPeer};
use crate::exit::Failure;
use crate::gate::GateArgs;
use crate::text::span;
use crate::torture::Torture;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fencelock::{MAX_TTL, MIN_TTL, Name, parse_duration};
use std::ffi::OsString;
use std::time::Duration;

/// The shortest span of a measurement or a torture.
const LEAST_SPAN: Duration = Duration::from_millis(100);

// Lines of at most 90 columns, so that they are not wrapped once more.
const EXAMPLES: &str = "\
Examples:
  fencelock run backup -- ./backup.sh               one at a time, the others wait in line
  fencelock run -n backup -- ./backup.sh            not at all if it is running already
  fencelock run -w 5m -a stock shop -- ./migrate    two locks at once, wait for 5 minutes
  fencelock run --slots 4 encode -- ffmpeg …        at most four of them
  fencelock run --min-hold 30s nightly -- ./report  by cron on hosts whose clocks differ

The command finds FENCELOCK_NAME, FENCELOCK_TOKEN (send it along with every write),
FENCELOCK_OWNER, FENCELOCK_URL and FENCELOCK_DEADLINE (Unix time in ms) in its
environment. A `fencelock run` of the same lock inside of it re-enters.

Exit status: the command's own (128 + signal when it was killed)
   64  bad usage                            75  the lock was not acquired in time
   69  the engine cannot be reached        126  the command cannot be executed
   74  the lock was lost meanwhile         127  the command was not found";

/// A distributed lock for scripts, cron jobs and migrations.
#[derive(Debug, Parser)]
#[command(name = "fencelock", version, max_term_width = 120)]
pub(crate) struct Cli {
    /// Where the locks are kept: file:/path, or another engine.
    ///
    /// `file:` alone is a directory of this user, on this machine.
    #[arg(short, long, global = true, env = "FENCELOCK_URL", hide_env_values = true, default_value = "file:")]
    #[arg(display_order = 100)]
    pub(crate) url: String,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock.
    Run(Run),
    /// Show who holds a lock, since when, and who waits.
    Status(Status),
    /// List the locks in use.
    List(List),
    /// Take a lock away from its holder, who is told that it lost it.
    Break(Break),
    /// Run a command while being the leader; stop it and stand again when that is lost.
    Elect(Elect),
    /// Make the tables that the locks need in a database, or print how.
    Migrate(Migrate),
    /// Hammer the engine from many processes and check exclusion, order and tokens.
    Torture(Torture),
    /// Measure throughput and latency of the engine from here.
    Bench(Bench),
    /// Stand before an HTTP API, and let a request in only with a token that is not older than the newest.
    Gate(GateArgs),
    /// One process of a torture.
    #[command(hide = true, name = crate::torture::WORKER)]
    TortureWorker,
    /// One process of a measurement of hand-overs.
    #[command(hide = true)]
    BenchPeer(BenchPeer),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

impl Command {
    /// `-q` and `-v`, where they exist.
    pub(crate) fn volume(&self) -> Volume {
        match self {
            Command::Run(run) => run.volume,
            Command::Elect(elect) => elect.volume,
            Command::Gate(gate) => gate.volume,
            _ => Volume::default(),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// Print the SQL instead of running it: for an administrator.
    #[arg(long)]
    pub(crate) print: bool,

    /// postgres, mysql, or the whole URL [default: that of --url].
    #[arg(value_name = "ENGINE")]
    pub(crate) scheme: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Run {
    /// Give up at once when the lock is busy.
    #[arg(short, long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,

    /// Wait at most so long (30s, 5m, 1h30m) [default: for ever].
    #[arg(short, long, value_name = "DUR", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) wait: Option<Duration>,

    /// Hold this lock as well, all or none, without deadlock (repeatable).
    #[arg(short, long, value_name = "NAME")]
    pub(crate) also: Vec<String>,

    /// Hold it as a reader, together with other readers; without this, as a writer.
    #[arg(long)]
    pub(crate) shared: bool,

    /// A semaphore: at most N holders. All who use the name must give the same N.
    #[arg(long, value_name = "N", value_parser = parse_slots, allow_hyphen_values = true)]
    pub(crate) slots: Option<u32>,

    #[command(flatten)]
    pub(crate) lease: Lease,

    /// What happens to the command when the lock is lost.
    #[arg(long, value_name = "ACTION", default_value = "term")]
    pub(crate) on_lost: OnLost,

    /// Keep the lock at least so long, also when the command ends sooner.
    #[arg(long, value_name = "DUR", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) min_hold: Option<Duration>,

    #[command(flatten)]
    pub(crate) volume: Volume,

    /// The name of the lock.
    pub(crate) name: String,

    /// The command and its arguments; no shell is involved.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

impl Run {
    /// What clap cannot see.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for name in std::iter::once(&self.name).chain(&self.also) {
            Name::new(name)?;
        }
        if !self.also.is_empty() && (self.shared || self.slots.is_some()) {
            let option = if self.shared { "--shared" } else { "--slots" };
            return Err(Failure::usage(format!(
                "--also holds all its locks alone, so it cannot be used with {option}; nest two `fencelock run` instead"
            )));
        }
        if self.shared && self.slots.is_some() {
            return Err(Failure::usage(
                "--shared has no limit and --slots has one, so they cannot be used together; choose one",
            ));
        }
        self.lease.check()
    }
}

#[derive(Debug, Args)]
pub(crate) struct Elect {
    #[command(flatten)]
    pub(crate) lease: Lease,

    #[command(flatten)]
    pub(crate) volume: Volume,

    /// The name of the election.
    pub(crate) name: String,

    /// The command and its arguments; no shell is involved.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

impl Elect {
    pub(crate) fn check(&self) -> Result<(), Failure> {
        Name::new(&self.name)?;
        self.lease.check()
    }
}

/// How long a grant lasts, and when its coming end is acted on.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Lease {
    /// The lease: how soon others can go on if this machine dies. Renewed while the command runs [default: 30s].
    #[arg(long, value_name = "DUR", value_parser = parse_ttl, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Duration>,

    /// From SIGTERM to SIGKILL when the lock is lost; both fall inside the lease [default: a sixth of the ttl].
    #[arg(long, value_name = "DUR", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) grace: Option<Duration>,
}

impl Lease {
    fn check(&self) -> Result<(), Failure> {
        match (self.grace, self.ttl) {
            (Some(grace), Some(ttl)) => check_grace(grace, ttl),
            _ => Ok(()),
        }
    }

    /// The grace for a lease of this length.
    pub(crate) fn grace(&self, ttl: Duration) -> Result<Duration, Failure> {
        let grace = self.grace.unwrap_or(ttl / 6);
        check_grace(grace, ttl).map(|()| grace)
    }
}

/// A lease is renewed at a third of its length: a grace that begins before a renewal could fail would stop healthy commands.
fn check_grace(grace: Duration, ttl: Duration) -> Result<(), Failure> {
    if grace <= ttl / 2 {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "--grace {} does not fit into a ttl of {}, which must have room for renewals as well; give at most {}, or a longer --ttl",
        span(grace),
        span(ttl),
        span(ttl / 2)
    )))
}

/// Of work that shows something: how long it goes on.
pub(crate) fn parse_span(text: &str) -> Result<Duration, String> {
    let span = parse_duration(text).map_err(|error| error.to_string())?;
    if span < LEAST_SPAN {
        return Err(format!("too short to show anything; give it {} at least", self::span(LEAST_SPAN)));
    }
    Ok(span)
}

pub(crate) fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = parse_duration(text).map_err(|error| error.to_string())?;
    if (MIN_TTL..=MAX_TTL).contains(&ttl) {
        return Ok(ttl);
    }
    Err("choose 100ms to 24h; the lease is renewed while the command runs, so it need not cover it".to_owned())
}

fn parse_slots(text: &str) -> Result<u32, &'static str> {
    text.parse().ok().filter(|slots| *slots > 0).ok_or("write how many may hold it at once, as a whole number from 1")
}

#[derive(Debug, Default, Clone, Copy, Args)]
pub(crate) struct Volume {
    /// Say nothing but errors, such as the loss of the lock.
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Tell about waiting and timing.
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// SIGTERM, then SIGKILL after the grace.
    Term,
    /// SIGKILL at once.
    Kill,
    /// Say so on stderr, and let it run.
    Warn,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The name of the lock; without it, all locks in use.
    pub(crate) name: Option<String>,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only names that start with this.
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Break {
    /// The name of the lock.
    pub(crate) name: String,

    /// Do not ask.
    #[arg(short, long)]
    pub(crate) yes: bool,
}

/// Reads the command line. The error is to be printed as it is if it is help, or as the one line of a failure.
pub(crate) fn parse() -> Result<Cli, clap::Error> {
    Cli::try_parse()
}

/// clap's error as one line: what is wrong, a remedy, where to read more.
pub(crate) fn one_line(error: &clap::Error) -> Failure {
    let text = match error.kind() {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "no command given, such as `fencelock run backup -- ./backup.sh`".to_owned()
        }
        ErrorKind::MissingRequiredArgument => format!("{} is missing", context(error, ContextKind::InvalidArg)),
        _ => first_paragraph(error),
    };
    Failure::usage(format!("{text}{}; see '{}'", remedy(error), help_page()))
}

/// clap says what is wrong first; tips and usage follow after empty lines.
fn first_paragraph(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    let first = rendered.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.trim_start_matches("error: ").split_whitespace().collect();
    words.join(" ")
}

fn remedy(error: &clap::Error) -> String {
    let suggestions = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    if let Some(suggestion) = suggestions.iter().map(|kind| context(error, *kind)).find(|text| !text.is_empty()) {
        return format!(", did you mean {suggestion}?");
    }
    let forgot_dashes = match error.kind() {
        ErrorKind::MissingRequiredArgument => true,
        ErrorKind::UnknownArgument => !context(error, ContextKind::InvalidArg).starts_with('-'),
        _ => false,
    };
    match subcommand() {
        Some(name) if forgot_dashes && ["run", "elect"].contains(&name.as_str()) => {
            format!("; the command stands after two dashes: fencelock {name} NAME -- COMMAND")
        }
        _ => String::new(),
    }
}

fn context(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(" "),
        _ => String::new(),
    }
}

/// Where the help for this command line is.
fn help_page() -> String {
    subcommand().map_or("fencelock --help".to_owned(), |name| format!("fencelock {name} --help"))
}

/// The subcommand that was meant, when parsing has failed.
fn subcommand() -> Option<String> {
    let given: Vec<OsString> = std::env::args_os().skip(1).take_while(|word| word != "--").collect();
    let known = Cli::command();
    let mut names = known.get_subcommands().map(clap::Command::get_name);
    names.find(|name| given.iter().any(|word| word == name)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_url_may_stand_on_either_side() {
        for words in [["fencelock", "-u", "memory:", "list"], ["fencelock", "list", "-u", "memory:"]] {
            assert_eq!(Cli::try_parse_from(words).unwrap().url, "memory:");
        }
    }

    #[test]
    fn what_follows_the_dashes_is_the_command() {
        let cli = Cli::try_parse_from(["fencelock", "run", "x", "--", "ls", "-n", "--", "-u"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("run") };
        assert_eq!(run.command, ["ls", "-n", "--", "-u"]);
    }

    #[test]
    fn the_grace_leaves_room_for_renewals() {
        let lease = Lease { ttl: None, grace: None };
        assert_eq!(lease.grace(Duration::from_secs(30)).unwrap(), Duration::from_secs(5));
        let lease = Lease { ttl: None, grace: Some(Duration::from_secs(16)) };
        assert!(lease.grace(Duration::from_secs(30)).is_err());
    }
}
