//! The line rule: who of a line may hold. One pure function, used by every engine that keeps a line.

use crate::Mode;

/// May the next one in line hold, given those who do?
///
/// `held` is the mode of the present holders and their number; they all hold in the same mode, since this rule let them
/// in. First come, first served is the caller's part: it asks only for the first one that waits, so a waiting
/// writer is not overtaken by a later reader.
///
/// A name is meant to be used in one way. Where it is not, different ways exclude each other.
pub fn admits(held: Option<(Mode, u32)>, next: Mode) -> bool {
    match (held, next) {
        (None, Mode::Permit { of }) => of > 0,
        (None, _) => true,
        (Some((Mode::Shared, _)), Mode::Shared) => true,
        (Some((Mode::Permit { of: theirs }, count)), Mode::Permit { of }) => theirs == of && count < of,
        _ => false,
    }
}

/// How many from the front of a line hold.
///
/// ```
/// use fencelock::{Mode, engine::rule::holders};
/// use Mode::{Exclusive, Shared};
/// assert_eq!(holders(&[Exclusive, Shared]), 1);
/// assert_eq!(holders(&[Shared, Shared, Exclusive, Shared]), 2);
/// assert_eq!(holders(&[Mode::Permit { of: 2 }; 5]), 2);
/// ```
pub fn holders(line: &[Mode]) -> usize {
    let mut held = None;
    for (index, mode) in line.iter().enumerate() {
        if !admits(held, *mode) {
            return index;
        }
        held = Some((*mode, u32::try_from(index + 1).unwrap_or(u32::MAX)));
    }
    line.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mode() -> impl Strategy<Value = Mode> {
        prop_oneof![Just(Mode::Exclusive), Just(Mode::Shared), (0u32..4).prop_map(|of| Mode::Permit { of })]
    }

    proptest! {
        #[test]
        fn the_first_one_always_holds_unless_it_wants_one_of_none(line in prop::collection::vec(mode(), 1..12)) {
            prop_assert_eq!(holders(&line) > 0, line[0] != Mode::Permit { of: 0 });
        }

        #[test]
        fn whoever_holds_is_compatible_with_all_who_hold(line in prop::collection::vec(mode(), 0..12)) {
            let held = &line[..holders(&line)];
            if held.contains(&Mode::Exclusive) {
                prop_assert_eq!(held.len(), 1);
            }
            if let Some(Mode::Permit { of }) = held.first() {
                prop_assert!(held.len() <= *of as usize);
            }
            prop_assert!(held.iter().all(|mode| *mode == held[0]));
        }

        #[test]
        fn joining_at_the_end_takes_nothing_from_a_holder(line in prop::collection::vec(mode(), 0..12), late in mode()) {
            let before = holders(&line);
            let mut longer = line.clone();
            longer.push(late);
            let after = holders(&longer);
            prop_assert!(after >= before);
            // Only the late one itself can be the difference, and only if everybody else holds.
            prop_assert!(after == before || (before == line.len() && after == before + 1));
        }

        #[test]
        fn leaving_takes_nothing_from_a_holder(line in prop::collection::vec(mode(), 1..12), at in any::<prop::sample::Index>()) {
            let at = at.index(line.len());
            let before = holders(&line);
            let mut shorter = line.clone();
            shorter.remove(at);
            let still = if at < before { before - 1 } else { before };
            prop_assert!(holders(&shorter) >= still);
        }

        #[test]
        fn a_waiting_writer_is_not_overtaken(readers in 1usize..5, late in 1usize..5) {
            let mut line = vec![Mode::Shared; readers];
            line.push(Mode::Exclusive);
            line.extend(vec![Mode::Shared; late]);
            prop_assert_eq!(holders(&line), readers);
        }
    }
}
