//! What a request's attempts say of its engines, and whether there may be another attempt.
//!
//! A failure is an engine's fault if another engine then served the same request. If two engines failed it alike, it
//! is the request's, and so it is if one failed it and another refused it. If nobody else was asked, it counts only
//! beside the failures of other sources: one class of bad requests takes no engine from anybody.
//!
//! The head of an answer disproves who failed before the head of his; only an answer that ended well disproves who broke
//! off in the middle.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::{Attempt, Event};

use super::ExchangeDriver;
use crate::client::disconnect::race;
use crate::client::session::Session;
use crate::engines::health::Sign;
use crate::engines::http::Engine;
use crate::legs::outcome::Ended;
use crate::legs::{Blame, Refusal, retries};
use crate::metrics::Leg;

/// Engines after which a request that finds them deaf is not sent on: it may be what keeps them from answering.
const DEAF_MAX: u32 = 2;

/// An engine that failed the request.
pub(super) struct Suspect {
    pub engine: Arc<Engine>,
    pub leg: Leg,
    /// After the head of its answer.
    pub midway: bool,
}

impl ExchangeDriver {
    /// Whether another attempt may be made: at once if it is the first or the second one, after a pause if it is
    /// a later one, and not at all when the budget is spent.
    pub(super) async fn may_try_again(
        &mut self,
        session: &mut Session,
        leg: Leg,
        tried: usize,
    ) -> Result<bool, Ended> {
        if tried == 0 {
            return Ok(true);
        }
        let terms = &self.generation.config.retries;
        let budget = &self.shared.retries;
        let Some(retry) = budget.take(self.shared.in_flight(), self.shared.now(), terms) else {
            self.shared.metrics.resilience.retry_refused(leg);
            return Ok(false);
        };
        let pause = retries::pause(tried, retries::dice(), terms);
        self.retry = Some(retry);
        self.shared.metrics.retry(leg);
        if !pause.is_zero() && race(session, tokio::time::sleep(pause)).await.is_err() {
            return Err(self.client_gone());
        }
        Ok(true)
    }

    /// What the engine of the answer says of itself before its stream breaks.
    pub(crate) fn told(&mut self, blame: Blame) {
        self.told = Some(blame);
    }

    /// An engine failed the request; whose fault that was is seen later.
    pub(super) fn blame(&mut self, engine: &Arc<Engine>, leg: Leg, blame: Blame) {
        match blame {
            Blame::Nobody => {}
            Blame::Engine => self.suspect(engine, leg),
            Blame::Deaf => {
                self.deaf += 1;
                self.suspect(engine, leg);
                let source = self.source;
                engine.judge(|health, now, terms| health.deaf(leg, source, now, terms));
            }
            Blame::Draining => engine.judge(|health, now, _| health.said_draining(now)),
            Blame::Layout => {
                let Some(producer) = &self.prefill_engine else { return };
                if self.shared.mismatch(producer.url(), engine.url()) {
                    tracing::warn!(
                        prefill = producer.authority(),
                        decode = engine.authority(),
                        "decode engine cannot read the prefill engine's blocks: models, versions or caches differ"
                    );
                }
            }
        }
    }

    fn suspect(&mut self, engine: &Arc<Engine>, leg: Leg) {
        self.suspects.push(Suspect { engine: Arc::clone(engine), leg, midway: false });
    }

    /// Whether so many engines were deaf to it that no other is to be asked.
    pub(super) fn is_deafening(&self) -> bool {
        self.deaf >= DEAF_MAX
    }

    /// A prefill engine did its part: others that did not were at fault themselves.
    pub(super) fn prefilled(&mut self, engine: &Arc<Engine>, after: Duration) {
        engine.spoke(Leg::Prefill, after);
        engine.served(Leg::Prefill);
        self.disprove(engine, |suspect| suspect.leg == Leg::Prefill);
    }

    /// A prefill engine lends what it still computes: others that lent nothing were at fault themselves.
    pub(super) fn lent_early(&mut self, engine: &Arc<Engine>) {
        self.disprove(engine, |suspect| suspect.leg == Leg::Prefill);
    }

    /// A decode engine sent the head of a good answer.
    pub(super) fn accepted(&mut self, engine: &Arc<Engine>, after: Duration) {
        engine.spoke(Leg::Decode, after);
        self.disprove(engine, |suspect| suspect.leg == Leg::Decode && !suspect.midway);
    }

    /// A decode engine's answer has ended well.
    pub(crate) fn served(&mut self, attempt: Attempt) {
        if let Some(computing) = self.computing.take() {
            computing.let_go();
        }
        let engine = self.engine(attempt);
        engine.served(Leg::Decode);
        self.disprove(&engine, |suspect| suspect.leg == Leg::Decode);
        self.apply(Event::StreamEnded(attempt));
    }

    /// An engine refused the request: it speaks, and that others failed a request that is refused is its own fault.
    pub(super) fn refused(&mut self, engine: &Arc<Engine>, leg: Leg, after: Duration) {
        engine.spoke(leg, after);
        self.suspects.retain(|suspect| suspect.leg != leg);
    }

    /// What `by` did shows that these failed by their own fault.
    fn disprove(&mut self, by: &Arc<Engine>, these: impl Fn(&Suspect) -> bool) {
        self.suspects.retain(|suspect| {
            let disproved = these(suspect);
            if disproved && !Arc::ptr_eq(&suspect.engine, by) {
                suspect.engine.failed(suspect.leg, Sign::Trouble);
            }
            !disproved
        });
    }

    /// The request is over. What one engine alone failed counts against it, if other sources say the same; what two
    /// engines failed alike is the request's own fault.
    pub(super) fn accuse(&mut self) {
        let suspects = std::mem::take(&mut self.suspects);
        for leg in [Leg::Prefill, Leg::Decode] {
            let of_leg = suspects.iter().filter(|suspect| suspect.leg == leg);
            let mut engines: Vec<_> = of_leg.map(|suspect| &suspect.engine).collect();
            engines.dedup_by(|a, b| Arc::ptr_eq(a, b));
            if let [engine] = engines[..] {
                engine.failed(leg, Sign::Suspect(self.source));
            }
        }
    }

    /// The configuration is wrong: the operator's fault, and never the client's.
    pub(super) fn note_misconfigured(&self, engine: &Engine, leg: Leg, refusal: &Refusal) {
        if *refusal == Refusal::misconfigured() {
            if let Some(held_back) = self.shared.refused_secret.due() {
                tracing::error!(
                    request = %self.debtor.request,
                    engine = engine.authority(),
                    leg = leg.label(),
                    held_back,
                    "engine refused the cluster secret or API key"
                );
            }
            self.shared.metrics.misconfigured(leg);
        }
        if *refusal == Refusal::wrong_model() {
            tracing::error!(
                engine = engine.authority(),
                leg = leg.label(),
                "engine does not serve its configured model"
            );
            self.shared.metrics.resilience.wrong_model(leg);
        }
    }
}
