//! The built-in model uses the whole prompt for its response. The text therefore shows a KV block that is missing,
//! stale or swapped on its way from the prefill engine to the decode engine.

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest};

mod agents;

#[test]
fn facts_of_the_prompt_are_recalled_behind_the_handoff() {
    let prompts: Value = serde_json::from_str(include_str!("../../../engine/models/demo/prompts.json"))
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

/// The router learns that these engines want chats of it, and translates.
#[test]
fn facts_are_recalled_in_messages_and_responses_behind_the_handoff() {
    let prompts: Value = serde_json::from_str(include_str!("../../../engine/models/demo/prompts.json"))
        .expect("the file is JSON");
    let cluster = Cluster::new().start();
    let prompts = &prompts.as_array().expect("a list")[..5];
    for prompt in prompts {
        let turns = &prompt["messages"];
        let chat = GenerateRequest::chat(turns.clone());
        let message = GenerateRequest { path: "/v1/messages", ..chat.clone() };
        let reply = cluster.ask(&message).json();
        assert_eq!(reply["content"][0]["text"], prompt["answer"], "{reply}");
        let response = GenerateRequest { path: "/v1/responses", ..chat };
        let response = response.with("input", turns.clone()).with("max_output_tokens", json!(200));
        let reply = cluster.ask(&response).json();
        assert_eq!(reply["output"][0]["content"][0]["text"], prompt["answer"], "{reply}");
        assert_eq!(reply["status"], "completed");
    }
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched > 50.0, "the prompts' blocks came from the prefill engine: {fetched}");
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
