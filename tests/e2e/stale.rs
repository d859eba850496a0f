//! The stale read: a lease has expired or was released, and the prefill engine has reused its blocks. A decode engine
//! begins to read them, or is reading them already. On vLLM 0.32 this leads to a 200 with a wrong text, and the decode
//! engine's prefix cache then serves wrong text to plain requests. On Baton it leads to the right text, recomputed, or
//! to a typed error. No prefix cache contains unverified blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{
    AT_ONCE, Cluster, Engine, GenerateRequest, LinkFault, PATIENCE, Proxy, Reply, digests, eventually,
};

/// Prompt tokens: 31 full blocks and a partial one.
const TOKENS: usize = 500;

/// The model's maximum, so that a copy takes a while.
const TOKENS_OF_LONG: usize = 1900;

/// Little more than one prompt, so that the next prompts reuse its blocks.
fn pool_for(tokens: usize) -> String {
    format!("--kv-blocks {}", tokens.div_ceil(16) + 10)
}

/// A lease that expires at once without a renewal.
const SHORT: &str = "--kv-lease-duration 0.3";

/// A lease that is little longer than a copy.
const HALF_A_SECOND: &str = "--kv-lease-duration 0.5";

/// KV in the memory of this host's only device.
const DEVICE: &str = "--device software --kv-cache-dtype f32";

const FAIL: &str = "--kv-load-failure-policy fail";

/// A slow side channel passes a few blocks of the prompt, but not all of them.
const SLOW: LinkFault = LinkFault::Slow { bytes: 2048, pause: Duration::from_millis(10) };

/// A prefill engine, a decode engine, an engine for the right response, and a prompt.
struct StaleReadSetup {
    cluster: Cluster,
    tokens: usize,
    ask: GenerateRequest,
    truth: Value,
    /// Whether the decode engine's policy is to fail instead of to recompute.
    fails: bool,
}

impl StaleReadSetup {
    /// Over TCP, with a link that can be slow.
    fn tcp(prefill: &str, decode: &str) -> Self {
        let plan = Cluster::new().links().prefill(&format!("{} {prefill}", pool_for(TOKENS)));
        Self::new(plan.decode(decode).decode("").start(), TOKENS, decode)
    }

    /// By shared memory.
    fn shm(prefill: &str, decode: &str) -> Self {
        Self::one_sided("shm", prefill, decode)
    }

    /// With a transport that reads the producer's memory itself.
    fn one_sided(transport: &str, prefill: &str, decode: &str) -> Self {
        let transport = format!("--kv-transport {transport}");
        let plan = Cluster::new().prefill(&format!("{transport} {} {prefill}", pool_for(TOKENS_OF_LONG)));
        Self::new(plan.decode(&format!("{transport} {decode}")).decode("").start(), TOKENS_OF_LONG, decode)
    }

    /// From device to device. A device computes a single token and a chunk with different sums. The test therefore
    /// compares tokens, and not their log probabilities.
    fn device(tokens: usize, prefill: &str, decode: &str) -> Self {
        let plan = Cluster::new().prefill(&format!("{DEVICE} {} {prefill}", pool_for(tokens)));
        let cluster = plan.decode(&format!("{DEVICE} {decode}")).decode(DEVICE).start();
        Self::asking(GenerateRequest::fresh(tokens).tokens(16), cluster, tokens, decode)
    }

    fn new(cluster: Cluster, tokens: usize, decode: &str) -> Self {
        Self::asking(
            GenerateRequest::fresh(tokens).tokens(16).with("logprobs", json!(1)),
            cluster,
            tokens,
            decode,
        )
    }

    fn asking(ask: GenerateRequest, cluster: Cluster, tokens: usize, decode: &str) -> Self {
        let truth = cluster.decode[1].send("POST", ask.path, &ask.body).reply();
        assert_eq!(truth.status, 200);
        Self { cluster, tokens, ask, truth: truth.json()["choices"].take(), fails: decode.contains("fail") }
    }

    fn p(&self) -> &Engine {
        &self.cluster.prefill[0]
    }

