//! The offload slot under every order of events.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

const A: TransferId = TransferId(1);
const B: TransferId = TransferId(2);

fn block(id: TransferId, event: BlockEvent) -> Event {
    Event::Block(id, event)
}

fn after(events: &[Event]) -> (OffloadSlot, Vec<Action>) {
    let mut slot = OffloadSlot::new();
    let actions = events.iter().flat_map(|&event| slot.apply(event)).collect();
    (slot, actions)
}

#[test]
fn a_finished_store_releases_its_block() {
    let (slot, actions) = after(&[block(A, BlockEvent::Store), block(A, BlockEvent::Done), Event::Finish]);
    assert_eq!(actions, [Action::Begin(A), Action::ReleaseHold(A), Action::Settled]);
    assert!(slot.is_settled());
}

/// Dynamo #6681: the store finishes in the very step in which the request stops and is aborted.
#[test]
fn stop_abort_and_store_end_in_one_step_give_one_result_in_every_order() {
    let orders = [
        [Event::Finish, Event::Abort, block(A, BlockEvent::Done)],
        [Event::Abort, Event::Finish, block(A, BlockEvent::Done)],
        [Event::Finish, block(A, BlockEvent::Done), Event::Abort],
        [Event::Abort, block(A, BlockEvent::Done), Event::Finish],
        [block(A, BlockEvent::Done), Event::Finish, Event::Abort],
        [block(A, BlockEvent::Done), Event::Abort, Event::Finish],
    ];
    for order in orders {
        let mut slots = OffloadSlots::default();
        slots.open(7);
        let mut actions = slots.apply(7, block(A, BlockEvent::Store));
        for event in order {
            match event {
                Event::Finish | Event::Abort => actions.extend(slots.finish(7, event).1),
                _ => actions.extend(slots.apply(7, event)),
            }
        }
        actions.sort_by_key(|action| format!("{action:?}"));
        assert_eq!(actions, [Action::Begin(A), Action::ReleaseHold(A), Action::Settled], "{order:?}");
        assert!(slots.is_empty());
        assert_eq!(
            slots.finish(7, Event::Abort),
            (FinishReply::Settled, vec![]),
            "a slot that is gone is settled"
        );
    }
}

#[test]
fn repeated_finish_and_abort_return_the_same_reply() {
    for order in [[Event::Finish, Event::Abort], [Event::Abort, Event::Finish], [Event::Abort, Event::Abort]]
    {
        let mut slots = OffloadSlots::default();
        slots.open(1);
        slots.apply(1, block(A, BlockEvent::Store));
        slots.apply(1, block(B, BlockEvent::Load));
        assert_eq!(slots.finish(1, order[0]), (FinishReply::Draining(2), vec![Action::Revoke(B)]));
        assert_eq!(slots.finish(1, order[1]), (FinishReply::Draining(2), vec![]));
    }
}

#[test]
fn giving_up_takes_effect_at_the_commitment_point() {
    let load = [block(B, BlockEvent::Load), Event::Abort];
    let (slot, actions) = after(&[&load[..], &[block(B, BlockEvent::Revoked)]].concat());
    assert_eq!(actions[1..], [Action::Revoke(B), Action::ReleaseHold(B), Action::Settled]);
    assert!(slot.is_settled());

    let (mut slot, actions) = after(&[&load[..], &[block(B, BlockEvent::Committed)]].concat());
    assert_eq!(actions[1..], [Action::Revoke(B)], "a worker writes: the block stays aside");
    assert_eq!(slot.apply(block(B, BlockEvent::Revoked)), [], "an answer that cannot be true frees nothing");
    assert_eq!(slot.apply(block(B, BlockEvent::Done)), [Action::ReleaseHold(B), Action::Settled]);
}

#[test]
fn a_short_pool_reclaims_only_uncommitted_stores() {
    let (_, actions) = after(&[
        block(A, BlockEvent::Store),
        block(B, BlockEvent::Store),
        block(B, BlockEvent::Committed),
        Event::Yield,
        block(A, BlockEvent::Revoked),
    ]);
    assert_eq!(actions[2..], [Action::Revoke(A), Action::ReleaseHold(A)]);
}

