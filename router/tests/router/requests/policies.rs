//! The choice of engines by the configuration and the properties of a request.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::{TestRouter, await_requests};

/// One entry of `models`, with these pools and further lines.
fn model(prefill: &str, decode: &str, more: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    prefill: {prefill}\n    decode: {decode}\n{more}\n"
    )
}

/// A pool of these engines; `of` are further keys of each engine, `more` of the pool.
fn pool(engines: &[&FakeEngine], of: &[&str], more: &str) -> String {
    let engine = |(n, e): (usize, &&FakeEngine)| {
        format!("{{url: '{}'{}}}", e.url(), of.get(n).map(|keys| format!(", {keys}")).unwrap_or_default())
    };
    let engines: Vec<_> = engines.iter().enumerate().map(engine).collect();
    format!(
        "{{engines: [{}]{}}}",
        engines.join(", "),
        if more.is_empty() { String::new() } else { format!(", {more}") }
    )
}

fn prompt(text: &str) -> Value {
    json!({"model": "m", "prompt": text, "max_tokens": 4})
}

async fn ask(system: &TestRouter, body: &Value) -> u16 {
    post(system.address, "/v1/completions", body).await.status
}

async fn decoders<const N: usize>() -> [FakeEngine; N] {
    let mut engines = Vec::new();
    for _ in 0..N {
        engines.push(FakeEngine::always(Action::Whole(1)).await);
    }
    engines.try_into().unwrap_or_else(|_| panic!("as many as were made"))
}

fn counts(engines: &[FakeEngine]) -> Vec<usize> {
    engines.iter().map(|e| e.received().len()).collect()
}

#[tokio::test]
async fn a_conversation_returns_to_the_engine_with_its_prefix() {
    let engines = decoders::<4>().await;
    let all: Vec<_> = engines.iter().collect();
    let policy = "policy: {prefix_aware: {balance_abs: 4, balance_rel: 2.0, match_min: 0.2}}";
    let features = "    features: {chunk_bytes: 64, chunks_max: 100, bytes_per_token: 4.0}";
    let system = TestRouter::of(&model("{}", &pool(&all, &[], policy), features)).await;
    let mut text = "a".repeat(300);
    for turn in 0..6 {
        assert_eq!(ask(&system, &prompt(&text)).await, 200);
        text.push_str(&format!(" and then {turn} {}", "b".repeat(80)));
    }
    let mut first = counts(&engines);
    first.sort_unstable();
    assert_eq!(first, [0, 0, 0, 6], "one conversation, one engine");
    let decided = "baton_router_decisions_total{model=\"m\",leg=\"decode\",policy=\"prefix_aware\"";
    assert_eq!(system.metric(&format!("{decided}}}")).await, 6.0, "each choice is counted");
    assert_eq!(system.metric(&format!("{decided},reason=\"not_cached\"}}")).await, 1.0, "and its reason");
    assert_eq!(system.metric(&format!("{decided},reason=\"holds_chunks\"}}")).await, 5.0);
    // Uncached prompts take turns.
    for n in 0..8 {
        assert_eq!(ask(&system, &prompt(&format!("{n} {}", "c".repeat(300)))).await, 200);
    }
    assert!(counts(&engines).iter().all(|&count| count >= 2), "{:?}", counts(&engines));
}

#[tokio::test]
async fn the_index_size_is_bounded_by_configuration() {
    let engines = decoders::<2>().await;
    let all: Vec<_> = engines.iter().collect();
    let yaml = model("{}", &pool(&all, &[], "policy: prefix_aware"), "    features: {chunk_bytes: 64}");
    let bounds = "prefix_index: {chunks_per_engine: 16, chunks_total: 32}";
    let system = TestRouter::of(&format!("{yaml}{bounds}")).await;
    // Eight prompts of eight chunks: the first is evicted before it is repeated.
    for n in 0..8 {
        assert_eq!(ask(&system, &prompt(&format!("{n}{}", "d".repeat(520)))).await, 200);
    }
    assert_eq!(counts(&engines), [4, 4]);
    let before = counts(&engines);
    for _ in 0..2 {
        assert_eq!(ask(&system, &prompt(&format!("0{}", "d".repeat(520)))).await, 200);
    }
    // Evicted at first, and then cached again: both times the engine whose turn it was.
    let after = counts(&engines);
    assert_eq!(after.iter().sum::<usize>(), before.iter().sum::<usize>() + 2);
    assert!(after.iter().zip(&before).any(|(a, b)| a - b == 2), "{before:?} {after:?}");
}

