//! Protocols of engines: what each leg of a request is sent, and the commands that end its work.
//!
//! The exchange (`connector/src/machines/exchange.rs`) decides which engine is due an abort or a release in which phase.
//! A protocol decides how: the order of the legs, their bodies, the commands, and the paths of probes. Both are pure.
//!
//! | protocol | order | handoff | abort | release |
//! |---|---|---|---|---|
//! | [`vllm`] | prefill first | `kv_transfer_params` of P's reply | `POST /abort_requests` | `POST /kv/release` |
//! | [`vllm`], through a store | prefill first | none: the engines share a store | as [`vllm`] | none: no lease |
//! | [`vllm_push`] | both legs at once | P's identity, the same request id | as [`vllm`] | as [`vllm`], before D has the request |
//! | [`sglang`] | both legs at once | `bootstrap_*` in both bodies | `POST /abort_request` by `rid` | none: no lease |

pub(crate) mod learned;
mod sglang;
mod vllm;
mod vllm_push;

use std::fmt;
use std::time::Duration;

use baton_connector::exchange::SettlementCause;
use baton_connector::{Handle, RequestId};
use baton_openai::{ApiError, RawBody};
use bytes::Bytes;

use crate::config::ProtocolSetting;
use crate::message::path::Dialect;
use crate::message::payload::Payload;
use crate::message::rewrite::{ModelName, RouterFields};
use crate::metrics::Leg;
pub(crate) use sglang::{Bootstrap, ServerInfo};
pub(crate) use vllm::Vllm;
pub(crate) use vllm_push::PushIdentity;

/// The paths of all commands.
pub(crate) const COMMAND_PATHS: [&str; 3] = ["/abort_requests", "/kv/release", "/abort_request"];

/// The header with the data-parallel rank of a request (vLLM, SGLang).
pub(crate) const RANK_HEADER: &str = "x-data-parallel-rank";

/// Prefixes of headers that only a router may send: Baton's own, and those by which SGLang replaces fields of the body
/// (`SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`).
const ROUTER_PREFIXES: [&str; 2] = ["x-baton-", "x-override-"];

/// Whether a header, in lower case, gives a request the rights of a router.
pub(crate) fn is_of_router(header: &str) -> bool {
    header == RANK_HEADER || ROUTER_PREFIXES.iter().any(|prefix| header.starts_with(prefix))
}

/// The order of the legs of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegOrder {
    /// The decode leg needs the prefill engine's reply.
    PrefillFirst,
    /// The engines exchange the blocks by themselves, and each leg waits for the other one.
    Concurrent,
}

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Ends one leg of a request.
    Abort,
    /// Ends a lease.
    Release,
}

/// A command that ends work or a lease on an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub path: &'static str,
    pub body: Bytes,
}

/// A request as its legs need it.
#[derive(Clone, Copy)]
pub(crate) struct LegInput<'a> {
    pub dialect: Dialect,
    /// The client's body without internal fields.
    pub body: &'a RawBody,
    /// The fields that the router adds for the request's owner.
    pub fields: &'a RouterFields,
    pub model: &'a ModelName,
    /// The id under which engines know the request.
    pub request: &'a RequestId,
    /// How many prompts the body has.
    pub prompts: usize,
}

/// What connects the decode leg with its prefill leg.
#[derive(Clone, Copy)]
pub(crate) enum Link<'a> {
    /// The decode engine computes the prompt.
    None,
    /// The transfer parameters of the prefill engine's reply, as JSON.
    Handoff(&'a str),
    /// The place where the two engines meet.
    Bootstrap(&'a Bootstrap),
}

/// One protocol.
pub(crate) trait Protocol: Send + Sync + fmt::Debug {
    /// The order of the legs.
    fn order(&self) -> LegOrder;

    /// Checks whether the legs can serve a request.
    ///
    /// # Errors
    /// The client's error for a request that the protocol cannot carry.
    fn check(&self, leg: &LegInput<'_>) -> Result<(), ApiError>;

    /// Whether the prefill engine writes the blocks, and only the end of its write frees the decode engine's blocks. Then
    /// a prefill whose decode engine may hold blocks runs to its end, whatever happens to the request. An engine that
    /// notifies the decode engine of a write that will not come ([`PushIdentity::ends_writes`]) needs no such write.
    fn write_frees_decode(&self) -> bool {
        false
    }

    /// Whether engines know the legs by the router's id. If not, only the end of its connection aborts a leg.
    fn names_legs(&self, _leg: &LegInput<'_>) -> bool {
        true
    }

    /// The body of the prefill leg.
    fn prefill_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload;

    /// The body of the decode leg.
    fn decode_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload;

    /// The command that aborts one leg.
    fn abort(&self, request: &RequestId, leg: Leg) -> Command;

    /// The pauses before an abort is repeated, for engines that confirm every abort and know a request only some time
    /// after its body has arrived.
    fn abort_repeats(&self) -> &'static [Duration] {
        &[]
    }

    /// Whether the body of a successful answer confirms a command.
    fn confirms(&self, verb: Verb, body: &[u8]) -> bool;

    /// The command that releases a lease; `None` if the protocol has no leases.
    fn release(&self, handle: Handle, cause: SettlementCause) -> Option<Command>;

    /// The command that releases the lease of a request whose handle is not known; `None` as above.
    fn release_by_request(&self, request: &RequestId, cause: SettlementCause) -> Option<Command>;

    /// The path of liveness probes and health checks.
    fn health_path(&self) -> &'static str;

    /// The path of an engine's load.
    fn load_path(&self) -> &'static str;
}

/// The protocols by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ProtocolKind {
    #[default]
    Vllm,
    VllmStore,
    Sglang,
}

impl ProtocolKind {
    /// The configured protocol; `None` if it is learned from the engine.
    pub(crate) fn configured(setting: ProtocolSetting) -> Option<Self> {
        match setting {
            ProtocolSetting::Auto => None,
            ProtocolSetting::Vllm => Some(Self::Vllm),
            ProtocolSetting::VllmStore => Some(Self::VllmStore),
            ProtocolSetting::Sglang => Some(Self::Sglang),
        }
    }

    pub(crate) fn protocol(self) -> &'static dyn Protocol {
        match self {
            Self::Vllm => &Vllm::Pull,
            Self::VllmStore => &Vllm::Store,
            Self::Sglang => &sglang::Sglang,
        }
    }
}
