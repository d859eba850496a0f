//! The multi-connector under every order of events.

use std::collections::BTreeSet;

use super::*;

const PD: Child = Child(0);
const OFFLOAD: Child = Child(1);

fn new(policy: LoadFailurePolicy) -> MultiConnectorRequest {
    MultiConnectorRequest::new(Children::first(2), policy)
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
    assert_eq!(multi.apply(Event::LoadFailed(PD)), [Action::RetryLookup]);
    assert_eq!(multi.apply(Event::Load(both())), [Action::LoadFrom(OFFLOAD)]);
    assert_eq!(multi.apply(Event::LoadFailed(OFFLOAD)), [Action::RetryLookup]);
    assert_eq!(multi.apply(Event::Load(both())), [Action::Compute]);
}

#[test]
fn a_failed_load_under_policy_fail_is_not_retried() {
    let mut multi = new(LoadFailurePolicy::Fail);
    multi.apply(Event::Load(both()));
    assert_eq!(multi.apply(Event::LoadFailed(PD)), [Action::Fail(PD)]);
}

#[test]
fn blocks_are_freed_after_the_last_holder() {
    for (first, last) in [(PD, OFFLOAD), (OFFLOAD, PD)] {
        let mut multi = new(LoadFailurePolicy::Recompute);
        assert_eq!(multi.apply(Event::Finish), [Action::FinishChild(PD), Action::FinishChild(OFFLOAD)]);
        assert_eq!(multi.apply(Event::Abort), [], "no child is asked twice");
        assert_eq!(multi.apply(Event::Replied(PD, ChildReply::Holds)), []);
        assert_eq!(multi.apply(Event::Replied(OFFLOAD, ChildReply::Holds)), []);
        assert_eq!(multi.apply(Event::Released(first)), []);
        assert_eq!(multi.apply(Event::Released(first)), [], "once");
        assert_eq!(multi.apply(Event::Released(last)), [Action::FreeBlocks]);
        assert_eq!(multi.apply(Event::Released(last)), []);
        assert_eq!(multi.ignored(), 3);
    }
}

#[test]
fn a_child_that_releases_before_its_reply_holds_no_blocks() {
    let mut multi = new(LoadFailurePolicy::Recompute);
    multi.apply(Event::Finish);
    multi.apply(Event::Replied(PD, ChildReply::Nothing));
    assert_eq!(multi.apply(Event::Released(OFFLOAD)), [Action::FreeBlocks]);
    assert_eq!(multi.apply(Event::Replied(OFFLOAD, ChildReply::Holds)), []);
    assert!(multi.is_free());
}

#[test]
fn a_notice_goes_to_the_first_child_with_the_handoff() {
    let mut asked = Vec::new();
    let answer = first_reply([0, 1, 2], |child| {
        asked.push(child);
        (child >= 1).then_some(child)
    });
    assert_eq!((answer, asked.as_slice()), (Some(1), &[0, 1][..]), "in order, and no child after it");
    assert_eq!(first_reply([0, 1], |_| None::<u8>), None);
}

#[test]
fn children_beyond_the_bound_are_in_no_set() {
    assert!(!Children::first(CHILDREN_MAX).contains(Child(200)));
    let mut multi = new(LoadFailurePolicy::Recompute);
    multi.apply(Event::Released(Child(200)));
    multi.apply(Event::Replied(Child(200), ChildReply::Holds));
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
    Event::Replied(PD, ChildReply::Holds),
    Event::Replied(PD, ChildReply::Nothing),
    Event::Replied(OFFLOAD, ChildReply::Holds),
    Event::Replied(OFFLOAD, ChildReply::Nothing),
    Event::Released(PD),
    Event::Released(OFFLOAD),
    Event::Released(Child(3)),
];

fn copy(multi: &MultiConnectorRequest) -> MultiConnectorRequest {
    MultiConnectorRequest { ignored: 0, ..*multi }
}

/// The state that an owner derives from the actions so far.
#[derive(Clone, Debug, Default)]
struct MultiOwner {
    asked: Children,
    loading: Option<Child>,
    over: bool,
    free: bool,
}

impl MultiOwner {
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
                Action::Compute | Action::RetryLookup | Action::Fail(_) => assert!(!self.over),
                Action::FinishChild(child) => {
                    assert!(self.over && !self.asked.contains(child), "each child is asked once");
                    self.asked = self.asked.with(child);
                }
                Action::FreeBlocks => {
                    assert!(!self.free && self.asked == both(), "free once, after every child was asked");
                    self.free = true;
                }
            }
        }
    }
}

/// Explores every state that any sequence of events can reach.
#[test]
fn every_child_is_called_once_and_blocks_are_freed_once_in_every_order_of_events() {
    for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
        let mut seen = BTreeSet::new();
        let mut edge = vec![(new(policy), MultiOwner::default())];
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
            for event in [Event::Abort, Event::Released(PD), Event::Released(OFFLOAD)] {
                let actions = multi.apply(event);
                owner.act(event, &actions);
            }
            assert!(multi.is_free() && owner.free, "every block is freed");
        }
        assert!(seen.len() > 20, "{} states", seen.len());
    }
}
