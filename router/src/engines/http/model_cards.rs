//! The models that an engine lists at `/v1/models`, and the context length of each: asked for when something needs it, by
//! one task at a time, and again after a minute, since another version may come up at its address.
//!
//! Only the first question about an engine is waited for by those who show the models: later ones get what the last
//! answer said, while a newer one is asked for aside. So an engine that does not answer costs `/v1/models` one second, once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::Semaphore;

use super::{Engine, Outgoing};

/// An answer counts for so long; after a question without one the engine is left alone for so long.
const KEPT_FOR: Duration = Duration::from_secs(60);
const FAILED_FOR: Duration = Duration::from_secs(5);
/// A list is waited for so long, by those who show it and by a stream that goes on, and read so far.
const SHOWN_WITHIN: Duration = Duration::from_secs(1);
const NEEDED_WITHIN: Duration = Duration::from_secs(2);
const BYTES_MAX: usize = 1 << 20;
/// Models of one engine that are kept, adapters included, and the bytes of a name.
const MODELS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 512;
/// Engines that are asked at once, for all requests together.
const ASKED_AT_ONCE: usize = 32;

/// One model: its name, and `max_model_len`.
type Card = (Box<str>, u64);

/// What one engine lists.
#[derive(Default)]
pub(crate) struct ModelCards {
    known: Mutex<Known>,
    /// Held by the task that asks.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Known {
    /// Of the last list that came.
    cards: Vec<Card>,
    listed: Option<Instant>,
    asked: Option<Instant>,
}

impl Known {
    fn length(&self, model: &str) -> Option<u64> {
        self.cards.iter().find(|(name, _)| **name == *model).map(|(_, length)| *length)
    }

    fn is_fresh(&self) -> bool {
        self.listed.is_some_and(|at| at.elapsed() < KEPT_FOR)
    }

    fn is_due(&self) -> bool {
        !self.is_fresh() && self.asked.is_none_or(|at| at.elapsed() >= FAILED_FOR)
    }
}

impl Engine {
    /// Tokens that a prompt and its answer may have together (`max_model_len`) at this engine, to be shown; `None` where
    /// it has not said.
    pub(crate) async fn shown_context_of(self: &Arc<Self>, model: &str) -> Option<u64> {
        let (is_due, is_first) = {
            let known = self.known_models();
            (known.is_due(), known.asked.is_none())
        };
        if is_due {
            let engine = Arc::clone(self);
            // It goes on when its asker has left or waits no longer.
            let asks = tokio::spawn(async move {
                let _one_at_a_time = engine.model_cards.asking.lock().await;
                let is_due = engine.known_models().is_due();
                if is_due {
                    engine.ask_models(SHOWN_WITHIN).await;
                }
            });
            if is_first {
                let _ = tokio::time::timeout(SHOWN_WITHIN, asks).await;
            }
        }
        self.known_models().length(model)
    }

    /// The same for a stream that cannot go on without it: asked for again where the engine has not listed the model.
    pub(crate) async fn needed_context_of(self: &Arc<Self>, model: &str) -> Option<u64> {
        let fresh = |engine: &Self| {
            let known = engine.known_models();
            known.length(model).filter(|_| known.is_fresh())
        };
        if let Some(length) = fresh(self) {
            return Some(length);
        }
        let asked = async {
            let _one_at_a_time = self.model_cards.asking.lock().await;
            if fresh(self).is_none() {
                self.ask_models(NEEDED_WITHIN).await;
            }
        };
        let _ = tokio::time::timeout(NEEDED_WITHIN, asked).await;
        fresh(self)
    }

    async fn ask_models(self: &Arc<Self>, within: Duration) {
        static ASKING: Semaphore = Semaphore::const_new(ASKED_AT_ONCE);
        self.known_models().asked = Some(Instant::now());
        let question = Outgoing::get("/v1/models");
        let asked = async {
            let _place = ASKING.acquire().await;
            self.call(&question, |_| {}).await?.whole(BYTES_MAX).await
        };
        let answer = tokio::time::timeout(within, asked).await.ok().and_then(Result::ok);
        let cards = answer.filter(|answer| answer.status.is_success()).and_then(|a| read(&a.body));
        let (mut known, now) = (self.known_models(), Instant::now());
        known.asked = Some(now);
        if let Some(cards) = cards {
            (known.cards, known.listed) = (cards, Some(now));
        }
    }

    fn known_models(&self) -> MutexGuard<'_, Known> {
        self.model_cards.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The models of a list that say how long a context they have.
fn read(body: &[u8]) -> Option<Vec<Card>> {
    let list: Value = serde_json::from_slice(body).ok()?;
    let card = |card: &Value| {
        let name = card["id"].as_str().filter(|name| name.len() <= NAME_BYTES_MAX)?;
        Some((name.into(), card["max_model_len"].as_u64().filter(|length| *length > 0)?))
    };
    Some(list["data"].as_array()?.iter().filter_map(card).take(MODELS_MAX).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_no_list_is_nothing_and_what_has_no_length_is_left_out() {
        let read = |list: Value| read(list.to_string().as_bytes());
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
}
