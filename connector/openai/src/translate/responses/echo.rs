//! The fields of a request that its response repeats.

use serde_json::{Map, Value, json};

/// Maximum bytes of JSON of one repeated field. A longer one has its default, so that streams stay small.
const FIELD_BYTES_MAX: usize = 64 << 10;

/// Fields that are `null` in the response unless the request has them.
const OPTIONAL: [&str; 9] = [
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
];

/// The fields of a response that are those of its request, or their defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestEcho {
    fields: Map<String, Value>,
}

impl RequestEcho {
    /// Of a request that [`super::to_chat`] accepts.
    #[must_use]
    pub fn of(body: &Map<String, Value>) -> Self {
        let fits = |value: &&Value| !value.is_null() && value.to_string().len() <= FIELD_BYTES_MAX;
        let own = |name: &str| body.get(name).filter(fits).cloned();
        let mut fields: Map<String, Value> =
            OPTIONAL.into_iter().map(|name| (name.to_owned(), own(name).unwrap_or_default())).collect();
        let mut text = own("text").filter(Value::is_object).unwrap_or_else(|| json!({}));
        if text["format"].is_null() {
            text["format"] = json!({"type": "text"});
        }
        for (name, default) in [
            ("metadata", json!({})),
            ("parallel_tool_calls", json!(true)),
            ("service_tier", json!("default")),
            ("tool_choice", json!("auto")),
            ("tools", json!([])),
            ("top_logprobs", json!(0)),
        ] {
            fields.insert(name.to_owned(), own(name).unwrap_or(default));
        }
        fields.insert("text".to_owned(), text);
        for (name, value) in [
            ("previous_response_id", Value::Null),
            ("background", json!(false)),
            ("store", json!(false)),
            ("truncation", json!("disabled")),
        ] {
            fields.insert(name.to_owned(), value);
        }
        Self { fields }
    }

    pub(super) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_repeats_its_request_or_the_defaults() {
        let of = |body: Value| RequestEcho::of(body.as_object().expect("an object")).fields;
        let found =
            of(json!({"temperature": 0.5, "tools": [{"type": "function", "name": "f"}], "store": true,
            "text": {"verbosity": "low"}, "metadata": {"a": "b"}, "input": "x", "top_p": null}));
        assert_eq!((&found["temperature"], &found["top_p"]), (&json!(0.5), &Value::Null));
        assert_eq!(found["tools"], json!([{"type": "function", "name": "f"}]));
        assert_eq!(found["text"], json!({"verbosity": "low", "format": {"type": "text"}}));
        assert_eq!((&found["store"], &found["metadata"]), (&json!(false), &json!({"a": "b"})));
        assert_eq!(found.get("input"), None);
        let long = of(json!({"instructions": "x".repeat(FIELD_BYTES_MAX), "tool_choice": "none"}));
        assert_eq!((&long["instructions"], &long["tool_choice"]), (&Value::Null, &json!("none")));
    }
}
