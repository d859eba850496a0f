//! Which engines a request is given: chosen, waited for in turn while they are full, and told to those who ask why.
//!
//! Whoever waits for a prefill engine keeps the decode engine that is set aside for it. No two requests can wait for
//! each other's places that way, because nobody waits for a prefill engine that also decodes for the same model: a
//! place there may be held by one who waits as well. Such engines count as busy at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::exchange::{Event, State};
use baton_openai::ApiError;

use super::ExchangeDriver;
use crate::admission::{Found, NotLetIn, Scarce, Ticket, Wants};
use crate::client::address;
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Fallback;
use crate::engines::http::Engine;
use crate::exchange::ask::Ask;
use crate::legs::outcome::Ended;
use crate::message::features::Wanted;
use crate::metrics::Leg;
use crate::metrics::routing::Why;
use crate::routing::disaggregation;
use crate::routing::models::Model;
use crate::routing::pool::{Pool, Reserved, Room, Tell, another_first};

/// What waiting for an engine came to.
pub(super) enum Had {
    Engine(Reserved),
    /// There is none that could be asked, whatever the wait. [`Scarce::Full`]: and those that are left are busy.
    None(Scarce),
    /// All are busy, and for too long.
    Busy(ApiError),
}

impl ExchangeDriver {
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
        self.source = ask.source(address::of(session, &self.generation.config.trusted_proxies));
        self.ticket = Some(ticket);
        self.debtor.model = Some(Arc::clone(&ask.model));
        self.debtor.authorization = ask.authorization.clone();
        let room = |model: &Model, tell| {
            self.search(Leg::Decode, &model.decode, &ask.wanted(), tell, |choose| choose(&[]))
        };
        match self.wait(session, Leg::Decode, (ticket, Wants::default()), room).await {
            Err(ClientGone) => Err(self.client_gone()),
            Ok(Ok(reserved)) => {
                self.reserved = Some(reserved);
                Ok(())
            }
            Ok(Err(NotLetIn { scarce, error })) => {
                self.apply(match scarce {
                    Scarce::Full => Event::NotAdmitted,
                    Scarce::NoEngine => Event::NoEngine,
                });
                Err(error.into())
            }
        }
    }

    /// A decode engine that is none of those `tried`, when they have failed the request, or for what is
    /// recomputed. It waits in the queue as often as it must, each time for as long as any request may: what it waited for
    /// the first time was its turn. With a finished prefill in hand it goes before those that had no turn yet.
    pub(super) async fn another_decode(
        &self,
        session: &mut Session,
        ask: &Ask,
        tried: &[Arc<Engine>],
    ) -> Result<Had, ClientGone> {
        let room = |model: &Model, tell| {
            let wanted = ask.wanted();
            match self.search(Leg::Decode, &model.decode, &wanted, tell, |choose| choose(tried)) {
                Err(Scarce::Full) => Err(Scarce::Full),
                chosen => Ok(chosen),
            }
        };
        let without = self.model.decode.among(tried);
        let ahead = matches!(self.exchange(|exchange| exchange.state()), State::Held(Some(_)));
        self.had(session, Leg::Decode, (self.ticket_again(), Wants { without, ahead }), room).await
    }

    /// A prefill engine: another than the decode engine and than those that were asked before, if there is another.
    pub(super) async fn another_prefill(
        &self,
        session: &mut Session,
        ask: &Ask,
        tried: &[Arc<Engine>],
    ) -> Result<Had, ClientGone> {
        let mut wanted = ask.wanted();
        wanted.pair = self.reserved.as_ref().and_then(Reserved::pair);
        let decode = self.reserved.as_ref().map(Reserved::engine);
        let before: Vec<_> = tried.iter().chain(&self.prefill_engine).cloned().collect();
        let others: Vec<_> = before.iter().chain(decode).cloned().collect();
        let room = |model: &Model, tell| {
            self.search(Leg::Prefill, &model.prefill, &wanted, tell, |choose| match choose(&others) {
                Err(Scarce::Full) if model.prefill.will_have_room(&others, &model.decode) => {
                    Err(Scarce::Full)
                }
                // One that failed after it had lent is not asked again where a decode engine may stand in.
                Err(_) if self.producer_failed && ask.model.fallback == Fallback::Aggregate => {
                    Ok(Err(Scarce::NoEngine))
                }
                Err(_) => Ok(another_first(&[&before, tried], choose)),
                chosen => Ok(chosen),
            })
        };
        let is_first = tried.is_empty() && self.may_recompute;
        let ticket = if is_first { self.ticket() } else { self.ticket_again() };
        let wants = Wants { without: self.model.prefill.among(&others), ahead: false };
        self.had(session, Leg::Prefill, (ticket, wants), room).await
    }

    fn ticket(&self) -> Ticket {
        self.ticket.expect("a decode engine is set aside before anything else")
    }

    /// For a wait after engines have worked for the request: the time that they took is not a wait.
    fn ticket_again(&self) -> Ticket {
        let ticket = self.ticket();
        let most = Instant::now() + Duration::from_millis(self.generation.config.queue.timeout_ms);
        Ticket { deadline: ticket.ends.map_or(most, |ends| ends.min(most)), ..ticket }
    }

    async fn had(
        &self,
        session: &mut Session,
        leg: Leg,
        how: (Ticket, Wants),
        room: impl FnMut(&Model, Tell) -> Result<Result<Reserved, Scarce>, Scarce>,
    ) -> Result<Had, ClientGone> {
        Ok(match self.wait(session, leg, how, room).await? {
            Ok(Ok(reserved)) => Had::Engine(reserved),
            Ok(Err(scarce)) => Had::None(scarce),
            Err(NotLetIn { error, .. }) => Had::Busy(error),
        })
    }

    /// Waits in the queue of a leg until `room` finds something; at once, mostly.
    async fn wait<T: Found>(
        &self,
        session: &mut Session,
        leg: Leg,
        (ticket, wants): (Ticket, Wants),
        mut room: impl FnMut(&Model, Tell) -> Result<T, Scarce>,
    ) -> Result<Result<T, NotLetIn>, ClientGone> {
        let mut waits = false;
        let room = || {
            if !std::mem::replace(&mut waits, true) {
                return room(&self.model, Tell::Everything);
            }
            // Engines that came since are good for those who wait already. That they are full still is no news.
            let now = self.shared.generation();
            room(now.models.named(Some(&self.model.name)).unwrap_or(&self.model), Tell::Choices)
        };
        race(session, self.model.queue(leg).enter(ticket, wants, &self.generation.config.queue, room)).await
    }

    /// An engine for a leg, at once, by as many choices as `how` makes, each with the engines that it may not take. What
    /// the last was made from is noted for those who ask: that the same engines were out the times before is no news.
    fn search<T>(
        &self,
        leg: Leg,
        pool: &Pool,
        wanted: &Wanted<'_>,
        tell: Tell,
        how: impl FnOnce(&mut dyn FnMut(&[Arc<Engine>]) -> Result<Reserved, Scarce>) -> T,
    ) -> T {
        let tell = if self.account.is_some() { tell } else { Tell::Nothing };
        let mut last = None;
        let found = how(&mut |tried| {
            let (reserved, sight) = pool.reserve(wanted, tried, Room::Needed, tell);
            last = sight;
            reserved
        });
        if let (Some(account), Some(sight)) = (&self.account, last) {
            account.chose(leg, sight);
        }
        found
    }

    /// A decode engine for the rest of an answer, at once: other than those `tried`. Where every other one has failed,
    /// one of them may be back by now; the one that died only where there is no other.
    pub(super) fn decode_again(
        &self,
        ask: &Ask,
        dead: &Arc<Engine>,
        tried: &[Arc<Engine>],
    ) -> Option<Reserved> {
        let decode = &ask.model.decode;
        self.search(Leg::Decode, decode, &ask.wanted(), Tell::Everything, |choose| {
            match choose(tried).or_else(|_| choose(std::slice::from_ref(dead))) {
                Err(Scarce::NoEngine) => choose(&[]).ok(),
                reserved => reserved.ok(),
            }
        })
    }

    /// Whether another engine prefills, now that it is known which one decodes.
    pub(super) fn disaggregation(&self, ask: &Ask) -> Why {
        let holding = self.reserved.as_ref().map(|reserved| reserved.holding).unwrap_or_default();
        let facts = ask.facts(holding);
        let why = disaggregation::decide(&ask.model.disaggregate, &facts);
        if let Some(account) = &self.account {
            account.disaggregated(why, facts);
        }
        why
    }
}
