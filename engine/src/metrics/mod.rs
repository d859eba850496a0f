//! The metrics of an engine. Known metrics have vLLM's names (`vllm:*`), all others begin with `baton_*`: blocks by
//! state, ended leases by cause, release notices, stranded block-seconds.
//!
//! The registry belongs to one engine, not to the process: two engines in one process do not mix. The cores of one
//! engine (data-parallel ranks) share it, each with its own label `engine`, as in vLLM.
//!
//! Handles are cached: only the first event with its labels takes the registry's lock (`handles.rs`).

use std::sync::Arc;
use std::time::Duration;

use baton_connector::lease::CloseCause;
use baton_connector::ledger::ClosedLease;
use baton_connector::{exchange, fetch};
use metrics::{Counter, Gauge, Histogram, Label, SharedString};

use self::handles::HandleCache;
use self::pressure::PressureMetrics;
use self::registry::Registry;
use self::steps::StepMetrics;
use crate::blocks::pool::BlockUsage;
use crate::compute::cuda::shared_kv_pool::CopyCounters;
use crate::kv_events::KvEventMetrics;
use crate::scheduler::sequence::FinishReason;
use crate::scheduler::{SchedulerLoad, StepTiming};

/// Buckets of `vllm:time_to_first_token_seconds`.
const TTFT_SECONDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Buckets of `vllm:inter_token_latency_seconds`.
const ITL_SECONDS: [f64; 18] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0];
/// Buckets of `vllm:e2e_request_latency_seconds`.
const E2E_SECONDS: [f64; 20] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
];
/// Buckets of transfers and of times to release.
const SHORT_SECONDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// Buckets of `vllm:nixl_bytes_transferred`, vLLM's: from 2 KiB to 8 GiB by fours.
const TRANSFER_BYTES: [f64; 12] = [
    2048.0,
    8192.0,
    32768.0,
    131_072.0,
    524_288.0,
    2_097_152.0,
    8_388_608.0,
    33_554_432.0,
    134_217_728.0,
    536_870_912.0,
    2_147_483_648.0,
    8_589_934_592.0,
];

mod drafts;
mod handles;
#[cfg(test)]
mod page;
mod pressure;
mod registry;
mod steps;
mod tiers;
pub use self::drafts::DraftMetrics;
pub use self::tiers::TierMetrics;

/// The engine's own reasons for the end of a lease.
const OWN_REASONS: [&str; 4] = ["client_gone", "aborted", "shutdown", "router_release"];

/// The result of a release notice that was not delivered before the lease's expiry.
pub const UNDELIVERED: &str = "undelivered";

/// The label of a reason. A peer may send any text, which is only logged.
fn known_reason(reason: &str) -> &'static str {
    let of_leases = CloseCause::ALL.map(CloseCause::label);
    let of_consumers = fetch::ReleaseReason::ALL.map(fetch::ReleaseReason::label);
    let of_routers = exchange::SettlementCause::ALL.map(exchange::SettlementCause::label);
    let known = OWN_REASONS.into_iter().chain(of_leases).chain(of_consumers).chain(of_routers);
    known.into_iter().find(|known| *known == reason).unwrap_or("other")
}

/// See the module's documentation.
pub struct EngineMetrics {
    /// One for all engine cores of the process.
    registry: Arc<Registry>,
    labels: Vec<Label>,
    waiting: Gauge,
    running: Gauge,
    fetching: Gauge,
    usage: Gauge,
    loading: Gauge,
    blocks: [Gauge; 6],
    leases: Gauge,
    pressure: PressureMetrics,
    ignored: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    external_queries: Counter,
    external_hits: Counter,
    ttft: Histogram,
    itl: Histogram,
    e2e: Histogram,
    steps: StepMetrics,
    transfer_seconds: Histogram,
    transfer_bytes: Histogram,
    transfers_failed: Counter,
    leases_opened: Counter,
    early_leases: Counter,
    leased_blocks: Counter,
    expired: Counter,
    stranded: Gauge,
    ended: HandleCache<Counter>,
    /// Fetches, and their bytes.
    carried: HandleCache<(Counter, Counter)>,
    load_failures: HandleCache<Counter>,
    releases: HandleCache<Counter>,
    held: HandleCache<Histogram>,
    notices: HandleCache<Counter>,
    rejections: HandleCache<Counter>,
}

