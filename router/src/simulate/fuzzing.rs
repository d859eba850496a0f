//! Entry points for fuzzing: each function accepts any bytes and fails only if an invariant of this crate is
//! broken.
//!
//! Not a public interface. `tests/fuzz/` calls these under a fuzzer, and `tests/fuzz.rs` of this crate replays the
//! corpus.

use baton_connector::RequestId;
use baton_connector::handoff::KvIntent;
use baton_openai::{Endpoint, ParseLimits, RawBody, parse_object, strip};
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::RouterConfig;
use crate::client::http::chunked::{ChunkError, ChunkedReader};
use crate::client::http::head;
use crate::legs::prefill;
use crate::message::path::Dialect;
use crate::message::rewrite::{
    ClientRules, ModelName, RouterFields, TransferParams, decode_body, prefill_body,
};
use crate::message::sse::FrameBuffer;

/// A body from a client: the forwarded body equals the parsed one without its internal fields.
pub fn request_json(bytes: &[u8]) {
    // The limits exclude bounds that only one of the two readers has.
    let limits = ParseLimits { body_bytes: 64 << 10, ..ParseLimits::default() };
    let came = Bytes::copy_from_slice(bytes);
    for endpoint in [Endpoint::Completions, Endpoint::Chat] {
        let read = RawBody::generate(came.clone(), endpoint, &limits, &ClientRules);
        let parsed = parse_object(bytes, &limits).and_then(|mut map| {
            strip(&mut map, &ClientRules);
            baton_openai::GenerateRequest::from_map(endpoint, &map, &limits)
        });
        match (&read, &parsed) {
            (Ok(_), Ok(_)) => {}
            (Err(raw), Err(tree)) => assert_eq!(raw, tree),
            // More fields than the router accepts.
            (Err(raw), Ok(_)) => assert!(raw.message.contains("fields"), "{raw}"),
            (Ok(_), Err(tree)) => panic!("accepted, and refused by the parser: {tree}"),
        }
        if let Ok((body, _)) = read {
            let (dialect, model) = (Dialect::OpenAi(endpoint), ModelName::new("m"));
            let id = RequestId::new("r").expect("an id");
            let sent =
                prefill_body(dialect, &body, &RouterFields::default(), &model, &id, TransferParams::Lease)
                    .pieces()
                    .concat();
            assert_eq!(parse_object(&sent, &limits).expect("one object")["stream"], false);
        }
    }
    let _ = RawBody::responses(came.clone(), &limits, &ClientRules);
    if let Ok(body) = RawBody::any(came, &limits, &ClientRules) {
        let mut expected = parse_object(bytes, &limits).expect("it was read before");
        strip(&mut expected, &ClientRules);
        expected.insert("model".to_owned(), json!("m"));
        let sent = decode_body(&body, &RouterFields::default(), &ModelName::new("m"), None).pieces().concat();
        let sent = parse_object(&sent, &limits).expect("each name once");
        assert_eq!(Value::Object(sent), Value::Object(expected));
    }
}

/// A stream of events in pieces. The first byte determines their length.
pub fn sse(bytes: &[u8]) {
    let Some((&size, stream)) = bytes.split_first() else { return };
    let (mut frames, mut passed, mut done) = (FrameBuffer::default(), Vec::new(), false);
    for piece in stream.chunks(1 + usize::from(size)) {
        let whole = frames.pass(Bytes::copy_from_slice(piece));
        // The second byte of CRLF may come later.
        let blank = |end: &u8| matches!(end, b'\r' | b'\n');
        let ends = whole.is_empty() || whole.last().is_some_and(blank);
        assert!(ends, "half a frame was passed");
        passed.extend_from_slice(&whole);
        assert!(frames.is_done() || !done, "done is done");
        done = frames.is_done();
    }
    assert!(stream.starts_with(&passed), "nothing is changed");
    assert_eq!(
        frames.is_whole(),
        done || passed.len() == stream.len(),
        "only what follows [DONE] is left out"
    );
}

/// A configuration file.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match RouterConfig::from_yaml(text, "fuzz.yaml") {
        Ok(config) => assert!(!config.models.is_empty()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A request's head in pieces. The first byte determines their length.
pub fn http_head(bytes: &[u8]) {
    const BYTES_MAX: usize = 4096;
    let Some((&size, bytes)) = bytes.split_first() else { return };
    let at_once = head::read(bytes, &mut 0, BYTES_MAX);
    let (mut searched, mut in_parts, mut end) = (0, Ok(None), 0);
    while end < bytes.len() && matches!(in_parts, Ok(None)) {
        end = (end + 1 + usize::from(size)).min(bytes.len());
        in_parts = head::read(&bytes[..end], &mut searched, BYTES_MAX);
    }
    assert_eq!(at_once.is_ok(), in_parts.is_ok(), "a split changes the verdict");
    let Ok(Some(head)) = at_once else { return };
    assert_eq!(Ok(Some(head.clone())), in_parts);
    let mut masked = bytes[..head.bytes].to_vec();
    head.mask_internal_fields(&mut masked);
    let masked = masked.to_ascii_lowercase();
    for name in ["\r\ncontent-length:", "\r\ntransfer-encoding:", "\r\nupgrade:"] {
        assert!(!masked.windows(name.len()).any(|window| window == name.as_bytes()), "{name} is left");
    }
}

/// A body in chunks, in pieces. The first byte determines their length.
pub fn http_chunks(bytes: &[u8]) {
    const LIMIT: usize = 1024;
    let Some((&size, bytes)) = bytes.split_first() else { return };
    let decode = |size: usize| -> Result<Option<BytesMut>, ChunkError> {
        let (mut chunks, mut input, mut out) = (ChunkedReader::default(), BytesMut::new(), BytesMut::new());
        for piece in bytes.chunks(size) {
            input.extend_from_slice(piece);
            if chunks.decode(&mut input, &mut out, LIMIT)? {
                return Ok(Some(out));
            }
        }
        Ok(None)
    };
    let (at_once, in_parts) = (decode(bytes.len().max(1)), decode(1 + usize::from(size)));
    assert_eq!(at_once, in_parts, "a split changes the verdict");
    if let Ok(Some(data)) = at_once {
        assert!(data.len() <= LIMIT);
    }
}

/// A prefill engine's reply: forwarded parameters occur in it, complete.
pub fn prefill_reply(bytes: &[u8]) {
    if let Some(params) = prefill::handoff_params(StatusCode::OK, Bytes::copy_from_slice(bytes)) {
        let parsed: Value = serde_json::from_slice(bytes).expect("only JSON is handed on");
        let params: Value = serde_json::from_str(&params).expect("only JSON is handed on");
        assert_eq!(params, parsed["kv_transfer_params"]);
        for needed in ["remote_engine_id", "remote_request_id", "remote_host"] {
            assert!(params[needed].as_str().is_some_and(|text| !text.is_empty()), "{needed}");
        }
        assert!(params["remote_port"].as_u64().is_some_and(|port| port > 0));
        // A Baton engine may still refuse them, but must not panic.
        let _ = KvIntent::parse(&params);
    }
}
