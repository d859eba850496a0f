//! Pages of a simulated engine: `/debug/kv` in the format of Baton's engine, and `/metrics` with vLLM's names.

use std::fmt::Write;

use serde_json::{Value, json};

use super::core::{Core, REASONS};
use super::engine::Engine;
use super::leases::Lease;
use super::plan::Dialect;

/// Maximum leases on the page, the oldest first.
const LEASES_SHOWN: usize = 1_000;

/// `GET /debug/kv`.
pub(super) fn debug_kv(engine: &Engine) -> Value {
    let now_us = engine.log.now_us();
    let mut core = engine.inspect(|core| debug_kv_body(core, now_us));
    let rank = core.clone();
    core["engine"] = json!({
        "role": engine.role.label(), "model": engine.plan.model, "epoch": engine.epoch.to_string(),
        "id": engine.id, "data_parallel_size": 1,
    });
    core["cores"] = json!([rank]);
    core
}

fn debug_kv_body(core: &Core, now_us: u64) -> Value {
    let (usage, leases) = (core.usage(), core.leases());
    let (waiting, running, fetching) = core.load();
    let mut oldest: Vec<_> = leases.live().collect();
    oldest.sort_by_key(|lease| lease.opened_us);
    oldest.truncate(LEASES_SHOWN);
    json!({
        "rank": 0,
        "blocks": {
            "total": usage.total, "free": usage.free, "cached": 0, "active": usage.active, "leased": usage.leased,
            "landing": usage.landing, "storing": 0,
        },
        "requests": {"waiting": waiting, "running": running, "fetching": fetching, "loading": 0, "stopping": 0},
        "leases": {
            "live": leases.live().len(), "opened": leases.opened, "late": leases.late, "unknown": leases.unknown,
        },
        "oldest_leases": oldest.into_iter().map(|lease| lease_json(lease, now_us)).collect::<Vec<_>>(),
        "offload": null, "steps": core.counts.steps, "failed": null,
    })
}

fn lease_json(lease: &Lease, now_us: u64) -> Value {
    let state = match (&lease.draining, lease.readers) {
        (Some(_), _) => "draining",
        (None, 0) => "offered",
        (None, _) => "reading",
    };
    json!({
        "request_id": lease.id.as_str(), "blocks": lease.blocks.len(), "state": state,
        "age_ms": now_us.saturating_sub(lease.opened_us) / 1_000, "left_ms": lease.ends_us.saturating_sub(now_us) / 1_000,
        "readers_done": 0, "readers_expected": 1,
    })
}

/// `GET /metrics`, in Prometheus' text format.
pub(super) fn metrics(engine: &Engine) -> String {
    let plan = &engine.plan;
    let labels = format!("model_name=\"{}\",engine=\"0\"", plan.model.replace(['"', '\\', '\n'], "_"));
    let mut out = String::new();
    let mut put = |name: &str, kind: &str, more: &str, value: f64| {
        let family = name.strip_suffix("_total").filter(|_| kind == "counter").unwrap_or(name);
        let family = format!("# TYPE {family} {kind}\n");
        if !out.contains(&family) {
            out.push_str(&family);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name}{{{labels}{more}}} {value}");
    };
    engine.inspect(|core| {
        let (usage, counts) = (core.usage(), &core.counts);
        let (waiting, running, fetching) = core.load();
        put("vllm:num_requests_running", "gauge", "", running as f64);
        put("vllm:num_requests_waiting", "gauge", "", (waiting + fetching) as f64);
        // Blocks that are freed twice make this negative.
        put("vllm:kv_cache_usage_perc", "gauge", "", 1.0 - usage.free as f64 / usage.total as f64);
        // In vLLM one block is reserved, which counts only in this number.
        let blocks = usage.total + usize::from(plan.dialect == Dialect::Vllm);
        let config = format!(",block_size=\"{}\",num_gpu_blocks=\"{blocks}\"", plan.block_tokens);
        put("vllm:cache_config_info", "gauge", &config, 1.0);
        for (reason, count) in REASONS.iter().zip(counts.ended) {
            let reason = format!(",finished_reason=\"{reason}\"");
            put("vllm:request_success_total", "counter", &reason, count as f64);
        }
        put("vllm:prompt_tokens_total", "counter", "", counts.prompt_tokens as f64);
        put("vllm:generation_tokens_total", "counter", "", counts.generation_tokens as f64);
        // Prometheus' Python client adds `_total`. Baton's engine does not.
        let expired = match plan.dialect {
            Dialect::Vllm => "vllm:nixl_num_kv_expired_reqs_total",
            Dialect::Baton => "vllm:nixl_num_kv_expired_reqs",
        };
        put(expired, "counter", "", counts.expired as f64);
        put("vllm:nixl_num_failed_transfers_total", "counter", "", counts.failed_fetches as f64);
        put("vllm:nixl_num_notifications_after_expiry_total", "counter", "", counts.after_expiry as f64);
        let bytes = counts.fetched_blocks * plan.block_tokens as u64 * plan.bytes_per_token;
        put("vllm:nixl_bytes_transferred_sum", "counter", "", bytes as f64);
        let fetched = counts.fetches - counts.failed_fetches;
        put("vllm:nixl_bytes_transferred_count", "counter", "", fetched as f64);
        if plan.push.is_some() {
            put("sim:stray_writes_total", "counter", "", counts.stray_writes as f64);
        }
        if plan.dialect == Dialect::Baton {
            let states = [
                ("free", usage.free),
                ("active", usage.active),
                ("leased", usage.leased),
                ("landing", usage.landing),
            ];
            for (state, blocks) in states {
                put("baton_kv_blocks", "gauge", &format!(",state=\"{state}\""), blocks as f64);
            }
            put("baton_kv_leases", "gauge", "", core.leases().live().len() as f64);
            put("baton_kv_leases_opened_total", "counter", "", core.leases().opened as f64);
            for (cause, count) in &counts.releases {
                put("baton_kv_release_total", "counter", &format!(",cause=\"{cause}\""), *count as f64);
            }
            let stranded = counts.stranded_block_us as f64 / 1e6;
            put("baton_kv_stranded_block_seconds", "gauge", "", stranded);
        }
    });
    out
}
