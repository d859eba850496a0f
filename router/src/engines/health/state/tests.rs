//! An engine's standing after every kind of event.

use super::*;

pub(crate) const TERMS: Terms = Terms {
    breaker: breaker::Terms {
        failures: 2,
        cool_down: Duration::from_secs(1),
        cool_down_max: Duration::from_secs(8),
    },
    checks: checks::Terms { healthy: 1, unhealthy: 2 },
    check_every: Duration::from_secs(5),
    ejection: Duration::from_secs(30),
    drain: false,
    load_stale: Duration::from_secs(5),
};

#[derive(Clone, Copy, Debug)]
enum Step {
    Answered(Leg),
    Failed(Leg, Sign),
    Spoke,
    Deaf(u64),
    SaidDraining,
    Order(Order),
    Eject(Leg),
    Tick,
    Told(Pulse),
    Undialled,
}

const STEPS: [Step; 21] = [
    Step::Answered(Leg::Prefill),
    Step::Answered(Leg::Decode),
    Step::Failed(Leg::Prefill, Sign::Trouble),
    Step::Failed(Leg::Decode, Sign::Trouble),
    Step::Failed(Leg::Decode, Sign::Unreachable),
    Step::Failed(Leg::Prefill, Sign::Silent),
    Step::Spoke,
    Step::Deaf(1),
    Step::Deaf(2),
    Step::SaidDraining,
    Step::Order(Order::Drain),
    Step::Order(Order::None),
    Step::Eject(Leg::Decode),
    Step::Tick,
    Step::Told(Pulse::Silent),
    Step::Told(Pulse::Busy),
    Step::Told(Pulse::Unasked),
    Step::Told(Pulse::Unreachable(Sign::Unreachable)),
    Step::Told(Pulse::Answered(true)),
    Step::Told(Pulse::Answered(false)),
    Step::Undialled,
];

fn take(health: &mut EngineHealth, step: Step, now: Time) {
    match step {
        Step::Answered(leg) => health.answered(leg, now, &TERMS),
        Step::Failed(leg, sign) => health.failed(leg, sign, now, &TERMS),
        Step::Spoke => health.spoke(now, &TERMS),
        Step::Deaf(source) => health.deaf(Leg::Decode, source, now, &TERMS),
        Step::SaidDraining => health.said_draining(now),
        Step::Order(order) => health.order(order),
        Step::Eject(leg) => health.eject(leg, now, &TERMS),
        Step::Tick => drop(health.tick(now, || 1.0, &TERMS)),
        Step::Told(pulse) => health.told(pulse, now, &TERMS),
        Step::Undialled => health.doubt(Sign::Nameless),
    }
}

/// Faults have ended: it is asked, says that it lives, and answers.
fn recovers(mut health: EngineHealth, mut now: Time) -> EngineHealth {
    for _ in 0..100 {
        now = now.after(Duration::from_secs(10));
        if health.tick(now, || 1.0, &TERMS) {
            health.told(Pulse::Answered(true), now, &TERMS);
        }
        for leg in [Leg::Prefill, Leg::Decode] {
            if health.standing(leg, &TERMS) <= Standing::Trial {
                health.answered(leg, now, &TERMS);
            }
        }
    }
    health
}

#[test]
fn after_every_order_of_five_events_an_engine_that_works_again_is_used_again() {
    let mut seen = std::collections::HashSet::from([EngineHealth::default()]);
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
        let expected = if health.order == Order::Drain { Standing::Draining } else { Standing::Usable };
        for leg in [Leg::Prefill, Leg::Decode] {
            assert_eq!(back.standing(leg, &TERMS), expected, "{health:?}");
        }
    }
}

#[test]
fn trouble_of_one_leg_leaves_the_other_alone_and_an_engine_that_is_gone_is_gone_for_both() {
    let mut health = EngineHealth::default();
    for _ in 0..2 {
        health.failed(Leg::Prefill, Sign::Trouble, Time::ZERO, &TERMS);
    }
    assert_eq!(health.standing(Leg::Prefill, &TERMS), Standing::Out);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Usable);
    health.failed(Leg::Prefill, Sign::Silent, Time::ZERO, &TERMS);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Silent);
}

#[test]
fn an_engine_that_is_deaf_to_one_request_is_asked_before_it_is_taken_from_everybody() {
    let both = |health: &EngineHealth| Leg::BOTH.map(|leg| health.standing(leg, &TERMS));
    let mut health = EngineHealth::default();
    health.tick(Time::ZERO, || 1.0, &TERMS);
    health.deaf(Leg::Decode, 1, Time::ZERO, &TERMS);
    health.deaf(Leg::Prefill, 1, Time::ZERO, &TERMS);
    assert_eq!(both(&health), [Standing::Out; 2], "the last to be chosen, until it has been asked");
    assert_eq!(health.due(&TERMS), Some(Time::ZERO), "which is at once");
    assert!(health.tick(Time::ZERO, || 1.0, &TERMS), "it is asked");
    assert!(!health.tick(Time::ZERO, || 1.0, &TERMS), "once");
    let mut lives = health;
    lives.told(Pulse::Answered(true), Time::ZERO, &TERMS);
    assert_eq!(both(&lives), [Standing::Usable; 2], "it was deaf to that one request");
    let mut spoke = health;
    spoke.spoke(Time::ZERO, &TERMS);
    spoke.told(Pulse::Silent, Time::ZERO, &TERMS);
    assert_eq!(both(&spoke), [Standing::Usable; 2], "another request heard of it meanwhile");
    let mut mute = health;
    mute.told(Pulse::Silent, Time::ZERO, &TERMS);
    assert_eq!(both(&mute), [Standing::Silent; 2], "the question had no answer either");
    health.deaf(Leg::Decode, 2, Time::ZERO, &TERMS);
    assert_eq!(both(&health), [Standing::Silent; 2], "another source found the same");
}

