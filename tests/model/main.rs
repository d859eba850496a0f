//! Model checking: the product's machines, in every reachable state of a small system.
//!
//! The system has one router, up to two prefill engines, two decode engines and two requests. Its network loses,
//! repeats and reorders, and its actors crash and restart. The machines are those of `baton-connector` ([`Lease`]
//! inside [`Ledger`], [`Fetch`], [`Gather`], [`Exchange`], [`Slots`]). The model replaces the I/O of router and engines
//! by a few lines each.
//!
//! | file | what it is |
//! |---|---|
//! | `explore.rs` | every reachable state once, breadth-first; no cycles; the shortest trace of a violation |
//! | `state_table.rs` | states of one actor, reached by the real machine and never copied |
//! | `router.rs`, `producer.rs`, `consumer.rs` | the actors, and the invariants that one actor can check |
//! | `messages.rs`, `system.rs`, `steps.rs`, `acting.rs` | the system: possible steps, their effects, how a run must end |
//! | `offload.rs` | the offload slot, its workers and the end of its request |
//! | `pair.rs` | protocols that send both legs at once: SGLang, vLLM push |
//! | `bounds.rs`, `explorations.rs` | the explorations and their bounds |
//! | `mutations.rs` | planted bugs, each of which must be found |
//!
//! Invariants of every state: no block is freed twice or while it is held (1, 2, 7). Nothing writes into a landing
//! block that was freed, and no stale byte reaches a forward pass (3). Each request has one outcome, and each
//! settlement is made once (6). A lease closes only for a valid reason. At the end of every run all blocks are free
//! (5). Without a fault they are free without waiting for the clock. No run contains a cycle, so every run ends.
//!
//! The model abstracts from bytes (a block carries the name of its content), from tokens and forward passes (one step),
//! and from the pool's order and prefix cache. It abstracts from durations: a lease can expire at any moment, as one
//! fault. Without such a fault, time passes only when no other step is possible. TCP does not repeat a call, so the
//! network does not either.
//!
//! [`Lease`]: baton_connector::lease::Lease
//! [`Ledger`]: baton_connector::ledger::Ledger
//! [`Fetch`]: baton_connector::fetch::Fetch
//! [`Gather`]: baton_connector::gather::Gather
//! [`Exchange`]: baton_connector::exchange::Exchange
//! [`Slots`]: baton_connector::offload::Slots

#![allow(clippy::print_stdout, reason = "--nocapture shows the explored states")]

mod acting;
mod bounds;
mod consumer;
mod explorations;
mod explore;
mod messages;
mod mutations;
mod names;
mod offload;
mod pair;
mod producer;
mod router;
mod state_table;
mod steps;
mod system;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use bounds::Bounds;
use explorations::{FULL, PAIRS_FULL, PAIRS_SMALL, PAIRS_WALKED, SMALL};
use explore::{Report, Violation, explore, explore_and, walk};
use mutations::{Mutation, PLANTED};
use offload::Offload;
use pair::PairModel;
use system::SystemModel;

/// Selects the bounds, whatever the profile.
const BOUNDS_VAR: &str = "BATON_MODEL_BOUNDS";

fn full_bounds() -> bool {
    match std::env::var(BOUNDS_VAR).as_deref() {
        Ok("full") => true,
        Ok("small") => false,
        _ => !cfg!(debug_assertions),
    }
}

/// Concurrent explorations. Each takes a thread and up to a few gigabytes.
const AT_ONCE: usize = 2;

fn violation_text(found: &Violation) -> String {
    let mut text = format!("{}\n", found.what);
    for (at, step) in found.trace.iter().enumerate() {
        writeln!(text, "    {:2}. {step}", at + 1).expect("a string takes everything");
    }
    text
}

/// One line with the result, and a trace if there is one.
fn line(name: &str, bounds: &Bounds, report: &Report, world: Option<&SystemModel>) -> String {
    let Report { states, steps, depth, ends, took, found } = report;
    let seconds = took.as_secs_f64();
    let mut text = format!(
        "{name}\n    bounds: {bounds}\n    {states} states, {steps} steps, depth {depth}, {ends} ends"
    );
    if let Some(world) = world {
        let (routers, producers, consumers) = world.actors();
        write!(text, "; states of a router {routers}, of a P {producers}, of a D {consumers}").expect("text");
        let faults: Vec<_> = world.faults.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        if !faults.is_empty() {
            write!(text, "; faults: {}", faults.join(", ")).expect("text");
        }
    }
    write!(text, "; {seconds:.1} s").expect("text");
    if let Some(found) = found {
        write!(text, "\n  VIOLATED: {}", violation_text(found)).expect("text");
    }
    text
}

