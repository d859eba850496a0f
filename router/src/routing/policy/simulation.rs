//! Simulates the hotspot spiral: most requests share one prefix, and the engines are fast enough only if they need not
//! compute it for each request. A policy has to keep the load even *and* the caches hit. A naive prefix policy (the
//! longest match wins, otherwise the engine with the fewest chunks) fails the same test.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Candidate, Candidates, Choice, Draw, LeastLoad, Policy, PrefixAware};
use crate::config::{LoadUnit, PrefixAwareConfig};
use crate::engines::caches::KnownCaches;
use crate::engines::caches::prefix_index::PrefixIndex;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

const ENGINES: u32 = 8;
const TICKS: u64 = 2_000;
/// Chunks that an engine computes in one tick.
const RATE: f64 = 20.0;
/// The cost of a response, in chunks.
const ANSWER: f64 = 5.0;
/// Ticks that a request stays after its prompt is computed.
const ANSWERING: u64 = 20;
/// Requests in one tick: 68 % of the engines' capacity if everything repeated is cached, and 237 % if nothing is.
const ARRIVALS: u64 = 8;
/// Chunks that an engine's cache holds. All shared prefixes together are 4,040.
const CACHE: usize = 1_500;

/// The longest match wins, regardless of load; without a match, the engine with the fewest chunks.
struct NaivePrefixPolicy(Arc<KnownCaches>);

impl Policy for NaivePrefixPolicy {
    fn choose(&self, features: &RoutingFeatures<'_>, field: &dyn Candidates, _: Draw) -> Option<Choice> {
        let mut candidates = Vec::new();
        field.each(&mut |c| candidates.push(*c));
        let any = |engine| candidates.iter().any(|c| c.cache_id == engine).then_some(0);
        let held = |c: &&Candidate| self.0.routed_chunks(c.cache_id);
        let found = self.0.longest_routed(features.prefix, any).map(|found| found.engine);
        let chosen = match found {
            Some(engine) => candidates.iter().find(|c| c.cache_id == engine),
            None => candidates.iter().min_by_key(held),
        };
        chosen.map(|c| Choice { index: c.index, reason: ChoiceReason::NotCached })
    }

    fn score(&self, _: &RoutingFeatures<'_>, _: &Candidate) -> f64 {
        0.0
    }
}

/// An engine: a queue of prompts, computed in order, and responses that all take equally long.
#[derive(Default)]
struct SimulatedEngine {
    /// Work left of each request, and its arrival.
    queue: VecDeque<(f64, u64)>,
    /// The end of each response.
    answering: VecDeque<u64>,
    served: u64,
    /// Requests in it, summed over the ticks.
    load: u64,
}

impl SimulatedEngine {
    fn in_flight(&self) -> usize {
        self.queue.len() + self.answering.len()
    }
}

#[derive(Debug)]
struct SimulationOutcome {
    /// Average requests in flight, at the busiest and at the idlest engine.
    busiest: f64,
    idlest: f64,
    /// The share of repeated chunks that was not computed again.
    hits: f64,
    /// The longest time from a request's arrival to the end of its prompt, in ticks.
    longest_wait: u64,
    /// Requests served by the engine that served fewest.
    fewest_served: u64,
}

impl SimulationOutcome {
    /// Even load, cached prefixes, no long wait, and no idle engine.
    fn is_healthy(&self) -> bool {
        self.busiest <= 1.6 * self.idlest
            && self.hits >= 0.9
            && self.longest_wait < 60
            && self.fewest_served > TICKS * ARRIVALS / u64::from(ENGINES) / 2
    }
}

/// A request's chunks, and how many of them are shared.
fn prompt(draw: Draw, number: u64) -> (Vec<u64>, usize) {
    let list = |kind: u64, count: u64| (0..count).map(move |n| (kind << 20) + n);
    let unique = 1_000_000 + number;
    if draw.number(10, 0) < 7 {
        (list(1, 40).chain(list(unique, 10)).collect(), 40)
    } else {
        let tenant = 100 + draw.number(200, 20);
        (list(tenant, 20).chain(list(unique, 5)).collect(), 20)
    }
}

