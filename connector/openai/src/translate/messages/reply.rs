//! A whole chat completion as a message.

use serde_json::{Value, json};

use super::stop::{Calls, Stop, message_id, usage};
use crate::error::ApiError;
use crate::translate::chat_reply::{calls, reasoning, unreadable};

/// The reply of `/tokenize` as a count.
///
/// # Errors
/// 502 for another reply.
pub(crate) fn to_count(reply: &Value) -> Result<Value, ApiError> {
    let count = reply["count"].as_u64();
    Ok(json!({"input_tokens": count.ok_or_else(|| unreadable("an engine did not count the tokens"))?}))
}

/// A whole chat as a message.
///
/// # Errors
/// 502 for a reply that has no counterpart.
pub(crate) fn to_message(chat: &Value) -> Result<Value, ApiError> {
    let choice = &chat["choices"][0];
    let message = &choice["message"];
    let calls = calls(message);
    let stop = Stop::of(
        choice,
        match calls.last() {
            None => Calls::None,
            Some(last) if arguments(last).is_some() => Calls::Complete,
            Some(_) => Calls::Cut,
        },
    )?;
    let mut content = Vec::new();
    let thinking = reasoning(message);
    if !thinking.is_empty() {
        content.push(json!({"type": "thinking", "thinking": thinking, "signature": ""}));
    }
    if let Some(text) = message["content"].as_str().filter(|text| !text.is_empty()) {
        content.push(json!({"type": "text", "text": text}));
    }
    for call in calls {
        let function = &call["function"];
        let input = input(call, &stop)?;
        content.push(json!({"type": "tool_use", "id": call["id"], "name": function["name"], "input": input}));
    }
    Ok(json!({
        "id": message_id(chat), "type": "message", "role": "assistant", "model": chat["model"],
        "content": content, "stop_reason": stop.reason, "stop_sequence": stop.sequence,
        "usage": usage(&chat["usage"]),
    }))
}

/// The arguments of a call, which are JSON in a string; `None` if they are no object.
fn arguments(call: &Value) -> Option<Value> {
    let arguments = call["function"]["arguments"].as_str()?;
    serde_json::from_str(arguments).ok().filter(Value::is_object)
}

/// The input of a call. It is empty if the arguments are empty, or if the length limit or a stop sequence cut them.
fn input(call: &Value, stop: &Stop) -> Result<Value, ApiError> {
    if let Some(arguments) = arguments(call) {
        return Ok(arguments);
    }
    let is_empty = call["function"]["arguments"].as_str().unwrap_or_default().trim().is_empty();
    if is_empty || matches!(stop.reason, "max_tokens" | "stop_sequence") {
        return Ok(json!({}));
    }
    Err(unreadable("the model's arguments of a tool call are no JSON object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(choice: Value) -> Result<Value, u16> {
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 6}});
        let chat = json!({"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage});
        to_message(&chat).map_err(|error| error.status)
    }

    #[test]
    fn a_text_is_a_message_with_its_usage() {
        let choice = json!({"message": {"content": "hi", "tool_calls": []}, "finish_reason": "stop"});
        let expected = json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 6,
                "output_tokens": 4},
        });
        assert_eq!(translated(choice), Ok(expected));
    }

    #[test]
    fn reasoning_and_calls_are_blocks_in_order() {
        let call = |arguments: &str| json!({"id": "c1", "function": {"name": "f", "arguments": arguments}});
        let message =
            json!({"reasoning": "hm", "content": "so", "tool_calls": [call("{\"a\":[1]}"), call("")]});
        let found = translated(json!({"message": message, "finish_reason": "stop"})).expect("a message");
        assert_eq!(found["stop_reason"], "tool_use");
        assert_eq!(
            found["content"],
            json!([
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": [1]}},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
            ])
        );
        let cut = |finish: &str| json!({"message": {"content": null, "tool_calls": [call("{\"a\":")]}, "finish_reason": finish});
        assert_eq!(translated(cut("length")).expect("a message")["content"][0]["input"], json!({}));
        assert_eq!(translated(cut("tool_calls")), Err(502), "no silent loss");
        let mut stopped = cut("stop");
        stopped["stop_reason"] = json!("END");
        let found = translated(stopped).expect("a message");
        assert_eq!(
            (&found["stop_reason"], &found["stop_sequence"], &found["content"][0]["input"]),
            (&json!("stop_sequence"), &json!("END"), &json!({})),
            "a call that was cut does not run"
        );
        let complete = json!({"message": {"content": null, "tool_calls": [call("{\"a\":1}")]},
            "finish_reason": "stop", "stop_reason": "END"});
        assert_eq!(translated(complete).expect("a message")["stop_reason"], "tool_use");
    }

    #[test]
    fn every_reason_of_a_complete_response_has_a_counterpart() {
        let of = |finish: Value, stop: Value| {
            let choice = json!({"message": {"content": "a"}, "finish_reason": finish, "stop_reason": stop});
            let found = translated(choice)?;
            Ok((found["stop_reason"].clone(), found["stop_sequence"].clone()))
        };
        for (finish, stop, expected) in [
            ("stop", json!("END"), Ok((json!("stop_sequence"), json!("END")))),
            ("stop", json!(7), Ok((json!("end_turn"), json!(null)))),
            ("length", json!(null), Ok((json!("max_tokens"), json!(null)))),
            ("content_filter", json!(null), Ok((json!("refusal"), json!(null)))),
            ("abort", json!(null), Err(502)),
        ] {
            assert_eq!(of(json!(finish), stop), expected, "{finish}");
        }
        assert_eq!(of(json!(null), json!(null)), Err(502));
    }

    #[test]
    fn a_count_is_translated_and_another_reply_is_an_error() {
        assert_eq!(to_count(&json!({"count": 5, "tokens": [1]})), Ok(json!({"input_tokens": 5})));
        assert_eq!(to_count(&json!({})).map_err(|error| error.status), Err(502));
    }
}
