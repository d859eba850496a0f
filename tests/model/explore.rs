//! The explorer visits every reachable state once, in breadth-first order.
//!
//! States are stored whole and compared exactly, so a hash collision hides no state. Breadth-first order makes the
//! trace of a violation a shortest one.
//!
//! After the last state the explorer checks the graph for cycles. Without a cycle every run ends. The model checks each
//! state in which a run can end ([`Model::steps`]), so every run ends well. No fairness is assumed.

use std::fmt::Display;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::time::{Duration, Instant};

/// More states than this are a mistake in the bounds. The exploration then fails and is never truncated.
const STATES_MAX: usize = 60_000_000;

/// A model to explore.
pub(crate) trait Model {
    /// A plain value.
    type State: Copy + Eq + Hash;
    /// One possible step.
    type Step: Copy + Display;

    /// The initial state.
    fn start(&mut self) -> Self::State;

    /// All possible steps of a state. An error means that no run may reach this state, or end in it.
    fn steps(&mut self, state: Self::State, into: &mut Vec<Self::Step>) -> Result<(), String>;

    /// Takes one step. An error describes what the step broke.
    fn take(&mut self, state: Self::State, step: Self::Step) -> Result<Self::State, String>;

    /// The representative of all states that differ only in names.
    fn canonical(&mut self, state: Self::State) -> Self::State {
        state
    }
}

/// The result of an exploration.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// States, each counted once.
    pub states: usize,
    /// Steps taken, over all states.
    pub steps: u64,
    /// The length of the longest shortest path to a state.
    pub depth: u32,
    /// States in which a run ends.
    pub ends: usize,
    /// The duration.
    pub took: Duration,
    /// The first violation, with a shortest path to it.
    pub found: Option<Violation>,
}

/// A violation.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    /// The description of what was broken.
    pub what: String,
    /// The steps, in order.
    pub trace: Vec<String>,
}

/// Explores a model to its end, or to the first violation.
pub(crate) fn explore<M: Model>(model: &mut M) -> Report {
    explore_and(model, |_, _| {})
}

/// The same, with a call of `each` for every state.
pub(crate) fn explore_and<M: Model>(model: &mut M, mut each: impl FnMut(&mut M, M::State)) -> Report {
    let begun = Instant::now();
    let mut seen = VisitedStates::new();
    let start = model.start();
    let start = model.canonical(start);
    seen.insert(start, u32::MAX);
    let mut report = Report { states: 0, steps: 0, depth: 0, ends: 0, took: Duration::ZERO, found: None };
    let (mut edges, mut first_edge) = (Vec::<u32>::new(), vec![0_usize]);
    let (mut steps, mut at, mut level_end) = (Vec::new(), 0, 1);
    while at < seen.states.len() {
        if at == level_end {
            report.depth += 1;
            level_end = seen.states.len();
        }
        let state = seen.states[at];
        each(model, state);
        steps.clear();
        if let Err(what) = model.steps(state, &mut steps) {
            report.found = Some(Violation { what, trace: trace(model, &seen, at, None) });
            break;
        }
        let mut moved = false;
        for &step in &steps {
            report.steps += 1;
            match model.take(state, step) {
                Ok(next) => {
                    let next = model.canonical(next);
                    let index = seen.insert(next, at as u32);
                    if index as usize != at {
                        moved = true;
                        edges.push(index);
                    }
                }
                Err(what) => {
                    report.found = Some(Violation { what, trace: trace(model, &seen, at, Some(step)) });
                    break;
                }
            }
        }
        if report.found.is_some() {
            break;
        }
        report.ends += usize::from(!moved);
        first_edge.push(edges.len());
        at += 1;
    }
    report.states = seen.states.len();
    if report.found.is_none() {
        report.found = cycle(model, &seen, &edges, &first_edge);
    }
    report.took = begun.elapsed();
    report
}

