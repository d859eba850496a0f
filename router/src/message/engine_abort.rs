//! An engine that ends a request by itself: a reply with status 200 and `finish_reason: "abort"`, without any content.
//!
//! Stock vLLM answers so to every request that it has not finished when it shuts down (`v1/engine/core.py`, 0.32), and a
//! vLLM with Baton's connector to one that a command has aborted. A chat stream then begins with the event of the role.
//! A stock decode engine has notified the producer by then, so the handoff is spent. Baton's engines refuse such a request by a status. Their replies with
//! `abort` follow an operator's command and are passed on: their ids end with a mark (`docs/reference/contract.md`).

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde_json::Value;

use crate::message::sse::frames;

/// Maximum bytes of a start that are parsed: an aborted reply has no text.
pub(crate) const START_BYTES_MAX: usize = 4 << 10;
/// The error that stands for such a reply. By its code the next engine recomputes the prompt.
pub(crate) const ABORT_ERROR: &str = r#"{"error":{"message":"the engine aborted the request","type":"service_unavailable_error","param":null,"code":"kv_gone"}}"#;

static ABORT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"abort\""));
static THRESHOLD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"cache_threshold\""));
static ROLE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"role\""));

/// The start of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyStart {
    /// A reply as any other.
    Usual,
    /// Only roles of a chat stream, without content: what follows decides.
    Role,
    /// The engine has aborted the request.
    Aborted,
    /// The engine has cached too little of the prompt, and has generated nothing (`cache_hit_threshold`).
    PrefixMissing,
}

impl ReplyStart {
    /// Of the whole frames of a stream. Bytes behind the last one do not count.
    pub(crate) fn of_stream(bytes: &[u8]) -> Self {
        // Inside of a string the quotes of these words would be escaped.
        let may_matter = is_early_end(bytes) || ROLE.find(bytes).is_some();
        if bytes.len() > START_BYTES_MAX || !may_matter {
            return Self::Usual;
        }
        let events = frames(bytes).filter(|frame| frame.has_data());
        let mut starts = events.map(|frame| Self::of_json(&frame.data(bytes)));
        starts.find(|start| *start != Self::Role).unwrap_or(Self::Role)
    }

    /// Of a whole reply.
    pub(crate) fn of_whole(bytes: &[u8]) -> Self {
        if bytes.len() > START_BYTES_MAX || !is_early_end(bytes) {
            return Self::Usual;
        }
        Self::of_json(bytes)
    }

    fn of_json(bytes: &[u8]) -> Self {
        let reply: Value = serde_json::from_slice(bytes).unwrap_or_default();
        let choices = reply["choices"].as_array().map_or(&[][..], Vec::as_slice);
        let all = |is: &dyn Fn(&Value) -> bool| !choices.is_empty() && choices.iter().all(is);
        if has_mark(&reply["id"]) || !all(&|choice| !has_content(choice)) {
            Self::Usual
        } else if all(&|choice| choice["finish_reason"] == "abort") {
            Self::Aborted
        } else if all(&|choice| choice["finish_reason"] == "cache_threshold") {
            Self::PrefixMissing
        } else if all(&|choice| choice["finish_reason"].is_null() && choice["delta"]["role"].is_string()) {
            Self::Role
        } else {
            Self::Usual
        }
    }
}

/// Whether a reply may have ended before its first token.
fn is_early_end(bytes: &[u8]) -> bool {
    [&ABORT, &THRESHOLD].iter().any(|reason| reason.find(bytes).is_some())
}

