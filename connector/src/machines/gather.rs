//! The gatherer: combines the links of one fetch into one transfer.
//!
//! ```text
//! Reading ─ every link has its bytes ─▶ Verifying ─ every verdict valid ─▶ Ended: valid
//!    │                                      └ another verdict, or none ──▶ Ended: gone or unknown
//!    └ a link or its verdict failed ─▶ Stopping ─ no link writes any more ─▶ Ended: failed
//!                                      (the stop flag of the other links is raised)
//! ```
//!
//! Each link's worker reads, reports, requests the verdict of its link and reports that. The request's
//! [`crate::machines::fetch::Fetch`] sees one transfer. The transfer is done when all links are done. It has failed
//! when one link failed and the others have stopped. It is valid only if the verdict of every link is.
//!
//! Invariants:
//! - The end of the transfer is reported only when no link may still write (invariant 3).
//! - The gatherer returns at most one [`Action::Transfer`] and then one [`Action::Verdict`]. A verdict follows only a
//!   transfer that was done, as [`crate::machines::fetch::Fetch`] expects of one worker.
//! - A link counts once: it reports, or its owner reports it lost ([`Event::Lost`]). A lost link blocks no other.
//! - A repeated or late report changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/gather.txt`.

use crate::machines::fetch::{FailureKind, Verification};

/// A report of a link's worker, or of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The link has all its bytes and writes no more.
    Done,
    /// The link ended without all its bytes and writes no more.
    Failed(FailureKind),
    /// The producer's answer to the link's "done", or its absence.
    Verdict(Verification),
    /// The link's worker ended without a report. It writes no more, and no further report follows.
    Lost,
}

/// What the owner of the gatherer must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Raise the stop flag that the links of this fetch share.
    StopOthers,
    /// Report to the fetch that every byte has arrived, or the failure. No link writes any more.
    Transfer(Result<(), FailureKind>),
    /// Report to the fetch whether the bytes may be used.
    Verdict(Verification),
}

/// The actions of one event, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherActions([Option<Action>; 2]);

impl GatherActions {
    fn push(&mut self, action: Action) {
        let free = self.0.iter_mut().find(|slot| slot.is_none());
        *free.expect("no event asks for more than two things") = Some(action);
    }

    /// The actions, in order.
    pub fn iter(&self) -> impl Iterator<Item = Action> + '_ {
        self.0.iter().flatten().copied()
    }
}

/// State of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LinkState {
    /// The link may write.
    Reading,
    /// The bytes have arrived; the verdict is pending.
    Done,
    /// The link has ended, with or without success. No further report is expected.
    Ended(Option<Verification>),
}

/// State of a gatherer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Links write.
    Reading,
    /// One link has failed; others may still write.
    Stopping(FailureKind),
    /// Every byte has arrived; verdicts are pending.
    Verifying,
    /// The result is reported.
    Ended,
}

/// The links of one fetch. Not `Clone`: the landing blocks of a fetch are freed once.
#[derive(Debug)]
pub struct Gatherer {
    state: State,
    links: Vec<LinkState>,
    ignored: u32,
}

impl Gatherer {
    /// A fetch of `links` links (at least one), all of them reading.
    #[must_use]
    pub fn new(links: usize) -> Self {
        Self { state: State::Reading, links: vec![LinkState::Reading; links.max(1)], ignored: 0 }
    }

