//! The state of the system: both halves of each pair at their engines, and the messages between all processes.

use crate::router::StreamEnd;
use crate::state_table::StateId;

/// Pairs of one request. Their ids, `rid`, have the same length.
pub(super) const ATTEMPTS: usize = 2;
/// Pairs of both requests.
pub(super) const PAIRS: usize = 2 * ATTEMPTS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leg {
    Prefill,
    Decode,
}

impl Leg {
    pub(super) const BOTH: [Self; 2] = [Self::Prefill, Self::Decode];
}

/// The answer to one leg, or its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reply {
    /// The prefill engine's one token; the decode engine's head.
    Done,
    Refused,
    Failed,
    NotReached,
    Broken,
}

/// A message of one pair on its way. At most one of each kind is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Message {
    Request(Leg),
    Reply(Leg, Reply),
    FirstChunk,
    StreamEnd(StreamEnd),
    /// The router's connection to the leg's engine ends.
    Close(Leg),
    /// The abort by `rid`.
    Abort(Leg),
    /// D's pages, from D to P.
    Register,
    /// D's ABORT of the room, from D to P.
    AbortRoom,
    /// P writes nothing more into the room's pages, from P to D.
    AbortAck,
    /// P's half has failed, from P to D. It writes nothing more.
    TransferFailed,
    /// The blocks, from P into the pages of D.
    Write,
}

/// Every message without the content of replies, in the order of its bits.
const KINDS: [Message; 11] = [
    Message::Request(Leg::Prefill),
    Message::Request(Leg::Decode),
    Message::FirstChunk,
    Message::Close(Leg::Prefill),
    Message::Close(Leg::Decode),
    Message::Abort(Leg::Prefill),
    Message::Abort(Leg::Decode),
    Message::Register,
    Message::AbortRoom,
    Message::AbortAck,
    Message::TransferFailed,
];
/// The bit of a write.
const WRITE: u16 = 1 << KINDS.len();

/// The messages of a pair on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Mail {
    kinds: u16,
    pub replies: [Option<Reply>; 2],
    pub stream_end: Option<StreamEnd>,
}

fn bit(message: Message) -> u16 {
    KINDS.iter().position(|&kind| kind == message).map_or(WRITE, |at| 1 << at)
}

impl Mail {
    pub(super) fn has(&self, message: Message) -> bool {
        match message {
            Message::Reply(leg, reply) => self.replies[leg as usize] == Some(reply),
            Message::StreamEnd(end) => self.stream_end == Some(end),
            _ => self.kinds & bit(message) != 0,
        }
    }

    pub(super) fn send(&mut self, message: Message) {
        match message {
            Message::Reply(leg, reply) => self.replies[leg as usize] = Some(reply),
            Message::StreamEnd(end) => self.stream_end = Some(end),
            _ => self.kinds |= bit(message),
        }
    }

