//! The hashes that one engine holds, by when they were used: a map into a list that is linked both ways.

use std::collections::HashMap;

use super::Mixed;

/// No node.
const NONE: u32 = u32::MAX;

/// Hashes, the least recently used first to go.
#[derive(Debug)]
pub(super) struct Held {
    at: HashMap<u64, u32, Mixed>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u64,
    newer: u32,
    older: u32,
}

impl Held {
    pub(super) fn new(mixed: Mixed) -> Self {
        let at = HashMap::with_hasher(mixed);
        Self { at, nodes: Vec::new(), free: Vec::new(), newest: NONE, oldest: NONE }
    }

    pub(super) fn len(&self) -> usize {
        self.at.len()
    }

    pub(super) fn contains(&self, hash: u64) -> bool {
        self.at.contains_key(&hash)
    }

    /// Makes a hash the newest; whether it is there.
    pub(super) fn touch(&mut self, hash: u64) -> bool {
        let Some(&node) = self.at.get(&hash) else { return false };
        if node != self.newest {
            self.unlink(node);
            self.link(node);
        }
        true
    }

    /// Adds a hash that is not there.
    pub(super) fn insert(&mut self, hash: u64) {
        let fresh = Node { hash, newer: NONE, older: NONE };
        let node = match self.free.pop() {
            Some(node) => {
                self.nodes[node as usize] = fresh;
                node
            }
            None => {
                self.nodes.push(fresh);
                u32::try_from(self.nodes.len() - 1).expect("an engine's hashes are bounded by configuration")
            }
        };
        self.at.insert(hash, node);
        self.link(node);
    }

    pub(super) fn remove(&mut self, hash: u64) -> bool {
        let Some(node) = self.at.remove(&hash) else { return false };
        self.unlink(node);
        self.free.push(node);
        true
    }

    /// Takes the oldest out.
    pub(super) fn evict(&mut self) -> Option<u64> {
        let hash = self.nodes.get(self.oldest as usize)?.hash;
        self.remove(hash);
        Some(hash)
    }

    /// Puts a node that is in no list in front.
    fn link(&mut self, node: u32) {
        let older = std::mem::replace(&mut self.newest, node);
        (self.nodes[node as usize].newer, self.nodes[node as usize].older) = (NONE, older);
        match self.nodes.get_mut(older as usize) {
            Some(next) => next.newer = node,
            None => self.oldest = node,
        }
    }

    fn unlink(&mut self, node: u32) {
        let Node { newer, older, .. } = self.nodes[node as usize];
        match self.nodes.get_mut(newer as usize) {
            Some(next) => next.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older as usize) {
            Some(next) => next.newer = newer,
            None => self.oldest = newer,
        }
    }
}
