//! An engine's standing after every kind of event.

use super::*;

pub(crate) const TERMS: HealthTerms = HealthTerms {
    breaker: breaker::BreakerTerms {
        failures: 2,
        cool_down: Duration::from_secs(1),
        cool_down_max: Duration::from_secs(8),
    },
    checks: checks::CheckTerms { healthy: 1, unhealthy: 2 },
    check_every: Duration::from_secs(5),
    ejection: Duration::from_secs(30),
    drain: false,
    load_stale: Duration::from_secs(5),
};

#[derive(Clone, Copy, Debug)]
enum Step {
    Completed(Leg),
    Failed(Leg, FailureKind),
    Responded,
    Unresponsive(u64),
    SaidDraining,
    Order(OperatorOrder),
    Eject(Leg),
    Tick,
    Probed(ProbeResult),
    Undialled,
}

const STEPS: [Step; 21] = [
    Step::Completed(Leg::Prefill),
    Step::Completed(Leg::Decode),
    Step::Failed(Leg::Prefill, FailureKind::EngineFault),
    Step::Failed(Leg::Decode, FailureKind::EngineFault),
    Step::Failed(Leg::Decode, FailureKind::Unreachable),
    Step::Failed(Leg::Prefill, FailureKind::Unresponsive),
    Step::Responded,
    Step::Unresponsive(1),
    Step::Unresponsive(2),
    Step::SaidDraining,
    Step::Order(OperatorOrder::Drain),
    Step::Order(OperatorOrder::None),
    Step::Eject(Leg::Decode),
    Step::Tick,
    Step::Probed(ProbeResult::Unresponsive),
    Step::Probed(ProbeResult::Busy),
    Step::Probed(ProbeResult::NotSent),
    Step::Probed(ProbeResult::Unreachable(FailureKind::Unreachable)),
    Step::Probed(ProbeResult::Answered(true)),
    Step::Probed(ProbeResult::Answered(false)),
    Step::Undialled,
];

fn take(health: &mut HealthState, step: Step, now: Time) {
    match step {
        Step::Completed(leg) => health.completed(leg, now, &TERMS),
        Step::Failed(leg, kind) => health.failed(leg, kind, now, &TERMS),
        Step::Responded => health.responded(now, &TERMS),
        Step::Unresponsive(source) => health.unresponsive(Leg::Decode, source, now, &TERMS),
        Step::SaidDraining => health.reported_draining(now),
        Step::Order(order) => health.order(order),
        Step::Eject(leg) => health.eject(leg, now, &TERMS),
        Step::Tick => drop(health.tick(now, || 1.0, &TERMS)),
        Step::Probed(result) => health.record_probe(result, now, &TERMS),
        Step::Undialled => health.suspect(FailureKind::Unresolved),
    }
}

/// Faults have ended: the engine passes a probe and completes a request.
fn recovers(mut health: HealthState, mut now: Time) -> HealthState {
    for _ in 0..100 {
        now = now.after(Duration::from_secs(10));
        if health.tick(now, || 1.0, &TERMS) {
            health.record_probe(ProbeResult::Answered(true), now, &TERMS);
        }
        for leg in [Leg::Prefill, Leg::Decode] {
            if health.standing(leg, &TERMS) <= Standing::Trial {
                health.completed(leg, now, &TERMS);
            }
        }
    }
    health
}

#[test]
fn a_recovered_engine_is_used_after_every_order_of_five_events() {
    let mut seen = std::collections::HashSet::from([HealthState::default()]);
    for second in 0..5 {
        let now = Time::ZERO.after(Duration::from_secs(second));
        let mut next = std::collections::HashSet::new();
        for before in &seen {
            for step in STEPS {
                let mut health = *before;
                take(&mut health, step, now);
                next.insert(health);
            }
        }
        seen = next;
    }
    assert!(seen.len() > 1000, "{}", seen.len());
    for health in seen {
        let back = recovers(health, Time::ZERO.after(Duration::from_secs(5)));
        let expected =
            if health.order == OperatorOrder::Drain { Standing::Draining } else { Standing::Usable };
        for leg in [Leg::Prefill, Leg::Decode] {
            assert_eq!(back.standing(leg, &TERMS), expected, "{health:?}");
        }
    }
}

