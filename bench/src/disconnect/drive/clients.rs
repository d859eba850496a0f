//! Clients on one deployment: each call is planned, made, left as planned, and written down.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::disconnect::drive::ghosts::Ghosts;
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::drive::timing::{Aim, Aims};
use crate::disconnect::plan::phase::{Kind, Phase};
use crate::disconnect::record::flight::{InFlight, Wanted};
use crate::disconnect::record::raw::{CallRecord, Leaves, Record};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::timeline::Timeline;
use crate::disconnect::record::watch::Feed;
use crate::load::plan::prompts::plain;
use crate::load::retry::{is_worth_another, pause};
use crate::load::rng::Rng;
use crate::load::{Call, Client, Endpoint, Leave, Manner, Moment, Outcome, Prompt, Streaming, Wish};

/// How often an SDK asks again.
const RETRIES: u32 = 2;
/// Who may leave anywhere in a storm leaves with so much of a stream, as a divisor, at the latest: one that is read in the rest is
/// often over on its engine.
const STREAM_SHARE: u32 = 3;
/// Characters of an error that are kept.
const ERROR_CHARS: usize = 200;
/// What every call asks for.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: String,
    /// Words of a prompt.
    pub(crate) words: usize,
    pub(crate) max_tokens: u32,
    /// How long a client that stalls reads nothing.
    pub(crate) stall: Duration,
}

/// One call that is to be made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) act: String,
    pub(crate) due: Instant,
    pub(crate) stream: bool,
    pub(crate) leaves: Option<Leaves>,
    /// Other than the shape's.
    pub(crate) max_tokens: Option<u32>,
}

/// See the module's documentation.
pub(crate) struct Stage {
    pub(crate) client: Client,
    pub(crate) shape: Shape,
    pub(crate) feed: Arc<Feed>,
    /// Engines tell every step.
    pub(crate) exact: bool,
    pub(crate) recorder: Arc<Recorder>,
    /// Tags begin with it.
    pub(crate) prefix: String,
    pub(crate) seed: u64,
    pub(crate) aims: Mutex<Aims>,
    pub(crate) next: AtomicU64,
    /// Calls that are not over, by tag, and whether they stream.
    pub(crate) open: Mutex<BTreeMap<String, bool>>,
    /// How clients stall in a phase; known once calls alone have shown how fast answers are.
    pub(crate) stall: OnceLock<Stall>,
    /// Requests of clients that have vanished, and what such clients ask for.
    pub(crate) ghosts: Ghosts,
    /// The run is broken off: no call goes on, and none of them counts.
    pub(crate) cut: CancellationToken,
}

/// A call that was made, and what engines have told of it by then.
pub(crate) struct Made {
    pub(crate) record: CallRecord,
    pub(crate) call: Call,
    pub(crate) timeline: Option<Timeline>,
}

impl Stage {
    /// The prompt of the call with this number: never the same twice, in no two runs; but for its first word always the
    /// same for a seed.
    pub(crate) fn prompt(&self, number: u64) -> Prompt {
        let mut rng = Rng::stream(self.seed, &format!("prompt-{number}"));
        // Run and number first: no block of it is in any prefix cache.
        Prompt::Text(plain(&format!("{}{number}", self.prefix), self.shape.words, &mut rng))
    }

    /// The number in a tag of this run.
    pub(crate) fn number_of(&self, tag: &str) -> Option<u64> {
        tag.strip_prefix(&self.prefix)?.trim_end_matches("-again").parse().ok()
    }

    /// Makes a call as it is planned, and what an SDK would make of it.
    pub(crate) async fn go(self: Arc<Self>, plan: Plan) -> Made {
        tokio::time::sleep_until(plan.due.into()).await;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let made = self.once(&plan, number, 0).await;
        if let (Some(Leaves { phase: Some(_), kind: Kind::Vanish }), "left") =
            (plan.leaves, made.record.outcome.as_str())
        {
            tokio::select! {
                () = self.cut.cancelled() => {}
                () = self.ghosts.while_there(&made.record, self.exact.then_some(&*self.feed)) => {}
            }
        }
        if plan.leaves.is_some_and(|leaves| leaves.kind == Kind::Timeout) && made.record.outcome == "left" {
            self.again(plan, number, &made.call).await;
        }
        made
    }

