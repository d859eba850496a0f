//! The segments of a run: calibration, calm and storm, cancels in each phase, refused requests, faults, and the
//! repetition of prompts without load.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::task::JoinSet;

use crate::BenchError;
use crate::disconnect::analyse::run_data::{cancelled_at, phase_of};
use crate::disconnect::drive::call::{CallPlan, CompletedCall};
use crate::disconnect::drive::driver::CallDriver;
use crate::disconnect::drive::local::{DeploymentPart, LocalDeployment};
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::drive::stall::{CallPace, Stall};
use crate::disconnect::plan::options::{FaultCommands, SegmentOptions};
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::in_flight::{FaultCondition, FaultContext};
use crate::disconnect::record::rate::CALIBRATION_CLIENTS;
use crate::disconnect::record::raw::{CallRecord, CancelPlan, Record, SegmentKind};
use crate::disconnect::record::watch::EngineWatch;
use crate::load::rng::Rng;
use crate::load::{Moment, Streaming};

/// Sequential calls that measure the phases.
const LESSONS: usize = 16;
/// Duration of the capacity measurement.
const CALIBRATION: Duration = Duration::from_secs(2);
/// Concurrent clients in a phase segment. Most of them have cancelled and stall, or wait for a retry.
const PHASE_CLIENTS: usize = 10;
/// Enough concurrent clients for some requests to wait in a queue.
const QUEUE_CLIENTS: usize = 32;
/// Maximum attempts per cancel that has to hit the phase.
const TRIES: usize = 12;
/// Requests that the decode engine has to refuse.
const REFUSED: usize = 20;
const REFUSED_AT_ONCE: usize = 2;
/// As many repeated prompts are computed at once as after a fault, when all waiting clients are served.
const VERIFIED_AT_ONCE: usize = 64;
/// More than any context has.
const TOO_MANY_TOKENS: u32 = 1 << 24;
/// The usual time until an engine's event is known here.
const WORD_TRAVELS: Duration = Duration::from_millis(3);
/// A fault is injected after this share of its segment, as soon as its condition is met. After the second share it is
/// injected in any case.
const FAULT_AFTER: f64 = 0.25;
const FAULT_BEFORE: f64 = 0.5;
/// The share of the segment between a fault command and its recovery command.
const RECOVER_AFTER: f64 = 0.25;
/// Timeout of a fault or recovery command.
const COMMAND_WITHIN: Duration = Duration::from_secs(120);

/// Runs the segments, in order.
pub(crate) struct SegmentRunner<'a> {
    pub(crate) driver: &'a Arc<CallDriver>,
    pub(crate) watch: &'a EngineWatch,
    pub(crate) terms: SegmentOptions,
    /// Prints the progress.
    pub(crate) progress: &'a Progress,
    /// The recovery command that has to run if the run is stopped now.
    pub(crate) unrecovered: &'a Mutex<Option<String>>,
}

