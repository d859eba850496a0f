//! One choice, in the form of the endpoint.

use serde::Serialize;

use super::logprobs::{Logprobs, PromptLogprobs};
use super::{CallDelta, ChoiceDelta, Finish, FinishReason, FinishedChoice, StopReason, ToolCall};
use crate::request::Endpoint;

#[derive(Serialize)]
pub(super) struct Choice<'a> {
    index: u32,
    #[serde(flatten)]
    body: Body<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
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
    content: Option<&'a str>,
    refusal: (),
    /// The reasoning under both names: DeepSeek's, which most clients read, and vLLM's.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [ToolCall],
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [CallDelta],
}

/// A text that ended by itself after calls ends because of them. One that was cut off does not.
fn reason_of(finish: &Finish, called: bool) -> &'static str {
    match finish.reason {
        FinishReason::Stop if called => "tool_calls",
        reason => reason.as_str(),
    }
}

impl<'a> Choice<'a> {
    pub(super) fn finished(endpoint: Endpoint, choice: &'a FinishedChoice) -> Self {
        let (body, of_prompt) = match endpoint {
            Endpoint::Completions => (Body::Text(&choice.text), Some(choice)),
            Endpoint::Chat => (Body::Message(Message::of(choice)), None),
        };
        Self {
            index: choice.index,
            body,
            logprobs: choice.logprobs.as_deref().map(|tokens| Logprobs::new(endpoint, tokens, 0)),
            finish_reason: Some(reason_of(&choice.finish, choice.parts.called)),
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
            Endpoint::Chat => (Body::Delta(Delta::of(delta)), None),
        };
        Self {
            index: delta.index,
            body,
            logprobs: delta.logprobs.map(|tokens| Logprobs::new(endpoint, tokens, delta.text_offset)),
            finish_reason: delta.finish.map(|finish| reason_of(finish, delta.called)),
            stop_reason: delta.finish.map(|finish| finish.stop.as_ref()),
            token_ids: delta.token_ids,
            prompt_token_ids,
            prompt_logprobs: None,
        }
    }

    pub(super) fn role(index: u32, reasoning: Option<&'a str>) -> Self {
        let delta = Delta {
            role: Some("assistant"),
            content: Some(""),
            reasoning_content: reasoning,
            reasoning,
            tool_calls: &[],
        };
        Self {
            index,
            body: Body::Delta(delta),
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

impl<'a> Message<'a> {
    /// Without text, a message with other parts has `content` null, as OpenAI's.
    fn of(choice: &'a FinishedChoice) -> Self {
        let (text, parts) = (choice.text.as_str(), &choice.parts);
        let reasoning = Some(parts.reasoning.as_str()).filter(|text| !text.is_empty());
        let has_parts = reasoning.is_some() || !parts.calls.is_empty();
        Self {
            role: "assistant",
            content: Some(text).filter(|text| !(text.is_empty() && has_parts)),
            refusal: (),
            reasoning_content: reasoning,
            reasoning,
            tool_calls: &parts.calls,
        }
    }
}

impl<'a> Delta<'a> {
    fn of(delta: &ChoiceDelta<'a>) -> Self {
        let has_parts = delta.reasoning.is_some() || !delta.calls.is_empty();
        Self {
            role: None,
            content: Some(delta.text).filter(|text| !(text.is_empty() && has_parts)),
            reasoning_content: delta.reasoning,
            reasoning: delta.reasoning,
            tool_calls: delta.calls,
        }
    }
}
