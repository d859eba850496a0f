//! Blocks and requests of a vLLM engine, from its metrics.

use crate::common::http_client::Samples;
use crate::disconnect::record::raw::EngineState;

/// Without a number of blocks the usage is in thousandths of the pool.
const THOUSANDTHS: u64 = 1_000;

/// The state of an engine, as far as its metrics contain it.
///
/// vLLM's usage is `1 − free / (num_gpu_blocks − 1)`, because one block of its pool is never used
/// (`BlockPool.get_usage`). Baton's engine counts all blocks. Held blocks are computed as `held × n / (n − 1)` or as
/// `held`. Rounded down both are the same, except for a full pool.
pub(super) fn engine_state(samples: &Samples) -> EngineState {
    let configured = samples
        .of("vllm:cache_config_info")
        .find_map(|(labels, _)| labels.get("num_gpu_blocks").and_then(|blocks| blocks.parse::<u64>().ok()))
        .filter(|blocks| *blocks > 0);
    let per_rank = configured.unwrap_or(THOUSANDTHS);
    // One share per data-parallel rank. All pools have the same size.
    let usage = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];
    let shares =
        usage.iter().map(|name| samples.of(name).map(|(_, share)| share.clamp(0.0, 1.0)).collect::<Vec<_>>());
    let shares = shares.into_iter().find(|shares| !shares.is_empty()).unwrap_or_default();
    let requests = ["vllm:num_requests_running", "vllm:num_requests_waiting"];
    // The share of a whole number of blocks is not exact in binary.
    let held = |share: &f64| (share * per_rank as f64 + 1e-6).floor() as u64;
    EngineState {
        total: per_rank * shares.len().max(1) as u64,
        thousandths: configured.is_none(),
        held: shares.iter().map(held).sum(),
        requests: requests.iter().filter_map(|name| samples.sum(name, &[])).sum::<f64>() as u64,
        ..EngineState::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::common::http_client::ServiceClient;
    use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, SimFleet};

    /// Longer than any request of these tests takes.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn leased_blocks_of_a_simulated_engine_match_its_metrics() {
        for (dialect, unused) in [(Dialect::Baton, 0), (Dialect::Vllm, 1)] {
            let plan = EnginePlan { dialect, lease: PATIENCE, ..EnginePlan::instant() };
            let blocks = plan.blocks as u64 + unused;
            let fleet = SimFleet::start(FleetPlan::new(1, 1, plan)).expect("a fleet starts on loopback");
            let prefill = ServiceClient::parse(&fleet.prefill()[0].to_string()).expect("an address");
            for lent in 0..4 {
                let samples = prefill.samples(PATIENCE).await.expect("metrics");
                // Three blocks per prompt of 40 words.
                let expected = EngineState { total: blocks, held: 3 * lent, ..EngineState::default() };
                assert_eq!(engine_state(&samples), expected, "{dialect:?}");
                let prompt: String = (0..40).map(|word| format!("w{lent}x{word} ")).collect();
                let first_leg = json!({
                    "model": "sim", "prompt": prompt, "max_tokens": 1,
                    "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
                });
                prefill.post_json("/v1/completions", &first_leg, PATIENCE).await.expect("an answer");
            }
        }
    }

    #[test]
    fn a_usage_share_becomes_blocks_with_or_without_an_unused_block() {
        let text = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"200\"} 1\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:num_requests_running 3\nvllm:num_requests_waiting 1\n";
        let seen = engine_state(&Samples::parse(text));
        assert_eq!((seen.total, seen.held, seen.requests, seen.thousandths), (200, 50, 4, false));
        for unused in [0, 1] {
            for held in 0..199_u64 {
                let usage = 1.0 - (200 - unused - held) as f64 / (200 - unused) as f64;
                let text = format!(
                    "vllm:cache_config_info{{num_gpu_blocks=\"200\"}} 1\nvllm:kv_cache_usage_perc {usage}\n"
                );
                assert_eq!(engine_state(&Samples::parse(&text)).held, held, "{unused}");
            }
        }
        let two = "vllm:cache_config_info{num_gpu_blocks=\"100\"} 1\n\
                   vllm:kv_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.8\n";
        let seen = engine_state(&Samples::parse(two));
        assert_eq!((seen.total, seen.held), (200, 170));
    }

    #[test]
    fn a_pool_of_unknown_size_is_counted_in_thousandths() {
        for config in ["", "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n"] {
            let seen = engine_state(&Samples::parse(&format!("{config}vllm:kv_cache_usage_perc 0.25\n")));
            assert_eq!((seen.total, seen.held, seen.thousandths), (1_000, 250, true));
        }
    }
}
