//! A deployment at one moment: every engine's blocks by state, the leases and why they are held, the requests by phase.
//! Pure; other modules read the engines.
//!
//! The same value is the JSON of `GET /debug/kv` on the admin listener, the data of its page, and the data of `baton
//! top`. [`LeaseView::classify`] is therefore the only place that describes a lease.
//!
//! A lease is **stranded** when no engine reads it and no router in view has its request in flight: its blocks are held
//! without a use until it is released or expires. If a request ended less than [`SETTLING_MS`] ago, its release is
//! still in progress. If a router does not answer, its requests in flight are unknown, and so are the stranded leases.

mod reading;
mod timeline;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::message::request_id::bare_id;
pub use timeline::{EngineEvents, Timeline, TimelineEntry, concerns};

/// For this long after a request's end its leases do not count as stranded. A release takes a round trip, and the
/// router and its engines are not read at the same instant.
pub const SETTLING_MS: u64 = 500;

/// The phases of a request in flight, in their order.
pub const PHASES: [&str; 7] =
    ["intake", "queue", "prefill", "gap", "decode_pre_first", "decode_stream", "ending"];

/// A deployment at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// When it was taken, in microseconds since the Unix epoch. Of merged views: when they were requested, which
    /// differs from when each was taken; see [`EngineView::at_us`].
    pub at_us: u64,
    /// The routers in view. Empty: only engines were read.
    pub routers: Vec<RouterView>,
    /// The routers' requests in flight.
    pub requests: RequestsView,
    /// Every engine: prefill engines first, then by address.
    pub engines: Vec<EngineView>,
    /// Live leases, the oldest first; limited to those that each engine lists.
    pub leases: Vec<LeaseView>,
    /// Blocks of stranded leases; `None` if unknown.
    pub stranded_blocks: Option<u64>,
    /// Stranded leases; `None` if unknown.
    pub stranded_leases: Option<u64>,
}

/// The state of a router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterView {
    /// The address of its admin listener; empty in the router's own response.
    pub admin: String,
    /// The running version.
    pub version: String,
    /// Number of the configuration in effect.
    pub generation: u64,
    /// The router accepts no new requests.
    pub draining: bool,
    /// Requests in flight.
    pub in_flight: u64,
    /// Why it could not be read.
    pub error: Option<String>,
}

/// Requests in flight.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestsView {
    /// Number of requests.
    pub in_flight: u64,
    /// Number of requests in each phase; see [`PHASES`].
    pub phases: BTreeMap<String, u64>,
    /// The oldest requests.
    pub oldest: Vec<RequestView>,
}

/// One request in flight.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestView {
    /// The id under which engines know it.
    pub request_id: String,
    /// The model's name, once the body is read.
    pub model: Option<String>,
    /// See [`PHASES`].
    pub phase: String,
    /// Milliseconds since its arrival.
    pub age_ms: u64,
    /// The engine of the last attempt.
    pub prefill_engine: Option<String>,
    /// The engine of the last attempt.
    pub decode_engine: Option<String>,
}

/// The source of an engine's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotSource {
    /// None: it did not answer.
    #[default]
    None,
    /// Only its `/metrics`: a stock engine.
    Metrics,
    /// Its `/debug/kv`.
    DebugKv,
}

/// One engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineView {
    /// `HOST:PORT`.
    pub engine: String,
    /// When it was read, by the reader's clock. A router reuses one reading for a while; rates refer to this time.
    pub at_us: u64,
    /// The admin listener of the router that read it; empty for a direct reading and in a router's own response.
    pub observed_by: String,
    /// `prefill`, `decode`, `both` or `standalone`: its own report, or else its pools.
    pub role: String,
    /// The model that it serves.
    pub model: Option<String>,
    /// Changes with each start of the engine.
    pub epoch: Option<String>,
    /// The source of the numbers.
    pub source: SnapshotSource,
    /// Why it could not be read, or not completely.
    pub error: Option<String>,
    /// Why it no longer computes.
    pub failed: Option<String>,
    /// Its standing in the router's pools, by leg.
    pub standing: BTreeMap<String, String>,
    /// Its requests from the routers in view.
    pub in_flight: Option<u64>,
    /// Its blocks by state.
    pub blocks: Option<BlockCounts>,
    /// Its total number of blocks, if nothing more is known.
    pub blocks_total: Option<u64>,
    /// Tokens of a block.
    pub block_size: Option<u64>,
    /// Share of blocks in use, from 0 to 1.
    pub kv_usage: Option<f64>,
    /// Its requests by phase.
    pub requests: BTreeMap<String, u64>,
    /// Number of live leases; it can exceed the number of listed ones.
    pub leases: Option<u64>,
    /// Leases opened since it started.
    pub leases_opened: Option<u64>,
    /// Leases ended since it started, by cause.
    pub releases: BTreeMap<String, u64>,
    /// Steps since it started.
    pub steps: Option<u64>,
}

