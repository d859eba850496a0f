//! Everything that decides whether an engine is given requests. Pure: time comes in as an argument.
//!
//! ```text
//!                 ┌ drained: by the configuration, by an operator, or because it says so itself
//!  for each leg: ─┼ its breaker (`breaker.rs`), from what became of requests
//!                 ├ a doubt, while it is asked whether it is deaf to everybody or to one request only
//!                 ├ an ejection (`outlier.rs`), from a comparison with the pool's others
//!                 └ its checks (`checks.rs`), from `GET /health`
//! ```
//!
//! The first row that objects decides; see [`Standing`].
//!
//! Invariants:
//! - Nothing here looks at or changes how many requests an engine has: load is counted elsewhere.
//! - One request that an engine is deaf to does not make it silent: another source's or a question of the router's
//!   own must agree. Until then it is the last to be chosen, for as long as one question takes. The same holds of one
//!   connection that could not be made, unless the host itself says that no process listens.
//! - An engine from which bytes come is not silent, whatever a question of the router's own came to.
//! - What was believed ends by itself (ejections, drains that the engine announced) or by an answer of the
//!   engine (breaker, checks); only an operator's word stays until it is taken back.

use std::time::Duration;

use baton_connector::Time;

use super::breaker::{self, Breaker, Event, Sign, State, Why};
use super::checks::{self, Checks};
use crate::engines::liveness::Pulse;
use crate::metrics::Leg;

/// An engine that says that it drains is believed for this long.
const DRAINS_FOR: Duration = Duration::from_secs(10);
/// An ejection grows with each one in a row, up to so many times the first.
const EJECTIONS_MAX: u32 = 10;

/// Terms of one engine; from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub breaker: breaker::Terms,
    pub checks: checks::Terms,
    /// How often a healthy engine is asked; zero: never.
    pub check_every: Duration,
    /// The first ejection.
    pub ejection: Duration,
    /// The configuration drains it.
    pub drain: bool,
    /// What it said of its load is believed for this long.
    pub load_stale: Duration,
}

/// Whether an engine may be given a request, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub(crate) enum Standing {
    /// Yes.
    Usable = 0,
    /// One at a time.
    Trial = 1,
    /// Only when there is no other, and the configuration would rather try.
    Out = 2,
    /// No: it answers nothing, so each try would cost a whole timeout.
    Silent = 3,
    /// No: it is being emptied.
    Draining = 4,
}

/// What an operator wants of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Order {
    /// What the configuration says.
    #[default]
    None,
    Drain,
    /// Use it although the configuration drains it.
    Undrain,
}

/// One leg's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct LegHealth {
    breaker: Breaker,
    ejected_until: Option<Time>,
    /// Ejections in a row.
    ejections: u32,
}

/// One engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct EngineHealth {
    legs: [LegHealth; 2],
    checks: Checks,
    /// The next `GET /health` of a healthy engine.
    next_check: Option<Time>,
    doubt: Option<Doubt>,
    drains_until: Option<Time>,
    order: Order,
    /// It has said that it is well, ever.
    is_known: bool,
}

/// One finding against it, which a question of the router's own is to confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Doubt {
    /// What it is out for if that is so.
    sign: Sign,
    /// Whose request it was deaf to; none where no connection could be made.
    source: Option<u64>,
    /// The question is on its way.
    asked: bool,
}

impl EngineHealth {
    /// Whether a leg may be given to it.
    pub(crate) fn standing(&self, leg: Leg, terms: &Terms) -> Standing {
        let LegHealth { breaker, ejected_until, .. } = &self.legs[leg as usize];
        if self.drains(terms) {
            return Standing::Draining;
        }
        match breaker.state() {
            State::Open { why: Why::Silent, .. } | State::Asking { why: Why::Silent, .. } => Standing::Silent,
            State::Open { .. } | State::Asking { .. } => Standing::Out,
            _ if self.doubt.is_some() => Standing::Out,
            _ if self.checks.is_down() || ejected_until.is_some() => Standing::Out,
            State::Trial { .. } => Standing::Trial,
            State::Closed { .. } => Standing::Usable,
        }
    }

    fn drains(&self, terms: &Terms) -> bool {
        match self.order {
            Order::Drain => true,
            Order::Undrain => self.drains_until.is_some(),
            Order::None => terms.drain || self.drains_until.is_some(),
        }
    }

