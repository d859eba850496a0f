//! The shell around one request's [`Exchange`]: asks engines, tells the machine, pays what the machine says.
//!
//! It lives in the request's context. Its `Drop` is the settlement: whatever ends the request (a finished
//! answer, a refusal, a panic, a connection task that is aborted at shutdown), the machine hears of it and
//! what is owed is paid.

mod going_on;
mod verdicts;

pub(crate) use going_on::Rest;
use verdicts::Suspect;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Fit, Outcome, Settlement, Timeline};
use hyper::header::HeaderValue;
use pingora::proxy::Session;

use crate::admission::Ticket;
use crate::alive::while_alive;
use crate::client_watch::{ClientGone, race};
use crate::config::Fallback;
use crate::disaggregation::{self, Disaggregation, Facts, Why};
use crate::explain::Account;
use crate::generation::Generation;
use crate::inflight::Entry;
use crate::intake::Ask;
use crate::legs::decode::{self, Decoding};
use crate::legs::prefill::{PrefillCall, Prefilled};
use crate::legs::{Meaning, Refusal};
use crate::metrics::Leg;
use crate::models::Model;
use crate::observe::Watched;
use crate::policy::Wanted;
use crate::pool::{Pool, Reserved, Scarce};
use crate::request_id;
use crate::retries::Retry;
use crate::rewrite;
use crate::settle::{Debtor, Returned};
use crate::shared::Shared;
use crate::trace_context::Trace;
use crate::upstream::{Engine, InFlight, Outgoing, Payload, Reply};

/// Why a request has no answer from an engine.
#[derive(Debug)]
pub(crate) enum Ended {
    /// Nobody is there to be told.
    ClientGone,
    /// The client is to be told this.
    Refused(Refusal),
}

impl From<ClientGone> for Ended {
    fn from(ClientGone: ClientGone) -> Self {
        Self::ClientGone
    }
}

/// A decode engine's answer, and which attempt it is of.
pub(crate) struct Answer {
    pub attempt: Attempt,
    pub reply: Box<Reply>,
    /// Counts the request at its engine while the answer is passed on.
    pub load: InFlight,
}