impl EngineMetrics {
    /// Metrics labelled with the served model's name.
    #[must_use]
    pub fn new(model: &str) -> Self {
        Self::labelled(model, 0, Arc::default())
    }

    /// Metrics of another engine core of the same process; one exposition contains both.
    #[must_use]
    pub fn sibling(&self, model: &str, rank: usize) -> Self {
        Self::labelled(model, rank, Arc::clone(&self.registry))
    }

    fn labelled(model: &str, rank: usize, registry: Arc<Registry>) -> Self {
        let labels = vec![Label::new("model_name", model.to_owned()), Label::new("engine", rank.to_string())];
        let make = Registrar { registry: &registry, labels: &labels };
        let states = ["free", "cached", "active", "leased", "landing", "storing"];
        let reasons = fetch::ReleaseReason::ALL.map(fetch::ReleaseReason::label);
        reasons.into_iter().for_each(|reason| make.notices(reason, UNDELIVERED).increment(0));
        Self {
            waiting: make.gauge("vllm:num_requests_waiting", "Requests in the queue."),
            running: make.gauge("vllm:num_requests_running", "Requests in the batch."),
            fetching: make.gauge("baton_requests_fetching", "Requests that wait for a transfer."),
            loading: make
                .gauge("baton_requests_loading", "Requests that wait for blocks from an offload tier."),
            usage: make.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1."),
            blocks: states.map(|state| {
                make.gauge_labelled("baton_kv_blocks", "KV blocks by state.", &[Label::new("state", state)])
            }),
            leases: make.gauge("baton_kv_leases", "Live leases."),
            pressure: PressureMetrics::new(&make),
            ignored: make.counter("baton_late_events_total", "Late or repeated events that changed nothing."),
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Prompt tokens."),
            generation_tokens: make.counter("vllm:generation_tokens_total", "Generated tokens."),
            prefix_queries: make
                .counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            prefix_hits: make
                .counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            external_queries: make.counter(
                "vllm:external_prefix_cache_queries_total",
                "Prompt tokens of requests with a handoff.",
            ),
            external_hits: make
                .counter("vllm:external_prefix_cache_hits_total", "Prompt tokens fetched from a producer."),
            ttft: make.histogram(
                "vllm:time_to_first_token_seconds",
                "Time from arrival to the first token.",
                &TTFT_SECONDS,
            ),
            itl: make.histogram(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of a choice. 0 for tokens of the same step.",
                &ITL_SECONDS,
            ),
            e2e: make.histogram(
                "vllm:e2e_request_latency_seconds",
                "Time from arrival to the end of a choice.",
                &E2E_SECONDS,
            ),
            steps: StepMetrics::new(&make),
            transfer_seconds: make.histogram(
                "vllm:nixl_xfer_time_seconds",
                "Time of one fetch, for all transports.",
                &SHORT_SECONDS,
            ),
            transfer_bytes: make.histogram(
                "vllm:nixl_bytes_transferred",
                "Bytes of one fetch.",
                &TRANSFER_BYTES,
            ),
            transfers_failed: make
                .counter("vllm:nixl_num_failed_transfers", "Fetches that delivered no blocks."),
            leases_opened: make.counter("baton_kv_leases_opened_total", "Leases opened."),
            early_leases: make
                .counter("baton_kv_early_leases_total", "Leases opened while the prefill still computed."),
            leased_blocks: make.counter("baton_kv_leased_blocks_total", "Blocks of opened leases."),
            // Zero from the start: of a series that begins with its first event, an alert sees no increase.
            expired: make.counter("vllm:nixl_num_kv_expired_reqs", "Leases that ended by expiry."),
            stranded: make.gauge(
                "baton_kv_stranded_block_seconds",
                "Blocks times seconds of leases that ended by expiry.",
            ),
            ended: HandleCache::default(),
            carried: HandleCache::default(),
            load_failures: HandleCache::default(),
            releases: HandleCache::default(),
            held: HandleCache::default(),
            notices: HandleCache::default(),
            rejections: HandleCache::default(),
            registry,
            labels,
        }
    }

    /// The exposition text of `/metrics`.
    #[must_use]
    pub fn render(&self) -> String {
        self.registry.render()
    }