impl SegmentRunner<'_> {
    /// Records begin and end of a segment around `run`. Between the last call and the end the engines free their
    /// blocks.
    async fn run_segment<T>(&self, name: &str, what: SegmentKind, run: impl Future<Output = T>) -> T {
        self.watch.read_counters().await;
        let (put, segment) = (|record| self.driver.recorder.put(&record), name.to_owned());
        let at_us = Moment::now().us();
        put(Record::SegmentBegan { segment: segment.clone(), at_us, what });
        self.progress.begin_segment(name, at_us);
        let result = run.await;
        self.watch.wait_until_all_free(self.driver.vanished.settle_timeout(self.terms.settle)).await;
        self.watch.read_counters().await;
        // The next sample contains the counters.
        self.watch.wait_until_all_free(Duration::from_millis(100)).await;
        put(Record::SegmentEnded { segment, at_us: Moment::now().us() });
        result
    }

    fn plan(&self, segment: &str, streaming: Streaming, leaves: Option<CancelPlan>) -> CallPlan {
        CallPlan { segment: segment.into(), due: Instant::now(), streaming, leaves, max_tokens: None }
    }

    /// Measures the phases with sequential calls, and returns the requests per second that the deployment completes.
    pub(crate) async fn calibrate(&self) -> Result<f64, BenchError> {
        const NAME: &str = "calibration";
        self.run_segment(NAME, SegmentKind::Calibration, async {
            let (mut without_events, mut pace) = (0, CallPace::default());
            for lesson in 0..LESSONS {
                let streaming = if lesson % 4 == 3 { Streaming::Whole } else { Streaming::Streamed };
                let completed = Arc::clone(self.driver).call(self.plan(NAME, streaming, None)).await;
                tokio::time::sleep(WORD_TRAVELS).await;
                without_events += usize::from(self.driver.feed.forget(&completed.record.tag).is_none());
                pace.learn(&completed);
                if completed.record.outcome != "done" {
                    let why = completed.record.error.unwrap_or_default();
                    return Err(
                        format!("the deployment does not answer: {} {why}", completed.record.outcome).into()
                    );
                }
            }
            if self.driver.exact && without_events * 2 > LESSONS {
                let why = format!(
                    "the engines' event logs know nothing of {without_events} of {LESSONS} requests: these are not the engines \
                     that answer, or what is before them does not pass on `user`; --metrics-only does without"
                );
                return Err(why.into());
            }
            let capacity = self.watch.token_capacity(&self.driver.shape.model).await;
            let usual = Stall::usual(self.driver.shape.max_tokens, self.driver.shape.stall);
            let stall = usual.of(&pace, capacity, PHASE_CLIENTS);
            // There is one calibration, so the value is not set yet.
            let _ = self.driver.stall.set(stall);
            self.driver.vanished.learn(&pace, capacity, self.driver.shape.max_tokens, PHASE_CLIENTS);
            let until = Instant::now() + CALIBRATION;
            let clients = (0..CALIBRATION_CLIENTS).map(|_| {
                let (driver, plan) = (Arc::clone(self.driver), self.plan(NAME, Streaming::Streamed, None));
                tokio::spawn(async move {
                    let mut done = 0;
                    while Instant::now() < until {
                        let completed = Arc::clone(&driver).call(CallPlan { due: Instant::now(), ..plan.clone() }).await;
                        done += usize::from(completed.record.outcome == "done");
                    }
                    done
                })
            });
            let began = Instant::now();
            let mut done = 0;
            for client in clients.collect::<Vec<_>>() {
                done += client.await?;
            }
            Ok(done as f64 / began.elapsed().as_secs_f64())
        })
        .await
    }

    /// The same load in calm and in storm, round by round, so that a slower period of the machine affects both. Every
    /// other round begins with the storm.
    pub(crate) async fn rounds(&self, share: f64) {
        for round in 1..=self.terms.rounds {
            let calm = (format!("calm {round}"), SegmentKind::Calm, 0.0);
            let storm = (format!("storm {round}"), SegmentKind::Storm, share);
            let order = if round % 2 == 1 { [calm, storm] } else { [storm, calm] };
            for (name, what, share) in order {
                self.load(&name, what, round, share).await;
            }
        }
    }

    /// Requests at the configured rate, at random times that depend on seed and round. A share of them is cancelled.
    async fn load(&self, name: &str, what: SegmentKind, round: u32, share: f64) {
        self.run_segment(name, what, async {
            let plans = self.arrivals(name, &round.to_string(), share, self.terms.segment);
            join(self.driver, plans).await;
        })
        .await;
    }

    /// Requests with the same `stream_name` have the same times.
    fn arrivals(&self, segment: &str, stream_name: &str, share: f64, within: Duration) -> Vec<CallPlan> {
        let mut moments = Rng::stream(self.driver.seed, &format!("arrivals-{stream_name}"));
        let mut leaving = Rng::stream(self.driver.seed, &format!("who-leaves-{stream_name}"));
        let begin = Instant::now() + Duration::from_millis(20);
        let (mut at, mut plans) = (0.0, Vec::new());
        let kinds = kinds_of_load(&self.terms.kinds);
        let mut kinds = kinds.iter().cycle();
        loop {
            at += moments.exponential() / self.terms.rate;
            if at > within.as_secs_f64() {
                return plans;
            }
            // Calm and storm use the same random numbers: their n-th requests are of the same kind.
            let whole = leaving.chance(self.terms.unary);
            let streaming = if whole { Streaming::Whole } else { Streaming::Streamed };
            let leaves = leaving.chance(share);
            let kind = if leaves { kinds.next().copied() } else { None };
            let leaves = kind.map(|kind| CancelPlan { phase: None, kind });
            plans.push(CallPlan {
                due: begin + Duration::from_secs_f64(at),
                ..self.plan(segment, streaming, leaves)
            });
        }
    }

    /// Cancels requests in one phase until enough of them were in it. Returns their number.
    pub(crate) async fn phase(&self, phase: Phase) -> usize {
        let name = format!("phase {}", phase.label());
        self.run_segment(&name, SegmentKind::Phase, async {
            let (wanted, until) = (self.terms.cancels, Instant::now() + self.terms.phase);
            let at_once = if phase == Phase::Queued { QUEUE_CLIENTS } else { PHASE_CLIENTS };
            let kinds = kinds_of_phase(&self.terms.kinds, phase);
            let streaming = if phase == Phase::Unary { Streaming::Whole } else { Streaming::Streamed };
            let (mut hit, mut tried, mut calls) = (0, 0, JoinSet::new());
            loop {
                let more = hit < wanted && tried < wanted * TRIES && Instant::now() < until;
                if more && calls.len() < at_once {
                    let leaves = CancelPlan { phase: Some(phase), kind: kinds[tried % kinds.len()] };
                    let plan = self.plan(&name, streaming, Some(leaves));
                    calls.spawn(Arc::clone(self.driver).call(plan));
                    tried += 1;
                    continue;
                }
                let Some(completed) = calls.join_next().await else { break };
                // Events that arrive after the end of a call are used to determine its phase.
                tokio::time::sleep(WORD_TRAVELS).await;
                hit += usize::from(completed.is_ok_and(|completed| self.reached(&completed, phase)));
            }
            hit
        })
        .await
    }

    fn reached(&self, completed: &CompletedCall, phase: Phase) -> bool {
        let Some(cancelled_at) = cancelled_at(&completed.record) else { return false };
        if !self.driver.exact {
            return true;
        }
        let known = self.driver.feed.forget(&completed.record.tag);
        known.or(completed.timeline.clone()).map_or(phase == Phase::Queued, |timeline| {
            phase_of(&completed.record, &timeline, cancelled_at) == Some(phase)
        })
    }

    /// Requests for more tokens than any context has: the prefill engine accepts them and the decode engine refuses
    /// them.
    pub(crate) async fn refused(&self) {
        const NAME: &str = "refused";
        self.run_segment(NAME, SegmentKind::Refused, async {
            for _ in 0..REFUSED / REFUSED_AT_ONCE {
                let plan = CallPlan {
                    max_tokens: Some(TOO_MANY_TOKENS),
                    ..self.plan(NAME, Streaming::Streamed, None)
                };
                let completed = join(self.driver, vec![plan; REFUSED_AT_ONCE]).await;
                if completed.iter().any(|completed| completed.record.outcome != "refused") {
                    // The engine accepts the request and limits its tokens: this segment has nothing to measure.
                    break;
                }
            }
        })
        .await;
    }

    /// Load during which a process of the deployment is killed and restarted.
    pub(crate) async fn kill_part(
        &self,
        local: LocalDeployment,
        part: DeploymentPart,
    ) -> Result<LocalDeployment, BenchError> {
        let (name, fault, wanted) = match part {
            DeploymentPart::Router => ("fault router", "router killed", FaultCondition::Stream),
            DeploymentPart::Prefill => ("fault prefill", "prefill engine killed", FaultCondition::Prefill),
            DeploymentPart::Decode => ("fault decode", "decode engine killed", FaultCondition::Stream),
        };
        let restart = async {
            let restarted = tokio::task::spawn_blocking(move || {
                let mut local = local;
                local.kill(part)?;
                local.start_again(part)?;
                Ok::<_, std::io::Error>(local)
            });
            Ok(restarted.await??)
        };
        self.fault(name, fault, wanted, restart).await
    }

    /// Load during which commands of the user inject a fault and recover from it.
    pub(crate) async fn inject_fault(&self, name: &str, commands: &FaultCommands) -> Result<(), BenchError> {
        let run = async |command: &str| {
            let mut shell = tokio::process::Command::new("sh");
            let shell = shell
                .args(["-c", command])
                .stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::null());
            let ended = tokio::time::timeout(COMMAND_WITHIN, shell.kill_on_drop(true).status()).await;
            match ended {
                Ok(Ok(status)) if status.success() => Ok(()),
                Ok(Ok(status)) => Err(BenchError::from(format!("`{command}`: {status}"))),
                Ok(Err(error)) => Err(format!("`{command}`: {error}").into()),
                Err(_) => Err(format!("`{command}`: no end within {COMMAND_WITHIN:?}").into()),
            }
        };
        let inject = async {
            *self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner) = commands.recover.clone();
            run(&commands.inject).await?;
            if let Some(command) = &commands.recover {
                tokio::time::sleep(self.terms.fault.mul_f64(RECOVER_AFTER)).await;
                run(command).await?;
            }
            *self.unrecovered.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Ok(())
        };
        // The command may affect any part.
        self.fault(&format!("fault {name}"), name, FaultCondition::PrefillAndStream, inject).await
    }

    /// Load with cancels, during which a fault is injected as soon as its condition is met, and ends again.
    async fn fault<T>(
        &self,
        name: &str,
        fault: &str,
        wanted: FaultCondition,
        inject: impl Future<Output = Result<T, BenchError>>,
    ) -> Result<T, BenchError> {
        let wanted = if self.driver.exact { wanted } else { FaultCondition::Open };
        let SegmentOptions { fault: length, fault_share, .. } = self.terms;
        self.run_segment(name, SegmentKind::Fault, async {
            // Each fault has its own request times, so that an idle moment does not coincide with every fault.
            let load = join(self.driver, self.arrivals(name, name, fault_share, length));
            let record_fault = |recovered, struck| {
                let (segment, fault) = (name.to_owned(), fault.to_owned());
                let at_us = Moment::now().us();
                self.driver.recorder.put(&Record::Fault { segment, fault, at_us, recovered, struck });
            };
            let injection = async {
                tokio::time::sleep(length.mul_f64(FAULT_AFTER)).await;
                let began = Instant::now();
                let within = length.mul_f64(FAULT_BEFORE - FAULT_AFTER);
                let known = self.driver.until_in_flight(wanted, within).await;
                let waited_us = began.elapsed().as_micros() as u64;
                record_fault(false, Some(FaultContext { wanted, waited_us, known }));
                let result = inject.await;
                if result.is_ok() {
                    record_fault(true, None);
                }
                result
            };
            tokio::join!(load, injection).1
        })
        .await
    }

    /// Repeats the prompts of these calls without load and records the expected responses. If a response differs, the
    /// prompt is repeated once more. If these two differ, the expected response is unknown. With wrong responses all
    /// prompts are repeated in parallel too, which shows what load without cancels and faults changes.
    pub(crate) async fn verify(&self, calls: &[&CallRecord], within: Duration) {
        self.progress.print_status("verifying texts");
        let until = Instant::now() + within;
        let (mut repeated, mut any_wrong) = (Vec::new(), false);
        for (turn, call) in calls.iter().enumerate().take_while(|_| Instant::now() < until) {
            let Some(number) = self.driver.number_of(&call.tag) else { continue };
            let salt = format!("{}verify-{turn}", self.driver.prefix);
            let mut right = self.driver.verify_prompt(number, call, &salt).await;
            let whole = call.outcome == "done";
            let agrees = |text: &str| if whole { text == call.text } else { text.starts_with(&call.text) };
            let (mut answers, mut unanswered) = (Vec::new(), right.is_none());
            if let Some(first) = right.clone().filter(|text| !agrees(text)) {
                match self.driver.verify_prompt(number, call, &format!("{salt}-again")).await {
                    Some(again) if again == first => {}
                    Some(again) => (right, answers) = (None, vec![first, again]),
                    None => (right, unanswered) = (None, true),
                }
            }
            if let Some(right) = &right {
                any_wrong |= !agrees(right);
                repeated.push((number, *call));
            }
            let (tag, text) = (call.tag.clone(), Some(call.text.clone()));
            self.driver.recorder.put(&Record::Replay { tag, text, said: right, answers, unanswered });
        }
        if any_wrong {
            self.verify_in_parallel(&repeated, within).await;
        }
    }

    async fn verify_in_parallel(&self, calls: &[(u64, &CallRecord)], within: Duration) {
        self.progress.print_status("verifying texts in parallel");
        let until = Instant::now() + within;
        let calls = futures::stream::iter(calls.iter().enumerate());
        let repeated = calls.for_each_concurrent(VERIFIED_AT_ONCE, |(turn, &(number, call))| async move {
            if Instant::now() >= until {
                return;
            }
            let salt = format!("{}parallel-{turn}", self.driver.prefix);
            if let Some(text) = self.driver.verify_prompt(number, call, &salt).await {
                self.driver.recorder.put(&Record::ParallelReplay { tag: call.tag.clone(), text });
            }
        });
        repeated.await;
    }
}

