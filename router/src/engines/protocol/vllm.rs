//! vLLM's pull protocol, which Baton's engines speak too: the prefill engine's reply contains the handoff, and the decode
//! engine reads the blocks. The verbs are those of the contract (docs/reference/contract.md).

use baton_connector::exchange::SettlementCause;
use baton_connector::{Handle, RequestId};
use baton_openai::ApiError;
use bytes::Bytes;
use serde_json::{Value, json};

use super::{Command, LegInput, LegOrder, Link, Protocol, Verb};
use crate::message::payload::Payload;
use crate::message::rewrite::{self, TransferParams};
use crate::metrics::Leg;

/// Which engine moves the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vllm {
    /// The decode engine reads them.
    Pull,
    /// The prefill engine writes them ([`super::vllm_push`]).
    Push,
    /// Both engines' connectors: the prefill engine saves them in a store, and the decode engine loads them by their
    /// hashes. There is no handoff and no lease.
    Store,
}

impl Protocol for Vllm {
    fn order(&self) -> LegOrder {
        match self {
            Self::Pull | Self::Store => LegOrder::PrefillFirst,
            Self::Push => LegOrder::Concurrent,
        }
    }

    fn write_frees_decode(&self) -> bool {
        *self == Self::Push
    }

    fn check(&self, _leg: &LegInput<'_>) -> Result<(), ApiError> {
        Ok(())
    }

    /// A handoff is that of the decode engine which keeps the conversation's last turn.
    fn prefill_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload {
        let transfer = match (self, link) {
            (Self::Pull, Link::Handoff(kept)) => TransferParams::Kept(kept),
            (Self::Pull, _) => TransferParams::Lease,
            (Self::Push, _) => TransferParams::LeaseWithId,
            (Self::Store, _) => TransferParams::None,
        };
        rewrite::prefill_body(leg.dialect, leg.body, leg.fields, leg.model, leg.request, transfer)
    }

    fn decode_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload {
        let handoff = match link {
            Link::Handoff(handoff) if *self != Self::Store => Some(handoff),
            Link::Handoff(_) | Link::None | Link::Bootstrap(_) => None,
        };
        rewrite::decode_body(leg.body, leg.fields, leg.model, handoff)
    }

    /// Both legs have the same id, so an engine that serves both needs the leg.
    fn abort(&self, request: &RequestId, leg: Leg) -> Command {
        command("/abort_requests", &json!({"request_ids": [request.as_str()], "leg": leg.label()}))
    }

    /// In its development mode vLLM has a path of the same name, which answers 200 for every id and ends no lease.
    fn confirms(&self, verb: Verb, body: &[u8]) -> bool {
        let Ok(answer) = serde_json::from_slice::<Value>(body) else { return false };
        match verb {
            Verb::Abort => answer["results"].is_object(),
            Verb::Release => answer["result"].is_string(),
        }
    }

    fn release(&self, handle: Handle, cause: SettlementCause) -> Option<Command> {
        let body = json!({"handle": handle.to_string(), "reason": cause.label()});
        (*self != Self::Store).then(|| command("/kv/release", &body))
    }

    fn release_by_request(&self, request: &RequestId, cause: SettlementCause) -> Option<Command> {
        let body = json!({"request_id": request.as_str(), "reason": cause.label()});
        (*self != Self::Store).then(|| command("/kv/release", &body))
    }

    fn health_path(&self) -> &'static str {
        "/health"
    }

    fn load_path(&self) -> &'static str {
        "/metrics"
    }
}

fn command(path: &'static str, body: &Value) -> Command {
    Command { path, body: Bytes::from(body.to_string()) }
}
