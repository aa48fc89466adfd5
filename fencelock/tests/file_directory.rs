//! The file engine's directory: what is done to it by users, by mistake and by the file system must not make a second holder,
//! and must be told in words that help.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(target_os = "linux")]

use fencelock::{Client, ErrorKind, connect};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

fn url(path: &Path) -> String {
    format!("file:{}", path.display())
}

async fn client(path: &Path) -> Client {
    connect(url(path)).await.expect("the directory can be used")
}

fn files(path: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).expect("a directory").flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files(&entry.path(), into),
            _ => into.push(entry.path()),
        }
    }
}

fn all_files(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(path, &mut found);
    found
}

/// Neither a client that is there already nor a newcomer gets the lock, waiting or not.
async fn nobody_else_gets_it(dir: &Path, there: &Client) {
    assert!(!matches!(there.mutex("x").try_acquire().await, Ok(Some(_))), "a second holder");
    if let Ok(newcomer) = connect(url(dir)).await {
        assert!(!matches!(newcomer.mutex("x").try_acquire().await, Ok(Some(_))), "a second holder");
        let waited = newcomer.mutex("x").acquire_timeout(Duration::from_millis(50)).await;
        assert!(waited.is_err(), "a second holder");
    }
}

#[tokio::test]
async fn removing_files_under_a_holder_makes_no_second_holder() {
    let patterns: [fn(&Path) -> bool; 4] = [
        |path| path.parent().is_some_and(|dir| dir.ends_with("lines")),
        |path| path.parent().is_some_and(|dir| dir.ends_with("sessions")),
        |path| !path.ends_with("VERSION"),
        |_| true,
    ];
    for remove in patterns {
        let dir = TempDir::new().unwrap();
        let (holder, other) = (client(dir.path()).await, client(dir.path()).await);
        let guard = holder.mutex("x").acquire().await.unwrap();
        let removed: Vec<PathBuf> = all_files(dir.path()).into_iter().filter(|path| remove(path)).collect();
        assert!(!removed.is_empty());
        for file in &removed {
            fs::remove_file(file).unwrap();
        }
        nobody_else_gets_it(dir.path(), &other).await;
        assert!(guard.is_valid());
    }
}

#[tokio::test]
async fn renaming_files_under_a_holder_makes_no_second_holder() {
    let dir = TempDir::new().unwrap();
    let (holder, other) = (client(dir.path()).await, client(dir.path()).await);
    let guard = holder.mutex("x").ttl(Duration::from_millis(600)).acquire().await.unwrap();
    fs::rename(dir.path().join("lines/x"), dir.path().join("lines/y")).unwrap();
    nobody_else_gets_it(dir.path(), &other).await;
    // The holder is told, the file of another lock is not taken for this one's, and afterwards all is well again.
    guard.lost().await;
    assert!(!matches!(other.mutex("y").try_acquire().await, Ok(Some(_))));
    holder.settled().await;
    other.settled().await;
    drop(other.mutex("x").acquire_timeout(Duration::from_secs(5)).await.unwrap());
}

#[tokio::test]
async fn after_files_were_removed_it_works_again_when_the_holders_are_done() {
    let dir = TempDir::new().unwrap();
    let (holder, other) = (client(dir.path()).await, client(dir.path()).await);
    let guard = holder.mutex("x").acquire().await.unwrap();
    fs::remove_file(dir.path().join("lines/x")).unwrap();
    let error = other.mutex("x").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Engine);
    assert!(error.to_string().contains("was removed"), "{error}");
    // Nobody is told that the lock is free.
    assert_eq!(other.status("x").await.unwrap_err().kind(), ErrorKind::Engine);
    assert_eq!(other.evict("x").await.unwrap_err().kind(), ErrorKind::Engine);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    other.settled().await;
    other.mutex("x").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn the_holder_is_told_when_the_whole_directory_is_moved_away() {
    let dir = TempDir::new().unwrap();
    let root = dir.path().join("locks");
    let holder = client(&root).await;
    let guard = holder.mutex("x").ttl(Duration::from_millis(600)).acquire().await.unwrap();
    fs::rename(&root, dir.path().join("elsewhere")).unwrap();
    guard.lost().await;
    assert!(!guard.is_valid());
}