#[test]
fn a_failure_ejects_one_leg_and_an_unreachable_engine_both() {
    let mut health = HealthState::default();
    for _ in 0..2 {
        health.failed(Leg::Prefill, FailureKind::EngineFault, Time::ZERO, &TERMS);
    }
    assert_eq!(health.standing(Leg::Prefill, &TERMS), Standing::Ejected);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Usable);
    health.failed(Leg::Prefill, FailureKind::Unresponsive, Time::ZERO, &TERMS);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Unresponsive);
}

#[test]
fn an_unresponsive_engine_is_probed_at_once_before_it_is_removed() {
    let both = |health: &HealthState| Leg::BOTH.map(|leg| health.standing(leg, &TERMS));
    let mut health = HealthState::default();
    health.tick(Time::ZERO, || 1.0, &TERMS);
    health.unresponsive(Leg::Decode, 1, Time::ZERO, &TERMS);
    health.unresponsive(Leg::Prefill, 1, Time::ZERO, &TERMS);
    assert_eq!(both(&health), [Standing::Ejected; 2], "the last to be chosen, until it has been asked");
    assert_eq!(health.due(&TERMS), Some(Time::ZERO), "which is at once");
    assert!(health.tick(Time::ZERO, || 1.0, &TERMS), "it is asked");
    assert!(!health.tick(Time::ZERO, || 1.0, &TERMS), "once");
    let mut lives = health;
    lives.record_probe(ProbeResult::Answered(true), Time::ZERO, &TERMS);
    assert_eq!(both(&lives), [Standing::Usable; 2], "it ignored only that one request");
    let mut spoke = health;
    spoke.responded(Time::ZERO, &TERMS);
    spoke.record_probe(ProbeResult::Unresponsive, Time::ZERO, &TERMS);
    assert_eq!(both(&spoke), [Standing::Usable; 2], "another request heard of it meanwhile");
    let mut unresponsive = health;
    unresponsive.record_probe(ProbeResult::Unresponsive, Time::ZERO, &TERMS);
    assert_eq!(both(&unresponsive), [Standing::Unresponsive; 2], "the question had no answer either");
    health.unresponsive(Leg::Decode, 2, Time::ZERO, &TERMS);
    assert_eq!(both(&health), [Standing::Unresponsive; 2], "another source found the same");
}

#[test]
fn a_probe_that_was_not_sent_does_not_change_health() {
    let mut doubted = HealthState::default();
    doubted.tick(Time::ZERO, || 1.0, &TERMS);
    doubted.unresponsive(Leg::Decode, 1, Time::ZERO, &TERMS);
    doubted.tick(Time::ZERO, || 1.0, &TERMS);
    for _ in 0..10 {
        doubted.record_probe(ProbeResult::NotSent, Time::ZERO, &TERMS);
    }
    assert_eq!(doubted.standing(Leg::Decode, &TERMS), Standing::Usable);
    let mut open = HealthState::default();
    open.failed(Leg::Decode, FailureKind::Unreachable, Time::ZERO, &TERMS);
    let later = Time::ZERO.after(Duration::from_secs(3600));
    assert!(open.tick(later, || 1.0, &TERMS), "it is to be asked");
    open.record_probe(ProbeResult::NotSent, later, &TERMS);
    assert_eq!(open.standing(Leg::Decode, &TERMS), Standing::Ejected, "and asked again later");
    assert!(open.due(&TERMS).is_some_and(|due| due > later));
}

