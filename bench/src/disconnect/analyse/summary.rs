//! What a run has shown, in numbers. Everything here is computed from the raw events by `analyse.rs`.

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::common::stats::Spread;
use crate::disconnect::analyse::dist::Dist;
use crate::disconnect::analyse::sampled::{Held, Sampled};
use crate::disconnect::analyse::uncancelled::SLOWER;
use crate::disconnect::analyse::vanished::{self, NotPlayed, Vanished};
use crate::disconnect::drive::rate::Load;
use crate::disconnect::plan::phase::{Kind, Phase};
use crate::disconnect::record::flight::InFlight;
use crate::disconnect::record::raw::Run;
use crate::disconnect::record::retries::Retries;

/// Fewer comparisons say little of all the answers.
const TEXTS_FEW: u64 = 50;
/// Above this share of answers that cannot be compared, those that can say little of all.
const TEXTS_UNSTEADY: f64 = 0.02;
/// Of fewer clients a high percentile is one client's bad luck.
pub(crate) const UNCANCELLED_FEW: usize = 20;
/// Of fewer requests whether engines are told is not judged.
pub(crate) const JUDGED_FEW: u64 = 10;
/// Fewer that were not told are chance.
pub(crate) const NOT_RECEIVED_FEW: u64 = 3;
/// Fewer clients that leave in one way say little of it.
const KIND_FEW: u64 = 10;
/// Where so many times as many come too late, those that left are a choice of the slowest.
const KIND_LATE: u64 = 2;

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) run: Run,
    /// Older files do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<Load>,
    /// Empty: nothing was found.
    pub(crate) findings: Vec<Finding>,
    /// Whether engines could be read exactly, or only by their metrics.
    pub(crate) exact: bool,
    /// Calls of every kind.
    pub(crate) requests: u64,
    pub(crate) cancelled: u64,
    pub(crate) all: Group,
    pub(crate) phases: Vec<PhaseRow>,
    pub(crate) kinds: Vec<KindRow>,
    /// Clients whose host vanished; in none of the groups above but that of their kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vanished: Option<Vanished>,
    /// Kinds of leaving that were asked for and not possible where it was run, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) not_played: Vec<NotPlayed>,
    pub(crate) refused: Option<Group>,
    pub(crate) calm: Option<Service>,
    /// Of the calm the same requests as those whose clients stay in the storm.
    pub(crate) calm_paired: Option<Service>,
    pub(crate) storm: Option<Service>,
    pub(crate) storm_cancels: Option<StormCancels>,
    /// Round by round, the storm's p99 time to first token of clients that stayed over that of the same requests of the calm.
    pub(crate) ttft_p99_over_calm_paired: Option<Spread>,
    pub(crate) uncancelled: Uncancelled,
    /// Legs of requests whose clients left while engines worked on them: prefill, and decode.
    pub(crate) work: Vec<WorkRow>,
    pub(crate) faults: Vec<FaultRow>,
    /// Leases that only time has ended, and that no finding names: what had to give them back, or had lent them, was killed.
    pub(crate) excused_leases: u64,
    pub(crate) engines: Vec<EngineRow>,
    pub(crate) texts: Texts,
    /// Blocks held for nobody, from looks at metrics; where not every engine tells of single requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sampled: Option<Sampled>,
    /// What `baton bench compare` says of other gateways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compared_with: Option<serde_json::Value>,
    /// It was broken off: there are fewer parts than there should be.
    pub(crate) interrupted: bool,
    /// Why it could not go on to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<String>,
    /// Events of engines that were overwritten before they were read; with any, counts are too small.
    pub(crate) events_lost: u64,
    #[serde(skip)]
    pub(crate) series: Series,
}

/// Something that is wrong with the deployment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Finding {
    /// For machines.
    pub(crate) name: &'static str,
    /// For people.
    pub(crate) says: String,
    /// How often.
    pub(crate) count: u64,
    /// Some of the calls that show it: their tags in `events.jsonl`.
    pub(crate) shown_by: Vec<String>,
}

