//! What a pool's boards say is what a walk over its members says, whatever the engines have been through.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::config::{PoolConfig, ReleaseMode};
use crate::engines::fleet::Fleet;
use crate::engines::health::{EngineLoad, Order, Reading, Sign, state};
use crate::engines::http::Terms;

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

fn terms() -> Terms {
    Terms {
        connect_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
        lost_after: Duration::ZERO,
        secret: None,
        api_key: None,
        tls: None,
        health: state::tests::TERMS,
        release: ReleaseMode::default(),
    }
}

/// A pool of so many engines in three zones, of which `a` is preferred; `weights`: they differ.
fn pool(fleet: &Fleet, policy: &str, engines: usize, weights: bool, prefer: &str) -> Pool {
    let engine = |n: usize| {
        let (weight, zone) = (if weights { 1 + n % 3 } else { 2 }, ["a", "b", "c"][n % 3]);
        format!(
            "  - {{url: 'http://e{n}:1', weight: {weight}, max_in_flight: 3, labels: {{zone: {zone}}}}}\n"
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
        Arc::new(Member::new(engine, known, &config, &["zone".to_owned()]))
    };
    let members = config.engines.iter().map(member).collect();
    let health = HealthConfig::default();
    Pool::new(members, &config.policy, &fleet.memory, true).guarded(Leg::Decode, &health)
}

/// Chance by seed.
struct Dice(Draw);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.next().number(bound as u64, 7)).expect("small")
    }
}

/// An engine tells its load.
fn says(engine: &Engine, running: usize, waiting: usize) {
    let [running, waiting] = [running, waiting].map(|count| u32::try_from(count).expect("small"));
    let load = EngineLoad { running, waiting, kv_usage: 0.0, at: Instant::now() };
    engine.set_reading(Reading::new(load, [engine.ours(); 2]));
}

/// Something happens to some engine.
fn happens(pool: &Pool, places: &mut Vec<Reserved>, dice: &mut Dice, prefix: &[u64]) {
    let engine = Arc::clone(&pool.members[dice.below(pool.members.len())].engine);
    match dice.below(24) {
        0 => engine.judge(|health, _, _| health.order(Order::Drain)),
        1 | 2 => engine.judge(|health, _, _| health.order(Order::None)),
        3 => engine.failed(Leg::Decode, Sign::Unreachable),
        4 | 5 => engine.judge(|health, now, terms| {
            health.tick(now.after(Duration::from_millis(3_600_000)), || 1.0, terms);
            health.told(crate::engines::liveness::Pulse::Answered(true), now, terms);
        }),
        6 => engine.served(Leg::Decode),
        12..14 => says(&engine, dice.below(6), dice.below(4)),
        7..12 if !places.is_empty() => drop(places.swap_remove(dice.below(places.len()))),
        _ => {
            let tokens = dice.below(900) as u64;
            let wanted = Wanted { prefix, tokens, ..Wanted::default() };
            places.extend(pool.reserve(&wanted, &[], Room::Needed, Tell::Everything).0);
        }
    }
}

#[test]
fn a_choice_on_the_boards_is_the_choice_of_a_walk_over_all_members() {
    for (number, policy) in POLICIES.into_iter().enumerate() {
        // Taking turns among equals needs no look at their weights, so turns differ where only some weigh the same.
        let weights = number > 0;
        for (engines, prefer, told) in [(1, "{}", false), (40, "{}", false), (23, "{zone: a}", true)] {
            let fleet = Fleet::new(Arc::new(Metrics::new()));
            let pool = pool(&fleet, policy, engines, weights, prefer);
            let (mut dice, mut places) = (Dice(Draw::seeded(number as u64 + 1)), Vec::new());
            let mut chosen = 0;
            pool.members.iter().filter(|_| told).for_each(|member| says(&member.engine, 4, 2));
            for step in 0..400_u64 {
                let prefix: Vec<u64> = (0..6).map(|n| (step % 9) << 8 | n).collect();
                happens(&pool, &mut places, &mut dice, &prefix);
                let tried: Vec<_> = (0..dice.below(3))
                    .map(|_| Arc::clone(&pool.members[dice.below(engines)].engine))
                    .collect();
                let pair = (dice.below(2) == 0).then(|| pool.members[dice.below(engines)].pair()).flatten();
                let session = Some(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let wanted = Wanted { session, prefix: &prefix, pair, ..Wanted::default() };
                let now = Now::new(Instant::now);
                let look =
                    Look { tried: &tried, leg: Leg::Decode, panic: false, room: Room::Needed, now: &now };
                let draw = dice.0.next();
                let (by_boards, told) = pool.decide(&wanted, &look, draw, Tell::Everything);
                let (by_walk, walked) = pool.walk(&wanted, &look, draw);
                assert_eq!(by_boards, by_walk, "{policy}, {engines} engines, step {step}");
                let (told, walked) = (told.expect("wanted"), walked.expect("always"));
                if let Ok((choice, _)) = by_walk {
                    chosen += 1;
                    assert_eq!(told.candidates, walked.candidates, "{policy}, step {step}");
                    assert!(told.named.iter().any(|named| named.index == choice.index));
                    assert!(
                        told.named.iter().all(|named| walked.named.contains(named)),
                        "{policy}, step {step}"
                    );
                    assert!(told.named.len() <= NAMED && told.others.len() <= NAMED);
                    let others = told.others.iter().map(|(at, _)| at);
                    assert!(others.into_iter().all(|at| walked.named.iter().all(|named| named.index != *at)));
                }
                for (at, fit) in told.others.iter().chain(&walked.others) {
                    assert_eq!(pool.members[*at].fit(&look), *fit, "{policy}, step {step}");
                }
                let out = |m: &&Arc<Member>| {
                    m.engine.health().standing(Leg::Decode) <= crate::engines::health::Standing::Trial
                };
                assert_eq!(pool.in_use(), pool.members.iter().filter(out).count());
                let least = pool.members.iter().map(|member| member.load()).min();
                assert_eq!(Some(pool.least_in_flight()), least);
            }
            assert!(chosen > 15, "{policy}, {engines} engines: {chosen} choices");
        }
    }
}

#[test]
fn who_said_least_is_not_given_everything_until_it_speaks_again() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let engines: String = (0..4).map(|n| format!("  - url: http://e{n}:1\n")).collect();
    let pool = of_yaml(&fleet, &format!("policy: least_load\nengines:\n{engines}"));
    for (member, running) in pool.members.iter().zip([10, 7, 10, 9]) {
        says(&member.engine, running, 0);
    }
    let reserve = || pool.reserve(&Wanted::default(), &[], Room::Needed, Tell::Nothing).0.expect("a place");
    let held: Vec<_> = (0..8).map(|_| reserve()).collect();
    let given =
        |at: usize| held.iter().filter(|place| Arc::ptr_eq(place.engine(), &pool.members[at].engine)).count();
    assert_eq!([0, 1, 2, 3].map(given), [1, 4, 1, 2], "eleven for each");
}

