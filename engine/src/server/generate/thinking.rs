//! The reasoning of a chat's responses: where it begins, what comes before a constrained text, and its budget.

use std::sync::Arc;

use baton_openai::{ApiError, ChatInput, GenerateRequest, Input, ToolChoice};

use crate::grammar::{ReasoningRules, can_precede_grammar};
use crate::model::output::{OutputFormat, PromptEnd, ReasoningTrack};
use crate::model::tokenizer::DecodeMode;
use crate::scheduler::sequence::{NewSequence, Purpose};
use crate::server::served_model::ServedModel;

/// The field with the budget, as vLLM spells it.
pub(super) const BUDGET: &str = "thinking_token_budget";

/// Tokens at the end of a prompt in which a reasoning tag is searched.
const TAIL_TOKENS: usize = 32;

/// The end of a chat's prompt.
pub(super) fn end_of_prompt(
    model: &ServedModel,
    chat: &ChatInput,
    format: OutputFormat,
    prompt: &[u32],
) -> PromptEnd {
    let tail = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
    format.end_of_prompt(chat, &model.tokenizer.decode(tail, DecodeMode::All))
}

/// Follows the reasoning of a response; `None` if there is none. A constraint replaces reasoning whose opening tag is
/// no token: the first token would not show whether the model reasons.
pub(super) fn track(
    model: &ServedModel,
    request: &GenerateRequest,
    prompt: &[u32],
) -> Option<ReasoningTrack> {
    let Input::Chat(chat) = &request.input else { return None };
    let format = model.output.of_request(request);
    let track = ReasoningTrack::new(format, end_of_prompt(model, chat, format, prompt))?;
    let precedes = request.structured.is_none() || can_precede_grammar(&track, &model.tokenizer);
    precedes.then_some(track)
}

/// What restricts the reasoning of a request's responses; `None` if nothing does.
///
/// # Errors
/// 400 if the budget leaves no token for the content, or cannot be enforced.
pub(super) fn rules(
    model: &ServedModel,
    request: &GenerateRequest,
    sequence: &NewSequence,
) -> Result<Option<Arc<ReasoningRules>>, ApiError> {
    let (budget, constrained) = (request.thinking_token_budget, request.structured.is_some());
    check_budget(request, sequence)?;
    if budget.is_none() && !constrained {
        return Ok(None);
    }
    let Some(track) = track(model, request, &sequence.prompt) else { return Ok(None) };
    let may_call = track.has_channels() && chooses_calls(&request.input);
    let mut rules = ReasoningRules::new(track, &model.tokenizer, model.vocab);
    if constrained && !may_call {
        rules = rules.without_stops(&sequence.stop.stop_ids);
    }
    if let Some(tokens) = budget {
        let unable = || ApiError::invalid(BUDGET, format!("`{BUDGET}` is not supported by this model"));
        rules = rules.with_budget(tokens).ok_or_else(unable)?;
    }
    Ok(Some(Arc::new(rules)))
}

/// A producer generates one token, whatever the client's limit is.
fn check_budget(request: &GenerateRequest, sequence: &NewSequence) -> Result<(), ApiError> {
    let Some((budget, most)) = request.thinking_token_budget.zip(request.max_tokens) else { return Ok(()) };
    if budget < most || matches!(sequence.purpose, Purpose::Produce { .. }) {
        return Ok(());
    }
    let message = format!("`{BUDGET}` {budget} must be less than `max_tokens` {most}");
    Err(ApiError::invalid(BUDGET, message))
}

/// Whether the model may call a tool instead of writing the content.
fn chooses_calls(input: &Input) -> bool {
    match input {
        Input::Chat(chat) => !chat.tools.is_empty() && chat.tool_choice == ToolChoice::Auto,
        Input::Prompts(_) => false,
    }
}
