//! What an endpoint is told, and what has to be known of it first: its model, its tokens, whether it lets an answer go on
//! past its end.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::ask::{Ask, Endpoint, Prompt, Streaming, Wish};
use super::call::{Call, Outcome};
use super::client::{Client, Connections, Leave, Manner};
use super::limits::Limits;
use super::plan::prompts::{WORDS, Words, WordsError};
use super::plan::workload::Planned;

/// An endpoint is asked about itself for at most so long; a request of one token among others.
const PATIENCE: Duration = Duration::from_secs(60);
/// Words that are learnt by requests of one token each, where there is no `/tokenize`.
const WORDS_BY_REQUEST: usize = 4;

/// Writes requests for one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct Speaker {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: String,
    pub(crate) words: Words,
    pub(crate) streaming: Streaming,
    /// Answers have the length that was asked for.
    pub(crate) ignore_eos: bool,
    /// Before the number of a request in its `user` field, by which engines' events are found again.
    pub(crate) tag: Option<String>,
    /// Put over everything else, field by field.
    pub(crate) extra: Map<String, Value>,
}

impl Speaker {
    /// The request with this number.
    pub(crate) fn ask(&self, planned: &Planned, number: usize) -> Ask {
        let prompt = self.words.prompt(&planned.segments);
        let user = self.tag.as_ref().map(|tag| format!("{tag}-{number:06}"));
        let wish = Wish {
            ignore_eos: self.ignore_eos,
            streaming: self.streaming,
            user: user.as_deref(),
            extra: Some(&self.extra),
            ..Wish::new(self.endpoint, &self.model, &prompt, planned.output_tokens)
        };
        wish.ask()
    }

    /// Finds out whether `ignore_eos` is understood, by one request with it; if it is refused, by one without.
    ///
    /// # Errors
    /// What the endpoint says to a request without.
    pub(crate) async fn try_out(&mut self, client: &Client, planned: &Planned) -> Result<(), String> {
        for ignore_eos in [true, false] {
            if ignore_eos && !self.ignore_eos {
                continue;
            }
            self.ignore_eos = ignore_eos;
            let call = client.call(&self.ask(planned, 0), &Leave::Never, Manner::Fin).await;
            match &call.outcome {
                Outcome::Done => return Ok(()),
                Outcome::Refused { status: 400 | 422, message, .. }
                    if ignore_eos && message.contains("ignore_eos") => {}
                outcome => return Err(format!("{}: a first request: {outcome}", client.target().url())),
            }
        }
        Ok(())
    }
}

/// The first model that the endpoint lists.
///
/// # Errors
/// In words, when it lists none.
pub(crate) async fn first_model(client: &Client) -> Result<String, String> {
    let client = client.within(limits(), Connections::Fresh);
    let listed = client.json(&Ask::get("/v1/models")).await?;
    let first = listed["data"][0]["id"].as_str().map(str::to_owned);
    first.ok_or_else(|| format!("{}: it lists no model; use --model", client.target().url()))
}

fn limits() -> Limits {
    Limits { total: PATIENCE, ..Limits::default() }
}

/// Learns the endpoint's words: from `/tokenize`, or from what requests of one token are counted as.
///
/// # Errors
/// When neither says anything.
pub(crate) async fn learn_words(
    client: &Client,
    endpoint: Endpoint,
    model: &str,
) -> Result<Words, WordsError> {
    let client = client.within(limits(), Connections::Fresh);
    let tokenized = Words::learn(&WORDS, |text| {
        let client = client.clone();
        let ask = tokenize(endpoint, model, &text);
        async move { count_of(&client.json(&ask).await?) }
    });
    match tokenized.await {
        Ok(words) => Ok(words),
        Err(WordsError::NoWords) => Err(WordsError::NoWords),
        Err(WordsError::Endpoint(_)) => {
            let by_requests = Words::learn(&WORDS[..WORDS_BY_REQUEST], |text| {
                let (client, prompt) = (client.clone(), Prompt::Text(text));
                let wish = Wish { streaming: Streaming::Whole, ..Wish::new(endpoint, model, &prompt, 1) };
                let ask = wish.ask();
                async move {
                    let call: Call = client.call(&ask, &Leave::Never, Manner::Fin).await;
                    let counted = call.usage.filter(|_| call.is_done()).map(|usage| usage.prompt_tokens);
                    counted.ok_or_else(|| format!("{}{}: {}", client.target().url(), ask.path, call.outcome))
                }
            });
            by_requests.await
        }
    }
}

/// Token ids to write prompts with: those of our words, which every model has.
///
/// # Errors
/// When there is no `/tokenize`.
pub(crate) async fn learn_ids(client: &Client, model: &str) -> Result<Words, String> {
    let client = client.within(limits(), Connections::Fresh);
    let text: String = WORDS.iter().map(|word| format!(" {word}")).collect();
    let body = json!({"model": model, "prompt": text, "add_special_tokens": false});
    let answer = client.json(&Ask::new("/tokenize", body.to_string())).await?;
    let ids = answer["tokens"].as_array().into_iter().flatten();
    let mut ids: Vec<u32> = ids.filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    ids.sort_unstable();
    ids.dedup();
    match ids.len() {
        0 | 1 => Err("the endpoint's /tokenize names no tokens; use --vocab-size".to_owned()),
        _ => Ok(Words::Ids(ids)),
    }
}

fn tokenize(endpoint: Endpoint, model: &str, text: &str) -> Ask {
    let body = match endpoint {
        Endpoint::Completions => json!({"model": model, "prompt": text}),
        Endpoint::Chat => json!({"model": model, "messages": [{"role": "user", "content": text}]}),
    };
    Ask::new("/tokenize", body.to_string())
}

fn count_of(answer: &Value) -> Result<u32, String> {
    let count = answer["count"].as_u64().or_else(|| answer["tokens"].as_array().map(|ids| ids.len() as u64));
    count.and_then(|count| u32::try_from(count).ok()).ok_or_else(|| "/tokenize says no count".to_owned())
}
