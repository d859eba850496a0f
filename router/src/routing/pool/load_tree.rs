//! The loads and weights of a pool's engines, in a wide, shallow tree. It finds the weights of the ready engines and
//! the least load. Updating one engine and choosing among all of them take O(height); 4,096 engines are four levels.
//! Values that only apply to all engines together are stored next to the tree. Pure.
//!
//! ```text
//!                 ┌───────────── all: weight 7, least 3 (two of them) ─────────────┐
//!        ┌─ weight 4, least 3 (one) ─┐          …  up to eight  …      ┌─ weight 3, least 3 (one) ─┐
//!      leaf    …  up to eight  …   leaf                              leaf         leaf          (none)
//! ```
//!
//! Invariants, checked against lists in the tests:
//! - A node contains what a walk over the leaves below it would find.
//! - A draw by position, or by a turn among equals, finds the same engine as a walk over the list.

use super::member::Eligibility;
use crate::routing::policy::Candidate;

/// The state of one engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LoadLeaf {
    pub candidate: Candidate,
    /// The value of which the tree finds the minimum.
    pub load: u64,
    /// This router's requests there.
    pub own: u32,
    pub fit: Eligibility,
    /// Its health permits requests.
    pub in_use: bool,
}

/// Sums over all leaves.
#[derive(Clone, Copy, Debug, Default)]
struct LoadTotals {
    ready: usize,
    full: usize,
    in_use: usize,
    /// Requests of the ready leaves.
    requests: u64,
}

impl LoadTotals {
    fn add(&mut self, leaf: &LoadLeaf) {
        self.ready += usize::from(leaf.fit == Eligibility::Ready);
        self.full += usize::from(leaf.fit == Eligibility::Full);
        self.in_use += usize::from(leaf.in_use);
        self.requests += leaf.ready_requests();
    }

    fn remove(&mut self, leaf: &LoadLeaf) {
        self.ready -= usize::from(leaf.fit == Eligibility::Ready);
        self.full -= usize::from(leaf.fit == Eligibility::Full);
        self.in_use -= usize::from(leaf.in_use);
        self.requests -= leaf.ready_requests();
    }
}

impl LoadLeaf {
    fn ready_requests(&self) -> u64 {
        if self.fit == Eligibility::Ready { u64::from(self.candidate.requests) } else { 0 }
    }
}

/// A summary of the leaves below a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LoadNode {
    /// Of the ready leaves: the sum of their weights, the least load, and the number of leaves with that load.
    weight: u64,
    least: u64,
    equals: u32,
    /// Minimum of [`LoadLeaf::own`] over all leaves.
    own: u32,
}

impl LoadNode {
    const NONE: Self = Self { weight: 0, least: u64::MAX, equals: 0, own: u32::MAX };

    fn of(leaf: &LoadLeaf) -> Self {
        if leaf.fit == Eligibility::Ready {
            let weight = u64::from(leaf.candidate.weight);
            Self { weight, least: leaf.load, equals: 1, own: leaf.own }
        } else {
            Self { own: leaf.own, ..Self::NONE }
        }
    }

    fn merge(self, other: Self) -> Self {
        let least = self.least.min(other.least);
        Self {
            weight: self.weight + other.weight,
            least,
            equals: self.equals_at(least) + other.equals_at(least),
            own: self.own.min(other.own),
        }
    }

    /// Number of leaves with the load `least`; no leaf may have less.
    fn equals_at(&self, least: u64) -> u32 {
        if self.least == least { self.equals } else { 0 }
    }

    /// This node after one child changed from `old` to `new`; `None` if the result depends on all children.
    fn with_child(self, old: &Self, new: &Self) -> Option<Self> {
        let least = self.least.min(new.least);
        let equals = self.equals_at(least) + new.equals_at(least) - old.equals_at(least);
        // No leaf with the least load may be left.
        let is_known = equals > 0 && (new.own <= old.own || old.own > self.own);
        let weight = self.weight + new.weight - old.weight;
        is_known.then_some(Self { weight, least, equals, own: self.own.min(new.own) })
    }
}

/// Children per node. Their minima occupy three cache lines.
const WIDE: usize = 8;

/// The leaves, and above them nodes by level, root first.
#[derive(Debug)]
pub(super) struct LoadTree {
    leaves: Vec<LoadLeaf>,
    totals: LoadTotals,
    /// Node `n` is above nodes `8n + 1` to `8n + 8`; the root is 0, leaf `i` is `first + i`.
    nodes: Vec<LoadNode>,
    first: usize,
    /// A bit for each leaf that is not ready.
    not_ready: Vec<u64>,
}

