//! Every engine the router knows, by its address. What an engine has become in use (connections, load, health)
//! outlives the configuration that names it, for as long as some generation or request still holds it. An operator's
//! order outlives that too: an engine that discovery loses and finds again is still drained.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::config::{EngineUrl, PrefixIndexConfig};
use crate::engines::caches::Memory;
use crate::engines::caches::kv_events::Subscriptions;
use crate::engines::health::{Order, Timers};
use crate::engines::http::{Bells, Engine, Terms};
use crate::engines::listeners::Freed;
use crate::engines::redact::Hosts;
use crate::metrics::Metrics;

/// Orders for engines that are gone; the oldest are forgotten.
const ORDERS_MAX: usize = 4096;

/// The engines.
pub(crate) struct Fleet {
    /// Those that tell of their caches.
    pub subscriptions: Subscriptions,
    /// What their caches hold, as far as is known.
    pub memory: Arc<Memory>,
    metrics: Arc<Metrics>,
    known: Mutex<Known>,
    /// Where they live; never told to clients.
    hosts: Arc<Hosts>,
    /// When each engine's health wants looking after; see `process/health_probe.rs`.
    pub timers: Arc<Timers>,
    /// Told whenever an engine may be able to take a request again.
    pub freed: Arc<Freed>,
}

#[derive(Default)]
struct Known {
    engines: HashMap<EngineUrl, Arc<Engine>>,
    /// The same, by [`Engine::id`].
    by_id: HashMap<u32, Weak<Engine>>,
    /// What operators ordered of engines that are gone, the oldest first.
    orders: VecDeque<(EngineUrl, Order)>,
    /// The orders have been handed over: whoever gives another is to give it to the next router.
    handed_over: bool,
}

/// The orders are the next router's by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandedOver;

/// Keeps an order for an engine that is not there: the latest of each, and the latest of all.
fn remember(orders: &mut VecDeque<(EngineUrl, Order)>, url: EngineUrl, order: Order) {
    orders.retain(|(of, _)| *of != url);
    orders.push_back((url, order));
    orders.drain(..orders.len().saturating_sub(ORDERS_MAX));
}

