//! SGLang's prefill/decode protocol: both engines get the same body at once, with the address of the prefill engine's
//! bootstrap server and a room. The prefill engine writes the blocks to the decode engine that names the same room.
//!
//! Rules of SGLang 0.5.23, with their source below `sglang/srt/`:
//! - A room is unique among the requests in flight at both engines, and never 0: 0 in the decode engine's metadata
//!   buffer means "not yet written" (`disaggregation/utils.py`, `decode.py`).
//! - The prefill rank is the room modulo the number of ranks (`disaggregation/common/conn.py`).
//! - The prefill engine limits itself to one token (`disaggregation/prefill.py`).
//! - `n` above 1 uses one room for all choices (`managers/tokenizer_manager.py`), which loses blocks.
//! - The scheduler aborts by prefix (`managers/scheduler.py`). So all ids of the router have the same length.
//! - `/health` generates a token, and answers after a second at least (`entrypoints/http_server.py`).

use std::time::Duration;

use baton_connector::exchange::SettlementCause;
use baton_connector::{Handle, RequestId};
use baton_openai::{ApiError, Code};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{Command, LegInput, LegOrder, Link, Protocol, Verb};
use crate::message::path::Dialect;
use crate::message::payload::Payload;
use crate::message::random;
use crate::metrics::Leg;

/// The port of a bootstrap server if neither the configuration nor the engine names one.
const BOOTSTRAP_PORT: u16 = 8998;
/// An abort that arrives before its request has no effect, and its answer is the same
/// (`managers/tokenizer_manager.py`, `abort_request`). Without a repetition the engine notices only the closed
/// connection, after up to 4 s.
const ABORT_REPEATS: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(750)];
/// Most prompts of one request: each has a room of its own.
const PROMPTS_MAX: usize = 1024;

/// Where the two engines of one attempt meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bootstrap {
    /// The prefill engine's host as the decode engine reaches it; IPv6 in brackets.
    pub host: String,
    pub port: u16,
    /// One room per prompt.
    pub rooms: Vec<u64>,
}

impl Bootstrap {
    /// A meeting place with random rooms. `rank`: the data-parallel rank of the prefill engine, of `ranks`.
    pub(crate) fn new(
        host: String,
        port: Option<u16>,
        prompts: usize,
        rank: Option<u16>,
        ranks: u16,
    ) -> Self {
        let rooms = (0..prompts.clamp(1, PROMPTS_MAX)).map(|_| room(random::bytes(), rank, ranks)).collect();
        Self { host, port: port.unwrap_or(BOOTSTRAP_PORT), rooms }
    }
}

/// A room from 1 to 2^63 - 1. If the router chooses the rank, it is the room modulo `ranks`.
fn room(random: [u8; 8], rank: Option<u16>, ranks: u16) -> u64 {
    // 62 random bits leave space for the rank.
    let number = 1 + (u64::from_ne_bytes(random) >> 2);
    let Some(rank) = rank.filter(|rank| *rank < ranks) else { return number };
    let ranks = u64::from(ranks);
    // The next multiple is above 0.
    (number / ranks + 1) * ranks + u64::from(rank)
}

/// The facts of an engine's `/server_info` that the router uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    pub bootstrap_port: Option<u16>,
}

impl ServerInfo {
    /// Reads a reply; `None` if the engine is no SGLang engine.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        let info: Value = serde_json::from_slice(body).ok()?;
        info.get("disaggregation_mode")?;
        let port = info["disaggregation_bootstrap_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        Some(Self { bootstrap_port: port.filter(|port| *port > 0) })
    }
}

#[derive(Debug)]
pub(super) struct Sglang;

impl Protocol for Sglang {
    fn order(&self) -> LegOrder {
        LegOrder::Concurrent
    }

    fn check(&self, leg: &LegInput<'_>) -> Result<(), ApiError> {
        for name in ["n", "best_of"] {
            let several = leg.body.field(name).filter(|value| !matches!(*value, b"1" | b"null"));
            if several.is_some() {
                let message = "SGLang's prefill and decode engines serve one choice per request";
                return Err(ApiError::invalid(name, message));
            }
        }
        let set = |name: &str| leg.body.field(name).is_some_and(|value| !matches!(value, b"null" | b"false"));
        if set("echo") && (set("logprobs") || set("top_logprobs")) || set("prompt_logprobs") {
            let message = "SGLang's prefill and decode engines return no log probabilities of a prompt";
            return Err(ApiError::invalid("logprobs", message));
        }
        if leg.prompts > PROMPTS_MAX {
            return Err(ApiError::of(
                Code::TooManyValues,
                format!("a request has at most {PROMPTS_MAX} prompts"),
            ));
        }
        Ok(())
    }

    /// Responses and Messages have no `rid`, and each prompt of a list has one of the engine's own.
    fn names_legs(&self, leg: &LegInput<'_>) -> bool {
        matches!(leg.dialect, Dialect::OpenAi(_)) && leg.prompts <= 1
    }

    fn prefill_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload {
        body(leg, link, Leg::Prefill)
    }

    fn decode_body(&self, leg: &LegInput<'_>, link: Link<'_>) -> Payload {
        body(leg, link, Leg::Decode)
    }

    /// Engines answer 200 for every id.
    fn abort(&self, request: &RequestId, _leg: Leg) -> Command {
        Command { path: "/abort_request", body: Bytes::from(json!({"rid": request.as_str()}).to_string()) }
    }

    fn abort_repeats(&self) -> &'static [Duration] {
        &ABORT_REPEATS
    }

    fn confirms(&self, verb: Verb, _body: &[u8]) -> bool {
        verb == Verb::Abort
    }

    fn release(&self, _handle: Handle, _cause: SettlementCause) -> Option<Command> {
        None
    }

    fn release_by_request(&self, _request: &RequestId, _cause: SettlementCause) -> Option<Command> {
        None
    }

    fn health_path(&self) -> &'static str {
        "/ready"
    }

    fn load_path(&self) -> &'static str {
        "/v1/loads?include=core"
    }
}

fn body(leg: &LegInput<'_>, link: Link<'_>, of: Leg) -> Payload {
    let host;
    let port;
    let room;
    let rid = json!(leg.request.as_str()).to_string();
    let mut added: Vec<(&str, &[u8])> = leg.model.field().into_iter().collect();
    if let Link::Bootstrap(bootstrap) = link {
        // A request with several prompts needs lists of the same length.
        let listed = |value: Value| match leg.prompts {
            0 | 1 => value.to_string(),
            prompts => Value::from(vec![value; prompts]).to_string(),
        };
        host = listed(json!(bootstrap.host));
        port = listed(json!(bootstrap.port));
        room = match bootstrap.rooms[..] {
            [room] => room.to_string(),
            _ => json!(bootstrap.rooms).to_string(),
        };
        added.push(("bootstrap_host", host.as_bytes()));
        added.push(("bootstrap_port", port.as_bytes()));
        added.push(("bootstrap_room", room.as_bytes()));
    }
    if matches!(leg.dialect, Dialect::OpenAi(_)) {
        added.push(("rid", rid.as_bytes()));
    }
    if of == Leg::Prefill && leg.body.has("stream") {
        added.push(("stream", b"false"));
    }
    leg.fields.add_to(&mut added, of);
    leg.body.write(&added, leg.fields.unset(of)).into()
}

#[cfg(test)]
mod tests;
