//! Log-probabilities of a prompt's tokens: `prompt_logprobs`, and `echo` with `logprobs`.

use std::path::Path;

use baton_engine::compute::cuda::DeviceChoice;
use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{BLOCK, LLAMA, Node, QWEN3, options, prompt, with};
use crate::harness::http;

/// Bound of a difference to `transformers` in nats: the bound of logits in the parity checks.
const FAR: f64 = 5e-4;

/// Prompts of a golden file that fit the context with one new token, and the log-probability of each token but the
/// first, as `transformers` computes it.
fn golden(model: &str) -> Vec<(Vec<u64>, Vec<f64>)> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden");
    let text = std::fs::read_to_string(fixtures.join(format!("{model}.json"))).expect("a golden file");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let prompts = file["prompts"].as_array().expect("prompts").iter();
    let numbers = |value: &Value| value.as_array().expect("an array").clone();
    let read = |prompt: &Value| -> (Vec<u64>, Vec<f64>) {
        let ids = numbers(&prompt["ids"]).iter().map(|id| id.as_u64().expect("an id")).collect();
        let scores = numbers(&prompt["f32"]["prompt_logprobs"]);
        (ids, scores.iter().map(|score| score.as_f64().expect("a number")).collect())
    };
    let found: Vec<_> = prompts.map(read).filter(|(ids, _)| ids.len() < 150).collect();
    assert!(found.len() > 5 && found.iter().all(|(ids, scores)| ids.len() == scores.len() + 1));
    found
}

