//! Redlock's nodes: what each of them does with the operations of a batch, what it notes, and for how long.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redlock")]

use fencelock::{Client, ErrorKind};
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::redlock::{NOTE, Nodes, TOKENS, value, who};
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use std::time::Duration;

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);
/// Many locks at once, while somebody waits: for some of them, and for another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_hands_over_what_is_waited_for_and_passes_nobody_by() {
    let nodes = Nodes::start(3);
    let (holder, other) = (nodes.client().await, nodes.client().await);
    let names: Vec<String> = (0..40).map(|number| format!("batch:{number}")).collect();
    for round in 0..5 {
        let all = |client: &Client| {
            let acquire = |name: &String| {
                let mutex = client.mutex(name.as_str()).ttl(LONG);
                tokio::spawn(async move { mutex.acquire().await.unwrap() })
            };
            names.iter().map(acquire).collect::<Vec<_>>()
        };
        let mut held = Vec::new();
        for acquired in all(&holder) {
            held.push(at_once("it is free", acquired).await.unwrap());
        }
        let waiting = all(&other);
        for name in &names {
            until_line(&other, name, 1, 1).await;
        }
        let pushed = || nodes.servers.iter().map(|server| server.calls(&["publish"])).sum::<u64>();
        let before = pushed();
        let released: Vec<_> = held.into_iter().map(|guard| tokio::spawn(guard.release())).collect();
        for guard in waiting {
            at_once("it is handed over", guard).await.unwrap().release().await.unwrap();
        }
        for released in released {
            released.await.unwrap().unwrap();
        }
        // Whoever finds it free in the end was not told.
        assert!(pushed() - before >= 2 * names.len() as u64, "round {round}: a majority hands over");
    }
}

/// Many free locks at once are granted in few steps, and each as if it were alone: it ends, its token is noted and above all before,
/// and one that cannot be had does not stand in the way of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_granted_as_each_of_it_would_be() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    let names: Vec<String> = (0..40).map(|number| format!("batch:{number}")).collect();
    let all = async || {
        let acquire = |name: &String| {
            let mutex = client.mutex(name.as_str()).ttl(LONG);
            tokio::spawn(async move { mutex.try_acquire().await.unwrap() })
        };
        let mut guards = Vec::new();
        for acquired in names.iter().map(acquire).collect::<Vec<_>>() {
            guards.push(acquired.await.unwrap());
        }
        guards
    };
    let guards = all().await;
    assert!(guards.iter().all(Option::is_some));
    let mut newest = 0;
    for (name, guard) in names.iter().zip(guards.into_iter().flatten()) {
        eventually("it is held everywhere", async || nodes.holding(name) == 3).await;
        for server in &nodes.servers {
            let (life, noted) = (server.ask::<i64>(&["PTTL", name]), server.ask::<u64>(&["HEXISTS", TOKENS, name]));
            assert!(life > 0, "{name} has no end");
            assert_eq!(noted, 1, "{name} is not noted");
        }
        newest = newest.max(guard.token().as_u64());
        guard.release().await.unwrap();
        until_free(&client, name).await;
    }
    // Somebody who knows nothing of fencelock holds one of them.
    for server in &nodes.servers {
        server.run(&["SET", "batch:20", "somebody", "PX", "100000"]);
    }
    for (name, guard) in names.iter().zip(all().await) {
        assert_eq!(guard.is_none(), name == "batch:20", "{name}");
        if let Some(guard) = guard {
            assert!(guard.token().as_u64() > newest, "{name}");
            guard.release().await.unwrap();
            until_free(&client, name).await;
        }
    }
    // Somebody's clock was ahead by half a minute, for one of them.
    let ahead = newest + 30_000_000;
    nodes.note_token("batch:30", ahead);
    for (name, guard) in names.iter().zip(all().await) {
        assert!(
            name == "batch:20" || guard.unwrap().token().as_u64() > if name == "batch:30" { ahead } else { newest }
        );
    }
}

