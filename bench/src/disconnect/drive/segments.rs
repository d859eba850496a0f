//! The parts of a run: to learn how fast the deployment is, the load in calm and in storm, clients that leave in each
//! phase, clients that are refused, engines that die, and at last the same prompts again when all is quiet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::BenchError;
use crate::disconnect::drive::clients::{Made, Plan, Stage};
use crate::disconnect::drive::local::{Own, Part};
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::drive::rate::CALIBRATION_CLIENTS;
use crate::disconnect::drive::stall::{Pace, Stall};
use crate::disconnect::plan::options::Terms;
use crate::disconnect::plan::phase::{Kind, Phase};
use crate::disconnect::record::flight::{Struck, Wanted};
use crate::disconnect::record::raw::{ActKind, CallRecord, Leaves, Record};
use crate::disconnect::record::watch::Watch;
use crate::load::Moment;
use crate::load::rng::Rng;

/// Calls one after another that teach the phases.
const LESSONS: usize = 16;
/// For how long clients show how much the deployment can do.
const CALIBRATION: Duration = Duration::from_secs(2);
/// Clients at once that are to leave in a phase. Most of them have left and stall, or wait to ask again.
const PHASE_CLIENTS: usize = 10;
/// Enough at once for some of them to wait.
const QUEUE_CLIENTS: usize = 32;
/// For each client that is to leave in a phase, so many may try.
const TRIES: usize = 12;
/// Clients that the decode engine is to refuse.
const REFUSED: usize = 20;
const REFUSED_AT_ONCE: usize = 2;
/// More than any context.
const TOO_MANY_TOKENS: u32 = 1 << 24;
/// From an engine's event to its being known here, as a rule.
const WORD_TRAVELS: Duration = Duration::from_millis(3);
/// A fault comes after so much of its act, as soon as there is in flight what it is to meet; and after so much of it
/// without that.
const FAULT_AFTER: f64 = 0.25;
const FAULT_BEFORE: f64 = 0.5;
/// And is mended so much of the act later, where somebody else's command does it.
const MEND_AFTER: f64 = 0.25;
/// A command that breaks or mends ends within this time.
const COMMAND_WITHIN: Duration = Duration::from_secs(120);

/// The run's parts, in order.
pub(crate) struct Acts<'a> {
    pub(crate) stage: &'a Arc<Stage>,
    pub(crate) watch: &'a Watch,
    pub(crate) terms: Terms,
    /// Says how far it is.
    pub(crate) progress: &'a Progress,
    /// What has to be run if the run is broken off now.
    pub(crate) unmended: &'a Mutex<Option<String>>,
}

