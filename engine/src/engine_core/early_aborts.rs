//! Decode requests that were aborted by name before they arrived. The core ends such a request when it arrives. The
//! ledger remembers prefills. Number and time are bounded.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use baton_connector::RequestId;
use baton_connector::limits::{TOMBSTONE_TTL, TOMBSTONES_MAX};

#[derive(Debug, Default)]
pub(super) struct EarlyAborts {
    /// Oldest first.
    order: VecDeque<(Instant, RequestId)>,
    /// The same by name, because every submission is looked up.
    by_name: HashMap<RequestId, Instant>,
}

impl EarlyAborts {
    pub(super) fn remember(&mut self, request: RequestId, now: Instant) {
        let lapsed = |at: Instant| now.saturating_duration_since(at) >= TOMBSTONE_TTL;
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

    pub(super) fn contains(&self, request: &RequestId, now: Instant) -> bool {
        self.by_name.get(request).is_some_and(|at| now.saturating_duration_since(*at) < TOMBSTONE_TTL)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_kept_for_a_while_and_only_so_many_of_them() {
        let (mut early, start) = (EarlyAborts::default(), Instant::now());
        let name = |n: usize| RequestId::new(&format!("r{n}")).expect("a request id");
        for n in 0..TOMBSTONES_MAX + 2 {
            early.remember(name(n), start);
        }
        assert_eq!(early.order.len(), TOMBSTONES_MAX);
        assert!(!early.contains(&name(1), start) && early.contains(&name(2), start));
        let later = start + TOMBSTONE_TTL;
        assert!(!early.contains(&name(2), later));
        early.remember(name(0), later + Duration::from_secs(1));
        assert_eq!((early.order.len(), early.by_name.len()), (1, 1));
    }
}
