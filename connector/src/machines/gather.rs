//! The gatherer: one fetch that reads over several links, seen as one.
//!
//! ```text
//! Reading ─ every link has its bytes ─▶ Verifying ─ every verdict valid ─▶ Over: valid
//!    │                                      └ another verdict, or none ──▶ Over: gone or unknown
//!    └ a link failed, or its verdict ─▶ Stopping ─ nobody writes any more ─▶ Over: failed
//!                                       (the others are told to stop)
//! ```
//!
//! Each link's worker reads, reports, asks for its own verdict and reports that. The [`crate::machines::fetch::Fetch`] of the
//! request hears of one transfer: done when all are done, failed when one failed and the others are quiet, valid
//! only if every link's verdict is.
//!
//! Invariants:
//! - Nothing is said about the end of the transfer while any link may still write (invariant 3).
//! - At most one [`Action::Transfer`] and one [`Action::Verdict`] leave it, in this order, and a verdict only after
//!   a transfer that was done: what [`crate::machines::fetch::Fetch`] expects of one worker.
//! - A link counts once: it reports, or it is declared lost ([`Event::Lost`]), and then its silence holds nobody.
//! - Whatever repeats, or comes too late, changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/gather.txt`.

use crate::machines::fetch::{Answer, FailureKind};

/// What a link, or whoever watches it, reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The link has all its bytes. Nothing writes for it any more.
    Done,
    /// It ended without. Nothing writes for it any more.
    Failed(FailureKind),
    /// The producer's answer to its "done", or that there is none.
    Verdict(Answer),
    /// Its worker is gone without a word: nothing writes for it any more, and nothing more will be said.
    Lost,
}

/// What the owner of the gatherer must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Raise the stop flag that the links of this fetch share.
    StopOthers,
    /// Tell the fetch: every byte is here, or why not. Nothing writes any more.
    Transfer(Result<(), FailureKind>),
    /// Tell the fetch whether the bytes may be used.
    Verdict(Answer),
}

/// What one event asks for, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions([Option<Action>; 2]);

impl Actions {
    fn push(&mut self, action: Action) {
        let free = self.0.iter_mut().find(|slot| slot.is_none());
        *free.expect("no event asks for more than two things") = Some(action);
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = Action> + '_ {
        self.0.iter().flatten().copied()
    }
}

/// Where one link stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Link {
    /// It may write.
    Reading,
    /// Its bytes are here; the verdict is not.
    Done,
    /// It is over, with or without success: nothing more is expected of it.
    Over(Option<Answer>),
}

/// Where a gatherer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Links write.
    Reading,
    /// One has failed; others may still write.
    Stopping(FailureKind),
    /// Every byte is here; not every verdict.
    Verifying,
    /// Everything has been said.
    Over,
}

/// See the module's documentation. Not `Clone`: it stands for one fetch's landing blocks.
#[derive(Debug)]
pub struct Gather {
    state: State,
    links: Vec<Link>,
    ignored: u32,
}

