//! Decides whether another engine than the decode engine prefills a request.
//!
//! A remote prefill costs a hop, a transfer and a lease. The decode engine itself is faster for a short prompt or for
//! one that it has mostly cached. The decision follows the reservation of a decode engine, because the cached part
//! depends on that engine.

use crate::config::DisaggregateConfig;
use crate::engines::caches::CachedPrefix;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::DisaggregationReason;
use crate::routing::models::Model;

/// The inputs of the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DisaggregationInputs {
    /// The model has prefill engines.
    pub has_prefill: bool,
    /// Why no request like this one is prefilled remotely.
    pub decode_only: Option<DisaggregationReason>,
    /// Estimated tokens of the prompt.
    pub prompt_tokens: u64,
    /// The share of the prompt that the decode engine has cached, as far as the router knows: 0 to 1.
    pub cached_share: f64,
    /// Requests in flight at the least loaded prefill engine.
    pub prefill_in_flight: usize,
}

impl DisaggregationInputs {
    /// The inputs for a request for one response to one prompt; `cached` is the part that its decode engine has cached.
    pub(crate) fn new(model: &Model, features: &RoutingFeatures<'_>, cached: CachedPrefix) -> Self {
        Self {
            has_prefill: !model.prefill.is_empty(),
            decode_only: None,
            prompt_tokens: features.tokens,
            cached_share: cached.share(features),
            prefill_in_flight: model.prefill.least_in_flight(features.compatibility),
        }
    }
}

/// Decides whether to prefill remotely, and why.
pub(crate) fn decide(config: &DisaggregateConfig, inputs: &DisaggregationInputs) -> DisaggregationReason {
    if !inputs.has_prefill {
        return DisaggregationReason::NoPrefillEngines;
    }
    if let Some(reason) = inputs.decode_only {
        return reason;
    }
    if config.always || *config == DisaggregateConfig::default() {
        return DisaggregationReason::Always;
    }
    let uncached_share = (1.0 - inputs.cached_share).clamp(0.0, 1.0);
    // Estimates of prompts are far below 2^53.
    let uncached = (inputs.prompt_tokens as f64 * uncached_share) as u64;
    let busy = |most: u32| inputs.prefill_in_flight >= usize::try_from(most).unwrap_or(usize::MAX);
    let against = if inputs.prompt_tokens < config.min_prompt_tokens {
        Some(DisaggregationReason::ShortPrompt)
    } else if uncached < config.min_uncached_tokens || uncached_share < config.min_uncached_share {
        let short = inputs.prompt_tokens < config.min_uncached_tokens;
        Some(if short { DisaggregationReason::ShortPrompt } else { DisaggregationReason::Cached })
    } else if config.max_prefill_in_flight.is_some_and(busy) {
        Some(DisaggregationReason::PrefillBusy)
    } else {
        None
    };
    against.unwrap_or(DisaggregationReason::WorthIt)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(prompt_tokens: u64, cached_share: f64) -> DisaggregationInputs {
        DisaggregationInputs {
            has_prefill: true,
            prompt_tokens,
            cached_share,
            ..DisaggregationInputs::default()
        }
    }

    #[test]
    fn with_the_defaults_every_request_of_one_prompt_is_prefilled_elsewhere() {
        let config = DisaggregateConfig::default();
        assert_eq!(decide(&config, &facts(0, 1.0)), DisaggregationReason::Always);
        for reason in [
            DisaggregationReason::SeveralPrompts,
            DisaggregationReason::EngineState,
            DisaggregationReason::PushUnmatched,
        ] {
            let inputs = DisaggregationInputs { decode_only: Some(reason), ..facts(9_000, 0.0) };
            assert_eq!(decide(&config, &inputs), reason);
        }
        let none = DisaggregationInputs { has_prefill: false, ..facts(9_000, 0.0) };
        assert_eq!(decide(&config, &none), DisaggregationReason::NoPrefillEngines);
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
        let of = |facts: DisaggregationInputs| decide(&config, &facts);
        assert_eq!(of(facts(99, 0.0)), DisaggregationReason::ShortPrompt);
        assert_eq!(of(facts(511, 0.0)), DisaggregationReason::ShortPrompt);
        assert_eq!(of(facts(512, 0.0)), DisaggregationReason::WorthIt);
        assert_eq!(of(facts(2048, 0.75)), DisaggregationReason::Cached, "by share");
        assert_eq!(of(facts(1000, 0.5)), DisaggregationReason::Cached, "by tokens");
        assert_eq!(of(facts(2048, 0.5)), DisaggregationReason::WorthIt);
        let busy = DisaggregationInputs { prefill_in_flight: 4, ..facts(2048, 0.0) };
        assert_eq!(of(busy), DisaggregationReason::PrefillBusy);
        let always = DisaggregateConfig { always: true, ..config.clone() };
        assert_eq!(decide(&always, &busy), DisaggregationReason::Always);
    }
}
