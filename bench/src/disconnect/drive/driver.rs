//! The clients of a deployment: they make planned calls, cancel them as planned, and record them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::disconnect::drive::call::{CallPlan, CompletedCall, record_of};
use crate::disconnect::drive::phase_times::{CancelPoint, PhaseTimes};
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::drive::vanished_clients::VanishedClients;
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::in_flight::{FaultCondition, InFlight};
use crate::disconnect::record::raw::{CallRecord, CancelPlan, Record};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::watch::TimelineFeed;
use crate::load::plan::prompts::plain;
use crate::load::retry::{is_worth_another, pause};
use crate::load::rng::Rng;
use crate::load::{Call, CancelTrigger, Client, CompletionSpec, DisconnectKind, Endpoint, Prompt, Streaming};

/// Retries of an SDK.
const RETRIES: u32 = 2;
/// In a storm, a stream is cancelled within this share of its tokens, as a divisor. Later its engine has often
/// completed the request.
const STREAM_SHARE: u32 = 3;

/// The request of every call.
#[derive(Clone, Debug)]
pub(crate) struct RequestShape {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: String,
    /// Words of a prompt.
    pub(crate) words: usize,
    pub(crate) max_tokens: u32,
    /// How long a stalled client reads nothing.
    pub(crate) stall: Duration,
}

/// See the module's documentation.
pub(crate) struct CallDriver {
    pub(crate) client: Client,
    pub(crate) shape: RequestShape,
    pub(crate) feed: Arc<TimelineFeed>,
    /// All engines have event logs.
    pub(crate) exact: bool,
    pub(crate) recorder: Arc<Recorder>,
    /// The prefix of all tags.
    pub(crate) prefix: String,
    pub(crate) seed: u64,
    pub(crate) phase_times: Mutex<PhaseTimes>,
    pub(crate) next: AtomicU64,
    /// Open calls by tag.
    pub(crate) open: Mutex<BTreeMap<String, Streaming>>,
    /// How clients stall in a phase; set by calibration.
    pub(crate) stall: OnceLock<Stall>,
    /// Requests of vanished clients, and their length.
    pub(crate) vanished: VanishedClients,
    /// Cancelled when the run is stopped: no call continues, and none of them counts.
    pub(crate) cut: CancellationToken,
}

impl CallDriver {
    /// The prompt of the call with this number. Prompts of different calls and runs differ in their first word. The
    /// other words depend on the seed only.
    pub(crate) fn prompt(&self, number: u64) -> Prompt {
        let mut rng = Rng::stream(self.seed, &format!("prompt-{number}"));
        // Run and number first: no prefix cache has a block of the prompt.
        Prompt::Text(plain(&format!("{}{number}", self.prefix), self.shape.words, &mut rng))
    }

    /// The number in a tag of this run.
    pub(crate) fn number_of(&self, tag: &str) -> Option<u64> {
        tag.strip_prefix(&self.prefix)?.trim_end_matches("-again").parse().ok()
    }

    /// Makes a planned call, with the retries of an SDK.
    pub(crate) async fn call(self: Arc<Self>, plan: CallPlan) -> CompletedCall {
        tokio::time::sleep_until(plan.due.into()).await;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let completed = self.attempt(&plan, number, 0).await;
        if let (Some(CancelPlan { phase: Some(_), kind: CancelKind::Vanish }), "left") =
            (plan.leaves, completed.record.outcome.as_str())
        {
            tokio::select! {
                () = self.cut.cancelled() => {}
                () = self.vanished.wait_until_noticed(&completed.record, self.exact.then_some(&*self.feed)) => {}
            }
        }
        if plan.leaves.is_some_and(|leaves| leaves.kind == CancelKind::Timeout)
            && completed.record.outcome == "left"
        {
            self.retry(plan, number, &completed.call).await;
        }
        completed
    }

    /// Repeats the prompt with the pauses and the number of attempts of an SDK. Each retry has a tag of its own.
    async fn retry(&self, plan: CallPlan, number: u64, first: &Call) {
        let mut rng = Rng::stream(self.seed, &format!("retries-{number}"));
        let mut wait = pause(0, first, &mut rng);
        for attempt in 1..=RETRIES {
            tokio::time::sleep(wait).await;
            let again = CallPlan { due: Instant::now(), leaves: None, ..plan.clone() };
            let completed = self.attempt(&again, number, attempt).await;
            if !is_worth_another(&completed.call) {
                break;
            }
            wait = pause(attempt, &completed.call, &mut rng);
        }
    }