#[tokio::test]
async fn a_session_stays_at_its_engine_while_that_has_no_more_than_its_share() {
    let engines = decoders::<4>().await;
    let all: Vec<_> = engines.iter().collect();
    let policy =
        "policy: {consistent_hash: {keys: [session, user, prefix], load_factor: 1.5, prefix_chunks: 2}}";
    let features = "    features: {session_header: x-conversation, chunk_bytes: 64}";
    let system = TestRouter::of(&model("{}", &pool(&all, &[], policy), features)).await;
    for session in ["one", "two", "three"] {
        let before = counts(&engines);
        for n in 0..5 {
            let mut client = Client::connect(system.address).await;
            let body = prompt(&format!("{n}")).to_string();
            let header = format!("X-Conversation: {session}\r\n");
            client.post_bytes("/v1/completions", &header, body.as_bytes()).await;
            assert_eq!(client.answer().await.status, 200);
        }
        let taken: Vec<_> = counts(&engines).iter().zip(&before).map(|(a, b)| a - b).collect();
        assert!(taken.contains(&5), "{session}: {taken:?}");
    }
    let before = counts(&engines);
    for n in 0..5 {
        let body = json!({"model": "m", "prompt": n.to_string(), "user": "u"});
        assert_eq!(ask(&system, &body).await, 200);
    }
    let taken: Vec<_> = counts(&engines).iter().zip(&before).map(|(a, b)| a - b).collect();
    assert!(taken.contains(&5), "a user: {taken:?}");
}

#[tokio::test]
async fn a_busy_engine_of_a_session_is_skipped_for_the_sessions_next() {
    let [a, b] =
        [FakeEngine::always(Action::WholeGated(1)).await, FakeEngine::always(Action::WholeGated(1)).await];
    let policy = "policy: {consistent_hash: {load_factor: 1.0}}";
    let system = TestRouter::of(&model("{}", &pool(&[&a, &b], &[], policy), "")).await;
    let mut clients = Vec::new();
    for n in 0..4 {
        let mut client = Client::connect(system.address).await;
        let body = completion(false).to_string();
        client.post_bytes("/v1/completions", "x-session-id: s\r\n", body.as_bytes()).await;
        eventually("an engine has the request", || a.received().len() + b.received().len() == n + 1).await;
        clients.push(client);
    }
    assert_eq!((a.received().len(), b.received().len()), (2, 2), "one session, and still half each");
    for _ in 0..2 {
        a.open_gate();
        b.open_gate();
    }
    for mut client in clients {
        assert_eq!(client.answer().await.status, 200);
    }
}

#[tokio::test]
async fn selected_labels_are_required_and_preferred_labels_apply_while_capacity_lasts() {
    let engines = [
        FakeEngine::always(Action::Whole(1)).await,
        FakeEngine::always(Action::WholeGated(1)).await,
        FakeEngine::always(Action::Whole(1)).await,
    ];
    let all: Vec<_> = engines.iter().collect();
    let labels = [
        "labels: {gpu: h200, zone: b}",
        "labels: {gpu: h200, zone: a}, max_in_flight: 1",
        "labels: {gpu: l4, zone: a}",
    ];
    let more = "select: {gpu: h200}, prefer: {zone: a}, policy: {least_load: {by: tokens}}";
    let system = TestRouter::of(&model("{}", &pool(&all, &labels, more), "")).await;
    let mut waiting = Client::connect(system.address).await;
    waiting.post("/v1/completions", &completion(false)).await;
    await_requests(&engines[1], 1).await;
    for _ in 0..3 {
        assert_eq!(ask(&system, &completion(false)).await, 200);
    }
    engines[1].open_gate();
    assert_eq!(waiting.answer().await.status, 200);
    assert_eq!(counts(&engines), [3, 1, 0]);
}

