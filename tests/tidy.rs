//! The rules of the repository, as tests. A failure names the file and the line.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "tidy/cycles.rs"]
mod cycles;
#[path = "tidy/layers.rs"]
mod layers;
#[path = "tidy/log_events.rs"]
mod log_events;
#[path = "tidy/pages.rs"]
mod pages;
#[path = "tidy/shapes.rs"]
mod shapes;
#[path = "tidy/words.rs"]
mod words;

/// Maximum lines of a source file. A file of more than 500 lines usually has a second purpose.
const LINES_MAX: usize = 600;

/// Imports between the crates of this repository. See the map in ARCHITECTURE.md.
const IMPORTS: &[(&str, &[&str])] = &[
    ("baton-connector", &[]),
    ("baton-openai", &[]),
    ("baton-connector-channel", &["baton-connector"]),
    ("baton-connector-device", &["baton-connector", "baton-connector-channel", "baton-connector-shm"]),
    ("baton-connector-leases", &["baton-connector"]),
    ("baton-connector-nixl", &["baton-connector", "baton-connector-channel"]),
    ("baton-connector-shm", &["baton-connector", "baton-connector-channel"]),
    ("baton-connector-tcp", &["baton-connector", "baton-connector-channel"]),
    (
        "baton-engine",
        &[
            "baton-connector",
            "baton-connector-device",
            "baton-connector-leases",
            "baton-connector-nixl",
            "baton-connector-shm",
            "baton-connector-tcp",
            "baton-openai",
        ],
    ),
    (
        "baton-engine-check",
        &[
            "baton-connector",
            "baton-connector-device",
            "baton-connector-nixl",
            "baton-engine",
            "baton-openai",
        ],
    ),
    ("baton-fuzz", &["baton-connector-channel", "baton-engine", "baton-router"]),
    ("baton-router", &["baton-connector", "baton-openai"]),
    ("baton-vllm", &["baton-connector", "baton-connector-channel", "baton-connector-leases", "baton-openai"]),
    (
        "baton-bench",
        &[
            "baton-connector",
            "baton-connector-device",
            "baton-connector-leases",
            "baton-connector-nixl",
            "baton-connector-shm",
            "baton-connector-tcp",
            "baton-engine",
            "baton-engine-check",
            "baton-openai",
            "baton-router",
        ],
    ),
    (
        "baton",
        &[
            "baton-bench",
            "baton-connector",
            "baton-connector-tcp",
            "baton-engine",
            "baton-engine-check",
            "baton-openai",
            "baton-router",
        ],
    ),
];

/// Allowed dependencies of the connector's core: data, hashing and errors.
const CORE_DEPENDENCIES: &[&str] = &["serde", "serde_json", "sha2", "thiserror"];

/// Words that make the connector's core impure. `Time` and all other input are arguments.
const IMPURE: &[&str] = &[
    "std::net",
    "std::thread",
    "std::fs",
    "std::io",
    "std::env",
    "std::process",
    "Instant",
    "SystemTime",
    "Mutex",
    "RwLock",
    "async fn",
    "tokio",
    "getrandom",
    "rand::",
    "libc",
];

/// The exception: an address is data, and a transport and its errors name a peer.
const ADDRESS: (&[&str], &str) =
    (&["connector/src/machines/replies.rs", "connector/src/transport.rs"], "use std::net::SocketAddr;");

/// Paths that exist on one machine only.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/")];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the repository, by its path from the root.
fn files() -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of ours can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let ours = !matches!(name.as_str(), "target" | ".git" | "node_modules" | "__pycache__");
            if path.is_dir() && ours {
                folders.push(path);
            } else if path.is_file() && ours {
                let below = path.strip_prefix(root()).expect("it was found below the root");
                found.insert(below.to_string_lossy().into_owned(), path);
            }
        }
    }
    found
}

