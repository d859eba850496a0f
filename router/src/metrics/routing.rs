//! Decisions about requests: whether another engine prefills, and why an engine was chosen.

use std::sync::{Arc, OnceLock};

use super::legs::Leg;
use super::registry::{Counter, Histogram, Registry, families};

/// Seconds of a wait for token ids, which `tokenize.timeout_ms` bounds.
const TOKENIZE: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0];

families! {
    counter DISAGGREGATION("baton_router_disagg_decisions_total", ["decision", "reason"]):
        "Requests by where the prefill runs, with the reason: on a prefill engine (`prefill_decode`) or on the decode \
         engine (`decode_only`). `prompt_logprobs`: the response includes prompt tokens. `engine_state`: a response that \
         depends on state of its engine. `push_unmatched`: a prefill engine that writes the blocks could not match the \
         legs. `fell_back`: no prefill engine was available. `decoded_first`: the decode engine had cached enough, by its \
         own reply (`disaggregate.cache_hit_threshold`).";
    counter DECISIONS("baton_router_decisions_total", ["model", "leg", "policy", "reason"]):
        "Choices of an engine, by policy and reason. `/explain` shows the same reason for one request.";
    counter TOKENIZED("baton_router_tokenize_total", ["model", "result"]):
        "Requests of models with `tokenize`, by where their token ids come from (`client`, `engine`, `cache`), or why there \
         are none. `unsupported`: the engines cannot tell the ids of such a request. `no_engine`: none is in use, or all \
         have failed repeatedly.";
    histogram TOKENIZE_SECONDS("baton_router_tokenize_seconds", ["model"], TOKENIZE):
        "Wait of a request for its token ids from an engine, also in vain.";
}

/// A policy's decisions for one leg of a model. The series of a reason begins with its first decision.
pub(crate) struct DecisionCounters {
    registry: Arc<Registry>,
    labels: [String; 3],
    reasons: [OnceLock<Counter>; ChoiceReason::KINDS],
}

impl DecisionCounters {
    pub(super) fn new(registry: &Arc<Registry>, model: &str, leg: Leg, policy: &str) -> Self {
        let labels = [model, leg.label(), policy].map(str::to_owned);
        Self { registry: Arc::clone(registry), labels, reasons: Default::default() }
    }

    /// Counts a chosen engine.
    pub(crate) fn count(&self, reason: ChoiceReason) {
        let [model, leg, policy] = &self.labels;
        let counter = || self.registry.counter(&DECISIONS, &[model, leg, policy, reason.label()]);
        self.reasons[reason.kind()].get_or_init(counter).increment(1);
    }
}

/// Questions for the token ids of one model's prompts.
pub(crate) struct TokenizeMetrics {
    results: [Counter; TokenizeResult::ALL.len()],
    pub wait: Histogram,
}

impl TokenizeMetrics {
    pub(super) fn new(registry: &Registry, model: &str) -> Self {
        let counter = |result: TokenizeResult| registry.counter(&TOKENIZED, &[model, result.label()]);
        Self {
            results: TokenizeResult::ALL.map(counter),
            wait: registry.histogram(&TOKENIZE_SECONDS, &[model]),
        }
    }

    /// Counts a request; once per request.
    pub(crate) fn count(&self, result: TokenizeResult) {
        self.results[result as usize].increment(1);
    }
}

/// Decisions about disaggregation.
pub(crate) struct RoutingMetrics {
    disaggregations: [Counter; DisaggregationReason::ALL.len()],
}

impl RoutingMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |reason: DisaggregationReason| {
            registry.counter(&DISAGGREGATION, &[reason.decision(), reason.label()])
        };
        Self { disaggregations: DisaggregationReason::ALL.map(counter) }
    }

    /// Counts whether another engine prefills a request; once per request.
    pub(crate) fn count_disaggregation(&self, reason: DisaggregationReason) {
        self.disaggregations[reason as usize].increment(1);
    }
}

