//! The models that an engine lists at `/v1/models`, with their context lengths. One task at a time queries the
//! list, when it is needed. The list is queried again after a minute, because another version may start at the
//! same address.
//!
//! An engine that reports KV events is queried at the first event of a connection too, because the list says which
//! models are adapters.
//!
//! Only the first query of an engine is awaited by `/v1/models`. Later calls return the last list while a task
//! queries a newer one. So an unresponsive engine costs `/v1/models` one second, once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::Semaphore;

use super::{Engine, EngineRequest};

/// A list is fresh for this time. After a failed query the engine is not queried for the shorter time.
const LIST_TTL: Duration = Duration::from_secs(60);
const FAILURE_TTL: Duration = Duration::from_secs(5);
/// Maximum wait for a list, by `/v1/models` and by a stream that continues, and maximum size.
const SHOW_TIMEOUT: Duration = Duration::from_secs(1);
const RESUME_TIMEOUT: Duration = Duration::from_secs(2);
const BYTES_MAX: usize = 1 << 20;
/// Maximum models of one engine, with adapters, and maximum bytes of a name.
const MODELS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 512;
/// Maximum engines queried at once, for all requests together.
const CONCURRENT_QUERIES_MAX: usize = 32;

/// One model: its name, and `max_model_len`.
type ModelCard = (Box<str>, u64);

/// The list of one engine.
#[derive(Default)]
pub(crate) struct ModelCards {
    cache: Mutex<CardCache>,
    /// Held by the task that queries.
    query_lock: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct CardCache {
    /// Of the last successful query.
    cards: Vec<ModelCard>,
    listed_at: Option<Instant>,
    asked_at: Option<Instant>,
}

impl CardCache {
    fn length(&self, model: &str) -> Option<u64> {
        self.cards.iter().find(|(name, _)| **name == *model).map(|(_, length)| *length)
    }

    fn is_fresh(&self) -> bool {
        self.listed_at.is_some_and(|at| at.elapsed() < LIST_TTL)
    }

    fn is_due(&self) -> bool {
        !self.is_fresh() && self.asked_at.is_none_or(|at| at.elapsed() >= FAILURE_TTL)
    }
}

impl Engine {
    /// Maximum tokens of a prompt with its output (`max_model_len`) at this engine, for `/v1/models`; `None` if
    /// unknown.
    pub(crate) async fn shown_context_of(self: &Arc<Self>, model: &str) -> Option<u64> {
        let (is_due, is_first) = {
            let cache = self.card_cache();
            (cache.is_due(), cache.asked_at.is_none())
        };
        if is_due {
            let engine = Arc::clone(self);
            // The query continues when the caller has left or its wait is over.
            let query = tokio::spawn(async move {
                let _one_at_a_time = engine.model_cards.query_lock.lock().await;
                let is_due = engine.card_cache().is_due();
                if is_due {
                    engine.query_models(SHOW_TIMEOUT).await;
                }
            });
            if is_first {
                let _ = tokio::time::timeout(SHOW_TIMEOUT, query).await;
            }
        }
        self.card_cache().length(model)
    }

    /// The same for a stream that cannot continue without it. Queries the engine again if its list does not
    /// contain the model.
    pub(crate) async fn needed_context_of(self: &Arc<Self>, model: &str) -> Option<u64> {
        let fresh = |engine: &Self| {
            let cache = engine.card_cache();
            cache.length(model).filter(|_| cache.is_fresh())
        };
        if let Some(length) = fresh(self) {
            return Some(length);
        }
        let query = async {
            let _one_at_a_time = self.model_cards.query_lock.lock().await;
            if fresh(self).is_none() {
                self.query_models(RESUME_TIMEOUT).await;
            }
        };
        let _ = tokio::time::timeout(RESUME_TIMEOUT, query).await;
        fresh(self)
    }