/// A node's answer to a group of operations: the letters of `vote.lua`.
fn vote(server: &RedisServer, code: &str, items: &[(&str, String)]) -> String {
    vote_with(server, SCRIPT, code, items)
}

const SCRIPT: &str = include_str!("../src/engine/redlock/vote.lua");

fn vote_with(server: &RedisServer, script: &str, code: &str, items: &[(&str, String)]) -> String {
    let count = items.len().to_string();
    let mut command = vec!["EVAL", script, "0"];
    command.extend(["900000", "2000", "60000", code, &count, "30000"]);
    if "aAtT".contains(code) {
        command.extend(items.iter().flat_map(|(name, what)| [*name, what]));
    } else {
        command.extend(items.iter().map(|(name, _)| *name));
        command.extend(items.iter().map(|(_, what)| what.as_str()));
    }
    let mut answer: Vec<redis::Value> = server.ask(&command);
    redis::from_redis_value(answer.swap_remove(1)).unwrap()
}

/// In one command, or one by one if that cannot be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_grants_many_as_it_grants_one() {
    let server = RedisServer::start();
    let names = ["x", "y", "z"];
    let mut token = 1_800_000_000_000_000;
    for (held, letters) in [(false, "ggg"), (true, "gbg")] {
        if held {
            server.run(&["SET", "y", "somebody", "PX", "100000"]);
        }
        let claims: Vec<_> = names.iter().zip(token..).map(|(name, token)| (*name, value(token, "a"))).collect();
        assert_eq!(vote(&server, "T", &claims), letters);
        assert_eq!(server.calls(&["msetnx"]), 1 + u64::from(held), "it is tried in one go");
        for (name, value) in claims.iter().filter(|(name, _)| !held || *name != "y") {
            let life = server.ask::<i64>(&["PTTL", name]);
            assert!((1..=30_000).contains(&life), "{name} has no end: {life}");
            assert_eq!(server.ask::<String>(&["GET", name]), *value);
            assert_eq!(server.ask::<String>(&["HGET", TOKENS, name]), *value, "{name} is noted");
        }
        let releases = |owner: &str, note: &str| -> Vec<_> {
            let what = |token| format!("{}{note}", who(token, owner));
            names.iter().zip(token..).map(|(name, token)| (*name, what(token))).collect()
        };
        assert_eq!(vote(&server, "r", &releases("b", NOTE)), "000", "somebody else's");
        let note = if held { "\nanother\nlabel" } else { NOTE };
        assert_eq!(vote(&server, "r", &releases("a", note)), letters.replace('g', "f").replace('b', "0"));
        token += 10;
    }
    assert_eq!(server.ask::<String>(&["GET", "y"]), "somebody");
}

/// Two who propose the same token: the second one must propose another, whatever its id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_accepted_for_one_owner_only() {
    let server = RedisServer::start();
    let mut token = 1_800_000_000_000_000;
    for (first, second) in [("a", "b"), ("b", "a")] {
        for group in ["t", "T", "a", "A"] {
            token += 10;
            let one = format!("{group}:{first}");
            let claims = [("other", value(token - 1, first)), (&one, value(token, first))];
            assert_eq!(vote(&server, group, &claims), "gg");
            assert_eq!(vote(&server, "r", &[("other", who(token - 1, first)), (&one, who(token, first))]), "ff");
            let claims = [(one.as_str(), value(token, second)), ("other", value(token + 1, second))];
            assert_eq!(vote(&server, group, &claims), "lg", "{group}: {second} after {first}");
            assert_eq!(vote(&server, "r", &[("other", who(token + 1, second))]), "f");
            let alone = &group.to_lowercase();
            assert_eq!(vote(&server, alone, &[(&one, value(token, second))]), "l", "{group}: {second} alone");
            assert_eq!(vote(&server, alone, &[(&one, value(token, first))]), "g", "the same one may come again");
        }
    }
}

