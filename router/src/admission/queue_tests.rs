//! Tests of the fair queue's invariants.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

impl FairQueue {
    /// Adds a request that may use any engine.
    fn join(&mut self, claim: Claim, bounds: &QueueConfig) -> Result<QueueEntry, QueueBound> {
        self.enter(claim, WaitOptions::default(), bounds)
    }
}

fn bounds() -> QueueConfig {
    QueueConfig { requests: 10_000, tenant_requests: 10_000, ..QueueConfig::default() }
}

fn claim(tenant: u32) -> Claim {
    Claim { tenant: Some(TenantId(tenant)), weight: 1, priority: Priority::Normal, bytes: 1, cost: 1 }
}

/// Serves so many requests and returns their tenants, in order.
fn serve(queue: &mut FairQueue, times: usize, terms: &QueueConfig) -> Vec<u32> {
    let mut served = Vec::new();
    for _ in 0..times {
        let Some(entry) = queue.next() else { break };
        served.push(queue.entries[&entry].0.tenant.expect("tests name tenants").0);
        queue.record_dispatch(entry, terms);
    }
    served
}

fn fill(queue: &mut FairQueue, times: usize, claim: Claim, terms: &QueueConfig) {
    for _ in 0..times {
        queue.join(claim, terms).unwrap();
    }
}

#[test]
fn a_thousand_queued_requests_delay_another_tenant_by_one_turn() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    for _ in 0..1000 {
        queue.join(claim(1), &terms).unwrap();
    }
    serve(&mut queue, 10, &terms);
    queue.join(claim(2), &terms).unwrap();
    assert!(serve(&mut queue, 2, &terms).contains(&2));
    assert_eq!(queue.len(), 1000 - 10 - 1);
}

#[test]
fn one_tenant_alone_is_first_come_first_served() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    let entries: Vec<_> = (0..50).map(|_| queue.join(claim(1), &terms).unwrap()).collect();
    for entry in entries {
        assert_eq!(queue.next(), Some(entry));
        queue.record_dispatch(entry, &terms);
    }
    assert_eq!(queue.next(), None);
}

#[test]
fn tenants_share_by_weight_and_by_cost() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    for _ in 0..900 {
        queue.join(Claim { weight: 3, ..claim(1) }, &terms).unwrap();
        queue.join(claim(2), &terms).unwrap();
        queue.join(Claim { cost: 2, ..claim(3) }, &terms).unwrap();
    }
    let served = serve(&mut queue, 900, &terms);
    let of = |tenant| served.iter().filter(|t| **t == tenant).count();
    // In units of cost: 3 : 1 : 1, so in requests 3 : 1 : 1/2.
    for (tenant, share) in [(1, 600), (2, 200), (3, 100)] {
        assert!(of(tenant).abs_diff(share) <= 2, "{tenant}: {}", of(tenant));
    }
}

#[test]
fn priorities_share_by_weight_and_none_starves() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    for _ in 0..2100 {
        for (tenant, priority) in [(1, Priority::High), (2, Priority::Normal), (3, Priority::Low)] {
            queue.join(Claim { priority, ..claim(tenant) }, &terms).unwrap();
        }
    }
    let served = serve(&mut queue, 2100, &terms);
    let of = |tenant| served.iter().filter(|t| **t == tenant).count();
    assert!(of(1).abs_diff(1600) <= 2 && of(2).abs_diff(400) <= 2 && of(3).abs_diff(100) <= 2);
    assert_eq!(served[0], 1, "of equals the more urgent one is first");
}

#[test]
fn an_idle_tenant_accumulates_no_share() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    fill(&mut queue, 500, claim(1), &terms);
    serve(&mut queue, 400, &terms);
    fill(&mut queue, 100, claim(2), &terms);
    let served = serve(&mut queue, 20, &terms);
    assert!(served.iter().filter(|t| **t == 2).count() <= 11, "{served:?}");
}