/// What clients that left did to the engines. Of engines that tell metrics only nothing but `left` is known, and written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Group {
    /// Engines told of single requests.
    pub(crate) exact: bool,
    /// Clients that left in time.
    pub(crate) cancelled: u64,
    /// Of those, whose blocks were not back in time.
    pub(crate) stranded: u64,
    /// Of those, whose blocks were not back at all while they were watched.
    pub(crate) never_freed: u64,
    /// From the client's going until every engine that had work for it had learnt of it, ms.
    pub(crate) abort_ms: Dist,
    /// Clients of whose going an engine that had work for them never learnt.
    pub(crate) abort_not_received: u64,
    /// From the client's going until the last block was back, ms.
    pub(crate) time_to_free_ms: Dist,
    /// The same at the prefill engine alone.
    pub(crate) time_to_free_at_prefill_ms: Dist,
    /// Blocks times seconds that they were held for clients that had left.
    pub(crate) block_seconds: f64,
    /// The same for every 1,000 clients that left.
    pub(crate) block_seconds_per_1000: f64,
    /// Tokens of prompts that were computed for nobody.
    pub(crate) wasted_prompt_tokens: u64,
    /// Tokens of answers that were computed for nobody.
    pub(crate) wasted_response_tokens: u64,
    /// Leases that ended by time alone.
    pub(crate) expired: u64,
    /// Whether engines at work were told; `None` where that is not asked.
    pub(crate) ran_on: Option<RanOn>,
}

/// Of clients that left while an engine worked for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RanOn {
    /// An engine came to its own end, and had not been told.
    pub(crate) completed_without_abort: u64,
    /// Of so many of which it can be said: see [`WorkRow::judged`].
    pub(crate) judged: u64,
}

/// Clients that left in one phase.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PhaseRow {
    pub(crate) phase: Phase,
    /// Clients that aimed at it.
    pub(crate) aimed: u64,
    #[serde(flatten)]
    pub(crate) group: Group,
}

/// Clients that left in one way.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KindRow {
    pub(crate) kind: Kind,
    /// Clients whose answer came whole all the same; they are not in the other numbers.
    pub(crate) served: u64,
    /// Clients that were to leave, and whose request was over before they had: they are not in the other numbers.
    pub(crate) too_late: u64,
    /// Of those, were let go by the deployment while they read nothing.
    pub(crate) dropped_by_server: u64,
    /// What those that left asked again.
    pub(crate) retries: Retries,
    #[serde(flatten)]
    pub(crate) group: Group,
}

/// Who was to leave in the storms, all rounds together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct StormCancels {
    /// Of all requests of the storms, but for what was asked again.
    pub(crate) requests: u64,
    /// Were to leave.
    pub(crate) drawn: u64,
    /// Left while their request was not over.
    pub(crate) in_time: u64,
    /// Of all requests.
    pub(crate) share_in_time: f64,
}

/// What clients that stayed got.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Service {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    /// Time to first token, from the moment at which the request was due, ms.
    pub(crate) ttft_ms: Dist,
    /// Between two events with text, ms.
    pub(crate) itl_ms: Dist,
    /// Of those, the share that is zero: both events came with one read of the socket.
    pub(crate) itl_within_one_read: f64,
    /// From the first token to the last for each token after the first, one for each request, ms.
    pub(crate) tpot_ms: Dist,
    /// From due to the end, ms.
    pub(crate) e2e_ms: Dist,
    pub(crate) tokens_per_second: f64,
}

/// Clients that stayed, one by one beside the same requests of the calm.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Uncancelled {
    pub(crate) requests: u64,
    pub(crate) rounds: u64,
    /// Rounds whose calm and storm are not of the same requests: one of them was broken off.
    pub(crate) unpaired_rounds: u64,
    /// Empty where there are too few.
    pub(crate) numbers: Vec<Compared>,
}

/// What is measured of a client that stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Measure {
    /// Time to first token
    Ttft,
    /// Time between tokens
    Itl,
    /// Time for each token after the first, of a whole answer
    Tpot,
    /// From due to the end
    E2e,
}