/// A pool's blocks by state. The first six states add up to the total. `draining` and `stranded` count blocks of
/// leases; a block that two leases share can be in both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCounts {
    /// All blocks.
    pub total: u64,
    /// Unused, without known content.
    pub free: u64,
    /// Unused; a repeated prompt finds them.
    pub cached: u64,
    /// Held by running requests.
    pub active: u64,
    /// Held by a lease and by no running request.
    pub leased: u64,
    /// Being written by a transfer.
    pub landing: u64,
    /// Being copied to a lower tier.
    pub storing: u64,
    /// Held by ended leases until their readers are idle.
    pub draining: u64,
    /// Held by stranded leases; `None` if unknown.
    pub stranded: Option<u64>,
}

/// The state of a lease's request in the routers in view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "known", rename_all = "snake_case")]
pub enum RequestState {
    /// No router was read, or one did not answer.
    #[default]
    Unknown,
    /// A router has it in flight.
    InFlight {
        /// See [`PHASES`].
        phase: String,
    },
    /// The request has ended.
    Over {
        /// Its outcome.
        outcome: String,
        /// Milliseconds since its end.
        ms_ago: u64,
    },
    /// No router has it in flight or remembers it.
    Absent,
}

/// One live lease.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseView {
    /// The producer: `HOST:PORT`.
    pub engine: String,
    /// The data-parallel rank.
    pub rank: u64,
    /// The request that computed the blocks.
    pub request_id: String,
    /// Number of blocks.
    pub blocks: u64,
    /// `growing`, `offered`, `reading` or `draining`.
    pub state: String,
    /// Milliseconds since it was opened.
    pub age_ms: u64,
    /// Milliseconds until it expires; `None` while it grows.
    pub left_ms: Option<u64>,
    /// Readers that have finished.
    pub readers_done: u64,
    /// Readers that are expected.
    pub readers_expected: u64,
    /// The state of its request.
    pub request: RequestState,
    /// Whether it is stranded; `None` if unknown.
    pub stranded: Option<bool>,
    /// Why it is still held, as text.
    pub why: String,
}

impl LeaseView {
    /// Sets `stranded` and `why`.
    pub fn classify(&mut self) {
        let quiet = matches!(self.state.as_str(), "offered" | "growing");
        self.stranded = match &self.request {
            // An engine reads it, or it has ended and waits for its readers.
            _ if !quiet => Some(false),
            RequestState::Unknown => None,
            RequestState::InFlight { .. } => Some(false),
            RequestState::Over { ms_ago, .. } => Some(*ms_ago >= SETTLING_MS),
            // Younger ones may belong to a request that began between two readings.
            RequestState::Absent => Some(self.age_ms >= SETTLING_MS),
        };
        self.why = self.reason();
    }