fn simulate(policy: &dyn Policy, caches: &KnownCaches, seed: u64) -> SimulationOutcome {
    let mut engines: Vec<SimulatedEngine> = (0..ENGINES).map(|_| SimulatedEngine::default()).collect();
    let mut index = PrefixIndex::new(CACHE, usize::MAX);
    let mut draw = Draw::seeded(seed);
    let (mut repeated, mut hit, mut longest_wait) = (0_usize, 0_usize, 0);
    for tick in 0..TICKS {
        for n in 0..ARRIVALS {
            let (prefix, shared) = prompt(draw.next(), tick * ARRIVALS + n);
            let features = RoutingFeatures { prefix: &prefix, ..RoutingFeatures::default() };
            let candidates: Vec<_> = (0..ENGINES)
                .map(|engine| Candidate {
                    index: engine as usize,
                    cache_id: engine,
                    key: u64::from(engine),
                    requests: u32::try_from(engines[engine as usize].in_flight()).expect("few"),
                    tokens: 0,
                    weight: 1,
                })
                .collect();
            let chosen = policy.choose(&features, &candidates, draw.next()).expect("a candidate").index;
            let engine = u32::try_from(chosen).expect("few");
            caches.record_routed(engine, &prefix);
            let cached = index.length(engine, &prefix).min(shared);
            index.add(engine, &prefix);
            (repeated, hit) = (repeated + shared, hit + cached);
            engines[chosen].queue.push_back(((prefix.len() - cached) as f64 + ANSWER, tick));
        }
        for engine in &mut engines {
            engine.load += engine.in_flight() as u64;
            while engine.answering.pop_front_if(|end| *end <= tick).is_some() {}
            let mut left = RATE;
            while let Some((work, came)) = engine.queue.front_mut() {
                if *work > left {
                    *work -= left;
                    break;
                }
                left -= *work;
                longest_wait = longest_wait.max(tick - *came);
                engine.served += 1;
                engine.answering.push_back(tick + ANSWERING);
                engine.queue.pop_front();
            }
        }
    }
    let still = engines.iter().filter_map(|e| e.queue.front()).map(|(_, came)| TICKS - came).max();
    let loads: Vec<f64> = engines.iter().map(|e| e.load as f64 / TICKS as f64).collect();
    SimulationOutcome {
        busiest: loads.iter().copied().fold(0.0, f64::max),
        idlest: loads.iter().copied().fold(f64::MAX, f64::min),
        hits: hit as f64 / repeated as f64,
        longest_wait: longest_wait.max(still.unwrap_or(0)),
        fewest_served: engines.iter().map(|e| e.served).min().unwrap_or(0),
    }
}

fn known_caches() -> Arc<KnownCaches> {
    Arc::new(KnownCaches::new(CACHE, usize::MAX))
}

fn prefix_aware(config: PrefixAwareConfig) -> SimulationOutcome {
    let caches = known_caches();
    simulate(&PrefixAware::new(config, Arc::clone(&caches)), &caches, 1)
}

#[test]
fn a_hot_prefix_is_spread_evenly_and_still_found_in_the_caches() {
    let outcome = prefix_aware(PrefixAwareConfig::default());
    println!("prefix_aware: {outcome:?}");
    assert!(outcome.is_healthy(), "{outcome:?}");
    for seed in 2..5 {
        let caches = known_caches();
        let policy = PrefixAware::new(PrefixAwareConfig::default(), Arc::clone(&caches));
        let outcome = simulate(&policy, &caches, seed);
        assert!(outcome.is_healthy(), "seed {seed}: {outcome:?}");
    }
}

#[test]
fn a_naive_prefix_policy_fails_the_same_test_by_its_load() {
    let caches = known_caches();
    let outcome = simulate(&NaivePrefixPolicy(Arc::clone(&caches)), &caches, 1);
    println!("naive: {outcome:?}");
    assert!(!outcome.is_healthy());
    assert!(outcome.busiest > 20.0 * outcome.idlest && outcome.longest_wait > 500, "{outcome:?}");
}

#[test]
fn least_load_fails_the_same_test_by_its_hits() {
    let caches = known_caches();
    let outcome = simulate(&LeastLoad(LoadUnit::Requests), &caches, 1);
    println!("least_load: {outcome:?}");
    assert!(!outcome.is_healthy());
    assert!(outcome.hits < 0.9, "{outcome:?}");
}

#[test]
fn the_thresholds_trade_evenness_for_hits() {
    let with = |balance_abs| prefix_aware(PrefixAwareConfig { balance_abs, ..PrefixAwareConfig::default() });
    let (tight, loose) = (with(1), with(64));
    println!("balance_abs 1: {tight:?}\nbalance_abs 64: {loose:?}");
    assert!(tight.busiest / tight.idlest.max(0.01) < loose.busiest / loose.idlest.max(0.01));
}