    fn d(&self) -> &Engine {
        &self.cluster.decode[0]
    }

    fn link(&self) -> &Proxy {
        self.cluster.side_channel.as_ref().expect("a cluster with links")
    }

    fn with(&self, handoff: &Value) -> Value {
        self.ask.clone().with("kv_transfer_params", handoff.clone()).body
    }

    /// Makes other prompts reuse every block of this handoff.
    fn reuse(&self, handoff: &Value) {
        let blocks = |handoff: &Value| -> BTreeSet<u64> {
            let ids = handoff["remote_block_ids"].as_array().expect("a table").iter();
            ids.flat_map(|id| id.as_array().cloned().unwrap_or_else(|| vec![id.clone()]))
                .map(|id| id.as_u64().expect("a block id"))
                .collect()
        };
        let mut left = blocks(handoff);
        assert!(left.len() >= self.tokens / 16, "{handoff}");
        for _ in 0..8 {
            let other = self.p().open_lease(&GenerateRequest::fresh(self.tokens));
            left = left.difference(&blocks(&other)).copied().collect();
            assert_eq!(self.p().release(&other), "released");
            if left.is_empty() {
                return;
            }
        }
        panic!("these blocks were not reused: {left:?}");
    }

    /// Checks the response to a stale handoff, and the state afterwards.
    fn ends_well(&self, reply: &Reply) {
        let body = reply.json();
        if self.fails {
            assert_eq!((reply.status, &body["error"]["code"]), (503, &json!("kv_gone")), "{body}");
        } else {
            assert_eq!(reply.status, 200, "{body}");
            assert_eq!(body["choices"], self.truth, "a wrong text");
        }
        let policy = if self.fails { "policy=\"fail\"" } else { "policy=\"recompute\"" };
        assert_eq!(self.d().metric("baton_kv_load_failures_total", policy), 1.0, "it was not refused");
        // A plain request, which uses the prefix cache.
        let plain = self.d().send("POST", self.ask.path, &self.ask.body).reply();
        assert_eq!(plain.json()["choices"], self.truth, "a wrong text to a plain request afterwards");
        for engine in [self.p(), self.d()] {
            engine.settled(PATIENCE);
        }
        self.caches_agree();
    }

    /// Every block that two engines have cached has the same bytes on both.
    fn caches_agree(&self) {
        // The prefill engine computes the prompt once more, so that all engines have cached its blocks.
        self.p().release(&self.p().open_lease(&self.ask));
        let mut known = BTreeMap::new();
        let mut shared = 0;
        for engine in [&self.cluster.decode[1], self.p(), self.d()] {
            for (hash, digest) in digests(&engine.address) {
                if let Some(first) = known.insert(hash.clone(), digest.clone()) {
                    assert_eq!(first, digest, "block {hash} has other bytes on another engine");
                    shared += 1;
                }
            }
        }
        assert!(shared >= 2 * (self.tokens / 16), "only {shared} blocks could be compared");
    }
}

#[test]
fn a_handoff_within_its_lease_is_fetched() {
    for stage in [StaleReadSetup::tcp("", ""), StaleReadSetup::shm("", "")] {
        let handoff = stage.p().open_lease(&stage.ask);
        let reply = stage.d().send("POST", stage.ask.path, &stage.with(&handoff)).reply();
        assert_eq!(reply.json()["choices"], stage.truth);
        let fetched = stage.d().metric("vllm:external_prefix_cache_hits_total", "");
        assert!(fetched >= (stage.tokens / 16 * 16) as f64, "only {fetched} tokens were fetched");
        // Checks that the blocks used the intended transport.
        let shm = stage.cluster.side_channel.is_none();
        assert_eq!(stage.d().mapped_pools(), usize::from(shm));
        stage.caches_agree();
    }
}

fn expired_and_reused_before_the_read(stage: &StaleReadSetup) {
    let handoff = stage.p().open_lease(&stage.ask);
    stage.p().settled(PATIENCE);
    let expired = || match stage.p().metric("vllm:nixl_num_kv_expired_reqs", "") {
        1.0 => Ok(()),
        other => Err(format!("{other} expired")),
    };
    eventually(PATIENCE, "the lease has expired", expired);
    stage.reuse(&handoff);
    let reply = stage.d().send("POST", stage.ask.path, &stage.with(&handoff)).reply();
    stage.ends_well(&reply);
}

