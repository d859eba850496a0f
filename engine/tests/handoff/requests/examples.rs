//! Every example of a request in `docs/reference/api.md` is served.

use std::path::Path;

use baton_engine::run::options::Role;
use baton_engine::scheduler::SchedulingPolicy;
use serde_json::Value;

use crate::harness::cluster::{LLAMA, Node, options};

/// The JSON blocks of a page that are requests to generate.
fn requests(page: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let blocks = text.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let bodies = blocks.map(|block| serde_json::from_str::<Value>(block).expect("an example is JSON"));
    bodies.filter(|body| body.get("prompt").or_else(|| body.get("messages")).is_some()).collect()
}

#[test]
fn the_examples_of_requests_in_the_reference_are_served() {
    let mut served = options(LLAMA, Role::Both);
    served.scheduling.policy = SchedulingPolicy::Priority;
    let engine = Node::start(served);
    let examples = requests("api.md");
    let has = |field: &str| examples.iter().any(|body| body.get(field).is_some());
    for field in
        ["allowed_token_ids", "bad_words", "priority", "prompt_logprobs", "truncate_prompt_tokens", "echo"]
    {
        assert!(has(field), "no example of `{field}`");
    }
    for (at, body) in examples.iter().enumerate() {
        let reply = engine.generate(&format!("example-{at}"), body).ok();
        let choice = &reply["choices"][0];
        assert!(choice["finish_reason"].is_string(), "{body}: {reply}");
        assert_eq!(
            choice["prompt_logprobs"].is_array(),
            body.get("prompt_logprobs").is_some(),
            "{body}: {reply}"
        );
    }
    engine.is_clean();
}
