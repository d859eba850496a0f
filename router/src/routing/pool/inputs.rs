//! The recorded inputs of a choice, for explanations: a few engines of a large pool, by index. Names are resolved when
//! an explanation is read, so that a choice among a thousand engines touches only the chosen one.

use std::sync::Arc;

use super::load_index::{LoadIndex, LoadIndexView};
use super::member::{ChoiceContext, Eligibility, PoolMember};
use super::{NAMED_MAX, Pool};
use crate::admission::Unavailable;
use crate::engines::caches::CachedPrefix;
use crate::message::features::RoutingFeatures;
use crate::routing::explain::Decision;
use crate::routing::policy::{Candidate, Candidates, Choice};

/// Members that are searched for those with fewer matching labels.
const OTHERS_SEARCHED_MAX: usize = 64;

/// The inputs of a choice.
#[derive(Default)]
pub(super) struct DecisionInputs {
    /// Number of engines that could be chosen.
    pub candidates: usize,
    /// Some of them, including the chosen one and one with the least load.
    pub named: Vec<Candidate>,
    /// Some that could not be chosen.
    pub others: Vec<(usize, Eligibility)>,
}

impl Pool {
    /// The inputs of a choice on a load index.
    pub(super) fn inputs_of_index(
        &self,
        view: &LoadIndexView<'_>,
        load_index: &LoadIndex,
        choice: Choice,
        context: &ChoiceContext<'_>,
    ) -> DecisionInputs {
        let mut named = view.first_ready(NAMED_MAX);
        if !named.iter().any(|candidate| candidate.index == choice.index) {
            named.truncate(NAMED_MAX - 1);
            named.extend(view.candidate(choice.index));
        }
        let mut others = view.first_not_ready(NAMED_MAX);
        if load_index.len() < self.members.len() && others.len() < NAMED_MAX {
            // Members with fewer matching labels.
            let less = (0..self.members.len())
                .take(OTHERS_SEARCHED_MAX)
                .filter(|index| !load_index.contains(*index));
            let less = less
                .take(NAMED_MAX - others.len())
                .map(|index| (index, self.members[index].eligibility(context)));
            others.extend(less);
            others.sort_unstable_by_key(|(index, _)| *index);
        }
        DecisionInputs { candidates: view.count(), named, others }
    }

    /// The inputs of a scan over all members, of which `candidates` could be chosen.
    pub(super) fn inputs_of_scan(
        &self,
        candidates: Vec<Candidate>,
        context: &ChoiceContext<'_>,
    ) -> DecisionInputs {
        let calm = ChoiceContext { panic: false, ..*context };
        let is_candidate = |index: usize| candidates.binary_search_by_key(&index, |c| c.index).is_ok();
        let others =
            self.members.iter().enumerate().filter(|(index, _)| !is_candidate(*index)).take(NAMED_MAX);
        let other = |(index, member): (usize, &Arc<PoolMember>)| (index, member.eligibility(&calm));
        DecisionInputs {
            others: others.map(other).collect(),
            candidates: candidates.len(),
            named: candidates,
        }
    }

    /// `cached`: the part of the prompt that the chosen engine has cached.
    pub(super) fn explain(
        &self,
        features: &RoutingFeatures<'_>,
        inputs: DecisionInputs,
        choice: Result<Choice, Unavailable>,
        cached: CachedPrefix,
    ) -> Decision {
        let chosen = choice.ok().map(|choice| choice.index);
        let DecisionInputs { candidates, mut named, others } = inputs;
        if named.len() > NAMED_MAX {
            named.select_nth_unstable_by_key(NAMED_MAX, |c| (Some(c.index) != chosen, c.requests, c.index));
            named.truncate(NAMED_MAX);
            // A decision is kept for a while.
            named.shrink_to_fit();
        }
        let more = candidates.saturating_sub(named.len());
        let scores = self.policy.scores(features, &named);
        Decision {
            engines: Arc::clone(&self.names),
            policy: self.policy_name,
            more,
            more_removed: (self.members.len() - candidates).saturating_sub(others.len()),
            considered: named,
            scores,
            removed: others,
            result: choice.map(|choice| (choice.index, choice.reason)),
            cached,
            chunks: features.prefix.len(),
            blocks: features.blocks.len(),
        }
    }
}