impl Fleet {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let bounds = PrefixIndexConfig::default();
        let memory = Arc::new(Memory::new(bounds.chunks_per_engine, bounds.chunks_total));
        Self {
            subscriptions: Subscriptions::default(),
            memory,
            metrics,
            known: Mutex::default(),
            hosts: Arc::default(),
            timers: Arc::default(),
            freed: Arc::default(),
        }
    }

    /// What counts the engines.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The engine at an address. One that is asked for twice is one engine: its load and its connections are
    /// counted together. The terms are those of the last who asked.
    pub(crate) fn engine(&self, url: &EngineUrl, terms: &Terms) -> Arc<Engine> {
        let mut known = self.lock();
        if let Some(engine) = known.engines.get(url) {
            engine.set_terms(terms.clone());
            return Arc::clone(engine);
        }
        let metrics = self.metrics.engine(&url.authority());
        let (timers, freed) = (Arc::clone(&self.timers), Arc::clone(&self.freed));
        let bells = Bells { timers, freed, memory: Arc::clone(&self.memory), hosts: Arc::clone(&self.hosts) };
        let engine = Arc::new(Engine::new(url.clone(), terms.clone(), bells, metrics));
        self.hosts.add(url.host());
        if let Some(at) = known.orders.iter().position(|(of, _)| of == url)
            && let Some((_, order)) = known.orders.remove(at)
        {
            engine.health().change(engine.authority(), &terms.health, |health, _| health.order(order));
        }
        known.engines.insert(url.clone(), Arc::clone(&engine));
        known.by_id.insert(engine.id(), Arc::downgrade(&engine));
        // Not sooner: the health loop looks for it here.
        engine.arm();
        engine
    }

    /// Takes an operator's order.
    ///
    /// # Errors
    /// After [`Self::hand_over_orders`]: nobody would ever hear of it.
    pub(crate) fn order(&self, engine: &Engine, order: Order) -> Result<(), HandedOver> {
        // Held until the order is in: what is handed over is told under the same lock, so an order is in it, or refused.
        let known = self.lock();
        if known.handed_over {
            return Err(HandedOver);
        }
        engine.judge(|health, _, _| health.order(order));
        Ok(())
    }

    /// As [`Self::orders`], for the next router. No further order is taken.
    pub(crate) fn hand_over_orders(&self) -> Vec<(EngineUrl, Order)> {
        let mut known = self.lock();
        known.handed_over = true;
        Self::ordered(&known)
    }

    /// What operators have ordered and not taken back, of engines that are gone, too.
    pub(crate) fn orders(&self) -> Vec<(EngineUrl, Order)> {
        Self::ordered(&self.lock())
    }

    fn ordered(known: &Known) -> Vec<(EngineUrl, Order)> {
        let ordered = |(url, engine): (&EngineUrl, &Arc<Engine>)| {
            let order = engine.health().snapshot().ordered();
            (order != Order::None).then(|| (url.clone(), order))
        };
        known.orders.iter().cloned().chain(known.engines.iter().filter_map(ordered)).collect()
    }

    /// Takes an order over that was given to the router before this one: for an engine that is known, or for when it is.
    pub(crate) fn take_over(&self, url: EngineUrl, order: Order) {
        let mut known = self.lock();
        let Some(engine) = known.engines.get(&url).map(Arc::clone) else {
            remember(&mut known.orders, url, order);
            return;
        };
        drop(known);
        engine.judge(|health, _, _| health.order(order));
    }

    /// The engine of an [`Engine::id`].
    pub(crate) fn by_id(&self, id: u32) -> Option<Arc<Engine>> {
        self.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    /// Every engine once.
    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        self.lock().engines.values().cloned().collect()
    }

    /// Forgets engines that no generation and no request holds.
    pub(crate) fn prune(&self) {
        let Known { engines, by_id, orders, .. } = &mut *self.lock();
        engines.retain(|url, engine| {
            let kept = Arc::strong_count(engine) > 1;
            if !kept {
                let order = engine.health().snapshot().ordered();
                if order != Order::None {
                    remember(orders, url.clone(), order);
                }
                self.hosts.remove(url.host());
                self.memory.forget(engine.holders());
                by_id.remove(&engine.id());
                self.timers.set(engine.id(), None);
            }
            kept
        });
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::ReleaseMode;
    use crate::engines::health::{Sign, Standing, state};
    use crate::engines::http::Manner;
    use crate::engines::liveness::Pulse;
    use crate::metrics::Leg;

    fn terms() -> Terms {
        Terms {
            connect_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(1),
            lost_after: Duration::ZERO,
            secret: None,
            api_key: None,
            tls: None,
            health: state::tests::TERMS,
            release: ReleaseMode::default(),
        }
    }

    fn url(n: usize) -> EngineUrl {
        format!("http://engine-{n}:8000").parse().expect("an address")
    }

    #[test]
    fn an_engine_that_is_lost_and_found_again_is_still_drained_until_it_is_undrained() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let standing = |engine: &Engine| engine.health().standing(Leg::Decode);
        let order = |engine: &Engine, order| engine.judge(|health, _, _| health.order(order));
        let first = fleet.engine(&url(0), &terms());
        order(&first, Order::Drain);
        let id = first.id();
        drop(first);
        fleet.prune();
        assert!(fleet.engines().is_empty());
        let again = fleet.engine(&url(0), &terms());
        assert_ne!(again.id(), id, "it is another in everything else");
        assert_eq!(standing(&again), Standing::Draining);
        order(&again, Order::None);
        drop(again);
        fleet.prune();
        assert_eq!(standing(&fleet.engine(&url(0), &terms())), Standing::Usable);
    }

    #[test]
    fn orders_are_taken_over_by_another_fleet_for_engines_that_it_knows_and_that_it_finds_later() {
        let fleets = [(); 2].map(|()| Fleet::new(Arc::new(Metrics::new())));
        let [before, after] = &fleets;
        let standing = |engine: &Engine| engine.health().standing(Leg::Decode);
        let drained = Terms { health: state::Terms { drain: true, ..state::tests::TERMS }, ..terms() };
        let of = |n| if n == 1 { drained.clone() } else { terms() };
        let known: Vec<_> = (0..4).map(|n| before.engine(&url(n), &of(n))).collect();
        known[0].judge(|health, _, _| health.order(Order::Drain));
        known[1].judge(|health, _, _| health.order(Order::Undrain));
        // Drained and taken back: nothing is left of that, here or there.
        for order in [Order::Drain, Order::Undrain] {
            known[3].judge(|health, _, _| health.order(order));
        }
        drop(known);
        // The second is gone from this one, and both are still to be found by the next.
        let kept = before.engine(&url(0), &terms());
        before.prune();
        let mut orders = before.orders();
        orders.sort_by_key(|(url, _)| url.to_string());
        assert_eq!(orders, [(url(0), Order::Drain), (url(1), Order::Undrain)]);
        assert_eq!(standing(&kept), Standing::Draining);
        let here = after.engine(&url(0), &terms());
        for (url, order) in orders {
            after.take_over(url, order);
        }
        assert_eq!(standing(&here), Standing::Draining);
        assert_eq!(standing(&after.engine(&url(1), &drained)), Standing::Usable);
        let others: Vec<_> = [2, 3].map(|n| after.engine(&url(n), &drained)).into();
        assert!(others.iter().all(|engine| standing(engine) == Standing::Draining));
        assert_eq!(after.orders().len(), 2);
    }

    #[test]
    fn an_order_is_in_what_is_handed_over_or_it_is_refused() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let engines: Vec<_> = (0..64).map(|n| fleet.engine(&url(n), &terms())).collect();
        let (begun, taken) = (std::sync::Barrier::new(3), std::sync::atomic::AtomicUsize::new(0));
        // Two operators, while the orders are handed over at some moment between.
        let give = |engines: &[Arc<Engine>]| -> Vec<EngineUrl> {
            begun.wait();
            let mut given = Vec::new();
            for engine in engines {
                if fleet.order(engine, Order::Drain).is_ok() {
                    taken.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    given.push(engine.url().clone());
                }
            }
            given
        };
        let (mut given, handed) = std::thread::scope(|scope| {
            let operators = [&engines[..32], &engines[32..]].map(|some| scope.spawn(move || give(some)));
            begun.wait();
            while taken.load(std::sync::atomic::Ordering::Relaxed) < 8 {
                std::hint::spin_loop();
            }
            let handed = fleet.hand_over_orders();
            let given: Vec<_> = operators.into_iter().flat_map(|one| one.join().expect("it ends")).collect();
            (given, handed)
        });
        let mut handed: Vec<_> = handed.into_iter().map(|(url, _)| url.to_string()).collect();
        let mut given: Vec<_> = given.drain(..).map(|url| url.to_string()).collect();
        handed.sort();
        given.sort();
        assert_eq!(handed, given);
        let before = engines[0].health().standing(Leg::Decode);
        assert_eq!(fleet.order(&engines[0], Order::Undrain), Err(HandedOver));
        assert_eq!(engines[0].health().standing(Leg::Decode), before, "and it changed nothing");
    }

    #[test]
    fn of_those_who_see_an_engine_on_trial_at_once_one_gets_it() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let engine = fleet.engine(&url(0), &terms());
        engine.failed(Leg::Decode, Sign::Unreachable);
        engine.judge(|health, now, terms| {
            health.tick(now.after(Duration::from_secs(3600)), || 1.0, terms);
            health.told(Pulse::Answered(true), now, terms);
        });
        assert_eq!(engine.health().standing(Leg::Decode), Standing::Trial);
        let begin = |manner| engine.begin(Leg::Decode, None, 1, usize::MAX, manner);
        assert!(engine.health().takes(Leg::Decode) && engine.health().takes(Leg::Decode), "both see it");
        let first = begin(Manner::Careful).expect("one gets it");
        assert!(begin(Manner::Careful).is_none(), "and the other chooses again");
        assert!(begin(Manner::Anyway).is_some(), "unless there is no other engine");
        drop(first);
        assert!(engine.begin(Leg::Decode, None, 1, 0, Manner::Careful).is_none(), "no place");
        assert!(begin(Manner::Careful).is_some(), "a trial that found no place is none");
        assert_eq!((engine.load(None), engine.tokens(None)), (0, 0));
    }

    #[test]
    fn the_ranks_of_an_engine_are_counted_and_remembered_apart_and_forgotten_together() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let (engine, other) = (fleet.engine(&url(0), &terms()), fleet.engine(&url(1), &terms()));
        let begin = |rank| engine.begin(Leg::Decode, Some(rank), 10, 1, Manner::Careful);
        let held = begin(3);
        assert!(held.is_some() && begin(3).is_none() && begin(2).is_some());
        let loads = [None, Some(3), Some(2)].map(|rank| (engine.load(rank), engine.tokens(rank)));
        assert_eq!(loads, [(1, 10), (1, 10), (0, 0)]);
        for rank in [0, 255] {
            fleet.memory.sent(engine.holder(Some(rank)), &[u64::from(rank)]);
        }
        fleet.memory.sent(other.holder(None), &[7]);
        let held = |engine: &Engine, rank| fleet.memory.chunks_of(engine.holder(rank));
        assert_eq!((held(&engine, None), held(&engine, Some(255)), held(&engine, Some(1))), (1, 1, 0));
        engine.failed(Leg::Decode, Sign::Unreachable);
        engine.judge(|health, _, _| health.doubt(Sign::Nameless));
        assert_eq!(
            (held(&engine, None), held(&engine, Some(255))),
            (1, 1),
            "a failed connection empties no cache"
        );
        fleet.memory.forget_sent(engine.holders());
        assert_eq!((held(&engine, None), held(&engine, Some(255)), held(&other, None)), (0, 0, 1));
    }

    #[test]
    fn orders_for_engines_that_are_gone_are_bounded_and_the_oldest_go_first() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        for n in 0..=ORDERS_MAX {
            fleet.engine(&url(n), &terms()).judge(|health, _, _| health.order(Order::Drain));
            fleet.prune();
        }
        assert_eq!(fleet.lock().orders.len(), ORDERS_MAX);
        assert_eq!(fleet.engine(&url(0), &terms()).health().standing(Leg::Decode), Standing::Usable);
        let last = fleet.engine(&url(ORDERS_MAX), &terms());
        assert_eq!(last.health().standing(Leg::Decode), Standing::Draining);
    }
}
