//! A fleet of two revisions: no engine reads blocks of another revision, and a rolling update fails no request.

use baton_router::RouterConfig;
use serde_json::{Value, json};

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::{TestRouter, await_requests};
use crate::requests::resume;

/// The revisions, by the handle of their prefill engines.
const OLD: u128 = 1;
const NEW: u128 = 2;

async fn prefill(revision: u128) -> FakeEngine {
    FakeEngine::always(Action::Lease(Some(revision))).await
}

/// Fails every request with blocks of another revision.
async fn decode(revision: u128, action: Action) -> FakeEngine {
    let wrong = move |request: &ReceivedRequest| {
        let handle = request.body["kv_transfer_params"]["remote_handle"].as_str()?;
        (handle != format!("{revision:032x}"))
            .then(|| Action::Refuse(418, json!({"error": {"message": "mixed"}})))
    };
    FakeEngine::always(action).await.with_rule(wrong)
}

fn pool(engines: &[(&FakeEngine, u128)]) -> String {
    let engine = |(engine, revision): &(&FakeEngine, u128)| {
        format!("{{url: '{}', labels: {{revision: r{revision}}}}}", engine.url())
    };
    let engines: Vec<_> = engines.iter().map(engine).collect();
    format!("{{policy: round_robin, engines: [{}]}}", engines.join(", "))
}

fn yaml(prefill: &[(&FakeEngine, u128)], decode: &[(&FakeEngine, u128)], model: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         explain: {{requests: 100}}\nmodels:\n  - name: m\n    compatibility: revision\n    prefill: {}\n    decode: {}\n{model}\n",
        pool(prefill),
        pool(decode)
    )
}

async fn ask(system: &TestRouter) -> u16 {
    post(system.address, "/v1/completions", &completion(false)).await.status
}

#[tokio::test]
async fn engines_of_two_revisions_are_never_a_pair() {
    let (p, d) = (
        [prefill(OLD).await, prefill(NEW).await],
        [decode(OLD, Action::Whole(1)).await, decode(NEW, Action::Whole(1)).await],
    );
    let system =
        TestRouter::of(&yaml(&[(&p[0], OLD), (&p[1], NEW)], &[(&d[0], OLD), (&d[1], NEW)], "")).await;
    for _ in 0..8 {
        assert_eq!(ask(&system).await, 200);
    }
    assert_eq!([&p[0], &p[1], &d[0], &d[1]].map(|engine| engine.received().len()), [4; 4]);
    system.settled().await;
}

#[tokio::test]
async fn a_decode_retry_with_blocks_stays_in_its_revision_and_then_computes_the_prompt() {
    for fallback in ["", "    fallback: none"] {
        let (old_p, new_p) = (prefill(OLD).await, prefill(NEW).await);
        let failing = decode(OLD, Action::Refuse(503, json!({}))).await;
        let other = decode(OLD, Action::Refuse(503, json!({}))).await;
        let new = decode(NEW, Action::Whole(1)).await;
        let (p, d) = ([(&old_p, OLD), (&new_p, NEW)], [(&failing, OLD), (&other, OLD), (&new, NEW)]);
        let system = TestRouter::of(&yaml(&p, &d, &format!("{fallback}\nattempts: {{decode: 3}}"))).await;
        while failing.received().is_empty() && other.received().is_empty() {
            assert_eq!(ask(&system).await, 200);
        }
        // Both old engines had the handoff once. The new one never had it: it would have failed the request.
        let with_handoff = |engine: &FakeEngine| {
            engine.received().iter().filter(|request| request.body["kv_transfer_params"].is_object()).count()
        };
        assert_eq!((with_handoff(&failing), with_handoff(&other)), (1, 1));
        old_p.wait("the release of the old blocks", |p| p.releases().len() == 1).await;
        let last = new.received().pop().unwrap();
        assert_eq!(last.body["kv_transfer_params"].is_object(), !fallback.is_empty(), "{fallback}");
        system.settled().await;
    }
}

#[tokio::test]
async fn without_a_prefill_engine_of_its_revision_a_decode_engine_computes_the_prompt() {
    let p = prefill(OLD).await;
    let d = decode(NEW, Action::Whole(1)).await;
    let system = TestRouter::of(&yaml(&[(&p, OLD)], &[(&d, NEW)], "")).await;
    assert_eq!(ask(&system).await, 200);
    assert_eq!((p.all().len(), d.received().len()), (0, 1));
    system.counts("baton_router_disagg_decisions_total{reason=\"fell_back\"}", 1.0).await;
    let refusing = TestRouter::of(&yaml(&[(&p, OLD)], &[(&d, NEW)], "    fallback: none")).await;
    assert_eq!(ask(&refusing).await, 503);
    assert!(p.all().is_empty());
}

#[tokio::test]
async fn a_request_waits_for_a_full_prefill_engine_of_its_revision() {
    let full = FakeEngine::always(Action::LeaseGated(Some(OLD))).await;
    let free = prefill(NEW).await;
    let d = decode(OLD, Action::Whole(1)).await;
    let text = yaml(&[(&full, OLD), (&free, NEW)], &[(&d, OLD)], "    fallback: none").replacen(
        "policy: round_robin",
        "capacity: {max_in_flight: 1}",
        1,
    );
    let system = TestRouter::of(&text).await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(system.address).await;
        client.post("/v1/completions", &completion(false)).await;
        clients.push(client);
    }
    await_requests(&full, 1).await;
    system.counts("baton_router_queue_requests", 1.0).await;
    full.open_gate();
    full.open_gate();
    for client in &mut clients {
        assert_eq!(client.answer().await.status, 200);
    }
    assert_eq!((full.received().len(), free.all().len()), (2, 0));
}

