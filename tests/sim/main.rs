//! Simulation by seed: the real machines, engine core, scheduler and block pool in virtual time, with many faults. The
//! invariants of ARCHITECTURE.md are checked after every event.
//!
//! ```text
//! cargo test --release --test sim -- --seeds N [--from S]   runs seeds S to S+N-1 (S is 0) and sums up
//! cargo test --release --test sim -- --seed S               runs one seed and prints its events
//! cargo test --release --test sim                           10,000 seeds, and the planted faults; both for pairs too
//! cargo test --release --test sim -- --pairs …              the same options for protocols that send both legs at once
//! ```
//!
//! The last line is `seeds N violations V`. A violation prints one line that replays it. The same seed gives the same
//! trace hash. The simulation runs every hundredth seed twice to check this.
//!
//! | file | what |
//! |---|---|
//! | `sim.rs` | the queue of events, and the loop |
//! | `setup.rs`, `faults.rs` | the parameters of a seed; the faults and their times |
//! | `net.rs`, `messages.rs` | connections, and the messages on them |
//! | `engine.rs`, `http.rs`, `producer.rs`, `consumer.rs` | an engine process around the real core and ledger |
//! | `tiers.rs` | its offload workers: host slots, files, and a disk that fails |
//! | `router.rs`, `clients.rs` | a router process around the real exchange; clients that check every token |
//! | `device.rs` | a KV cache that can be checked, with or without an attention window |
//! | `checks.rs` | the invariants |
//! | `pairs.rs` | protocols that send both legs at once: SGLang, vLLM push |
// A test program: nothing here is public, and a panic is a finding.
#![allow(clippy::unwrap_used, unreachable_pub, missing_docs, reason = "a test crate of several files")]

mod checks;
mod clients;
mod consumer;
mod counts;
mod device;
mod engine;
mod faults;
mod http;
mod messages;
mod net;
mod pairs;
mod producer;
mod rng;
mod router;
mod setup;
mod sim;
mod tiers;

use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use counts::Counts;
use pairs::{PairMutation, PairSim};
use setup::{Mutation, Setup};
use sim::{Sim, Verdict};

/// Seeds of a run without arguments.
const SEEDS: u64 = 10_000;
/// Violations after which the simulation stops.
const VIOLATIONS_MAX: usize = 20;
/// Each planted fault must be found within this many seeds.
const MUTATION_SEEDS: u64 = 50_000;

pub fn print_line(line: &str) {
    // The reader of the output may have closed it.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// What is simulated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Baton's engines: the prefill leg first, then a handoff.
    Handoffs,
    /// Both legs at once, and engines that exchange the blocks by themselves.
    Pairs,
}

impl Mode {
    /// The option that selects the mode.
    fn option(self) -> &'static str {
        match self {
            Self::Handoffs => "",
            Self::Pairs => "--pairs ",
        }
    }

    fn run(self, seed: u64, narrate: bool) -> Verdict {
        match self {
            Self::Handoffs => run(seed, Mutation::None, narrate),
            Self::Pairs => run_pairs(seed, PairMutation::None, narrate),
        }
    }
}

fn run(seed: u64, mutation: Mutation, narrate: bool) -> Verdict {
    caught(|| Sim::new(Setup::of(seed, mutation), narrate).run())
}

fn run_pairs(seed: u64, mutation: PairMutation, narrate: bool) -> Verdict {
    caught(|| PairSim::new(seed, mutation, narrate).run())
}

/// A panic is a violation.
fn caught(simulate: impl FnOnce() -> Verdict) -> Verdict {
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(simulate));
    outcome.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let violation = Some(format!("panic: {}", text.unwrap_or_default()));
        Verdict { violation, trace: 0, counts: Counts::default(), virtual_micros: 0, events: 0 }
    })
}

#[derive(Default)]
struct RunTotals {
    counts: Counts,
    micros: u64,
    events: u64,
    trace: u64,
    violations: Vec<(u64, String)>,
}

