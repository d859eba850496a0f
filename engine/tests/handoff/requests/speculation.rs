//! Speculative decoding: answers are those without drafts, to the last bit of each log-probability.

use std::thread;

use baton_engine::run::options::{EngineOptions, Role};
use baton_engine::scheduler::PromptLookup;
use serde_json::{Value, json};

use crate::harness::cluster::{
    Cluster, LLAMA, Node, QWEN3, fresh_id, greedy, options, prompt, same_choices, with,
};

const ACCEPTED: &str = "vllm:spec_decode_num_accepted_tokens_total";
const DRAFTED: &str = "vllm:spec_decode_num_draft_tokens_total";

fn drafts(options: &mut EngineOptions) {
    options.speculation = PromptLookup::new(5, 1, 3);
}

fn node(model: &str, change: impl FnOnce(&mut EngineOptions)) -> Node {
    let mut options = options(model, Role::Both);
    change(&mut options);
    Node::start(options)
}

/// A request whose answer repeats one token.
fn constant() -> Value {
    with(&greedy(&prompt(77, 20), 40), "logit_bias", json!({"300": 100}))
}

/// Greedy and drawn requests, over prompts with and without repetitions, with every field that changes the choice.
fn requests() -> Vec<Value> {
    let mut bodies = vec![constant()];
    for seed in 0..6 {
        let part = prompt(seed, 9);
        let prompt = if seed % 2 == 0 { [&part[..], &part, &part].concat() } else { prompt(seed, 30) };
        let plain = greedy(&prompt, 40);
        let drawn = with(&with(&plain, "temperature", json!(0.7)), "seed", json!(seed));
        let (field, value) = [
            ("repetition_penalty", json!(1.3)),
            ("frequency_penalty", json!(0.8)),
            ("logit_bias", json!({"300": 3, "301": 3})),
            ("stop_token_ids", json!((260..300).collect::<Vec<u32>>())),
            ("allowed_token_ids", json!((300..306).collect::<Vec<u32>>())),
            ("top_k", json!(3)),
        ][seed as usize]
            .clone();
        bodies.extend([with(&plain, field, value.clone()), with(&drawn, field, value)]);
        // Without log-probabilities a device may draw the tokens itself.
        for mut body in [plain.clone(), with(&drawn, "min_tokens", json!(20))] {
            body.as_object_mut().expect("an object").remove("logprobs");
            bodies.push(body);
        }
        bodies.extend([with(&drawn, "n", json!(2)), plain, drawn]);
    }
    bodies
}

#[test]
fn answers_are_those_without_drafts_alone_and_batched() {
    for model in [LLAMA, QWEN3] {
        let (plain, drafting) = (node(model, |_| {}), node(model, drafts));
        let bodies = requests();
        let answers: Vec<Value> = bodies.iter().map(|body| plain.generate(&fresh_id(), body).ok()).collect();
        let same = |body: &Value, answer: &Value| {
            let reply = drafting.generate(&fresh_id(), body).ok();
            same_choices(&reply, answer);
            assert_eq!(reply["usage"]["completion_tokens"], answer["usage"]["completion_tokens"]);
        };
        bodies.iter().zip(&answers).for_each(|(body, answer)| same(body, answer));
        let steps = |node: &Node| node.kv()["steps"].as_u64().expect("a count");
        assert!(steps(&drafting) < steps(&plain), "{model}: drafts save steps");
        // Answers are cached now, and most of the steps have several sequences.
        thread::scope(|scope| {
            for (body, answer) in bodies.iter().zip(&answers) {
                let same = &same;
                scope.spawn(move || same(body, answer));
            }
        });
        let (drafted, accepted) = (drafting.metric(DRAFTED), drafting.metric(ACCEPTED));
        eprintln!("{model}: {accepted} of {drafted} draft tokens accepted");
        assert!(0.0 < accepted && accepted < drafted, "{accepted} of {drafted}");
        let at = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        assert_eq!(drafting.metric(at), accepted, "each at one position");
        assert!(drafting.metric("vllm:spec_decode_num_drafts_total") <= drafted);
        assert_eq!(plain.metric(DRAFTED), 0.0);
        plain.is_clean();
        drafting.is_clean();
    }
}

#[test]
fn a_decode_engine_drafts_and_the_answer_is_that_of_one_engine() {
    let cluster = Cluster::each(LLAMA, |options| {
        if options.role == Role::Decode {
            drafts(options);
        }
    });
    for body in requests() {
        cluster.agrees(&body);
    }
    assert!(cluster.d.metric(ACCEPTED) > 0.0);
    cluster.is_clean();
}

