//! What is known of a pool's engines, in a wide and shallow tree: what those that can be chosen weigh, and who has the
//! least load. A change of one engine and a choice among all take as many steps as the tree is high, and 4,096 engines
//! are four levels. What is only ever asked of all engines together is counted beside it. Pure.
//!
//! ```text
//!                 ┌───────────── all: weight 7, least 3 (two of them) ─────────────┐
//!        ┌─ weight 4, least 3 (one) ─┐          …  up to eight  …      ┌─ weight 3, least 3 (one) ─┐
//!      leaf    …  up to eight  …   leaf                              leaf         leaf          (none)
//! ```
//!
//! Invariants, checked against lists in the tests:
//! - A node says of the leaves below it what a walk over them would.
//! - Whoever is drawn by a position, or by a turn among equals, is whom a walk over the list would find there.

use super::member::Fit;
use crate::routing::policy::Candidate;

/// What can be said of one engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Leaf {
    pub candidate: Candidate,
    /// What the tree looks for the least of.
    pub load: u64,
    /// Requests of this router there.
    pub own: u32,
    pub fit: Fit,
    /// Its health lets it be given requests.
    pub in_use: bool,
}

/// All leaves together.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    ready: usize,
    full: usize,
    in_use: usize,
    /// Of those that are ready.
    requests: u64,
}

impl Totals {
    fn add(&mut self, leaf: &Leaf) {
        self.ready += usize::from(leaf.fit == Fit::Ready);
        self.full += usize::from(leaf.fit == Fit::Full);
        self.in_use += usize::from(leaf.in_use);
        self.requests += leaf.ready_requests();
    }

    fn take(&mut self, leaf: &Leaf) {
        self.ready -= usize::from(leaf.fit == Fit::Ready);
        self.full -= usize::from(leaf.fit == Fit::Full);
        self.in_use -= usize::from(leaf.in_use);
        self.requests -= leaf.ready_requests();
    }
}

impl Leaf {
    fn ready_requests(&self) -> u64 {
        if self.fit == Fit::Ready { u64::from(self.candidate.requests) } else { 0 }
    }
}

/// The leaves below, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    /// Of those that are ready: their weights together, the least load, and how many have it.
    weight: u64,
    least: u64,
    equals: u32,
    /// Least of [`Leaf::own`], of all leaves.
    own: u32,
}

impl Node {
    const NONE: Self = Self { weight: 0, least: u64::MAX, equals: 0, own: u32::MAX };

    fn of(leaf: &Leaf) -> Self {
        if leaf.fit == Fit::Ready {
            let weight = u64::from(leaf.candidate.weight);
            Self { weight, least: leaf.load, equals: 1, own: leaf.own }
        } else {
            Self { own: leaf.own, ..Self::NONE }
        }
    }

    fn and(self, other: Self) -> Self {
        let least = self.least.min(other.least);
        Self {
            weight: self.weight + other.weight,
            least,
            equals: self.equals_at(least) + other.equals_at(least),
            own: self.own.min(other.own),
        }
    }

    /// How many have this load, which nobody is below.
    fn equals_at(&self, least: u64) -> u32 {
        if self.least == least { self.equals } else { 0 }
    }

    /// The same once one below says `new` instead of `old`; `None` where only all below together can say it.
    fn with(self, old: &Self, new: &Self) -> Option<Self> {
        let least = self.least.min(new.least);
        let equals = self.equals_at(least) + new.equals_at(least) - old.equals_at(least);
        // Of what was the least nothing may be left.
        let is_known = equals > 0 && (new.own <= old.own || old.own > self.own);
        let weight = self.weight + new.weight - old.weight;
        is_known.then_some(Self { weight, least, equals, own: self.own.min(new.own) })
    }
}

/// Nodes below one node: what the least of them is looked for in lies in three lines of a cache.
const WIDE: usize = 8;

