//! The multi-connector under every order of events.

use std::collections::BTreeSet;

use super::*;

const PD: Child = Child(0);
const OFFLOAD: Child = Child(1);

fn new(policy: LoadFailurePolicy) -> Multi {
    Multi::new(Children::first(2), policy)
}

fn both() -> Children {
    Children::first(2)
}

#[test]
fn the_first_child_that_has_the_prefix_loads_it() {
    let mut multi = new(LoadFailurePolicy::Recompute);
    assert_eq!(multi.apply(Event::Load(both())), [Action::LoadFrom(PD)]);
    let mut multi = new(LoadFailurePolicy::Recompute);
    assert_eq!(multi.apply(Event::Load(Children::NONE.with(OFFLOAD))), [Action::LoadFrom(OFFLOAD)]);
    let mut multi = new(LoadFailurePolicy::Recompute);
    assert_eq!(multi.apply(Event::Load(Children::NONE)), [Action::Compute]);
}

#[test]
fn offload_is_the_fallback_of_a_handoff_that_failed_and_computing_is_the_last() {
    let mut multi = new(LoadFailurePolicy::Recompute);
    multi.apply(Event::Load(both()));
    assert_eq!(multi.apply(Event::LoadFailed(PD)), [Action::LookAgain]);
    assert_eq!(multi.apply(Event::Load(both())), [Action::LoadFrom(OFFLOAD)]);
    assert_eq!(multi.apply(Event::LoadFailed(OFFLOAD)), [Action::LookAgain]);
    assert_eq!(multi.apply(Event::Load(both())), [Action::Compute]);
}

#[test]
fn where_the_policy_is_to_fail_nobody_else_is_asked() {
    let mut multi = new(LoadFailurePolicy::Fail);
    multi.apply(Event::Load(both()));
    assert_eq!(multi.apply(Event::LoadFailed(PD)), [Action::Fail(PD)]);
}

#[test]
fn the_blocks_come_back_when_the_last_holder_lets_go() {
    for (first, last) in [(PD, OFFLOAD), (OFFLOAD, PD)] {
        let mut multi = new(LoadFailurePolicy::Recompute);
        assert_eq!(multi.apply(Event::Finish), [Action::Ask(PD), Action::Ask(OFFLOAD)]);
        assert_eq!(multi.apply(Event::Abort), [], "nobody is asked twice");
        assert_eq!(multi.apply(Event::Answered(PD, Answer::Holds)), []);
        assert_eq!(multi.apply(Event::Answered(OFFLOAD, Answer::Holds)), []);
        assert_eq!(multi.apply(Event::LetGo(first)), []);
        assert_eq!(multi.apply(Event::LetGo(first)), [], "once");
        assert_eq!(multi.apply(Event::LetGo(last)), [Action::FreeBlocks]);
        assert_eq!(multi.apply(Event::LetGo(last)), []);
        assert_eq!(multi.ignored(), 3);
    }
}

#[test]
fn a_child_that_lets_go_before_its_answer_arrives_holds_nothing() {
    let mut multi = new(LoadFailurePolicy::Recompute);
    multi.apply(Event::Finish);
    multi.apply(Event::Answered(PD, Answer::Nothing));
    assert_eq!(multi.apply(Event::LetGo(OFFLOAD)), [Action::FreeBlocks]);
    assert_eq!(multi.apply(Event::Answered(OFFLOAD, Answer::Holds)), []);
    assert!(multi.is_free());
}

#[test]
fn a_notice_goes_to_the_first_child_that_knows_the_handoff() {
    let mut asked = Vec::new();
    let answer = first_that_knows([0, 1, 2], |child| {
        asked.push(child);
        (child >= 1).then_some(child)
    });
    assert_eq!((answer, asked.as_slice()), (Some(1), &[0, 1][..]), "in order, and nobody after it");
    assert_eq!(first_that_knows([0, 1], |_| None::<u8>), None);
}

#[test]
fn children_beyond_the_bound_are_in_no_set() {
    assert!(!Children::first(CHILDREN_MAX).contains(Child(200)));
    let mut multi = new(LoadFailurePolicy::Recompute);
    multi.apply(Event::LetGo(Child(200)));
    multi.apply(Event::Answered(Child(200), Answer::Holds));
    assert_eq!(multi.ignored(), 2);
}

const EVENTS: [Event; 18] = [
    Event::Load(Children(0)),
    Event::Load(Children(1)),
    Event::Load(Children(2)),
    Event::Load(Children(3)),
    Event::Loaded(PD),
    Event::Loaded(OFFLOAD),
    Event::LoadFailed(PD),
    Event::LoadFailed(OFFLOAD),
    Event::Preempted,
    Event::Finish,
    Event::Abort,
    Event::Answered(PD, Answer::Holds),
    Event::Answered(PD, Answer::Nothing),
    Event::Answered(OFFLOAD, Answer::Holds),
    Event::Answered(OFFLOAD, Answer::Nothing),
    Event::LetGo(PD),
    Event::LetGo(OFFLOAD),
    Event::LetGo(Child(3)),
];

fn copy(multi: &Multi) -> Multi {
    Multi { ignored: 0, ..*multi }
}

/// What the actions so far say, as their owner keeps it.
#[derive(Clone, Debug, Default)]
struct Owner {
    asked: Children,
    loading: Option<Child>,
    over: bool,
    free: bool,
}

impl Owner {
    fn act(&mut self, event: Event, actions: &[Action]) {
        self.over |= matches!(event, Event::Finish | Event::Abort);
        if matches!(event, Event::Loaded(child) | Event::LoadFailed(child) if self.loading == Some(child)) {
            self.loading = None;
        }
        for &action in actions {
            match action {
                Action::LoadFrom(child) => {
                    assert!(!self.over && self.loading.is_none(), "one child loads at a time");
                    self.loading = Some(child);
                }
                Action::Compute | Action::LookAgain | Action::Fail(_) => assert!(!self.over),
                Action::Ask(child) => {
                    assert!(self.over && !self.asked.contains(child), "each child is asked once");
                    self.asked = self.asked.with(child);
                }
                Action::FreeBlocks => {
                    assert!(!self.free && self.asked == both(), "free once, after everybody was asked");
                    self.free = true;
                }
            }
        }
    }
}

/// Every state that any number of events in any order can lead to, until there is no new one.
#[test]
fn every_child_is_asked_once_and_the_blocks_come_back_once_whatever_the_order_of_events() {
    for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
        let mut seen = BTreeSet::new();
        let mut edge = vec![(new(policy), Owner::default())];
        while let Some((multi, owner)) = edge.pop() {
            if !seen.insert(format!("{multi:?} {owner:?}")) {
                continue;
            }
            for event in EVENTS {
                let (mut multi, mut owner) = (copy(&multi), owner.clone());
                let actions = multi.apply(event);
                owner.act(event, &actions);
                edge.push((copy(&multi), owner));
            }
            let (mut multi, mut owner) = (copy(&multi), owner.clone());
            for event in [Event::Abort, Event::LetGo(PD), Event::LetGo(OFFLOAD)] {
                let actions = multi.apply(event);
                owner.act(event, &actions);
            }
            assert!(multi.is_free() && owner.free, "everything comes home");
        }
        assert!(seen.len() > 20, "{} states", seen.len());
    }
}
