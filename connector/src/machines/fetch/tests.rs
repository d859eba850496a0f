//! The fetch under every order of events.

use super::*;

fn after(policy: LoadFailurePolicy, events: &[Event]) -> (Fetch, Vec<Action>) {
    let mut fetch = Fetch::new(policy);
    let actions = events.iter().flat_map(|&event| fetch.apply(event)).collect();
    (fetch, actions)
}

#[test]
fn a_successful_fetch_lands_without_a_release() {
    let (fetch, actions) = after(
        LoadFailurePolicy::Fail,
        &[
            Event::Admitted,
            Event::BlocksReserved,
            Event::TransferDone,
            Event::Verdict(Verification::Valid),
            Event::LeaseGone,
        ],
    );
    assert_eq!(
        actions,
        [Action::StartRead, Action::AskVerdict, Action::StopHeartbeat, Action::Land],
        "the producer closed the lease with its verdict"
    );
    assert_eq!((fetch.state(), fetch.ignored()), (State::Landed, 1));
}

#[test]
fn an_abort_during_a_read_frees_nothing_before_the_read_is_over() {
    let (mut fetch, actions) =
        after(LoadFailurePolicy::Recompute, &[Event::Admitted, Event::BlocksReserved, Event::Abort]);
    assert_eq!(actions, [Action::StartRead, Action::StopHeartbeat, Action::StopRead]);
    assert!(fetch.holds_landing() && !fetch.needs_heartbeat());
    let quiet: Vec<_> = fetch.apply(Event::TransferDone).iter().collect();
    assert_eq!(quiet, [Action::FreeLanding, Action::ReleaseAtProducer(ReleaseReason::Aborted)]);
}

#[test]
fn bytes_without_a_verdict_never_land() {
    for (answer, kind) in
        [(Verification::Gone, FailureKind::Gone), (Verification::Unknown, FailureKind::Unverified)]
    {
        let events = [Event::Admitted, Event::BlocksReserved, Event::TransferDone, Event::Verdict(answer)];
        let (fetch, actions) = after(LoadFailurePolicy::Fail, &events);
        assert_eq!(fetch.state(), State::Failed(kind));
        assert!(!actions.contains(&Action::Land) && actions.contains(&Action::FreeLanding));
        let (fetch, actions) = after(LoadFailurePolicy::Recompute, &events);
        assert_eq!((fetch.state(), actions.last()), (State::Recomputing, Some(&Action::Recompute)));
    }
}

#[test]
fn a_gone_heartbeat_does_not_stop_a_read_that_may_still_be_valid() {
    let (fetch, actions) = after(
        LoadFailurePolicy::Fail,
        &[
            Event::Admitted,
            Event::BlocksReserved,
            Event::LeaseGone,
            Event::TransferDone,
            Event::LeaseGone,
            Event::Verdict(Verification::Valid),
        ],
    );
    assert_eq!((fetch.state(), fetch.ignored()), (State::Landed, 2));
    assert!(!actions.iter().any(|a| matches!(a, Action::ReleaseAtProducer(_))));
}

#[test]
fn an_unknown_verdict_is_not_valid() {
    let broken = TransportError::Transfer("reset".into());
    assert_eq!(Verification::from(Err(broken)), Verification::Unknown);
    assert_eq!(Verification::from(Err(TransportError::Gone)), Verification::Gone);
    assert_eq!(Verification::from(Ok(Verdict::Valid)), Verification::Valid);
}

const EVENTS: [Event; 11] = [
    Event::Admitted,
    Event::BlocksReserved,
    Event::AlreadyCached,
    Event::LeaseGone,
    Event::TransferDone,
    Event::TransferFailed(FailureKind::Transfer),
    Event::WorkerLost,
    Event::Verdict(Verification::Valid),
    Event::Verdict(Verification::Gone),
    Event::Abort,
    Event::Reject,
];

/// Every order of six events out of eleven kinds under both policies: 3.5 million runs. The longest path to an end has
/// five events. So every path is covered, with one late or repeated event more.
#[test]
fn landing_blocks_and_the_lease_are_freed_once_in_every_order_of_events() {
    let mut runs = 0_u64;
    for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
        let mut order = [0_usize; 6];
        loop {
            run(policy, &order);
            runs += 1;
            let Some(digit) = order.iter().position(|&d| d + 1 < EVENTS.len()) else {
                break;
            };
            order[digit] += 1;
            order[..digit].fill(0);
        }
    }
    assert_eq!(runs, 2 * 11_u64.pow(6));
}

/// The expected state around a fetch.
#[derive(Default)]
struct FetchModel {
    writing: bool,
    landing: bool,
    frees: u32,
    releases: u32,
    ends: u32,
    silenced: bool,
    valid: bool,
    complete: bool,
}

fn run(policy: LoadFailurePolicy, order: &[usize]) {
    let mut fetch = Fetch::new(policy);
    let mut model = FetchModel::default();
    for &i in order {
        step(&mut fetch, &mut model, EVENTS[i]);
    }
    // Then the client disconnects, and the worker ends.
    step(&mut fetch, &mut model, Event::Abort);
    step(&mut fetch, &mut model, Event::WorkerLost);
    assert!(fetch.is_over(), "{order:?} ends in {:?}", fetch.state());
    assert!(!model.landing && !model.writing, "{order:?} strands landing blocks");
    assert!(model.silenced, "{order:?} heartbeats for ever");
    assert_eq!(model.releases, u32::from(!model.valid), "{order:?} releases");
    assert!(model.ends <= 1, "{order:?} has one outcome");
}

fn step(fetch: &mut Fetch, model: &mut FetchModel, event: Event) {
    let (before, ignored) = (fetch.state(), fetch.ignored());
    if let Event::TransferDone | Event::TransferFailed(_) | Event::WorkerLost = event {
        model.complete |= model.writing && event == Event::TransferDone;
        model.writing = false;
    }
    let actions = fetch.apply(event);
    assert!(fetch.ignored() == ignored || fetch.state() == before, "what is ignored changes nothing");
    for action in actions {
        assert_eq!(fetch.ignored(), ignored, "what is ignored asks for nothing");
        match action {
            Action::StartRead => {
                assert!(!model.landing && !model.complete, "one read per fetch");
                (model.landing, model.writing) = (true, true);
            }
            Action::StopRead => assert!(model.writing),
            Action::AskVerdict => assert!(model.complete),
            Action::Land => {
                assert!(!model.writing);
                let verdict = event == Event::Verdict(Verification::Valid) && model.complete;
                assert!(verdict || (event == Event::AlreadyCached && !model.landing));
                model.valid = verdict;
                model.landing = false;
                model.ends += 1;
            }
            Action::FreeLanding => {
                assert!(model.landing && !model.writing, "freed under a writer, or twice");
                model.landing = false;
                model.frees += 1;
                assert_eq!(model.frees, 1);
            }
            Action::ReleaseAtProducer(_) => model.releases += 1,
            Action::Recompute => {
                assert_eq!(fetch.policy, LoadFailurePolicy::Recompute);
                model.ends += 1;
            }
            Action::Fail(_) => {
                assert_eq!(fetch.policy, LoadFailurePolicy::Fail);
                model.ends += 1;
            }
            Action::StopHeartbeat => {
                assert!(!model.silenced, "stopped once");
                model.silenced = true;
            }
        }
    }
    assert_eq!(fetch.needs_heartbeat(), !model.silenced);
    assert_eq!(fetch.holds_landing(), model.landing);
}
