//! The fields that are removed from a client's body, and the bodies of both legs.
//!
//! No byte of a client may choose an engine, a handle or a rank. One malformed `kv_transfer_params` ends a stock
//! vLLM 0.32 decode engine, and a well-formed one reads another client's blocks. [`RawBody`] decides which bytes
//! are passed unchanged. This module decides which names are internal.

use baton_connector::RequestId;
use baton_connector::handoff::KvIntent;
use baton_openai::{FieldLevel, InternalFields, RawBody};
use serde_json::{Map, Value};

use crate::message::path::Dialect;
use crate::message::payload::Payload;
use crate::metrics::Leg;

/// Removed at any depth of the body. Stock vLLM also reads these from inside `vllm_xargs`.
const INTERNAL_FIELDS: [&str; 3] = ["kv_transfer_params", "ec_transfer_params", "disaggregated_params"];

/// Removed at the top and inside [`EXTENSIONS`]. The first three name a request inside an engine, which only the
/// router may do. The others choose engines, ranks and handles (vLLM, SGLang, TensorRT-LLM, Dynamo).
const INTERNAL_TOP_FIELDS: [&str; 18] = [
    // The router decides which decode engine may decline a request.
    "cache_hit_threshold",
    "request_id",
    "rid",
    "abort_immediately",
    "do_remote_decode",
    "do_remote_prefill",
    "data_parallel_rank",
    "dp_rank",
    "routed_dp_rank",
    "prefill_dp_rank",
    "decode_dp_rank",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "worker_id",
    "prefill_result",
];

/// As [`INTERNAL_TOP_FIELDS`], for whole families (SGLang's `bootstrap_*`, NixlConnector's `remote_*`).
const INTERNAL_TOP_PREFIXES: [&str; 3] = ["bootstrap_", "remote_", "disagg_"];

/// Objects whose fields engines read as if they were at the top.
const EXTENSIONS: [&str; 6] =
    ["vllm_xargs", "extra_body", "extra_args", "sampling_params", "custom_params", "nvext"];

/// The rules for clients' bodies.
pub(crate) struct ClientRules;

impl InternalFields for ClientRules {
    fn is_extension(&self, field: &str) -> bool {
        EXTENSIONS.contains(&field)
    }

    fn is_internal(&self, level: FieldLevel, name: &str) -> bool {
        INTERNAL_FIELDS.contains(&name)
            || level != FieldLevel::Inside
                && (INTERNAL_TOP_FIELDS.contains(&name)
                    || INTERNAL_TOP_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
    }
}

/// Removed for the prefill leg. `stream_options` is refused without `stream`, and `min_tokens` above `max_tokens`.
/// Stop conditions have no effect on the prompt, and a stop that ends the one token keeps older vLLM from opening
/// a lease.
const UNSET_FOR_PREFILL: [&str; 9] = [
    // Removed only if the client may not set it.
    "priority",
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "ignore_eos",
    "return_token_ids",
];

/// A model's name in bodies, as JSON.
pub(crate) struct ModelName {
    json: Box<str>,
    /// The configuration contains no name: each client gives one, or none.
    is_of_client: bool,
}

impl ModelName {
    pub(crate) fn new(name: &str) -> Self {
        Self { json: json(name).into(), is_of_client: false }
    }

    /// The name in a client's body, which engines know and the router does not.
    pub(crate) fn of_client(name: Option<&str>) -> Self {
        Self { json: name.map_or_else(|| "null".to_owned(), json).into(), is_of_client: true }
    }

    /// `null` without a name.
    pub(crate) fn as_json(&self) -> &str {
        &self.json
    }

    /// Whether an unknown name is the client's error.
    pub(crate) fn is_of_client(&self) -> bool {
        self.is_of_client
    }

