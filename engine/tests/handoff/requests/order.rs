//! Priorities and deadlines of requests, as clients see them.

use std::sync::mpsc;
use std::time::Duration;

use baton_engine::run::options::{EngineOptions, Role};
use baton_engine::scheduler::SchedulingPolicy;
use serde_json::{Value, json};

use crate::harness::cluster::{LLAMA, Node, options, prompt, with};
use crate::harness::http;

/// An engine that computes one sequence at a time, a token every few milliseconds.
fn slow_engine(change: impl Fn(&mut EngineOptions)) -> Node {
    let mut options = options(LLAMA, Role::Both);
    options.max_num_seqs = 1;
    options.pace = Some(Duration::from_millis(20));
    change(&mut options);
    Node::start(options)
}

fn long(seed: u64) -> Value {
    json!({"prompt": prompt(seed, 20), "max_tokens": 60, "temperature": 0, "ignore_eos": true})
}

fn waiting(node: &Node) -> f64 {
    node.metric("vllm:num_requests_waiting")
}

#[test]
fn urgent_requests_are_answered_first_and_equals_in_the_order_of_arrival() {
    let by_policy = |policy: SchedulingPolicy, priorities: [i32; 3]| {
        let node = slow_engine(|options| options.scheduling.policy = policy);
        let first = http::send(node.http, "POST", "/v1/completions", &[], &long(1).to_string());
        node.until("the first one runs", || node.metric("vllm:num_requests_running") == 1.0);
        let (ended, order) = mpsc::sync_channel(priorities.len());
        std::thread::scope(|scope| {
            for (at, priority) in priorities.into_iter().enumerate() {
                let body =
                    json!({"prompt": prompt(2 + at as u64, 20), "max_tokens": 8, "priority": priority});
                let call = http::send(node.http, "POST", "/v1/completions", &[], &body.to_string());
                node.until("it waits", || waiting(&node) == (at + 1) as f64);
                let ended = ended.clone();
                scope.spawn(move || {
                    http::receive(call).ok();
                    ended.send(at).expect("the test waits");
                });
            }
            drop(ended);
            http::receive(first).ok();
            let order: Vec<usize> = order.iter().collect();
            node.is_clean();
            order
        })
    };
    // The first request is the most urgent one, or an equal: none yields.
    assert_eq!(by_policy(SchedulingPolicy::Fcfs, [0, 0, 0]), [0, 1, 2]);
    assert_eq!(by_policy(SchedulingPolicy::Priority, [5, 2, 2]), [1, 2, 0]);
}

#[test]
fn a_more_urgent_request_takes_the_place_of_a_running_one_and_changes_no_answer() {
    let node = slow_engine(|options| options.scheduling.policy = SchedulingPolicy::Priority);
    let alone = node.post("/v1/completions", &long(1)).ok();
    node.forget();
    let later = with(&long(1), "priority", json!(3));
    let first = http::send(node.http, "POST", "/v1/completions", &[], &later.to_string());
    node.until("it runs", || node.metric("vllm:generation_tokens_total") > 65.0);
    node.post("/v1/completions", &json!({"prompt": prompt(2, 20), "max_tokens": 4})).ok();
    assert_eq!(node.metric("vllm:num_preemptions_total"), 1.0);
    assert_eq!(http::receive(first).ok()["choices"], alone["choices"]);
    node.is_clean();
}

#[test]
fn a_priority_without_priority_scheduling_is_refused_by_name() {
    let node = Node::start(options(LLAMA, Role::Both));
    for path in ["/v1/completions", "/v1/embeddings"] {
        let body = json!({"prompt": "x", "input": "x", "priority": 10, "max_tokens": 1});
        let refused = node.post(path, &body);
        assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some("priority")));
        // Clients of vLLM recognize these words.
        assert!(refused.text.contains("Priority scheduling is not enabled"), "{}", refused.text);
        assert_eq!(node.post(path, &with(&body, "priority", json!(0))).status, 200);
    }
    node.is_clean();
}

#[test]
fn a_request_ends_at_its_deadline_whether_it_runs_or_waits() {
    let node = slow_engine(|_| {});
    let call = |headers: &[(&str, &str)], body: &Value| {
        http::call(node.http, "POST", "/v1/completions", headers, &body.to_string())
    };
    let timeouts = || node.metric("baton_deadlines_exceeded_total");
    let late = call(&[("x-request-timeout-ms", "150")], &long(1));
    assert_eq!((late.status, late.code().as_deref()), (504, Some("request_timeout")), "{}", late.text);
    node.is_clean();
    // A stream that has begun ends with the same error.
    let streamed = call(&[("x-request-timeout-ms", "600")], &with(&long(2), "stream", json!(true)));
    assert_eq!(streamed.status, 200);
    assert!(streamed.text.contains("\"code\":\"request_timeout\""), "{}", streamed.text);
    node.is_clean();
    // Another one has the only place.
    let first = http::send(node.http, "POST", "/v1/completions", &[], &long(3).to_string());
    node.until("it runs", || node.metric("vllm:num_requests_running") == 1.0);
    let late = call(&[("x-first-token-timeout-ms", "50")], &long(4));
    assert_eq!((late.status, late.code().as_deref()), (504, Some("request_timeout")), "{}", late.text);
    http::receive(first).ok();
    assert_eq!(timeouts(), 3.0);
    // The first token is in time, and nothing limits the others.
    let body = json!({"prompt": prompt(5, 4), "max_tokens": 30, "ignore_eos": true});
    assert_eq!(call(&[("x-first-token-timeout-ms", "20000")], &body).status, 200);
    // No time, and no number.
    let refused = call(&[("x-request-timeout-ms", "0")], &long(6));
    assert_eq!((refused.status, refused.code().as_deref()), (504, Some("request_timeout")));
    let refused = call(&[("x-first-token-timeout-ms", "soon")], &long(6));
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].as_str()),
        (400, Some("x-first-token-timeout-ms"))
    );
    assert_eq!(timeouts(), 3.0);
    node.is_clean();
}