impl Gather {
    /// A fetch of `links` links (at least one), all of them reading.
    #[must_use]
    pub fn new(links: usize) -> Self {
        Self { state: State::Reading, links: vec![Link::Reading; links.max(1)], ignored: 0 }
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether everything has been said, and nothing more will be asked for.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Whether any link may still write into landing blocks.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.links.contains(&Link::Reading)
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// Takes one link's report. Every event is allowed in every state, from any number.
    pub fn apply(&mut self, link: usize, event: Event) -> Actions {
        let Some(slot) = self.links.get_mut(link) else {
            return self.ignore();
        };
        let failure = match (*slot, event) {
            (Link::Reading, Event::Done) => {
                *slot = Link::Done;
                None
            }
            (Link::Reading, Event::Failed(kind)) => {
                *slot = Link::Over(None);
                Some(kind)
            }
            (Link::Reading, Event::Lost) => {
                *slot = Link::Over(None);
                Some(FailureKind::Transfer)
            }
            (Link::Done, Event::Verdict(answer)) => {
                *slot = Link::Over(Some(answer));
                failure_of(answer)
            }
            (Link::Done, Event::Lost) => {
                *slot = Link::Over(Some(Answer::Unknown));
                failure_of(Answer::Unknown)
            }
            (Link::Reading, Event::Verdict(_))
            | (Link::Done, Event::Done | Event::Failed(_))
            | (Link::Over(_), Event::Done | Event::Failed(_) | Event::Verdict(_) | Event::Lost) => {
                return self.ignore();
            }
        };
        self.advance(failure)
    }

    /// What follows for the whole from a link that has moved, and has perhaps failed.
    fn advance(&mut self, failure: Option<FailureKind>) -> Actions {
        let mut actions = Actions::default();
        if let (State::Reading, Some(kind)) = (self.state, failure)
            && self.writes()
        {
            self.state = State::Stopping(kind);
            actions.push(Action::StopOthers);
            return actions;
        }
        if self.writes() {
            return actions;
        }
        match self.state {
            State::Reading => match failure {
                // The last link that wrote has failed: nobody has to be stopped.
                Some(kind) if self.links.contains(&Link::Over(None)) => self.fail(kind, &mut actions),
                _ => {
                    self.state = State::Verifying;
                    actions.push(Action::Transfer(Ok(())));
                    self.judge(&mut actions);
                }
            },
            State::Stopping(kind) => self.fail(kind, &mut actions),
            State::Verifying => self.judge(&mut actions),
            // Verdicts of links that were faster than the one that failed.
            State::Over => {}
        }
        actions
    }

    fn fail(&mut self, kind: FailureKind, actions: &mut Actions) {
        self.state = State::Over;
        actions.push(Action::Transfer(Err(kind)));
    }

    /// Every byte is here: says the verdict once every link has one, or one is not "valid".
    fn judge(&mut self, actions: &mut Actions) {
        let answers = || {
            self.links.iter().filter_map(|link| if let Link::Over(answer) = link { *answer } else { None })
        };
        let verdict = if answers().any(|answer| answer == Answer::Gone) {
            Answer::Gone
        } else if answers().any(|answer| answer == Answer::Unknown) {
            Answer::Unknown
        } else if self.links.contains(&Link::Done) {
            return;
        } else {
            Answer::Valid
        };
        self.state = State::Over;
        actions.push(Action::Verdict(verdict));
    }

    fn ignore(&mut self) -> Actions {
        self.ignored = self.ignored.saturating_add(1);
        Actions::default()
    }
}

/// Bytes that may not be used are as good as bytes that never came: the other links need not go on.
fn failure_of(answer: Answer) -> Option<FailureKind> {
    match answer {
        Answer::Valid => None,
        Answer::Gone => Some(FailureKind::Gone),
        Answer::Unknown => Some(FailureKind::Unverified),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: FailureKind = FailureKind::Gone;

    fn apply(gather: &mut Gather, link: usize, event: Event) -> Vec<Action> {
        gather.apply(link, event).iter().collect()
    }

    #[test]
    fn a_fetch_of_one_link_says_what_the_link_says() {
        let mut gather = Gather::new(1);
        assert_eq!(apply(&mut gather, 0, Event::Done), [Action::Transfer(Ok(()))]);
        assert_eq!(apply(&mut gather, 0, Event::Verdict(Answer::Valid)), [Action::Verdict(Answer::Valid)]);
        let mut gather = Gather::new(1);
        assert_eq!(apply(&mut gather, 0, Event::Failed(GONE)), [Action::Transfer(Err(GONE))]);
        assert!(gather.is_over());
    }

    #[test]
    fn a_fetch_is_done_when_all_links_are_and_valid_when_all_verdicts_are() {
        let mut gather = Gather::new(3);
        for (link, event) in [(1, Event::Done), (1, Event::Verdict(Answer::Valid)), (0, Event::Done)] {
            assert_eq!(apply(&mut gather, link, event), []);
        }
        assert_eq!(apply(&mut gather, 2, Event::Done), [Action::Transfer(Ok(()))]);
        assert_eq!(apply(&mut gather, 2, Event::Verdict(Answer::Valid)), []);
        assert_eq!(apply(&mut gather, 0, Event::Verdict(Answer::Valid)), [Action::Verdict(Answer::Valid)]);
    }

    #[test]
    fn one_failure_stops_the_others_and_waits_for_them() {
        let mut gather = Gather::new(3);
        assert_eq!(apply(&mut gather, 1, Event::Failed(GONE)), [Action::StopOthers]);
        assert_eq!(apply(&mut gather, 0, Event::Done), [], "it was faster than the flag");
        assert_eq!(apply(&mut gather, 0, Event::Verdict(Answer::Valid)), []);
        let last = apply(&mut gather, 2, Event::Failed(FailureKind::Transfer));
        assert_eq!(last, [Action::Transfer(Err(GONE))], "the first failure is the reason");
    }

    #[test]
    fn a_lost_worker_holds_nobody() {
        let mut gather = Gather::new(2);
        assert_eq!(apply(&mut gather, 0, Event::Done), []);
        assert_eq!(apply(&mut gather, 1, Event::Lost), [Action::Transfer(Err(FailureKind::Transfer))]);
        let mut gather = Gather::new(2);
        apply(&mut gather, 0, Event::Done);
        apply(&mut gather, 1, Event::Done);
        assert_eq!(apply(&mut gather, 0, Event::Lost), [Action::Verdict(Answer::Unknown)]);
        assert_eq!(apply(&mut gather, 0, Event::Lost), []);
        assert_eq!((apply(&mut gather, 7, Event::Done), gather.ignored()), (vec![], 2));
    }

    /// Every order of seven events out of ten kinds (two links): ten million runs.
    #[test]
    fn every_order_of_reports_ends_at_most_once_and_never_while_a_link_writes() {
        let kinds = [
            Event::Done,
            Event::Failed(FailureKind::Transfer),
            Event::Verdict(Answer::Valid),
            Event::Verdict(Answer::Gone),
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
        let mut gather = Gather::new(2);
        // What a link has truly said: its first report, and the verdict after "done".
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
                    valid[link] = Some(answer == Answer::Valid);
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
                        assert_eq!(answer == Answer::Valid, valid == [Some(true); 2]);
                    }
                }
            }
        }
        // Whoever has not reported by now is lost; then it is over.
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
