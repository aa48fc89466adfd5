//! How those who wait for the outcome of an operation are told.
//!
//! They run on other threads. Where all cores are busy, waking one from the driver's thread costs a switch to its thread, and another one
//! back as soon as it has nothing more to do, for each of them anew. So the driver wakes one of them only, and this one, on its own
//! thread, wakes the others. The driver tells those whom nobody has told soon.

use super::ballot::Outcome;
use crate::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

/// From so many on it is worth it.
const MANY: usize = 8;

/// Whoever submitted an operation.
pub(super) type Addressee = oneshot::Sender<Letter>;

/// Outcomes, and for whom they are.
pub(super) type Mail = Vec<(Addressee, Outcome)>;

#[derive(Debug)]
pub(super) struct Letter {
    outcome: Outcome,
    /// For others.
    rest: Option<Arc<Bag>>,
}

/// What is to be told, by whoever gets to it first.
#[derive(Debug, Default)]
pub(super) struct Bag(Mutex<Mail>);

impl Bag {
    /// Tells those whom nobody has told yet.
    pub(super) fn empty(&self) {
        // One by one: if this thread has to pause, another one goes on.
        while let Some((addressee, outcome)) = self.next() {
            // Who is gone need not know.
            let _ = addressee.send(Letter { outcome, rest: None });
        }
    }

    fn next(&self) -> Option<(Addressee, Outcome)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// Tells the addressees, or one of many; the others are in the bag, which is to be emptied soon.
pub(super) fn deliver(mut mail: Mail) -> Arc<Bag> {
    let first = if mail.len() < MANY { None } else { mail.iter().rposition(|(addressee, _)| !addressee.is_closed()) };
    let first = first.map(|first| mail.swap_remove(first));
    let bag = Arc::new(Bag(Mutex::new(mail)));
    match first {
        Some((addressee, outcome)) => {
            let _ = addressee.send(Letter { outcome, rest: Some(Arc::clone(&bag)) });
        }
        None => bag.empty(),
    }
    bag
}

/// The outcome of an operation; nodes are asked on a thread of their own, which never ends.
pub(super) async fn answered(told: oneshot::Receiver<Letter>) -> Result<Outcome> {
    let gone = |_| Error::new(ErrorKind::Ambiguous, "the operation was dropped; please report this");
    let letter = told.await.map_err(gone)?;
    if let Some(bag) = letter.rest {
        bag.empty();
    }
    Ok(letter.outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Moment;

    type Waiting = Vec<oneshot::Receiver<Letter>>;

    fn mail(count: usize) -> (Mail, Waiting) {
        let outcome = || Outcome { won: true, sent: Moment::NEVER, voices: Vec::new() };
        let pairs = (0..count).map(|_| oneshot::channel());
        pairs.map(|(addressee, told)| ((addressee, outcome()), told)).unzip()
    }

    /// How many have a letter.
    fn told(waiting: &mut Waiting) -> usize {
        waiting.iter_mut().filter(|told| !told.is_empty()).count()
    }

    #[test]
    fn few_are_told_at_once() {
        let (mail, mut waiting) = mail(MANY - 1);
        deliver(mail);
        assert_eq!(told(&mut waiting), MANY - 1);
    }

    #[tokio::test]
    async fn of_many_the_first_one_tells_the_others() {
        let (mail, mut waiting) = mail(MANY);
        let bag = deliver(mail);
        let first = waiting.iter_mut().position(|told| !told.is_empty()).expect("one is told");
        let first = waiting.swap_remove(first);
        assert_eq!(told(&mut waiting), 0);
        assert!(answered(first).await.is_ok_and(|outcome| outcome.won));
        assert_eq!(told(&mut waiting), MANY - 1);
        bag.empty();
    }

    /// It may have been given up, or its thread may be busy with something else.
    #[test]
    fn nobody_depends_on_the_first_one() {
        let (mail, mut waiting) = mail(MANY + 1);
        drop(waiting.pop());
        let bag = deliver(mail);
        assert_eq!(told(&mut waiting), 1, "one who is still there");
        bag.empty();
        assert_eq!(told(&mut waiting), MANY);
    }
}
