//! An engine's reported load, read from vLLM's `/metrics` or SGLang's `/v1/loads`. Pure.
//!
//! Baton's engines use vLLM's names. Samples of several ranks or models are added up. The cache's usage is the maximum.

use std::time::{Duration, Instant};

use serde::Deserialize;

/// One reading.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EngineLoad {
    /// `vllm:num_requests_running`, or `num_running_reqs`.
    pub running: u32,
    /// `vllm:num_requests_waiting`, or `num_waiting_reqs`.
    pub waiting: u32,
    /// `vllm:kv_cache_usage_perc`, 0 to 1 although its name says percent, or `token_usage`.
    pub kv_usage: f32,
    /// When it was read.
    pub at: Instant,
}

/// SGLang's `/v1/loads`.
#[derive(Deserialize)]
struct SglangLoads {
    loads: Vec<SglangLoad>,
}

/// The load of one data-parallel rank.
#[derive(Deserialize)]
struct SglangLoad {
    num_running_reqs: u32,
    num_waiting_reqs: u32,
    #[serde(default)]
    token_usage: f32,
}

impl EngineLoad {
    /// Reads Prometheus text or SGLang's JSON; `None` if it contains neither count.
    pub(crate) fn read(text: &str, at: Instant) -> Option<Self> {
        if text.starts_with('{') {
            return Self::read_sglang(text, at);
        }
        let mut load = Self { running: 0, waiting: 0, kv_usage: 0.0, at };
        let mut found = false;
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("vllm:") else { continue };
            let name = rest.split(['{', ' ']).next().unwrap_or_default();
            // The label values of these three have no space, so the value follows the last space.
            let value =
                || line.rsplit(' ').next().and_then(|text| text.parse::<f32>().ok()).filter(|v| *v >= 0.0);
            match name {
                "num_requests_running" => {
                    found = true;
                    load.running = load.running.saturating_add(value()? as u32);
                }
                "num_requests_waiting" => {
                    found = true;
                    load.waiting = load.waiting.saturating_add(value()? as u32);
                }
                "kv_cache_usage_perc" | "gpu_cache_usage_perc" => {
                    load.kv_usage = load.kv_usage.max(value()?.min(1.0))
                }
                _ => {}
            }
        }
        found.then_some(load)
    }

    fn read_sglang(text: &str, at: Instant) -> Option<Self> {
        let SglangLoads { loads } = serde_json::from_str(text).ok()?;
        let sum = |count: fn(&SglangLoad) -> u32| loads.iter().map(count).fold(0, u32::saturating_add);
        let usage = loads.iter().map(|load| load.token_usage).fold(0.0, f32::max);
        (!loads.is_empty()).then(|| Self {
            running: sum(|load| load.num_running_reqs),
            waiting: sum(|load| load.num_waiting_reqs),
            kv_usage: usage.clamp(0.0, 1.0),
            at,
        })
    }

    /// The load, unless it is stale.
    pub(crate) fn fresh(self, now: Instant, stale: Duration) -> Option<Self> {
        (now.saturating_duration_since(self.at) <= stale).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n\
        vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
        vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 2\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\"} 9\n\
        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n\
        vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.5\n";

    #[test]
    fn vllms_own_names_are_read_and_ranks_are_added_up() {
        let now = Instant::now();
        let load = EngineLoad::read(TEXT, now).expect("a reading");
        assert_eq!((load.running, load.waiting, load.kv_usage), (7, 2, 0.5));
        assert_eq!(EngineLoad::read("up 1\n", now), None);
        assert_eq!(EngineLoad::read("vllm:num_requests_running NaN\n", now), None, "nonsense is no reading");
    }

    #[test]
    fn sglangs_loads_are_read_and_ranks_are_added_up() {
        let text = r#"{"timestamp": "x", "loads": [
            {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25},
            {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 1, "token_usage": 0.5, "other": null}]}"#;
        let load = EngineLoad::read(text, Instant::now()).expect("a reading");
        assert_eq!((load.running, load.waiting, load.kv_usage), (7, 2, 0.5));
        for odd in ["{}", r#"{"loads": []}"#, r#"{"loads": [{"num_running_reqs": -1}]}"#] {
            assert_eq!(EngineLoad::read(odd, Instant::now()), None, "{odd}");
        }
    }

    #[test]
    fn a_stale_load_reading_is_ignored() {
        let at = Instant::now();
        let load = EngineLoad::read(TEXT, at).expect("a reading");
        assert!(load.fresh(at + Duration::from_secs(3), Duration::from_secs(3)).is_some());
        assert!(load.fresh(at + Duration::from_secs(4), Duration::from_secs(3)).is_none());
    }
}