    /// Publishes the state of the scheduler, after each step.
    pub fn publish(&self, usage: BlockUsage, load: SchedulerLoad, leases: usize) {
        self.waiting.set(load.waiting as f64);
        self.running.set(load.running as f64);
        self.fetching.set((load.fetching + load.stopping) as f64);
        self.loading.set(load.loading as f64);
        self.usage.set(usage.held_share());
        let states = [usage.free, usage.cached, usage.active, usage.leased, usage.landing, usage.storing];
        for (gauge, blocks) in self.blocks.iter().zip(states) {
            gauge.set(blocks as f64);
        }
        self.leases.set(leases as f64);
        self.pressure.publish(&load);
        self.ignored.absolute(load.ignored);
    }

    /// A sequence's first token.
    pub fn first_token(&self, since_arrival: Duration, prompt: usize, cached: usize, fetched: usize) {
        self.ttft.record(since_arrival.as_secs_f64());
        self.prompt_tokens.increment(prompt as u64);
        self.generation_tokens.increment(1);
        self.prefix_queries.increment(prompt as u64);
        self.prefix_hits.increment(cached as u64);
        self.external_hits.increment(fetched as u64);
    }

    /// A prompt with a handoff.
    pub fn handed_off(&self, prompt: usize) {
        self.external_queries.increment(prompt as u64);
    }

    /// Any token after the first.
    pub fn next_token(&self, since_last: Duration) {
        self.itl.record(since_last.as_secs_f64());
        self.generation_tokens.increment(1);
    }

    /// A sequence's end.
    pub fn finished(&self, reason: FinishReason, since_arrival: Duration) {
        self.e2e.record(since_arrival.as_secs_f64());
        let help = "Ended sequences by reason, including aborts and errors.";
        let label = reason.as_str();
        let make = || self.make().counter_with("vllm:request_success_total", help, "finished_reason", label);
        self.ended.with([label, ""], make, |counter| counter.increment(1));
    }

    /// The time target of steps; zero for none.
    pub fn step_target(&self, target: Duration) {
        self.steps.set_target(target);
    }

    /// A step has ended.
    pub fn step(&self, timing: StepTiming) {
        self.steps.record(timing);
    }

    /// Counts a fetch with valid blocks.
    pub fn transfer(&self, took: Duration, bytes: u64) {
        self.transfer_seconds.record(took.as_secs_f64());
        self.transfer_bytes.record(bytes as f64);
    }

    /// Counts a fetch without valid blocks.
    pub fn transfer_failed(&self) {
        self.transfers_failed.increment(1);
    }

    /// The transport of a valid fetch.
    pub fn carried(&self, transport: &'static str, bytes: u64) {
        let make = || {
            let make = self.make();
            let help = "Fetches with valid blocks, by transport.";
            let fetches = make.counter_with("baton_kv_transfers_total", help, "transport", transport);
            let help = "Bytes of fetches with valid blocks, by transport.";
            (fetches, make.counter_with("baton_kv_transfer_bytes_total", help, "transport", transport))
        };
        self.carried.with([transport, ""], make, |(fetches, sum)| {
            fetches.increment(1);
            sum.increment(bytes);
        });
    }

    /// Counters of blocks copied between a device's own memory and host memory.
    #[must_use]
    pub fn copy_counters(&self) -> CopyCounters {
        let to = |side| {
            let help = "Blocks copied between a device's own memory and its mirror in host memory, by destination \
                (`device_in_step`: while a step waited).";
            self.make().counter_with("baton_kv_mirror_blocks_total", help, "to", side)
        };
        CopyCounters { to_host: to("host"), to_device: to("device"), in_step: to("device_in_step") }
    }

    /// The size of the mirror of a pool in a device's memory; 0 without a mirror.
    pub fn mirror_bytes(&self, bytes: usize) {
        let help =
            "Host memory that mirrors a pool in a device's own memory; 0 for an engine without handoffs.";
        self.make().gauge("baton_kv_mirror_bytes", help).set(bytes as f64);
    }

