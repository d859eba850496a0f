//! Replies and streams in the form that clients read.

use baton_openai::response::{DetokenizeReply, TokenizeReply, models};
use baton_openai::{
    CallDelta, ChoiceDelta, Endpoint, Finish, FinishReason, FinishedChoice, MessageParts, ModelCard,
    PredictionTokens, PromptTokenLogprob, ReplyHead, StopReason, TokenLogprob, ToolCall, TopLogprob, Usage,
};
use bytes::Bytes;
use serde_json::{Value, json};

fn head(endpoint: Endpoint) -> ReplyHead {
    ReplyHead { endpoint, id: "cmpl-1".into(), created: 7, model: "m\"".into(), system_fingerprint: None }
}

fn stopped(stop: Option<StopReason>) -> Finish {
    Finish { reason: FinishReason::Stop, stop }
}

fn token(text: &str, logprob: f32, other: &str) -> TokenLogprob {
    let top = |text: &str, logprob| TopLogprob { token: text.into(), bytes: text.into(), logprob };
    TokenLogprob {
        token: text.into(),
        bytes: text.into(),
        logprob: Some(logprob),
        top: vec![top(other, -0.25), top(text, logprob)],
    }
}

fn json_of(body: &Bytes) -> Value {
    serde_json::from_slice(body).expect("JSON")
}

/// The JSON of one SSE frame.
fn event(frame: &Bytes) -> Value {
    let text = std::str::from_utf8(frame).expect("utf-8");
    let data = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).expect("one frame");
    assert!(!data.contains('\n'));
    serde_json::from_str(data).expect("JSON")
}

const USAGE: Usage = Usage {
    prompt_tokens: 3,
    completion_tokens: 2,
    cached_tokens: Some(1),
    reasoning_tokens: None,
    predictions: None,
};

#[test]
fn a_completion_in_one_piece_has_vllms_fields() {
    let choice = FinishedChoice {
        index: 0,
        text: "é\nb".into(),
        parts: MessageParts::default(),
        logprobs: Some(vec![token("é", -0.5, "x"), token("\nb", f32::NEG_INFINITY, "y")]),
        finish: stopped(Some(StopReason::Text("END".into()))),
        token_ids: Some(vec![5, 6]),
        prompt_token_ids: Some(vec![1, 2, 3]),
        prompt_logprobs: None,
    };
    let kv = json!({"do_remote_prefill": true, "remote_block_ids": [[1]]});
    let reply = json_of(&head(Endpoint::Completions).full(&[choice], &USAGE, Some(&kv)));
    assert_eq!(
        reply,
        json!({
            "id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m\"",
            "choices": [{
                "index": 0, "text": "é\nb",
                "logprobs": {
                    "text_offset": [0, 1], "token_logprobs": [-0.5, -9999.0], "tokens": ["é", "\nb"],
                    "top_logprobs": [{"x": -0.25, "é": -0.5}, {"y": -0.25, "\nb": -9999.0}],
                },
                "finish_reason": "stop", "stop_reason": "END", "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3],
            }],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 1}},
            "system_fingerprint": null,
            "kv_transfer_params": kv,
        })
    );
}

#[test]
fn a_chat_reply_in_one_piece_has_openais_fields() {
    let choice = FinishedChoice {
        index: 1,
        text: "hi".into(),
        parts: MessageParts::default(),
        logprobs: Some(vec![token("hi", -0.5, "x")]),
        finish: Finish { reason: FinishReason::Length, stop: None },
        token_ids: None,
        prompt_token_ids: None,
        prompt_logprobs: None,
    };
    let reasoned = Usage { reasoning_tokens: Some(1), ..USAGE };
    let reply = json_of(&head(Endpoint::Chat).full(std::slice::from_ref(&choice), &reasoned, None));
    assert_eq!(reply["usage"]["completion_tokens_details"], json!({"reasoning_tokens": 1}));
    let usage = Usage { cached_tokens: None, ..USAGE };
    let reply = json_of(&head(Endpoint::Chat).full(&[choice], &usage, None));
    assert_eq!(reply["object"], "chat.completion");
    assert_eq!(
        reply["choices"][0],
        json!({
            "index": 1, "message": {"role": "assistant", "content": "hi", "refusal": null},
            "logprobs": {"content": [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": [
                {"token": "x", "logprob": -0.25, "bytes": [120]}, {"token": "hi", "logprob": -0.5, "bytes": [104, 105]},
            ]}]},
            "finish_reason": "length", "stop_reason": null,
        })
    );
    assert_eq!(reply["usage"], json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}));
    assert!(reply.get("kv_transfer_params").is_none());
}

