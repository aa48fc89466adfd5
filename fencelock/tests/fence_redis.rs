//! The Redis fence and the optimistic lock on a real server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::fence::Retry;
use fencelock::fence::redis::{Change, RedisFence, modify};
use fencelock::{ErrorKind, Token};
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::rng::Rng;
use redis::aio::MultiplexedConnection;
use std::time::Duration;

async fn connection(server: &RedisServer) -> MultiplexedConnection {
    redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
}

#[tokio::test]
async fn an_older_token_changes_nothing() {
    let server = RedisServer::start();
    let mut redis = connection(&server).await;
    let fence = RedisFence::new("stock:7").unwrap();
    assert_eq!(fence.newest(&mut redis).await.unwrap(), None);
    fence.set(&mut redis, Token::new(5), "stock:7", "five").await.unwrap();
    fence.set(&mut redis, Token::new(5), "stock:7", "five again").await.unwrap();
    let error = fence.set(&mut redis, Token::new(4), "stock:7", "four").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.to_string().contains("token 4") && error.to_string().contains("token 5"), "{error}");
    assert_eq!(server.ask::<String>(&["GET", "stock:7"]), "five again");
    fence.raise(&mut redis, Token::new(9)).await.unwrap();
    assert_eq!(fence.raise(&mut redis, Token::new(8)).await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(fence.newest(&mut redis).await.unwrap(), Some(Token::new(9)));
    assert_eq!(server.ask::<String>(&["GET", "stock:7"]), "five again");
}

#[tokio::test]
async fn any_command_goes_through_the_fence() {
    let server = RedisServer::start();
    let mut redis = connection(&server).await;
    let fence = RedisFence::new("basket").unwrap();
    let count: i64 = fence.run(&mut redis, Token::new(1), redis::cmd("INCRBY").arg("n").arg(5), &["n"]).await.unwrap();
    assert_eq!(count, 5);
    let none: Option<String> =
        fence.run(&mut redis, Token::new(1), redis::cmd("GET").arg("missing"), &["missing"]).await.unwrap();
    assert_eq!(none, None);
    let mut write = redis::cmd("HSET");
    write.arg("h").arg("bytes").arg(&[0_u8, 255, 13, 10][..]);
    let _: i64 = fence.run(&mut redis, Token::new(2), &write, &["h"]).await.unwrap();
    let kept: Vec<u8> =
        fence.run(&mut redis, Token::new(2), redis::cmd("HGET").arg("h").arg("bytes"), &["h"]).await.unwrap();
    assert_eq!(kept, [0, 255, 13, 10]);
    // A command that fails changes nothing, the newest token included.
    let wrong = fence.run::<i64>(&mut redis, Token::new(7), redis::cmd("INCR").arg("h"), &["h"]).await.unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Engine, "{wrong}");
    assert_eq!(fence.newest(&mut redis).await.unwrap(), Some(Token::new(2)));
}

#[tokio::test]
async fn tokens_of_all_sizes_are_compared_as_numbers() {
    let server = RedisServer::start();
    let mut redis = connection(&server).await;
    let mut dice = Rng::new(7);
    let mut tokens: Vec<u64> =
        vec![0, 1, 9, 10, 99, 100, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, u64::MAX - 1, u64::MAX];
    tokens.extend((0..40).map(|_| dice.next_u64() >> dice.below(64)));
    tokens.sort_unstable();
    tokens.dedup();
    for (round, &first) in tokens.iter().enumerate() {
        for &second in &tokens {
            let fence = RedisFence::new(format!("r{round}:{second}")).unwrap();
            fence.raise(&mut redis, Token::new(first)).await.unwrap();
            let outcome = fence.raise(&mut redis, Token::new(second)).await;
            assert_eq!(outcome.is_ok(), second >= first, "{second} after {first}");
            assert_eq!(fence.newest(&mut redis).await.unwrap(), Some(Token::new(first.max(second))));
        }
    }
}

