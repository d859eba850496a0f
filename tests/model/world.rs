//! The whole system in one state: a router, two prefill engines, two decode engines, and what is on its way.
//!
//! Faults, each of which costs one of [`Bounds::faults`]:
//!
//! | fault | what happens |
//! |---|---|
//! | lost | a message does not arrive; its sender's tries are spent, or who waits sees a broken connection |
//! | repeated | a message that is repeated until answered arrives twice |
//! | broken read | a transfer breaks off before or after the copy; P notices, or finds out late |
//! | silence | the router finds an engine silent for too long, though it is not |
//! | crash | of any party; what was in the memory of the router or of D is lost, or still arrives |
//! | early | a lease runs out while it is wanted (a paused or fast clock, heartbeats that were lost) |
//! | ages | a message is on its way for so long that its tombstone is forgotten |
//!
//! A party that has crashed restarts at any time later. Orders and delays cost nothing: whatever is on its way arrives
//! next. Time passes by itself only when nothing else can happen.

use std::collections::{BTreeMap, HashMap};

use crate::bounds::Bounds;
use crate::cast::{Cast, Role};
use crate::consumer::Consumer;
use crate::explore::{Mixed, Model};
use crate::messages::Message;
use crate::names::{BOTH, Renaming};
use crate::producer::Producer;
use crate::router::Router;
use crate::steps::Step;

/// Messages on their way at once. More fails the exploration.
const IN_FLIGHT_MAX: usize = 16;

/// Nothing in this place.
const NONE: u16 = u16::MAX;

/// The system's state, packed: the parties' states by number, and the messages by number, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Packed {
    router: [Role; 2],
    prefill: [Role; 2],
    decode: [Role; 2],
    /// Faults left, and 256 if the router is up.
    rest: u16,
    net: [u16; IN_FLIGHT_MAX],
}

/// The same, to work on.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    pub router: [Role; 2],
    pub prefill: [Role; 2],
    pub decode: [Role; 2],
    pub router_up: bool,
    pub faults_left: u8,
    pub net: Vec<u16>,
}

/// Everything that is known of the system's parties and messages.
pub(crate) struct World {
    pub bounds: Bounds,
    pub routers: Cast<Router>,
    pub producers: Cast<Producer>,
    pub consumers: Cast<Consumer>,
    pub messages: Messages,
    /// Faults that were explored, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    renamings: Vec<Renaming>,
}

/// Every message that has come up, by number.
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

impl Scene {
    pub(crate) fn of(packed: &Packed) -> Self {
        Self {
            router: packed.router,
            prefill: packed.prefill,
            decode: packed.decode,
            router_up: packed.rest & 256 != 0,
            faults_left: (packed.rest & 255) as u8,
            net: packed.net.iter().copied().take_while(|&number| number != NONE).collect(),
        }
    }

    pub(crate) fn pack(mut self) -> Packed {
        assert!(self.net.len() <= IN_FLIGHT_MAX, "more than {IN_FLIGHT_MAX} messages on their way");
        self.net.sort_unstable();
        let mut net = [NONE; IN_FLIGHT_MAX];
        net[..self.net.len()].copy_from_slice(&self.net);
        let rest = u16::from(self.faults_left) | if self.router_up { 256 } else { 0 };
        Packed { router: self.router, prefill: self.prefill, decode: self.decode, rest, net }
    }
}

impl World {
    pub(crate) fn new(bounds: Bounds) -> Self {
        // Only what there are two of can change places.
        let may = |by: &Renaming| {
            (by.0 & 1 == 0 || bounds.requests == 2)
                && (by.0 & 2 == 0 || bounds.prefill == 2)
                && (by.0 & 4 == 0 || bounds.decode == 2)
        };
        Self {
            bounds,
            routers: Cast::new(bounds),
            producers: Cast::new(bounds),
            consumers: Cast::new(bounds),
            messages: Messages::default(),
            faults: BTreeMap::new(),
            renamings: (1..8).map(Renaming).filter(may).collect(),
        }
    }

    /// The same system, in which a state is explored for itself only.
    pub(crate) fn without_renaming(bounds: Bounds) -> Self {
        Self { renamings: Vec::new(), ..Self::new(bounds) }
    }

    /// How many states one state is explored for.
    pub(crate) fn places(&mut self, state: Packed) -> usize {
        let mut all: Vec<_> = std::iter::once(state)
            .chain(self.renamings.clone().into_iter().map(|by| self.renamed(&state, by)))
            .collect();
        all.sort_unstable();
        all.dedup();
        all.len()
    }

    /// States of each kind of party that came up: how much of the machines was covered.
    pub(crate) fn parties(&self) -> (usize, usize, usize) {
        (self.routers.len(), self.producers.len(), self.consumers.len())
    }

    fn renamed(&mut self, state: &Packed, by: Renaming) -> Packed {
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

impl Model for World {
    type State = Packed;
    type Step = Step;

    fn start(&mut self) -> Packed {
        Packed {
            router: [0; 2],
            prefill: [0; 2],
            decode: [0; 2],
            rest: 256 | u16::from(self.bounds.faults),
            net: [NONE; IN_FLIGHT_MAX],
        }
    }

    fn steps(&mut self, state: Packed, into: &mut Vec<Step>) -> Result<(), String> {
        self.list(&Scene::of(&state), into)
    }

    fn take(&mut self, state: Packed, step: Step) -> Result<Packed, String> {
        let mut scene = Scene::of(&state);
        self.play(&mut scene, step)?;
        Ok(scene.pack())
    }

    fn canonical(&mut self, state: Packed) -> Packed {
        let mut least = state;
        for at in 0..self.renamings.len() {
            let other = self.renamed(&state, self.renamings[at]);
            least = least.min(other);
        }
        least
    }
}
