//! Runs a plan: sends each request at its time, whatever the state of earlier ones, and records every call.
//!
//! ```text
//!   writer ─(requests, 256 ahead)─▶ timer thread ─(when due)─▶ dispatcher ─▶ one task per call ─▶ RunObserver
//! ```
//!
//! Requests are written ahead of their time. A thread of its own waits until they are due, because timers of an
//! event loop have a resolution of one millisecond. Latency counts from the due time, so that delays of waiting
//! requests are included (no coordinated omission). A request that was due but not sent before the end of the run is
//! reported as [`UnsentRequest`]. To omit it would be the same error.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::call::{Call, CallOutcome};
use super::client::{CancelTrigger, Client, DisconnectKind};
use super::clock::Moment;
use super::endpoint_profile::EndpointProfile;
use super::plan::workload::{PlannedRequest, RunPlan};
use super::request::PreparedRequest;
use super::retry::RetryLimit;
use super::rng::Rng;

/// Requests that are written before they are due.
const WRITTEN_AHEAD: usize = 256;
/// Maximum sleep of the timer thread, which then checks whether the run was stopped.
const LOOK_UP: Duration = Duration::from_millis(50);

/// One request of a run and its call.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MeasuredCall {
    pub(crate) index: usize,
    /// When the request was due. Latencies count from here.
    #[serde(rename = "scheduled_us")]
    pub(crate) scheduled: Moment,
    pub(crate) planned_input_tokens: u32,
    pub(crate) planned_output_tokens: u32,
    /// Number of attempts. Only the last is reported.
    pub(crate) attempts: usize,
    pub(crate) call: Call,
}

/// A request that was due before the end of a run and was not sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct UnsentRequest {
    pub(crate) index: usize,
    #[serde(rename = "scheduled_us")]
    pub(crate) scheduled: Moment,
    pub(crate) planned_input_tokens: u32,
    pub(crate) planned_output_tokens: u32,
    /// Time from the due time until sending stopped: the minimum delay.
    #[serde(rename = "waited_us", serialize_with = "whole_us")]
    pub(crate) waited: Duration,
}

fn whole_us<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// The result of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunResult {
    pub(crate) began: Moment,
    pub(crate) ended: Moment,
    /// In the order in which the calls ended.
    pub(crate) calls: Vec<MeasuredCall>,
    /// Planned requests that were not sent, because the run was stopped or its time was over.
    pub(crate) unsent: usize,
    /// Those of the unsent requests that were due.
    pub(crate) waited: Vec<UnsentRequest>,
    /// The run was stopped.
    pub(crate) stopped: bool,
}

/// Runs a plan.
pub(crate) struct Runner<'a> {
    pub(crate) client: &'a Client,
    pub(crate) profile: Arc<EndpointProfile>,
    pub(crate) retries: RetryLimit,
    /// Ends the run: no further request is sent, and waiting clients disconnect.
    pub(crate) stop: CancellationToken,
    pub(crate) seed: u64,
}

/// Receives the events of a run.
pub(crate) trait RunObserver {
    /// A request was sent.
    fn sent(&mut self) {}
    /// A call has ended. Parts that the observer takes out are not kept.
    fn ended(&mut self, _: &mut MeasuredCall) {}
    /// A request was due and will not be sent.
    fn waited(&mut self, _: &UnsentRequest) {}
}

struct PreparedCall {
    index: usize,
    at: Option<Duration>,
    input_tokens: u32,
    output_tokens: u32,
    ask: PreparedRequest,
}

impl Runner<'_> {
    /// Runs until the plan ends or the run is stopped.
    pub(crate) async fn run(&self, plan: RunPlan, watch: &mut dyn RunObserver) -> RunResult {
        let (lanes, until) = (plan.lanes.unwrap_or(usize::MAX), plan.until);
        let planned: Vec<ScheduledCall> = plan.requests.iter().map(ScheduledCall::of).collect();
        let (write, written) = sync_channel(WRITTEN_AHEAD);
        let (ring, mut due) = mpsc::channel(1);
        let profile = Arc::clone(&self.profile);
        let writer = tokio::task::spawn_blocking(move || write_ahead(plan, &profile, &write));
        // The first requests are written before the clock starts.
        let (ready, is_ready) = tokio::sync::oneshot::channel::<Instant>();
        let stop = self.stop.clone();
        let timer = tokio::task::spawn_blocking(move || {
            if let Ok(begin) = is_ready.blocking_recv() {
                send_when_due(begin, &written, &ring, &stop);
            }
        });
        let begin = Instant::now() + Duration::from_millis(20);
        // The timer thread waits for nothing else.
        let _ = ready.send(begin);
        let began = Moment::of(begin);
        let over = async move {
            match until {
                Some(until) => tokio::time::sleep_until((begin + until).into()).await,
                None => std::future::pending().await,
            }
        };
        let mut over = std::pin::pin!(over);
        let (mut calls, mut tasks) = (Vec::new(), JoinSet::new());
        let (mut listening, mut sent) = (true, 0);
        // When sending stopped.
        let mut closed = None;
        while listening || !tasks.is_empty() {
            tokio::select! {
                biased;
                () = self.stop.cancelled(), if listening => listening = false,
                () = &mut over, if listening => listening = false,
                // Due requests come before ended calls: a request would be late, a call already has its times.
                written = due.recv(), if listening && tasks.len() < lanes => match written {
                    Some(written) => {
                        // In the plan's order.
                        sent = written.index + 1;
                        self.send(written, began, &mut tasks);
                        watch.sent();
                    }
                    None => listening = false,
                },
                Some(ended) = tasks.join_next() => {
                    // A call does not panic. If it did, the run must end as well.
                    let mut ended: MeasuredCall = ended.expect("a call ends");
                    watch.ended(&mut ended);
                    calls.push(ended);
                }
            }
            if !listening {
                closed.get_or_insert_with(Moment::now);
            }
        }
        drop(due);
        // Both end when the channel is closed.
        let _ = tokio::join!(writer, timer);
        let ended = Moment::now();
        let left = &planned[sent..];
        let waited = overdue(left, sent, began, closed.unwrap_or(ended));
        waited.iter().for_each(|one| watch.waited(one));
        RunResult { began, ended, calls, unsent: left.len(), waited, stopped: self.stop.is_cancelled() }
    }

    fn send(&self, written: PreparedCall, began: Moment, tasks: &mut JoinSet<MeasuredCall>) {
        let PreparedCall { index, at, input_tokens, output_tokens, ask } = written;
        let scheduled = at.map_or_else(Moment::now, |at| began.plus(at));
        let (client, leave, retries) =
            (self.client.clone(), CancelTrigger::When(self.stop.clone()), self.retries);
        let mut rng = Rng::new(self.seed ^ index as u64);
        tasks.spawn(async move {
            let mut attempts = Vec::new();
            if retries.0 > 0 {
                let retried = retries.call(&client, &ask, &leave, DisconnectKind::Fin, &mut rng).await;
                attempts = retried.unwrap_or_default();
            }
            let (attempts, call) = match (attempts.len(), attempts.pop()) {
                (count, Some(last)) => (count, last),
                (_, None) => (1, client.call(&ask, &leave, DisconnectKind::Fin).await),
            };
            MeasuredCall {
                index,
                scheduled,
                planned_input_tokens: input_tokens,
                planned_output_tokens: output_tokens,
                attempts,
                call,
            }
        });
    }
}