#[test]
fn what_is_sent_where_somebody_waits_waits_too_and_who_ends_makes_room_before_the_next_reading() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let pool = of_yaml(&fleet, "capacity: {max_waiting: 3}\nengines:\n  - url: http://e0:1\n");
    let engine = &pool.members[0].engine;
    let reserve = || pool.reserve(&Wanted::default(), &[], Room::Needed, Tell::Nothing).0;
    let all = || std::iter::from_fn(|| reserve().ok()).take(100).collect::<Vec<_>>();
    let mut held = all();
    assert_eq!(held.len(), 100, "nobody was seen waiting");
    says(engine, 99, 1);
    held.extend(all());
    assert_eq!((held.len(), reserve().err()), (102, Some(Scarce::Full)), "three wait");
    held.pop();
    held.extend(all());
    assert_eq!(held.len(), 102);
    says(engine, 99, 3);
    assert_eq!(reserve().err(), Some(Scarce::Full));
    says(engine, 102, 0);
    assert_eq!(all().len(), 100, "what it said before is forgotten");
}

#[test]
fn whoever_changes_an_engine_at_once_the_board_says_what_they_came_to() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let pool = pool(&fleet, "least_load", 5, true, "{}");
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                let mut held = Vec::new();
                for _ in 0..3_000 {
                    let wanted = Wanted { tokens: 5, ..Wanted::default() };
                    match pool.reserve(&wanted, &[], Room::Needed, Tell::Nothing).0 {
                        Ok(reserved) if held.len() < 5 => held.push(reserved),
                        Ok(_) => held.clear(),
                        Err(scarce) => {
                            assert_eq!(scarce, Scarce::Full);
                            held.clear();
                        }
                    }
                }
            });
        }
    });
    assert_eq!((pool.least_in_flight(), pool.in_use()), (0, 5));
    let held: Vec<_> =
        std::iter::from_fn(|| pool.reserve(&Wanted::default(), &[], Room::Needed, Tell::Nothing).0.ok())
            .collect();
    assert_eq!(held.len(), 15, "every place of every engine can be had again");
}

#[test]
fn pools_that_are_gone_are_not_told_any_more() {
    let fleet = Fleet::new(Arc::new(Metrics::new()));
    let first = pool(&fleet, "least_load", 3, false, "{}");
    let reserved = first.reserve(&Wanted::default(), &[], Room::Needed, Tell::Nothing).0.expect("a place");
    let second = pool(&fleet, "least_load", 3, false, "{}");
    assert_eq!(second.least_in_flight(), 0);
    let others = second.reserve(&Wanted::default(), &[], Room::Needed, Tell::Nothing).0.expect("a place");
    assert!(!Arc::ptr_eq(others.engine(), reserved.engine()), "the second knows what the first has there");
    drop(first);
    let engine = Arc::clone(reserved.engine());
    drop((reserved, others));
    assert_eq!(engine.load(None), 0);
    let third = pool(&fleet, "least_load", 3, false, "{}");
    assert_eq!((second.least_in_flight(), third.least_in_flight()), (0, 0));
}
