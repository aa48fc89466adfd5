//! Rust's rslock. See `foreign.rs` for what it is asked.

use rslock::{Lock, LockManager};
use std::io::{BufRead, Write};
use std::time::Duration;

#[tokio::main]
async fn main() {
    let port = std::env::args().nth(1).expect("the server's port");
    let mut manager = LockManager::new(vec![format!("redis://127.0.0.1:{port}")]);
    manager.set_retry(1, Duration::from_millis(1));
    let mut held: Option<Lock> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("the input can be read");
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match (words.as_slice(), &held) {
            (["lock", name, milliseconds], _) => {
                let ttl = Duration::from_millis(milliseconds.parse().expect("a number"));
                match manager.lock(*name, ttl).await {
                    Ok(lock) => {
                        held = Some(lock);
                        "locked"
                    }
                    Err(_) => "busy",
                }
            }
            (["extend"], Some(lock)) => match manager.extend(lock, Duration::from_secs(60)).await {
                Ok(_) => "extended",
                Err(_) => "lost",
            },
            // It does not tell whether the lock was its own.
            (_, Some(lock)) => {
                manager.unlock(lock).await;
                "unlocked"
            }
            (_, None) => "nothing is held",
        };
        writeln!(std::io::stdout(), "{answer}").expect("somebody reads");
    }
}