    /// The same prompt, as an SDK does, with its waits and as often; under tags of their own, so that they can be told apart.
    async fn again(&self, plan: Plan, number: u64, first: &Call) {
        let mut rng = Rng::stream(self.seed, &format!("retries-{number}"));
        let mut wait = pause(0, first, &mut rng);
        for attempt in 1..=RETRIES {
            tokio::time::sleep(wait).await;
            let again = Plan { due: Instant::now(), leaves: None, ..plan.clone() };
            let made = self.once(&again, number, attempt).await;
            if !is_worth_another(&made.call) {
                break;
            }
            wait = pause(attempt, &made.call, &mut rng);
        }
    }

    /// `attempt`: from 0; what is asked again has `-again` in its tag, once for each time.
    async fn once(&self, plan: &Plan, number: u64, attempt: u32) -> Made {
        let first = format!("{}{number}", self.prefix);
        let tag = format!("{first}{}", "-again".repeat(attempt as usize));
        let retries = (attempt > 0).then_some(first);
        let extra = extra(None);
        let prompt = self.prompt(number);
        let usual = Stall::usual(self.shape.max_tokens, self.shape.stall);
        // In calm and storm everybody asks for as much: what is compared is the same.
        let stall = match plan.leaves {
            Some(Leaves { phase: Some(_), kind: Kind::Stall }) => *self.stall.get().unwrap_or(&usual),
            _ => usual,
        };
        let max_tokens = match plan.leaves {
            Some(Leaves { phase: Some(Phase::Stream | Phase::Unary), kind: Kind::Vanish }) => {
                self.ghosts.max_tokens(usual.max_tokens)
            }
            _ => stall.max_tokens,
        };
        let wish = Wish {
            ignore_eos: plan.max_tokens.is_none(),
            streaming: if plan.stream { Streaming::Streamed } else { Streaming::Whole },
            user: Some(&tag),
            extra: Some(&extra),
            ..Wish::new(
                self.shape.endpoint,
                &self.shape.model,
                &prompt,
                plan.max_tokens.unwrap_or(max_tokens),
            )
        };
        let ask = wish.ask();
        let mut rng = Rng::stream(self.seed, &format!("leaves-{number}"));
        let (leave, aiming) = match plan.leaves {
            None => (Leave::Never, None),
            Some(leaves) => self.leave(&tag, plan.stream, leaves, &mut rng),
        };
        let manner = match plan.leaves.map(|leaves| leaves.kind) {
            None | Some(Kind::Fin | Kind::Timeout) => Manner::Fin,
            Some(Kind::Rst) => Manner::Rst,
            Some(Kind::HalfClose) => Manner::HalfClose,
            Some(Kind::Stall) => Manner::Stall { hold: stall.hold },
            Some(Kind::Vanish) => Manner::Vanish,
        };
        self.open().insert(tag.clone(), plan.stream);
        let call = tokio::select! {
            biased;
            () = self.cut.cancelled() => std::future::pending().await,
            call = self.client.call(&ask, &leave, manner) => call,
        };
        self.open().remove(&tag);
        if let Some(aiming) = aiming {
            aiming.abort();
        }
        let mut record = record_of(&call, plan, tag, retries);
        record.max_tokens = (max_tokens != usual.max_tokens).then_some(max_tokens);
        self.recorder.put(&Record::Call(record.clone()));
        let timeline = self.feed.forget(&record.tag);
        // What is told later is not learnt from; there are others.
        self.aims.lock().unwrap_or_else(PoisonError::into_inner).learn(&record.seen(), timeline.as_ref());
        Made { record, call, timeline }
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<String, bool>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until what is in flight is what is wanted, at most so long; says what is in flight then.
    pub(crate) async fn until_in_flight(&self, wanted: Wanted, within: Duration) -> InFlight {
        let open = || self.open().iter().map(|(tag, stream)| (tag.clone(), *stream)).collect();
        self.feed.until_in_flight(within, self.exact, open, |flight| wanted.is_in(flight)).await
    }

    /// Arranges for a client to leave in its phase.
    fn leave(
        &self,
        tag: &str,
        stream: bool,
        leaves: Leaves,
        rng: &mut Rng,
    ) -> (Leave, Option<tokio::task::JoinHandle<()>>) {
        let began = Instant::now();
        let phase = leaves.phase.unwrap_or_else(|| {
            // Anywhere in the life of a request, in each part of it as often.
            Phase::COMMON[rng.below(Phase::COMMON.len() as u64 - 1) as usize]
        });
        let phase = if phase == Phase::Stream && !stream { Phase::Unary } else { phase };
        let within = |tokens: u32, rng: &mut Rng| 1 + rng.below(u64::from(tokens).max(1)) as usize;
        let anywhere = leaves.phase.is_none();
        if phase == Phase::Stream {
            let most = self.shape.max_tokens;
            let most = if anywhere { most / STREAM_SHARE } else { most * 2 / 3 };
            return (Leave::AfterTokens(within(most, rng)), None);
        }
        let aims = self.aims.lock().unwrap_or_else(PoisonError::into_inner);
        let aim = aims.at(phase, self.exact, rng);
        // Never seen: somewhere in its first moments.
        let mut aim = aim.unwrap_or_else(|| Aim::At(Duration::from_micros(rng.below(3_000))));
        if anywhere {
            aim = aim.in_time(aims.while_it_lives(stream));
        }
        drop(aims);
        let (leave, aiming) = aim.leave(began, &self.feed, tag);
        let leave = match leave {
            // A request that is quicker than those before it is left at a token.
            Leave::When(said) if anywhere && stream => {
                Leave::WhenOrAfterTokens(said, within(self.shape.max_tokens / STREAM_SHARE, rng))
            }
            leave => leave,
        };
        (leave, Some(aiming))
    }

    /// Asks the prompt of a call again, in no company, and past every prefix cache; what it says.
    pub(crate) async fn ask_again(&self, number: u64, call: &CallRecord, salt: &str) -> Option<String> {
        let extra = extra(Some(salt));
        let prompt = self.prompt(number);
        // One that vanishes has left before the usual answer's end, whatever it asked for.
        let asked = call.max_tokens.filter(|_| !call.vanishes());
        let max_tokens = asked.unwrap_or(self.shape.max_tokens);
        let wish = Wish {
            ignore_eos: true,
            streaming: if call.stream { Streaming::Streamed } else { Streaming::Whole },
            extra: Some(&extra),
            ..Wish::new(self.shape.endpoint, &self.shape.model, &prompt, max_tokens)
        };
        let call = self.client.call(&wish.ask(), &Leave::Never, Manner::Fin).await;
        call.is_done().then_some(call.text)
    }
}

/// Greedy; what is said can be compared.
fn extra(salt: Option<&str>) -> Map<String, Value> {
    let mut extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
    if let Some(salt) = salt {
        extra.insert("cache_salt".into(), salt.into());
    }
    extra
}

fn record_of(call: &Call, plan: &Plan, tag: String, retries: Option<String>) -> CallRecord {
    let (outcome, error) = match &call.outcome {
        Outcome::Done => ("done", None),
        Outcome::Left => ("left", None),
        Outcome::Refused { message, .. } => ("refused", Some(message.clone())),
        Outcome::Failed { message, .. } => ("failed", Some(message.clone())),
        Outcome::Broken { stage, why } => ("broken", Some(format!("{}: {why}", stage.as_str()))),
        Outcome::TimedOut { stage } => ("timed_out", Some(stage.as_str().to_owned())),
    };
    let after = |moment: Moment| moment.us().saturating_sub(call.began.us());
    CallRecord {
        act: plan.act.clone(),
        tag,
        leaves: plan.leaves,
        stream: plan.stream,
        due_us: Moment::of(plan.due).us(),
        began_us: call.began.us(),
        sent_us: call.sent.map(Moment::us),
        left_us: call.left.map(Moment::us),
        ended_us: call.ended.us(),
        tokens_us: call.tokens.iter().copied().map(after).collect(),
        outcome: outcome.into(),
        status: call.status,
        error: error.map(|error| error.chars().take(ERROR_CHARS).collect()),
        generated: call.completion_tokens(),
        max_tokens: None,
        text: call.text.clone(),
        retries,
    }
}
