//! `GET /debug/kv`: `docs/reference/admin-api.md` contains exactly its fields.

use std::collections::BTreeSet;
use std::path::Path;

use baton_engine::run::options::Role;
use serde_json::Value;

use crate::harness::cluster::{LLAMA, Node, greedy, options, prompt};
use crate::tiers::{disk, host};

/// The paths of all values that are neither objects nor lists: `blocks.total`, `oldest_leases[].age_ms`.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                paths(value, &format!("{path}{dot}{name}"), found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| paths(value, &format!("{path}[]"), found)),
        _ => drop(found.insert(path.to_owned())),
    }
}

#[test]
fn the_page_documents_exactly_the_fields_of_debug_kv() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut options = options(LLAMA, Role::Prefill);
    disk(&mut options, folder.path());
    host(&mut options, 1);
    let node = Node::start(options);
    node.open_lease(&greedy(&prompt(1, 45), 8));
    let mut usage = node.kv();
    // Each core has the same fields.
    let cores = usage["cores"].take();
    let mut found = BTreeSet::new();
    usage.as_object_mut().expect("an object").remove("cores");
    paths(&usage, "", &mut found);
    let mut of_core = BTreeSet::new();
    paths(&cores[0], "", &mut of_core);
    assert!(of_core.remove("rank"), "{cores}");
    let of_all: BTreeSet<_> = found.iter().filter(|path| !path.starts_with("engine.")).cloned().collect();
    assert_eq!(of_core, of_all);
    found.insert("cores[]".to_owned());
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/admin-api.md");
    let page = std::fs::read_to_string(page).expect("docs/reference/admin-api.md is there");
    let table = page
        .split_once("<!-- engine fields: begin -->")
        .and_then(|(_, rest)| rest.split_once("<!-- engine fields: end -->"));
    let rows =
        table.expect("the table begins and ends").0.lines().filter_map(|line| line.strip_prefix("| `"));
    let named: BTreeSet<_> = rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned())).collect();
    assert_eq!(named, found, "docs/reference/admin-api.md and an engine's answer");
}
