//! Names of requests: the heads of replies repeat them, and ids of replies are unique.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{LLAMA, Node, fresh_id, greedy, options, prompt, with};
use crate::harness::http;

#[test]
fn a_reply_has_the_name_of_its_request_in_its_head_and_an_id_of_its_own() {
    let node = Node::start(options(LLAMA, Role::Both));
    let body = greedy(&prompt(1, 9), 2);
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
    let mut ids = std::collections::HashSet::new();
    for (body, prefix) in [(&body, "cmpl-mine."), (&chat, "chatcmpl-mine.")] {
        for _ in 0..3 {
            let reply = node.generate("mine", body);
            assert_eq!(reply.header("x-request-id"), Some("mine"), "{}", reply.head);
            let id = reply.ok()["id"].as_str().expect("an id").to_owned();
            assert!(id.starts_with(prefix), "{id}");
            assert!(ids.insert(id), "an id comes twice: {ids:?}");
        }
    }
    // A stream, refusals, and replies of other endpoints.
    let stream = node.generate("mine", &with(&body, "stream", json!(true)));
    assert_eq!((stream.status, stream.header("x-request-id")), (200, Some("mine")));
    let refused = node.generate("mine", &json!({"prompt": 7}));
    assert_eq!((refused.status, refused.header("x-request-id")), (400, Some("mine")));
    let named = [("x-request-id", "mine")];
    assert_eq!(http::call(node.http, "GET", "/health", &named, "").header("x-request-id"), Some("mine"));
    // An invalid name is not sent back.
    assert_eq!(node.get("/health").header("x-request-id"), None);
    let long = "x".repeat(4096);
    let odd = node.generate(&long, &body);
    let given = odd.header("x-request-id").expect("a name").to_owned();
    assert!(given.len() == 32 && odd.ok()["id"].as_str().is_some_and(|id| id.contains(&given)), "{given}");
    let unnamed = http::call(node.http, "POST", "/v1/completions", &[], &body.to_string());
    assert!(unnamed.header("x-request-id").is_some_and(|name| name.len() == 32 && name != given));
    node.is_clean();
}

#[test]
fn a_request_is_aborted_by_its_name_and_by_the_id_of_its_reply() {
    let mut paced = options(LLAMA, Role::Both);
    paced.pace = Some(Duration::from_millis(20));
    let node = Node::start(paced);
    let body = with(&greedy(&prompt(1, 9), 120), "stream", json!(true)).to_string();
    for by_id in [true, false] {
        let name = fresh_id();
        let stream = http::send(node.http, "POST", "/v1/completions", &[("x-request-id", &name)], &body);
        let mut lines = BufReader::new(stream).lines().map(|line| line.expect("the stream goes on"));
        let event = |line: String| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok();
        let first = lines.by_ref().find_map(event).expect("a first event");
        let id = first["id"].as_str().expect("an id").to_owned();
        let named = if by_id { &id } else { &name };
        node.post("/abort_requests", &json!({"request_ids": [named]})).ok();
        let rest: Vec<Value> = lines.filter_map(event).collect();
        assert!(rest.iter().all(|event| event["id"] == id), "one id for all of a stream");
        let finish = rest.iter().find_map(|event| event["choices"][0]["finish_reason"].as_str());
        assert_eq!(finish, Some("abort"), "by {named}");
    }
    node.is_clean();
}
