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
    /// Members by their compatibility, if the model has a label for it.
    compatible: HashMap<u64, Vec<Arc<LoadIndex>>>,
    /// Members by their compatibility and the hash of their pair labels.
    pairs: HashMap<(Option<u64>, u64), Vec<Arc<LoadIndex>>>,
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
        let (mut compatible, mut pairs) = (HashMap::new(), HashMap::new());
        for member in members {
            let compatibility = member.compatibility();
            if let Some(value) = compatibility {
                compatible
                    .entry(value)
                    .or_insert_with(|| both(&|other| other.compatibility() == compatibility));
            }
            if let Some(pair) = member.pair() {
                let same =
                    |other: &PoolMember| other.compatibility() == compatibility && other.pair() == Some(pair);
                pairs.entry((compatibility, pair)).or_insert_with(|| both(&same));
            }
        }
        Self { all: both(&|_| true), compatible, pairs }
    }

    /// The compatibilities of the members; none if the model has no label for it.
    pub(super) fn compatibilities(&self) -> Vec<u64> {
        self.compatible.keys().copied().collect()
    }

    /// The members of this compatibility; `None`: all members.
    pub(super) fn compatible(&self, required: Option<u64>) -> &[Arc<LoadIndex>] {
        match required {
            None => &self.all,
            Some(required) => self.compatible.get(&required).map(Vec::as_slice).unwrap_or_default(),
        }
    }

    /// The members of this compatibility with these pair labels.
    pub(super) fn of_pair(&self, compatibility: Option<u64>, pair: Option<u64>) -> &[Arc<LoadIndex>] {
        let paired = pair.and_then(|pair| self.pairs.get(&(compatibility, pair)));
        paired.map(Vec::as_slice).unwrap_or_default()
    }

    /// Members of this compatibility whose health permits requests.
    pub(super) fn in_use(&self, compatibility: Option<u64>) -> usize {
        self.compatible(compatibility).iter().map(|index| index.in_use()).sum()
    }

    /// This router's requests at the member of this compatibility with the fewest.
    pub(super) fn least_own(&self, compatibility: Option<u64>) -> Option<u32> {
        self.compatible(compatibility).iter().filter_map(|index| index.least_own()).min()
    }
}
