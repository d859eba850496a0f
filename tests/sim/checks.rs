//! The invariants of ARCHITECTURE.md, checked after every event and at the end.

use baton_connector::exchange::Outcome;

use crate::clients::ClientEnd;
use crate::sim::Sim;

impl Sim {
    /// Checks the invariants that hold after every event.
    pub fn check(&mut self) {
        let mut found = None;
        for engine in &mut self.engines {
            if let Some(stale) = engine.stale.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
            {
                found.get_or_insert(format!("engine {}: {stale}", engine.index));
            }
            let Some(core) = &mut engine.core else { continue };
            let (usage, load) = core.usage_and_load();
            if !usage.adds_up() {
                found.get_or_insert(format!("I1: engine {}: {usage:?}", engine.index));
            }
            if load.waiting + load.fetching + load.loading + load.running > core.live() {
                found.get_or_insert(format!("I5: engine {}: {load:?}, {} live", engine.index, core.live()));
            }
        }
        if let Some(found) = found {
            self.wrong(found);
        }
    }

    /// Checks the state at the end of a run: all blocks are free.
    pub fn check_rest(&mut self) {
        let mut found = Vec::new();
        for engine in &mut self.engines {
            let index = engine.index;
            let Some(core) = &mut engine.core else {
                found.push(format!("engine {index} is down"));
                continue;
            };
            let (usage, load) = core.usage_and_load();
            if usage.free + usage.cached != usage.total {
                found.push(format!("I5: engine {index} holds blocks: {usage:?}"));
            }
            if (
                load.waiting,
                load.fetching,
                load.running,
                load.stopping + load.offloading + load.loading + load.pending_release,
            ) != (0, 0, 0, 0)
                || core.live() > 0
            {
                found.push(format!("I5: engine {index} has requests: {load:?}"));
            }
            let leases = core.env().ledger.len();
            if leases > 0 {
                found.push(format!("I5: engine {index} has {leases} leases"));
            }
            if !engine.fronts.is_empty() {
                found.push(format!("I6: engine {index}: {} front ends wait", engine.fronts.len()));
            }
            if !engine.peers.idle() {
                found.push(format!("I5: engine {index} has reads, heartbeats or notices"));
            }
        }
        for router in &self.routers {
            if router.open() > 0 {
                found.push(format!("I6: router {} has {} open requests", router.index, router.open()));
            }
        }
        for (index, client) in self.clients.asks.iter().enumerate() {
            let outcome = self.routers[client.router].outcome(index);
            match (client.end, outcome) {
                (None, _) => found.push(format!("I6: client {index} received no end")),
                (Some(ClientEnd::Complete), Some(outcome)) if outcome != Outcome::Completed => {
                    found.push(format!("I6: client {index} says complete, its router {outcome:?}"));
                }
                (Some(ClientEnd::Error), Some(Outcome::Completed)) => {
                    found.push(format!("I6: client {index} says error, its router completed"));
                }
                _ => {}
            }
        }
        if let Some(first) = found.into_iter().next() {
            self.wrong(first);
        }
    }

    /// Sums up the event logs of the whole run.
    pub fn sum_up(&mut self) {
        for engine in &self.engines {
            if let Some(core) = &engine.core {
                self.counts.ignored += core.usage_and_load().1.ignored;
            }
            self.counts.passed += engine.passed.load(std::sync::atomic::Ordering::Relaxed);
            self.counts.drifting += u64::from(engine.setup.clock_rate != 1_000);
        }
        for index in 0..self.clients.asks.len() {
            let end = self.clients.asks[index].end.map_or(9, |end| match end {
                ClientEnd::Complete => 1,
                ClientEnd::Error => 2,
                ClientEnd::Cut => 3,
                ClientEnd::Left => 4,
            });
            self.mark(end);
        }
    }
}
