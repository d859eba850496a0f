//! What is known of a pool's engines, in a tree: how many can be chosen, what they weigh, who has the least load. A change
//! of one engine and a choice among all take as many steps as the tree is high. Pure.
//!
//! ```text
//!                 ┌───────────── all: ready 5, weight 7, least 3 (two of them) ─────────────┐
//!        ┌─ ready 3, weight 4, least 3 (one) ─┐                       ┌─ ready 2, weight 3, least 3 (one) ─┐
//!      leaf           leaf                   leaf                   leaf            leaf              (none)
//! ```
//!
//! Invariants, checked against lists in the tests:
//! - A node says of the leaves below it what a walk over them would.
//! - Whoever is drawn by a position, or by a turn among equals, is whom a walk over the list would find there.

use crate::policy::Candidate;

/// What can be said of one engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Leaf {
    pub candidate: Candidate,
    /// What the tree looks for the least of.
    pub load: u64,
    /// Requests of this router there.
    pub own: u32,
    pub state: State,
    /// Its health lets it be given requests.
    pub in_use: bool,
}

/// Whether an engine can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    Full,
    Not,
}

/// The leaves below, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    ready: u32,
    full: u32,
    in_use: u32,
    /// Least of [`Leaf::own`], of all leaves.
    own: u32,
    /// Of those that are ready: weights and requests together, the least load, and how many have it.
    weight: u64,
    requests: u64,
    least: u64,
    equals: u32,
}

impl Node {
    const NONE: Self = Self {
        ready: 0,
        full: 0,
        in_use: 0,
        own: u32::MAX,
        weight: 0,
        requests: 0,
        least: u64::MAX,
        equals: 0,
    };

    fn of(leaf: &Leaf) -> Self {
        let none = Self {
            full: u32::from(leaf.state == State::Full),
            in_use: u32::from(leaf.in_use),
            own: leaf.own,
            ..Self::NONE
        };
        match leaf.state {
            State::Full | State::Not => none,
            State::Ready => Self {
                ready: 1,
                weight: u64::from(leaf.candidate.weight),
                requests: u64::from(leaf.candidate.requests),
                least: leaf.load,
                equals: 1,
                ..none
            },
        }
    }

    fn and(self, other: Self) -> Self {
        let least = self.least.min(other.least);
        let with = |node: Self| if node.least == least { node.equals } else { 0 };
        Self {
            ready: self.ready + other.ready,
            full: self.full + other.full,
            in_use: self.in_use + other.in_use,
            own: self.own.min(other.own),
            weight: self.weight + other.weight,
            requests: self.requests + other.requests,
            least,
            equals: with(self) + with(other),
        }
    }
}

/// The tree: the leaves, and above them nodes by level, the root first.
#[derive(Debug)]
pub(super) struct Tree {
    leaves: Vec<Leaf>,
    /// Node `n` is above nodes `2n` and `2n + 1`; the root is 1, leaf `i` is `width + i`.
    nodes: Vec<Node>,
    width: usize,
}

impl Tree {
    pub(super) fn new(leaves: Vec<Leaf>) -> Self {
        let width = leaves.len().next_power_of_two();
        let mut nodes = vec![Node::NONE; 2 * width];
        for (node, leaf) in nodes[width..].iter_mut().zip(&leaves) {
            *node = Node::of(leaf);
        }
        for at in (1..width).rev() {
            nodes[at] = nodes[2 * at].and(nodes[2 * at + 1]);
        }
        Self { leaves, nodes, width }
    }

    /// Replaces what is said of one engine; gives what was said before.
    pub(super) fn set(&mut self, at: usize, leaf: Leaf) -> Leaf {
        let before = std::mem::replace(&mut self.leaves[at], leaf);
        let mut node = self.width + at;
        let mut new = Node::of(&leaf);
        while self.nodes[node] != new {
            self.nodes[node] = new;
            node /= 2;
            if node == 0 {
                break;
            }
            new = self.nodes[2 * node].and(self.nodes[2 * node + 1]);
        }
        before
    }

    pub(super) fn leaf(&self, at: usize) -> &Leaf {
        &self.leaves[at]
    }

    pub(super) fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    fn root(&self) -> &Node {
        &self.nodes[1]
    }

    /// Engines that can be chosen.
    pub(super) fn ready(&self) -> usize {
        self.root().ready as usize
    }

    /// Whether some engine cannot only because it is full.
    pub(super) fn has_full(&self) -> bool {
        self.root().full > 0
    }

    /// Engines whose health lets them be given requests.
    pub(super) fn in_use(&self) -> usize {
        self.root().in_use as usize
    }

