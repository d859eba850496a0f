//! A request of Responses as a chat request.
//!
//! | Responses | chat |
//! |---|---|
//! | `instructions`, `input` | `messages` ([`super::items`]) |
//! | `max_output_tokens` | `max_tokens` |
//! | `tools` of type `function`, `tool_choice` | `tools`, `tool_choice` |
//! | `text.format` | `response_format` |
//! | `reasoning.effort` | `reasoning_effort` |
//! | `include` with log probabilities, `top_logprobs` | `logprobs`, `top_logprobs` |
//!
//! What needs stored responses, another program than the engine, or another response than a chat's is refused by name.
//! `store` has no effect, because nothing is stored. Other unknown fields are removed, as vLLM's endpoint ignores them.

use serde_json::{Map, Value, json};

use super::items;
use crate::code::Code;
use crate::error::{ApiError, shortened};
use crate::field::{Fields, must_be};
use crate::translate::block::array;
use crate::translate::kept::kept;

/// Fields that mean the same in a chat, besides those of every API.
const KEPT: [&str; 9] = [
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "user",
];

/// Fields that need a stored object.
const STORED: [&str; 4] = ["previous_response_id", "conversation", "prompt", "previous_input_messages"];

/// The part of a response that contains log probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Parts that no response of a chat has, because nothing runs tools. The content of reasoning is not encrypted.
const WITHOUT_EFFECT: [&str; 7] = [
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// Translates a request of `/v1/responses`.
///
/// # Errors
/// 400 with the field that is invalid or has no counterpart. Fields that a chat has too are not checked here.
pub fn to_chat(body: &Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let fields = Fields::new(body);
    check_supported(fields)?;
    let mut chat = kept(body, &KEPT);
    if let Some(most) = fields.get("max_output_tokens") {
        chat.insert("max_tokens".to_owned(), most.clone());
    }
    items::conversation(fields, &mut chat)?;
    if let Some(tools) = array(body, "tools")?.filter(|tools| !tools.is_empty()) {
        let tools = tools.iter().enumerate().map(|(index, value)| tool(index, value));
        chat.insert("tools".to_owned(), tools.collect::<Result<Vec<_>, _>>()?.into());
    }
    if let Some(choice) = fields.get("tool_choice") {
        chat.insert("tool_choice".to_owned(), tool_choice(choice)?);
    }
    if let Some(effort) = reasoning_effort(fields)? {
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    if let Some(format) = response_format(fields)? {
        chat.insert("response_format".to_owned(), format);
    }
    logprobs(body, fields, &mut chat)?;
    Ok(chat)
}

/// Refuses what would change the response and has no counterpart.
fn check_supported(fields: Fields<'_>) -> Result<(), ApiError> {
    let refused = |name: &str, why: &str| {
        Err(ApiError::invalid(name, format!("`{name}` {why}")).with_code(Code::UnsupportedParameter))
    };
    if let Some(name) = STORED.into_iter().find(|name| fields.get(name).is_some()) {
        return refused(name, "needs stored objects, and none are stored here; send all items in `input`");
    }
    if fields.boolean("background")? == Some(true) {
        return refused("background", "is not supported: a response ends with its connection");
    }
    match fields.string("truncation")? {
        None | Some("disabled") => {}
        Some(_) => return refused("truncation", "must be disabled: no item of the input is left out here"),
    }
    let management = fields.get("context_management");
    if management.is_some_and(|value| value.as_array().is_none_or(|edits| !edits.is_empty())) {
        return refused("context_management", "is not supported: no item of the input is left out here");
    }
    fields.boolean("store")?;
    check_repeated(fields)
}

/// Checks fields that have no effect, and are in the response.
fn check_repeated(fields: Fields<'_>) -> Result<(), ApiError> {
    for name in ["prompt_cache_key", "safety_identifier", "service_tier", "user"] {
        fields.string(name)?;
    }
    fields.count_from("max_tool_calls", 0..=u32::MAX)?;
    if let Some(metadata) = fields.object("metadata")?
        && let Some(wrong) = metadata.values().find(|value| !value.is_string())
    {
        return Err(must_be("metadata", "an object of strings", wrong));
    }
    for (object, member) in [("reasoning", "summary"), ("text", "verbosity")] {
        if let Some(members) = fields.object(object)? {
            Fields::under(members, object).string(member)?;
        }
    }
    Ok(())
}

/// One function. Other tools are run by OpenAI's servers, or have an input that is no JSON.
fn tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let path = format!("tools[{index}]");
    let Some(members) = tool.as_object() else { return Err(must_be(&path, "an object", tool)) };
    let fields = Fields::under(members, &path);
    let kind = fields.string("type")?.unwrap_or_default();
    if kind != "function" {
        let kind = shortened(kind);
        let message =
            format!("`{path}` is of type `{kind}`; only tools of type `function` are supported here");
        return Err(ApiError::invalid(format!("{path}.type"), message).with_code(Code::UnsupportedParameter));
    }
    let Some(name) = fields.string("name")? else {
        return Err(ApiError::invalid(format!("{path}.name"), format!("`{path}.name` is missing")));
    };
    let mut function = json!({"name": name});
    for name in ["description", "parameters", "strict"] {
        if let Some(value) = fields.get(name) {
            function[name] = value.clone();
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(choice: &Value) -> Result<Value, ApiError> {
    let expected = "\"auto\", \"none\", \"required\" or a function with its `name`";
    match (choice, choice["type"].as_str(), choice["name"].as_str()) {
        (Value::String(word), ..) if matches!(word.as_str(), "auto" | "none" | "required") => {
            Ok(choice.clone())
        }
        (Value::Object(_), Some("function"), Some(name)) => {
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        _ => Err(must_be("tool_choice", expected, choice).with_code(Code::UnsupportedParameter)),
    }
}

/// The effort; the engine checks its value. Reasoning is returned as it is, so `summary` has no effect.
fn reasoning_effort(fields: Fields<'_>) -> Result<Option<&str>, ApiError> {
    let Some(reasoning) = fields.object("reasoning")? else { return Ok(None) };
    Fields::under(reasoning, "reasoning").string("effort")
}

fn response_format(fields: Fields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = Fields::under(text, "text").object("format")? else { return Ok(None) };
    let format = Fields::under(format, "text.format");
    match format.string("type")?.unwrap_or_default() {
        "text" => Ok(None),
        "json_object" => Ok(Some(json!({"type": "json_object"}))),
        "json_schema" => {
            let Some(schema) = format.object("schema")? else {
                return Err(ApiError::invalid("text.format.schema", "`text.format.schema` is missing"));
            };
            let mut named = json!({"name": format.string("name")?.unwrap_or("response"), "schema": schema});
            for name in ["strict", "description"] {
                if let Some(value) = format.get(name) {
                    named[name] = value.clone();
                }
            }
            Ok(Some(json!({"type": "json_schema", "json_schema": named})))
        }
        other => {
            let message = format!(
                "`text.format.type` must be text, json_object or json_schema, got `{}`",
                shortened(other)
            );
            Err(ApiError::invalid("text.format.type", message).with_code(Code::UnsupportedParameter))
        }
    }
}

/// Log probabilities are in a response whose request includes them. `top_logprobs` alone has no effect, as in OpenAI's
/// API.
fn logprobs(
    body: &Map<String, Value>,
    fields: Fields<'_>,
    chat: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let top = fields.integer("top_logprobs", 0..=20)?;
    let mut is_included = false;
    for (index, part) in array(body, "include")?.map_or(&[][..], Vec::as_slice).iter().enumerate() {
        match part.as_str() {
            Some(LOGPROBS) => is_included = true,
            Some(part) if WITHOUT_EFFECT.contains(&part) => {}
            _ => return Err(must_be(&format!("include[{index}]"), "a part of a response", part)),
        }
    }
    if is_included {
        chat.insert("logprobs".to_owned(), true.into());
        chat.insert("top_logprobs".to_owned(), top.unwrap_or(0).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
