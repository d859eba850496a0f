//! Streams as events: items, ends, and what is an error.

use super::*;
use crate::translate::responses::to_response;
use crate::translate::{StreamTranslator, Translation};

fn chunk(delta: Value) -> Value {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": null});
    json!({"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice]})
}

fn end(finish: &str) -> Value {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": finish});
    json!({"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice]})
}

fn counted() -> Value {
    json!({"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 2}}})
}

fn call(index: u64, head: Option<(&str, &str)>, arguments: &str) -> Value {
    let mut call = json!({"index": index, "function": {"arguments": arguments}});
    if let Some((id, name)) = head {
        call["id"] = id.into();
        call["function"]["name"] = name.into();
    }
    chunk(json!({"tool_calls": [call]}))
}

fn sse(chunks: &[Value]) -> String {
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect::<String>() + "data: [DONE]\n\n"
}

fn begin() -> StreamTranslator {
    let echo = Arc::new(RequestEcho::of(&Map::new()));
    Translation::Response(echo).stream().expect("a stream")
}

/// The events of some bytes. They are numbered without a gap from `first` on, and named by their types.
fn read(bytes: &[u8], first: u64) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).expect("UTF-8");
    let frames = text.split_terminator("\n\n").filter(|frame| *frame != ": ka");
    let events: Vec<Value> = frames
        .map(|frame| {
            let (name, data) = frame.split_once("\ndata: ").expect("two lines");
            let data: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(name, format!("event: {}", data["type"].as_str().expect("a type")));
            data
        })
        .collect();
    for (number, event) in (first..).zip(&events) {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    events
}

fn translated(stream: &str) -> Result<Vec<Value>, u16> {
    let bytes = begin().push(stream.as_bytes()).map_err(|error| error.status)?;
    Ok(read(&bytes, 0))
}

/// The type of each event without its common beginning, its item, and what it adds.
fn summary(events: &[Value]) -> Vec<String> {
    let line = |event: &Value| {
        let kind = event["type"].as_str().expect("a type").trim_start_matches("response.");
        let added = ["delta", "text", "arguments"].iter().find_map(|name| event[*name].as_str());
        match (event["output_index"].as_u64(), added) {
            (Some(index), Some(added)) => format!("{index} {kind} {added}"),
            (Some(index), None) => format!("{index} {kind}"),
            (None, _) => kind.to_owned(),
        }
    };
    events.iter().map(line).collect()
}

fn everything() -> Vec<Value> {
    vec![
        chunk(json!({"role": "assistant", "content": "", "reasoning_content": ""})),
        chunk(json!({"reasoning_content": "h"})),
        chunk(json!({"reasoning": "m"})),
        chunk(json!({"content": "so"})),
        call(0, Some(("c0", "f")), ""),
        call(0, None, "{\"a\":"),
        call(0, None, "1}"),
        call(1, Some(("c1", "g")), "{}"),
        end("tool_calls"),
        counted(),
    ]
}

#[test]
fn reasoning_text_and_calls_are_numbered_items() {
    let events = translated(&sse(&everything())).expect("a translation");
    let expected = [
        "created",
        "in_progress",
        "0 output_item.added",
        "0 content_part.added",
        "0 reasoning_text.delta h",
        "0 reasoning_text.delta m",
        "0 reasoning_text.done hm",
        "0 content_part.done",
        "0 output_item.done",
        "1 output_item.added",
        "1 content_part.added",
        "1 output_text.delta so",
        "1 output_text.done so",
        "1 content_part.done",
        "1 output_item.done",
        "2 output_item.added",
        "2 function_call_arguments.delta {\"a\":",
        "2 function_call_arguments.delta 1}",
        "2 function_call_arguments.done {\"a\":1}",
        "2 output_item.done",
        "3 output_item.added",
        "3 function_call_arguments.delta {}",
        "3 function_call_arguments.done {}",
        "3 output_item.done",
        "completed",
    ];
    assert_eq!(summary(&events), expected);
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(
        (&events[0]["response"]["output"], &events[0]["response"]["usage"]),
        (&json!([]), &json!(null))
    );
    let (added, done) = (&events[9]["item"], &events[14]["item"]);
    assert_eq!((&added["id"], &added["content"]), (&done["id"], &json!([])));
    assert_eq!((&events[11]["item_id"], &events[11]["logprobs"]), (&done["id"], &json!([])));
}

#[test]
fn the_last_event_has_what_the_whole_chat_is_translated_to() {
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let message = json!({"reasoning_content": "hm", "content": "so",
        "tool_calls": [call("c0", "f", "{\"a\":1}"), call("c1", "g", "{}")]});
    let text = json!({"content": "so"});
    let entry = |token: &str| json!({"token": token, "logprob": -0.5, "bytes": [], "top_logprobs": []});
    let mut scored = chunk(text.clone());
    scored["choices"][0]["logprobs"] = json!({"content": [entry("so")]});
    let mut last = end("stop");
    last["choices"][0]["logprobs"] = json!({"content": [entry("<end>")]});
    let both = json!({"content": [entry("so"), entry("<end>")]});
    for (stream, message, finish, logprobs) in [
        (everything(), message, "tool_calls", json!(null)),
        (vec![chunk(text.clone()), end("length"), counted()], text.clone(), "length", json!(null)),
        (vec![chunk(json!({})), end("stop"), counted()], json!({"content": ""}), "stop", json!(null)),
        (vec![scored, last, counted()], text, "stop", both),
    ] {
        let events = translated(&sse(&stream)).expect("a translation");
        let choice = json!({"message": message, "finish_reason": finish, "logprobs": logprobs});
        let mut chat = json!({"id": "chatcmpl-1", "created": 7, "model": "m", "choices": [choice]});
        chat["usage"] = counted()["usage"].clone();
        let whole = to_response(&chat, &RequestEcho::of(&Map::new())).expect("a response");
        let whole: Value = serde_json::from_str(&whole).expect("JSON");
        let last = events.last().expect("an event");
        assert_eq!(last["response"], whole);
        assert_eq!(last["type"], format!("response.{}", whole["status"].as_str().expect("a word")));
        let items = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let items: Vec<_> = items.map(|event| event["item"].clone()).collect();
        assert_eq!(whole["output"], Value::from(items));
    }
}

#[test]
fn the_result_does_not_depend_on_how_the_frames_arrive() {
    let stream = sse(&everything());
    let mut translator = begin();
    let one_by_one: Vec<u8> = stream
        .split_inclusive("\n\n")
        .flat_map(|frame| translator.push(frame.as_bytes()).expect("a translation"))
        .collect();
    let at_once = begin().push(stream.as_bytes()).expect("a translation");
    assert_eq!(one_by_one, at_once);
}

#[test]
fn a_stream_that_fails_ends_with_a_failed_response() {
    let error = ApiError::bad_gateway("the engine died");
    let mut translator = begin();
    let begun = format!(": ka\n\ndata: {}\n\n", chunk(json!({"content": "a"})));
    let events = read(&translator.push(begun.as_bytes()).expect("a translation"), 0);
    translator.set_usage([9, 2, 4]);
    let last = read(&translator.fail(&error), events.len() as u64);
    let response = &last[0]["response"];
    assert_eq!(
        (last.len(), &last[0]["type"], &response["status"]),
        (1, &json!("response.failed"), &json!("failed"))
    );
    assert_eq!(
        response["error"],
        json!({"code": "server_error", "message": "the engine died", "param": null, "type": "server_error"})
    );
    assert_eq!(response["output"][0]["content"][0]["text"], "a", "what was sent");
    assert_eq!(
        (&response["output"][0]["status"], &response["usage"]["total_tokens"]),
        (&json!("incomplete"), &json!(13))
    );
    let before = read(&begin().fail(&error), 0);
    let kind = "server_error";
    let failure = json!({"code": kind, "message": "the engine died", "param": null, "type": kind});
    let expected = json!({"type": "error", "sequence_number": 0, "code": kind, "message": "the engine died",
        "param": null, "error": failure});
    assert_eq!(before, [expected], "there is no response that could fail");
    assert_eq!(error_event(&error), begin().fail(&error));
}

#[test]
fn the_log_probabilities_of_a_stream_are_bounded_as_they_are_kept() {
    let entry = json!({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []});
    let mut scored = chunk(json!({"content": "a"}));
    scored["choices"][0]["logprobs"] = json!({"content": vec![entry.clone(); 1000]});
    let frame = format!("data: {scored}\n\n");
    let (mut translator, mut kept) = (begin(), 0);
    let error = loop {
        match translator.push(frame.as_bytes()) {
            Ok(_) => kept += 1000 * entry.to_string().len(),
            Err(error) => break error,
        }
    };
    assert_eq!(error.status, 502);
    assert!((REPLY_BYTES_MAX / 10 * 9..=REPLY_BYTES_MAX).contains(&kept), "{kept}");
}

#[test]
fn a_text_behind_a_call_is_an_item_of_its_own() {
    let stream =
        [chunk(json!({"content": "a"})), call(0, Some(("c0", "f")), "{}"), chunk(json!({"content": "b"}))];
    let events = translated(&sse(&[&stream[..], &[end("stop"), counted()]].concat())).expect("a translation");
    let output = events.last().expect("an event")["response"]["output"].clone();
    let kinds: Vec<_> = output.as_array().expect("items").iter().map(|item| item["type"].clone()).collect();
    assert_eq!(kinds, ["message", "function_call", "message"]);
}

#[test]
fn an_incomplete_or_unknown_stream_is_an_error_and_never_a_response() {
    let text = || chunk(json!({"content": "a"}));
    for stream in [
        sse(&[text()]),
        sse(&[]),
        sse(&[text(), end("abort")]),
        sse(&[call(0, None, "{}")]),
        sse(&[call(1, Some(("c", "f")), "{}"), call(0, Some(("d", "f")), "{}")]),
        sse(&[call(0, Some(("c", "f")), "{"), text(), call(0, None, "}")]),
        sse(&[chunk(json!({"content": "a".repeat(REPLY_BYTES_MAX + 1)}))]),
        "data: [1]\n\n".to_owned(),
        "data: {\"cut\n\n".to_owned(),
        format!("data: {}", text()),
    ] {
        assert_eq!(translated(&stream), Err(502), "{}", &stream[..stream.len().min(200)]);
    }
}
