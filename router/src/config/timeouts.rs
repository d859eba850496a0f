//! Timeouts of requests and connections, attempts per leg, and the budget of retries.

use std::time::Duration;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Comments more often than this only cost bytes: clients and proxies wait for seconds.
const SSE_KEEPALIVE_MIN: Duration = Duration::from_millis(100);

/// How long each part of a request may take or be silent, in milliseconds.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct TimeoutsConfig {
    /// The head of a client's request, from its first byte to its last; a slower one gets 408. 1 to
    /// 3,600,000; default 10,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub head_ms: u64,
    /// A client's connection without a request, before the first one and between two. 1 to 3,600,000; default 75,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub client_idle_ms: u64,
    /// The whole body of a client's request. 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub body_ms: u64,
    /// A client that makes its response wait and takes less than 64 bytes per second of it. Only such waits count. 1 to
    /// 3,600,000; default 60,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub client_stall_ms: u64,
    /// A client whose host acknowledges neither data nor keepalive probes is lost: the router ends its
    /// request in every phase. A client that only reads slowly is not lost. 0 (the system's timeout, which
    /// may be hours) to 3,600,000, at least 1,000; default 20,000.
    #[garde(range(max = 3_600_000))]
    pub client_lost_ms: u64,
    /// The same for an engine's host: its connections are broken. 0 (the system's timeout) to 3,600,000, at
    /// least 1,000; default 20,000.
    #[garde(range(max = 3_600_000))]
    pub engine_lost_ms: u64,
    /// A connection to an engine. 1 to 60,000; default 2,000.
    #[garde(range(min = 1, max = 60_000))]
    pub connect_ms: u64,
    /// A prefill engine that sends nothing. 1 to 3,600,000; default 120,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub prefill_silence_ms: u64,
    /// A decode engine before the first byte of its response. Without streaming this is the whole generation.
    /// 1 to 3,600,000; default 600,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub decode_first_byte_ms: u64,
    /// If an engine with a request sends nothing on any connection for this time, the router probes its
    /// health. After two probes without a response, of 2 s each, the engine has failed. Shorter than a lease.
    /// 1 to 3,600,000; default 5,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub liveness_probe_ms: u64,
    /// A decode engine between two pieces of its response. 1 to 3,600,000; default 60,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub stream_silence_ms: u64,
    /// A streamed response that sends nothing for this time, from its request on, gets an SSE comment (`: ka`), so that
    /// proxies and clients keep the connection. The first one also sends status 200: a later error is an event of the
    /// stream, and clients do not retry it. See docs/how-to/fleets/long-silences.md. 0 (no comments) to 3,600,000, at least
    /// 100; default 0.
    #[garde(range(max = 3_600_000))]
    pub sse_keepalive_ms: u64,
    /// One try of a settlement.
    /// 1 to 60,000; default 5,000.
    #[garde(range(min = 1, max = 60_000))]
    pub settle_ms: u64,
    /// Longest wait for the reply of a prefill engine without the abort verb, if the client leaves when that
    /// reply is due. Then the router half-closes the connection. A stock engine drops a reply that it has not
    /// written before, and its blocks stay pinned. 0 (no wait) to 10,000; default 20.
    #[garde(range(max = 10_000))]
    pub abandon_wait_ms: u64,
    /// An idle connection to an engine is not used again after this. Engines must keep idle connections for
    /// longer (vLLM: 5 s). 0 to 3,600,000; default 4,000.
    #[garde(range(max = 3_600_000))]
    pub engine_idle_ms: u64,
    /// A whole request, from its head to the last byte of its response, including its body and its wait. Then
    /// the router aborts it on its engines. Before the response's head the client gets 504, in a stream a
    /// typed error. 0 (no bound) to 86,400,000; default 0.
    #[garde(range(max = 86_400_000))]
    pub request_ms: u64,
}

/// The bounds that a model may have of its own, in milliseconds; each as in `timeouts`. Default: none.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ModelTimeouts {
    /// A prefill engine that sends nothing. 1 to 3,600,000.
    #[garde(inner(range(min = 1, max = 3_600_000)))]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub prefill_silence_ms: Option<u64>,
    /// A decode engine before the first byte of its response. 1 to 3,600,000.
    #[garde(inner(range(min = 1, max = 3_600_000)))]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub decode_first_byte_ms: Option<u64>,
    /// A decode engine between two pieces of its response. 1 to 3,600,000.
    #[garde(inner(range(min = 1, max = 3_600_000)))]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub stream_silence_ms: Option<u64>,
    /// Silence of a stream before a comment. 0 (no comments) to 3,600,000, at least 100.
    #[garde(inner(range(max = 3_600_000)))]
    #[schemars(range(max = 3_600_000))]
    pub sse_keepalive_ms: Option<u64>,
    /// A whole request. 0 (no bound) to 86,400,000.
    #[garde(inner(range(max = 86_400_000)))]
    #[schemars(range(max = 86_400_000))]
    pub request_ms: Option<u64>,
}

