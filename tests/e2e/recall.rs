//! The built-in model uses the whole prompt for its response. The text therefore shows a KV block that is missing,
//! stale or swapped on its way from the prefill engine to the decode engine.

use serde_json::{Value, json};

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

#[test]
fn log_probabilities_of_a_prompt_are_of_one_engine_and_restrictions_hold_behind_a_handoff() {
    let cluster = Cluster::new().start();
    let ask = GenerateRequest::fresh(300).with("prompt_logprobs", json!(1));
    let reply = cluster.ask(&ask).json();
    let scores = reply["choices"][0]["prompt_logprobs"].as_array().expect("log-probabilities").clone();
    assert_eq!(scores.len(), 300);
    let own = |(score, id): (&Value, &Value)| score[id.to_string()]["logprob"].is_number();
    let ids = ask.body["prompt"].as_array().expect("ids");
    assert!(scores[0].is_null() && scores[1..].iter().zip(&ids[1..]).all(own), "{reply}");
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 0);

    let allowed = [10, 200, 1400];
    let ask = GenerateRequest::fresh(300).tokens(12).with("return_token_ids", json!(true));
    let reply = cluster.ask(&ask.with("allowed_token_ids", json!(allowed))).json();
    let ids = reply["choices"][0]["token_ids"].as_array().expect("ids");
    assert!(ids.len() == 12 && ids.iter().all(|id| allowed.iter().any(|one| id == one)), "{reply}");
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1);
    cluster.settled(AT_ONCE);
}
