//! The allocations of a router for one body. With locks and caches, they are most of the cost of reading and writing.

mod counting;

use baton_openai::{Endpoint, ParseLimits, RawBody};
use bytes::Bytes;

use counting::allocations;

#[test]
fn an_ordinary_body_is_read_and_written_twice_with_few_allocations() {
    let limits = ParseLimits::of_any_engine(1 << 20);
    let chat = r#"{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],
        "stream":true,"max_tokens":64,"temperature":0.7,"top_p":0.9}"#;
    let completion = r#"{"model":"m","prompt":"a prompt","stream":true,"max_tokens":64,"temperature":0}"#;
    for (endpoint, text) in [(Endpoint::Chat, chat), (Endpoint::Completions, completion)] {
        let bytes = Bytes::from_static(text.as_bytes());
        let (read, reading) = allocations(|| RawBody::generate(bytes, endpoint, &limits, &()));
        let (body, _) = read.expect("an ordinary body");
        let handoff = [b'7'; 600];
        let ours: [(&str, &[u8]); 2] = [("model", b"\"n\""), ("kv_transfer_params", &handoff)];
        let (pieces, writing) = allocations(|| body.write(&ours, &[]));
        assert!(pieces.concat().len() > text.len() + 600);
        assert!(reading <= READING && writing <= WRITING, "{endpoint:?}: {reading} and {writing}");
    }
}

/// The fields; their names; the small fields; the model's name, there and in the outline; and the open names of the
/// walk.
const READING: usize = 6;
/// The text, its reference count, and the list of pieces.
const WRITING: usize = 3;
