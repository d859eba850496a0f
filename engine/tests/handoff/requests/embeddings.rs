//! `/v1/embeddings`: the vectors are those of transformers, and no batch, chunk or cache changes a bit of them.

use std::path::Path;

use baton_engine::run::options::{EngineOptions, Role};
use baton_engine::scheduler::sequence::Pooling;
use serde_json::{Value, json};

use crate::harness::cluster::{LLAMA, Node, greedy, options, prompt, with};

fn node(change: impl Fn(&mut EngineOptions)) -> Node {
    let mut options = options(LLAMA, Role::Both);
    change(&mut options);
    Node::start(options)
}

fn embed(node: &Node, input: &Value) -> Value {
    node.post("/v1/embeddings", &json!({"model": LLAMA, "input": input})).ok()
}

fn vectors(reply: &Value) -> Vec<Vec<f64>> {
    let data = reply["data"].as_array().expect("a list");
    let vector = |entry: &Value| {
        let values = entry["embedding"].as_array().expect("numbers").iter();
        values.map(|value| value.as_f64().expect("a number")).collect()
    };
    data.iter().map(vector).collect()
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embeddings.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("the fixture is there")).expect("JSON")
}

#[test]
fn embeddings_are_those_of_transformers() {
    let golden = golden();
    for (pooling, name) in [(Pooling::Last, "last"), (Pooling::Mean, "mean")] {
        let engine = node(|options| options.pooling = pooling);
        let reply = embed(&engine, &golden["prompt"]);
        let (found, wanted) = (&vectors(&reply)[0], golden[name].as_array().expect("a vector"));
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            let wanted = wanted.as_f64().expect("a number");
            assert!((found - wanted).abs() < 2e-5, "{name}: {found}, not {wanted}");
        }
        assert_eq!(reply["usage"], json!({"prompt_tokens": 45, "total_tokens": 45}), "{reply}");
        assert_eq!((&reply["object"], &reply["model"]), (&"list".into(), &LLAMA.into()));
        engine.is_clean();
    }
}

#[test]
fn neither_batch_nor_chunks_nor_caches_change_a_bit() {
    let inputs: Vec<Vec<u32>> = (0..5).map(|seed| prompt(seed, 20 + 13 * seed as usize)).collect();
    for pooling in [Pooling::Last, Pooling::Mean] {
        let engine = node(|options| options.pooling = pooling);
        let alone: Vec<_> =
            inputs.iter().map(|input| vectors(&embed(&engine, &json!(input))).remove(0)).collect();
        assert_eq!(vectors(&embed(&engine, &json!(inputs))), alone, "together, with a cache: {pooling:?}");
        engine.forget();
        assert_eq!(vectors(&embed(&engine, &json!(inputs))), alone, "together, without a cache: {pooling:?}");
        // A text beside it, and its prefix in the cache.
        engine.generate("beside", &greedy(&inputs[4], 20)).ok();
        assert_eq!(vectors(&embed(&engine, &json!(inputs[4])))[0], alone[4]);
        let wide = node(|options| {
            options.pooling = pooling;
            options.max_num_batched_tokens = 512;
        });
        assert_eq!(vectors(&embed(&wide, &json!(inputs))), alone, "in one chunk: {pooling:?}");
        engine.is_clean();
        wide.is_clean();
    }
}

#[test]
fn the_example_of_the_reference_is_served() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/api.md");
    let page = std::fs::read_to_string(page).expect("docs/reference/api.md is there");
    let (_, section) = page.split_once("## Embeddings").expect("the section");
    let (_, rest) = section.split_once("```json\n").expect("an example");
    let example: Value = serde_json::from_str(rest.split("```").next().unwrap_or_default()).expect("JSON");
    let engine = node(|options| options.served.model = example["model"].as_str().map(str::to_owned));
    let found = vectors(&engine.post("/v1/embeddings", &example).ok());
    assert_eq!(found.len(), 2);
    for vector in found {
        let length: f64 = vector.iter().map(|value| value * value).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
}

#[test]
fn base64_has_the_same_bits_and_refusals_name_their_field() {
    let engine = node(|_| {});
    let body = json!({"model": LLAMA, "input": "one two"});
    let floats = vectors(&engine.post("/v1/embeddings", &body).ok()).remove(0);
    let coded = engine.post("/v1/embeddings", &with(&body, "encoding_format", json!("base64"))).ok();
    let coded = coded["data"][0]["embedding"].as_str().expect("base64").to_owned();
    assert_eq!(coded.len(), (4 * floats.len()).div_ceil(3) * 4);
    // The first three values are the first twelve bytes.
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let bits = coded.bytes().take(16).fold(0_u128, |bits, c| bits << 6 | u128::from(digit(c)));
    let bytes = bits.to_be_bytes();
    for (at, value) in floats.iter().take(3).enumerate() {
        let start = 4 + 4 * at;
        let found = f32::from_le_bytes(bytes[start..start + 4].try_into().expect("four bytes"));
        assert_eq!(found, *value as f32);
    }
    let long = json!(vec![300; 5_000]);
    for (field, value, wanted) in [
        ("dimensions", json!(8), "dimensions"),
        ("encoding_format", json!("hex"), "encoding_format"),
        ("input", json!([]), "input"),
        ("input", json!([1_000_000]), "input[0]"),
        ("input", long, "input"),
        ("model", json!("other"), "model"),
    ] {
        let reply = engine.post("/v1/embeddings", &with(&body, field, value));
        assert!(matches!(reply.status, 400 | 404), "{}", reply.text);
        assert_eq!(reply.json()["error"]["param"], wanted, "{}", reply.text);
    }
    engine.is_clean();
}
