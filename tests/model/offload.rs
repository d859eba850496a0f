//! One request's blocks on their way down to slower tiers and up again, with the product's [`Slots`]: two stores and a
//! load, workers that begin, finish and fail whenever they like, reports that come late, in any order and repeated, a
//! pool that runs short, and a request that finishes, is stopped and is aborted, in any order, also in the step in
//! which a transfer ends (Dynamo #6681).

use std::fmt;

use baton_connector::offload::{Action, Answer, BlockEvent, BlockState, Event, Slots, TransferId};

use crate::bounds::Bounds;
use crate::cast::{Cast, Party, Role};
use crate::explore::Model;
use crate::mutations::Mutation;
use crate::names::Renaming;

/// The request.
const REQUEST: u8 = 1;
/// Blocks 0 and 1 are stored, block 2 is loaded.
const BLOCKS: [u8; 3] = [0, 1, 2];
const LOADED: u8 = 2;
/// Calls of finish and abort, of either kind.
const ENDS_MAX: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Input {
    /// The step loop hands a block to the connector.
    Transfer(u8),
    /// A worker begins: the commitment point.
    Begin(u8),
    /// A worker is done, well or not; also one that never begins.
    End(u8, BlockEvent),
    /// The step loop hears a report, which may be repeated.
    Report(u8, BlockEvent, Heard),
    /// The pool is short of blocks.
    Yield,
    /// The request ends.
    Finish,
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Heard {
    Once,
    /// It comes again.
    Again,
}

/// A transfer at the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Work {
    None,
    Queued,
    Begun,
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View {
    slot: Option<[Option<BlockState>; 3]>,
    work: [Work; 3],
    /// Reports that the step loop has not heard, in order of block and event.
    mail: Vec<(u8, BlockEvent)>,
    /// Who holds a block: the request, a transfer.
    by_request: [bool; 3],
    by_transfer: [bool; 3],
    ends: u8,
    yields: u8,
    repeats_left: u8,
    settled: bool,
}

/// The step loop's and the workers' side of it.
pub(crate) struct Shell {
    bounds: Bounds,
    slots: Slots<u8>,
    view: View,
}

impl Shell {
    fn tell(&mut self, event: Event) -> Result<(), String> {
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
                    // Too late if a worker has begun: its report says so.
                    if self.view.work[id as usize] == Work::Queued {
                        self.view.work[id as usize] = Work::Over;
                        self.mail(id as u8, BlockEvent::Revoked);
                    }
                }
                Action::LetGo(id) => self.let_go(id)?,
                Action::Land(id) | Action::Miss(id) => {
                    self.let_go(id)?;
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

    fn let_go(&mut self, TransferId(id): TransferId) -> Result<(), String> {
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
        let said = match answer {
            Answer::Settled => 0,
            Answer::Draining(transfers) => transfers,
        };
        if self.bounds.has(Mutation::EndForgetsTheSlot) {
            self.slots = Slots::default();
        } else if self.bounds.has(Mutation::EndFreesInFlight) {
            self.view.by_transfer = [false; 3];
        } else if held != said {
            return Err(format!("{held} blocks are held for transfers, the slot says {said}"));
        }
        Ok(())
    }

    fn mail(&mut self, id: u8, event: BlockEvent) {
        self.view.mail.push((id, event));
        self.view.mail.sort_by_key(|&(id, event)| (id, event as u8));
    }
}

impl Party for Shell {
    type Input = Input;
    type Output = ();
    type View = View;

    fn born(bounds: &Bounds) -> Self {
        let mut slots = Slots::default();
        slots.open(REQUEST);
        let view = View {
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

    fn live(&mut self, input: Input, _: &mut Vec<()>) -> Result<(), String> {
        match input {
            Input::Transfer(id) => {
                let event = if id == LOADED { BlockEvent::Load } else { BlockEvent::Store };
                self.tell(Event::Block(TransferId(id.into()), event))
            }
            Input::Begin(id) => {
                if !self.view.by_transfer[usize::from(id)] {
                    return Err(format!("a worker touches block {id}, which was freed (invariant 3)"));
                }
                self.view.work[usize::from(id)] = Work::Begun;
                self.mail(id, BlockEvent::Committed);
                Ok(())
            }
            Input::End(id, event) => {
                self.view.work[usize::from(id)] = Work::Over;
                self.mail(id, event);
                Ok(())
            }
            Input::Report(id, event, heard) => {
                match heard {
                    Heard::Again => self.view.repeats_left -= 1,
                    Heard::Once => {
                        let at = self.view.mail.iter().position(|&mail| mail == (id, event));
                        self.view.mail.remove(at.expect("it is in the mail"));
                    }
                }
                self.tell(Event::Block(TransferId(id.into()), event))
            }
            Input::Yield => {
                self.view.yields += 1;
                self.tell(Event::Yield)
            }
            Input::Finish => self.end(Event::Finish),
            Input::Abort => self.end(Event::Abort),
        }
    }

    fn view(&self) -> View {
        let slot = self.slots.get(REQUEST);
        let slot = slot.map(|slot| BLOCKS.map(|id| slot.block(TransferId(id.into()))));
        View { slot, ..self.view.clone() }
    }

    fn renamed(input: Input, _: Renaming) -> Input {
        input
    }
}

/// The whole of it.
pub(crate) struct Offload(Cast<Shell>);

impl Offload {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self(Cast::new(bounds))
    }
}

impl Model for Offload {
    type State = Role;
    type Step = Input;

    fn start(&mut self) -> Role {
        0
    }

    fn steps(&mut self, state: Role, into: &mut Vec<Input>) -> Result<(), String> {
        let view = self.0.view(state);
        for id in BLOCKS {
            match view.work[usize::from(id)] {
                Work::None if view.ends == 0 => into.push(Input::Transfer(id)),
                Work::Queued => into.extend([Input::Begin(id), Input::End(id, BlockEvent::Failed)]),
                Work::Begun => {
                    into.extend([BlockEvent::Done, BlockEvent::Failed].map(|event| Input::End(id, event)))
                }
                Work::None | Work::Over => {}
            }
        }
        for (at, &(id, event)) in
            view.mail.iter().enumerate().filter(|(at, mail)| !view.mail[..*at].contains(mail))
        {
            debug_assert!(at < view.mail.len());
            into.push(Input::Report(id, event, Heard::Once));
            into.extend((view.repeats_left > 0).then_some(Input::Report(id, event, Heard::Again)));
        }
        if view.ends < ENDS_MAX {
            into.extend([Input::Finish, Input::Abort]);
        }
        if view.yields == 0 && view.ends == 0 {
            into.push(Input::Yield);
        }
        if into.is_empty() {
            let home = view.slot.is_none() && view.by_transfer == [false; 3] && view.settled;
            return if home {
                Ok(())
            } else {
                Err("at the end a block is still held for a transfer (invariant 5)".into())
            };
        }
        Ok(())
    }

    fn take(&mut self, state: Role, step: Input) -> Result<Role, String> {
        self.0.tell(state, step).map(|(next, _)| next)
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Transfer(LOADED) => write!(f, "block {LOADED} is to be loaded"),
            Self::Transfer(id) => write!(f, "block {id} is to be stored"),
            Self::Begin(id) => write!(f, "a worker begins with block {id}"),
            Self::End(id, event) => write!(f, "a worker is done with block {id}: {event:?}"),
            Self::Report(id, event, Heard::Once) => write!(f, "the step loop hears: block {id} {event:?}"),
            Self::Report(id, event, Heard::Again) => write!(f, "FAULT repeated: block {id} {event:?}"),
            Self::Yield => write!(f, "the pool is short of blocks"),
            Self::Finish => write!(f, "the request finishes"),
            Self::Abort => write!(f, "the request is aborted"),
        }
    }
}
