//! `docs/reference/configuration.md` has a row for every configuration key, and each row names a test that exists.
//!
//! The cells of a row (type, default, bounds, text) come from the JSON schema; only the last cell, the test, is written
//! by hand. To update the page after a key was added or changed:
//!
//! ```text
//! BATON_WRITE_DOCS=1 cargo test -p baton-router --test router the_page_has_a_row_for_every_key
//! ```
//!
//! Then name the test of each new row, which is marked `?`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use baton_router::RouterConfig;
use serde_json::Value;

/// The table is between these lines.
const BEGIN: &str = "<!-- keys: begin -->";
const END: &str = "<!-- keys: end -->";
/// Marks a row without a test.
const UNNAMED: &str = "?";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every key of the schema once, in the schema's order; a type that is used twice is listed at its first use.
struct SchemaKeys<'a> {
    schema: &'a Value,
    documented: BTreeMap<String, String>,
    rows: Vec<(String, String)>,
}

impl<'a> SchemaKeys<'a> {
    fn of(schema: &'a Value) -> Vec<(String, String)> {
        let mut keys = Self { schema, documented: BTreeMap::new(), rows: Vec::new() };
        keys.walk(schema, "");
        keys.rows
    }

    fn target(&self, node: &'a Value) -> Option<(&'a str, &'a Value)> {
        let name = node["$ref"].as_str()?.strip_prefix("#/$defs/")?;
        Some((name, &self.schema["$defs"][name]))
    }

    /// Adds the keys below a node.
    fn walk(&mut self, node: &'a Value, path: &str) {
        if self.same_keys_as(node).is_some() {
            return;
        }
        if let Some((name, target)) = self.target(node) {
            if self.documented.contains_key(name) {
                return;
            }
            if has_keys(self.schema, target, 0) {
                self.documented.insert(name.to_owned(), path.to_owned());
            }
            self.walk(target, path);
        }
        for (key, below) in node["properties"].as_object().into_iter().flatten() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if !self.rows.iter().any(|(known, _)| *known == path) {
                let row = self.row(&path, below);
                self.rows.push((path.clone(), row));
            }
            self.walk(below, &path);
        }
        if node["items"].is_object() {
            self.walk(&node["items"], &format!("{path}[]"));
        }
        if node["additionalProperties"].is_object() {
            self.walk(&node["additionalProperties"], &format!("{path}.*"));
        }
        for variant in ["oneOf", "anyOf", "allOf"].iter().flat_map(|kind| node[*kind].as_array()).flatten() {
            self.walk(variant, path);
        }
    }

    /// The first use of a type with the same keys, if it is listed already.
    fn same_keys_as(&self, node: &Value) -> Option<&str> {
        self.documented.get(node["x-keys-of"].as_str()?).map(String::as_str)
    }

    fn row(&self, path: &str, node: &'a Value) -> String {
        let bounds = self.bounds(node);
        let default = node.get("default").map_or_else(String::new, |d| match d {
            // The keys of an object have their own rows.
            Value::Object(_) => String::new(),
            Value::Array(list) if list.is_empty() => "none".into(),
            Value::Null => "none".into(),
            Value::String(text) => format!("`{text}`"),
            other => format!("`{other}`"),
        });
        let words = node["description"].as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|");
        format!("| `{path}` | {} | {default} | {bounds} | {words} |", self.kind(node))
    }

    fn kind(&self, node: &'a Value) -> String {
        if let Some((name, target)) = self.target(node) {
            return match self.documented.get(name) {
                Some(first) => format!("as `{first}`"),
                None => self.kind(target),
            };
        }
        let variants: Vec<_> =
            ["oneOf", "anyOf"].iter().flat_map(|kind| node[*kind].as_array()).flatten().collect();
        if let Some(path) = self.same_keys_as(node) {
            return format!("as `{path}`");
        }
        if !variants.is_empty() {
            let mut kinds: Vec<_> = variants.iter().map(|v| self.kind(v)).filter(|k| k != "null").collect();
            kinds.dedup();
            return kinds.join(", ");
        }
        if let Some(word) = node["const"].as_str() {
            return format!("`{word}`");
        }
        if let Some(words) = node["enum"].as_array() {
            let words: Vec<_> = words.iter().filter_map(Value::as_str).map(|w| format!("`{w}`")).collect();
            return words.join(", ");
        }
        let kinds: Vec<_> = match &node["type"] {
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).filter(|k| *k != "null").collect(),
            kind => kind.as_str().into_iter().collect(),
        };
        match kinds.as_slice() {
            ["array"] => format!("list of {}", self.kind(&node["items"])),
            ["object"] => "map".to_owned(),
            kinds => kinds.join(" or "),
        }
    }

    fn bounds(&self, node: &'a Value) -> String {
        let node = self.target(node).map_or(node, |(_, target)| target);
        let mut ranges = Vec::new();
        for (low, high, of) in [
            ("minimum", "maximum", ""),
            ("minLength", "maxLength", " bytes"),
            ("minItems", "maxItems", " entries"),
            ("minProperties", "maxProperties", " entries"),
        ] {
            match (&node[low], &node[high]) {
                (Value::Null, Value::Null) => {}
                (low, Value::Null) => ranges.push(format!("at least {low}{of}")),
                (Value::Null, high) => ranges.push(format!("at most {high}{of}")),
                (low, high) => ranges.push(format!("{low} to {high}{of}")),
            }
        }
        ranges.join("; ")
    }
}

