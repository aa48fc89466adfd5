//! The line rule exists in the script of the Redis engine as well: it must be the same one.

#![cfg(feature = "redis")]

use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::rule::agrees_with_memory;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_script_and_the_rule_agree() {
    let server = RedisServer::start();
    agrees_with_memory(&server.url(), 8).await;
}