    /// The state of NIXL, and the path of its library (`baton_nixl_info`).
    pub fn nixl(&self, state: &'static str, library: &str) {
        let labels = [Label::new("state", state), Label::new("library", library.to_owned())];
        let help = "State of NIXL, as labels: `disabled`, `not_found` (another transport is used), or `loaded`, with its file.";
        self.make().gauge_labelled("baton_nixl_info", help, &labels).set(1.0);
    }

    /// A failed fetch, and its handling.
    pub fn load_failed(&self, policy: &'static str) {
        let make =
            || self.make().counter_with("baton_kv_load_failures_total", "Failed fetches.", "policy", policy);
        self.load_failures.with([policy, ""], make, |counter| counter.increment(1));
    }

    /// A lease was opened over this many blocks.
    pub fn lease_opened(&self, blocks: u64) {
        self.leases_opened.increment(1);
        self.leased_blocks.increment(blocks);
    }

    /// A lease was opened before the end of its prefill.
    pub fn early_lease(&self) {
        self.early_leases.increment(1);
    }

    /// A lease has ended.
    pub fn lease_settled(&self, lease: &ClosedLease) {
        let reason = known_reason(&lease.reason);
        let help = "Ended leases by cause.";
        let make = || self.make().counter_with("baton_kv_release_total", help, "cause", reason);
        self.releases.with([reason, ""], make, |counter| counter.increment(1));
        let (held, cause) = (lease.lifetime.as_secs_f64(), lease.cause.label());
        let help = "Time from opening to end of a lease.";
        let make = || {
            let cause = [Label::new("cause", cause)];
            self.make().histogram_labelled("baton_lease_held_seconds", help, &SHORT_SECONDS, &cause)
        };
        self.held.with([cause, ""], make, |histogram| histogram.record(held));
        if lease.cause == CloseCause::Expired {
            self.expired.increment(1);
            self.stranded.increment(held * lease.blocks.len() as f64);
        }
    }

    /// A release notice was answered, or given up.
    pub fn notice(&self, reason: &'static str, result: &'static str) {
        self.notices.with(
            [reason, result],
            || self.make().notices(reason, result),
            |counter| counter.increment(1),
        );
    }

    /// A request with a handoff was refused before it was queued.
    pub fn early_rejection(&self, reason: &'static str) {
        let help = "Requests with a handoff that the engine refused, releasing their lease.";
        let make = || self.make().counter_with("baton_early_rejections_total", help, "reason", reason);
        self.rejections.with([reason, ""], make, |counter| counter.increment(1));
    }

    /// A sequence was ended at its deadline.
    pub fn timed_out(&self, phase: &'static str) {
        self.pressure.timed_out(phase);
    }

    /// Model and cache, as labels (`vllm:cache_config_info`).
    pub fn cache_config(&self, block_tokens: usize, blocks: usize) {
        let labels = [
            Label::new("block_size", block_tokens.to_string()),
            Label::new("num_gpu_blocks", blocks.to_string()),
        ];
        self.make()
            .gauge_labelled("vllm:cache_config_info", "Number and size of KV blocks, as labels.", &labels)
            .set(1.0);
    }

    /// Metrics of the tiers below the device, whose blocks have so many bytes.
    #[must_use]
    pub fn tiers(&self, block_bytes: usize) -> TierMetrics {
        TierMetrics::new(&self.make(), block_bytes)
    }

    /// Counters of drafts of at most `longest` tokens. They start at 0.
    #[must_use]
    pub fn drafts(&self, longest: usize) -> DraftMetrics {
        DraftMetrics::new(&self.make(), longest)
    }

    /// Metrics of this core's KV events.
    #[must_use]
    pub fn kv_events(&self) -> KvEventMetrics {
        let make = self.make();
        KvEventMetrics {
            published: make.counter("baton_kv_events_published_total", "Messages with KV events published."),
            dropped: make.counter(
                "baton_kv_events_dropped_total",
                "Messages with KV events dropped because the publisher was behind. Subscribers see a gap.",
            ),
            subscribers: make.gauge("baton_kv_events_subscribers", "Connected subscribers of KV events."),
        }
    }

    fn make(&self) -> Registrar<'_> {
        Registrar { registry: &self.registry, labels: &self.labels }
    }
}

/// Creates handles in one registry with the engine's labels.
struct Registrar<'a> {
    registry: &'a Registry,
    labels: &'a [Label],
}

