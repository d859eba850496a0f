//! Layers: a module imports its own layer and lower ones.
//!
//! A layer is a first-level entry of a crate's `src`: a folder or a file. Test modules may import any layer.

use std::collections::{BTreeMap, BTreeSet};

use super::cycles::{leaves, trees};
use super::{assert_none, files, sources};

/// The layers of each source folder, bottom first.
const LAYERS: &[(&str, &[&str])] = &[
    ("bench/src/", &["common", "load", "sim", "parts", "systems", "disconnect", "ops", "chart"]),
    ("connector/src/", &["limits", "time", "id", "labels", "memory", "handoff", "machines", "transport"]),
    ("connector/leases/src/", &["log_span", "event_log", "service", "rank"]),
    (
        "connector/vllm/src/",
        &[
            "signals", "ids", "config", "ops", "metrics", "pool", "channel", "producer", "consumer", "http",
            "assembly", "abi",
        ],
    ),
    ("engine/check/src/", &["software", "open", "golden_text", "parity", "kernels"]),
    (
        "engine/src/",
        &[
            "log_span",
            "model",
            "sampling",
            "grammar",
            "compute",
            "blocks",
            "offload",
            "scheduler",
            "engine_core",
            "kv_events",
            "metrics",
            "handoff",
            "run",
            "server",
            "engine",
        ],
    ),
    (
        "router/src/",
        &[
            "config",
            "metrics",
            "message",
            "envelope",
            "tls",
            "auth",
            "engines",
            "admission",
            "client",
            "routing",
            "legs",
            "observe",
            "state",
            "exchange",
            "service",
            "picker",
            "admin",
            "process",
            "simulate",
        ],
    ),
];

/// The layer of a file below a source folder; `None` for `lib.rs` and for files that only tests compile.
fn layer_of(below: &str) -> Option<&str> {
    let file = below.rsplit('/').next().unwrap_or(below);
    let is_test = file.ends_with("tests.rs") || below.contains("/tests/");
    let layer = below.split('/').next().unwrap_or(below);
    (!is_test && below != "lib.rs").then(|| layer.strip_suffix(".rs").unwrap_or(layer))
}

/// The code of a file, without comments and without the test module and what follows it.
pub(super) fn code(text: &str) -> String {
    let lines = text.lines().collect::<Vec<_>>();
    let is_module = |line: &str| line.ends_with('{') && line.split(' ').any(|word| word == "mod");
    let tests = lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && is_module(pair[1]));
    let lines = lines[..tests.unwrap_or(lines.len())].iter();
    lines.map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The names directly below the crate's root in a file: `crate::NAME`, the heads of `crate::{…}`, and names after as
