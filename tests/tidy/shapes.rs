//! Sizes and names of items: fields of a struct, lines of a function, types of a crate, and layers that import pingora.

use std::collections::{BTreeMap, BTreeSet};

use super::layers::code;
use super::{assert_none, sources};

/// Most fields of a struct of the router and the engine, but for configurations, metrics and serialized records.
const FIELDS_MAX: usize = 12;

/// Structs with more fields: configurations, and records that one function fills. The numbers only shrink.
const MORE_FIELDS: &[(&str, usize)] = &[
    ("engine/check/src/software.rs SoftwareDevice", 17),
    ("engine/src/model/config.rs ModelConfig", 18),
    ("engine/src/run/options.rs EngineOptions", 39),
    ("router/src/observe/finished_request.rs FinishedRequest", 18),
];

/// Most lines of a function.
const FUNCTION_LINES_MAX: usize = 80;

/// Names that several types of a crate may have: each state machine has its own.
const SHARED_NAMES: &[&str] = &["Action", "Error", "Event", "Options", "State", "Step"];

/// Layers of the router that import pingora.
const PINGORA_LAYERS: &[&str] = &["client", "process", "service"];

/// An item of a source: its name, the number of its first line, and its lines.
struct Item<'a> {
    name: &'a str,
    number: usize,
    lines: Vec<&'a str>,
    /// The lines of attributes right above.
    attributes: String,
}

/// The word behind `keyword` in a line that begins an item.
fn name_of<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let line = match line.strip_prefix("pub(") {
        Some(restricted) => restricted.split_once(") ")?.1,
        None => line,
    };
    let mut words = line.split([' ', '(', '<', '{', ';', ':']).filter(|word| !word.is_empty());
    let before = ["pub", "async", "const", "unsafe", "extern", "\"C\""];
    words.find(|word| !before.contains(word)).filter(|word| *word == keyword)?;
    words.next()
}

#[test]
fn planted_items_are_found() {
    let text = "pub(in crate::a) async fn long(\n    of: u8,\n) -> u8 {\n    1\n}\n\nstruct Unit;\n\n\
                trait Held {\n    type Part;\n    fn short(&self);\n}\n// fn none() {}\n";
    let sizes = |keyword| -> Vec<_> {
        items(text, keyword).iter().map(|item| (item.name.to_owned(), item.lines.len())).collect()
    };
    assert_eq!(sizes("fn"), [("long".to_owned(), 5), ("short".to_owned(), 1)]);
    assert_eq!(sizes("struct"), [("Unit".to_owned(), 1)]);
    assert_eq!(sizes("trait"), [("Held".to_owned(), 4)]);
    let found = || vec![("a.rs long".to_owned(), 1, 90)];
    assert_eq!(without_exceptions(found(), &[], "LIST"), ["a.rs long (line 1) has 90"]);
    assert_eq!(without_exceptions(found(), &[("a.rs long", 91)], "LIST").len(), 1);
    assert_eq!(without_exceptions(found(), &[("a.rs long", 90), ("a.rs gone", 81)], "LIST").len(), 1);
    assert!(without_exceptions(found(), &[("a.rs long", 90)], "LIST").is_empty());
}

/// The items of a source that begin with `keyword`. `rustfmt` puts the end of an item below its beginning.
fn items<'a>(text: &'a str, keyword: &str) -> Vec<Item<'a>> {
    let lines: Vec<&str> = text.lines().collect();
    let mut items = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = name_of(line.trim_start(), keyword) else { continue };
        let indent = &line[..line.len() - line.trim_start().len()];
        let ends = |line: &&&str| {
            line.strip_prefix(indent).is_some_and(|rest| rest.starts_with(['}', ')']) && !rest.ends_with('{'))
        };
        let has_body = !line.ends_with([';', '}']);
        let count = if has_body { lines[at..].iter().take_while(|line| !ends(line)).count() + 1 } else { 1 };
        let above = lines[..at].iter().rev().take_while(|line| line.trim_start().starts_with(['#', '/']));
        let attributes = above.copied().collect();
        items.push(Item {
            name,
            number: at + 1,
            lines: lines[at..].iter().take(count).copied().collect(),
            attributes,
        });
    }
    items
}

fn is_test(file: &str) -> bool {
    file.ends_with("tests.rs") || file.contains("/tests/")
}

/// The crate of a source: the path before `/src/`.
fn crate_of(file: &str) -> Option<&str> {
    file.find("/src/").map(|at| &file[..at]).or_else(|| file.starts_with("src/").then_some(""))
}

