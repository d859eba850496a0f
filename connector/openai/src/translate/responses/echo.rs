//! The fields of a request that its response repeats.

use serde_json::{Map, Value, json};

use super::json::JsonObject;

/// Maximum bytes of JSON of all repeated fields. A field that no longer fits has its default, so that requests and
/// streams stay small.
const ECHO_BYTES_MAX: usize = 128 << 10;

/// Strings that are `null` in the response unless the request has them. Instructions may be long.
const STRINGS: [&str; 4] = ["prompt_cache_key", "safety_identifier", "user", "instructions"];
/// Numbers that are `null` in the response unless the request has them.
const NUMBERS: [&str; 4] = ["max_output_tokens", "max_tool_calls", "temperature", "top_p"];

/// The fields of a response that are those of its request, or their defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestEcho {
    fields: JsonObject,
}

/// A request whose fields are repeated, as many as fit.
struct Repeated<'a> {
    body: &'a Map<String, Value>,
    fields: JsonObject,
    /// Bytes of JSON that still fit.
    left: usize,
}

impl RequestEcho {
    /// Of a request that [`super::to_chat`] accepts.
    #[must_use]
    pub fn of(body: &Map<String, Value>) -> Self {
        let mut of = Repeated { body, fields: JsonObject::default(), left: ECHO_BYTES_MAX };
        // What is short comes first.
        for name in NUMBERS {
            of.repeat(name, Value::is_number, &Value::Null);
        }
        of.repeat("top_logprobs", Value::is_number, &json!(0));
        of.repeat("parallel_tool_calls", Value::is_boolean, &json!(true));
        of.repeat("service_tier", Value::is_string, &json!("default"));
        of.repeat("tool_choice", |choice| choice.is_string() || choice.is_object(), &json!("auto"));
        let reasoning = of.members("reasoning", &["effort", "summary"]);
        of.add("reasoning", reasoning.filter(|members| !members.is_empty()), &Value::Null);
        of.repeat("metadata", Value::is_object, &json!({}));
        for name in STRINGS {
            of.repeat(name, Value::is_string, &Value::Null);
        }
        let mut text = of.members("text", &["format", "verbosity"]).unwrap_or_default();
        text.entry("format").or_insert_with(|| json!({"type": "text"}));
        of.add("text", Some(text), &json!({"format": {"type": "text"}}));
        of.repeat("tools", Value::is_array, &json!([]));
        let fields = of.fields.with("previous_response_id", Value::Null).with("background", false);
        Self { fields: fields.with("store", false).with_text("truncation", "disabled") }
    }

    pub(super) fn fields(&self) -> &JsonObject {
        &self.fields
    }
}

impl Repeated<'_> {
    /// Repeats a field of this type.
    fn repeat(&mut self, name: &str, is_type: impl Fn(&Value) -> bool, default: &Value) {
        let own = self.body.get(name).filter(|&value| is_type(value));
        let text = own.map(ToString::to_string);
        self.add_text(name, text, default);
    }

    /// The members with these names of an object, without those that are `null`.
    fn members(&self, name: &str, names: &[&str]) -> Option<Map<String, Value>> {
        let object = self.body.get(name)?.as_object()?;
        let own = names.iter().filter_map(|name| Some(((*name).to_owned(), object.get(*name)?.clone())));
        Some(own.filter(|(_, value)| !value.is_null()).collect())
    }

    fn add(&mut self, name: &str, own: Option<Map<String, Value>>, default: &Value) {
        self.add_text(name, own.map(|own| Value::Object(own).to_string()), default);
    }

    fn add_text(&mut self, name: &str, own: Option<String>, default: &Value) {
        let fields = std::mem::take(&mut self.fields);
        self.fields = match own.filter(|text| text.len() <= self.left) {
            Some(text) => {
                self.left -= text.len();
                fields.with(name, text)
            }
            None => fields.with(name, default),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &Value) -> Value {
        let echo = RequestEcho::of(body.as_object().expect("an object"));
        serde_json::from_str(&echo.fields().to_string()).expect("JSON")
    }

    #[test]
    fn a_response_repeats_its_request_or_the_defaults() {
        let found =
            of(&json!({"temperature": 0.5, "tools": [{"type": "function", "name": "f"}], "store": true,
            "text": {"verbosity": "low"}, "metadata": {"a": "b"}, "input": "x", "top_p": null}));
        assert_eq!((&found["temperature"], &found["top_p"]), (&json!(0.5), &Value::Null));
        assert_eq!(found["tools"], json!([{"type": "function", "name": "f"}]));
        assert_eq!(found["text"], json!({"verbosity": "low", "format": {"type": "text"}}));
        assert_eq!((&found["store"], &found["metadata"]), (&json!(false), &json!({"a": "b"})));
        assert_eq!(found.get("input"), None);
        let effort = json!({"effort": "low", "summary": null});
        assert_eq!(of(&json!({"reasoning": effort}))["reasoning"], json!({"effort": "low"}));
    }

    #[test]
    fn all_repeated_fields_together_are_bounded() {
        let half = "x".repeat(ECHO_BYTES_MAX / 2);
        let tools = json!([{"type": "function", "name": "f", "description": half}]);
        let both = json!({"instructions": half, "tools": tools, "tool_choice": "none"});
        let found = of(&both);
        assert_eq!((&found["instructions"], &found["tool_choice"]), (&both["instructions"], &json!("none")));
        assert_eq!(found["tools"], json!([]), "it no longer fits");
        assert_eq!(of(&json!({"tools": tools}))["tools"], tools);
        let one = json!({"instructions": "x".repeat(ECHO_BYTES_MAX), "top_p": 0.5});
        assert_eq!((&of(&one)["instructions"], &of(&one)["top_p"]), (&Value::Null, &json!(0.5)));
    }

    #[test]
    fn what_has_no_place_in_a_response_is_not_repeated() {
        let tree = json!(vec![json!([0]); 9]);
        let found =
            of(&json!({"max_tool_calls": tree, "user": tree, "service_tier": tree, "temperature": tree,
            "reasoning": {"x": tree}, "text": {"x": tree}, "metadata": tree}));
        assert_eq!(found, of(&json!({})));
    }
}
