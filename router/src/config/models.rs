//! One entry of `models`: what clients ask for, and the two pools that serve it.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    #[garde(dive, custom(not_empty))]
    pub decode: PoolConfig,
    /// What happens when no prefill engine can be had. Default `aggregate`.
    #[serde(default)]
    #[garde(skip)]
    pub fallback: Fallback,
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

/// No name and no alias is given twice: a request must mean one model.
pub(super) fn distinct_names(models: &[ModelConfig], _: &()) -> garde::Result {
    let mut seen = std::collections::BTreeSet::new();
    let names = models.iter().flat_map(|m| std::iter::once(&m.name).chain(&m.aliases));
    for name in names {
        if !seen.insert(name) {
            return Err(garde::Error::new(format!("the name `{name}` is given twice")));
        }
    }
    Ok(())
}

fn not_empty(pool: &PoolConfig, _: &()) -> garde::Result {
    if pool.engines.is_empty() {
        return Err(garde::Error::new("needs at least one engine"));
    }
    Ok(())
}
