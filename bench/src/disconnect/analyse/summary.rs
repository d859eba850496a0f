//! The types of a summary. All values are computed from the raw events by `analyse.rs`.

mod unknown;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::common::stats::Spread;
use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::load::RunLoad;
use crate::disconnect::analyse::run_data::UnavailableKind;
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::in_flight::InFlight;
use crate::disconnect::record::raw::{RunRecord, is_default};
use crate::disconnect::record::retries::RetryCounts;

/// The target: the latencies of uncancelled requests stay within this many times those of the calm.
pub(crate) const SLOWER: f64 = 1.2;
/// With fewer requests a high percentile is a single request.
pub(crate) const UNCANCELLED_FEW: usize = 20;
/// With fewer judged requests aborts are not judged.
pub(crate) const JUDGED_FEW: u64 = 10;
/// Fewer missing aborts are chance.
pub(crate) const NOT_RECEIVED_FEW: u64 = 3;

/// Calls that a finding names.
const SHOWN: usize = 5;

/// The summary of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) run: RunRecord,
    /// Missing in older files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<RunLoad>,
    /// Empty if nothing was found.
    pub(crate) findings: Vec<Finding>,
    /// Whether all engines have event logs. Otherwise only their metrics are known.
    pub(crate) exact: bool,
    /// All calls.
    pub(crate) requests: u64,
    pub(crate) cancelled: u64,
    pub(crate) all: CancelGroup,
    pub(crate) phases: Vec<PhaseRow>,
    pub(crate) kinds: Vec<KindRow>,
    /// Vanished clients; not in the groups above, except for that of their kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vanished: Option<VanishedSummary>,
    /// Configured kinds of cancels that were not possible, and the reasons.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) not_played: Vec<UnavailableKind>,
    pub(crate) refused: Option<CancelGroup>,
    pub(crate) calm: Option<ServiceLevels>,
    /// The calm requests whose paired requests in the storm are uncancelled.
    pub(crate) calm_paired: Option<ServiceLevels>,
    pub(crate) storm: Option<ServiceLevels>,
    pub(crate) storm_cancels: Option<StormCancels>,
    /// Per round: p99 time to first token of uncancelled requests in the storm, over their paired requests of the calm.
    pub(crate) ttft_p99_over_calm_paired: Option<Spread>,
    pub(crate) uncancelled: UncancelledSummary,
    /// Legs with work at the cancel: prefill and decode.
    pub(crate) work: Vec<WorkRow>,
    pub(crate) faults: Vec<FaultRow>,
    /// Expired leases that are no finding: the process that had to release or serve them was killed.
    pub(crate) excused_leases: u64,
    pub(crate) engines: Vec<EngineRow>,
    pub(crate) texts: TextComparison,
    /// Blocks held without a request, from samples of metrics; if not all engines have event logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sampled: Option<SampledSummary>,
    /// The output of `baton bench compare` for other gateways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compared_with: Option<serde_json::Value>,
    /// The run was stopped: segments are missing.
    pub(crate) interrupted: bool,
    /// Why the run ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
    /// Events that engines overwrote before they were read. If there are any, counts are too low.
    pub(crate) events_lost: u64,
    #[serde(skip)]
    pub(crate) series: PlotData,
}

/// A defect of the deployment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Finding {
    /// The identifier.
    pub(crate) name: &'static str,
    /// The text.
    pub(crate) says: String,
    /// The number of occurrences.
    pub(crate) count: u64,
    /// Tags in `events.jsonl` of some calls that show the defect.
    pub(crate) shown_by: Vec<String>,
}

/// The effect of cancelled requests on the engines. Without event logs only `cancelled` is known and serialized.
#[derive(Clone, Debug, Default)]
pub(crate) struct CancelGroup {
    /// All engines have event logs.
    pub(crate) exact: bool,
    /// Requests that were cancelled in time.
    pub(crate) cancelled: u64,
    /// Requests whose blocks were not freed in time.
    pub(crate) stranded: u64,
    /// Requests whose blocks were not freed while they were watched.
    pub(crate) never_freed: u64,
    /// Time from the cancel until all engines with work received the abort, ms.
    pub(crate) abort_ms: Dist,
    /// Requests whose abort did not reach an engine with work.
    pub(crate) abort_not_received: u64,
    /// Time from the cancel until the last block was freed, ms.
    pub(crate) time_to_free_ms: Dist,
    /// The same at the prefill engine.
    pub(crate) time_to_free_at_prefill_ms: Dist,
    /// Blocks times the seconds that they were held after the cancel.
    pub(crate) block_seconds: f64,
    /// The same per 1,000 cancelled requests.
    pub(crate) block_seconds_per_1000: f64,
    /// Prompt tokens that were computed after the cancel.
    pub(crate) wasted_prompt_tokens: u64,
    /// Response tokens that were computed after the cancel.
    pub(crate) wasted_response_tokens: u64,
    /// Expired leases.
    pub(crate) expired: u64,
    /// Legs that completed without an abort; `None` if not computed for this group.
    pub(crate) ran_on: Option<UnabortedCount>,
}

