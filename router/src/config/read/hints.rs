//! Suggested corrections: the nearest word, the part that a key belongs to, the form that a value needs.

use std::rc::Rc;

use serde_json::Value;

use super::document::{NodeContent, YamlNode};
use super::schema::{SHOWN_MAX, alternatives, could_be, short, target, types};
use crate::config::EngineUrl;

/// Most paths in a suggestion. A key with more paths is too ambiguous for one.
const SUGGESTED_PATHS_MAX: usize = 3;

/// Keys of other routers and proxies, each with the key of this router that has its meaning.
const FOREIGN_KEYS: [(&str, &str); 20] = [
    ("address", "listen"),
    ("bind", "listen"),
    ("host", "listen"),
    ("port", "listen"),
    ("address", "url"),
    ("endpoint", "url"),
    ("host", "url"),
    ("port", "url"),
    ("uri", "url"),
    ("backends", "engines"),
    ("endpoints", "engines"),
    ("servers", "engines"),
    ("upstreams", "engines"),
    ("workers", "engines"),
    ("api_keys", "auth"),
    ("algorithm", "policy"),
    ("balance", "policy"),
    ("lb_policy", "policy"),
    ("strategy", "policy"),
    ("ssl", "listen_tls"),
];

/// Counts the mismatches between a tree and a part of the schema. Arguments: the schema's root, the part, the tree.
pub(in crate::config::read) type MisfitCounter = fn(&Value, &Value, &Rc<YamlNode>) -> usize;

/// An unknown key and the map that has it.
pub(in crate::config::read) struct UnknownKey<'k, 'a> {
    pub name: &'k str,
    pub value: &'k Rc<YamlNode>,
    /// The schema of the map.
    pub map: &'a Value,
    /// The path of the map.
    pub path: &'k str,
    /// Keys of the other alternatives at this path.
    pub also: &'k [&'a str],
    /// Counts the mismatches between a tree and a part of the schema.
    pub misfits_of: MisfitCounter,
}

/// `, did you mean ...?`: the nearest key of this map, keys whose names share its parts, or the paths of the key
/// elsewhere. Of several candidates the hint contains those that the value fits best.
pub(in crate::config::read) fn hint_for_key<'a>(root: &'a Value, key: &UnknownKey<'_, 'a>) -> String {
    let properties = || key.map["properties"].as_object().into_iter().flatten();
    let known: Vec<&str> =
        properties().map(|(name, _)| name.as_str()).chain(key.also.iter().copied()).collect();
    if let Some(nearest) = nearest(key.name, known.iter().copied()) {
        return format!(", did you mean `{nearest}`?");
    }
    let name = normal(&key.name.chars().take(SHOWN_MAX).collect::<String>());
    let meant = |known: &str| FOREIGN_KEYS.iter().any(|(word, ours)| *word == name && *ours == known);
    let here = properties().filter(|(known, _)| have_parts(known, &name) || meant(known));
    let here = best_paths(root, key, here.map(|(name, schema)| (name.clone(), schema)).collect());
    let mut paths = Vec::new();
    if !key.value.is_null() {
        paths_of_key(root, root, &|known| known == name || meant(known), "", 0, &mut paths);
    }
    // Paths below the map with the unknown key take precedence.
    let below = format!("{}.", without_indices(key.path));
    if paths.iter().any(|(path, _)| path.starts_with(&below)) {
        paths.retain(|(path, _)| path.starts_with(&below));
    }
    let there = if paths.len() > SUGGESTED_PATHS_MAX {
        (usize::MAX, Vec::new())
    } else {
        best_paths(root, key, paths)
    };
    let (_, names) = if there.0 < here.0 { there } else { here };
    if !names.is_empty() {
        let names: Vec<_> = names.iter().take(SUGGESTED_PATHS_MAX).map(|name| format!("`{name}`")).collect();
        return format!(", did you mean {}?", names.join(" or "));
    }
    match known.len() {
        1..=20 => format!("; known here: {}", known.join(", ")),
        _ => String::new(),
    }
}

/// The correct form of a value if a map or a list is needed: `{url: http://a:1}` for `http://a:1`.
pub(in crate::config::read) fn hint_for_form(
    root: &Value,
    schema: &Value,
    node: &YamlNode,
) -> Option<String> {
    match &node.content {
        NodeContent::Scalar { text, plain } if !node.is_null() => wrapped(root, schema, text, *plain, 0),
        NodeContent::List(_) => {
            only_of_type(root, schema, "array").map(|(name, _)| format!("{{{name}: [...]}}"))
        }
        NodeContent::Map(_) if types(schema).contains(&"array") => Some("[{...}]".to_owned()),
        NodeContent::Scalar { .. } | NodeContent::Map(_) => None,
    }
}