    fn reason(&self) -> String {
        let readers = match self.readers_expected {
            0 | 1 => String::new(),
            expected => format!(", {} of {expected} are done", self.readers_done),
        };
        let held = match self.state.as_str() {
            "reading" => "a decode engine reads it",
            "draining" => "lease ended; its readers are not quiet yet",
            "growing" => "its prefill still computes",
            "offered" => "no decode engine has read it yet",
            other => return format!("its state is {other}"),
        };
        let is_read = matches!(self.state.as_str(), "reading" | "draining");
        let readers = if self.state == "draining" { String::new() } else { readers };
        // The state of the request comes first, because a narrow column cuts the end.
        match &self.request {
            RequestState::InFlight { phase } => {
                format!("request in flight ({}): {held}{readers}", phase_name(phase))
            }
            RequestState::Over { outcome, .. } if is_read => {
                format!("request ended ({}): {held}{readers}", outcome.replace('_', " "))
            }
            RequestState::Unknown => format!("{held}{readers}"),
            RequestState::Absent if is_read => format!("{held}{readers}"),
            RequestState::Over { outcome, ms_ago } => {
                let outcome = outcome.replace('_', " ");
                let settles = if *ms_ago < SETTLING_MS { "; release in progress" } else { "" };
                format!("request ended ({outcome}) {:.1} s ago{settles}", *ms_ago as f64 / 1e3)
            }
            RequestState::Absent if self.age_ms < SETTLING_MS => format!("{held}; just opened"),
            RequestState::Absent => "no known router has its request".to_owned(),
        }
    }
}

impl Snapshot {
    /// Classifies every lease, counts draining and stranded blocks, and sorts the lists. Must be called once all parts
    /// are present.
    pub fn finish(&mut self) {
        for lease in &mut self.leases {
            lease.classify();
        }
        self.leases.sort_by(|a, b| {
            b.age_ms.cmp(&a.age_ms).then_with(|| (&a.engine, &a.request_id).cmp(&(&b.engine, &b.request_id)))
        });
        // In the order in which a request reaches them.
        let place = |role: &str| match role {
            "prefill" => 0,
            "both" => 1,
            _ => 2,
        };
        self.engines.sort_by(|a, b| (place(&a.role), &a.engine).cmp(&(place(&b.role), &b.engine)));
        let all_covered =
            !self.routers.is_empty() && self.routers.iter().all(|router| router.error.is_none());
        for engine in &mut self.engines {
            let Some(blocks) = &mut engine.blocks else { continue };
            let of = |which: &dyn Fn(&LeaseView) -> bool| {
                let its = self.leases.iter().filter(|lease| lease.engine == engine.engine && which(lease));
                its.map(|lease| lease.blocks).sum::<u64>()
            };
            let lent = blocks.leased + blocks.active;
            blocks.draining = of(&|lease| lease.state == "draining").min(lent);
            let unknown = self.leases.iter().any(|l| l.engine == engine.engine && l.stranded.is_none());
            let stranded = of(&|lease| lease.stranded == Some(true)).min(lent);
            blocks.stranded = (all_covered && !unknown).then_some(stranded);
        }
        let unknown = !all_covered || self.leases.iter().any(|lease| lease.stranded.is_none());
        let stranded = || self.leases.iter().filter(|lease| lease.stranded == Some(true));
        self.stranded_leases = (!unknown).then(|| stranded().count() as u64);
        self.stranded_blocks = (!unknown).then(|| stranded().map(|lease| lease.blocks).sum());
    }
}

