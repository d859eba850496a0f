//! All known engines by address. An engine's connections, load and health outlive the configuration that names it,
//! for as long as a generation or a request holds the engine. An operator's order outlives the engine: an engine
//! that discovery loses and finds again is still drained.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::config::{EngineUrl, PrefixIndexConfig};
use crate::engines::caches::KnownCaches;
use crate::engines::caches::kv_events::Subscriptions;
use crate::engines::health::{HealthTimers, OperatorOrder};
use crate::engines::http::{ConnectionTerms, Engine, EngineListeners};
use crate::engines::listeners::CapacityNotify;
use crate::engines::redact::AddressRedactor;
use crate::metrics::Metrics;

/// Maximum orders for absent engines. The oldest are removed.
const ORDERS_MAX: usize = 4096;

/// The engines.
pub(crate) struct Fleet {
    /// Subscriptions to KV events.
    pub subscriptions: Subscriptions,
    /// Known contents of the engines' caches.
    pub known_caches: Arc<KnownCaches>,
    metrics: Arc<Metrics>,
    state: Mutex<FleetState>,
    /// The engines' addresses, which no client may see.
    redactor: Arc<AddressRedactor>,
    /// When each engine's health is due; see `process/health_probe.rs`.
    pub timers: Arc<HealthTimers>,
    /// Notified when an engine may be able to accept a request again.
    pub capacity: Arc<CapacityNotify>,
}

#[derive(Default)]
struct FleetState {
    engines: HashMap<EngineUrl, Arc<Engine>>,
    /// The same, by [`Engine::id`].
    by_id: HashMap<u32, Weak<Engine>>,
    /// Operators' orders for absent engines, the oldest first.
    orders: VecDeque<(EngineUrl, OperatorOrder)>,
    /// The orders have been transferred: the next router accepts further orders.
    orders_transferred: bool,
}

/// The next router has the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrdersTransferredError;

/// Stores an order for an absent engine: the latest order of each engine, and the latest of all.
fn store_order(orders: &mut VecDeque<(EngineUrl, OperatorOrder)>, url: EngineUrl, order: OperatorOrder) {
    orders.retain(|(of, _)| *of != url);
    orders.push_back((url, order));
    orders.drain(..orders.len().saturating_sub(ORDERS_MAX));
}

