//! Streams that are cut at every position and continued.

use super::*;

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("tests pass objects"),
    }
}

fn completion(extra: Value) -> Map<String, Value> {
    let mut body =
        object(json!({"model": "m", "prompt": "x", "stream": true, "max_tokens": 8, "temperature": 0}));
    body.extend(object(extra));
    body
}

fn frame(data: &Value) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

fn piece(id: &str, text: &str, ids: &[u32], finish: Option<&str>) -> Bytes {
    frame(&json!({"id": id, "object": "text_completion", "created": 1, "model": id, "choices": [
        {"index": 0, "text": text, "logprobs": null, "finish_reason": finish, "token_ids": ids}]}))
}

fn first(id: &str, prompt: &[u32], text: &str, ids: &[u32]) -> Bytes {
    frame(&json!({"id": id, "object": "text_completion", "created": 1, "model": id, "choices": [
        {"index": 0, "text": text, "logprobs": null, "finish_reason": null, "token_ids": ids,
         "prompt_token_ids": prompt}]}))
}

fn read(frames: &Bytes) -> Vec<Value> {
    let text = std::str::from_utf8(frames).expect("text");
    let json = |frame: &str| {
        serde_json::from_str(frame.strip_prefix("data: ").expect("data")).unwrap_or(json!("[DONE]"))
    };
    text.split_terminator("\n\n").map(json).collect()
}

#[test]
fn token_ids_are_kept_here_and_not_passed_on() {
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(json!({})));
    let out = read(&transcript.rewrite_frames(&first("a", &[1, 2], "He", &[10])));
    assert_eq!(
        out[0]["choices"][0],
        json!({"index": 0, "text": "He", "logprobs": null, "finish_reason": null})
    );
    assert_eq!(
        (transcript.tokens.prompt.as_deref(), transcript.tokens.sent.as_slice()),
        (Some([1, 2].as_slice()), [10].as_slice())
    );
    let done = Bytes::from_static(b": keep-alive\n\ndata: [DONE]\n\n");
    assert_eq!(transcript.rewrite_frames(&done), done);
}

#[test]
fn resumption_starts_after_the_last_sent_token() {
    let mut transcript =
        Transcript::new(Endpoint::Completions, "m", &completion(json!({"min_tokens": 3, "cache_salt": "s"})));
    transcript.rewrite_frames(&first("a", &[1, 2], "He", &[10]));
    transcript.rewrite_frames(&piece("a", "", &[11], None));
    transcript.rewrite_frames(&piece("a", "llo", &[12], None));
    transcript.rewrite_frames(&piece("a", "", &[13], None));
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("it can be continued") };
    let expected = json!({"model": "m", "prompt": [1, 2, 10, 11, 12], "stream": true, "return_token_ids": true,
        "max_tokens": 5, "temperature": 0, "cache_salt": "s"});
    assert_eq!(Value::Object(body), expected);
    transcript.mark_continued();
    let out = read(&transcript.rewrite_frames(&first("b", &[1, 2, 10, 11, 12], " w", &[14])));
    assert_eq!((&out[0]["id"], &out[0]["model"]), (&json!("a"), &json!("a")));
    assert!(out[0]["choices"][0].get("prompt_token_ids").is_none());
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("and again") };
    assert_eq!(body["prompt"], json!([1, 2, 10, 11, 12, 14]));
    assert_eq!(body["max_tokens"], 4);
}

#[test]
fn usage_is_that_of_the_whole_answer() {
    let usage = json!({"stream_options": {"include_usage": true}});
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(usage));
    transcript.rewrite_frames(&first("a", &[1, 2], "He", &[10]));
    transcript.rewrite_frames(&piece("a", "llo", &[11], None));
    assert!(matches!(transcript.plan_resume(), ResumePlan::Continue(_)));
    transcript.mark_continued();
    transcript.rewrite_frames(&piece("b", "!", &[12], Some("stop")));
    let last = json!({"id": "b", "created": 9, "model": "b", "choices": [],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5,
            "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2}}});
    let out = read(&transcript.rewrite_frames(&frame(&last)));
    let expected = json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5});
    assert_eq!((&out[0]["usage"], &out[0]["id"]), (&expected, &json!("a")));
}