    /// For people: every reason why it is not simply usable.
    pub(crate) fn reasons(&self, terms: &Terms) -> Vec<&'static str> {
        self.reasons_in(&Leg::BOTH, terms)
    }

    /// The same in one leg.
    pub(crate) fn reasons_of(&self, leg: Leg, terms: &Terms) -> Vec<&'static str> {
        self.reasons_in(&[leg], terms)
    }

    fn reasons_in(&self, legs: &[Leg], terms: &Terms) -> Vec<&'static str> {
        let mut reasons = Vec::new();
        match self.order {
            Order::Drain => reasons.push("drained by an operator"),
            Order::None if terms.drain => reasons.push("drained by the configuration"),
            _ if self.drains_until.is_some() => reasons.push("reports that it drains"),
            Order::Undrain | Order::None => {}
        }
        for leg in legs {
            let LegHealth { breaker, ejected_until, .. } = &self.legs[*leg as usize];
            let why = match breaker.state() {
                State::Closed { .. } => None,
                State::Open { why, .. } | State::Asking { why, .. } | State::Trial { why, .. } => {
                    Some(why.label())
                }
            };
            reasons.extend(why);
            reasons.extend(ejected_until.map(|_| match leg {
                Leg::Prefill => "ejected from prefill",
                Leg::Decode => "ejected from decode",
            }));
        }
        if let Some(doubt) = &self.doubt {
            reasons.push(match doubt.sign {
                Sign::Unreachable => "a connection could not be made, and it is asked again",
                Sign::Nameless => "its name could not be looked up, and it is asked again",
                Sign::Silent | Sign::Trouble | Sign::Suspect(_) => "did not answer, and is asked again",
            });
        }
        if self.checks.is_down() {
            reasons.push("fails its health checks");
        }
        reasons.dedup();
        reasons
    }

    pub(crate) fn breaker(&self, leg: Leg) -> State {
        self.legs[leg as usize].breaker.state()
    }

    /// Whether anybody is known to live there. Where nobody asks for health, that is taken for granted.
    pub(crate) fn is_known(&self, terms: &Terms) -> bool {
        self.is_known || terms.check_every.is_zero()
    }

    /// It answered a request of this leg, well and to the end.
    pub(crate) fn answered(&mut self, leg: Leg, now: Time, terms: &Terms) {
        self.doubt = None;
        self.is_there(now, terms);
        self.legs[leg as usize].breaker.apply(Event::Answered, now, &terms.breaker);
    }

    /// It sent the head of an answer, or refused a request.
    pub(crate) fn spoke(&mut self, now: Time, terms: &Terms) {
        self.doubt = None;
        self.is_there(now, terms);
    }

    /// What shows that it is there holds for both legs, as what shows the contrary does.
    fn is_there(&mut self, now: Time, terms: &Terms) {
        for one in &mut self.legs {
            one.breaker.apply(Event::Spoke, now, &terms.breaker);
        }
    }

    /// A request of this source got no answer from it, nor to the questions whether it lives.
    pub(crate) fn deaf(&mut self, leg: Leg, source: u64, now: Time, terms: &Terms) {
        match self.doubt {
            Some(Doubt { source: Some(other), .. }) if other != source => {
                self.doubt = None;
                self.failed(leg, Sign::Silent, now, terms);
            }
            Some(_) => {}
            None => self.doubt = Some(Doubt { sign: Sign::Silent, source: Some(source), asked: false }),
        }
    }

    /// No connection to it could be made, for a reason that may be a lost packet's or a resolver's.
    pub(crate) fn doubt(&mut self, sign: Sign) {
        if self.doubt.is_none() && self.passes() {
            self.doubt = Some(Doubt { sign, source: None, asked: false });
        }
    }

    /// Whether a breaker lets requests through.
    fn passes(&self) -> bool {
        let passes =
            |one: &LegHealth| matches!(one.breaker.state(), State::Closed { .. } | State::Trial { .. });
        self.legs.iter().any(passes)
    }

    /// Whether nothing is held against it in a leg.
    pub(crate) fn is_clean(&self, leg: Leg) -> bool {
        self.doubt.is_none() && self.legs[leg as usize].breaker == Breaker::default()
    }

    /// It failed one. What shows that nobody is there holds for both legs.
    pub(crate) fn failed(&mut self, leg: Leg, sign: Sign, now: Time, terms: &Terms) {
        let both = matches!(sign, Sign::Unreachable | Sign::Nameless | Sign::Silent);
        for (at, one) in self.legs.iter_mut().enumerate() {
            if both || at == leg as usize {
                one.breaker.apply(Event::Failed(sign), now, &terms.breaker);
            }
        }
    }

    /// It said that it drains.
    pub(crate) fn said_draining(&mut self, now: Time) {
        self.drains_until = Some(now.after(DRAINS_FOR));
    }

    /// An operator's word.
    pub(crate) fn order(&mut self, order: Order) {
        self.order = order;
        if order == Order::Undrain {
            // What it said before; what it says from now on counts.
            self.drains_until = None;
        }
    }

    /// An order against the configuration ends with what it was against: the next `drain: true` is a new one.
    pub(crate) fn forget_spent_order(&mut self, terms: &Terms) {
        if self.order == Order::Undrain && !terms.drain {
            self.order = Order::None;
        }
    }

    /// The operator's word that holds.
    pub(crate) fn ordered(&self) -> Order {
        self.order
    }

    /// It is far worse than its pool's others.
    pub(crate) fn eject(&mut self, leg: Leg, now: Time, terms: &Terms) {
        let one = &mut self.legs[leg as usize];
        one.ejections = (one.ejections + 1).min(EJECTIONS_MAX);
        one.ejected_until = Some(now.after(terms.ejection.saturating_mul(one.ejections)));
    }

    /// It was no outlier for a whole interval.
    pub(crate) fn behaved(&mut self, leg: Leg) {
        let one = &mut self.legs[leg as usize];
        if one.ejected_until.is_none() {
            one.ejections = one.ejections.saturating_sub(1);
        }
    }

    /// Moves what time moves. True: the engine is to be asked whether it lives, once, and [`Self::told`] to be
    /// called with what came of it. `jitter` is a factor of the pause before the next question.
    pub(crate) fn tick(&mut self, now: Time, jitter: impl FnOnce() -> f64, terms: &Terms) -> bool {
        let mut ask = false;
        for one in &mut self.legs {
            let was_open = matches!(one.breaker.state(), State::Open { .. });
            one.breaker.apply(Event::Tick, now, &terms.breaker);
            ask |= was_open && matches!(one.breaker.state(), State::Asking { .. });
            one.ejected_until = one.ejected_until.filter(|until| now < *until);
        }
        self.drains_until = self.drains_until.filter(|until| now < *until);
        if let Some(doubt) = &mut self.doubt {
            ask |= !std::mem::replace(&mut doubt.asked, true);
        }
        if terms.check_every.is_zero() {
            self.next_check = None;
            self.checks.forget();
            return ask;
        }
        // The first question comes at once: until it is answered nobody knows that there is an engine.
        if ask || self.next_check.is_none_or(|next| next <= now) {
            self.next_check = Some(now.after(terms.check_every.mul_f64(jitter())));
            ask = true;
        }
        ask
    }

    /// The next moment at which [`Self::tick`] does anything.
    pub(crate) fn due(&self, terms: &Terms) -> Option<Time> {
        let legs = self.legs.iter().flat_map(|one| [one.breaker.due(), one.ejected_until]);
        let doubt = self.doubt.filter(|doubt| !doubt.asked).map(|_| Time::ZERO);
        let check = match (terms.check_every.is_zero(), self.next_check) {
            (false, next) => Some(next.unwrap_or(Time::ZERO)),
            // What was believed is to be forgotten.
            (true, next) => next.map(|_| Time::ZERO),
        };
        legs.chain([self.drains_until, check, doubt]).flatten().min()
    }

    /// What came of asking it.
    pub(crate) fn told(&mut self, pulse: Pulse, now: Time, terms: &Terms) {
        let passed = self.passes();
        let event = if pulse.is_life() { Event::Lives } else { Event::Mute };
        for one in &mut self.legs {
            one.breaker.apply(event, now, &terms.breaker);
        }
        let doubt = self.doubt.take();
        let good = match pulse {
            Pulse::Answered(good) => {
                self.is_known |= good;
                good
            }
            // It works, and has said nothing of how it is.
            Pulse::Busy => return,
            Pulse::Unasked => return,
            Pulse::Silent => {
                if let Some(doubt) = doubt {
                    self.failed(Leg::Decode, doubt.sign, now, terms);
                }
                false
            }
            Pulse::Unreachable(sign) => {
                match doubt {
                    Some(_) => self.failed(Leg::Decode, sign, now, terms),
                    None if passed => self.doubt(sign),
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
    pub(crate) const ALL: [Self; 5] = [Self::Usable, Self::Trial, Self::Out, Self::Silent, Self::Draining];

    pub(crate) fn of(byte: u8) -> Self {
        Self::ALL[usize::from(byte).min(4)]
    }

    /// For people, and a metric's label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Usable => "usable",
            Self::Trial => "trial",
            Self::Out => "ejected",
            Self::Silent => "unresponsive",
            Self::Draining => "draining",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
