//! The input of Responses as the messages of a chat.
//!
//! | item | chat |
//! |---|---|
//! | a string, a message | a message; `input_image` is an `image_url` part |
//! | `reasoning`, an assistant's message, `function_call` in a row | one message of the assistant |
//! | `function_call_output` | a message of role `tool` |
//!
//! Another item is refused by name. Encrypted reasoning is removed: only OpenAI can read it. A last message of the
//! assistant that is not completed is continued, as in vLLM, if it has a text. Arguments of a call that are no JSON
//! object, such as those that a limit cut, are `{}`: a chat has no others.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::field::{Fields, must_be};
use crate::translate::block::{Block, blocks, content, image_part, text_part};
use crate::translate::chat_reply::{has_text_to_continue, is_json};

/// Roles of messages.
const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// The messages so far.
#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    /// The assistant's message that later items may extend.
    open: Option<Turn>,
}

/// A message of the assistant.
#[derive(Default)]
struct Turn {
    thoughts: Vec<String>,
    text: Option<String>,
    calls: Vec<Value>,
}

/// Adds the fields from which a template makes the prompt.
///
/// # Errors
/// 400 with the path of the first value that is invalid or has no counterpart in a chat.
pub(super) fn conversation(fields: Fields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = fields.string("instructions")?.filter(|text| !text.is_empty()) {
        conversation.messages.push(json!({"role": "system", "content": instructions}));
    }
    let items: &[Value] = match fields.get("input") {
        None => return Err(ApiError::invalid("input", "`input` is missing")),
        Some(Value::String(text)) => {
            conversation.messages.push(json!({"role": "user", "content": text}));
            &[]
        }
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(ApiError::invalid("input", "`input` must have at least one item"));
        }
        Some(Value::Array(items)) => items,
        Some(other) => return Err(must_be("input", "a string or an array of items", other)),
    };
    for (index, value) in items.iter().enumerate() {
        conversation.add(&Block { path: format!("input[{index}]"), value })?;
    }
    conversation.close();
    let is_continued =
        items.last().is_some_and(is_unfinished) && has_text_to_continue(&conversation.messages);
    chat.insert("messages".to_owned(), conversation.messages.into());
    if is_continued {
        chat.insert("continue_final_message".to_owned(), true.into());
        chat.insert("add_generation_prompt".to_owned(), false.into());
    }
    Ok(())
}

/// Whether an item is a message of the assistant that is not completed.
fn is_unfinished(item: &Value) -> bool {
    item["role"] == "assistant" && matches!(item["status"].as_str(), Some("in_progress" | "incomplete"))
}

impl Conversation {
    fn add(&mut self, item: &Block<'_>) -> Result<(), ApiError> {
        if !item.value.is_object() {
            return Err(must_be(&item.path, "an object", item.value));
        }
        let kind = match item.member("type") {
            // A message needs no type.
            None if item.member("role").is_some() => "message",
            _ => item.text("type")?,
        };
        match kind {
            "message" => self.message(item),
            "reasoning" => self.reasoning(item),
            "function_call" => self.call(item),
            "function_call_output" => {
                self.close();
                let output = Block { path: format!("{}.output", item.path), value: &item.value["output"] };
                let id = item.text("call_id")?;
                let text = texts(&output)?.join("\n");
                self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                Ok(())
            }
            other => Err(item.unsupported(other)),
        }
    }

    fn message(&mut self, item: &Block<'_>) -> Result<(), ApiError> {
        let role = item.text("role")?;
        if !ROLES.contains(&role) {
            let path = format!("{}.role", item.path);
            return Err(must_be(&path, "user, assistant, system or developer", &item.value["role"]));
        }
        let path = format!("{}.content", item.path);
        let Some(value) = item.member("content") else {
            return Err(ApiError::invalid(path.as_str(), format!("`{path}` is missing")));
        };
        if role == "assistant" {
            let text = texts(&Block { path, value })?.concat();
            let turn = self.turn(|turn| turn.text.is_none() && turn.calls.is_empty());
            turn.text = Some(text);
            return Ok(());
        }
        self.close();
        let parts = blocks(&path, value)?.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        self.messages.push(json!({"role": role, "content": content(parts)}));
        Ok(())
    }

    fn reasoning(&mut self, item: &Block<'_>) -> Result<(), ApiError> {
        let mut thoughts = Vec::new();
        // A summary stands for a content that is not there.
        for name in ["content", "summary"] {
            let Some(value) = item.member(name).filter(|_| thoughts.is_empty()) else { continue };
            for part in blocks(&format!("{}.{name}", item.path), value)? {
                match part.kind()? {
                    "text" | "reasoning_text" | "summary_text" => {
                        thoughts.push(part.text("text")?.to_owned());
                    }
                    other => return Err(part.unsupported(other)),
                }
            }
        }
        if !thoughts.is_empty() {
            let turn = self.turn(|turn| turn.text.is_none() && turn.calls.is_empty());
            turn.thoughts.append(&mut thoughts);
        }
        Ok(())
    }

    fn call(&mut self, item: &Block<'_>) -> Result<(), ApiError> {
        let written = item.text("arguments")?;
        let is_object = written.trim_start().starts_with('{') && is_json(written);
        let arguments = if is_object || written.trim().is_empty() { written } else { "{}" };
        let function = json!({"name": item.text("name")?, "arguments": arguments});
        let call = json!({"id": item.text("call_id")?, "type": "function", "function": function});
        self.turn(|_| true).calls.push(call);
        Ok(())
    }

    /// The open message if it may be extended, or else a new one.
    fn turn(&mut self, may_extend: impl FnOnce(&Turn) -> bool) -> &mut Turn {
        if self.open.as_ref().is_some_and(|open| !may_extend(open)) {
            self.close();
        }
        self.open.get_or_insert_default()
    }

    fn close(&mut self) {
        let Some(Turn { thoughts, text, calls }) = self.open.take() else { return };
        let mut message = json!({"role": "assistant", "content": text});
        if calls.is_empty() && message["content"].is_null() {
            message["content"] = "".into();
        }
        if !thoughts.is_empty() {
            message["reasoning_content"] = thoughts.join("\n").into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        self.messages.push(message);
    }
}

/// The texts of an output, or of a message of the assistant.
fn texts<'a>(block: &Block<'a>) -> Result<Vec<&'a str>, ApiError> {
    blocks(&block.path, block.value)?.iter().map(text).collect()
}

fn text<'a>(block: &Block<'a>) -> Result<&'a str, ApiError> {
    match block.kind()? {
        "text" | "input_text" | "output_text" => block.text("text"),
        "refusal" => block.text("refusal"),
        other => Err(block.unsupported(other)),
    }
}

/// A part of a message.
fn part(block: &Block<'_>) -> Result<Value, ApiError> {
    match block.kind()? {
        // A file by its id would have to be stored.
        "input_image" => block.text("image_url").map(image_part),
        _ => text(block).map(text_part),
    }
}
