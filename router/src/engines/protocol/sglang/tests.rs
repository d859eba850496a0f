//! Bodies and rooms of SGLang legs.

use baton_openai::{Endpoint, ParseLimits};

use super::*;
use crate::message::rewrite::{ClientRules, ModelName, RouterFields};
use baton_openai::RawBody;

fn raw(body: &Value) -> RawBody {
    RawBody::any(Bytes::from(body.to_string()), &ParseLimits::default(), &ClientRules).expect("an object")
}

fn sent(body: &Value, prompts: usize, of: Leg) -> Value {
    let (raw, fields, model) = (raw(body), RouterFields::default(), ModelName::new("m"));
    let request = RequestId::new("r-1").expect("an id");
    let dialect = Dialect::OpenAi(Endpoint::Completions);
    let leg = LegInput { dialect, body: &raw, fields: &fields, model: &model, request: &request, prompts };
    let bootstrap = Bootstrap { host: "[::1]".into(), port: 9_000, rooms: (7..).take(prompts).collect() };
    let link = Link::Bootstrap(&bootstrap);
    let payload = match of {
        Leg::Prefill => Sglang.prefill_body(&leg, link),
        Leg::Decode => Sglang.decode_body(&leg, link),
    };
    serde_json::from_slice(&payload.pieces().concat()).expect("JSON")
}

#[test]
fn a_room_is_never_zero_and_selects_the_rank() {
    for bytes in [[0; 8], [255; 8], [1, 2, 3, 4, 5, 6, 7, 8]] {
        let any = room(bytes, None, 1);
        assert!(any > 0 && i64::try_from(any).is_ok());
        for ranks in [1, 2, 3, 8, 256] {
            for rank in 0..ranks {
                let room = room(bytes, Some(rank), ranks);
                assert!(room > 0 && i64::try_from(room).is_ok());
                assert_eq!(room % u64::from(ranks), u64::from(rank));
            }
        }
    }
    let rooms = Bootstrap::new("h".into(), None, 1000, None, 1).rooms;
    assert_eq!(rooms.iter().collect::<std::collections::HashSet<_>>().len(), 1000);
}

#[test]
fn both_legs_contain_the_same_room_and_none_of_a_client() {
    let body = json!({
        "model": "x", "prompt": "p", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9,
        "bootstrap_room": 0, "bootstrap_host": "MARK", "bootstrap_port": 1, "rid": "MARK", "routed_dp_rank": 3,
        "disagg_prefill_dp_rank": 3, "data_parallel_rank": 3,
    });
    for of in [Leg::Prefill, Leg::Decode] {
        let sent = sent(&body, 1, of);
        assert_eq!((&sent["bootstrap_host"], &sent["bootstrap_port"]), (&json!("[::1]"), &json!(9_000)));
        assert_eq!((&sent["bootstrap_room"], &sent["rid"]), (&json!(7), &json!("r-1")));
        assert_eq!((&sent["model"], &sent["max_tokens"]), (&json!("m"), &json!(9)));
        for name in ["routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"] {
            assert_eq!(sent.get(name), None, "{name}");
        }
        // The prefill engine's reply is read whole.
        assert_eq!(sent["stream"], json!(of == Leg::Decode));
        assert_eq!(sent.get("stream_options").is_some(), of == Leg::Decode);
    }
}

#[test]
fn several_prompts_have_a_room_each() {
    let sent = sent(&json!({"prompt": ["a", "b"]}), 2, Leg::Decode);
    assert_eq!(sent["bootstrap_room"], json!([7, 8]));
    assert_eq!(sent["bootstrap_host"], json!(["[::1]", "[::1]"]));
    assert_eq!(sent["bootstrap_port"], json!([9_000, 9_000]));
}

#[test]
fn several_choices_are_refused() {
    let (fields, model) = (RouterFields::default(), ModelName::new("m"));
    let request = RequestId::new("r-1").expect("an id");
    for (body, refused) in [
        (json!({"prompt": "p"}), None),
        (json!({"prompt": "p", "n": 1, "best_of": null}), None),
        (json!({"prompt": "p", "n": 2}), Some("n")),
        (json!({"prompt": "p", "best_of": 2}), Some("best_of")),
    ] {
        let raw = raw(&body);
        let dialect = Dialect::OpenAi(Endpoint::Completions);
        let leg =
            LegInput { dialect, body: &raw, fields: &fields, model: &model, request: &request, prompts: 1 };
        let error = Sglang.check(&leg).err();
        assert_eq!(error.and_then(|error| error.param).as_deref(), refused, "{body}");
    }
}

#[test]
fn an_engine_is_recognized_by_its_server_info() {
    let read = |info: Value| ServerInfo::read(info.to_string().as_bytes());
    let prefill = json!({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8_999});
    assert_eq!(read(prefill), Some(ServerInfo { bootstrap_port: Some(8_999) }));
    assert_eq!(read(json!({"disaggregation_mode": null})), Some(ServerInfo { bootstrap_port: None }));
    let odd = json!({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 70_000});
    assert_eq!(read(odd), Some(ServerInfo { bootstrap_port: None }));
    for other in [json!({"vllm_config": "…"}), json!([]), json!(null)] {
        assert_eq!(read(other), None);
    }
}
