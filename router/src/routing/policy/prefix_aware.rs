//! The engine (or data-parallel rank: each has a cache of its own) that holds most of the prompt, unless it is too busy for that.
//!
//! **The balance rule.** Let `least` be the load of the least loaded engine (requests for its weight). An engine
//! is too busy when its load is over `least + balance_abs` and over `least × balance_rel`. Too busy engines are
//! not chosen for what they hold; of the others the one that holds most is, the less loaded of equals; if nobody
//! holds enough, the least loaded. So a popular prefix is computed by one engine, spills to a second when the
//! first runs ahead, and from then on both serve it.
//!
//! It is judged for each engine and each request. Rules that ask whether the whole fleet is out of balance switch
//! cache affinity off for everybody as soon as one engine is hot, and rules that send a prompt that nobody holds
//! to whoever holds least send all new work to the engine whose queue is longest: the known spiral (sglang
//! #14305, #14532). `simulation.rs` runs that scenario with this policy and with a naive one.

use std::sync::Arc;

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::config::{LoadUnit, PrefixAwareConfig};
use crate::engines::caches::Memory;
use crate::message::features::Wanted;
use crate::metrics::routing::Reason;

/// Follows prefixes.
#[derive(Debug)]
pub(crate) struct PrefixAware {
    config: PrefixAwareConfig,
    memory: Arc<Memory>,
}

impl PrefixAware {
    pub(crate) fn new(config: PrefixAwareConfig, memory: Arc<Memory>) -> Self {
        Self { config, memory }
    }

    /// The load beyond which an engine is too busy, given the least.
    fn busy_over(&self, least: u64) -> u64 {
        let abs = least.saturating_add(u64::from(self.config.balance_abs) << 16);
        // Loads are far below 2^53.
        abs.max((least as f64 * self.config.balance_rel) as u64)
    }

    /// Whether a match of so many of all is worth following.
    fn is_worth(&self, length: usize, of: usize) -> bool {
        length > 0 && length as f64 >= self.config.match_min * of as f64
    }
}

impl Policy for PrefixAware {
    fn choose(&self, wanted: &Wanted<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice> {
        let least = candidates.least(LoadUnit::Requests, draw.turn)?;
        let busy_over = self.busy_over(least.load(LoadUnit::Requests));
        let of = |holder: u32| candidates.of_holder(holder);
        let load = |holder| Some(of(holder)?.load(LoadUnit::Requests));
        let calm = |holder| load(holder).filter(|&load| load <= busy_over);
        if let Some(found) = self.memory.longest_told(wanted.blocks, calm)
            && self.is_worth(found.length, wanted.blocks.len())
        {
            let blocks = u32::try_from(found.length).unwrap_or(u32::MAX);
            return Some(Choice { index: of(found.engine)?.index, reason: Reason::HoldsBlocks(blocks) });
        }
        if let Some(found) = self.memory.longest_sent(wanted.prefix, calm)
            && self.is_worth(found.length, wanted.prefix.len())
        {
            let chunks = u32::try_from(found.length).unwrap_or(u32::MAX);
            return Some(Choice { index: of(found.engine)?.index, reason: Reason::HoldsChunks(chunks) });
        }
        let busy = self.memory.longest_sent(wanted.prefix, load);
        let busy = busy.is_some_and(|found| self.is_worth(found.length, wanted.prefix.len()));
        let reason = if busy { Reason::HoldersBusy } else { Reason::NotCached };
        Some(Choice { index: least.index, reason })
    }

    fn score(&self, wanted: &Wanted<'_>, candidate: &Candidate) -> f64 {
        self.scores(wanted, std::slice::from_ref(candidate))[0]
    }

    /// The share of the prompt that each holds, less its load in thousandths.
    fn scores(&self, wanted: &Wanted<'_>, candidates: &[Candidate]) -> Vec<f64> {
        let holders: Vec<u32> = candidates.iter().map(|candidate| candidate.holder).collect();
        let holdings = self.memory.holdings(&holders, wanted.prefix, wanted.blocks);
        let less = |candidate: &Candidate| candidate.load(LoadUnit::Requests) as f64 / 65_536.0 / 1_000.0;
        holdings.iter().zip(candidates).map(|(holding, c)| holding.share(wanted) - less(c)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;
    use crate::engines::caches::prefix_index::Change;

    fn policy(balance_abs: u32, balance_rel: f64) -> PrefixAware {
        let config = PrefixAwareConfig { balance_abs, balance_rel, match_min: 0.1 };
        PrefixAware::new(config, Arc::new(Memory::new(1000, 10_000)))
    }

    fn choose(policy: &PrefixAware, prefix: &[u64], loads: &[u32]) -> (usize, Reason) {
        let wanted = Wanted { prefix, ..Wanted::default() };
        let choice = policy.choose(&wanted, &with_loads(loads), Draw::default()).expect("a candidate");
        (choice.index, choice.reason)
    }

    #[test]
    fn the_engine_that_holds_most_is_chosen_until_both_thresholds_say_that_it_is_too_busy() {
        let policy = policy(4, 2.0);
        policy.memory.sent(1, &[1, 2, 3, 4]);
        policy.memory.sent(2, &[1, 2]);
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 4, 0]), (1, Reason::HoldsChunks(4)));
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 5, 1]), (2, Reason::HoldsChunks(2)));
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[0, 5, 6]), (0, Reason::HoldersBusy));
        assert_eq!(choose(&policy, &[1, 2, 3, 4], &[10, 20, 30]), (1, Reason::HoldsChunks(4)), "not twice");
        assert_eq!(choose(&policy, &[9, 8], &[7, 5, 6]), (1, Reason::NotCached));
    }

    #[test]
    fn what_engines_tell_goes_before_what_was_sent() {
        let policy = policy(4, 2.0);
        policy.memory.sent(1, &[1, 2, 3, 4]);
        policy.memory.told(2, &[Change::Added(71), Change::Added(70)], &Default::default());
        let wanted = Wanted { prefix: &[1, 2, 3, 4], blocks: &[70, 71, 72], ..Wanted::default() };
        let choice = policy.choose(&wanted, &with_loads(&[0, 0, 0]), Draw::default());
        assert_eq!(choice, Some(Choice { index: 2, reason: Reason::HoldsBlocks(2) }));
    }

    #[test]
    fn a_match_that_is_too_short_is_not_followed() {
        let policy = policy(4, 2.0);
        policy.memory.sent(1, &[1]);
        let long: Vec<u64> = (1..=11).collect();
        assert_eq!(choose(&policy, &long, &[0, 3, 0]).1, Reason::NotCached);
        assert_eq!(choose(&policy, &long[..10], &[0, 3, 0]), (1, Reason::HoldsChunks(1)));
    }
}
