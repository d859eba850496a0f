//! Baton's connector in vLLM engines: the overlay `vllm-baton`, the image of the package and the settings on pages agree
//! with the package in `connector/vllm`.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::container::{instruction, stages};
use crate::references::{Fleet, containers, list, port_of};
use crate::{ours, parsed, read};

const OVERLAY: &str = "vllm-baton";
/// The folder of the installed package in the image.
const FOLDER: &str = "/baton-vllm";
/// Pages with settings of the connector.
const PAGES: [&str; 2] = ["connector/vllm/README.md", "docs/how-to/vllm-connector.md"];
/// Keys of `--kv-transfer-config` that manifests and pages use.
const KEYS: [&str; 5] = [
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
];
/// Keys of `kv_connector_extra_config`.
const EXTRA_KEYS: [&str; 2] = ["baton", "kv_lease_duration"];
const TRANSFER_CONFIG: &str = "--kv-transfer-config";

/// A file of the package.
fn package(file: &str) -> String {
    read(&ours("connector/vllm").join(file))
}

/// The settings of the package: the fields of its class `Settings`, as operators write them.
fn settings() -> BTreeSet<String> {
    let source = package("python/baton_vllm/settings.py");
    let (_, class) = source.split_once("class Settings:\n").expect("the class of the settings");
    let (fields, _) = class.split_once("@classmethod").expect("its parser");
    let names = fields.lines().filter_map(|line| Some(line.trim().split_once(": ")?.0));
    let found: BTreeSet<String> = names.map(|name| name.replace("strict_peers", "peers")).collect();
    assert!(found.contains("http") && found.contains("peers") && found.len() >= 7, "{found:?}");
    found
}

/// A number of the package.
fn constant(name: &str) -> u64 {
    let source = package("python/baton_vllm/settings.py");
    let value = source.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no number {name}"))
}

/// The name of the endpoint plugin, whose function exists.
fn plugin() -> String {
    let project = package("pyproject.toml");
    let section = "[project.entry-points.\"vllm.endpoint_plugins\"]\n";
    let (_, entries) = project.split_once(section).expect("the section");
    let entry = entries.lines().next().and_then(|line| line.split_once(" = "));
    let (name, target) = entry.expect("an entry point");
    let (module, function) = target.trim_matches('"').split_once(':').expect("a function of a module");
    let source = package(&format!("python/{}.py", module.replace('.', "/")));
    assert!(source.contains(&format!("\ndef {function}(")), "{target}");
    name.to_owned()
}

/// The errors of a value of `--kv-transfer-config`.
fn mistakes(text: &str) -> Vec<String> {
    let config: Value = match serde_json::from_str(text) {
        Ok(config) => config,
        Err(error) => return vec![format!("{text}: {error}")],
    };
    let settings = settings();
    let extra = &config["kv_connector_extra_config"];
    let mut found = Vec::new();
    let mut unknown = |object: &Value, is_known: &dyn Fn(&str) -> bool| {
        let keys = object.as_object().into_iter().flatten().map(|(key, _)| key);
        found.extend(keys.filter(|key| !is_known(key)).map(|key| format!("{key} is unknown")));
    };
    unknown(&config, &|key| KEYS.contains(&key));
    unknown(extra, &|key| EXTRA_KEYS.contains(&key));
    unknown(&extra["baton"], &|key| settings.contains(key));
    let text = |key: &str| config[key].as_str().unwrap_or_default().to_owned();
    let (class, module) = (text("kv_connector"), text("kv_connector_module_path"));
    let sources = package("python/baton_vllm/__init__.py");
    let exported = sources.lines().find(|line| line.starts_with("__all__ = ")).expect("its classes");
    if !exported.contains(&format!("\"{class}\"")) {
        found.push(format!("the package has no class {class:?}"));
    }
    if !ours("connector/vllm/python").join(&module).join("__init__.py").is_file() {
        found.push(format!("there is no module {module:?}"));
    }
    found
}

fn fleet(name: &str) -> Fleet {
    Fleet::all().find(|fleet| fleet.name == name).expect("an overlay")
}

/// The pods of P and D.
fn engines(fleet: &Fleet) -> Vec<(String, &Value)> {
    fleet.pods().filter(|(name, _)| name == "prefill" || name == "decode").collect()
}

fn main_container(pod: &Value) -> &Value {
    containers(pod).next().expect("a container")
}

fn variable<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    list(&container["env"]).find(|variable| variable["name"] == name)?["value"].as_str()
}

/// The name of the volume that a container has at this path.
fn volume_at<'a>(container: &'a Value, path: &str) -> &'a Value {
    let mount = list(&container["volumeMounts"]).find(|mount| mount["mountPath"] == path);
    &mount.unwrap_or_else(|| panic!("nothing is mounted at {path}"))["name"]
}

