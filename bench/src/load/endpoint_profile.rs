//! How requests for one endpoint are written: its model, its tokens, and whether it accepts `ignore_eos`.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::call::{Call, CallOutcome};
use super::client::{CancelTrigger, Client, Connections, DisconnectKind};
use super::limits::Limits;
use super::plan::prompts::{Vocabulary, VocabularyError, WORDS};
use super::plan::workload::PlannedRequest;
use super::request::{CompletionSpec, Endpoint, PreparedRequest, Prompt, Streaming};

/// Maximum time of a request about the endpoint itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of words whose tokens are counted by requests of one token, if there is no `/tokenize`.
const WORDS_BY_REQUEST: usize = 4;

/// Writes requests for one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct EndpointProfile {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: String,
    pub(crate) words: Vocabulary,
    pub(crate) streaming: Streaming,
    /// Whether responses have exactly the requested length.
    pub(crate) ignore_eos: bool,
    /// Prefix of the request number in the `user` field. Engine events are found by this tag.
    pub(crate) tag: Option<String>,
    /// Fields that replace those of the request.
    pub(crate) extra: Map<String, Value>,
}

impl EndpointProfile {
    /// The request with this number.
    pub(crate) fn ask(&self, planned: &PlannedRequest, number: usize) -> PreparedRequest {
        let prompt = self.words.prompt(&planned.segments);
        let user = self.tag.as_ref().map(|tag| format!("{tag}-{number:06}"));
        let wish = CompletionSpec {
            ignore_eos: self.ignore_eos,
            streaming: self.streaming,
            user: user.as_deref(),
            extra: Some(&self.extra),
            ..CompletionSpec::new(self.endpoint, &self.model, &prompt, planned.output_tokens)
        };
        wish.prepare()
    }

    /// Finds out whether the endpoint accepts `ignore_eos`, by one request. If that is refused, sends one without.
    ///
    /// # Errors
    /// The endpoint's error to the request without.
    pub(crate) async fn probe(&mut self, client: &Client, planned: &PlannedRequest) -> Result<(), String> {
        for ignore_eos in [true, false] {
            if ignore_eos && !self.ignore_eos {
                continue;
            }
            self.ignore_eos = ignore_eos;
            let call = client.call(&self.ask(planned, 0), &CancelTrigger::Never, DisconnectKind::Fin).await;
            match &call.outcome {
                CallOutcome::Done => return Ok(()),
                CallOutcome::Refused { status: 400 | 422, message, .. }
                    if ignore_eos && message.contains("ignore_eos") => {}
                outcome => return Err(format!("{}: a first request: {outcome}", client.target().url())),
            }
        }
        Ok(())
    }
}

/// The first model in the endpoint's list.
///
/// # Errors
/// If the list is empty or cannot be read.
pub(crate) async fn first_model(client: &Client) -> Result<String, String> {
    let client = client.within(limits(), Connections::Fresh);
    let listed = client.json(&PreparedRequest::get("/v1/models")).await?;
    let first = listed["data"][0]["id"].as_str().map(str::to_owned);
    first.ok_or_else(|| format!("{}: it lists no model; use --model", client.target().url()))
}

fn limits() -> Limits {
    Limits { total: PATIENCE, ..Limits::default() }
}

/// Learns the endpoint's words: from `/tokenize`, or from the usage of requests of one token.
///
/// # Errors
/// If neither works.
pub(crate) async fn learn_words(
    client: &Client,
    endpoint: Endpoint,
    model: &str,
) -> Result<Vocabulary, VocabularyError> {
    let client = client.within(limits(), Connections::Fresh);
    let tokenized = Vocabulary::learn(&WORDS, |text| {
        let client = client.clone();
        let ask = tokenize(endpoint, model, &text);
        async move { count_of(&client.json(&ask).await?) }
    });
    match tokenized.await {
        Ok(words) => Ok(words),
        Err(VocabularyError::NoWords) => Err(VocabularyError::NoWords),
        Err(VocabularyError::Endpoint(_)) => {
            let by_requests = Vocabulary::learn(&WORDS[..WORDS_BY_REQUEST], |text| {
                let (client, prompt) = (client.clone(), Prompt::Text(text));
                let wish = CompletionSpec {
                    streaming: Streaming::Whole,
                    ..CompletionSpec::new(endpoint, model, &prompt, 1)
                };
                let ask = wish.prepare();
                async move {
                    let call: Call = client.call(&ask, &CancelTrigger::Never, DisconnectKind::Fin).await;
                    let counted = call.usage.filter(|_| call.is_done()).map(|usage| usage.prompt_tokens);
                    counted.ok_or_else(|| format!("{}{}: {}", client.target().url(), ask.path, call.outcome))
                }
            });
            by_requests.await
        }
    }
}

/// Token ids for prompts: those of [`WORDS`], which every model has.
///
/// # Errors
/// If there is no `/tokenize`.
pub(crate) async fn learn_ids(client: &Client, model: &str) -> Result<Vocabulary, String> {
    let client = client.within(limits(), Connections::Fresh);
    let text: String = WORDS.iter().map(|word| format!(" {word}")).collect();
    let body = json!({"model": model, "prompt": text, "add_special_tokens": false});
    let answer = client.json(&PreparedRequest::new("/tokenize", body.to_string())).await?;
    let ids = answer["tokens"].as_array().into_iter().flatten();
    let mut ids: Vec<u32> = ids.filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    ids.sort_unstable();
    ids.dedup();
    match ids.len() {
        0 | 1 => Err("the endpoint's /tokenize names no tokens; use --vocab-size".to_owned()),
        _ => Ok(Vocabulary::Ids(ids)),
    }
}

fn tokenize(endpoint: Endpoint, model: &str, text: &str) -> PreparedRequest {
    let body = match endpoint {
        Endpoint::Completions => json!({"model": model, "prompt": text}),
        Endpoint::Chat => json!({"model": model, "messages": [{"role": "user", "content": text}]}),
    };
    PreparedRequest::new("/tokenize", body.to_string())
}

fn count_of(answer: &Value) -> Result<u32, String> {
    let count = answer["count"].as_u64().or_else(|| answer["tokens"].as_array().map(|ids| ids.len() as u64));
    count.and_then(|count| u32::try_from(count).ok()).ok_or_else(|| "/tokenize says no count".to_owned())
}