#[test]
fn a_returning_tenant_gets_no_more_than_its_share() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    fill(&mut queue, 500, claim(1), &terms);
    let mut of_two = 0;
    // One request at a time: the queue is empty after each, and the tenant's tag must be remembered.
    for _ in 0..100 {
        queue.join(Claim { cost: 5, ..claim(2) }, &terms).unwrap();
        of_two += serve(&mut queue, 2, &terms).iter().filter(|t| **t == 2).count();
        let left: Vec<_> = queue.entries.iter().filter(|(_, (c, _))| c.cost == 5).map(|(p, _)| *p).collect();
        left.into_iter().for_each(|entry| queue.leave(entry));
    }
    assert!(of_two <= 40, "a fifth of the cost each, but {of_two} of 100 rounds");
}

#[test]
fn a_request_that_leaves_the_queue_costs_its_tenant_nothing() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    fill(&mut queue, 10, claim(1), &terms);
    let gone: Vec<_> = (0..100).map(|_| queue.join(claim(2), &terms).unwrap()).collect();
    gone.into_iter().for_each(|entry| queue.leave(entry));
    queue.join(claim(2), &terms).unwrap();
    assert!(serve(&mut queue, 2, &terms).contains(&2));
}

#[test]
fn every_queue_bound_holds_and_is_named() {
    let terms = QueueConfig {
        requests: 3,
        bytes: 100,
        tenant_requests: 2,
        tenant_bytes: 60,
        ..QueueConfig::default()
    };
    let mut queue = FairQueue::default();
    assert_eq!(queue.join(Claim { bytes: 61, ..claim(1) }, &terms), Err(QueueBound::Tenant));
    queue.join(Claim { bytes: 60, ..claim(1) }, &terms).unwrap();
    assert_eq!(queue.join(claim(1), &terms), Err(QueueBound::Tenant));
    assert_eq!(queue.join(Claim { bytes: 41, ..claim(2) }, &terms), Err(QueueBound::Total));
    queue.join(claim(2), &terms).unwrap();
    queue.join(claim(2), &terms).unwrap();
    assert_eq!(queue.join(claim(3), &terms), Err(QueueBound::Total));
    serve(&mut queue, 3, &terms);
    queue.join(Claim { tenant: None, bytes: 100, ..claim(0) }, &terms).unwrap();
    assert_eq!(queue.len(), 1, "who is not known has no bound but the total");
}

#[test]
fn the_requests_ahead_are_estimated_by_turns() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    fill(&mut queue, 1000, claim(1), &terms);
    assert_eq!(queue.ahead_of(&claim(1), &WaitOptions::default(), &terms), 1000);
    assert_eq!(queue.ahead_of(&claim(2), &WaitOptions::default(), &terms), 1);
    let urgent = Claim { priority: Priority::High, ..claim(3) };
    assert_eq!(queue.ahead_of(&urgent, &WaitOptions::default(), &terms), 1);
    let batch = Claim { priority: Priority::Low, ..claim(3) };
    assert_eq!(queue.ahead_of(&batch, &WaitOptions::default(), &terms), 4);
}

fn without(engines: &[u32]) -> WaitOptions {
    WaitOptions { excluded: engines.to_vec(), ahead: false }
}

fn ahead(engines: &[u32]) -> WaitOptions {
    WaitOptions { ahead: true, ..without(engines) }
}

#[test]
fn a_full_lane_delays_only_requests_for_its_engines() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    let retry = queue.enter(claim(1), without(&[1]), &terms).unwrap();
    let narrower = queue.enter(claim(1), without(&[1, 2]), &terms).unwrap();
    let other = queue.enter(claim(1), without(&[2]), &terms).unwrap();
    let any = queue.join(claim(1), &terms).unwrap();
    assert_eq!(queue.next(), Some(retry));
    let candidates = narrow_candidates(None, &vec![1]);
    assert_eq!(queue.next_eligible(Some(&candidates)), Some(other), "engine 1 may have room for it");
    queue.leave(other);
    assert_eq!(queue.next_eligible(Some(&candidates)), Some(any));
    let candidates = narrow_candidates(Some(candidates), &vec![2]);
    assert!(candidates.is_empty(), "2 is full for the first, and 1 for the second");
    assert_eq!(queue.next_eligible(Some(&candidates)), None);
    assert_eq!(narrow_candidates(Some(vec![1, 2, 5]), &vec![2, 3, 5]), [2, 5]);
    queue.leave(retry);
    assert_eq!(queue.next(), Some(narrower), "its lane alone was left out");
}