#[test]
fn blocks_reused_after_expiry_are_recomputed() {
    expired_and_reused_before_the_read(&StaleReadSetup::tcp(SHORT, ""));
    expired_and_reused_before_the_read(&StaleReadSetup::shm(SHORT, ""));
}

#[test]
fn blocks_reused_after_expiry_are_a_typed_error_under_policy_fail() {
    expired_and_reused_before_the_read(&StaleReadSetup::tcp(SHORT, FAIL));
    expired_and_reused_before_the_read(&StaleReadSetup::shm(SHORT, FAIL));
}

/// Waits until the decode engine has read some of the blocks, but not all.
fn in_the_middle_of_a_read(stage: &StaleReadSetup, handoff: &Value) -> crate::harness::PendingCall {
    stage.link().set(SLOW);
    let before = stage.link().passed();
    let call = stage.d().send("POST", stage.ask.path, &stage.with(handoff));
    eventually(PATIENCE, "some of the blocks have come", || match stage.link().passed() - before {
        some if some > 8 * 1024 => Ok(()),
        few => Err(format!("{few} bytes")),
    });
    assert_eq!(stage.d().snapshot().fetching, 1, "the read is over already");
    call
}

fn given_up_and_reused_during_the_read(decode: &str) {
    let stage = StaleReadSetup::tcp("--kv-lease-duration 600", decode);
    let handoff = stage.p().open_lease(&stage.ask);
    let call = in_the_middle_of_a_read(&stage, &handoff);
    assert_eq!(stage.p().release(&handoff), "draining");
    assert_eq!(stage.p().lease_states(), ["draining"], "its reader is waited for");
    // At the drain deadline the blocks are freed, and the reader gets no valid verdict.
    stage.p().settled(PATIENCE);
    stage.reuse(&handoff);
    assert_eq!(stage.d().snapshot().fetching, 1, "the blocks were to be reused during the read");
    stage.link().set(LinkFault::None);
    stage.ends_well(&call.reply());
}

#[test]
fn blocks_released_and_reused_during_the_read_are_recomputed() {
    given_up_and_reused_during_the_read("");
}

#[test]
fn blocks_released_and_reused_during_the_read_are_a_typed_error_under_policy_fail() {
    given_up_and_reused_during_the_read(FAIL);
}

#[test]
fn blocks_reused_while_their_reader_is_stopped_are_recomputed() {
    let mut stage = StaleReadSetup::tcp("--kv-lease-duration 0.5", "");
    let handoff = stage.p().open_lease(&stage.ask);
    let call = in_the_middle_of_a_read(&stage, &handoff);
    // Neither heartbeats nor reads: only time ends the lease.
    stage.cluster.decode[0].pause();
    stage.p().settled(PATIENCE);
    assert_eq!(stage.p().metric("vllm:nixl_num_kv_expired_reqs", ""), 1.0);
    stage.reuse(&handoff);
    stage.link().set(LinkFault::None);
    stage.cluster.decode[0].go_on();
    stage.ends_well(&call.reply());
    stage.cluster.decode[0].settled(AT_ONCE);
}

/// A test cannot slow a copy from shared memory. It stops the reader at varying moments until a moment is within a
/// read. The lease then expires and drains, and other requests reuse the blocks. The reader continues its copy
/// afterwards.
#[test]
fn blocks_reused_during_a_copy_are_recomputed() {
    reused_in_the_middle_of_a_copy(StaleReadSetup::one_sided("shm", HALF_A_SECOND, ""));
}

/// A device also copies by itself and does not know leases.
#[test]
fn blocks_reused_during_a_copy_between_devices_are_recomputed() {
    reused_in_the_middle_of_a_copy(StaleReadSetup::device(TOKENS_OF_LONG, HALF_A_SECOND, ""));
}