/// One request's exchange in operation.
pub(crate) struct ExchangeDriver {
    shared: Arc<Shared>,
    generation: Arc<Generation>,
    /// The decode engine that is set aside for the request before any prefill is spent on it.
    reserved: Option<Reserved>,
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
    /// Whether the prompt may be computed anew: once.
    may_recompute: bool,
    /// What the last prefill engine that lent said of it, for the release.
    lent: Option<(Attempt, Arc<str>)>,
    /// Engines that failed it, of which it is not yet known whether that was its own fault.
    suspects: Vec<Suspect>,
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
        model: Arc<Model>,
    ) -> Self {
        let exchange = Arc::new(Mutex::new(Exchange::new()));
        let account = shared.explain.begin(&request, client_id, &model.name);
        Self {
            shared,
            model,
            watched: Watched::default(),
            account,
            generation,
            reserved: None,
            debtor: Debtor { request, exchange, model: None, authorization: None },
            lent: None,
            attempts: Vec::new(),
            prefill: None,
            may_recompute: true,
            suspects: Vec::new(),
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
        let spans = [
            ("prefill", line.prefill_sent, line.held),
            ("gap", line.prefill_sent.and(line.held), line.decode_sent),
            ("accept", line.decode_sent, line.accepted),
        ];
        let parts = spans.into_iter().filter_map(|(name, from, to)| {
            Some(format!("{name};dur={:.3}", to?.since(from?).as_secs_f64() * 1000.0))
        });
        HeaderValue::from_str(&parts.collect::<Vec<_>>().join(", ")).ok()
    }

    /// Tells the machine, and pays what it says.
    pub(crate) fn apply(&mut self, event: Event) {
        let now = self.shared.now();
        if let Event::StreamBroken(attempt) | Event::StreamCut(attempt) = event {
            let engine = self.engine(attempt);
            self.suspects.push(Suspect { engine, leg: Leg::Decode, midway: true });
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
            if let Event::PrefillFailed(by, Failure::NotReached)
            | Event::DecodeFailed(by, Failure::NotReached) = event
            {
                // It may come back with an empty cache.
                self.shared.fleet.memory.forget_sent(self.engine(by).id());
            }
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

    /// An engine for a leg; what it was chosen from is noted for those who ask.
    fn choose(
        &self,
        leg: Leg,
        pool: &Pool,
        wanted: &Wanted<'_>,
        tried: &[Arc<Engine>],
    ) -> Result<Reserved, Scarce> {
        let Some(account) = &self.account else { return pool.reserve(wanted, tried) };
        let mut sight = None;
        let reserved = pool.reserve_telling(wanted, tried, Some(&mut sight));
        if let Some(sight) = sight {
            account.chose(leg, sight);
        }
        reserved
    }

    /// A piece of the answer is being passed on.
    pub(crate) fn piece(&mut self, piece: &[u8]) {
        self.watched.seen.look(piece);
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

    /// Sets a decode engine aside, before prefill is asked for anything; waits in the model's queue when all are
    /// full.
    ///
    /// # Errors
    /// No decode engine can be had.
    pub(crate) async fn reserve(
        &mut self,
        session: &mut Session,
        ask: &Ask,
        ticket: Ticket,
    ) -> Result<(), Ended> {
        self.source = ask.source(session.client_addr());
        self.debtor.model = Some(Arc::clone(&ask.model));
        self.debtor.authorization = ask.authorization.clone();
        let generation = Arc::clone(&self.generation);
        let mut waits = false;
        let room = || {
            let wanted = ask.wanted();
            if !std::mem::replace(&mut waits, true) {
                return self.choose(Leg::Decode, &ask.model.decode, &wanted, &[]);
            }
            // Engines that came since are good for those who wait already.
            let now = self.shared.generation();
            let model = now.models.named(Some(&ask.model.name)).unwrap_or(&ask.model);
            let mut sight = None;
            let reserved = model.decode.reserve_telling(&wanted, &[], Some(&mut sight))?;
            if let (Some(account), Some(sight)) = (&self.account, sight) {
                account.chose(Leg::Decode, sight);
            }
            Ok(reserved)
        };
        match race(session, ask.model.queue.enter(ticket, &generation.config.queue, room)).await {
            Err(ClientGone) => Err(self.client_gone()),
            Ok(Ok(reserved)) => {
                self.reserved = Some(reserved);
                Ok(())
            }
            Ok(Err(refusal)) => {
                self.apply(Event::GaveUp);
                Err(refusal.into())
            }
        }
    }

    /// Whether another engine prefills, now that it is known which one decodes.
    fn disaggregation(&self, ask: &Ask) -> Disaggregation {
        let wanted = ask.wanted();
        let holding = self.reserved.as_ref().map(|reserved| reserved.holding).unwrap_or_default();
        let facts = Facts {
            has_prefill: !ask.model.prefill.is_empty(),
            several_prompts: ask.aggregate,
            prompt_logprobs: ask.prompt_logprobs,
            prompt_tokens: wanted.tokens,
            cached_share: holding.share(&wanted),
            prefill_in_flight: ask.model.prefill.least_in_flight(),
        };
        let decided = disaggregation::decide(&ask.model.disaggregate, &facts);
        if let Some(account) = &self.account {
            account.disaggregated(decided, facts);
        }
        decided
    }

    /// A prefill engine: another than the decode engine and than those that were asked before, if there is another.
    /// Those from the attempt `first` on were asked in this round.
    fn reserve_prefill(&self, ask: &Ask, first: usize) -> Result<Reserved, Scarce> {
        let mut wanted = ask.wanted();
        wanted.pair = self.reserved.as_ref().and_then(Reserved::pair);
        let decode = self.reserved.as_ref().map(Reserved::engine);
        let tried = &self.attempts[first..];
        let others: Vec<_> = tried.iter().chain(&self.prefill_engine).chain(decode).cloned().collect();
        let before = &others[..others.len() - usize::from(decode.is_some())];
        let choose = |tried: &[Arc<Engine>]| self.choose(Leg::Prefill, &ask.model.prefill, &wanted, tried);
        choose(&others).or_else(|_| choose(before)).or_else(|_| choose(tried))
    }

    /// First leg: the handoff, or `None` when the decode engine is to compute everything.
    pub(crate) async fn prefill(
        &mut self,
        session: &mut Session,
        ask: &Ask,
    ) -> Result<Option<Arc<str>>, Ended> {
        let decided = self.disaggregation(ask);
        self.shared.metrics.routing.disaggregation(decided);
        if let Disaggregation::Local(_) = decided {
            self.apply(Event::PrefillSkipped);
            return Ok(None);
        }
        let silence = ask.model.bounds.prefill_silence;
        let pause = Duration::from_millis(self.generation.config.timeouts.alive_ms);
        let mut outgoing = self.outgoing(
            ask,
            Leg::Prefill,
            rewrite::prefill_body(ask.dialect, &ask.body, &ask.owned, &ask.model.name_in_bodies),
        );
        let first = self.attempts.len();
        let mut last = Refusal::none_left();
        for asked in 0..usize::from(self.generation.config.attempts.prefill) {
            let Ok(Reserved { member, load, .. }) = self.reserve_prefill(ask, first) else { break };
            if !self.may_try_again(session, Leg::Prefill, asked).await? {
                break;
            }
            let engine = Arc::clone(&member.engine);
            outgoing.rank = member.rank;
            let begun = Instant::now();
            let attempt = self.attempt(&engine);
            self.prefill_engine = Some(Arc::clone(&engine));
            self.apply(Event::PrefillSent(attempt));
            let call = self.prefill.insert(PrefillCall::start(attempt, load, outgoing.clone()));
            let prefilled = while_alive(&engine, pause, silence, call.prefilled());
            let prefilled = match race(session, prefilled).await {
                Err(ClientGone) => return Err(self.client_gone()),
                Ok(Err(silent)) => {
                    self.blame(&engine, Leg::Prefill, silent.blame());
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
            // It has answered: there is nothing to read on.
            self.prefill = None;
            match &prefilled {
                Prefilled::Lent(..) | Prefilled::Empty => self.prefilled(&engine, begun.elapsed()),
                Prefilled::Refused(_) => self.refused(&engine, Leg::Prefill, begun.elapsed()),
                Prefilled::Failed(..) => {}
            }
            self.apply(prefilled.event(attempt));
            match prefilled {
                Prefilled::Lent(params, _) => {
                    self.lent = Some((attempt, Arc::clone(&params)));
                    return Ok(Some(params));
                }
                Prefilled::Empty => return Ok(None),
                Prefilled::Refused(refusal) => return Err(Ended::Refused(refusal)),
                Prefilled::Failed(_, refusal, blame) => {
                    self.note_misconfigured(&engine, Leg::Prefill, &refusal);
                    self.blame(&engine, Leg::Prefill, blame);
                    last = refusal;
                }
            }
        }
        self.fall_back(ask, last)
    }

    /// Without a prefill engine the decode engine computes everything, where that is configured.
    fn fall_back(&mut self, ask: &Ask, last: Refusal) -> Result<Option<Arc<str>>, Ended> {
        match ask.model.fallback {
            Fallback::Aggregate => {
                self.shared.metrics.routing.disaggregation(Disaggregation::Local(Why::FellBack));
                self.apply(Event::PrefillSkipped);
                Ok(None)
            }
            Fallback::None => {
                self.apply(Event::GaveUp);
                Err(Ended::Refused(last))
            }
        }
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
                    Fallback::Aggregate => self.fall_back(ask, Refusal::none_left())?,
                    Fallback::None => self.prefill(session, ask).await?,
                };
                let answer = self.decode_with(session, ask, handoff).await?;
                Ok(answer.expect("the prompt is computed anew once"))
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
        let pause = Duration::from_millis(self.generation.config.timeouts.alive_ms);
        let first_byte = ask.model.bounds.decode_first_byte;
        let body = rewrite::decode_body(&ask.body, &ask.owned, &ask.model.name_in_bodies, handoff.as_deref());
        let mut outgoing = self.outgoing(ask, Leg::Decode, body);
        outgoing.router_settles = true;
        let first = self.attempts.len();
        let mut last = Refusal::none_left();
        let mut spent = false;
        for asked in 0..usize::from(self.generation.config.attempts.decode) {
            let reserved = self.reserved.take().map(Ok);
            let reserved = reserved.unwrap_or_else(|| {
                self.choose(Leg::Decode, &ask.model.decode, &ask.wanted(), &self.attempts[first..])
            });
            let Ok(Reserved { member, load, .. }) = reserved else { break };
            if !self.may_try_again(session, Leg::Decode, asked).await? {
                break;
            }
            let engine = Arc::clone(&member.engine);
            outgoing.rank = member.rank;
            let begun = Instant::now();
            let attempt = self.attempt(&engine);
            self.decode_engine = Some(Arc::clone(&engine));
            self.apply(Event::DecodeSent(attempt));
            let Ok(decoding) = race(session, decode::ask(&engine, &outgoing, first_byte, pause)).await else {
                return Err(self.client_gone());
            };
            match decoding {
                Decoding::Accepted(reply) => {
                    self.accepted(&engine, begun.elapsed());
                    self.apply(Event::DecodeAccepted(attempt));
                    return Ok(Some(Answer { attempt, reply, load }));
                }
                Decoding::Refused(refusal) => {
                    self.refused(&engine, Leg::Decode, begun.elapsed());
                    self.apply(Event::DecodeRefused(attempt));
                    return Err(Ended::Refused(refusal));
                }
                Decoding::Failed(failure, refusal, meaning, blame) => {
                    self.apply(Event::DecodeFailed(attempt, failure));
                    self.blame(&engine, Leg::Decode, blame);
                    self.note_misconfigured(&engine, Leg::Decode, &refusal);
                    last = refusal;
                    spent |= matches!(meaning, Meaning::CannotUseHandoff | Meaning::HandoffSpent);
                    if meaning == Meaning::HandoffSpent && recompute || self.is_deafening() {
                        break;
                    }
                }
            }
        }
        if spent && recompute && !self.is_deafening() {
            self.apply(Event::HandoffSpent);
            return Ok(None);
        }
        self.apply(Event::GaveUp);
        Err(Ended::Refused(last))
    }

    /// The request has taken longer than it may: everything that is owed is on its way when this returns.
    pub(crate) fn out_of_time(&mut self) -> Ended {
        self.apply(Event::GaveUp);
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
