//! The cached hashes of one engine, by last use: a map into a doubly linked list.

use std::collections::HashMap;

use super::MixHashBuilder;

/// No node.
const NONE: u32 = u32::MAX;

/// Hashes, ordered by last use.
#[derive(Debug)]
pub(super) struct HashLru {
    node_of: HashMap<u64, u32, MixHashBuilder>,
    nodes: Vec<LruNode>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct LruNode {
    hash: u64,
    newer: u32,
    older: u32,
}

impl HashLru {
    pub(super) fn new(hash_builder: MixHashBuilder) -> Self {
        let node_of = HashMap::with_hasher(hash_builder);
        Self { node_of, nodes: Vec::new(), free: Vec::new(), newest: NONE, oldest: NONE }
    }

    pub(super) fn len(&self) -> usize {
        self.node_of.len()
    }

    pub(super) fn contains(&self, hash: u64) -> bool {
        self.node_of.contains_key(&hash)
    }

    /// Makes a hash the newest. Returns whether it exists.
    pub(super) fn touch(&mut self, hash: u64) -> bool {
        let Some(&node) = self.node_of.get(&hash) else { return false };
        if node != self.newest {
            self.unlink(node);
            self.link(node);
        }
        true
    }

    /// Adds a hash that does not exist yet.
    pub(super) fn insert(&mut self, hash: u64) {
        let fresh = LruNode { hash, newer: NONE, older: NONE };
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
        self.node_of.insert(hash, node);
        self.link(node);
    }

    pub(super) fn remove(&mut self, hash: u64) -> bool {
        let Some(node) = self.node_of.remove(&hash) else { return false };
        self.unlink(node);
        self.free.push(node);
        true
    }

    /// Removes the oldest hash.
    pub(super) fn evict(&mut self) -> Option<u64> {
        let hash = self.nodes.get(self.oldest as usize)?.hash;
        self.remove(hash);
        Some(hash)
    }

    /// Inserts an unlinked node at the front.
    fn link(&mut self, node: u32) {
        let older = std::mem::replace(&mut self.newest, node);
        (self.nodes[node as usize].newer, self.nodes[node as usize].older) = (NONE, older);
        match self.nodes.get_mut(older as usize) {
            Some(next) => next.newer = node,
            None => self.oldest = node,
        }
    }

    fn unlink(&mut self, node: u32) {
        let LruNode { newer, older, .. } = self.nodes[node as usize];
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
