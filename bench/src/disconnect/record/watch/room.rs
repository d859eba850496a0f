//! How long an answer may be: what the engines' contexts and pools have room for.

use super::{PATIENCE, Watch, Watched};

/// Tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Room {
    /// Of a prompt and its answer, at the engine with the shortest context; `None` where one does not say.
    pub(crate) context: Option<u64>,
    /// Of all requests together, at the engine with the smallest pool, of those that say.
    pub(crate) pool: Option<u64>,
}

impl Watch {
    /// Asks every engine.
    pub(crate) async fn room(&self, model: &str) -> Room {
        let (mut contexts, mut pools) = (Vec::new(), Vec::new());
        for engine in &self.engines {
            contexts.push(engine.context(model).await);
            pools.extend(engine.pool_tokens().await);
        }
        let context = contexts.into_iter().collect::<Option<Vec<u64>>>();
        Room { context: context.and_then(|all| all.into_iter().min()), pool: pools.into_iter().min() }
    }
}

impl Watched {
    /// `max_model_len`, as vLLM's engines and Baton's tell it.
    async fn context(&self, model: &str) -> Option<u64> {
        let listed = self.origin.get_json("/v1/models", PATIENCE).await.ok()?;
        let cards = listed["data"].as_array()?;
        let ours = cards.iter().find(|card| card["id"] == model).or(cards.first())?;
        ours["max_model_len"].as_u64()
    }

    async fn pool_tokens(&self) -> Option<u64> {
        let samples = self.origin.samples(PATIENCE).await.ok()?;
        let (labels, _) = samples.of("vllm:cache_config_info").next()?;
        let number = |name: &str| labels.get(name)?.parse::<u64>().ok();
        number("num_gpu_blocks")?.checked_mul(number("block_size")?)
    }
}