#[tokio::test]
async fn replacing_parts_of_the_directory_makes_no_second_holder_that_the_first_does_not_hear_of() {
    let copy = |from: &Path, to: &Path| {
        let done = std::process::Command::new("cp").arg("-r").args([from, to]).status().unwrap();
        assert!(done.success());
    };
    let dir = TempDir::new().unwrap();
    let (root, old) = (dir.path().join("locks"), dir.path().join("old"));
    fs::create_dir(&old).unwrap();
    let holder = client(&root).await;
    let guard = holder.mutex("x").acquire().await.unwrap();
    for part in ["claims", "lines"] {
        fs::rename(root.join(part), old.join(part)).unwrap();
        copy(&old.join(part), &root.join(part));
    }
    // A newcomer sees that these are not the claims that this directory was made with.
    assert!(connect(url(&root)).await.is_err());
    // And the holder, long before its lease has to be renewed, that it stands on nothing.
    tokio::time::timeout(Duration::from_secs(9), guard.lost()).await.expect("the holder is told");
}

#[tokio::test]
async fn a_line_at_which_somebody_is_stuck_costs_no_other_lock() {
    let dir = TempDir::new().unwrap();
    let locks = client(dir.path()).await;
    let ttl = Duration::from_millis(900);
    let stuck = locks.mutex("stuck").ttl(ttl).acquire().await.unwrap();
    let other = locks.mutex("other").ttl(ttl).acquire().await.unwrap();
    // As if a process were stopped in the middle of a step.
    let gate = fs::File::options().write(true).open(dir.path().join("lines/stuck")).unwrap();
    gate.lock().unwrap();
    stuck.lost().await;
    assert!(other.is_valid(), "another lock went down with it");
    let newcomer = client(dir.path()).await;
    let error = newcomer.mutex("stuck").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(newcomer.status("stuck").await.unwrap_err().kind(), ErrorKind::Unavailable);
    let names: Vec<String> = newcomer.list("").await.unwrap().into_iter().map(|status| status.name).collect();
    assert_eq!(names, ["other"]);
    gate.unlock().unwrap();
    other.release().await.unwrap();
    newcomer.settled().await;
    drop(newcomer.mutex("stuck").acquire_timeout(Duration::from_secs(5)).await.unwrap());
}

#[tokio::test]
async fn two_paths_to_one_directory_are_one_directory() {
    let dir = TempDir::new().unwrap();
    let (root, link) = (dir.path().join("locks"), dir.path().join("link"));
    fs::create_dir(&root).unwrap();
    symlink(&root, &link).unwrap();
    let (one, two, three) = (client(&root).await, client(&link).await, client(&root.join("../locks/.")).await);
    let guard = one.mutex("x").acquire().await.unwrap();
    for other in [&two, &three] {
        assert!(other.mutex("x").try_acquire().await.unwrap().is_none());
    }
    let token = guard.token();
    drop(guard);
    assert!(two.mutex("x").acquire().await.unwrap().token() > token);
}

#[tokio::test]
async fn a_command_that_inherits_the_descriptors_does_not_keep_the_lock() {
    let dir = TempDir::new().unwrap();
    let holder = client(dir.path()).await;
    let guard = holder.mutex("x").acquire().await.unwrap();
    let mut child = tokio::process::Command::new("sleep").arg("100").kill_on_drop(true).spawn().unwrap();
    // What the child has of ours would be seen here.
    let pid = child.id().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let inherited: Vec<PathBuf> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter(|target| target.starts_with(&root))
        .collect();
    assert!(inherited.is_empty(), "{inherited:?}");
    drop(guard);
    drop(client(dir.path()).await.mutex("x").acquire_timeout(Duration::from_secs(5)).await.unwrap());
    child.kill().await.unwrap();
}