/// The kinds of cancels under load, where all requests have the usual length. Such a response ends before a stall does,
/// so a stall would come too late. A vanished client is served like an uncancelled one until the deployment notices, so
/// it would not reduce the load. Both kinds are measured in phase segments. If no other kind is configured, they are
/// used here too.
fn kinds_of_load(kinds: &[CancelKind]) -> Vec<CancelKind> {
    without(kinds, &[CancelKind::Stall, CancelKind::Vanish])
}

/// The kinds of cancels in a phase. A client can stall only after its response has begun. If no other kind is
/// configured, clients stall in any case and count in the phase that they hit.
fn kinds_of_phase(kinds: &[CancelKind], phase: Phase) -> Vec<CancelKind> {
    if matches!(phase, Phase::Stream | Phase::Unary) {
        kinds.to_vec()
    } else {
        without(kinds, &[CancelKind::Stall])
    }
}

/// `kinds` without `left_out`, or all of them if none remains.
fn without(kinds: &[CancelKind], left_out: &[CancelKind]) -> Vec<CancelKind> {
    let others: Vec<CancelKind> = kinds.iter().copied().filter(|kind| !left_out.contains(kind)).collect();
    if others.is_empty() { kinds.to_vec() } else { others }
}

/// Makes planned calls, each at its time, and returns them in the order of the plans.
async fn join(driver: &Arc<CallDriver>, plans: Vec<CallPlan>) -> Vec<CompletedCall> {
    let calls: Vec<_> = plans.into_iter().map(|plan| tokio::spawn(Arc::clone(driver).call(plan))).collect();
    let mut completed = Vec::with_capacity(calls.len());
    for call in calls {
        // A call does not panic. If one did, it would be missing in the counts of the report.
        completed.extend(call.await.ok());
    }
    completed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_stall_or_vanish_in_a_storm_only_without_other_kinds() {
        let others = [CancelKind::Fin, CancelKind::Rst, CancelKind::HalfClose, CancelKind::Timeout];
        assert_eq!(kinds_of_load(&CancelKind::ALL), others);
        assert_eq!(kinds_of_load(&[CancelKind::Stall]), [CancelKind::Stall]);
        assert_eq!(kinds_of_load(&[]), []);
        assert_eq!(
            kinds_of_load(&[CancelKind::Vanish, CancelKind::Stall]),
            [CancelKind::Vanish, CancelKind::Stall]
        );
        let gap = [others.as_slice(), &[CancelKind::Vanish]].concat();
        assert_eq!(kinds_of_phase(&CancelKind::ALL, Phase::Gap), gap);
        assert_eq!(kinds_of_phase(&CancelKind::ALL, Phase::Stream), CancelKind::ALL);
        assert_eq!(kinds_of_phase(&[CancelKind::Stall], Phase::Gap), [CancelKind::Stall]);
    }
}
