//! A pool's load indexes give the same choice as a scan of its members, after any events at the engines.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::config::{PoolConfig, ReleaseMode};
use crate::engines::fleet::Fleet;
use crate::engines::health::{EngineLoad, FailureKind, LoadReading, OperatorOrder, state};
use crate::engines::http::ConnectionTerms;
use crate::engines::protocol::learned::ProtocolTerms;

const POLICIES: [&str; 8] = [
    "round_robin",
    "random",
    "power_of_two",
    "{power_of_two: {by: tokens}}",
    "least_load",
    "{least_load: {by: tokens}}",
    "{consistent_hash: {load_factor: 1.5}}",
    "{prefix_aware: {balance_abs: 2}}",
];

fn terms() -> ConnectionTerms {
    ConnectionTerms {
        connect_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
        lost_after: Duration::ZERO,
        secret: None,
        api_key: None,
        tls: None,
        http2: Default::default(),
        health: state::tests::TERMS,
        release: ReleaseMode::default(),
        protocol: ProtocolTerms::default(),
        control: None,
    }
}

/// A pool of `engines` in three zones, with different or equal `weights`; `prefer` is YAML.
fn pool(fleet: &Fleet, policy: &str, engines: usize, weights: bool, prefer: &str) -> Pool {
    let engine = |n: usize| {
        let (weight, zone) = (if weights { 1 + n % 3 } else { 2 }, ["a", "b", "c"][n % 3]);
        let revision = [", revision: old", ", revision: new", ""][n / 3 % 3];
        format!(
            "  - {{url: 'http://e{n}:1', weight: {weight}, max_in_flight: 3, labels: {{zone: {zone}{revision}}}}}\n"
        )
    };
    let engines: String = (0..engines).map(engine).collect();
    let yaml =
        format!("policy: {policy}\ncapacity: {{max_waiting: 2}}\nprefer: {prefer}\nengines:\n{engines}");
    of_yaml(fleet, &yaml)
}

fn of_yaml(fleet: &Fleet, yaml: &str) -> Pool {
    let config: PoolConfig = serde_saphyr::from_str(yaml).expect("a pool");
    let member = |engine: &crate::config::EngineConfig| {
        let known = fleet.engine(&engine.url, &terms());
        Arc::new(PoolMember::new(engine, known, None, &config, &["zone".to_owned()], Some("revision")))
    };
    let members = config.engines.iter().map(member).collect();
    let health = HealthConfig::default();
    let (leg, caches) = (Leg::Decode, &fleet.known_caches);
    Pool::new(leg, members, &config.policy, &health, caches, PrefixTracking::Always)
}

/// A random number generator with a seed.
struct TestRng(Draw);

impl TestRng {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.next().number(bound as u64, 7)).expect("small")
    }
}

/// Sets the load that an engine reports.
fn report(engine: &Engine, running: usize, waiting: usize) {
    let [running, waiting] = [running, waiting].map(|count| u32::try_from(count).expect("small"));
    let load = EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() };
    engine.set_reading(LoadReading::new(load, [engine.own_requests(); 2]));
}

/// Applies a random event to a random engine.
fn random_event(pool: &Pool, reservations: &mut Vec<EngineReservation>, rng: &mut TestRng, prefix: &[u64]) {
    let engine = Arc::clone(&pool.members[rng.below(pool.members.len())].engine);
    match rng.below(24) {
        0 => engine.update_health(|health, _, _| health.order(OperatorOrder::Drain)),
        1 | 2 => engine.update_health(|health, _, _| health.order(OperatorOrder::None)),
        3 => engine.failed(Leg::Decode, FailureKind::Unreachable),
        4 | 5 => engine.update_health(|health, now, terms| {
            health.tick(now.after(Duration::from_millis(3_600_000)), || 1.0, terms);
            health.record_probe(crate::engines::probe::ProbeResult::Answered(true), now, terms);
        }),
        6 => engine.completed(Leg::Decode),
        12..14 => report(&engine, rng.below(6), rng.below(4)),
        7..12 if !reservations.is_empty() => drop(reservations.swap_remove(rng.below(reservations.len()))),
        _ => {
            let tokens = rng.below(900) as u64;
            let features = RoutingFeatures { prefix, tokens, ..RoutingFeatures::default() };
            reservations.extend(pool.reserve(&features, &[], CapacityRule::Needed, Detail::All).0);
        }
    }
}

