//! Engines that compute: each token depends on all earlier ones. A response composed of several engines' responses can
//! therefore be compared with that of a single engine.

use serde_json::{Value, json};

use crate::harness::engine::{Action, ReceivedRequest};

/// The text of a token.
fn letter(token: u64) -> char {
    char::from(b'a' + u8::try_from(token % 26).expect("small"))
}

/// Whether the text of this token is sent only with the next one.
fn is_held(token: u64) -> bool {
    token.is_multiple_of(7)
}

fn next(tokens: &[u64]) -> u64 {
    let mixed =
        tokens.iter().fold(tokens.len() as u64, |sum, token| sum.wrapping_mul(31).wrapping_add(*token));
    (mixed >> 3) % 1000
}

/// The prompt's tokens: its bytes, unless it consists of tokens already.
fn prompt(body: &Value) -> Vec<u64> {
    let bytes = |text: &str| text.bytes().map(u64::from).collect();
    match &body["prompt"] {
        Value::Array(ids) => ids.iter().map(|id| id.as_u64().expect("a token")).collect(),
        Value::String(text) => bytes(text),
        _ => bytes(&body["messages"].to_string()),
    }
}

/// The engine's response: all frames, or a whole response.
pub(crate) fn answer(request: &ReceivedRequest, name: &str) -> Action {
    let body = &request.body;
    let most = body["max_completion_tokens"].as_u64().or(body["max_tokens"].as_u64()).unwrap_or(16);
    let prompt = prompt(body);
    let (mut tokens, mut held, mut steps) = (prompt.clone(), String::new(), Vec::new());
    for at in 1..=most {
        let token = next(&tokens);
        tokens.push(token);
        held.push(letter(token));
        let text = if is_held(token) && at < most { String::new() } else { std::mem::take(&mut held) };
        steps.push((token, text));
    }
    let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": most,
        "total_tokens": prompt.len() as u64 + most});
    let chat = request.path == "/v1/chat/completions";
    if body["stream"] != true {
        let text: String = steps.into_iter().map(|(_, text)| text).collect();
        return Action::Json(
            json!({"id": name, "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
            "usage": usage}),
        );
    }
    let with_ids = body["return_token_ids"] == true;
    let object = if chat { "chat.completion.chunk" } else { "text_completion" };
    let frame = |choices: Value, extra: Value| {
        let mut data =
            json!({"id": name, "object": object, "created": name.len(), "model": name, "choices": choices});
        data.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        format!("data: {data}\n\n")
    };
    let ids = if with_ids { json!({"prompt_token_ids": prompt}) } else { json!({}) };
    let mut frames = Vec::new();
    if chat {
        let role =
            json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]);
        frames.push(frame(role, ids.clone()));
    }
    for (at, (token, text)) in (1..).zip(steps) {
        let finish = (at == most).then_some("length");
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        if chat {
            choice["delta"] = json!({"content": text});
        } else {
            choice["text"] = json!(text);
        }
        if with_ids {
            choice["token_ids"] = json!([token]);
            if at == 1 && !chat {
                choice["prompt_token_ids"] = ids["prompt_token_ids"].clone();
            }
        }
        frames.push(frame(json!([choice]), json!({})));
    }
    if body["stream_options"]["include_usage"] == true {
        frames.push(frame(json!([]), json!({"usage": usage})));
    }
    frames.push("data: [DONE]\n\n".to_owned());
    Action::Frames(frames, true)
}

/// The content of one response for a client.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct StreamContent {
    pub text: String,
    pub finishes: usize,
    pub dones: usize,
    pub errors: usize,
    pub roles: usize,
    pub usage: Option<Value>,
    /// `id`, `created`, `model` and `object` of every frame.
    pub heads: std::collections::BTreeSet<String>,
}

/// Reads a stream of events, which must all be complete.
pub(crate) fn read(stream: &str) -> StreamContent {
    let mut read = StreamContent::default();
    assert!(stream.is_empty() || stream.ends_with("\n\n"), "{stream}");
    for frame in stream.split_terminator("\n\n") {
        assert_eq!(read.dones, 0, "nothing comes after the end: {stream}");
        let data = frame.strip_prefix("data: ").unwrap_or_else(|| panic!("{frame}"));
        if data == "[DONE]" {
            read.dones += 1;
            continue;
        }
        let data: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"));
        if !data["error"].is_null() {
            read.errors += 1;
            continue;
        }
        assert!(!data.to_string().contains("token_ids"), "no token ids were requested: {data}");
        read.heads.insert(format!("{} {} {} {}", data["id"], data["created"], data["model"], data["object"]));
        read.usage = data.get("usage").filter(|usage| usage.is_object()).cloned().or(read.usage);
        if let Some(choice) = data["choices"].get(0) {
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            read.text.push_str(text.unwrap_or_default());
            read.finishes += usize::from(!choice["finish_reason"].is_null());
            read.roles += usize::from(!choice["delta"]["role"].is_null());
        }
    }
    read
}
