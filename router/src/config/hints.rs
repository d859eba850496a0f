//! What was probably meant: the nearest word, the part that a key belongs to, the form that a value needs.

use std::rc::Rc;

use serde_json::Value;

use super::EngineUrl;
use super::read::document::{Content, Node};
use super::read::schema::{SHOWN_MAX, alternatives, could_be, short, target, types};

/// Places that a message names; a key that more parts have says nothing.
const HOMES_MAX: usize = 3;

/// Keys of other routers and proxies, each with the key here that it means.
const ELSEWHERE: [(&str, &str); 20] = [
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

/// Counts what of a tree does not fit a part of the schema (its root, the part, the tree).
pub(super) type MisfitsOf = fn(&Value, &Value, &Rc<Node>) -> usize;

/// An unknown key and the map that has it.
pub(super) struct Unknown<'k, 'a> {
    pub name: &'k str,
    pub value: &'k Rc<Node>,
    /// The schema of the map.
    pub map: &'a Value,
    /// The path of the map.
    pub path: &'k str,
    /// Keys that other alternatives of the same place would take.
    pub also: &'k [&'a str],
    /// How much of a tree does not fit a part of a schema.
    pub misfits_of: MisfitsOf,
}

/// `, did you mean ...?`: the nearest key of this place, the keys whose names have it as a part, or else where the key
/// belongs. Of several the ones that the value fits best.
pub(super) fn of_key<'a>(root: &'a Value, key: &Unknown<'_, 'a>) -> String {
    let properties = || key.map["properties"].as_object().into_iter().flatten();
    let known: Vec<&str> =
        properties().map(|(name, _)| name.as_str()).chain(key.also.iter().copied()).collect();
    if let Some(nearest) = nearest(key.name, known.iter().copied()) {
        return format!(", did you mean `{nearest}`?");
    }
    let name = normal(&key.name.chars().take(SHOWN_MAX).collect::<String>());
    let meant = |known: &str| ELSEWHERE.iter().any(|(word, ours)| *word == name && *ours == known);
    let here = properties().filter(|(known, _)| have_parts(known, &name) || meant(known));
    let here = best(root, key, here.map(|(name, schema)| (name.clone(), schema)).collect());
    let mut homes = Vec::new();
    if !key.value.is_null() {
        homes_of(root, root, &|known| known == name || meant(known), "", 0, &mut homes);
    }
    // The parts below the map that has the key are nearer than the rest.
    let below = format!("{}.", without_indices(key.path));
    if homes.iter().any(|(home, _)| home.starts_with(&below)) {
        homes.retain(|(home, _)| home.starts_with(&below));
    }
    let there = if homes.len() > HOMES_MAX { (usize::MAX, Vec::new()) } else { best(root, key, homes) };
    let (_, names) = if there.0 < here.0 { there } else { here };
    match names.as_slice() {
        [] => {}
        names => {
            let names: Vec<_> = names.iter().take(HOMES_MAX).map(|name| format!("`{name}`")).collect();
            return format!(", did you mean {}?", names.join(" or "));
        }
    }
    match known.as_slice() {
        [] => String::new(),
        _ if known.len() <= 12 => format!("; known here: {}", known.join(", ")),
        _ => String::new(),
    }
}

/// How a value would be written where a map or a list is needed: `{url: http://a:1}` for `http://a:1`.
pub(super) fn of_form(root: &Value, schema: &Value, node: &Node) -> Option<String> {
    match &node.content {
        Content::Scalar { text, plain } if !node.is_null() => wrapped(root, schema, text, *plain, 0),
        Content::List(_) => only_list(root, schema).map(|(name, _)| format!("{{{name}: [...]}}")),
        Content::Map(_) if types(schema).contains(&"array") => Some("[{...}]".to_owned()),
        Content::Scalar { .. } | Content::Map(_) => None,
    }
}

/// The one of some words that was probably meant. `-` and spaces count as `_`, and capitals as small letters.
pub(super) fn nearest<'w>(word: &str, known: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    // So long a name is no misspelt key, and comparing it would take long.
    if word.len() > SHOWN_MAX {
        return None;
    }
    let word = normal(word);
    let near = known.map(|candidate| (strsim::damerau_levenshtein(&word, &normal(candidate)), candidate));
    let (distance, candidate) = near.min()?;
    // A third of the letters may be wrong, as compilers allow it.
    (distance <= candidate.len().max(word.len()).max(3) / 3).then_some(candidate)
}

fn normal(word: &str) -> String {
    word.chars().map(|c| if matches!(c, '-' | ' ') { '_' } else { c.to_ascii_lowercase() }).collect()
}

/// Whether all parts of one name are parts of the other: `tls` and `listen_tls`, `request_timeout` and `timeouts`.
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

/// Those of some places that a value fits best, and how many problems it has there.
fn best(root: &Value, key: &Unknown<'_, '_>, places: Vec<(String, &Value)>) -> (usize, Vec<String>) {
    let tried = places.into_iter().map(|(name, schema)| ((key.misfits_of)(root, schema, key.value), name));
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

/// `models[0].decode` as the places of the schema are written: `models[].decode`.
fn without_indices(path: &str) -> String {
    path.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Where in the schema a key stands whose name is meant; paths without indices.
fn homes_of<'a>(
    root: &'a Value,
    node: &'a Value,
    meant: &impl Fn(&str) -> bool,
    path: &str,
    depth: usize,
    homes: &mut Vec<(String, &'a Value)>,
) {
    // The tree is below 12 deep; a type that contains itself would have no end.
    if depth > 12 {
        return;
    }
    let resolved = target(root, node);
    if !std::ptr::eq(resolved, node) {
        return homes_of(root, resolved, meant, path, depth + 1, homes);
    }
    for (key, below) in node["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if meant(key) {
            homes.push((path.clone(), below));
        }
        homes_of(root, below, meant, &path, depth + 1, homes);
    }
    if node["items"].is_object() {
        homes_of(root, &node["items"], meant, &format!("{path}[]"), depth + 1, homes);
    }
    for alternative in alternatives(node) {
        homes_of(root, alternative, meant, path, depth + 1, homes);
    }
}

/// The only key of a map that takes a list.
fn only_list<'a>(root: &'a Value, schema: &'a Value) -> Option<(&'a str, &'a Value)> {
    let properties = schema["properties"].as_object()?;
    let mut lists = properties
        .iter()
        .map(|(name, property)| (name.as_str(), target(root, property)))
        .filter(|(_, property)| types(property).contains(&"array"));
    let only = lists.next()?;
    lists.next().is_none().then_some(only)
}

/// A text in the form of a schema, where there is one form only.
fn wrapped(root: &Value, schema: &Value, text: &str, plain: bool, depth: usize) -> Option<String> {
    // The configuration's own nesting is below 12.
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
            [] => only_list(root, schema)?,
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
    // What YAML would read otherwise within a map is not shown.
    let is_safe = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-./:+~%=".contains(&b));
    takes.then(|| if is_safe { short(text) } else { "...".to_owned() })
}
