//! Counters of one core, and the text of `/metrics`: names and labels as Baton's engine has them, and the reason of a
//! failed load.
//!
//! All names begin with `baton_`, so that the text can follow vLLM's own page. Labels come from fixed lists: a text of
//! a peer counts as `other`.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_connector::exchange;
use baton_connector::fetch::{FailureKind, ReleaseReason};
use baton_connector::lease::CloseCause;
use baton_connector::ledger::ClosedLease;

use crate::config::Identity;

/// Buckets of the time from opening to end of a lease.
const HELD_SECONDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// An engine's own reasons for the end of a lease.
const OWN_REASONS: [&str; 4] = ["client_gone", "aborted", "shutdown", "router_release"];

/// The statuses with which the front end refuses a request, and the reasons of the scheduler.
const REFUSALS: [&str; 11] = [
    "refused_400",
    "refused_401",
    "refused_403",
    "refused_404",
    "refused_413",
    "refused_422",
    "refused_429",
    "refused_499",
    "refused_500",
    "refused_503",
    "consumer_rejected",
];

/// Reasons of handoffs that are not loaded: malformed or not for this engine, and of a producer without the contract.
/// The prompt is computed here, whatever the policy.
const NOT_LOADED: [&str; 2] = ["invalid", "stock"];

/// The result of a notice that was not delivered before the lease's expiry.
pub(crate) const UNDELIVERED: &str = "undelivered";

/// The label of a reason.
pub(crate) fn known_reason(reason: &str) -> &'static str {
    let of_leases = CloseCause::ALL.map(CloseCause::label);
    let of_consumers = ReleaseReason::ALL.map(ReleaseReason::label);
    let of_routers = exchange::SettlementCause::ALL.map(exchange::SettlementCause::label);
    let known = OWN_REASONS.into_iter().chain(of_leases).chain(of_consumers).chain(of_routers);
    known.into_iter().find(|known| *known == reason).unwrap_or("other")
}

/// The label of a failed load, as Baton's engine names the failures of a fetch.
fn failure_label(reason: &str) -> &'static str {
    let label = match reason {
        "lease_over" | "wait_expired" => FailureKind::Gone.label(),
        "forged" => FailureKind::Refused.label(),
        other => other,
    };
    let known = FailureKind::ALL.map(FailureKind::label).into_iter().chain(NOT_LOADED);
    known.into_iter().find(|known| *known == label).unwrap_or("other")
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct CoreMetrics {
    /// In exposition format.
    labels: String,
    /// The handling of a load that failed.
    policy: &'static str,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    leases_opened: u64,
    leased_blocks: u64,
    released: BTreeMap<&'static str, u64>,
    held: BTreeMap<&'static str, HeldSeconds>,
    /// Blocks times seconds of expired leases.
    stranded: f64,
    /// By policy and reason.
    load_failures: BTreeMap<(&'static str, &'static str), u64>,
    transfers: u64,
    /// Loads from stock producers, used and refused.
    unverified: [u64; 2],
    rejections: BTreeMap<&'static str, u64>,
    /// By reason and result.
    notices: BTreeMap<(&'static str, &'static str), u64>,
    late: u64,
}

#[derive(Debug, Default)]
struct HeldSeconds {
    buckets: [u64; HELD_SECONDS.len() + 1],
    sum: f64,
}

/// Values that the core has when a page is written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Levels {
    /// Live leases.
    pub(crate) leases: usize,
    /// Late messages that the ledger counted.
    pub(crate) late: u64,
    /// Blocks by state: free, cached, active, leased, landing.
    pub(crate) blocks: [usize; 5],
}

impl CoreMetrics {
    /// Metrics with the labels of this engine. Series that alerts watch begin at zero.
    pub(crate) fn new(identity: &Identity, policy: &'static str) -> Self {
        let model = identity.model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let counts = Counts {
            released: CloseCause::ALL.into_iter().map(|cause| (cause.label(), 0)).collect(),
            load_failures: FailureKind::ALL.into_iter().map(|kind| ((policy, kind.label()), 0)).collect(),
            notices: ReleaseReason::ALL
                .into_iter()
                .map(|reason| ((reason.label(), UNDELIVERED), 0))
                .collect(),
            ..Counts::default()
        };
        let labels = format!("model_name=\"{model}\",engine=\"{}\"", identity.rank);
        Self { labels, policy, counts: Mutex::new(counts) }
    }

