//! NIXL between real processes. Needs its library, without a GPU (`pip install --no-deps nixl nixl-cu12`):
//!
//! ```text
//! BATON_NIXL_LIBRARY=…/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so \
//!     cargo test --workspace --test e2e nixl -- --ignored
//! ```

use std::collections::BTreeMap;

use serde_json::json;

use crate::harness::{Cluster, GenerateRequest, PATIENCE, digests};

const NIXL: &str = "--kv-transport nixl";
/// NIXL takes a software device's memory for host memory. Other transports do not.
const ON_DEVICE: &str = "--kv-transport nixl --device software --kv-cache-dtype f32";

fn cluster(prefill: &str, decode: &str) -> Cluster {
    Cluster::new().prefill(prefill).decode(decode).decode("").start()
}

/// The router's response equals that of a single engine.
fn answers(cluster: &Cluster, tokens: usize) {
    let ask = GenerateRequest::fresh(tokens).tokens(16).with("logprobs", json!(1));
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
    nixl_is(&cluster, "loaded");
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
fn engines_with_and_without_nixl_use_a_common_transport() {
    for (prefill, decode) in [(NIXL, ""), ("", NIXL)] {
        let cluster = cluster(prefill, decode);
        answers(&cluster, 100);
        assert_eq!((carried(&cluster, "nixl"), carried(&cluster, "shm")), (0.0, 1.0));
        cluster.settled(PATIENCE);
    }
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_killed_prefill_engine_with_nixl_is_replaced() {
    let mut cluster = cluster(NIXL, NIXL);
    answers(&cluster, 100);
    cluster.prefill[0].kill();
    answers(&cluster, 200);
    assert_eq!(carried(&cluster, "nixl"), 1.0);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_pair_on_devices_with_nixl_hands_over_from_device_to_device_byte_by_byte() {
    let cluster = Cluster::new().prefill(ON_DEVICE).decode(ON_DEVICE).start();
    // No prompt ends with a full block, whose last token P and D compute with different sums.
    let lengths = [20, 100, 333, 1000];
    for tokens in lengths {
        assert_eq!(cluster.ask(&GenerateRequest::fresh(tokens)).status, 200);
    }
    assert_eq!(carried(&cluster, "nixl-device"), lengths.len() as f64);
    let leased: BTreeMap<_, _> = digests(&cluster.prefill[0].address).into_iter().collect();
    let fetched = digests(&cluster.decode[0].address).into_iter();
    let both = fetched.filter_map(|(hash, digest)| Some((digest, leased.get(&hash)?)));
    let same = both.map(|(fetched, leased)| assert_eq!(&fetched, leased, "a block has other bytes")).count();
    assert!(
        same >= lengths.iter().sum::<usize>() / 16 - lengths.len(),
        "only {same} blocks could be compared"
    );
    cluster.settled(PATIENCE);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_device_and_a_cpu_with_nixl_meet_in_host_memory() {
    let on_cpu = format!("{NIXL} --kv-cache-dtype f32");
    for (prefill, decode) in [(ON_DEVICE, on_cpu.as_str()), (on_cpu.as_str(), ON_DEVICE)] {
        let cluster = Cluster::new().prefill(prefill).decode(decode).start();
        assert_eq!(cluster.ask(&GenerateRequest::fresh(100)).status, 200);
        assert_eq!((carried(&cluster, "nixl"), carried(&cluster, "nixl-device")), (1.0, 0.0));
        cluster.settled(PATIENCE);
    }
}

/// The only one of these tests that needs no library.
#[test]
fn an_engine_without_the_nixl_library_logs_it_and_uses_another_transport() {
    let missing = format!("{NIXL} --nixl-library /nowhere/libnixl_capi.so");
    let cluster = cluster(&missing, &missing);
    nixl_is(&cluster, "not_found");
    answers(&cluster, 100);
    assert_eq!(carried(&cluster, "shm"), 1.0);
    cluster.settled(PATIENCE);
}
