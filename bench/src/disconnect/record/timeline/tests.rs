//! Timelines of known events: phases, spans, held blocks, aborts and attempts.

use super::*;

/// `kind@at`, on engine 0 (prefill) or 1 (decode).
fn event(engine: usize, kind: &str, at: u64) -> EventRecord {
    let leg = (kind == "queued").then(|| if engine == 0 { "prefill" } else { "decode" }.to_owned());
    EventRecord { engine, at_us: at, kind: kind.into(), leg, ..EventRecord::default() }
}

fn timeline_of(events: &[(usize, &str, u64)]) -> Timeline {
    let mut timeline = Timeline::default();
    for &(engine, kind, at) in events {
        let mut event = event(engine, kind, at);
        match kind {
            "computed" => event.tokens = Some(at),
            "lease_opened" => event.blocks = Some(7),
            "freed" => event.blocks = Some(if engine == 0 { 7 } else { 8 }),
            "fetching" => event.blocks = Some(6),
            "lease_ended" => event.reason = Some("transfer_done".into()),
            "ended" => (event.generated, event.computed) = (Some(9), Some(100)),
            _ => {}
        }
        timeline.apply(&event);
    }
    timeline
}

const WHOLE: [(usize, &str, u64); 18] = [
    (0, "queued", 10),
    (0, "started", 20),
    (0, "computed", 60),
    (0, "computed", 100),
    (0, "first_token", 100),
    (0, "ended", 100),
    (0, "lease_opened", 101),
    (1, "queued", 110),
    (1, "fetching", 120),
    (1, "fetched", 140),
    (0, "lease_ended", 141),
    (0, "freed", 142),
    (1, "started", 145),
    (1, "computed", 150),
    (1, "first_token", 150),
    (1, "abort", 300),
    (1, "ended", 310),
    (1, "freed", 312),
];

#[test]
fn a_call_goes_through_every_phase_in_order() {
    let timeline = timeline_of(&WHOLE);
    let mut seen =
        ClientTimes { stream: true, first_token: Some(160), last_token: Some(200), ..ClientTimes::default() };
    let phase = |seen: &ClientTimes, at| timeline.phase_at(seen, at);
    let expected = [
        (5, Phase::Queued),
        (15, Phase::Queued),
        (20, Phase::Prefill),
        (99, Phase::Prefill),
        (101, Phase::Gap),
        (115, Phase::Gap),
        (120, Phase::Fetch),
        (140, Phase::FirstToken),
        (159, Phase::FirstToken),
        (160, Phase::Stream),
        (309, Phase::Stream),
    ];
    for (at, expected) in expected {
        assert_eq!(phase(&seen, at), Some(expected), "at {at}");
    }
    assert_eq!(phase(&seen, 310), None);
    seen = ClientTimes::default();
    assert_eq!((phase(&seen, 145), phase(&seen, 160)), (Some(Phase::FirstToken), Some(Phase::Unary)));
}

#[test]
fn legs_that_begin_at_once_are_queued_until_the_prefill_begins() {
    let timeline = timeline_of(&[
        (1, "queued", 10),
        (1, "fetching", 12),
        (0, "queued", 15),
        (0, "started", 20),
        (0, "lease_opened", 80),
        (0, "ended", 80),
        (0, "lease_ended", 90),
        (1, "fetched", 91),
    ]);
    let seen = ClientTimes { stream: true, first_token: Some(100), ..ClientTimes::default() };
    let phases = [
        (5, Phase::Queued),
        (13, Phase::Queued),
        (19, Phase::Queued),
        (20, Phase::Prefill),
        (80, Phase::Fetch),
        (91, Phase::FirstToken),
        (100, Phase::Stream),
    ];
    for (at, expected) in phases {
        assert_eq!(timeline.phase_at(&seen, at), Some(expected), "at {at}");
    }
    let spans = timeline.spans(&seen);
    let expected = [
        (Phase::Queued, 15, 20),
        (Phase::Prefill, 20, 80),
        (Phase::Fetch, 80, 91),
        (Phase::FirstToken, 91, 100),
    ];
    assert_eq!(spans, expected);
}