#[tokio::test]
async fn a_prefill_engine_of_the_decode_engines_zone_is_preferred() {
    let mut prefill = Vec::new();
    for handle in 0..2 {
        prefill.push(FakeEngine::always(Action::Lease(Some(handle))).await);
    }
    let decode = decoders::<2>().await;
    let zones = ["labels: {zone: a}", "labels: {zone: b}"];
    let p = pool(&prefill.iter().collect::<Vec<_>>(), &zones, "policy: random");
    let d = pool(&decode.iter().collect::<Vec<_>>(), &zones, "policy: round_robin");
    let system = TestRouter::of(&model(&p, &d, "    pair_by: [zone]")).await;
    for _ in 0..8 {
        assert_eq!(ask(&system, &completion(false)).await, 200);
    }
    for (p, d) in prefill.iter().zip(&decode) {
        assert_eq!((p.received().len(), d.received().len()), (4, 4));
        let id = |e: &FakeEngine| -> Vec<_> {
            e.received().iter().map(|s| s.headers["x-request-id"].clone()).collect()
        };
        assert_eq!(id(p), id(d), "each pair is of one zone");
    }
}

#[tokio::test]
async fn an_engine_of_both_pools_does_not_prefill_for_itself_while_there_is_another() {
    let both = FakeEngine::scripted(vec![Action::Whole(1)]).await;
    let other = FakeEngine::always(Action::Lease(Some(1))).await;
    let system = TestRouter::of(&model(&pool(&[&both, &other], &[], ""), &pool(&[&both], &[], ""), "")).await;
    for _ in 0..4 {
        assert_eq!(ask(&system, &completion(false)).await, 200);
    }
    assert_eq!((both.received().len(), other.received().len()), (4, 4));
}

#[tokio::test]
async fn a_full_decode_engine_costs_no_prefill() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::WholeGated(1)).await;
    let decode = pool(&[&d], &[], "capacity: {max_in_flight: 1}");
    let without_queue = format!("{}\nqueue: {{requests: 0}}\n", model(&pool(&[&p], &[], ""), &decode, ""));
    let system = TestRouter::of(&without_queue).await;
    let mut first = Client::connect(system.address).await;
    first.post("/v1/completions", &completion(false)).await;
    await_requests(&d, 1).await;
    let mut second = Client::connect(system.address).await;
    second.post("/v1/completions", &completion(false)).await;
    let refused = second.answer().await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    assert_eq!(p.received().len(), 1, "no prefill is spent on a request that no decode engine has room for");
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test]
async fn engines_with_full_metrics_are_skipped() {
    for capacity in ["max_waiting: 9", "max_kv_usage: 0.9"] {
        let full_metrics = |request: &crate::harness::engine::ReceivedRequest| {
            let text = "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 9.0\nvllm:kv_cache_usage_perc 0.93\n";
            (request.path == "/metrics").then_some(Action::Text(text))
        };
        let full = FakeEngine::always(Action::WholeGated(1)).await.with_rule(full_metrics);
        let free = FakeEngine::always(Action::Whole(1)).await;
        let more = format!("prefer: {{zone: a}}, capacity: {{{capacity}}}");
        let decode = pool(&[&full, &free], &["labels: {zone: a}", "labels: {zone: b}"], &more);
        let health = "health: {active: {interval_ms: 0}, load: {interval_ms: 10, stale_ms: 600000}}";
        let system = TestRouter::of(&model("{}", &decode, health)).await;
        full.wait("its metrics are read", |e| e.all().iter().filter(|s| s.path == "/metrics").count() > 1)
            .await;
        // Without a request of this router the engine gets one regardless of its report, because only the end of such a
        // request would signal free capacity.
        let mut first = Client::connect(system.address).await;
        first.post("/v1/completions", &completion(false)).await;
        await_requests(&full, 1).await;
        assert_eq!(ask(&system, &completion(false)).await, 200);
        assert_eq!((full.received().len(), free.received().len()), (1, 1), "{capacity}");
        full.open_gate();
        assert_eq!(first.answer().await.status, 200);
    }
}

const DISAGG: &str = "baton_router_disagg_decisions_total";