    pub(super) fn take(&mut self, message: Message) {
        match message {
            Message::Reply(leg, _) => self.replies[leg as usize] = None,
            Message::StreamEnd(_) => self.stream_end = None,
            _ => self.kinds &= !bit(message),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The messages that may arrive next. Messages of one connection arrive in order, all others in any order.
    pub(super) fn next(&self) -> impl Iterator<Item = Message> + use<> {
        let mail = *self;
        let replies = Leg::BOTH
            .into_iter()
            .filter_map(move |leg| mail.replies[leg as usize].map(|reply| Message::Reply(leg, reply)));
        let kinds = KINDS.into_iter().chain([Message::Write]).chain(replies);
        kinds
            .chain(mail.stream_end.map(Message::StreamEnd))
            .filter(move |&message| mail.has(message) && !mail.waits(message))
    }

    fn waits(&self, message: Message) -> bool {
        let before = |earlier| self.has(earlier);
        match message {
            Message::Close(leg) => before(Message::Request(leg)),
            Message::AbortRoom => before(Message::Register),
            Message::FirstChunk => self.replies[Leg::Decode as usize].is_some(),
            Message::StreamEnd(_) => {
                self.replies[Leg::Decode as usize].is_some() || before(Message::FirstChunk)
            }
            _ => false,
        }
    }
}

/// P's half of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum PrefillHalf {
    #[default]
    None,
    /// D's registration is here before the router's request.
    Early,
    /// It waits for D's registration.
    Waiting,
    /// vLLM push: it has answered, and waits for D's registration until its lease ends.
    Leased,
    Computing,
    /// `ended`: the leg is over at the end of the write. `ack`: D waits for that end.
    Writing {
        ended: bool,
        ack: bool,
    },
    /// The blocks were written, and the answer does not come.
    Stuck,
    Over,
}

impl PrefillHalf {
    pub(super) fn works(self) -> bool {
        !matches!(self, Self::None | Self::Early | Self::Over)
    }
}

/// D's half of a pair, with the page that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum DecodeHalf {
    #[default]
    None,
    /// It waits for a page.
    Queued,
    /// It waits for the write into this page.
    Registered(u8),
    Written(u8),
    Streaming(u8),
    /// The page is kept until P writes nothing more into it.
    Aborted(u8),
    Over,
}

impl DecodeHalf {
    pub(super) fn page(self) -> Option<u8> {
        match self {
            Self::Registered(page) | Self::Written(page) | Self::Streaming(page) | Self::Aborted(page) => {
                Some(page)
            }
            Self::None | Self::Queued | Self::Over => None,
        }
    }

    pub(super) fn works(self) -> bool {
        !matches!(self, Self::None | Self::Over)
    }
}

/// Where P writes: a pair's page at its D, in the process that registered it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    pub pair: u8,
    pub page: u8,
    pub life: u8,
}

/// One pair that was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pair {
    /// The engines, by leg.
    pub engines: [u8; 2],
    pub prefill: PrefillHalf,
    pub decode: DecodeHalf,
    /// What D registered.
    pub registered: Target,
    /// The registration that P uses.
    pub target: Target,
    /// vLLM push: P has the registration before it has the blocks.
    pub has_target: bool,
    pub mail: Mail,
}

impl Pair {
    pub(super) fn works(&self, leg: Leg) -> bool {
        match leg {
            Leg::Prefill => self.prefill.works(),
            Leg::Decode => self.decode.works(),
        }
    }
}

/// An engine's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub up: bool,
    /// Earlier starts.
    pub life: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PairState {
    pub routers: [StateId; 2],
    pub pairs: [Option<Pair>; PAIRS],
    /// By leg.
    pub engines: [[Process; 2]; 2],
    pub faults_left: u8,
}

impl PairState {
    pub(super) fn pair(&mut self, at: u8) -> &mut Pair {
        self.pairs[usize::from(at)].as_mut().expect("the pair was sent")
    }

    pub(super) fn get(&self, at: u8) -> &Pair {
        self.pairs[usize::from(at)].as_ref().expect("the pair was sent")
    }

    /// The process of a leg's engine.
    pub(super) fn process(&self, at: u8, leg: Leg) -> Process {
        self.engines[leg as usize][usize::from(self.get(at).engines[leg as usize])]
    }

    /// The pairs with a leg at this engine.
    pub(super) fn at_engine(&self, leg: Leg, engine: u8) -> impl Iterator<Item = u8> + use<> {
        let pairs = self.pairs;
        (0..PAIRS as u8).filter(move |&at| {
            pairs[usize::from(at)].is_some_and(|pair| pair.engines[leg as usize] == engine)
        })
    }

    /// The pairs that were sent.
    pub(super) fn sent(&self) -> impl Iterator<Item = u8> + use<> {
        let pairs = self.pairs;
        (0..PAIRS as u8).filter(move |&at| pairs[usize::from(at)].is_some())
    }
}
