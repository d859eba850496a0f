//! vLLM's push protocol on simulated engines: the prefill engine writes, both legs have one request id.

use super::behind_the_router::router;
use super::*;

fn pushes(engine: EnginePlan) -> EnginePlan {
    EnginePlan { push: Some(Duration::from_secs(480)), ..engine }
}

/// Prompts take 10 ms per 16 tokens and their transfer 10 ms per block.
fn slow() -> EnginePlan {
    pushes(EnginePlan {
        prefill_rate: 1_600,
        decode_step: Duration::from_millis(5),
        fetch_rate: 100,
        step_tokens: 16,
        ..EnginePlan::default()
    })
}

impl TestFleet {
    /// Posts a leg under a request id of the router.
    async fn leg(&self, role: Role, id: &str, body: &Value) -> TestCaller {
        let mut stream = TcpStream::connect(self.at(role)).await.expect("it listens");
        let (body, path) = (body.to_string(), "/v1/completions");
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.expect("it is sent");
        TestCaller(stream)
    }

    /// The transfer parameters of a decode leg, by the identity in a reply of the prefill engine.
    async fn identity(&self) -> Value {
        let reply = self.complete(Role::Prefill, &first_leg(&ask("identity", 1, "identity"))).await;
        let params = &reply["kv_transfer_params"];
        assert_eq!(params["transfer_mode"], "push");
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": params["remote_engine_id"],
            "remote_host": params["remote_host"], "remote_port": params["remote_port"], "tp_size": params["tp_size"],
            "remote_request_id": "none",
        })
    }
}

fn second_leg(ask: &Value, identity: &Value) -> Value {
    let mut leg = ask.clone();
    leg["kv_transfer_params"] = identity.clone();
    leg
}

#[tokio::test]
async fn both_legs_meet_in_either_order_and_the_text_is_that_of_one_engine() {
    let fleet = TestFleet::with(slow());
    let identity = fleet.identity().await;
    let body = ask(&prompt(1, 60), 6, "mine");
    let right = text(&fleet.complete(Role::Decode, &ask(&prompt(1, 60), 6, "alone")).await);
    for (number, first) in [Role::Prefill, Role::Decode].into_iter().enumerate() {
        let (id, tag) = (format!("r{number}"), format!("t{number}"));
        let body = json!({"user": tag, "model": "sim", "prompt": body["prompt"], "max_tokens": 6});
        let (prefill, decode) = (first_leg(&body), second_leg(&body, &identity));
        let mut callers = match first {
            Role::Prefill => {
                let prefill = fleet.leg(Role::Prefill, &id, &prefill).await;
                fleet.event(Role::Prefill, &tag, "lease_opened").await;
                [prefill, fleet.leg(Role::Decode, &id, &decode).await]
            }
            Role::Decode => {
                let decode = fleet.leg(Role::Decode, &id, &decode).await;
                fleet.event(Role::Decode, &tag, "fetching").await;
                [fleet.leg(Role::Prefill, &id, &prefill).await, decode]
            }
        };
        callers[0].reads_until("\"transfer_mode\":\"push\"").await;
        let response = callers[1].reads_until(&right).await;
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        let ended = fleet.event(Role::Prefill, &tag, "lease_ended").await;
        assert_eq!((&ended["reason"], &ended["blocks"]), (&json!("transfer_done"), &json!(4)));
    }
}

#[tokio::test]
async fn the_blocks_of_a_client_that_left_wait_for_the_write() {
    let fleet = TestFleet::with(slow());
    let identity = fleet.identity().await;
    let body = ask(&prompt(1, 60), 6, "left");
    let decode = fleet.leg(Role::Decode, "r1", &second_leg(&body, &identity)).await;
    fleet.event(Role::Decode, "left", "fetching").await;
    decode.leaves(HangUp::Fin);
    fleet.event(Role::Decode, "left", "abort").await;
    // The prompt and six tokens.
    assert_eq!(fleet.usage(Role::Decode).landing, 5);
    let _prefill = fleet.leg(Role::Prefill, "r1", &first_leg(&body)).await;
    let lease = fleet.event(Role::Prefill, "left", "lease_ended").await;
    assert_eq!(lease["reason"], "transfer_done");
    assert_eq!(fleet.event(Role::Decode, "left", "ended").await["outcome"], "abort");
}

#[tokio::test]
async fn a_decode_leg_without_a_write_holds_its_blocks_after_its_registration_has_ended() {
    let plan = EnginePlan { push: Some(Duration::from_millis(50)), ..EnginePlan::instant() };
    let fleet = TestFleet::with(plan);
    let identity = fleet.identity().await;
    let body = ask(&prompt(1, 60), 6, "late");
    let decode = fleet.leg(Role::Decode, "r1", &second_leg(&body, &identity)).await;
    fleet.event(Role::Decode, "late", "fetching").await;
    decode.leaves(HangUp::Rst);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let _prefill = fleet.leg(Role::Prefill, "r1", &first_leg(&body)).await;
    fleet.event(Role::Prefill, "late", "lease_opened").await;
    assert_eq!((fleet.usage(Role::Prefill).leased > 0, fleet.usage(Role::Decode).landing), (true, 5));
}

