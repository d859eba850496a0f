//! The requests of one engine, by vLLM's internal id and by the router's request id.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use baton_connector::limits::{LEASES_MAX, TOMBSTONE_TTL, TOMBSTONES_MAX};
use baton_connector::{Handle, RequestId};
use baton_openai::cluster::LegFilter;

use crate::ids::RequestName;

/// Limit of the requests in the table. Further ones are served, and are not lent.
const REQUESTS_MAX: usize = 2 * LEASES_MAX;

/// Results of a read of blocks.
pub(super) const FETCH_RESULTS: &[&str] = &["landed", "gone", "failed", "stopped"];

/// Ways of an abort.
pub(super) const ABORTS: &[&str] = &["disconnect", "verb"];

/// Outcomes of a request.
pub(super) const OUTCOMES: &[&str] = &["stop", "length", "abort", "error"];

/// Reasons for which a request is refused.
pub(super) const REFUSALS: &[&str] =
    &["aborted_early", "queue_full", "too_long", "draining", "invalid_kv_transfer_params"];

/// A word of a fixed list, else `other`.
pub(super) fn known(word: &str, words: &[&'static str]) -> &'static str {
    words.iter().find(|known| **known == word).copied().unwrap_or("other")
}

/// The part of a request that this engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Prefill,
    Decode,
    Whole,
    Other,
}

impl Leg {
    /// The leg of a word.
    pub(crate) fn of(word: &str) -> Self {
        let all = [Self::Prefill, Self::Decode, Self::Whole];
        all.into_iter().find(|leg| leg.label() == word).unwrap_or(Self::Other)
    }

    /// The word in the log.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Whole => "whole",
            Self::Other => "other",
        }
    }

    /// Whether a verb for these legs ends this one. As at Baton's engine, a whole request counts as a decode leg.
    fn is_in(self, legs: LegFilter) -> bool {
        legs == LegFilter::Both || (legs == LegFilter::Prefill) == (self == Self::Prefill)
    }
}

/// One request that the scheduler knows, or whose blocks are lent.
#[derive(Debug)]
pub(super) struct RequestEntry {
    pub(super) name: RequestName,
    leg: Leg,
    /// The lease of its blocks. It may have ended.
    pub(super) lent: Option<Handle>,
    /// A verb has ended it.
    pub(super) aborted: bool,
    /// The scheduler has finished it.
    pub(super) ended: bool,
    /// Its blocks are free, or it had none.
    pub(super) freed: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct RequestTable {
    by_internal: HashMap<Arc<str>, RequestEntry>,
    by_request: HashMap<RequestId, Vec<Arc<str>>>,
    early: EarlyAborts,
    /// Internal ids of requests that the Python half must abort.
    pub(super) aborts: Vec<Arc<str>>,
    /// The core stops: nothing is lent.
    pub(super) closing: bool,
}

impl RequestTable {
    /// Adds a request; `None` when the table is full or has this id.
    pub(super) fn insert(&mut self, id: &Arc<str>, router: Option<&str>, leg: Leg) -> Option<&RequestEntry> {
        if self.by_internal.len() >= REQUESTS_MAX || self.by_internal.contains_key(id) {
            return None;
        }
        let name = RequestName::of(id, router);
        self.by_request.entry(name.request.clone()).or_default().push(Arc::clone(id));
        let entry = RequestEntry { name, leg, lent: None, aborted: false, ended: false, freed: false };
        let entry = self.by_internal.entry(Arc::clone(id)).or_insert(entry);
        Some(&*entry)
    }

    /// The entry of an internal id.
    pub(super) fn get_mut(&mut self, id: &str) -> Option<&mut RequestEntry> {
        self.by_internal.get_mut(id)
    }

    /// The name of a request that is not in the table.
    pub(super) fn name_of(&self, id: &str) -> RequestName {
        RequestName::of(id, None)
    }