    /// `attempt`: from 0. The tag of a retry ends with one `-again` per attempt.
    async fn attempt(&self, plan: &CallPlan, number: u64, attempt: u32) -> CompletedCall {
        let first = format!("{}{number}", self.prefix);
        let tag = format!("{first}{}", "-again".repeat(attempt as usize));
        let retries = (attempt > 0).then_some(first);
        let extra = extra(None);
        let prompt = self.prompt(number);
        let usual = Stall::usual(self.shape.max_tokens, self.shape.stall);
        // In calm and storm all requests have the same length, so that they are comparable.
        let stall = match plan.leaves {
            Some(CancelPlan { phase: Some(_), kind: CancelKind::Stall }) => {
                *self.stall.get().unwrap_or(&usual)
            }
            _ => usual,
        };
        let max_tokens = match plan.leaves {
            Some(CancelPlan { phase: Some(Phase::Stream | Phase::Unary), kind: CancelKind::Vanish }) => {
                self.vanished.max_tokens(usual.max_tokens)
            }
            _ => stall.max_tokens,
        };
        let asked_tokens = plan.max_tokens.unwrap_or(max_tokens);
        let spec = CompletionSpec {
            ignore_eos: plan.max_tokens.is_none(),
            streaming: plan.streaming,
            user: Some(&tag),
            extra: Some(&extra),
            ..CompletionSpec::new(self.shape.endpoint, &self.shape.model, &prompt, asked_tokens)
        };
        let request = spec.prepare();
        let mut rng = Rng::stream(self.seed, &format!("leaves-{number}"));
        let (leave, timer) = match plan.leaves {
            None => (CancelTrigger::Never, None),
            Some(leaves) => self.schedule_cancel(&tag, plan.streaming, leaves, &mut rng),
        };
        let kind = match plan.leaves.map(|leaves| leaves.kind) {
            None | Some(CancelKind::Fin | CancelKind::Timeout) => DisconnectKind::Fin,
            Some(CancelKind::Rst) => DisconnectKind::Rst,
            Some(CancelKind::HalfClose) => DisconnectKind::HalfClose,
            Some(CancelKind::Stall) => DisconnectKind::Stall { hold: stall.hold },
            Some(CancelKind::Vanish) => DisconnectKind::Vanish,
        };
        self.open().insert(tag.clone(), plan.streaming);
        let call = tokio::select! {
            biased;
            () = self.cut.cancelled() => std::future::pending().await,
            call = self.client.call(&request, &leave, kind) => call,
        };
        self.open().remove(&tag);
        if let Some(timer) = timer {
            timer.abort();
        }
        let mut record = record_of(&call, plan, tag, retries);
        record.max_tokens = (max_tokens != usual.max_tokens).then_some(max_tokens);
        self.recorder.put(&Record::Call(record.clone()));
        let timeline = self.feed.forget(&record.tag);
        // Events that arrive later are not used for the phase times.
        self.phase_times
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .learn(&record.client_times(), timeline.as_ref());
        CompletedCall { record, call, timeline }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<String, Streaming>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the requests in flight meet the condition or the time is over, and returns them.
    pub(crate) async fn until_in_flight(&self, wanted: FaultCondition, within: Duration) -> InFlight {
        let open = || self.open().clone();
        self.feed.until_in_flight(within, self.exact, open, |flight| wanted.is_met_by(flight)).await
    }

    /// Plans the cancel of a call in its phase.
    fn schedule_cancel(
        &self,
        tag: &str,
        streaming: Streaming,
        leaves: CancelPlan,
        rng: &mut Rng,
    ) -> (CancelTrigger, Option<tokio::task::JoinHandle<()>>) {
        let began = Instant::now();
        let phase = leaves.phase.unwrap_or_else(|| {
            // Any phase, each with the same probability.
            Phase::STORM[rng.below(Phase::STORM.len() as u64) as usize]
        });
        let whole = streaming == Streaming::Whole;
        let phase = if phase == Phase::Stream && whole { Phase::Unary } else { phase };
        let within = |tokens: u32, rng: &mut Rng| 1 + rng.below(u64::from(tokens).max(1)) as usize;
        let anywhere = leaves.phase.is_none();
        if phase == Phase::Stream {
            let most = self.shape.max_tokens;
            let most = if anywhere { most / STREAM_SHARE } else { most * 2 / 3 };
            return (CancelTrigger::AfterTokens(within(most, rng)), None);
        }
        let phase_times = self.phase_times.lock().unwrap_or_else(PoisonError::into_inner);
        let point = phase_times.at(phase, self.exact, rng);
        // Without observed times: at a random time shortly after the start.
        let mut point = point.unwrap_or_else(|| CancelPoint::At(Duration::from_micros(rng.below(3_000))));
        if anywhere {
            point = point.limited_to(phase_times.usual_lifetime(streaming));
        }
        drop(phase_times);
        let (leave, timer) = point.leave(began, &self.feed, tag);
        let leave = match leave {
            // A faster request than earlier ones is cancelled at a token.
            CancelTrigger::When(token) if anywhere && !whole => {
                CancelTrigger::WhenOrAfterTokens(token, within(self.shape.max_tokens / STREAM_SHARE, rng))
            }
            leave => leave,
        };
        (leave, Some(timer))
    }

    /// Repeats the prompt of a call without load and without cached blocks, and returns the response.
    pub(crate) async fn verify_prompt(&self, number: u64, call: &CallRecord, salt: &str) -> Option<String> {
        let extra = extra(Some(salt));
        let prompt = self.prompt(number);
        // A vanishing client is gone before the usual end of a response, however many tokens it requested.
        let asked = call.max_tokens.filter(|_| !call.vanishes());
        let max_tokens = asked.unwrap_or(self.shape.max_tokens);
        let spec = CompletionSpec {
            ignore_eos: true,
            streaming: if call.stream { Streaming::Streamed } else { Streaming::Whole },
            extra: Some(&extra),
            ..CompletionSpec::new(self.shape.endpoint, &self.shape.model, &prompt, max_tokens)
        };
        let call = self.client.call(&spec.prepare(), &CancelTrigger::Never, DisconnectKind::Fin).await;
        call.is_done().then_some(call.text)
    }
}

/// Greedy sampling makes responses comparable.
fn extra(salt: Option<&str>) -> Map<String, Value> {
    let mut extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
    if let Some(salt) = salt {
        extra.insert("cache_salt".into(), salt.into());
    }
    extra
}
