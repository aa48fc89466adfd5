//! The line rule exists in the functions of the databases as well: it must be the same one.

#![cfg(all(feature = "postgres", feature = "mysql"))]

use fencelock_testkit::rule::agrees_with_memory;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_and_the_rule_agree() {
    let database = fencelock_testkit::postgres::PostgresDatabase::new();
    agrees_with_memory(&database.url(), 8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_and_the_rule_agree() {
    let database = fencelock_testkit::mysql::MysqlDatabase::new();
    agrees_with_memory(&database.url(), 8).await;
}