#[test]
fn a_retry_with_a_finished_prefill_goes_first_without_a_second_turn() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    let urgent = Claim { priority: Priority::High, ..claim(1) };
    let first = queue.join(urgent, &terms).unwrap();
    let low = Claim { priority: Priority::Low, cost: 1000, ..claim(2) };
    let again = queue.enter(low, ahead(&[7]), &terms).unwrap();
    let later = queue.enter(claim(1), ahead(&[8]), &terms).unwrap();
    assert_eq!(queue.next(), Some(again), "before every priority");
    assert_eq!(queue.next_eligible(Some(&vec![7])), Some(later));
    queue.leave(later);
    assert_eq!(queue.next_eligible(Some(&vec![7])), Some(first));
    let later = queue.enter(claim(1), ahead(&[8]), &terms).unwrap();
    assert_eq!(queue.ahead_of(&urgent, &WaitOptions::default(), &terms), 3);
    assert_eq!(queue.ahead_of(&urgent, &ahead(&[]), &terms), 2);
    queue.record_dispatch(again, &terms);
    queue.record_dispatch(later, &terms);
    // If its 1,000 tokens were charged, its priority would wait for 4,000 requests of the other.
    fill(&mut queue, 20, claim(3), &terms);
    queue.join(Claim { cost: 1, ..low }, &terms).unwrap();
    queue.leave(first);
    assert!(serve(&mut queue, 6, &terms).contains(&2));
}

#[test]
fn prioritized_retries_have_separate_bounds() {
    let terms = QueueConfig { requests: 2, bytes: 100, tenant_requests: 1, ..QueueConfig::default() };
    let mut queue = FairQueue::default();
    queue.join(claim(1), &terms).unwrap();
    queue.join(claim(2), &terms).unwrap();
    queue.enter(claim(1), ahead(&[]), &terms).unwrap();
    queue.enter(claim(1), ahead(&[]), &terms).unwrap();
    assert_eq!(queue.enter(claim(3), ahead(&[]), &terms), Err(QueueBound::Total));
    assert_eq!(queue.join(claim(3), &terms), Err(QueueBound::Total));
    assert_eq!(queue.len(), 4);
    while let Some(entry) = queue.next() {
        queue.leave(entry);
    }
    assert_eq!((queue.total_ahead, queue.total), (QueuedTotals::default(), QueuedTotals::default()));
    assert!(queue.ahead.is_empty());
}

#[test]
fn tenants_share_what_is_open_to_them_while_a_lane_is_full() {
    let (mut queue, terms) = (FairQueue::default(), bounds());
    for _ in 0..100 {
        queue.enter(claim(1), without(&[1]), &terms).unwrap();
        queue.join(claim(1), &terms).unwrap();
        queue.join(claim(2), &terms).unwrap();
    }
    let mut served = [0; 3];
    for _ in 0..100 {
        let entry = queue.next_eligible(Some(&vec![1])).unwrap();
        assert!(queue.entries[&entry].1.excluded.is_empty());
        served[queue.entries[&entry].0.tenant.unwrap().0 as usize] += 1;
        queue.record_dispatch(entry, &terms);
    }
    assert_eq!(served, [0, 50, 50], "in equal parts");
}

