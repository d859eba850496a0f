//! Deadlines of loads, and which leases go back.

use baton_connector::Epoch;

use super::super::target::ProducerKey;
use super::*;

fn target(lease: Duration) -> LoadTarget {
    LoadTarget {
        handle: Handle(1),
        producer: ProducerKey { host: "p".into(), port: 1, epoch: Epoch(1), fingerprint: 1 },
        several_consumers: false,
        layout: 1,
        lease,
        blocks: Arc::default(),
    }
}

#[test]
fn a_load_without_an_answer_is_given_up_after_five_seconds_or_its_lease() {
    let (now, moment) = (Instant::now(), Duration::from_millis(1));
    for (lease_ms, timeout_ms) in [(30_000, 5_000), (500, 500)] {
        for (hold, after) in [(Hold::Asking, Hold::Gone(UNREACHABLE)), (Hold::Live, Hold::Live)] {
            let (mut table, timeout) = (LoadTable::default(), Duration::from_millis(timeout_ms));
            let target = target(Duration::from_millis(lease_ms));
            table.admit(&Arc::from("a"), false, target, 1, now).expect("an empty table");
            table.loads.get_mut(&1).expect("the load").hold = hold;
            assert_eq!(table.next_deadline(), Some(now + timeout));
            table.tick(now + timeout - moment);
            assert_eq!(table.hold("a"), Some(hold));
            table.tick(now + timeout);
            assert_eq!(table.hold("a"), Some(after));
            assert_eq!(table.next_deadline(), None);
        }
    }
}

#[test]
fn the_lease_of_an_old_load_is_not_given_back() {
    let (mut table, now, lease) = (LoadTable::default(), Instant::now(), Duration::from_secs(30));
    table.admit(&Arc::from("a"), false, target(lease), 1, now).expect("an empty table");
    table.recent = RecentHandles::default();
    assert!(!table.give_back(&target(lease), 2, "consumer_rejected", now));
    table.leave(&Arc::from("a"), "lease_gone", now).expect("the load");
    assert!(table.give_back(&target(lease), 2, "consumer_rejected", now));
}

#[test]
fn the_deadline_of_an_ended_load_is_removed() {
    let (mut table, now) = (LoadTable::default(), Instant::now());
    table.admit(&Arc::from("a"), false, target(Duration::from_secs(30)), 1, now).expect("an empty table");
    table.leave(&Arc::from("a"), "lease_gone", now).expect("the load");
    assert_eq!(table.next_deadline(), None);
}

#[test]
fn a_held_load_whose_read_does_not_begin_is_given_up() {
    let (mut table, now, lease) = (LoadTable::default(), Instant::now(), Duration::from_secs(30));
    table.admit(&Arc::from("a"), false, target(lease), 1, now).expect("an empty table");
    let load = table.loads.get_mut(&1).expect("the load");
    load.hold = Hold::Live;
    let until = now + lease * RENEWAL_DURATIONS_MAX;
    assert!(load.renews(until - Duration::from_millis(1)));
    load.read = ReadProgress::Open;
    assert!(load.renews(until), "a read that has begun is renewed");
    load.read = ReadProgress::None;
    assert!(!load.renews(until));
    assert_eq!(load.hold, Hold::Gone("wait_expired"));
}