impl TimeoutsConfig {
    /// How long a client's host may acknowledge nothing. Zero: the system's timeout.
    pub(crate) fn client_lost(&self) -> Duration {
        lost(self.client_lost_ms)
    }

    /// How long an engine's host may acknowledge nothing. Zero: the system's timeout.
    pub(crate) fn engine_lost(&self) -> Duration {
        lost(self.engine_lost_ms)
    }

    /// The timeouts of a model's requests.
    pub(crate) fn of(&self, model: &ModelTimeouts) -> RequestTimeouts {
        let ms = |of_model: Option<u64>, general: u64| Duration::from_millis(of_model.unwrap_or(general));
        let request = ms(model.request_ms, self.request_ms);
        let comments = ms(model.sse_keepalive_ms, self.sse_keepalive_ms);
        RequestTimeouts {
            prefill_silence: ms(model.prefill_silence_ms, self.prefill_silence_ms),
            decode_first_byte: ms(model.decode_first_byte_ms, self.decode_first_byte_ms),
            stream_silence: ms(model.stream_silence_ms, self.stream_silence_ms),
            sse_keepalive: (!comments.is_zero()).then(|| comments.max(SSE_KEEPALIVE_MIN)),
            request: (!request.is_zero()).then_some(request),
        }
    }
}

/// The system's keepalive timers count whole seconds, so one second is the minimum.
fn lost(ms: u64) -> Duration {
    Duration::from_millis(if ms == 0 { 0 } else { ms.max(1_000) })
}

/// Timeouts of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestTimeouts {
    pub prefill_silence: Duration,
    pub decode_first_byte: Duration,
    pub stream_silence: Duration,
    /// Between comments in a silent stream; `None`: no comments.
    pub sse_keepalive: Option<Duration>,
    /// From the request's head to the end of its response; `None`: no bound.
    pub request: Option<Duration>,
}

impl Default for TimeoutsConfig {
    fn default() -> Self {
        Self {
            head_ms: 10_000,
            client_idle_ms: 75_000,
            body_ms: 30_000,
            client_stall_ms: 60_000,
            client_lost_ms: 20_000,
            engine_lost_ms: 20_000,
            connect_ms: 2_000,
            prefill_silence_ms: 120_000,
            decode_first_byte_ms: 600_000,
            liveness_probe_ms: 5_000,
            stream_silence_ms: 60_000,
            sse_keepalive_ms: 0,
            settle_ms: 5_000,
            abandon_wait_ms: 20,
            engine_idle_ms: 4_000,
            request_ms: 0,
        }
    }
}

/// How often a leg is tried, each time on another engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AttemptsConfig {
    /// Prefill engines that one request may try. 1 to 16; default 2.
    #[garde(range(min = 1, max = 16))]
    pub prefill: u16,
    /// Decode engines that one request may try, with the same handoff. 1 to 16; default 3.
    #[garde(range(min = 1, max = 16))]
    pub decode: u16,
    /// Tries of one settlement. 1 to 16; default 4.
    #[garde(range(min = 1, max = 16))]
    pub settle: u16,
}

impl Default for AttemptsConfig {
    fn default() -> Self {
        Self { prefill: 2, decode: 3, settle: 4 }
    }
}

/// The budget of retries, for the whole router. Without it, slow engines would get more work the slower they
/// are. `attempts` bounds one request; this bounds all requests together.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct RetriesConfig {
    /// Concurrent retries, in percent of the requests in flight. 0 to 1,000; default 20.
    #[garde(range(max = 1000))]
    pub budget_percent: u32,
    /// Retries per second that are always allowed, so that a router with few requests can retry. 0 to
    /// 1,000,000; default 10.
    #[garde(range(max = 1_000_000))]
    pub min_per_second: u32,
    /// The pause before the third attempt of a leg, in milliseconds. The router draws it between half and all
    /// of this, and doubles it for each further attempt. The second attempt, at another engine, follows at
    /// once. 0 to 60,000; default 25.
    #[garde(range(max = 60_000))]
    pub pause_ms: u64,
    /// The longest pause, in milliseconds. 0 to 60,000; default 250.
    #[garde(range(max = 60_000))]
    pub pause_max_ms: u64,
}

impl Default for RetriesConfig {
    fn default() -> Self {
        Self { budget_percent: 20, min_per_second: 10, pause_ms: 25, pause_max_ms: 250 }
    }
}
