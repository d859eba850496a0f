//! Runs the real `baton check` on every router configuration of this repository: the files below `deploy/` and
//! `examples/router/`, the configurations of overlays, and the YAML blocks of pages. The tests walk the folders, so that
//! a new file cannot be missed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::{baton, files_below, ours, parsed, read, run};

/// The kind of a YAML file, by its top-level keys.
#[derive(Debug, PartialEq)]
enum Kind {
    Router,
    Kubernetes,
    Rules,
    Collector,
    Envoy,
}

fn kind(path: &Path) -> Kind {
    let text = read(path);
    // The first document is enough. Files of several documents are Kubernetes manifests.
    let first = text.split("\n---\n").next().unwrap_or_default();
    let document = parsed(first, path);
    let has = |key: &str| !document[key].is_null();
    if has("static_resources") {
        return Kind::Envoy;
    }
    match (has("models"), has("apiVersion") || has("kind"), has("groups"), has("receivers")) {
        (true, false, false, false) => Kind::Router,
        (false, true, false, false) => Kind::Kubernetes,
        (false, false, true, false) => Kind::Rules,
        (false, false, false, true) => Kind::Collector,
        _ => panic!("{}: what is it?", path.display()),
    }
}

fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Every YAML file below `deploy/` and `examples/router/`.
fn yaml_files() -> impl Iterator<Item = PathBuf> {
    let files = files_below(&ours("deploy")).into_iter().chain(files_below(&ours("examples/router")));
    files.filter(|path| is_yaml(path))
}

/// Every router configuration below `deploy/` and `examples/router/`.
pub(crate) fn routers() -> Vec<PathBuf> {
    yaml_files().filter(|file| kind(file) == Kind::Router).collect()
}

/// The YAML blocks of a page, each with its line.
fn blocks(page: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut open: Option<(usize, String)> = None;
    // A block in a list is indented as a whole.
    let mut indent = 0;
    for (number, line) in page.lines().enumerate() {
        match (&mut open, line.trim_start()) {
            (None, "```yaml" | "```yml") => {
                open = Some((number + 2, String::new()));
                indent = line.len() - line.trim_start().len();
            }
            (Some(_), "```") => found.extend(open.take()),
            (Some((_, text)), _) => {
                text.push_str(line.get(indent..).unwrap_or_default());
                text.push('\n');
            }
            (None, _) => {}
        }
    }
    found
}

/// Every page for people.
fn pages() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = ["docs", "deploy", "examples", "bench", "engine", "connector", "tests"]
        .iter()
        .flat_map(|folder| files_below(&ours(folder)))
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    found.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(ours));
    found
}

/// The content of a file that a configuration key names.
fn content(name: &str) -> String {
    match name {
        "keys_file" => {
            let words = ["key", "new", "--id", "chat-1", "--tenant", "chat"].map(str::to_owned);
            let (made, text) = baton(&words);
            assert!(made, "{text}");
            format!("keys:\n{text}")
        }
        "headers_file" => "authorization: Bearer x\n".to_owned(),
        _ => "0123456789abcdef0123456789abcdef".to_owned(),
    }
}

/// The files that a configuration names and the router would read, by their keys.
fn named_files(value: &Value, key: &str, found: &mut BTreeSet<(String, String)>) {
    match value {
        Value::String(text) if text.starts_with('/') && key != "path" => {
            found.insert((key.to_owned(), text.clone()));
        }
        Value::Array(list) => list.iter().for_each(|value| named_files(value, key, found)),
        Value::Object(map) => map.iter().for_each(|(key, value)| named_files(value, key, found)),
        _ => {}
    }
}

/// A configuration for this machine, whose files are in `folder`.
fn with_local_files(text: &str, place: &str, folder: &Path) -> String {
    let mut named = BTreeSet::new();
    named_files(&parsed(text, place.as_ref()), "", &mut named);
    let made = rcgen::generate_simple_self_signed(vec!["baton.example".to_owned()]).expect("a certificate");
    let mut text = text.to_owned();
    for (at, (key, file)) in named.iter().enumerate() {
        let here = folder.join(format!("{at}"));
        let inside = match key.as_str() {
            "certificate" | "client_ca" | "ca" => made.cert.pem(),
            "key" => made.signing_key.serialize_pem(),
            name => content(name),
        };
        fs::write(&here, inside).expect("the test's folder can be written");
        // No file name is the beginning of another, so that the order of replacements does not matter.
        assert!(named.iter().all(|(_, other)| other == file || !other.starts_with(file.as_str())), "{file}");
        text = text.replace(file.as_str(), &here.display().to_string());
    }
    text
}

