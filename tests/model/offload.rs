//! The blocks of one request on their way to slower tiers and back, with the product's [`OffloadSlots`]: two stores and
//! a load. Workers begin, finish and fail at any time. Reports come late, repeated and in any order. The pool runs
//! short. The request finishes, is stopped and is aborted, in any order, also in the step in which a transfer ends
//! (Dynamo #6681).

use std::fmt;

use baton_connector::offload::{
    Action, BlockEvent, BlockState, Event, FinishReply, OffloadSlots, TransferId,
};

use crate::bounds::Bounds;
use crate::explore::Model;
use crate::mutations::Mutation;
use crate::names::Renaming;
use crate::state_table::{Actor, StateId, StateTable};

/// The request.
const REQUEST: u8 = 1;
/// Blocks 0 and 1 are stored, block 2 is loaded.
const BLOCKS: [u8; 3] = [0, 1, 2];
const LOADED: u8 = 2;
/// Calls of finish and abort, counted together.
const ENDS_MAX: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OffloadInput {
    /// The step loop hands a block to the connector.
    Transfer(u8),
    /// A worker begins an order: the commitment point.
    Begin(u8),
    /// A worker ends an order, well or not, or without a beginning.
    End(u8, BlockEvent),
    /// The step loop receives a report, which may be repeated.
    Report(u8, BlockEvent, Delivery),
    /// The pool is short of blocks.
    Yield,
    /// The request ends.
    Finish,
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Delivery {
    Once,
    /// The request repeats.
    Again,
}

/// The state of a transfer at the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Work {
    None,
    Queued,
    Begun,
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OffloadView {
    slot: Option<[Option<BlockState>; 3]>,
    work: [Work; 3],
    /// Reports that the step loop has not received, in order of block and event.
    mail: Vec<(u8, BlockEvent)>,
    /// The holders of a block: the request, a transfer.
    by_request: [bool; 3],
    by_transfer: [bool; 3],
    ends: u8,
    yields: u8,
    repeats_left: u8,
    settled: bool,
}

/// The step loop's and the workers' side of the transfers.
pub(crate) struct OffloadActor {
    bounds: Bounds,
    slots: OffloadSlots<u8>,
    view: OffloadView,
}

impl OffloadActor {
    fn apply(&mut self, event: Event) -> Result<(), String> {
        let actions = self.slots.apply(REQUEST, event);
        self.carry_out(actions)
    }

    fn carry_out(&mut self, actions: Vec<Action>) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Begin(TransferId(id)) => {
                    self.view.by_transfer[id as usize] = true;
                    self.view.work[id as usize] = Work::Queued;
                }
                Action::Revoke(TransferId(id)) => {
                    // The revocation is too late if a worker has begun. The worker's report then shows this.
                    if self.view.work[id as usize] == Work::Queued {
                        self.view.work[id as usize] = Work::Over;
                        self.mail(id as u8, BlockEvent::Revoked);
                    }
                }
                Action::ReleaseHold(id) => self.release_hold(id)?,
                Action::Land(id) | Action::Miss(id) => {
                    self.release_hold(id)?;
                    if self.view.ends > 0 {
                        return Err("a block lands for a request that is over (invariant 6)".into());
                    }
                }
                Action::Settled => {
                    if std::mem::replace(&mut self.view.settled, true) {
                        return Err("a slot is settled twice (invariant 7)".into());
                    }
                }
            }
        }
        Ok(())
    }

    fn release_hold(&mut self, TransferId(id): TransferId) -> Result<(), String> {
        if matches!(self.view.work[id as usize], Work::Queued | Work::Begun) {
            return Err(format!("block {id} is freed while a worker may touch it (invariant 3)"));
        }
        if !std::mem::replace(&mut self.view.by_transfer[id as usize], false) {
            return Err(format!("block {id} is freed twice (invariant 2)"));
        }
        Ok(())
    }

    fn end(&mut self, event: Event) -> Result<(), String> {
        self.view.ends += 1;
        self.view.by_request = [false; 3];
        let (answer, actions) = self.slots.finish(REQUEST, event);
        self.carry_out(actions)?;
        let held = self.view.by_transfer.iter().filter(|&&held| held).count();
        let reported = match answer {
            FinishReply::Settled => 0,
            FinishReply::Draining(transfers) => transfers,
        };
        if self.bounds.has(Mutation::EndForgetsTheSlot) {
            self.slots = OffloadSlots::default();
        } else if self.bounds.has(Mutation::EndFreesInFlight) {
            self.view.by_transfer = [false; 3];
        } else if held != reported {
            return Err(format!("{held} blocks are held for transfers, the slot says {reported}"));
        }
        Ok(())
    }

    fn mail(&mut self, id: u8, event: BlockEvent) {
        self.view.mail.push((id, event));
        self.view.mail.sort_by_key(|&(id, event)| (id, event as u8));
    }
}

impl Actor for OffloadActor {
    type Input = OffloadInput;
    type Output = ();
    type View = OffloadView;