fn sources() -> impl Iterator<Item = (String, String)> {
    files().into_iter().filter(|(name, _)| name.ends_with(".rs")).map(|(name, path)| {
        let text = fs::read_to_string(path).expect("a source is text");
        (name, text)
    })
}

/// A manifest's package name and the keys of its `[dependencies]`.
fn manifest(text: &str) -> (String, Vec<String>) {
    let (mut section, mut package, mut dependencies) = ("", String::new(), Vec::new());
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        } else if let Some((key, value)) = line.split_once('=') {
            let key = key.trim().split('.').next().unwrap_or_default().to_owned();
            match section {
                "[package]" if key == "name" => package = value.trim().trim_matches('"').to_owned(),
                "[dependencies]" | "[build-dependencies]" => dependencies.push(key),
                _ => {}
            }
        }
    }
    (package, dependencies)
}

fn manifests() -> Vec<(String, Vec<String>)> {
    let manifests = files().into_iter().filter(|(name, _)| name.ends_with("Cargo.toml"));
    manifests.map(|(_, path)| manifest(&fs::read_to_string(path).expect("a manifest is text"))).collect()
}

fn assert_none(broken: &[String], rule: &str) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

#[test]
fn crates_import_only_permitted_crates() {
    let mut broken = Vec::new();
    for (package, dependencies) in manifests() {
        let ours: Vec<_> = dependencies.iter().filter(|d| d.starts_with("baton")).collect();
        let Some((_, allowed)) = IMPORTS.iter().find(|(name, _)| *name == package) else {
            // A replacement of a foreign crate, or a new crate that is not in the table yet.
            if package.starts_with("baton") || !ours.is_empty() {
                broken.push(format!("{package} is not in the table of tests/tidy.rs"));
            }
            continue;
        };
        let forbidden = ours.into_iter().filter(|d| !allowed.contains(&d.as_str()));
        broken.extend(forbidden.map(|d| format!("{package} imports {d}")));
    }
    assert_none(&broken, "imports between crates");
}

#[test]
fn only_the_router_knows_pingora() {
    let knows = |(package, dependencies): &(String, Vec<String>)| {
        package != "baton-router" && dependencies.iter().any(|d| d.starts_with("pingora"))
    };
    let broken: Vec<_> = manifests().into_iter().filter(knows).map(|(package, _)| package).collect();
    assert_none(&broken, "pingora outside the router");
}

#[test]
fn the_connectors_core_is_pure() {
    let core = manifests().into_iter().find(|(package, _)| package == "baton-connector").expect("it exists");
    let foreign: Vec<_> = core.1.into_iter().filter(|d| !CORE_DEPENDENCIES.contains(&d.as_str())).collect();
    assert_none(&foreign, "dependencies of the connector's core");

    let mut broken = Vec::new();
    for (name, text) in sources() {
        if !name.starts_with("connector/src/") || name.ends_with("/tests.rs") {
            continue;
        }
        // Tests are at the end of a file and may use anything.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if ADDRESS.0.contains(&name.as_str()) && line == ADDRESS.1 {
                continue;
            }
            let impure = IMPURE.iter().filter(|word| code.contains(**word));
            broken.extend(impure.map(|word| format!("{name}:{}: {word}", number + 1)));
        }
    }
    assert_none(&broken, "the connector decides and never acts");
}

#[test]
fn every_source_has_a_module_comment() {
    let silent = sources().filter(|(_, text)| !text.starts_with("//! ")).map(|(name, _)| name);
    assert_none(&silent.collect::<Vec<_>>(), "files without a first line of documentation");
}

#[test]
fn every_allowance_of_unsafe_code_has_a_reason() {
    let mut broken = Vec::new();
    for (name, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            let allows = line.trim_start().starts_with("#![allow(unsafe_code")
                || line.trim_start().starts_with("#[allow(unsafe_code");
            let reason = line.split_once("reason = ").is_some_and(|(_, reason)| reason.trim().len() > 10);
            if allows && !reason {
                broken.push(format!("{name}:{}", number + 1));
            }
        }
    }
    assert_none(&broken, "unsafe code without a reason");
}

