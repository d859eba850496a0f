//! Reads an engine's own reports: `GET /debug/kv` of Baton's engines, and the metrics of every engine.
//!
//! Every number is optional: a missing number is not shown.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{BlockCounts, EngineView, LeaseView, SnapshotSource};

/// Limit on the leases of one engine; the engine lists 1,000 per core.
const LEASES_MAX: usize = 4_000;

/// Limit on the causes of releases.
const CAUSES_MAX: usize = 64;

/// Limit on a text from an engine.
const TEXT_BYTES_MAX: usize = 256;

impl EngineView {
    /// Reads a `/debug/kv` response and adds its leases. Returns false if the value is no such response.
    pub fn read_debug_kv(&mut self, value: &Value, leases: &mut Vec<LeaseView>) -> bool {
        let blocks = &value["blocks"];
        let Some(total) = blocks["total"].as_u64() else { return false };
        let number = |name: &str| blocks[name].as_u64().unwrap_or(0);
        self.source = SnapshotSource::DebugKv;
        self.blocks_total = Some(total);
        self.blocks = Some(BlockCounts {
            total,
            free: number("free"),
            cached: number("cached"),
            active: number("active"),
            leased: number("leased"),
            landing: number("landing"),
            storing: number("storing"),
            draining: 0,
            stranded: None,
        });
        let held = total.saturating_sub(number("free") + number("cached"));
        self.kv_usage = Some(held as f64 / total.max(1) as f64);
        let counts = value["requests"].as_object().into_iter().flatten();
        self.requests = counts.take(16).filter_map(|(name, n)| Some((cut(name), n.as_u64()?))).collect();
        self.leases = value["leases"]["live"].as_u64();
        self.leases_opened = value["leases"]["opened"].as_u64();
        self.steps = value["steps"].as_u64();
        self.failed = text(&value["failed"]);
        let engine = &value["engine"];
        if let Some(role) = text(&engine["role"]) {
            self.role = role;
        }
        self.model = text(&engine["model"]).or(self.model.take());
        self.epoch = text(&engine["epoch"]);
        // The leases of a core have the rank of that core.
        let cores = value["cores"].as_array().map_or(&[][..], Vec::as_slice);
        let whole = [value.clone()];
        let cores = if cores.is_empty() { &whole[..] } else { cores };
        for core in cores {
            let rank = core["rank"].as_u64().unwrap_or(0);
            let list = core["oldest_leases"].as_array().into_iter().flatten();
            let left = LEASES_MAX.saturating_sub(leases.len());
            leases.extend(list.take(left).map(|lease| self.lease(rank, lease)));
        }
        true
    }

    fn lease(&self, rank: u64, value: &Value) -> LeaseView {
        let number = |name: &str| value[name].as_u64().unwrap_or(0);
        LeaseView {
            engine: self.engine.clone(),
            rank,
            request_id: text(&value["request_id"]).unwrap_or_default(),
            blocks: number("blocks"),
            state: text(&value["state"]).unwrap_or_default(),
            age_ms: number("age_ms"),
            left_ms: value["left_ms"].as_u64(),
            readers_done: number("readers_done"),
            readers_expected: number("readers_expected"),
            ..LeaseView::default()
        }
    }

    /// Reads a `/metrics` response. Returns false if no series belongs to an engine.
    pub fn read_metrics(&mut self, text: &str) -> bool {
        let (mut known, mut usage, mut expired) = (false, None, 0);
        let mut requests = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let name = series.split('{').next().unwrap_or_default();
            let Some(value) = value.parse::<f64>().ok().filter(|value| *value >= 0.0) else { continue };
            let count = value as u64;
            match name {
                "vllm:num_requests_running" => *requests.entry("running".to_owned()).or_insert(0) += count,
                "vllm:num_requests_waiting" => *requests.entry("waiting".to_owned()).or_insert(0) += count,
                "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" => {
                    usage = Some(usage.unwrap_or(0.0_f64).max(value.min(1.0)));
                }
                "vllm:cache_config_info" => {
                    let number = |name| label(series, name).and_then(|value| value.parse().ok());
                    self.block_size = number("block_size");
                    // One line for each rank.
                    if self.source != SnapshotSource::DebugKv {
                        let blocks: Option<u64> = number("num_gpu_blocks");
                        self.blocks_total =
                            blocks.map_or(self.blocks_total, |n| Some(self.blocks_total.unwrap_or(0) + n));
                    }
                }
                "vllm:nixl_num_kv_expired_reqs" => expired += count,
                "baton_kv_release_total" => {
                    let Some(cause) = label(series, "cause").map(cut) else { continue };
                    if self.releases.contains_key(&cause) || self.releases.len() < CAUSES_MAX {
                        *self.releases.entry(cause).or_insert(0) += count;
                    }
                }
                _ => continue,
            }
            known = true;
        }
        if self.source != SnapshotSource::DebugKv && known {
            self.source = SnapshotSource::Metrics;
            (self.kv_usage, self.requests) = (usage, requests);
            // Baton's engines also count it among the releases.
            self.releases.entry("lease_expired".to_owned()).or_insert(expired);
        }
        known
    }
}