/// Runs all explorations, some at a time, and prints the results. Returns those that failed.
fn explore_all(explorations: &[(&str, Bounds)]) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((name, bounds)) = explorations.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut world = SystemModel::new(*bounds);
            let report = explore(&mut world);
            let text = line(name, bounds, &report, Some(&world));
            println!("{text}");
            done.push((report, text));
        }
        done
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("an exploration ends")).collect()
    });
    let states: usize = done.iter().map(|(report, _)| report.states).sum();
    let steps: u64 = done.iter().map(|(report, _)| report.steps).sum();
    println!(
        "in all: {states} states, {steps} steps, {} explorations, each complete within its bounds",
        done.len()
    );
    done.into_iter().filter(|(report, _)| report.found.is_some()).map(|(_, text)| text).collect()
}

#[test]
fn invariants_hold_in_every_state_and_every_run_frees_every_block() {
    let (size, explorations) = if full_bounds() { ("full", FULL) } else { ("small", SMALL) };
    println!(
        "{size} bounds (small in the dev profile and full in release, unless {BOUNDS_VAR} says small or full)"
    );
    let failed = explore_all(explorations);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn an_offload_slot_settles_once_for_every_end_of_its_request() {
    let bounds = Bounds { faults: u8::from(full_bounds()), ..Bounds::PLAIN };
    let mut offload = Offload::new(bounds);
    let report = explore(&mut offload);
    let Report { states, steps, depth, ends, took, .. } = &report;
    println!(
        "offload: two stores, a load, a yield, three ends of the request, {} repeated reports\n    {states} states, \
         {steps} steps, depth {depth}, {ends} ends; {:.1} s",
        bounds.faults,
        took.as_secs_f64()
    );
    assert!(report.found.is_none(), "{}", violation_text(&report.found.expect("just seen")));
}

#[test]
fn pairs_end_on_both_engines_and_write_only_into_their_own_pages() {
    let explorations = if full_bounds() { PAIRS_FULL } else { PAIRS_SMALL };
    for (name, bounds) in explorations {
        let report = explore(&mut PairModel::new(*bounds));
        let text = line(name, bounds, &report, None);
        println!("{text}");
        assert!(report.found.is_none(), "{text}");
    }
}

#[test]
fn pairs_end_well_in_random_runs_with_many_faults() {
    let seeds = if full_bounds() { 2_000_000 } else { 50_000 };
    for bounds in [PAIRS_WALKED, Bounds { pushes: true, ..PAIRS_WALKED }] {
        let mut model = PairModel::new(bounds);
        let mut steps = 0;
        for seed in 0..seeds {
            let walked = walk(&mut model, seed);
            steps += walked.unwrap_or_else(|found| panic!("seed {seed}: {}", violation_text(&found)));
        }
        println!("pairs: {seeds} random runs, {steps} steps\n    bounds: {bounds}");
    }
    let mutation = Some(Mutation::PagesGivenAwayAtOnce);
    let mut sick = PairModel::new(Bounds { mutation, ..PAIRS_WALKED });
    let found = (0..seeds).find_map(|seed| walk(&mut sick, seed).err()).expect("random runs find it");
    assert!(found.what.contains("lands in pages"), "{}", violation_text(&found));
}

/// A state that represents several counts as many. The sum is the number of states without the reduction.
#[test]
fn places_can_be_changed_without_a_difference() {
    let all = Bounds { requests: 2, prefill: 2, decode: 2, clients_cancel: true, ..Bounds::PLAIN };
    let fewer = Bounds { requests: 2, faults: 1, ..Bounds::PLAIN };
    for bounds in [all, fewer] {
        let mut reduced = SystemModel::new(bounds);
        let mut stands_for = 0;
        let one_for_all = explore_and(&mut reduced, |world, state| stands_for += world.places(state));
        let each = explore(&mut SystemModel::without_renaming(bounds));
        assert!(one_for_all.found.is_none() && each.found.is_none());
        println!("{} states stand for {} ({bounds})", one_for_all.states, each.states);
        assert_eq!(stands_for, each.states);
    }
}

#[test]
fn every_planted_bug_is_found() {
    for planted in PLANTED {
        let clean = planted.bounds;
        let bounds = Bounds { mutation: Some(planted.mutation), ..clean };
        let (sound, sick) = match planted.mutation {
            Mutation::EndForgetsTheSlot | Mutation::EndFreesInFlight => {
                (explore(&mut Offload::new(clean)), explore(&mut Offload::new(bounds)))
            }
            bug if bug.is_of_pairs() => {
                (explore(&mut PairModel::new(clean)), explore(&mut PairModel::new(bounds)))
            }
            _ => (explore(&mut SystemModel::new(clean)), explore(&mut SystemModel::new(bounds))),
        };
        assert!(
            sound.found.is_none(),
            "{} without it: {}",
            planted.name,
            violation_text(&sound.found.expect("just seen"))
        );
        let found = sick.found.unwrap_or_else(|| panic!("not found: {}", planted.name));
        println!("found after {} states: {}\n  {}", sick.states, planted.name, violation_text(&found));
        assert!(
            found.what.contains(planted.broken),
            "{}: {} instead of {}",
            planted.name,
            found.what,
            planted.broken
        );
    }
}
