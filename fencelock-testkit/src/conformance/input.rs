//! Bad input: refused with a kind to match on and one line to read, before anything is touched.

use super::NAME;
use crate::Subject;
use crate::stepped::Stepped;
use crate::wait::line;
use fencelock::{Error, ErrorKind, Owner, connect};
use std::time::Duration;

fn refused<T>(what: &str, outcome: Result<T, Error>) {
    let Err(error) = outcome else { panic!("{what} was accepted") };
    assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
    let text = error.to_string();
    assert!(text.len() > 20 && text.lines().count() == 1, "{what}: {text:?}");
}

/// Names, leases, numbers and owners that make no sense.
pub async fn bad_input_is_refused_in_one_line(subject: &Subject) {
    let client = subject.client().await;
    let ttl = |ttl| client.mutex(NAME).ttl(ttl);
    refused("an empty name", client.mutex("").acquire().await);
    refused("an empty name", client.mutex("").try_acquire().await);
    refused("a name of 513 bytes", client.mutex("x".repeat(513)).acquire().await);
    refused("a name with a line break and 513 bytes", client.mutex("\n".repeat(513)).acquire().await);
    refused("a name of 513 bytes in few characters", client.rwlock("é".repeat(257)).read().await);
    refused("the status of an empty name", client.status("").await);
    refused("the eviction of an empty name", client.evict("").await);
    refused("a lease of nothing", ttl(Duration::ZERO).acquire().await);
    refused("a lease below the shortest", ttl(Duration::from_millis(99)).try_acquire().await);
    refused("a lease above the longest", ttl(Duration::from_secs(24 * 3600 + 1)).acquire().await);
    refused("a lease for ever", ttl(Duration::MAX).acquire_timeout(Duration::from_secs(1)).await);
    refused("a hold of nothing", client.mutex(NAME).max_hold(Duration::ZERO).acquire().await);
    refused("no permits", client.semaphore(NAME, 0).acquire().await);
    refused("no permits", client.semaphore(NAME, 0).try_acquire().await);
    refused("no names", client.all(<[&str; 0]>::default()).acquire().await);
    refused("one bad name among several", client.all(["a", ""]).acquire().await);
    refused("an owner of three digits", "abc".parse::<Owner>());
    refused("an owner of other letters", "g".repeat(32).parse::<Owner>());
    client.settled().await;
    for name in [NAME, "a"] {
        assert_eq!(line(&client, name).await, (0, 0), "nothing was touched");
    }
    drop(client.mutex(NAME).max_hold(Duration::MAX).acquire().await.unwrap());
    drop(client.mutex(NAME).label("x".repeat(10_000) + "ü").acquire().await.unwrap());
}

/// URLs that make no sense, among them this engine's own with a bad option.
pub async fn bad_urls_are_refused_in_one_line(subject: &Subject) {
    let bad = ["", "nothing", ":", "what:", "memory:x?what=1", "memory:?ttl=1s&ttl=2s", "memory:%zz", "me mory:", "\n"];
    for url in bad {
        refused(url, connect(url).await);
    }
    for option in ["what=1", "ttl", "ttl=", "ttl=5", "ttl=1ms", "ttl=25h", "ttl=-5s", "ttl=1s&ttl=1s"] {
        refused(option, connect(format!("{}?{option}", subject.url())).await);
    }
    let client = connect(format!("{}?ttl=7s", subject.url())).await.unwrap();
    let valid = client.mutex(NAME).acquire().await.unwrap().valid_for();
    assert!(valid <= Duration::from_secs(7) && valid > Duration::from_secs(3), "the option counts: {valid:?}");
}

/// Acquiring where no runtime is fails with words.
pub async fn outside_of_a_runtime_there_is_an_error_and_no_panic(subject: &Subject) {
    let client = subject.client().await;
    let outcome = std::thread::spawn(move || {
        let mutex = client.mutex(NAME);
        Stepped::new(mutex.acquire()).poll().map(|outcome| outcome.map(drop))
    });
    let outcome = tokio::task::spawn_blocking(move || outcome.join().expect("no panic")).await.unwrap();
    refused("no runtime", outcome.expect("it is said at once"));
}
