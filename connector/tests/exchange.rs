//! The exchange under every order of events, and its table as a golden file.
//!
//! The walk keeps a model of the engines next to the machine. It explores every reachable pair of machine and model, so
//! the length of a sequence of events is not bounded.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fmt::Write as _;

use baton_connector::exchange::{
    Attempt, Event, EventEffect, Exchange, Failure, PrefillHalf, Settlement, SettlementCause, Span, State,
};
use baton_connector::{Handle, Time};

const P: [Attempt; 2] = [Attempt(1), Attempt(2)];
const D: [Attempt; 2] = [Attempt(3), Attempt(4)];

fn handle(of: Attempt) -> Handle {
    Handle(u128::from(of.0))
}

fn alphabet() -> Vec<Event> {
    let failures = [Failure::NotReached, Failure::Answered, Failure::Unknown];
    let mut events = vec![
        Event::NotAdmitted,
        Event::NoEngine,
        Event::PrefillSkipped,
        Event::HandoffUnusable,
        Event::Exhausted,
        Event::ExhaustedFor(SettlementCause::DecodeBusy),
        Event::ClientGone,
    ];
    events.push(Event::Dropped);
    for p in P {
        events.extend([Event::PrefillSent(p), Event::PrefillLeased(p, Some(handle(p)))]);
        events.extend([Event::PrefillEmpty(p), Event::PrefillRefused(p), Event::PrefillEnded(p)]);
        events.extend(failures.map(|f| Event::PrefillFailed(p, f)));
        events.push(Event::PrefillFailed(p, Failure::Unusable(Some(handle(p)))));
    }
    for d in D {
        events.extend([Event::DecodeSent(d), Event::DecodeAccepted(d), Event::DecodeRefused(d)]);
        events.extend(failures.map(|f| Event::DecodeFailed(d, f)));
        events.extend([Event::DecodeDeclined(d), Event::FirstChunk(d), Event::StreamEnded(d)]);
        events.extend([Event::StreamBroken(d), Event::StreamCut(d)]);
    }
    events
}

/// The expected state of the engines under the same events. The settlements are checked against it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct EngineModel {
    /// Attempts that were used; an owner never reuses a number.
    used: BTreeSet<Attempt>,
    /// Engines that may be working on the request.
    working: BTreeSet<Attempt>,
    /// Leases that no decode engine has taken over and that are not released.
    leases: BTreeSet<Attempt>,
    aborted: BTreeSet<Attempt>,
    released: BTreeSet<Attempt>,
    /// Prefills whose pair has completed its response: they end by themselves.
    finishing: BTreeSet<Attempt>,
    ended: bool,
}

impl EngineModel {
    /// Whether this event is possible: an engine replies once, and only to its own attempt.
    fn possible(&self, event: Event) -> bool {
        match event {
            Event::PrefillSent(a) | Event::DecodeSent(a) => !self.used.contains(&a),
            Event::PrefillEnded(a) => self.used.contains(&a) && !self.working.contains(&a),
            Event::PrefillLeased(a, _)
            | Event::PrefillEmpty(a)
            | Event::PrefillRefused(a)
            | Event::PrefillFailed(a, _)
            | Event::DecodeAccepted(a)
            | Event::DecodeRefused(a)
            | Event::DecodeFailed(a, _)
            | Event::DecodeDeclined(a)
            | Event::FirstChunk(a)
            | Event::StreamEnded(a)
            | Event::StreamBroken(a)
            | Event::StreamCut(a) => self.working.contains(&a),
            Event::NotAdmitted
            | Event::NoEngine
            | Event::PrefillSkipped
            | Event::HandoffUnusable
            | Event::Exhausted
            | Event::ExhaustedFor(_)
            | Event::ClientGone
            | Event::Dropped => true,
        }
    }