/// A lock may be free although somebody waits: a batch sees it as a lone claim does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_passes_nobody_by_who_waits_for_a_free_lock() {
    let nodes = Nodes::start(3);
    let (client, other) = (nodes.client().await, nodes.client().await);
    for round in 0..5 {
        let name = |number: u32| format!("batch:{round}:{number}");
        let wanted = name(20);
        // Somebody who tells nobody holds it, and dies.
        nodes.servers.iter().for_each(|server| server.run(&["SET", &wanted, "somebody", "PX", "100000"]));
        let mutex = other.mutex(wanted.as_str()).ttl(LONG);
        let waiting = tokio::spawn(async move { mutex.acquire().await.unwrap() });
        until_line(&client, &wanted, 1, 1).await;
        nodes.servers.iter().for_each(|server| server.run(&["DEL", &wanted]));
        let acquire = |number: u32| {
            let mutex = client.mutex(name(number)).ttl(LONG);
            tokio::spawn(async move { mutex.try_acquire().await.unwrap() })
        };
        for (number, acquired) in (0..40).map(acquire).collect::<Vec<_>>().into_iter().enumerate() {
            assert_eq!(acquired.await.unwrap().is_none(), number == 20, "round {round}: {number}");
        }
        drop(at_once("the one who waited has it", waiting).await.unwrap());
    }
}

/// Also one that travels alone: here the one who waits is gone, and is struck off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_looks_at_the_line() {
    let server = RedisServer::start();
    let token = 1_700_000_000_000_000;
    assert_eq!(vote(&server, "a", &[("k", value(token, "a"))]), "g");
    assert_eq!(vote(&server, "a", &[("k", value(token + 1, "b"))]), "w");
    assert_eq!(vote(&server, "r", &[("k", who(token, "a"))]), "f");
    assert_eq!(server.ask::<u64>(&["EXISTS", "k", "fencelock:rq:k", "fencelock:rw:k"]), 0);
}

/// What is meant for one proposal does nothing to another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_knows_proposals_apart() {
    let server = RedisServer::start();
    let token = 1_800_000_000_000_000;
    assert_eq!(vote(&server, "a", &[("k", value(token, "a"))]), "g");
    for code in ["n", "c"] {
        assert_eq!(vote(&server, code, &[("k", value(token + 1, "b"))]), "n", "{code}: somebody else holds");
        assert_eq!(vote(&server, code, &[("k", value(token, "a"))]), "y", "{code}");
    }
    assert_eq!(vote(&server, "r", &[("k", value(token, "b"))]), "0", "somebody else's");
    assert_eq!(vote(&server, "v", &[("k", who(token + 1, "a"))]), "0", "another hold of the same owner");
    assert_eq!(vote(&server, "o", &[("k", who(token, "a"))]), "0", "it is a hold of fencelock's");
    // It waits again, with another proposal: the old one is taken back later.
    assert_eq!(vote(&server, "a", &[("k", value(token + 2, "b"))]), "w");
    assert_eq!(vote(&server, "u", &[("k", who(token + 1, "b"))]), "0");
    assert_eq!(server.ask::<u64>(&["ZCARD", "fencelock:rq:k"]), 1, "it still waits");
    assert_eq!(vote(&server, "u", &[("k", who(token + 2, "b"))]), "0");
    assert_eq!(server.ask::<u64>(&["ZCARD", "fencelock:rq:k"]), 0);
    assert_eq!(vote(&server, "v", &[("k", who(token, "a"))]), "f");
    // Neither the length nor a part of what a client of another kind writes makes it one of ours.
    for foreign in ["somebody", "", &"x".repeat(60), &value(token, "a").replace('\n', " ")] {
        server.run(&["SET", "k", foreign, "PX", "100000"]);
        assert_eq!(vote(&server, "v", &[("k", who(token, "a"))]), "0", "{foreign}");
        assert_eq!(vote(&server, "o", &[("k", who(token, "a"))]), "f", "{foreign}");
    }
}