/// The errors and warnings of `baton check` for a configuration.
fn checked(text: &str, place: &str) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("router.yaml");
    fs::write(&file, with_local_files(text, place, folder.path())).expect("the test's folder can be written");
    let (sound, printed) = run(Command::new(env!("CARGO_BIN_EXE_baton")).arg("check").arg(&file));
    let warned = printed.lines().filter(|line| line.contains(": warning: "));
    match sound {
        true => warned.map(|line| format!("{place}: {line}")).collect(),
        false => vec![format!("{place}: {printed}")],
    }
}

#[test]
fn every_router_configuration_below_deploy_passes_check() {
    let routers = routers();
    // These names show that the walk finds the files.
    for name in [
        "router/router.yaml",
        "config/systemd.yaml",
        "otel/router.yaml",
        "overlays/vllm/router.yaml",
        "overlays/vllm-baton/router.yaml",
    ] {
        assert!(routers.iter().any(|path| path.ends_with(name)), "{name}: {routers:?}");
    }
    assert!(routers.len() >= 12, "{routers:?}");
    let wrong: Vec<_> =
        routers.iter().flat_map(|path| checked(&read(path), &path.display().to_string())).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The files unchanged, on a machine without their secrets.
    for path in routers {
        let file = path.display().to_string();
        let (sound, printed) = baton(&["check".to_owned(), "--no-files".to_owned(), file]);
        assert!(sound && !printed.contains("warning:"), "{printed}");
    }
}

#[test]
fn every_yaml_file_below_deploy_has_a_known_kind() {
    for file in yaml_files() {
        let expected = match file.strip_prefix(ours("deploy")).unwrap_or(&file) {
            path if path.starts_with("config")
                || path.starts_with(ours("examples/router"))
                || path.ends_with("picker.yaml")
                || path.ends_with("router.yaml") && !path.starts_with("alerts") =>
            {
                Kind::Router
            }
            path if path.starts_with("alerts") => Kind::Rules,
            path if path.starts_with("otel") => Kind::Collector,
            path if path.ends_with("envoy.yaml") => Kind::Envoy,
            _ => Kind::Kubernetes,
        };
        assert_eq!(kind(&file), expected, "{}", file.display());
    }
}

/// Whether a block is a router's configuration or a part of one: its keys are in the schema.
fn is_router(block: &Value, keys: &BTreeSet<String>) -> bool {
    block.as_object().is_some_and(|map| map.keys().all(|key| keys.contains(key)))
}

#[test]
fn every_router_configuration_in_a_page_passes_check() {
    let (shown, schema) = baton(&["check".to_owned(), "--schema".to_owned()]);
    assert!(shown, "{schema}");
    let schema: Value = serde_json::from_str(&schema).expect("the schema is JSON");
    let keys: BTreeSet<String> = schema["properties"].as_object().expect("keys").keys().cloned().collect();
    assert!(keys.contains("models") && keys.contains("telemetry"), "{keys:?}");
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in pages() {
        for (line, text) in blocks(&read(&page)) {
            let place = format!("{}:{line}", page.display());
            let block = parsed(&text, place.as_ref());
            // The first line marks fragments of an entry of `models`, and configurations of other programs.
            if text.starts_with("# not the router's") {
                continue;
            }
            let part_of_model = block.as_object().is_some_and(|map| {
                let model = &schema["$defs"]["ModelConfig"]["properties"];
                map.keys().all(|key| !model[key].is_null() && !keys.contains(key))
            });
            let whole = match (is_router(&block, &keys), part_of_model) {
                (true, _) if !block["models"].is_null() => text,
                (true, _) => {
                    format!(
                        "{text}\nmodels: [{{name: m, decode: {{engines: [{{url: 'http://127.0.0.1:2'}}]}}}}]\n"
                    )
                }
                (false, true) => {
                    let indented: String = text.lines().map(|line| format!("    {line}\n")).collect();
                    let engines = |leg: &str, port: u16| match block[leg].is_null() {
                        true => format!("    {leg}: {{engines: [{{url: 'http://127.0.0.1:{port}'}}]}}\n"),
                        false => String::new(),
                    };
                    format!(
                        "models:\n  - name: m\n{}{}{indented}",
                        engines("prefill", 2),
                        engines("decode", 3)
                    )
                }
                (false, false) => {
                    wrong.push(format!("{place}: neither a router's configuration nor a part of one"));
                    continue;
                }
            };
            seen += 1;
            wrong.extend(checked(&whole, &place));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen >= 3, "{seen} blocks");
}

#[test]
fn a_configuration_that_is_wrong_is_found_wrong() {
    let good = "models: [{name: m, decode: {engines: [{url: 'http://127.0.0.1:2'}]}}]\n";
    assert_eq!(checked(good, "good"), Vec::<String>::new());
    assert_eq!(checked(&good.replace("name", "nam"), "bad").len(), 1);
    let page = "text\n```yaml\na: 1\n```\n```sh\nx\n```\n  ```yaml\n  b: 2\n  ```\n";
    assert_eq!(blocks(page), [(3, "a: 1\n".to_owned()), (9, "b: 2\n".to_owned())]);
}
