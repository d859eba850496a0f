//! Requests, by model: how they end, how long their parts take, and what they cost in tokens.

use std::sync::{Arc, OnceLock};

use baton_connector::exchange::{Outcome, Phase};

use super::page::Scrape;
use super::registry::{Counter, Gauge, Histogram, Registry, families};

/// Seconds, the buckets of vLLM's time to first token, so that dashboards can overlay the two.
pub(super) const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Seconds, the buckets of vLLM's end-to-end latency, with lower ones for requests that are refused at once.
const DURATION: &[f64] = &[
    0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// Seconds, the buckets of vLLM's inter-token latency, with lower ones for small models.
const PER_TOKEN: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 80.0,
];
/// Seconds, from the router's own processing time to the time in an engine's queue.
const WAIT: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 120.0, 600.0,
];

families! {
    counter REQUESTS("baton_router_requests_total", ["model", "outcome", "code"]):
        "Ended requests, by outcome and status class (`none`: no status sent). `not_admitted`: queue full or wait too \
         long. `no_engine`: no usable engine for a leg. `passed`: served by one engine (embeddings, tokens). \
         `rejected`: refused before an engine was chosen.";
    gauge IN_FLIGHT("baton_router_requests_in_flight", []):
        "Requests in flight, of at most `limits.in_flight`.";
    counter DISCONNECTS("baton_router_disconnects_total", ["phase"]):
        "Cancelled requests, by phase: the client disconnected before the response was complete.";
    histogram DURATION_SECONDS("baton_router_request_duration_seconds", ["model"], DURATION):
        "From a request's head to its end, for all outcomes.";
    histogram FIRST_TOKEN_SECONDS("baton_router_time_to_first_token_seconds", ["model", "streaming"], FIRST_TOKEN):
        "From a request's head to the first byte of the response body; without streaming, to the whole response.";
    histogram INTER_TOKEN_SECONDS("baton_router_inter_token_latency_seconds", ["model"], PER_TOKEN):
        "Between two pieces of a streamed response; engines send one per token or step.";
    histogram PER_TOKEN_SECONDS("baton_router_time_per_output_token_seconds", ["model"], PER_TOKEN):
        "Time from the first to the last piece of a completed stream with `usage`, divided by its tokens after the \
         first.";
    counter TOKENS("baton_router_tokens_total", ["model", "kind"]):
        "Tokens, from the engines' `usage`: `prompt`, `cached` (part of prompt), `completion` (events, if a stream \
         ended before its usage).";
    histogram QUEUE_SECONDS("baton_router_queue_seconds", ["model"], WAIT):
        "From a request's head to the first attempt: body, checks, admission, choice.";
    histogram PREFILL_SECONDS("baton_router_prefill_seconds", ["model"], FIRST_TOKEN):
        "From the first prefill attempt to the handoff, retries included.";
    histogram GAP_SECONDS("baton_router_gap_seconds", ["model"], WAIT):
        "From the handoff to the first decode attempt: the router's part of the gap.";
    histogram ACCEPT_SECONDS("baton_router_accept_seconds", ["model"], FIRST_TOKEN):
        "From the first decode attempt to the head of a successful response: queue, fetch and first event. Stock vLLM \
         sends the head of a stream at once, so that most of this is not included.";
    histogram DECODE_SECONDS("baton_router_decode_seconds", ["model"], DURATION):
        "From a decode engine's acceptance of a request to the end of its response.";
    gauge AGE("baton_router_inflight_request_age_seconds", []):
        "Age of the oldest request in flight; 0 when there is none.";
    gauge OLDER("baton_router_inflight_requests_older_than", ["seconds"]):
        "Requests in flight that are older than this.";
}

/// Values of the label of [`OLDER`].
const AGES: [u64; 6] = [1, 10, 60, 300, 600, 3600];

/// The label of requests without a known model.
const UNKNOWN: &str = "unknown";

/// The outcome of a request, for the label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// The request was an exchange.
    Exchange(Outcome),
    /// The request was refused before an exchange.
    Rejected,
    /// The request was passed to one engine unchanged.
    Passed,
}

impl RequestOutcome {
    /// Number of labels.
    const KINDS: usize = 12;

    fn index(self) -> usize {
        match self {
            Self::Exchange(Outcome::Completed) => 0,
            Self::Exchange(Outcome::PrefillRefused) => 1,
            Self::Exchange(Outcome::PrefillExhausted) => 2,
            Self::Exchange(Outcome::DecodeRefused) => 3,
            Self::Exchange(Outcome::DecodeExhausted) => 4,
            Self::Exchange(Outcome::StreamBroken) => 5,
            Self::Exchange(Outcome::ClientGone(_)) => 6,
            Self::Exchange(Outcome::Dropped(_)) => 7,
            Self::Rejected => 8,
            Self::Passed => 9,
            Self::Exchange(Outcome::NotAdmitted) => 10,
            Self::Exchange(Outcome::NoEngine) => 11,
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Exchange(outcome) => outcome.label(),
            Self::Rejected => "rejected",
            Self::Passed => "passed",
        }
    }
}

