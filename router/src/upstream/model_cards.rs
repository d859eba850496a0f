//! The models that an engine lists at `/v1/models`, and the context length of each: asked for when something needs it, by
//! one task at a time, and kept for a minute, since another version may come up at its address.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::Mutex;

use super::{Engine, Outgoing};

/// A list counts for so long, and an answer that could not be had for so long.
const KEPT_FOR: Duration = Duration::from_secs(60);
const FAILED_FOR: Duration = Duration::from_secs(5);
/// A list is waited for so long, and read so far.
const WITHIN: Duration = Duration::from_secs(1);
const BYTES_MAX: usize = 1 << 20;
/// Models of one engine that are kept, adapters included, and the bytes of a name.
const MODELS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 512;

/// The latest list of one engine.
#[derive(Default)]
pub(crate) struct ModelCards(Mutex<Option<List>>);

struct List {
    at: Instant,
    /// `None`: the engine did not answer with a list.
    models: Option<Vec<Card>>,
}

/// One model: its name, and `max_model_len`.
type Card = (Box<str>, u64);

impl List {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < if self.models.is_some() { KEPT_FOR } else { FAILED_FOR }
    }
}

impl Engine {
    /// Tokens that a prompt and its answer may have together (`max_model_len`) at this engine; `None` where it does not
    /// say within a second or two.
    pub(crate) async fn context_of(self: &Arc<Self>, model: &str) -> Option<u64> {
        // One task asks, and others wait for what it learns.
        let mut list = tokio::time::timeout(WITHIN, self.model_cards.0.lock()).await.ok()?;
        if !list.as_ref().is_some_and(List::is_fresh) {
            let question = Outgoing::get("/v1/models");
            let asked = async { self.call(&question, |_| {}).await?.whole(BYTES_MAX).await };
            let answer = tokio::time::timeout(WITHIN, asked).await.ok().and_then(Result::ok);
            let models = answer.filter(|answer| answer.status.is_success()).and_then(|a| read(&a.body));
            *list = Some(List { at: Instant::now(), models });
        }
        let cards = list.as_ref()?.models.as_ref()?;
        cards.iter().find(|(name, _)| **name == *model).map(|(_, length)| *length)
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
