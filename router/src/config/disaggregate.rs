//! Which requests are prefilled on another engine than the one that decodes them.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Conditions for a prefill by a prefill engine. All of them must hold; with the defaults they hold for every
/// request.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct DisaggregateConfig {
    /// Every request, regardless of the other keys. Default false.
    #[garde(skip)]
    pub always: bool,
    /// The prompt has at least this many tokens (estimated: `features.bytes_per_token`).
    /// 0 to 100,000,000; default 0.
    #[garde(range(max = 100_000_000))]
    pub min_prompt_tokens: u64,
    /// The decode engine would have to compute at least this many tokens of the prompt. Tokens in its known
    /// cache do not count. 0 to 100,000,000; default 0.
    #[garde(range(max = 100_000_000))]
    pub min_uncached_tokens: u64,
    /// The decode engine would have to compute at least this share of the prompt. 0.0 to 1.0; default 0.0.
    #[garde(range(min = 0.0, max = 1.0))]
    pub min_uncached_share: f64,
    /// The least loaded prefill engine has fewer requests in flight than this. 1 to 1,000,000; default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_prefill_in_flight: Option<u32>,
}

impl Default for DisaggregateConfig {
    fn default() -> Self {
        Self {
            always: false,
            min_prompt_tokens: 0,
            min_uncached_tokens: 0,
            min_uncached_share: 0.0,
            max_prefill_in_flight: None,
        }
    }
}

impl DisaggregateConfig {
    /// Whether it matters what the decode engine holds of a prompt.
    pub(crate) fn asks_what_is_cached(&self) -> bool {
        !self.always && (self.min_uncached_tokens > 0 || self.min_uncached_share > 0.0)
    }
}
