//! Chooses the engine that owns a request's key. If that engine has more than its share, the key's next engine is
//! chosen.
//!
//! Keys are sorted into 65,536 slots. Each engine has a number per slot (highest random weight; Thaler and Ravishankar,
//! 1998), computed from the slot and the engine's address only. The highest number wins, so every router sends a key to
//! the same engine. A pool stores the engines with the highest numbers per slot and does not rank all engines again.
//! The limited number of slots makes shares uneven: n engines have equal shares of the keys to within about √(n /
//! 65,536), which is 4 % for 100 engines and 12 % for 1,000.
//!
//! An added engine takes its share of the keys and moves no other key; the keys of a removed engine go to all others.
//! Loads are bounded as in Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018: no engine
//! gets more than `load_factor` times its fair share, rounded up to a whole request.

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::config::{AffinityKey, ConsistentHashConfig, LoadUnit};
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Sends equal keys to equal engines.
#[derive(Debug)]
pub(crate) struct ConsistentHash(pub ConsistentHashConfig);

impl ConsistentHash {
    fn key(&self, features: &RoutingFeatures<'_>) -> Option<u64> {
        let of = |key: &AffinityKey| match key {
            AffinityKey::Session => features.session,
            AffinityKey::User => features.user,
            AffinityKey::Prefix => {
                features.prefix.get(..self.0.prefix_chunks).unwrap_or(features.prefix).last().copied()
            }
        };
        self.0.keys.iter().find_map(of)
    }
}

impl Policy for ConsistentHash {
    fn choose(
        &self,
        features: &RoutingFeatures<'_>,
        candidates: &dyn Candidates,
        draw: Draw,
    ) -> Option<Choice> {
        let Some(key) = self.key(features) else {
            let index = candidates.least(LoadUnit::Requests, draw.turn)?.index;
            return Some(Choice { index, reason: ChoiceReason::NoKey });
        };
        // `load_factor` times the engine's share of all requests including this one, and at least one.
        let all = (candidates.requests() + 1) as f64;
        let per_weight = self.0.load_factor * all / candidates.weights() as f64;
        let slot = slot(key);
        let has_room = |c: &Candidate| f64::from(c.requests) < (per_weight * f64::from(c.weight)).ceil();
        if let Some(stored) = candidates.first_of_slot(slot, &|candidate| rank(slot, candidate)) {
            let mut stored = stored.into_iter().flatten().peekable();
            let first = stored.peek().map(|candidate| candidate.index);
            if let Some((first, chosen)) = first.zip(stored.find(has_room)) {
                return Some(choice(first, chosen.index));
            }
        }
        let (mut first, mut with_room) = (None::<(f64, usize)>, None::<(f64, usize)>);
        candidates.each(&mut |candidate| {
            let ranked = (rank(slot, candidate), candidate.index);
            let is_better = |than: Option<(f64, usize)>| than.is_none_or(|than| ranked.0 >= than.0);
            if is_better(first) {
                first = Some(ranked);
            }
            if is_better(with_room) && has_room(candidate) {
                with_room = Some(ranked);
            }
        });
        let (_, first) = first?;
        // The factor is at least 1, so an engine has room; the key's own engine covers rounding errors.
        let index = with_room.map_or(first, |(_, index)| index);
        Some(choice(first, index))
    }

    fn score(&self, features: &RoutingFeatures<'_>, candidate: &Candidate) -> f64 {
        self.key(features).map_or(0.0, |key| rank(slot(key), candidate))
    }
}

fn choice(first: usize, index: usize) -> Choice {
    Choice { index, reason: if index == first { ChoiceReason::KeysEngine } else { ChoiceReason::KeysNext } }
}

/// The slot of a key.
fn slot(key: u64) -> u16 {
    (mix(key) >> 48) as u16
}

