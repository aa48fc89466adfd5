//! One leader at a time: `cargo run -p fencelock --example election -- NODE`. Start it in two terminals with different names,
//! then stop the leader, or kill it.

use std::time::Duration;

#[tokio::main]
async fn main() -> fencelock::Result<()> {
    let node = std::env::args().nth(1).unwrap_or_else(|| "node-1".to_owned());
    let locks = fencelock::connect("file:").await?;
    let election = locks.election("example:scheduler").label(&node).ttl(Duration::from_secs(5));

    if let Some(leader) = election.leader().await? {
        println!("{node}: {} leads, standing by", leader.label);
    }
    let leadership = election.campaign().await?;
    println!("{node}: leading, term {}", leadership.token());
    tokio::select! {
        why = leadership.lost() => println!("{node}: deposed: {why}"),
        () = lead(&node) => leadership.release().await?,
    }
    locks.close().await
}

async fn lead(node: &str) {
    for tick in 1..=10 {
        println!("{node}: scheduling, tick {tick}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    println!("{node}: resigning");
}