impl Measure {
    pub(crate) const ALL: [Self; 4] = [Self::Ttft, Self::Itl, Self::Tpot, Self::E2e];

    /// What was waited for.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Ttft => "first token",
            Self::Itl => "next token",
            Self::Tpot => "average token",
            Self::E2e => "whole answer",
        }
    }
}

/// One number of clients that stayed, in the storm and of the same requests in the calm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Compared {
    pub(crate) measure: Measure,
    pub(crate) percentile: u32,
    /// The round whose ratio is the median: of it are calm, storm and their difference.
    pub(crate) round: u64,
    pub(crate) calm_ms: f64,
    pub(crate) storm_ms: f64,
    /// Round by round, the storm's over the calm's; its median is that of the round that is shown.
    pub(crate) over: Spread,
    /// Rounds of which the ratio is above the target.
    pub(crate) rounds_above: u64,
    /// How much more it is in the storm, ms.
    pub(crate) by_ms: f64,
    /// By how much it usually differs from calm to calm, ms.
    pub(crate) noise_ms: f64,
    /// Beyond the target, and beyond the noise, in three of four rounds.
    pub(crate) slower: bool,
    /// How much more it would have to be in the storm of the round shown to be beyond both, ms; `None`: it is.
    pub(crate) named_by_ms: Option<f64>,
}

/// Requests whose clients left while engines of one kind worked on them, or were about to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct WorkRow {
    /// `prefill` or `decode`.
    pub(crate) leg: &'static str,
    pub(crate) at_work: u64,
    /// Of those, whether they were told can be said: they were, or had more left to do than telling takes.
    pub(crate) judged: u64,
    /// Of those judged, came to their own end and had not been told.
    pub(crate) completed_without_abort: u64,
    /// Of those judged, were told, and went on for long all the same.
    pub(crate) continued_after_abort: u64,
    /// How long a leg has to have had left to be judged, ms: what telling takes in this run.
    pub(crate) abort_delivery_ms: f64,
    /// The share of the untold that honest telling explains: as much of it was slower than they were quick.
    pub(crate) by_chance: f64,
}

/// What became of a deployment in which something was broken.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FaultRow {
    pub(crate) fault: String,
    /// How long it had waited for requests to strike, ms; older files do not say.
    pub(crate) waited_ms: Option<f64>,
    /// What was in flight when it struck; `None`: it never did.
    #[serde(flatten)]
    pub(crate) met: Option<InFlight>,
    /// What was to be in flight then, and was not.
    pub(crate) missed: Option<&'static str>,
    /// Of those in flight, calls of clients that stayed.
    pub(crate) stayed_in_flight: u64,
    /// Of these, how many failed.
    pub(crate) failed_in_flight: u64,
    /// What all clients that stayed got, before, during and after it.
    #[serde(flatten)]
    pub(crate) stayed: Service,
    /// What clients that left asked again.
    pub(crate) retries: Retries,
    /// Errors of the clients that began after it was mended.
    pub(crate) errors_after: u64,
    /// What clients that left in this part did to the engines; what was held by an engine that was killed is gone with it.
    pub(crate) cancelled: Group,
    /// From the end of the last client until no engine held anything, ms; `None`: not within this part.
    pub(crate) all_free_ms: Option<f64>,
    pub(crate) expired: u64,
    pub(crate) wrong_texts: u64,
}

/// An engine, at the end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct EngineRow {
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) exact: bool,
    /// 0 where it does not say; what it held is then in thousandths of its pool.
    pub(crate) blocks: u64,
    pub(crate) held_at_most: u64,
    pub(crate) held_at_end: Option<u64>,
    /// Of these, blocks of leases that are excused, and whose time was not over.
    pub(crate) excused_at_end: u64,
    /// Of these, blocks held for clients that had vanished, and of which it need not know yet.
    #[serde(skip_serializing_if = "is_none")]
    pub(crate) ghosts_at_end: u64,
    pub(crate) expired: u64,
    /// Looks at which its books had more blocks than its pool, and fewer.
    pub(crate) too_many: u64,
    pub(crate) too_few: u64,
    /// Blocks times seconds held while no client was there, from its books.
    pub(crate) idle_block_seconds: f64,
    /// From looks at its metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sampled: Option<Held>,
}

