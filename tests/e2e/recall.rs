//! The built-in model uses the whole prompt for its response. The text therefore shows a KV block that is missing,
//! stale or swapped on its way from the prefill engine to the decode engine.

use serde_json::Value;

use crate::harness::{AT_ONCE, Cluster, GenerateRequest};

#[test]
fn facts_of_the_prompt_are_recalled_behind_the_handoff() {
    let prompts: Value = serde_json::from_str(include_str!("../../engine/models/demo/prompts.json"))
        .expect("the file is JSON");
    let prompts = prompts.as_array().expect("a list");
    assert!(prompts.len() >= 20);
    let cluster = Cluster::new().start();
    for prompt in prompts {
        let ask = GenerateRequest::chat(prompt["messages"].clone());
        assert_eq!(
            cluster.ask(&ask).text(),
            prompt["answer"].as_str().expect("a text"),
            "{}",
            prompt["messages"]
        );
    }
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched > 1000.0, "the prompts' blocks came from the prefill engine: {fetched}");
    cluster.settled(AT_ONCE);
}
