//! `migrate`: what an administrator runs in a database, for those whose clients may not create tables.

use crate::admin::print;
use crate::args::Migrate;
use crate::exit::{Exit, Failure};
use crate::run::reach;

/// Prints the SQL, or connects, which makes what is missing.
pub(crate) async fn run(url: &str, args: &Migrate) -> Result<Exit, Failure> {
    if args.print {
        let scheme = args.scheme.as_deref().unwrap_or(url);
        return print(&fencelock::migration(scheme)?);
    }
    fencelock::migration(args.scheme.as_deref().unwrap_or(url))?;
    let client = reach(args.scheme.as_deref().unwrap_or(url)).await?;
    let address = client.address().to_owned();
    client.close().await?;
    print(&format!("{address} is ready\n"))
}
