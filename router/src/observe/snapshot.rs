//! A deployment at one moment: every engine's blocks by state, the leases and why they are held, the requests by phase.
//! Pure: who asked the engines, and how, is elsewhere.
//!
//! The same value is the JSON of `GET /debug/kv` on the admin listener, what its page draws, and what `baton top` shows
//! and prints; so what is said of a lease is decided in one place, [`LeaseView::judge`].
//!
//! A lease is **stranded** when nobody reads it and no router in view has its request in flight any more: its blocks are
//! held for nobody until it is released or expires. A request that ended less than [`SETTLING_MS`] ago has its release on
//! the way. What a router that does not answer has in flight is not known, and neither, then, is what is stranded.

mod books;
mod merged;
mod timeline;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use timeline::{EngineEvents, Moment, Timeline, concerns};

/// For so long after a request's end a lease of it is not called stranded: its release takes a round trip, and the
/// router and its engines are not looked at in the same instant.
pub const SETTLING_MS: u64 = 500;

/// The phases of a request in flight, in the order of its life.
pub const PHASES: [&str; 7] =
    ["intake", "queue", "prefill", "gap", "decode_pre_first", "decode_stream", "ending"];

/// A deployment at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// When it was taken, in microseconds since the Unix epoch. Of several views together: when they were asked for, which
    /// is not when each of them was taken; see [`EngineView::at_us`].
    pub at_us: u64,
    /// The routers in view. None: only engines were asked.
    pub routers: Vec<RouterView>,
    /// What the routers have in flight.
    pub requests: Requests,
    /// Every engine: prefill engines first, each kind in the order of addresses.
    pub engines: Vec<EngineView>,
    /// Live leases, the oldest first; of each engine those that it lists.
    pub leases: Vec<LeaseView>,
    /// Blocks of stranded leases; none where that is not known.
    pub stranded_blocks: Option<u64>,
    /// Stranded leases; none where that is not known.
    pub stranded_leases: Option<u64>,
}

/// A router, as far as the deployment's state is concerned.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterView {
    /// Where its admin listener was found; nothing in what it says of itself.
    pub admin: String,
    /// What is running.
    pub version: String,
    /// Number of the configuration in effect.
    pub generation: u64,
    /// It takes no new requests.
    pub draining: bool,
    /// Requests in flight.
    pub in_flight: u64,
    /// Why it could not be asked.
    pub error: Option<String>,
}

/// Requests in flight.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Requests {
    /// How many.
    pub in_flight: u64,
    /// How many in each phase; see [`PHASES`].
    pub phases: BTreeMap<String, u64>,
    /// The oldest of them.
    pub oldest: Vec<RequestView>,
}

/// One request in flight.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestView {
    /// As engines know it.
    pub request_id: String,
    /// The model's name, once it is read.
    pub model: Option<String>,
    /// See [`PHASES`].
    pub phase: String,
    /// Since it arrived.
    pub age_ms: u64,
    /// Who was asked last.
    pub prefill_engine: Option<String>,
    /// Who was asked last.
    pub decode_engine: Option<String>,
}

/// Where an engine's numbers come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// It did not answer.
    #[default]
    None,
    /// Its `/metrics` alone: a stock engine.
    Metrics,
    /// Its books.
    DebugKv,
}

/// One engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineView {
    /// `HOST:PORT`.
    pub engine: String,
    /// When it was looked at, by the clock of whoever looked. A router shows one look for a while: rates are of this time.
    pub at_us: u64,
    /// The admin listener of the router whose look it is; nothing where it was asked directly, and in what a router says.
    pub observed_by: String,
    /// `prefill`, `decode` or `both`: what it says itself, or else the pools that it is in.
    pub role: String,
    /// The model that it serves.
    pub model: Option<String>,
    /// Changes when it is started anew.
    pub epoch: Option<String>,
    /// Where the numbers come from.
    pub source: Source,
    /// Why it could not be asked, or not completely.
    pub error: Option<String>,
    /// Why it computes no more.
    pub failed: Option<String>,
    /// Whether the router would choose it, by leg.
    pub standing: BTreeMap<String, String>,
    /// Requests of the routers in view that it works on.
    pub in_flight: Option<u64>,
    /// Its pool.
    pub blocks: Option<Blocks>,
    /// Blocks of its pool, where only that is known.
    pub blocks_total: Option<u64>,
    /// Tokens of a block.
    pub block_size: Option<u64>,
    /// Held blocks as a share from 0 to 1.
    pub kv_usage: Option<f64>,
    /// Its requests by phase.
    pub requests: BTreeMap<String, u64>,
    /// Live leases; more than are listed where there are many.
    pub leases: Option<u64>,
    /// Leases opened since it started.
    pub leases_opened: Option<u64>,
    /// Leases ended since it started, by cause.
    pub releases: BTreeMap<String, u64>,
    /// Steps since it started.
    pub steps: Option<u64>,
}

