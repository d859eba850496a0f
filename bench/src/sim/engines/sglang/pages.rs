//! Pages of a simulated SGLang engine: those of SGLang, and `/debug/kv` in the format of Baton's engine.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Value, json};

use super::super::http::HttpRequest;
use super::super::pool::PoolUsage;
use super::super::role::Role;
use super::engine::SglangEngine;
use super::rank::{RankCounts, RankLoad};

/// The version that the simulation follows.
const VERSION: &str = "0.5.23";
/// The sections of `/v1/loads`.
const SECTIONS: [&str; 7] = ["core", "memory", "spec", "lora", "disagg", "queues", "all"];

/// What pages show of a rank.
struct RankPage {
    usage: PoolUsage,
    load: RankLoad,
    counts: RankCounts,
}

fn ranks(engine: &SglangEngine) -> Vec<RankPage> {
    engine.inspect(|rank| RankPage { usage: rank.usage(), load: rank.load(), counts: rank.counts.clone() })
}

/// The engine in `/debug/kv` and `/debug/kv/events`.
pub(super) fn identity(engine: &SglangEngine) -> Value {
    let identity = &engine.identity;
    json!({
        "id": identity.id, "epoch": identity.epoch.to_string(), "role": identity.role.label(),
        "model": engine.plan.model, "data_parallel_size": engine.ranks(),
    })
}

/// `GET /server_info`.
pub(super) fn server_info(engine: &SglangEngine) -> Value {
    let (identity, plan) = (&engine.identity, &engine.plan);
    let method = if identity.role == Role::Prefill { "follow_bootstrap_room" } else { "round_robin" };
    let states: Vec<_> = ranks(engine)
        .iter()
        .map(|rank| json!({"max_total_num_tokens": rank.usage.total * plan.block_tokens}))
        .collect();
    json!({
        "model_path": plan.model, "served_model_name": plan.model, "host": "127.0.0.1",
        "port": identity.address.port(), "disaggregation_mode": identity.role.label(),
        "disaggregation_bootstrap_port": identity.bootstrap.map(|at| at.port()),
        "disaggregation_transfer_backend": "mooncake", "dp_size": engine.ranks(), "tp_size": 1,
        "load_balance_method": method, "page_size": plan.block_tokens, "context_length": plan.capacity(),
        "max_running_requests": plan.running_max, "kv_events": null, "internal_states": states,
        "startup_time": 0.0, "version": VERSION,
    })
}

/// `GET /model_info`.
pub(super) fn model_info(engine: &SglangEngine) -> Value {
    let name = &engine.plan.model;
    json!({
        "model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": true,
        "preferred_sampling_params": null, "weight_version": "default",
        "disaggregation_mode": engine.identity.role.label(), "has_image_understanding": false,
        "has_audio_understanding": false,
    })
}

/// `GET /v1/models`.
pub(super) fn models(engine: &SglangEngine) -> Value {
    let name = &engine.plan.model;
    let card = json!({
        "id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": null,
        "max_model_len": engine.plan.capacity(),
    });
    json!({"object": "list", "data": [card]})
}

/// A page of `/v1/loads`.
pub(super) enum LoadsPage {
    Json(Value),
    Prometheus(String),
}

/// `GET /v1/loads`.
///
/// # Errors
/// An unknown section or rank.
pub(super) fn loads(engine: &SglangEngine, request: &HttpRequest) -> Result<LoadsPage, String> {
    let include: BTreeSet<&str> =
        request.field("include").unwrap_or("all").split(',').map(str::trim).collect();
    if let Some(unknown) = include.iter().find(|name| !SECTIONS.contains(name)) {
        return Err(format!("Invalid include sections: {{'{unknown}'}}. Valid options: {SECTIONS:?}"));
    }
    let only = match request.field("dp_rank").map(str::parse::<usize>) {
        None => None,
        Some(Ok(rank)) if rank < engine.ranks() => Some(rank),
        Some(_) => return Err("dp_rank is out of range".to_owned()),
    };
    let all = ranks(engine).into_iter().enumerate();
    let loads: Vec<_> = all
        .filter(|(number, _)| only.is_none_or(|only| only == *number))
        .map(|(number, rank)| load(engine, number, &rank, &include))
        .collect();
    if request.field("format") == Some("prometheus") {
        return Ok(LoadsPage::Prometheus(prometheus(&loads)));
    }
    Ok(LoadsPage::Json(json!({
        "timestamp": engine.log.now_us() as f64 / 1e6, "version": VERSION, "accelerator": null,
        "num_accelerators": 1, "loads": loads,
    })))
}

