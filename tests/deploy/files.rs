//! The test that reads each file of `deploy/`: every file has one. A row names the test and the words of its source
//! that lead to the file. A row that leads nowhere is an error, too.

use std::collections::BTreeSet;

use crate::{ours, read};

/// A file or, with a star, every file of a folder and of those below it; the test's module and name; words of that
/// module that lead to the file.
const READ_BY: &[(&str, &str, &str, &str)] = &[
    ("README.md", "runbook", "every_alarm_has_a_section_and_every_section_an_alarm", "\"deploy/README.md\""),
    ("alerts/*", "metrics", "every_metric_and_label_of_a_rule_or_panel_exists", "\"deploy/alerts\""),
    (
        "config/*",
        "examples",
        "every_router_configuration_below_deploy_passes_check",
        "files_below(&ours(\"deploy\"))",
    ),
    (
        "container/Dockerfile",
        "container",
        "every_image_runs_as_non_root_with_a_health_check_and_without_a_toolkit",
        "\"deploy/container/Dockerfile\"",
    ),
    (
        "container/Dockerfile.dockerignore",
        "container",
        "every_image_runs_as_non_root_with_a_health_check_and_without_a_toolkit",
        "\"deploy/container/Dockerfile.dockerignore\"",
    ),
    (
        "container/rootfs.sh",
        "container",
        "the_routers_image_is_small_and_has_nothing_that_it_does_not_need",
        "\"deploy/container/rootfs.sh\"",
    ),
    (
        "container/vllm.Dockerfile",
        "vllm",
        "the_connectors_image_has_the_installed_package",
        "\"deploy/container/vllm.Dockerfile\"",
    ),
    (
        "container/vllm.Dockerfile.dockerignore",
        "vllm",
        "the_connectors_image_has_the_installed_package",
        "\"deploy/container/vllm.Dockerfile.dockerignore\"",
    ),
    ("dashboards/baton.json", "metrics", "the_dashboard_is_valid", "\"deploy/dashboards/baton.json\""),
    (
        "envoy/envoy.yaml",
        "envoy",
        "envoy_removes_a_clients_destination_and_holds_requests_for_the_picker",
        "\"deploy/envoy/envoy.yaml\"",
    ),
    (
        "envoy/kubernetes.yaml",
        "envoy",
        "the_manifest_conforms_to_the_api_and_its_parts_name_each_other",
        "\"deploy/envoy/kubernetes.yaml\"",
    ),
    (
        "envoy/picker.yaml",
        "envoy",
        "envoy_reaches_the_picker_and_waits_longer_than_its_queue",
        "\"deploy/envoy/picker.yaml\"",
    ),
    (
        "envoy/sidecar.yaml",
        "sidecar",
        "the_sidecars_manifest_conforms_to_the_api_and_its_parts_name_each_other",
        "\"deploy/envoy/sidecar.yaml\"",
    ),
    ("kubernetes/base/*", "manifests", "every_file_is_part_of_an_overlay", "\"deploy/kubernetes\""),
    ("kubernetes/components/*", "manifests", "every_file_is_part_of_an_overlay", "\"deploy/kubernetes\""),
    ("kubernetes/overlays/*", "manifests", "every_file_is_part_of_an_overlay", "\"deploy/kubernetes\""),
    (
        "kubernetes/secrets.sh",
        "kustomize",
        "overlays_match_kubectl_and_fail_without_secrets",
        "\"secrets.sh\"",
    ),
    (
        "otel/collector.yaml",
        "collector",
        "every_part_of_the_collector_is_used_and_every_part_that_is_used_is_there",
        "\"deploy/otel/collector.yaml\"",
    ),
    (
        "otel/router.yaml",
        "traces",
        "one_request_is_one_trace_across_both_engines_even_after_a_cancel",
        "\"deploy/otel/router.yaml\"",
    ),
    ("systemd/baton-engine@.service", "systemd", "the_units_use_valid_commands", "\"baton-engine@.service\""),
    ("systemd/baton-engine-cuda.conf", "systemd", SYSTEMD, "\"baton-engine-cuda.conf\""),
    ("systemd/baton-router.service", "systemd", SYSTEMD, "\"baton-router.service\""),
    ("systemd/baton-router.socket", "systemd", SYSTEMD, "\"baton-router.socket\""),
    (
        "systemd/engine-decode.env",
        "systemd",
        "the_units_load_the_secret_and_allow_the_drain",
        "\"engine-{name}.env\"",
    ),
    (
        "systemd/engine-prefill.env",
        "systemd",
        "the_units_load_the_secret_and_allow_the_drain",
        "\"engine-{name}.env\"",
    ),
    (
        "systemd/router.env",
        "systemd",
        "the_environment_file_has_only_variables_of_the_router",
        "\"router.env\"",
    ),
];

const SYSTEMD: &str = "systemd_verifies_the_units_and_their_exposure_is_low";

/// Every file below `deploy/` without the operator's own secrets.
fn files() -> BTreeSet<String> {
    let (mut found, mut folders) = (BTreeSet::new(), vec![ours("deploy")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of ours can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.strip_prefix(ours("deploy")).expect("it is below it").display().to_string();
            if path.is_dir() {
                folders.push(path);
            } else if name.contains("/secrets/") {
                // These lines keep the folder empty. Files that an operator adds are not part of the repository.
                if name.ends_with("/.gitignore") {
                    assert!(read(&path).ends_with("*\n!.gitignore\n"), "{name}");
                }
            } else {
                found.insert(name);
            }
        }
    }
    found
}

fn is_of(row: &str, file: &str) -> bool {
    row.strip_suffix('*').map_or(row == file, |folder| file.starts_with(folder))
}

#[test]
fn every_file_below_deploy_is_read_by_a_test() {
    let files = files();
    assert!(files.len() > 40, "{files:?}");
    let unread: Vec<_> =
        files.iter().filter(|file| !READ_BY.iter().any(|(row, ..)| is_of(row, file))).collect();
    assert!(unread.is_empty(), "no test reads {unread:?}: write one, and a row here");
    for (row, module, test, words) in READ_BY {
        assert!(files.iter().any(|file| is_of(row, file)), "{row} is not there any more");
        let source = read(&ours("tests/deploy").join(format!("{module}.rs")));
        let marked = format!("#[test]\nfn {test}() {{");
        assert!(source.contains(&marked), "{row}: there is no test {module}::{test}");
        assert!(source.contains(words), "{row}: {words} is not in {module}.rs");
        assert!(!source.contains("#[ignore"), "{module}: a test that is not run reads nothing");
    }
}

/// Rows with a star are for folders that a test walks, or whose references it follows completely. In any other folder a
/// new file could be missed.
#[test]
fn folders_in_the_list_of_files_are_walked() {
    let stars: Vec<_> = READ_BY.iter().filter_map(|(row, ..)| row.strip_suffix("/*")).collect();
    assert_eq!(
        stars,
        ["alerts", "config", "kubernetes/base", "kubernetes/components", "kubernetes/overlays"]
    );
    let examples = crate::examples::routers();
    for file in files().iter().filter(|file| file.starts_with("config/")) {
        assert!(examples.contains(&ours("deploy").join(file)), "{file} is no router's configuration");
    }
    for file in crate::files_below(&ours("examples/router")) {
        assert!(examples.contains(&file), "{} is no router's configuration", file.display());
    }
}