/// Requests with work at the cancel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct UnabortedCount {
    /// Requests that an engine completed without an abort.
    pub(crate) completed_without_abort: u64,
    /// The number of judged requests: see [`WorkRow::judged`].
    pub(crate) judged: u64,
}

/// Requests that were cancelled in one phase.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PhaseRow {
    pub(crate) phase: Phase,
    /// Requests with this intended phase.
    pub(crate) aimed: u64,
    #[serde(flatten)]
    pub(crate) group: CancelGroup,
}

/// Requests that were cancelled in one way.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KindRow {
    pub(crate) kind: CancelKind,
    /// Requests that received a complete response after their cancel (half-close); not in the other numbers.
    pub(crate) served: u64,
    /// Requests that ended before their planned cancel; not in the other numbers.
    pub(crate) too_late: u64,
    /// Of those, requests that the deployment aborted during a stall.
    pub(crate) dropped_by_server: u64,
    /// Retries of the cancelled requests.
    pub(crate) retries: RetryCounts,
    #[serde(flatten)]
    pub(crate) group: CancelGroup,
}

/// The cancels in the storms of all rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct StormCancels {
    /// Requests of the storms, without retries.
    pub(crate) requests: u64,
    /// Requests that were selected for a cancel.
    pub(crate) drawn: u64,
    /// Requests that were cancelled before they ended.
    pub(crate) in_time: u64,
    /// Their share of all requests.
    pub(crate) share_in_time: f64,
}

/// The service levels of uncancelled requests.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ServiceLevels {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    /// Time from the due time to the first token, ms.
    pub(crate) ttft_ms: Dist,
    /// Time between two events with text, ms.
    pub(crate) itl_ms: Dist,
    /// The share of these times that is zero: both events arrived in one read of the socket.
    pub(crate) itl_within_one_read: f64,
    /// Time from the first token to the last, per token after the first, ms; one value per request.
    pub(crate) tpot_ms: Dist,
    /// Time from the due time to the end, ms.
    pub(crate) e2e_ms: Dist,
    pub(crate) tokens_per_second: f64,
}

/// Uncancelled requests of the storms compared with their paired requests of the calms.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct UncancelledSummary {
    pub(crate) requests: u64,
    pub(crate) rounds: u64,
    /// Rounds whose calm and storm have different requests because one of them was stopped.
    pub(crate) unpaired_rounds: u64,
    /// Empty if there are too few requests.
    pub(crate) numbers: Vec<PairedComparison>,
}

/// A measure of uncancelled requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Measure {
    /// Time to first token
    Ttft,
    /// Time between tokens
    Itl,
    /// Time per token after the first, of a complete response
    Tpot,
    /// From the due time to the end
    E2e,
}

impl Measure {
    pub(crate) const ALL: [Self; 4] = [Self::Ttft, Self::Itl, Self::Tpot, Self::E2e];

    /// The name of the awaited result.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Ttft => "first token",
            Self::Itl => "next token",
            Self::Tpot => "average token",
            Self::E2e => "whole answer",
        }
    }
}

/// One percentile of a measure in storm and calm, for paired requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PairedComparison {
    pub(crate) measure: Measure,
    pub(crate) percentile: u32,
    /// The round with the median ratio. Calm, storm and difference are from this round.
    pub(crate) round: u64,
    pub(crate) calm_ms: f64,
    pub(crate) storm_ms: f64,
    /// The ratio of storm to calm per round. The median is that of the shown round.
    pub(crate) over: Spread,
    /// Rounds whose ratio is above the target.
    pub(crate) rounds_above: u64,
    /// The difference between storm and calm, ms.
    pub(crate) by_ms: f64,
    /// The usual difference between two calms, ms.
    pub(crate) noise_ms: f64,
    /// The storm exceeds both the target and the noise in three of four rounds.
    pub(crate) slower: bool,
    /// The additional time in the shown round from which the storm would exceed both, ms; `None` if it does.
    pub(crate) named_by_ms: Option<f64>,
}

