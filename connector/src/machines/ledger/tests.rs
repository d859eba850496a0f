//! The ledger: each guarantee by itself, and random events compared with a list that is scanned.

use super::*;
use crate::limits::{TOMBSTONE_TTL, TOMBSTONES_MAX};

const READER: Reader = Reader::sole(9);

fn id(text: &str) -> RequestId {
    RequestId::new(text).expect("a test id")
}

fn spec(n: u128) -> LeaseSpec {
    let blocks = vec![BlockId(2 * n as u32), BlockId(2 * n as u32 + 1)];
    LeaseSpec { handle: Handle(n), request: id(&format!("r{n}")), blocks, expected: 1 }
}

#[test]
fn a_released_lease_frees_its_blocks_once_with_its_reason() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(spec(1), Time(0)).expect("open");
    assert_eq!(ledger.release(Handle(1), "client_gone", Time(5)), ReleaseReply::Released);
    assert_eq!(ledger.release(Handle(1), "client_gone", Time(6)), ReleaseReply::Already);
    let closed = ledger.take_closed();
    assert_eq!(closed.len(), 1);
    assert_eq!((&*closed[0].reason, closed[0].blocks.len()), ("client_gone", 2));
    assert!(ledger.take_closed().is_empty());
    assert_eq!(ledger.counts().late, 1);
}

#[test]
fn a_release_before_the_request_is_known_wins_when_it_arrives() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    assert_eq!(ledger.release_request(&id("r1"), "client_gone", Time(0)), ReleaseReply::Unknown);
    let refused = ledger.open(spec(1), Time(1)).expect_err("it was given up");
    assert_eq!((refused.kind, refused.spec.blocks.len()), (LeaseOpenErrorKind::AlreadyReleased, 2));
}

#[test]
fn a_growing_lease_is_read_as_far_as_it_is_final_and_expires_only_once_it_is_sealed() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open_growing(spec(1), 1, Time(0)).expect("open");
    ledger.begin_read(Handle(1), READER, 0, 2, Time(1)).expect("granted");
    let readiness = |ledger: &Ledger| [1, 2].map(|upto| ledger.readiness(Handle(1), READER, upto));
    assert_eq!(readiness(&ledger), [Readiness::Ready, Readiness::NotYet]);
    assert_eq!((ledger.is_read_live(Handle(1), READER), ledger.next_deadline()), (true, None));
    let later = Time::ZERO.after(Duration::from_secs(600));
    ledger.tick(later);
    ledger.grow(Handle(1), 7);
    ledger.grow(Handle(1), 0);
    assert_eq!(readiness(&ledger), [Readiness::Ready; 2]);
    assert!(ledger.seal(Handle(1), later));
    assert!(!ledger.seal(Handle(1), later), "once");
    assert_eq!(ledger.next_deadline(), Some(later.after(LeaseTerms::default().duration)));
    assert_eq!(ledger.finish_read(Handle(1), READER, later), Verdict::Valid);
    assert!(ledger.take_unfinished().is_empty() && ledger.take_closed().len() == 1);
}

#[test]
fn a_lease_that_ends_before_its_prefill_closes_once_and_stops_growing() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    for n in [1, 2] {
        ledger.open_growing(spec(n), 1, Time(0)).expect("open");
    }
    ledger.begin_read(Handle(1), READER, 0, 2, Time(1)).expect("granted");
    assert_eq!(ledger.release(Handle(1), "client_gone", Time(2)), ReleaseReply::Draining);
    assert_eq!(ledger.release_request(&id("r2"), "client_gone", Time(2)), ReleaseReply::Released);
    assert_eq!(ledger.take_unfinished(), [Handle(1), Handle(2)]);
    assert_eq!(ledger.readiness(Handle(1), READER, 2), Readiness::Gone, "it will never be final");
    assert_eq!(ledger.readiness(Handle(1), READER, 1), Readiness::Ready);
    assert!(!ledger.seal(Handle(1), Time(3)) && !ledger.seal(Handle(2), Time(3)));
    ledger.tick(ledger.next_deadline().expect("a drain has a deadline"));
    assert!(ledger.is_empty() && ledger.take_unfinished().is_empty());
    assert_eq!(ledger.take_closed().len(), 2);
}