#[derive(Clone, Debug)]
enum Step {
    Join(u32, usize, u64, WaitOptions),
    Serve(Option<Lane>),
    Leave(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lane = || proptest::sample::subsequence(vec![1_u32, 2, 3], 0..=3);
    let options = (lane(), prop::bool::weighted(0.2))
        .prop_map(|(without, ahead)| WaitOptions { excluded: without, ahead });
    let step = prop_oneof![
        4 => (0..5_u32, 0..3_usize, 1..50_u64, options).prop_map(|(t, p, c, w)| Step::Join(t, p, c, w)),
        3 => prop::option::of(lane()).prop_map(Step::Serve),
        1 => (0..100_usize).prop_map(Step::Leave),
    ];
    proptest::collection::vec(step, 1..400)
}

proptest! {
    /// After any steps: counts are right, all waiting requests are served in the end, and no state remains.
    #[test]
    fn queue_counts_stay_consistent_and_end_at_zero(steps in steps()) {
        let terms = QueueConfig { requests: 40, tenant_requests: 15, bytes: 1 << 20, ..QueueConfig::default() };
        let mut queue = FairQueue::default();
        let mut waiting: BTreeMap<QueueEntry, (Claim, WaitOptions)> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Join(tenant, priority, cost, options) => {
                    let claim = Claim { priority: Priority::ALL[priority], cost, bytes: 7, ..claim(tenant) };
                    let alike = waiting.values().filter(|(_, w)| w.ahead == options.ahead);
                    let of_tenant = alike.clone().filter(|(c, _)| c.tenant == claim.tenant).count();
                    match queue.enter(claim, options.clone(), &terms) {
                        Ok(entry) => { waiting.insert(entry, (claim, options)); }
                        Err(QueueBound::Total) => prop_assert_eq!(alike.count(), 40),
                        Err(QueueBound::Tenant) => prop_assert_eq!(of_tenant, 15),
                    }
                }
                Step::Serve(candidates) => {
                    let has = |candidates: &Lane, w: &WaitOptions| candidates.iter().any(|engine| !w.excluded.contains(engine));
                    let is_open = |w: &WaitOptions| candidates.as_ref().is_none_or(|candidates| has(candidates, w));
                    match queue.next_eligible(candidates.as_ref()) {
                        Some(entry) => {
                            let (_, options) = waiting.remove(&entry).expect("one that waits");
                            prop_assert!(is_open(&options));
                            let goes_ahead = |w: &WaitOptions| w.ahead && is_open(w);
                            prop_assert!(options.ahead || !waiting.values().any(|(_, w)| goes_ahead(w)));
                            queue.record_dispatch(entry, &terms);
                            queue.record_dispatch(entry, &terms);
                        }
                        None => prop_assert!(!waiting.values().any(|(_, w)| is_open(w)), "who can be served is"),
                    }
                }
                Step::Leave(n) => {
                    if let Some(&entry) = waiting.keys().nth(n) {
                        waiting.remove(&entry);
                        queue.leave(entry);
                        queue.leave(entry);
                    }
                }
            }
            prop_assert_eq!(queue.len(), waiting.len());
            for priority in Priority::ALL {
                let of = waiting.values().filter(|(c, w)| c.priority == priority && !w.ahead).count();
                prop_assert_eq!(queue.waiting(priority), of);
            }
        }
        while let Some(entry) = queue.next() {
            queue.record_dispatch(entry, &terms);
            prop_assert!(waiting.remove(&entry).is_some());
        }
        prop_assert!(waiting.is_empty() && queue.tenant_totals.is_empty() && queue.entries.is_empty());
        prop_assert!(queue.classes.iter().all(|c| c.flows.is_empty() && c.ahead.is_empty() && c.ready.is_empty()));
        prop_assert!(queue.ahead.is_empty() && queue.total_ahead == QueuedTotals::default());
    }

    /// Tenants that wait all the time never differ by more than one of their largest requests each.
    #[test]
    fn service_never_lags_behind_the_share(costs in proptest::collection::vec(1..100_u64, 3), turns in 10..300_usize) {
        let (mut queue, terms) = (FairQueue::default(), bounds());
        let join = |queue: &mut FairQueue, tenant: usize| {
            queue.join(Claim { cost: costs[tenant], ..claim(tenant as u32) }, &terms).unwrap()
        };
        for tenant in 0..3 { join(&mut queue, tenant); join(&mut queue, tenant); }
        let mut got = [0_u64; 3];
        for _ in 0..turns {
            let tenant = serve(&mut queue, 1, &terms)[0] as usize;
            got[tenant] += costs[tenant];
            join(&mut queue, tenant);
            for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                prop_assert!(got[a].abs_diff(got[b]) <= costs[a] + costs[b], "{:?} {:?}", got, costs);
            }
        }
    }
}