#[tokio::test]
async fn short_prompts_and_cached_prompts_are_computed_where_they_are_decoded() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let more = "    disaggregate: {min_prompt_tokens: 50, min_uncached_tokens: 60, min_uncached_share: 0.1}\n    \
                features: {chunk_bytes: 64, bytes_per_token: 4.0}";
    let system = TestRouter::of(&model(&pool(&[&p], &[], ""), &pool(&[&d], &[], ""), more)).await;
    let decided =
        |decision: &str, reason: &str| format!("{DISAGG}{{decision=\"{decision}\",reason=\"{reason}\"}}");
    assert_eq!(ask(&system, &prompt("short")).await, 200);
    system.counts(&decided("decode_only", "short_prompt"), 1.0).await;
    assert!(p.received().is_empty());
    let long = "a".repeat(1_000);
    assert_eq!(ask(&system, &prompt(&long)).await, 200);
    system.counts(&decided("prefill_decode", "worth_it"), 1.0).await;
    assert_eq!(p.received().len(), 1);
    // The decode engine has cached it now; the second time nothing is left to prefill.
    assert_eq!(ask(&system, &prompt(&long)).await, 200);
    system.counts(&decided("decode_only", "cached"), 1.0).await;
    assert_eq!(p.received().len(), 1);
    // Another tenant's equal prompt is a different one.
    let mut salted = prompt(&long);
    salted["cache_salt"] = json!("other");
    assert_eq!(ask(&system, &salted).await, 200);
    assert_eq!(p.received().len(), 2);
    assert!(d.received()[2].body.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn only_the_examined_part_of_a_long_prompt_counts_as_cached() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let more = "    disaggregate: {min_uncached_tokens: 100}\n    \
                features: {chunk_bytes: 64, chunks_max: 4, bytes_per_token: 4.0}";
    let system = TestRouter::of(&model(&pool(&[&p], &[], ""), &pool(&[&d], &[], ""), more)).await;
    // 64 tokens are compared: of 300 enough is left to prefill elsewhere, of 150 it is not.
    for (bytes, prefilled) in [(1_200, 2), (600, 1)] {
        let before = p.received().len();
        let text = format!("{bytes}{}", "a".repeat(bytes));
        for _ in 0..2 {
            assert_eq!(ask(&system, &prompt(&text)).await, 200);
        }
        assert_eq!(p.received().len() - before, prefilled, "{bytes}");
    }
}

fn ranks(engine: &FakeEngine) -> Vec<String> {
    let rank = |request: &crate::harness::engine::ReceivedRequest| {
        request.headers["x-data-parallel-rank"].to_str().unwrap().to_owned()
    };
    engine.received().iter().map(rank).collect()
}

#[tokio::test]
async fn each_data_parallel_rank_has_a_cache_and_a_load_of_its_own() {
    for (policy, large) in [("prefix_aware", false), ("{least_load: {by: tokens}}", true)] {
        let d = FakeEngine::always(Action::WholeGated(1)).await;
        let decode = pool(&[&d], &["data_parallel_size: 2"], &format!("policy: {policy}"));
        let more = "    features: {chunk_bytes: 64, bytes_per_token: 4.0}";
        let system = TestRouter::of(&model("{}", &decode, more)).await;
        let (long, short) = (prompt(&"a".repeat(4_000)), prompt("b"));
        let mut clients = Vec::new();
        for n in 0..5 {
            let mut client = Client::connect(system.address).await;
            client.post("/v1/completions", if large && n > 0 { &short } else { &long }).await;
            await_requests(&d, n + 1).await;
            clients.push(client);
        }
        let ranks = ranks(&d);
        if large {
            assert!(ranks[1..].iter().all(|rank| *rank != ranks[0]), "the other one has less: {ranks:?}");
        } else {
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "the other one holds nothing: {ranks:?}");
        }
        (0..5).for_each(|_| d.open_gate());
        for mut client in clients {
            assert_eq!(client.answer().await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_busy_prefill_pool_is_skipped_unless_disaggregation_is_always() {
    let p = FakeEngine::always(Action::LeaseGated(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    for (more, sent_to_p) in [("", 1), (", always: true", 2)] {
        let more = format!("    disaggregate: {{max_prefill_in_flight: 1{more}}}");
        let system = TestRouter::of(&model(&pool(&[&p], &[], ""), &pool(&[&d], &[], ""), &more)).await;
        let before = p.received().len();
        let mut first = Client::connect(system.address).await;
        first.post("/v1/completions", &completion(false)).await;
        await_requests(&p, before + 1).await;
        let mut second = Client::connect(system.address).await;
        second.post("/v1/completions", &completion(false)).await;
        if sent_to_p == 2 {
            await_requests(&p, before + 2).await;
            p.open_gate();
            p.open_gate();
        }
        assert_eq!(second.answer().await.status, 200);
        if sent_to_p == 1 {
            p.open_gate();
        }
        assert_eq!(first.answer().await.status, 200);
        assert_eq!(p.received().len(), before + sent_to_p);
    }
}
