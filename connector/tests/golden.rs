//! The transition tables of lease, fetch, gatherer, offload slot and multi-connector, as readable files whose changes a
//! review shows. `BATON_BLESS=1 cargo test -p baton-connector --test golden` rewrites them.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use baton_connector::fetch::{self, FailureKind, Fetch, LoadFailurePolicy, Verification};
use baton_connector::gather::{self, Gatherer};
use baton_connector::lease::{self, Lease, LeaseTerms};
use baton_connector::multi::{self, Child, Children, MultiConnectorRequest};
use baton_connector::offload::{
    self, BlockEvent, BlockState, OffloadBlock, OffloadSlot, TransferId, TransferStage,
};
use baton_connector::{Rank, Reader, Time};

const A: Reader = Reader::sole(1);
const B: Reader = Reader::sole(2);
/// The two links of a consumer.
const C0: Reader = Reader { consumer: 3, of: 2, rank: Rank(0) };
const C1: Reader = Reader { consumer: 3, of: 2, rank: Rank(1) };

/// Compares with `golden/<name>`, or writes it.
fn check(name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("BATON_BLESS").is_some() {
        std::fs::write(&path, table).expect("the table can be written");
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    let changed = table.lines().zip(golden.lines()).find(|(new, old)| new != old);
    if let Some((new, old)) = changed {
        panic!("{name} changed (BATON_BLESS=1 accepts it)\n  was {old}\n  is  {new}");
    }
    assert_eq!(table.lines().count(), golden.lines().count(), "{name} has more or fewer rows");
}

/// A scenario of a lease: its name, the number of expected consumers, and events with their time in seconds.
type Scenario = (&'static str, usize, &'static [(lease::Event, u64)]);

/// Scenarios with this word in their name begin with a prefill that still computes.
const GROWING: &str = "Growing";

/// 40 s is past the expiry, 44 s is within the drain that follows, 60 s is past both.
const LEASES: &[Scenario] = &[
    ("Growing", 1, &[]),
    ("Growing {A}", 1, &[(lease::Event::ReadBegun(A), 1)]),
    ("Growing, A left, one more expected", 2, &[(lease::Event::Leave(1), 1)]),
    ("Offered", 1, &[]),
    ("Offered, A done, one more expected", 2, DONE_A),
    ("Reading {A}", 1, &[(lease::Event::ReadBegun(A), 1)]),
    ("Reading {A, B}", 2, &[(lease::Event::ReadBegun(A), 1), (lease::Event::ReadBegun(B), 1)]),
    ("Offered, link 0 of C done", 1, DONE_C0),
    ("Reading {link 1 of C}, link 0 done", 1, READING_C1),
    ("Offered, A left, one more expected", 2, &[(lease::Event::Leave(1), 1)]),
    ("Draining(Released) {A}", 1, &[(lease::Event::ReadBegun(A), 1), (lease::Event::Release, 2)]),
    (
        "Draining(Released) {A}, was Growing",
        1,
        &[(lease::Event::ReadBegun(A), 1), (lease::Event::Release, 2)],
    ),
    ("Draining(Expired) {A}", 1, &[(lease::Event::ReadBegun(A), 1), (lease::Event::Tick, 40)]),
    ("Closed(Fetched) {A done}", 1, DONE_A),
    ("Closed(Released)", 1, &[(lease::Event::Release, 1)]),
    ("Closed(Expired)", 1, &[(lease::Event::Tick, 40)]),
];

const DONE_C0: &[(lease::Event, u64)] = &[(lease::Event::ReadBegun(C0), 1), (lease::Event::ReadDone(C0), 2)];
const READING_C1: &[(lease::Event, u64)] =
    &[(lease::Event::ReadBegun(C0), 1), (lease::Event::ReadDone(C0), 2), (lease::Event::ReadBegun(C1), 2)];
const DONE_A: &[(lease::Event, u64)] = &[(lease::Event::ReadBegun(A), 1), (lease::Event::ReadDone(A), 2)];

fn at(seconds: u64) -> Time {
    Time::ZERO.after(Duration::from_secs(seconds))
}

fn lease_in(scenario: &Scenario) -> (Lease, u64) {
    let terms = LeaseTerms::default();
    let mut lease = match scenario.0.contains(GROWING) {
        true => Lease::growing(terms, scenario.1),
        false => Lease::open(terms, scenario.1, Time::ZERO),
    };
    for &(event, seconds) in scenario.2 {
        lease.apply(event, at(seconds));
    }
    (lease, scenario.2.last().map_or(0, |&(_, seconds)| seconds))
}

#[test]
fn the_lease_matches_its_golden_table() {
    use lease::Event::{Heartbeat, Leave, ReadBegun, ReadDone, ReadFailed, Release, Sealed, Tick};
    let events = [
        ("sealed", Sealed, 1),
        ("read begun(A)", ReadBegun(A), 1),
        ("read begun(B)", ReadBegun(B), 1),
        ("read done(A)", ReadDone(A), 1),
        ("read done(B)", ReadDone(B), 1),
        ("read failed(A)", ReadFailed(A), 1),
        ("read failed(B)", ReadFailed(B), 1),
        ("read begun(C1)", ReadBegun(C1), 1),
        ("read done(C1)", ReadDone(C1), 1),
        ("leave(A)", Leave(1), 1),
        ("leave(B)", Leave(2), 1),
        ("heartbeat", Heartbeat, 1),
        ("late heartbeat", Heartbeat, 15),
        ("release", Release, 1),
        ("tick", Tick, 1),
        ("tick when due", Tick, 31),
    ];
    let mut table = format!(
        "{:<36}{:<16}{:<22}{:<10}{:<18}deadline\n",
        "lease", "event", "becomes", "reply", "blocks go back"
    );
    for scenario in LEASES {
        table.push('\n');
        for (name, event, wait) in events {
            let (mut lease, now) = lease_in(scenario);
            let before = lease.deadline();
            let step = lease.apply(event, at(now + wait));
            let deadline = match lease.deadline() {
                None => "none".to_owned(),
                after if after == before => "same".to_owned(),
                Some(after) => format!("{} s", after.since(Time::ZERO).as_secs()),
            };
            let closed = step.closed.map_or("-".to_owned(), |cause| format!("{cause:?}"));
            let (state, reply) = (format!("{:?}", lease.state()), format!("{:?}", step.reply));
            writeln!(table, "{:<36}{name:<16}{state:<22}{reply:<10}{closed:<18}{deadline}", scenario.0)
                .expect("a string takes everything");
        }
    }
    check("lease.txt", &table);
}

#[test]
fn every_scenario_of_the_lease_table_has_the_state_in_its_name() {
    for scenario in LEASES {
        let (lease, _) = lease_in(scenario);
        let state = format!("{:?}", lease.state());
        assert!(scenario.0.starts_with(&state), "{} is {state}", scenario.0);
    }
}

#[test]
fn the_fetch_matches_its_golden_table() {
    use fetch::Event::{
        Abort, Admitted, AlreadyCached, BlocksReserved, LeaseGone, Reject, TransferDone, TransferFailed,
        Verdict, WorkerLost,
    };
    let stories: &[(&str, &[fetch::Event])] = &[
        ("Queued", &[]),
        ("Reserving", &[Admitted]),
        ("Reading", &[Admitted, BlocksReserved]),
        ("Verifying", &[Admitted, BlocksReserved, TransferDone]),
        ("Stopping(Aborted)", &[Admitted, BlocksReserved, Abort]),
        ("Stopping(Rejected)", &[Admitted, BlocksReserved, Reject]),
        ("Landed", &[Admitted, BlocksReserved, TransferDone, Verdict(Verification::Valid)]),
        ("Ended", &[Abort]),
        ("Recomputing or Failed", &[LeaseGone]),
    ];
    let events = [
        Admitted,
        BlocksReserved,
        AlreadyCached,
        LeaseGone,
        TransferDone,
        TransferFailed(FailureKind::Transfer),
        WorkerLost,
        Verdict(Verification::Valid),
        Verdict(Verification::Gone),
        Verdict(Verification::Unknown),
        Abort,
        Reject,
    ];
    let mut table = String::from("Policy \"recompute\"; where \"fail\" differs, a second row says how.\n\n");
    writeln!(table, "{:<23}{:<27}{:<21}actions", "fetch", "event", "becomes").expect("a string");
    for (name, story) in stories {
        table.push('\n');
        for event in events {
            let row = |policy| {
                let mut fetch = Fetch::new(policy);
                for &event in *story {
                    let _ = fetch.apply(event);
                }
                let ignored = fetch.ignored();
                let actions: Vec<_> = fetch.apply(event).iter().map(|a| format!("{a:?}")).collect();
                let actions = match (fetch.ignored() > ignored, actions.is_empty()) {
                    (true, _) => "ignored, counted".to_owned(),
                    (false, true) => "-".to_owned(),
                    (false, false) => actions.join(", "),
                };
                let state = format!("{:?}", fetch.state());
                format!("{name:<23}{:<27}{state:<21} {actions}", format!("{event:?}"))
            };
            let (recompute, fail) = (row(LoadFailurePolicy::Recompute), row(LoadFailurePolicy::Fail));
            writeln!(table, "{recompute}").expect("a string");
            if recompute != fail {
                writeln!(table, "{fail}").expect("a string");
            }
        }
    }
    check("fetch.txt", &table);
}

#[test]
fn the_gatherer_matches_its_golden_table() {
    use gather::Event::{Done, Failed, Lost, Verdict};
    let failed = Failed(FailureKind::Transfer);
    let stories: &[(&str, &[(usize, gather::Event)])] = &[
        ("Reading, both write", &[]),
        ("Reading, 0 has its bytes", &[(0, Done)]),
        ("Reading, 0 is valid", &[(0, Done), (0, Verdict(Verification::Valid))]),
        ("Stopping, 0 failed", &[(0, failed)]),
        ("Stopping, 0 is gone", &[(0, Done), (0, Verdict(Verification::Gone))]),
        ("Verifying, no verdict", &[(0, Done), (1, Done)]),
        ("Verifying, 0 is valid", &[(0, Done), (1, Done), (0, Verdict(Verification::Valid))]),
        ("Ended, 1 without verdict", &[(0, Done), (1, Done), (0, Verdict(Verification::Gone))]),
        ("Ended", &[(0, failed), (1, failed)]),
    ];
    let mut table = String::from("Two links; state and actions of the whole.\n\n");
    writeln!(table, "{:<26}{:<4}{:<20}{:<20}actions", "gatherer", "of", "report", "becomes")
        .expect("a string");
    for (name, story) in stories {
        table.push('\n');
        for link in [0, 1] {
            let verdicts = [Verification::Valid, Verification::Gone, Verification::Unknown].map(Verdict);
            for event in [Done, failed, Lost].into_iter().chain(verdicts) {
                let mut gather = Gatherer::new(2);
                for &(link, event) in *story {
                    let _ = gather.apply(link, event);
                }
                assert!(
                    name.starts_with(&format!("{:?}", gather.state())[..4]),
                    "{name}: {:?}",
                    gather.state()
                );
                let ignored = gather.ignored();
                let actions: Vec<_> = gather.apply(link, event).iter().map(|a| format!("{a:?}")).collect();
                let actions = match (gather.ignored() > ignored, actions.is_empty()) {
                    (true, _) => "ignored, counted".to_owned(),
                    (false, true) => "-".to_owned(),
                    (false, false) => actions.join(", "),
                };
                let (event, state) = (format!("{event:?}"), format!("{:?}", gather.state()));
                writeln!(table, "{name:<26}{link:<4}{event:<20}{state:<20} {actions}").expect("a string");
            }
        }
    }
    check("gather.txt", &table);
}

#[test]
fn the_offload_slot_matches_its_golden_table() {
    use BlockEvent::{Committed, Done, Failed, GiveUp, Load, Revoked, Store};
    let stages =
        [TransferStage::Queued, TransferStage::Revoking, TransferStage::Committed, TransferStage::Draining];
    let mut states = vec![BlockState::Resident, BlockState::Stored];
    states.extend(stages.map(BlockState::Storing));
    states.extend(stages.map(BlockState::Loading));
    let mut table = format!("One block.\n\n{:<21}{:<11}{:<21}action\n", "block", "event", "becomes");
    for state in states {
        table.push('\n');
        for event in [Store, Load, Committed, Done, Failed, Revoked, GiveUp] {
            let mut block = OffloadBlock::new(state);
            let action = match block.apply(TransferId(1), event) {
                None => "ignored, counted".to_owned(),
                Some(None) => "-".to_owned(),
                Some(Some(action)) => format!("{action:?}").replace("(TransferId(1))", ""),
            };
            let (from, to) = (format!("{state:?}"), format!("{:?}", block.state()));
            writeln!(table, "{from:<21}{:<11}{to:<21}{action}", format!("{event:?}")).expect("a string");
        }
    }

    const S: TransferId = TransferId(1);
    const L: TransferId = TransferId(2);
    let block = offload::Event::Block;
    let stories: [(&str, Vec<offload::Event>); 8] = [
        ("nothing in flight", vec![]),
        ("S storing", vec![block(S, Store)]),
        ("S storing, begun", vec![block(S, Store), block(S, Committed)]),
        ("L loading", vec![block(L, Load)]),
        ("L loading, begun", vec![block(L, Load), block(L, Committed)]),
        ("over, S storing", vec![block(S, Store), offload::Event::Finish]),
        ("over, L loading", vec![block(L, Load), offload::Event::Abort]),
        ("over, settled", vec![offload::Event::Finish]),
    ];
    let events = [
        ("finish", offload::Event::Finish),
        ("abort", offload::Event::Abort),
        ("yield", offload::Event::Yield),
        ("S store", block(S, Store)),
        ("S done", block(S, Done)),
        ("S failed", block(S, Failed)),
        ("S revoked", block(S, Revoked)),
        ("L load", block(L, Load)),
        ("L done", block(L, Done)),
        ("L failed", block(L, Failed)),
        ("L revoked", block(L, Revoked)),
    ];
    writeln!(table, "\n\nOne slot: S is copied down, L is copied up.\n").expect("a string");
    writeln!(table, "{:<19}{:<11}{:<14}actions", "slot", "event", "answers").expect("a string");
    for (name, story) in &stories {
        table.push('\n');
        for (event_name, event) in events {
            let mut slot = OffloadSlot::new();
            for &event in story {
                let _ = slot.apply(event);
            }
            let ignored = slot.ignored();
            let actions = listed(slot.apply(event), slot.ignored() > ignored);
            let actions = actions.replace("TransferId(1)", "S").replace("TransferId(2)", "L");
            let answer = format!("{:?}", slot.finish_reply());
            writeln!(table, "{name:<19}{event_name:<11}{answer:<14}{actions}").expect("a string");
        }
    }
    check("offload.txt", &table);
}

#[test]
fn the_multi_connector_matches_its_golden_table() {
    use multi::ChildReply::{Holds, Nothing};
    use multi::Event::{Abort, Finish, Load, LoadFailed, Loaded, Preempted, Released, Replied};
    const P: Child = Child(0);
    const O: Child = Child(1);
    let (none, both) = (Children::NONE, Children::first(2));
    let stories: [(&str, Vec<multi::Event>); 8] = [
        ("idle", vec![]),
        ("loading from 0", vec![Load(both)]),
        ("idle, 0 failed", vec![Load(both), LoadFailed(P)]),
        ("finished 0, 1", vec![Finish]),
        ("finished 1, 0 holds", vec![Finish, Replied(P, Holds)]),
        ("finished 1", vec![Finish, Replied(P, Nothing)]),
        ("0, 1 hold", vec![Finish, Replied(P, Holds), Replied(O, Holds)]),
        ("freed", vec![Finish, Replied(P, Nothing), Replied(O, Nothing)]),
    ];
    let events = [
        ("load: none", Load(none)),
        ("load: 1", Load(none.with(O))),
        ("load: 0, 1", Load(both)),
        ("loaded(0)", Loaded(P)),
        ("load failed(0)", LoadFailed(P)),
        ("load failed(1)", LoadFailed(O)),
        ("preempted", Preempted),
        ("finish", Finish),
        ("abort", Abort),
        ("replied(0, holds)", Replied(P, Holds)),
        ("replied(0, nothing)", Replied(P, Nothing)),
        ("replied(1, holds)", Replied(O, Holds)),
        ("replied(1, nothing)", Replied(O, Nothing)),
        ("released(0)", Released(P)),
        ("released(1)", Released(O)),
    ];
    let mut table = String::from(
        "Children 0 and 1; policy \"recompute\"; where \"fail\" differs, a second row says how.\n\n",
    );
    writeln!(table, "{:<21}{:<22}actions", "request", "event").expect("a string");
    for (name, story) in &stories {
        table.push('\n');
        for (event_name, event) in events {
            let row = |policy| {
                let mut multi = MultiConnectorRequest::new(both, policy);
                for &event in story {
                    let _ = multi.apply(event);
                }
                let ignored = multi.ignored();
                let actions = listed(multi.apply(event), multi.ignored() > ignored);
                let actions = actions.replace("Child(0)", "0").replace("Child(1)", "1");
                format!("{name:<21}{event_name:<22}{actions}")
            };
            let (recompute, fail) = (row(LoadFailurePolicy::Recompute), row(LoadFailurePolicy::Fail));
            writeln!(table, "{recompute}").expect("a string");
            if recompute != fail {
                writeln!(table, "{fail}").expect("a string");
            }
        }
    }
    check("multi.txt", &table);
}

fn listed(actions: Vec<impl std::fmt::Debug>, ignored: bool) -> String {
    let actions: Vec<_> = actions.iter().map(|action| format!("{action:?}")).collect();
    match (ignored, actions.is_empty()) {
        (true, _) => "ignored, counted".to_owned(),
        (false, true) => "-".to_owned(),
        (false, false) => actions.join(", "),
    }
}
