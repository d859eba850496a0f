//! One choice, in the form of the endpoint.

use serde::Serialize;

use super::logprobs::{Logprobs, PromptLogprobs};
use super::{ChoiceDelta, Finish, FinishReason, FinishedChoice, StopReason};
use crate::request::Endpoint;

#[derive(Serialize)]
pub(super) struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    body: Body<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Option<&'a StopReason>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Body<'a> {
    Text(&'a str),
    Message(Message<'a>),
    Delta(Delta<'a>),
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl<'a> Choice<'a> {
    pub(super) fn finished(endpoint: Endpoint, choice: &'a FinishedChoice) -> Self {
        let (body, of_prompt) = match endpoint {
            Endpoint::Completions => (Body::Text(&choice.text), Some(choice)),
            Endpoint::Chat => {
                (Body::Message(Message { role: "assistant", content: &choice.text, refusal: () }), None)
            }
        };
        Self {
            index: choice.index,
            body,
            logprobs: choice.logprobs.as_deref().map(|tokens| Logprobs::new(endpoint, tokens, 0)),
            finish_reason: Some(choice.finish.reason),
            stop_reason: Some(choice.finish.stop.as_ref()),
            token_ids: choice.token_ids.as_deref(),
            prompt_token_ids: of_prompt.and_then(|choice| choice.prompt_token_ids.as_deref()),
            prompt_logprobs: of_prompt
                .and_then(|choice| choice.prompt_logprobs.as_deref())
                .map(PromptLogprobs),
        }
    }

    pub(super) fn delta(endpoint: Endpoint, delta: &ChoiceDelta<'a>) -> Self {
        let (body, prompt_token_ids) = match endpoint {
            Endpoint::Completions => (Body::Text(delta.text), delta.prompt_token_ids),
            Endpoint::Chat => (Body::Delta(Delta { role: None, content: Some(delta.text) }), None),
        };
        Self {
            index: delta.index,
            body,
            logprobs: delta.logprobs.map(|tokens| Logprobs::new(endpoint, tokens, delta.text_offset)),
            finish_reason: delta.finish.map(|finish: &Finish| finish.reason),
            stop_reason: delta.finish.map(|finish| finish.stop.as_ref()),
            token_ids: delta.token_ids,
            prompt_token_ids,
            prompt_logprobs: None,
        }
    }

    pub(super) fn role(index: u32) -> Self {
        Self {
            index,
            body: Body::Delta(Delta { role: Some("assistant"), content: Some("") }),
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}
