//! Tests of waiting settlements.

use super::*;
use crate::engines::fleet::Fleet;
use crate::engines::health;
use crate::engines::http::ConnectionTerms;

/// The terms of an engine that has no verb, so nothing is sent.
fn without_verbs() -> ConnectionTerms {
    ConnectionTerms {
        protocol: crate::engines::protocol::learned::ProtocolTerms::default(),
        connect_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
        lost_after: Duration::ZERO,
        secret: None,
        api_key: None,
        tls: None,
        http2: Default::default(),
        health: health::state::tests::TERMS,
        release: ReleaseMode::Lease,
        control: None,
    }
}

#[tokio::test]
async fn settlements_of_a_panicked_worker_are_made_by_another() {
    let metrics = Arc::new(Metrics::new());
    let terms = SettlementTerms {
        at_once: 1,
        waiting: 10,
        tries: 1,
        try_timeout: Duration::from_secs(1),
        abandon_wait: Duration::ZERO,
    };
    let settler = Settler::new(terms, Arc::clone(&metrics), Clock::start());
    let url = "http://engine:8000".parse().expect("an address");
    let engine = Fleet::new(metrics).engine(&url, &without_verbs());
    settler.backlog().working = 1;
    for _ in 0..3 {
        let exchange = Arc::new(Mutex::new(Exchange::new()));
        let request = crate::message::request_id::generate();
        let context = SettlementContext {
            request,
            exchange,
            model: None,
            authorization: None,
            ends_by_write: Arc::default(),
            is_named: true,
        };
        settler.abort(Arc::clone(&engine), Leg::Decode, context);
    }
    assert_eq!(settler.backlog().waiting(), 3);
    let worker = SettlementWorker { settler: Arc::clone(&settler), is_over: false };
    let panics = tokio::spawn(async move {
        let _worker = worker;
        panic!("a settlement has a bug");
    });
    assert!(panics.await.expect_err("it panics").is_panic());
    assert!(settler.drained(Duration::from_secs(10)).await);
    let backlog = settler.backlog();
    assert_eq!((backlog.working, backlog.waiting()), (0, 0));
}

#[test]
fn the_backoff_of_all_settlement_tries_is_shorter_than_a_lease() {
    let pauses: Vec<_> = retry_pauses().take(16).collect();
    assert_eq!(pauses[..3], [50, 100, 200].map(Duration::from_millis));
    assert_eq!(pauses[15], PAUSE_MAX);
    assert!(pauses.iter().sum::<Duration>() < Duration::from_secs(30));
}
