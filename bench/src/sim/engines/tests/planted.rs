//! Every fault has the effect of its name, and a fault that is not set has none.

use super::*;

fn fleet(dialect: Dialect, fault: Fault, engine: EnginePlan) -> TestFleet {
    TestFleet::of(FleetPlan::new(1, 1, EnginePlan { dialect, ..engine }).with(fault.into()))
}

fn computes_for_a_while() -> EnginePlan {
    EnginePlan {
        prefill_rate: 3_200,
        step_tokens: 16,
        decode_step: Duration::from_millis(5),
        lease: Duration::from_millis(400),
        ..EnginePlan::default()
    }
}

#[tokio::test]
async fn a_planted_missing_prefill_abort_computes_and_leases_after_the_cancel() {
    let fleet = fleet(Dialect::Vllm, Fault::NeverAbortsPrefill, computes_for_a_while());
    let long = first_leg(&ask(&prompt(1, 100), 1, "left"));
    let caller = TestCaller::post(fleet.at(Role::Prefill), "/v1/completions", &long).await;
    fleet.event(Role::Prefill, "left", "started").await;
    caller.leaves(HangUp::Fin);
    assert_eq!(fleet.event(Role::Prefill, "left", "lease_ended").await["reason"], "lease_expired");
    assert!(!fleet.kinds(Role::Prefill, "left").contains(&"abort".to_owned()));
    fleet.settled().await;
}

#[tokio::test]
async fn a_planted_missing_decode_abort_generates_to_the_last_token() {
    let fleet = fleet(Dialect::Baton, Fault::NeverAbortsDecode, computes_for_a_while());
    let mut streamed = ask(&prompt(1, 10), 40, "left");
    streamed["stream"] = json!(true);
    let mut caller = TestCaller::post(fleet.at(Role::Decode), "/v1/completions", &streamed).await;
    caller.reads_until("data: ").await;
    caller.leaves(HangUp::Rst);
    let ended = fleet.event(Role::Decode, "left", "ended").await;
    assert_eq!((&ended["outcome"], &ended["generated"]), (&json!("length"), &json!(40)));
    fleet.settled().await;
}

#[tokio::test]
async fn a_planted_stranding_gap_replies_released_and_keeps_the_blocks() {
    let fleet = fleet(
        Dialect::Baton,
        Fault::StrandsGap,
        EnginePlan { lease: Duration::from_millis(300), ..EnginePlan::instant() },
    );
    let second = fleet.open_lease(&ask(&prompt(1, 40), 5, "mine")).await;
    let release = json!({"handle": second["kv_transfer_params"]["remote_handle"], "reason": "client_gone"});
    let released = fleet.post(Role::Prefill, "/kv/release", &release).await.expect("a verb");
    assert_eq!(released["result"], "released");
    assert_eq!(fleet.usage(Role::Prefill).leased, 3);
    assert_eq!(fleet.event(Role::Prefill, "mine", "lease_ended").await["reason"], "lease_expired");
}

#[tokio::test]
async fn blocks_that_are_freed_twice_are_shared_and_add_up_to_too_many() {
    let fleet = fleet(Dialect::Baton, Fault::DoubleFree, EnginePlan::instant());
    let asks: Vec<_> = (1..3).map(|number| ask(&prompt(number, 40), 20, &format!("n{number}"))).collect();
    let mut right = Vec::new();
    for ask in &asks {
        right.push(text(&fleet.complete(Role::Decode, ask).await));
    }
    let cancelled = fleet.open_lease(&ask(&prompt(9, 40), 5, "cancelled")).await;
    let release =
        json!({"handle": cancelled["kv_transfer_params"]["remote_handle"], "reason": "client_gone"});
    fleet.post(Role::Prefill, "/kv/release", &release).await.expect("a verb");
    let pool::PoolUsage { total, free, .. } = fleet.usage(Role::Prefill);
    assert_eq!(free, total + 3);
    // The next two requests get the same blocks: the first is read as the second.
    let (one, other) = (fleet.open_lease(&asks[0]).await, fleet.open_lease(&asks[1]).await);
    assert_ne!(text(&fleet.complete(Role::Decode, &one).await), right[0]);
    assert_eq!(text(&fleet.complete(Role::Decode, &other).await), right[1]);
}

