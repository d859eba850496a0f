//! The guarantees of a lease, one by one and under every order of events.

use super::*;

const A: Reader = Reader::sole(1);
const B: Reader = Reader::sole(2);

/// Link `rank` of a consumer with two links.
const fn link(consumer: u64, rank: u16) -> Reader {
    Reader { consumer, of: 2, rank: Rank(rank) }
}

fn lease(expected: usize) -> Lease {
    Lease::open(LeaseTerms::default(), expected, Time::ZERO)
}

#[test]
fn a_released_offered_lease_frees_its_blocks_in_the_same_step() {
    let step = lease(1).apply(Event::Release, Time(1));
    assert_eq!(step, Step { reply: Reply::Released, closed: Some(CloseCause::Released) });
}

#[test]
fn a_release_during_a_read_waits_for_the_reader() {
    let mut lease = lease(1);
    lease.apply(Event::ReadBegun(A), Time(1));
    assert_eq!(lease.apply(Event::Release, Time(2)).closed, None);
    assert_eq!(lease.apply(Event::ReadBegun(B), Time(3)).reply, Reply::Gone);
    let last = lease.apply(Event::ReadDone(A), Time(4));
    assert_eq!(last, Step { reply: Reply::Valid, closed: Some(CloseCause::Fetched) });
}

#[test]
fn a_repeated_acknowledgement_is_one_reader() {
    let mut lease = lease(2);
    for _ in 0..3 {
        lease.apply(Event::ReadBegun(A), Time(1));
        assert_eq!(lease.apply(Event::ReadDone(A), Time(1)), Step { reply: Reply::Valid, closed: None });
    }
    lease.apply(Event::ReadBegun(B), Time(2));
    assert_eq!(lease.apply(Event::ReadDone(B), Time(2)).closed, Some(CloseCause::Fetched));
    assert_eq!(
        lease.apply(Event::ReadDone(A), Time(3)).reply,
        Reply::Valid,
        "it was checked when it was live"
    );
}

#[test]
fn a_failed_read_leaves_the_lease_for_another_engine() {
    let mut lease = lease(1);
    lease.apply(Event::ReadBegun(A), Time(1));
    lease.apply(Event::ReadFailed(A), Time(2));
    assert_eq!(lease.state(), State::Offered);
    assert_eq!(lease.apply(Event::ReadDone(A), Time(3)).reply, Reply::Gone);
    lease.apply(Event::ReadBegun(B), Time(4));
    assert_eq!(lease.apply(Event::ReadDone(B), Time(5)).closed, Some(CloseCause::Fetched));
}

#[test]
fn a_heartbeat_only_extends_a_live_lease() {
    let mut lease = lease(1);
    lease.apply(Event::Heartbeat, Time(1));
    assert_eq!(
        lease.deadline(),
        Some(Time::ZERO.after(KV_LEASE_DURATION)),
        "20 s from now is earlier than 30 s"
    );
    let late = Time::ZERO.after(Duration::from_secs(29));
    lease.apply(Event::Heartbeat, late);
    assert_eq!(lease.deadline(), Some(late.after(Duration::from_secs(20))));
    let after = Time::ZERO.after(Duration::from_secs(49));
    let step = lease.apply(Event::Heartbeat, after);
    assert_eq!(step, Step { reply: Reply::Gone, closed: Some(CloseCause::Expired) });
}

#[test]
fn a_stuck_reader_cannot_hold_blocks_past_the_drain_deadline() {
    let mut lease = lease(1);
    lease.apply(Event::ReadBegun(A), Time(1));
    let expired = Time::ZERO.after(KV_LEASE_DURATION);
    assert_eq!(lease.apply(Event::Tick, expired).closed, None);
    assert_eq!(lease.state(), State::Draining(CloseCause::Expired));
    let deadline = expired.after(DRAIN_DEADLINE);
    assert_eq!(lease.apply(Event::Tick, deadline).closed, Some(CloseCause::Expired));
    assert!(!lease.serves(A));
    assert_eq!(lease.apply(Event::ReadDone(A), deadline).reply, Reply::Gone, "its bytes may be stale");
}

#[test]
fn a_consumer_is_done_when_both_links_are_and_repeats_do_not_count() {
    let mut lease = lease(1);
    for _ in 0..3 {
        lease.apply(Event::ReadBegun(link(1, 0)), Time(1));
        let done = lease.apply(Event::ReadDone(link(1, 0)), Time(2));
        assert_eq!(done, Step { reply: Reply::Valid, closed: None });
    }
    assert_eq!((lease.progress(), lease.state()), ((1, 2), State::Offered));
    lease.apply(Event::ReadBegun(link(1, 1)), Time(3));
    assert_eq!(lease.apply(Event::ReadDone(link(1, 1)), Time(4)).closed, Some(CloseCause::Fetched));
    assert_eq!(lease.progress(), (2, 2));
}

