//! An engine that ends a request by itself: a reply with status 200 and `finish_reason: "abort"`, without any content.
//!
//! | reply | the abort |
//! |---|---|
//! | chats, completions | `finish_reason: "abort"` |
//! | Messages | `stop_reason` is `null` or missing at the end |
//! | Responses | `status: "cancelled"`, or an end without output and without output tokens |
//!
//! Stock vLLM answers so to every request that it has not finished when it shuts down (`v1/engine/core.py`, 0.32), and a
//! vLLM with Baton's connector to one that a command has aborted. A chat stream then begins with the event of the role.
//! A stock decode engine has notified the producer by then, so the handoff is spent. Baton's engines refuse such a
//! request by a status. Their replies with `abort` follow an operator's command and are passed on: their ids end with a
//! mark (`docs/reference/contract.md`).

use std::sync::LazyLock;

use memchr::memmem::{self, Finder};
use serde_json::Value;

use crate::message::embedded_error::has_no_output;
use crate::message::path::Dialect;
use crate::message::sse::frames;
use crate::message::usage::JsonScanner;

/// Maximum bytes of a start that are parsed: an aborted reply has no text.
const START_BYTES_MAX: usize = 4 << 10;
/// The same for Messages and Responses: the first events of a response repeat the tools of its request.
const EVENTS_BYTES_MAX: usize = 64 << 10;

/// The events of a response before its first output.
const BEFORE_OUTPUT: [&[u8]; 3] =
    [b"\"response.created\"", b"\"response.in_progress\"", b"\"response.queued\""];