impl Registrar<'_> {
    fn notices(&self, reason: &'static str, result: &'static str) -> Counter {
        let labels = [Label::new("reason", reason), Label::new("result", result)];
        self.counter_labelled("baton_release_notices_total", "Release notices to producers.", &labels)
    }

    fn counter(&self, name: &'static str, help: &'static str) -> Counter {
        self.counter_labelled(name, help, &[])
    }

    fn counter_with(
        &self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        value: impl Into<SharedString>,
    ) -> Counter {
        self.counter_labelled(name, help, &[Label::new(label, value)])
    }

    fn counter_labelled(&self, name: &'static str, help: &'static str, labels: &[Label]) -> Counter {
        self.registry.counter(name, help, self.labels.iter().chain(labels))
    }

    fn gauge(&self, name: &'static str, help: &'static str) -> Gauge {
        self.gauge_labelled(name, help, &[])
    }

    fn gauge_labelled(&self, name: &'static str, help: &'static str, labels: &[Label]) -> Gauge {
        self.registry.gauge(name, help, self.labels.iter().chain(labels))
    }

    fn histogram(&self, name: &'static str, help: &'static str, bounds: &'static [f64]) -> Histogram {
        self.histogram_labelled(name, help, bounds, &[])
    }

    fn histogram_labelled(
        &self,
        name: &'static str,
        help: &'static str,
        bounds: &'static [f64],
        labels: &[Label],
    ) -> Histogram {
        self.registry.histogram(name, help, bounds, self.labels.iter().chain(labels))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_release_reasons_share_one_label() {
        for known in ["aborted", "lease_expired", "consumer_rejected", "decode_unreachable"] {
            assert_eq!(known_reason(known), known);
        }
        assert_eq!(known_reason("r-1f3a"), "other");
    }

    #[test]
    fn events_whose_labels_have_been_counted_before_take_no_lock() {
        let metrics = Arc::new(EngineMetrics::new("demo"));
        let settled = |cause| ClosedLease {
            handle: baton_connector::Handle(1),
            request: baton_connector::RequestId::new("r").expect("a test id"),
            blocks: vec![baton_connector::BlockId(1)],
            cause,
            reason: "aborted".into(),
            lifetime: Duration::from_millis(5),
            readers: (0, 1),
        };
        let count = move |metrics: &EngineMetrics| {
            metrics.finished(FinishReason::Stop, Duration::from_millis(9));
            metrics.carried("tcp", 7);
            metrics.load_failed("recompute");
            metrics.lease_settled(&settled(CloseCause::Expired));
            metrics.notice("aborted", "released");
            metrics.early_rejection("queue_full");
            metrics.next_token(Duration::from_millis(1));
        };
        count(&metrics);
        let held = metrics.registry.lock_for_test();
        let (sender, done) = std::sync::mpsc::sync_channel(1);
        let counting = Arc::clone(&metrics);
        // On its own thread: if it waits for the lock, it waits until this test fails.
        std::thread::spawn(move || {
            count(&counting);
            sender.send(())
        });
        let done = done.recv_timeout(Duration::from_secs(60));
        drop(held);
        assert_eq!(done, Ok(()), "an event waits for the lock");
        let text = metrics.render();
        for line in ["finished_reason=\"stop\"} 2", "transport=\"tcp\"} 14", "reason=\"queue_full\"} 2"] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn dashboards_find_the_names_they_know() {
        let metrics = EngineMetrics::new("demo");
        metrics.publish(
            BlockUsage { total: 4, free: 3, active: 1, ..BlockUsage::default() },
            SchedulerLoad::default(),
            0,
        );
        metrics.first_token(Duration::from_millis(3), 10, 4, 0);
        metrics.finished(FinishReason::Stop, Duration::from_millis(9));
        let text = metrics.render();
        for line in [
            "vllm:kv_cache_usage_perc{model_name=\"demo\",engine=\"0\"} 0.25",
            "vllm:prompt_tokens_total{model_name=\"demo\",engine=\"0\"} 10",
            "vllm:request_success_total{model_name=\"demo\",engine=\"0\",finished_reason=\"stop\"} 1",
            "baton_kv_blocks{model_name=\"demo\",engine=\"0\",state=\"free\"} 3",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(text.contains("vllm:time_to_first_token_seconds_bucket"));
    }
}
