//! Simulated engines behind the real router, with callers that disconnect: all blocks are freed, in both dialects.

use baton_router::{Router, RouterConfig};

use super::*;

pub(super) async fn router(fleet: &SimFleet) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let config = RouterConfig::from_yaml(&fleet.router_yaml(any, any), "test").expect("a configuration");
    let router = Router::bind(config).await.expect("it binds");
    let address = router.local_addr();
    (address, tokio::spawn(router.run(Default::default())))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_storm_every_block_is_free_and_every_text_is_correct() {
    for dialect in [Dialect::Baton, Dialect::Vllm] {
        let engine = EnginePlan {
            dialect,
            prefill_rate: 20_000,
            decode_step: Duration::from_millis(1),
            blocks: 400,
            lease: Duration::from_secs(600),
            // Otherwise replies lost in this window leave leases. See the test below.
            reply_delay: Some(Duration::ZERO),
            ..EnginePlan::default()
        };
        let fleet = TestFleet::of(FleetPlan::new(1, 1, engine));
        let (address, running) = router(&fleet.fleet).await;
        let service = ServiceClient::parse(&address.to_string()).expect("an address");
        let mut right = Vec::new();
        for number in 0..4 {
            right.push(text(&fleet.complete(Role::Decode, &ask(&prompt(number, 60), 24, "")).await));
        }
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..60usize {
            let (service, right) = (service.clone(), right[number % 4].clone());
            tasks.spawn(async move {
                let mut body = ask(&prompt(number % 4, 60), 24, &format!("n{number}"));
                if number % 2 == 0 {
                    let answer =
                        service.post_json("/v1/completions", &body, PATIENCE).await.expect("an answer");
                    assert_eq!(text(&answer), right);
                    return;
                }
                body["stream"] = json!(true);
                let mut caller = TestCaller::post(address, "/v1/completions", &body).await;
                if number % 4 == 1 {
                    caller.reads_until("data: ").await;
                } else {
                    tokio::time::sleep(Duration::from_micros(number as u64 * 150)).await;
                }
                caller.leaves(if number % 3 == 0 { HangUp::Rst } else { HangUp::Fin });
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.expect("no thread panics");
        }
        // No lease has expired: its duration exceeds the wait of this test.
        fleet.settled().await;
        running.abort();
    }
}

/// A caller that leaves in a reply window that outlasts the test, and the router in front of it.
async fn leaves_in_the_reply_window(dialect: Dialect) -> (TestFleet, tokio::task::JoinHandle<()>) {
    let engine = EnginePlan { dialect, reply_delay: Some(PATIENCE * 2), ..EnginePlan::instant() };
    let fleet = TestFleet::with(engine);
    let (address, running) = router(&fleet.fleet).await;
    let caller = TestCaller::post(address, "/v1/completions", &ask(&prompt(1, 40), 5, "mine")).await;
    fleet.event(Role::Prefill, "mine", "lease_opened").await;
    caller.leaves(HangUp::Fin);
    (fleet, running)
}

/// A known limit with stock engines: their abort is a half-close, and their server then drops the reply with the
/// only copy of the handoff.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_engine_strands_the_blocks_of_a_caller_that_leaves_in_its_reply_window() {
    let (fleet, running) = leaves_in_the_reply_window(Dialect::Vllm).await;
    let replied = fleet.event(Role::Prefill, "mine", "replied").await;
    assert_eq!((&replied["result"], fleet.usage(Role::Prefill).leased), (&json!("dropped"), 3));
    running.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_by_id_frees_the_blocks_of_a_caller_that_leaves_in_the_reply_window() {
    let (fleet, running) = leaves_in_the_reply_window(Dialect::Baton).await;
    let ended = fleet.event(Role::Prefill, "mine", "lease_ended").await;
    assert_eq!((&ended["reason"], &ended["blocks"]), (&json!("aborted"), &json!(3)));
    fleet.settled().await;
    running.abort();
}
