//! Files of one crate do not import each other in a circle. A parent and the files below it do not count.

use std::collections::{BTreeMap, BTreeSet};

use super::layers::code;
use super::{assert_none, sources};

/// Source folders that are checked.
const FOLDERS: &[&str] = &[
    "bench/src/",
    "connector/src/",
    "connector/channel/src/",
    "connector/device/src/",
    "connector/leases/src/",
    "connector/nixl/src/",
    "connector/openai/src/",
    "connector/shm/src/",
    "connector/tcp/src/",
    "connector/vllm/src/",
    "engine/check/src/",
    "engine/src/",
    "router/src/",
];

/// Circles that stay: one of their files, how many there are, and why.
const ALLOWED: &[(&str, usize)] = &[
    // Two halves of one idea each.
    ("bench/src/systems/fleet/client.rs", 2),
    ("engine/check/src/software/memory.rs", 2),
];

type Module = Vec<String>;

/// The module of a file below a source folder.
fn module(below: &str) -> Module {
    let path = below.strip_suffix(".rs").unwrap_or(below);
    let mut parts: Module = path.split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
        parts.pop();
    }
    parts
}

/// The paths of a use tree: `a::{b, c::d as e}` has `a::b` and `a::c::d`.
pub(super) fn leaves(tree: &str) -> Vec<Module> {
    let tree = tree.trim();
    let segments = |path: &str| -> Module {
        let path = path.split(" as ").next().unwrap_or_default();
        path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
    };
    let Some((head, rest)) = tree.split_once('{') else { return vec![segments(tree)] };
    let (rest, head) = (rest.trim_end().strip_suffix('}').unwrap_or(rest), segments(head));
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    let ends = rest.char_indices().chain([(rest.len(), ',')]);
    for (at, c) in ends {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = rest[start..at].trim();
                let below = leaves(part).into_iter().filter(|_| !part.is_empty());
                found.extend(below.map(|leaf| [head.clone(), leaf].concat()));
                start = at + 1;
            }
            _ => {}
        }
    }
    found
}

/// The use trees of some code, and whether each is a re-export.
pub(super) fn trees(code: &str) -> Vec<(bool, &str)> {
    let starts = code.match_indices("use ").filter(|(at, _)| {
        let line = code[..*at].rsplit('\n').next().unwrap_or_default().trim();
        line.is_empty() || line.starts_with("pub")
    });
    let tree = |at: usize| code[at + 4..].split(';').next().unwrap_or_default();
    let public = |at: usize| code[..at].trim_end().ends_with(['b', ')']);
    starts.map(|(at, _)| (public(at), tree(at))).collect()
}

/// Paths in code that begin with one of these words: `crate::a::B`, `child::f`.
fn paths(code: &str, heads: &BTreeSet<&str>) -> Vec<Module> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut before = ' ';
    let mut rest = code;
    while let Some(c) = rest.chars().next() {
        if !is_word(c) || is_word(before) {
            (before, rest) = (c, &rest[c.len_utf8()..]);
            continue;
        }
        let end = |text: &str| text.find(|c| !is_word(c)).unwrap_or(text.len());
        let mut path = vec![rest[..end(rest)].to_owned()];
        let begins = !matches!(before, ':' | '.') && heads.contains(path[0].as_str());
        rest = &rest[path[0].len()..];
        while let Some(next) = rest.strip_prefix("::").filter(|next| next.starts_with(is_word)) {
            path.push(next[..end(next)].to_owned());
            rest = &next[end(next)..];
        }
        before = 'a';
        if begins && path.len() > 1 {
            found.push(path);
        }
    }
    found
}

/// The module that a path inside a module names, from the crate's root; `None` for another crate.
fn absolute(me: &Module, path: &[String], files: &BTreeMap<Module, String>) -> Option<Module> {
    let up = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([me.clone(), path[1..].to_vec()].concat()),
        "super" => Some([&me[..me.len().checked_sub(up)?], &path[up..]].concat()),
        child => {
            let below = [me.clone(), vec![child.to_owned()]].concat();
            files.contains_key(&below).then(|| [me.clone(), path.to_vec()].concat())
        }
    }
}

