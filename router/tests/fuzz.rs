//! Replays the fuzzers' corpus: every file unchanged, and in some thousand reproducible mutations.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;

use baton_router::fuzzing;

/// Mutated copies of a target's corpus.
const CHANGED: usize = 3_000;

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3, "{target} has a corpus");
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    corpus.iter().for_each(|bytes| run(bytes));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end.max(1)
    };
    for number in 0..CHANGED {
        let mut bytes = corpus[number % corpus.len()].clone();
        for _ in 0..1 + below(4) {
            let (at, other) = (below(bytes.len()), &corpus[below(corpus.len())]);
            match below(5) {
                0 if !bytes.is_empty() => bytes[at] = u8::try_from(below(256)).unwrap(),
                1 if !bytes.is_empty() => drop(bytes.remove(at)),
                2 => bytes.insert(at, b"\"{}[]:,\\\r\n0-e \0\xff"[below(16)]),
                3 => bytes.truncate(at),
                // The end of another file after the beginning of this one.
                _ => {
                    bytes.truncate(at);
                    bytes.extend_from_slice(&other[below(other.len())..]);
                }
            }
        }
        run(&bytes);
    }
}

#[test]
fn request_json_keeps_its_promises() {
    replay("request_json", fuzzing::request_json);
}

#[test]
fn sse_keeps_its_promises() {
    replay("sse", fuzzing::sse);
}

#[test]
fn config_keeps_its_promises() {
    replay("config", fuzzing::config);
}

#[test]
fn http_head_keeps_its_promises() {
    replay("http_head", fuzzing::http_head);
}

#[test]
fn http_chunks_keeps_its_promises() {
    replay("http_chunks", fuzzing::http_chunks);
}

#[test]
fn prefill_reply_keeps_its_promises() {
    replay("prefill_reply", fuzzing::prefill_reply);
}