    /// Learns which models of this engine are adapters. A prompt of one is not compared with the blocks of its base.
    pub(crate) async fn learn_adapters(self: &Arc<Self>) {
        // A query that is running learns them.
        if let Ok(_one_at_a_time) = self.model_cards.query_lock.try_lock() {
            self.query_models(SHOW_TIMEOUT).await;
        }
    }

    async fn query_models(self: &Arc<Self>, within: Duration) {
        static ASKING: Semaphore = Semaphore::const_new(CONCURRENT_QUERIES_MAX);
        self.card_cache().asked_at = Some(Instant::now());
        let request = EngineRequest::get("/v1/models");
        let reply = async {
            let _permit = ASKING.acquire().await;
            self.call(&request, |_| {}).await?.read_whole(BYTES_MAX).await
        };
        let list = tokio::time::timeout(within, reply).await.ok().and_then(Result::ok);
        let list = list.filter(|list| list.status.is_success());
        let list = list.and_then(|list| serde_json::from_slice::<Value>(&list.body).ok());
        for adapter in list.iter().flat_map(adapters) {
            self.known_caches.add_adapter(adapter.as_bytes());
        }
        let cards = list.as_ref().and_then(read);
        let (mut cache, now) = (self.card_cache(), Instant::now());
        cache.asked_at = Some(now);
        if let Some(cards) = cards {
            (cache.cards, cache.listed_at) = (cards, Some(now));
        }
    }

    fn card_cache(&self) -> MutexGuard<'_, CardCache> {
        self.model_cards.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The models of a list that have a context length.
fn read(list: &Value) -> Option<Vec<ModelCard>> {
    let card = |card: &Value| {
        let name = card["id"].as_str().filter(|name| name.len() <= NAME_BYTES_MAX)?;
        Some((name.into(), card["max_model_len"].as_u64().filter(|length| *length > 0)?))
    };
    Some(list["data"].as_array()?.iter().filter_map(card).take(MODELS_MAX).collect())
}

/// The adapters of a list: as in vLLM, the models with a `parent`.
fn adapters(list: &Value) -> impl Iterator<Item = &str> {
    let cards = list["data"].as_array().into_iter().flatten().take(MODELS_MAX);
    cards.filter(|card| card["parent"].is_string()).filter_map(|card| card["id"].as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reply_without_a_list_is_empty_and_models_without_a_length_are_ignored() {
        let read = |list: Value| read(&list);
        let cards = json!({"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}, {"max_model_len": 8}, 3,
            {"id": "c", "max_model_len": null}, {"id": "d", "max_model_len": 0}, {"id": "é", "max_model_len": 9}]});
        assert_eq!(read(cards), Some(vec![("a".into(), 8), ("é".into(), 9)]));
        for odd in [json!(null), json!([]), json!({"data": {}}), json!("x")] {
            assert_eq!(read(odd), None);
        }
        let many: Vec<Value> = (0..1000).map(|n| json!({"id": n.to_string(), "max_model_len": 1})).collect();
        assert_eq!(read(json!({"data": many})).map(|cards| cards.len()), Some(MODELS_MAX));
        let long = json!({"data": [{"id": "n".repeat(NAME_BYTES_MAX + 1), "max_model_len": 1}]});
        assert_eq!(read(long), Some(vec![]));
    }

    #[test]
    fn a_model_with_a_parent_is_an_adapter() {
        let list = json!({"data": [{"id": "base", "parent": null}, {"id": "sql", "parent": "base"}, {"parent": "base"},
            3, {"id": 4, "parent": "base"}, {"id": "odd", "parent": {}}, {"id": "chat", "parent": "base"}]});
        assert_eq!(adapters(&list).collect::<Vec<_>>(), ["sql", "chat"]);
        assert_eq!(adapters(&json!({"data": {}})).count() + adapters(&json!([])).count(), 0);
        let many = json!({"data": vec![json!({"id": "a", "parent": "base"}); 1000]});
        assert_eq!(adapters(&many).count(), MODELS_MAX);
    }
}