#[test]
fn drafts_are_counted_by_openais_names_in_replies_and_streams() {
    let predictions = Some(PredictionTokens { accepted: 2, rejected: 3 });
    let both = Usage { reasoning_tokens: Some(1), predictions, ..USAGE };
    for (usage, details) in [
        (
            Usage { predictions, ..USAGE },
            json!({"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}),
        ),
        (
            both,
            json!({"reasoning_tokens": 1, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}),
        ),
        (
            Usage { predictions: Some(PredictionTokens::default()), ..USAGE },
            json!({"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}),
        ),
    ] {
        for endpoint in [Endpoint::Completions, Endpoint::Chat] {
            let whole = json_of(&head(endpoint).full(&[], &usage, None));
            assert_eq!(whole["usage"]["completion_tokens_details"], details);
            assert_eq!(whole["usage"]["total_tokens"], 5, "rejected drafts are no tokens of the response");
            let streamed = event(&head(endpoint).chunks().usage(&usage));
            assert_eq!(streamed["usage"], whole["usage"]);
        }
    }
    let without = json_of(&head(Endpoint::Chat).full(&[], &USAGE, None));
    assert_eq!(without["usage"].get("completion_tokens_details"), None);
}

#[test]
fn a_chat_stream_is_role_deltas_usage_and_done() {
    let chunks = head(Endpoint::Chat).chunks();
    let role = event(&chunks.role(0, Some(&[1, 2])).expect("chat names the role"));
    assert_eq!(
        (role["object"].as_str(), role["id"].as_str()),
        (Some("chat.completion.chunk"), Some("cmpl-1"))
    );
    assert_eq!(role["model"], "m\"");
    assert_eq!(role["prompt_token_ids"], json!([1, 2]));
    let plain = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null});
    assert_eq!(role["choices"], json!([plain]));
    let delta = ChoiceDelta { index: 2, text: "a\nb", token_ids: Some(&[9]), ..ChoiceDelta::default() };
    let chunk = event(&chunks.delta(&delta, Some(&USAGE), None));
    assert_eq!(
        chunk["choices"],
        json!([{"index": 2, "delta": {"content": "a\nb"}, "logprobs": null, "finish_reason": null, "token_ids": [9]}])
    );
    assert_eq!(chunk["usage"]["total_tokens"], 5);
    let finish = stopped(Some(StopReason::Token(7)));
    let last = ChoiceDelta { finish: Some(&finish), ..ChoiceDelta::default() };
    let last = event(&chunks.delta(&last, None, Some(&json!({"remote_port": 1}))));
    assert_eq!(
        (&last["choices"][0]["finish_reason"], &last["choices"][0]["stop_reason"]),
        (&json!("stop"), &json!(7))
    );
    assert_eq!(last["kv_transfer_params"]["remote_port"], 1);
    let usage = event(&chunks.usage(&USAGE));
    assert_eq!((&usage["choices"], &usage["usage"]["prompt_tokens"]), (&json!([]), &json!(3)));
    assert_eq!(&baton_openai::sse::DONE[..], b"data: [DONE]\n\n");
}

#[test]
fn reasoning_and_calls_have_fields_of_their_own() {
    let call = ToolCall { id: "call_1".into(), name: "f".into(), arguments: "{\"a\":1}".into() };
    let parts = MessageParts { reasoning: "Hm.".into(), calls: vec![call], called: true };
    let choice = |text: &str, finish| FinishedChoice {
        index: 0,
        text: text.into(),
        parts: parts.clone(),
        logprobs: None,
        finish,
        token_ids: None,
        prompt_token_ids: None,
        prompt_logprobs: None,
    };
    let whole = |choice| json_of(&head(Endpoint::Chat).full(&[choice], &USAGE, None))["choices"][0].clone();
    let reply = whole(choice("", stopped(None)));
    assert_eq!(
        reply["message"],
        json!({
            "role": "assistant", "content": null, "refusal": null, "reasoning_content": "Hm.", "reasoning": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}],
        })
    );
    assert_eq!(reply["finish_reason"], "tool_calls");
    // A call of the function that the request named ends as any text.
    let named = FinishedChoice {
        parts: MessageParts { called: false, ..parts.clone() },
        ..choice("", stopped(None))
    };
    assert_eq!(whole(named)["finish_reason"], "stop");
    // A text that was cut off did not end because of its calls.
    let reply = whole(choice("x", Finish { reason: FinishReason::Length, stop: None }));
    assert_eq!((&reply["message"]["content"], &reply["finish_reason"]), (&json!("x"), &json!("length")));

    let chunks = head(Endpoint::Chat).chunks();
    let delta = |delta: &ChoiceDelta<'_>| event(&chunks.delta(delta, None, None))["choices"][0].clone();
    let calls = [
        CallDelta { index: 0, head: Some(("call_1".into(), "f".into())), arguments: String::new() },
        CallDelta { index: 1, head: None, arguments: "{}".into() },
    ];
    let chunk = delta(&ChoiceDelta { calls: &calls, ..ChoiceDelta::default() });
    assert_eq!(
        chunk["delta"],
        json!({"tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 1, "function": {"arguments": "{}"}},
        ]})
    );
    let chunk = delta(&ChoiceDelta { reasoning: Some("Hm."), ..ChoiceDelta::default() });
    assert_eq!(chunk["delta"], json!({"reasoning_content": "Hm.", "reasoning": "Hm."}));
    let finish = stopped(None);
    let last = delta(&ChoiceDelta { called: true, finish: Some(&finish), ..ChoiceDelta::default() });
    assert_eq!(last["finish_reason"], "tool_calls");
    let role = event(&chunks.reasoning_role(3, None));
    assert_eq!(
        role["choices"][0]["delta"],
        json!({"role": "assistant", "content": "", "reasoning_content": "", "reasoning": ""})
    );
}