fn mix(mut mixed: u64) -> u64 {
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

/// The candidate's number for a slot, in (0, 1). A candidate has the highest number as often as its weight requires.
fn rank(slot: u16, candidate: &Candidate) -> f64 {
    let mixed = mix(u64::from(slot) ^ candidate.key.rotate_left(32));
    let unit = ((mixed >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    if candidate.weight == 1 { unit } else { unit.powf(1.0 / f64::from(candidate.weight)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::with_loads;
    use super::*;

    fn policy(load_factor: f64) -> ConsistentHash {
        ConsistentHash(ConsistentHashConfig { load_factor, ..ConsistentHashConfig::default() })
    }

    fn owner(candidates: &Vec<Candidate>, session: u64) -> usize {
        let features = RoutingFeatures { session: Some(session), ..RoutingFeatures::default() };
        policy(100.0).choose(&features, candidates, Draw::default()).expect("a candidate").index
    }

    /// Keys that differ in all bits, as hashes do.
    fn keys(count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(|n| xxhash_rust::xxh3::xxh3_64(&n.to_le_bytes()))
    }

    #[test]
    fn an_engine_that_is_added_takes_its_share_of_the_keys_and_moves_no_other() {
        let (before, after) = (with_loads(&[0; 10]), with_loads(&[0; 11]));
        let moved: Vec<_> = keys(20_000).filter(|&k| owner(&before, k) != owner(&after, k)).collect();
        assert!(moved.iter().all(|&k| owner(&after, k) == 10), "only the new engine takes keys");
        // 20,000 / 11 = 1,818; six standard deviations are 244.
        assert!(moved.len().abs_diff(1_818) < 244, "{}", moved.len());
    }

    #[test]
    fn keys_are_spread_in_proportion_to_the_weights() {
        let mut candidates = with_loads(&[0; 4]);
        candidates[0].weight = 3;
        let mut taken = [0_u32; 4];
        keys(30_000).for_each(|key| taken[owner(&candidates, key)] += 1);
        assert!(taken[0].abs_diff(15_000) < 520, "{taken:?}");
        assert!(taken[1..].iter().all(|t| t.abs_diff(5_000) < 400), "{taken:?}");
    }

    #[test]
    fn the_first_key_that_a_request_has_is_used_and_without_any_load_decides() {
        let candidates = with_loads(&[3; 50]);
        let choose = |features: RoutingFeatures<'_>| {
            policy(100.0).choose(&features, &candidates, Draw::default()).expect("a candidate")
        };
        let (session, user, prefix) = (Some(11), Some(12), [1, 2, 3, 4, 5, 6]);
        let all = choose(RoutingFeatures { session, user, prefix: &prefix, ..RoutingFeatures::default() });
        assert_eq!(all, choose(RoutingFeatures { session, ..RoutingFeatures::default() }));
        assert_ne!(all, choose(RoutingFeatures { user, ..RoutingFeatures::default() }));
        let by_prefix = choose(RoutingFeatures { prefix: &prefix, ..RoutingFeatures::default() });
        assert_eq!(
            by_prefix,
            choose(RoutingFeatures { prefix: &[1, 2, 3, 4, 9], ..RoutingFeatures::default() })
        );
        assert_ne!(
            by_prefix,
            choose(RoutingFeatures { prefix: &[1, 2, 3, 5], ..RoutingFeatures::default() })
        );
        assert_eq!(choose(RoutingFeatures::default()).reason, ChoiceReason::NoKey);
    }

    proptest! {
        #[test]
        fn no_engine_exceeds_the_factor_times_its_share_even_for_one_key(
            engines in 1_usize..24, factor in 1.0_f64..3.0, hot in 0_u64..1000, requests in 1_u32..400,
        ) {
            let mut candidates = with_loads(&vec![0; engines]);
            let policy = policy(factor);
            for n in 0..requests {
                let features = RoutingFeatures { session: Some(hot), ..RoutingFeatures::default() };
                let index = policy.choose(&features, &candidates, Draw::default()).expect("one").index;
                candidates[index].requests += 1;
                let share = f64::from(n + 1) / engines as f64;
                prop_assert!(f64::from(candidates[index].requests) <= (factor * share).ceil());
            }
        }
    }
}