    fn born(bounds: &Bounds) -> Self {
        let mut slots = OffloadSlots::default();
        slots.open(REQUEST);
        let view = OffloadView {
            slot: None,
            work: [Work::None; 3],
            mail: Vec::new(),
            by_request: [true; 3],
            by_transfer: [false; 3],
            ends: 0,
            yields: 0,
            repeats_left: bounds.faults,
            settled: false,
        };
        Self { bounds: *bounds, slots, view }
    }

    fn live(&mut self, input: OffloadInput, _: &mut Vec<()>) -> Result<(), String> {
        match input {
            OffloadInput::Transfer(id) => {
                let event = if id == LOADED { BlockEvent::Load } else { BlockEvent::Store };
                self.apply(Event::Block(TransferId(id.into()), event))
            }
            OffloadInput::Begin(id) => {
                if !self.view.by_transfer[usize::from(id)] {
                    return Err(format!("a worker touches block {id}, which was freed (invariant 3)"));
                }
                self.view.work[usize::from(id)] = Work::Begun;
                self.mail(id, BlockEvent::Committed);
                Ok(())
            }
            OffloadInput::End(id, event) => {
                self.view.work[usize::from(id)] = Work::Over;
                self.mail(id, event);
                Ok(())
            }
            OffloadInput::Report(id, event, heard) => {
                match heard {
                    Delivery::Again => self.view.repeats_left -= 1,
                    Delivery::Once => {
                        let at = self.view.mail.iter().position(|&mail| mail == (id, event));
                        self.view.mail.remove(at.expect("it is in the mail"));
                    }
                }
                self.apply(Event::Block(TransferId(id.into()), event))
            }
            OffloadInput::Yield => {
                self.view.yields += 1;
                self.apply(Event::Yield)
            }
            OffloadInput::Finish => self.end(Event::Finish),
            OffloadInput::Abort => self.end(Event::Abort),
        }
    }

    fn view(&self) -> OffloadView {
        let slot = self.slots.get(REQUEST);
        let slot = slot.map(|slot| BLOCKS.map(|id| slot.block(TransferId(id.into()))));
        OffloadView { slot, ..self.view.clone() }
    }

    fn renamed(input: OffloadInput, _: Renaming) -> OffloadInput {
        input
    }
}

/// The whole model.
pub(crate) struct Offload(StateTable<OffloadActor>);

impl Offload {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self(StateTable::new(bounds))
    }
}

impl Model for Offload {
    type State = StateId;
    type Step = OffloadInput;

    fn start(&mut self) -> StateId {
        0
    }

    fn steps(&mut self, state: StateId, into: &mut Vec<OffloadInput>) -> Result<(), String> {
        let view = self.0.view(state);
        for id in BLOCKS {
            match view.work[usize::from(id)] {
                Work::None if view.ends == 0 => into.push(OffloadInput::Transfer(id)),
                Work::Queued => {
                    into.extend([OffloadInput::Begin(id), OffloadInput::End(id, BlockEvent::Failed)])
                }
                Work::Begun => into
                    .extend([BlockEvent::Done, BlockEvent::Failed].map(|event| OffloadInput::End(id, event))),
                Work::None | Work::Over => {}
            }
        }
        for (at, &(id, event)) in
            view.mail.iter().enumerate().filter(|(at, mail)| !view.mail[..*at].contains(mail))
        {
            debug_assert!(at < view.mail.len());
            into.push(OffloadInput::Report(id, event, Delivery::Once));
            into.extend((view.repeats_left > 0).then_some(OffloadInput::Report(id, event, Delivery::Again)));
        }
        if view.ends < ENDS_MAX {
            into.extend([OffloadInput::Finish, OffloadInput::Abort]);
        }
        if view.yields == 0 && view.ends == 0 {
            into.push(OffloadInput::Yield);
        }
        if into.is_empty() {
            let released = view.slot.is_none() && view.by_transfer == [false; 3] && view.settled;
            return if released {
                Ok(())
            } else {
                Err("at the end a block is still held for a transfer (invariant 5)".into())
            };
        }
        Ok(())
    }

    fn take(&mut self, state: StateId, step: OffloadInput) -> Result<StateId, String> {
        self.0.apply(state, step).map(|(next, _)| next)
    }
}

impl fmt::Display for OffloadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transfer(LOADED) => write!(f, "block {LOADED} is to be loaded"),
            Self::Transfer(id) => write!(f, "block {id} is to be stored"),
            Self::Begin(id) => write!(f, "a worker begins with block {id}"),
            Self::End(id, event) => write!(f, "a worker is done with block {id}: {event:?}"),
            Self::Report(id, event, Delivery::Once) => write!(f, "the step loop hears: block {id} {event:?}"),
            Self::Report(id, event, Delivery::Again) => write!(f, "FAULT repeated: block {id} {event:?}"),
            Self::Yield => write!(f, "the pool is short of blocks"),
            Self::Finish => write!(f, "the request finishes"),
            Self::Abort => write!(f, "the request is aborted"),
        }
    }
}
