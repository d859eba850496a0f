//! Streams as events: blocks, ends, and what is an error.

use super::*;
use crate::translate::{StreamTranslator, Translation};

fn chunk(delta: Value) -> Value {
    json!({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn end(finish: &str, stop: Value) -> Value {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop});
    json!({"id": "chatcmpl-1", "model": "m", "choices": [choice]})
}

fn counted() -> Value {
    json!({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2}}})
}

fn call(index: u64, id: Option<&str>, name: Option<&str>, arguments: &str) -> Value {
    let mut call = json!({"index": index, "function": {"arguments": arguments}});
    if let Some(id) = id {
        call["id"] = id.into();
    }
    if let Some(name) = name {
        call["function"]["name"] = name.into();
    }
    chunk(json!({"tool_calls": [call]}))
}

fn begin() -> StreamTranslator {
    Translation::Message.stream().expect("a stream")
}

fn sse(chunks: &[Value]) -> String {
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect::<String>() + "data: [DONE]\n\n"
}

/// One line per event: its name and what it adds.
fn summary(stream: &str) -> Result<Vec<String>, ApiError> {
    let out = begin().push(stream.as_bytes())?;
    let text = String::from_utf8(out.to_vec()).expect("UTF-8");
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once("\ndata: ").expect("two lines");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(name, format!("event: {}", data["type"].as_str().expect("a type")));
        match data["type"].as_str().expect("a type") {
            "message_start" => format!("start {}", data["message"]["id"].as_str().expect("an id")),
            "content_block_start" => format!("{} {}", data["index"], data["content_block"]),
            "content_block_delta" => format!("{} {}", data["index"], data["delta"]),
            "content_block_stop" => format!("{} stop", data["index"]),
            "message_delta" => format!("{} {}", data["delta"], data["usage"]),
            other => other.to_owned(),
        }
    });
    Ok(events.collect())
}

const USAGE: &str =
    r#"{"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":2,"output_tokens":4}"#;

#[test]
fn reasoning_text_and_calls_are_numbered_blocks() {
    let stream = [
        chunk(json!({"role": "assistant", "content": ""})),
        chunk(json!({"reasoning_content": "h"})),
        chunk(json!({"reasoning": "m"})),
        chunk(json!({"content": "so"})),
        call(0, Some("c0"), Some("f"), ""),
        call(0, None, None, "{\"a\":"),
        call(0, None, None, "1}"),
        call(1, None, Some("g"), "{}"),
        end("tool_calls", json!(null)),
        counted(),
    ];
    let end = format!(r#"{{"stop_reason":"tool_use","stop_sequence":null}} {USAGE}"#);
    let expected = [
        "start msg_1",
        r#"0 {"type":"thinking","thinking":"","signature":""}"#,
        r#"0 {"type":"thinking_delta","thinking":"h"}"#,
        r#"0 {"type":"thinking_delta","thinking":"m"}"#,
        "0 stop",
        r#"1 {"type":"text","text":""}"#,
        r#"1 {"type":"text_delta","text":"so"}"#,
        "1 stop",
        r#"2 {"type":"tool_use","id":"c0","name":"f","input":{}}"#,
        r#"2 {"type":"input_json_delta","partial_json":"{\"a\":"}"#,
        r#"2 {"type":"input_json_delta","partial_json":"1}"}"#,
        "2 stop",
        r#"3 {"type":"tool_use","id":"msg_1-1","name":"g","input":{}}"#,
        r#"3 {"type":"input_json_delta","partial_json":"{}"}"#,
        "3 stop",
        &end,
        "message_stop",
    ];
    assert_eq!(summary(&sse(&stream)).expect("a translation"), expected);
}

#[test]
fn the_result_does_not_depend_on_how_the_frames_arrive() {
    let stream =
        sse(&[chunk(json!({"content": "a"})), chunk(json!({"content": "b"})), end("stop", json!("X"))]);
    let mut translator = begin();
    let one_by_one: Vec<u8> = stream
        .split_inclusive("\n\n")
        .flat_map(|frame| translator.push(frame.as_bytes()).expect("a translation"))
        .collect();
    let at_once = begin().push(stream.as_bytes()).expect("a translation");
    assert_eq!(one_by_one, at_once);
    let text = String::from_utf8(one_by_one).expect("UTF-8");
    assert!(text.contains(r#""stop_reason":"stop_sequence","stop_sequence":"X""#), "{text}");
}

#[test]
fn a_call_that_a_stop_sequence_cut_is_no_tool_use() {
    for (calls, finish, stop, reason, sequence) in [
        (vec!["{\"a\":"], "stop", json!("END"), "stop_sequence", json!("END")),
        (vec!["{\"a\":", "\"}"], "tool_calls", json!("END"), "stop_sequence", json!("END")),
        (vec!["{\"a\":", "1}"], "stop", json!("END"), "tool_use", json!(null)),
        (vec!["{\"a\":"], "tool_calls", json!(null), "tool_use", json!(null)),
        (vec!["{\"a\":"], "length", json!(null), "max_tokens", json!(null)),
    ] {
        let mut stream = vec![call(0, Some("c0"), Some("f"), "{}"), call(1, Some("c1"), Some("f"), "")];
        stream.extend(calls.iter().map(|part| call(1, None, None, part)));
        stream.push(end(finish, stop));
        let events = summary(&sse(&stream)).expect("a translation");
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        assert!(events[events.len() - 2].starts_with(&delta.to_string()), "{events:?}");
    }
}

#[test]
fn a_count_stands_for_a_missing_usage() {
    let begun = format!("data: {}\n\n", chunk(json!({"content": "a"})));
    let ended = format!("data: {}\n\ndata: [DONE]\n\n", end("stop", json!(null)));
    let mut translator = begin();
    translator.push(begun.as_bytes()).expect("a translation");
    translator.set_usage([9, 2, 4]);
    let last = translator.push(ended.as_bytes()).expect("a translation");
    assert!(String::from_utf8_lossy(&last).contains(USAGE));
}

#[test]
fn comments_become_pings_once_the_message_has_begun() {
    let begun = format!(": ka\n\ndata: {}\n\n: ka\n\n", chunk(json!({"role": "assistant"})));
    assert_eq!(summary(&begun).expect("a translation"), ["start msg_1", "ping"]);
}

#[test]
fn an_incomplete_or_unknown_stream_is_an_error_and_never_a_message() {
    let text = || chunk(json!({"content": "a"}));
    for stream in [
        sse(&[text()]),
        sse(&[]),
        sse(&[text(), end("abort", json!(null))]),
        sse(&[call(0, Some("c"), None, "{}")]),
        sse(&[call(1, Some("c"), Some("f"), "{}"), call(0, Some("d"), Some("f"), "{}")]),
        sse(&[call(0, Some("c"), Some("f"), "{"), text(), call(0, None, None, "}")]),
        "data: [1]\n\n".to_owned(),
        "data: {\"cut\n\n".to_owned(),
        format!("data: {}", text()),
    ] {
        assert_eq!(summary(&stream).map_err(|error| error.status), Err(502), "{stream}");
    }
}
