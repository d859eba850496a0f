//! Compares a text's tree with the JSON schema and reports every mismatch with its position: unknown keys (with the
//! nearest known key), missing keys, wrong types, values out of their bounds.
//!
//! The schema is generated, so the check supports only the keywords that `schemars` writes. The check is never stricter
//! than the deserializer, which runs afterwards and finds the errors that a schema cannot express.

use std::rc::Rc;

use serde_json::Value;

use super::hints::{self, nearest};
use super::schema::{alternatives, could_be, short, target, types};
use crate::config::address::{self, listen_address};
use crate::config::error::{Problem, SourcePosition};
use crate::config::read::document::{NodeContent, PROBLEMS_MAX, YamlNode};
use crate::config::{Cidr, EngineUrl};

/// The mismatches between a tree and a schema, in the order of the tree. At most [`PROBLEMS_MAX`].
pub(crate) fn misfits(schema: &Value, root: &Rc<YamlNode>) -> Vec<Problem> {
    let mut found = ShapeCheck { schema, problems: Vec::new() };
    found.check(schema, root, "", &[]);
    found.problems
}

/// The number of mismatches between a tree and a part of the schema.
fn misfits_of(root: &Value, part: &Value, node: &Rc<YamlNode>) -> usize {
    let mut found = ShapeCheck { schema: root, problems: Vec::new() };
    found.check(part, node, "", &[]);
    found.problems.len()
}

struct ShapeCheck<'a> {
    schema: &'a Value,
    problems: Vec<Problem>,
}

