//! A token that ends the text belongs to the answer, but its own text does not (as in vLLM).

use serde_json::{Value, json};

use crate::harness::cluster::{Cluster, LLAMA, fresh_id, greedy, prompt, with};

/// A greedy answer of 12 tokens, and the position of a token with text that has not occurred before.
fn answer(cluster: &Cluster) -> (Value, Vec<u64>, usize) {
    for seed in 0..100 {
        let body = greedy(&prompt(seed, 20), 12);
        let reply = cluster.one.generate(&fresh_id(), &body).ok();
        let ids = reply["choices"][0]["token_ids"].as_array().expect("ids").iter();
        let ids: Vec<u64> = ids.map(|id| id.as_u64().expect("an id")).collect();
        let text = |count: usize| {
            let cut = with(&body, "max_tokens", json!(count));
            cluster.one.generate(&fresh_id(), &cut).ok()["choices"][0]["text"].clone()
        };
        let fresh = (2..8).find(|&at| !ids[..at].contains(&ids[at]) && text(at) != text(at + 1));
        if let Some(at) = fresh {
            return (body, ids, at);
        }
    }
    panic!("no prompt of a hundred is answered with different tokens");
}

#[test]
fn the_text_of_a_stop_token_is_left_out_and_its_id_and_logprob_stay() {
    let cluster = Cluster::of(LLAMA);
    let (body, ids, at) = answer(&cluster);
    let text_of = |count: usize| {
        let cut = with(&body, "max_tokens", json!(count));
        cluster.one.generate(&fresh_id(), &cut).ok()["choices"][0]["text"].clone()
    };
    let stopped = with(&body, "stop_token_ids", json!([ids[at]]));
    let reply = cluster.agrees(&stopped);
    let choice = &reply["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(ids[at])));
    assert_eq!(choice["token_ids"], json!(ids[..=at]));
    assert_eq!(choice["logprobs"]["tokens"].as_array().expect("tokens").len(), at + 1);
    assert_eq!(choice["text"], text_of(at), "without the last token's text");
    assert_eq!(reply["usage"]["completion_tokens"], at + 1);

    let included = with(&stopped, "include_stop_str_in_output", json!(true));
    assert_eq!(cluster.agrees(&included)["choices"][0]["text"], text_of(at + 1), "with it");

    // Before `min_tokens` it is an ordinary token, and so is its text.
    let later = with(&stopped, "min_tokens", json!(at + 2));
    let reply = cluster.agrees(&later);
    let ids_then = reply["choices"][0]["token_ids"].as_array().expect("ids").len();
    assert!(ids_then > at + 1, "{reply}");
    cluster.is_clean();
}
