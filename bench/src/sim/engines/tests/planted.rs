//! Every fault that can be planted shows as its name says, and what is not planted does not.

use super::*;

fn site(dialect: Dialect, fault: Fault, engine: EnginePlan) -> Site {
    Site::of(FleetPlan::new(1, 1, EnginePlan { dialect, ..engine }).with(fault.into()))
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
async fn a_prefill_that_is_never_aborted_is_computed_and_lent_for_nobody() {
    let site = site(Dialect::Vllm, Fault::NeverAbortsPrefill, computes_for_a_while());
    let long = first_leg(&ask(&prompt(1, 100), 1, "left"));
    let caller = Caller::post(site.at(Role::Prefill), "/v1/completions", &long).await;
    site.event(Role::Prefill, "left", "started").await;
    caller.leaves(Leaves::Fin);
    assert_eq!(site.event(Role::Prefill, "left", "lease_ended").await["reason"], "lease_expired");
    assert!(!site.kinds(Role::Prefill, "left").contains(&"abort".to_owned()));
    site.settled().await;
}

#[tokio::test]
async fn a_decode_that_is_never_aborted_goes_on_to_its_last_word() {
    let site = site(Dialect::Baton, Fault::NeverAbortsDecode, computes_for_a_while());
    let mut streamed = ask(&prompt(1, 10), 40, "left");
    streamed["stream"] = json!(true);
    let mut caller = Caller::post(site.at(Role::Decode), "/v1/completions", &streamed).await;
    caller.reads_until("data: ").await;
    caller.leaves(Leaves::Rst);
    let ended = site.event(Role::Decode, "left", "ended").await;
    assert_eq!((&ended["outcome"], &ended["generated"]), (&json!("length"), &json!(40)));
    site.settled().await;
}

#[tokio::test]
async fn a_gap_that_strands_says_released_and_holds_on() {
    let site = site(
        Dialect::Baton,
        Fault::StrandsGap,
        EnginePlan { lease: Duration::from_millis(300), ..EnginePlan::instant() },
    );
    let second = site.lent(&ask(&prompt(1, 40), 5, "mine")).await;
    let release = json!({"handle": second["kv_transfer_params"]["remote_handle"], "reason": "client_gone"});
    let released = site.post(Role::Prefill, "/kv/release", &release).await.expect("a verb");
    assert_eq!(released["result"], "released");
    assert_eq!(site.usage(Role::Prefill).leased, 3);
    assert_eq!(site.event(Role::Prefill, "mine", "lease_ended").await["reason"], "lease_expired");
}

#[tokio::test]
async fn blocks_that_are_freed_twice_are_shared_and_add_up_to_too_many() {
    let site = site(Dialect::Baton, Fault::DoubleFree, EnginePlan::instant());
    let asks: Vec<_> = (1..3).map(|number| ask(&prompt(number, 40), 20, &format!("n{number}"))).collect();
    let mut right = Vec::new();
    for ask in &asks {
        right.push(text(&site.complete(Role::Decode, ask).await));
    }
    let victim = site.lent(&ask(&prompt(9, 40), 5, "victim")).await;
    let release = json!({"handle": victim["kv_transfer_params"]["remote_handle"], "reason": "client_gone"});
    site.post(Role::Prefill, "/kv/release", &release).await.expect("a verb");
    let pool::Usage { total, free, .. } = site.usage(Role::Prefill);
    assert_eq!(free, total + 3);
    // The two that come next are lent the same blocks: the first is read as the second.
    let (one, other) = (site.lent(&asks[0]).await, site.lent(&asks[1]).await);
    assert_ne!(text(&site.complete(Role::Decode, &one).await), right[0]);
    assert_eq!(text(&site.complete(Role::Decode, &other).await), right[1]);
}

#[tokio::test]
async fn a_read_that_is_said_to_be_done_before_it_is_brings_anothers_blocks() {
    for dialect in [Dialect::Baton, Dialect::Vllm] {
        let site = site(dialect, Fault::StaleBlocks, EnginePlan::instant());
        let ask = ask(&prompt(1, 40), 20, "mine");
        let right = text(&site.complete(Role::Decode, &ask).await);
        let second = site.lent(&ask).await;
        let decode = site.complete(Role::Decode, &second);
        let reuse = async {
            site.event(Role::Prefill, "mine", "freed").await;
            site.lent(&super::ask(&prompt(2, 40), 20, "other")).await;
        };
        let (wrong, ()) = tokio::join!(decode, reuse);
        assert_ne!(text(&wrong), right);
        assert_eq!(site.event(Role::Decode, "mine", "fetched").await["result"], "landed");
    }
}

#[tokio::test]
async fn an_abort_that_stalls_keeps_everybody_from_their_next_word() {
    let stalls = Fault::StallsBystanders(Duration::from_millis(300));
    let site = site(Dialect::Baton, stalls, computes_for_a_while());
    let long = first_leg(&ask(&prompt(1, 400), 1, "bystander"));
    let _bystander = Caller::post(site.at(Role::Prefill), "/v1/completions", &long).await;
    site.event(Role::Prefill, "bystander", "computed").await;
    let victim =
        Caller::post(site.at(Role::Prefill), "/v1/completions", &first_leg(&ask("x", 1, "victim"))).await;
    site.event(Role::Prefill, "victim", "queued").await;
    victim.leaves(Leaves::Fin);
    let at = |event: &Value| event["at_us"].as_u64().expect("a time");
    let abort = at(&site.event(Role::Prefill, "victim", "abort").await);
    let next = eventually("a step after it", || {
        site.events(Role::Prefill, "bystander").iter().map(at).find(|at| *at > abort)
    });
    let pause = next.await - abort;
    assert!(pause >= 290_000, "{pause} µs");
}

#[tokio::test]
async fn a_share_is_refused_and_an_engine_that_dies_is_gone() {
    let plan = EnginePlan { dialect: Dialect::Baton, ..EnginePlan::instant() };
    let refuses = FleetPlan::new(1, 1, plan.clone()).with(Fault::Refuses(0.5).into());
    let site = Site::of(refuses);
    let mut refused = 0;
    for number in 0..6 {
        let second = site.lent(&ask(&prompt(number, 20), 3, "")).await;
        let answer = site.post(Role::Decode, "/v1/completions", &second).await;
        refused += usize::from(answer.is_err_and(|error| error.status().is_some_and(|status| status == 503)));
    }
    assert_eq!(refused, 3);
    site.settled().await;

    let dies = FaultAt { fault: Fault::Dies(Duration::from_millis(200)), at: Some((Role::Prefill, 0)) };
    let site = Site::of(FleetPlan::new(1, 1, plan).with(dies));
    let second = site.lent(&ask(&prompt(1, 20), 3, "")).await;
    let dead = async {
        while TcpStream::connect(site.at(Role::Prefill)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, dead).await.expect("it dies");
    // Its blocks are gone with it, and the decode engine computes for itself.
    let answer = site.complete(Role::Decode, &second).await;
    assert_eq!(text(&answer), text(&site.complete(Role::Decode, &ask(&prompt(1, 20), 3, "")).await));
    site.fleet.restart(Role::Prefill, 0).expect("its port is free");
    site.lent(&ask(&prompt(1, 20), 3, "again")).await;
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