#[test]
fn links_of_two_consumers_do_not_make_one() {
    let mut lease = lease(1);
    for reader in [link(1, 0), link(2, 1)] {
        lease.apply(Event::ReadBegun(reader), Time(1));
        assert_eq!(lease.apply(Event::ReadDone(reader), Time(1)).closed, None);
    }
    // The second link of the first consumer fails. The second consumer fetches everything instead.
    lease.apply(Event::ReadBegun(link(1, 1)), Time(2));
    assert_eq!(lease.apply(Event::ReadFailed(link(1, 1)), Time(2)).closed, None);
    lease.apply(Event::ReadBegun(link(2, 0)), Time(3));
    assert_eq!(lease.apply(Event::ReadDone(link(2, 0)), Time(3)).closed, Some(CloseCause::Fetched));
    assert_eq!(lease.progress(), (2, 2));
}

#[test]
fn one_departed_consumer_does_not_end_the_lease_of_the_others() {
    let mut lease = lease(3);
    assert_eq!(lease.progress(), (0, 3));
    assert_eq!(lease.apply(Event::Leave(1), Time(1)).reply, Reply::Draining);
    assert_eq!(lease.apply(Event::Leave(1), Time(1)).reply, Reply::Already);
    assert_eq!(lease.apply(Event::ReadBegun(A), Time(1)).reply, Reply::Gone, "it has left");
    for reader in [link(2, 0), link(2, 1), link(3, 0)] {
        lease.apply(Event::ReadBegun(reader), Time(2));
        assert_eq!(lease.apply(Event::ReadDone(reader), Time(2)).reply, Reply::Valid);
    }
    assert_eq!(lease.apply(Event::Leave(2), Time(2)).reply, Reply::Already, "it has everything");
    let last = lease.apply(Event::Leave(3), Time(3));
    assert_eq!(last, Step { reply: Reply::Released, closed: Some(CloseCause::Released) });
    assert_eq!(lease.progress(), (3, 5));
}

#[test]
fn a_consumer_that_departs_during_a_read_is_awaited() {
    let mut lease = lease(2);
    lease.apply(Event::ReadBegun(A), Time(1));
    assert_eq!(lease.apply(Event::Leave(1), Time(1)).closed, None);
    assert_eq!(lease.apply(Event::Leave(2), Time(1)).closed, None, "bytes of the first may be on their way");
    assert_eq!(lease.apply(Event::ReadFailed(A), Time(2)).closed, Some(CloseCause::Released));
}

#[test]
fn a_growing_lease_is_read_before_it_is_sealed_and_valid_only_after() {
    let mut lease = Lease::growing(LeaseTerms::default(), 1);
    assert_eq!(lease.apply(Event::ReadBegun(A), Time(1)).reply, Reply::Granted);
    assert!(lease.serves(A));
    let much_later = Time::ZERO.after(10 * KV_LEASE_DURATION);
    assert_eq!(lease.apply(Event::Tick, much_later), Step { reply: Reply::None, closed: None });
    assert_eq!((lease.deadline(), lease.state()), (None, State::Growing), "no clock runs");
    assert_eq!(lease.apply(Event::ReadDone(A), much_later).reply, Reply::Gone, "it cannot have everything");
    lease.apply(Event::ReadBegun(B), much_later);
    assert_eq!(lease.apply(Event::Sealed, much_later).reply, Reply::Valid);
    assert_eq!(
        (lease.deadline(), lease.state()),
        (Some(much_later.after(KV_LEASE_DURATION)), State::Reading)
    );
    let last = lease.apply(Event::ReadDone(B), much_later);
    assert_eq!(last, Step { reply: Reply::Valid, closed: Some(CloseCause::Fetched) });
}

#[test]
fn a_released_growing_lease_drains_and_its_reader_gets_no_valid_verdict() {
    let mut lease = Lease::growing(LeaseTerms::default(), 1);
    lease.apply(Event::ReadBegun(A), Time(1));
    assert_eq!(lease.apply(Event::Release, Time(2)), Step { reply: Reply::Draining, closed: None });
    assert_eq!(lease.apply(Event::Sealed, Time(3)).reply, Reply::Gone);
    let last = lease.apply(Event::ReadDone(A), Time(4));
    assert_eq!(last, Step { reply: Reply::Gone, closed: Some(CloseCause::Released) });
    let mut lease = Lease::growing(LeaseTerms::default(), 1);
    lease.apply(Event::ReadBegun(A), Time(1));
    lease.apply(Event::ReadFailed(A), Time(1));
    assert_eq!(lease.state(), State::Growing);
    let left = lease.apply(Event::Leave(1), Time(2));
    assert_eq!(left, Step { reply: Reply::Released, closed: Some(CloseCause::Released) });
}

