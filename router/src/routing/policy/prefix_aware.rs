//! The engine or data-parallel rank whose cache has most of the prompt, unless it is too busy.
//!
//! **The balance rule.** Let `least` be the load of the least loaded engine (requests for its weight). An engine is too
//! busy if its load exceeds both `least + balance_abs` and `least × balance_rel`. Too busy engines are not chosen for
//! their cache. Among the others the engine with most of the prompt is chosen, and of equals the less loaded one. If no
//! engine has enough of it, the least loaded engine is chosen. So one engine computes a popular prefix, a second one
//! takes over when the first becomes too busy, and from then on both serve it.
//!
//! The rule applies to each engine and each request. A rule for the balance of the whole fleet would disable cache
//! affinity for all requests as soon as one engine is hot. A rule that sends uncached prompts to the engine with the
//! smallest cache would send all new work to the engine with the longest queue: the known spiral (sglang #14305,
//! #14532). `simulation.rs` runs that scenario with this policy and with a naive one.

use std::sync::Arc;

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::config::{LoadUnit, PrefixAwareConfig};
use crate::engines::caches::KnownCaches;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Chooses by cached prefixes.
#[derive(Debug)]
pub(crate) struct PrefixAware {
    config: PrefixAwareConfig,
    caches: Arc<KnownCaches>,
}

impl PrefixAware {
    pub(crate) fn new(config: PrefixAwareConfig, caches: Arc<KnownCaches>) -> Self {
        Self { config, caches }
    }

    /// The load above which an engine is too busy, given the least load.
    fn busy_over(&self, least: u64) -> u64 {
        let abs = least.saturating_add(u64::from(self.config.balance_abs) << 16);
        // Loads are far below 2^53.
        abs.max((least as f64 * self.config.balance_rel) as u64)
    }

    /// Whether a match of `length` out of `of` is long enough.
    fn is_worth(&self, length: usize, of: usize) -> bool {
        length > 0 && length as f64 >= self.config.match_min * of as f64
    }
}

impl Policy for PrefixAware {
    fn choose(
        &self,
        features: &RoutingFeatures<'_>,
        candidates: &dyn Candidates,
        draw: Draw,
    ) -> Option<Choice> {
        let least = candidates.least(LoadUnit::Requests, draw.turn)?;
        let busy_over = self.busy_over(least.load(LoadUnit::Requests));
        let of = |cache_id: u32| candidates.with_cache(cache_id);
        let load = |cache_id| Some(of(cache_id)?.load(LoadUnit::Requests));
        let calm = |cache_id| load(cache_id).filter(|&load| load <= busy_over);
        if let Some(found) = self.caches.longest_reported(features.blocks, calm)
            && self.is_worth(found.length, features.blocks.len())
        {
            let blocks = u32::try_from(found.length).unwrap_or(u32::MAX);
            return Some(Choice {
                index: of(found.engine)?.index,
                reason: ChoiceReason::HoldsBlocks(blocks),
            });
        }
        if let Some(found) = self.caches.longest_routed(features.prefix, calm)
            && self.is_worth(found.length, features.prefix.len())
        {
            let chunks = u32::try_from(found.length).unwrap_or(u32::MAX);
            return Some(Choice {
                index: of(found.engine)?.index,
                reason: ChoiceReason::HoldsChunks(chunks),
            });
        }
        let busy = self.caches.longest_routed(features.prefix, load);
        let busy = busy.is_some_and(|found| self.is_worth(found.length, features.prefix.len()));
        let reason = if busy { ChoiceReason::HoldersBusy } else { ChoiceReason::NotCached };
        Some(Choice { index: least.index, reason })
    }

    fn score(&self, features: &RoutingFeatures<'_>, candidate: &Candidate) -> f64 {
        self.scores(features, std::slice::from_ref(candidate))[0]
    }

    /// The cached share of the prompt, minus a thousandth of the load.
    fn scores(&self, features: &RoutingFeatures<'_>, candidates: &[Candidate]) -> Vec<f64> {
        let cache_ids: Vec<u32> = candidates.iter().map(|candidate| candidate.cache_id).collect();
        let cached = self.caches.cached_prefixes(&cache_ids, features.prefix, features.blocks);
        let less = |candidate: &Candidate| candidate.load(LoadUnit::Requests) as f64 / 65_536.0 / 1_000.0;
        cached.iter().zip(candidates).map(|(prefix, c)| prefix.share(features) - less(c)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;
    use crate::engines::caches::prefix_index::CacheChange;

    fn policy(balance_abs: u32, balance_rel: f64) -> PrefixAware {
        let config = PrefixAwareConfig { balance_abs, balance_rel, match_min: 0.1 };
        PrefixAware::new(config, Arc::new(KnownCaches::new(1000, 10_000)))
    }

    fn choose(policy: &PrefixAware, prefix: &[u64], loads: &[u32]) -> (usize, ChoiceReason) {
        let features = RoutingFeatures { prefix, ..RoutingFeatures::default() };
        let choice = policy.choose(&features, &with_loads(loads), Draw::default()).expect("a candidate");
        (choice.index, choice.reason)
    }

    #[test]
    fn the_engine_with_the_longest_prefix_is_chosen_below_both_load_thresholds() {
        let policy = policy(4, 2.0);
        policy.caches.record_routed(1, &[1, 2, 3, 4]);
        policy.caches.record_routed(2, &[1, 2]);
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 4, 0]), (1, ChoiceReason::HoldsChunks(4)));
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 5, 1]), (2, ChoiceReason::HoldsChunks(2)));
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 5, 6]), (0, ChoiceReason::HoldersBusy));
        assert_eq!(
            choose(&policy, &[1, 2, 3, 4], &[10, 20, 30]),
            (1, ChoiceReason::HoldsChunks(4)),
            "not twice"
        );
        assert_eq!(choose(&policy, &[9, 8], &[7, 5, 6]), (1, ChoiceReason::NotCached));
    }

    #[test]
    fn reported_cache_contents_override_assumed_ones() {
        let policy = policy(4, 2.0);
        policy.caches.record_routed(1, &[1, 2, 3, 4]);
        policy.caches.apply_reported(
            2,
            &[CacheChange::Added(71), CacheChange::Added(70)],
            &Default::default(),
        );
        let features =
            RoutingFeatures { prefix: &[1, 2, 3, 4], blocks: &[70, 71, 72], ..RoutingFeatures::default() };
        let choice = policy.choose(&features, &with_loads(&[0, 0, 0]), Draw::default());
        assert_eq!(choice, Some(Choice { index: 2, reason: ChoiceReason::HoldsBlocks(2) }));
    }

    #[test]
    fn a_match_that_is_too_short_is_not_followed() {
        let policy = policy(4, 2.0);
        policy.caches.record_routed(1, &[1]);
        let long: Vec<u64> = (1..=11).collect();
        assert_eq!(choose(&policy, &long, &[0, 3, 0]).1, ChoiceReason::NotCached);
        assert_eq!(choose(&policy, &long[..10], &[0, 3, 0]), (1, ChoiceReason::HoldsChunks(1)));
    }
}
