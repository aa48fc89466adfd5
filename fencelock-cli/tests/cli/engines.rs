//! What the tool does is the same on every engine: one story, told on each of them.

use crate::harness::{Place, code, text};
use fencelock_testkit::Subject;
use fencelock_testkit::redis::{RedisServer, RedisSubject};
use fencelock_testkit::redlock::RedlockSubject;
use rustix::process::Signal;
use std::time::{Duration, SystemTime};

/// A command that writes down its token and the end of its lease, and goes on until it is stopped.
fn note(file: &str) -> String {
    format!("echo $FENCELOCK_TOKEN $FENCELOCK_DEADLINE > {file}; exec sleep 1000")
}

/// The token that it was given. It was given a whole lease as well, however it came by the lock.
fn noted(place: &Place, file: &str) -> u64 {
    let line = place.line(file);
    let (token, deadline) = line.split_once(' ').unwrap();
    let deadline = SystemTime::UNIX_EPOCH + Duration::from_millis(deadline.parse().unwrap());
    let left = deadline.duration_since(SystemTime::now()).unwrap_or_default();
    assert!(left > Duration::from_secs(5), "{file}: {left:?} are left of 30 s");
    token.parse().unwrap()
}

fn who_is_next_runs(subject: &Subject) {
    let place = Place::at(subject.url());
    let run = |file: &str| place.start(&["run", "x", "--", "sh", "-c", &note(file)]);
    let one = run("one");
    let first = noted(&place, "one");
    let busy = place.run(&["run", "-n", "x", "--", "true"]);
    assert_eq!(code(busy.status), 75, "{}", text(&busy.stderr));

    // The one before it ends.
    let two = run("two");
    place.until_standing("x", 1, 1);
    one.send(Signal::TERM);
    assert_eq!(one.code(), 143);
    let second = noted(&place, "two");
    assert!(second > first, "{second} after {first}");

    // The lock is taken away from the one before it.
    let three = run("three");
    place.until_standing("x", 1, 1);
    let broken = place.run(&["break", "x", "--yes"]);
    assert_eq!(code(broken.status), 0, "{}", text(&broken.stderr));
    assert_eq!(two.code(), 74);
    let third = noted(&place, "three");
    assert!(third > second, "{third} after {second}");

    // As a leader.
    let four = place.start(&["elect", "x", "--", "sh", "-c", &note("four")]);
    place.until_standing("x", 1, 1);
    three.send(Signal::TERM);
    assert_eq!(three.code(), 143);
    assert!(noted(&place, "four") > third);
    four.send(Signal::TERM);
    assert_eq!(four.code(), 143);
    place.until_standing("x", 0, 0);
}

/// A password in the URL is for the server alone.
#[test]
fn what_is_printed_has_no_password() {
    let server = RedisServer::options().password("s3cret").start();
    let place = Place::at(&server.url_as("default", "s3cret"));
    for arguments in [
        &["torture", "--for", "200ms", "--processes", "2", "--workers", "2", "--json"][..],
        &["torture", "--for", "200ms", "--processes", "2", "--workers", "2"],
        &["bench", "--for", "100ms", "--json"],
        &["status", "x", "--json"],
        &["list"],
    ] {
        let output = place.run(arguments);
        let (said, warned) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(code(output.status), 0, "{arguments:?}: {warned}");
        assert!(!said.contains("s3cret") && !warned.contains("s3cret"), "{arguments:?}: {said}{warned}");
    }
}

/// After a restart a server grants nothing for a while; who waits is told so, and for how long, and who gives up as well.
#[test]
fn who_waits_for_a_quarantine_is_told_so() {
    let mut server = RedisServer::options().durable().start();
    let place = Place::at(&server.url());
    assert_eq!(code(place.run(&["run", "--ttl", "60s", "x", "--", "true"]).status), 0);
    server.kill();
    server.start_again();
    let told = |said: &str| said.contains("nothing new is granted for another ");
    for option in ["-v", "--ttl=60s"] {
        let waited = place.run(&["run", option, "-w", "3s", "x", "--", "true"]);
        let warned = text(&waited.stderr);
        assert_eq!(code(waited.status), 75, "{warned}");
        assert!(warned.lines().any(|line| line.contains("not acquired within 3s") && told(line)), "{warned}");
        assert_eq!(warned.lines().filter(|line| line.contains("waiting:") && told(line)).count(), 1, "{warned}");
    }
    assert_eq!(text(&place.run(&["run", "-q", "-w", "500ms", "x", "--", "true"]).stderr), "");
    assert!(told(&text(&place.run(&["status", "x"]).stdout)));
    let seen: serde_json::Value = serde_json::from_slice(&place.run(&["status", "x", "--json"]).stdout).unwrap();
    assert!(told(seen["obstacle"].as_str().unwrap()), "{seen}");
    let refused = place.run(&["run", "-n", "x", "--", "true"]);
    assert!(told(&text(&refused.stderr)), "{}", text(&refused.stderr));
}

/// A lock on a key of the engine itself would break all the others.
#[test]
fn the_keys_of_redis_itself_are_no_locks() {
    let (redis, redlock) = (RedisSubject::new(), RedlockSubject::new());
    for url in [redis.url(), redlock.url()] {
        let place = Place::at(url);
        for arguments in [&["run", "fencelock:t", "--", "true"][..], &["break", "fencelock:t", "--yes"]] {
            let refused = place.run(arguments);
            assert_eq!(code(refused.status), 64, "{arguments:?}");
            assert!(text(&refused.stderr).contains("choose another name"), "{}", text(&refused.stderr));
        }
    }
}

/// On each of these engines.
macro_rules! engines {
    ($($name:ident: $subject:expr,)*) => {$(
        #[test]
        fn $name() {
            who_is_next_runs(&$subject);
        }
    )*};
}

engines! {
    who_is_next_runs_on_file: Subject::file(),
    who_is_next_runs_on_redis: RedisSubject::new(),
    who_is_next_runs_on_sentinel: fencelock_testkit::redis::SentinelSubject::new(),
    who_is_next_runs_on_cluster: fencelock_testkit::redis::ClusterSubject::new(),
    who_is_next_runs_on_redlock: RedlockSubject::new(),
    who_is_next_runs_on_etcd: fencelock_testkit::etcd::EtcdSubject::on(1),
    who_is_next_runs_on_zookeeper: fencelock_testkit::zookeeper::ZooKeeperSubject::one(),
    who_is_next_runs_on_postgres: fencelock_testkit::postgres::PostgresSubject::new(),
    who_is_next_runs_on_mysql: fencelock_testkit::mysql::MysqlSubject::new(),
}