#[test]
fn one_failed_connection_demotes_the_engine_and_a_second_ejects_it() {
    let standing = |health: &HealthState| health.standing(Leg::Decode, &TERMS);
    let mut health = HealthState::default();
    health.tick(Time::ZERO, || 1.0, &TERMS);
    health.suspect(FailureKind::Unreachable);
    assert_eq!(
        (standing(&health), health.due(&TERMS)),
        (Standing::Ejected, Some(Time::ZERO)),
        "it is asked at once"
    );
    assert!(health.tick(Time::ZERO, || 1.0, &TERMS));
    let mut answers = health;
    answers.record_probe(ProbeResult::Answered(true), Time::ZERO, &TERMS);
    assert_eq!(
        (standing(&answers), answers.reasons(&TERMS)),
        (Standing::Usable, vec![]),
        "one packet was lost"
    );
    let mut flows = health;
    flows.record_probe(ProbeResult::Busy, Time::ZERO, &TERMS);
    assert_eq!(standing(&flows), Standing::Usable, "it works on what it has");
    health.record_probe(ProbeResult::Unreachable(FailureKind::Unreachable), Time::ZERO, &TERMS);
    assert_eq!((standing(&health), health.reasons(&TERMS)), (Standing::Ejected, vec!["unreachable"]));
    // The same where a probe finds it first.
    let mut checked = HealthState::default();
    checked.tick(Time::ZERO, || 1.0, &TERMS);
    checked.record_probe(ProbeResult::Unreachable(FailureKind::Unresolved), Time::ZERO, &TERMS);
    assert!(checked.tick(Time::ZERO, || 1.0, &TERMS), "it is asked again at once");
    checked.record_probe(ProbeResult::Unreachable(FailureKind::Unresolved), Time::ZERO, &TERMS);
    assert_eq!(checked.reasons(&TERMS), ["its name has no address", "fails its health checks"]);
}

#[test]
fn a_working_engine_with_unanswered_probes_stays_usable() {
    let mut health = HealthState::default();
    for second in 0..100 {
        let now = Time::ZERO.after(Duration::from_secs(second * 10));
        health.tick(now, || 1.0, &TERMS);
        health.record_probe(ProbeResult::Busy, now, &TERMS);
    }
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Usable);
    for _ in 0..2 {
        health.record_probe(ProbeResult::Unresponsive, Time::ZERO, &TERMS);
    }
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Ejected, "nothing comes of it");
}

#[test]
fn an_answer_in_one_leg_shows_that_the_engine_is_there_for_both() {
    let mut health = HealthState::default();
    health.failed(Leg::Decode, FailureKind::Unresponsive, Time::ZERO, &TERMS);
    assert_eq!(health.reasons_of(Leg::Prefill, &TERMS), ["silent"]);
    health.responded(Time::ZERO, &TERMS);
    assert_eq!((health.reasons(&TERMS), health.is_clean(Leg::Prefill)), (vec![], true));
    for _ in 0..2 {
        health.failed(Leg::Prefill, FailureKind::EngineFault, Time::ZERO, &TERMS);
    }
    assert!(health.reasons_of(Leg::Decode, &TERMS).is_empty(), "a leg's log lines name what is the leg's");
}

#[test]
fn an_operator_order_overrides_the_configuration() {
    let drained = HealthTerms { drain: true, ..TERMS };
    let mut health = HealthState::default();
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining);
    health.order(OperatorOrder::Undrain);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Usable);
    health.order(OperatorOrder::Drain);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Draining);
    assert_eq!(health.reasons(&TERMS), ["drained by an operator"]);
    health.order(OperatorOrder::Undrain);
    health.reported_draining(Time::ZERO);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining, "its own word is newer");
    health.order(OperatorOrder::Undrain);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Usable);
    health.forget_obsolete_order(&drained);
    assert_eq!(health.current_order(), OperatorOrder::Undrain);
    health.forget_obsolete_order(&TERMS);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining, "drained again");
}

#[test]
fn each_ejection_in_a_row_is_longer_and_a_quiet_interval_makes_the_next_one_shorter() {
    let mut health = HealthState::default();
    let mut lasted = Vec::new();
    let mut now = Time::ZERO;
    for _ in 0..3 {
        health.eject(Leg::Decode, now, &TERMS);
        let until = health.legs[Leg::Decode as usize].ejected_until.expect("it is ejected");
        lasted.push(until.since(now).as_secs());
        now = until;
        health.tick(now, || 1.0, &TERMS);
        assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Usable);
    }
    assert_eq!(lasted, [30, 60, 90]);
    (0..3).for_each(|_| health.reduce_ejections(Leg::Decode));
    health.eject(Leg::Decode, now, &TERMS);
    let until = health.legs[Leg::Decode as usize].ejected_until;
    assert_eq!(until, Some(now.after(Duration::from_secs(30))));
}