/// Why an engine was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChoiceReason {
    /// The engine's turn.
    Turn,
    /// Random.
    Drawn,
    /// The less loaded of two random engines.
    LessLoadedOfTwo,
    /// The least load.
    LeastLoaded,
    /// The engine owns the request's key.
    KeysEngine,
    /// The key's engine had its share; this is the key's next engine.
    KeysNext,
    /// The request has no key; this engine had the least load.
    NoKey,
    /// The engine holds this many chunks of the prompt, according to the router's own decisions.
    HoldsChunks(u32),
    /// The engine holds this many KV blocks of the prompt, according to its events.
    HoldsBlocks(u32),
    /// No engine holds enough of the prompt; this engine had the least load.
    NotCached,
    /// The engines that hold the prompt are too busy; this engine had the least load.
    HoldersBusy,
}

impl ChoiceReason {
    /// Number of kinds.
    pub(crate) const KINDS: usize = 11;

    /// The index and the label of the kind.
    fn row(self) -> (usize, &'static str) {
        match self {
            Self::Turn => (0, "turn"),
            Self::Drawn => (1, "drawn"),
            Self::LessLoadedOfTwo => (2, "less_loaded_of_two"),
            Self::LeastLoaded => (3, "least_loaded"),
            Self::KeysEngine => (4, "keys_engine"),
            Self::KeysNext => (5, "keys_next"),
            Self::NoKey => (6, "no_key"),
            Self::HoldsChunks(_) => (7, "holds_chunks"),
            Self::HoldsBlocks(_) => (8, "holds_blocks"),
            Self::NotCached => (9, "not_cached"),
            Self::HoldersBusy => (10, "holders_busy"),
        }
    }

    /// The index of the kind.
    pub(crate) fn kind(self) -> usize {
        self.row().0
    }

    /// The label in explanations.
    pub(crate) fn label(self) -> &'static str {
        self.row().1
    }
}

baton_connector::labelled! {
    /// Where a prompt's token ids come from, or why there are none.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum TokenizeResult {
        /// The request contains them.
        Client => "client",
        Engine => "engine",
        /// An equal request was answered before.
        Cache => "cache",
        /// The body is below `tokenize.min_bytes`.
        Small => "small",
        /// The prompt contains parts that are no text, or is not one prompt.
        NotText => "not_text",
        /// As many requests as `tokenize.concurrent` wait.
        Busy => "busy",
        Late => "late",
        /// The engine refused the question, or it cannot be translated.
        Refused => "refused",
        /// The engine failed or broke off.
        Failed => "failed",
        /// The reply has no ids, or more than the prompt can have.
        Malformed => "malformed",
        /// The engines have no endpoint for the request.
        Unsupported => "unsupported",
        /// No engine is in use, or all have failed repeatedly.
        NoEngine => "no_engine",
    }
}

baton_connector::labelled! {
    /// The reason of a disaggregation decision, which implies the decision.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum DisaggregationReason {
        /// The configuration prefills every request of this model remotely.
        Always => "always",
        /// Every condition for a remote prefill is met.
        WorthIt => "worth_it",
        NoPrefillEngines => "no_prefill_engines",
        SeveralPrompts => "several_prompts",
        PushUnmatched => "push_unmatched",
        PromptLogprobs => "prompt_logprobs",
        /// A response that an engine stores, continues or runs in the background, or that calls tools of the engine.
        EngineState => "engine_state",
        ShortPrompt => "short_prompt",
        /// The decode engine has cached too much of the prompt.
        Cached => "cached",
        PrefillBusy => "prefill_busy",
        /// The decode engine has cached enough of the prompt by its own reply. A result, never a decision.
        DecodedFirst => "decoded_first",
        /// No prefill engine was available, and the model falls back. A result, never a decision.
        FellBack => "fell_back",
    }
}

impl DisaggregationReason {
    /// Whether another engine prefills. Otherwise the decode engine computes the whole request.
    pub(crate) fn is_remote(self) -> bool {
        match self {
            Self::Always | Self::WorthIt => true,
            Self::NoPrefillEngines
            | Self::SeveralPrompts
            | Self::PushUnmatched
            | Self::PromptLogprobs
            | Self::EngineState
            | Self::ShortPrompt
            | Self::Cached
            | Self::PrefillBusy
            | Self::DecodedFirst
            | Self::FellBack => false,
        }
    }

    /// `prefill_decode` or `decode_only`.
    pub(crate) fn decision(self) -> &'static str {
        if self.is_remote() { "prefill_decode" } else { "decode_only" }
    }
}