#[test]
fn a_choice_by_index_equals_a_walk_over_all_members() {
    for (number, policy) in POLICIES.into_iter().enumerate() {
        // Turns among equals ignore weights, so the turns differ if only some weights are equal.
        let weights = number > 0;
        for (engines, prefer, reported) in [(1, "{}", false), (40, "{}", false), (23, "{zone: a}", true)] {
            let fleet = Fleet::new(Arc::new(Metrics::new()));
            let pool = pool(&fleet, policy, engines, weights, prefer);
            let (mut rng, mut reservations) = (TestRng(Draw::seeded(number as u64 + 1)), Vec::new());
            let mut chosen = 0;
            pool.members.iter().filter(|_| reported).for_each(|member| report(&member.engine, 4, 2));
            for step in 0..400_u64 {
                let prefix: Vec<u64> = (0..6).map(|n| (step % 9) << 8 | n).collect();
                random_event(&pool, &mut reservations, &mut rng, &prefix);
                let tried: Vec<_> =
                    (0..rng.below(3)).map(|_| Arc::clone(&pool.members[rng.below(engines)].engine)).collect();
                let partner = (rng.below(2) == 0).then(|| Arc::clone(&pool.members[rng.below(engines)]));
                let session = Some(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let mut features = RoutingFeatures { session, prefix: &prefix, ..RoutingFeatures::default() };
                partner.iter().for_each(|partner| partner.require_partner(&mut features));
                let compatibility = features.compatibility;
                let now = LazyNow::new(Instant::now);
                let context = ChoiceContext {
                    tried: &tried,
                    leg: Leg::Decode,
                    panic: false,
                    capacity: CapacityRule::Needed,
                    compatibility,
                    now: &now,
                };
                let draw = rng.0.next();
                let (by_index, from_index) = pool.decide(&features, &context, draw, Detail::All);
                let (by_scan, from_scan) = pool.scan(&features, &context, draw);
                assert_eq!(by_index, by_scan, "{policy}, {engines} engines, step {step}");
                let (from_index, from_scan) = (from_index.expect("wanted"), from_scan.expect("always"));
                if let Ok((choice, _)) = by_scan {
                    chosen += 1;
                    assert!(pool.members[choice.index].is_compatible(compatibility), "{policy}, step {step}");
                    assert_eq!(from_index.candidates, from_scan.candidates, "{policy}, step {step}");
                    assert!(from_index.named.iter().any(|named| named.index == choice.index));
                    assert!(
                        from_index.named.iter().all(|named| from_scan.named.contains(named)),
                        "{policy}, step {step}"
                    );
                    assert!(from_index.named.len() <= NAMED_MAX && from_index.others.len() <= NAMED_MAX);
                    let others = from_index.others.iter().map(|(at, _)| at);
                    assert!(
                        others.into_iter().all(|at| from_scan.named.iter().all(|named| named.index != *at))
                    );
                }
                for (at, fit) in from_index.others.iter().chain(&from_scan.others) {
                    assert_eq!(pool.members[*at].eligibility(&context), *fit, "{policy}, step {step}");
                }
                let out = |m: &&Arc<PoolMember>| {
                    m.engine.health().standing(Leg::Decode) <= crate::engines::health::Standing::Trial
                };
                assert_eq!(pool.in_use(), pool.members.iter().filter(out).count());
                let least = pool.members.iter().map(|member| member.load()).min();
                assert_eq!(Some(pool.least_in_flight(None)), least);
            }
            assert!(chosen > 15, "{policy}, {engines} engines: {chosen} choices");
        }
    }
}

#[test]
fn the_least_loaded_engine_does_not_get_all_requests_between_reports() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let engines: String = (0..4).map(|n| format!("  - url: http://e{n}:1\n")).collect();
    let pool = of_yaml(&fleet, &format!("policy: least_load\nengines:\n{engines}"));
    for (member, running) in pool.members.iter().zip([10, 7, 10, 9]) {
        report(&member.engine, running, 0);
    }
    let reserve = || {
        pool.reserve(&RoutingFeatures::default(), &[], CapacityRule::Needed, Detail::None).0.expect("a place")
    };
    let held: Vec<_> = (0..8).map(|_| reserve()).collect();
    let given =
        |at: usize| held.iter().filter(|place| Arc::ptr_eq(place.engine(), &pool.members[at].engine)).count();
    assert_eq!([0, 1, 2, 3].map(given), [1, 4, 1, 2], "eleven for each");
}

