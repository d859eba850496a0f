//! Restrictions of the tokens of an answer, and truncated prompts.

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{Cluster, LLAMA, Node, options, prompt, with};
use crate::harness::http;

/// `z` of the fixture's tokenizer. No two of these letters are one token.
const Z: u64 = 89;
/// `q`.
const Q: u64 = 80;

fn ids(reply: &Value) -> Vec<u64> {
    let ids = reply["choices"][0]["token_ids"].as_array().expect("ids").iter();
    ids.map(|id| id.as_u64().expect("an id")).collect()
}

/// Nearly uniform draws.
fn drawn(max_tokens: u32) -> Value {
    json!({
        "prompt": prompt(1, 20), "max_tokens": max_tokens, "temperature": 100, "top_p": 1, "top_k": 0, "seed": 3,
        "ignore_eos": true, "return_token_ids": true,
    })
}

#[test]
fn only_allowed_tokens_are_generated_and_no_bad_word() {
    let engine = Node::start(options(LLAMA, Role::Both));
    let body = with(&drawn(100), "allowed_token_ids", json!([Z, Q]));
    let free = ids(&engine.post("/v1/completions", &body).ok());
    assert_eq!(free.len(), 100);
    assert!(free.iter().all(|id| [Z, Q].contains(id)));
    assert!(free.windows(2).any(|pair| pair == [Z, Q]), "the word is likely without the restriction");
    let body = with(&body, "bad_words", json!(["zq"]));
    let restricted = ids(&engine.post("/v1/completions", &body).ok());
    assert!(restricted.iter().all(|id| [Z, Q].contains(id)));
    assert!(restricted.contains(&Z) && !restricted.windows(2).any(|pair| pair == [Z, Q]), "{restricted:?}");
    // The end of the prompt does not begin a word, as in vLLM.
    let after = with(&with(&body, "prompt", json!([300, Z])), "logit_bias", json!({Q.to_string(): 100}));
    let after = with(&after, "temperature", json!(0));
    assert_eq!(ids(&engine.post("/v1/completions", &after).ok())[0], Q);
    engine.is_clean();
}

#[test]
fn an_answer_without_a_token_left_ends_as_after_a_stop_token() {
    let cluster = Cluster::of(LLAMA);
    let body = json!({
        "prompt": prompt(4, 20), "max_tokens": 9, "temperature": 0, "return_token_ids": true,
        "allowed_token_ids": [Z], "bad_words": ["zz"],
    });
    let reply = cluster.agrees(&body);
    assert_eq!((ids(&reply), &reply["choices"][0]["finish_reason"]), (vec![Z], &json!("stop")));
    let nothing = with(&body, "bad_words", json!(["z"]));
    let refused = cluster.one.post("/v1/completions", &nothing);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("allowed_token_ids")));
    cluster.is_clean();
}

#[test]
fn restrictions_hold_across_a_handoff_and_beside_other_requests() {
    let cluster = Cluster::of(LLAMA);
    let body = |seed: u64| {
        json!({
            "prompt": prompt(seed, 33), "max_tokens": 24, "temperature": 100, "top_p": 1, "top_k": 0, "seed": seed,
            "ignore_eos": true, "return_token_ids": true, "logprobs": 2, "min_tokens": 3,
            "allowed_token_ids": [Z, Q, 300, 301], "bad_words": ["zq", "qz"],
        })
    };
    let alone: Vec<Value> = (0..4).map(|seed| cluster.agrees(&body(seed))["choices"].clone()).collect();
    let send = |body: Value| http::send(cluster.one.http, "POST", "/v1/completions", &[], &body.to_string());
    let calls: Vec<_> = (0..4).flat_map(|seed| [send(body(seed)), send(drawn(20))]).collect();
    for (at, call) in calls.into_iter().enumerate() {
        let reply = http::receive(call).ok();
        assert!(at % 2 == 1 || reply["choices"] == alone[at / 2], "{reply}");
    }
    cluster.is_clean();
}

#[test]
fn a_device_draws_for_requests_beside_those_that_the_host_restricts() {
    let mut device = options(LLAMA, Role::Both);
    device.device = baton_engine_check::SOFTWARE;
    let engine = Node::start(device);
    let free = |seed: u64| {
        json!({
            "prompt": prompt(seed, 20), "max_tokens": 16, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
        })
    };
    let restricted = |seed: u64| {
        let body = with(&free(seed), "allowed_token_ids", json!([Z, Q, 300, 301, 302]));
        with(&with(&body, "repetition_penalty", json!(1.3)), "bad_words", json!(["zq"]))
    };
    let bodies: Vec<Value> = (0..3).flat_map(|seed| [free(seed), restricted(seed + 10)]).collect();
    let alone: Vec<_> = bodies.iter().map(|body| ids(&engine.post("/v1/completions", body).ok())).collect();
    engine.forget();
    let send = |body: &Value| http::send(engine.http, "POST", "/v1/completions", &[], &body.to_string());
    let calls: Vec<_> = bodies.iter().map(send).collect();
    for (call, alone) in calls.into_iter().zip(&alone) {
        assert_eq!(&ids(&http::receive(call).ok()), alone);
    }
    engine.is_clean();
}

#[test]
fn a_truncated_prompt_is_that_of_a_request_for_its_part_alone() {
    let cluster = Cluster::of(LLAMA);
    let long = prompt(6, 200);
    let body = json!({"prompt": long, "max_tokens": 1, "temperature": 0, "return_token_ids": true});
    let refused = cluster.one.post("/v1/completions", &body);
    assert_eq!(refused.code().as_deref(), Some("context_length_exceeded"), "{}", refused.text);
    for (tokens, side, kept) in [
        (json!(40), json!("left"), &long[160..]),
        (json!(40), json!("right"), &long[..40]),
        (json!(40), Value::Null, &long[..40]),
        (json!(-1), json!("left"), &long[41..]),
    ] {
        let cut = with(&with(&body, "truncate_prompt_tokens", tokens), "truncation_side", side);
        let two = cluster.agrees(&cut);
        assert_eq!(two["choices"][0]["prompt_token_ids"], json!(kept));
        let whole = cluster.one.post("/v1/completions", &with(&body, "prompt", json!(kept))).ok();
        assert_eq!(two["choices"], whole["choices"]);
    }
    // A text that no number of tokens could hold, and a conversation.
    let text =
        with(&with(&body, "prompt", json!("word ".repeat(200_000))), "truncate_prompt_tokens", json!(7));
    assert_eq!(cluster.one.post("/v1/completions", &text).ok()["usage"]["prompt_tokens"], 7);
    let chat = json!({
        "messages": [{"role": "user", "content": "word ".repeat(500)}], "max_tokens": 1, "truncate_prompt_tokens": 9,
    });
    assert_eq!(cluster.one.post("/v1/chat/completions", &chat).ok()["usage"]["prompt_tokens"], 9);
    let more = with(&body, "truncate_prompt_tokens", json!(161));
    let refused = cluster.one.post("/v1/completions", &more);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("truncate_prompt_tokens")));
    cluster.is_clean();
}