/// The part of a plan's request that is kept until it is sent.
struct ScheduledCall {
    at: Option<Duration>,
    input_tokens: u32,
    output_tokens: u32,
}

impl ScheduledCall {
    fn of(planned: &PlannedRequest) -> Self {
        let (at, output_tokens) = (planned.at, planned.output_tokens);
        Self { at, input_tokens: planned.input_tokens(), output_tokens }
    }
}

/// The requests from `first` on that were due. A request that waits for the end of another is due only then.
fn overdue(left: &[ScheduledCall], first: usize, began: Moment, closed: Moment) -> Vec<UnsentRequest> {
    let due = |(place, one): (usize, &ScheduledCall)| {
        let scheduled = began.plus(one.at?);
        (scheduled <= closed).then(|| UnsentRequest {
            index: first + place,
            scheduled,
            planned_input_tokens: one.input_tokens,
            planned_output_tokens: one.output_tokens,
            waited: closed.since(scheduled),
        })
    };
    left.iter().enumerate().filter_map(due).collect()
}

/// Writes requests in order until the channel is closed.
fn write_ahead(plan: RunPlan, profile: &EndpointProfile, write: &SyncSender<PreparedCall>) {
    for (index, planned) in plan.requests.into_iter().enumerate() {
        let ask = profile.ask(&planned, index);
        let (input_tokens, output_tokens) = (planned.input_tokens(), planned.output_tokens);
        if write.send(PreparedCall { index, at: planned.at, input_tokens, output_tokens, ask }).is_err() {
            return;
        }
    }
}

/// Passes on each request when it is due.
fn send_when_due(
    begin: Instant,
    written: &Receiver<PreparedCall>,
    ring: &mpsc::Sender<PreparedCall>,
    stop: &CancellationToken,
) {
    while let Ok(next) = written.recv() {
        let at = begin + next.at.unwrap_or_default();
        loop {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            if stop.is_cancelled() || ring.is_closed() {
                return;
            }
            std::thread::park_timeout(left.min(LOOK_UP));
        }
        if ring.blocking_send(next).is_err() {
            return;
        }
    }
}

impl MeasuredCall {
    /// From the due time to the first token.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        Some(self.call.tokens.first()?.since(self.scheduled))
    }

    /// From the due time to the end.
    pub(crate) fn e2e(&self) -> Duration {
        self.call.ended.since(self.scheduled)
    }

    /// Time after the first token per further token. `None` without a stream or with fewer than two tokens.
    pub(crate) fn tpot(&self) -> Option<Duration> {
        let after = self.call.completion_tokens().checked_sub(1).filter(|after| *after > 0)?;
        Some((self.e2e() - self.ttft()?) / after)
    }

    /// Delay of sending.
    pub(crate) fn lag(&self) -> Duration {
        self.call.began.since(self.scheduled)
    }

    /// Why the call failed. A stopped run is no failure.
    pub(crate) fn failure(&self) -> Option<String> {
        self.call.outcome.failure()
    }

    pub(crate) fn was_stopped(&self) -> bool {
        self.call.outcome == CallOutcome::Left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_due_calls_are_overdue() {
        let began = Moment::now();
        let due = |ms: Option<u64>| ScheduledCall {
            at: ms.map(Duration::from_millis),
            input_tokens: 8,
            output_tokens: 2,
        };
        let left = [due(Some(100)), due(None), due(Some(400)), due(Some(401))];
        let waited = overdue(&left, 7, began, began.plus(Duration::from_millis(400)));
        let overdue_ms: Vec<_> = waited.iter().map(|one| (one.index, one.waited.as_millis())).collect();
        assert_eq!(overdue_ms, [(7, 300), (9, 0)]);
    }
}