#[test]
fn a_lease_tracks_a_bounded_number_of_readers() {
    let mut lease = lease(1);
    for consumer in 0..READERS_MAX as u64 {
        lease.apply(Event::ReadBegun(link(consumer, 0)), Time(1));
        lease.apply(Event::ReadDone(link(consumer, 0)), Time(1));
    }
    assert_eq!(lease.apply(Event::ReadBegun(link(u64::MAX, 0)), Time(1)).reply, Reply::Busy);
    assert_eq!(lease.apply(Event::ReadBegun(link(5, 0)), Time(1)).reply, Reply::Granted, "it is known");
    for consumer in 0..100 {
        lease.apply(Event::Leave(consumer), Time(1));
    }
    assert!(lease.left.len() <= CONSUMERS_MAX);
}

/// Every order of six events out of ten kinds (two readers, two clock jumps): a million runs.
#[test]
fn blocks_are_released_exactly_once_in_every_order_of_network_events() {
    let runs = every_order(lease, &[A, B], &[], 6);
    assert_eq!(runs, 1_000_000);
}

/// The same for a growing lease, with the end of its prefill among the events.
#[test]
fn blocks_of_a_growing_lease_are_released_exactly_once() {
    let growing = |expected| Lease::growing(LeaseTerms::default(), expected);
    assert_eq!(every_order(growing, &[A], &[1], 6), 531_441);
    assert_eq!(every_order(growing, &[A, B], &[1, 2], 5), 371_293);
}

/// Every order of five events out of eighteen kinds (two consumers with two links each, which may also leave):
/// 1.9 million runs.
#[test]
fn blocks_are_released_exactly_once_with_two_consumers_of_two_links() {
    let runs = every_order(lease, &[link(1, 0), link(1, 1), link(2, 0), link(2, 1)], &[1, 2], 5);
    assert_eq!(runs, 1_889_568);
}

fn every_order(open: fn(usize) -> Lease, readers: &[Reader], leaving: &[u64], length: usize) -> u64 {
    let mut events = vec![(Event::Heartbeat, 1), (Event::Release, 1), (Event::Tick, 6), (Event::Tick, 31)];
    if open(1).state() == State::Growing {
        events.push((Event::Sealed, 1));
    }
    for &reader in readers {
        events.push((Event::ReadBegun(reader), 1));
        events.push((Event::ReadDone(reader), 1));
        events.push((Event::ReadFailed(reader), 1));
    }
    events.extend(leaving.iter().map(|&consumer| (Event::Leave(consumer), 1)));
    let mut runs = 0_u64;
    let mut order = vec![0_usize; length];
    loop {
        run(open(2), &events, &order);
        runs += 1;
        let Some(digit) = order.iter().position(|&d| d + 1 < events.len()) else {
            return runs;
        };
        order[digit] += 1;
        order[..digit].fill(0);
    }
}

fn run(mut lease: Lease, events: &[(Event, u64)], order: &[usize]) {
    let mut sealed = lease.state() != State::Growing;
    let (mut now, mut closings) = (Time::ZERO, 0);
    let mut valid_before_close = BTreeSet::new();
    for &i in order {
        let (event, seconds) = events[i];
        now = now.after(Duration::from_secs(seconds));
        let step = lease.apply(event, now);
        closings += usize::from(step.closed.is_some());
        sealed |= event == Event::Sealed && step.reply == Reply::Valid;
        assert!(
            sealed || step.reply != Reply::Valid || event == Event::Heartbeat,
            "{event:?} before the seal"
        );
        let over = matches!(lease.state(), State::Closed(_));
        assert_eq!(closings == 1, over, "blocks go back when, and only when, the lease closes");
        if let Event::ReadDone(reader) = event {
            if step.reply == Reply::Valid && (!over || step.closed.is_some()) {
                valid_before_close.insert(reader);
            }
            let known = valid_before_close.contains(&reader);
            assert_eq!(
                step.reply == Reply::Valid,
                known,
                "valid only for a reader that was checked while live"
            );
        }
        if let (Event::ReadBegun(reader), Reply::Granted) = (event, step.reply) {
            assert!(lease.serves(reader));
        }
        if step.closed == Some(CloseCause::Fetched) {
            let complete = |consumer| {
                let mut of_it = valid_before_close.iter().filter(|reader| reader.consumer == consumer);
                of_it.next().is_some_and(|first| 1 + of_it.count() == usize::from(first.of))
            };
            assert!(complete(1) && complete(2), "fetched by every link of every consumer");
        }
        let (done, of) = lease.progress();
        assert!(done <= of && of >= 2);
    }
    if lease.state() == State::Growing {
        // A growing lease does not expire; the end of its prefill ends it.
        assert_eq!(lease.deadline(), None);
        closings += usize::from(lease.apply(Event::Release, now).closed.is_some());
    }
    for wait in [31, 6] {
        now = now.after(Duration::from_secs(wait));
        closings += usize::from(lease.apply(Event::Tick, now).closed.is_some());
    }
    assert_eq!(closings, 1, "no lease outlives its expiry and its drain");
}
