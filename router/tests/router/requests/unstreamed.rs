//! Whole responses: compressed, large, and read slowly.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, event, handoff};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";
const HANDLE: u128 = 0xabc;
const MIB: usize = 1 << 20;

/// Each coding's name and the encoded data.
fn coded(data: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(data).unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
    zlib.write_all(data).unwrap();
    let mut bare = DeflateEncoder::new(Vec::new(), Compression::fast());
    bare.write_all(data).unwrap();
    let mut brotli = brotli::CompressorWriter::new(Vec::new(), 4096, 3, 18);
    brotli.write_all(data).unwrap();
    vec![
        ("gzip", gzip.finish().unwrap()),
        ("deflate", zlib.finish().unwrap()),
        ("deflate", bare.finish().unwrap()),
        ("br", brotli.into_inner()),
        ("zstd", zstd::encode_all(data, 1).unwrap()),
    ]
}

fn json_in(coding: &'static str) -> Vec<(&'static str, &'static str)> {
    vec![("content-type", "application/json"), ("content-encoding", coding)]
}

fn text(bytes: usize) -> Value {
    json!({"id": "d", "choices": [{"text": "t".repeat(bytes)}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
}

#[tokio::test]
async fn an_unrequested_compression_is_removed_for_the_client() {
    let answer = text(40_000);
    let frames = format!("{}{}data: [DONE]\n\n", event(0), event(1));
    for (coding, bytes) in coded(answer.to_string().as_bytes()) {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Answer(200, json_in(coding), bytes)).await;
        let system = TestRouter::with(&[&p], &[&d], "    protocol: vllm", "").await;
        for path in [PATH, "/v1/embeddings"] {
            let read = post(system.address, path, &json!({"model": "m", "prompt": "x", "input": "x"})).await;
            assert_eq!((read.status, read.json()), (200, answer.clone()), "{coding} {path}");
            assert_eq!(read.header("content-encoding"), None);
        }
        let tokens = "baton_router_tokens_total{kind=\"completion\"}";
        assert_eq!(system.metric(tokens).await, 4.0, "{coding}: usage is read from what is decoded");
        for engine in [&p, &d] {
            assert_eq!(engine.received()[0].headers["accept-encoding"], "identity");
        }
        assert_eq!(d.connections(), 1, "{coding}: its connection is used again");
        system.settled().await;
        assert_eq!((p.releases().len(), p.aborts().len(), d.aborts().len()), (0, 0, 0));
    }
    for (coding, bytes) in coded(frames.as_bytes()) {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let headers = vec![("content-type", "text/event-stream"), ("content-encoding", coding)];
        let d = FakeEngine::always(Action::Answer(200, headers, bytes)).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let read = post(system.address, PATH, &completion(true)).await;
        assert_eq!((read.status, read.text()), (200, frames.clone()), "{coding}");
        system.counts("baton_router_requests_total{model=\"m\",outcome=\"completed\"}", 1.0).await;
    }
}

#[tokio::test]
async fn a_prefill_engines_compressed_reply_keeps_its_lease() {
    let reply = json!({"id": "p", "kv_transfer_params": handoff(Some(HANDLE))});
    for (coding, bytes) in coded(reply.to_string().as_bytes()) {
        let p = FakeEngine::always(Action::Answer(200, json_in(coding), bytes)).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
        assert_eq!(d.received()[0].body["kv_transfer_params"], handoff(Some(HANDLE)), "{coding}");
        system.settled().await;
        assert!(p.releases().is_empty() && p.aborts().is_empty(), "{coding}");
    }
}

#[tokio::test]
async fn a_compressed_refusal_keeps_its_message_on_either_leg() {
    let body = json!({"error": {"message": "`n` is 7", "type": "x", "param": "n", "code": "odd"}});
    for (coding, bytes) in coded(body.to_string().as_bytes()) {
        let refuses = || FakeEngine::always(Action::Answer(400, json_in(coding), bytes.clone()));
        let (p, d) = (FakeEngine::always(Action::Lease(Some(HANDLE))).await, refuses().await);
        let (first, second) = (refuses().await, FakeEngine::always(Action::Whole(1)).await);
        for system in [TestRouter::start(&[&p], &[&d]).await, TestRouter::start(&[&first], &[&second]).await]
        {
            let answer = post(system.address, PATH, &completion(false)).await;
            assert_eq!((answer.status, answer.code().as_str()), (400, "odd"), "{coding}");
            assert_eq!(answer.json()["error"]["message"], "`n` is 7", "{coding}");
            assert_eq!(answer.json()["error"]["param"], "n", "{coding}");
            system.settled().await;
        }
    }
}

#[tokio::test]
async fn an_undecodable_response_is_a_502_and_its_lease_is_released() {
    let why = "content coding";
    let body = text(40_000).to_string();
    let cut = |(coding, bytes): (&'static str, Vec<u8>)| (coding, bytes[..bytes.len() - 9].to_vec());
    let mut odd: Vec<_> = coded(body.as_bytes()).into_iter().map(cut).collect();
    odd.push(("snappy", body.clone().into_bytes()));
    odd.push(("gzip", body.clone().into_bytes()));
    odd.push(("gzip, br", body.clone().into_bytes()));
    for (coding, bytes) in odd {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Answer(200, json_in(coding), bytes.clone())).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        for path in [PATH, "/v1/embeddings"] {
            let read = post(system.address, path, &json!({"model": "m", "prompt": "x", "input": "x"})).await;
            assert_eq!((read.status, read.code().as_str()), (502, "bad_gateway"), "{coding} {path}");
            assert!(read.text().contains(why), "{coding} {path}: {}", read.text());
        }
        system.settled().await;
        assert_eq!(p.releases().len(), 1, "{coding}: what D did not settle is given back");

        // A reply that cannot be decoded: its lease is ended by the request's id.
        let p = FakeEngine::always(Action::Answer(200, json_in(coding), bytes)).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let no_fallback = "    fallback: none";
        let system = TestRouter::with(&[&p], &[&d], no_fallback, "").await;
        let read = post(system.address, PATH, &completion(false)).await;
        assert_eq!(read.status, 502, "{coding}");
        assert!(read.text().contains(why), "{coding}: {}", read.text());
        p.wait("the abort", |p| p.aborts().len() == 1).await;
        system.settled().await;
    }
    let d = FakeEngine::always(Action::Answer(400, json_in("snappy"), body.into_bytes())).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let read = post(system.address, PATH, &completion(false)).await;
    assert_eq!((read.status, read.code().as_str()), (400, ""), "a refusal is judged by its status");
}

#[tokio::test]
async fn a_small_answer_that_expands_without_end_takes_no_memory() {
    let (open, close) = (&br#"{"text":""#[..], &br#""}"#[..]);
    let spaces = std::io::repeat(b' ').take((96 * MIB - open.len() - close.len()) as u64);
    let bomb = zstd::encode_all(open.chain(spaces).chain(close), 1).unwrap();
    assert!(bomb.len() < MIB);
    let d = FakeEngine::scripted(vec![
        Action::Answer(400, json_in("zstd"), bomb.clone()),
        Action::Answer(200, json_in("zstd"), bomb),
    ])
    .await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes_total: 1048576}").await;
    let read = post(system.address, PATH, &completion(false)).await;
    assert_eq!((read.status, read.text().contains("refused")), (400, true));
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    assert_eq!(client.head().await.0, 200);
    let mut bytes = 0;
    while let Some(chunk) = client.chunk().await {
        bytes += chunk.len();
    }
    assert_eq!(bytes, 96 * MIB, "it is passed on as it comes");
}

#[tokio::test]
async fn an_engine_that_dies_in_a_large_answer_is_to_blame_and_not_the_client() {
    let whole = |outcome: &str| format!("baton_router_requests_total{{model=\"m\",outcome=\"{outcome}\"}}");
    // Buffered: the client has received nothing yet.
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::PartAndDie(4 * MIB)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let read = post(system.address, PATH, &completion(false)).await;
    assert_eq!((read.status, read.code().as_str()), (502, "bad_gateway"));
    system.counts(&whole("stream_broken"), 1.0).await;
    // Relayed unbuffered: the response is cut.
    let system = TestRouter::with(&[&p], &[&d], "", "limits: {body_bytes_total: 1048576}").await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    let (status, head) = client.head().await;
    assert!(status == 200 && head.contains("chunked"), "{head}");
    assert!(client.is_cut().await, "no last chunk");
    system.counts(&whole("stream_broken"), 1.0).await;
    system.counts("baton_router_requests_total{code=\"2xx\",outcome=\"stream_broken\"}", 1.0).await;
    assert_eq!(system.metric(&whole("client_gone")).await, 0.0);
    assert_eq!(system.metric("baton_router_disconnects_total").await, 0.0);
    system.counts("baton_router_engine_errors_total{reason=\"died\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_slow_reader_of_an_unstreamed_response_holds_no_engine_capacity() {
    for path in [PATH, "/v1/embeddings"] {
        let d = FakeEngine::scripted(vec![Action::Whole(24 * MIB), Action::Whole(1)]).await;
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
             models: [{{name: m, decode: {{engines: [{{url: '{}', max_in_flight: 1}}]}}}}]",
            d.url()
        );
        let system = TestRouter::of(&yaml).await;
        let body = json!({"model": "m", "prompt": "x", "input": "x"});
        let mut slow = Client::connect(system.address).await;
        slow.post(path, &body).await;
        d.wait("it has the request", |d| d.received().len() == 1).await;
        // The client reads nothing until another request was served in its place.
        assert_eq!(post(system.address, path, &body).await.status, 200, "{path}");
        assert!(system.metric("baton_router_requests_in_flight").await >= 1.0, "the first is not read");
        assert!(slow.answer().await.body.len() > 24 * MIB);
        system.settled().await;
        system.counts("baton_router_answer_bytes", 0.0).await;
    }
}

#[tokio::test]
async fn answers_that_do_not_fit_together_are_passed_on_as_they_come() {
    let d = FakeEngine::always(Action::Whole(24 * MIB)).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes_total: 41943040}").await;
    let body = json!({"model": "m", "input": "x"});
    let mut clients = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(system.address).await;
        client.post("/v1/embeddings", &body).await;
        clients.push(client);
    }
    // Each response has begun, and none is read further, so the buffers stay occupied.
    let (mut passed, mut held) = (Vec::new(), Vec::new());
    for mut client in clients {
        let (status, head) = client.head().await;
        assert_eq!(status, 200);
        match head.contains("chunked") {
            true => passed.push(client),
            false => held.push(client),
        }
    }
    assert!(passed.len() >= 3, "{} of 4 are passed on, and 40 MiB hold one", passed.len());
    for mut client in passed {
        let mut bytes = 0;
        while let Some(chunk) = client.chunk().await {
            bytes += chunk.len();
        }
        assert!(bytes > 24 * MIB);
    }
    drop(held);
    system.settled().await;
    // The budget refuses requests only.
    assert_eq!(post(system.address, "/v1/embeddings", &body).await.status, 200);
}
