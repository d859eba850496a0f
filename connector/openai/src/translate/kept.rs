//! Fields that mean the same in a chat.

use serde_json::Value;

use crate::Object;

/// Those of every translated API, most of them vLLM's.
const KEPT: [&str; 15] = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "priority",
    "vllm_xargs",
    // Of routers: they remove a client's.
    "kv_transfer_params",
];

/// A chat with the fields of a body that mean the same there: those of every API, and these of its own.
pub(super) fn kept(body: &Object, own: &[&str]) -> Object {
    let field =
        |name: &&str| -> Option<(String, Value)> { Some(((*name).to_owned(), body.get(*name)?.clone())) };
    KEPT.iter().chain(own).filter_map(field).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_chat_has_the_fields_of_all_apis_and_those_of_its_own() {
        let Value::Object(body) = json!({"model": "m", "user": "u", "max_tokens": 3, "seed": null, "x": 1})
        else {
            panic!("an object")
        };
        assert_eq!(Value::Object(kept(&body, &[])), json!({"model": "m", "seed": null}));
        assert_eq!(Value::Object(kept(&body, &["user"])), json!({"model": "m", "seed": null, "user": "u"}));
    }
}