fn has_keys(schema: &Value, node: &Value, depth: usize) -> bool {
    if node["properties"].is_object() {
        return true;
    }
    let variants = ["oneOf", "anyOf", "allOf"].iter().flat_map(|kind| node[*kind].as_array()).flatten();
    let target =
        |v: &Value| v["$ref"].as_str().map(|r| schema["$defs"][r.trim_start_matches("#/$defs/")].clone());
    depth < 8
        && variants.clone().any(|v| has_keys(schema, &target(v).unwrap_or_else(|| v.clone()), depth + 1))
}

/// The names of all tests in all sources, to verify the names in the table.
fn tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of ours can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if path.is_dir() && !matches!(name.as_str(), "target" | ".git") {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = std::fs::read_to_string(&path).expect("a source is text");
                let mut marked = false;
                for line in text.lines().map(str::trim) {
                    let name = line.strip_prefix("async fn ").or_else(|| line.strip_prefix("fn "));
                    match name.and_then(|rest| rest.split(['(', '<']).next()) {
                        Some(name) if marked => drop(found.insert(name.to_owned())),
                        _ => {}
                    }
                    // Other attributes and comments may be between the attribute and the function.
                    let between = line.starts_with("#[") || line.starts_with("//");
                    marked = line == "#[test]" || line.starts_with("#[tokio::test") || (marked && between);
                }
            }
        }
    }
    found
}

#[test]
fn the_page_has_a_row_for_every_key() {
    let file = root().join("docs/reference/configuration.md");
    let page = std::fs::read_to_string(&file).expect("the page is there");
    let (before, rest) = page.split_once(BEGIN).expect("the table has a beginning");
    let (table, after) = rest.split_once(END).expect("the table has an end");
    // The last cell of a row is written by hand; the first one identifies the key.
    let named: BTreeMap<&str, &str> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| {
            let key = line.split('`').nth(1)?;
            let tests = line.trim_end().strip_suffix('|')?.rsplit_once('|')?.1.trim();
            Some((key, tests))
        })
        .collect();
    let schema = RouterConfig::schema();
    let mut wanted =
        String::from("\n| key | type | default | bounds | what | covered by |\n|---|---|---|---|---|---|\n");
    for (path, row) in SchemaKeys::of(&schema) {
        let tests = named.get(path.as_str()).copied().unwrap_or(UNNAMED);
        let _ = writeln!(wanted, "{row} {tests} |");
    }
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&file, format!("{before}{BEGIN}{wanted}{END}{after}"))
            .expect("the page can be written");
    } else {
        let (there, here): (BTreeSet<_>, BTreeSet<_>) = (table.lines().collect(), wanted.lines().collect());
        let missing: Vec<_> = here.difference(&there).copied().collect();
        let stale: Vec<_> = there.difference(&here).copied().collect();
        assert!(
            table == wanted,
            "docs/reference/configuration.md is not up to date; bring it up to date with\n  BATON_WRITE_DOCS=1 cargo test -p \
             baton-router --test router the_page_has_a_row_for_every_key\nmissing:\n{}\nto be removed:\n{}",
            missing.join("\n"),
            stale.join("\n")
        );
    }
    let tests_there = tests();
    let mut wrong = Vec::new();
    for line in wanted.lines().skip(3) {
        let tests = line.trim_end_matches('|').rsplit_once('|').expect("a row has cells").1.trim();
        let names: Vec<_> = tests.split('`').skip(1).step_by(2).collect();
        let key = line.split('`').nth(1).unwrap_or_default();
        if names.is_empty() {
            wrong.push(format!("{key}: no test is named"));
        }
        wrong.extend(
            names
                .iter()
                .filter(|n| !tests_there.contains(**n))
                .map(|n| format!("{key}: there is no test {n}")),
        );
    }
    assert!(wrong.is_empty(), "rows of docs/reference/configuration.md:\n  {}", wrong.join("\n  "));
}