/// A machine without a clock of its own begins in 1970.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_has_few_digits_knows_what_it_accepted() {
    let server = RedisServer::start();
    let token = 1_800_000_000_000_000;
    assert!(SCRIPT.contains("call('TIME')"));
    for seconds in ["7", "100", "999999999", "1000000000"] {
        let script = SCRIPT.replace("call('TIME')", &format!("{{'{seconds}', '5'}}"));
        let vote = |code: &str, items: &[(&str, String)]| vote_with(&server, &script, code, items);
        server.run(&["FLUSHALL"]);
        assert_eq!(vote("A", &[("j", value(token, "a")), ("k", value(token + 1, "a"))]), "gg", "{seconds}");
        server.run(&["DEL", "j", "k"]);
        assert_eq!(vote("A", &[("j", value(token - 2, "b")), ("k", value(token - 1, "b"))]), "ll", "{seconds}");
        assert_eq!(vote("a", &[("j", value(token + 2, "b"))]), "g", "{seconds}");
        assert_eq!(vote("a", &[("j", value(token + 3, "c"))]), "w", "{seconds}");
        let record: String = server.ask(&["HGET", "fencelock:rw:j", &"c".repeat(22)]);
        let parts: Vec<&str> = record.splitn(3, '\n').collect();
        assert_eq!((parts[1].len(), parts[2]), (16, &*value(token + 3, "c")), "{seconds}");
    }
}

/// One that was written by nobody knows whom stands in nobody's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_record_is_struck_off() {
    let server = RedisServer::start();
    let token = 1_800_000_000_000_000;
    for record in ["junk\nx", "junk", "", "\n", "30000\n\n"] {
        server.run(&["ZADD", "fencelock:rq:k", "1", "nobody"]);
        server.run(&["HSET", "fencelock:rw:k", "nobody", record]);
        server.run(&["SET", "fencelock:redlock:waits", "1700000000000000", "PX", "60000"]);
        assert_eq!(vote(&server, "a", &[("k", value(token, "a"))]), "g", "{record}");
        assert_eq!(server.ask::<u64>(&["EXISTS", "fencelock:rq:k", "fencelock:rw:k"]), 0, "{record}");
        assert_eq!(vote(&server, "r", &[("k", value(token, "a"))]), "f");
    }
}

/// Where somebody waits, a lone claim takes another way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_too_low_is_so_in_a_crowd_as_well() {
    let server = RedisServer::start();
    let token = 1_800_000_000_000_000;
    assert_eq!(vote(&server, "a", &[("crowded", value(token, "a"))]), "g");
    assert_eq!(vote(&server, "a", &[("crowded", value(token + 1, "b"))]), "w");
    assert_eq!(vote(&server, "t", &[("k", value(token + 9, "a"))]), "g");
    assert_eq!(vote(&server, "r", &[("k", who(token + 9, "a"))]), "f");
    for code in ["t", "T", "a", "A"] {
        assert_eq!(vote(&server, code, &[("k", value(token + 8, "b"))]), "l", "{code}");
    }
    assert_eq!(vote(&server, "T", &[("k", value(token + 10, "b"))]), "g");
    assert_eq!(vote(&server, "A", &[("k", value(token + 10, "b"))]), "g", "again");
}

/// Also if nobody ever looks, since all are handed the lock before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_lives_as_long_as_somebody_joins() {
    let server = RedisServer::start();
    let token = 1_700_000_000_000_000;
    let [line, records, marker] = ["fencelock:rq:k", "fencelock:rw:k", "fencelock:redlock:waits"];
    let lives = |key: &str| server.ask::<i64>(&["PTTL", key]);
    let claim = |owner: &str, later: u64| vote(&server, "a", &[("k", value(token + later, owner))]);
    assert_eq!(claim("a", 0), "g");
    assert_eq!(claim("b", 1), "w");
    assert!([line, records, marker].iter().all(|key| lives(key) > 50_000), "begun by the first one");
    for key in [line, records] {
        server.run(&["PEXPIRE", key, "20000"]);
    }
    server.run(&["SET", marker, "1700000000000000", "PX", "20000"]);
    assert_eq!(claim("c", 2), "w");
    assert!([line, records, marker].iter().all(|key| lives(key) > 50_000), "prolonged by the next one");
    assert!(lives(marker) > lives(line), "the mark outlives the line");
    server.run(&["PERSIST", records]);
    assert_eq!(claim("c", 2), "w");
    assert!(lives(records) > 50_000, "not for ever");
}