    /// A lease was opened over this many blocks.
    pub(crate) fn lease_opened(&self, blocks: usize) {
        let mut counts = self.lock();
        counts.leases_opened += 1;
        counts.leased_blocks += blocks as u64;
    }

    /// A lease has ended.
    pub(crate) fn lease_closed(&self, lease: &ClosedLease) {
        let seconds = lease.lifetime.as_secs_f64();
        let mut counts = self.lock();
        *counts.released.entry(known_reason(&lease.reason)).or_default() += 1;
        let held = counts.held.entry(lease.cause.label()).or_default();
        held.buckets[HELD_SECONDS.partition_point(|bound| *bound < seconds)] += 1;
        held.sum += seconds;
        if lease.cause == CloseCause::Expired {
            counts.stranded += seconds * lease.blocks.len() as f64;
        }
    }

    /// A load is verified.
    pub(crate) fn loaded(&self) {
        self.lock().transfers += 1;
    }

    /// A load from a stock producer has ended, which confirms nothing.
    pub(crate) fn unverified(&self, used: bool) {
        self.lock().unverified[usize::from(!used)] += 1;
    }

    /// A handoff was not loaded, or its blocks are not used.
    pub(crate) fn load_failed(&self, reason: &str) {
        let reason = failure_label(reason);
        let policy = if NOT_LOADED.contains(&reason) { "recompute" } else { self.policy };
        *self.lock().load_failures.entry((policy, reason)).or_default() += 1;
    }

    /// A request with a handoff was refused before the scheduler knew it.
    pub(crate) fn rejected(&self, reason: &str) {
        let known = REFUSALS.into_iter().find(|known| *known == reason).unwrap_or("other");
        *self.lock().rejections.entry(known).or_default() += 1;
    }

    /// A notice was answered, or given up.
    pub(crate) fn notice(&self, reason: &str, result: &'static str) {
        *self.lock().notices.entry((known_reason(reason), result)).or_default() += 1;
    }

    /// A late or unknown id changed nothing.
    pub(crate) fn late(&self) {
        self.lock().late += 1;
    }

    /// Late and unknown ids so far.
    pub(crate) fn late_events(&self) -> u64 {
        self.lock().late
    }

    /// The page in Prometheus' text format.
    pub(crate) fn render(&self, levels: &Levels) -> String {
        let counts = self.lock();
        let mut page = Page { text: String::new(), labels: &self.labels };
        page.family(
            "baton_early_rejections_total",
            "counter",
            "Requests with a handoff that the engine refused, releasing their lease.",
        );
        page.by_label("baton_early_rejections_total", "reason", &counts.rejections);
        page.family("baton_kv_blocks", "gauge", "KV blocks by state.");
        for (state, blocks) in ["free", "cached", "active", "leased", "landing"].iter().zip(levels.blocks) {
            page.line("baton_kv_blocks", &format!(",state=\"{state}\""), blocks);
        }
        page.single(
            "baton_kv_leased_blocks_total",
            "counter",
            "Blocks of opened leases.",
            counts.leased_blocks,
        );
        page.single("baton_kv_leases", "gauge", "Live leases.", levels.leases);
        page.single("baton_kv_leases_opened_total", "counter", "Leases opened.", counts.leases_opened);
        page.family("baton_kv_load_failures_total", "counter", "Failed fetches.");
        for ((policy, reason), count) in &counts.load_failures {
            let labels = format!(",policy=\"{policy}\",reason=\"{reason}\"");
            page.line("baton_kv_load_failures_total", &labels, count);
        }
        page.family("baton_kv_release_total", "counter", "Ended leases by cause.");
        page.by_label("baton_kv_release_total", "cause", &counts.released);
        let help = "Blocks times seconds of leases that ended by expiry.";
        page.single("baton_kv_stranded_block_seconds", "gauge", help, counts.stranded);
        page.family("baton_kv_transfers_total", "counter", "Fetches with valid blocks, by transport.");
        page.line("baton_kv_transfers_total", ",transport=\"nixl\"", counts.transfers);
        page.family(
            "baton_kv_unverified_loads_total",
            "counter",
            "Fetches from producers that confirm nothing, by result.",
        );
        for (result, count) in ["used", "refused"].iter().zip(counts.unverified) {
            page.line("baton_kv_unverified_loads_total", &format!(",result=\"{result}\""), count);
        }
        let help = "Late or repeated events that changed nothing.";
        page.single("baton_late_events_total", "counter", help, counts.late + levels.late);
        page.family("baton_lease_held_seconds", "histogram", "Time from opening to end of a lease.");
        counts.held.iter().for_each(|(cause, held)| page.histogram("baton_lease_held_seconds", cause, held));
        page.family("baton_release_notices_total", "counter", "Release notices to producers.");
        for ((reason, result), count) in &counts.notices {
            let labels = format!(",reason=\"{reason}\",result=\"{result}\"");
            page.line("baton_release_notices_total", &labels, count);
        }
        page.text.push('\n');
        page.text
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A page that is being written.
struct Page<'a> {
    text: String,
    labels: &'a str,
}

impl Page<'_> {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        // Writing to a text cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One series; `more` are labels behind those of the engine, each with a comma.
    fn line(&mut self, name: &str, more: &str, value: impl Display) {
        let _ = writeln!(self.text, "{name}{{{}{more}}} {value}", self.labels);
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.line(name, "", value);
    }