/// The value of a label as written; the labels in question contain nothing escaped.
fn label<'a>(series: &'a str, name: &str) -> Option<&'a str> {
    let (_, labels) = series.split_once('{')?;
    let mut rest = labels;
    loop {
        let at = rest.find(name)?;
        let before = rest[..at].chars().next_back();
        rest = &rest[at + name.len()..];
        if matches!(before, None | Some(',' | ' '))
            && let Some(value) = rest.strip_prefix("=\"")
        {
            return value.split('"').next();
        }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(cut)
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn debug_kv_is_parsed_with_the_leases_of_every_rank() {
        let lease = json!({"request_id": "r", "blocks": 3, "state": "offered", "age_ms": 5, "left_ms": null,
            "readers_done": 0, "readers_expected": 1});
        let blocks = json!({"total": 10, "free": 4, "cached": 1, "active": 2, "leased": 3, "landing": 0, "storing": 0});
        let response = json!({
            "blocks": blocks, "requests": {"waiting": 1, "running": 2}, "leases": {"live": 2, "opened": 9},
            "steps": 7, "failed": null, "engine": {"role": "prefill", "model": "m", "epoch": "e"},
            "oldest_leases": [lease.clone(), lease.clone()],
            "cores": [{"rank": 0, "oldest_leases": [lease.clone()]}, {"rank": 1, "oldest_leases": [lease]}],
        });
        let mut engine = EngineView { engine: "p:1".to_owned(), ..EngineView::default() };
        let mut leases = Vec::new();
        assert!(engine.read_debug_kv(&response, &mut leases));
        assert_eq!(
            (engine.source, engine.role.as_str(), engine.leases),
            (SnapshotSource::DebugKv, "prefill", Some(2))
        );
        assert_eq!(engine.kv_usage, Some(0.5));
        assert_eq!(leases.iter().map(|lease| lease.rank).collect::<Vec<_>>(), [0, 1], "each once");
        assert_eq!((leases[0].blocks, leases[0].left_ms), (3, None));
        for strange in [json!(null), json!([]), json!({"blocks": 3}), json!({"blocks": {"total": "x"}})] {
            assert!(!EngineView::default().read_debug_kv(&strange, &mut Vec::new()), "{strange}");
        }
        let hostile = json!({"blocks": {"total": 1, "free": 5}, "oldest_leases": [1, null], "requests": [], "cores": {}});
        assert!(EngineView::default().read_debug_kv(&hostile, &mut Vec::new()));
    }

    #[test]
    fn a_stock_engine_is_shown_from_its_metrics() {
        let text = "# TYPE x\nvllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_running{engine=\"1\"} 1.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 2.0\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
            vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",num_gpu_blocks=\"400\"} 1.0\n";
        let mut engine = EngineView::default();
        assert!(engine.read_metrics(text));
        assert_eq!(engine.source, SnapshotSource::Metrics);
        assert_eq!((engine.requests["running"], engine.requests["waiting"]), (4, 2));
        assert_eq!(
            (engine.kv_usage, engine.blocks_total, engine.block_size),
            (Some(0.25), Some(400), Some(16))
        );
        assert!(engine.blocks.is_none(), "what is not known is not shown as nothing");
        assert!(!EngineView::default().read_metrics("up 1\n<html>\n"));
    }

    #[test]
    fn releases_are_added_up_by_cause() {
        let mut engine = EngineView { source: SnapshotSource::DebugKv, ..EngineView::default() };
        let text = "baton_kv_release_total{model_name=\"cause=\",engine=\"0\",cause=\"fetched\"} 5\n\
            baton_kv_release_total{engine=\"1\",cause=\"fetched\"} 2\nbaton_kv_release_total{cause=\"client_gone\"} 1\n";
        assert!(engine.read_metrics(text));
        assert_eq!(
            engine.releases,
            BTreeMap::from([("fetched".to_owned(), 7), ("client_gone".to_owned(), 1)])
        );
    }
}