/// Cancelled requests with work for the engines of one leg.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct WorkRow {
    /// `prefill` or `decode`.
    pub(crate) leg: &'static str,
    pub(crate) at_work: u64,
    /// Requests that received an abort, or had more work left than an abort takes.
    pub(crate) judged: u64,
    /// Judged requests that completed without an abort.
    pub(crate) completed_without_abort: u64,
    /// Judged requests that continued for long after their abort.
    pub(crate) continued_after_abort: u64,
    /// The work that a leg has to have left to be judged, ms: the usual delay of an abort in this run.
    pub(crate) abort_delivery_ms: f64,
    /// The share of the missing aborts that lost races explain, because other aborts were as slow.
    pub(crate) by_chance: f64,
}

/// The outcome of a fault segment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FaultRow {
    pub(crate) fault: String,
    /// How long the fault waited for its condition, ms. Missing in older files.
    pub(crate) waited_ms: Option<f64>,
    /// The requests in flight at the fault; `None` if it was not injected.
    #[serde(flatten)]
    pub(crate) met: Option<InFlight>,
    /// The condition that was not met.
    pub(crate) missed: Option<&'static str>,
    /// Uncancelled requests among those in flight.
    pub(crate) stayed_in_flight: u64,
    /// Failed requests among these.
    pub(crate) failed_in_flight: u64,
    /// The service levels of all uncancelled requests of the segment.
    #[serde(flatten)]
    pub(crate) stayed: ServiceLevels,
    /// Retries of cancelled requests.
    pub(crate) retries: RetryCounts,
    /// Failed requests that began after the recovery.
    pub(crate) errors_after: u64,
    /// The effect of cancelled requests in this segment. Blocks of a killed engine do not count.
    pub(crate) cancelled: CancelGroup,
    /// Time from the end of the last request until no engine held blocks, ms; `None` if not within the segment.
    pub(crate) all_free_ms: Option<f64>,
    pub(crate) expired: u64,
    pub(crate) wrong_texts: u64,
}

/// The state of an engine at the end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct EngineRow {
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) exact: bool,
    /// 0 if the engine does not report it. Held blocks are then thousandths of the pool.
    pub(crate) blocks: u64,
    pub(crate) held_at_most: u64,
    pub(crate) held_at_end: Option<u64>,
    /// Held blocks of excused leases that had not expired.
    pub(crate) excused_at_end: u64,
    /// Held blocks of vanished clients within their limit.
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) ghosts_at_end: u64,
    pub(crate) expired: u64,
    /// Samples with more blocks than the pool has. `too_few`: samples with fewer.
    pub(crate) too_many: u64,
    pub(crate) too_few: u64,
    /// Block-seconds held while no request was open.
    pub(crate) idle_block_seconds: f64,
    /// From samples of metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sampled: Option<HeldBlocks>,
}

/// Responses compared with the responses to the same prompts without load.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct TextComparison {
    pub(crate) compared: u64,
    pub(crate) wrong: u64,
    /// Compared responses from before the first cancel: differences among them are an effect of batching alone.
    pub(crate) compared_in_calm: u64,
    pub(crate) wrong_in_calm: u64,
    /// Repetitions beside others: their differences are no effect of a cancel or fault.
    pub(crate) compared_in_parallel: u64,
    pub(crate) wrong_in_parallel: u64,
    /// Responses that differ from a prompt with two different responses without load. The expected response is unknown,
    /// so they are not compared.
    pub(crate) nondeterministic: u64,
    /// Prompts without a response when they were repeated.
    pub(crate) unanswered: u64,
}

/// Block-seconds without a request, of one engine or all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct HeldBlocks {
    pub(crate) block_seconds: f64,
    /// The error in both directions, from changes between two quiet samples.
    pub(crate) off_by: f64,
    pub(crate) looks: u64,
    pub(crate) quiet_looks: u64,
    /// The longest time between quiet samples, s. Blocks held only within it do not show.
    pub(crate) longest_unseen_s: f64,
}