#[test]
fn answers_are_those_without_drafts_in_a_pool_that_is_too_small() {
    let plain = node(LLAMA, |_| {});
    let bodies = requests();
    let answers: Vec<Value> = bodies.iter().map(|body| plain.generate(&fresh_id(), body).ok()).collect();
    let drafting = node(LLAMA, |options| {
        drafts(options);
        options.kv_blocks = Some(24);
    });
    thread::scope(|scope| {
        for (body, answer) in bodies.iter().zip(&answers) {
            let drafting = &drafting;
            scope.spawn(move || same_choices(&drafting.generate(&fresh_id(), body).ok(), answer));
        }
    });
    eprintln!("{} preemptions", drafting.metric("vllm:num_preemptions_total"));
    assert!(drafting.metric(ACCEPTED) > 0.0);
    drafting.is_clean();
}

#[test]
fn the_tokens_of_one_step_are_events_of_their_own() {
    let drafting = node(LLAMA, drafts);
    let body = with(&constant(), "stream_options", json!({"include_usage": true}));
    let stream = drafting.generate(&fresh_id(), &with(&body, "stream", json!(true)));
    assert_eq!(stream.status, 200, "{}", stream.text);
    let events: Vec<Value> = stream
        .text
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    let mut ids = Vec::new();
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        let new: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap_or_default();
        assert!(new.len() <= 1, "{choice}");
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().map_or(0, Vec::len);
        assert_eq!(logprobs, new.len(), "{choice}");
        ids.extend(new);
    }
    assert_eq!(ids, [300; 40]);
    let usage = &events.last().expect("events")["usage"];
    assert_eq!(usage["completion_tokens"], 40, "{usage}");
    let steps = drafting.kv()["steps"].as_u64().expect("a count");
    assert!(steps < 20, "{steps} steps for 40 tokens");
    assert!(drafting.metric(ACCEPTED) >= 25.0);
    drafting.is_clean();
}

/// The counts of accepted and rejected drafts in a usage.
fn predictions(usage: &Value) -> (u64, u64) {
    let count = |name: &str| usage["completion_tokens_details"][name].as_u64().expect("a count");
    (count("accepted_prediction_tokens"), count("rejected_prediction_tokens"))
}

#[test]
fn usage_counts_accepted_and_rejected_drafts_by_openais_names() {
    let drafting = node(LLAMA, drafts);
    let (mut accepted, mut rejected) = (0, 0);
    for body in requests() {
        let usage = drafting.generate(&fresh_id(), &body).ok()["usage"].clone();
        let (kept, dropped) = predictions(&usage);
        assert!(kept <= usage["completion_tokens"].as_u64().expect("a count"), "{usage}");
        (accepted, rejected) = (accepted + kept, rejected + dropped);
    }
    // The counters follow the last token.
    drafting.until("accepted drafts are counted", || drafting.metric(ACCEPTED) == accepted as f64);
    drafting.until("all drafts are counted", || drafting.metric(DRAFTED) >= (accepted + rejected) as f64);
    assert!(rejected > 0, "{accepted} accepted");
    // An engine that does not draft has no such counts.
    let plain = node(LLAMA, |_| {}).generate(&fresh_id(), &constant()).ok();
    assert_eq!(plain["usage"].get("completion_tokens_details"), None, "{}", plain["usage"]);
}

#[test]
fn streamed_usage_counts_drafts_with_each_chunk_and_at_the_end() {
    let drafting = node(LLAMA, drafts);
    let asked = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = with(&with(&constant(), "stream_options", asked), "stream", json!(true));
    let stream = drafting.generate(&fresh_id(), &body);
    let usages: Vec<Value> = stream
        .text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .map(|event| event["usage"].clone())
        .collect();
    let counted: Vec<(u64, u64)> = usages.iter().map(predictions).collect();
    assert!(counted.is_sorted(), "counts only grow: {counted:?}");
    let (accepted, rejected) = *counted.last().expect("usage");
    drafting.until("accepted drafts are counted", || drafting.metric(ACCEPTED) == accepted as f64);
    drafting.until("all drafts are counted", || drafting.metric(DRAFTED) == (accepted + rejected) as f64);
    assert!((25..40).contains(&accepted), "{accepted} accepted");
    drafting.is_clean();
}

#[test]
fn a_constrained_text_has_no_drafts_and_ends_as_without() {
    let (plain, drafting) = (node(LLAMA, |_| {}), node(LLAMA, drafts));
    let body = json!({
        "prompt": prompt(5, 20), "max_tokens": 24, "temperature": 0, "guided_regex": "(ab)+c",
        "return_token_ids": true,
    });
    let answer = plain.generate(&fresh_id(), &body).ok();
    same_choices(&drafting.generate(&fresh_id(), &body).ok(), &answer);
    assert_eq!(drafting.metric(DRAFTED), 0.0);
    drafting.is_clean();
}
