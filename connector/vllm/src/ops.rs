//! The operations of the Python half as types: one JSON object per call, named by `op`.

use serde::Deserialize;
use serde_json::Value;

/// One operation.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Op {
    /// The workers' compatibility hash is known: the side channel begins to listen.
    Layout { layout: String },
    /// A request has arrived at the scheduler.
    Queued(QueuedOp),
    /// Events of requests, in order.
    Events { events: Vec<EventOp> },
    /// A finished request's blocks are lent, unless the request was released before.
    Offer { id: String, blocks: Vec<Vec<u32>>, consumers: u64, prompt: String },
    /// Returns ended leases, aborts and verdicts, each once.
    Take,
    /// Consumers of the NixlConnector have acknowledged on every rank.
    Acked { id: String },
    /// Consumers of the NixlConnector have renewed.
    Beat { ids: Vec<String> },
    /// The scheduler has freed the blocks of a lent request.
    Freed { id: String, blocks: usize },
    /// Blocks by state.
    Pool(PoolCounts),
    /// The engine has begun to drain: it takes no new request.
    Draining,
    /// Whether the abort of a request came by a verb, so that its caller still waits for an answer.
    Aborted { id: String },
    /// An id that the Python half does not know was ignored.
    Late {},
    /// A load from a stock producer has ended: used, or refused because the lease may be over.
    Unverified { used: bool },
    /// A request with a handoff has arrived.
    Admit(AdmitOp),
    /// vLLM's notice of a refused request with this handoff.
    GiveBack { params: Value },
    /// The state of a load's lease, after the producer's answer or at most this time.
    State {
        id: String,
        #[serde(default)]
        wait_us: u64,
    },
    /// The workers begin to read.
    Begin { id: String },
    /// The workers have read these.
    Done { ids: Vec<String>, wait_us: u64 },
    /// A load will not happen, or its result is discarded.
    Leave { id: String, reason: String },
    /// Counters, for tests.
    Stats,
}

/// A request at its arrival.
#[derive(Debug, Deserialize)]
pub(crate) struct QueuedOp {
    /// vLLM's internal id.
    pub(crate) id: String,
    /// The router's id, if the router wrote it into the request.
    pub(crate) request_id: Option<String>,
    /// `prefill`, `decode` or `whole`.
    pub(crate) leg: String,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// The client's tag.
    pub(crate) tag: Option<String>,
}

/// One event of one request.
#[derive(Debug, Deserialize)]
pub(crate) struct EventOp {
    /// vLLM's internal id.
    pub(crate) id: String,
    /// The event.
    #[serde(flatten)]
    pub(crate) kind: EventKind,
}

/// The kinds of events, with the words of the Python half. A load with a reason has failed.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum EventKind {
    Started { cached: usize },
    Computed { tokens: usize },
    FirstToken,
    Fetching { blocks: usize },
    Fetched { result: String, reason: Option<String> },
    Abort { how: String },
    Refused { reason: String },
    Ended { outcome: String, generated: usize, computed: usize, blocks: usize },
    Freed { blocks: usize },
}

/// Blocks by state and requests by phase, as the scheduler counts them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub(crate) struct PoolCounts {
    /// Free, without content.
    pub(crate) free: usize,
    /// Free, with content that a request may reuse.
    pub(crate) cached: usize,
    /// In use by requests.
    pub(crate) active: usize,
    /// Written by transfers.
    pub(crate) landing: usize,
    /// Requests that wait.
    pub(crate) waiting: usize,
    /// Requests that run.
    pub(crate) running: usize,
}

/// A request with a handoff.
#[derive(Debug, Deserialize)]
pub(crate) struct AdmitOp {
    /// vLLM's internal id.
    pub(crate) id: String,
    /// The client's `kv_transfer_params`, unchecked.
    pub(crate) params: Value,
    /// Fingerprint of the tokens that this engine would load.
    pub(crate) prompt: String,
    /// Number of those tokens.
    pub(crate) tokens: usize,
    /// Tokens per block of this engine.
    pub(crate) block_tokens: usize,
    /// KV cache groups of this engine.
    pub(crate) groups: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_the_python_half_is_read() {
        for text in [
            r#"{"op":"layout","layout":"00"}"#,
            r#"{"op":"queued","id":"a","request_id":null,"leg":"whole","prompt":3,"tag":null}"#,
            r#"{"op":"events","events":[{"id":"a","kind":"started","cached":1},{"id":"a","kind":"first_token"},
                {"id":"a","kind":"ended","outcome":"stop","generated":1,"computed":2,"blocks":3}]}"#,
            r#"{"op":"events","events":[{"id":"a","kind":"fetched","result":"landed"},
                {"id":"a","kind":"fetched","result":"landed","reason":null},
                {"id":"a","kind":"fetched","result":"gone","reason":"lease_over"}]}"#,
            r#"{"op":"offer","id":"a","blocks":[[1,2],[]],"consumers":1,"prompt":""}"#,
            r#"{"op":"take"}"#,
            r#"{"op":"draining"}"#,
            r#"{"op":"pool","free":1,"cached":2,"active":3,"landing":4,"waiting":5,"running":6}"#,
            r#"{"op":"late","id":"a"}"#,
            r#"{"op":"unverified","id":"a","used":true}"#,
            r#"{"op":"admit","id":"a","params":[],"prompt":"","tokens":1,"block_tokens":2,"groups":1}"#,
            r#"{"op":"give_back","params":{}}"#,
            r#"{"op":"state","id":"a"}"#,
            r#"{"op":"state","id":"a","wait_us":1000}"#,
            r#"{"op":"begin","id":"a","count":3}"#,
            r#"{"op":"done","ids":["a"],"wait_us":2000}"#,
            r#"{"op":"stats"}"#,
        ] {
            serde_json::from_str::<Op>(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
        for text in
            ["{}", r#"{"op":"none"}"#, r#"{"op":"offer","id":"a","blocks":[[-1]],"consumers":1,"prompt":""}"#]
        {
            assert!(serde_json::from_str::<Op>(text).is_err(), "{text}");
        }
    }
}
