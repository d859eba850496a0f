//! Explanations of past requests and dry runs.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

/// The explanation of one request.
async fn account(system: &TestRouter, id: &str) -> Value {
    let answer = get(system.admin, &format!("/explain/{id}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["requests"][0].clone()
}

/// The steps of one kind.
fn steps<'a>(account: &'a Value, what: &str) -> Vec<&'a Value> {
    account["steps"].as_array().unwrap().iter().filter(|step| step["what"] == what).collect()
}

async fn ended(system: &TestRouter, id: &str) -> Value {
    for _ in 0..2_000 {
        let account = account(system, id).await;
        if !account["status"].is_null() {
            return account;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    panic!("the request never ended");
}

#[tokio::test]
async fn a_request_is_explained_by_what_was_chosen_from_and_what_came_of_it() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let down = FakeEngine::always(Action::Close).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&down, &d]).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", "x-request-id: mine\r\n", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    let account = ended(&system, "mine").await;
    assert_eq!((&account["status"], &account["outcome"]), (&json!(200), &json!("completed")));
    let chosen = steps(&account, "choose");
    let legs: Vec<_> = chosen.iter().map(|c| c["leg"].as_str().unwrap()).collect();
    assert_eq!(legs, ["decode", "prefill", "decode"], "D before P, and then the other D");
    assert_eq!(chosen[0]["chosen"], down.address.to_string());
    assert_eq!(chosen[0]["candidates"].as_array().unwrap().len(), 2);
    assert_eq!((&chosen[0]["policy"], &chosen[0]["reason"]), (&json!("round_robin"), &json!("turn")));
    assert_eq!(chosen[2]["chosen"], d.address.to_string());
    assert_eq!(chosen[2]["removed"][0], json!({"engine": down.address.to_string(), "why": "tried"}));
    assert_eq!(steps(&account, "disaggregate")[0]["decision"], "prefill_decode");
    let came: Vec<_> = steps(&account, "answer").iter().map(|a| a["came"].as_str().unwrap()).collect();
    assert_eq!(came[..2], ["opened a lease", "failed or did not respond"]);
    assert!(came.contains(&"accepted"), "{came:?}");
    let minted = account["id"].as_str().unwrap();
    assert_eq!(p.received()[0].headers["x-request-id"], minted);
    assert_eq!(ended(&system, minted).await, account, "by either name");
    let unknown = get(system.admin, "/explain/unknown").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("keeps the latest 4096 "), "{}", unknown.text());
    let listed = get(system.admin, "/explain").await.json();
    let line = &listed["requests"][0];
    assert_eq!((&line["id"], &line["path"]), (&json!(minted), &json!("/v1/completions")));
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64;
    let began = line["began_ms"].as_u64().unwrap();
    assert!(began <= now && now - began < 600_000, "{began} at {now}");
}

#[tokio::test]
async fn a_search_without_another_engine_is_explained_once() {
    let p = FakeEngine::always(Action::Close).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&d], "    fallback: aggregate", "").await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", "x-request-id: mine\r\n", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    let account = ended(&system, "mine").await;
    let chosen = steps(&account, "choose").into_iter().filter(|step| step["leg"] == "prefill");
    let chosen: Vec<_> = chosen.map(|step| (step["chosen"].as_str(), &step["removed"])).collect();
    let (name, none) = (p.address.to_string(), json!([]));
    let tried = json!([{"engine": name, "why": "tried"}]);
    assert_eq!(chosen, [(Some(&*name), &none), (None, &tried)], "{account:#}");
}

#[tokio::test]
async fn a_request_that_hangs_is_explained_while_it_hangs() {
    let d = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", "x-request-id: stuck\r\n", body.as_bytes()).await;
    await_requests(&d, 1).await;
    let account = account(&system, "stuck").await;
    assert!(account["status"].is_null() && account["took_us"].is_null());
    assert_eq!(steps(&account, "disaggregate")[0]["reason"], "no_prefill_engines");
    assert_eq!(steps(&account, "ask")[0]["engine"], d.address.to_string());
}