    fn by_label(&mut self, name: &str, label: &str, counts: &BTreeMap<&'static str, u64>) {
        for (value, count) in counts {
            self.line(name, &format!(",{label}=\"{value}\""), count);
        }
    }

    fn histogram(&mut self, name: &str, cause: &str, held: &HeldSeconds) {
        let mut count = 0;
        for (at, of_bucket) in held.buckets.iter().enumerate() {
            count += of_bucket;
            let bound = HELD_SECONDS.get(at).map_or("+Inf".to_owned(), f64::to_string);
            self.line(&format!("{name}_bucket"), &format!(",cause=\"{cause}\",le=\"{bound}\""), count);
        }
        let cause = format!(",cause=\"{cause}\"");
        self.line(&format!("{name}_sum"), &cause, held.sum);
        self.line(&format!("{name}_count"), &cause, count);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_connector::{BlockId, Handle, RequestId};

    use super::*;

    #[test]
    fn a_page_has_every_family_with_bounded_labels() {
        let identity = Identity { model: "a \"b\"".into(), rank: 2, ..Identity::default() };
        let metrics = CoreMetrics::new(&identity, "fail");
        metrics.lease_opened(3);
        metrics.lease_closed(&ClosedLease {
            handle: Handle(1),
            request: RequestId::new("r").expect("an id"),
            blocks: vec![BlockId(1), BlockId(2)],
            cause: CloseCause::Expired,
            reason: "a peer's own words".into(),
            lifetime: Duration::from_secs(2),
            readers: (0, 1),
        });
        metrics.rejected("refused_404");
        metrics.rejected("refused_999");
        metrics.notice("load_failed", "released");
        metrics.late();
        metrics.unverified(false);
        for reason in ["lease_over", "wait_expired", "forged", "stock", "a peer's own words"] {
            metrics.load_failed(reason);
        }
        let page = metrics.render(&Levels { leases: 4, late: 2, blocks: [9, 8, 7, 6, 5] });
        let labels = r#"model_name="a \"b\"",engine="2""#;
        for line in [
            format!("baton_kv_leases{{{labels}}} 4"),
            format!("baton_kv_blocks{{{labels},state=\"landing\"}} 5"),
            format!("baton_kv_release_total{{{labels},cause=\"other\"}} 1"),
            format!("baton_kv_release_total{{{labels},cause=\"lease_expired\"}} 0"),
            format!("baton_kv_stranded_block_seconds{{{labels}}} 4"),
            format!("baton_lease_held_seconds_bucket{{{labels},cause=\"lease_expired\",le=\"5\"}} 1"),
            format!("baton_lease_held_seconds_count{{{labels},cause=\"lease_expired\"}} 1"),
            format!("baton_early_rejections_total{{{labels},reason=\"other\"}} 1"),
            format!("baton_release_notices_total{{{labels},reason=\"load_failed\",result=\"released\"}} 1"),
            format!("baton_kv_unverified_loads_total{{{labels},result=\"refused\"}} 1"),
            format!("baton_late_events_total{{{labels}}} 3"),
            format!("baton_kv_load_failures_total{{{labels},policy=\"fail\",reason=\"unreachable\"}} 0"),
            format!("baton_kv_load_failures_total{{{labels},policy=\"fail\",reason=\"gone\"}} 2"),
            format!("baton_kv_load_failures_total{{{labels},policy=\"fail\",reason=\"refused\"}} 1"),
            format!("baton_kv_load_failures_total{{{labels},policy=\"fail\",reason=\"other\"}} 1"),
            format!("baton_kv_load_failures_total{{{labels},policy=\"recompute\",reason=\"stock\"}} 1"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
    }
}