/// One run to its end, for bounds that are too large to explore. The seed selects every step. A model lists its optional
/// steps last, and most seeds select them less often. Returns the number of steps.
pub(crate) fn walk<M: Model>(model: &mut M, seed: u64) -> Result<usize, Violation> {
    let mut dice = seed << 32;
    let mut state = model.start();
    let (mut steps, mut trace) = (Vec::new(), Vec::new());
    loop {
        steps.clear();
        if let Err(what) = model.steps(state, &mut steps) {
            return Err(Violation { what, trace });
        }
        if steps.is_empty() {
            return Ok(trace.len());
        }
        let draw = |_| {
            // SplitMix64.
            dice = dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (dice ^ (dice >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % steps.len() as u64) as usize
        };
        let step = steps[(0..=seed % 3).map(draw).min().expect("one at least")];
        trace.push(step.to_string());
        match model.take(state, step) {
            Ok(next) => state = next,
            Err(what) => return Err(Violation { what, trace }),
        }
    }
}

/// A state on a cycle, if there is one.
fn cycle<M: Model>(
    model: &mut M,
    seen: &VisitedStates<M::State>,
    edges: &[u32],
    first_edge: &[usize],
) -> Option<Violation> {
    let mut entered_by = vec![0_u32; seen.states.len()];
    edges.iter().for_each(|&to| entered_by[to as usize] += 1);
    let mut free = vec![0_u32];
    let mut done = 0;
    while let Some(at) = free.pop() {
        done += 1;
        for &to in &edges[first_edge[at as usize]..first_edge[at as usize + 1]] {
            entered_by[to as usize] -= 1;
            if entered_by[to as usize] == 0 {
                free.push(to);
            }
        }
    }
    if done == seen.states.len() {
        return None;
    }
    let at = entered_by.iter().position(|&ways| ways > 0).expect("something is left");
    let what = "a run can go round in a circle and never end".to_owned();
    Some(Violation { what, trace: trace(model, seen, at, None) })
}

/// A shortest path to the state at an index, and one more step. The states on the path are stored under canonical
/// names. The path is repeated with its initial names, so that names do not change within the trace.
fn trace<M: Model>(
    model: &mut M,
    seen: &VisitedStates<M::State>,
    at: usize,
    last: Option<M::Step>,
) -> Vec<String> {
    let mut way = vec![at];
    while let Some(&parent) = way.last().map(|&child| &seen.parents[child]) {
        if parent == u32::MAX {
            break;
        }
        way.push(parent as usize);
    }
    let mut lines = Vec::new();
    let mut state = model.start();
    let mut steps = Vec::new();
    for &index in way.iter().rev().skip(1) {
        steps.clear();
        // These states were checked when they were found.
        drop(model.steps(state, &mut steps));
        let next = steps.iter().find_map(|&step| {
            let next = model.take(state, step).ok()?;
            (model.canonical(next) == seen.states[index]).then_some((step, next))
        });
        let (step, next) = next.expect("a step that led there once leads there again");
        lines.push(step.to_string());
        state = next;
    }
    if last.is_some() {
        steps.clear();
        drop(model.steps(state, &mut steps));
        let broken = steps.iter().copied().find(|&step| model.take(state, step).is_err());
        lines.push(broken.or(last).expect("there is a last step").to_string());
    }
    lines
}

/// All states so far, in the order in which they were found, and a table to find them.
struct VisitedStates<S> {
    states: Vec<S>,
    parents: Vec<u32>,
    /// Indices into `states`, open addressing; `u32::MAX` is empty. Its length is a power of two.
    table: Vec<u32>,
}

impl<S: Copy + Eq + Hash> VisitedStates<S> {
    fn new() -> Self {
        Self { states: Vec::new(), parents: Vec::new(), table: vec![u32::MAX; 1 << 16] }
    }

    /// The index of a state, which is inserted if it is new.
    fn insert(&mut self, state: S, parent: u32) -> u32 {
        if self.states.len() * 2 >= self.table.len() {
            self.grow();
        }
        let slot = self.slot(&state);
        if self.table[slot] != u32::MAX {
            return self.table[slot];
        }
        assert!(self.states.len() < STATES_MAX, "more than {STATES_MAX} states: choose smaller bounds");
        let index = self.states.len() as u32;
        self.table[slot] = index;
        self.states.push(state);
        self.parents.push(parent);
        index
    }

    /// The position of a state in the table, or the position where it belongs.
    fn slot(&self, state: &S) -> usize {
        let mask = self.table.len() - 1;
        let mut slot = (hash(state) >> 20) as usize & mask;
        while self.table[slot] != u32::MAX && self.states[self.table[slot] as usize] != *state {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn grow(&mut self) {
        self.table = vec![u32::MAX; self.table.len() * 2];
        for index in 0..self.states.len() {
            let slot = self.slot(&self.states[index]);
            self.table[slot] = index as u32;
        }
    }
}

/// A fast hash for small plain values from a trusted source.
#[derive(Clone, Copy, Default)]
pub(crate) struct Mix(u64);

/// The same for tables of the standard library.
pub(crate) type Mixed = BuildHasherDefault<Mix>;

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(26) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.write_u64(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

fn hash<T: Hash>(value: &T) -> u64 {
    let mut mix = Mix::default();
    value.hash(&mut mix);
    let h = mix.finish();
    h ^ (h >> 32)
}
