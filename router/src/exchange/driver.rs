//! The shell around one request's [`Exchange`]: asks engines, tells the machine, pays what the machine says.
//!
//! The request's context owns it. Its `Drop` is the settlement: whatever ends the request (an answer, a refusal, a panic,
//! a shutdown), the machine gets the event, and what an engine is owed is paid.

mod choosing;
mod going_on;
mod holding;
mod verdicts;

use choosing::Had;
pub(crate) use going_on::Rest;
use verdicts::Suspect;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_connector::exchange::{
    Attempt, Cause, Event, Exchange, Failure, Fit, Lent, Outcome, Settlement, Span, State, Timeline,
};
use hyper::header::HeaderValue;

use crate::admission::{Scarce, Ticket};
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Fallback;
use crate::engines::http::{Engine, InFlight, Outgoing, Reply};
use crate::exchange::ask::Ask;
use crate::legs::decode::{self, Decoding, Plain};
use crate::legs::liveness::while_alive;
use crate::legs::outcome::Ended;
use crate::legs::prefill::{Computing, Patience, PrefillCall, Prefilled, unless_failed};
use crate::legs::retries::Retry;
use crate::legs::settle::{Debtor, Returned};
use crate::legs::{Blame, Meaning, Refusal};
use crate::message::payload::Payload;
use crate::message::trace_context::Trace;
use crate::message::{request_id, rewrite};
use crate::metrics::Leg;
use crate::metrics::routing::Why;
use crate::observe::in_flight::Entry;
use crate::observe::progress::Watched;
use crate::routing::explain::Account;
use crate::routing::models::Model;
use crate::routing::pool::Reserved;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// A decode engine's answer, and which attempt it is of.
pub(crate) struct Answer {
    pub attempt: Attempt,
    pub reply: Box<Reply>,
    /// Counts the request at its engine while the answer is passed on.
    pub load: InFlight,
}

/// What asking prefill engines came to.
enum Elsewhere {
    /// One answered, with a handoff or with none.
    Prefilled(Option<Arc<str>>),
    /// None could be had, for want of any or of room.
    NotHad(Scarce, Refusal),
}

/// What one attempt at a decode engine came to.
enum Attempted {
    Accepted(Answer),
    /// It refused the request itself: the exchange is over.
    Refused(Refusal),
    /// And whether it was reached.
    Failed(Refusal, Meaning, bool),
}

/// One request's exchange in operation.
pub(crate) struct ExchangeDriver {
    shared: Arc<Shared>,
    generation: Arc<Generation>,
    /// The decode engine that is set aside for the request before any prefill is spent on it.
    reserved: Option<Reserved>,
    /// What it brings to a queue; set when it is let in.
    ticket: Option<Ticket>,
    debtor: Debtor,
    pub model: Arc<Model>,
    /// What is noted of the engines' doings.
    pub watched: Watched,
    /// What is told to those who ask why; none if nobody may.
    account: Option<Arc<Account>>,
    /// The engine of each attempt, by the attempt's number.
    attempts: Vec<Arc<Engine>>,
    /// The prefill in flight.
    prefill: Option<PrefillCall>,
    /// The prefill that lent before its end.
    computing: Option<Computing>,
    /// A prefill engine failed after it had lent.
    producer_failed: bool,
    /// Whether the prompt may be computed anew: once.
    may_recompute: bool,
    /// What the last prefill engine that lent said of it, for the release.
    lent: Option<(Attempt, Arc<str>)>,
    /// Engines that failed it, of which it is not yet known whether that was its own fault.
    suspects: Vec<Suspect>,
    /// What the engine of the answer said of itself in its stream.
    told: Option<Blame>,
    /// Engines that were deaf to it.
    deaf: u32,
    /// Who sent it, as a hash; one source's failures alone take no engine out.
    source: u64,
    /// Its share of the budget of second attempts.
    retry: Option<Retry>,
    /// Who was asked last, for the access log.
    pub prefill_engine: Option<Arc<Engine>>,
    pub decode_engine: Option<Arc<Engine>>,
}