#[test]
fn spans_are_what_the_phases_were() {
    let seen = ClientTimes { stream: true, first_token: Some(160), ..ClientTimes::default() };
    let spans = timeline_of(&WHOLE).spans(&seen);
    let expected = [
        (Phase::Queued, 10, 20),
        (Phase::Prefill, 20, 101),
        // The reply is not logged. The decode engine has its contents at 110.
        (Phase::Reply, 101, 110),
        (Phase::Gap, 101, 120),
        (Phase::Fetch, 120, 140),
        (Phase::FirstToken, 140, 160),
    ];
    assert_eq!(spans, expected);
    let whole = ClientTimes { done: Some(400), ..ClientTimes::default() };
    assert!(timeline_of(&WHOLE).spans(&whole).contains(&(Phase::Unary, 150, 400)));
    // A lease that grows is read during the prefill: there is no gap.
    let early = timeline_of(&[
        (0, "queued", 10),
        (0, "started", 20),
        (0, "lease_opened", 30),
        (1, "queued", 35),
        (1, "fetching", 40),
        (0, "ended", 80),
        (1, "fetched", 90),
    ]);
    let spans = early.spans(&seen);
    assert!(
        spans.contains(&(Phase::Prefill, 20, 80)) && spans.contains(&(Phase::Fetch, 80, 90)),
        "{spans:?}"
    );
    assert!(!spans.iter().any(|(phase, ..)| *phase == Phase::Gap), "{spans:?}");
    assert_eq!(
        (early.phase_at(&seen, 50), early.phase_at(&seen, 85)),
        (Some(Phase::Prefill), Some(Phase::Fetch))
    );
}

#[test]
fn the_reply_phase_lasts_from_the_lease_to_the_written_reply() {
    let timeline = |result: &str| {
        let mut timeline = timeline_of(&WHOLE[..7]);
        let result = Some(result.to_owned());
        timeline.apply(&EventRecord { result, ..event(0, "replied", 105) });
        WHOLE[7..].iter().for_each(|&(engine, kind, at)| timeline.apply(&event(engine, kind, at)));
        timeline
    };
    let seen = ClientTimes { stream: true, first_token: Some(160), ..ClientTimes::default() };
    let sent = timeline("sent");
    let phases = [99, 101, 104, 105, 119].map(|at| sent.phase_at(&seen, at));
    let expected = [Phase::Prefill, Phase::Reply, Phase::Reply, Phase::Gap, Phase::Gap].map(Some);
    assert_eq!(phases, expected);
    let spans = sent.spans(&seen);
    assert!(
        spans.contains(&(Phase::Reply, 101, 105)) && spans.contains(&(Phase::Gap, 105, 120)),
        "{spans:?}"
    );
    // A reply that was dropped was never written.
    let mut dropped = timeline_of(&WHOLE[..7]);
    let result = Some("dropped".to_owned());
    dropped.apply(&EventRecord { result, ..event(0, "replied", 105) });
    assert_eq!(dropped.phase_at(&seen, 110), Some(Phase::Reply));
    assert!(!dropped.spans(&seen).iter().any(|(phase, ..)| matches!(phase, Phase::Reply | Phase::Gap)));
}

#[test]
fn an_abort_by_id_shows_that_the_reply_had_not_arrived() {
    let seen = ClientTimes { stream: true, ..ClientTimes::default() };
    for (reason, expected) in
        [("aborted", Phase::Reply), ("client_gone", Phase::Gap), ("lease_expired", Phase::Gap)]
    {
        let mut ended = timeline_of(&WHOLE[..7]);
        let reason = Some(reason.to_owned());
        ended.apply(&EventRecord { reason: reason.clone(), ..event(0, "lease_ended", 300) });
        assert_eq!(ended.phase_at(&seen, 102), Some(expected), "{reason:?}");
        // A reply that the engine logs is exact.
        ended.apply(&EventRecord { result: Some("sent".into()), ..event(0, "replied", 104) });
        let phases = [102, 104].map(|at| ended.phase_at(&seen, at));
        assert_eq!(phases, [Some(Phase::Reply), Some(Phase::Gap)], "{reason:?}");
    }
    // A cancel before the lease is one of the prefill.
    let mut ended = timeline_of(&WHOLE[..7]);
    ended.apply(&EventRecord { reason: Some("aborted".into()), ..event(0, "lease_ended", 300) });
    assert_eq!(ended.phase_at(&seen, 99), Some(Phase::Prefill));
}