/// The tree: the leaves, and above them nodes by level, the root first.
#[derive(Debug)]
pub(super) struct Tree {
    leaves: Vec<Leaf>,
    totals: Totals,
    /// Node `n` is above nodes `8n + 1` to `8n + 8`; the root is 0, leaf `i` is `first + i`.
    nodes: Vec<Node>,
    first: usize,
    /// A bit for each leaf that is not ready.
    not_ready: Vec<u64>,
}

impl Tree {
    pub(super) fn new(leaves: Vec<Leaf>) -> Self {
        let (mut first, mut width) = (0, 1);
        while width < leaves.len() {
            (first, width) = (first + width, width * WIDE);
        }
        let below = if first == 0 { 1 } else { leaves.len().next_multiple_of(WIDE) };
        let mut tree = Self {
            totals: Totals::default(),
            nodes: vec![Node::NONE; first + below],
            first,
            not_ready: vec![0; leaves.len().div_ceil(64)],
            leaves,
        };
        for (at, leaf) in tree.leaves.iter().enumerate() {
            tree.totals.add(leaf);
            tree.nodes[first + at] = Node::of(leaf);
            tree.not_ready[at / 64] |= u64::from(leaf.fit != Fit::Ready) << (at % 64);
        }
        for node in (0..first).rev() {
            tree.nodes[node] = tree.below(node);
        }
        tree
    }

    /// What the nodes below a node say together.
    fn below(&self, node: usize) -> Node {
        let from = WIDE * node + 1;
        // Where there are fewer leaves than the lowest level has room for, the last nodes above it have none.
        let below = self.nodes.get(from..from + WIDE).unwrap_or_default();
        below.iter().fold(Node::NONE, |all, node| all.and(*node))
    }

    /// Replaces what is said of one engine; gives what was said before.
    pub(super) fn set(&mut self, at: usize, leaf: Leaf) -> Leaf {
        let before = std::mem::replace(&mut self.leaves[at], leaf);
        self.totals.take(&before);
        self.totals.add(&leaf);
        let bit = 1 << (at % 64);
        let word = &mut self.not_ready[at / 64];
        *word = if leaf.fit == Fit::Ready { *word & !bit } else { *word | bit };
        let (mut node, mut new) = (self.first + at, Node::of(&leaf));
        loop {
            let old = std::mem::replace(&mut self.nodes[node], new);
            if old == new || node == 0 {
                return before;
            }
            node = (node - 1) / WIDE;
            new = self.nodes[node].with(&old, &new).unwrap_or_else(|| self.below(node));
        }
    }

    pub(super) fn leaf(&self, at: usize) -> &Leaf {
        &self.leaves[at]
    }

    pub(super) fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    /// Engines that can be chosen.
    pub(super) fn ready(&self) -> usize {
        self.totals.ready
    }

    /// Whether some engine cannot only because it is full.
    pub(super) fn has_full(&self) -> bool {
        self.totals.full > 0
    }

    /// Engines whose health lets them be given requests.
    pub(super) fn in_use(&self) -> usize {
        self.totals.in_use
    }

    /// What all that are ready are working on.
    pub(super) fn requests(&self) -> u64 {
        self.totals.requests
    }