    /// Current state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the result is reported, and no further action follows.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state == State::Ended
    }

    /// Whether any link may still write into landing blocks.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.links.contains(&LinkState::Reading)
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Applies one link's report. Every event is allowed in every state, for any link number.
    pub fn apply(&mut self, link: usize, event: Event) -> GatherActions {
        let Some(slot) = self.links.get_mut(link) else {
            return self.ignore();
        };
        let failure = match (*slot, event) {
            (LinkState::Reading, Event::Done) => {
                *slot = LinkState::Done;
                None
            }
            (LinkState::Reading, Event::Failed(kind)) => {
                *slot = LinkState::Ended(None);
                Some(kind)
            }
            (LinkState::Reading, Event::Lost) => {
                *slot = LinkState::Ended(None);
                Some(FailureKind::Transfer)
            }
            (LinkState::Done, Event::Verdict(answer)) => {
                *slot = LinkState::Ended(Some(answer));
                failure_of(answer)
            }
            (LinkState::Done, Event::Lost) => {
                *slot = LinkState::Ended(Some(Verification::Unknown));
                failure_of(Verification::Unknown)
            }
            (LinkState::Reading, Event::Verdict(_))
            | (LinkState::Done, Event::Done | Event::Failed(_))
            | (LinkState::Ended(_), Event::Done | Event::Failed(_) | Event::Verdict(_) | Event::Lost) => {
                return self.ignore();
            }
        };
        self.advance(failure)
    }

    /// Advances the state after a report of one link, which may be a failure.
    fn advance(&mut self, failure: Option<FailureKind>) -> GatherActions {
        let mut actions = GatherActions::default();
        if let (State::Reading, Some(kind)) = (self.state, failure)
            && self.is_writing()
        {
            self.state = State::Stopping(kind);
            actions.push(Action::StopOthers);
            return actions;
        }
        if self.is_writing() {
            return actions;
        }
        match self.state {
            State::Reading => match failure {
                // The last link that wrote has failed: there is no link to stop.
                Some(kind) if self.links.contains(&LinkState::Ended(None)) => self.fail(kind, &mut actions),
                _ => {
                    self.state = State::Verifying;
                    actions.push(Action::Transfer(Ok(())));
                    self.report_verdict(&mut actions);
                }
            },
            State::Stopping(kind) => self.fail(kind, &mut actions),
            State::Verifying => self.report_verdict(&mut actions),
            // Verdicts of links that finished before the failure of another link.
            State::Ended => {}
        }
        actions
    }

    fn fail(&mut self, kind: FailureKind, actions: &mut GatherActions) {
        self.state = State::Ended;
        actions.push(Action::Transfer(Err(kind)));
    }

    /// Reports the verdict once every link has one, or one is not "valid".
    fn report_verdict(&mut self, actions: &mut GatherActions) {
        let answers = || {
            self.links
                .iter()
                .filter_map(|link| if let LinkState::Ended(answer) = link { *answer } else { None })
        };
        let verdict = if answers().any(|answer| answer == Verification::Gone) {
            Verification::Gone
        } else if answers().any(|answer| answer == Verification::Unknown) {
            Verification::Unknown
        } else if self.links.contains(&LinkState::Done) {
            return;
        } else {
            Verification::Valid
        };
        self.state = State::Ended;
        actions.push(Action::Verdict(verdict));
    }

    fn ignore(&mut self) -> GatherActions {
        self.ignored = self.ignored.saturating_add(1);
        GatherActions::default()
    }
}

