//! The whole system in one state: a router, two prefill engines, two decode engines, and the messages between them.
//!
//! Faults, each of which costs one of [`Bounds::faults`]:
//!
//! | fault | what happens |
//! |---|---|
//! | lost | a message does not arrive: its sender's retries are exhausted, or the waiting actor sees a broken connection |
//! | repeated | a message that is repeated until answered arrives twice |
//! | broken read | a transfer breaks off before or after the copy; P detects it, at once or late |
//! | silence | the router takes an engine for silent that is not |
//! | crash | of any actor; messages in the memory of the router or of D are lost, or still arrive |
//! | early | a lease expires while it is in use (a paused or fast clock, heartbeats that were lost) |
//! | ages | a message is on its way for so long that its tombstone is forgotten |
//!
//! A crashed actor restarts at any later time. Reordering and delay cost nothing: any message on its way arrives next.
//! Time passes by itself only when no other step is possible.

use std::collections::{BTreeMap, HashMap};

use crate::bounds::Bounds;
use crate::consumer::Consumer;
use crate::explore::{Mixed, Model};
use crate::messages::Message;
use crate::names::{BOTH, Renaming};
use crate::producer::Producer;
use crate::router::Router;
use crate::state_table::{StateId, StateTable};
use crate::steps::Step;

/// Messages on their way at once. More fails the exploration.
const IN_FLIGHT_MAX: usize = 16;

/// An empty place.
const NONE: u16 = u16::MAX;

/// The system's state, packed: the numbers of the actors' states, and the numbers of the messages, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PackedState {
    router: [StateId; 2],
    prefill: [StateId; 2],
    decode: [StateId; 2],
    /// Faults left, and 256 if the router is up.
    rest: u16,
    net: [u16; IN_FLIGHT_MAX],
}

/// The same state, unpacked.
#[derive(Clone, Debug)]
pub(crate) struct WorkingState {
    pub router: [StateId; 2],
    pub prefill: [StateId; 2],
    pub decode: [StateId; 2],
    pub router_up: bool,
    pub faults_left: u8,
    pub net: Vec<u16>,
}

/// All states of the actors and all messages that were reached.
pub(crate) struct SystemModel {
    pub bounds: Bounds,
    pub routers: StateTable<Router>,
    pub producers: StateTable<Producer>,
    pub consumers: StateTable<Consumer>,
    pub messages: Messages,
    /// Faults that were explored, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    renamings: Vec<Renaming>,
}

/// Every message that was reached, by number.
#[derive(Default)]
pub(crate) struct Messages {
    known: Vec<Message>,
    numbers: HashMap<Message, u16, Mixed>,
    renamed: Vec<[u16; 8]>,
}

impl Messages {
    pub(crate) fn get(&self, number: u16) -> Message {
        self.known[usize::from(number)]
    }

    pub(crate) fn number(&mut self, message: Message) -> u16 {
        if let Some(&number) = self.numbers.get(&message) {
            return number;
        }
        let number = u16::try_from(self.known.len()).expect("at most 65,535 different messages");
        self.known.push(message);
        self.numbers.insert(message, number);
        self.renamed.push([NONE; 8]);
        number
    }

    fn renamed(&mut self, number: u16, by: Renaming) -> u16 {
        let known = self.renamed[usize::from(number)][usize::from(by.0)];
        if known != NONE {
            return known;
        }
        let renamed = self.get(number).renamed(by);
        let renamed = self.number(renamed);
        self.renamed[usize::from(number)][usize::from(by.0)] = renamed;
        renamed
    }
}

impl WorkingState {
    pub(crate) fn of(packed: &PackedState) -> Self {
        Self {
            router: packed.router,
            prefill: packed.prefill,
            decode: packed.decode,
            router_up: packed.rest & 256 != 0,
            faults_left: (packed.rest & 255) as u8,
            net: packed.net.iter().copied().take_while(|&number| number != NONE).collect(),
        }
    }

    pub(crate) fn pack(mut self) -> PackedState {
        assert!(self.net.len() <= IN_FLIGHT_MAX, "more than {IN_FLIGHT_MAX} messages on their way");
        self.net.sort_unstable();
        let mut net = [NONE; IN_FLIGHT_MAX];
        net[..self.net.len()].copy_from_slice(&self.net);
        let rest = u16::from(self.faults_left) | if self.router_up { 256 } else { 0 };
        PackedState { router: self.router, prefill: self.prefill, decode: self.decode, rest, net }
    }
}

impl SystemModel {
    pub(crate) fn new(bounds: Bounds) -> Self {
        // Only actors of which there are two can change places.
        let may = |by: &Renaming| {
            (by.0 & 1 == 0 || bounds.requests == 2)
                && (by.0 & 2 == 0 || bounds.prefill == 2)
                && (by.0 & 4 == 0 || bounds.decode == 2)
        };
        Self {
            bounds,
            routers: StateTable::new(bounds),
            producers: StateTable::new(bounds),
            consumers: StateTable::new(bounds),
            messages: Messages::default(),
            faults: BTreeMap::new(),
            renamings: (1..8).map(Renaming).filter(may).collect(),
        }
    }

    /// The same system without the reduction by renaming.
    pub(crate) fn without_renaming(bounds: Bounds) -> Self {
        Self { renamings: Vec::new(), ..Self::new(bounds) }
    }

    /// The number of states that one state represents.
    pub(crate) fn places(&mut self, state: PackedState) -> usize {
        let mut all: Vec<_> = std::iter::once(state)
            .chain(self.renamings.clone().into_iter().map(|by| self.renamed(&state, by)))
            .collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    }

    /// The number of reached states of each kind of actor: how much of the machines was covered.
    pub(crate) fn actors(&self) -> (usize, usize, usize) {
        (self.routers.len(), self.producers.len(), self.consumers.len())
    }

    fn renamed(&mut self, state: &PackedState, by: Renaming) -> PackedState {
        let mut to = *state;
        for at in BOTH {
            let (req, p, d) = (by.req(at), by.prefill(at), by.decode(at));
            let from = usize::from(at);
            to.router[usize::from(req)] = self.routers.renamed(state.router[from], by);
            to.prefill[usize::from(p)] = self.producers.renamed(state.prefill[from], by);
            to.decode[usize::from(d)] = self.consumers.renamed(state.decode[from], by);
        }
        for number in to.net.iter_mut().take_while(|number| **number != NONE) {
            *number = self.messages.renamed(*number, by);
        }
        to.net.sort_unstable();
        to
    }
}

impl Model for SystemModel {
    type State = PackedState;
    type Step = Step;

    fn start(&mut self) -> PackedState {
        PackedState {
            router: [0; 2],
            prefill: [0; 2],
            decode: [0; 2],
            rest: 256 | u16::from(self.bounds.faults),
            net: [NONE; IN_FLIGHT_MAX],
        }
    }

    fn steps(&mut self, state: PackedState, into: &mut Vec<Step>) -> Result<(), String> {
        self.list(&WorkingState::of(&state), into)
    }

    fn take(&mut self, state: PackedState, step: Step) -> Result<PackedState, String> {
        let mut scene = WorkingState::of(&state);
        self.play(&mut scene, step)?;
        Ok(scene.pack())
    }

    fn canonical(&mut self, state: PackedState) -> PackedState {
        let mut least = state;
        for at in 0..self.renamings.len() {
            let other = self.renamed(&state, self.renamings[at]);
            least = least.min(other);
        }
        least
    }
}