    /// The field of a body; `None` if the client's body has the right one.
    pub(crate) fn field(&self) -> Option<(&'static str, &[u8])> {
        (!self.is_of_client).then_some(("model", self.json.as_bytes()))
    }
}

/// The `stream_options` of a stream whose client has none.
const USAGE_OPTIONS: &str = r#"{"include_usage":true,"continuous_usage_stats":false}"#;

/// Maximum fields that the router adds to one body.
const ROUTER_FIELDS_MAX: usize = 12;

/// Fields that the router adds because of the request's owner. None by default.
#[derive(Clone, Debug, Default)]
pub(crate) struct RouterFields {
    /// `cache_salt`, as JSON.
    cache_salt: Option<String>,
    without_priority: bool,
    /// vLLM's `priority`, as JSON.
    priority: Option<String>,
    /// The prefill engine must return the prompt's token ids.
    pub prompt_ids: bool,
    /// `cache_hit_threshold`, as JSON.
    cache_hit_threshold: Option<String>,
    /// The engine must return the output's token ids.
    pub token_ids: bool,
    /// `stream_options` with usage, as JSON, for a stream whose client does not ask for usage.
    stream_options: Option<String>,
}

impl RouterFields {
    /// With this `cache_salt`, where the endpoint supports it, and without the client's `priority`, where the key
    /// may not set it.
    pub(crate) fn new(cache_salt: Option<&str>, without_priority: bool) -> Self {
        Self { cache_salt: cache_salt.map(json), without_priority, ..Self::default() }
    }

    /// The `cache_salt` that the router sets.
    pub(crate) fn cache_salt(&self) -> Option<String> {
        serde_json::from_str(self.cache_salt.as_deref()?).ok()
    }

    /// With this `priority` instead of the client's.
    pub(crate) fn with_priority(self, number: i32) -> Self {
        Self { priority: Some(number.to_string()), ..self }
    }

    /// With this `cache_hit_threshold`: an engine that has cached a smaller share of the prompt generates nothing.
    pub(crate) fn with_cache_hit_threshold(self, share: f64) -> Self {
        Self { cache_hit_threshold: Some(share.to_string()), ..self }
    }

    /// Asks the decode engine for the usage of a stream, in addition to the client's options.
    pub(crate) fn ask_for_usage(&mut self, body: &RawBody) {
        let Some(own) = body.field("stream_options") else {
            self.stream_options = Some(USAGE_OPTIONS.to_owned());
            return;
        };
        let mut options: Map<String, Value> = serde_json::from_slice(own).unwrap_or_default();
        options.insert("include_usage".to_owned(), Value::Bool(true));
        // Without `include_usage` the option has no effect (vLLM), and it must not get one.
        options.insert("continuous_usage_stats".to_owned(), Value::Bool(false));
        self.stream_options = Some(Value::Object(options).to_string());
    }

    /// Whether the engine sends usage that the client did not ask for.
    pub(crate) fn asks_for_usage(&self) -> bool {
        self.stream_options.is_some()
    }

    /// The same for an engine that refuses the usage option.
    pub(crate) fn without_usage(&self) -> Self {
        Self { stream_options: None, ..self.clone() }
    }

    /// Appends the fields for one leg of a protocol without transfer parameters.
    pub(crate) fn add_to<'a>(&'a self, added: &mut Vec<(&'a str, &'a [u8])>, leg: Leg) {
        added.extend(self.fields());
        if let (Leg::Decode, Some(options)) = (leg, &self.stream_options) {
            added.push(("stream_options", options.as_bytes()));
        }
    }

    /// The client's fields that one leg of such a protocol does not get.
    pub(crate) fn unset(&self, leg: Leg) -> &'static [&'static str] {
        match (leg, self.without_priority) {
            (Leg::Prefill, true) => &["stream_options", "priority"],
            (Leg::Prefill, false) => &["stream_options"],
            (Leg::Decode, true) => &["priority"],
            (Leg::Decode, false) => &[],
        }
    }

    /// Sets the fields in a body that the router has written from the client's, without those that the client may not set.
    pub(crate) fn set_in(&self, body: &mut Map<String, Value>) {
        if self.without_priority {
            body.remove("priority");
        }
        for (name, value) in self.fields() {
            let value: Value = serde_json::from_slice(value).expect("the router's own fields are JSON");
            body.insert(name.to_owned(), value);
        }
    }

    fn fields(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let threshold =
            self.cache_hit_threshold.iter().map(|share| ("cache_hit_threshold", share.as_bytes()));
        let priority = self.priority.iter().map(|number| ("priority", number.as_bytes()));
        self.cache_salt.iter().map(|salt| ("cache_salt", salt.as_bytes())).chain(threshold).chain(priority)
    }
}

