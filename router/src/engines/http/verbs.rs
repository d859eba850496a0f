//! Which settlement verbs an engine supports, learnt from its replies. A missing verb is remembered for a minute
//! only: the reply may have come from a proxy, or from an engine that was still starting.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time for which an engine gets no request for a missing verb. Each check costs one settlement a useless request.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// A settlement verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// `POST /abort_requests`.
    Abort,
    /// `POST /kv/release`.
    Release,
}

/// Whether an engine supports a verb or an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    Present,
    Missing,
}

/// The learnt values with their times; empty at first.
#[derive(Debug, Default)]
pub(crate) struct VerbSupport(Mutex<[Option<(bool, Instant)>; 2]>);

impl VerbSupport {
    /// Whether the engine supports a verb, if known.
    pub(crate) fn has(&self, verb: Verb, now: Instant) -> Option<bool> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner)[verb as usize];
        let is_fresh =
            |(has, since): &(bool, Instant)| *has || now.saturating_duration_since(*since) < RECHECK_INTERVAL;
        known.filter(is_fresh).map(|(has, _)| has)
    }

    pub(crate) fn learn(&self, verb: Verb, support: Support, now: Instant) {
        let has = support == Support::Present;
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[verb as usize] = Some((has, now));
    }

    /// Forgets missing verbs when the engine has gone, because its successor may support them. Supported verbs
    /// stay: one reply of a proxy that starts first must not remove them.
    pub(crate) fn forget(&self) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter_mut().for_each(|known| *known = known.filter(|(has, _)| *has));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_verb_is_cached_for_a_minute_and_a_present_one_forever() {
        let (verbs, now) = (VerbSupport::default(), Instant::now());
        assert_eq!(verbs.has(Verb::Abort, now), None);
        verbs.learn(Verb::Abort, Support::Missing, now);
        verbs.learn(Verb::Release, Support::Present, now);
        let later = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(verbs.has(Verb::Abort, later(59)), Some(false));
        assert_eq!(verbs.has(Verb::Abort, later(60)), None, "it is asked again");
        assert_eq!(verbs.has(Verb::Release, later(1 << 20)), Some(true));
        verbs.learn(Verb::Abort, Support::Missing, later(60));
        assert_eq!(verbs.has(Verb::Abort, later(119)), Some(false));
        verbs.forget();
        assert_eq!(verbs.has(Verb::Abort, later(119)), None, "what comes up may have it");
        assert_eq!(verbs.has(Verb::Release, now), Some(true), "and one that had it is not doubted");
    }
}