#[tokio::test]
async fn a_missing_size_ends_the_engine_and_a_wrong_identity_only_the_request() {
    let fleet = TestFleet::with(pushes(EnginePlan::instant()));
    let identity = fleet.identity().await;
    let body = ask(&prompt(1, 60), 6, "mine");
    let mut wrong = identity.clone();
    wrong["remote_engine_id"] = json!("an earlier process");
    let refused = fleet.post(Role::Decode, "/v1/completions", &second_leg(&body, &wrong)).await;
    assert_eq!(refused.expect_err("no such engine").status().map(|status| status.as_u16()), Some(500));
    assert_eq!(fleet.usage(Role::Decode).free, fleet.usage(Role::Decode).total);
    let mut deadly = identity;
    deadly.as_object_mut().expect("an object").remove("tp_size");
    assert!(fleet.post(Role::Decode, "/v1/completions", &second_leg(&body, &deadly)).await.is_err());
    let dead = async {
        while TcpStream::connect(fleet.at(Role::Decode)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, dead).await.expect("it ends");
    fleet.fleet.restart(Role::Decode, 0).expect("its port is free");
    fleet.complete(Role::Decode, &body).await;
}

#[test]
fn faults_of_writes_need_engines_that_write() {
    let with = |engine| FleetPlan::new(1, 1, engine).with(Fault::FreesBeforeWrite.into()).check();
    assert!(with(EnginePlan::default()).is_err());
    assert_eq!(with(pushes(EnginePlan::default())), Ok(()));
    assert!(pushes(EnginePlan { dialect: Dialect::Baton, ..EnginePlan::default() }).check().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_the_router_a_pair_that_is_cancelled_computes_to_its_end_and_frees_both_engines() {
    let fleet = TestFleet::with(EnginePlan { lease: PATIENCE * 2, ..slow() });
    let (address, running) = router(&fleet.fleet).await;
    let service = ServiceClient::parse(&address.to_string()).expect("an address");
    service.post_json("/v1/completions", &ask("first", 1, "first"), PATIENCE).await.expect("an answer");
    // One second.
    let long = ask(&prompt(1, 1_600), 6, "mine");
    let caller = TestCaller::post(address, "/v1/completions", &long).await;
    fleet.event(Role::Decode, "mine", "fetching").await;
    assert!(!fleet.kinds(Role::Prefill, "mine").contains(&"lease_opened".to_owned()), "both legs at once");
    caller.leaves(HangUp::Fin);
    fleet.event(Role::Decode, "mine", "abort").await;
    assert_eq!(fleet.event(Role::Decode, "mine", "ended").await["outcome"], "abort");
    assert_eq!(fleet.event(Role::Prefill, "mine", "lease_ended").await["reason"], "transfer_done");
    fleet.settled().await;
    running.abort();
}

/// Also after a restart of the prefill engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_the_router_every_block_is_freed_after_a_storm_and_a_restart() {
    let engine = EnginePlan {
        prefill_rate: 20_000,
        decode_step: Duration::from_millis(1),
        blocks: 400,
        // P's half of a pair whose D has not registered ends with its lease.
        lease: PATIENCE / 2,
        fetch_rate: 1_000,
        ..EnginePlan::default()
    };
    let fleet = TestFleet::of(FleetPlan::new(1, 1, pushes(engine)));
    let (address, running) = router(&fleet.fleet).await;
    let service = ServiceClient::parse(&address.to_string()).expect("an address");
    let right = text(&fleet.complete(Role::Decode, &ask(&prompt(0, 60), 24, "alone")).await);
    for round in 0..2 {
        let mut body = ask(&prompt(0, 60), 24, &format!("first{round}"));
        let first = service.post_json("/v1/completions", &body, PATIENCE).await.expect("an answer");
        assert_eq!(text(&first), right);
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..40usize {
            let (service, right) = (service.clone(), right.clone());
            body["user"] = json!(format!("n{round}-{number}"));
            let mut body = body.clone();
            tasks.spawn(async move {
                if number % 2 == 0 {
                    let answer =
                        service.post_json("/v1/completions", &body, PATIENCE).await.expect("an answer");
                    assert_eq!(text(&answer), right);
                    return;
                }
                body["stream"] = json!(true);
                let mut caller = TestCaller::post(address, "/v1/completions", &body).await;
                match number % 4 {
                    1 => drop(caller.reads_until("data: ").await),
                    _ => tokio::time::sleep(Duration::from_micros(number as u64 * 300)).await,
                }
                caller.leaves(if number % 3 == 0 { HangUp::Rst } else { HangUp::Fin });
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.expect("no thread panics");
        }
        fleet.settled().await;
        // Another identity.
        fleet.fleet.restart(Role::Prefill, 0).expect("its port is free");
    }
    running.abort();
}