    /// Requests of this router at the engine that has fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        (!self.leaves.is_empty()).then_some(self.root().own)
    }

    /// What all that are ready weigh.
    pub(super) fn weight(&self) -> u64 {
        self.root().weight
    }

    /// What all that are ready are working on.
    pub(super) fn requests(&self) -> u64 {
        self.root().requests
    }

    /// The leaf at a position below the sum of the weights, each that is ready taking as many positions as it weighs;
    /// and the position at which it begins.
    pub(super) fn at(&self, position: u64) -> Option<(usize, u64)> {
        if position >= self.root().weight {
            return None;
        }
        let (mut node, mut left) = (1, position);
        while node < self.width {
            node *= 2;
            let here = self.nodes[node].weight;
            if left >= here {
                left -= here;
                node += 1;
            }
        }
        Some((node - self.width, position - left))
    }

    /// The leaf with the least load; of several the one whose turn it is.
    pub(super) fn least(&self, turn: u64) -> Option<usize> {
        let root = self.root();
        let mut left = u32::try_from(turn.checked_rem(u64::from(root.equals))?).ok()?;
        let mut node = 1;
        while node < self.width {
            node *= 2;
            let here = if self.nodes[node].least == root.least { self.nodes[node].equals } else { 0 };
            if left >= here {
                left -= here;
                node += 1;
            }
        }
        Some(node - self.width)
    }

    /// The leaves with the least load, as many as `most`: the least first.
    pub(super) fn few_least(&self, most: usize) -> Vec<usize> {
        let mut found: Vec<(u64, usize)> = Vec::with_capacity(most + 1);
        self.gather_least(1, most, &mut found);
        found.into_iter().map(|(_, at)| at).collect()
    }

    fn gather_least(&self, node: usize, most: usize, found: &mut Vec<(u64, usize)>) {
        let is_in_vain =
            found.len() == most && found.last().is_none_or(|last| self.nodes[node].least >= last.0);
        if self.nodes[node].ready == 0 || is_in_vain {
            return;
        }
        if node >= self.width {
            let entry = (self.nodes[node].least, node - self.width);
            found.insert(found.partition_point(|other| *other <= entry), entry);
            found.truncate(most);
            return;
        }
        let (left, right) = (2 * node, 2 * node + 1);
        let right_first = self.nodes[right].least < self.nodes[left].least;
        let order = if right_first { [right, left] } else { [left, right] };
        order.into_iter().for_each(|below| self.gather_least(below, most, found));
    }

    /// The first leaves that are not ready, as many as `most`.
    pub(super) fn few_not_ready(&self, most: usize) -> Vec<usize> {
        let mut found = Vec::new();
        self.gather_not_ready(1, 0, self.width, most, &mut found);
        found
    }

    fn gather_not_ready(&self, node: usize, from: usize, span: usize, most: usize, found: &mut Vec<usize>) {
        let there = self.leaves.len().saturating_sub(from).min(span);
        if found.len() == most || self.nodes[node].ready as usize == there {
            return;
        }
        if span == 1 {
            found.push(from);
            return;
        }
        let half = span / 2;
        self.gather_not_ready(2 * node, from, half, most, found);
        self.gather_not_ready(2 * node + 1, from + half, half, most, found);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn leaf(index: usize, (requests, weight, state): (u32, u32, u8)) -> Leaf {
        let state = [State::Ready, State::Full, State::Not][usize::from(state % 3)];
        let candidate = Candidate {
            index,
            holder: u32::try_from(index).expect("few"),
            key: 0,
            requests,
            tokens: 0,
            weight: 1 + weight,
        };
        Leaf { candidate, load: u64::from(requests), own: requests, state, in_use: state != State::Not }
    }

    proptest! {
        /// Against a walk over a list, after any changes.
        #[test]
        fn it_says_what_a_walk_over_a_list_would(
            first in prop::collection::vec((0..6_u32, 0..3_u32, 0..4_u8), 0..40),
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
            let ready: Vec<&Leaf> = list.iter().filter(|leaf| leaf.state == State::Ready).collect();
            prop_assert_eq!(tree.ready(), ready.len());
            prop_assert_eq!(tree.has_full(), list.iter().any(|leaf| leaf.state == State::Full));
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
            let mut loads: Vec<u64> = ready.iter().map(|leaf| leaf.load).collect();
            loads.sort_unstable();
            loads.truncate(8);
            let few: Vec<u64> = tree.few_least(8).into_iter().map(|at| list[at].load).collect();
            prop_assert_eq!(few, loads);
            let not: Vec<usize> = list.iter().filter(|l| l.state != State::Ready).map(|l| l.candidate.index).collect();
            prop_assert_eq!(tree.few_not_ready(8), not.into_iter().take(8).collect::<Vec<_>>());
        }
    }
}