#[test]
fn requests_behind_waiting_ones_count_as_waiting_until_a_request_ends() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let pool = of_yaml(&fleet, "capacity: {max_waiting: 3}\nengines:\n  - url: http://e0:1\n");
    let engine = &pool.members[0].engine;
    let reserve = || pool.reserve(&RoutingFeatures::default(), &[], CapacityRule::Needed, Detail::None).0;
    let all = || std::iter::from_fn(|| reserve().ok()).take(100).collect::<Vec<_>>();
    let mut held = all();
    assert_eq!(held.len(), 100, "no request was reported waiting");
    report(engine, 99, 1);
    held.extend(all());
    assert_eq!((held.len(), reserve().err()), (102, Some(Unavailable::Full)), "three wait");
    held.pop();
    held.extend(all());
    assert_eq!(held.len(), 102);
    report(engine, 99, 3);
    assert_eq!(reserve().err(), Some(Unavailable::Full));
    report(engine, 102, 0);
    assert_eq!(all().len(), 100, "the previous report is discarded");
}

#[test]
fn the_load_index_matches_engines_after_concurrent_changes() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let pool = pool(&fleet, "least_load", 5, true, "{}");
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                let mut held = Vec::new();
                for _ in 0..3_000 {
                    let features = RoutingFeatures { tokens: 5, ..RoutingFeatures::default() };
                    match pool.reserve(&features, &[], CapacityRule::Needed, Detail::None).0 {
                        Ok(reserved) if held.len() < 5 => held.push(reserved),
                        Ok(_) => held.clear(),
                        Err(scarce) => {
                            assert_eq!(scarce, Unavailable::Full);
                            held.clear();
                        }
                    }
                }
            });
        }
    });
    assert_eq!((pool.least_in_flight(None), pool.in_use()), (0, 5));
    let held: Vec<_> = std::iter::from_fn(|| {
        pool.reserve(&RoutingFeatures::default(), &[], CapacityRule::Needed, Detail::None).0.ok()
    })
    .collect();
    assert_eq!(held.len(), 15, "every place of every engine can be had again");
}

#[test]
fn dropped_pools_receive_no_load_changes() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let first = pool(&fleet, "least_load", 3, false, "{}");
    let reserved = first
        .reserve(&RoutingFeatures::default(), &[], CapacityRule::Needed, Detail::None)
        .0
        .expect("a place");
    let second = pool(&fleet, "least_load", 3, false, "{}");
    assert_eq!(second.least_in_flight(None), 0);
    let others = second
        .reserve(&RoutingFeatures::default(), &[], CapacityRule::Needed, Detail::None)
        .0
        .expect("a place");
    assert!(!Arc::ptr_eq(others.engine(), reserved.engine()), "the second counts the first's request");
    drop(first);
    let engine = Arc::clone(reserved.engine());
    drop((reserved, others));
    assert_eq!(engine.load(None), 0);
    let third = pool(&fleet, "least_load", 3, false, "{}");
    assert_eq!((second.least_in_flight(None), third.least_in_flight(None)), (0, 0));
}

#[test]
fn engines_without_a_partner_are_those_of_a_revision_that_the_other_pool_lacks() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let pool = |engines: &[(&str, &str)]| {
        let engine =
            |(name, labels): &(&str, &str)| format!("  - {{url: 'http://{name}:1', labels: {labels}}}\n");
        let engines: String = engines.iter().map(engine).collect();
        of_yaml(&fleet, &format!("policy: random\nengines:\n{engines}"))
    };
    let (old, new, none) = ("{revision: old}", "{revision: new}", "{}");
    let decode = pool(&[("d1", old), ("d2", new), ("d3", none)]);
    let without = |prefill: &Pool| -> Vec<String> {
        decode.without_partner(prefill).iter().map(|engine| engine.authority().to_owned()).collect()
    };
    assert_eq!(without(&pool(&[("p1", old), ("p2", new), ("p3", none)])), Vec::<String>::new());
    let prefill = pool(&[("p1", old), ("p2", new)]);
    assert_eq!(without(&prefill), ["d3:1"]);
    prefill.members[1].engine.update_health(|health, _, _| health.order(OperatorOrder::Drain));
    assert_eq!(without(&prefill), ["d2:1", "d3:1"], "a draining engine prefills for no new request");
    assert_eq!(without(&pool(&[("p9", "{revision: other}")])), Vec::<String>::new(), "no choice is better");
    assert_eq!(without(&pool(&[])), Vec::<String>::new());
    let required = decode.members[0].compatibility();
    let features = RoutingFeatures { compatibility: required, ..RoutingFeatures::default() };
    let trial = prefill.dry_run(&features, &[]);
    assert_eq!(trial.chosen.map(|member| member.engine.authority().to_owned()).as_deref(), Some("p1:1"));
    assert!(trial.decision.json().to_string().contains("incompatible"), "{}", trial.decision.json());
}
