//! The requests in flight, for whoever asks: who, since when, in which phase, at which engines.
//!
//! Each request enters once and leaves once, in one of [`SHARDS`] tables by its number; the bound is that of
//! `limits.in_flight`. What is told of it (phase, engines) is looked up when somebody asks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use baton_connector::exchange::Exchange;
use baton_connector::{RequestId, Time};

use crate::engines::http::Engine;
use crate::metrics::{Leg, Scrape, requests};
use crate::routing::models::Model;

/// Tables; a power of two. Requests that begin at once rarely meet in one.
const SHARDS: usize = 16;

/// One request.
pub(crate) struct Entry {
    pub id: RequestId,
    pub begun: Time,
    /// Set once the body is read.
    pub model: OnceLock<Arc<Model>>,
    pub exchange: OnceLock<Arc<Mutex<Exchange>>>,
    engines: Mutex<[Option<Arc<Engine>>; 2]>,
}

impl Entry {
    /// An engine is being asked.
    pub(crate) fn asks(&self, leg: Leg, engine: &Arc<Engine>) {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)[leg as usize] = Some(Arc::clone(engine));
    }

    /// Who was asked last, prefill and decode.
    pub(crate) fn engines(&self) -> [Option<Arc<Engine>>; 2] {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The part of its life it is in.
    pub(crate) fn phase(&self) -> &'static str {
        let Some(exchange) = self.exchange.get() else { return "intake" };
        let phase = exchange.lock().unwrap_or_else(PoisonError::into_inner).phase();
        phase.map_or("ending", |phase| phase.label())
    }
}

type Shard = HashMap<u64, Arc<Entry>>;

/// Every request in flight.
#[derive(Default)]
pub(crate) struct InFlightTable {
    shards: [Mutex<Shard>; SHARDS],
    next: AtomicU64,
}

impl InFlightTable {
    /// A request begins. Whoever enters it takes it out, by the number.
    pub(crate) fn enter(&self, id: RequestId, begun: Time) -> (u64, Arc<Entry>) {
        let entry = Arc::new(Entry {
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

    /// Every request, the oldest first.
    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        let of = |shard: &Mutex<Shard>| -> Vec<_> {
            shard.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
        };
        let mut list: Vec<_> = self.shards.iter().flat_map(of).collect();
        list.sort_by_key(|entry| entry.begun);
        list
    }

    /// How old they are.
    pub(crate) fn look_up(&self, now: Time, scrape: &mut Scrape) {
        let ages: Vec<f64> = self.list().iter().map(|entry| now.since(entry.begun).as_secs_f64()).collect();
        requests::look_up_ages(scrape, &ages);
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, Shard> {
        self.shards[number as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