impl Fleet {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let bounds = PrefixIndexConfig::default();
        let known_caches = Arc::new(KnownCaches::new(bounds.chunks_per_engine, bounds.chunks_total));
        Self {
            subscriptions: Subscriptions::default(),
            known_caches,
            metrics,
            state: Mutex::default(),
            redactor: Arc::default(),
            timers: Arc::default(),
            capacity: Arc::default(),
        }
    }

    /// The metrics of the engines.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The engine at an address, with these terms. Repeated calls return the same engine, so its load and its
    /// connections are counted together.
    pub(crate) fn engine(&self, url: &EngineUrl, terms: &ConnectionTerms) -> Arc<Engine> {
        let mut state = self.lock();
        if let Some(engine) = state.engines.get(url) {
            engine.set_terms(terms.clone());
            return Arc::clone(engine);
        }
        let metrics = self.metrics.engine(&url.authority());
        let (timers, capacity) = (Arc::clone(&self.timers), Arc::clone(&self.capacity));
        let listeners = EngineListeners {
            timers,
            capacity,
            known_caches: Arc::clone(&self.known_caches),
            redactor: Arc::clone(&self.redactor),
        };
        let engine = Arc::new(Engine::new(url.clone(), terms.clone(), listeners, metrics));
        self.redactor.add(url.host());
        if let Some(at) = state.orders.iter().position(|(of, _)| of == url)
            && let Some((_, order)) = state.orders.remove(at)
        {
            engine.health().change(engine.authority(), &terms.health, |health, _| health.order(order));
        }
        state.engines.insert(url.clone(), Arc::clone(&engine));
        state.by_id.insert(engine.id(), Arc::downgrade(&engine));
        // Must come last, because the health loop looks the engine up here.
        engine.arm();
        engine
    }

    /// Applies an operator's order.
    ///
    /// # Errors
    /// After [`Self::transfer_orders`], because the order would be lost.
    pub(crate) fn apply_order(
        &self,
        engine: &Engine,
        order: OperatorOrder,
    ) -> Result<(), OrdersTransferredError> {
        // The lock is held until the order is stored. The transfer takes the same lock, so an order is either
        // transferred or refused.
        let state = self.lock();
        if state.orders_transferred {
            return Err(OrdersTransferredError);
        }
        engine.update_health(|health, _, _| health.order(order));
        Ok(())
    }

    /// The orders for the next router, as [`Self::orders`] returns them. No further order is accepted.
    pub(crate) fn transfer_orders(&self) -> Vec<(EngineUrl, OperatorOrder)> {
        let mut state = self.lock();
        state.orders_transferred = true;
        Self::collect_orders(&state)
    }

    /// Current orders of operators, including those for absent engines.
    pub(crate) fn orders(&self) -> Vec<(EngineUrl, OperatorOrder)> {
        Self::collect_orders(&self.lock())
    }

    fn collect_orders(state: &FleetState) -> Vec<(EngineUrl, OperatorOrder)> {
        let ordered = |(url, engine): (&EngineUrl, &Arc<Engine>)| {
            let order = engine.health().snapshot().current_order();
            (order != OperatorOrder::None).then(|| (url.clone(), order))
        };
        state.orders.iter().cloned().chain(state.engines.iter().filter_map(ordered)).collect()
    }

    /// Adopts an order from the previous router: applies it, or stores it until the engine is known.
    pub(crate) fn adopt_order(&self, url: EngineUrl, order: OperatorOrder) {
        let mut state = self.lock();
        let Some(engine) = state.engines.get(&url).map(Arc::clone) else {
            store_order(&mut state.orders, url, order);
            return;
        };
        drop(state);
        engine.update_health(|health, _, _| health.order(order));
    }

    /// The engine with this [`Engine::id`].
    pub(crate) fn by_id(&self, id: u32) -> Option<Arc<Engine>> {
        self.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    /// All engines.
    pub(crate) fn engines(&self) -> Vec<Arc<Engine>> {
        self.lock().engines.values().cloned().collect()
    }

    /// Removes engines that no generation and no request holds.
    pub(crate) fn prune(&self) {
        let FleetState { engines, by_id, orders, .. } = &mut *self.lock();
        engines.retain(|url, engine| {
            let kept = Arc::strong_count(engine) > 1;
            if !kept {
                let order = engine.health().snapshot().current_order();
                if order != OperatorOrder::None {
                    store_order(orders, url.clone(), order);
                }
                self.redactor.remove(url.host());
                self.known_caches.forget(engine.cache_ids());
                by_id.remove(&engine.id());
                self.timers.set(engine.id(), None);
            }
            kept
        });
    }

    fn lock(&self) -> MutexGuard<'_, FleetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::ReleaseMode;
    use crate::engines::health::{FailureKind, Standing, state};
    use crate::engines::http::TrialRule;
    use crate::engines::probe::ProbeResult;
    use crate::engines::protocol::learned::ProtocolTerms;
    use crate::metrics::Leg;

    fn terms() -> ConnectionTerms {
        ConnectionTerms {
            connect_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(1),
            lost_after: Duration::ZERO,
            secret: None,
            api_key: None,
            tls: None,
            http2: Default::default(),
            health: state::tests::TERMS,
            release: ReleaseMode::default(),
            protocol: ProtocolTerms::default(),
            control: None,
        }
    }

    fn url(n: usize) -> EngineUrl {
        format!("http://engine-{n}:8000").parse().expect("an address")
    }

    #[test]
    fn an_engine_that_is_lost_and_found_again_is_still_drained_until_it_is_undrained() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let standing = |engine: &Engine| engine.health().standing(Leg::Decode);
        let order = |engine: &Engine, order| engine.update_health(|health, _, _| health.order(order));
        let first = fleet.engine(&url(0), &terms());
        order(&first, OperatorOrder::Drain);
        let id = first.id();
        drop(first);
        fleet.prune();
        assert!(fleet.engines().is_empty());
        let again = fleet.engine(&url(0), &terms());
        assert_ne!(again.id(), id, "it is another in everything else");
        assert_eq!(standing(&again), Standing::Draining);
        order(&again, OperatorOrder::None);
        drop(again);
        fleet.prune();
        assert_eq!(standing(&fleet.engine(&url(0), &terms())), Standing::Usable);
    }

    #[test]
    fn operator_orders_apply_to_present_and_later_engines_of_the_next_fleet() {
        let fleets = [(); 2].map(|()| Fleet::new(Arc::new(Metrics::new())));
        let [before, after] = &fleets;
        let standing = |engine: &Engine| engine.health().standing(Leg::Decode);
        let drained =
            ConnectionTerms { health: state::HealthTerms { drain: true, ..state::tests::TERMS }, ..terms() };
        let of = |n| if n == 1 { drained.clone() } else { terms() };
        let engines: Vec<_> = (0..4).map(|n| before.engine(&url(n), &of(n))).collect();
        engines[0].update_health(|health, _, _| health.order(OperatorOrder::Drain));
        engines[1].update_health(|health, _, _| health.order(OperatorOrder::Undrain));
        // Drained and undrained: no order is left in either fleet.
        for order in [OperatorOrder::Drain, OperatorOrder::Undrain] {
            engines[3].update_health(|health, _, _| health.order(order));
        }
        drop(engines);
        // The second engine is gone from this fleet, and the next fleet has neither yet.
        let kept = before.engine(&url(0), &terms());
        before.prune();
        let mut orders = before.orders();
        orders.sort_by_key(|(url, _)| url.to_string());
        assert_eq!(orders, [(url(0), OperatorOrder::Drain), (url(1), OperatorOrder::Undrain)]);
        assert_eq!(standing(&kept), Standing::Draining);
        let here = after.engine(&url(0), &terms());
        for (url, order) in orders {
            after.adopt_order(url, order);
        }
        assert_eq!(standing(&here), Standing::Draining);
        assert_eq!(standing(&after.engine(&url(1), &drained)), Standing::Usable);
        let others: Vec<_> = [2, 3].map(|n| after.engine(&url(n), &drained)).into();
        assert!(others.iter().all(|engine| standing(engine) == Standing::Draining));
        assert_eq!(after.orders().len(), 2);
    }

    #[test]
    fn an_operator_order_is_handed_over_or_refused() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let engines: Vec<_> = (0..64).map(|n| fleet.engine(&url(n), &terms())).collect();
        let (begun, taken) = (std::sync::Barrier::new(3), std::sync::atomic::AtomicUsize::new(0));
        // Two operators give orders while the orders are transferred.
        let give = |engines: &[Arc<Engine>]| -> Vec<EngineUrl> {
            begun.wait();
            let mut given = Vec::new();
            for engine in engines {
                if fleet.apply_order(engine, OperatorOrder::Drain).is_ok() {
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
            let handed = fleet.transfer_orders();
            let given: Vec<_> = operators.into_iter().flat_map(|one| one.join().expect("it ends")).collect();
            (given, handed)
        });
        let mut handed: Vec<_> = handed.into_iter().map(|(url, _)| url.to_string()).collect();
        let mut given: Vec<_> = given.drain(..).map(|url| url.to_string()).collect();
        handed.sort();
        given.sort();
        assert_eq!(handed, given);
        let before = engines[0].health().standing(Leg::Decode);
        assert_eq!(fleet.apply_order(&engines[0], OperatorOrder::Undrain), Err(OrdersTransferredError));
        assert_eq!(engines[0].health().standing(Leg::Decode), before, "and it changed nothing");
    }

    #[test]
    fn one_of_concurrent_requests_gets_the_trial() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let engine = fleet.engine(&url(0), &terms());
        engine.failed(Leg::Decode, FailureKind::Unreachable);
        engine.update_health(|health, now, terms| {
            health.tick(now.after(Duration::from_secs(3600)), || 1.0, terms);
            health.record_probe(ProbeResult::Answered(true), now, terms);
        });
        assert_eq!(engine.health().standing(Leg::Decode), Standing::Trial);
        let begin = |manner| engine.begin(Leg::Decode, None, 1, usize::MAX, manner);
        assert!(engine.health().accepts(Leg::Decode) && engine.health().accepts(Leg::Decode), "both see it");
        let first = begin(TrialRule::Enforce).expect("one gets it");
        assert!(begin(TrialRule::Enforce).is_none(), "and the other chooses again");
        assert!(begin(TrialRule::Ignore).is_some(), "unless there is no other engine");
        drop(first);
        assert!(engine.begin(Leg::Decode, None, 1, 0, TrialRule::Enforce).is_none(), "no place");
        assert!(begin(TrialRule::Enforce).is_some(), "a trial that found no place is none");
        assert_eq!((engine.load(None), engine.tokens(None)), (0, 0));
    }

    #[test]
    fn ranks_of_an_engine_have_separate_state_and_are_removed_together() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        let (engine, other) = (fleet.engine(&url(0), &terms()), fleet.engine(&url(1), &terms()));
        let begin = |rank| engine.begin(Leg::Decode, Some(rank), 10, 1, TrialRule::Enforce);
        let held = begin(3);
        assert!(held.is_some() && begin(3).is_none() && begin(2).is_some());
        let loads = [None, Some(3), Some(2)].map(|rank| (engine.load(rank), engine.tokens(rank)));
        assert_eq!(loads, [(1, 10), (1, 10), (0, 0)]);
        for rank in [0, 255] {
            fleet.known_caches.record_routed(engine.cache_id(Some(rank)), &[u64::from(rank)]);
        }
        fleet.known_caches.record_routed(other.cache_id(None), &[7]);
        let held = |engine: &Engine, rank| fleet.known_caches.routed_chunks(engine.cache_id(rank));
        assert_eq!((held(&engine, None), held(&engine, Some(255)), held(&engine, Some(1))), (1, 1, 0));
        engine.failed(Leg::Decode, FailureKind::Unreachable);
        engine.update_health(|health, _, _| health.suspect(FailureKind::Unresolved));
        assert_eq!(
            (held(&engine, None), held(&engine, Some(255))),
            (1, 1),
            "a failed connection empties no cache"
        );
        fleet.known_caches.forget_routed(engine.cache_ids());
        assert_eq!((held(&engine, None), held(&engine, Some(255)), held(&other, None)), (0, 0, 1));
    }

    #[test]
    fn orders_for_removed_engines_are_bounded_and_the_oldest_are_dropped() {
        let fleet = Fleet::new(Arc::new(Metrics::new()));
        for n in 0..=ORDERS_MAX {
            fleet.engine(&url(n), &terms()).update_health(|health, _, _| health.order(OperatorOrder::Drain));
            fleet.prune();
        }
        assert_eq!(fleet.lock().orders.len(), ORDERS_MAX);
        assert_eq!(fleet.engine(&url(0), &terms()).health().standing(Leg::Decode), Standing::Usable);
        let last = fleet.engine(&url(ORDERS_MAX), &terms());
        assert_eq!(last.health().standing(Leg::Decode), Standing::Draining);
    }
}