/// A failed verdict counts as a failed link: the other links need not continue.
fn failure_of(answer: Verification) -> Option<FailureKind> {
    match answer {
        Verification::Valid => None,
        Verification::Gone => Some(FailureKind::Gone),
        Verification::Unknown => Some(FailureKind::Unverified),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: FailureKind = FailureKind::Gone;

    fn apply(gather: &mut Gatherer, link: usize, event: Event) -> Vec<Action> {
        gather.apply(link, event).iter().collect()
    }

    #[test]
    fn a_fetch_of_one_link_has_the_verdict_of_the_link() {
        let mut gather = Gatherer::new(1);
        assert_eq!(apply(&mut gather, 0, Event::Done), [Action::Transfer(Ok(()))]);
        assert_eq!(
            apply(&mut gather, 0, Event::Verdict(Verification::Valid)),
            [Action::Verdict(Verification::Valid)]
        );
        let mut gather = Gatherer::new(1);
        assert_eq!(apply(&mut gather, 0, Event::Failed(GONE)), [Action::Transfer(Err(GONE))]);
        assert!(gather.is_over());
    }

    #[test]
    fn a_fetch_is_done_when_all_links_are_and_valid_when_all_verdicts_are() {
        let mut gather = Gatherer::new(3);
        for (link, event) in [(1, Event::Done), (1, Event::Verdict(Verification::Valid)), (0, Event::Done)] {
            assert_eq!(apply(&mut gather, link, event), []);
        }
        assert_eq!(apply(&mut gather, 2, Event::Done), [Action::Transfer(Ok(()))]);
        assert_eq!(apply(&mut gather, 2, Event::Verdict(Verification::Valid)), []);
        assert_eq!(
            apply(&mut gather, 0, Event::Verdict(Verification::Valid)),
            [Action::Verdict(Verification::Valid)]
        );
    }

    #[test]
    fn one_failed_link_stops_the_others_and_waits_for_them() {
        let mut gather = Gatherer::new(3);
        assert_eq!(apply(&mut gather, 1, Event::Failed(GONE)), [Action::StopOthers]);
        assert_eq!(apply(&mut gather, 0, Event::Done), [], "it was faster than the flag");
        assert_eq!(apply(&mut gather, 0, Event::Verdict(Verification::Valid)), []);
        let last = apply(&mut gather, 2, Event::Failed(FailureKind::Transfer));
        assert_eq!(last, [Action::Transfer(Err(GONE))], "the first failure is the reason");
    }

    #[test]
    fn a_lost_worker_fails_its_link_and_the_fetch_ends() {
        let mut gather = Gatherer::new(2);
        assert_eq!(apply(&mut gather, 0, Event::Done), []);
        assert_eq!(apply(&mut gather, 1, Event::Lost), [Action::Transfer(Err(FailureKind::Transfer))]);
        let mut gather = Gatherer::new(2);
        apply(&mut gather, 0, Event::Done);
        apply(&mut gather, 1, Event::Done);
        assert_eq!(apply(&mut gather, 0, Event::Lost), [Action::Verdict(Verification::Unknown)]);
        assert_eq!(apply(&mut gather, 0, Event::Lost), []);
        assert_eq!((apply(&mut gather, 7, Event::Done), gather.ignored()), (vec![], 2));
    }

    /// Every order of seven events out of ten kinds (two links): ten million runs.
    #[test]
    fn every_order_of_reports_ends_at_most_once_and_never_while_a_link_writes() {
        let kinds = [
            Event::Done,
            Event::Failed(FailureKind::Transfer),
            Event::Verdict(Verification::Valid),
            Event::Verdict(Verification::Gone),
            Event::Lost,
        ];
        let events: Vec<_> = [0, 1].into_iter().flat_map(|link| kinds.map(|event| (link, event))).collect();
        let (mut order, mut runs) = ([0_usize; 7], 0_u64);
        loop {
            run(&events, &order);
            runs += 1;
            let Some(digit) = order.iter().position(|&d| d + 1 < events.len()) else { break };
            order[digit] += 1;
            order[..digit].fill(0);
        }
        assert_eq!(runs, 10_000_000);
    }

    fn run(events: &[(usize, Event)], order: &[usize]) {
        let mut gather = Gatherer::new(2);
        // The effective reports of each link: the first one, and the verdict after "done".
        let (mut quiet, mut valid) = ([None; 2], [None; 2]);
        let (mut transfer, mut verdict) = (None, None);
        for &i in order {
            let (link, event) = events[i];
            match event {
                Event::Done | Event::Failed(_) if quiet[link].is_none() => {
                    quiet[link] = Some(event == Event::Done)
                }
                Event::Lost if quiet[link].is_none() => quiet[link] = Some(false),
                Event::Lost if quiet[link] == Some(true) && valid[link].is_none() => {
                    valid[link] = Some(false)
                }
                Event::Verdict(answer) if quiet[link] == Some(true) && valid[link].is_none() => {
                    valid[link] = Some(answer == Verification::Valid);
                }
                _ => {}
            }
            for action in gather.apply(link, event).iter() {
                match action {
                    Action::StopOthers => assert!(quiet.contains(&None) && transfer.is_none()),
                    Action::Transfer(result) => {
                        assert_eq!(transfer.replace(result), None, "said twice");
                        assert!(!quiet.contains(&None), "a link may still write");
                        assert!(result.is_err() || quiet == [Some(true); 2]);
                    }
                    Action::Verdict(answer) => {
                        assert_eq!(verdict.replace(answer), None, "said twice");
                        assert_eq!(transfer, Some(Ok(())), "a verdict about bytes that are not here");
                        assert_eq!(answer == Verification::Valid, valid == [Some(true); 2]);
                    }
                }
            }
        }
        // Links without a report so far are lost. Then the fetch is over.
        for link in [0, 1, 0, 1] {
            for action in gather.apply(link, Event::Lost).iter() {
                transfer =
                    transfer.or(if let Action::Transfer(result) = action { Some(result) } else { None });
                verdict = verdict.or(if let Action::Verdict(answer) = action { Some(answer) } else { None });
            }
        }
        assert!(gather.is_over() && transfer.is_some() && (verdict.is_some() == (transfer == Some(Ok(())))));
    }
}
