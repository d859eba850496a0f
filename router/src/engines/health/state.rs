//! All criteria for whether an engine may receive requests. Pure: the time is an argument.
//!
//! ```text
//!                 ┌ drained: by the configuration, by an operator, or by the engine's own report
//!  for each leg: ─┼ its breaker (`breaker.rs`), from the outcomes of requests
//!                 ├ a suspicion, while a probe shows whether it ignores all requests or only one
//!                 ├ an ejection (`outlier.rs`), from a comparison with the pool's others
//!                 └ its checks (`checks.rs`), from `GET /health`
//! ```
//!
//! The first row that excludes the engine decides; see [`Standing`].
//!
//! Invariants:
//! - The state neither reads nor changes the number of an engine's requests: load is counted elsewhere.
//! - One request without a response does not make an engine unresponsive: another source's request or a probe must
//!   agree. Until then the engine is the last choice, for as long as one probe takes. The same holds for one
//!   failed connection, unless the host itself reports that no process listens.
//! - An engine that sends bytes is not unresponsive, whatever the result of a probe.
//! - Conclusions end by themselves (ejections, drains reported by the engine) or by a reply of the engine
//!   (breaker, checks). Only an operator's order stays until it is withdrawn.

use std::time::Duration;

use baton_connector::Time;

use super::breaker::{self, Breaker, BreakerEvent, BreakerReason, BreakerState, FailureKind};
use super::checks::{self, CheckRecord};
use crate::engines::probe::ProbeResult;
use crate::metrics::Leg;

/// Time for which an engine's report that it drains is valid.
const DRAINING_TTL: Duration = Duration::from_secs(10);
/// An ejection grows with each one in a row, up to so many times the first.
const EJECTIONS_MAX: u32 = 10;

/// Terms of one engine, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HealthTerms {
    pub breaker: breaker::BreakerTerms,
    pub checks: checks::CheckTerms,
    /// Interval of checks of a healthy engine; zero: no checks.
    pub check_every: Duration,
    /// The first ejection.
    pub ejection: Duration,
    /// The configuration drains the engine.
    pub drain: bool,
    /// Time for which a reported load is valid.
    pub load_stale: Duration,
}

baton_connector::labelled! {
    /// Whether an engine may receive a request, from best to worst.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub(crate) enum Standing {
        /// Yes.
        Usable => "usable",
        /// One request at a time.
        Trial => "trial",
        /// Only if there is no other engine, and the configuration prefers a try.
        Ejected => "ejected",
        /// No: the engine sends nothing, so each try would cost a whole timeout.
        Unresponsive => "unresponsive",
        /// No: the engine finishes its requests and gets no new ones.
        Draining => "draining",
    }
}

/// An operator's order for an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum OperatorOrder {
    /// The configuration decides.
    #[default]
    None,
    Drain,
    /// Use the engine although the configuration drains it.
    Undrain,
}

/// The state of one leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct LegHealth {
    breaker: Breaker,
    ejected_until: Option<Time>,
    /// Ejections in a row.
    ejections: u32,
}

/// The state of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct HealthState {
    legs: [LegHealth; 2],
    checks: CheckRecord,
    /// The next `GET /health` of a healthy engine.
    next_check: Option<Time>,
    suspicion: Option<Suspicion>,
    drains_until: Option<Time>,
    order: OperatorOrder,
    /// The engine has passed a check at least once.
    is_known: bool,
}

/// One finding against the engine, which a probe is to confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Suspicion {
    /// The failure, if the probe confirms it.
    kind: FailureKind,
    /// The source of the request without a response; none where no connection could be made.
    source: Option<u64>,
    /// The probe is in progress.
    is_probing: bool,
}

impl HealthState {
    /// Whether the engine may receive a leg.
    pub(crate) fn standing(&self, leg: Leg, terms: &HealthTerms) -> Standing {
        let LegHealth { breaker, ejected_until, .. } = &self.legs[leg as usize];
        if self.drains(terms) {
            return Standing::Draining;
        }
        match breaker.state() {
            BreakerState::Open { reason: BreakerReason::Unresponsive, .. }
            | BreakerState::Probing { reason: BreakerReason::Unresponsive, .. } => Standing::Unresponsive,
            BreakerState::Open { .. } | BreakerState::Probing { .. } => Standing::Ejected,
            _ if self.suspicion.is_some() => Standing::Ejected,
            _ if self.checks.is_down() || ejected_until.is_some() => Standing::Ejected,
            BreakerState::Trial { .. } => Standing::Trial,
            BreakerState::Closed { .. } => Standing::Usable,
        }
    }

    fn drains(&self, terms: &HealthTerms) -> bool {
        match self.order {
            OperatorOrder::Drain => true,
            OperatorOrder::Undrain => self.drains_until.is_some(),
            OperatorOrder::None => terms.drain || self.drains_until.is_some(),
        }
    }