/// Compares `docs/reference/router.schema.json`, for editors, with `baton check --schema`. `BATON_WRITE_DOCS=1` writes
/// the file.
#[test]
fn the_schema_for_editors_is_that_of_the_code() {
    let file = root().join("docs/reference/router.schema.json");
    let schema = serde_json::to_string_pretty(&RouterConfig::schema()).expect("a schema is JSON") + "\n";
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&file, &schema).expect("the schema can be written");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        there == schema,
        "run this test with BATON_WRITE_DOCS=1 to write docs/reference/router.schema.json"
    );
}

/// The examples, by name.
fn examples() -> BTreeMap<String, String> {
    let folders = ["deploy/config", "examples/router"].map(|folder| root().join(folder));
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("there are examples"));
    let mut found = BTreeMap::new();
    for entry in entries {
        let path = entry.expect("an entry can be read").path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            found.insert(name, std::fs::read_to_string(&path).expect("an example is text"));
        }
    }
    found
}

#[test]
fn every_example_is_a_configuration_and_fits_the_schema() {
    let examples = examples();
    for name in [
        "router.yaml",
        "single.yaml",
        "vllm-pd.yaml",
        "kubernetes.yaml",
        "messages.yaml",
        "vllm-transfers.yaml",
        "multi-tenant.yaml",
        "several-routers.yaml",
    ] {
        assert!(examples.contains_key(name), "{name} is there");
    }
    let schema = RouterConfig::schema();
    let validator = jsonschema::validator_for(&schema).expect("the schema is one");
    for (name, text) in examples {
        let config = RouterConfig::from_yaml(&text, &name).unwrap_or_else(|problems| panic!("{problems}"));
        for text in [text, config.effective()] {
            let value: Value = serde_saphyr::from_str(&text).expect("it is YAML");
            let wrong: Vec<_> =
                validator.iter_errors(&value).map(|e| format!("{}: {e}", e.instance_path())).collect();
            assert!(wrong.is_empty(), "{name}:\n{}\n{text}", wrong.join("\n"));
        }
    }
    assert!(!validator.is_valid(&serde_json::json!({"models": [], "listen": 1})), "it refuses something");
}

/// Whether a text contains a key below its parent key: on the parent's line, or on a later line that is indented
/// further, before one that is not. Commented lines count at the position of their text.
fn is_named(reference: &str, keys: &[&str]) -> bool {
    let lines: Vec<(usize, &str)> = reference
        .lines()
        .map(|line| {
            let text = line.trim_start_matches([' ', '#', '-']);
            (line.len() - text.len(), text)
        })
        .collect();
    // A policy without parameters is its name only.
    let is_policy = keys.contains(&"policy");
    let has = |text: &str, key: &str| {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
        words.into_iter().any(|word| word.strip_suffix(':') == Some(key) || (is_policy && word == key))
    };
    let Some((key, above)) = keys.split_last() else { return true };
    let Some(parent) = above.last() else {
        return lines.iter().any(|(column, text)| *column < 4 && has(text, key));
    };
    if is_policy && *parent == "policy" {
        // The key is in the list of alternatives.
        return lines.iter().any(|(_, text)| has(text, key));
    }
    // Both pools have the same keys, and each key is shown in one of them.
    let holds = |text: &str| has(text, parent) || (*parent == "prefill" && has(text, "decode"));
    lines.iter().enumerate().filter(|(_, (_, text))| holds(text)).any(|(at, (column, text))| {
        let below = lines[at + 1..].iter().take_while(|(inner, text)| inner > column || text.is_empty());
        has(text, key) || below.into_iter().any(|(_, text)| has(text, key))
    })
}

#[test]
fn a_key_is_named_only_below_the_one_that_holds_it() {
    let text = "a:\n  port: 1\nb:\n  # c: {host: x}  # and so on\nd:\n  e:\n    host: 1\n";
    for named in [&["a", "port"][..], &["b", "c", "host"], &["d", "e", "host"], &["b"]] {
        assert!(is_named(text, named), "{named:?}");
    }
    for missing in [&["b", "port"][..], &["a", "host"], &["d", "e", "port"], &["host"]] {
        assert!(!is_named(text, missing), "{missing:?}");
    }
}

#[test]
fn the_reference_names_every_key() {
    let reference = examples().remove("router.yaml").expect("the reference is there");
    let schema = RouterConfig::schema();
    let named = |path: &str| {
        let keys: Vec<&str> =
            path.split('.').map(|key| key.trim_end_matches("[]")).filter(|key| *key != "*").collect();
        is_named(&reference, &keys)
    };
    let missing: Vec<_> =
        SchemaKeys::of(&schema).into_iter().map(|(path, _)| path).filter(|path| !named(path)).collect();
    assert!(missing.is_empty(), "examples/router/router.yaml does not name\n  {}", missing.join("\n  "));
}
