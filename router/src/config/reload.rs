//! How the router detects a changed configuration, and the differences between two configurations.

use std::collections::BTreeMap;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How the router detects a changed configuration. SIGHUP always reloads it and the files that it names.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadConfig {
    /// Interval at which the router reads the file and the files that it names (secrets, keys, tokens,
    /// certificates), in milliseconds. Changed content takes effect. 0 disables this. 0 to 3,600,000; default
    /// 1,000.
    #[garde(range(max = 3_600_000))]
    pub poll_ms: u64,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self { poll_ms: 1_000 }
    }
}

/// `- path: old` and `+ path: new` for every leaf that differs, ordered by path.
pub(super) fn diff(old: &Value, new: &Value) -> Vec<String> {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    leaves(old, String::new(), &mut before);
    leaves(new, String::new(), &mut after);
    let mut lines = Vec::new();
    let paths: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    for path in paths {
        let (was, is) = (before.get(path), after.get(path));
        if was != is {
            lines.extend(was.map(|value| format!("- {path}: {value}")));
            lines.extend(is.map(|value| format!("+ {path}: {value}")));
        }
    }
    lines
}

/// Collects the leaves below `value`. The path of a list entry contains its name or URL, if it has one, so that a moved
/// entry does not count as changed.
fn leaves(value: &Value, path: String, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (key, below) in entries {
                let gap = if path.is_empty() { "" } else { "." };
                leaves(below, format!("{path}{gap}{key}"), found);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (at, item) in items.iter().enumerate() {
                let own = item["name"].as_str().or_else(|| item["url"].as_str()).map(str::to_owned);
                leaves(item, format!("{path}[{}]", own.unwrap_or_else(|| at.to_string())), found);
            }
        }
        leaf => drop(found.insert(path, leaf.clone())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changed_values_are_listed_by_path() {
        let old = json!({"a": 1, "b": {"c": [1, 2]}, "e": [{"url": "x", "w": 1}, {"url": "y", "w": 1}]});
        let new =
            json!({"a": 1, "b": {"c": [1, 3]}, "e": [{"url": "y", "w": 2}, {"url": "x", "w": 1}], "f": null});
        let wanted = ["- b.c[1]: 2", "+ b.c[1]: 3", "- e[y].w: 1", "+ e[y].w: 2", "+ f: null"];
        assert_eq!(diff(&old, &new), wanted);
        assert!(diff(&old, &old).is_empty());
    }
}