#[test]
fn chat_is_continued_as_chat() {
    let body = object(
        json!({"model": "m", "messages": [], "stream": true, "max_completion_tokens": 8, "temperature": 0}),
    );
    let mut transcript = Transcript::new(Endpoint::Chat, "m", &body);
    transcript.rewrite_frames(&frame(
        &json!({"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
        "finish_reason": null}]}),
    ));
    transcript.rewrite_frames(&frame(
        &json!({"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": {"content": "He"}, "finish_reason": null, "token_ids": [10]}]}),
    ));
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("it can be continued") };
    assert_eq!((&body["prompt"], &body["max_tokens"]), (&json!([1, 2, 10]), &json!(7)));
    assert!(body.get("messages").is_none());
    transcript.mark_continued();
    let out = read(&transcript.rewrite_frames(&piece("b", "llo", &[11], Some("stop"))));
    assert_eq!(out[0]["object"], "chat.completion.chunk");
    assert_eq!(out[0]["choices"][0]["delta"], json!({"content": "llo"}));
    assert!(out[0]["choices"][0].get("text").is_none());
}

#[test]
fn a_stream_that_only_lacks_its_end_gets_it_here() {
    let usage = json!({"stream_options": {"include_usage": true}});
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(usage));
    transcript.rewrite_frames(&first("a", &[1, 2], "He", &[10]));
    transcript.rewrite_frames(&piece("a", "", &[11], Some("stop")));
    let ResumePlan::Finish(last) = transcript.plan_resume() else { panic!("it is finished") };
    let out = read(&last);
    assert_eq!(out[0]["usage"], json!({"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}));
    assert_eq!(out[1], "[DONE]");
}

#[test]
fn a_stream_that_cannot_be_continued_exactly_is_not_resumed() {
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(json!({})));
    assert_eq!(transcript.plan_resume(), ResumePlan::Restart, "nothing was sent");
    // An engine without token ids.
    transcript.rewrite_frames(&frame(
        &json!({"id": "a", "choices": [{"index": 0, "text": "He", "finish_reason": null}]}),
    ));
    assert_eq!(transcript.plan_resume(), ResumePlan::Impossible);
    let mut transcript = Transcript::new(Endpoint::Chat, "m", &completion(json!({})));
    transcript.rewrite_frames(&frame(&json!({"id": "a", "prompt_token_ids": [1], "choices": [
        {"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": null, "token_ids": [10]}]})));
    assert_eq!(transcript.plan_resume(), ResumePlan::Impossible, "a tool call");
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(json!({})));
    transcript.rewrite_frames(&first("a", &[1], "He", &[10]));
    transcript.rewrite_frames(&frame(&json!({"error": {"message": "x"}})));
    assert_eq!(transcript.plan_resume(), ResumePlan::Impossible, "the engine's own error went out");
}

#[test]
fn a_chat_is_not_continued_during_its_reasoning_or_behind_it() {
    let chat = |delta: Value, id: u32| {
        frame(&json!({"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "prompt_token_ids": [1, 2],
            "choices": [{"index": 0, "delta": delta, "finish_reason": null, "token_ids": [id]}]}))
    };
    for begins in [
        json!({"reasoning_content": "Hm", "reasoning": "Hm"}),
        json!({"reasoning": "Hm"}),
        // It may begin with reasoning.
        json!({"role": "assistant", "content": "", "reasoning_content": ""}),
    ] {
        let mut transcript = Transcript::new(Endpoint::Chat, "m", &completion(json!({})));
        transcript.rewrite_frames(&chat(begins.clone(), 10));
        assert_eq!(transcript.plan_resume(), ResumePlan::Impossible, "{begins}");
        transcript.rewrite_frames(&chat(json!({"content": "so"}), 11));
        assert_eq!(transcript.plan_resume(), ResumePlan::Impossible, "behind {begins}");
    }
}

#[test]
fn requests_whose_answer_depends_on_more_than_its_tokens_are_not_continued() {
    for fine in [
        json!({}),
        json!({"n": 1, "echo": false, "stop": [], "logprobs": null, "top_p": 0.5, "tools": []}),
        json!({"seed": 5, "min_tokens": 2, "presence_penalty": 0}),
        json!({"temperature": 0.7, "response_format": {"type": "text"}}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"guided_json": {}, "structured_outputs": null}),
    ] {
        assert!(is_allowed(&completion(fine.clone())), "{fine}");
    }
    for not in [
        json!({"stream": false}),
        json!({"n": 2}),
        json!({"logprobs": 1}),
        json!({"echo": true}),
        json!({"stop": ["x"]}),
        json!({"stop": "x"}),
        json!({"seed": 5, "temperature": 0.5}),
        json!({"tools": [{}]}),
        json!({"presence_penalty": 0.5}),
        json!({"return_token_ids": true}),
        json!({"something_new": 1}),
    ] {
        assert!(!is_allowed(&completion(not.clone())), "{not}");
    }
}