/// The same of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct SampledSummary {
    /// The sum of all engines that can be sampled, with their samples.
    #[serde(flatten)]
    pub(crate) held: HeldBlocks,
    /// Engines without a known pool size or without quiet samples. Their blocks are missing.
    pub(crate) unknown_engines: u64,
    /// Per 1,000 cancelled requests.
    pub(crate) per_1000: f64,
    pub(crate) per_1000_off_by: f64,
}

/// Vanished clients.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct VanishedSummary {
    /// The time in which a deployment has to notice, ms.
    pub(crate) noticed_within_ms: f64,
    /// Requests that an abort or a release ended, and the time after the vanishing.
    pub(crate) noticed_ms: Dist,
    /// Requests that completed earlier, and the time after the vanishing.
    pub(crate) by_itself_ms: Dist,
    #[serde(flatten)]
    pub(crate) group: CancelGroup,
    /// By the phase at the vanishing.
    pub(crate) phases: Vec<PhaseRow>,
}

/// The data of the plots.
#[derive(Clone, Debug, Default)]
pub(crate) struct PlotData {
    /// The times to free per phase, ms, sorted.
    pub(crate) time_to_free: Vec<(Phase, Vec<f64>)>,
    /// Blocks held for cancelled requests, over seconds since the run began.
    pub(crate) stranded: Vec<(f64, f64)>,
    /// The same in fault segments, including broken requests. Blocks of a killed engine do not count.
    pub(crate) stranded_in_faults: Vec<(f64, f64)>,
    /// The same for vanished clients.
    pub(crate) vanished: Vec<(f64, f64)>,
    /// The held share of each engine's pool, over seconds.
    pub(crate) pools: Vec<(String, Vec<(f64, f64)>)>,
    /// Segments: name, begin and end in seconds.
    pub(crate) segments: Vec<(String, f64, f64)>,
    /// Sorted, ms: calm and storm.
    pub(crate) ttft: [Vec<f64>; 2],
    pub(crate) itl: [Vec<f64>; 2],
}

impl Finding {
    /// `tags`: calls that show the defect. The first ones are kept.
    pub(crate) fn new(name: &'static str, says: String, count: u64, tags: &[&str]) -> Self {
        let shown_by = tags.iter().take(SHOWN).map(|tag| (*tag).to_owned()).collect();
        Self { name, says, count, shown_by }
    }
}

impl UncancelledSummary {
    /// Numbers above the target in the median round, whether they are findings or not.
    pub(crate) fn above_target(&self) -> impl Iterator<Item = &PairedComparison> {
        self.numbers.iter().filter(|number| number.over.median > SLOWER)
    }
}

impl Summary {
    /// The ratio for the headline, if there are enough uncancelled requests to compare.
    pub(crate) fn judged_ttft_ratio(&self) -> Option<&Spread> {
        self.ttft_p99_over_calm_paired.as_ref().filter(|_| !self.uncancelled.numbers.is_empty())
    }
}

impl EngineRow {
    /// Held blocks as text, or as a share of the pool if its size is unknown.
    pub(crate) fn describe_held(&self, held: u64) -> String {
        if self.blocks > 0 {
            format!("{held} blocks")
        } else {
            format!("{:.1} % of its pool", held as f64 / 10.0)
        }
    }
}

impl Serialize for CancelGroup {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("cancelled", &self.cancelled)?;
        if self.exact {
            map.serialize_entry("stranded", &self.stranded)?;
            map.serialize_entry("never_freed", &self.never_freed)?;
            map.serialize_entry("abort_ms", &self.abort_ms)?;
            map.serialize_entry("abort_not_received", &self.abort_not_received)?;
            map.serialize_entry("time_to_free_ms", &self.time_to_free_ms)?;
            map.serialize_entry("time_to_free_at_prefill_ms", &self.time_to_free_at_prefill_ms)?;
            map.serialize_entry("block_seconds", &self.block_seconds)?;
            map.serialize_entry("block_seconds_per_1000", &self.block_seconds_per_1000)?;
            map.serialize_entry("wasted_prompt_tokens", &self.wasted_prompt_tokens)?;
            map.serialize_entry("wasted_response_tokens", &self.wasted_response_tokens)?;
            map.serialize_entry("expired", &self.expired)?;
            if let Some(ran_on) = &self.ran_on {
                map.serialize_entry("ran_on", ran_on)?;
            }
        }
        map.end()
    }
}