#[tokio::test]
async fn tokens_grow_over_everything_short_of_losing_the_directory() {
    let dir = TempDir::new().unwrap();
    let mut last = 0;
    for round in 0..4 {
        let locks = client(dir.path()).await;
        for _ in 0..3 {
            let guard = locks.mutex("x").acquire().await.unwrap();
            assert!(guard.token().as_u64() > last, "round {round}");
            last = guard.token().as_u64();
            guard.release().await.unwrap();
        }
        locks.close().await.unwrap();
        drop(locks);
        match round {
            // The line's own memory of its token is gone.
            0 => drop(fs::remove_file(dir.path().join("lines/x"))),
            // The machine was restarted, perhaps after a power loss: the boot id is another one.
            1 => {
                let mut record = fs::read(dir.path().join("tokens")).unwrap();
                record[8..24].copy_from_slice(&[0; 16]);
                fs::write(dir.path().join("tokens"), record).unwrap();
                // The bound, an hour ahead, is what the next start begins above.
                last += 3_000_000_000;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn nothing_is_left_behind() {
    let dir = TempDir::new().unwrap();
    let locks = client(dir.path()).await;
    for index in 0..300 {
        locks.mutex(format!("name {index}")).acquire().await.unwrap().release().await.unwrap();
    }
    locks.close().await.unwrap();
    let left: Vec<PathBuf> = all_files(dir.path())
        .into_iter()
        .filter(|path| path.parent().is_some_and(|dir| dir.ends_with("lines") || dir.ends_with("sessions")))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_process_with_many_locks_needs_few_descriptors() {
    let dir = TempDir::new().unwrap();
    let locks = client(dir.path()).await;
    let mut guards = Vec::new();
    for index in 0..2_000 {
        guards.push(locks.mutex(format!("many {index}")).acquire().await.unwrap());
    }
    let root = dir.path().canonicalize().unwrap();
    let open = fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter(|target| target.starts_with(&root))
        .count();
    assert!(open < 300, "{open} descriptors for 2,000 locks");
}

#[tokio::test]
async fn the_directory_s_own_permissions_say_who_may_use_the_locks() {
    let dir = TempDir::new().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
    let guard = client(dir.path()).await.mutex("x").acquire().await.unwrap();
    for file in all_files(dir.path()) {
        let mode = fs::symlink_metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o660, "{}", file.display());
    }
    drop(guard);
}

#[tokio::test]
async fn in_a_directory_for_a_group_everything_belongs_to_the_group() {
    let dir = TempDir::new().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o2770)).unwrap();
    let guard = client(dir.path()).await.mutex("x").acquire().await.unwrap();
    for part in ["lines", "sessions", "claims"] {
        let mode = fs::metadata(dir.path().join(part)).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, 0o2770, "{part}");
    }
    drop(guard);
}

#[tokio::test]
async fn bad_directories_are_refused_in_one_line_with_a_remedy() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let newer = dir.path().join("newer");
    fs::create_dir(&newer).unwrap();
    fs::write(newer.join("VERSION"), "fencelock directory, version 2\n").unwrap();
    let blocked = dir.path().join("blocked");
    client(&blocked).await.close().await.unwrap();
    fs::create_dir(blocked.join("lines/x")).unwrap();
    let cases = [
        (url(&file), ErrorKind::Invalid, "not a directory"),
        (url(&file.join("below")), ErrorKind::Invalid, "not a directory"),
        (url(&newer), ErrorKind::Invalid, "version"),
        (url(&blocked), ErrorKind::Invalid, "expects a file"),
        ("file://somehost/x".to_owned(), ErrorKind::Invalid, "host"),
        ("file:/x%00y".to_owned(), ErrorKind::Invalid, "NUL"),
        (format!("{}?shiny=1", url(dir.path())), ErrorKind::Invalid, "shiny"),
        (format!("{}?network=maybe", url(dir.path())), ErrorKind::Invalid, "maybe"),
        (format!("{}?ttl=1y", url(dir.path())), ErrorKind::Invalid, "1y"),
        (format!("{}?ttl=0s", url(dir.path())), ErrorKind::Invalid, "0ns"),
        ("file:/proc/fencelock".to_owned(), ErrorKind::Unavailable, ""),
    ];
    for (url, kind, word) in cases {
        let error = async { connect(&url).await?.mutex("x").acquire().await }.await.expect_err(&url);
        let text = error.to_string();
        assert!(text.contains(word) && !text.contains('\n'), "{url}: {text}");
        if !word.is_empty() {
            assert_eq!(error.kind(), kind, "{url}: {text}");
        }
    }
}
