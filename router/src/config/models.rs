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
    /// What happens when no prefill engine can be had. Default `aggregate`.
    #[serde(default)]
    #[garde(skip)]
    pub fallback: Fallback,
    /// A decode engine begins to read a prompt's blocks while they are computed, where the prefill engine can lend them
    /// so (Baton's can, for prompts that take more than one step). Costs the decode engine its blocks for the prompt
    /// for as long as that takes. Default true.
    #[serde(default = "yes")]
    #[garde(skip)]
    pub early_handoff: bool,
    /// A streamed answer whose decode engine dies in the middle is continued by another, from the tokens that were
    /// sent, where the request allows it: see docs/resilience.md. Costs a look into every event of such a stream.
    /// Needs `fallback: aggregate`. Default false.
    #[serde(default)]
    #[garde(skip)]
    pub resume: bool,
    /// Bounds of this model's requests that differ from the router's. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub timeouts: ModelTimeouts,
    /// Which requests are prefilled on another engine than the one that decodes them. Default: all.
    #[serde(default)]
    #[garde(dive)]
    pub disaggregate: DisaggregateConfig,
    /// Names of labels. A prefill engine that has the decode engine's values of them is preferred to one that
    /// has not. At most 8; default: none.
    #[serde(default)]
    #[garde(length(max = 8), inner(length(bytes, min = 1, max = 256)))]
    pub pair_by: Vec<String>,
    /// What the router looks at in a request to choose engines.
    #[serde(default)]
    #[garde(dive)]
    pub features: FeaturesConfig,
}

fn yes() -> bool {
    true
}

/// What happens when no prefill engine can be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// A decode engine computes the whole request.
    #[default]
    Aggregate,
    /// The request is refused with 503.
    None,
}