#[tokio::test]
async fn a_dry_run_returns_the_choice_and_changes_no_state() {
    let (p, p2) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Lease(Some(8))).await);
    let (a, b) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let more = "    disaggregate: {min_prompt_tokens: 20}";
    let system = TestRouter::with(&[&p, &p2], &[&a, &b], more, "").await;
    let metrics = get(system.admin, "/metrics").await.text();
    let counted = |text: &str| -> Vec<String> {
        let ours = text.lines().filter(|line| line.starts_with("baton_router_") && line.contains("_total"));
        ours.filter(|line| !line.contains("connections")).map(str::to_owned).collect()
    };
    let long = json!({"model": "m", "prompt": "x".repeat(400)});
    for _ in 0..3 {
        let plan = post(system.admin, "/dry-run?path=/v1/completions", &long).await;
        assert_eq!(plan.status, 200, "{}", plan.text());
        let plan = plan.json();
        assert_eq!(plan["decode"]["chosen"], a.address.to_string(), "the turn does not move");
        assert_eq!(plan["prefill"]["chosen"], p.address.to_string());
        assert_eq!(plan["disaggregation"]["reason"], "worth_it");
    }
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let plan = post(system.admin, "/dry-run", &chat).await.json();
    assert_eq!(plan["disaggregation"]["reason"], "short_prompt");
    assert!(plan["prefill"].is_null());
    let bad = post(system.admin, "/dry-run", &json!({"model": "unknown", "messages": []})).await;
    assert!(matches!(bad.status, 400 | 404), "{}", bad.text());
    for engine in [&p, &p2, &a, &b] {
        assert!(engine.all().is_empty(), "no engine hears of a dry run");
    }
    assert_eq!(counted(&get(system.admin, "/metrics").await.text()), counted(&metrics));
    assert_eq!(get(system.admin, "/explain").await.json()["requests"], json!([]));
    // A real request then goes to the engines of the dry run.
    assert_eq!(post(system.address, "/v1/completions", &long).await.status, 200);
    assert_eq!((a.received().len(), p.received().len()), (1, 1));
}

#[tokio::test]
async fn explanations_are_as_many_as_configured_and_none_when_they_are_off() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    for (most, kept) in [(2, 2), (0, 0)] {
        let system = TestRouter::with(&[], &[&d], "", &format!("explain: {{requests: {most}}}")).await;
        for _ in 0..5 {
            assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        }
        let listed = get(system.admin, "/explain").await.json();
        assert_eq!(listed["requests"].as_array().unwrap().len(), kept);
    }
}

#[tokio::test]
async fn with_keys_a_dry_run_is_of_a_tenant_whose_prefixes_are_its_own() {
    let (a, b) = (FakeEngine::always(Action::Whole(1)).await, FakeEngine::always(Action::Whole(1)).await);
    let (one, two) = (baton_router::NewKey::make(), baton_router::NewKey::make());
    let top = format!(
        "auth:\n  keys:\n    - {{id: a, hash: '{}', tenant: one}}\n    - {{id: b, hash: '{}', tenant: two}}",
        one.hash, two.hash
    );
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels: [{{name: m, \
         features: {{chunk_bytes: 64}}, decode: {{policy: prefix_aware, engines: [{{url: '{}'}}, {{url: '{}'}}]}}}}]\n{top}\n",
        a.url(),
        b.url()
    );
    let system = TestRouter::of(&yaml).await;
    let body = json!({"model": "m", "prompt": "x".repeat(640)});
    let mut client = Client::connect(system.address).await;
    let head = format!("authorization: Bearer {}\r\n", one.key);
    client.post_bytes("/v1/completions", &head, body.to_string().as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    let held = async |tenant: &str| {
        let plan = post(system.admin, &format!("/dry-run?path=/v1/completions&tenant={tenant}"), &body).await;
        assert_eq!(plan.status, 200, "{}", plan.text());
        plan.json()["decode"]["held"]["chunks"].as_u64().unwrap()
    };
    assert!(held("one").await >= 9, "what it sent is held");
    assert_eq!(held("two").await, 0, "and belongs to no other tenant");
    for unknown in ["", "&tenant=unknown"] {
        let plan = post(system.admin, &format!("/dry-run?path=/v1/completions{unknown}"), &body).await;
        assert_eq!(plan.status, 400, "{}", plan.text());
    }
}
