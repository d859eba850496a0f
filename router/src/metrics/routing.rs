//! What was decided about requests: whether another engine prefills, and by what reason engines were chosen.

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

/// What a policy decided for one leg of a model. A reason's series begins with its first decision.
pub(crate) struct Decisions {
    registry: Arc<Registry>,
    labels: [String; 3],
    reasons: [OnceLock<Counter>; Reason::KINDS],
}

impl Decisions {
    pub(super) fn new(registry: &Arc<Registry>, model: &str, leg: Leg, policy: &str) -> Self {
        let labels = [model, leg.label(), policy].map(str::to_owned);
        Self { registry: Arc::clone(registry), labels, reasons: Default::default() }
    }

    /// Counts an engine that was chosen.
    pub(crate) fn count(&self, reason: Reason) {
        let [model, leg, policy] = &self.labels;
        let counter = || self.registry.counter(&DECISIONS, &[model, leg, policy, reason.label()]);
        self.reasons[reason.kind()].get_or_init(counter).increment(1);
    }
}

/// What was decided about requests.
pub(crate) struct RoutingMetrics {
    disaggregations: [Counter; Why::ALL.len()],
}

impl RoutingMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let counter = |why: Why| registry.counter(&DISAGGREGATION, &[why.decision(), why.label()]);
        Self { disaggregations: Why::ALL.map(counter) }
    }

    /// Counts whether a request's prefill was another engine's; once for each request.
    pub(crate) fn disaggregation(&self, why: Why) {
        self.disaggregations[why as usize].increment(1);
    }
}

/// Why an engine was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It was its turn.
    Turn,
    /// It was drawn.
    Drawn,
    /// It was the less loaded of two that were drawn.
    LessLoadedOfTwo,
    /// It had the least load.
    LeastLoaded,
    /// The request's key belongs to it.
    KeysEngine,
    /// The engine of the request's key had its share; this is the key's next.
    KeysNext,
    /// The request has no key; this engine had the least load.
    NoKey,
    /// It holds this many chunks of the prompt, as the router's own decisions say.
    HoldsChunks(u32),
    /// It holds this many KV blocks of the prompt, as its events say.
    HoldsBlocks(u32),
    /// No engine holds enough of the prompt; this engine had the least load.
    NotCached,
    /// Those that hold the prompt are too busy; this engine had the least load.
    HoldersBusy,
}

impl Reason {
    /// How many kinds there are.
    pub(crate) const KINDS: usize = 11;

    /// Which kind it is.
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

    /// As explanations have it.
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

/// What was decided, which is said by why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// Every request of this model is.
    Always,
    /// Every condition holds.
    WorthIt,
    NoPrefillEngines,
    SeveralPrompts,
    PromptLogprobs,
    ShortPrompt,
    /// The decode engine holds too much of it.
    Cached,
    PrefillBusy,
    /// No prefill engine could be had, and the model falls back. Never decided, only come to.
    FellBack,
}

impl Why {
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

    /// Whether another engine prefills. Otherwise the decode engine computes everything.
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
