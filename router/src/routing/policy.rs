//! How one engine of a pool is chosen. A plug: the trait is here, one file per policy is below.
//!
//! A policy is a pure function of the request, the engines that have room ([`Candidates`]), and what is drawn for the decision
//! (a turn and a random number come as arguments), so that a decision can be repeated without consequences: a
//! dry run is the same call. Only [`PrefixAware`] looks at something else, the index of who holds what.

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
use crate::engines::caches::Memory;
use crate::message::features::Wanted;
use crate::metrics::routing::Reason;

/// What a policy may know of an engine that can be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// Its index in its pool.
    pub index: usize,
    /// Whose cache it has: an engine's, or one of its data-parallel ranks'. Candidates come in its order.
    pub holder: u32,
    /// A hash of its address: the same in every router.
    pub key: u64,
    /// Requests that it is working on: this router's, or, where engines are asked for their load, everybody's as far as is
    /// known.
    pub requests: u32,
    /// Prompt tokens of this router's requests that it is working on, estimated.
    pub tokens: u64,
    /// Its share of the work against the others'. At least 1.
    pub weight: u32,
}

/// What a policy decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The candidate's `index`.
    pub index: usize,
    pub reason: Reason,
}

/// Chooses among the engines that can serve a request.
pub(crate) trait Policy: Send + Sync {
    /// `None` only when there is no candidate.
    fn choose(&self, wanted: &Wanted<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice>;

    /// What the policy compares of a candidate, for explanations; more is better.
    fn score(&self, wanted: &Wanted<'_>, candidate: &Candidate) -> f64;

    /// The scores of several candidates, in their order.
    fn scores(&self, wanted: &Wanted<'_>, candidates: &[Candidate]) -> Vec<f64> {
        candidates.iter().map(|candidate| self.score(wanted, candidate)).collect()
    }
}

/// The policy that a configuration names.
pub(crate) fn of_config(config: &PolicyConfig, memory: &Arc<Memory>) -> Box<dyn Policy> {
    match config {
        PolicyConfig::RoundRobin(_) => Box::new(RoundRobin),
        PolicyConfig::Random(_) => Box::new(Random),
        PolicyConfig::PowerOfTwo(config) => Box::new(PowerOfTwo(config.by)),
        PolicyConfig::LeastLoad(config) => Box::new(LeastLoad(config.by)),
        PolicyConfig::ConsistentHash(config) => Box::new(ConsistentHash(config.clone())),
        PolicyConfig::PrefixAware(config) => Box::new(PrefixAware::new(config.clone(), Arc::clone(memory))),
    }
}

/// What a policy takes the least of, where it does.
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
    /// Its load for its weight, in 2^-16 of the unit; comparable between candidates.
    pub(crate) fn load(&self, by: LoadUnit) -> u64 {
        let load = match by {
            LoadUnit::Requests => u64::from(self.requests),
            // A prompt of no tokens is work too.
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
            holder: u32::try_from(index).expect("few"),
            key: index as u64 ^ 0x5bd1_e995,
            requests,
            tokens: u64::from(requests) * 100,
            weight: 1,
        };
        loads.iter().enumerate().map(one).collect()
    }

    #[test]
    fn every_policy_chooses_a_candidate_if_there_is_one_and_nothing_otherwise() {
        let memory = Arc::new(Memory::new(1 << 10, 1 << 10));
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
            let policy = of_config(&config, &memory);
            assert_eq!(policy.choose(&Wanted::default(), &Vec::new(), Draw::default()), None, "{yaml}");
            let mut draw = Draw::seeded(7);
            for size in 1..20_u32 {
                let candidates = with_loads(&(0..size).map(|n| n * 7 % 5).collect::<Vec<_>>());
                let choice = policy.choose(&Wanted::default(), &candidates, draw.next());
                assert!(choice.is_some_and(|c| c.index < candidates.len()), "{yaml}");
            }
        }
    }
}