impl ExchangeDriver {
    pub(crate) fn new(
        shared: Arc<Shared>,
        generation: Arc<Generation>,
        request: RequestId,
        client_id: Option<&HeaderValue>,
        path: &'static str,
        model: Arc<Model>,
    ) -> Self {
        let exchange = Arc::new(Mutex::new(Exchange::new()));
        let account = shared.explain.begin(&request, client_id, path, &model.name);
        Self {
            shared,
            model,
            watched: Watched::default(),
            account,
            generation,
            reserved: None,
            ticket: None,
            debtor: Debtor { request, exchange, model: None, authorization: None },
            lent: None,
            attempts: Vec::new(),
            prefill: None,
            computing: None,
            producer_failed: false,
            may_recompute: true,
            suspects: Vec::new(),
            told: None,
            deaf: 0,
            source: 0,
            retry: None,
            prefill_engine: None,
            decode_engine: None,
        }
    }

    /// Whose trace it is, and where it is told of while it is in flight.
    pub(crate) fn watch(&mut self, trace: &Trace, entry: Option<&Arc<Entry>>) {
        self.watched.trace = trace.clone();
        self.watched.entry = entry.cloned();
        if let Some(entry) = entry {
            // Set once: an entry is of one request, which has one driver.
            let _ = entry.exchange.set(Arc::clone(&self.debtor.exchange));
            let _ = entry.model.set(Arc::clone(&self.model));
        }
    }

    /// The time of each phase so far, as `Server-Timing` has it; `None` where it is not configured.
    pub(crate) fn server_timing(&self) -> Option<HeaderValue> {
        if !self.generation.config.telemetry.server_timing {
            return None;
        }
        let line = self.timeline();
        let spans = [("prefill", line.prefill()), ("gap", line.gap()), ("accept", line.accept())];
        let parts = spans.into_iter().filter_map(|(name, span)| {
            Some(format!("{name};dur={:.3}", span.and_then(Span::took)?.as_secs_f64() * 1000.0))
        });
        HeaderValue::from_str(&parts.collect::<Vec<_>>().join(", ")).ok()
    }

    /// Tells the machine, and pays what it says.
    pub(crate) fn apply(&mut self, event: Event) {
        let now = self.shared.now();
        if let Event::StreamBroken(attempt) | Event::StreamCut(attempt) = event {
            let engine = self.engine(attempt);
            match self.told.take() {
                None | Some(Blame::Engine) => {
                    self.suspects.push(Suspect { engine, leg: Leg::Decode, midway: true });
                }
                Some(blame) => self.blame(&engine, Leg::Decode, blame),
            }
        }
        let step = self.exchange(|exchange| exchange.apply(event, now));
        for debt in step.settle {
            self.pay(debt);
        }
        if step.ended.is_some() {
            self.accuse();
        }
        if step.fit == Fit::Applied {
            self.watched.event(event, now, &self.attempts);
            if let Some(account) = &self.account {
                account.event(&event, &self.attempts);
            }
        }
        if let Some(Outcome::ClientGone(phase)) = step.ended {
            self.shared.metrics.disconnect(phase);
        }
    }

    /// The request is over, and this is what its client was told.
    pub(crate) fn end(&self, status: u16) {
        if let Some(account) = &self.account {
            account.end(status, self.outcome());
        }
    }