/// The Secret that contains a file of a pod.
fn secret_of<'a>(pod: &'a Value, file: &str) -> &'a Value {
    let (folder, _) = file.rsplit_once('/').expect("a path");
    let name = volume_at(main_container(pod), folder);
    let volume = list(&pod["spec"]["volumes"]).find(|volume| volume["name"] == *name);
    &volume.expect("the volume of a mount")["secret"]["secretName"]
}

#[test]
fn engines_of_the_overlay_find_the_package_and_its_plugin() {
    let fleet = fleet(OVERLAY);
    let engines = engines(&fleet);
    assert_eq!(engines.len(), 2);
    for (name, pod) in engines {
        let engine = main_container(pod);
        let copies: Vec<_> = list(&pod["spec"]["initContainers"]).collect();
        assert_eq!(copies.len(), 1, "{name}");
        let image = format!("registry.example/baton/vllm-connector:{}", env!("CARGO_PKG_VERSION"));
        assert_eq!(copies[0]["image"], image, "{name}");
        // From the image's folder into the volume that the engine's interpreter searches.
        let command: Vec<_> = list(&copies[0]["command"]).filter_map(Value::as_str).collect();
        let from = format!("{FOLDER}/.");
        assert_eq!(command[..3], ["cp", "-r", from.as_str()], "{name}");
        let copied = volume_at(copies[0], command[3].trim_end_matches('/'));
        let searched = variable(engine, "PYTHONPATH").expect("the folder of the package");
        assert_eq!(copied, volume_at(engine, searched), "{name}");
        let volume = list(&pod["spec"]["volumes"]).find(|volume| volume["name"] == *copied);
        assert!(volume.is_some_and(|volume| volume["emptyDir"].is_object()), "{name}");
        assert_eq!(variable(engine, "VLLM_PLUGINS"), Some(plugin().as_str()), "{name}");
        let security = &copies[0]["securityContext"];
        let wanted =
            [("allowPrivilegeEscalation", false), ("readOnlyRootFilesystem", true), ("runAsNonRoot", true)];
        for (key, wanted) in wanted {
            assert_eq!(security[key], wanted, "{name}: {key}");
        }
        assert_eq!(security["capabilities"]["drop"][0], "ALL", "{name}");
        // The package refuses other versions of vLLM at the start.
        let image = engine["image"].as_str().expect("an image");
        let (_, version) = image.split_once(":v").expect("a version");
        let (minor, _) = version.rsplit_once('.').expect("a patch level");
        let seams: Value = serde_json::from_str(&package("python/baton_vllm/seams.json")).expect("JSON");
        assert!(seams[minor].is_object(), "{name}: the package does not support vLLM {version}");
    }
}

#[test]
fn settings_of_the_overlay_match_the_package_and_the_router() {
    let fleet = fleet(OVERLAY);
    let router = parsed(fleet.router_yaml(), "router.yaml".as_ref());
    let of_router = router["cluster_secret_file"].as_str().expect("the engines need it");
    for (name, pod) in engines(&fleet) {
        let engine = main_container(pod);
        let mut args = list(&engine["args"]).filter_map(Value::as_str);
        let flag = args.find_map(|arg| arg.strip_prefix(TRANSFER_CONFIG)?.strip_prefix('='));
        let flag = flag.expect("the flag that loads the connector");
        assert_eq!(mistakes(flag), Vec::<String>::new(), "{name}");
        let config: Value = serde_json::from_str(flag).expect("it was parsed above");
        assert_eq!(config["kv_load_failure_policy"], "recompute", "{name}");
        // Without addresses of their own both ports follow the side channel's. HTTP stays on loopback.
        let given = &config["kv_connector_extra_config"]["baton"];
        assert!(given["http"].is_null() && given["channel"].is_null(), "{name}: {given}");
        let side = port_of(engine, "side-channel").expect("the side channel's port");
        assert_eq!(variable(engine, "VLLM_NIXL_SIDE_CHANNEL_PORT"), Some(side.to_string().as_str()));
        let channel = side + constant("CHANNEL_PORT_OFFSET");
        assert_eq!(port_of(engine, "baton-channel"), Some(channel), "{name}");
        let http = side + constant("HTTP_PORT_OFFSET");
        assert!(list(&engine["ports"]).all(|port| port["containerPort"] != http), "{name}");
        // The channel listens beyond loopback, so it needs the secret, the same as the router's.
        let file = given["secret_file"].as_str().expect("the channel is reachable from other hosts");
        let mounts = fleet.mounts(pod);
        let there = mounts.iter().any(|(at, keys)| keys.iter().any(|key| format!("{at}/{key}") == file));
        assert!(there, "{name}: {file} is not in {mounts:?}");
        assert_eq!(secret_of(pod, file), secret_of(fleet.router(), of_router), "{name}");
    }
}