    fn observe(&mut self, before: State, event: Event) {
        match event {
            Event::PrefillSent(a) | Event::DecodeSent(a) => {
                self.used.insert(a);
                self.working.insert(a);
            }
            // The decode engine has read the blocks of a completed pair.
            Event::PrefillLeased(a, _) if self.finishing.contains(&a) => drop(self.working.remove(&a)),
            // It settles with the prefill engine from its acceptance on.
            Event::PrefillLeased(a, _)
                if matches!(before, State::Accepted(_, half) | State::Streaming(_, half)
                    if half == PrefillHalf::Computing(a)) =>
            {
                self.working.remove(&a);
            }
            Event::PrefillLeased(a, _) | Event::PrefillFailed(a, Failure::Unusable(_)) => {
                self.working.remove(&a);
                self.leases.insert(a);
            }
            Event::PrefillFailed(_, Failure::Unknown)
            | Event::DecodeFailed(_, Failure::Unknown)
            | Event::StreamBroken(_)
            | Event::StreamCut(_)
            | Event::FirstChunk(_) => {}
            Event::PrefillEmpty(a)
            | Event::PrefillRefused(a)
            | Event::PrefillFailed(a, _)
            | Event::DecodeRefused(a)
            | Event::DecodeFailed(a, _) => drop(self.working.remove(&a)),
            // An engine with a prefill half declines nothing.
            Event::DecodeDeclined(a) => {
                if let State::Decoding(_, PrefillHalf::Ended) | State::Accepted(_, PrefillHalf::Ended) =
                    before
                {
                    self.working.remove(&a);
                }
            }
            Event::StreamEnded(a) => {
                self.working.remove(&a);
                if let State::Accepted(_, PrefillHalf::Computing(p))
                | State::Streaming(_, PrefillHalf::Computing(p)) = before
                {
                    self.finishing.insert(p);
                }
            }
            // From here on the decode engine settles with the prefill engine.
            Event::DecodeAccepted(_) => {
                if let State::Decoding(_, PrefillHalf::Leased(lease)) = before {
                    self.leases.remove(&lease.attempt);
                }
            }
            Event::NotAdmitted
            | Event::NoEngine
            | Event::PrefillEnded(_)
            | Event::PrefillSkipped
            | Event::HandoffUnusable
            | Event::Exhausted
            | Event::ExhaustedFor(_)
            | Event::ClientGone
            | Event::Dropped => {}
        }
    }

    fn settle(&mut self, settlement: Settlement) {
        match settlement {
            Settlement::AbortPrefill(a) | Settlement::AbortDecode(a) => {
                assert!(self.working.contains(&a), "an abort for {a:?}, which is not working");
                assert!(self.aborted.insert(a), "a second abort for {a:?}");
            }
            Settlement::ReleasePrefill(lease, _) => {
                assert_eq!(lease.handle, Some(handle(lease.attempt)));
                assert!(self.released.insert(lease.attempt), "a second release of {:?}", lease.attempt);
                self.leases.remove(&lease.attempt);
            }
        }
    }
}

#[test]
fn every_end_of_a_request_makes_each_due_settlement_once() {
    let events = alphabet();
    let mut seen = HashSet::new();
    let mut queue = VecDeque::from([(Exchange::new(), EngineModel::default())]);
    let mut steps = 0_u64;
    while let Some((exchange, model)) = queue.pop_front() {
        let dropped = exchange.clone().apply(Event::Dropped, Time::ZERO).settlements;
        assert_eq!(
            dropped,
            exchange.pending_settlements(SettlementCause::RouterShutdown),
            "the pending settlements are those of the end"
        );
        for &event in events.iter().filter(|e| model.possible(**e)) {
            let (mut exchange, mut model) = (exchange.clone(), model.clone());
            let before = exchange.state();
            let step = exchange.apply(event, Time::ZERO);
            steps += 1;
            if step.effect == EventEffect::Ignored {
                assert_eq!(exchange.state(), before);
                assert!(step.settlements.is_empty() && step.ended.is_none());
                continue;
            }
            model.observe(before, event);
            step.settlements.iter().for_each(|settlement| model.settle(*settlement));
            if step.ended.is_some() {
                assert!(!model.ended, "a second outcome");
                model.ended = true;
            }
            assert_eq!(exchange.outcome().is_some(), model.ended);
            if model.ended {
                assert!(exchange.pending_settlements(SettlementCause::Late).is_empty());
                let ends = |a| model.aborted.contains(a) || model.finishing.contains(a);
                let stopped = model.working.iter().all(ends);
                assert!(stopped, "left working: {model:?}");
                assert!(model.leases.is_empty(), "left leased: {model:?}");
            }
            if seen.insert((exchange.clone(), model.clone())) {
                queue.push_back((exchange, model));
            }
        }
    }
    assert!(seen.len() > 500, "only {} states: the walk is broken", seen.len());
    println!("{} states of machine and model, {steps} steps", seen.len());
}

#[test]
fn an_event_about_another_attempt_changes_nothing() {
    let mut exchange = Exchange::new();
    exchange.apply(Event::PrefillSent(P[0]), Time::ZERO);
    for unknown in [
        Event::PrefillLeased(P[1], None),
        Event::PrefillFailed(P[1], Failure::Unknown),
        Event::DecodeAccepted(D[0]),
        Event::StreamEnded(D[0]),
    ] {
        assert_eq!(exchange.apply(unknown, Time::ZERO).effect, EventEffect::Ignored, "{unknown:?}");
        assert_eq!(exchange.state(), State::Prefilling(P[0]));
    }
}