#[tokio::test]
async fn a_planted_early_read_completion_reads_blocks_of_another_prompt() {
    for dialect in [Dialect::Baton, Dialect::Vllm] {
        let fleet = fleet(dialect, Fault::StaleBlocks, EnginePlan::instant());
        let ask = ask(&prompt(1, 40), 20, "mine");
        let right = text(&fleet.complete(Role::Decode, &ask).await);
        let second = fleet.open_lease(&ask).await;
        let decode = fleet.complete(Role::Decode, &second);
        let reuse = async {
            fleet.event(Role::Prefill, "mine", "freed").await;
            fleet.open_lease(&super::ask(&prompt(2, 40), 20, "other")).await;
        };
        let (wrong, ()) = tokio::join!(decode, reuse);
        assert_ne!(text(&wrong), right);
        assert_eq!(fleet.event(Role::Decode, "mine", "fetched").await["result"], "landed");
    }
}

#[tokio::test]
async fn a_planted_abort_stall_delays_every_other_request() {
    let stalls = Fault::StallsBystanders(Duration::from_millis(300));
    let fleet = fleet(Dialect::Baton, stalls, computes_for_a_while());
    let long = first_leg(&ask(&prompt(1, 400), 1, "uncancelled"));
    let _uncancelled = TestCaller::post(fleet.at(Role::Prefill), "/v1/completions", &long).await;
    fleet.event(Role::Prefill, "uncancelled", "computed").await;
    let cancelled =
        TestCaller::post(fleet.at(Role::Prefill), "/v1/completions", &first_leg(&ask("x", 1, "cancelled")))
            .await;
    fleet.event(Role::Prefill, "cancelled", "queued").await;
    cancelled.leaves(HangUp::Fin);
    let at = |event: &Value| event["at_us"].as_u64().expect("a time");
    let abort = at(&fleet.event(Role::Prefill, "cancelled", "abort").await);
    let next = eventually("a step after it", || {
        fleet.events(Role::Prefill, "uncancelled").iter().map(at).find(|at| *at > abort)
    });
    let pause = next.await - abort;
    assert!(pause >= 290_000, "{pause} µs");
}

#[tokio::test]
async fn a_planted_share_is_refused_and_a_killed_engine_is_unreachable() {
    let plan = EnginePlan { dialect: Dialect::Baton, ..EnginePlan::instant() };
    let refuses = FleetPlan::new(1, 1, plan.clone()).with(Fault::Refuses(0.5).into());
    let fleet = TestFleet::of(refuses);
    let mut refused = 0;
    for number in 0..6 {
        let second = fleet.open_lease(&ask(&prompt(number, 20), 3, "")).await;
        let answer = fleet.post(Role::Decode, "/v1/completions", &second).await;
        refused += usize::from(answer.is_err_and(|error| error.status().is_some_and(|status| status == 503)));
    }
    assert_eq!(refused, 3);
    fleet.settled().await;

    let dies = FaultAt { fault: Fault::Dies(Duration::from_millis(200)), at: Some((Role::Prefill, 0)) };
    let fleet = TestFleet::of(FleetPlan::new(1, 1, plan).with(dies));
    let second = fleet.open_lease(&ask(&prompt(1, 20), 3, "")).await;
    let dead = async {
        while TcpStream::connect(fleet.at(Role::Prefill)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, dead).await.expect("it dies");
    // The engine's blocks are lost, and the decode engine computes the prompt.
    let answer = fleet.complete(Role::Decode, &second).await;
    assert_eq!(text(&answer), text(&fleet.complete(Role::Decode, &ask(&prompt(1, 20), 3, "")).await));
    fleet.fleet.restart(Role::Prefill, 0).expect("its port is free");
    fleet.open_lease(&ask(&prompt(1, 20), 3, "again")).await;
}

#[test]
fn a_fleet_that_cannot_be_is_refused() {
    let plan = FleetPlan::new(0, 0, EnginePlan::default());
    assert!(SimFleet::start(plan).is_err());
    let at = FaultAt { fault: Fault::StrandsGap, at: Some((Role::Prefill, 3)) };
    assert!(FleetPlan::new(1, 1, EnginePlan::default()).with(at).check().is_err());
    let nothing = EnginePlan { blocks: 0, ..EnginePlan::default() };
    assert!(FleetPlan::new(1, 1, nothing).check().is_err());
}
