//! What is taken out of a client's body, and what each leg is sent instead.
//!
//! No byte of a client may choose an engine, a handle or a rank: one malformed `kv_transfer_params` ends a
//! stock vLLM 0.32 decode engine, and a well-formed one reads another client's blocks. Bodies are never
//! patched as text: what an engine gets is written anew from what was parsed, so there is nothing that two
//! parsers could read differently.

use baton_connector::handoff::KvIntent;
use bytes::Bytes;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

/// Taken out wherever it is in the body. Stock vLLM also reads it from inside `vllm_xargs`.
const STRIPPED_EVERYWHERE: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];

/// Taken out at the top and inside [`EXTENSION_OBJECTS`]. `request_id` and `rid` name a request inside an
/// engine, and only the router does that.
const STRIPPED: [&str; 6] =
    ["request_id", "rid", "data_parallel_rank", "do_remote_decode", "do_remote_prefill", "abort_immediately"];

/// As [`STRIPPED`], for whole families (SGLang's `bootstrap_*`, NixlConnector's `remote_*`).
const STRIPPED_PREFIXES: [&str; 2] = ["bootstrap_", "remote_"];

/// Objects whose fields engines read as if they stood at the top.
const EXTENSION_OBJECTS: [&str; 6] =
    ["vllm_xargs", "extra_body", "extra_args", "sampling_params", "custom_params", "nvext"];

/// Takes everything internal out of a client's body.
pub(crate) fn strip(body: &mut Map<String, Value>) {
    body.retain(|name, _| !is_internal(name));
    for name in EXTENSION_OBJECTS {
        if let Some(Value::Object(fields)) = body.get_mut(name) {
            fields.retain(|name, _| !is_internal(name));
        }
    }
    body.values_mut().for_each(strip_nested);
}

fn is_internal(name: &str) -> bool {
    STRIPPED.contains(&name)
        || STRIPPED_EVERYWHERE.contains(&name)
        || STRIPPED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// As deep as the parser goes, which is bounded.
fn strip_nested(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !STRIPPED_EVERYWHERE.contains(&name.as_str()));
            fields.values_mut().for_each(strip_nested);
        }
        Value::Array(items) => items.iter_mut().for_each(strip_nested),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Not for the prefill leg. `stream_options` is refused without `stream`, and `min_tokens` above `max_tokens`; what
/// ends an answer has no bearing on its prompt, and a stop that ends the one token keeps older vLLM from lending.
const UNSET_FOR_PREFILL: [&str; 7] = [
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "return_token_ids",
];

/// The prefill leg: one token, not streamed, lent to whoever comes with the handle.
pub(crate) fn prefill_body(body: &Map<String, Value>, model: &str) -> Bytes {
    let mut set = vec![
        ("model", json!(model)),
        ("stream", json!(false)),
        ("max_tokens", json!(1)),
        ("kv_transfer_params", KvIntent::produce_request()),
    ];
    // Only where the client had them: older engines refuse fields that they do not know.
    for name in ["max_completion_tokens", "max_output_tokens", "n", "best_of"] {
        if body.contains_key(name) {
            set.push((name, json!(1)));
        }
    }
    write(&Rewritten { body, set: &set, unset: &UNSET_FOR_PREFILL })
}

/// The decode leg: the client's request, with the producer's handoff unopened, or with none.
pub(crate) fn decode_body(body: &Map<String, Value>, model: &str, handoff: Option<&Value>) -> Bytes {
    let mut set = vec![("model", json!(model))];
    set.extend(handoff.map(|handoff| ("kv_transfer_params", handoff.clone())));
    write(&Rewritten { body, set: &set, unset: &[] })
}

/// A body with some fields set and some taken out, written without copying the rest.
struct Rewritten<'a> {
    body: &'a Map<String, Value>,
    set: &'a [(&'static str, Value)],
    unset: &'a [&'static str],
}

impl Serialize for Rewritten<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_map(None)?;
        // First what is ours: of a body that is cut off on its way, or too large for an engine, the handoff has arrived.
        for (name, value) in self.set {
            out.serialize_entry(name, value)?;
        }
        for (name, value) in self.body {
            let replaced = self.set.iter().any(|(set, _)| set == name);
            if !replaced && !self.unset.contains(&name.as_str()) {
                out.serialize_entry(name, value)?;
            }
        }
        out.end()
    }
}

fn write(body: &Rewritten<'_>) -> Bytes {
    serde_json::to_vec(body).expect("what was parsed from JSON can be written as JSON").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            _ => unreachable!("tests pass objects"),
        }
    }

    fn read(body: &Bytes) -> Value {
        serde_json::from_slice(body).expect("JSON")
    }

    #[test]
    fn nothing_internal_survives_wherever_it_hides() {
        let mut body = object(json!({
            "model": "m", "prompt": "x", "kv_transfer_params": {"remote_host": "MARK"},
            "request_id": "MARK", "rid": "MARK", "bootstrap_room": "MARK", "remote_host": "MARK",
            "data_parallel_rank": "MARK", "do_remote_prefill": "MARK",
            "vllm_xargs": {"kv_transfer_params": "MARK", "remote_port": "MARK", "mine": 1},
            "metadata": {"deep": [{"kv_transfer_params": "MARK", "remote_control": "kept"}]},
        }));
        strip(&mut body);
        let text = Value::Object(body).to_string();
        assert!(!text.contains("MARK"), "{text}");
        assert!(text.contains("\"mine\":1") && text.contains("kept"), "{text}");
    }

    #[test]
    fn the_prefill_leg_asks_for_one_token_and_keeps_what_it_does_not_know() {
        let body = object(json!({
            "model": "alias", "prompt": "x", "stream": true, "stream_options": {"include_usage": true},
            "max_tokens": 64, "min_tokens": 5, "n": 3, "temperature": 0.5, "mystery": [1],
        }));
        let sent = read(&prefill_body(&body, "m"));
        assert_eq!(sent["model"], "m");
        assert_eq!((&sent["stream"], &sent["max_tokens"], &sent["n"]), (&json!(false), &json!(1), &json!(1)));
        for gone in ["stream_options", "min_tokens", "max_completion_tokens"] {
            assert!(sent.get(gone).is_none(), "{gone}");
        }
        assert_eq!(sent["mystery"], json!([1]));
        assert_eq!(sent["kv_transfer_params"]["do_remote_decode"], true);
    }

    #[test]
    fn the_decode_leg_is_the_clients_request_and_the_handoff_verbatim() {
        let body = object(json!({"model": "m", "prompt": "x", "max_tokens": 64, "stream": true}));
        let handoff = json!({"remote_handle": "00", "future_field": {"kept": [1, 2]}});
        let sent = read(&decode_body(&body, "m", Some(&handoff)));
        assert_eq!(sent["kv_transfer_params"], handoff);
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&json!(64), &json!(true)));
        assert!(read(&decode_body(&body, "m", None)).get("kv_transfer_params").is_none());
        let written = decode_body(&body, "m", Some(&handoff));
        let text = std::str::from_utf8(&written).expect("JSON is text");
        assert!(text.find("kv_transfer_params") < text.find("prompt"), "in front: {text}");
    }
}