#[test]
fn a_handle_that_arrives_after_a_cancel_is_released_once() {
    let mut exchange = Exchange::new();
    exchange.apply(Event::PrefillSent(P[0]), Time::ZERO);
    let gone = exchange.apply(Event::ClientGone, Time::ZERO);
    assert_eq!(gone.settlements, [Settlement::AbortPrefill(P[0])]);
    let late = Event::PrefillLeased(P[0], Some(handle(P[0])));
    let settlements = exchange.apply(late, Time::ZERO).settlements;
    assert!(
        matches!(settlements[..], [Settlement::ReleasePrefill(lease, SettlementCause::Late)] if lease.attempt == P[0])
    );
    assert_eq!(exchange.apply(late, Time::ZERO).effect, EventEffect::Ignored);
}

#[test]
fn a_resumed_response_settles_nothing_for_the_dead_engine() {
    let mut exchange = Exchange::new();
    let leased = Event::PrefillLeased(P[0], Some(handle(P[0])));
    for event in [Event::PrefillSent(P[0]), leased, Event::DecodeSent(D[0]), Event::DecodeAccepted(D[0])] {
        exchange.apply(event, Time::ZERO);
    }
    exchange.apply(Event::FirstChunk(D[0]), Time::ZERO);
    let cut = exchange.apply(Event::StreamCut(D[0]), Time::ZERO).settlements;
    let [Settlement::AbortDecode(first), Settlement::ReleasePrefill(released, SettlementCause::DecodeBroken)] =
        cut[..]
    else {
        panic!("{cut:?}")
    };
    assert_eq!((first, released.attempt), (D[0], P[0]));
    for event in [Event::DecodeSent(D[1]), Event::DecodeAccepted(D[1]), Event::FirstChunk(D[1])] {
        assert_eq!(exchange.apply(event, Time::ZERO).effect, EventEffect::Applied);
    }
    assert_eq!(
        exchange.apply(Event::StreamEnded(D[0]), Time::ZERO).effect,
        EventEffect::Ignored,
        "the first one's late end"
    );
    let gone = exchange.apply(Event::ClientGone, Time::ZERO);
    assert_eq!(gone.settlements, [Settlement::AbortDecode(D[1])]);
}

#[test]
fn each_phase_of_a_request_is_stamped_once() {
    let mut exchange = Exchange::new();
    let life = [
        Event::PrefillSent(P[0]),
        Event::PrefillFailed(P[0], Failure::NotReached),
        Event::PrefillSent(P[1]),
        Event::PrefillLeased(P[1], None),
        Event::DecodeSent(D[0]),
        Event::DecodeAccepted(D[0]),
        Event::FirstChunk(D[0]),
        Event::StreamEnded(D[0]),
    ];
    for (at, event) in life.into_iter().enumerate() {
        assert_eq!(exchange.apply(event, Time(at as u64)).effect, EventEffect::Applied, "{event:?}");
    }
    let line = *exchange.timeline();
    let stamps =
        [line.prefill_sent, line.prefilled, line.decode_sent, line.accepted, line.first_chunk, line.ended];
    assert_eq!(stamps, [0, 3, 4, 5, 6, 7].map(|t| Some(Time(t))));
}

#[test]
fn a_prefill_without_a_reply_has_no_duration_and_no_gap() {
    let mut exchange = Exchange::new();
    let life = [
        Event::PrefillSent(P[0]),
        Event::PrefillFailed(P[0], Failure::Unknown),
        Event::PrefillSkipped,
        Event::DecodeSent(D[0]),
        Event::DecodeAccepted(D[0]),
        Event::StreamEnded(D[0]),
    ];
    for (at, event) in life.into_iter().enumerate() {
        assert_eq!(exchange.apply(event, Time(at as u64)).effect, EventEffect::Applied, "{event:?}");
    }
    let line = *exchange.timeline();
    assert_eq!(line.first_sent(), Some(Time(0)));
    assert_eq!(line.prefill(), Some(Span { from: Time(0), to: None }), "it was tried");
    assert_eq!(line.prefill().and_then(Span::duration), None);
    assert_eq!(line.gap(), None);
    assert_eq!(line.accept(), Some(Span { from: Time(3), to: Some(Time(4)) }));
    assert_eq!(line.decode().and_then(Span::duration), Some(Time(5).since(Time(4))));
}

