//! The requests in flight: id, start, phase and engines.
//!
//! Each request enters and leaves one of [`SHARDS`] tables, selected by its number; the limit is `limits.in_flight`.
//! Phase and engines are looked up only when a caller reads them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use baton_connector::exchange::Exchange;
use baton_connector::{RequestId, Time};

use crate::engines::http::Engine;
use crate::metrics::{Leg, Scrape, requests};
use crate::routing::models::Model;

/// Number of tables, a power of two. Concurrent requests rarely share one.
const SHARDS: usize = 16;

/// One request in flight.
pub(crate) struct InFlightRequest {
    pub id: RequestId,
    pub begun: Time,
    /// Set once the body is read.
    pub model: OnceLock<Arc<Model>>,
    pub exchange: OnceLock<Arc<Mutex<Exchange>>>,
    engines: Mutex<[Option<Arc<Engine>>; 2]>,
}

impl InFlightRequest {
    /// Records an attempt at an engine.
    pub(crate) fn set_engine(&self, leg: Leg, engine: &Arc<Engine>) {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)[leg as usize] = Some(Arc::clone(engine));
    }

    /// The engines of the last attempts, prefill and decode.
    pub(crate) fn engines(&self) -> [Option<Arc<Engine>>; 2] {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The request's phase.
    pub(crate) fn phase(&self) -> &'static str {
        let Some(exchange) = self.exchange.get() else { return "intake" };
        let phase = exchange.lock().unwrap_or_else(PoisonError::into_inner).phase();
        phase.map_or("ending", |phase| phase.label())
    }
}

type InFlightShard = HashMap<u64, Arc<InFlightRequest>>;

/// All requests in flight.
#[derive(Default)]
pub(crate) struct InFlightTable {
    shards: [Mutex<InFlightShard>; SHARDS],
    next: AtomicU64,
}

impl InFlightTable {
    /// Adds a request. The caller must remove it by its number.
    pub(crate) fn enter(&self, id: RequestId, begun: Time) -> (u64, Arc<InFlightRequest>) {
        let entry = Arc::new(InFlightRequest {
            id,
            begun,
            model: OnceLock::new(),
            exchange: OnceLock::new(),
            engines: Mutex::default(),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.shard(number).insert(number, Arc::clone(&entry));
        (number, entry)
    }

    pub(crate) fn leave(&self, number: u64) {
        self.shard(number).remove(&number);
    }

    /// All requests, the oldest first.
    pub(crate) fn list(&self) -> Vec<Arc<InFlightRequest>> {
        let of = |shard: &Mutex<InFlightShard>| -> Vec<_> {
            shard.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
        };
        let mut list: Vec<_> = self.shards.iter().flat_map(of).collect();
        list.sort_by_key(|entry| entry.begun);
        list
    }

    /// Adds the ages of the requests to the scrape.
    pub(crate) fn look_up(&self, now: Time, scrape: &mut Scrape) {
        let ages: Vec<f64> = self.list().iter().map(|entry| now.since(entry.begun).as_secs_f64()).collect();
        requests::look_up_ages(scrape, &ages);
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, InFlightShard> {
        self.shards[number as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
