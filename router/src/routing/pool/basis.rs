//! What a choice was made from, as far as people are told: of a large pool a few engines only, by their indices. What
//! they are called is looked up when somebody asks, so that a choice among a thousand touches the engine that it takes
//! and no other.

use std::sync::Arc;

use super::board::{Board, View};
use super::member::{Fit, Look, Member};
use super::{NAMED, Pool};
use crate::admission::Scarce;
use crate::engines::caches::Holding;
use crate::message::features::Wanted;
use crate::routing::explain::{Considered, Removed, Sight};
use crate::routing::policy::{Candidate, Candidates, Choice};

/// Engines that are looked at for those that suit less.
const LOOKED_AT: usize = 64;

/// What a choice was made from.
#[derive(Default)]
pub(super) struct Basis {
    /// How many could be chosen.
    pub candidates: usize,
    /// Some of them; the chosen one and one with the least load are among them.
    pub named: Vec<Candidate>,
    /// Some that could not.
    pub others: Vec<(usize, Fit)>,
}

impl Pool {
    /// Of a choice on a board.
    pub(super) fn seen(&self, view: &View<'_>, board: &Board, choice: Choice, look: &Look<'_>) -> Basis {
        let mut named = view.few(NAMED);
        if !named.iter().any(|candidate| candidate.index == choice.index) {
            named.truncate(NAMED - 1);
            named.extend(view.candidate(choice.index));
        }
        let mut others = view.few_not_ready(NAMED);
        if board.len() < self.members.len() && others.len() < NAMED {
            // Those that suit less.
            let less = (0..self.members.len()).take(LOOKED_AT).filter(|index| !board.has(*index));
            let less = less.take(NAMED - others.len()).map(|index| (index, self.members[index].fit(look)));
            others.extend(less);
            others.sort_unstable_by_key(|(index, _)| *index);
        }
        Basis { candidates: view.count(), named, others }
    }

    /// Of a walk over all members, some of which were `candidates`.
    pub(super) fn walked(&self, candidates: Vec<Candidate>, look: &Look<'_>) -> Basis {
        let calm = Look { panic: false, ..*look };
        let is_candidate = |index: usize| candidates.binary_search_by_key(&index, |c| c.index).is_ok();
        let others = self.members.iter().enumerate().filter(|(index, _)| !is_candidate(*index)).take(NAMED);
        let why = |(index, member): (usize, &Arc<Member>)| (index, member.fit(&calm));
        Basis { others: others.map(why).collect(), candidates: candidates.len(), named: candidates }
    }

    /// `holding`: what the chosen one holds of the prompt.
    pub(super) fn sight(
        &self,
        wanted: &Wanted<'_>,
        basis: Basis,
        choice: Result<Choice, Scarce>,
        holding: Holding,
    ) -> Sight {
        let chosen = choice.ok().map(|choice| choice.index);
        let Basis { candidates, mut named, others } = basis;
        if named.len() > NAMED {
            named.select_nth_unstable_by_key(NAMED, |c| (Some(c.index) != chosen, c.requests, c.index));
            named.truncate(NAMED);
        }
        let more = candidates.saturating_sub(named.len());
        let scores = self.policy.scores(wanted, &named);
        let scored = named.into_iter().zip(scores);
        Sight {
            engines: Arc::clone(&self.names),
            policy: self.policy_name,
            more,
            more_removed: (self.members.len() - candidates).saturating_sub(others.len()),
            considered: scored.map(|(candidate, score)| Considered { candidate, score }).collect(),
            removed: others.into_iter().map(|(index, why)| Removed { index, why }).collect(),
            result: choice.map(|choice| (choice.index, choice.reason)),
            holding,
            chunks: wanted.prefix.len(),
            blocks: wanted.blocks.len(),
        }
    }
}
