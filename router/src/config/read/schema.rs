//! Reads parts of a JSON schema that `schemars` generated.

use serde_json::Value;

/// Most characters of a key or a value that are compared and shown.
pub(crate) const SHOWN_MAX: usize = 64;

/// The keywords under which a schema lists alternatives.
const ALTERNATIVES: [&str; 2] = ["oneOf", "anyOf"];

pub(crate) fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    ALTERNATIVES.iter().filter_map(|keyword| schema[*keyword].as_array()).flatten()
}

pub(crate) fn could_be(kind: &str, text: &str, plain: bool) -> bool {
    let nothing = plain && matches!(text, "" | "~" | "null");
    match kind {
        "string" => !nothing,
        "integer" => serde_saphyr::from_str::<i128>(text).is_ok(),
        "number" => serde_saphyr::from_str::<f64>(text).is_ok(),
        "boolean" => serde_saphyr::from_str::<bool>(text).is_ok(),
        "null" => nothing,
        _ => false,
    }
}

/// A text, cut and escaped for a message.
pub(crate) fn short(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        None => text.escape_debug().to_string(),
        Some((end, _)) => format!("{}...", text[..end].escape_debug()),
    }
}

/// The schema that a `$ref` names, or the node itself.
pub(crate) fn target<'a>(root: &'a Value, node: &'a Value) -> &'a Value {
    let name = node["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/"));
    name.map_or(node, |name| &root["$defs"][name])
}

pub(crate) fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        kind => kind.as_str().into_iter().collect(),
    }
}