/// The events at the end of a response that is not an error.
const OUTPUT_ENDS: [&[u8]; 2] = [b"\"response.completed\"", b"\"response.incomplete\""];

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
    /// Maximum bytes of a start that are read.
    pub(crate) fn bytes_max(dialect: Dialect) -> usize {
        match dialect {
            Dialect::Messages | Dialect::Responses => EVENTS_BYTES_MAX,
            Dialect::OpenAi(_) | Dialect::Passthrough(_) => START_BYTES_MAX,
        }
    }

    /// Of the whole frames of a stream. Bytes behind the last one do not count.
    pub(crate) fn of_stream(dialect: Dialect, bytes: &[u8]) -> Self {
        let of_event: fn(&[u8]) -> Self = match dialect {
            Dialect::Messages => Self::of_message_event,
            Dialect::Responses => Self::of_response_event,
            Dialect::OpenAi(_) => Self::of_json,
            Dialect::Passthrough(_) => return Self::Usual,
        };
        // Inside of a string the quotes of these words would be escaped.
        let may_matter =
            !matches!(dialect, Dialect::OpenAi(_)) || is_early_end(bytes) || ROLE.find(bytes).is_some();
        if bytes.len() > Self::bytes_max(dialect) || !may_matter {
            return Self::Usual;
        }
        let events = frames(bytes).filter(|frame| frame.has_data());
        let mut starts = events.map(|frame| of_event(&frame.data(bytes)));
        starts.find(|start| *start != Self::Role).unwrap_or(Self::Role)
    }

    /// Of a whole reply.
    pub(crate) fn of_whole(dialect: Dialect, bytes: &[u8]) -> Self {
        if bytes.len() > Self::bytes_max(dialect) {
            return Self::Usual;
        }
        match dialect {
            Dialect::OpenAi(_) if is_early_end(bytes) => Self::of_json(bytes),
            Dialect::Messages | Dialect::Responses => {
                let scanner = JsonScanner::of(bytes);
                let is_reply = scanner.is_whole() && scanner.is_object() && !scanner.is_error();
                let has_tokens = scanner.usage().is_none_or(|usage| usage.completion > 0);
                let is_empty =
                    || serde_json::from_slice(bytes).is_ok_and(|reply: Value| has_no_output(&reply));
                let is_aborted = is_aborted(dialect, &scanner)
                    || dialect == Dialect::Responses && !has_tokens && is_empty();
                if is_reply && is_aborted { Self::Aborted } else { Self::Usual }
            }
            Dialect::OpenAi(_) | Dialect::Passthrough(_) => Self::Usual,
        }
    }

    /// Of an event of Messages.
    fn of_message_event(event: &[u8]) -> Self {
        let event: Value = serde_json::from_slice(event).unwrap_or_default();
        match event["type"].as_str() {
            Some("message_start" | "ping") => Self::Role,
            Some("message_delta") if event["delta"]["stop_reason"].is_null() => Self::Aborted,
            _ => Self::Usual,
        }
    }

    /// Of an event of a response. Only its last event is parsed.
    fn of_response_event(event: &[u8]) -> Self {
        if has_any(event, &OUTPUT_ENDS) {
            let event: Value = serde_json::from_slice(event).unwrap_or_default();
            let response = &event["response"];
            let is_aborted = response["status"] == "cancelled" || has_no_output(response);
            return if is_aborted { Self::Aborted } else { Self::Usual };
        }
        if has_any(event, &BEFORE_OUTPUT) { Self::Role } else { Self::Usual }
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

/// Whether a whole reply reports the engine's own abort.
pub(crate) fn is_aborted(dialect: Dialect, scanner: &JsonScanner) -> bool {
    match dialect {
        Dialect::Messages => scanner.finish().is_none(),
        Dialect::Responses => scanner.is_cancelled(),
        // `abort` after content is the end of a response (`docs/reference/contract.md`).
        Dialect::OpenAi(_) | Dialect::Passthrough(_) => false,
    }
}

/// Whether an event has one of these words.
fn has_any(event: &[u8], words: &[&[u8]]) -> bool {
    words.iter().any(|word| memmem::find(event, word).is_some())
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
pub(crate) fn has_mark(id: &Value) -> bool {
    let mark = id.as_str().and_then(|id| id.rsplit_once('.')).map(|(_, mark)| mark);
    mark.is_some_and(|mark| mark.len() == 16 && mark.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use baton_openai::Endpoint;
    use serde_json::json;

    use super::*;

    const CHAT: Dialect = Dialect::OpenAi(Endpoint::Chat);

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
            assert_eq!(ReplyStart::of_stream(CHAT, stream.as_bytes()), ReplyStart::Aborted, "{stream}");
        }
        for stream in [role(), role() + &role(), role() + &chat[..chat.len() / 2]] {
            assert_eq!(ReplyStart::of_stream(CHAT, stream.as_bytes()), ReplyStart::Role, "{stream}");
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
            assert_eq!(ReplyStart::of_stream(CHAT, stream.as_bytes()), ReplyStart::Usual, "{stream}");
        }
        let long = text("", json!("abort")).replace("cmpl", &"x".repeat(START_BYTES_MAX));
        assert_eq!(ReplyStart::of_stream(CHAT, long.as_bytes()), ReplyStart::Usual, "bounded");
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
            assert_eq!(ReplyStart::of_whole(CHAT, aborted.as_bytes()), ReplyStart::Aborted, "{aborted}");
            assert_eq!(ReplyStart::of_whole(CHAT, &aborted.as_bytes()[1..]), ReplyStart::Usual, "not JSON");
        }
        for usual in [
            reply(&[choice(message(json!("text")), json!("abort"))]),
            reply(&[choice(message(json!("")), json!("stop"))]),
            reply(&[]),
        ] {
            assert_eq!(ReplyStart::of_whole(CHAT, usual.as_bytes()), ReplyStart::Usual, "{usual}");
        }
    }

    #[test]
    fn a_reply_without_content_below_the_cache_threshold_is_recognized() {
        let reason = || json!("cache_threshold");
        let stream = role() + &event(&[choice(json!({"delta": {}}), reason())]);
        assert_eq!(ReplyStart::of_stream(CHAT, stream.as_bytes()), ReplyStart::PrefixMissing);
        let whole = |text: &str| json!({"choices": [choice(json!({"text": text}), reason())]}).to_string();
        assert_eq!(ReplyStart::of_whole(CHAT, whole("").as_bytes()), ReplyStart::PrefixMissing);
        assert_eq!(ReplyStart::of_whole(CHAT, whole("a").as_bytes()), ReplyStart::Usual);
    }

    #[test]
    fn a_message_without_a_stop_reason_is_aborted() {
        let start = r#"event: message_start
data: {"type":"message_start","message":{"content":[],"stop_reason":null}}

"#;
        let delta = |reason: &str| {
            format!("data: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":{reason}}}}}\n\n")
        };
        let block = "data: {\"type\":\"content_block_start\",\"index\":0}\n\n";
        let ping = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
        for (stream, expected) in [
            (start.to_owned(), ReplyStart::Role),
            (format!("{start}{ping}{}", delta("null")), ReplyStart::Aborted),
            (format!("{start}{}", delta("\"end_turn\"")), ReplyStart::Usual),
            (format!("{start}{block}{}", delta("null")), ReplyStart::Usual),
        ] {
            assert_eq!(ReplyStart::of_stream(Dialect::Messages, stream.as_bytes()), expected, "{stream}");
        }
        for (reply, expected) in [
            (r#"{"type":"message","content":[]}"#, ReplyStart::Aborted),
            (r#"{"type":"message","content":[{"text":"a"}],"stop_reason":null}"#, ReplyStart::Aborted),
            (r#"{"type":"message","content":[],"stop_reason":"end_turn"}"#, ReplyStart::Usual),
            (r#"{"type":"error","error":{"message":"x"}}"#, ReplyStart::Usual),
            (r#"{"type":"message","content":["#, ReplyStart::Usual),
        ] {
            assert_eq!(ReplyStart::of_whole(Dialect::Messages, reply.as_bytes()), expected, "{reply}");
        }
    }

    #[test]
    fn a_response_that_is_cancelled_or_has_no_token_is_aborted() {
        let created = "data: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\",\"output\":[]}}\n\n";
        for (response, expected) in [
            (json!({"status": "cancelled", "output": [{}], "usage": null}), ReplyStart::Aborted),
            (
                json!({"status": "completed", "output": [], "usage": {"output_tokens": 0}}),
                ReplyStart::Aborted,
            ),
            (
                json!({"status": "incomplete", "output": [], "usage": {"output_tokens": 0}}),
                ReplyStart::Aborted,
            ),
            (json!({"status": "completed", "output": [], "usage": {"output_tokens": 1}}), ReplyStart::Usual),
            (
                json!({"status": "completed", "output": [{}], "usage": {"output_tokens": 0}}),
                ReplyStart::Usual,
            ),
            (json!({"status": "completed", "output": [], "usage": null}), ReplyStart::Usual),
        ] {
            let last = json!({"type": "response.completed", "response": response});
            let stream = format!("{created}data: {last}\n\n");
            assert_eq!(ReplyStart::of_stream(Dialect::Responses, stream.as_bytes()), expected, "{stream}");
            let mut whole = response;
            // A reply without both lengths has no usage.
            if whole["usage"].is_object() {
                whole["usage"]["input_tokens"] = json!(3);
            }
            let whole = whole.to_string();
            assert_eq!(ReplyStart::of_whole(Dialect::Responses, whole.as_bytes()), expected, "{whole}");
        }
        assert_eq!(ReplyStart::of_stream(Dialect::Responses, created.as_bytes()), ReplyStart::Role);
        let item = "data: {\"type\":\"response.output_item.added\"}\n\n";
        let begun = format!("{created}{item}");
        assert_eq!(ReplyStart::of_stream(Dialect::Responses, begun.as_bytes()), ReplyStart::Usual);
    }
}
