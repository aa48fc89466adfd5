//! A holder is told that it lost the lock: `cargo run -p fencelock --example loss`.

use std::time::Duration;

#[tokio::main]
async fn main() -> fencelock::Result<()> {
    let locks = fencelock::connect("memory:").await?;
    let guard = locks.mutex("job").ttl(Duration::from_secs(2)).acquire().await?;
    println!("held under token {}, good for {:?} without a renewal", guard.token(), guard.valid_for());

    // Somebody takes it away, as `fencelock break` does.
    tokio::spawn({
        let locks = locks.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            locks.evict("job").await
        }
    });

    tokio::select! {
        () = work() => println!("done"),
        why = guard.lost() => println!("stopped in the middle: {why}"),
    }
    println!("valid: {}, release: {:?}", guard.is_valid(), guard.release().await);
    Ok(())
}

async fn work() {
    tokio::time::sleep(Duration::from_secs(60)).await;
}