impl LoadTree {
    pub(super) fn new(leaves: Vec<LoadLeaf>) -> Self {
        let (mut first, mut width) = (0, 1);
        while width < leaves.len() {
            (first, width) = (first + width, width * WIDE);
        }
        let below = if first == 0 { 1 } else { leaves.len().next_multiple_of(WIDE) };
        let mut tree = Self {
            totals: LoadTotals::default(),
            nodes: vec![LoadNode::NONE; first + below],
            first,
            not_ready: vec![0; leaves.len().div_ceil(64)],
            leaves,
        };
        for (at, leaf) in tree.leaves.iter().enumerate() {
            tree.totals.add(leaf);
            tree.nodes[first + at] = LoadNode::of(leaf);
            tree.not_ready[at / 64] |= u64::from(leaf.fit != Eligibility::Ready) << (at % 64);
        }
        for node in (0..first).rev() {
            tree.nodes[node] = tree.merge_children(node);
        }
        tree
    }

    /// Merges the children of a node.
    fn merge_children(&self, node: usize) -> LoadNode {
        let from = WIDE * node + 1;
        // The lowest level can have fewer leaves than places, so the last nodes above it can have no children.
        let below = self.nodes.get(from..from + WIDE).unwrap_or_default();
        below.iter().fold(LoadNode::NONE, |all, node| all.merge(*node))
    }

    /// Replaces the state of one engine and returns the previous one.
    pub(super) fn set(&mut self, at: usize, leaf: LoadLeaf) -> LoadLeaf {
        let before = std::mem::replace(&mut self.leaves[at], leaf);
        self.totals.remove(&before);
        self.totals.add(&leaf);
        let bit = 1 << (at % 64);
        let word = &mut self.not_ready[at / 64];
        *word = if leaf.fit == Eligibility::Ready { *word & !bit } else { *word | bit };
        let (mut node, mut new) = (self.first + at, LoadNode::of(&leaf));
        loop {
            let old = std::mem::replace(&mut self.nodes[node], new);
            if old == new || node == 0 {
                return before;
            }
            node = (node - 1) / WIDE;
            new = self.nodes[node].with_child(&old, &new).unwrap_or_else(|| self.merge_children(node));
        }
    }

    pub(super) fn leaf(&self, at: usize) -> &LoadLeaf {
        &self.leaves[at]
    }

    pub(super) fn leaves(&self) -> &[LoadLeaf] {
        &self.leaves
    }

    /// Engines that can be chosen.
    pub(super) fn ready(&self) -> usize {
        self.totals.ready
    }

    /// Whether an engine is not ready only because it is full.
    pub(super) fn has_full(&self) -> bool {
        self.totals.full > 0
    }

    /// Engines whose health permits requests.
    pub(super) fn in_use(&self) -> usize {
        self.totals.in_use
    }

    /// Requests of all ready engines.
    pub(super) fn requests(&self) -> u64 {
        self.totals.requests
    }