#[test]
fn a_name_is_not_used_twice_while_it_is_in_flight() {
    let (slot, actions) = after(&[block(A, BlockEvent::Store), block(A, BlockEvent::Load)]);
    assert_eq!((actions, slot.ignored()), (vec![Action::Begin(A)], 1));
}

const EVENTS: [Event; 13] = [
    Event::Block(A, BlockEvent::Store),
    Event::Block(A, BlockEvent::Committed),
    Event::Block(A, BlockEvent::Done),
    Event::Block(A, BlockEvent::Failed),
    Event::Block(A, BlockEvent::Revoked),
    Event::Block(B, BlockEvent::Load),
    Event::Block(B, BlockEvent::Committed),
    Event::Block(B, BlockEvent::Done),
    Event::Block(B, BlockEvent::Failed),
    Event::Block(B, BlockEvent::Revoked),
    Event::Yield,
    Event::Finish,
    Event::Abort,
];

/// The state that an owner derives from the actions so far.
#[derive(Clone, Debug, Default)]
struct OffloadOwner {
    held: BTreeMap<TransferId, bool>,
    over: bool,
    settled: bool,
}

impl OffloadOwner {
    /// Performs the actions and checks the invariants.
    fn act(&mut self, event: Event, actions: &[Action]) {
        self.over |= matches!(event, Event::Finish | Event::Abort);
        for action in actions {
            assert!(!self.settled, "nothing comes after settled");
            match *action {
                Action::Begin(id) => {
                    assert!(!self.over, "nothing begins after the end");
                    assert_eq!(self.held.insert(id, false), None, "one hold per transfer");
                }
                Action::Revoke(id) => {
                    let revoked = self.held.get_mut(&id).expect("what is revoked is held");
                    assert!(!std::mem::replace(revoked, true), "revoked once");
                }
                Action::ReleaseHold(id) => assert!(self.held.remove(&id).is_some(), "a hold goes back once"),
                Action::Land(id) | Action::Miss(id) => {
                    assert!(!self.over, "nothing lands in a request that is over");
                    assert!(self.held.remove(&id).is_some(), "a hold passes on once");
                }
                Action::Settled => {
                    assert!(self.over && self.held.is_empty(), "settled when over and nothing is held");
                    self.settled = true;
                }
            }
        }
        assert_eq!(self.settled, self.over && self.held.is_empty());
    }
}

fn copy(slot: &OffloadSlot) -> OffloadSlot {
    OffloadSlot { blocks: slot.blocks.clone(), ended: slot.ended, ignored: slot.ignored }
}

/// Explores every state that any sequence of events can reach.
#[test]
fn every_block_is_freed_exactly_once_in_every_order_of_events() {
    let mut seen = BTreeSet::new();
    let mut edge = vec![(OffloadSlot::new(), OffloadOwner::default())];
    let mut steps = 0;
    while let Some((slot, owner)) = edge.pop() {
        if !seen.insert(format!("{:?} {} {owner:?}", slot.blocks, slot.ended)) {
            continue;
        }
        for event in EVENTS {
            let (mut slot, mut owner) = (copy(&slot), owner.clone());
            let actions = slot.apply(event);
            owner.act(event, &actions);
            assert_eq!(slot.in_flight(), owner.held.len());
            steps += 1;
            edge.push((slot, owner));
        }
        // Then the client disconnects and every worker reports: every hold is released.
        let (mut slot, mut owner) = (copy(&slot), owner.clone());
        for event in [Event::Abort, block(A, BlockEvent::Failed), block(B, BlockEvent::Done)] {
            let actions = slot.apply(event);
            owner.act(event, &actions);
        }
        assert!(owner.held.is_empty() && owner.settled && slot.is_settled());
    }
    assert!(seen.len() >= 40 && steps == seen.len() * EVENTS.len(), "{} states", seen.len());
}