/// The known word that is nearest to `word`. `-` and spaces count as `_`, and capitals as small letters.
pub(in crate::config::read) fn nearest<'w>(
    word: &str,
    known: impl Iterator<Item = &'w str>,
) -> Option<&'w str> {
    // A longer name is no misspelt key, and its comparison would be slow.
    if word.len() > SHOWN_MAX {
        return None;
    }
    let word = normal(word);
    let near = known.map(|candidate| (strsim::damerau_levenshtein(&word, &normal(candidate)), candidate));
    let (distance, candidate) = near.min()?;
    // A third of the letters may differ, as in the suggestions of compilers.
    (distance <= candidate.len().max(word.len()).max(3) / 3).then_some(candidate)
}

fn normal(word: &str) -> String {
    word.chars().map(|c| if matches!(c, '-' | ' ') { '_' } else { c.to_ascii_lowercase() }).collect()
}

/// Whether one name contains all parts of the other: `tls` and `listen_tls`, `request_timeout` and `timeouts`.
fn have_parts(one: &str, other: &str) -> bool {
    let parts = |name: &str| -> Vec<String> {
        name.split('_')
            .map(|part| part.trim_end_matches('s').to_owned())
            .filter(|part| !part.is_empty())
            .collect()
    };
    let (one, other) = (parts(one), parts(other));
    let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    !short.is_empty() && short.iter().all(|part| long.contains(part))
}

/// The paths that the value of a key fits best, and the number of its problems there.
fn best_paths(root: &Value, key: &UnknownKey<'_, '_>, paths: Vec<(String, &Value)>) -> (usize, Vec<String>) {
    let tried = paths.into_iter().map(|(name, schema)| ((key.misfits_of)(root, schema, key.value), name));
    tried.fold((usize::MAX, Vec::new()), |(least, mut names), (problems, name)| {
        if problems < least {
            return (problems, vec![name]);
        }
        if problems == least {
            names.push(name);
        }
        (least, names)
    })
}

/// A path as [`paths_of_key`] writes it: `models[].decode` for `models[0].decode`.
fn without_indices(path: &str) -> String {
    path.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Collects the paths, without indices, of the schema's keys that `meant` accepts.
fn paths_of_key<'a>(
    root: &'a Value,
    node: &'a Value,
    meant: &impl Fn(&str) -> bool,
    path: &str,
    depth: usize,
    paths: &mut Vec<(String, &'a Value)>,
) {
    // The schema is less than 12 deep. The bound stops a type that contains itself.
    if depth > 12 {
        return;
    }
    let resolved = target(root, node);
    if !std::ptr::eq(resolved, node) {
        return paths_of_key(root, resolved, meant, path, depth + 1, paths);
    }
    for (key, below) in node["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if meant(key) {
            paths.push((path.clone(), below));
        }
        paths_of_key(root, below, meant, &path, depth + 1, paths);
    }
    if node["items"].is_object() {
        paths_of_key(root, &node["items"], meant, &format!("{path}[]"), depth + 1, paths);
    }
    for alternative in alternatives(node) {
        paths_of_key(root, alternative, meant, path, depth + 1, paths);
    }
}

/// The only key of a map that takes a value of this type.
fn only_of_type<'a>(root: &'a Value, schema: &'a Value, kind: &str) -> Option<(&'a str, &'a Value)> {
    let properties = schema["properties"].as_object()?;
    let mut keys = properties
        .iter()
        .map(|(name, property)| (name.as_str(), target(root, property)))
        .filter(|(_, property)| types(property).contains(&kind));
    let only = keys.next()?;
    keys.next().is_none().then_some(only)
}

/// A text in the form that a schema needs, if there is only one.
fn wrapped(root: &Value, schema: &Value, text: &str, plain: bool, depth: usize) -> Option<String> {
    // The nesting of a configuration is below 12.
    if depth > 12 {
        return None;
    }
    let schema = target(root, schema);
    if alternatives(schema).next().is_some() {
        return alternatives(schema).find_map(|schema| wrapped(root, schema, text, plain, depth + 1));
    }
    let types = types(schema);
    if types.contains(&"object") {
        let required: Vec<_> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let (name, property) = match required.as_slice() {
            [] => only_of_type(root, schema, "array").or_else(|| only_of_type(root, schema, "integer"))?,
            [name] => (*name, &schema["properties"][name]),
            _ => return None,
        };
        return Some(format!("{{{name}: {}}}", wrapped(root, property, text, plain, depth + 1)?));
    }
    if types.contains(&"array") {
        return Some(format!("[{}]", wrapped(root, &schema["items"], text, plain, depth + 1)?));
    }
    if schema["format"] == "engine-url" && !text.contains("://") {
        let url = format!("http://{text}");
        return url.parse::<EngineUrl>().ok().map(|url| url.to_string());
    }
    let takes = !text.is_empty() && types.iter().any(|kind| could_be(kind, text, plain));
    // A text that YAML parses differently within a map is not shown.
    let is_safe = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-./:+~%=".contains(&b));
    takes.then(|| if is_safe { short(text) } else { "...".to_owned() })
}