/// The transfer parameters of the prefill leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferParams<'a> {
    /// The engine leases the blocks.
    Lease,
    /// The same, after it has read the blocks that these parameters of a decode engine name.
    Kept(&'a str),
    /// The same, with the request's id as the name of the transfer. vLLM's push connector will match its legs by it
    /// (vLLM's docs/design/nixl_kv_push_connector.md), and 0.33 ignores it.
    LeaseWithId,
    None,
}

/// Bytes of a `user` that the prefill leg's transfer parameters repeat, with its quotes. Engines use it as a tag.
const TAG_JSON_BYTES_MAX: usize = 66;

/// The body of the prefill leg: one token, not streamed, with a lease for the holder of the handle. The transfer
/// parameters contain the router's id of the request and a short `user`, because not every front end passes these to
/// its engine.
pub(crate) fn prefill_body(
    dialect: Dialect,
    body: &RawBody,
    router_fields: &RouterFields,
    model: &ModelName,
    request: &RequestId,
    transfer: TransferParams<'_>,
) -> Payload {
    let params = if let TransferParams::Kept(kept) = transfer { kept } else { KvIntent::PRODUCE_REQUEST };
    let params = params.strip_suffix('}').expect("it is a JSON object with members");
    let tag = body.field("user").filter(|user| user.starts_with(b"\"") && user.len() <= TAG_JSON_BYTES_MAX);
    let tag = tag.and_then(|user| std::str::from_utf8(user).ok());
    let tag = tag.map_or_else(String::new, |user| format!(",\"router_user\":{user}"));
    let id = json(request.as_str());
    let name = match transfer {
        TransferParams::LeaseWithId => format!(",\"transfer_id\":{id}"),
        TransferParams::Lease | TransferParams::Kept(_) | TransferParams::None => String::new(),
    };
    let params = format!("{params},\"router_request_id\":{id}{name}{tag}}}");
    let mut added: Vec<(&str, &[u8])> = Vec::with_capacity(ROUTER_FIELDS_MAX);
    added.extend(model.field());
    added.extend([("stream", b"false" as &[u8]), (dialect.length_field(), b"1")]);
    if transfer != TransferParams::None {
        added.push(("kv_transfer_params", params.as_bytes()));
    }
    // Only fields of the client: older engines refuse unknown fields.
    for name in ["max_completion_tokens", "max_output_tokens", "n", "best_of"] {
        if body.has(name) {
            added.push((name, b"1"));
        }
    }
    // No client can retrieve what the prefill engine would store, and storing is the API's default.
    if dialect == Dialect::Responses {
        added.push(("store", b"false"));
    }
    added.extend(router_fields.fields());
    if router_fields.prompt_ids {
        added.push(("return_token_ids", b"true"));
    }
    let unset = if router_fields.without_priority { &UNSET_FOR_PREFILL[..] } else { &UNSET_FOR_PREFILL[1..] };
    body.write(&added, unset).into()
}

/// The body of the decode leg: the client's request, with the producer's handoff unchanged (JSON), or without one.
pub(crate) fn decode_body(
    body: &RawBody,
    router_fields: &RouterFields,
    model: &ModelName,
    handoff: Option<&str>,
) -> Payload {
    let mut added: Vec<(&str, &[u8])> = Vec::with_capacity(ROUTER_FIELDS_MAX);
    added.extend(model.field());
    added.extend(handoff.map(|handoff| ("kv_transfer_params", handoff.as_bytes())));
    added.extend(router_fields.fields());
    if router_fields.token_ids {
        added.push(("return_token_ids", b"true"));
    }
    if let Some(options) = &router_fields.stream_options {
        added.push(("stream_options", options.as_bytes()));
    }
    body.write(&added, if router_fields.without_priority { &["priority"] } else { &[] }).into()
}

fn json(text: &str) -> String {
    serde_json::to_string(text).expect("a string can be written as JSON")
}

#[cfg(test)]
#[path = "../../tests/router/input/hostile_bodies.rs"]
pub(crate) mod hostile;

#[cfg(test)]
mod tests {
    use baton_openai::{Endpoint, ParseLimits};
    use bytes::Bytes;
    use serde_json::json;

    use super::hostile::{HostileBody, TestRng, hostile, is_marked};
    use super::*;

    const COMPLETIONS: Dialect = Dialect::OpenAi(Endpoint::Completions);