    /// All reasons why the engine is not simply usable, as text.
    pub(crate) fn reasons(&self, terms: &HealthTerms) -> Vec<&'static str> {
        self.reasons_in(&Leg::BOTH, terms)
    }

    /// The same for one leg.
    pub(crate) fn reasons_of(&self, leg: Leg, terms: &HealthTerms) -> Vec<&'static str> {
        self.reasons_in(&[leg], terms)
    }

    fn reasons_in(&self, legs: &[Leg], terms: &HealthTerms) -> Vec<&'static str> {
        let mut reasons = Vec::new();
        match self.order {
            OperatorOrder::Drain => reasons.push("drained by an operator"),
            OperatorOrder::None if terms.drain => reasons.push("drained by the configuration"),
            _ if self.drains_until.is_some() => reasons.push("reports that it drains"),
            OperatorOrder::Undrain | OperatorOrder::None => {}
        }
        for leg in legs {
            let LegHealth { breaker, ejected_until, .. } = &self.legs[*leg as usize];
            let reason = match breaker.state() {
                BreakerState::Closed { .. } => None,
                BreakerState::Open { reason, .. }
                | BreakerState::Probing { reason, .. }
                | BreakerState::Trial { reason, .. } => Some(reason.label()),
            };
            reasons.extend(reason);
            reasons.extend(ejected_until.map(|_| match leg {
                Leg::Prefill => "ejected from prefill",
                Leg::Decode => "ejected from decode",
            }));
        }
        if let Some(suspicion) = &self.suspicion {
            reasons.push(match suspicion.kind {
                FailureKind::Unreachable => "a connection could not be made, and it is asked again",
                FailureKind::Unresolved => "its name could not be looked up, and it is asked again",
                FailureKind::Unresponsive | FailureKind::EngineFault | FailureKind::PossibleFault(_) => {
                    "did not answer, and is asked again"
                }
            });
        }
        if self.checks.is_down() {
            reasons.push("fails its health checks");
        }
        reasons.dedup();
        reasons
    }

    pub(crate) fn breaker(&self, leg: Leg) -> BreakerState {
        self.legs[leg as usize].breaker.state()
    }

    /// Whether an engine is known to exist at this address. Without health checks this is assumed.
    pub(crate) fn is_known(&self, terms: &HealthTerms) -> bool {
        self.is_known || terms.check_every.is_zero()
    }

    /// Records that the engine completed a request of this leg.
    pub(crate) fn completed(&mut self, leg: Leg, now: Time, terms: &HealthTerms) {
        self.suspicion = None;
        self.record_life(now, terms);
        self.legs[leg as usize].breaker.apply(BreakerEvent::Completed, now, &terms.breaker);
    }

    /// Records that the engine sent a response head or refused a request.
    pub(crate) fn responded(&mut self, now: Time, terms: &HealthTerms) {
        self.suspicion = None;
        self.record_life(now, terms);
    }

    /// A sign of life holds for both legs, as a sign of the contrary does.
    fn record_life(&mut self, now: Time, terms: &HealthTerms) {
        for one in &mut self.legs {
            one.breaker.apply(BreakerEvent::Responded, now, &terms.breaker);
        }
    }

    /// Records that a request of this source got no response, and the liveness probes no reply.
    pub(crate) fn unresponsive(&mut self, leg: Leg, source: u64, now: Time, terms: &HealthTerms) {
        match self.suspicion {
            Some(Suspicion { source: Some(other), .. }) if other != source => {
                self.suspicion = None;
                self.failed(leg, FailureKind::Unresponsive, now, terms);
            }
            Some(_) => {}
            None => {
                self.suspicion = Some(Suspicion {
                    kind: FailureKind::Unresponsive,
                    source: Some(source),
                    is_probing: false,
                })
            }
        }
    }

    /// Records that no connection could be made, for a reason that may be a lost packet or a resolver.
    pub(crate) fn suspect(&mut self, kind: FailureKind) {
        if self.suspicion.is_none() && self.passes_requests() {
            self.suspicion = Some(Suspicion { kind, source: None, is_probing: false });
        }
    }

    /// Whether a breaker lets requests pass.
    fn passes_requests(&self) -> bool {
        let passes = |one: &LegHealth| {
            matches!(one.breaker.state(), BreakerState::Closed { .. } | BreakerState::Trial { .. })
        };
        self.legs.iter().any(passes)
    }

    /// Whether there is no finding against the engine in a leg.
    pub(crate) fn is_clean(&self, leg: Leg) -> bool {
        self.suspicion.is_none() && self.legs[leg as usize].breaker == Breaker::default()
    }

    /// Records a failed request. A sign that the engine is gone holds for both legs.
    pub(crate) fn failed(&mut self, leg: Leg, kind: FailureKind, now: Time, terms: &HealthTerms) {
        let both =
            matches!(kind, FailureKind::Unreachable | FailureKind::Unresolved | FailureKind::Unresponsive);
        for (at, one) in self.legs.iter_mut().enumerate() {
            if both || at == leg as usize {
                one.breaker.apply(BreakerEvent::Failed(kind), now, &terms.breaker);
            }
        }
    }

    /// Records the engine's report that it drains.
    pub(crate) fn reported_draining(&mut self, now: Time) {
        self.drains_until = Some(now.after(DRAINING_TTL));
    }

    /// Applies an operator's order.
    pub(crate) fn order(&mut self, order: OperatorOrder) {
        self.order = order;
        if order == OperatorOrder::Undrain {
            // Discards earlier reports of the engine. Later ones count.
            self.drains_until = None;
        }
    }

    /// Ends an order against the configuration once the configuration has changed: the next `drain: true` is a new
    /// one.
    pub(crate) fn forget_obsolete_order(&mut self, terms: &HealthTerms) {
        if self.order == OperatorOrder::Undrain && !terms.drain {
            self.order = OperatorOrder::None;
        }
    }

    /// The operator's order in effect.
    pub(crate) fn current_order(&self) -> OperatorOrder {
        self.order
    }

    /// Ejects an engine that is far worse than the others of its pool.
    pub(crate) fn eject(&mut self, leg: Leg, now: Time, terms: &HealthTerms) {
        let one = &mut self.legs[leg as usize];
        one.ejections = (one.ejections + 1).min(EJECTIONS_MAX);
        one.ejected_until = Some(now.after(terms.ejection.saturating_mul(one.ejections)));
    }

    /// Records an interval in which the engine was no outlier.
    pub(crate) fn reduce_ejections(&mut self, leg: Leg) {
        let one = &mut self.legs[leg as usize];
        if one.ejected_until.is_none() {
            one.ejections = one.ejections.saturating_sub(1);
        }
    }

    /// Advances the state to `now`. Returns whether a probe must be sent, once; its result goes to
    /// [`Self::record_probe`]. `jitter` is a factor of the pause before the next check.
    pub(crate) fn tick(&mut self, now: Time, jitter: impl FnOnce() -> f64, terms: &HealthTerms) -> bool {
        let mut probe = false;
        for one in &mut self.legs {
            let was_open = matches!(one.breaker.state(), BreakerState::Open { .. });
            one.breaker.apply(BreakerEvent::Tick, now, &terms.breaker);
            probe |= was_open && matches!(one.breaker.state(), BreakerState::Probing { .. });
            one.ejected_until = one.ejected_until.filter(|until| now < *until);
        }
        self.drains_until = self.drains_until.filter(|until| now < *until);
        if let Some(suspicion) = &mut self.suspicion {
            probe |= !std::mem::replace(&mut suspicion.is_probing, true);
        }
        if terms.check_every.is_zero() {
            self.next_check = None;
            self.checks.forget();
            return probe;
        }
        // The first check is due at once: until it succeeds, the engine is not known to exist.
        if probe || self.next_check.is_none_or(|next| next <= now) {
            self.next_check = Some(now.after(terms.check_every.mul_f64(jitter())));
            probe = true;
        }
        probe
    }

    /// The next time at which [`Self::tick`] has an effect.
    pub(crate) fn due(&self, terms: &HealthTerms) -> Option<Time> {
        let legs = self.legs.iter().flat_map(|one| [one.breaker.due(), one.ejected_until]);
        let suspicion = self.suspicion.filter(|suspicion| !suspicion.is_probing).map(|_| Time::ZERO);
        let check = match (terms.check_every.is_zero(), self.next_check) {
            (false, next) => Some(next.unwrap_or(Time::ZERO)),
            // The record is to be reset.
            (true, next) => next.map(|_| Time::ZERO),
        };
        legs.chain([self.drains_until, check, suspicion]).flatten().min()
    }

    /// Applies the result of a probe or check.
    pub(crate) fn record_probe(&mut self, result: ProbeResult, now: Time, terms: &HealthTerms) {
        let passed = self.passes_requests();
        let event =
            if result.shows_life() { BreakerEvent::ProbeSucceeded } else { BreakerEvent::ProbeFailed };
        for one in &mut self.legs {
            one.breaker.apply(event, now, &terms.breaker);
        }
        let suspicion = self.suspicion.take();
        let good = match result {
            ProbeResult::Answered(good) => {
                self.is_known |= good;
                good
            }
            // The engine works, and its reply contains nothing about its health.
            ProbeResult::Busy => return,
            ProbeResult::NotSent => return,
            ProbeResult::Unresponsive => {
                if let Some(suspicion) = suspicion {
                    self.failed(Leg::Decode, suspicion.kind, now, terms);
                }
                false
            }
            ProbeResult::Unreachable(kind) => {
                match suspicion {
                    Some(_) => self.failed(Leg::Decode, kind, now, terms),
                    None if passed => self.suspect(kind),
                    None => {}
                }
                false
            }
        };
        if !terms.check_every.is_zero() {
            self.checks.answered(good, &terms.checks);
        }
    }
}

impl Standing {
    pub(crate) fn of(byte: u8) -> Self {
        Self::ALL[usize::from(byte).min(4)]
    }
}

#[cfg(test)]
pub(crate) mod tests;