fn load(engine: &SglangEngine, number: usize, rank: &RankPage, include: &BTreeSet<&str>) -> Value {
    let (plan, RankPage { usage, load, counts }) = (&engine.plan, rank);
    let waiting = load.opening + load.waiting;
    let used = usage.total.saturating_sub(usage.free) * plan.block_tokens;
    let mut page = json!({
        "timestamp": engine.log.now_us() as f64 / 1e6, "dp_rank": number, "num_running_reqs": load.running,
        "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": load.waiting_tokens, "num_used_tokens": used,
        "num_total_tokens": used + load.waiting_tokens, "max_total_num_tokens": usage.total * plan.block_tokens,
        "max_running_requests": plan.running_max, "token_usage": token_usage(usage), "gen_throughput": 0.0,
        "cache_hit_rate": 0.0, "utilization": load.running as f64 / plan.running_max as f64,
        "total_prefill_uncached_tokens": counts.prompt_tokens,
    });
    let has = |section: &str| include.contains("all") || include.contains(section);
    let prefills = engine.identity.role == Role::Prefill;
    let of = |role_fits: bool, number: usize| if role_fits { number } else { 0 };
    if has("disagg") {
        page["disaggregation"] = json!({
            "mode": engine.identity.role.label(),
            "prefill_bootstrap_queue_reqs": of(prefills, load.opening),
            "prefill_inflight_queue_reqs": of(prefills, load.transferring),
            "decode_prealloc_queue_reqs": of(!prefills, load.opening),
            "decode_transfer_queue_reqs": of(!prefills, load.transferring),
            "decode_retracted_queue_reqs": 0,
        });
    }
    if has("queues") {
        page["queues"] =
            json!({"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0});
    }
    page
}

fn token_usage(usage: &PoolUsage) -> f64 {
    1.0 - usage.free as f64 / usage.total as f64
}

/// The numbers of `/v1/loads` in Prometheus' text format.
fn prometheus(loads: &[Value]) -> String {
    let mut out = String::new();
    for load in loads {
        let fields = load.as_object().into_iter().flatten().filter(|(name, _)| *name != "dp_rank");
        for (name, value) in fields.filter(|(_, value)| value.is_number()) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "sglang_{name}{{dp_rank=\"{}\"}} {value}", load["dp_rank"]);
        }
    }
    out
}

/// `GET /metrics`, in Prometheus' text format.
pub(super) fn metrics(engine: &SglangEngine) -> String {
    let (plan, role, ranks) = (&engine.plan, engine.identity.role, ranks(engine));
    let name = plan.model.replace(['"', '\\', '\n'], "_");
    let mut out = String::new();
    let mut put = |metric: &str, of: &dyn Fn(&RankPage) -> f64| {
        let kind = if metric.ends_with("_total") { "counter" } else { "gauge" };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# TYPE sglang:{metric} {kind}");
        for (number, rank) in ranks.iter().enumerate() {
            let labels = format!(
                "model_name=\"{name}\",engine_type=\"{}\",tp_rank=\"0\",dp_rank=\"{number}\"",
                role.label()
            );
            let _ = writeln!(out, "sglang:{metric}{{{labels}}} {}", of(rank));
        }
    };
    put("num_running_reqs", &|rank| rank.load.running as f64);
    put("num_queue_reqs", &|rank| rank.load.waiting as f64);
    put("token_usage", &|rank| token_usage(&rank.usage));
    put("cache_hit_rate", &|_| 0.0);
    let used =
        |rank: &RankPage| (rank.usage.total.saturating_sub(rank.usage.free) * plan.block_tokens) as f64;
    put("num_used_tokens", &used);
    put("max_total_num_tokens", &|rank| (rank.usage.total * plan.block_tokens) as f64);
    put("page_size", &|_| plan.block_tokens as f64);
    put("num_pages", &|rank| rank.usage.total as f64);
    match role {
        Role::Prefill => {
            put("num_prefill_bootstrap_queue_reqs", &|rank| rank.load.opening as f64);
            put("num_prefill_inflight_queue_reqs", &|rank| rank.load.transferring as f64);
        }
        Role::Decode => {
            put("num_decode_prealloc_queue_reqs", &|rank| rank.load.opening as f64);
            put("num_decode_transfer_queue_reqs", &|rank| rank.load.transferring as f64);
            put("num_decode_deferred_kv_release_reqs", &|rank| rank.load.deferred as f64);
        }
    }
    put("num_bootstrap_failed_reqs_total", &|rank| rank.counts.bootstrap_failed as f64);
    put("num_transfer_failed_reqs_total", &|rank| rank.counts.transfer_failed as f64);
    put("num_aborted_requests_total", &|rank| rank.counts.aborted as f64);
    put("num_requests_total", &|rank| rank.counts.requests as f64);
    put("prompt_tokens_total", &|rank| rank.counts.prompt_tokens as f64);
    put("generation_tokens_total", &|rank| rank.counts.generation_tokens as f64);
    out
}

/// `GET /debug/kv`. Real SGLang has no such page: it is the simulation's record, as the event log.
pub(super) fn debug_kv(engine: &SglangEngine) -> Value {
    let ranks = ranks(engine);
    let cores: Vec<_> = ranks.iter().enumerate().map(|(number, rank)| debug_rank(number, [rank])).collect();
    let mut page = debug_rank(0, &ranks);
    page["engine"] = identity(engine);
    page["cores"] = cores.into();
    page
}

fn debug_rank<'a>(number: usize, ranks: impl IntoIterator<Item = &'a RankPage> + Copy) -> Value {
    let sum = |of: &dyn Fn(&RankPage) -> usize| ranks.into_iter().map(of).sum::<usize>();
    json!({
        "rank": number,
        "blocks": {
            "total": sum(&|rank| rank.usage.total), "free": sum(&|rank| rank.usage.free), "cached": 0,
            "active": sum(&|rank| rank.usage.active), "leased": sum(&|rank| rank.usage.leased),
            "landing": sum(&|rank| rank.usage.landing), "storing": 0,
        },
        "requests": {
            "waiting": sum(&|rank| rank.load.opening + rank.load.waiting), "running": sum(&|rank| rank.load.running),
            "fetching": sum(&|rank| rank.load.transferring), "loading": 0,
            "stopping": sum(&|rank| rank.load.deferred),
        },
        // P's transfers, whose pages are leased.
        "leases": {
            "live": sum(&|rank| if rank.usage.leased > 0 { rank.load.transferring } else { 0 }),
            "opened": 0, "late": 0, "unknown": 0,
        },
        "oldest_leases": [], "offload": null,
        "steps": ranks.into_iter().map(|rank| rank.counts.steps).sum::<u64>(), "failed": null,
    })
}