    /// This router's requests at the engine with the fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        (!self.leaves.is_empty()).then_some(self.nodes[0].own)
    }

    /// Sum of the weights of all ready engines.
    pub(super) fn weight(&self) -> u64 {
        self.nodes[0].weight
    }

    /// The leaf at a position below the sum of the weights, and the position at which that leaf begins. A ready leaf
    /// covers as many positions as its weight.
    pub(super) fn at(&self, position: u64) -> Option<(usize, u64)> {
        if position >= self.weight() {
            return None;
        }
        let (leaf, left) = self.descend(position, |node| node.weight);
        Some((leaf, position - left))
    }

    /// The leaf with the least load; among equals `turn` selects one.
    pub(super) fn least(&self, turn: u64) -> Option<usize> {
        let LoadNode { least, equals, .. } = self.nodes[0];
        let left = turn.checked_rem(u64::from(equals))?;
        Some(self.descend(left, |node| u64::from(node.equals_at(least))).0)
    }

    /// The first leaf at which the sum of `takes` exceeds `left`, and the remainder there. `left` must be below the sum
    /// at the root.
    fn descend(&self, mut left: u64, takes: impl Fn(&LoadNode) -> u64) -> (usize, u64) {
        let mut node = 0;
        while node < self.first {
            node = WIDE * node + 1;
            loop {
                let here = takes(&self.nodes[node]);
                if left < here {
                    break;
                }
                left -= here;
                node += 1;
            }
        }
        (node - self.first, left)
    }

    /// At most `most` ready leaves: the leaf with the least load first, then those after it.
    pub(super) fn first_ready(&self, most: usize) -> Vec<Candidate> {
        let mut found = Vec::with_capacity(most);
        let Some(from) = self.least(0) else { return found };
        let (before, behind) = self.leaves.split_at(from);
        for leaf in behind.iter().chain(before).take(2 * most) {
            if leaf.fit == Eligibility::Ready {
                found.push(leaf.candidate);
            }
            if found.len() == most {
                break;
            }
        }
        found
    }

    /// The first leaves that are not ready, at most `most`, with their eligibility.
    pub(super) fn first_not_ready(&self, most: usize) -> Vec<(usize, Eligibility)> {
        let most = most.min(self.leaves.len() - self.totals.ready);
        let mut found = Vec::with_capacity(most);
        for (at, &word) in self.not_ready.iter().enumerate() {
            let mut left = word;
            while found.len() < most && left != 0 {
                let leaf = 64 * at + left.trailing_zeros() as usize;
                found.push((leaf, self.leaves[leaf].fit));
                left &= left - 1;
            }
            if found.len() == most {
                break;
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaf(index: usize, (requests, weight, fit): (u32, u32, u8)) -> LoadLeaf {
        let fit = [Eligibility::Ready, Eligibility::Full, Eligibility::Unresponsive][usize::from(fit % 3)];
        let candidate = Candidate {
            index,
            cache_id: u32::try_from(index).expect("few"),
            key: 0,
            requests,
            tokens: 0,
            weight: 1 + weight,
        };
        LoadLeaf {
            candidate,
            load: u64::from(requests),
            own: requests,
            fit,
            in_use: fit != Eligibility::Unresponsive,
        }
    }

    proptest! {
        /// Compared with a walk over a list, after any changes.
        #[test]
        fn the_tree_matches_a_walk_over_a_list(
            first in prop_oneof![Just(0..10), Just(0..140), Just(500..530)]
                .prop_flat_map(|lengths| prop::collection::vec((0..6_u32, 0..3_u32, 0..4_u8), lengths)),
            changes in prop::collection::vec((any::<prop::sample::Index>(), (0..6_u32, 0..3_u32, 0..4_u8)), 0..60),
            turn in 0..1_000_u64,
        ) {
            let mut list: Vec<LoadLeaf> = first.iter().enumerate().map(|(at, &of)| leaf(at, of)).collect();
            let mut tree = LoadTree::new(list.clone());
            for (at, of) in changes.iter().filter(|_| !first.is_empty()) {
                let at = at.index(list.len());
                prop_assert_eq!(tree.set(at, leaf(at, *of)), list[at]);
                list[at] = leaf(at, *of);
            }
            for node in 0..tree.first {
                prop_assert_eq!(tree.nodes[node], tree.merge_children(node));
            }
            let ready: Vec<&LoadLeaf> = list.iter().filter(|leaf| leaf.fit == Eligibility::Ready).collect();
            prop_assert_eq!(tree.ready(), ready.len());
            prop_assert_eq!(tree.has_full(), list.iter().any(|leaf| leaf.fit == Eligibility::Full));
            prop_assert_eq!(tree.in_use(), list.iter().filter(|leaf| leaf.in_use).count());
            prop_assert_eq!(tree.least_own(), list.iter().map(|leaf| leaf.own).min());
            prop_assert_eq!(tree.requests(), ready.iter().map(|leaf| u64::from(leaf.candidate.requests)).sum::<u64>());
            let mut position = 0;
            for leaf in &ready {
                for _ in 0..leaf.candidate.weight {
                    let begins = tree.at(position).expect("below the sum");
                    prop_assert_eq!(begins.0, leaf.candidate.index);
                    prop_assert!(begins.1 <= position && position < begins.1 + u64::from(leaf.candidate.weight));
                    position += 1;
                }
            }
            prop_assert_eq!((tree.weight(), tree.at(position)), (position, None));
            let least = ready.iter().map(|leaf| leaf.load).min();
            let equals: Vec<usize> =
                ready.iter().filter(|leaf| Some(leaf.load) == least).map(|leaf| leaf.candidate.index).collect();
            let expected = equals.get((turn % equals.len().max(1) as u64) as usize).copied();
            prop_assert_eq!(tree.least(turn), expected);
            let mut few: Vec<usize> = tree.first_ready(8).iter().map(|candidate| candidate.index).collect();
            prop_assert_eq!(few.first().map(|at| list[*at].load), least);
            prop_assert!(few.iter().all(|at| list[*at].fit == Eligibility::Ready));
            few.sort_unstable();
            few.dedup();
            let all = if list.len() <= 16 { ready.len().min(8) } else { few.len() };
            prop_assert!(few.len() == all && few.len() <= 8, "{:?}", few);
            let not = list.iter().filter(|leaf| leaf.fit != Eligibility::Ready).take(8);
            let not: Vec<_> = not.map(|leaf| (leaf.candidate.index, leaf.fit)).collect();
            prop_assert_eq!(tree.first_not_ready(8), not);
        }
    }

    #[test]
    fn a_draw_among_four_thousand_engines_visits_few_more_nodes_than_among_ten() {
        let looked_at = |engines: usize| {
            let tree = LoadTree::new((0..engines).map(|at| leaf(at, (1, 0, 0))).collect());
            let looks = std::cell::Cell::new(0);
            let mut worst = 0;
            for position in 0..tree.weight() {
                looks.set(0);
                let found = tree.descend(position, |node| {
                    looks.set(looks.get() + 1);
                    node.weight
                });
                assert_eq!(found, (usize::try_from(position).expect("small"), 0));
                worst = worst.max(looks.get());
            }
            worst
        };
        assert_eq!([looked_at(10), looked_at(512), looked_at(4_096)], [9, 24, 32]);
    }
}
