//! The engine's side of its leases: metrics, and the way of blocks back to the pool.
//!
//! Blocks of ended leases go to the mailbox of the step loop, which alone changes the block pool.

use std::sync::Arc;

use baton_connector::Handle;
use baton_connector::ledger::ClosedLease;
use baton_connector_leases::service::LeaseOwner;

use crate::engine_core::mailbox::Mailbox;
use crate::metrics::EngineMetrics;

/// See the module's documentation.
pub struct EngineLeaseOwner {
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
}

impl EngineLeaseOwner {
    /// The owner of one rank's leases.
    #[must_use]
    pub fn new(mailbox: Arc<Mailbox>, metrics: Arc<EngineMetrics>) -> Self {
        Self { mailbox, metrics }
    }
}

impl LeaseOwner for EngineLeaseOwner {
    fn lease_opened(&self, blocks: usize, growing: bool) {
        self.metrics.lease_opened(blocks as u64);
        if growing {
            self.metrics.early_lease();
        }
    }

    fn count_closed(&self, lease: &ClosedLease) {
        self.metrics.lease_settled(lease);
    }

    fn leases_closed(&self, closed: Vec<ClosedLease>) {
        self.mailbox.settled(closed);
    }

    fn leases_unfinished(&self, handles: Vec<Handle>) {
        self.mailbox.unfinished(handles);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_connector::lease::LeaseTerms;
    use baton_connector::ledger::{HeartbeatReply, LeaseSpec, ReleaseReply};
    use baton_connector::transport::Verdict;
    use baton_connector::{BlockId, Epoch, Rank, Reader, RequestId};
    use baton_connector_leases::event_log::RankLog;
    use baton_connector_leases::service::LeaseService;

    use super::*;

    fn grant(handle: u128, expected: usize) -> LeaseSpec {
        LeaseSpec {
            handle: Handle(handle),
            request: RequestId::new(&format!("request-{handle}")).expect("an id"),
            blocks: vec![BlockId(0), BlockId(1), BlockId(2)],
            expected,
        }
    }

    #[test]
    fn each_end_counts_once_by_its_cause_and_frees_every_block_once() {
        let terms = LeaseTerms { duration: Duration::from_millis(500), ..LeaseTerms::default() };
        let metrics = Arc::new(EngineMetrics::new("m"));
        let mailbox = Arc::new(Mailbox::new(1));
        let owner = Arc::new(EngineLeaseOwner::new(Arc::clone(&mailbox), Arc::clone(&metrics)));
        let service = LeaseService::new(terms, Epoch(1), 2, owner, RankLog::new(&Arc::default(), 0));
        for (handle, expected) in [(1, 2), (2, 1), (3, 1)] {
            service.open(grant(handle, expected)).expect("room for three");
        }
        // One of the first's two readers finishes; the second is released, the third is fetched.
        for (handle, consumer) in [(1, 7), (3, 8)] {
            let reader = Reader { consumer, rank: Rank(0), of: 1 };
            service.begin_read(Handle(handle), reader, 0, 3).expect("it is live");
            assert_eq!(service.finish_read(Handle(handle), reader), Verdict::Valid);
        }
        assert_eq!(service.release(Handle(2), "router_release"), ReleaseReply::Released);
        // The timer holds the ledger while it calls `stop`, so its effect is read from the metrics.
        service.run_timer(|| {
            metrics.render().contains("nixl_num_kv_expired_reqs{model_name=\"m\",engine=\"0\"} 1\n")
        });
        // Late messages change nothing.
        assert_eq!(service.release(Handle(1), "late"), ReleaseReply::Already);
        assert_eq!(service.heartbeat(Handle(1)), HeartbeatReply::Gone);
        let text = metrics.render();
        for series in [
            "vllm:nixl_num_kv_expired_reqs{model_name=\"m\",engine=\"0\"} 1",
            "baton_kv_release_total{model_name=\"m\",engine=\"0\",cause=\"lease_expired\"} 1",
            "baton_lease_held_seconds_count{model_name=\"m\",engine=\"0\",cause=\"lease_expired\"} 1",
            "baton_lease_held_seconds_count{model_name=\"m\",engine=\"0\",cause=\"released\"} 1",
            "baton_lease_held_seconds_count{model_name=\"m\",engine=\"0\",cause=\"transfer_done\"} 1",
        ] {
            assert!(text.contains(series), "{series} is not in\n{text}");
        }
        let settled: usize = mailbox.collect().settled.iter().map(|lease| lease.blocks.len()).sum();
        assert_eq!(settled, 9, "every block of the three was freed once");
    }
}