/// A pool's blocks by state. The first six add up to the total. `draining` and `stranded` are of leases, and a block that
/// two leases share is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Blocks {
    /// All.
    pub total: u64,
    /// Nobody's, and nothing is known to be in them.
    pub free: u64,
    /// Nobody's; a repeated prompt finds them.
    pub cached: u64,
    /// Of running requests.
    pub active: u64,
    /// Lent, and of no running request.
    pub leased: u64,
    /// Being written by a transfer.
    pub landing: u64,
    /// Being copied to a tier below.
    pub storing: u64,
    /// Of leases that are over, until their readers are quiet.
    pub draining: u64,
    /// Of leases that are held for nobody; none where that is not known.
    pub stranded: Option<u64>,
}

/// What the routers in view know of the request that a lease belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "known", rename_all = "snake_case")]
pub enum Request {
    /// No router was asked, or one did not answer.
    #[default]
    Unknown,
    /// One has it in flight.
    InFlight {
        /// See [`PHASES`].
        phase: String,
    },
    /// It is over.
    Over {
        /// How it ended.
        outcome: String,
        /// Since when.
        ms_ago: u64,
    },
    /// None has it, or remembers it.
    Absent,
}

/// One live lease.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseView {
    /// Whose blocks are lent: `HOST:PORT`.
    pub engine: String,
    /// The data-parallel rank.
    pub rank: u64,
    /// The request that computed them.
    pub request_id: String,
    /// How many.
    pub blocks: u64,
    /// `growing`, `offered`, `reading` or `draining`.
    pub state: String,
    /// Since it was opened.
    pub age_ms: u64,
    /// Until it expires; none while it grows.
    pub left_ms: Option<u64>,
    /// Readers that have everything.
    pub readers_done: u64,
    /// Readers that it waits for.
    pub readers_expected: u64,
    /// What is known of its request.
    pub request: Request,
    /// Whether it is held for nobody; none where that is not known.
    pub stranded: Option<bool>,
    /// Why it is still held, for people.
    pub why: String,
}

impl LeaseView {
    /// Decides whether it is stranded and says why it is held.
    pub fn judge(&mut self) {
        let quiet = matches!(self.state.as_str(), "offered" | "growing");
        self.stranded = match &self.request {
            // Somebody reads it, or it has ended and waits for its readers.
            _ if !quiet => Some(false),
            Request::Unknown => None,
            Request::InFlight { .. } => Some(false),
            Request::Over { ms_ago, .. } => Some(*ms_ago >= SETTLING_MS),
            // Younger ones may belong to a request that began between two looks.
            Request::Absent => Some(self.age_ms >= SETTLING_MS),
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
        // Whether its request lives comes first: a narrow column cuts the end.
        match &self.request {
            Request::InFlight { phase } => {
                format!("request in flight ({}): {held}{readers}", phase_name(phase))
            }
            Request::Over { outcome, .. } if is_read => {
                format!("request ended ({}): {held}{readers}", outcome.replace('_', " "))
            }
            Request::Unknown => format!("{held}{readers}"),
            Request::Absent if is_read => format!("{held}{readers}"),
            Request::Over { outcome, ms_ago } => {
                let outcome = outcome.replace('_', " ");
                let settles = if *ms_ago < SETTLING_MS { "; release in progress" } else { "" };
                format!("request ended ({outcome}) {:.1} s ago{settles}", *ms_ago as f64 / 1e3)
            }
            Request::Absent if self.age_ms < SETTLING_MS => format!("{held}; just opened"),
            Request::Absent => "no known router has its request".to_owned(),
        }
    }
}

impl Snapshot {
    /// Judges every lease, counts what is draining and stranded, and puts everything in order. To be called once all
    /// parts are there.
    pub fn settle(&mut self) {
        for lease in &mut self.leases {
            lease.judge();
        }
        self.leases.sort_by(|a, b| {
            b.age_ms.cmp(&a.age_ms).then_with(|| (&a.engine, &a.request_id).cmp(&(&b.engine, &b.request_id)))
        });
        // In the order in which a request meets them.
        let place = |role: &str| match role {
            "prefill" => 0,
            "both" => 1,
            _ => 2,
        };
        self.engines.sort_by(|a, b| (place(&a.role), &a.engine).cmp(&(place(&b.role), &b.engine)));
        let sighted = !self.routers.is_empty() && self.routers.iter().all(|router| router.error.is_none());
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
            blocks.stranded = (sighted && !unknown).then_some(stranded);
        }
        let unknown = !sighted || self.leases.iter().any(|lease| lease.stranded.is_none());
        let stranded = || self.leases.iter().filter(|lease| lease.stranded == Some(true));
        self.stranded_leases = (!unknown).then(|| stranded().count() as u64);
        self.stranded_blocks = (!unknown).then(|| stranded().map(|lease| lease.blocks).sum());
    }
}

