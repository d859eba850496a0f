//! Requests to decode that were aborted by name before they arrived: such a request is ended when it arrives.
//! (One that lends is remembered by the ledger.) Bounded in number and in time.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use baton_connector::RequestId;
use baton_connector::limits::{TOMBSTONE_KEPT, TOMBSTONES_MAX};

#[derive(Debug, Default)]
pub(super) struct AbortedEarly {
    /// Oldest first.
    order: VecDeque<(Instant, RequestId)>,
    /// The same by name: every submission is looked up.
    by_name: HashMap<RequestId, Instant>,
}

impl AbortedEarly {
    pub(super) fn remember(&mut self, request: RequestId, now: Instant) {
        let lapsed = |at: Instant| now.saturating_duration_since(at) >= TOMBSTONE_KEPT;
        while self.order.len() >= TOMBSTONES_MAX || self.order.front().is_some_and(|(at, _)| lapsed(*at)) {
            if let Some((at, oldest)) = self.order.pop_front()
                && self.by_name.get(&oldest) == Some(&at)
            {
                self.by_name.remove(&oldest);
            }
        }
        self.by_name.insert(request.clone(), now);
        self.order.push_back((now, request));
    }

    pub(super) fn knows(&self, request: &RequestId, now: Instant) -> bool {
        self.by_name.get(request).is_some_and(|at| now.saturating_duration_since(*at) < TOMBSTONE_KEPT)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_kept_for_a_while_and_only_so_many_of_them() {
        let (mut early, start) = (AbortedEarly::default(), Instant::now());
        let name = |n: usize| RequestId::new(&format!("r{n}")).expect("a request id");
        for n in 0..TOMBSTONES_MAX + 2 {
            early.remember(name(n), start);
        }
        assert_eq!(early.order.len(), TOMBSTONES_MAX);
        assert!(!early.knows(&name(1), start) && early.knows(&name(2), start));
        let later = start + TOMBSTONE_KEPT;
        assert!(!early.knows(&name(2), later));
        early.remember(name(0), later + Duration::from_secs(1));
        assert_eq!((early.order.len(), early.by_name.len()), (1, 1));
    }
}
