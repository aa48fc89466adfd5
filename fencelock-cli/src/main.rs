//! The command-line tool: reads the command line, runs one of its commands, and ends with the exit code of the manual.
//!
//! * `args`: what can be said. `run`, `elect`, `admin`, `migrate`, `torture`, `bench`, `gate`: the commands. `exit`: how they end.
//! * `hold`, `line`: getting the lock. `under`: a command while the lock is held.
//! * `supervised`, `protocol`, `supervisor`, `tree`: the process between the tool and its command, from both sides.
//! * `signals`, `terminal`, `console`, `text`, `log`: dealing with the world.
//!
//! A new command is a variant of `args::Command`, an arm of `dispatch`, and a module.

#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("the command-line tool needs Linux: it supervises its command by prctl and /proc");

mod admin;
mod args;
mod bench;
mod command;
mod console;
mod elect;
mod exit;
mod gate;
mod hold;
mod line;
mod log;
mod migrate;
mod protocol;
mod run;
mod signals;
mod supervised;
mod supervisor;
mod terminal;
mod text;
mod torture;
mod tree;
mod under;

use args::{Cli, Command};
use clap::CommandFactory;
use exit::{Exit, Failure, UNAVAILABLE};
use signal_hook::consts::signal::SIGINT;
use std::process::ExitCode;

fn main() -> ExitCode {
    if supervisor::is_asked_for() {
        return supervisor::main();
    }
    match tool() {
        Ok(Exit::Code(code)) => ExitCode::from(code),
        Ok(Exit::Interrupted) => {
            let _ = signal_hook::low_level::emulate_default_handler(SIGINT);
            ExitCode::from(130)
        }
        Err(failure) => {
            console::say(&failure.text);
            ExitCode::from(failure.code)
        }
    }
}

fn tool() -> Result<Exit, Failure> {
    let cli = match args::parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => return Err(args::one_line(&error)),
        Err(help) => {
            let _ = help.print();
            return Ok(Exit::OK);
        }
    };
    let volume = cli.command.volume();
    log::start(volume.quiet, volume.verbose)?;
    // The keeper renews on a thread of its own: a terminal that does not take our output must not cost us the lock.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(UNAVAILABLE, format!("cannot start threads: {error}")))?;
    let outcome = runtime.block_on(dispatch(&cli));
    runtime.shutdown_background();
    outcome
}

async fn dispatch(cli: &Cli) -> Result<Exit, Failure> {
    match &cli.command {
        Command::Run(args) => run::run(&cli.url, args).await,
        Command::Status(args) => admin::status(&cli.url, args).await,
        Command::List(args) => admin::list(&cli.url, args).await,
        Command::Break(args) => admin::take_away(&cli.url, args).await,
        Command::Elect(args) => elect::elect(&cli.url, args).await,
        Command::Migrate(args) => migrate::run(&cli.url, args).await,
        Command::Torture(args) => torture::run(args, &cli.url).await,
        Command::TortureWorker => torture::run_worker().await,
        Command::Bench(args) => bench::run(args, &cli.url).await,
        Command::BenchPeer(args) => bench::run_peer(args, &cli.url).await,
        Command::Gate(args) => gate::run(args).await,
        Command::Completions { shell } => completions(*shell),
    }
}

fn completions(shell: clap_complete::Shell) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "fencelock", &mut script);
    admin::print(&String::from_utf8_lossy(&script))
}
