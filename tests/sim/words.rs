//! What processes say to each other, as the simulator carries it: the same content as on the wire, without the bytes.

use std::sync::Arc;

use baton_connector::exchange::Attempt;
use baton_connector::{BlockId, Epoch, Handle, Handoff, Reader, RequestId};
use baton_engine::engine_core::mailbox::Legs;

use crate::device::Slot;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// All clients; they are never down.
    Clients,
    Router(usize),
    Engine(usize),
}

/// What a client asks for, as the engines see it.
#[derive(Debug)]
pub struct Ask {
    pub request: RequestId,
    pub prompt: Vec<u32>,
    pub max_new: usize,
    pub choices: u32,
}

#[derive(Clone, Debug)]
pub enum Msg {
    // Client and router.
    Ask(usize),
    Text {
        choice: u32,
        token: u32,
    },
    Complete,
    Error,

    // Router and engine.
    Prefill(Arc<Ask>),
    Prefilled(Result<Option<Box<Handoff>>, u16>),
    /// The end of a prefill that has lent before.
    PrefillOver(Result<(), u16>),
    Decode(Arc<Ask>, Option<Box<Handoff>>),
    Accepted,
    Chunk {
        choice: u32,
        token: u32,
    },
    Decoded,
    Refused(u16),
    ReleaseVerb(Handle, &'static str),
    AbortVerb(RequestId, Legs),
    Done,

    // Decode engine and prefill engine.
    Read {
        epoch: Epoch,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    },
    Granted(Vec<BlockId>),
    Block(usize, Vec<Slot>),
    /// Shared memory: so many blocks of the read may be taken by now.
    Final(usize),
    NotYet,
    AllSent,
    ReadDone {
        epoch: Epoch,
        handle: Handle,
        reader: Reader,
    },
    Verdict(bool),
    ReadGivenUp {
        epoch: Epoch,
        handle: Handle,
        reader: Reader,
    },
    Release {
        epoch: Epoch,
        handle: Handle,
        reason: &'static str,
    },
    Heartbeat {
        epoch: Epoch,
        handle: Handle,
    },
    Renewed,
    Gone,
    NotServed,
}

impl Msg {
    /// Whether the contract makes a repetition of this request harmless.
    pub fn may_repeat(&self) -> bool {
        matches!(
            self,
            Self::ReleaseVerb(..)
                | Self::AbortVerb(..)
                | Self::ReadDone { .. }
                | Self::ReadGivenUp { .. }
                | Self::Release { .. }
                | Self::Heartbeat { .. }
                | Self::Prefill(_)
                | Self::Decode(..)
        )
    }
}

/// What its caller uses a connection for.
#[derive(Clone, Debug)]
pub enum Purpose {
    /// A client's request.
    Ask(usize),
    /// A router's leg of a client's request.
    Prefill(usize, Attempt),
    Decode(usize, Attempt),
    /// A router's settlement, by its number.
    Settle(usize),
    /// An engine's read, and its questions about it.
    Read(u64),
    Verdict(u64),
    GiveUp,
    /// A release notice, by its number.
    Notice(u64),
    /// A heartbeat for a sequence.
    Beat(u64),
    /// A repetition: nobody hears the answer.
    Ghost,
}
