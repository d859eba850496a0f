//! Many concurrent requests, and pools that are too small for them.

use std::thread;

use serde_json::Value;

use super::harness::cluster::{BLOCK, Cluster, LLAMA, QWEN3, fresh_id, greedy, prompt, same_choices};
use super::observe::digests::same_bytes;

/// Hands over all bodies at once. Returns the answers in the same order.
fn all_at_once(cluster: &Cluster, bodies: &[Value]) -> Vec<Value> {
    thread::scope(|scope| {
        let calls: Vec<_> = bodies.iter().map(|body| scope.spawn(move || cluster.hand_over(body))).collect();
        calls.into_iter().map(|call| call.join().expect("an answer")).collect()
    })
}

fn each_as_if_alone(cluster: &Cluster, bodies: &[Value]) {
    let together = all_at_once(cluster, bodies);
    for (body, answer) in bodies.iter().zip(together) {
        let alone = cluster.one.generate(&fresh_id(), body).ok();
        same_choices(&answer, &alone);
    }
}

#[test]
fn thirty_two_requests_at_once_are_answered_as_if_each_were_alone() {
    let cluster = Cluster::of(QWEN3);
    let prompts: Vec<_> = (0..32).map(|n| prompt(1_000 + n, 1 + (n as usize * 13) % 97)).collect();
    let bodies: Vec<_> = prompts.iter().map(|prompt| greedy(prompt, 16)).collect();
    each_as_if_alone(&cluster, &bodies);
    for prompt in &prompts {
        same_bytes(&cluster.p, &cluster.d, prompt);
    }
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    cluster.is_clean();
}

#[test]
fn concurrent_handoffs_of_one_prompt_share_their_blocks() {
    let cluster = Cluster::of(LLAMA);
    let prompt = prompt(3_000, 7 * BLOCK + 2);
    let bodies = vec![greedy(&prompt, 12); 12];
    each_as_if_alone(&cluster, &bodies);
    same_bytes(&cluster.p, &cluster.d, &prompt);
    cluster.is_clean();
}

#[test]
fn pools_too_small_for_all_requests_preempt_and_change_no_answer() {
    let cluster = Cluster::with(LLAMA, |options| {
        options.kv_blocks = Some(20);
        options.scheduling.growth_reserve = false;
    });
    // Three blocks each at the start and eight at the end: twenty do not hold all that start.
    let bodies: Vec<_> =
        (0..14).map(|n| greedy(&prompt(2_000 + n, 2 * BLOCK + 1 + n as usize % 7), 40)).collect();
    each_as_if_alone(&cluster, &bodies);
    assert!(cluster.d.metric("vllm:num_preemptions_total") > 0.0, "nothing was preempted");
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    cluster.is_clean();
}
