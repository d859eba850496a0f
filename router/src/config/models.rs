//! One entry of `models`: what clients ask for, and the two pools that serve it.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::disaggregate::DisaggregateConfig;
use super::features::FeaturesConfig;
use super::pool::PoolConfig;
use super::timeouts::ModelTimeouts;

/// One model and the engines that serve it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name that clients send as `model`, and that the engines know.
    #[garde(length(bytes, min = 1, max = 256))]
    pub name: String,
    /// Other names that clients may send; engines are always sent `name`. Default: none.
    #[serde(default)]
    #[garde(length(max = 64), inner(length(bytes, min = 1, max = 256)))]
    pub aliases: Vec<String>,
    /// The engines that prefill. Without any, decode engines compute whole requests.
    #[serde(default)]
    #[garde(dive)]
    pub prefill: PoolConfig,
    /// The engines that decode. At least one.
    #[garde(dive)]
    pub decode: PoolConfig,
    /// What happens if no prefill engine is available. Default `aggregate`.
    #[serde(default)]
    #[garde(skip)]
    pub fallback: Fallback,
    /// A decode engine begins to read a prompt's blocks while the prefill engine computes them, if that
    /// engine supports it. Baton's engine does, for prompts of more than one step. During this time the
    /// decode engine already holds its blocks for the prompt. Default true.
    #[serde(default = "yes")]
    #[garde(skip)]
    pub early_handoff: bool,
    /// If the decode engine of a stream fails, another one continues from the tokens that were sent, if the
    /// request allows it: see docs/explanation/resilience.md. The router then reads every event of such a
    /// stream. Needs `fallback: aggregate`. Default false.
    #[serde(default)]
    #[garde(skip)]
    pub resume: bool,
    /// Timeouts of this model that differ from the router's. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub timeouts: ModelTimeouts,
    /// Which requests are prefilled by a prefill engine. Default: all.
    #[serde(default)]
    #[garde(dive)]
    pub disaggregate: DisaggregateConfig,
    /// Names of labels. The router prefers a prefill engine with the decode engine's values of these labels.
    /// At most 8; default: none.
    #[serde(default)]
    #[garde(length(max = 8), inner(length(bytes, min = 1, max = 256)))]
    pub pair_by: Vec<String>,
    /// What the router reads of a request to choose engines.
    #[serde(default)]
    #[garde(dive)]
    pub features: FeaturesConfig,
}

fn yes() -> bool {
    true
}

/// What happens if no prefill engine is available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// A decode engine computes the whole request.
    #[default]
    Aggregate,
    /// The request is refused with 503.
    None,
}
