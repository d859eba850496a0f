//! What a decision costs among a thousand engines: a measurement, printed, not a test of a time.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use super::tests::with_loads;
use super::{Draw, Wanted, of_config};
use crate::config::PolicyConfig;
use crate::memory::Memory;

const DECISIONS: u32 = 20_000;

#[test]
#[ignore = "a measurement; run it in release"]
fn a_decision_among_a_thousand() {
    let loads: Vec<u32> = (0..1_000).map(|n| 20 + n * 37 % 11).collect();
    for engines in [10, 100, 1_000] {
        let candidates = with_loads(&loads[..engines]);
        let memory = Arc::new(Memory::new(1 << 14, 1 << 22));
        // A hot prefix that every engine holds, and one of its own each.
        let hot: Vec<u64> = (0..64).collect();
        for engine in 0..u32::try_from(engines).expect("few") {
            memory.sent(engine, &hot);
            memory.sent(engine, &[u64::from(engine) << 32; 1]);
        }
        for name in ["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix_aware"]
        {
            let config: PolicyConfig = serde_saphyr::from_str(name).expect("a name");
            let policy = of_config(&config, &memory);
            let mut draw = Draw::seeded(1);
            let wanted = Wanted { session: Some(7), prefix: &hot, ..Wanted::default() };
            let begun = Instant::now();
            for _ in 0..DECISIONS {
                black_box(policy.choose(&wanted, &candidates, draw.next()));
            }
            println!("{engines:>5} engines  {name:<16} {:>10.2?} a decision", begun.elapsed() / DECISIONS);
        }
    }
}