#[tokio::test]
async fn the_token_lies_in_the_slot_of_the_resource() {
    let server = RedisServer::options().set("cluster-enabled", "yes").start();
    for name in ["plain", "{tag}rest", "a}b", "{}x", "{a", "ü{ö}ä"] {
        let fence = RedisFence::new(name).unwrap();
        let slot = |key: &str| server.ask::<u32>(&["CLUSTER", "KEYSLOT", key]);
        assert_eq!(slot(fence.key()), slot(name), "{name}");
    }
}

#[tokio::test]
async fn a_token_can_be_forgotten_after_a_time() {
    let server = RedisServer::start();
    let mut redis = connection(&server).await;
    let fence = RedisFence::new("x").unwrap().forget_after(Duration::from_secs(3600));
    fence.set(&mut redis, Token::new(5), "x", 1).await.unwrap();
    let left: i64 = server.ask(&["PTTL", fence.key()]);
    assert!((3_500_000..=3_600_000).contains(&left), "{left}");
    let kept = RedisFence::new("y").unwrap();
    kept.set(&mut redis, Token::new(5), "y", 1).await.unwrap();
    assert_eq!(server.ask::<i64>(&["PTTL", kept.key()]), -1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_at_one_time_leave_the_newest() {
    let server = RedisServer::start();
    let tasks: Vec<_> = (0..16_u64)
        .map(|writer| {
            let url = server.url();
            tokio::spawn(async move {
                let mut redis = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
                let fence = RedisFence::new("x").unwrap();
                let mut newest = 0;
                for step in 0..100 {
                    let token = 1 + (step * 16 + writer * 11) % 1_000;
                    match fence.set(&mut redis, Token::new(token), "x", token).await {
                        Ok(()) => {
                            assert!(token >= newest, "{token} was taken after {newest}");
                            newest = token;
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
                    }
                }
                newest
            })
        })
        .collect();
    let mut newest = 0;
    for task in tasks {
        newest = newest.max(task.await.unwrap());
    }
    assert_eq!(server.ask::<u64>(&["GET", "x"]), newest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_optimistic_lock_loses_no_update() {
    let server = RedisServer::start();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let url = server.url();
            tokio::spawn(async move {
                let mut redis = redis::Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
                let retry = Retry::default().attempts(1_000).longest_pause(Duration::from_millis(10));
                for _ in 0..25 {
                    modify(&mut redis, "n", retry, |value| {
                        let number: u64 = value.map_or(0, |value| std::str::from_utf8(value).unwrap().parse().unwrap());
                        Ok(Change::Set((number + 1).to_string().into_bytes()))
                    })
                    .await
                    .unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(server.ask::<u64>(&["GET", "n"]), 200);
}

#[tokio::test]
async fn the_optimistic_lock_gives_up_and_leaves_things_as_they_are() {
    let server = RedisServer::start();
    let mut redis = connection(&server).await;
    server.run(&["SET", "x", "1", "PX", "1000000"]);
    let mut calls = 0;
    let outcome = modify(&mut redis, "x", Retry::default().attempts(3).longest_pause(Duration::ZERO), |_| {
        calls += 1;
        // Somebody else is always faster.
        server.run(&["SET", "x", &format!("other {calls}"), "KEEPTTL"]);
        Ok(Change::Set(b"mine".to_vec()))
    })
    .await;
    assert_eq!((outcome.unwrap_err().kind(), calls), (ErrorKind::Conflict, 3));
    assert_eq!(server.ask::<String>(&["GET", "x"]), "other 3");
    assert_eq!(modify(&mut redis, "x", Retry::default(), |_| Ok(Change::Keep)).await.unwrap(), Change::Keep);
    modify(&mut redis, "x", Retry::default(), |_| Ok(Change::Set(b"new".to_vec()))).await.unwrap();
    assert!(server.ask::<i64>(&["PTTL", "x"]) > 0, "the time to live stays");
    modify(&mut redis, "x", Retry::default(), |_| Ok(Change::Delete)).await.unwrap();
    assert_eq!(server.ask::<i64>(&["EXISTS", "x"]), 0);
}
