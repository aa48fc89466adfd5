//! Readers and writers, permits, several locks at once, re-entry: `cargo run -p fencelock --example modes`.

#[tokio::main]
async fn main() -> fencelock::Result<()> {
    let locks = fencelock::connect("memory:").await?;

    let config = locks.rwlock("config");
    let (one, two) = (config.read().await?, config.read().await?);
    println!("two readers; a writer must wait: {}", config.try_write().await?.is_none());
    drop((one, two));

    let gpus = locks.semaphore("gpu", 2);
    let (first, second) = (gpus.acquire().await?, gpus.acquire().await?);
    println!("two of two permits; a third must wait: {}", gpus.try_acquire().await?.is_none());
    drop((first, second));

    let both = locks.all(["account:7", "account:3"]).acquire().await?;
    println!("both accounts, tokens {:?} and {:?}", both.token_of("account:7"), both.token_of("account:3"));
    both.release().await?;

    let outer = locks.mutex("ledger").acquire().await?;
    let inner = outer.reenter().await?;
    outer.release().await?;
    println!("still held by the inner guard: {}", locks.status("ledger").await?.is_held());
    inner.release().await?;
    println!("free: {}", !locks.status("ledger").await?.is_held());
    Ok(())
}
