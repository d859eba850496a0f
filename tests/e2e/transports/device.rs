//! Engines whose KV pools are in a device's memory, on one host: blocks go from device to device. The device is the
//! software device, whose pools are really shared between processes. `BATON_TEST_DEVICE=cuda:0` runs the same tests on
//! a GPU (`bench/gpu/check.sh`).

use std::collections::BTreeMap;

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, digests, eventually};

const DEVICE: &str = "--device software --kv-cache-dtype f32";

/// Prompt tokens. No prompt ends with a full block: P and D compute the KV of such a block's last token with different
/// sums.
const LENGTHS: [usize; 4] = [20, 100, 333, 1000];

fn cluster(prefill: &str, decode: &str) -> Cluster {
    Cluster::new().prefill(prefill).decode(decode).decode(decode).start()
}

/// The router's response equals that of a single engine on the same device.
fn answers(cluster: &Cluster, tokens: usize) {
    let ask = GenerateRequest::fresh(tokens).tokens(16);
    let alone = cluster.decode[1].send("POST", ask.path, &ask.body).reply();
    let reply = cluster.ask(&ask);
    assert_eq!((reply.status, alone.status), (200, 200), "{}", reply.json());
    assert_eq!(reply.json()["choices"], alone.json()["choices"]);
}

fn carried(cluster: &Cluster, transport: &str) -> f64 {
    let labels = format!("transport=\"{transport}\"");
    cluster.decode.iter().map(|engine| engine.metric("baton_kv_transfers_total", &labels)).sum()
}

/// Producers' pools that decode engines have open. For a GPU a process's map does not show them.
fn open_pools(cluster: &Cluster) -> Option<usize> {
    let on_software = std::env::var_os("BATON_TEST_DEVICE").is_none_or(|device| device == "software");
    on_software.then(|| cluster.decode.iter().map(|engine| engine.mapped_pools()).sum())
}

/// Compares the bytes of blocks that both engines have cached under one hash. Returns their number.
fn same_blocks(cluster: &Cluster) -> usize {
    let (p, d) = (&cluster.prefill[0].address, &cluster.decode[0].address);
    let leased: BTreeMap<_, _> = digests(p).into_iter().collect();
    let both = digests(d).into_iter().filter_map(|(hash, digest)| Some((digest, leased.get(&hash)?)));
    both.map(|(fetched, leased)| assert_eq!(&fetched, leased, "a block has other bytes")).count()
}

#[test]
fn a_pair_on_one_hosts_devices_hands_over_from_device_to_device() {
    let cluster = cluster(DEVICE, DEVICE);
    for tokens in LENGTHS {
        answers(&cluster, tokens);
    }
    assert!(carried(&cluster, "device") >= LENGTHS.len() as f64);
    assert_eq!(carried(&cluster, "shm") + carried(&cluster, "tcp"), 0.0);
    // Prompts of more than a step get an early lease, and no step loop copies their blocks through host memory.
    assert!(cluster.prefill[0].metric("baton_kv_early_leases_total", "") >= 1.0);
    assert!(cluster.prefill[0].metrics().contains("baton_kv_mirror_blocks_total"));
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        assert_eq!(engine.metric("baton_kv_mirror_blocks_total", ""), 0.0, "blocks went through host memory");
    }
    // The router may have chosen the second engine for some requests.
    assert_ne!(open_pools(&cluster), Some(0), "its pool is not open");
    same_blocks(&cluster);
    cluster.settled(PATIENCE);
}

#[test]
fn every_block_read_by_a_device_equals_the_producers_bytes() {
    let cluster = Cluster::new().prefill(DEVICE).decode(DEVICE).start();
    for tokens in LENGTHS {
        assert_eq!(cluster.ask(&GenerateRequest::fresh(tokens)).status, 200);
    }
    let tokens: usize = LENGTHS.iter().sum();
    assert_eq!(carried(&cluster, "device"), LENGTHS.len() as f64);
    let same = same_blocks(&cluster);
    assert!(same >= tokens / 16 - LENGTHS.len(), "only {same} blocks could be compared");
    cluster.settled(PATIENCE);
}

#[test]
fn blocks_of_other_sizes_are_cut_on_the_device() {
    let cluster = cluster(&format!("{DEVICE} --block-size 32"), DEVICE);
    answers(&cluster, 333);
    assert_eq!(carried(&cluster, "device"), 1.0);
    cluster.settled(PATIENCE);
}

#[test]
fn a_device_and_a_cpu_hand_off_through_host_memory_and_log_the_reason() {
    for (prefill, decode) in [(DEVICE, "--kv-cache-dtype f32"), ("--kv-cache-dtype f32", DEVICE)] {
        let cluster = cluster(prefill, decode);
        answers(&cluster, 100);
        assert_eq!((carried(&cluster, "device"), carried(&cluster, "shm")), (0.0, 1.0));
        if decode == DEVICE {
            let said = "cannot read the peer's device memory, using host memory";
            assert!(cluster.decode.iter().any(|engine| engine.log().contains(said)), "it does not say why");
        }
        cluster.settled(PATIENCE);
    }
}

#[test]
fn a_device_does_not_read_another_device_without_the_option() {
    for (transport, carrier) in [("tcp", "tcp"), ("shm", "shm")] {
        let engine = format!("{DEVICE} --kv-transport {transport}");
        let cluster = cluster(&engine, &engine);
        answers(&cluster, 100);
        assert_eq!((carried(&cluster, "device"), carried(&cluster, carrier)), (0.0, 1.0));
        cluster.settled(PATIENCE);
    }
}

#[test]
fn a_cancel_while_a_device_fetches_frees_every_block() {
    for how in HangUp::BOTH {
        let mut cluster = Cluster::new().prefill(DEVICE).decode(DEVICE).start();
        cluster.decode[0].pause();
        let cancelled = cluster.send(&GenerateRequest::fresh(300));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        cluster.decode[0].is_sent_something();
        cluster.prefill[0].pause();
        cluster.decode[0].go_on();
        cluster.decode[0].shows("it fetches", |snapshot| snapshot.fetching == 1 && snapshot.landing > 0);
        cancelled.hang_up(how);
        cluster.decode[0].shows_within(AT_ONCE, "no fetch runs", |snapshot| snapshot.fetching == 0);
        cluster.prefill[0].go_on();
        cluster.settled(AT_ONCE);
        cluster.still_serves();
    }
}

#[test]
fn a_killed_prefill_engine_is_replaced_and_its_pool_unmapped() {
    let mut cluster = Cluster::new().prefill(DEVICE).decode(DEVICE).start();
    assert_eq!(cluster.ask(&GenerateRequest::fresh(100)).status, 200);
    assert_eq!(carried(&cluster, "device"), 1.0);
    assert!(open_pools(&cluster).is_none_or(|open| open == 1));
    cluster.prefill[0].kill();
    assert_eq!(cluster.ask(&GenerateRequest::fresh(100)).status, 200);
    eventually(PATIENCE, "its pool is closed", || match open_pools(&cluster) {
        None | Some(0) => Ok(()),
        Some(other) => Err(format!("{other} pools are open")),
    });
}