#[tokio::test]
async fn a_stream_is_continued_within_its_revision() {
    for (revision, continued) in [(OLD, 1), (NEW, 0)] {
        let (dies, lives) = (resume::engine("first", 4).await, resume::engine("second", resume::NEVER).await);
        let text = yaml(&[], &[(&dies, OLD), (&lives, revision)], "    resume: true");
        let system = TestRouter::of(&text).await;
        let mut before = 0;
        while dies.received().is_empty() {
            before = lives.received().len();
            post(system.address, "/v1/completions", &resume::streamed(json!({}))).await;
        }
        assert_eq!(lives.received().len() - before, continued);
        system.settled().await;
    }
}

#[tokio::test]
async fn a_dry_run_and_an_explanation_show_the_other_revision() {
    let (old, new) = (prefill(OLD).await, prefill(NEW).await);
    let d = decode(OLD, Action::Whole(1)).await;
    let system = TestRouter::of(&yaml(&[(&old, OLD), (&new, NEW)], &[(&d, OLD)], "")).await;
    let trial = post(system.admin, "/dry-run?path=/v1/completions", &completion(false)).await.json();
    assert_eq!(trial["prefill"]["chosen"], old.address.to_string(), "{trial}");
    assert!(trial["prefill"].to_string().contains("incompatible"), "{trial}");
    assert_eq!(ask(&system).await, 200);
    let id = d.received()[0].headers["x-request-id"].to_str().unwrap().to_owned();
    let explained = get(system.admin, &format!("/explain/{id}")).await.text();
    assert!(explained.contains("incompatible"), "{explained}");
}

/// One step of an update: the engines in use.
struct Step {
    old: [bool; 2],
    new: [bool; 2],
}

/// From all engines of the old revision to all of the new one, a prefill and a decode engine at a time.
const UPDATE: [Step; 5] = [
    Step { old: [true, true], new: [false, false] },
    Step { old: [true, true], new: [false, true] },
    Step { old: [true, true], new: [true, true] },
    Step { old: [false, true], new: [true, true] },
    Step { old: [false, false], new: [true, true] },
];

fn in_use<'a>(engines: &'a [FakeEngine; 2], step: &Step, leg: usize) -> Vec<(&'a FakeEngine, u128)> {
    let used = [(step.old[leg], 0, OLD), (step.new[leg], 1, NEW)].into_iter().filter(|(used, ..)| *used);
    used.map(|(_, at, revision)| (&engines[at], revision)).collect()
}

#[tokio::test]
async fn a_rolling_update_fails_no_request_and_mixes_no_revisions() {
    for model in ["", "    fallback: none"] {
        let p = [prefill(OLD).await, prefill(NEW).await];
        let d = [decode(OLD, Action::Whole(1)).await, decode(NEW, Action::Whole(1)).await];
        let text = |step: &Step| yaml(&in_use(&p, step, 0), &in_use(&d, step, 1), model);
        let system = TestRouter::of(&text(&UPDATE[0])).await;
        for step in &UPDATE {
            system.reload.install(RouterConfig::from_yaml(&text(step), "step.yaml").unwrap()).unwrap();
            for _ in 0..6 {
                assert_eq!(ask(&system).await, 200);
            }
        }
        assert!([&p[0], &p[1], &d[0], &d[1]].iter().all(|engine| !engine.received().is_empty()));
        if !model.is_empty() {
            assert!(
                d.iter()
                    .flat_map(FakeEngine::received)
                    .all(|request| request.body["kv_transfer_params"].is_object())
            );
        }
        system.settled().await;
    }
}

/// SGLang's paths at an engine.
fn sglang(answer: Action) -> impl Fn(&ReceivedRequest) -> Option<Action> + Send {
    move |request| match request.path.as_str() {
        "/v1/completions" => Some(answer.clone()),
        _ => Some(Action::Text("")),
    }
}

#[tokio::test]
async fn legs_that_are_sent_at_once_are_of_one_revision_throughout_an_update() {
    let token = json!({"id": "p", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]});
    let engine = async |action: Action| FakeEngine::always(Action::Hang).await.with_rule(sglang(action));
    let p = [engine(Action::Json(token.clone())).await, engine(Action::Json(token.clone())).await];
    let d = [engine(Action::Whole(1)).await, engine(Action::Whole(1)).await];
    let text = |step: &Step| yaml(&in_use(&p, step, 0), &in_use(&d, step, 1), "    protocol: sglang");
    let system = TestRouter::of(&text(&UPDATE[0])).await;
    for step in &UPDATE {
        system.reload.install(RouterConfig::from_yaml(&text(step), "step.yaml").unwrap()).unwrap();
        for _ in 0..6 {
            assert_eq!(ask(&system).await, 200);
        }
    }
    let rooms = |engine: &FakeEngine| -> Vec<Value> {
        engine.received().iter().map(|request| request.body["bootstrap_room"].clone()).collect()
    };
    for (p, d) in p.iter().zip(&d) {
        assert!(!rooms(p).is_empty());
        assert_eq!(rooms(p), rooms(d), "each pair is of one revision");
    }
}
