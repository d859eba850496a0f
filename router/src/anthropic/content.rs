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

use baton_openai::{ApiError, Code};
use serde_json::{Value, json};

use super::system::without_billing;

/// Maximum bytes of a client's word in an error.
const WORD_BYTES_MAX: usize = 64;

/// An object of the request, and its path in errors.
struct Block<'a> {
    path: String,
    value: &'a Value,
}

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

/// The blocks of a content; a string is one text block.
fn blocks<'a>(path: &str, value: &'a Value) -> Result<Vec<Block<'a>>, ApiError> {
    match value {
        Value::String(_) => Ok(vec![Block { path: path.to_owned(), value }]),
        Value::Array(items) => Ok(items
            .iter()
            .enumerate()
            .map(|(index, value)| Block { path: format!("{path}[{index}]"), value })
            .collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            Err(ApiError::invalid(path, format!("`{path}` must be a string or an array of blocks")))
        }
    }
}

fn user(blocks: &[Block<'_>], messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut parts, mut images) = (Vec::new(), Vec::new());
    for block in blocks {
        match block.kind()? {
            "text" => parts.push(text_part(block.text("text")?)),
            "image" => parts.push(block.image()?),
            "document" => parts.push(block.document()?),
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
    let results = match block.value.get("content").filter(|content| !content.is_null()) {
        Some(value) => blocks(&format!("{}.content", block.path), value)?,
        None => Vec::new(),
    };
    for result in &results {
        match result.kind()? {
            "text" => texts.push(result.text("text")?),
            "image" => images.push(result.image()?),
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

impl<'a> Block<'a> {
    fn kind(&self) -> Result<&'a str, ApiError> {
        if self.value.is_string() {
            return Ok("text");
        }
        self.text("type")
    }

    /// A string member, or the block itself if it is a string.
    fn text(&self, name: &str) -> Result<&'a str, ApiError> {
        let text = if self.value.is_string() { Some(self.value) } else { self.value.get(name) };
        text.and_then(Value::as_str).ok_or_else(|| {
            let path = format!("{}.{name}", self.path);
            ApiError::invalid(path.as_str(), format!("`{path}` must be a string"))
        })
    }

    fn image(&self) -> Result<Value, ApiError> {
        let source = Block { path: format!("{}.source", self.path), value: &self.value["source"] };
        let url = match source.text("type")? {
            "url" => source.text("url")?.to_owned(),
            "base64" => format!("data:{};base64,{}", source.text("media_type")?, source.text("data")?),
            other => return Err(source.unsupported(other)),
        };
        Ok(json!({"type": "image_url", "image_url": {"url": url}}))
    }

    fn document(&self) -> Result<Value, ApiError> {
        let source = Block { path: format!("{}.source", self.path), value: &self.value["source"] };
        match source.text("type")? {
            "text" => Ok(text_part(source.text("data")?)),
            other => Err(source.unsupported(other)),
        }
    }

    fn unsupported(&self, kind: &str) -> ApiError {
        let kind = &kind[..kind.floor_char_boundary(WORD_BYTES_MAX)];
        let message = format!(
            "`{}` is of type `{kind}`; the router translates Messages to chats for this model, and a chat has no such \
             content",
            self.path
        );
        ApiError::invalid(format!("{}.type", self.path), message).with_code(Code::UnsupportedContent)
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// One text stays a string, which every chat template accepts.
fn content(mut parts: Vec<Value>) -> Value {
    match &mut parts[..] {
        [only] if only["type"] == "text" => only["text"].take(),
        _ => parts.into(),
    }
}
