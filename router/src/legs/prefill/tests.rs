//! Damaged replies: only a complete reply is handed on.

use hyper::StatusCode;
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn complete() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]],
        "remote_engine_id": "p", "remote_request_id": "cmpl-1", "remote_host": "127.0.0.1", "remote_port": 5600,
        "tp_size": 1, "remote_num_tokens": 20, "remote_handle": format!("{:032x}", 7),
    })
}

fn answered(body: impl Into<bytes::Bytes>) -> PrefillResult {
    let status = StatusCode::OK;
    interpret(
        &WholeReply { status, retry_after: None, body: body.into(), own_key: false },
        &AddressRedactor::default(),
    )
}

/// The fields that vLLM's decode engine requires of a handoff, written independently.
fn is_complete(params: &Value) -> bool {
    let text = |name: &str| params[name].as_str().is_some_and(|text| !text.is_empty());
    let ids = |ids: &Value| ids.as_array().is_some_and(|ids| ids.iter().all(Value::is_u64));
    let groups = params["remote_block_ids"].as_array().cloned().unwrap_or_default();
    params["do_remote_prefill"] == true
        && params["do_remote_decode"] != true
        && !groups.is_empty()
        && (groups.iter().all(Value::is_u64)
            || groups.iter().all(ids)
                && groups.iter().any(|ids| ids.as_array().is_some_and(|a| !a.is_empty())))
        && text("remote_engine_id")
        && text("remote_request_id")
        && text("remote_host")
        && params["remote_port"].as_u64().is_some_and(|port| (1..=65_535).contains(&port))
}

fn damage() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
        Just(json!([])),
        Just(json!([[]])),
        Just(json!([1])),
        Just(json!([[1], "x"])),
        Just(json!({})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_reply_is_never_forwarded(
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop::option::of(damage())), 1..4),
    ) {
        let mut params = complete();
        let names: Vec<String> = params.as_object().unwrap().keys().cloned().collect();
        for (name, value) in changes {
            let name = &names[name.index(names.len())];
            match value {
                Some(value) => params[name] = value,
                None => drop(params.as_object_mut().unwrap().remove(name)),
            }
        }
        match answered(json!({"id": "p", "kv_transfer_params": params}).to_string()) {
            PrefillResult::Leased(handed, ..) => {
                let handed: Value = serde_json::from_str(&handed.params).expect("only JSON is handed on");
                prop_assert!(is_complete(&handed), "{handed}");
                prop_assert_eq!(handed, params);
            }
            PrefillResult::Failed(Failure::Unusable(_), ..) => {}
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn a_reply_with_damaged_bytes_is_handed_on_as_it_came_or_not_at_all(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = json!({"id": "p", "kv_transfer_params": complete()}).to_string().into_bytes();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        let cut = cut.index(bytes.len() * 2);
        bytes.truncate(cut.max(1));
        if let PrefillResult::Leased(handed, ..) = answered(bytes.clone()) {
            let parsed: Value = serde_json::from_slice(&bytes).expect("only JSON is handed on");
            let handed: Value = serde_json::from_str(&handed.params).expect("only JSON is handed on");
            prop_assert!(is_complete(&handed));
            prop_assert_eq!(&handed, &parsed["kv_transfer_params"]);
        }
    }
}

#[test]
fn a_handle_in_an_unreadable_reply_is_found_for_its_release() {
    let reply = json!({"id": "p", "kv_transfer_params": complete()}).to_string();
    let twice = reply.replacen("\"id\"", "\"id\":1,\"id\"", 1);
    let odd = reply.replacen("\"p\"", "NaN", 1);
    for text in [twice, odd] {
        let handle = match answered(text.clone()) {
            PrefillResult::Failed(Failure::Unusable(handle), ..) => handle,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(handle, Some(Handle(7)), "{text}");
    }
    assert!(matches!(answered("{}"), PrefillResult::NoLease));
    assert!(matches!(answered(r#"{"kv_transfer_params":null}"#), PrefillResult::NoLease));
}