    /// Requests of this router at the engine that has fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        (!self.leaves.is_empty()).then_some(self.nodes[0].own)
    }

    /// What all that are ready weigh.
    pub(super) fn weight(&self) -> u64 {
        self.nodes[0].weight
    }

    /// The leaf at a position below the sum of the weights, each that is ready taking as many positions as it weighs;
    /// and the position at which it begins.
    pub(super) fn at(&self, position: u64) -> Option<(usize, u64)> {
        if position >= self.weight() {
            return None;
        }
        let (leaf, left) = self.descend(position, |node| node.weight);
        Some((leaf, position - left))
    }

    /// The leaf with the least load; of several the one whose turn it is.
    pub(super) fn least(&self, turn: u64) -> Option<usize> {
        let Node { least, equals, .. } = self.nodes[0];
        let left = turn.checked_rem(u64::from(equals))?;
        Some(self.descend(left, |node| u64::from(node.equals_at(least))).0)
    }

    /// The leaf in which the sum of what nodes take first exceeds `left`, which is below what the root takes; and what is
    /// left of it there.
    fn descend(&self, mut left: u64, takes: impl Fn(&Node) -> u64) -> (usize, u64) {
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

    /// Those that are ready, as many as `most`: the first has the least load, and the others stand behind it.
    pub(super) fn few(&self, most: usize) -> Vec<Candidate> {
        let mut found = Vec::with_capacity(most);
        let Some(from) = self.least(0) else { return found };
        let (before, behind) = self.leaves.split_at(from);
        for leaf in behind.iter().chain(before).take(2 * most) {
            if leaf.fit == Fit::Ready {
                found.push(leaf.candidate);
            }
            if found.len() == most {
                break;
            }
        }
        found
    }

    /// The first leaves that are not ready, as many as `most`, and why.
    pub(super) fn few_not_ready(&self, most: usize) -> Vec<(usize, Fit)> {
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

    fn leaf(index: usize, (requests, weight, fit): (u32, u32, u8)) -> Leaf {
        let fit = [Fit::Ready, Fit::Full, Fit::Silent][usize::from(fit % 3)];
        let candidate = Candidate {
            index,
            holder: u32::try_from(index).expect("few"),
            key: 0,
            requests,
            tokens: 0,
            weight: 1 + weight,
        };
        Leaf { candidate, load: u64::from(requests), own: requests, fit, in_use: fit != Fit::Silent }
    }

    proptest! {
        /// Against a walk over a list, after any changes.
        #[test]
        fn it_says_what_a_walk_over_a_list_would(
            first in prop_oneof![Just(0..10), Just(0..140), Just(500..530)]
                .prop_flat_map(|lengths| prop::collection::vec((0..6_u32, 0..3_u32, 0..4_u8), lengths)),
            changes in prop::collection::vec((any::<prop::sample::Index>(), (0..6_u32, 0..3_u32, 0..4_u8)), 0..60),
            turn in 0..1_000_u64,
        ) {
            let mut list: Vec<Leaf> = first.iter().enumerate().map(|(at, &of)| leaf(at, of)).collect();
            let mut tree = Tree::new(list.clone());
            for (at, of) in changes.iter().filter(|_| !first.is_empty()) {
                let at = at.index(list.len());
                prop_assert_eq!(tree.set(at, leaf(at, *of)), list[at]);
                list[at] = leaf(at, *of);
            }
            for node in 0..tree.first {
                prop_assert_eq!(tree.nodes[node], tree.below(node));
            }
            let ready: Vec<&Leaf> = list.iter().filter(|leaf| leaf.fit == Fit::Ready).collect();
            prop_assert_eq!(tree.ready(), ready.len());
            prop_assert_eq!(tree.has_full(), list.iter().any(|leaf| leaf.fit == Fit::Full));
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
            let mut few: Vec<usize> = tree.few(8).iter().map(|candidate| candidate.index).collect();
            prop_assert_eq!(few.first().map(|at| list[*at].load), least);
            prop_assert!(few.iter().all(|at| list[*at].fit == Fit::Ready));
            few.sort_unstable();
            few.dedup();
            let all = if list.len() <= 16 { ready.len().min(8) } else { few.len() };
            prop_assert!(few.len() == all && few.len() <= 8, "{:?}", few);
            let not = list.iter().filter(|leaf| leaf.fit != Fit::Ready).take(8);
            let not: Vec<_> = not.map(|leaf| (leaf.candidate.index, leaf.fit)).collect();
            prop_assert_eq!(tree.few_not_ready(8), not);
        }
    }

    #[test]
    fn a_draw_among_four_thousand_engines_looks_at_few_more_nodes_than_one_among_ten() {
        let looked_at = |engines: usize| {
            let tree = Tree::new((0..engines).map(|at| leaf(at, (1, 0, 0))).collect());
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