fn is_none(count: &u64) -> bool {
    *count == 0
}

/// Answers compared with the same prompt's when all was quiet.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Texts {
    pub(crate) compared: u64,
    pub(crate) wrong: u64,
    /// Of those, from before anybody left: what batching alone changes in an engine that is not exact.
    pub(crate) compared_in_calm: u64,
    pub(crate) wrong_in_calm: u64,
    /// Answers that are not what the prompt gave when all was quiet, where that gave two different answers: what is right
    /// is not known, and they are not among those compared.
    pub(crate) nondeterministic: u64,
    /// Prompts that had no answer when all was quiet.
    pub(crate) unanswered: u64,
}

/// What is drawn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    /// For each phase, the times until blocks were back, ms, sorted.
    pub(crate) back: Vec<(Phase, Vec<f64>)>,
    /// Blocks held for clients that had left, over seconds since the run began.
    pub(crate) stranded: Vec<(f64, f64)>,
    /// The same where something was broken: also of clients whose connection broke. What an engine held that was killed is gone with it.
    pub(crate) stranded_in_broken_parts: Vec<(f64, f64)>,
    /// The same for clients whose host vanished.
    pub(crate) vanished: Vec<(f64, f64)>,
    /// Held blocks of each engine over seconds, as a share of its pool.
    pub(crate) pools: Vec<(String, Vec<(f64, f64)>)>,
    /// Parts of the run: name, begin, end, in seconds.
    pub(crate) acts: Vec<(String, f64, f64)>,
    /// Sorted, ms: calm and storm.
    pub(crate) ttft: [Vec<f64>; 2],
    pub(crate) itl: [Vec<f64>; 2],
}

impl Uncancelled {
    /// Numbers that are above the target in the median of the rounds, named or not.
    pub(crate) fn above(&self) -> impl Iterator<Item = &Compared> {
        self.numbers.iter().filter(|number| number.over.median > SLOWER)
    }
}

impl Summary {
    /// The headline's ratio, where those who stayed are enough to be compared at all.
    pub(crate) fn judged_ttft_ratio(&self) -> Option<&Spread> {
        self.ttft_p99_over_calm_paired.as_ref().filter(|_| !self.uncancelled.numbers.is_empty())
    }