fn many(mode: Mode, from: u64, seeds: u64) -> ExitCode {
    let start = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (next, sum) = (AtomicU64::new(from), Mutex::new(RunTotals::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + seeds || sum.lock().unwrap().violations.len() >= VIOLATIONS_MAX {
                        return;
                    }
                    let mut verdict = mode.run(seed, false);
                    if seed % 100 == 0 && mode.run(seed, false).trace != verdict.trace {
                        verdict.violation.get_or_insert("the same seed went another way".into());
                    }
                    let mut sum = sum.lock().unwrap();
                    sum.counts.add(&verdict.counts);
                    sum.micros += verdict.virtual_micros;
                    sum.events += verdict.events;
                    // The sum does not depend on the order of the seeds.
                    sum.trace = sum.trace.wrapping_add(rng::mix(verdict.trace));
                    if let Some(violation) = verdict.violation {
                        print_line(&format!("seed {seed}: {violation}"));
                        let option = mode.option();
                        print_line(&format!(
                            "replay: cargo test --release --test sim -- {option}--seed {seed}"
                        ));
                        sum.violations.push((seed, violation));
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap();
    let seconds = start.elapsed().as_secs_f64();
    for (what, count) in sum.counts.lines().into_iter().filter(|(_, count)| *count > 0) {
        print_line(&format!("{count:>12}  {what}"));
    }
    print_line(&format!(
        "{:.0} seeds/s, {:.0} simulated hours, {} events, {threads} threads, trace {:016x}",
        seeds as f64 / seconds,
        sum.micros as f64 / 3.6e9,
        sum.events,
        sum.trace
    ));
    print_line(&format!("seeds {seeds} violations {}", sum.violations.len()));
    if sum.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether the invariants find every planted fault.
fn mutations() -> bool {
    let handoffs = Mutation::ALL.map(|planted| {
        is_found(&format!("{planted:?}"), planted.shows_as(), |seed| run(seed, planted, false))
    });
    let pairs = PairMutation::ALL.map(|planted| {
        is_found(&format!("{planted:?}"), planted.shows_as(), |seed| run_pairs(seed, planted, false))
    });
    handoffs.into_iter().chain(pairs).all(|is_found| is_found)
}

/// Whether some seed shows a planted fault by one of these violations.
fn is_found(name: &str, shows_as: &[&str], run: impl Fn(u64) -> Verdict) -> bool {
    let found = (0..MUTATION_SEEDS).find_map(|seed| {
        let violation = run(seed).violation?;
        shows_as.iter().any(|word| violation.contains(word)).then_some((seed, violation))
    });
    match &found {
        Some((seed, violation)) => print_line(&format!("planted {name}: found by seed {seed}: {violation}")),
        None => print_line(&format!("planted {name}: NOT FOUND within {MUTATION_SEEDS} seeds")),
    }
    found.is_some()
}

fn main() -> ExitCode {
    // A panic is a violation with a line of its own.
    std::panic::set_hook(Box::new(|_| {}));
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<u64>().ok()
    };
    if arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let pairs = arguments.iter().any(|argument| argument == "--pairs");
    let mode = if pairs { Mode::Pairs } else { Mode::Handoffs };
    if let Some(seed) = value("--seed") {
        let verdict = mode.run(seed, true);
        print_line(&format!("seed {seed}: {}", verdict.violation.as_deref().unwrap_or("no violation")));
        print_line(&format!("trace {:016x}, {} events", verdict.trace, verdict.events));
        return if verdict.violation.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if let Some(seeds) = value("--seeds") {
        return many(mode, value("--from").unwrap_or(0), seeds);
    }
    let found = mutations();
    let codes = [Mode::Handoffs, Mode::Pairs].map(|mode| many(mode, 0, SEEDS));
    let is_sound = found && codes.iter().all(|code| *code == ExitCode::SUCCESS);
    if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
