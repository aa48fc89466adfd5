//! One at a time, whatever happens: `cargo run -p fencelock --example mutex`. Start it in two terminals.

use std::time::Duration;

#[tokio::main]
async fn main() -> fencelock::Result<()> {
    let locks = fencelock::connect("file:").await?; // the user's state directory
    let mutex = locks.mutex("example:invoice:42").ttl(Duration::from_secs(10)).label("the mutex example");

    println!("waiting in line …");
    let billed = mutex
        .with(async |lock| {
            println!("mine, under token {}; nobody else bills this invoice for the next 3 s", lock.token());
            tokio::time::sleep(Duration::from_secs(3)).await;
            // Send the token along with the write: UPDATE … SET fence = $token WHERE id = 42 AND fence <= $token
            lock.token()
        })
        .await?;
    println!("billed under token {billed}");
    locks.close().await
}