    /// What could not be judged, for people. Without it a clean bill would say more than is known.
    pub(crate) fn unknown(&self) -> Vec<String> {
        let mut unknown = Vec::new();
        let mut add = |there: bool, what: String| unknown.extend(there.then_some(what));
        add(self.interrupted, "the run was broken off".into());
        let failed = self.failed.as_deref().unwrap_or_default();
        add(self.failed.is_some(), format!("the run ended early: {failed}"));
        add(
            self.engines.is_empty(),
            "blocks, leases and wasted work: no engine was observed (`--admin`, `--engine`)".into(),
        );
        add(
            !self.exact && !self.engines.is_empty(),
            "phases, times and blocks of single requests: the engines report metrics only".into(),
        );
        for EngineRow { name, .. } in
            self.engines.iter().filter(|engine| !self.exact && engine.sampled.is_none())
        {
            let sizeless = self.engines.iter().any(|engine| engine.name == *name && engine.blocks == 0);
            let why = if sizeless {
                "does not report the size of its pool (`num_gpu_blocks` of `vllm:cache_config_info`); held blocks are a share of the pool"
            } else {
                "had a request or a client before its first token in every sample"
            };
            add(true, format!("orphaned block-seconds: {name} {why}"));
        }
        let in_parts: u64 = self.faults.iter().map(|fault| fault.expired).sum();
        add(
            !self.exact && in_parts > 0,
            format!(
                "{in_parts} leases that expired in fault segments: engines with metrics only do not report their requests"
            ),
        );
        for engine in self.engines.iter().filter(|engine| engine.excused_at_end > 0) {
            let EngineRow { name, excused_at_end, .. } = engine;
            let what = engine.told(*excused_at_end);
            add(
                true,
                format!(
                    "{name} still holds {what} at the end, of unexpired leases that a killed process had to release: a longer `--final-wait` shows their end"
                ),
            );
        }
        add(self.events_lost > 0, format!("exact counts: {} engine events were lost", self.events_lost));
        add(self.texts.compared == 0, "responses: none could be compared".into());
        let few = self.texts.compared > 0 && self.texts.compared < TEXTS_FEW && self.requests >= TEXTS_FEW;
        add(
            few,
            format!(
                "all responses: only {} of {} were compared within `--verify-seconds`",
                self.texts.compared, self.requests
            ),
        );
        let Texts { compared, nondeterministic: unsteady, unanswered, .. } = self.texts;
        for (count, why) in
            [(unsteady, "different responses without load"), (unanswered, "no response without load")]
        {
            let all = compared + unsteady + unanswered;
            add(
                count as f64 > TEXTS_UNSTEADY * all as f64,
                format!("{count} of {all} responses: the same prompt has {why}"),
            );
        }
        if self.calm.is_some() && self.storm.is_some() {
            let Uncancelled { requests, rounds, unpaired_rounds, numbers } = &self.uncancelled;
            add(
                !numbers.iter().any(|number| number.measure == Measure::Ttft),
                format!(
                    "time to first token: {requests} uncancelled requests in {rounds} storms are too few"
                ),
            );
            let (above, all) = (self.uncancelled.above().count(), numbers.len());
            add(
                above * 2 > all && !numbers.iter().any(|number| number.slower),
                format!(
                    "effect on uncancelled requests: {above} of {all} numbers are above {SLOWER} times the calm, none beyond the noise between calms"
                ),
            );
            add(
                *unpaired_rounds > 0,
                format!("{unpaired_rounds} rounds: calm and storm have different requests"),
            );
        }
        for row in self.work.iter().filter(|row| row.at_work > 0 && row.judged < JUDGED_FEW) {
            add(
                self.exact && row.completed_without_abort + row.continued_after_abort < NOT_RECEIVED_FEW,
                format!(
                    "aborts at {} engines: only {} of {} cancelled requests are judged, the others completed within {:.1} ms, which an abort takes",
                    row.leg, row.judged, row.at_work, row.abort_delivery_ms
                ),
            );
        }
        let few = |row: &&KindRow| {
            let (left, late) = (row.group.cancelled, row.too_late);
            (left < KIND_FEW && late > left) || late > KIND_LATE * left
        };
        for row in self.kinds.iter().filter(few) {
            add(
                true,
                format!(
                    "cancel by {}: only {} of {} were measured, the other requests completed before their cancel",
                    row.kind.label(),
                    row.group.cancelled,
                    row.group.cancelled + row.too_late
                ),
            );
        }
        for phase in &self.phases {
            let missed = phase.aimed > 0 && phase.group.cancelled == 0 && self.exact;
            add(missed, format!("phase {}: no cancel was in it", phase.phase.label()));
        }
        for FaultRow { fault, met, missed, .. } in &self.faults {
            // One that never struck is one of a run that ended early.
            let Some(met) = met else { continue };
            add(met.requests == 0, format!("effect of `{fault}` on requests: none was in flight"));
            let missed = missed.filter(|_| met.requests > 0);
            add(
                missed.is_some(),
                format!("`{fault}` met {}, with {} in flight", missed.unwrap_or_default(), met.requests),
            );
        }
        add(
            self.refused.as_ref().is_some_and(|refused| refused.cancelled == 0) && self.exact,
            "refused handoffs: the decode engine refused none".into(),
        );
        unknown.extend(vanished::unknown(self));
        unknown
    }
}

impl EngineRow {
    /// Blocks, or a share of a pool of which nobody knows how many it has.
    pub(crate) fn told(&self, held: u64) -> String {
        if self.blocks > 0 {
            format!("{held} blocks")
        } else {
            format!("{:.1} % of its pool", held as f64 / 10.0)
        }
    }
}

impl Serialize for Group {
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
