//! Which of the verbs that settle debts an engine has: learnt from its answers, and remembered. That it lacks one is
//! remembered for a minute: what said so may have been a proxy, or an engine that was not all there yet.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an engine is not asked for a verb that it lacks. Asking costs one settlement one request in vain.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// `POST /abort_requests`.
    Abort,
    /// `POST /kv/release`.
    Release,
}

/// What is known, and since when; nothing at first.
#[derive(Debug, Default)]
pub(crate) struct Verbs(Mutex<[Option<(bool, Instant)>; 2]>);

impl Verbs {
    /// Whether the engine has it, where that is known.
    pub(crate) fn has(&self, verb: Verb, now: Instant) -> Option<bool> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner)[verb as usize];
        let is_fresh =
            |(has, since): &(bool, Instant)| *has || now.saturating_duration_since(*since) < ASK_AGAIN;
        known.filter(is_fresh).map(|(has, _)| has)
    }

    pub(crate) fn learn(&self, verb: Verb, has: bool, now: Instant) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[verb as usize] = Some((has, now));
    }

    /// The engine went away; what comes up in its place may have what it lacked. What it had is doubted only as before:
    /// one answer of a proxy that is up sooner takes nothing from it.
    pub(crate) fn forget(&self) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter_mut().for_each(|known| *known = known.filter(|(has, _)| *has));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_a_verb_is_missing_is_believed_for_a_minute_and_that_it_is_there_for_good() {
        let (verbs, now) = (Verbs::default(), Instant::now());
        assert_eq!(verbs.has(Verb::Abort, now), None);
        verbs.learn(Verb::Abort, false, now);
        verbs.learn(Verb::Release, true, now);
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(verbs.has(Verb::Abort, later(59)), Some(false));
        assert_eq!(verbs.has(Verb::Abort, later(60)), None, "it is asked again");
        assert_eq!(verbs.has(Verb::Release, later(1 << 20)), Some(true));
        verbs.learn(Verb::Abort, false, later(60));
        assert_eq!(verbs.has(Verb::Abort, later(119)), Some(false));
        verbs.forget();
        assert_eq!(verbs.has(Verb::Abort, later(119)), None, "what comes up may have it");
        assert_eq!(verbs.has(Verb::Release, now), Some(true), "and one that had it is not doubted");
    }
}
