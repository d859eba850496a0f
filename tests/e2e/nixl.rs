//! NIXL between real processes. Needs its library, without a GPU (`pip install --no-deps nixl nixl-cu12`):
//!
//! ```text
//! BATON_NIXL_LIBRARY=…/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so \
//!     cargo test --workspace --test e2e nixl -- --ignored
//! ```

use serde_json::json;

use crate::harness::{Ask, Cluster, PATIENCE};

const NIXL: &str = "--kv-transport nixl";

fn cluster(prefill: &str, decode: &str) -> Cluster {
    Cluster::new().prefill(prefill).decode(decode).decode("").start()
}

/// The router's answer is the one that an engine gives alone.
fn answers(cluster: &Cluster, tokens: usize) {
    let ask = Ask::fresh(tokens).tokens(16).with("logprobs", json!(1));
    let alone = cluster.decode[1].send("POST", ask.path, &ask.body).reply();
    let reply = cluster.ask(&ask);
    assert_eq!((reply.status, alone.status), (200, 200), "{}", reply.json());
    assert_eq!(reply.json()["choices"], alone.json()["choices"]);
}

fn carried(cluster: &Cluster, transport: &str) -> f64 {
    let labels = format!("transport=\"{transport}\"");
    cluster.decode.iter().map(|engine| engine.metric("baton_kv_transfers_total", &labels)).sum()
}

fn nixl_is(cluster: &Cluster, state: &str) {
    let labels = format!("state=\"{state}\"");
    assert_eq!(cluster.decode[0].metric("baton_nixl_info", &labels), 1.0);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_pair_with_nixl_answers_what_one_engine_answers() {
    let cluster = Cluster::new().prefill(NIXL).decode(NIXL).decode(NIXL).start();
    nixl_is(&cluster, "here");
    for tokens in [20, 100, 333, 1000] {
        answers(&cluster, tokens);
    }
    assert!(carried(&cluster, "nixl") >= 4.0);
    assert_eq!(carried(&cluster, "shm") + carried(&cluster, "tcp"), 0.0);
    cluster.settled(PATIENCE);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn caches_that_are_cut_in_different_ways_are_handed_over_by_nixl() {
    let cluster = cluster(&format!("{NIXL} --kv-ranks 2 --block-size 32"), NIXL);
    answers(&cluster, 333);
    assert_eq!(carried(&cluster, "nixl"), 2.0, "one for each rank of the producer");
    cluster.settled(PATIENCE);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn an_engine_with_nixl_and_one_without_hand_over_by_what_both_have() {
    for (prefill, decode) in [(NIXL, ""), ("", NIXL)] {
        let cluster = cluster(prefill, decode);
        answers(&cluster, 100);
        assert_eq!((carried(&cluster, "nixl"), carried(&cluster, "shm")), (0.0, 1.0));
        cluster.settled(PATIENCE);
    }
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_prefill_engine_with_nixl_that_is_killed_is_made_up_for() {
    let mut cluster = cluster(NIXL, NIXL);
    answers(&cluster, 100);
    cluster.prefill[0].kill();
    answers(&cluster, 200);
    assert_eq!(carried(&cluster, "nixl"), 1.0);
}

/// The one of these that needs nothing.
#[test]
fn an_engine_that_finds_no_nixl_says_so_and_hands_over_without() {
    let missing = format!("{NIXL} --nixl-library /nowhere/libnixl_capi.so");
    let cluster = cluster(&missing, &missing);
    nixl_is(&cluster, "missing");
    answers(&cluster, 100);
    assert_eq!(carried(&cluster, "shm"), 1.0);
    cluster.settled(PATIENCE);
}
