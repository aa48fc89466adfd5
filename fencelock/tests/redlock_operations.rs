//! How Redlock's nodes are reached: over TLS, and as a user with few rights.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redlock")]

use fencelock::{Client, ErrorKind, connect};
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::redlock::Nodes;
use fencelock_testkit::wait::{eventually, until_free, until_line};
use std::time::Duration;

const NAME: &str = "app:invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);

/// The rights that `docs/engines/redlock.md` and `redis.md` name together, as a user would copy them.
fn documented() -> Vec<String> {
    let rights = |page: &str| -> Vec<String> {
        let words = page.split(|letter: char| letter.is_whitespace() || letter == '`');
        words.filter(|word| word.starts_with(['+', '~', '&'])).map(str::to_owned).collect()
    };
    let redis = include_str!("../../docs/engines/redis.md");
    let redlock = include_str!("../../docs/engines/redlock.md");
    let (_, redis) = redis.split_once("ACL SETUSER locks").unwrap();
    let (redis, _) = redis.split_once("```").unwrap();
    let (_, redlock) = redlock.split_once("Rights, beyond those in `redis.md`:").unwrap();
    let mut all = rights(redis);
    all.extend(rights(redlock));
    all
}

async fn use_everything(client: &Client, nodes: &Nodes) {
    // Many at once, before anybody waits: later on they go another way.
    let one_of_many = |number: u32| {
        let mutex = client.mutex(format!("app:{number}"));
        tokio::spawn(async move { mutex.acquire().await?.release().await })
    };
    for one in (0..20).map(one_of_many).collect::<Vec<_>>() {
        one.await.unwrap().unwrap();
    }
    let mutex = || client.mutex(NAME).ttl(LONG);
    let guard = mutex().acquire().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = mutex();
        async move { mutex.acquire().await }
    });
    until_line(client, NAME, 1, 1).await;
    assert_eq!(client.list("app:").await.unwrap().len(), 1);
    assert!(mutex().try_acquire().await.unwrap().is_none());
    assert!(mutex().acquire_timeout(Duration::from_millis(200)).await.is_err(), "it gives up");
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    until_free(client, NAME).await;
    // A renewal that has to bring the lock back; and notes of tokens that make room for new ones.
    let short = client.mutex(NAME).ttl(Duration::from_millis(600)).acquire().await.unwrap();
    eventually("it is held everywhere", async || nodes.holding(NAME) == nodes.servers.len()).await;
    nodes.servers[0].run(&["DEL", NAME]);
    eventually("it is brought back", async || nodes.holding(NAME) == nodes.servers.len()).await;
    for server in &nodes.servers {
        server.run(&["HSET", "fencelock:redlock:tokens", "", &"0".repeat(16)]);
    }
    client.mutex("app:another").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    short.lost().await;
}

/// What the documentation says is enough, is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_rights_are_enough() {
    let nodes = Nodes::start(3);
    let rights = documented();
    for server in &nodes.servers {
        let mut command = vec!["ACL", "SETUSER", "locks", "reset", "resetchannels", "on", ">secret"];
        command.extend(rights.iter().map(String::as_str));
        server.run(&command);
        server.run(&["ACL", "LOG", "RESET"]);
    }
    let url = nodes.url().replace("redlock://", "redlock://locks:secret@");
    let client = connect(&*url).await.unwrap();
    use_everything(&client, &nodes).await;
    client.close().await.unwrap();
    for server in &nodes.servers {
        assert_eq!(server.ask::<Vec<::redis::Value>>(&["ACL", "LOG"]), []);
    }
    let error = connect(url.replace("secret", "guessed")).await.unwrap_err();
    assert!(!error.to_string().contains("guessed"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_reaches_nodes_that_the_authorities_vouch_for() {
    let nodes = Nodes::start_with(3, &RedisServer::options().tls());
    let urls: Vec<(String, String)> = nodes
        .servers
        .iter()
        .map(|server| {
            let url = server.tls_url();
            let (address, ca) = url.strip_prefix("rediss://").unwrap().split_once("?ca=").unwrap();
            (address.to_owned(), std::fs::read_to_string(ca).unwrap())
        })
        .collect();
    let addresses: Vec<&str> = urls.iter().map(|(address, _)| address.as_str()).collect();
    let bundle = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(bundle.path(), urls.iter().map(|(_, ca)| ca.as_str()).collect::<String>()).unwrap();
    let url = format!("redlocks://{}?ca={}", addresses.join(","), bundle.path().display());
    let client = connect(&*url).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    // Nobody vouches for the others.
    std::fs::write(bundle.path(), &urls[0].1).unwrap();
    assert!(connect(&*url).await.is_err());
}
