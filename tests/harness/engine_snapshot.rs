//! The contents of `/debug/kv` of an engine, and a parser for numbers of `/metrics`.

use serde_json::Value;

use super::PendingCall;

/// One reading of `/debug/kv`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineSnapshot {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) cached: u64,
    pub(crate) active: u64,
    pub(crate) leased: u64,
    pub(crate) landing: u64,
    pub(crate) waiting: u64,
    pub(crate) running: u64,
    pub(crate) fetching: u64,
    pub(crate) stopping: u64,
    pub(crate) leases: u64,
    pub(crate) leases_opened: u64,
    pub(crate) steps: u64,
}

impl EngineSnapshot {
    pub(crate) fn read(shown: &Value) -> Self {
        let number = |part: &str, name: &str| {
            let value = shown[part][name].as_u64();
            value.unwrap_or_else(|| panic!("/debug/kv has no {part}.{name}: {shown}"))
        };
        Self {
            total: number("blocks", "total"),
            free: number("blocks", "free"),
            cached: number("blocks", "cached"),
            active: number("blocks", "active"),
            leased: number("blocks", "leased"),
            landing: number("blocks", "landing"),
            waiting: number("requests", "waiting"),
            running: number("requests", "running"),
            fetching: number("requests", "fetching"),
            stopping: number("requests", "stopping"),
            leases: number("leases", "live"),
            leases_opened: number("leases", "opened"),
            steps: shown["steps"].as_u64().expect("steps"),
        }
    }

    /// Whether the engine holds nothing, serves no request, and misses no block.
    pub(crate) fn is_baseline(&self) -> bool {
        let held = self.active + self.leased + self.landing;
        let requests = self.waiting + self.running + self.fetching + self.stopping;
        let back = self.total > 0 && self.free + self.cached == self.total;
        held == 0 && requests == 0 && self.leases == 0 && back
    }
}

/// Hash and digest of every block in the prefix cache of the engine at this address.
pub(crate) fn digests(address: &str) -> Vec<(String, String)> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let page = PendingCall::new(address, "GET", &format!("/debug/kv/digests{after}"), b"").reply().json();
        let text = |value: &Value| value.as_str().expect("a hash").to_owned();
        let blocks = page["blocks"].as_array().expect("a list");
        all.extend(blocks.iter().map(|block| (text(&block["hash"]), text(&block["sha256"]))));
        match page["next"].as_str() {
            Some(next) => after = format!("?after={next}"),
            None => return all,
        }
    }
}

/// The sum of all series of a metric whose labels contain `labels`; 0 if there is none.
pub(crate) fn metric(exposition: &str, name: &str, labels: &str) -> f64 {
    let series = exposition.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (shown, value) = rest.rsplit_once(' ')?;
        let whole = shown.is_empty() || shown.starts_with('{');
        (whole && shown.contains(labels)).then(|| value.parse::<f64>().ok()).flatten()
    });
    series.sum()
}