#[test]
fn a_completion_stream_has_no_role_and_goes_on_counting_offsets() {
    let chunks = head(Endpoint::Completions).chunks();
    assert!(chunks.role(0, None).is_none());
    let tokens = [token("é", -0.5, "x"), token("b", -0.5, "x")];
    let delta = ChoiceDelta {
        text: "éb",
        logprobs: Some(&tokens),
        text_offset: 10,
        prompt_token_ids: Some(&[4]),
        ..ChoiceDelta::default()
    };
    let chunk = event(&chunks.delta(&delta, None, None));
    assert_eq!(chunk["object"], "text_completion");
    assert_eq!(chunk["choices"][0]["text"], "éb");
    assert_eq!(chunk["choices"][0]["logprobs"]["text_offset"], json!([10, 11]));
    assert_eq!(chunk["choices"][0]["prompt_token_ids"], json!([4]));
    assert!(chunk.get("usage").is_none() && chunk.get("prompt_token_ids").is_none());
}

#[test]
fn prompt_logprobs_have_vllms_form_in_the_choice_or_beside_the_choices_of_a_chat() {
    let entry =
        |id, token: &str, logprob, rank| PromptTokenLogprob { id, token: token.into(), logprob, rank };
    let choice = FinishedChoice {
        index: 0,
        text: "b".into(),
        parts: MessageParts::default(),
        logprobs: None,
        finish: stopped(None),
        token_ids: None,
        prompt_token_ids: None,
        prompt_logprobs: Some(vec![
            Vec::new(),
            vec![entry(5, "a", -1.5, 3), entry(7, "\"", -0.25, 1)],
            vec![entry(6, "c", f32::NEG_INFINITY, 9)],
        ]),
    };
    let wanted = json!([
        null,
        {"5": {"logprob": -1.5, "rank": 3, "decoded_token": "a"},
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "\""}},
        {"6": {"logprob": -9999.0, "rank": 9, "decoded_token": "c"}},
    ]);
    let of = |endpoint| json_of(&head(endpoint).full(std::slice::from_ref(&choice), &USAGE, None));
    let reply = of(Endpoint::Completions);
    assert_eq!(reply["choices"][0]["prompt_logprobs"], wanted);
    assert!(reply.get("prompt_logprobs").is_none());
    let reply = of(Endpoint::Chat);
    assert_eq!(reply["prompt_logprobs"], wanted);
    assert!(reply["choices"][0].get("prompt_logprobs").is_none());
}

