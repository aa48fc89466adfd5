//! A process that holds locks for a check, and can be killed, stopped and continued. With `torture-worker` it is one of
//! the processes of a torture, with `torture-worker SABOTAGE` one whose engine breaks a promise. With
//! `lost-update-writer` it is a writer of the lost-update experiment.

use fencelock_testkit::sabotage::{self, Sabotage};
use fencelock_testkit::{probe, torture};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        None => probe::serve(),
        Some("torture-worker") => return work(arguments.next()),
        #[cfg(feature = "lost-update")]
        Some("lost-update-writer") => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.expect("a runtime can be made").block_on(fencelock_testkit::lost_update::work());
            return ExitCode::SUCCESS;
        }
        Some(other) => eprintln!("unknown argument {other:?}"),
    }
    ExitCode::FAILURE
}

fn work(sabotage: Option<String>) -> ExitCode {
    let connect = match sabotage.map(|name| name.parse::<Sabotage>()).transpose() {
        Ok(None) => torture::by_url(),
        Ok(Some(sabotage)) => sabotage::connector(sabotage),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    match runtime.block_on(torture::work(connect)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
