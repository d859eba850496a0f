//! Turns: a policy that lets a few threads serve many producers, some of which never answer.
//!
//! A silent producer occupies a thread until the call times out. Therefore:
//! - a producer has at most `each` threads at once ([`Turns::new`]);
//! - a producer that has not answered yet has one;
//! - producers that did not answer their last call have one each, and together leave one thread to the others.
//!
//! The policy is pure: its caller owns the threads, asks before each call, and reports how the call ended.

use std::collections::HashMap;
use std::hash::Hash;

/// Limit of the producers with a remembered answer. Beyond the limit all are forgotten.
const REMEMBERED_MAX: usize = 1_024;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Turns<P> {
    threads: usize,
    each: usize,
    running: HashMap<P, usize>,
    /// Whether they answered their last call.
    responsive: HashMap<P, bool>,
}

impl<P: Eq + Hash + Clone> Turns<P> {
    /// Turns of so many threads, of which one producer may have `each`.
    pub(super) fn new(threads: usize, each: usize) -> Self {
        Self { threads, each: each.max(1), running: HashMap::new(), responsive: HashMap::new() }
    }

    /// Whether a call to this producer may start.
    pub(super) fn may_start(&self, producer: &P) -> bool {
        let running = self.running.get(producer).copied().unwrap_or_default();
        match self.responsive.get(producer) {
            Some(true) => running < self.each,
            None => running == 0,
            Some(false) => {
                let silent = |other: &P| self.responsive.get(other) == Some(&false);
                let waited_for = self.running.keys().filter(|other| silent(other)).count();
                running == 0 && waited_for < self.threads.saturating_sub(1).max(1)
            }
        }
    }

    pub(super) fn started(&mut self, producer: &P) {
        *self.running.entry(producer.clone()).or_default() += 1;
    }

    /// Ends a call. `answered` is true for an answer of any kind, and `None` if this engine stopped the call.
    pub(super) fn ended(&mut self, producer: &P, answered: impl Into<Option<bool>>) {
        if let Some(running) = self.running.get_mut(producer) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(producer);
            }
        }
        let Some(answered) = answered.into() else { return };
        if self.responsive.len() == REMEMBERED_MAX && !self.responsive.contains_key(producer) {
            self.responsive.clear();
        }
        self.responsive.insert(producer.clone(), answered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_producers_leave_one_thread_free() {
        let mut turns = Turns::new(4, 3);
        for unknown in ["a", "b", "c", "d"] {
            assert!(turns.may_start(&unknown));
            turns.started(&unknown);
            assert!(!turns.may_start(&unknown), "one each as long as nothing is known");
        }
        for silent in ["a", "b", "c", "d"] {
            turns.ended(&silent, false);
        }
        for silent in ["a", "b", "c"] {
            assert!(turns.may_start(&silent), "it may try again");
            turns.started(&silent);
        }
        assert!(!turns.may_start(&"d"), "three are waited for already");
        assert!(turns.may_start(&"e"), "the last thread is for others");
        turns.ended(&"a", true);
        turns.started(&"a");
        assert!(turns.may_start(&"a"), "it answers: it may have more than one");
        turns.ended(&"a", false);
        turns.started(&"d");
        assert!(!turns.may_start(&"a"), "it has fallen silent, and three others have too");
    }

    #[test]
    fn one_responsive_producer_does_not_hold_all_threads() {
        let mut turns = Turns::new(4, 3);
        turns.started(&"a");
        turns.ended(&"a", true);
        for _ in 0..3 {
            assert!(turns.may_start(&"a"));
            turns.started(&"a");
        }
        assert!(!turns.may_start(&"a") && turns.may_start(&"b"));
    }

    #[test]
    fn a_single_thread_serves_producers_in_turn() {
        let mut turns = Turns::new(1, 0);
        assert!(turns.may_start(&"a"));
        turns.started(&"a");
        assert!(!turns.may_start(&"a"));
        turns.ended(&"a", false);
        assert!(turns.may_start(&"b"));
    }

    #[test]
    fn the_remembered_producers_are_bounded() {
        let mut turns = Turns::new(2, 1);
        for producer in 0..10 * REMEMBERED_MAX {
            turns.started(&producer);
            turns.ended(&producer, true);
            assert!(turns.responsive.len() <= REMEMBERED_MAX && turns.running.is_empty());
        }
    }
}
