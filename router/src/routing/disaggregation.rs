//! Whether a request is prefilled on another engine than the one that decodes it.
//!
//! A remote prefill costs a hop, a transfer and a lease; a short prompt, or one that the decode engine holds most
//! of, is computed there sooner. The decision is made once a decode engine is reserved, because what is cached is
//! cached somewhere.

use crate::config::DisaggregateConfig;
use crate::engines::caches::Holding;
use crate::message::features::Wanted;
use crate::metrics::routing::Why;
use crate::routing::models::Model;

/// What is known when the decision is made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Facts {
    /// The model has prefill engines.
    pub has_prefill: bool,
    /// The request has several prompts: one handoff is one sequence of blocks.
    pub several_prompts: bool,
    /// The answer tells of the prompt's tokens: an engine that is handed the prompt has not computed them.
    pub prompt_logprobs: bool,
    /// Tokens of the prompt, estimated.
    pub prompt_tokens: u64,
    /// The share of it that the decode engine holds, as far as is known: 0 to 1.
    pub cached_share: f64,
    /// Requests in flight at the least loaded prefill engine.
    pub prefill_in_flight: usize,
}

impl Facts {
    /// What is known of a request for one response to one prompt, whose decode engine holds this much of it.
    pub(crate) fn new(model: &Model, features: &Wanted<'_>, holding: Holding) -> Self {
        Self {
            has_prefill: !model.prefill.is_empty(),
            several_prompts: false,
            prompt_logprobs: false,
            prompt_tokens: features.tokens,
            cached_share: holding.share(features),
            prefill_in_flight: model.prefill.least_in_flight(),
        }
    }
}

/// Decides.
pub(crate) fn decide(config: &DisaggregateConfig, facts: &Facts) -> Why {
    if !facts.has_prefill {
        return Why::NoPrefillEngines;
    }
    if facts.several_prompts {
        return Why::SeveralPrompts;
    }
    if facts.prompt_logprobs {
        return Why::PromptLogprobs;
    }
    if config.always || *config == DisaggregateConfig::default() {
        return Why::Always;
    }
    let uncached_share = (1.0 - facts.cached_share).clamp(0.0, 1.0);
    // Estimates of prompts are far below 2^53.
    let uncached = (facts.prompt_tokens as f64 * uncached_share) as u64;
    let busy = |most: u32| facts.prefill_in_flight >= usize::try_from(most).unwrap_or(usize::MAX);
    let against = if facts.prompt_tokens < config.min_prompt_tokens {
        Some(Why::ShortPrompt)
    } else if uncached < config.min_uncached_tokens || uncached_share < config.min_uncached_share {
        let short = facts.prompt_tokens < config.min_uncached_tokens;
        Some(if short { Why::ShortPrompt } else { Why::Cached })
    } else if config.max_prefill_in_flight.is_some_and(busy) {
        Some(Why::PrefillBusy)
    } else {
        None
    };
    against.unwrap_or(Why::WorthIt)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(prompt_tokens: u64, cached_share: f64) -> Facts {
        Facts { has_prefill: true, prompt_tokens, cached_share, ..Facts::default() }
    }

    #[test]
    fn with_the_defaults_every_request_of_one_prompt_is_prefilled_elsewhere() {
        let config = DisaggregateConfig::default();
        assert_eq!(decide(&config, &facts(0, 1.0)), Why::Always);
        let several = Facts { several_prompts: true, ..facts(9_000, 0.0) };
        assert_eq!(decide(&config, &several), Why::SeveralPrompts);
        let logprobs = Facts { prompt_logprobs: true, ..facts(9_000, 0.0) };
        assert_eq!(decide(&config, &logprobs), Why::PromptLogprobs);
        let none = Facts { has_prefill: false, ..facts(9_000, 0.0) };
        assert_eq!(decide(&config, &none), Why::NoPrefillEngines);
    }

    #[test]
    fn each_condition_that_does_not_hold_keeps_the_prompt_where_it_is_decoded() {
        let config = DisaggregateConfig {
            min_prompt_tokens: 100,
            min_uncached_tokens: 512,
            min_uncached_share: 0.3,
            max_prefill_in_flight: Some(4),
            ..DisaggregateConfig::default()
        };
        let of = |facts: Facts| decide(&config, &facts);
        assert_eq!(of(facts(99, 0.0)), Why::ShortPrompt);
        assert_eq!(of(facts(511, 0.0)), Why::ShortPrompt);
        assert_eq!(of(facts(512, 0.0)), Why::WorthIt);
        assert_eq!(of(facts(2048, 0.75)), Why::Cached, "by share");
        assert_eq!(of(facts(1000, 0.5)), Why::Cached, "by tokens");
        assert_eq!(of(facts(2048, 0.5)), Why::WorthIt);
        let busy = Facts { prefill_in_flight: 4, ..facts(2048, 0.0) };
        assert_eq!(of(busy), Why::PrefillBusy);
        let always = DisaggregateConfig { always: true, ..config.clone() };
        assert_eq!(decide(&always, &busy), Why::Always);
    }
}