    fn body(value: &Value) -> RawBody {
        let bytes = Bytes::from(value.to_string());
        RawBody::any(bytes, &ParseLimits::default(), &ClientRules).expect("tests pass objects")
    }

    fn model() -> ModelName {
        ModelName::new("m")
    }

    fn id() -> RequestId {
        RequestId::new("r-1").expect("an id")
    }

    fn prefill(dialect: Dialect, body: &RawBody, id: &RequestId) -> Payload {
        prefill_body(dialect, body, &RouterFields::default(), &model(), id, TransferParams::Lease)
    }

    fn read(payload: &Payload) -> Value {
        serde_json::from_slice(&payload.pieces().concat()).expect("JSON")
    }

    #[test]
    fn internal_fields_are_removed_at_every_position() {
        let body = body(&json!({
            "model": "m", "prompt": "x", "kv_transfer_params": {"remote_host": "MARK"},
            "request_id": "MARK", "rid": "MARK", "bootstrap_room": "MARK", "remote_host": "MARK",
            "data_parallel_rank": "MARK", "do_remote_prefill": "MARK",
            "vllm_xargs": {"kv_transfer_params": "MARK", "remote_port": "MARK", "mine": 1},
            "extra_body": {"nvext": {"backend_instance_id": "MARK", "kept": 2}},
            "metadata": {"deep": [{"kv_transfer_params": "MARK", "remote_control": "kept"}]},
        }));
        let text = read(&decode_body(&body, &RouterFields::default(), &model(), None)).to_string();
        assert!(!text.contains("MARK"), "{text}");
        for kept in ["\"mine\":1", "\"kept\":2", "\"remote_control\":\"kept\""] {
            assert!(text.contains(kept), "{text}");
        }
    }

    #[test]
    fn the_prefill_leg_requests_one_token_and_keeps_unknown_fields() {
        let body = body(&json!({
            "model": "alias", "prompt": "x", "stream": true, "stream_options": {"include_usage": true},
            "max_tokens": 64, "min_tokens": 5, "n": 3, "temperature": 0.5, "mystery": [1],
        }));
        let sent = read(&prefill(COMPLETIONS, &body, &id()));
        assert_eq!(sent["model"], "m");
        assert_eq!((&sent["stream"], &sent["max_tokens"], &sent["n"]), (&json!(false), &json!(1), &json!(1)));
        for gone in ["stream_options", "min_tokens", "max_completion_tokens"] {
            assert!(sent.get(gone).is_none(), "{gone}");
        }
        assert_eq!(sent["mystery"], json!([1]));
        assert_eq!(sent["kv_transfer_params"]["do_remote_decode"], true);
    }

    #[test]
    fn the_prefill_leg_contains_the_routers_request_id_and_none_of_a_client() {
        let params = json!({"router_request_id": "MARK", "do_remote_decode": true});
        let body = body(&json!({"prompt": "x", "kv_transfer_params": params}));
        let id = RequestId::new("a\"quoted\\id").expect("printable");
        let sent = read(&prefill(COMPLETIONS, &body, &id));
        let params = &sent["kv_transfer_params"];
        assert_eq!(params["router_request_id"], id.as_str());
        assert_eq!(KvIntent::parse(params), Ok(Some(KvIntent::Produce { consumers: 1 })));
    }

    #[test]
    fn a_short_user_is_repeated_for_the_engine_and_a_long_or_other_one_is_not() {
        let repeated = |user: Value| {
            let body = body(&json!({"prompt": "x", "user": user}));
            let sent = read(&prefill(COMPLETIONS, &body, &id()));
            sent["kv_transfer_params"].get("router_user").cloned()
        };
        for user in [json!("d-17"), json!("say \"hi\""), json!("x".repeat(64))] {
            assert_eq!(repeated(user.clone()), Some(user));
        }
        for user in [json!("x".repeat(65)), json!(7), json!(null), json!(["a"])] {
            assert_eq!(repeated(user), None);
        }
    }

