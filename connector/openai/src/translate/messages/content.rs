//! The turns of a Messages request as chat messages.
//!
//! | block | chat |
//! |---|---|
//! | `text` | text |
//! | `image`, also in a `tool_result` | `image_url` part of a user message |
//! | `document` with plain text | text |
//! | `tool_use` | `tool_calls` of the assistant's message |
//! | `tool_result` | a message of role `tool`, before the turn's other content, as vLLM has it |
//! | `thinking` | `reasoning_content` of the assistant's message |
//! | `redacted_thinking` | removed: only Anthropic can read it |
//!
//! Another block is refused by name. Cache marks have no counterpart and are removed.

use serde_json::{Value, json};

use super::system::without_billing;
use crate::error::ApiError;
use crate::translate::block::{Block, blocks, content, image_part, text_part};

/// Appends `system` as a message.
///
/// # Errors
/// 400 for another form than a string or text blocks.
pub(super) fn system(value: Option<&Value>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(()) };
    let mut parts = Vec::new();
    for block in blocks("system", value)? {
        let text = match block.kind()? {
            "text" => block.text("text")?,
            other => return Err(block.unsupported(other)),
        };
        parts.extend(without_billing(text).map(text_part));
    }
    if !parts.is_empty() {
        messages.push(json!({"role": "system", "content": content(parts)}));
    }
    Ok(())
}

/// Appends the messages of one turn.
///
/// # Errors
/// 400 with the path of the first value that is invalid or has no counterpart in a chat.
pub(super) fn turn(index: usize, turn: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let path = format!("messages[{index}]");
    let role = turn["role"].as_str().unwrap_or_default();
    let Some(value) = turn.get("content").filter(|content| !content.is_null()) else {
        return Err(ApiError::invalid(format!("{path}.content"), format!("`{path}.content` is missing")));
    };
    let blocks = blocks(&format!("{path}.content"), value)?;
    match role {
        "user" => user(&blocks, messages),
        "assistant" => assistant(&blocks, messages),
        "system" => system(Some(value), messages),
        _ => {
            let message = format!("`{path}.role` must be user, assistant or system");
            Err(ApiError::invalid(format!("{path}.role"), message))
        }
    }
}

fn user(blocks: &[Block<'_>], messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut parts, mut images) = (Vec::new(), Vec::new());
    for block in blocks {
        match block.kind()? {
            "text" => parts.push(text_part(block.text("text")?)),
            "image" => parts.push(image(block)?),
            "document" => parts.push(document(block)?),
            "tool_result" => messages.push(tool_result(block, &mut images)?),
            other => return Err(block.unsupported(other)),
        }
    }
    images.append(&mut parts);
    if !images.is_empty() {
        messages.push(json!({"role": "user", "content": content(images)}));
    }
    Ok(())
}

/// A result as a message. A chat has no images in it, so they precede the turn's other parts.
fn tool_result(block: &Block<'_>, images: &mut Vec<Value>) -> Result<Value, ApiError> {
    let id = block.text("tool_use_id")?;
    let mut texts = Vec::new();
    let results = match block.member("content") {
        Some(value) => blocks(&format!("{}.content", block.path), value)?,
        None => Vec::new(),
    };
    for result in &results {
        match result.kind()? {
            "text" => texts.push(result.text("text")?),
            "image" => images.push(image(result)?),
            other => return Err(result.unsupported(other)),
        }
    }
    Ok(json!({"role": "tool", "tool_call_id": id, "content": texts.join("\n")}))
}

fn assistant(blocks: &[Block<'_>], messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match block.kind()? {
            "text" => texts.push(block.text("text")?),
            "thinking" => thoughts.push(block.text("thinking")?),
            "redacted_thinking" => {}
            "tool_use" => {
                let arguments = block.value.get("input").map_or_else(|| "{}".to_owned(), Value::to_string);
                let function = json!({"name": block.text("name")?, "arguments": arguments});
                calls.push(json!({"id": block.text("id")?, "type": "function", "function": function}));
            }
            other => return Err(block.unsupported(other)),
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.join("\n")});
    if texts.is_empty() && !calls.is_empty() {
        message["content"] = Value::Null;
    }
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

fn image(block: &Block<'_>) -> Result<Value, ApiError> {
    let source = source(block);
    match source.text("type")? {
        "url" => Ok(image_part(source.text("url")?)),
        "base64" => {
            let (kind, data) = (source.text("media_type")?, source.text("data")?);
            Ok(image_part(&format!("data:{kind};base64,{data}")))
        }
        other => Err(source.unsupported(other)),
    }
}

fn document(block: &Block<'_>) -> Result<Value, ApiError> {
    let source = source(block);
    match source.text("type")? {
        "text" => Ok(text_part(source.text("data")?)),
        other => Err(source.unsupported(other)),
    }
}

fn source<'a>(block: &Block<'a>) -> Block<'a> {
    Block { path: format!("{}.source", block.path), value: &block.value["source"] }
}
