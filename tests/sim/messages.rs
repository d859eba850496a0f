//! The messages between processes: the content of the wire format, without the bytes.

use std::sync::Arc;

use baton_connector::exchange::Attempt;
use baton_connector::{BlockId, Epoch, Handle, Handoff, Reader, RequestId};
use baton_engine::engine_core::mailbox::LegFilter;

use crate::device::Slot;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// All clients. They are never down.
    Clients,
    Router(usize),
    Engine(usize),
}

/// A client's request as the engines receive it.
#[derive(Debug)]
pub struct ClientRequest {
    pub request: RequestId,
    pub prompt: Vec<u32>,
    pub max_new: usize,
    pub choices: u32,
}

#[derive(Clone, Debug)]
pub enum Msg {
    // Between client and router.
    Ask(usize),
    Text {
        choice: u32,
        token: u32,
    },
    Complete,
    Error,

    // Between router and engine.
    Prefill(Arc<ClientRequest>),
    Prefilled(Result<Option<Box<Handoff>>, u16>),
    /// The end of a prefill with an early lease.
    PrefillOver(Result<(), u16>),
    Decode(Arc<ClientRequest>, Option<Box<Handoff>>),
    Accepted,
    Chunk {
        choice: u32,
        token: u32,
    },
    Decoded,
    Refused(u16),
    ReleaseVerb(Handle, &'static str),
    AbortVerb(RequestId, LegFilter),
    Done,

    // Between decode engine and prefill engine.
    Read {
        epoch: Epoch,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    },
    Granted(Vec<BlockId>),
    Block(usize, Vec<Slot>),
    /// Shared memory: the number of blocks that the reader may copy by now.
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

/// The caller's use of a connection.
#[derive(Clone, Debug)]
pub enum Purpose {
    /// A client's request.
    Ask(usize),
    /// A router's leg of a client's request.
    Prefill(usize, Attempt),
    Decode(usize, Attempt),
    /// A router's settlement, by its number.
    Settle(usize),
    /// An engine's read, and the request for its verdict.
    Read(u64),
    Verdict(u64),
    GiveUp,
    /// A release notice, by its number.
    Notice(u64),
    /// A heartbeat for a sequence.
    Heartbeat(u64),
    /// A repetition, whose reply has no receiver.
    Ghost,
}