#[test]
fn no_source_is_too_long() {
    let long = sources().map(|(name, text)| (name, text.lines().count()));
    let long = long.filter(|&(_, lines)| lines > LINES_MAX).map(|(name, lines)| format!("{name}: {lines}"));
    assert_none(&long.collect::<Vec<_>>(), "files with a second idea in them");
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    let mut broken = Vec::new();
    for (name, path) in files() {
        // A binary file has no lines.
        let Ok(text) = fs::read_to_string(path) else { continue };
        for (number, line) in text.lines().enumerate() {
            if MACHINE_PATHS.iter().any(|path| line.contains(path)) {
                broken.push(format!("{name}:{}", number + 1));
            }
        }
    }
    assert_none(&broken, "paths of one machine");
}

/// Every code span of a page: each second piece between backticks.
fn code(page: &str) -> impl Iterator<Item = &str> {
    page.split('`').skip(1).step_by(2)
}

/// The pages that are a map of the sources.
const MAPS: &[&str] = &["ARCHITECTURE.md", "docs/explanation/source-reports.md"];

#[test]
fn the_maps_name_only_files_that_exist() {
    let files = files();
    let exists = |word: &str| {
        let word = word.trim_end_matches('/');
        root().join(word).exists() || files.keys().any(|file| file.ends_with(&format!("/{word}")))
    };
    let is_path = |word: &&str| {
        let kinds = [".rs", ".toml", ".md", ".txt", ".yaml", ".json", ".html", "/"];
        let plain = !word.contains([' ', '*', '{', '<', '$', ':']) && !word.starts_with('/');
        plain && kinds.iter().any(|kind| word.ends_with(kind))
    };
    let mut missing = Vec::new();
    for map in MAPS {
        let page = fs::read_to_string(root().join(map)).expect("a map is there");
        let words = code(&page).filter(is_path).filter(|word| !exists(word));
        missing.extend(words.map(|word| format!("{map}: {word}")));
    }
    assert_none(&missing, "files that do not exist are on a map");
}

#[test]
fn the_page_of_the_reports_names_only_tests_and_mutations_that_exist() {
    let page =
        fs::read_to_string(root().join("docs/explanation/source-reports.md")).expect("the page is there");
    let all: String = sources().map(|(_, text)| text).collect();
    let mutations = fs::read_to_string(root().join("tests/model/mutations.rs")).expect("they are there");
    let plain = |word: &&str| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let missing = code(&page).filter(plain).filter(|word| {
        let test = word.matches('_').count() >= 3;
        // Names of states are one word, names of mutations are several.
        let mutation = word.chars().filter(|letter| letter.is_ascii_uppercase()).count() >= 2;
        (test && !all.contains(&format!("fn {word}(")))
            || (mutation && *word != "FreeNow" && !mutations.contains(&format!(" {word},")))
    });
    assert_none(&missing.map(str::to_owned).collect::<Vec<_>>(), "names that are not there");
}

#[test]
fn every_example_configuration_is_well_formed() {
    let folders = ["deploy/config/", "examples/router/"];
    let of_folder = |folder: &str| {
        files().into_iter().filter(|(name, _)| name.starts_with(folder) && name.ends_with(".yaml")).collect()
    };
    let examples: Vec<Vec<_>> = folders.into_iter().map(of_folder).collect();
    assert!(examples.iter().all(|folder| !folder.is_empty()), "{folders:?} have examples");
    for (name, path) in examples.into_iter().flatten() {
        let text = fs::read_to_string(path).expect("a configuration is text");
        let value: Result<serde_json::Value, _> = serde_saphyr::from_str(&text);
        let value = value.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(value.is_object(), "{name} is a mapping");
    }
}