#[test]
fn a_constrained_stream_of_batons_engine_is_continued_with_its_constraint() {
    const BATONS: &str = "cmpl-7.0123456789abcdef";
    let format = json!({"type": "json_object"});
    let begin = |format: &Value| {
        let body = completion(json!({"response_format": format, "guided_regex": null}));
        Transcript::new(Endpoint::Completions, "m", &body)
    };
    let mut transcript = begin(&format);
    transcript.rewrite_frames(&first(BATONS, &[1, 2], "{", &[10]));
    transcript.rewrite_frames(&piece(BATONS, "\"a\"", &[11, 12], None));
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("it can be continued") };
    assert_eq!(body["prompt"], json!([1, 2, 10, 11, 12]));
    let continued = json!({"continues": 3, "of": {"response_format": format}});
    assert_eq!((&body["structured_outputs"], body.get("response_format")), (&continued, None));
    // Nothing of the text was sent: the constraint is that of a new text.
    let mut transcript = begin(&format);
    transcript.rewrite_frames(&first(BATONS, &[1, 2], "", &[10]));
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("it can be continued") };
    assert_eq!((&body["response_format"], body.get("structured_outputs")), (&format, None));
    // Another engine's: it would continue without the constraint.
    let mut transcript = begin(&format);
    transcript.rewrite_frames(&first("cmpl-7", &[1, 2], "{", &[10]));
    assert_eq!(transcript.plan_resume(), ResumePlan::Impossible);
    // No constraint.
    let mut transcript = begin(&json!({"type": "text"}));
    transcript.rewrite_frames(&first("cmpl-7", &[1, 2], "He", &[10]));
    let ResumePlan::Continue(body) = transcript.plan_resume() else { panic!("it can be continued") };
    assert!(!body.contains_key("structured_outputs") && !body.contains_key("response_format"));
}

#[test]
fn a_stream_with_an_unreadable_frame_is_not_resumed() {
    for unread in
        ["data: {\"error\": {\"message\": \"x\"}}\n\n", "data: not JSON\n\n", "event: x\ndata: 1\n\n"]
    {
        let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(json!({})));
        assert!(!transcript.rewrite_frames(&Bytes::from_static(unread.as_bytes())).is_empty());
        assert_eq!(transcript.plan_resume(), ResumePlan::Impossible, "{unread}");
    }
    let mut transcript = Transcript::new(Endpoint::Completions, "m", &completion(json!({})));
    transcript.rewrite_frames(&Bytes::from_static(b": keep-alive\n\n"));
    assert_eq!(transcript.plan_resume(), ResumePlan::Restart, "a comment is no part of the answer");
}

#[test]
fn ten_thousand_hostile_bodies_add_no_internal_field_to_the_resumed_request() {
    use crate::message::rewrite::ClientRules;
    use crate::message::rewrite::hostile::{TestRng, is_marked, resumable};
    let limits = baton_openai::ParseLimits::default();
    let mut rng = TestRng(7);
    for number in 0..10_000 {
        let hostile = resumable(&mut rng);
        let endpoint = Endpoint::at(hostile.path).expect("it generates");
        let body = Bytes::from(hostile.body.clone());
        let (body, _) = RawBody::generate(body, endpoint, &limits, &ClientRules)
            .unwrap_or_else(|error| panic!("{number}: {}: {error}", hostile.body));
        let started = Transcript::begin(endpoint, "m", &body);
        let mut transcript = started.unwrap_or_else(|| panic!("{number}: {}", hostile.body));
        transcript.rewrite_frames(&first("a", &[1, 2], "He", &[10]));
        let ResumePlan::Continue(sent) = transcript.plan_resume() else {
            panic!("{number}: {}", hostile.body)
        };
        assert_eq!(sent["logit_bias"], json!({"7": 1}));
        let sent = Value::Object(sent).to_string();
        assert!(!is_marked(sent.as_bytes()), "{number}: {}\n{sent}", hostile.body);
    }
}