/// Status classes: 2xx to 5xx, and none.
const CODES: [&str; 5] = ["none", "2xx", "3xx", "4xx", "5xx"];

/// The class of a status sent to a client; 499 and 0 are not sent.
fn code(status: u16) -> usize {
    match status {
        200..300 => 1,
        300..400 => 2,
        499 => 0,
        400..500 => 3,
        500..600 => 4,
        _ => 0,
    }
}

/// The requests of all models.
pub(crate) struct RequestMetrics {
    pub in_flight: Gauge,
    /// Requests without a model.
    pub unknown: Arc<ModelMetrics>,
    disconnects: [Counter; Phase::ALL.len()],
}

impl RequestMetrics {
    pub(super) fn new(registry: &Arc<Registry>) -> Self {
        Self {
            in_flight: registry.gauge(&IN_FLIGHT, &[]),
            unknown: Arc::new(ModelMetrics::new(registry, UNKNOWN)),
            disconnects: Phase::ALL.map(|phase| registry.counter(&DISCONNECTS, &[phase.label()])),
        }
    }

    /// Counts a cancelled request.
    pub(crate) fn count_disconnect(&self, phase: Phase) {
        self.disconnects[phase as usize].increment(1);
    }
}

/// The requests of one model.
pub(crate) struct ModelMetrics {
    registry: Arc<Registry>,
    model: String,
    /// By outcome and status class; created when first counted.
    requests: [[OnceLock<Counter>; CODES.len()]; RequestOutcome::KINDS],
    tokens: OnceLock<[Counter; 3]>,
    pub duration: Histogram,
    first_token: [OnceLock<Histogram>; 2],
    pub inter_token: Histogram,
    pub per_token: Histogram,
    pub queue: Histogram,
    pub prefill: Histogram,
    pub gap: Histogram,
    pub accept: Histogram,
    pub decode: Histogram,
}

impl ModelMetrics {
    pub(crate) fn new(registry: &Arc<Registry>, model: &str) -> Self {
        let histogram = |family| registry.histogram(family, &[model]);
        Self {
            registry: Arc::clone(registry),
            model: model.to_owned(),
            requests: Default::default(),
            tokens: OnceLock::new(),
            duration: histogram(&DURATION_SECONDS),
            first_token: Default::default(),
            inter_token: histogram(&INTER_TOKEN_SECONDS),
            per_token: histogram(&PER_TOKEN_SECONDS),
            queue: histogram(&QUEUE_SECONDS),
            prefill: histogram(&PREFILL_SECONDS),
            gap: histogram(&GAP_SECONDS),
            accept: histogram(&ACCEPT_SECONDS),
            decode: histogram(&DECODE_SECONDS),
        }
    }

    /// Counts a request that has ended.
    pub(crate) fn count_end(&self, end: RequestOutcome, status: u16) {
        let class = code(status);
        let labels = [self.model.as_str(), end.label(), CODES[class]];
        let counter = &self.requests[end.index()][class];
        counter.get_or_init(|| self.registry.counter(&REQUESTS, &labels)).increment(1);
    }

    /// The time to the first token, separate for streamed and other responses.
    pub(crate) fn first_token(&self, streamed: bool) -> &Histogram {
        let label = if streamed { "true" } else { "false" };
        self.first_token[usize::from(streamed)]
            .get_or_init(|| self.registry.histogram(&FIRST_TOKEN_SECONDS, &[&self.model, label]))
    }

    /// Counts the tokens of a response's `usage`.
    pub(crate) fn count_tokens(&self, prompt: u64, cached: u64, completion: u64) {
        let counters = self.tokens.get_or_init(|| {
            ["prompt", "cached", "completion"]
                .map(|kind| self.registry.counter(&TOKENS, &[&self.model, kind]))
        });
        for (counter, tokens) in counters.iter().zip([prompt, cached, completion]) {
            counter.increment(tokens);
        }
    }
}

/// Adds the ages of the requests in flight, in seconds, the oldest first.
pub(crate) fn look_up_ages(scrape: &mut Scrape, ages: &[f64]) {
    scrape.put(&AGE, &[], ages.first().copied().unwrap_or(0.0));
    for seconds in AGES {
        let older = ages.iter().filter(|age| **age > seconds as f64).count();
        scrape.put(&OLDER, &[&seconds.to_string()], older as f64);
    }
}
