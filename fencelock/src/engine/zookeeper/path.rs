//! Where a lock's line is kept: the names of directories and of entries, and back again.
//!
//! The layout is that of Curator's `InterProcessMutex` and `InterProcessReadWriteLock`, so that Java services which use the same
//! path and fencelock exclude each other.

use crate::{Mode, Owner};
use std::cmp::Ordering;

/// A lock's name as one component of a path. A plain name stays as it is; what ZooKeeper does not allow is percent-encoded.
pub(super) fn encode(name: &str) -> String {
    // Relative paths, and the server's own directory.
    if [".", "..", "zookeeper"].contains(&name) {
        let (first, rest) = name.split_at(1);
        return percent(first) + rest;
    }
    let mut component = String::with_capacity(name.len());
    for character in name.chars() {
        if is_plain(character) {
            component.push(character);
        } else {
            component.push_str(&percent(character.encode_utf8(&mut [0; 4])));
        }
    }
    component
}

fn percent(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// What may stand in a path. ZooKeeper sees UTF-16 and allows no surrogates, so nothing beyond the first plane.
fn is_plain(character: char) -> bool {
    !matches!(character, '%' | '/' | '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

/// The name that this component stands for; `None` if fencelock would not have called it so.
pub(super) fn decode(component: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(component.len());
    let mut rest = component.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        bytes.push(u8::try_from(digit()? * 16 + digit()?).ok()?);
    }
    String::from_utf8(bytes).ok().filter(|name| encode(name) == component)
}

/// The recipe that an entry follows; it is in the entry's name, so that a list of names tells all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recipe {
    /// Curator's `InterProcessMutex`.
    Mutex,
    /// The readers of Curator's `InterProcessReadWriteLock`.
    Reader,
    /// Its writers.
    Writer,
    /// A semaphore of this size; fencelock's own.
    Permit(u32),
}

impl Recipe {
    /// `writer`: whether an exclusive claim was made as that of a writer among readers.
    pub(super) fn of(mode: Mode, writer: bool) -> Self {
        match mode {
            Mode::Exclusive if writer => Self::Writer,
            Mode::Exclusive => Self::Mutex,
            Mode::Shared => Self::Reader,
            Mode::Permit { of } => Self::Permit(of),
        }
    }

    pub(super) fn mode(self) -> Mode {
        match self {
            Self::Mutex | Self::Writer => Mode::Exclusive,
            Self::Reader => Mode::Shared,
            Self::Permit(of) => Mode::Permit { of },
        }
    }
}

const READ: &str = "__READ__";
const WRITE: &str = "__WRIT__";
const PERMIT: &str = "__PERMIT__";

/// The beginning of the names of all entries of this owner: Curator's protection against a lost reply.
fn protection(owner: Owner) -> String {
    let id = owner.to_string();
    format!("_c_{}-{}-{}-{}-{}-", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..])
}

/// The name of an entry without its sequence number.
pub(super) fn entry_prefix(owner: Owner, recipe: Recipe) -> String {
    let protection = protection(owner);
    match recipe {
        Recipe::Mutex => protection + "lock-",
        Recipe::Reader => protection + READ,
        Recipe::Writer => protection + WRITE,
        Recipe::Permit(of) => format!("{protection}{PERMIT}{of}-"),
    }
}

/// An entry of a line, as its name tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) sequence: i32,
    pub(super) recipe: Recipe,
    /// `None` for somebody who marks entries in another way.
    pub(super) owner: Option<Owner>,
}

impl Entry {
    /// `None` for a node that is no entry: it has no sequence number.
    pub(super) fn parse(name: String) -> Option<Self> {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let at = name.len() - digits.min(10);
        // After the last one comes the most negative one: `…-lock--2147483648`.
        let negative = |width: usize| digits == width && name[..name.len() - width].ends_with('-');
        let doubly = |width: usize| negative(width) && name[..name.len() - width - 1].ends_with(['-', '_']);
        let at = if doubly(9) || doubly(10) { name.len() - digits - 1 } else { at };
        if digits < 9 || (digits == 9 && at == name.len() - digits) {
            return None;
        }
        let sequence = name[at..].parse().ok()?;
        let recipe = recipe(&name[..at]);
        let owner = owner(&name);
        Some(Self { name, sequence, recipe, owner })
    }