#[test]
fn a_question_that_could_not_be_asked_says_nothing_of_the_engine() {
    let mut doubted = EngineHealth::default();
    doubted.tick(Time::ZERO, || 1.0, &TERMS);
    doubted.deaf(Leg::Decode, 1, Time::ZERO, &TERMS);
    doubted.tick(Time::ZERO, || 1.0, &TERMS);
    for _ in 0..10 {
        doubted.told(Pulse::Unasked, Time::ZERO, &TERMS);
    }
    assert_eq!(doubted.standing(Leg::Decode, &TERMS), Standing::Usable);
    let mut open = EngineHealth::default();
    open.failed(Leg::Decode, Sign::Unreachable, Time::ZERO, &TERMS);
    let later = Time::ZERO.after(Duration::from_secs(3600));
    assert!(open.tick(later, || 1.0, &TERMS), "it is to be asked");
    open.told(Pulse::Unasked, later, &TERMS);
    assert_eq!(open.standing(Leg::Decode, &TERMS), Standing::Out, "and asked again later");
    assert!(open.due(&TERMS).is_some_and(|due| due > later));
}

#[test]
fn one_connection_that_could_not_be_made_is_a_doubt_and_a_second_takes_the_engine_out() {
    let standing = |health: &EngineHealth| health.standing(Leg::Decode, &TERMS);
    let mut health = EngineHealth::default();
    health.tick(Time::ZERO, || 1.0, &TERMS);
    health.doubt(Sign::Unreachable);
    assert_eq!(
        (standing(&health), health.due(&TERMS)),
        (Standing::Out, Some(Time::ZERO)),
        "it is asked at once"
    );
    assert!(health.tick(Time::ZERO, || 1.0, &TERMS));
    let mut answers = health;
    answers.told(Pulse::Answered(true), Time::ZERO, &TERMS);
    assert_eq!(
        (standing(&answers), answers.reasons(&TERMS)),
        (Standing::Usable, vec![]),
        "one packet was lost"
    );
    let mut flows = health;
    flows.told(Pulse::Busy, Time::ZERO, &TERMS);
    assert_eq!(standing(&flows), Standing::Usable, "it works on what it has");
    health.told(Pulse::Unreachable(Sign::Unreachable), Time::ZERO, &TERMS);
    assert_eq!((standing(&health), health.reasons(&TERMS)), (Standing::Out, vec!["unreachable"]));
    // The same where a question of the router's own finds it first.
    let mut checked = EngineHealth::default();
    checked.tick(Time::ZERO, || 1.0, &TERMS);
    checked.told(Pulse::Unreachable(Sign::Nameless), Time::ZERO, &TERMS);
    assert!(checked.tick(Time::ZERO, || 1.0, &TERMS), "it is asked again at once");
    checked.told(Pulse::Unreachable(Sign::Nameless), Time::ZERO, &TERMS);
    assert_eq!(checked.reasons(&TERMS), ["its name has no address", "fails its health checks"]);
}

#[test]
fn an_engine_that_works_and_leaves_questions_unanswered_stays_usable() {
    let mut health = EngineHealth::default();
    for second in 0..100 {
        let now = Time::ZERO.after(Duration::from_secs(second * 10));
        health.tick(now, || 1.0, &TERMS);
        health.told(Pulse::Busy, now, &TERMS);
    }
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Usable);
    for _ in 0..2 {
        health.told(Pulse::Silent, Time::ZERO, &TERMS);
    }
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Out, "nothing comes of it");
}

#[test]
fn an_answer_in_one_leg_shows_that_the_engine_is_there_for_both() {
    let mut health = EngineHealth::default();
    health.failed(Leg::Decode, Sign::Silent, Time::ZERO, &TERMS);
    assert_eq!(health.reasons_of(Leg::Prefill, &TERMS), ["silent"]);
    health.spoke(Time::ZERO, &TERMS);
    assert_eq!((health.reasons(&TERMS), health.is_clean(Leg::Prefill)), (vec![], true));
    for _ in 0..2 {
        health.failed(Leg::Prefill, Sign::Trouble, Time::ZERO, &TERMS);
    }
    assert!(health.reasons_of(Leg::Decode, &TERMS).is_empty(), "a leg's log lines name what is the leg's");
}

#[test]
fn an_operators_word_goes_before_the_configurations() {
    let drained = Terms { drain: true, ..TERMS };
    let mut health = EngineHealth::default();
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining);
    health.order(Order::Undrain);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Usable);
    health.order(Order::Drain);
    assert_eq!(health.standing(Leg::Decode, &TERMS), Standing::Draining);
    assert_eq!(health.reasons(&TERMS), ["drained by an operator"]);
    health.order(Order::Undrain);
    health.said_draining(Time::ZERO);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining, "its own word is newer");
    health.order(Order::Undrain);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Usable);
    health.forget_spent_order(&drained);
    assert_eq!(health.ordered(), Order::Undrain);
    health.forget_spent_order(&TERMS);
    assert_eq!(health.standing(Leg::Decode, &drained), Standing::Draining, "drained again");
}

#[test]
fn each_ejection_in_a_row_is_longer_and_a_quiet_interval_makes_the_next_one_shorter() {
    let mut health = EngineHealth::default();
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
    (0..3).for_each(|_| health.behaved(Leg::Decode));
    health.eject(Leg::Decode, now, &TERMS);
    let until = health.legs[Leg::Decode as usize].ejected_until;
    assert_eq!(until, Some(now.after(Duration::from_secs(30))));
}