#[test]
fn engines_that_hold_blocks_are_named() {
    let open = |count: usize| timeline_of(&WHOLE[..count]).unfinished().collect::<Vec<_>>();
    assert_eq!(open(0), []);
    assert_eq!(open(1), [(0, "it has not ended")]);
    assert_eq!(open(7), [(0, "its lease is live")]);
    assert_eq!(open(9), [(0, "its lease is live"), (1, "it has not ended")]);
    assert_eq!(open(11), [(0, "its blocks are not freed"), (1, "it has not ended")]);
    assert_eq!((open(17), open(18)), (vec![(1, "its blocks are not freed")], vec![]));
    assert!(timeline_of(&WHOLE).had_handoff());
    let unheld = timeline_of(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]);
    assert_eq!(unheld.unfinished().count(), 0, "it never held a block");
}

#[test]
fn held_blocks_aborts_and_work_after_a_cancel_are_counted() {
    let timeline = timeline_of(&WHOLE);
    assert_eq!(timeline.all_freed_at(), Some(312));
    // 7 blocks of P for 42 µs and 8 blocks of D for 202 µs; the leg of D begins 10 µs later.
    let held = timeline.block_seconds_after(100, 1_000);
    assert!((held - (7.0 * 42.0 + 8.0 * 202.0) / 1e6).abs() < 1e-12, "{held}");
    assert_eq!(timeline.abort_delivery(200), AbortDelivery::Received(300));
    // At 100 both had work. P received no abort, but its lease was read.
    assert_eq!(timeline.abort_delivery(100), AbortDelivery::Received(300));
    assert_eq!(timeline_of(&WHOLE[..7]).abort_delivery(50), AbortDelivery::NotReceived);
    assert_eq!(timeline.abort_delivery(312), AbortDelivery::NotNeeded);
    assert_eq!(timeline.work_after(60, 0), (40 + (150 - 50), 9));
    // 110 of the 160 µs in which it generated nine tokens.
    assert_eq!(timeline.work_after(200, 4), (0, 6));
    assert!(!timeline.expired());
}

#[test]
fn all_blocks_are_freed_only_when_each_block_is() {
    let timeline = timeline_of(&WHOLE[..7]);
    assert_eq!(timeline.all_freed_at(), None);
    assert!((timeline.block_seconds_after(101, 1_000_101) - 7.0).abs() < 1e-9);
    // The leg still computes: its blocks are not freed.
    assert_eq!(timeline_of(&WHOLE[..2]).all_freed_at(), None);
    // The leg holds the blocks that it fetches, even if the engine logs nothing more.
    let hangs = timeline_of(&[(1, "queued", 1), (1, "fetching", 1_000_000)]);
    assert_eq!((hangs.all_freed_at(), hangs.legs[0].held()), (None, 6));
    // Aborted before it held blocks: nothing has to be freed.
    assert_eq!(timeline_of(&[(0, "queued", 1), (0, "abort", 2), (0, "ended", 3)]).all_freed_at(), Some(0));
}

#[test]
fn an_engine_with_two_attempts_has_two_legs() {
    let mut events = WHOLE.to_vec();
    events.extend([
        (1, "queued", 400),
        (1, "fetching", 401),
        (1, "fetched", 402),
        (1, "ended", 403),
        (1, "freed", 404),
    ]);
    let timeline = timeline_of(&events);
    assert_eq!(timeline.legs.len(), 3);
    assert_eq!(timeline.all_freed_at(), Some(404));
    assert_eq!((timeline.legs[1].freed.len(), timeline.legs[2].freed.len()), (1, 1));
    // A second `freed` event of one leg is kept.
    let twice = timeline_of(&[(0, "queued", 1), (0, "ended", 2), (0, "freed", 3), (0, "freed", 4)]);
    assert_eq!(twice.legs[0].freed.len(), 2);
    // An abort before its request does not create a second leg.
    assert_eq!(timeline_of(&[(0, "abort", 1), (0, "queued", 2), (0, "ended", 3)]).legs.len(), 1);
}