/// A phase of a request for people.
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

    pub(super) fn lease(state: &str, request: Request) -> LeaseView {
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

    fn over(ms_ago: u64) -> Request {
        Request::Over { outcome: "client_gone".to_owned(), ms_ago }
    }

    #[test]
    fn a_lease_is_stranded_when_nobody_reads_it_and_its_request_is_over() {
        let flying = || Request::InFlight { phase: "gap".to_owned() };
        for (state, request, stranded) in [
            ("offered", flying(), Some(false)),
            ("offered", over(SETTLING_MS - 1), Some(false)),
            ("offered", over(SETTLING_MS), Some(true)),
            ("offered", Request::Absent, Some(true)),
            ("offered", Request::Unknown, None),
            ("growing", over(60_000), Some(true)),
            ("growing", Request::Unknown, None),
            ("reading", over(60_000), Some(false)),
            ("reading", Request::Unknown, Some(false)),
            ("draining", over(60_000), Some(false)),
        ] {
            let mut lease = lease(state, request);
            lease.judge();
            assert_eq!(lease.stranded, stranded, "{state} {:?}", lease.request);
            assert!(!lease.why.is_empty());
        }
        let mut young = LeaseView { age_ms: 3, ..lease("offered", Request::Absent) };
        young.judge();
        assert_eq!(young.stranded, Some(false), "its request may have begun between two looks");
    }

    #[test]
    fn what_is_stranded_is_known_only_where_every_router_answers() {
        let blocks = Blocks { total: 100, free: 90, leased: 10, ..Blocks::default() };
        let engine = EngineView { engine: "p:1".to_owned(), blocks: Some(blocks), ..EngineView::default() };
        let snapshot = Snapshot {
            routers: vec![RouterView::default()],
            engines: vec![engine],
            leases: vec![lease("offered", Request::Absent), lease("draining", Request::Absent)],
            ..Snapshot::default()
        };
        let stranded = |mut snapshot: Snapshot| {
            snapshot.settle();
            let blocks = snapshot.engines[0].blocks.clone().expect("books");
            (blocks.stranded, snapshot.stranded_leases, blocks.draining)
        };
        assert_eq!(stranded(snapshot.clone()), (Some(4), Some(1), 4));
        assert_eq!(stranded(Snapshot { routers: Vec::new(), ..snapshot.clone() }), (None, None, 4));
        let deaf = RouterView { error: Some("no answer".to_owned()), ..RouterView::default() };
        assert_eq!(stranded(Snapshot { routers: vec![deaf], ..snapshot.clone() }), (None, None, 4));
        let mut shared = snapshot;
        shared.leases.extend(std::iter::repeat_n(lease("offered", Request::Absent), 9));
        assert_eq!(stranded(shared).0, Some(10), "blocks that leases share are there once");
    }

    #[test]
    fn a_snapshot_survives_json() {
        let mut snapshot = Snapshot { leases: vec![lease("offered", over(700))], ..Snapshot::default() };
        snapshot.settle();
        let text = serde_json::to_string(&snapshot).expect("JSON");
        assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("a snapshot"), snapshot);
        assert_eq!(serde_json::from_str::<Snapshot>("{}").expect("an older router's"), Snapshot::default());
    }

    /// The paths of all values that are no object and no list; what is counted by name is one value.
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
    fn the_page_has_every_field_of_a_snapshot_and_no_other() {
        let snapshot = Snapshot {
            routers: vec![RouterView::default()],
            requests: Requests { oldest: vec![RequestView::default()], ..Requests::default() },
            engines: vec![EngineView { blocks: Some(Blocks::default()), ..EngineView::default() }],
            leases: vec![
                lease("offered", over(700)),
                lease("offered", Request::InFlight { phase: "gap".into() }),
            ],
            ..Snapshot::default()
        };
        let mut told = std::collections::BTreeSet::new();
        paths(&serde_json::to_value(&snapshot).expect("JSON"), "", &mut told);
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/admin-api.md");
        let page = std::fs::read_to_string(page).expect("docs/reference/admin-api.md is there");
        let table =
            page.split_once("<!-- kv: begin -->").and_then(|(_, rest)| rest.split_once("<!-- kv: end -->"));
        let rows = table.expect("the table begins and ends").0.lines();
        let named = rows.filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned()));
        assert_eq!(
            named.collect::<std::collections::BTreeSet<_>>(),
            told,
            "docs/reference/admin-api.md, and the JSON"
        );
    }
}