#[test]
fn an_early_handoff_prefill_lasts_until_its_end() {
    let events = [
        Event::PrefillSent(P[0]),
        Event::PrefillLeased(P[0], Some(handle(P[0]))),
        Event::DecodeSent(D[0]),
        Event::PrefillEnded(P[1]),
        Event::PrefillEnded(P[0]),
        Event::DecodeAccepted(D[0]),
    ];
    let mut exchange = Exchange::new();
    exchange.computes_on();
    let effects =
        events.iter().zip(1..).map(|(event, at)| exchange.apply(*event, Time(at)).effect).collect::<Vec<_>>();
    assert_eq!(
        effects.iter().filter(|effect| **effect == EventEffect::Ignored).count(),
        1,
        "that of another attempt: {effects:?}"
    );
    let line = exchange.timeline();
    assert_eq!(line.prefill().and_then(Span::duration), Some(Time(5).since(Time(1))));
    assert_eq!(line.gap().and_then(Span::duration), Some(Time(3).since(Time(2))));
    assert_eq!(line.accept().and_then(Span::duration), Some(Time(6).since(Time(3))));
}

/// Every kind of state with every event. `BLESS=1 cargo test -p baton-connector` rewrites the file.
#[test]
fn the_transition_table_matches_its_golden_file() {
    let [p, d] = [Event::PrefillSent(P[0]), Event::DecodeSent(D[0])];
    let prefixes: [&[Event]; 14] = [
        &[],
        &[Event::PrefillSent(P[0])],
        &[Event::PrefillSent(P[0]), Event::PrefillFailed(P[0], Failure::Unknown)],
        &[Event::PrefillSent(P[0]), Event::PrefillLeased(P[0], Some(handle(P[0])))],
        &[Event::PrefillSkipped],
        &[Event::PrefillSkipped, Event::DecodeSent(D[0])],
        &[Event::PrefillSent(P[0]), Event::PrefillLeased(P[0], Some(handle(P[0]))), Event::DecodeSent(D[0])],
        &[
            Event::PrefillSent(P[0]),
            Event::PrefillLeased(P[0], Some(handle(P[0]))),
            Event::DecodeSent(D[0]),
            Event::DecodeAccepted(D[0]),
        ],
        &[
            Event::PrefillSent(P[0]),
            Event::PrefillLeased(P[0], Some(handle(P[0]))),
            Event::DecodeSent(D[0]),
            Event::DecodeAccepted(D[0]),
            Event::FirstChunk(D[0]),
        ],
        &[Event::PrefillSent(P[0]), Event::ClientGone],
        &[p, d],
        &[p, d, Event::DecodeAccepted(D[0])],
        &[p, d, Event::DecodeAccepted(D[0]), Event::FirstChunk(D[0])],
        &[p, d, Event::DecodeAccepted(D[0]), Event::StreamEnded(D[0])],
    ];
    let mut table =
        String::from("# state ─ event ─▶ state | settlements. Attempts 1, 2 prefill; 3, 4 decode.\n");
    for prefix in prefixes {
        let mut exchange = Exchange::new();
        prefix.iter().for_each(|e| drop(exchange.apply(*e, Time::ZERO)));
        let after = prefix.last().map_or_else(|| "new".to_owned(), |e| format!("after {}", brief(e)));
        let _ = writeln!(table, "\n{} ({after})", brief(&exchange.state()));
        for event in alphabet() {
            let mut next = exchange.clone();
            let step = next.apply(event, Time::ZERO);
            if step.effect == EventEffect::Ignored {
                let _ = writeln!(table, "  {} ─▶ ignored", brief(&event));
                continue;
            }
            let settlements: Vec<_> = step.settlements.iter().map(brief).collect();
            let separator = if settlements.is_empty() { "" } else { " | " };
            let _ = write!(table, "  {} ─▶ {}", brief(&event), brief(&next.state()));
            let _ = writeln!(table, "{separator}{}", settlements.join(", "));
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/exchange.txt");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &table).expect("the golden file is written");
    }
    let golden = std::fs::read_to_string(path).expect("the golden file is there");
    assert_eq!(table, golden, "if the change is meant: BLESS=1 cargo test -p baton-connector");
}

fn brief(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    ["Attempt(", "PrefillLease ", "Handle(00000000…)"].iter().fold(text, |text, noise| match *noise {
        "Attempt(" => (1..=4).fold(text, |t, n| t.replace(&format!("Attempt({n})"), &n.to_string())),
        "Handle(00000000…)" => text.replace(noise, "handle"),
        _ => text.replace(noise, ""),
    })
}
