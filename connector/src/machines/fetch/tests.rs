//! The fetch under every order of events.

use super::*;

fn after(policy: LoadFailurePolicy, events: &[Event]) -> (Fetch, Vec<Action>) {
    let mut fetch = Fetch::new(policy);
    let actions = events.iter().flat_map(|&event| fetch.apply(event)).collect();
    (fetch, actions)
}

#[test]
fn a_fetch_that_goes_well_lands_and_owes_nothing() {
    let (fetch, actions) = after(
        LoadFailurePolicy::Fail,
        &[
            Event::Admitted,
            Event::BlocksReserved,
            Event::TransferDone,
            Event::Verdict(Answer::Valid),
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
    assert!(fetch.holds_landing() && !fetch.heartbeating());
    let quiet: Vec<_> = fetch.apply(Event::TransferDone).iter().collect();
    assert_eq!(quiet, [Action::FreeLanding, Action::ReleaseAtProducer(Reason::Aborted)]);
}

#[test]
fn bytes_without_a_verdict_never_land() {
    for (answer, kind) in [(Answer::Gone, FailureKind::Gone), (Answer::Unknown, FailureKind::Unverified)] {
        let events = [Event::Admitted, Event::BlocksReserved, Event::TransferDone, Event::Verdict(answer)];
        let (fetch, actions) = after(LoadFailurePolicy::Fail, &events);
        assert_eq!(fetch.state(), State::Failed(kind));
        assert!(!actions.contains(&Action::Land) && actions.contains(&Action::FreeLanding));
        let (fetch, actions) = after(LoadFailurePolicy::Recompute, &events);
        assert_eq!((fetch.state(), actions.last()), (State::Recomputing, Some(&Action::Recompute)));
    }
}

#[test]
fn a_heartbeat_answered_gone_does_not_disturb_a_read_that_may_still_be_valid() {
    let (fetch, actions) = after(
        LoadFailurePolicy::Fail,
        &[
            Event::Admitted,
            Event::BlocksReserved,
            Event::LeaseGone,
            Event::TransferDone,
            Event::LeaseGone,
            Event::Verdict(Answer::Valid),
        ],
    );
    assert_eq!((fetch.state(), fetch.ignored()), (State::Landed, 2));
    assert!(!actions.iter().any(|a| matches!(a, Action::ReleaseAtProducer(_))));
}

#[test]
fn a_verdict_of_nobody_knows_is_not_valid() {
    let broken = TransportError::Transfer("reset".into());
    assert_eq!(Answer::from(Err(broken)), Answer::Unknown);
    assert_eq!(Answer::from(Err(TransportError::Gone)), Answer::Gone);
    assert_eq!(Answer::from(Ok(Verdict::Valid)), Answer::Valid);
}

const EVENTS: [Event; 11] = [
    Event::Admitted,
    Event::BlocksReserved,
    Event::AlreadyHere,
    Event::LeaseGone,
    Event::TransferDone,
    Event::TransferFailed(FailureKind::Transfer),
    Event::Quiet,
    Event::Verdict(Answer::Valid),
    Event::Verdict(Answer::Gone),
    Event::Abort,
    Event::Reject,
];

/// Every order of six events out of eleven kinds under both policies: 3.5 million runs. The longest way
/// to an end is five events, so every way is in there, with one event more to be late or repeated.
#[test]
fn landing_blocks_and_the_lease_come_home_once_whatever_the_order_of_events() {
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

/// What the world around a fetch has seen.
#[derive(Default)]
struct World {
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
    let mut world = World::default();
    for &i in order {
        step(&mut fetch, &mut world, EVENTS[i]);
    }
    // Then faults stop: the client leaves, the worker ends.
    step(&mut fetch, &mut world, Event::Abort);
    step(&mut fetch, &mut world, Event::Quiet);
    assert!(fetch.is_over(), "{order:?} ends in {:?}", fetch.state());
    assert!(!world.landing && !world.writing, "{order:?} strands landing blocks");
    assert!(world.silenced, "{order:?} heartbeats for ever");
    assert_eq!(world.releases, u32::from(!world.valid), "{order:?} releases");
    assert!(world.ends <= 1, "{order:?} has one outcome");
}

fn step(fetch: &mut Fetch, world: &mut World, event: Event) {
    let (before, ignored) = (fetch.state(), fetch.ignored());
    if let Event::TransferDone | Event::TransferFailed(_) | Event::Quiet = event {
        world.complete |= world.writing && event == Event::TransferDone;
        world.writing = false;
    }
    let actions = fetch.apply(event);
    assert!(fetch.ignored() == ignored || fetch.state() == before, "what is ignored changes nothing");
    for action in actions {
        assert_eq!(fetch.ignored(), ignored, "what is ignored asks for nothing");
        match action {
            Action::StartRead => {
                assert!(!world.landing && !world.complete, "one read per fetch");
                (world.landing, world.writing) = (true, true);
            }
            Action::StopRead => assert!(world.writing),
            Action::AskVerdict => assert!(world.complete),
            Action::Land => {
                assert!(!world.writing);
                let verdict = event == Event::Verdict(Answer::Valid) && world.complete;
                assert!(verdict || (event == Event::AlreadyHere && !world.landing));
                world.valid = verdict;
                world.landing = false;
                world.ends += 1;
            }
            Action::FreeLanding => {
                assert!(world.landing && !world.writing, "freed under a writer, or twice");
                world.landing = false;
                world.frees += 1;
                assert_eq!(world.frees, 1);
            }
            Action::ReleaseAtProducer(_) => world.releases += 1,
            Action::Recompute => {
                assert_eq!(fetch.policy, LoadFailurePolicy::Recompute);
                world.ends += 1;
            }
            Action::Fail(_) => {
                assert_eq!(fetch.policy, LoadFailurePolicy::Fail);
                world.ends += 1;
            }
            Action::StopHeartbeat => {
                assert!(!world.silenced, "said once");
                world.silenced = true;
            }
        }
    }
    assert_eq!(fetch.heartbeating(), !world.silenced);
    assert_eq!(fetch.holds_landing(), world.landing);
}