impl Acts<'_> {
    /// Writes the beginning and the end of an act around it; between its last call and its end the engines come to rest.
    async fn act<T>(&self, name: &str, what: ActKind, run: impl Future<Output = T>) -> T {
        self.watch.read_counters().await;
        let (put, act) = (|record| self.stage.recorder.put(&record), name.to_owned());
        let at_us = Moment::now().us();
        put(Record::SegmentBegan { act: act.clone(), at_us, what });
        self.progress.part(name, at_us);
        let result = run.await;
        self.watch.home(self.stage.ghosts.patience(self.terms.settle)).await;
        self.watch.read_counters().await;
        // The next look carries the counters.
        self.watch.home(Duration::from_millis(100)).await;
        put(Record::SegmentEnded { act, at_us: Moment::now().us() });
        result
    }

    fn plan(&self, act: &str, stream: bool, leaves: Option<Leaves>) -> Plan {
        Plan { act: act.into(), due: Instant::now(), stream, leaves, max_tokens: None }
    }

    /// Learns the phases from calls one after another, and says how many requests a second the deployment completes.
    pub(crate) async fn calibrate(&self) -> Result<f64, BenchError> {
        const NAME: &str = "calibration";
        self.act(NAME, ActKind::Calibration, async {
            let (mut untold, mut pace) = (0, Pace::default());
            for lesson in 0..LESSONS {
                let made = Arc::clone(self.stage).go(self.plan(NAME, lesson % 4 != 3, None)).await;
                tokio::time::sleep(WORD_TRAVELS).await;
                untold += usize::from(self.stage.feed.forget(&made.record.tag).is_none());
                pace.learn(&made);
                if made.record.outcome != "done" {
                    let why = made.record.error.unwrap_or_default();
                    return Err(
                        format!("the deployment does not answer: {} {why}", made.record.outcome).into()
                    );
                }
            }
            if self.stage.exact && untold * 2 > LESSONS {
                let why = format!(
                    "the engines' event logs know nothing of {untold} of {LESSONS} requests: these are not the engines \
                     that answer, or what is before them does not pass on `user`; --metrics-only does without"
                );
                return Err(why.into());
            }
            let room = self.watch.room(&self.stage.shape.model).await;
            let usual = Stall::usual(self.stage.shape.max_tokens, self.stage.shape.stall);
            let stall = usual.of(&pace, room, PHASE_CLIENTS);
            // Nobody has set it before: there is one calibration.
            let _ = self.stage.stall.set(stall);
            self.stage.ghosts.learn(&pace, room, self.stage.shape.max_tokens, PHASE_CLIENTS);
            let until = Instant::now() + CALIBRATION;
            let clients = (0..CALIBRATION_CLIENTS).map(|_| {
                let (stage, plan) = (Arc::clone(self.stage), self.plan(NAME, true, None));
                tokio::spawn(async move {
                    let mut done = 0;
                    while Instant::now() < until {
                        let made = Arc::clone(&stage).go(Plan { due: Instant::now(), ..plan.clone() }).await;
                        done += usize::from(made.record.outcome == "done");
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

    /// The same load in calm and in storm, round by round: a machine that is slower for a while is so for both. Every
    /// other round begins with the storm.
    pub(crate) async fn rounds(&self, share: f64) {
        for round in 1..=self.terms.rounds {
            let calm = (format!("calm {round}"), ActKind::Calm, 0.0);
            let storm = (format!("storm {round}"), ActKind::Storm, share);
            let order = if round % 2 == 1 { [calm, storm] } else { [storm, calm] };
            for (name, what, share) in order {
                self.load(&name, what, round, share).await;
            }
        }
    }

    /// Requests at this rate, at random moments that are the same for a seed and round. The share of them leaves.
    async fn load(&self, name: &str, what: ActKind, round: u32, share: f64) {
        self.act(name, what, async {
            let plans = self.arrivals(name, &round.to_string(), share, self.terms.act);
            join(self.stage, plans).await;
        })
        .await;
    }

    /// `dice`: what has the same name has the same moments.
    fn arrivals(&self, act: &str, dice: &str, share: f64, within: Duration) -> Vec<Plan> {
        let mut moments = Rng::stream(self.stage.seed, &format!("arrivals-{dice}"));
        let mut leaving = Rng::stream(self.stage.seed, &format!("who-leaves-{dice}"));
        let begin = Instant::now() + Duration::from_millis(20);
        let (mut at, mut plans) = (0.0, Vec::new());
        let kinds = kinds_of_load(&self.terms.kinds);
        let mut kinds = kinds.iter().cycle();
        loop {
            at += moments.exponential() / self.terms.rate;
            if at > within.as_secs_f64() {
                return plans;
            }
            // The same dice in calm and in storm: the n-th request is of the same kind in both.
            let stream = !leaving.chance(self.terms.unary);
            let leaves = leaving.chance(share);
            let kind = if leaves { kinds.next().copied() } else { None };
            let leaves = kind.map(|kind| Leaves { phase: None, kind });
            plans.push(Plan { due: begin + Duration::from_secs_f64(at), ..self.plan(act, stream, leaves) });
        }
    }

    /// Clients that leave in one phase, until enough of them were in it.
    pub(crate) async fn phase(&self, phase: Phase) -> usize {
        let name = format!("phase {}", phase.label());
        self.act(&name, ActKind::Phase, async {
            let (wanted, until) = (self.terms.victims, Instant::now() + self.terms.phase);
            let at_once = if phase == Phase::Queued { QUEUE_CLIENTS } else { PHASE_CLIENTS };
            let kinds = kinds_of_phase(&self.terms.kinds, phase);
            let (mut hit, mut tried, mut calls) = (0, 0, JoinSet::new());
            loop {
                let more = hit < wanted && tried < wanted * TRIES && Instant::now() < until;
                if more && calls.len() < at_once {
                    let leaves = Leaves { phase: Some(phase), kind: kinds[tried % kinds.len()] };
                    let plan = self.plan(&name, phase != Phase::Unary, Some(leaves));
                    calls.spawn(Arc::clone(self.stage).go(plan));
                    tried += 1;
                    continue;
                }
                let Some(made) = calls.join_next().await else { break };
                // What is told after a call's end is waited for before it is judged where it was.
                tokio::time::sleep(WORD_TRAVELS).await;
                hit += usize::from(made.is_ok_and(|made| self.was_in(&made, phase)));
            }
            hit
        })
        .await
    }

    fn was_in(&self, made: &Made, phase: Phase) -> bool {
        let Some(gone) = crate::disconnect::analyse::gone(&made.record) else { return false };
        if !self.stage.exact {
            return true;
        }
        let told = self.stage.feed.forget(&made.record.tag);
        told.or(made.timeline.clone()).map_or(phase == Phase::Queued, |timeline| {
            crate::disconnect::analyse::phase_of(&made.record, &timeline, gone) == Some(phase)
        })
    }

    /// Requests that the prefill engine takes and the decode engine cannot: for more tokens than any context has.
    pub(crate) async fn refused(&self) {
        const NAME: &str = "refused";
        self.act(NAME, ActKind::Refused, async {
            for _ in 0..REFUSED / REFUSED_AT_ONCE {
                let plan = Plan { max_tokens: Some(TOO_MANY_TOKENS), ..self.plan(NAME, true, None) };
                let made = join(self.stage, vec![plan; REFUSED_AT_ONCE]).await;
                if made.iter().any(|made| made.record.outcome != "refused") {
                    // It takes as many as it can: there is nothing to be seen here.
                    break;
                }
            }
        })
        .await;
    }

    /// Load, in which a part of our own is killed and started again at once.
    pub(crate) async fn killed(&self, own: Own, part: Part) -> Result<Own, BenchError> {
        let (name, fault, wanted) = match part {
            Part::Router => ("fault router", "router killed", Wanted::Stream),
            Part::Prefill => ("fault prefill", "prefill engine killed", Wanted::Prefill),
            Part::Decode => ("fault decode", "decode engine killed", Wanted::Stream),
        };
        let mending = async {
            let mending = tokio::task::spawn_blocking(move || {
                let mut own = own;
                own.kill(part)?;
                own.start_again(part)?;
                Ok::<_, std::io::Error>(own)
            });
            Ok(mending.await??)
        };
        self.fault(name, fault, wanted, mending).await
    }

    /// Load, in which something is broken and mended by whoever runs the deployment.
    pub(crate) async fn broken(
        &self,
        name: &str,
        breaking: &str,
        mending: Option<&str>,
    ) -> Result<(), BenchError> {
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
        let both = async {
            *self.unmended.lock().unwrap_or_else(PoisonError::into_inner) = mending.map(str::to_owned);
            run(breaking).await?;
            if let Some(mending) = mending {
                tokio::time::sleep(self.terms.fault.mul_f64(MEND_AFTER)).await;
                run(mending).await?;
            }
            *self.unmended.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Ok(())
        };
        // Whatever it breaks.
        self.fault(&format!("fault {name}"), name, Wanted::PrefillAndStream, both).await
    }

    /// Load, of which some leave, and in its midst something that breaks, when it meets what is wanted, and mends.
    async fn fault<T>(
        &self,
        name: &str,
        fault: &str,
        wanted: Wanted,
        break_and_mend: impl Future<Output = Result<T, BenchError>>,
    ) -> Result<T, BenchError> {
        let wanted = if self.stage.exact { wanted } else { Wanted::Open };
        let Terms { fault: lasts, fault_share, .. } = self.terms;
        self.act(name, ActKind::Fault, async {
            // Moments of its own: what is idle at one fault is not idle at all of them.
            let load = join(self.stage, self.arrivals(name, name, fault_share, lasts));
            let told = |mended, struck| {
                let (act, fault) = (name.to_owned(), fault.to_owned());
                let at_us = Moment::now().us();
                self.stage.recorder.put(&Record::Fault { act, fault, at_us, mended, struck });
            };
            let breaking = async {
                tokio::time::sleep(lasts.mul_f64(FAULT_AFTER)).await;
                let began = Instant::now();
                let within = lasts.mul_f64(FAULT_BEFORE - FAULT_AFTER);
                let known = self.stage.until_in_flight(wanted, within).await;
                told(false, Some(Struck { wanted, waited_us: began.elapsed().as_micros() as u64, known }));
                let result = break_and_mend.await;
                if result.is_ok() {
                    told(true, None);
                }
                result
            };
            tokio::join!(load, breaking).1
        })
        .await
    }

    /// Asks the prompts of these calls again, now that all is quiet, and writes down what is right. An answer that
    /// differs is asked for twice: of a deployment that does not say the same twice nobody knows what is right.
    pub(crate) async fn verify(&self, calls: &[&CallRecord], within: Duration) {
        self.progress.say("verifying texts");
        let until = Instant::now() + within;
        for (turn, call) in calls.iter().enumerate().take_while(|_| Instant::now() < until) {
            let Some(number) = self.stage.number_of(&call.tag) else { continue };
            let salt = format!("{}verify-{turn}", self.stage.prefix);
            let mut said = self.stage.ask_again(number, call, &salt).await;
            let whole = call.outcome == "done";
            let agrees = |said: &str| if whole { said == call.text } else { said.starts_with(&call.text) };
            let (mut answers, mut unanswered) = (Vec::new(), said.is_none());
            if let Some(first) = said.clone().filter(|said| !agrees(said)) {
                match self.stage.ask_again(number, call, &format!("{salt}-again")).await {
                    Some(again) if again == first => {}
                    Some(again) => (said, answers) = (None, vec![first, again]),
                    None => (said, unanswered) = (None, true),
                }
            }
            let (tag, text) = (call.tag.clone(), Some(call.text.clone()));
            self.stage.recorder.put(&Record::Replay { tag, text, said, answers, unanswered });
        }
    }
}

/// How clients leave where requests are what all ask for. Such an answer is over before a stall is: who stalls there comes
/// too late. And a deployment that does not know yet that a client has vanished serves it as one that stays, so that a storm
/// of those is none. Both are measured in the phases. Where nothing else is asked for, they leave so all the same.
fn kinds_of_load(kinds: &[Kind]) -> Vec<Kind> {
    but_for(kinds, &[Kind::Stall, Kind::Vanish])
}

/// How clients leave in a phase. Who stalls goes on until its answer has begun and longer: before that nobody can stall
/// (but where nothing else is asked for, clients do all the same, and count where they hit).
fn kinds_of_phase(kinds: &[Kind], phase: Phase) -> Vec<Kind> {
    if matches!(phase, Phase::Stream | Phase::Unary) {
        kinds.to_vec()
    } else {
        but_for(kinds, &[Kind::Stall])
    }
}

/// All of them where there are no others.
fn but_for(kinds: &[Kind], left_out: &[Kind]) -> Vec<Kind> {
    let others: Vec<Kind> = kinds.iter().copied().filter(|kind| !left_out.contains(kind)).collect();
    if others.is_empty() { kinds.to_vec() } else { others }
}

/// Makes planned calls, each at its time; in the order of the plans.
async fn join(stage: &Arc<Stage>, plans: Vec<Plan>) -> Vec<Made> {
    let calls: Vec<_> = plans.into_iter().map(|plan| tokio::spawn(Arc::clone(stage).go(plan))).collect();
    let mut made = Vec::with_capacity(calls.len());
    for call in calls {
        // A call does not panic; if one did, it would be missing in the report's counts.
        made.extend(call.await.ok());
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_stall_or_vanish_in_a_storm_only_where_nothing_else_is_asked_for() {
        let others = [Kind::Fin, Kind::Rst, Kind::HalfClose, Kind::Timeout];
        assert_eq!(kinds_of_load(&Kind::ALL), others);
        assert_eq!(kinds_of_load(&[Kind::Stall]), [Kind::Stall]);
        assert_eq!(kinds_of_load(&[]), []);
        assert_eq!(kinds_of_load(&[Kind::Vanish, Kind::Stall]), [Kind::Vanish, Kind::Stall]);
        let gap = [others.as_slice(), &[Kind::Vanish]].concat();
        assert_eq!(kinds_of_phase(&Kind::ALL, Phase::Gap), gap);
        assert_eq!(kinds_of_phase(&Kind::ALL, Phase::Stream), Kind::ALL);
        assert_eq!(kinds_of_phase(&[Kind::Stall], Phase::Gap), [Kind::Stall]);
    }
}
