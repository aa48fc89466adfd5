//! A line as a list of names tells it, and what the data of an entry adds.

use super::path::Entry as Named;
use crate::engine::line::ahead::Entry;
use crate::{Claim, Mode, Owner};
use std::collections::HashMap;
use std::time::{Duration, SystemTime};
use zookeeper_client::Stat;

/// The entries of a directory, in order.
#[derive(Clone)]
pub(super) struct Line(Vec<Named>);

impl Line {
    pub(super) fn of(names: Vec<String>) -> Self {
        let mut entries: Vec<Named> = names.into_iter().filter_map(Named::parse).collect();
        entries.sort_by(Named::before);
        Self(entries)
    }

    /// Whether the numbers alone do not tell the order.
    pub(super) fn is_doubtful(&self) -> bool {
        self.0.iter().any(Named::is_doubtful)
    }

    /// Puts the entries into this order; those that are not in it are gone.
    pub(super) fn order_by(&mut self, order: &HashMap<String, i64>) {
        self.0.retain(|entry| order.contains_key(&entry.name));
        self.0.sort_by_key(|entry| order.get(&entry.name).copied());
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.retain(|entry| entry.name != name);
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|entry| entry.name.as_str())
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Named> {
        self.0.iter()
    }

    pub(super) fn of_owner(&self, owner: Owner) -> impl Iterator<Item = &Named> {
        self.0.iter().filter(move |entry| entry.owner == Some(owner))
    }

    /// Everybody, to somebody who is not in line.
    pub(super) fn all_ahead(&self) -> Vec<Entry> {
        self.0.iter().map(plain).collect()
    }

    /// How many are ahead of this entry, if it is there.
    pub(super) fn count_ahead(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|entry| entry.name == name)
    }

    /// Those ahead of this entry who matter to a claim of this mode; `None` if the entry is not there.
    pub(super) fn ahead_of(&self, name: &str, mode: Mode) -> Option<Vec<Entry>> {
        // Mostly it is the last one, or the first.
        let at = self.0.iter().rposition(|entry| entry.name == name)?;
        let ahead = &self.0[..at];
        Some(match mode {
            Mode::Exclusive => ahead.last().map(plain).into_iter().collect(),
            Mode::Shared => {
                ahead.iter().rfind(|entry| entry.recipe.mode() != Mode::Shared).map(plain).into_iter().collect()
            }
            Mode::Permit { of } => {
                let first = ahead.len().min(usize::try_from(of).unwrap_or(usize::MAX).saturating_add(1));
                let last = ahead.last().filter(|_| ahead.len() > first);
                ahead[..first].iter().chain(last).map(plain).collect()
            }
        })
    }
}

/// What the name alone tells.
fn plain(entry: &Named) -> Entry {
    Entry {
        key: entry.name.clone(),
        order: 0,
        token: 0,
        mode: entry.recipe.mode(),
        owner: entry.owner,
        label: String::new(),
        session: 0,
        age: Duration::ZERO,
    }
}

/// What an entry's data begins with.
const MARK: &str = "fencelock 1";

/// The data of an entry: its lease in ms, whether it is known to hold, and who it is.
pub(super) fn data(claim: &Claim, holds: bool) -> Vec<u8> {
    let state = if holds { "holds" } else { "joined" };
    format!("{MARK}\n{}\n{state}\n{}", claim.ttl.as_millis(), claim.label).into_bytes()
}

/// Whether the entry's owner has written that it holds.
pub(super) fn holds(data: &[u8]) -> bool {
    parse(data).is_some_and(|(_, holds, _)| holds)
}

fn parse(data: &[u8]) -> Option<(Duration, bool, &str)> {
    let text = std::str::from_utf8(data).ok()?.strip_prefix(MARK)?.strip_prefix('\n')?;
    let (lease, rest) = text.split_once('\n')?;
    let (state, label) = rest.split_once('\n')?;
    Some((Duration::from_millis(lease.parse().ok()?), state == "holds", label))
}

/// All that is known of an entry, and its lease if it says so.
pub(super) fn entry(named: &Named, data: &[u8], stat: &Stat) -> (Entry, Option<Duration>) {
    let token = stat.czxid.cast_unsigned();
    let (lease, label) = match parse(data) {
        Some((lease, _, label)) => (Some(lease), label.to_owned()),
        None => (None, foreign_label(data)),
    };
    let joined = Duration::from_millis(u64::try_from(stat.ctime).unwrap_or(0));
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let entry = Entry {
        order: token,
        token,
        label,
        session: stat.ephemeral_owner.cast_unsigned(),
        age: now.saturating_sub(joined),
        ..plain(named)
    };
    (entry, lease)
}

/// Curator writes the address of its machine.
fn foreign_label(data: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(data).chars().filter(|c| !c.is_control()).collect();
    crate::client::fit_label(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_read_back() {
        let claim = Claim {
            name: crate::Name::new("x").unwrap(),
            mode: Mode::Exclusive,
            owner: Owner::random(),
            ttl: Duration::from_secs(1),
            label: "two\nlines".into(),
            writer: false,
        };
        assert_eq!(parse(&data(&claim, false)), Some((claim.ttl, false, "two\nlines")));
        assert!(holds(&data(&claim, true)) && !holds(&data(&claim, false)));
        assert_eq!(parse(b"10.0.0.1"), None);
        assert_eq!(foreign_label(b"10.0.0.1\n\xff"), "10.0.0.1\u{fffd}");
    }
}
