//! A Messages request as a chat request.
//!
//! | Messages | chat |
//! |---|---|
//! | `system`, `messages` | `messages` ([`super::content`]); a last turn of the assistant is continued |
//! | `tools`, `tool_choice` | `tools`, `tool_choice`, `parallel_tool_calls` |
//! | `stop_sequences` | `stop` |
//! | `thinking` | `enable_thinking` and `thinking` of `chat_template_kwargs`; `thinking_token_budget` |
//! | `output_config` | `reasoning_effort`, `response_format` |
//! | `metadata.user_id` | `user` |
//!
//! Unknown fields are removed, as vLLM's endpoint ignores them. A field that would change the response and has no
//! counterpart is refused.

use serde_json::{Map, Value, json};

use super::content;
use crate::Object;
use crate::code::Code;
use crate::error::ApiError;
use crate::field::whole;
use crate::translate::block::array;
use crate::translate::chat_reply::has_text_to_continue;
use crate::translate::kept::kept;

/// A chat's field with the budget of reasoning. Engines that do not know it, or have no setting for it, may refuse it.
pub const THINKING_BUDGET: &str = "thinking_token_budget";

/// Translates a request of `/v1/messages`.
///
/// # Errors
/// 400 with the field that is invalid or has no counterpart. Fields that a chat has too are not checked here.
pub fn to_chat(body: &Object) -> Result<Object, ApiError> {
    if is_absent(body.get("max_tokens")) {
        return Err(ApiError::invalid("max_tokens", "`max_tokens` is missing"));
    }
    let mut chat = kept(body, &["max_tokens"]);
    conversation(body, &mut chat)?;
    if let Some(stops) = array(body, "stop_sequences")?.filter(|stops| !stops.is_empty()) {
        chat.insert("stop".to_owned(), stops.clone().into());
    }
    if let Some(user) = body.get("metadata").and_then(|metadata| metadata["user_id"].as_str()) {
        chat.insert("user".to_owned(), user.into());
    }
    output_format(body, &mut chat)?;
    if let Some(budget) = thinking_budget(body) {
        chat.insert(THINKING_BUDGET.to_owned(), budget);
    }
    if array(body, "mcp_servers")?.is_some_and(|servers| !servers.is_empty()) {
        let message = "`mcp_servers` is not supported: no servers are called here";
        return Err(ApiError::invalid("mcp_servers", message).with_code(Code::UnsupportedParameter));
    }
    Ok(chat)
}

/// Translates a request of `/v1/messages/count_tokens` to one of `/tokenize`.
///
/// # Errors
/// As [`to_chat`].
pub fn to_tokenize(body: &Object) -> Result<Object, ApiError> {
    let mut chat = Object::new();
    chat.extend(body.get("model").map(|model| ("model".to_owned(), model.clone())));
    conversation(body, &mut chat)?;
    Ok(chat)
}

/// The fields from which a template makes the prompt.
fn conversation(body: &Object, chat: &mut Object) -> Result<(), ApiError> {
    let turns = array(body, "messages")?.map_or(&[][..], Vec::as_slice);
    let Some(last) = turns.last() else {
        return Err(ApiError::invalid("messages", "`messages` must have at least one message"));
    };
    let mut messages = Vec::with_capacity(turns.len() + 1);
    content::system(body.get("system"), &mut messages)?;
    for (index, turn) in turns.iter().enumerate() {
        content::turn(index, turn, &mut messages)?;
    }
    let is_continued = last["role"] == "assistant"
        && messages.last().is_some_and(|message| message.get("tool_calls").is_none())
        && has_text_to_continue(&messages);
    chat.insert("messages".to_owned(), messages.into());
    if is_continued {
        chat.insert("continue_final_message".to_owned(), true.into());
        chat.insert("add_generation_prompt".to_owned(), false.into());
    }
    if let Some(tools) = array(body, "tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.iter().enumerate().map(|(index, value)| tool(index, value));
        chat.insert("tools".to_owned(), tools.collect::<Result<Vec<_>, _>>()?.into());
        tool_choice(body, chat)?;
    }
    reasoning_effort(body, chat);
    template_kwargs(body, chat)
}

/// The budget of reasoning. Chats refuse one that leaves no token for the content, which Messages allow: it is less.
fn thinking_budget(body: &Object) -> Option<Value> {
    let thinking = body.get("thinking").filter(|thinking| thinking["type"] == "enabled")?;
    let budget = thinking.get("budget_tokens")?;
    let most = body.get("max_tokens").and_then(whole).map(|tokens| tokens.saturating_sub(1));
    let most = most.filter(|most| *most >= 0);
    match (whole(budget), most) {
        (Some(tokens), Some(most)) if tokens > most => Some(most.into()),
        _ => Some(budget.clone()),
    }
}

