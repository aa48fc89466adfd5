//! The processes below this one.

use rustix::process::{Pid, Signal, getpid, kill_process};
use std::collections::HashMap;

/// Kills everything below this process, whatever process group or session it has moved to.
///
/// Finds all of it only if this process adopts orphans (`PR_SET_CHILD_SUBREAPER`): otherwise a process whose parent has
/// ended belongs to init.
pub(crate) fn kill_descendants() {
    for pid in descendants(getpid()) {
        // It may have ended meanwhile, or belong to another user.
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for pid in processes() {
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut next = vec![root.as_raw_nonzero().get()];
    while let Some(pid) = next.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        found.extend(below.iter().filter_map(|pid| Pid::from_raw(*pid)));
        next.extend(below);
    }
    found
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // `pid (name) state ppid …`, and the name may contain any bytes.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_below_its_parent() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(descendants(getpid()).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!descendants(getpid()).contains(&pid));
    }
}
