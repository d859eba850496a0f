//! The maximum length of a response: the contexts and pools of the engines.

use super::{EngineWatch, PATIENCE, WatchedEngine};

/// Tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCapacity {
    /// Prompt and response, at the engine with the shortest context; `None` if an engine does not report it.
    pub(crate) context: Option<u64>,
    /// All requests together, at the engine with the smallest pool, of those that report it.
    pub(crate) pool: Option<u64>,
}

impl EngineWatch {
    /// Queries every engine.
    pub(crate) async fn token_capacity(&self, model: &str) -> TokenCapacity {
        let (mut contexts, mut pools) = (Vec::new(), Vec::new());
        for engine in &self.engines {
            contexts.push(engine.context(model).await);
            pools.extend(engine.pool_tokens().await);
        }
        let context = contexts.into_iter().collect::<Option<Vec<u64>>>();
        TokenCapacity {
            context: context.and_then(|all| all.into_iter().min()),
            pool: pools.into_iter().min(),
        }
    }
}

impl WatchedEngine {
    /// `max_model_len`, which vLLM's and Baton's engines report.
    async fn context(&self, model: &str) -> Option<u64> {
        let listed = self.service.get_json("/v1/models", PATIENCE).await.ok()?;
        let cards = listed["data"].as_array()?;
        let ours = cards.iter().find(|card| card["id"] == model).or(cards.first())?;
        ours["max_model_len"].as_u64()
    }

    async fn pool_tokens(&self) -> Option<u64> {
        let samples = self.service.samples(PATIENCE).await.ok()?;
        let (labels, _) = samples.of("vllm:cache_config_info").next()?;
        let number = |name: &str| labels.get(name)?.parse::<u64>().ok();
        number("num_gpu_blocks")?.checked_mul(number("block_size")?)
    }
}