    /// Numbers are 32 bits wide and start again from the most negative one; those that stand in one line are close together.
    pub(super) fn before(&self, other: &Self) -> Ordering {
        other.sequence.wrapping_sub(self.sequence).cmp(&0).reverse()
    }

    /// Whether the number alone does not tell the order: where numbers end, servers have been seen to give the last one twice.
    pub(super) fn is_doubtful(&self) -> bool {
        self.sequence < 0 || self.sequence > i32::MAX - (1 << 16)
    }
}

fn recipe(prefix: &str) -> Recipe {
    if prefix.ends_with(READ) {
        return Recipe::Reader;
    }
    if prefix.ends_with(WRITE) {
        return Recipe::Writer;
    }
    let permits = || prefix.split_once(PERMIT)?.1.strip_suffix('-')?.parse().ok();
    // Whoever marks entries in another way wants the lock alone, as far as anybody knows.
    permits().map_or(Recipe::Mutex, Recipe::Permit)
}

fn owner(name: &str) -> Option<Owner> {
    let id = name.strip_prefix("_c_")?.get(..36)?;
    id.replace('-', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn plain_names_stay_as_they_are() {
        for plain in ["invoice:42", "a b", "ü", "路径", "...", "a.b", "_c_x", "{x}"] {
            assert_eq!(encode(plain), plain);
        }
        for (name, component) in [("a/b", "a%2Fb"), ("%", "%25"), (".", "%2E"), ("..", "%2E."), ("🔒", "%F0%9F%94%92")]
        {
            assert_eq!(encode(name), component);
            assert_eq!(decode(component).as_deref(), Some(name));
        }
        for foreign in ["100%", "%2e", "a%2", "%41"] {
            assert_eq!(decode(foreign), None, "{foreign}");
        }
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in any::<String>()) {
            let component = encode(&name);
            prop_assert!(component.chars().all(|c| is_plain(c) || c == '%'));
            prop_assert_eq!(decode(&component), Some(name));
        }
    }

    #[test]
    fn entries_are_read_back() {
        let owner = Owner::random();
        let recipes = [Recipe::Mutex, Recipe::Reader, Recipe::Writer, Recipe::Permit(1), Recipe::Permit(4_000_000_000)];
        for recipe in recipes {
            for (number, sequence) in [
                ("0000000000", 0),
                ("0000000042", 42),
                ("2147483647", i32::MAX),
                ("-2147483648", i32::MIN),
                ("-000000001", -1),
            ] {
                let entry = Entry::parse(entry_prefix(owner, recipe) + number).unwrap();
                assert_eq!(
                    (entry.sequence, entry.recipe, entry.owner),
                    (sequence, recipe, Some(owner)),
                    "{}",
                    entry.name
                );
            }
        }
    }

    #[test]
    fn entries_of_others_are_understood() {
        let curator = "_c_2f0a4d4b-6a0e-4b55-a6a4-0e6d0b1b2c3d-lock-0000000007";
        let entry = Entry::parse(curator.to_owned()).unwrap();
        assert_eq!((entry.sequence, entry.recipe), (7, Recipe::Mutex));
        assert!(entry.owner.is_some());
        let kazoo = Entry::parse("0123456789abcdef0123456789abcdef__lock__0000000003".to_owned()).unwrap();
        assert_eq!((kazoo.sequence, kazoo.recipe, kazoo.owner), (3, Recipe::Mutex, None));
        for other in ["leases", "locks", "lock-17", ""] {
            assert_eq!(Entry::parse(other.to_owned()), None, "{other}");
        }
    }

    #[test]
    fn the_order_survives_the_end_of_the_numbers() {
        let entry = |number: &str| Entry::parse(format!("x-lock-{number}")).unwrap();
        let line = [entry("2147483646"), entry("2147483647"), entry("-2147483648"), entry("-2147483647")];
        for pair in line.windows(2) {
            assert_eq!(pair[0].before(&pair[1]), Ordering::Less);
            assert_eq!(pair[1].before(&pair[0]), Ordering::Greater);
        }
        assert!(line.iter().all(Entry::is_doubtful));
        assert_eq!(entry("0000000009").before(&entry("0000000010")), Ordering::Less);
        assert!(!entry("0000000009").is_doubtful());
    }
}
