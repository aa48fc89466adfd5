//! An invoice that is billed once: the lock keeps others out, the fence in the row keeps out a holder that overslept.
//!
//! `cargo run --example invoice --features fence-sqlite` (rusqlite with `bundled` needs no SQLite on the machine). With PostgreSQL or
//! MySQL the same calls are in `fence::sql::postgres` and `fence::sql::mysql`.

use fencelock::fence::sql::sqlite;
use fencelock::{ErrorKind, Token};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(example())
}

async fn example() -> Result<(), Box<dyn Error>> {
    let mut db = rusqlite::Connection::open_in_memory()?;
    db.execute_batch(
        "CREATE TABLE invoices (id INTEGER PRIMARY KEY, state TEXT, cents INTEGER, fence BIGINT NOT NULL DEFAULT 0);
         INSERT INTO invoices (id, state, cents) VALUES (42, 'draft', 0);",
    )?;
    let locks = fencelock::connect("memory:").await?;

    // A takes the lock, and is paused for longer than its lease: the lock is taken from it.
    let a = locks.mutex("invoice:42").acquire().await?;
    let old = a.token();
    locks.evict("invoice:42").await?;

    // B takes it, and bills.
    let b = locks.mutex("invoice:42").acquire().await?;
    bill(&mut db, b.token(), 9_900)?;
    println!("B billed with token {}", b.token());

    // A wakes up, knows of nothing, and writes what it had computed.
    match bill(&mut db, old, 100) {
        Err(error) if error.kind() == ErrorKind::Fenced => println!("A was refused: {error}"),
        other => return Err(format!("A must be refused: {other:?}").into()),
    }
    let (state, cents): (String, i64) =
        db.query_row("SELECT state, cents FROM invoices WHERE id = 42", [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    assert_eq!((state.as_str(), cents), ("billed", 9_900));
    b.release().await?;
    Ok(())
}

/// Raise, read, write: in one transaction of ours, which the fence is a part of.
fn bill(db: &mut rusqlite::Connection, token: Token, cents: i64) -> fencelock::Result<()> {
    let failed = |error| fencelock::Error::new(ErrorKind::Engine, "the database failed").caused_by(error);
    let work = db.transaction().map_err(failed)?;
    let invoice = sqlite::row("invoices", "id = ?", &[&42]);
    sqlite::raise(&work, &invoice, token)?;
    sqlite::write(&work, &invoice, token, "state = ?, cents = ?", &[&"billed", &cents])?;
    work.commit().map_err(failed)
}
