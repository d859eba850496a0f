//! Extracts the message of an engine's refusal from the formats of engines and their frameworks:
//!
//! - `{"error": {"message": …, "param": …, "code": …}}` and vLLM's older `{"object": "error", "message": …}`,
//! - `{"error": "…"}`, `{"message": "…"}`,
//! - `{"detail": "…"}`, and FastAPI's list of `{"loc": ["body", "messages", 0], "msg": "…"}`,
//! - a JSON string, or plain text.
//!
//! Pure. The caller decides which parts a client may read.

use std::borrow::Cow;

use serde_json::Value;

/// Limit on the listed faults of one refusal.
const FAULTS_MAX: usize = 8;
/// Limit on the parts of the path to a field.
const PATH_PARTS_MAX: usize = 16;

/// An engine's error message about a request.
#[derive(Debug, Default)]
pub(super) struct EngineError<'a> {
    pub message: Option<Cow<'a, str>>,
    pub param: Option<Cow<'a, str>>,
    pub code: Cow<'a, str>,
    pub kind: &'a str,
}

impl<'a> EngineError<'a> {
    /// `body` is `bytes` as JSON; `Null` if they are not JSON.
    pub(super) fn of(body: &'a Value, bytes: &'a [u8]) -> Self {
        let error = body.get("error").filter(|error| error.is_object()).unwrap_or(body);
        let text = |name: &str| error.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let code = match error.get("code") {
            None | Some(Value::Null) => Cow::Borrowed(""),
            Some(Value::String(code)) => Cow::Borrowed(code.as_str()),
            Some(other) => Cow::Owned(other.to_string()),
        };
        let (reason, field) = error.get("detail").map(detail).unwrap_or_default();
        let message = text("message").map(Cow::Borrowed).or(reason);
        let message = message.or_else(|| {
            Some(Cow::Borrowed(match body {
                Value::Null => plain(bytes)?,
                _ => text("error").or_else(|| body.as_str()).or_else(|| text("title"))?,
            }))
        });
        let param = text("param").map(Cow::Borrowed).or(field);
        Self { message, param, code, kind: text("type").unwrap_or_default() }
    }
}

impl EngineError<'_> {
    /// Whether a 404 concerns the path and not the content of the request: a code of Baton's engines, or the message of
    /// an HTTP framework. A 404 without a message, or with a page, may have any reason.
    pub(super) fn lacks_path(&self) -> bool {
        let message = self.message.as_deref().unwrap_or_default();
        let bare = ["not found", "404 page not found", "404 not found"];
        match &*self.code {
            _ if self.param.is_some() => false,
            "unsupported_endpoint" => true,
            "not_found" => message.starts_with("no such path"),
            "" => self.kind.is_empty() && bare.iter().any(|bare| message.eq_ignore_ascii_case(bare)),
            _ => false,
        }
    }
}

/// The reason and the first field of a `detail`.
fn detail(detail: &Value) -> (Option<Cow<'_, str>>, Option<Cow<'_, str>>) {
    match detail {
        Value::String(reason) if !reason.is_empty() => (Some(reason.into()), None),
        Value::Object(fault) => {
            let reason = ["message", "msg"].iter().find_map(|name| fault.get(*name)?.as_str());
            (reason.map(Cow::Borrowed), path(detail).map(Cow::Owned))
        }
        Value::Array(faults) => {
            let reasons: Vec<_> = faults.iter().filter_map(fault).take(FAULTS_MAX).collect();
            let reason = (!reasons.is_empty()).then(|| reasons.join("; ").into());
            (reason, faults.first().and_then(path).map(Cow::Owned))
        }
        _ => (None, None),
    }
}

/// One fault of FastAPI's list.
fn fault(fault: &Value) -> Option<Cow<'_, str>> {
    let reason = fault.as_str().or_else(|| fault.get("msg")?.as_str())?;
    Some(path(fault).map_or(Cow::Borrowed(reason), |path| format!("{path}: {reason}").into()))
}

/// The field that a fault names, as `messages.0.content`; `None` for the whole body.
fn path(fault: &Value) -> Option<String> {
    let parts = fault.get("loc")?.as_array()?;
    let parts = parts.strip_prefix(&[Value::from("body")]).unwrap_or(parts);
    // A syntax error contains a text position instead.
    parts.first()?.as_str()?;
    let parts = parts.iter().take(PATH_PARTS_MAX).map(|part| match part {
        Value::String(name) => name.clone(),
        other => other.to_string(),
    });
    Some(parts.collect::<Vec<_>>().join("."))
}

/// Plain text: no page, no fragment of JSON, no binary data.
fn plain(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?.trim();
    let is_text = !text.starts_with(['<', '{', '[', '"']) && !text.contains(is_binary);
    (is_text && !text.is_empty()).then_some(text)
}

fn is_binary(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
}