/// The display name of a phase.
#[must_use]
pub fn phase_name(phase: &str) -> &str {
    match phase {
        "queue" => "queued",
        "decode_pre_first" => "before first token",
        "decode_stream" => "mid-stream",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(state: &str, request: RequestState) -> LeaseView {
        LeaseView {
            engine: "p:1".to_owned(),
            request_id: "r".to_owned(),
            blocks: 4,
            state: state.to_owned(),
            age_ms: 10_000,
            left_ms: Some(20_000),
            request,
            ..LeaseView::default()
        }
    }

    fn over(ms_ago: u64) -> RequestState {
        RequestState::Over { outcome: "client_gone".to_owned(), ms_ago }
    }

    #[test]
    fn a_lease_without_a_reader_is_stranded_after_its_request_ends() {
        let flying = || RequestState::InFlight { phase: "gap".to_owned() };
        for (state, request, stranded) in [
            ("offered", flying(), Some(false)),
            ("offered", over(SETTLING_MS - 1), Some(false)),
            ("offered", over(SETTLING_MS), Some(true)),
            ("offered", RequestState::Absent, Some(true)),
            ("offered", RequestState::Unknown, None),
            ("growing", over(60_000), Some(true)),
            ("growing", RequestState::Unknown, None),
            ("reading", over(60_000), Some(false)),
            ("reading", RequestState::Unknown, Some(false)),
            ("draining", over(60_000), Some(false)),
        ] {
            let mut lease = lease(state, request);
            lease.classify();
            assert_eq!(lease.stranded, stranded, "{state} {:?}", lease.request);
            assert!(!lease.why.is_empty());
        }
        let mut young = LeaseView { age_ms: 3, ..lease("offered", RequestState::Absent) };
        young.classify();
        assert_eq!(young.stranded, Some(false), "its request may have begun between two readings");
    }

    #[test]
    fn stranded_blocks_are_known_only_if_every_router_answers() {
        let blocks = BlockCounts { total: 100, free: 90, leased: 10, ..BlockCounts::default() };
        let engine = EngineView { engine: "p:1".to_owned(), blocks: Some(blocks), ..EngineView::default() };
        let snapshot = Snapshot {
            routers: vec![RouterView::default()],
            engines: vec![engine],
            leases: vec![lease("offered", RequestState::Absent), lease("draining", RequestState::Absent)],
            ..Snapshot::default()
        };
        let stranded = |mut snapshot: Snapshot| {
            snapshot.finish();
            let blocks = snapshot.engines[0].blocks.clone().expect("block counts");
            (blocks.stranded, snapshot.stranded_leases, blocks.draining)
        };
        assert_eq!(stranded(snapshot.clone()), (Some(4), Some(1), 4));
        assert_eq!(stranded(Snapshot { routers: Vec::new(), ..snapshot.clone() }), (None, None, 4));
        let silent = RouterView { error: Some("no answer".to_owned()), ..RouterView::default() };
        assert_eq!(stranded(Snapshot { routers: vec![silent], ..snapshot.clone() }), (None, None, 4));
        let mut shared = snapshot;
        shared.leases.extend(std::iter::repeat_n(lease("offered", RequestState::Absent), 9));
        assert_eq!(stranded(shared).0, Some(10), "blocks that leases share are there once");
    }

    #[test]
    fn a_snapshot_round_trips_as_json() {
        let mut snapshot = Snapshot { leases: vec![lease("offered", over(700))], ..Snapshot::default() };
        snapshot.finish();
        let text = serde_json::to_string(&snapshot).expect("JSON");
        assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("a snapshot"), snapshot);
        assert_eq!(serde_json::from_str::<Snapshot>("{}").expect("an older router's"), Snapshot::default());
    }

    /// The paths of all values that are neither object nor list; counts by name are one value.
    fn paths(value: &serde_json::Value, path: &str, found: &mut std::collections::BTreeSet<String>) {
        const BY_NAME: [&str; 4] =
            ["requests.phases", "engines[].standing", "engines[].requests", "engines[].releases"];
        match value {
            serde_json::Value::Object(fields) if !BY_NAME.contains(&path) => {
                for (name, value) in fields {
                    let dot = if path.is_empty() { "" } else { "." };
                    paths(value, &format!("{path}{dot}{name}"), found);
                }
            }
            serde_json::Value::Array(list) => {
                list.iter().for_each(|value| paths(value, &format!("{path}[]"), found));
            }
            _ => drop(found.insert(path.to_owned())),
        }
    }

    #[test]
    fn the_page_documents_exactly_the_fields_of_a_snapshot() {
        let snapshot = Snapshot {
            routers: vec![RouterView::default()],
            requests: RequestsView { oldest: vec![RequestView::default()], ..RequestsView::default() },
            engines: vec![EngineView { blocks: Some(BlockCounts::default()), ..EngineView::default() }],
            leases: vec![
                lease("offered", over(700)),
                lease("offered", RequestState::InFlight { phase: "gap".into() }),
            ],
            ..Snapshot::default()
        };
        let mut found = std::collections::BTreeSet::new();
        paths(&serde_json::to_value(&snapshot).expect("JSON"), "", &mut found);
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/admin-api.md");
        let page = std::fs::read_to_string(page).expect("docs/reference/admin-api.md is there");
        let table =
            page.split_once("<!-- kv: begin -->").and_then(|(_, rest)| rest.split_once("<!-- kv: end -->"));
        let rows = table.expect("the table begins and ends").0.lines();
        let named = rows.filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned()));
        assert_eq!(
            named.collect::<std::collections::BTreeSet<_>>(),
            found,
            "docs/reference/admin-api.md, and the JSON"
        );
    }
}