    /// Removes a request.
    pub(super) fn remove(&mut self, id: &str) -> Option<RequestEntry> {
        let entry = self.by_internal.remove(id)?;
        if let Some(ids) = self.by_request.get_mut(&entry.name.request) {
            ids.retain(|of_request| **of_request != *id);
            if ids.is_empty() {
                self.by_request.remove(&entry.name.request);
            }
        }
        Some(entry)
    }

    /// Marks the running sequences of a request as aborted, and queues new ones for the Python half. False without any.
    pub(super) fn abort(&mut self, request: &RequestId, legs: LegFilter) -> bool {
        let mut found = false;
        for id in self.by_request.get(request).into_iter().flatten() {
            let Some(entry) = self.by_internal.get_mut(id) else { continue };
            if entry.ended || entry.lent.is_some() || !entry.leg.is_in(legs) {
                continue;
            }
            found = true;
            if !entry.aborted {
                entry.aborted = true;
                self.aborts.push(Arc::clone(id));
            }
        }
        found
    }

    /// Remembers the abort of a decode leg that has not arrived. The ledger remembers prefills.
    pub(super) fn remember(&mut self, request: RequestId, now: Instant) {
        self.early.remember(request, now);
    }

    /// Whether a decode leg was aborted before it arrived.
    pub(super) fn was_aborted_early(&self, request: &RequestId, now: Instant) -> bool {
        self.early.contains(request, now)
    }

    /// Requests in the table.
    pub(super) fn len(&self) -> usize {
        self.by_internal.len()
    }
}

/// Aborts of requests that have not arrived, bounded in number and time.
#[derive(Debug, Default)]
struct EarlyAborts {
    /// Oldest first.
    order: VecDeque<(Instant, RequestId)>,
    by_name: HashMap<RequestId, Instant>,
}

impl EarlyAborts {
    fn remember(&mut self, request: RequestId, now: Instant) {
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

    fn contains(&self, request: &RequestId, now: Instant) -> bool {
        self.by_name.get(request).is_some_and(|at| now.saturating_duration_since(*at) < TOMBSTONE_TTL)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn request(name: &str) -> RequestId {
        RequestId::new(name).expect("an id")
    }

    #[test]
    fn a_verb_finds_every_sequence_of_its_leg_once() {
        let mut table = RequestTable::default();
        for (id, leg) in [("0_cmpl-x-0-0a1b2c3d", Leg::Prefill), ("1_cmpl-x-0-0a1b2c3d", Leg::Prefill)] {
            assert!(table.insert(&Arc::from(id), None, leg).is_some());
            assert!(table.insert(&Arc::from(id), None, leg).is_none(), "a repeated id");
        }
        table.insert(&Arc::from("other"), Some("x"), Leg::Whole);
        assert!(!table.abort(&request("y"), LegFilter::Both));
        assert!(table.abort(&request("x"), LegFilter::Prefill) && table.aborts.len() == 2);
        assert!(table.abort(&request("x"), LegFilter::Prefill) && table.aborts.len() == 2);
        assert!(table.abort(&request("x"), LegFilter::Decode) && table.aborts.len() == 3);
        table.get_mut("other").expect("an entry").ended = true;
        assert!(!table.abort(&request("x"), LegFilter::Decode));
        assert!(table.remove("other").is_some() && table.remove("other").is_none());
        assert_eq!((table.len(), table.by_request.len()), (2, 1));
    }

    #[test]
    fn early_aborts_are_bounded_in_number_and_time() {
        let (mut early, start) = (EarlyAborts::default(), Instant::now());
        for number in 0..=TOMBSTONES_MAX {
            early.remember(request(&number.to_string()), start);
        }
        assert!(!early.contains(&request("0"), start) && early.contains(&request("1"), start));
        assert!(!early.contains(&request("1"), start + TOMBSTONE_TTL));
        early.remember(request("late"), start + TOMBSTONE_TTL + Duration::from_secs(1));
        assert_eq!((early.order.len(), early.by_name.len()), (1, 1));
    }
}
