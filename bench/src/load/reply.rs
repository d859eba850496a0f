//! Parses a response in either dialect: text, finish reason, usage or error. Pure.

use serde::Deserialize;
use serde_json::Value;

use super::call::TokenUsage;
use super::limits::MESSAGE_CHARS_MAX;

/// Content of one event, or of a response in one piece.
#[derive(Debug, Default)]
pub(super) struct ReplyContent {
    /// Text of the choice with index 0.
    pub(super) text: String,
    /// Whether any choice has text that is not empty.
    pub(super) content: bool,
    /// Finish reason of the choice with index 0.
    pub(super) finish_reason: Option<String>,
    pub(super) usage: Option<TokenUsage>,
    pub(super) error: Option<ReplyError>,
}

/// An error in OpenAI's envelope, or in those of other servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplyError {
    pub(super) code: Option<String>,
    pub(super) kind: Option<String>,
    pub(super) message: String,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    usage: Option<UsageFields>,
    error: Option<Value>,
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    index: u32,
    text: Option<String>,
    /// In a stream of a chat.
    delta: Option<Message>,
    /// In a chat in one piece.
    message: Option<Message>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    /// vLLM's name, and the name before vLLM 0.10.
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct UsageFields {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<PromptTokenDetails>,
}

#[derive(Deserialize)]
struct PromptTokenDetails {
    cached_tokens: Option<u32>,
}

impl ReplyContent {
    /// Reads one event's data, or a whole response.
    ///
    /// # Errors
    /// If the JSON is invalid in both dialects.
    pub(super) fn read(json: &[u8]) -> Result<Self, serde_json::Error> {
        let chunk: Chunk = serde_json::from_slice(json)?;
        let error = match chunk.error {
            Some(Value::Null) | None if chunk.object.as_deref() != Some("error") => None,
            _ => Some(ReplyError::read(json)),
        };
        let usage = chunk.usage.map(|counted| TokenUsage {
            prompt_tokens: counted.prompt_tokens,
            completion_tokens: counted.completion_tokens,
            cached_tokens: counted.prompt_tokens_details.and_then(|details| details.cached_tokens),
        });
        let mut content = Self { usage, error, ..Self::default() };
        for choice in chunk.choices.unwrap_or_default() {
            let Choice { index, text, delta, message, finish_reason } = choice;
            let parts = delta.or(message).map(Message::texts).unwrap_or_default();
            let text = text.unwrap_or_default() + &parts.0;
            content.content |= !text.is_empty() || parts.1;
            if index == 0 {
                content.text.push_str(&text);
                content.finish_reason = finish_reason.or(content.finish_reason);
            }
        }
        Ok(content)
    }
}

impl Message {
    /// Reasoning and content, in the order of generation, and whether there is a tool call.
    fn texts(self) -> (String, bool) {
        let parts = [self.reasoning.or(self.reasoning_content), self.content];
        (parts.into_iter().flatten().collect(), self.tool_calls.is_some_and(|calls| !calls.is_empty()))
    }
}

impl ReplyError {
    /// Reads the body of a refusal: OpenAI's envelope, vLLM's older one without an envelope, FastAPI's `detail`, or
    /// text.
    pub(super) fn read(body: &[u8]) -> Self {
        let plain = || Self { message: cut(&String::from_utf8_lossy(body)), ..Self::default() };
        let Ok(Value::Object(whole)) = serde_json::from_slice(body) else { return plain() };
        let error = match whole.get("error") {
            Some(Value::Object(error)) => error,
            Some(Value::String(message)) => return Self { message: cut(message), ..Self::default() },
            _ => &whole,
        };
        let word = |name: &str| match error.get(name)? {
            Value::String(word) => Some(cut(word)),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        match word("message").or_else(|| error.get("detail").map(|detail| cut(&detail.to_string()))) {
            Some(message) => Self { code: word("code"), kind: word("type"), message },
            None => plain(),
        }
    }
}

fn cut(text: &str) -> String {
    text.trim().chars().take(MESSAGE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_dialects_are_read_in_pieces_and_whole() {
        for (json, text, content, finish) in [
            (r#"{"choices":[{"index":0,"text":" a","finish_reason":null}]}"#, " a", true, None),
            (r#"{"choices":[{"text":"","finish_reason":"length"}],"usage":null}"#, "", false, Some("length")),
            (r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#, "", false, None),
            (
                r#"{"choices":[{"index":0,"delta":{"reasoning_content":"hm","content":null}}]}"#,
                "hm",
                true,
                None,
            ),
            (r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}"#, "", true, None),
            (
                r#"{"choices":[{"index":0,"message":{"content":"all"},"finish_reason":"stop"}]}"#,
                "all",
                true,
                Some("stop"),
            ),
            (r#"{"choices":[{"index":1,"text":"other"}]}"#, "", true, None),
            (r#"{"choices":[]}"#, "", false, None),
        ] {
            let read = ReplyContent::read(json.as_bytes()).unwrap_or_else(|error| panic!("{json}: {error}"));
            assert_eq!(
                (read.text.as_str(), read.content, read.finish_reason.as_deref()),
                (text, content, finish),
                "{json}"
            );
            assert_eq!(read.error, None, "{json}");
        }
        assert!(ReplyContent::read(b"[1]").is_err() && ReplyContent::read(b"{").is_err());
    }

    #[test]
    fn token_usage_is_parsed() {
        let json = br#"{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let usage = ReplyContent::read(json).expect("a chunk").usage;
        assert_eq!(
            usage,
            Some(TokenUsage { prompt_tokens: 5, completion_tokens: 2, cached_tokens: Some(4) })
        );
    }

    #[test]
    fn errors_are_read_in_every_envelope() {
        for (json, code, message) in [
            (
                r#"{"error":{"message":"full","type":"overloaded","param":null,"code":"queue_full"}}"#,
                Some("queue_full"),
                "full",
            ),
            (r#"{"error":{"message":"bad","type":"BadRequestError","code":400}}"#, Some("400"), "bad"),
            (r#"{"object":"error","message":"old","type":"x","code":404}"#, Some("404"), "old"),
            (r#"{"error":"only words"}"#, None, "only words"),
            (r#"{"detail":"Not Found"}"#, None, "\"Not Found\""),
            ("<html>bad gateway</html>\n", None, "<html>bad gateway</html>"),
        ] {
            let error = ReplyError::read(json.as_bytes());
            assert_eq!((error.code.as_deref(), error.message.as_str()), (code, message), "{json}");
        }
        let event =
            ReplyContent::read(br#"{"error":{"message":"gone","code":"engine_lost"}}"#).expect("an event");
        assert_eq!(event.error.and_then(|error| error.code).as_deref(), Some("engine_lost"));
        assert_eq!(ReplyError::read("é".repeat(9_999).as_bytes()).message.chars().count(), MESSAGE_CHARS_MAX);
    }
}
