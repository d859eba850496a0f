//! A whole chat completion as a response.

use serde_json::Value;

use super::RequestEcho;
use super::json::JsonArray;
use super::output::{Item, ResponseHead, Status, logprobs, usage};
use crate::error::ApiError;
use crate::translate::chat_reply::{calls, reasoning, unreadable};

/// A whole chat as a response, in JSON.
///
/// # Errors
/// 502 for a reply that has no counterpart.
pub(crate) fn to_response(chat: &Value, echo: &RequestEcho) -> Result<String, ApiError> {
    let choice = &chat["choices"][0];
    let message = &choice["message"];
    let status = Status::of(choice)?;
    let mut items = Vec::new();
    let thinking = reasoning(message);
    if !thinking.is_empty() {
        items.push(Item::Reasoning(thinking.to_owned()));
    }
    let text = message["content"].as_str().unwrap_or_default();
    let calls = calls(message);
    if !text.is_empty() || (items.is_empty() && calls.is_empty()) {
        items.push(Item::Message { text: text.to_owned(), logprobs: logprobs(choice) });
    }
    for call in calls {
        let function = &call["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(unreadable("an engine's tool call has no name"));
        };
        let arguments = function["arguments"].as_str().unwrap_or_default().to_owned();
        items.push(Item::Call { id: call["id"].clone(), name: name.to_owned(), arguments });
    }
    let head = ResponseHead::of(chat);
    let last = items.len() - 1;
    let mut output = JsonArray::default();
    for (index, item) in items.iter().enumerate() {
        // The end of a text cuts its last item only.
        let status = if index == last { status } else { Status::Completed };
        output.push(item.json(&head.item_id(item, index), status));
    }
    Ok(head.response(echo, status, &output, Some(&usage(&chat["usage"])), None))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn translated(choice: Value) -> Result<Value, u16> {
        let usage = json!({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 6},
            "completion_tokens_details": {"reasoning_tokens": 2, "accepted_prediction_tokens": 1}});
        let chat = json!({"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice],
            "usage": usage});
        let text = to_response(&chat, &RequestEcho::of(&Map::new())).map_err(|error| error.status)?;
        Ok(serde_json::from_str(&text).expect("JSON"))
    }

    #[test]
    fn a_text_is_a_response_with_its_usage() {
        let choice = json!({"message": {"content": "hi", "tool_calls": []}, "finish_reason": "stop"});
        let expected = json!({
            "id": "resp_1", "object": "response", "created_at": 7, "status": "completed", "error": null,
            "incomplete_details": null, "model": "m",
            "output": [{"id": "msg_1_0", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}]}],
            "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 0},
                "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 13},
            "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "prompt_cache_key": null,
            "reasoning": null, "safety_identifier": null, "temperature": null, "top_p": null, "user": null,
            "metadata": {}, "parallel_tool_calls": true, "service_tier": "default", "tool_choice": "auto",
            "tools": [], "top_logprobs": 0, "text": {"format": {"type": "text"}},
            "previous_response_id": null, "background": false, "store": false, "truncation": "disabled",
        });
        assert_eq!(translated(choice), Ok(expected));
    }

    #[test]
    fn reasoning_text_and_calls_are_items_in_order() {
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
        let logprob = json!({"token": "so", "logprob": -0.5, "bytes": [115, 111], "top_logprobs": []});
        let choice = json!({"message": {"reasoning": "hm", "content": "so", "tool_calls": [call]},
            "logprobs": {"content": [logprob]}, "finish_reason": "tool_calls"});
        let found = translated(choice).expect("a response");
        assert_eq!(
            found["output"],
            json!([
                {"id": "rs_1_0", "type": "reasoning", "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null,
                    "status": "completed"},
                {"id": "msg_1_1", "type": "message", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "so", "annotations": [],
                        "logprobs": [logprob]}]},
                {"id": "fc_1_2", "type": "function_call", "call_id": "c1", "name": "f",
                    "arguments": "{\"a\":1}", "status": "completed"},
            ])
        );
        let unnamed = json!({"message": {"tool_calls": [{"function": {}}]}, "finish_reason": "tool_calls"});
        assert_eq!(translated(unnamed), Err(502));
    }

    #[test]
    fn an_end_is_complete_incomplete_or_an_error() {
        for (finish, status, reason) in [
            (json!("stop"), "completed", Value::Null),
            (json!("length"), "incomplete", json!({"reason": "max_output_tokens"})),
            (json!("content_filter"), "incomplete", json!({"reason": "content_filter"})),
        ] {
            let choice = json!({"message": {"content": "", "reasoning": "hm"}, "finish_reason": finish});
            let found = translated(choice).expect("a response");
            assert_eq!((&found["status"], &found["incomplete_details"]), (&json!(status), &reason));
            assert_eq!(found["output"].as_array().map(Vec::len), Some(1), "no empty message");
            assert_eq!(found["output"][0]["status"], status);
        }
        for finish in [json!("abort"), json!("error"), json!(null)] {
            let choice = json!({"message": {"content": "a"}, "finish_reason": finish});
            assert_eq!(translated(choice), Err(502), "{finish}");
        }
        let empty = translated(json!({"message": {"content": ""}, "finish_reason": "stop"}));
        assert_eq!(empty.expect("a response")["output"][0]["content"][0]["text"], "");
    }
}