#[test]
fn one_live_lease_at_the_head_does_not_stop_the_expiry_of_others() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    for n in 1..=3 {
        ledger.open(spec(n), Time(n as u64)).expect("open");
    }
    let late = Time::ZERO.after(Duration::from_secs(29));
    assert_eq!(ledger.heartbeat(Handle(1), late), HeartbeatReply::Renewed);
    ledger.tick(Time::ZERO.after(Duration::from_secs(31)));
    assert_eq!(ledger.take_closed().iter().map(|s| s.cause).collect::<Vec<_>>(), [CloseCause::Expired; 2]);
    assert_eq!(ledger.len(), 1);
    ledger.tick(late.after(Duration::from_secs(20)));
    assert!(ledger.is_empty());
}

#[test]
fn a_release_during_a_read_ends_at_the_drain_deadline_at_the_latest() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(spec(1), Time(0)).expect("open");
    ledger.begin_read(Handle(1), READER, 0, 2, Time(1)).expect("granted");
    assert_eq!(ledger.release(Handle(1), "x", Time(2)), ReleaseReply::Draining);
    let due = ledger.next_deadline().expect("a drain has a deadline");
    assert!(due <= Time(2).after(LeaseTerms::default().drain));
    ledger.tick(due);
    assert_eq!(ledger.take_closed().len(), 1);
    assert_eq!(ledger.finish_read(Handle(1), READER, due), Verdict::Gone);
}

#[test]
fn a_read_outside_the_table_is_refused_and_changes_nothing() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(spec(1), Time(0)).expect("open");
    for (first, count) in [(0, 3), (2, 1), (usize::MAX, 2), (0, 0)] {
        let refusal = ledger.begin_read(Handle(1), READER, first, count, Time(1));
        assert_eq!(refusal, Err(ReadError::Range { first, count, blocks: 2 }));
    }
    assert_eq!(ledger.begin_read(Handle(2), READER, 0, 1, Time(1)), Err(ReadError::Gone));
    assert_eq!(ledger.release(Handle(1), "x", Time(2)), ReleaseReply::Released, "no reader was counted");
}

#[test]
fn a_repeated_done_after_the_end_stays_valid_for_its_reader_only() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(spec(1), Time(0)).expect("open");
    ledger.begin_read(Handle(1), READER, 0, 2, Time(1)).expect("granted");
    assert_eq!(ledger.finish_read(Handle(1), READER, Time(2)), Verdict::Valid);
    assert_eq!(ledger.finish_read(Handle(1), READER, Time(3)), Verdict::Valid);
    let unknown = Reader { consumer: 10, ..READER };
    assert_eq!(ledger.finish_read(Handle(1), unknown, Time(3)), Verdict::Gone);
}

#[test]
fn the_last_departed_consumer_ends_the_lease_with_its_reason() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(LeaseSpec { expected: 2, ..spec(1) }, Time(0)).expect("open");
    assert_eq!(ledger.leave(Handle(1), 4, "consumer_rejected", Time(1)), ReleaseReply::Draining);
    assert_eq!(ledger.leave(Handle(1), 4, "consumer_rejected", Time(1)), ReleaseReply::Already);
    assert_eq!(ledger.leave(Handle(1), 5, "consumer_aborted", Time(2)), ReleaseReply::Released);
    assert_eq!(ledger.leave(Handle(1), 5, "consumer_aborted", Time(3)), ReleaseReply::Already);
    assert_eq!(ledger.leave(Handle(2), 5, "consumer_aborted", Time(3)), ReleaseReply::Unknown);
    let closed = ledger.take_closed();
    assert_eq!((closed.len(), &*closed[0].reason), (1, "consumer_aborted"));
}

#[test]
fn tombstones_are_bounded_in_number_and_time() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    for n in 0..TOMBSTONES_MAX + 10 {
        ledger.release_request(&id(&format!("r{n}")), "x", Time(0));
    }
    assert_eq!(ledger.tombstones.len(), TOMBSTONES_MAX);
    assert!(!ledger.was_released_early(&id("r0")) && ledger.was_released_early(&id("r10")));
    ledger.tick(Time::ZERO.after(TOMBSTONE_TTL));
    assert_eq!(ledger.tombstones.len(), 0);
}