/// One tool of the client. The tools of Anthropic's servers have a `type`.
fn tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let path = format!("tools[{index}]");
    let Some(name) = tool["name"].as_str() else {
        return Err(ApiError::invalid(format!("{path}.name"), format!("`{path}.name` must be a string")));
    };
    if !matches!(tool["type"].as_str(), None | Some("custom")) {
        let message =
            format!("`{path}` is a tool of Anthropic's servers; this model has only tools with a schema");
        return Err(ApiError::invalid(format!("{path}.type"), message).with_code(Code::UnsupportedParameter));
    }
    let mut function = json!({"name": name});
    for (name, own) in [("description", "description"), ("input_schema", "parameters"), ("strict", "strict")]
    {
        if let Some(value) = tool.get(name).filter(|value| !value.is_null()) {
            function[own] = value.clone();
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(body: &Object, chat: &mut Object) -> Result<(), ApiError> {
    let Some(choice) = body.get("tool_choice").filter(|choice| !choice.is_null()) else { return Ok(()) };
    let translated = match (choice["type"].as_str(), choice["name"].as_str()) {
        (Some("auto"), _) => json!("auto"),
        (Some("any"), _) => json!("required"),
        (Some("none"), _) => json!("none"),
        (Some("tool"), Some(name)) => json!({"type": "function", "function": {"name": name}}),
        _ => {
            let message = "`tool_choice.type` must be auto, any, none, or tool with a `name`";
            return Err(ApiError::invalid("tool_choice", message));
        }
    };
    chat.insert("tool_choice".to_owned(), translated);
    if choice["disable_parallel_tool_use"] == true {
        chat.insert("parallel_tool_calls".to_owned(), false.into());
    }
    Ok(())
}

/// The variables of templates that switch reasoning: `enable_thinking` (Qwen, GLM), `thinking` (DeepSeek, Granite). A
/// template ignores the other. The client's own variables win.
fn template_kwargs(body: &Object, chat: &mut Object) -> Result<(), ApiError> {
    let enabled = match body.get("thinking").filter(|thinking| !thinking.is_null()) {
        None => None,
        Some(thinking) => match thinking["type"].as_str() {
            Some("enabled" | "adaptive") => Some(true),
            Some("disabled") => Some(false),
            _ => {
                let message = "`thinking.type` must be enabled, adaptive or disabled";
                return Err(ApiError::invalid("thinking", message));
            }
        },
    };
    let mut kwargs = Map::new();
    for name in ["enable_thinking", "thinking"] {
        kwargs.extend(enabled.map(|enabled| (name.to_owned(), Value::Bool(enabled))));
    }
    match body.get("chat_template_kwargs") {
        None | Some(Value::Null) => {}
        Some(Value::Object(own)) => kwargs.extend(own.clone()),
        Some(_) => {
            let message = "`chat_template_kwargs` must be an object";
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
    }
    if !kwargs.is_empty() {
        chat.insert("chat_template_kwargs".to_owned(), kwargs.into());
    }
    Ok(())
}

/// Templates read it, so it is a part of the prompt.
fn reasoning_effort(body: &Object, chat: &mut Object) {
    if let Some(effort) = body.get("output_config").and_then(|config| config["effort"].as_str()) {
        // A chat has three levels.
        let effort = if matches!(effort, "xhigh" | "max") { "high" } else { effort };
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
}

fn output_format(body: &Object, chat: &mut Object) -> Result<(), ApiError> {
    let Some(config) = body.get("output_config").filter(|config| !config.is_null()) else { return Ok(()) };
    let format = &config["format"];
    match format["type"].as_str() {
        Some("json_schema") if format["schema"].is_object() => {
            let schema = json!({"name": "response", "schema": format["schema"], "strict": true});
            let format = json!({"type": "json_schema", "json_schema": schema});
            chat.insert("response_format".to_owned(), format);
            Ok(())
        }
        None if format.is_null() => Ok(()),
        _ => {
            let message = "`output_config.format` must have the type json_schema and a `schema`";
            Err(ApiError::invalid("output_config.format", message))
        }
    }
}

fn is_absent(value: Option<&Value>) -> bool {
    value.is_none_or(Value::is_null)
}

#[cfg(test)]
mod tests;