/// A claim that comes after it was given up, alone or with others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_does_not_revive_who_gave_up() {
    let server = RedisServer::start();
    let (one, two) = (1_800_000_000_000_001, 1_800_000_000_000_002);
    assert_eq!(vote(&server, "x", &[("k", who(two, "a"))]), "0");
    assert_eq!(vote(&server, "A", &[("j", value(one, "b")), ("k", value(two, "a"))]), "gx");
    assert_eq!(vote(&server, "t", &[("l", value(one, "b")), ("k", value(two, "a"))]), "gx");
    assert_eq!(vote(&server, "t", &[("k", value(one, "a"))]), "x");
    assert_eq!(vote(&server, "t", &[("k", value(two + 1, "a"))]), "g", "a later claim counts");
}

/// All in one batch: of those who want the same, one gets it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_with_the_same_lock_twice_grants_it_once() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    for round in 0..20 {
        // While the first one is under way, the others come together.
        let name = format!("wanted:{round}");
        let wanted = std::iter::once("first").chain(std::iter::repeat_n(name.as_str(), 20));
        let acquire = |name: &str| {
            let mutex = client.mutex(name).ttl(LONG);
            tokio::spawn(async move { mutex.try_acquire().await.unwrap() })
        };
        let mut guards = Vec::new();
        for acquired in wanted.map(acquire).collect::<Vec<_>>() {
            guards.extend(acquired.await.unwrap());
        }
        let granted = guards.iter().filter(|guard| guard.name() == name).count();
        assert_eq!(granted, 1, "round {round}");
        for guard in guards {
            guard.release().await.unwrap();
        }
    }
}

/// Notes that are old are dropped; those of locks that are in use are made anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_of_a_lock_in_use_is_not_forgotten() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    client.mutex("short").acquire().await.unwrap().release().await.unwrap();
    let guard = client.mutex(NAME).ttl(Duration::from_millis(900)).acquire().await.unwrap();
    let noted = |name: &str| {
        let knows = |server: &&RedisServer| server.ask::<u64>(&["HEXISTS", TOKENS, name]) == 1;
        nodes.servers.iter().filter(knows).count()
    };
    for _ in 0..2 {
        nodes.age();
        client.mutex("another").acquire().await.unwrap().release().await.unwrap();
        eventually("its renewal notes it again", async || noted(NAME) == 3).await;
    }
    assert_eq!(noted("short"), 0);
    let before = |server: &RedisServer| server.ask::<u64>(&["HEXISTS", "fencelock:redlock:before", "short"]);
    assert!(nodes.servers.iter().all(|server| before(server) == 0), "it was forgotten");
    let token = guard.token();
    guard.release().await.unwrap();
    assert!(client.mutex(NAME).acquire().await.unwrap().token() > token);
}

/// The lock's key may be in use for something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_other_data_is_refused_and_left_alone() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    nodes.servers[1].run(&["RPUSH", NAME, "x"]);
    nodes.servers[2].run(&["RPUSH", NAME, "x"]);
    let error = client.mutex(NAME).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(nodes.servers[1].ask::<u64>(&["LLEN", NAME]), 1);
    client.mutex("another").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_script_cache_is_no_loss() {
    let nodes = Nodes::start(5);
    let client = nodes.client().await;
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    for server in &nodes.servers {
        server.run(&["SCRIPT", "FLUSH"]);
    }
    assert_eq!(line(&client, NAME).await, (1, 0));
    guard.release().await.unwrap();
    client.close().await.unwrap();
    for server in &nodes.servers {
        for (key, life) in server.keys() {
            assert!(life > 0, "{key} has no end");
        }
    }
}
