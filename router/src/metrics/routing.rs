//! Decisions about requests: whether another engine prefills, and why an engine was chosen.

use std::sync::{Arc, OnceLock};

use super::legs::Leg;
use super::registry::{Counter, Family, Registry};

static DISAGGREGATION: Family = Family::counter(
    "baton_router_disagg_decisions_total",
    &["decision", "reason"],
    "Requests by where the prefill runs, with the reason: on a prefill engine (`prefill_decode`) or on the decode engine \
     (`decode_only`). `prompt_logprobs`: the response includes prompt tokens. `fell_back`: no prefill engine was \
     available.",
);

static DECISIONS: Family = Family::counter(
    "baton_router_decisions_total",
    &["model", "leg", "policy", "reason"],
    "Choices of an engine, by policy and reason. `/explain` shows the same reason for one request.",
);

pub(super) static FAMILIES: &[&Family] = &[&DISAGGREGATION, &DECISIONS];

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

    /// The index of the kind.
    pub(crate) fn kind(self) -> usize {
        match self {
            Self::Turn => 0,
            Self::Drawn => 1,
            Self::LessLoadedOfTwo => 2,
            Self::LeastLoaded => 3,
            Self::KeysEngine => 4,
            Self::KeysNext => 5,
            Self::NoKey => 6,
            Self::HoldsChunks(_) => 7,
            Self::HoldsBlocks(_) => 8,
            Self::NotCached => 9,
            Self::HoldersBusy => 10,
        }
    }

    /// The label in explanations.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Drawn => "drawn",
            Self::LessLoadedOfTwo => "less_loaded_of_two",
            Self::LeastLoaded => "least_loaded",
            Self::KeysEngine => "keys_engine",
            Self::KeysNext => "keys_next",
            Self::NoKey => "no_key",
            Self::HoldsChunks(_) => "holds_chunks",
            Self::HoldsBlocks(_) => "holds_blocks",
            Self::NotCached => "not_cached",
            Self::HoldersBusy => "holders_busy",
        }
    }
}

/// The reason of a disaggregation decision, which implies the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DisaggregationReason {
    /// The configuration prefills every request of this model remotely.
    Always,
    /// Every condition for a remote prefill is met.
    WorthIt,
    NoPrefillEngines,
    SeveralPrompts,
    PromptLogprobs,
    ShortPrompt,
    /// The decode engine has cached too much of the prompt.
    Cached,
    PrefillBusy,
    /// No prefill engine was available, and the model falls back. A result, never a decision.
    FellBack,
}

impl DisaggregationReason {
    pub(crate) const ALL: [Self; 9] = [
        Self::Always,
        Self::WorthIt,
        Self::NoPrefillEngines,
        Self::SeveralPrompts,
        Self::PromptLogprobs,
        Self::ShortPrompt,
        Self::Cached,
        Self::PrefillBusy,
        Self::FellBack,
    ];

    /// Whether another engine prefills. Otherwise the decode engine computes the whole request.
    pub(crate) fn is_remote(self) -> bool {
        match self {
            Self::Always | Self::WorthIt => true,
            Self::NoPrefillEngines
            | Self::SeveralPrompts
            | Self::PromptLogprobs
            | Self::ShortPrompt
            | Self::Cached
            | Self::PrefillBusy
            | Self::FellBack => false,
        }
    }

    /// `prefill_decode` or `decode_only`.
    pub(crate) fn decision(self) -> &'static str {
        if self.is_remote() { "prefill_decode" } else { "decode_only" }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::WorthIt => "worth_it",
            Self::NoPrefillEngines => "no_prefill_engines",
            Self::SeveralPrompts => "several_prompts",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::ShortPrompt => "short_prompt",
            Self::Cached => "cached",
            Self::PrefillBusy => "prefill_busy",
            Self::FellBack => "fell_back",
        }
    }
}