#[test]
fn an_echoed_prompts_first_token_has_no_logprob() {
    let first = TokenLogprob { token: "a".into(), bytes: vec![97], logprob: None, top: Vec::new() };
    let choice = FinishedChoice {
        index: 0,
        text: "a".into(),
        parts: MessageParts::default(),
        logprobs: Some(vec![first]),
        finish: stopped(None),
        token_ids: None,
        prompt_token_ids: None,
        prompt_logprobs: None,
    };
    let reply = json_of(&head(Endpoint::Completions).full(&[choice], &USAGE, None));
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!((&logprobs["token_logprobs"], &logprobs["top_logprobs"]), (&json!([null]), &json!([null])));
    assert_eq!(reply["choices"][0]["stop_reason"], Value::Null);
}

#[test]
fn models_and_tokenize_replies_are_openais_and_vllms() {
    let card = ModelCard { id: "m".into(), created: 1, root: None, parent: None, max_model_len: Some(128) };
    let list = json_of(&models(std::slice::from_ref(&card)));
    assert_eq!((&list["object"], &list["data"][0]), (&json!("list"), &json_of(&card.to_bytes())));
    assert_eq!(
        (&list["data"][0]["object"], &list["data"][0]["max_model_len"]),
        (&json!("model"), &json!(128))
    );
    assert!(list["data"][0]["parent"].is_null() && list["data"][0].get("parent").is_some());
    let adapter = ModelCard { root: Some("sql-lora".into()), parent: Some("m".into()), ..card };
    assert_eq!(
        json_of(&adapter.to_bytes()),
        json!({"id": "m", "object": "model", "created": 1, "owned_by": "baton", "root": "sql-lora", "parent": "m",
            "max_model_len": 128})
    );
    let reply = TokenizeReply { count: 1, max_model_len: 9, tokens: vec![4], token_strs: None };
    assert_eq!(
        json_of(&reply.to_bytes()),
        json!({"count": 1, "max_model_len": 9, "tokens": [4], "token_strs": null})
    );
    assert_eq!(json_of(&DetokenizeReply { prompt: "x".into() }.to_bytes()), json!({"prompt": "x"}));
}

/// `cargo test --release -p baton-openai stream_costs -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn stream_costs() {
    let finish = stopped(None);
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let chunks = head(endpoint).chunks();
        let tokens = [token("the", -0.5, "a")];
        let plain = ChoiceDelta { text: " the", ..ChoiceDelta::default() };
        let full = ChoiceDelta { logprobs: Some(&tokens), finish: Some(&finish), ..plain.clone() };
        for (name, delta, usage) in [("plain", &plain, None), ("logprobs, usage", &full, Some(&USAGE))] {
            let rounds = 200_000;
            let start = std::time::Instant::now();
            for _ in 0..rounds {
                std::hint::black_box(chunks.delta(std::hint::black_box(delta), usage, None));
            }
            println!("{endpoint:?} {name}: {} ns per chunk", start.elapsed().as_nanos() / rounds);
        }
    }
}