impl<'a> ShapeCheck<'a> {
    fn add_problem(&mut self, position: SourcePosition, what: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(Problem { position, what });
        }
    }

    /// Reports a mismatch of the value at `path`.
    fn add_mismatch(&mut self, position: SourcePosition, path: &str, what: String) {
        self.add_problem(position, format!("{}{what}", key_label(path)));
    }

    /// Checks a node. `also` contains the keys of the other alternatives at this path.
    fn check(&mut self, schema: &'a Value, node: &Rc<YamlNode>, path: &str, also: &[&'a str]) {
        let target = target(self.schema, schema);
        if !std::ptr::eq(target, schema) {
            self.check(target, node, path, also);
        }
        let mut alternatives = Vec::new();
        alternatives_of(self.schema, schema, 0, &mut alternatives);
        if !node.is_null() {
            alternatives.retain(|alternative| types(alternative) != ["null"]);
        }
        if !alternatives.is_empty() {
            return self.check_alternatives(&alternatives, node, path);
        }
        if let Some(words) = words(schema) {
            return self.check_word(&words, node, path);
        }
        let types = types(schema);
        if types.is_empty() || (node.is_null() && types.contains(&"null")) {
            return;
        }
        match &node.content {
            NodeContent::Map(_) if types.contains(&"object") => self.check_map(schema, node, path, also),
            NodeContent::List(items) if types.contains(&"array") => {
                self.check_count(schema, ("minItems", "maxItems"), items.len(), node.position, path);
                for (at, item) in items.iter().enumerate() {
                    self.check(&schema["items"], item, &format!("{path}[{at}]"), &[]);
                }
            }
            NodeContent::Scalar { text, plain } if types.iter().any(|kind| could_be(kind, text, *plain)) => {
                self.check_value(schema, text, node.position, path);
            }
            _ => {
                let form = hints::hint_for_form(self.schema, schema, node);
                let form = form.map_or_else(String::new, |form| format!(": write `{form}`"));
                let what = format!("needs {}, not {}{form}", expected(&types), describe(node));
                self.add_mismatch(node.position, path, what);
            }
        }
    }

    fn check_map(&mut self, schema: &'a Value, node: &Rc<YamlNode>, path: &str, also: &[&'a str]) {
        let NodeContent::Map(entries) = &node.content else { return };
        if self.problems.len() >= PROBLEMS_MAX {
            return;
        }
        let properties = &schema["properties"];
        for (key, value) in entries {
            if self.problems.len() >= PROBLEMS_MAX {
                break;
            }
            let below = join(path, &key.name);
            if let Some(property) = properties.get(&key.name) {
                self.check(property, value, &below, &[]);
            } else if schema["additionalProperties"].is_object() {
                self.check(&schema["additionalProperties"], value, &below, &[]);
            } else if also.contains(&key.name.as_str()) {
                let what = format!("`{}` is a second choice, expected one of {}", key.name, also.join(", "));
                self.add_problem(key.position, what);
            } else if schema["additionalProperties"] == Value::Bool(false) {
                let unknown =
                    hints::UnknownKey { name: &key.name, value, map: schema, path, also, misfits_of };
                let hint = hints::hint_for_key(self.schema, &unknown);
                self.add_problem(key.position, format!("unknown key `{}`{hint}", short(&key.name)));
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if node.get(name).is_none() {
                self.add_mismatch(node.position, path, format!("needs the key `{name}`"));
            }
        }
        self.check_count(schema, ("minProperties", "maxProperties"), entries.len(), node.position, path);
    }

    /// Reports the problems of the alternative that fits best.
    fn check_alternatives(&mut self, alternatives: &[&'a Value], node: &Rc<YamlNode>, path: &str) {
        let all_words: Option<Vec<_>> = alternatives.iter().map(|a| words(a)).collect();
        if let Some(words) = all_words {
            return self.check_word(&words.concat(), node, path);
        }
        if self.check_choice(alternatives, node, path) {
            return;
        }
        let keys: Vec<&str> = alternatives
            .iter()
            .flat_map(|a| a["properties"].as_object())
            .flatten()
            .map(|(k, _)| k.as_str())
            .collect();
        let tries = alternatives.iter().map(|alternative| {
            let mut tried = ShapeCheck { schema: self.schema, problems: Vec::new() };
            tried.check(alternative, node, path, &keys);
            let distance = (!fits(alternative, node)) as usize * PROBLEMS_MAX;
            (distance + tried.problems.len(), tried.problems)
        });
        if let Some((_, problems)) =
            tries.min_by_key(|(distance, problems)| if problems.is_empty() { 0 } else { *distance })
        {
            problems.into_iter().for_each(|problem| self.add_problem(problem.position, problem.what));
        }
    }

    /// Reports a map of one name to its parameters whose key is none of the names. Returns whether the node is
    /// such a map.
    fn check_choice(&mut self, alternatives: &[&'a Value], node: &Rc<YamlNode>, path: &str) -> bool {
        let names: Vec<&str> = alternatives.iter().filter_map(|alternative| only_key(alternative)).collect();
        let NodeContent::Map(entries) = &node.content else { return false };
        let Some((key, _)) = entries.first() else { return false };
        if names.len() < 2 || entries.iter().any(|(key, _)| names.contains(&key.name.as_str())) {
            return false;
        }
        let meant = |text: &str| nearest(text, names.iter().copied());
        let from_value = entries.iter().find_map(|(_, value)| match &value.content {
            NodeContent::Scalar { text, .. } => meant(text),
            NodeContent::List(_) | NodeContent::Map(_) => None,
        });
        let (label, unknown) = (key_label(path), short(&key.name));
        let what = match (meant(&key.name), from_value) {
            (Some(name), _) => format!("unknown key `{unknown}`, did you mean `{name}`?"),
            (None, Some(name)) => format!(
                "{label}unknown key `{unknown}`: write `{name}`, or with parameters `{{{name}: {{...}}}}`"
            ),
            (None, None) => format!("{label}unknown key `{unknown}`; known here: {}", names.join(", ")),
        };
        self.add_problem(key.position, what);
        true
    }

    fn check_word(&mut self, words: &[&'a str], node: &Rc<YamlNode>, path: &str) {
        let choice = words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
        match &node.content {
            NodeContent::Scalar { text, .. } if words.contains(&text.as_str()) => {}
            NodeContent::Scalar { text, .. } => {
                let hint = nearest(text, words.iter().copied());
                let hint = hint.map_or_else(String::new, |word| format!(", did you mean `{word}`?"));
                let what = format!("`{}` is none of {choice}{hint}", short(text));
                self.add_mismatch(node.position, path, what);
            }
            _ => {
                let what = format!("needs one of {choice}, not {}", describe(node));
                self.add_mismatch(node.position, path, what);
            }
        }
    }

    fn check_value(&mut self, schema: &Value, text: &str, position: SourcePosition, path: &str) {
        if let Some(what) = malformed(schema["format"].as_str().unwrap_or_default(), text) {
            self.add_mismatch(position, path, what);
        }
        if let Ok(number) = text.parse::<f64>() {
            if schema["minimum"].as_f64().is_some_and(|low| number < low) {
                self.add_mismatch(position, path, format!("{text} is below {}", schema["minimum"]));
            }
            if schema["maximum"].as_f64().is_some_and(|high| number > high) {
                self.add_mismatch(position, path, format!("{text} is above {}", schema["maximum"]));
            }
        }
        // The schema does not contain the unit: only a length that is invalid in bytes and in characters is reported.
        let (bytes, letters) = (text.len() as u64, text.chars().count() as u64);
        if schema["minLength"].as_u64().is_some_and(|low| bytes < low) {
            self.add_mismatch(position, path, format!("shorter than {} bytes", schema["minLength"]));
        }
        if schema["maxLength"].as_u64().is_some_and(|high| letters > high) {
            self.add_mismatch(position, path, format!("longer than {} bytes", schema["maxLength"]));
        }
    }

    fn check_count(
        &mut self,
        schema: &Value,
        keywords: (&str, &str),
        count: usize,
        position: SourcePosition,
        path: &str,
    ) {
        if let Some(low) = schema[keywords.0].as_u64().filter(|low| (count as u64) < *low) {
            self.add_mismatch(position, path, format!("needs at least {low}, and has {count}"));
        }
        if let Some(high) = schema[keywords.1].as_u64().filter(|high| count as u64 > *high) {
            self.add_mismatch(position, path, format!("takes at most {high}, and has {count}"));
        }
    }
}

/// Why a text does not have a format of the configuration.
fn malformed(format: &str, text: &str) -> Option<String> {
    let shown = |message: String| message.replace(text, &short(text));
    match format {
        address::FORMAT => listen_address(text).err().map(|error| error.to_string()),
        "engine-url" => text.parse::<EngineUrl>().err().map(|error| shown(error.to_string())),
        "network" => text.parse::<Cidr>().err().map(|error| shown(error.to_string())),
        "ip" if text.parse::<std::net::IpAddr>().is_err() => Some(format!(
            "`{}` is no IP address: write one without a port, for example `127.0.0.1`",
            short(text)
        )),
        _ => None,
    }
}

/// The alternatives of a schema, with nested alternatives flattened.
fn alternatives_of<'a>(root: &'a Value, schema: &'a Value, depth: usize, found: &mut Vec<&'a Value>) {
    for alternative in alternatives(schema).map(|alternative| target(root, alternative)) {
        // The configuration's alternatives are two deep.
        match depth < 4 && alternatives(alternative).next().is_some() {
            true => alternatives_of(root, alternative, depth + 1, found),
            false => found.push(alternative),
        }
    }
}

/// The key of a map that has exactly one key, which is required.
fn only_key(schema: &Value) -> Option<&str> {
    let (properties, required) = (schema["properties"].as_object()?, schema["required"].as_array()?);
    (properties.len() == 1 && required.len() == 1).then(|| required[0].as_str())?
}

/// The words that an enumeration allows.
fn words(schema: &Value) -> Option<Vec<&str>> {
    if let Some(word) = schema["const"].as_str() {
        return Some(vec![word]);
    }
    schema["enum"].as_array()?.iter().map(Value::as_str).collect()
}

/// Whether a node is probably this alternative: it has the type, and the tag or a required key.
fn fits(schema: &Value, node: &YamlNode) -> bool {
    let is = |kind: &str| types(schema).is_empty() || types(schema).contains(&kind);
    match &node.content {
        NodeContent::Scalar { .. } => {
            words(schema).is_some() || !(is("object") || is("array")) || types(schema).is_empty()
        }
        NodeContent::List(_) => is("array"),
        NodeContent::Map(entries) => {
            let properties = schema["properties"].as_object();
            let tags =
                properties.into_iter().flatten().filter_map(|(name, p)| Some((name, p["const"].as_str()?)));
            let tagged = tags.into_iter().all(|(name, word)| {
                node.get(name)
                    .is_some_and(|n| matches!(&n.content, NodeContent::Scalar { text, .. } if text == word))
            });
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let named = required.clone().count() == 0
                || entries.iter().any(|(key, _)| required.clone().any(|name| name == key.name));
            is("object") && words(schema).is_none() && tagged && named
        }
    }
}

fn expected(types: &[&str]) -> String {
    let word = |kind: &&str| match *kind {
        "object" => "a map",
        "array" => "a list",
        "string" => "a text",
        "integer" => "a whole number",
        "number" => "a number",
        "boolean" => "true or false",
        _ => "nothing",
    };
    types.iter().filter(|kind| **kind != "null").map(word).collect::<Vec<_>>().join(" or ")
}

fn describe(node: &YamlNode) -> String {
    match &node.content {
        _ if node.is_null() => "nothing".into(),
        NodeContent::Scalar { text, .. } => format!("`{}`", short(text)),
        NodeContent::List(_) => "a list".into(),
        NodeContent::Map(_) => "a map".into(),
    }
}

fn key_label(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("`{path}`: ") }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