#[test]
fn tombstones_of_ended_leases_are_bounded_by_live_leases() {
    let mut ledger = Ledger::new(LeaseTerms::default());
    ledger.open(spec(0), Time(0)).expect("open");
    for n in 1..20_000_u128 {
        ledger.open(spec(n), Time(n as u64)).expect("open");
        ledger.begin_read(Handle(n), READER, 0, 2, Time(n as u64)).expect("granted");
        ledger.release(Handle(n), "x", Time(n as u64));
        ledger.finish_read(Handle(n), READER, Time(n as u64));
        assert!(ledger.deadlines.len() < 4 * ledger.len() + 100, "{} entries", ledger.deadlines.len());
    }
    assert_eq!((ledger.take_closed().len(), ledger.len()), (19_999, 1));
    ledger.tick(Time::ZERO.after(LeaseTerms::default().duration));
    assert!(ledger.is_empty(), "the one that was left has not been forgotten");
}

/// Opens, renews, releases and expires at random, and compares with a list that is scanned each time.
#[test]
fn any_order_of_events_ends_each_lease_at_its_own_time() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let terms = LeaseTerms::default();
    let mut ledger = Ledger::new(terms);
    let mut expiries: Vec<(Handle, Time)> = Vec::new();
    let (mut now, mut next, mut ended) = (Time::ZERO, 0_u128, 0);
    for _ in 0..20_000 {
        now = now.after(Duration::from_millis(random(400)));
        expiries.retain(|(_, expiry)| *expiry > now);
        match random(4) {
            0 => {
                next += 1;
                // Sometimes several leases of one request.
                let request = id(&format!("r{}", next / 3));
                ledger.open(LeaseSpec { request, ..spec(next) }, now).expect("open");
                expiries.push((Handle(next), now.after(terms.duration)));
            }
            1 | 2 if !expiries.is_empty() => {
                let at = random(expiries.len() as u64) as usize;
                assert_eq!(ledger.heartbeat(expiries[at].0, now), HeartbeatReply::Renewed);
                expiries[at].1 = expiries[at].1.max(now.after(terms.extension()));
            }
            3 if !expiries.is_empty() => {
                let (handle, _) = expiries.swap_remove(random(expiries.len() as u64) as usize);
                assert_eq!(ledger.release(handle, "x", now), ReleaseReply::Released);
            }
            _ => ledger.tick(now),
        }
        ledger.tick(now);
        assert_eq!(ledger.len(), expiries.len());
        assert!(expiries.iter().all(|(_, expiry)| ledger.next_deadline().is_some_and(|due| due <= *expiry)));
        ended += ledger.take_closed().len();
        // All leases of a request end together. Their slots are reused, their handles are not.
        if random(50) == 0 && next > 0 {
            ledger.release_request(&id(&format!("r{}", next / 3)), "y", now);
            expiries.retain(|(handle, _)| handle.0 / 3 != next / 3);
            next += 3;
            ended += ledger.take_closed().len();
        }
    }
    assert_eq!(ended + ledger.len(), ledger.counts().opened as usize);
}

/// Leases of one request end together, after some of them have ended in any order.
#[test]
fn a_request_of_several_leases_is_released_whole() {
    for gone in 0..32_u32 {
        let mut ledger = Ledger::new(LeaseTerms::default());
        let of_request =
            |n: u128| LeaseSpec { request: id(if n < 5 { "several" } else { "another" }), ..spec(n) };
        for n in 0..6 {
            ledger.open(of_request(n), Time(0)).expect("open");
        }
        let ended: Vec<u128> = (0..5).filter(|n| gone >> n & 1 == 1).collect();
        let mut order = ended.clone();
        order.rotate_left(ended.len() / 2);
        for n in order {
            assert_eq!(ledger.release(Handle(n), "x", Time(1)), ReleaseReply::Released);
        }
        // Leases of another request reuse the slots of the ended ones.
        for n in &ended {
            ledger.open(of_request(100 + n), Time(2)).expect("open");
        }
        let left = 5 - ended.len();
        let reply = ledger.release_request(&id("several"), "y", Time(3));
        assert_eq!(reply, if left > 0 { ReleaseReply::Released } else { ReleaseReply::Unknown });
        let released = ledger.take_closed();
        assert_eq!(released.iter().filter(|closed| &*closed.reason == "y").count(), left, "{ended:?}");
        assert_eq!(ledger.len(), 1 + ended.len(), "the other request's");
        assert_eq!(ledger.release_request(&id("another"), "z", Time(4)), ReleaseReply::Released);
        assert!(ledger.is_empty());
    }
}
