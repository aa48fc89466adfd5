//! The keys of a lock: its name itself, and companions that live in the same slot of a cluster, whatever braces the name has.

use crate::Name;
use std::sync::LazyLock;

pub(super) const SLOTS: u16 = 16_384;

/// The key of one lock. The names of the others are made by `line.lua`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) name: Name,
    /// Of a cluster; all keys of the lock fall into it. 0 elsewhere.
    pub(super) slot: u16,
}

impl Key {
    pub(super) fn of(name: Name, on_cluster: bool) -> Self {
        let slot = if on_cluster { slot(tag(name.as_str()).unwrap_or(name.as_str()).as_bytes()) } else { 0 };
        Self { name, slot }
    }
}

/// The newest token of a server.
pub(super) const NEWEST: &str = "fencelock:t";
/// A key that is never there. On a cluster it is named in each call: while a slot moves from one node to another, neither has all
/// the keys of a lock, and a node that misses a key which was named says so instead of taking a part for the whole.
pub(super) const NOBODY: &str = "fencelock:-";
/// The process that grants; see `takeover.lua`.
pub(super) const GRANTING: &str = "fencelock:n";
/// While it exists, nothing is granted to new owners.
pub(super) const QUARANTINE: &str = "fencelock:g";

/// A short text in braces that moves a key, or a channel, to this slot of a cluster.
pub(super) fn tag_of(slot: u16) -> String {
    format!("{{{}}}", TAGS[usize::from(slot % SLOTS)])
}

/// The start of the keys of all lines in which somebody waits.
pub(super) const QUEUES: &str = "fencelock:q:";

/// Matches the keys that start with `prefix`.
pub(in crate::engine) fn pattern_of(prefix: &str) -> String {
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for character in prefix.chars() {
        if "*?[]^\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern.push('*');
    pattern
}

/// `fencelock:` + how the slot is kept + part + `:` + the name, so that the slot is that of the name.
pub(crate) fn companion(name: &str, part: char) -> String {
    if tag(name).is_some() {
        // The prefix has no brace, so the name's own tag counts.
        format!("fencelock:0{part}:{name}")
    } else if !name.contains('}') {
        format!("fencelock:1{part}:{{{name}}}")
    } else {
        let tag = &TAGS[usize::from(slot(name.as_bytes()))];
        format!("fencelock:2{part}:{{{tag}}}{name}")
    }
}

/// The name that the key of a line belongs to; on a cluster there is a tag before it.
pub(super) fn name_of(key: &str, on_cluster: bool) -> Option<&str> {
    let rest = key.strip_prefix(QUEUES)?;
    if on_cluster { rest.split_once('}').map(|(_, name)| name) } else { Some(rest) }
}

/// The part of a key that its slot is computed from, if it is not all of it.
fn tag(key: &str) -> Option<&str> {
    let (_, after) = key.split_once('{')?;
    let (tag, _) = after.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// For each slot, a short text that falls into it.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut tags = vec![String::new(); usize::from(SLOTS)];
    let mut missing = SLOTS;
    for number in 0_u32.. {
        let text = format!("{number:x}");
        let place = &mut tags[usize::from(slot(text.as_bytes()))];
        if place.is_empty() {
            *place = text;
            missing -= 1;
        }
        if missing == 0 {
            break;
        }
    }
    tags
});

/// The slot of a text without a tag: CRC16 (XMODEM) modulo 16384.
fn slot(text: &[u8]) -> u16 {
    let mut crc: u16 = 0;
    for byte in text {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot_of(key: &str) -> u16 {
        slot(tag(key).unwrap_or(key).as_bytes())
    }

    #[test]
    fn slots_are_those_of_redis() {
        // From the Redis cluster specification and CLUSTER KEYSLOT.
        assert_eq!(slot(b"123456789"), 12739);
        assert_eq!(slot_of("foo{hash_tag}"), 2515);
    }

    proptest! {
        #[test]
        fn all_keys_of_a_lock_share_its_slot_and_tell_its_name(name in "[a-c{}:]{1,12}") {
            let key = Key::of(Name::new(&name).unwrap(), true);
            prop_assert_eq!(key.slot, slot_of(&name));
            for part in ["q:", "w:", "d:", "x", "t"] {
                let companion = format!("fencelock:{part}{}{name}", tag_of(key.slot));
                prop_assert_eq!(slot_of(&companion), key.slot, "{} of {}", companion, name);
            }
            let (queue, tagged) = (format!("{QUEUES}{name}"), format!("{QUEUES}{}{name}", tag_of(key.slot)));
            prop_assert_eq!(name_of(&tagged, true), Some(name.as_str()));
            prop_assert_eq!(name_of(&queue, false), Some(name.as_str()));
            prop_assert_eq!(slot_of(&companion(&name, 'f')), key.slot);
        }

        #[test]
        fn different_names_have_different_companions(one in "[a{}]{1,6}", two in "[a{}]{1,6}") {
            prop_assume!(one != two);
            prop_assert_ne!(companion(&one, 'f'), companion(&two, 'f'));
        }
    }
}
