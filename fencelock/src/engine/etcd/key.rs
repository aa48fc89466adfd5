//! The keys of a lock: `<prefix><name>/<entry>`, as `etcdctl lock` and Go's `concurrency` package lay them out.
//!
//! A `/` in a name would make one lock the beginning of another, so it is escaped, and `%` with it. An entry is named after its
//! owner and its mode; those of other programs (a lease id) count as exclusive.

use crate::{Mode, Name, Owner};

/// What stands between the name and the owner of a claim that was given up before its answer was seen. No escape looks like it.
const GIVEN_UP: &str = "%x/";
/// Where the last words of holders are, below the prefix. No lock has this name.
const LAST_WORD: &str = "%h/";
const READER: &str = "r-";
const PERMIT: &str = "p-";

/// A half-open range of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) from: Vec<u8>,
    pub(super) to: Vec<u8>,
}

impl Span {
    /// All keys that start with this.
    pub(super) fn prefixed(prefix: impl Into<Vec<u8>>) -> Self {
        let from = prefix.into();
        let mut to = from.clone();
        while let Some(last) = to.pop() {
            if last < u8::MAX {
                to.push(last + 1);
                break;
            }
        }
        if to.is_empty() {
            // Everything from here on.
            to.push(0);
        }
        Self { from, to }
    }
}

/// The keys of one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// Prefix and escaped name, without the slash.
    lock: String,
}

impl Line {
    pub(super) fn new(prefix: &str, name: &Name) -> Self {
        Self { lock: format!("{prefix}{}", escape(name.as_str())) }
    }

    pub(super) fn key(&self, entry: &str) -> String {
        format!("{}/{entry}", self.lock)
    }

    /// Every entry.
    pub(super) fn all(&self) -> Span {
        Span::prefixed(self.key(""))
    }

    /// Every entry that is not a reader's.
    pub(super) fn not_readers(&self) -> [Span; 2] {
        let (all, readers) = (self.all(), Span::prefixed(self.key(READER)));
        [Span { from: all.from, to: readers.from }, Span { from: readers.to, to: all.to }]
    }

    /// The places where an entry of this owner can be, whatever its mode is.
    pub(super) fn of_owner(&self, owner: Owner) -> [Span; 3] {
        let own = |kind: &str| Span::prefixed(self.key(&format!("{kind}{owner}")));
        [own(""), own(READER), own(PERMIT)]
    }

    /// Where it is noted that a claim was given up.
    pub(super) fn given_up(&self, owner: Owner) -> String {
        format!("{}{GIVEN_UP}{owner}", self.lock)
    }
}

/// Where a client says which of its holds it ended last.
pub(super) fn last_word(prefix: &str, session: u64) -> String {
    format!("{prefix}{LAST_WORD}{session:x}")
}

/// What the entry of a claim is called within its line.
pub(super) fn entry(owner: Owner, mode: Mode) -> String {
    match mode {
        Mode::Exclusive => owner.to_string(),
        Mode::Shared => format!("{READER}{owner}"),
        Mode::Permit { of } => format!("{PERMIT}{owner}-{of}"),
    }
}

/// Mode and owner of an entry; one that is not ours is exclusive.
pub(super) fn read_entry(entry: &str) -> (Mode, Option<Owner>) {
    let ours = || {
        if let Some(owner) = entry.strip_prefix(READER) {
            return Some((Mode::Shared, owner.parse().ok()?));
        }
        if let Some(rest) = entry.strip_prefix(PERMIT) {
            let (owner, of) = rest.split_once('-')?;
            return Some((Mode::Permit { of: of.parse().ok()? }, owner.parse().ok()?));
        }
        Some((Mode::Exclusive, entry.parse().ok()?))
    };
    match ours() {
        Some((mode, owner)) => (mode, Some(owner)),
        None => (Mode::Exclusive, None),
    }
}

/// Splits what follows the prefix into the lock's name and the entry's. `None` for keys that are no entries of a lock.
pub(super) fn split(rest: &str) -> Option<(Name, &str)> {
    let (name, entry) = rest.split_once('/')?;
    Some((Name::new(unescape(name)?).ok()?, entry))
}

pub(super) fn escape(name: &str) -> String {
    name.replace('%', "%25").replace('/', "%2F")
}

fn unescape(escaped: &str) -> Option<String> {
    let mut parts = escaped.split('%');
    let mut name = parts.next()?.to_owned();
    for part in parts {
        let (sign, rest) = match part.split_at_checked(2)? {
            ("25", rest) => ('%', rest),
            ("2F", rest) => ('/', rest),
            _ => return None,
        };
        name.push(sign);
        name.push_str(rest);
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    proptest! {
        #[test]
        fn names_come_back(text in "[a%/2Fé]{1,40}") {
            let line = Line::new("p/", &name(&text));
            let key = line.key("entry");
            let rest = key.strip_prefix("p/").unwrap();
            prop_assert_eq!(split(rest), Some((name(&text), "entry")));
        }

        #[test]
        fn no_lock_is_the_beginning_of_another(one in "[a%/]{1,6}", other in "[a%/]{1,6}") {
            let span = Line::new("", &name(&one)).all();
            let key = Line::new("", &name(&other)).key("e").into_bytes();
            prop_assert_eq!(span.from <= key && key < span.to, one == other);
        }
    }

    #[test]
    fn entries_are_found_by_their_owner_in_any_mode() {
        let line = Line::new("locks/", &name("a/b"));
        let owner = Owner::random();
        assert_eq!(line.key(""), "locks/a%2Fb/");
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 12 }] {
            let entry = entry(owner, mode);
            assert_eq!(read_entry(&entry), (mode, Some(owner)));
            let key = line.key(&entry).into_bytes();
            let inside = |span: &Span| span.from <= key && key < span.to;
            assert_eq!(line.of_owner(owner).iter().filter(|span| inside(span)).count(), 1);
            assert_eq!(line.not_readers().iter().any(inside), mode != Mode::Shared);
            assert!(inside(&line.all()));
        }
        let given_up = line.given_up(owner).into_bytes();
        assert!(!(line.all().from <= given_up && given_up < line.all().to));
        assert_eq!(split("a%2Fb%x/0123"), None);
        assert_eq!(read_entry("694d8b2f1c3a5e07"), (Mode::Exclusive, None));
    }

    #[test]
    fn a_prefix_ends_where_the_next_one_begins() {
        assert_eq!(Span::prefixed("a/").to, b"a0");
        assert_eq!(Span::prefixed(vec![b'a', 0xff]).to, b"b");
        assert_eq!(Span::prefixed("").to, b"\0");
    }
}