    /// A piece of the answer is being passed on.
    pub(crate) fn piece(&mut self) {
        if self.watched.streamed {
            let now = self.shared.now();
            self.watched.piece(now, &self.model.metrics);
        }
    }

    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.exchange(|exchange| exchange.outcome())
    }

    pub(crate) fn timeline(&self) -> Timeline {
        self.exchange(|exchange| *exchange.timeline())
    }

    /// First leg: the handoff, or `None` when the decode engine is to compute everything.
    pub(crate) async fn prefill(
        &mut self,
        session: &mut Session,
        ask: &Ask,
    ) -> Result<Option<Arc<str>>, Ended> {
        if !ask.dialect.generates() {
            self.apply(Event::PrefillSkipped);
            return Ok(None);
        }
        let why = self.disaggregation(ask);
        let (why, prefilled) = if why.is_remote() {
            match self.prefill_elsewhere(session, ask).await {
                Ok(Elsewhere::Prefilled(handoff)) => (why, Ok(handoff)),
                Ok(Elsewhere::NotHad(..)) if ask.model.fallback == Fallback::Aggregate => {
                    self.apply(Event::PrefillSkipped);
                    (Why::FellBack, Ok(None))
                }
                Ok(Elsewhere::NotHad(scarce, last)) => {
                    self.apply(match scarce {
                        Scarce::Full => Event::NotAdmitted,
                        Scarce::NoEngine if self.attempts.is_empty() => Event::NoEngine,
                        Scarce::NoEngine => Event::GaveUp,
                    });
                    (why, Err(Ended::Refused(last)))
                }
                Err(ended) => (why, Err(ended)),
            }
        } else {
            self.apply(Event::PrefillSkipped);
            (why, Ok(None))
        };
        // What is computed anew was counted in the first round.
        if self.may_recompute {
            self.shared.metrics.routing.disaggregation(why);
        }
        prefilled
    }

    async fn prefill_elsewhere(&mut self, session: &mut Session, ask: &Ask) -> Result<Elsewhere, Ended> {
        let silence = ask.model.bounds.prefill_silence;
        let pause = Duration::from_millis(self.generation.config.timeouts.liveness_probe_ms);
        let mut outgoing = self.outgoing(
            ask,
            Leg::Prefill,
            rewrite::prefill_body(ask.dialect, &ask.body, &ask.owned, &ask.model.name_in_bodies),
        );
        // What is computed anew has no third round.
        outgoing.early_handoff = ask.model.early_handoff && self.may_recompute;
        let mut tried: Vec<Arc<Engine>> = Vec::new();
        let mut last = Refusal::none_left();
        while tried.len() < usize::from(self.generation.config.attempts.prefill) {
            let Ok(had) = self.another_prefill(session, ask, &tried).await else {
                return Err(self.client_gone());
            };
            let Reserved { member, load, .. } = match had {
                Had::Engine(reserved) => reserved,
                Had::None(Scarce::NoEngine) => break,
                Had::None(Scarce::Full) => return Ok(Elsewhere::NotHad(Scarce::Full, Refusal::all_busy())),
                Had::Busy(busy) => {
                    self.apply(Event::NotAdmitted);
                    return Err(busy.into());
                }
            };
            if !self.may_try_again(session, Leg::Prefill, tried.len()).await? {
                break;
            }
            let engine = Arc::clone(&member.engine);
            outgoing.rank = member.rank;
            let asked = Instant::now();
            let attempt = self.attempt(&engine);
            self.prefill_engine = Some(Arc::clone(&engine));
            tried.push(Arc::clone(&engine));
            self.apply(Event::PrefillSent(attempt));
            let call = self.prefill.insert(PrefillCall::start(attempt, load, outgoing.clone()));
            let prefilled = while_alive(&engine, pause, silence, call.prefilled());
            let prefilled = match race(session, prefilled).await {
                Err(ClientGone) => return Err(self.client_gone()),
                Ok(Err(silent)) => {
                    self.blame(&engine, Leg::Prefill, silent.blame());
                    self.watched.silent = true;
                    self.apply(Event::PrefillFailed(attempt, Failure::Unknown));
                    last = Refusal::silent();
                    if self.is_deafening() {
                        self.apply(Event::GaveUp);
                        return Err(Ended::Refused(last));
                    }
                    continue;
                }
                Ok(Ok(prefilled)) => prefilled,
            };
            // It has answered: the call is over.
            let load = self.prefill.take().map(PrefillCall::into_load);
            match &prefilled {
                Prefilled::Lent(_, _, Some(_)) => self.lent_early(&engine),
                Prefilled::Lent(..) | Prefilled::Empty => self.prefilled(&engine, asked.elapsed()),
                Prefilled::Refused(_) => self.refused(&engine, Leg::Prefill, asked.elapsed()),
                Prefilled::Failed(..) => {}
            }
            self.apply(prefilled.event(attempt));
            match prefilled {
                Prefilled::Lent(params, _, rest) => {
                    self.computing = rest.zip(load).map(|(rest, load)| {
                        let patience = Patience { asked, silence, pause };
                        self.exchange(Exchange::computes_on);
                        let of = (attempt, load);
                        Computing::start(self.shared.clock, &self.debtor.exchange, of, rest, patience)
                    });
                    self.lent = Some((attempt, Arc::clone(&params)));
                    return Ok(Elsewhere::Prefilled(Some(params)));
                }
                Prefilled::Empty => return Ok(Elsewhere::Prefilled(None)),
                Prefilled::Refused(refusal) => return Err(Ended::Refused(refusal)),
                Prefilled::Failed(_, refusal, blame) => {
                    self.note_misconfigured(&engine, Leg::Prefill, &refusal);
                    self.blame(&engine, Leg::Prefill, blame);
                    last = refusal;
                }
            }
        }
        Ok(Elsewhere::NotHad(Scarce::NoEngine, last))
    }

    /// Second leg: the head of a decode engine's good answer. Every engine that is asked gets the same handoff. If none
    /// of them can use it, it goes back and the prompt is computed anew, once: by a decode engine, or, where that is
    /// not configured, by a second prefill.
    pub(crate) async fn decode(
        &mut self,
        session: &mut Session,
        ask: &Ask,
        handoff: Option<Arc<str>>,
    ) -> Result<Answer, Ended> {
        match self.decode_with(session, ask, handoff).await? {
            Some(answer) => Ok(answer),
            None => {
                self.may_recompute = false;
                // Whatever the first round owed is on its way under the first name.
                self.debtor.request = request_id::anew(&self.debtor.request);
                self.shared.metrics.legs.recomputes.increment(1);
                let handoff = match ask.model.fallback {
                    Fallback::Aggregate if !self.producer_failed => {
                        self.apply(Event::PrefillSkipped);
                        None
                    }
                    // Another prefill engine can do what this one did not.
                    Fallback::Aggregate | Fallback::None => self.prefill(session, ask).await?,
                };
                let answer = self.decode_with(session, ask, handoff).await?;
                Ok(answer.expect("the prompt is computed again once"))
            }
        }
    }

    /// `None` when the handoff is spent; the exchange then stands where it began.
    async fn decode_with(
        &mut self,
        session: &mut Session,
        ask: &Ask,
        handoff: Option<Arc<str>>,
    ) -> Result<Option<Answer>, Ended> {
        let recompute = handoff.is_some() && self.may_recompute;
        let body = rewrite::decode_body(&ask.body, &ask.owned, &ask.model.name_in_bodies, handoff.as_deref());
        let plain = || {
            let (owned, model) = (ask.owned.without_usage(), &ask.model.name_in_bodies);
            rewrite::decode_body(&ask.body, &owned, model, handoff.as_deref())
        };
        let plain = ask.owned.asks_for_usage().then_some(&plain as Plain<'_>);
        let mut outgoing = self.outgoing(ask, Leg::Decode, body);
        outgoing.router_settles = handoff.is_some();
        let state = self.exchange(|exchange| exchange.state());
        // Baton's engines say what a handoff came to.
        let may_be_spent = recompute && matches!(state, State::Held(Some(Lent { handle: None, .. })));
        let mut tried: Vec<Arc<Engine>> = Vec::new();
        let mut last = Refusal::none_left();
        let mut spent = false;
        // What a release says if it comes to nothing.
        let mut cause = Cause::DecodeUnreachable;
        while tried.len() < usize::from(self.generation.config.attempts.decode) {
            let reserved = match self.reserved.take() {
                Some(reserved) => reserved,
                None => match self.another_decode(session, ask, &tried).await {
                    Ok(Had::Engine(reserved)) => reserved,
                    Ok(Had::None(_)) => break,
                    Ok(Had::Busy(busy)) => {
                        (last, cause) = (Refusal(busy), Cause::DecodeBusy);
                        break;
                    }
                    Err(ClientGone) => return Err(self.client_gone()),
                },
            };
            if !self.may_try_again(session, Leg::Decode, tried.len()).await? {
                break;
            }
            tried.push(Arc::clone(reserved.engine()));
            match self.ask_decode(session, ask, reserved, (&mut outgoing, plain), may_be_spent).await? {
                Attempted::Accepted(answer) => return Ok(Some(answer)),
                Attempted::Refused(refusal) => return Err(Ended::Refused(refusal)),
                Attempted::Failed(refusal, meaning, was_reached) => {
                    last = refusal;
                    if was_reached {
                        cause = Cause::DecodeFailed;
                    }
                    spent |= matches!(meaning, Meaning::CannotUseHandoff | Meaning::HandoffSpent);
                    if meaning == Meaning::HandoffSpent && handoff.is_some() || self.is_deafening() {
                        break;
                    }
                }
            }
        }
        // Whatever becomes of that prefill is nobody's business any more.
        self.computing = None;
        if spent && recompute && !self.is_deafening() {
            self.apply(Event::HandoffSpent);
            return Ok(None);
        }
        self.apply(Event::GaveUpFor(cause));
        Err(Ended::Refused(last))
    }

    /// One attempt at a decode engine. `may_be_spent`: a stock engine's handoff, which its failure may be the end of.
    /// Stock vLLM answers a plain 500 when the engine that lends is gone (0.32, observed 2026-11-20), and whoever is sent
    /// the same handoff next will too.
    async fn ask_decode(
        &mut self,
        session: &mut Session,
        ask: &Ask,
        reserved: Reserved,
        (outgoing, plain): (&mut Outgoing, Option<Plain<'_>>),
        may_be_spent: bool,
    ) -> Result<Attempted, Ended> {
        let Reserved { member, load, .. } = reserved;
        let engine = Arc::clone(&member.engine);
        outgoing.rank = member.rank;
        let asked = Instant::now();
        let attempt = self.attempt(&engine);
        self.decode_engine = Some(Arc::clone(&engine));
        self.apply(Event::DecodeSent(attempt));
        let pause = Duration::from_millis(self.generation.config.timeouts.liveness_probe_ms);
        let bounds = &ask.model.bounds;
        let mut computing = self.computing.take();
        // What it waits for is bounded by itself.
        let meanwhile = computing.as_ref().map_or(Duration::ZERO, |_| bounds.prefill_silence);
        let first_byte = bounds.decode_first_byte.saturating_add(meanwhile);
        let admitted = || self.apply(Event::DecodeAccepted(attempt));
        // An engine that is known to refuse to be asked for usage is not.
        let known = plain.filter(|_| engine.usage_option.is_taken() == Some(false));
        let without = known.map(|plain| Outgoing { body: plain(), ..outgoing.clone() });
        let (outgoing, plain) = match &without {
            Some(without) => (without, None),
            None => (&*outgoing, plain),
        };
        let answer = decode::ask(&engine, outgoing, first_byte, pause, plain, admitted);
        let answer = unless_failed(computing.as_mut(), answer);
        let Ok(decoding) = race(session, answer).await else {
            return Err(self.client_gone());
        };
        let decoding = match decoding {
            Ok(decoding) => decoding,
            Err(blame) => {
                // What the decode engine waits for will not come.
                self.apply(Event::DecodeFailed(attempt, Failure::Unknown));
                self.producer_failed = true;
                if let Some(producer) = self.prefill_engine.clone() {
                    self.blame(&producer, Leg::Prefill, blame);
                }
                return Ok(Attempted::Failed(Refusal::broken(), Meaning::HandoffSpent, true));
            }
        };
        // Its own time begins when everything that it waits for is there.
        let begun = computing.as_ref().map_or(asked, |computing| asked.max(computing.ended_at()));
        self.computing = computing;
        Ok(match decoding {
            Decoding::Accepted(reply) => {
                self.accepted(&engine, begun.elapsed());
                Attempted::Accepted(Answer { attempt, reply, load })
            }
            Decoding::Refused(refusal) => {
                self.refused(&engine, Leg::Decode, asked.elapsed());
                self.apply(Event::DecodeRefused(attempt));
                Attempted::Refused(refusal)
            }
            Decoding::Failed(failure, refusal, Meaning::FailedInside, _) if may_be_spent => {
                // Nobody knows whose fault it was; if it was this engine's, the second round shows it.
                self.apply(Event::DecodeFailed(attempt, failure));
                Attempted::Failed(refusal, Meaning::HandoffSpent, true)
            }
            Decoding::Failed(failure, refusal, meaning, blame) => {
                self.watched.silent = refusal == Refusal::silent();
                self.apply(Event::DecodeFailed(attempt, failure));
                self.blame(&engine, Leg::Decode, blame);
                self.note_misconfigured(&engine, Leg::Decode, &refusal);
                Attempted::Failed(refusal, meaning, failure != Failure::NotReached)
            }
        })
    }

    /// The request has taken longer than it may: everything that is owed is on its way when this returns.
    pub(crate) fn out_of_time(&mut self) -> Ended {
        self.apply(Event::GaveUpFor(Cause::OutOfTime));
        Ended::Refused(Refusal::out_of_time())
    }

    /// The client left: everything that is owed is on its way when this returns.
    pub(crate) fn client_gone(&mut self) -> Ended {
        self.apply(Event::ClientGone);
        Ended::ClientGone
    }

    fn pay(&mut self, debt: Settlement) {
        let debtor = self.debtor.clone();
        match debt {
            Settlement::AbortPrefill(attempt) => match self.prefill.take() {
                Some(call) => self.shared.settler.abandon(call, debtor),
                // Its connection broke: there is nothing to read on.
                None => self.shared.settler.abort(self.engine(attempt), Leg::Prefill, debtor),
            },
            Settlement::ReleasePrefill(lent, cause) => {
                let params = self.lent.as_ref().filter(|(by, _)| *by == lent.by);
                let params = params.map(|(_, params)| Arc::clone(params));
                let returned = Returned { lent, params, cause };
                self.shared.settler.release(self.engine(lent.by), returned, debtor);
            }
            Settlement::AbortDecode(attempt) => {
                self.shared.settler.abort(self.engine(attempt), Leg::Decode, debtor);
            }
        }
    }

    /// Numbers an attempt at an engine.
    fn attempt(&mut self, engine: &Arc<Engine>) -> Attempt {
        let number = u16::try_from(self.attempts.len()).expect("attempts are bounded by configuration");
        self.attempts.push(Arc::clone(engine));
        Attempt(number)
    }

    fn engine(&self, attempt: Attempt) -> Arc<Engine> {
        Arc::clone(&self.attempts[usize::from(attempt.0)])
    }

    fn outgoing(&self, ask: &Ask, leg: Leg, body: impl Into<Payload>) -> Outgoing {
        Outgoing {
            id: Some(self.debtor.request.clone()),
            authorization: ask.authorization.clone(),
            trace: self.watched.trace.told(leg),
            ..Outgoing::post(ask.dialect.path(), body)
        }
    }

    fn exchange<T>(&self, with: impl FnOnce(&mut Exchange) -> T) -> T {
        with(&mut self.debtor.exchange.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for ExchangeDriver {
    fn drop(&mut self) {
        self.apply(Event::Dropped);
    }
}