fn scoring(ids: &[u64]) -> Value {
    json!({"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2})
}

fn scores_of(reply: &Value) -> Value {
    reply["choices"][0]["prompt_logprobs"].clone()
}

fn engine(model: &str, device: DeviceChoice, batched_tokens: usize) -> Node {
    let mut options = options(model, Role::Both);
    options.device = device;
    options.max_num_batched_tokens = batched_tokens;
    // A step has a token for each of its sequences.
    options.max_num_seqs = options.max_num_seqs.min(batched_tokens);
    Node::start(options)
}

#[track_caller]
fn close(found: &Value, wanted: f64, far: f64) {
    let found = found.as_f64().expect("a number");
    assert!((found - wanted).abs() <= far, "{found} instead of {wanted}");
}

/// Each token's log-probability is that of `transformers`, and the tokens of rank 1 and 2 are the best.
#[track_caller]
fn matches_golden(scores: &Value, ids: &[u64], golden: &[f64], far: f64) {
    let scores = scores.as_array().expect("an array");
    assert_eq!((scores.len(), &scores[0]), (ids.len(), &Value::Null));
    for (at, wanted) in golden.iter().enumerate() {
        let position = scores[at + 1].as_object().expect("an object");
        let own = &position[&ids[at + 1].to_string()];
        close(&own["logprob"], *wanted, far);
        let ranked = |rank: u64| position.values().find(|entry| entry["rank"] == rank).expect("ranked");
        let [best, second] = [1, 2].map(|rank| ranked(rank)["logprob"].as_f64().expect("a number"));
        assert!(best >= second && second >= *wanted - far || own["rank"].as_u64() <= Some(2));
        assert!(position.len() == 2 + usize::from(own["rank"].as_u64() > Some(2)), "{position:?}");
    }
}

#[test]
fn prompt_logprobs_match_transformers_whatever_the_chunks_and_the_cache() {
    for model in [LLAMA, QWEN3] {
        let golden = golden(model);
        // Steps of 24 and 7 tokens, and steps without a bound of their own.
        let engines = [24, 7, 512].map(|tokens| engine(model, DeviceChoice::Cpu, tokens));
        for (ids, wanted) in &golden {
            let body = scoring(ids);
            let first = engines[0].post("/v1/completions", &body).ok();
            matches_golden(&scores_of(&first), ids, wanted, FAR);
            // The prompt is cached now, and computed again.
            let again = engines[0].post("/v1/completions", &body).ok();
            assert_eq!(again["choices"], first["choices"]);
            assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
            for engine in &engines[1..] {
                assert_eq!(engine.post("/v1/completions", &body).ok()["choices"], first["choices"]);
            }
            // A request without them uses the cache.
            let plain = with(&body, "prompt_logprobs", Value::Null);
            let reply = engines[0].post("/v1/completions", &plain).ok();
            let cached = (ids.len() - 1) / BLOCK * BLOCK;
            assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
        }
        engines.iter().for_each(Node::is_clean);
    }
}

#[test]
fn prompt_logprobs_match_transformers_on_a_device() {
    let engine = engine(LLAMA, baton_engine_check::SOFTWARE, 24);
    for (ids, wanted) in golden(LLAMA).iter().filter(|(ids, _)| ids.len() < 50) {
        let reply = engine.post("/v1/completions", &scoring(ids)).ok();
        matches_golden(&scores_of(&reply), ids, wanted, 2.0 * FAR);
    }
    engine.is_clean();
}

#[test]
fn requests_beside_each_other_have_the_bits_of_each_alone() {
    let engine = engine(LLAMA, DeviceChoice::Cpu, 24);
    let body = |seed: u64| {
        let body = json!({
            "prompt": prompt(seed, 30 + 9 * seed as usize), "max_tokens": 8, "temperature": 0, "ignore_eos": true,
            "return_token_ids": true, "logprobs": 3,
        });
        if seed.is_multiple_of(2) { with(&body, "prompt_logprobs", json!(3)) } else { body }
    };
    let alone: Vec<Value> =
        (0..8).map(|seed| engine.post("/v1/completions", &body(seed)).ok()["choices"].clone()).collect();
    engine.forget();
    let send = |seed| http::send(engine.http, "POST", "/v1/completions", &[], &body(seed).to_string());
    let calls: Vec<_> = (0..8).map(send).collect();
    for (call, alone) in calls.into_iter().zip(&alone) {
        assert_eq!(&http::receive(call).ok()["choices"], alone);
    }
    engine.is_clean();
}

#[test]
fn a_preempted_prompt_has_the_scores_of_an_undisturbed_one() {
    let roomy = engine(LLAMA, DeviceChoice::Cpu, 24);
    let mut tight = options(LLAMA, Role::Both);
    // Less than the sequences below need together at their longest.
    tight.kv_blocks = Some(24);
    tight.scheduling.growth_reserve = false;
    let tight = Node::start(tight);
    let body = |seed: u64| {
        json!({
            "prompt": prompt(seed, 41), "max_tokens": 60, "temperature": 0, "ignore_eos": true,
            "prompt_logprobs": 1, "return_token_ids": true,
        })
    };
    let send = |seed| http::send(tight.http, "POST", "/v1/completions", &[], &body(seed).to_string());
    let calls: Vec<_> = (0..4).map(|seed| (seed, send(seed))).collect();
    for (seed, call) in calls {
        let alone = roomy.post("/v1/completions", &body(seed)).ok();
        assert_eq!(http::receive(call).ok()["choices"], alone["choices"]);
    }
    assert!(tight.metric("vllm:num_preemptions_total") > 0.0, "nothing was preempted");
    tight.is_clean();
}

#[test]
fn an_echo_has_the_logprobs_of_the_prompt_before_those_of_the_answer() {
    let engine = engine(LLAMA, DeviceChoice::Cpu, 24);
    let ids = prompt(3, 30);
    let body = json!({
        "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "logprobs": 2, "echo": true,
    });
    let reply = engine.post("/v1/completions", &body).ok();
    let logprobs = reply["choices"][0]["logprobs"].clone();
    let plain = with(&with(&body, "echo", json!(false)), "prompt_logprobs", json!(2));
    let plain = engine.post("/v1/completions", &plain).ok();
    let scores = scores_of(&plain);
    for (at, id) in ids.iter().enumerate().skip(1) {
        assert_eq!(logprobs["token_logprobs"][at], scores[at][&id.to_string()]["logprob"]);
        assert!(logprobs["top_logprobs"][at].as_object().is_some_and(|top| top.len() <= 3));
    }
    assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
    let answer = &plain["choices"][0]["logprobs"];
    for name in ["token_logprobs", "tokens", "top_logprobs"] {
        let all = logprobs[name].as_array().expect(name);
        assert_eq!((all.len(), &all[30..]), (34, &answer[name].as_array().expect(name)[..]), "{name}");
    }
    // A stream has the same, in more pieces.
    let text = engine.post("/v1/completions", &with(&body, "stream", json!(true))).text;
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let events: Vec<Value> = events.map(|data| serde_json::from_str(data).expect("JSON")).collect();
    let joined = |name: &str| -> Vec<Value> {
        let pieces = events.iter().filter_map(|event| event["choices"][0]["logprobs"][name].as_array());
        pieces.flatten().cloned().collect()
    };
    assert_eq!(json!(joined("token_logprobs")), logprobs["token_logprobs"]);
    let pieces = events.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(json!(pieces.collect::<String>()), reply["choices"][0]["text"]);
    engine.is_clean();
}

#[test]
fn an_echo_of_the_prompt_alone_generates_nothing() {
    let engine = engine(LLAMA, DeviceChoice::Cpu, 24);
    let ids = prompt(5, 12);
    let body = json!({"prompt": ids, "max_tokens": 0, "echo": true, "logprobs": 1, "temperature": 0});
    let reply = engine.post("/v1/completions", &body).ok();
    let text = engine.post("/detokenize", &json!({"tokens": ids})).ok()["prompt"].clone();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&text, &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"].as_array().map(Vec::len), Some(12));
    assert_eq!(reply["usage"]["completion_tokens"], 0);
    let streamed = engine.post("/v1/completions", &with(&body, "stream", json!(true))).text;
    assert!(streamed.contains("\"finish_reason\":\"length\"") && streamed.ends_with("data: [DONE]\n\n"));
    engine.is_clean();
}

#[test]
fn every_choice_of_a_prompt_has_its_scores_and_a_chat_has_them_beside_its_choices() {
    let engine = engine(QWEN3, DeviceChoice::Cpu, 24);
    let (one, other) = (prompt(1, 11), prompt(2, 26));
    let body = json!({
        "prompt": [one, other], "n": 2, "max_tokens": 2, "temperature": 1, "seed": 5, "prompt_logprobs": 1,
    });
    let reply = engine.post("/v1/completions", &body).ok();
    let of = |at: usize| reply["choices"][at]["prompt_logprobs"].clone();
    assert_eq!((of(0), of(2)), (of(1), of(3)));
    for (at, prompt) in [(0, &one), (2, &other)] {
        let alone = with(&with(&body, "prompt", json!(prompt)), "n", json!(1));
        assert_eq!(scores_of(&engine.post("/v1/completions", &alone).ok()), of(at));
    }
    let chat = json!({
        "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 1, "prompt_logprobs": 0,
    });
    let reply = engine.post("/v1/chat/completions", &chat).ok();
    let scores = reply["prompt_logprobs"].as_array().expect("scores").clone();
    assert_eq!(reply["usage"]["prompt_tokens"], scores.len());
    assert!(scores[1..].iter().all(|entry| entry.as_object().is_some_and(|tokens| tokens.len() == 1)));
    engine.is_clean();
}
