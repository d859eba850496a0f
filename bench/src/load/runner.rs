//! Carries out a plan: each request at its time, whatever has become of those before, and every call as it happened.
//!
//! ```text
//!  writer ─(asks, 256 ahead)─▶ metronome ─(when due)─▶ dispatcher ─▶ one task per call ─▶ each(&Measured)
//! ```
//!
//! Requests are written ahead of their time, and waited for by a thread of their own: timers of an event loop have a grain of
//! a millisecond. Latency counts from when a request was due, so that what an endpoint does
//! to requests that wait because of it is seen (no coordinated omission). One that was due and was never sent, because time was
//! over while it waited, is told as [`Waited`]: to leave it out would be the same omission.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::ask::Ask;
use super::call::{Call, Outcome};
use super::client::{Client, Leave, Manner};
use super::clock::Moment;
use super::plan::workload::{Plan, Planned};
use super::retry::Retries;
use super::rng::Rng;
use super::speaker::Speaker;

/// Requests that are written before they are due.
const WRITTEN_AHEAD: usize = 256;
/// The metronome looks up at least so often, to see whether the run was stopped.
const LOOK_UP: Duration = Duration::from_millis(50);

/// One request of a run and what became of it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) index: usize,
    /// When it was due: what latencies count from.
    #[serde(rename = "scheduled_us")]
    pub(crate) scheduled: Moment,
    pub(crate) planned_input_tokens: u32,
    pub(crate) planned_output_tokens: u32,
    /// How often it was sent; only the last is told.
    pub(crate) attempts: usize,
    pub(crate) call: Call,
}

/// A request that was due when a run's time was over, and had not been sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Waited {
    pub(crate) index: usize,
    #[serde(rename = "scheduled_us")]
    pub(crate) scheduled: Moment,
    pub(crate) planned_input_tokens: u32,
    pub(crate) planned_output_tokens: u32,
    /// Until nothing more was sent: how late it would have been at least.
    #[serde(rename = "waited_us", serialize_with = "whole_us")]
    pub(crate) waited: Duration,
}

fn whole_us<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// A run that is over.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) began: Moment,
    pub(crate) ended: Moment,
    /// In the order in which they ended.
    pub(crate) calls: Vec<Measured>,
    /// Requests that were planned and not sent, because the run was stopped or its time was over.
    pub(crate) unsent: usize,
    /// Those of them that were due.
    pub(crate) waited: Vec<Waited>,
    /// It was told to stop.
    pub(crate) stopped: bool,
}

/// How a plan is carried out.
pub(crate) struct Runner<'a> {
    pub(crate) client: &'a Client,
    pub(crate) speaker: Arc<Speaker>,
    pub(crate) retries: Retries,
    /// Ends the run: nothing more is sent, and who is still waiting leaves.
    pub(crate) stop: CancellationToken,
    pub(crate) seed: u64,
}

/// What happens while a run lasts.
pub(crate) trait Watch {
    /// A request is on its way.
    fn sent(&mut self) {}
    /// A call has ended. What is taken out of it is not kept.
    fn ended(&mut self, _: &mut Measured) {}
    /// A request was due and is not sent any more.
    fn waited(&mut self, _: &Waited) {}
}

struct Written {
    index: usize,
    at: Option<Duration>,
    input_tokens: u32,
    output_tokens: u32,
    ask: Ask,
}