#[test]
fn blocks_reused_before_a_copy_between_devices_are_recomputed_or_a_typed_error() {
    expired_and_reused_before_the_read(&StaleReadSetup::device(TOKENS, SHORT, ""));
    expired_and_reused_before_the_read(&StaleReadSetup::device(TOKENS, SHORT, FAIL));
}

/// NIXL reads reused blocks and reports success. `nixl.rs` shows how to run this test.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_reused_during_a_nixl_read_are_recomputed() {
    reused_in_the_middle_of_a_copy(StaleReadSetup::one_sided("nixl", HALF_A_SECOND, ""));
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_reused_before_a_nixl_read_of_a_device_are_recomputed_or_a_typed_error() {
    let nixl = "--kv-transport nixl";
    for policy in ["", FAIL] {
        let stage = StaleReadSetup::device(TOKENS, &format!("{nixl} {SHORT}"), &format!("{nixl} {policy}"));
        expired_and_reused_before_the_read(&stage);
    }
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_reused_before_a_nixl_read_are_recomputed_or_a_typed_error() {
    expired_and_reused_before_the_read(&StaleReadSetup::one_sided("nixl", SHORT, ""));
    expired_and_reused_before_the_read(&StaleReadSetup::one_sided("nixl", SHORT, FAIL));
}

/// Each attempt depends on the one before it: later if the read had not begun, earlier if it had ended. The attempts
/// therefore stay close to the read at any speed of the machine.
fn reused_in_the_middle_of_a_copy(mut stage: StaleReadSetup) {
    const SHOTS: u32 = 300;
    let (mut delay, mut step) = (Duration::from_millis(1), Duration::from_micros(800));
    for shot in 0..SHOTS {
        let _ = stage.d().send("POST", "/reset_prefix_cache", &json!({})).reply();
        let handoff = stage.p().open_lease(&stage.ask);
        // The engine finds the request when it continues. An attempt after that moment can be early, however fast the
        // read is.
        stage.cluster.decode[0].pause();
        let call = stage.d().send("POST", stage.ask.path, &stage.with(&handoff));
        stage.cluster.decode[0].go_on();
        wait(delay);
        stage.cluster.decode[0].pause();
        let states = stage.p().lease_states();
        let mut hit = states == ["reading"];
        if hit {
            stage.p().settled(PATIENCE);
            // The reader's last message may have been on its way when it was stopped.
            hit = stage.p().metric("vllm:nixl_num_kv_expired_reqs", "") == 1.0;
        }
        if hit {
            println!("hit in the middle of a copy by shot {shot}, {delay:?} after it went on");
            stage.reuse(&handoff);
            stage.cluster.decode[0].go_on();
            stage.ends_well(&call.reply());
            return;
        }
        delay = if states == ["offered"] { delay + step } else { delay.saturating_sub(step) };
        step = (step * 9 / 10).max(Duration::from_micros(40));
        stage.cluster.decode[0].go_on();
        let reply = call.reply();
        assert_eq!(reply.json()["choices"], stage.truth);
        stage.d().settled(PATIENCE);
        stage.p().settled(PATIENCE);
    }
    panic!("{SHOTS} shots, and none was in the middle of a copy");
}

/// A decode engine must unmap the pool of a prefill engine that died: memory of the size of the pool.
#[test]
fn the_pool_of_a_dead_prefill_engine_is_unmapped() {
    let mut stage = StaleReadSetup::shm("", "");
    let handoff = stage.p().open_lease(&stage.ask);
    let reply = stage.d().send("POST", stage.ask.path, &stage.with(&handoff)).reply();
    assert_eq!(reply.status, 200);
    assert_eq!(stage.d().mapped_pools(), 1);
    stage.cluster.prefill[0].kill();
    eventually(PATIENCE, "its pool is unmapped", || match stage.d().mapped_pools() {
        0 => Ok(()),
        other => Err(format!("{other} pools are mapped")),
    });
}

#[allow(clippy::disallowed_methods, reason = "the moment of an attempt, whose effect the test checks")]
fn wait(time: Duration) {
    std::thread::sleep(time);
}