/// The context length and the prompt length in tokens, from a message about a long prompt. The formats are those of
/// vLLM (0.6 to 0.32) and SGLang.
pub(super) fn context_and_prompt(message: &str) -> Option<(u64, u64)> {
    let after = |phrase: &&str| {
        let digits = message.split_once(phrase)?.1;
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().ok()
    };
    let before = |phrase: &&str| {
        let digits = message.split_once(phrase)?.0;
        let begin = digits.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
        digits.get(begin..)?.parse().ok()
    };
    let context = [
        "context length is only ",
        "context length is ",
        "context length of ",
        "context length (",
        "maximum model length of ",
    ];
    let prompt_before = [
        " in the messages",
        " in the prompt",
        " tokens in the messages",
        " tokens in the prompt",
        " input tokens",
        " tokens from the input",
    ];
    let prompt_after = ["prompt (length ", "The input ("];
    let prompt = prompt_before.iter().find_map(before).or_else(|| prompt_after.iter().find_map(after));
    Some((context.iter().find_map(after)?, prompt?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_and_param(text: &str) -> (Option<String>, Option<String>) {
        let body = serde_json::from_str(text).unwrap_or(Value::Null);
        let EngineError { message, param, .. } = EngineError::of(&body, text.as_bytes());
        (message.map(Cow::into_owned), param.map(Cow::into_owned))
    }

    #[test]
    fn the_reason_and_the_field_are_found_in_every_form() {
        let fault = r#"{"type":"missing","loc":["body","messages",0,"content"],"msg":"Field required"}"#;
        let two = format!(
            r#"{{"detail":[{fault},{{"loc":["body"],"msg":"too old"}},{{"loc":["query","n"],"msg":"odd"}}]}}"#
        );
        for (text, message, param) in [
            (r#"{"error":{"message":"m","param":"p"}}"#, Some("m"), Some("p")),
            (r#"{"object":"error","message":"m","param":null}"#, Some("m"), None),
            (r#"{"error":"m","error_type":"validation"}"#, Some("m"), None),
            (r#"{"detail":"m"}"#, Some("m"), None),
            (r#"{"error":{"detail":"m","param":"p"}}"#, Some("m"), Some("p")),
            (r#"{"detail":{"msg":"m","loc":["body","n"]}}"#, Some("m"), Some("n")),
            (
                &two,
                Some("messages.0.content: Field required; too old; query.n: odd"),
                Some("messages.0.content"),
            ),
            (
                r#"{"detail":[{"loc":["body",12],"msg":"JSON decode error"}]}"#,
                Some("JSON decode error"),
                None,
            ),
            (r#"{"title":"m","status":400}"#, Some("m"), None),
            (r#""m""#, Some("m"), None),
            ("the prompt is empty\n", Some("the prompt is empty"), None),
            ("<html>no</html>", None, None),
            (r#"{"error":{"mess"#, None, None),
            ("\u{1f}\u{8b}", None, None),
            ("", None, None),
            ("{}", None, None),
            ("7", None, None),
            (r#"{"detail":[]}"#, None, None),
            (r#"{"detail":7,"error":[1]}"#, None, None),
        ] {
            assert_eq!(
                message_and_param(text),
                (message.map(str::to_owned), param.map(str::to_owned)),
                "{text}"
            );
        }
    }

    #[test]
    fn both_lengths_are_parsed_from_context_length_errors() {
        for message in [
            "This model's maximum context length is 8 tokens. However, you requested 10 tokens (9 in the messages, \
             1 in the completion). Please reduce the length of the messages or completion.",
            "This model's maximum context length is 8 tokens. However, you requested 9 tokens in the messages, \
             Please reduce the length of the messages.",
            "This model's maximum context length is 8 tokens. However, your request has 9 input tokens. Please \
             reduce the length of the input messages.",
            "'max_tokens' or 'max_completion_tokens' is too large: 1. This model's maximum context length is 8 \
             tokens and your request has 9 input tokens (1 > 8 - 9).",
            "You passed 9 input tokens and requested 1 output tokens. However, the model's context length is only 8 \
             tokens, resulting in a maximum input length of 7 tokens. Please reduce the length of the input prompt.",
            "This model's maximum context length is 8 tokens. However, you requested 1 output tokens and your prompt \
             contains at least 9 input tokens, for a total of at least 10 tokens.",
            "The decoder prompt (length 9) is longer than the maximum model length of 8. Make sure that \
             `max_model_len` is no smaller than the number of text tokens.",
            "The input (9 tokens) is longer than the model's context length (8 tokens).",
            "Requested token count exceeds the model's maximum context length of 8 tokens. You requested a total of \
             10 tokens: 9 tokens from the input messages and 1 tokens for the completion.",
        ] {
            assert_eq!(context_and_prompt(message), Some((8, 9)), "{message}");
        }
        for message in
            ["", "context length is 8", "context length is 99999999999999999999 and 9 input tokens"]
        {
            assert_eq!(context_and_prompt(message), None, "{message}");
        }
    }
}
