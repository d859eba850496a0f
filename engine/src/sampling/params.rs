//! A request's parameters and a model's defaults, resolved to numbers.

use baton_openai::GenerateRequest;

use super::exclusions::TokenExclusions;
use crate::model::generation::GenerationDefaults;

/// A temperature below this means greedy (vLLM's `_SAMPLING_EPS`).
pub(super) const GREEDY_BELOW: f32 = 1e-5;

/// Parameters of the choice of tokens. Every field has a value.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// Seed of all random choices of the sequence.
    pub seed: u64,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Each token with the value that is added to its logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that cannot be chosen.
    pub exclusions: TokenExclusions,
    /// Number of alternatives with log-probabilities; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    /// Greedy, without other parameters.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            exclusions: TokenExclusions::default(),
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// The request's values, then the model's, then OpenAI's (temperature 1, everything else off).
    ///
    /// `eos` are the model's end-of-sequence tokens. The exclusions are those of `min_tokens` only: the others need the
    /// tokenizer ([`TokenExclusions::resolve`]). `random_seed` is used if the request has no seed or the seed -1,
    /// as in vLLM.
    #[must_use]
    pub fn resolve(
        request: &GenerateRequest,
        defaults: &GenerationDefaults,
        eos: &[u32],
        random_seed: u64,
    ) -> Self {
        let wish = &request.sampling;
        Self {
            temperature: wish.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_k: wish.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: wish.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: wish.min_p.or(defaults.min_p).unwrap_or(0.0),
            seed: wish.seed.filter(|seed| *seed != -1).map_or(random_seed, i64::cast_unsigned),
            frequency_penalty: wish.frequency_penalty.unwrap_or(0.0),
            presence_penalty: wish.presence_penalty.unwrap_or(0.0),
            repetition_penalty: wish.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            logit_bias: wish.logit_bias.clone(),
            exclusions: TokenExclusions::before_min_tokens(request, eos),
            logprobs: request.logprobs,
        }
    }

    /// The same for choice `choice` of a prompt. The seeds count up from the request's, as in vLLM: choice 1 of a seed
    /// equals the result of the next seed. Every prompt of a request draws as in a request of its own.
    #[must_use]
    pub fn for_choice(mut self, choice: u32) -> Self {
        self.seed = self.seed.wrapping_add(u64::from(choice));
        self
    }

    /// Whether the most likely token is always chosen.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Whether [`super::TokenCounts`] are needed.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}