/// Whether a choice has anything that a client could use, or shows that tokens were generated.
fn has_content(choice: &Value) -> bool {
    let is_filled = |value: &Value| match value {
        Value::Null | Value::Bool(_) => false,
        Value::Number(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    };
    let message = ["delta", "message"].iter().filter_map(|name| choice[*name].as_object()).flatten();
    let mut parts = message.filter(|(name, _)| *name != "role").map(|(_, value)| value);
    ["text", "token_ids", "logprobs"].iter().any(|name| is_filled(&choice[*name])) || parts.any(is_filled)
}

/// Whether an id is one of Baton's engines: a dot and 16 hexadecimal digits at its end.
fn has_mark(id: &Value) -> bool {
    let mark = id.as_str().and_then(|id| id.rsplit_once('.')).map(|(_, mark)| mark);
    mark.is_some_and(|mark| mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn choice(part: Value, finish: Value) -> Value {
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        choice.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
        choice
    }

    fn event(choices: &[Value]) -> String {
        format!("data: {}\n\n", json!({"id": "cmpl-1-0", "choices": choices}))
    }

    fn role() -> String {
        event(&[choice(json!({"delta": {"role": "assistant", "content": ""}}), Value::Null)])
    }

    #[test]
    fn a_stream_that_begins_with_an_abort_is_aborted_whatever_the_dialect() {
        let completion = event(&[choice(json!({"text": "", "token_ids": null}), json!("abort"))]);
        let chat = event(&[choice(json!({"delta": {"content": null, "tool_calls": []}}), json!("abort"))]);
        let bare = event(&[choice(json!({"delta": {}}), json!("abort"))]);
        let done = "data: [DONE]\n\n";
        for stream in [
            completion.clone(),
            format!(": ping\n\n{completion}{done}"),
            format!("{}{}{chat}{done}", role(), role()),
            role() + &bare,
        ] {
            assert_eq!(ReplyStart::of_stream(stream.as_bytes()), ReplyStart::Aborted, "{stream}");
        }
        for stream in [role(), role() + &role(), role() + &chat[..chat.len() / 2]] {
            assert_eq!(ReplyStart::of_stream(stream.as_bytes()), ReplyStart::Role, "{stream}");
        }
    }

    #[test]
    fn an_abort_after_content_is_the_end_of_a_response() {
        let text = |text: &str, finish: Value| event(&[choice(json!({"text": text}), finish)]);
        let aborted = text("", json!("abort"));
        let marked = aborted.replace("cmpl-1-0", "cmpl-1.0123456789abcdef");
        let quoted = text("he said \"abort\" and \"role\"", Value::Null);
        let tools = event(&[choice(json!({"delta": {"tool_calls": [{"index": 0}]}}), json!("abort"))]);
        for stream in [
            text("a", Value::Null) + &aborted,
            text("a", json!("abort")),
            text("", json!("length")),
            event(&[choice(json!({"text": ""}), json!("abort")), choice(json!({"text": ""}), Value::Null)]),
            event(&[]),
            role() + &text("", json!("stop")),
            "data: [DONE]\n\n".to_owned(),
            "data: {\"abort\"\n\n".to_owned(),
            marked,
            quoted,
            tools,
        ] {
            assert_eq!(ReplyStart::of_stream(stream.as_bytes()), ReplyStart::Usual, "{stream}");
        }
        let long = text("", json!("abort")).replace("cmpl", &"x".repeat(START_BYTES_MAX));
        assert_eq!(ReplyStart::of_stream(long.as_bytes()), ReplyStart::Usual, "bounded");
    }

    #[test]
    fn a_whole_reply_is_aborted_if_no_choice_has_content() {
        let reply =
            |choices: &[Value]| json!({"id": "cmpl-1-0", "choices": choices, "usage": {}}).to_string();
        let message = |content: Value| json!({"message": {"role": "assistant", "content": content}});
        for aborted in [
            reply(&[choice(json!({"text": ""}), json!("abort"))]),
            reply(&[
                choice(message(Value::Null), json!("abort")),
                choice(message(json!("")), json!("abort")),
            ]),
        ] {
            assert_eq!(ReplyStart::of_whole(aborted.as_bytes()), ReplyStart::Aborted, "{aborted}");
            assert_eq!(ReplyStart::of_whole(&aborted.as_bytes()[1..]), ReplyStart::Usual, "not JSON");
        }
        for usual in [
            reply(&[choice(message(json!("text")), json!("abort"))]),
            reply(&[choice(message(json!("")), json!("stop"))]),
            reply(&[]),
        ] {
            assert_eq!(ReplyStart::of_whole(usual.as_bytes()), ReplyStart::Usual, "{usual}");
        }
    }

    #[test]
    fn a_reply_without_content_below_the_cache_threshold_is_recognized() {
        let reason = || json!("cache_threshold");
        let stream = role() + &event(&[choice(json!({"delta": {}}), reason())]);
        assert_eq!(ReplyStart::of_stream(stream.as_bytes()), ReplyStart::PrefixMissing);
        let whole = |text: &str| json!({"choices": [choice(json!({"text": text}), reason())]}).to_string();
        assert_eq!(ReplyStart::of_whole(whole("").as_bytes()), ReplyStart::PrefixMissing);
        assert_eq!(ReplyStart::of_whole(whole("a").as_bytes()), ReplyStart::Usual);
    }

    #[test]
    fn the_error_in_its_place_says_that_the_handoff_is_spent() {
        let error: Value = serde_json::from_str(ABORT_ERROR).unwrap();
        assert_eq!(
            (&error["error"]["code"], error["error"].as_object().unwrap().len()),
            (&json!("kv_gone"), 4)
        );
    }
}