impl Runner<'_> {
    /// Runs to the end of the plan, or until it is stopped.
    pub(crate) async fn run(&self, plan: Plan, watch: &mut dyn Watch) -> Run {
        let (lanes, until) = (plan.lanes.unwrap_or(usize::MAX), plan.until);
        let planned: Vec<Due> = plan.requests.iter().map(Due::of).collect();
        let (write, written) = sync_channel(WRITTEN_AHEAD);
        let (ring, mut due) = mpsc::channel(1);
        let speaker = Arc::clone(&self.speaker);
        let writer = tokio::task::spawn_blocking(move || write_ahead(plan, &speaker, &write));
        // The first requests are written before the clock starts.
        let (ready, is_ready) = tokio::sync::oneshot::channel::<Instant>();
        let stop = self.stop.clone();
        let metronome = tokio::task::spawn_blocking(move || {
            if let Ok(begin) = is_ready.blocking_recv() {
                ring_in_time(begin, &written, &ring, &stop);
            }
        });
        let begin = Instant::now() + Duration::from_millis(20);
        // It waits for nothing else.
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
        // When nothing more is sent.
        let mut closed = None;
        while listening || !tasks.is_empty() {
            tokio::select! {
                biased;
                () = self.stop.cancelled(), if listening => listening = false,
                () = &mut over, if listening => listening = false,
                // What is due goes before what is over: the one would be late, the other has its times already.
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
                    // A call does not panic; were it to, the run has to end as well.
                    let mut ended: Measured = ended.expect("a call ends");
                    watch.ended(&mut ended);
                    calls.push(ended);
                }
            }
            if !listening {
                closed.get_or_insert_with(Moment::now);
            }
        }
        drop(due);
        // Both end when nobody listens any more.
        let _ = tokio::join!(writer, metronome);
        let ended = Moment::now();
        let left = &planned[sent..];
        let waited = overdue(left, sent, began, closed.unwrap_or(ended));
        waited.iter().for_each(|one| watch.waited(one));
        Run { began, ended, calls, unsent: left.len(), waited, stopped: self.stop.is_cancelled() }
    }

    fn send(&self, written: Written, began: Moment, tasks: &mut JoinSet<Measured>) {
        let Written { index, at, input_tokens, output_tokens, ask } = written;
        let scheduled = at.map_or_else(Moment::now, |at| began.plus(at));
        let (client, leave, retries) = (self.client.clone(), Leave::When(self.stop.clone()), self.retries);
        let mut rng = Rng::new(self.seed ^ index as u64);
        tasks.spawn(async move {
            let (attempts, call) = if retries.0 == 0 {
                (1, client.call(&ask, &leave, Manner::Fin).await)
            } else {
                match retries.call(&client, &ask, &leave, Manner::Fin, &mut rng).await {
                    Ok(mut attempts) => match (attempts.len(), attempts.pop()) {
                        (count, Some(last)) => (count, last),
                        (_, None) => (1, client.call(&ask, &leave, Manner::Fin).await),
                    },
                    Err(_) => (1, client.call(&ask, &leave, Manner::Fin).await),
                }
            };
            Measured {
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

/// What is kept of a plan's request until it is sent.
struct Due {
    at: Option<Duration>,
    input_tokens: u32,
    output_tokens: u32,
}

impl Due {
    fn of(planned: &Planned) -> Self {
        let (at, output_tokens) = (planned.at, planned.output_tokens);
        Self { at, input_tokens: planned.input_tokens(), output_tokens }
    }
}

/// Those that were due by then, of requests from `first` on. One that waits for the end of another is due when that ends, and
/// not before.
fn overdue(left: &[Due], first: usize, began: Moment, closed: Moment) -> Vec<Waited> {
    let due = |(place, one): (usize, &Due)| {
        let scheduled = began.plus(one.at?);
        (scheduled <= closed).then(|| Waited {
            index: first + place,
            scheduled,
            planned_input_tokens: one.input_tokens,
            planned_output_tokens: one.output_tokens,
            waited: closed.since(scheduled),
        })
    };
    left.iter().enumerate().filter_map(due).collect()
}

/// Writes requests in their order, as long as somebody takes them.
fn write_ahead(plan: Plan, speaker: &Speaker, write: &SyncSender<Written>) {
    for (index, planned) in plan.requests.into_iter().enumerate() {
        let ask = speaker.ask(&planned, index);
        let (input_tokens, output_tokens) = (planned.input_tokens(), planned.output_tokens);
        if write.send(Written { index, at: planned.at, input_tokens, output_tokens, ask }).is_err() {
            return;
        }
    }
}

/// Hands on each request when it is due.
fn ring_in_time(
    begin: Instant,
    written: &Receiver<Written>,
    ring: &mpsc::Sender<Written>,
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

impl Measured {
    /// From when it was due to its first token.
    pub(crate) fn ttft(&self) -> Option<Duration> {
        Some(self.call.tokens.first()?.since(self.scheduled))
    }

    /// From when it was due to its end.
    pub(crate) fn e2e(&self) -> Duration {
        self.call.ended.since(self.scheduled)
    }

    /// What follows the first token, for each token that follows it; `None` for a single token or none, or without a
    /// stream.
    pub(crate) fn tpot(&self) -> Option<Duration> {
        let after = self.call.completion_tokens().checked_sub(1).filter(|after| *after > 0)?;
        Some((self.e2e() - self.ttft()?) / after)
    }

    /// How late it was sent.
    pub(crate) fn lag(&self) -> Duration {
        self.call.began.since(self.scheduled)
    }

    /// Whether it failed, apart from a run that was stopped.
    pub(crate) fn failure(&self) -> Option<String> {
        self.call.outcome.failure()
    }

    pub(crate) fn was_stopped(&self) -> bool {
        self.call.outcome == Outcome::Left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_due_is_overdue() {
        let began = Moment::now();
        let due =
            |ms: Option<u64>| Due { at: ms.map(Duration::from_millis), input_tokens: 8, output_tokens: 2 };
        let left = [due(Some(100)), due(None), due(Some(400)), due(Some(401))];
        let waited = overdue(&left, 7, began, began.plus(Duration::from_millis(400)));
        let told: Vec<_> = waited.iter().map(|one| (one.index, one.waited.as_millis())).collect();
        assert_eq!(told, [(7, 300), (9, 0)]);
    }
}
