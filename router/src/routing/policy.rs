//! How one engine of a pool is chosen. The trait is here; each policy has a file below.
//!
//! A policy is a pure function of the request, the engines with capacity ([`Candidates`]), and a [`Draw`] (a turn and a
//! random number). A dry run is therefore the same call without consequences. Only [`PrefixAware`] reads more: the
//! index of the engines' caches.

mod candidates;
mod consistent_hash;
mod draw;
mod least_load;
mod power_of_two;
mod prefix_aware;
mod random;
mod round_robin;
#[cfg(test)]
mod simulation;

pub(crate) use candidates::{Candidates, FIRST};
pub(crate) use consistent_hash::ConsistentHash;
pub(crate) use draw::Draw;
pub(crate) use least_load::LeastLoad;
pub(crate) use power_of_two::PowerOfTwo;
pub(crate) use prefix_aware::PrefixAware;
pub(crate) use random::Random;
pub(crate) use round_robin::RoundRobin;

use std::sync::Arc;

use crate::config::{LoadUnit, PolicyConfig};
use crate::engines::caches::KnownCaches;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// The properties of an eligible engine that a policy reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// Its index in the pool.
    pub index: usize,
    /// The id of its cache: an engine's, or that of a data-parallel rank. Candidates are ordered by this id.
    pub cache_id: u32,
    /// A hash of its address, equal in every router.
    pub key: u64,
    /// Its requests: this router's, or those of all routers as far as known if engines report their load.
    pub requests: u32,
    /// Estimated prompt tokens of this router's requests there.
    pub tokens: u64,
    /// Its relative share of the work. At least 1.
    pub weight: u32,
}

/// A policy's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The candidate's `index`.
    pub index: usize,
    pub reason: ChoiceReason,
}

/// Chooses among the engines that can serve a request.
pub(crate) trait Policy: Send + Sync {
    /// `None` only when there is no candidate.
    fn choose(
        &self,
        features: &RoutingFeatures<'_>,
        candidates: &dyn Candidates,
        draw: Draw,
    ) -> Option<Choice>;

    /// The value that the policy compares, for explanations; a higher value is better.
    fn score(&self, features: &RoutingFeatures<'_>, candidate: &Candidate) -> f64;

    /// The scores of several candidates, in their order.
    fn scores(&self, features: &RoutingFeatures<'_>, candidates: &[Candidate]) -> Vec<f64> {
        candidates.iter().map(|candidate| self.score(features, candidate)).collect()
    }
}

/// The policy that a configuration names.
pub(crate) fn of_config(config: &PolicyConfig, caches: &Arc<KnownCaches>) -> Box<dyn Policy> {
    match config {
        PolicyConfig::RoundRobin(_) => Box::new(RoundRobin),
        PolicyConfig::Random(_) => Box::new(Random),
        PolicyConfig::PowerOfTwo(config) => Box::new(PowerOfTwo(config.by)),
        PolicyConfig::LeastLoad(config) => Box::new(LeastLoad(config.by)),
        PolicyConfig::ConsistentHash(config) => Box::new(ConsistentHash(config.clone())),
        PolicyConfig::PrefixAware(config) => Box::new(PrefixAware::new(config.clone(), Arc::clone(caches))),
    }
}

/// The unit of load that a policy minimizes.
pub(crate) fn unit_of(config: &PolicyConfig) -> LoadUnit {
    match config {
        PolicyConfig::LeastLoad(config) | PolicyConfig::PowerOfTwo(config) => config.by,
        PolicyConfig::RoundRobin(_)
        | PolicyConfig::Random(_)
        | PolicyConfig::ConsistentHash(_)
        | PolicyConfig::PrefixAware(_) => LoadUnit::Requests,
    }
}

impl Candidate {
    /// Its load divided by its weight, in 2^-16 of the unit; comparable between candidates.
    pub(crate) fn load(&self, by: LoadUnit) -> u64 {
        let load = match by {
            LoadUnit::Requests => u64::from(self.requests),
            // A prompt without tokens is work too.
            LoadUnit::Tokens => self.tokens.saturating_add(u64::from(self.requests)),
        };
        load.saturating_mul(1 << 16) / u64::from(self.weight.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates with these loads and equal weights.
    pub(crate) fn with_loads(loads: &[u32]) -> Vec<Candidate> {
        let one = |(index, &requests): (usize, &u32)| Candidate {
            index,
            cache_id: u32::try_from(index).expect("few"),
            key: index as u64 ^ 0x5bd1_e995,
            requests,
            tokens: u64::from(requests) * 100,
            weight: 1,
        };
        loads.iter().enumerate().map(one).collect()
    }

    #[test]
    fn every_policy_chooses_a_candidate_if_there_is_one_and_nothing_otherwise() {
        let caches = Arc::new(KnownCaches::new(1 << 10, 1 << 10));
        for yaml in [
            "round_robin",
            "random",
            "power_of_two",
            "least_load",
            "consistent_hash",
            "prefix_aware",
            "{least_load: {by: tokens}}",
        ] {
            let config: PolicyConfig = serde_saphyr::from_str(yaml).expect(yaml);
            let policy = of_config(&config, &caches);
            assert_eq!(
                policy.choose(&RoutingFeatures::default(), &Vec::new(), Draw::default()),
                None,
                "{yaml}"
            );
            let mut draw = Draw::seeded(7);
            for size in 1..20_u32 {
                let candidates = with_loads(&(0..size).map(|n| n * 7 % 5).collect::<Vec<_>>());
                let choice = policy.choose(&RoutingFeatures::default(), &candidates, draw.next());
                assert!(choice.is_some_and(|c| c.index < candidates.len()), "{yaml}");
            }
        }
    }
}