/// The imports between the files of a folder, by module.
fn imports(code: &BTreeMap<Module, String>) -> BTreeMap<&Module, BTreeSet<&Module>> {
    let mut exports = BTreeMap::new();
    for (me, code_of) in code {
        for leaf in
            trees(code_of).into_iter().filter(|(public, _)| *public).flat_map(|(_, tree)| leaves(tree))
        {
            if let (Some(target), Some(name)) = (absolute(me, &leaf, code), leaf.last()) {
                exports.insert([me.clone(), vec![name.clone()]].concat(), target);
            }
        }
    }
    let file_of = |mut path: Module| {
        for _ in 0..5 {
            let exported = |n: &usize| !code.contains_key(&path[..*n]) && exports.contains_key(&path[..*n]);
            let Some(n) = (1..=path.len()).rev().find(exported) else { break };
            path = [exports[&path[..n]].clone(), path[n..].to_vec()].concat();
        }
        (0..=path.len()).rev().find_map(|n| code.get_key_value(&path[..n]).map(|(file, _)| file))
    };
    let mut found: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
    for (me, code_of) in code {
        let children = code.keys().filter(|file| file.len() == me.len() + 1 && file.starts_with(me));
        let mut heads: BTreeSet<&str> = children.filter_map(|file| file.last().map(String::as_str)).collect();
        heads.extend(["crate", "self", "super"]);
        let used = trees(code_of).into_iter().flat_map(|(_, tree)| leaves(tree));
        for path in used.chain(paths(code_of, &heads)) {
            let Some(file) = absolute(me, &path, code).and_then(file_of) else { continue };
            if !file.starts_with(me) && !me.starts_with(file) {
                found.entry(me).or_default().insert(file);
            }
        }
    }
    found
}

/// The circles among imports: sets of files that all import each other, directly or indirectly.
fn circles<'a>(imports: &BTreeMap<&'a Module, BTreeSet<&'a Module>>) -> Vec<BTreeSet<&'a Module>> {
    let reached = |from: &'a Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            for to in imports.get(file).into_iter().flatten() {
                if seen.insert(*to) {
                    next.push(to);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        imports.keys().map(|file| (*file, reached(file))).collect();
    let mut found: Vec<BTreeSet<&Module>> = Vec::new();
    for (file, there) in &reach {
        if there.contains(file) && !found.iter().any(|circle| circle.contains(file)) {
            let back = |other: &&&Module| reach.get(**other).is_some_and(|there| there.contains(file));
            found.push(there.iter().filter(back).copied().collect());
        }
    }
    found
}

#[test]
fn files_form_no_cycle() {
    let mut files: BTreeMap<&str, BTreeMap<Module, String>> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for (name, text) in sources() {
        let Some(folder) = FOLDERS.iter().find(|folder| name.starts_with(**folder)) else { continue };
        let below = &name[folder.len()..];
        if below.ends_with("tests.rs") || below.contains("/tests/") {
            continue;
        }
        names.insert((*folder, module(below)), name.clone());
        files.entry(folder).or_default().insert(module(below), code(&text));
    }
    let mut broken = Vec::new();
    let mut open: BTreeSet<&(&str, usize)> = ALLOWED.iter().collect();
    for (folder, code) in &files {
        for circle in circles(&imports(code)) {
            let circle: Vec<&str> =
                circle.into_iter().map(|file| names[&(*folder, file.clone())].as_str()).collect();
            match open.iter().find(|(known, _)| circle.contains(known)).copied() {
                Some(known) if circle.len() == known.1 => _ = open.remove(known),
                Some(known) => {
                    open.remove(known);
                    broken.push(format!(
                        "{} files instead of {}: {}",
                        circle.len(),
                        known.1,
                        circle.join(", ")
                    ));
                }
                None => broken.push(circle.join(", ")),
            }
        }
    }
    let gone = |(known, _): &&(&str, usize)| {
        format!("{known} is in no circle of its own any more: take it off the list")
    };
    broken.extend(open.iter().map(gone));
    assert_none(&broken, "files that import each other in a circle (tests/tidy/cycles.rs)");
}

#[test]
fn a_planted_circle_is_found_through_a_re_export_and_a_parent_does_not_count() {
    let of = |files: &[(&str, &str)]| {
        let code: BTreeMap<Module, String> =
            files.iter().map(|(name, text)| (module(name), (*text).to_owned())).collect();
        circles(&imports(&code)).into_iter().map(|circle| circle.len()).collect::<Vec<_>>()
    };
    let low = ("low/mod.rs", "mod a;\npub(crate) use a::A;\n");
    assert_eq!(of(&[low, ("low/a.rs", "use crate::high::B;"), ("high.rs", "use crate::low::A;")]), [2]);
    assert_eq!(
        of(&[low, ("low/a.rs", "fn f(_: super::super::high::B) {}"), ("high.rs", "use crate::low::{x, A};")]),
        [2]
    );
    assert!(of(&[low, ("low/a.rs", "use super::x;"), ("high.rs", "use crate::low::A;")]).is_empty());
}
