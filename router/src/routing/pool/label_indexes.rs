//! The load indexes of a pool, one for each kind of labels. Members of one index suit a request equally well.

use std::collections::HashMap;
use std::sync::Arc;

use super::load_index::LoadIndex;
use super::member::PoolMember;
use crate::config::LoadUnit;
use crate::metrics::Leg;

/// Each list begins with the members that have the labels that the pool prefers.
pub(super) struct LabelIndexes {
    /// All members.
    all: Vec<Arc<LoadIndex>>,
    /// Members by the hash of their pair labels.
    pairs: HashMap<u64, Vec<Arc<LoadIndex>>>,
}

impl LabelIndexes {
    /// Builds the indexes and subscribes them to the members of a pool.
    pub(super) fn new(members: &[Arc<PoolMember>], leg: Leg, by: LoadUnit) -> Self {
        let new_index = |of: &dyn Fn(&PoolMember) -> bool| {
            let members = members.iter().enumerate().filter(|(_, member)| of(member));
            let members: Vec<_> = members.map(|(index, member)| (index, Arc::clone(member))).collect();
            (!members.is_empty()).then(|| LoadIndex::new(members, leg, by))
        };
        let both = |of: &dyn Fn(&PoolMember) -> bool| -> Vec<Arc<LoadIndex>> {
            let with = |preferred| {
                new_index(&|member: &PoolMember| of(member) && member.is_preferred() == preferred)
            };
            [true, false].into_iter().filter_map(with).collect()
        };
        let mut pairs = HashMap::new();
        for pair in members.iter().filter_map(|member| member.pair()) {
            pairs.entry(pair).or_insert_with(|| both(&|member| member.pair() == Some(pair)));
        }
        Self { all: both(&|_| true), pairs }
    }

    pub(super) fn all(&self) -> &[Arc<LoadIndex>] {
        &self.all
    }

    /// The members with these pair labels.
    pub(super) fn of_pair(&self, pair: Option<u64>) -> &[Arc<LoadIndex>] {
        pair.and_then(|pair| self.pairs.get(&pair)).map(Vec::as_slice).unwrap_or_default()
    }

    /// Members whose health permits requests.
    pub(super) fn in_use(&self) -> usize {
        self.all.iter().map(|index| index.in_use()).sum()
    }

    /// This router's requests at the member with the fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        self.all.iter().filter_map(|index| index.least_own()).min()
    }
}