/// many `super::` as lead to the root.
fn names(below: &str, code: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let depth = below.strip_suffix("/mod.rs").unwrap_or(below).split('/').count();
    let climb = "super::".repeat(depth);
    let mut names = Vec::new();
    for start in ["crate::", &climb] {
        for (at, _) in code.match_indices(start) {
            let (before, rest) = (&code[..at], &code[at + start.len()..]);
            if before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
                continue;
            }
            let Some(group) = rest.strip_prefix('{') else {
                names.push(word(rest));
                continue;
            };
            let mut open = 1;
            let mut head = true;
            for (at, c) in group.char_indices() {
                match c {
                    '{' => open += 1,
                    '}' => open -= 1,
                    ',' if open == 1 => head = true,
                    _ if open == 1 && head && !c.is_whitespace() => {
                        names.push(word(&group[at..]));
                        head = false;
                    }
                    _ => {}
                }
                if open == 0 {
                    break;
                }
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// The layers of the names that a `lib.rs` re-exports: `pub use machines::lease` makes `lease` a name of `machines`.
fn re_exports(lib: &str) -> BTreeMap<String, String> {
    let code = code(lib);
    let public = trees(&code).into_iter().filter(|(public, _)| *public);
    let paths = public.flat_map(|(_, tree)| leaves(tree));
    paths.filter_map(|path| Some((path.last()?.clone(), path.first()?.clone()))).collect()
}

/// The imports of a file from higher layers, and whether the file is in a layer.
fn upward(folder: &str, layers: &[&str], lib: &str, below: &str, text: &str) -> Vec<String> {
    let Some(layer) = layer_of(below) else { return Vec::new() };
    let re_exports = re_exports(lib);
    let rank = |name: &str| {
        let name = re_exports.get(name).map_or(name, String::as_str);
        layers.iter().position(|layer| *layer == name)
    };
    let Some(own) = rank(layer) else { return vec![format!("{folder}{below} is in no layer")] };
    let code = code(text);
    let higher = names(below, &code).into_iter().filter(|name| rank(name).is_some_and(|rank| rank > own));
    let mut found: Vec<_> =
        higher.map(|name| format!("{folder}{below} imports {name}, above {layer}")).collect();
    found.dedup();
    found
}

#[test]
fn modules_import_only_lower_layers() {
    let mut broken = Vec::new();
    let mut seen = BTreeSet::new();
    let sources: BTreeMap<String, String> = sources().collect();
    for (name, text) in &sources {
        for (folder, layers) in LAYERS {
            if let Some(below) = name.strip_prefix(folder) {
                let lib = &sources[&format!("{folder}lib.rs")];
                broken.extend(upward(folder, layers, lib, below, text));
                seen.extend(layer_of(below).map(|layer| (*folder, layer.to_owned())));
            }
        }
    }
    for (folder, layers) in LAYERS {
        let empty = layers.iter().filter(|layer| !seen.contains(&(*folder, (**layer).to_owned())));
        broken.extend(empty.map(|layer| format!("{folder}{layer} has no file")));
    }
    assert_none(&broken, "imports of a higher layer (layers are listed in tests/tidy/layers.rs)");
}

#[test]
fn a_planted_upward_import_is_found_in_every_form() {
    let layers = ["low", "high"];
    let lib = "mod low;\nmod high;\n\npub use high::{again, B as C};\n";
    let of = |below: &str, text: &str| upward("src/", &layers, lib, below, text);
    assert_eq!(of("low/a.rs", "use crate::high::B;\n"), ["src/low/a.rs imports high, above low"]);
    for (below, text) in [
        ("low/a.rs", "use crate::{low::x, high::B};\n"),
        ("low/a.rs", "use crate::{\n    low::{x, y},\n    high,\n};\n"),
        ("low/a.rs", "fn f() -> crate::high::B { todo!() }\n"),
        ("low/a.rs", "use super::super::high;\n"),
        ("low/mod.rs", "use super::high;\n"),
        ("low.rs", "use crate::high::B; // as well\n"),
        ("low/a.rs", "use crate::again::x;\n"),
    ] {
        assert_eq!(of(below, text).len(), 1, "{below}: {text}");
    }
    for (below, text) in [
        ("high/a.rs", "use crate::low::B;\nuse crate::high::C;\n"),
        ("low/a.rs", "// use crate::high::B;\nuse super::high;\nuse crate::highest::X;\n"),
        ("low/a.rs", "use crate::low::X;\n\n#[cfg(test)]\nmod tests {\n    use crate::high::B;\n}\n"),
        ("low/a/tests.rs", "use crate::high::B;\n"),
    ] {
        assert!(of(below, text).is_empty(), "{below}: {text}");
    }
    assert_eq!(of("new/a.rs", ""), ["src/new/a.rs is in no layer"]);
}

/// Maximum entries of a folder with sources.
const ENTRIES_MAX: usize = 20;

#[test]
fn no_folder_has_more_than_twenty_entries() {
    let mut entries: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in files().into_keys() {
        let parts: Vec<&str> = name.split('/').collect();
        let data = |part: &&str| {
            matches!(*part, "fixtures" | "golden" | "corpus" | "results") || part.starts_with('.')
        };
        let code = parts.iter().any(|part| matches!(*part, "src" | "tests"));
        if !code || parts.iter().any(data) {
            continue;
        }
        for at in 1..parts.len() {
            entries.entry(parts[..at].join("/")).or_default().insert(parts[at].to_owned());
        }
    }
    assert!(entries.len() > 50, "only {} folders were seen", entries.len());
    let mut broken = Vec::new();
    for (folder, entries) in &entries {
        if entries.len() > ENTRIES_MAX {
            broken.push(format!("{folder}: {}", entries.len()));
        }
    }
    assert_none(&broken, "folders with more than 20 entries");
}