/// The overlay repeats the engines' arguments. This keeps them equal to those of `vllm`.
#[test]
fn engines_of_the_overlay_differ_from_stock_engines_by_the_connector_only() {
    let (stock, changed) = (fleet("vllm"), fleet(OVERLAY));
    for ((name, before), (other, after)) in engines(&stock).into_iter().zip(engines(&changed)) {
        assert_eq!(name, other);
        let args = |pod: &Value| -> Vec<Value> {
            let is_flag = |arg: &&Value| arg.as_str().is_some_and(|arg| arg.starts_with(TRANSFER_CONFIG));
            list(&main_container(pod)["args"]).filter(|arg| !is_flag(arg)).cloned().collect()
        };
        assert_eq!(args(before), args(after), "{name}");
        let (old, new) = (main_container(before), main_container(after));
        for key in ["env", "ports", "volumeMounts"] {
            for item in list(&old[key]) {
                assert!(list(&new[key]).any(|other| other == item), "{name}: {item} is not in {key}");
            }
        }
        let same = ["image", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe", "resources"];
        for key in same {
            assert_eq!(old[key], new[key], "{name}: {key}");
        }
        let grace = |pod: &Value| pod["spec"]["terminationGracePeriodSeconds"].clone();
        assert_eq!(grace(before), grace(after), "{name}");
    }
}

#[test]
fn the_connectors_image_has_the_installed_package() {
    let stages = stages("deploy/container/vllm.Dockerfile");
    let names: Vec<_> = stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["toolchain", "build", "wheel", "connector"]);
    let engines = crate::container::stages("deploy/container/Dockerfile");
    assert_eq!(stages[0].from, engines[0].from, "one version of Rust");
    assert!(stages[1].from.starts_with("quay.io/pypa/manylinux_2_28_"), "{}", stages[1].from);
    let commands: Vec<&str> =
        stages[1].lines.iter().filter(|(word, _)| word == "RUN").map(|(_, rest)| rest.as_str()).collect();
    assert!(commands[0].contains(" ./connector/vllm ") && commands[0].contains("auditwheel repair"));
    assert!(commands[1].contains(&format!(" --target {FOLDER} ")), "{}", commands[1]);
    let copied = format!("--from=build {FOLDER}/ {FOLDER}/");
    assert_eq!(instruction(&stages, "connector", "COPY"), Some(copied.as_str()));
    assert_eq!(instruction(&stages, "connector", "USER"), Some("65532:65532"));
    let ignored = read(&ours("deploy/container/vllm.Dockerfile.dockerignore"));
    assert_eq!(ignored, read(&ours("deploy/container/Dockerfile.dockerignore")));
    let version = format!("\nversion = \"{}\"\n", env!("CARGO_PKG_VERSION"));
    assert!(package("pyproject.toml").contains(&version), "the wheel has another version");
}

#[test]
fn pages_have_every_setting_and_valid_flags() {
    let sources = ["python/baton_vllm/connector.py", "python/baton_vllm/core.py", "setup.py"].map(package);
    let known = sources.concat() + &read(&ours("docs/reference/cli.md"));
    for page in PAGES {
        let text = read(&ours(page));
        for setting in settings() {
            assert!(text.contains(&format!("\n| `{setting}` | ")), "{page}: no row for {setting}");
        }
        for offset in ["HTTP_PORT_OFFSET", "CHANNEL_PORT_OFFSET"] {
            let shown = format!("`VLLM_NIXL_SIDE_CHANNEL_PORT` + {}", constant(offset));
            assert!(text.contains(&shown), "{page}: {shown}");
        }
        assert!(text.contains(&format!("VLLM_PLUGINS={}", plugin())), "{page}");
        let start = format!("{TRANSFER_CONFIG} '");
        let quoted = text.split(start.as_str()).skip(1).filter_map(|rest| rest.split('\'').next());
        let flags: Vec<&str> = quoted.filter(|flag| flag.contains("baton_vllm")).collect();
        assert!(!flags.is_empty(), "{page} shows no flag");
        let wrong: Vec<String> = flags.into_iter().flat_map(mistakes).collect();
        assert!(wrong.is_empty(), "{page}: {wrong:?}");
        let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
        for name in words.filter(|word| word.starts_with("BATON_")) {
            assert!(known.contains(name), "{page}: no variable {name}");
        }
    }
}

#[test]
fn a_wrong_flag_is_found_wrong() {
    let good = r#"{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton_vllm", "kv_connector_extra_config": {"baton": {"peers": "any"}}}"#;
    assert_eq!(mistakes(good), Vec::<String>::new());
    for (from, to) in [
        ("BatonConnector", "Connector"),
        ("baton_vllm", "baton"),
        ("peers", "peer"),
        ("kv_connector_extra", "extra"),
        ("}}}", "}}"),
    ] {
        assert_ne!(mistakes(&good.replace(from, to)), Vec::<String>::new(), "{to}");
    }
}
