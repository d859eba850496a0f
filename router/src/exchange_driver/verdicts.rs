//! What a request's attempts say of its engines, and whether there may be another attempt.
//!
//! A failure is an engine's fault if another engine then served the same request. If two engines failed it alike, it
//! is the request's. If nobody else was asked, it counts only beside the failures of other sources: one class of bad
//! requests takes no engine from anybody.

use std::sync::Arc;
use std::time::Duration;

use pingora::proxy::Session;

use super::{Ended, ExchangeDriver};
use crate::client_watch::race;
use crate::health::Sign;
use crate::legs::{Blame, Refusal};
use crate::metrics::Leg;
use crate::retries;
use crate::upstream::Engine;

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
        let pause = retries::pause(tried, dice(), terms);
        self.retry = Some(retry);
        self.shared.metrics.retry(leg);
        if !pause.is_zero() && race(session, tokio::time::sleep(pause)).await.is_err() {
            return Err(self.client_gone());
        }
        Ok(true)
    }

    /// An engine failed the request; whose fault that was is seen later.
    pub(super) fn blame(&mut self, engine: &Arc<Engine>, leg: Leg, blame: Blame) {
        match blame {
            Blame::Nobody => {}
            Blame::Engine => self.suspects.push((Arc::clone(engine), leg)),
            Blame::Draining => engine.judge(|health, now, _| health.said_draining(now)),
            Blame::Layout => {
                let Some(producer) = &self.prefill_engine else { return };
                if self.shared.mismatch(producer.url(), engine.url()) {
                    tracing::warn!(
                        prefill = producer.authority(),
                        decode = engine.authority(),
                        "an engine cannot read the blocks of another: their models, versions or caches differ"
                    );
                }
            }
        }
    }

    /// An engine answered the request: others that failed it were at fault themselves.
    pub(super) fn vindicate(&mut self, engine: &Arc<Engine>, leg: Leg, after: Duration) {
        engine.answered(leg, after);
        for (suspect, of) in std::mem::take(&mut self.suspects) {
            match (of == leg, Arc::ptr_eq(&suspect, engine)) {
                (true, false) => suspect.failed(leg, Sign::Trouble),
                (true, true) => {}
                (false, _) => self.suspects.push((suspect, of)),
            }
        }
    }

    /// The request is over. What one engine alone failed counts against it, if other sources say the same; what two
    /// engines failed alike is the request's own fault.
    pub(super) fn accuse(&mut self) {
        let suspects = std::mem::take(&mut self.suspects);
        for leg in [Leg::Prefill, Leg::Decode] {
            let mut engines: Vec<_> = suspects.iter().filter(|(_, of)| *of == leg).map(|(e, _)| e).collect();
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
                    "an engine refuses this router's cluster secret or the key it is configured with"
                );
            }
            self.shared.metrics.misconfigured(leg);
        }
        if *refusal == Refusal::wrong_model() {
            let what = "an engine does not serve the model that it is configured for";
            tracing::error!(engine = engine.authority(), leg = leg.label(), "{what}");
            self.shared.metrics.resilience.wrong_model(leg);
        }
    }
}

/// 0 to 1.
fn dice() -> f64 {
    let mut byte = [0_u8];
    getrandom::fill(&mut byte).expect("the kernel's random numbers are there from boot on");
    f64::from(byte[0]) / 255.0
}