    #[test]
    fn the_prefill_leg_of_a_response_is_short_and_not_stored() {
        for store in [json!({"store": true}), json!({})] {
            let mut fields = json!({"input": "x", "max_output_tokens": 9, "stream": true});
            fields.as_object_mut().unwrap().extend(store.as_object().unwrap().clone());
            let body = body(&fields);
            let sent = read(&prefill(Dialect::Responses, &body, &id()));
            assert_eq!((&sent["max_output_tokens"], &sent["store"]), (&json!(1), &json!(false)));
            assert_eq!((sent.get("background"), sent.get("max_tokens")), (None, None));
        }
    }

    #[test]
    fn the_prefill_leg_of_a_message_is_one_token_of_the_same_prompt() {
        let fields = json!({"model": "alias", "system": "s", "messages": [], "max_tokens": 64, "stream": true,
            "stop_sequences": ["a"], "thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [],
            "kv_transfer_params": {"remote_host": "x"}});
        let body = body(&fields);
        let sent = read(&prefill(Dialect::Messages, &body, &id()));
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&json!(1), &json!(false)));
        assert_eq!(
            (sent.get("stop_sequences"), &sent["kv_transfer_params"]["do_remote_decode"]),
            (None, &json!(true))
        );
        for kept in ["system", "messages", "thinking", "tools"] {
            assert_eq!(sent[kept], fields[kept], "{kept}");
        }
    }

    #[test]
    fn the_decode_leg_is_the_clients_request_and_the_handoff_verbatim() {
        let body = body(&json!({"model": "m", "prompt": "x", "max_tokens": 64, "stream": true}));
        let handoff = json!({"remote_handle": "00", "future_field": {"kept": [1, 2]}});
        let written = decode_body(&body, &RouterFields::default(), &model(), Some(&handoff.to_string()));
        let sent = read(&written);
        assert_eq!(sent["kv_transfer_params"], handoff);
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&json!(64), &json!(true)));
        assert!(
            read(&decode_body(&body, &RouterFields::default(), &model(), None))
                .get("kv_transfer_params")
                .is_none()
        );
        let bytes = written.pieces().concat();
        let text = std::str::from_utf8(&bytes).expect("JSON is text");
        assert!(text.find("kv_transfer_params") < text.find("prompt"), "in front: {text}");
    }

    #[test]
    fn a_hundred_thousand_hostile_bodies_add_no_internal_field_to_a_leg() {
        let (limits, mut dice, model) = (ParseLimits::default(), TestRng(4), model());
        let (handoff, mut served) = (r#"{"remote_handle":"00"}"#, 0);
        for number in 0..100_000 {
            let HostileBody { path, body, expected_texts: kept, refused } = hostile(&mut dice);
            let bytes = || Bytes::from(body.clone());
            let dialect = Dialect::at(path);
            let read = match dialect {
                Some(Dialect::OpenAi(endpoint)) => {
                    RawBody::generate(bytes(), endpoint, &limits, &ClientRules).map(|(raw, _)| raw)
                }
                Some(Dialect::Responses) => {
                    RawBody::responses(bytes(), &limits, &ClientRules).map(|(raw, _)| raw)
                }
                Some(Dialect::Messages) => {
                    RawBody::messages(bytes(), &limits, &ClientRules).map(|(raw, _)| raw)
                }
                Some(Dialect::Passthrough(_)) | None => RawBody::any(bytes(), &limits, &ClientRules),
            };
            assert_eq!(read.is_err(), refused, "{number}: {path} {body}: {:?}", read.map(drop));
            let Ok(raw) = read else { continue };
            served += 1;
            let any = RawBody::any(bytes(), &limits, &ClientRules).expect("it was read before");
            let mut sent = vec![
                decode_body(&raw, &RouterFields::default(), &model, Some(handoff)),
                decode_body(&raw, &RouterFields::default(), &model, None),
                decode_body(&any, &RouterFields::default(), &model, None),
            ];
            let prefill = |dialect| {
                prefill_body(dialect, &raw, &RouterFields::default(), &model, &id(), TransferParams::Lease)
            };
            sent.extend(dialect.map(prefill));
            for sent in sent {
                let sent = sent.pieces().concat();
                assert!(!is_marked(&sent), "{number}: {body}\n{}", String::from_utf8_lossy(&sent));
                let text = String::from_utf8(sent).expect("JSON is text");
                let lost = kept.iter().find(|kept| !text.contains(*kept));
                assert_eq!(lost, None, "{number}: {body}\n{text}");
            }
        }
        assert!(served > 90_000, "{served}");
    }
}