/// Compares items that a rule found (file and name, first line, size) with its exceptions, which have the exact size.
fn without_exceptions(
    found: Vec<(String, usize, usize)>,
    exceptions: &[(&str, usize)],
    list: &str,
) -> Vec<String> {
    let mut broken = Vec::new();
    let mut met = BTreeSet::new();
    for (item, line, size) in found {
        met.insert(item.clone());
        match exceptions.iter().find(|(known, _)| *known == item) {
            Some((_, known)) if *known == size => {}
            Some((_, known)) => {
                broken.push(format!("{item} (line {line}) has {size}, and {known} in {list}"))
            }
            None => broken.push(format!("{item} (line {line}) has {size}")),
        }
    }
    let gone = exceptions.iter().filter(|(item, _)| !met.contains(*item));
    broken.extend(gone.map(|(item, _)| format!("{item} is in {list} and needs no exception")));
    broken
}

#[test]
fn no_struct_has_more_than_twelve_fields() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        let folders = ["engine/check/src/", "engine/src/", "router/src/"];
        let below = folders.iter().find_map(|folder| file.strip_prefix(folder));
        let Some(below) = below.filter(|_| !is_test(&file)) else { continue };
        if below.starts_with("config/") || below.starts_with("metrics/") {
            continue;
        }
        for item in items(&code(&text), "struct") {
            let record = ["Serialize", "Deserialize", "Args", "Parser"];
            if record.iter().any(|derive| item.attributes.contains(derive)) {
                continue;
            }
            let is_field = |line: &&&str| {
                let rest = line.trim_start();
                let rest = rest.strip_prefix("pub ").unwrap_or(rest);
                let rest =
                    rest.strip_prefix("pub").and_then(|rest| rest.split_once(") ")).map_or(rest, |(_, r)| r);
                let name = rest.split(':').next().unwrap_or_default();
                rest.contains(": ") && name.chars().all(|c| c.is_alphanumeric() || c == '_')
            };
            let fields = item.lines[1..].iter().filter(is_field).count();
            if fields > FIELDS_MAX {
                found.push((format!("{file} {}", item.name), item.number, fields));
            }
        }
    }
    assert_none(&without_exceptions(found, MORE_FIELDS, "MORE_FIELDS"), "structs with several ideas in them");
}

#[test]
fn no_function_is_longer_than_eighty_lines() {
    let mut found = Vec::new();
    for (file, text) in sources() {
        // The transition tables of the machines are one function each.
        if is_test(&file) || crate_of(&file).is_none() || file.starts_with("connector/src/machines/") {
            continue;
        }
        for item in items(&code(&text), "fn") {
            if item.lines.len() > FUNCTION_LINES_MAX {
                found.push((format!("{file} {}", item.name), item.number, item.lines.len()));
            }
        }
    }
    let long = found.iter().map(|(item, line, lines)| format!("{item} (line {line}) has {lines} lines"));
    assert_none(&long.collect::<Vec<_>>(), "functions with several ideas in them");
}

#[test]
fn a_type_name_is_defined_once_per_crate() {
    let mut defined: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for (file, text) in sources() {
        let Some(name) = crate_of(&file) else { continue };
        for keyword in ["struct", "enum", "trait", "union", "type"] {
            for item in items(&text, keyword) {
                // A type inside of an item belongs to a trait.
                let indented = text.lines().nth(item.number - 1).is_some_and(|line| line.starts_with(' '));
                if SHARED_NAMES.contains(&item.name) || keyword == "type" && indented {
                    continue;
                }
                let place = format!("{file}:{}", item.number);
                defined.entry((name.to_owned(), item.name.to_owned())).or_default().push(place);
            }
        }
    }
    assert!(defined.len() > 1000, "only {} types were seen", defined.len());
    let broken: Vec<_> = defined.into_iter().filter(|(_, places)| places.len() > 1).collect();
    let broken: Vec<_> =
        broken.into_iter().map(|((_, name), places)| format!("{name}: {}", places.join(", "))).collect();
    assert_none(&broken, "types with one name");
}

#[test]
fn only_three_layers_import_pingora() {
    let mut broken = Vec::new();
    let mut met = BTreeSet::new();
    for (file, text) in sources() {
        let Some(below) = file.strip_prefix("router/src/").filter(|_| !is_test(&file)) else { continue };
        let layer = below.split(['/', '.']).next().unwrap_or_default();
        for (at, line) in code(&text).lines().enumerate() {
            if line.contains("pingora") {
                met.insert(layer.to_owned());
                if !PINGORA_LAYERS.contains(&layer) {
                    broken.push(format!("{file}:{}", at + 1));
                }
            }
        }
    }
    assert_none(&broken, "pingora outside its layers");
    assert!(met.len() <= PINGORA_LAYERS.len() && !met.is_empty(), "pingora is imported by {met:?}");
}
