//! Typed parts of a request's content, with their paths for errors.

use serde_json::{Map, Value, json};

use crate::code::Code;
use crate::error::ApiError;

/// Maximum bytes of a client's word in an error.
const WORD_BYTES_MAX: usize = 64;

/// A value of the request, and its path in errors.
pub(super) struct Block<'a> {
    pub(super) path: String,
    pub(super) value: &'a Value,
}

/// The blocks of a content; a string is one text block.
///
/// # Errors
/// 400 for another form.
pub(super) fn blocks<'a>(path: &str, value: &'a Value) -> Result<Vec<Block<'a>>, ApiError> {
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

impl<'a> Block<'a> {
    /// Its `type`; that of a string is `text`.
    pub(super) fn kind(&self) -> Result<&'a str, ApiError> {
        if self.value.is_string() {
            return Ok("text");
        }
        self.text("type")
    }

    /// A string member, or the block itself if it is a string.
    pub(super) fn text(&self, name: &str) -> Result<&'a str, ApiError> {
        let text = if self.value.is_string() { Some(self.value) } else { self.value.get(name) };
        text.and_then(Value::as_str).ok_or_else(|| {
            let path = format!("{}.{name}", self.path);
            ApiError::invalid(path.as_str(), format!("`{path}` must be a string"))
        })
    }

    /// A member that is not `null`.
    pub(super) fn member(&self, name: &str) -> Option<&'a Value> {
        self.value.get(name).filter(|value| !value.is_null())
    }

    /// 400: a chat has nothing of this type.
    pub(super) fn unsupported(&self, kind: &str) -> ApiError {
        let kind = &kind[..kind.floor_char_boundary(WORD_BYTES_MAX)];
        let message =
            format!("`{}` is of type `{kind}`, which has no counterpart in a chat of this model", self.path);
        ApiError::invalid(format!("{}.type", self.path), message).with_code(Code::UnsupportedContent)
    }
}

/// A text as a part of a chat's message.
pub(super) fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// An image as a part of a chat's message.
pub(super) fn image_part(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// The content of a chat's message. One text stays a string, which every chat template accepts.
pub(super) fn content(mut parts: Vec<Value>) -> Value {
    match &mut parts[..] {
        [only] if only["type"] == "text" => only["text"].take(),
        _ => parts.into(),
    }
}

/// The array in a field.
///
/// # Errors
/// 400 for another type.
pub(super) fn array<'a>(
    body: &'a Map<String, Value>,
    name: &str,
) -> Result<Option<&'a Vec<Value>>, ApiError> {
    match body.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(items)) => Ok(Some(items)),
        Some(_) => Err(ApiError::invalid(name, format!("`{name}` must be an array"))),
    }
}
