//! Reads every document into its type of the Kubernetes API and writes it again. Misspelt, misplaced and missing fields
//! show as a difference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::kustomize::{Kustomization, OVERLAYS, Patch, identity, overlay};
use crate::{documents, files_below, ours, read};

/// The used part of the Prometheus operator's type.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ServiceMonitor {
    api_version: MonitoringV1,
    kind: String,
    metadata: ObjectMeta,
    spec: ServiceMonitorSpec,
}

#[derive(Deserialize, Serialize)]
enum MonitoringV1 {
    #[serde(rename = "monitoring.coreos.com/v1")]
    V1,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ServiceMonitorSpec {
    selector: LabelSelector,
    endpoints: Vec<MonitorEndpoint>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct MonitorEndpoint {
    port: String,
    path: String,
    interval: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    authorization: Option<Authorization>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Authorization {
    credentials: KeyOf,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct KeyOf {
    name: String,
    key: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PrometheusRule {
    api_version: MonitoringV1,
    kind: String,
    metadata: ObjectMeta,
    spec: PrometheusRuleSpec,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PrometheusRuleSpec {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RuleGroup {
    name: String,
    rules: Vec<OperatorsRule>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct OperatorsRule {
    alert: String,
    expr: String,
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    for_: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Reads a document into its type and writes it again.
fn typed(document: &Value) -> Result<Value, String> {
    fn again<T: DeserializeOwned + Serialize>(document: &Value) -> Result<Value, String> {
        let read: T = serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
        serde_json::to_value(read).map_err(|error| error.to_string())
    }
    match document["kind"].as_str().unwrap_or_default() {
        "ConfigMap" => again::<ConfigMap>(document),
        "Deployment" => again::<Deployment>(document),
        "Namespace" => again::<Namespace>(document),
        "NetworkPolicy" => again::<NetworkPolicy>(document),
        "PodDisruptionBudget" => again::<PodDisruptionBudget>(document),
        "PrometheusRule" => again::<PrometheusRule>(document),
        "Role" => again::<Role>(document),
        "RoleBinding" => again::<RoleBinding>(document),
        "Secret" => again::<Secret>(document),
        "Service" => again::<Service>(document),
        "ServiceAccount" => again::<ServiceAccount>(document),
        "ServiceMonitor" => again::<ServiceMonitor>(document),
        kind => Err(format!("no type for the kind {kind:?}")),
    }
}

/// The parts of `a` that differ in `b`, with their paths.
fn lost(place: &str, a: &Value, b: &Value) -> Vec<String> {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => a
            .iter()
            .flat_map(|(key, value)| {
                lost(&format!("{place}.{key}"), value, b.get(key).unwrap_or(&Value::Null))
            })
            .collect(),
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .flat_map(|(at, (a, b))| lost(&format!("{place}[{at}]"), a, b))
            .collect(),
        _ if a == b => Vec::new(),
        _ => vec![format!("{place}: {a} was written as {b}")],
    }
}

/// The errors of a document: unknown fields and missing fields.
fn problems(document: &Value) -> Vec<String> {
    let place = format!("{:?}", identity(document));
    match typed(document) {
        Err(error) => vec![format!("{place}: {error}")],
        Ok(again) => [lost(&place, document, &again), lost(&place, &again, document)].concat(),
    }
}

fn resources() -> Vec<PathBuf> {
    let yaml = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "yaml");
    let documents = |path: &PathBuf| !path.ends_with("kustomization.yaml") && !path.ends_with("router.yaml");
    files_below(&ours("deploy/kubernetes")).into_iter().filter(yaml).filter(documents).collect()
}

/// Every file that overlays reference, and those of them that are patches.
fn reached() -> (BTreeSet<PathBuf>, BTreeSet<PathBuf>) {
    fn follow(folder: &Path, files: &mut BTreeSet<PathBuf>, patches: &mut BTreeSet<PathBuf>) {
        let at = |path: &String| folder.join(path).canonicalize().unwrap_or_else(|e| panic!("{path}: {e}"));
        let kustomization = Kustomization::read(folder);
        files.insert(at(&"kustomization.yaml".to_owned()));
        for path in kustomization.resources.iter().chain(&kustomization.components).map(at) {
            match path.is_dir() {
                true => follow(&path, files, patches),
                false => drop(files.insert(path)),
            }
        }
        patches.extend(kustomization.patches.iter().map(|Patch { path }| at(path)));
        files.extend(kustomization.config_map_generator.iter().flat_map(|map| map.files.iter().map(at)));
    }
    let (mut files, mut patches) = (BTreeSet::new(), BTreeSet::new());
    for overlay in OVERLAYS {
        follow(&ours("deploy/kubernetes/overlays").join(overlay), &mut files, &mut patches);
    }
    (files, patches)
}

#[test]
fn every_document_matches_the_api_schema() {
    let (_, patches) = reached();
    let whole =
        resources().into_iter().filter(|path| !patches.contains(&path.canonicalize().expect("it exists")));
    let mut wrong: Vec<String> = Vec::new();
    for path in whole {
        for document in documents(&path) {
            wrong.extend(problems(&document).iter().map(|problem| format!("{}: {problem}", path.display())));
        }
    }
    for name in OVERLAYS {
        let objects = overlay(name);
        wrong.extend(objects.iter().flat_map(problems).map(|problem| format!("{name}: {problem}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn misspelt_misplaced_and_missing_fields_are_detected() {
    let objects = overlay("baton");
    let find =
        |kind: &str| objects.iter().find(|object| object["kind"] == kind).expect("it is there").clone();
    let spoil = |kind: &str, pointer: &str, key: &str, value: Value| {
        let mut object = find(kind);
        assert_eq!(problems(&object), Vec::<String>::new());
        object.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}"))[key] = value;
        assert_ne!(problems(&object), Vec::<String>::new(), "{kind}{pointer}/{key}");
    };
    let container = "/spec/template/spec/containers/0";
    spoil("Deployment", container, "readinesProbe", json!({}));
    spoil("Deployment", &format!("{container}/readinessProbe"), "path", json!("/ready"));
    spoil("Deployment", container, "ports", json!([{"containerPort": "8080"}]));
    spoil("Deployment", "/spec", "minReady", json!(5));
    spoil("Service", "/spec/ports/0", "targetport", json!("http"));
    spoil("NetworkPolicy", "/spec", "ingres", json!([]));
    spoil("ServiceMonitor", "/spec", "namespace", json!("x"));
    spoil("PrometheusRule", "/spec/groups/0/rules/0", "expression", json!("up == 0"));
    let mut without = find("Deployment");
    without["spec"].as_object_mut().expect("a map").remove("selector");
    assert_ne!(problems(&without), Vec::<String>::new(), "a Deployment has a selector");
}

#[test]
fn every_file_is_part_of_an_overlay() {
    let (files, patches) = reached();
    // All files, except the script that creates the secrets.
    let mut unused: Vec<_> = files_below(&ours("deploy/kubernetes"))
        .into_iter()
        .filter(|path| {
            let path = path.canonicalize().expect("it exists");
            !files.contains(&path) && !patches.contains(&path)
        })
        .collect();
    unused.retain(|path| !path.ends_with("kubernetes/secrets.sh"));
    assert!(unused.is_empty(), "no overlay uses {unused:?}");
}

/// The Prometheus operator reads no rule files, and kustomize reads no files of another folder. The manifest therefore
/// repeats the alerts. `BATON_BLESS=1` writes it again.
#[test]
fn the_operators_rules_are_those_of_the_alerts() {
    let mut wanted = "# Written from deploy/alerts/ by `BATON_BLESS=1 cargo test --test deploy the_operators_rules`: change those.\n".to_owned();
    for (at, file) in files_below(&ours("deploy/alerts")).iter().enumerate() {
        let text = read(file);
        let (_, groups) = text.split_once("\ngroups:\n").expect("a file of rules");
        let name = file.file_stem().expect("a name").display();
        let between = if at == 0 { "" } else { "---\n" };
        wanted += &format!(
            "{between}apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: baton-{name}\nspec:\n  groups:\n"
        );
        for line in groups.lines() {
            wanted += &if line.is_empty() { "\n".to_owned() } else { format!("  {line}\n") };
        }
    }
    let path = ours("deploy/kubernetes/components/monitoring/rules.yaml");
    if std::env::var_os("BATON_BLESS").is_some() {
        std::fs::write(&path, &wanted).expect("the file can be written");
    }
    assert_eq!(read(&path), wanted, "BATON_BLESS=1 cargo test --test deploy the_operators_rules");
    let rules: Vec<String> = documents(&path)
        .iter()
        .flat_map(|document| document["spec"]["groups"].as_array().expect("groups").clone())
        .flat_map(|group| group["rules"].as_array().expect("rules").clone())
        .map(|rule| rule["alert"].as_str().expect("a name").to_owned())
        .collect();
    assert_eq!(rules.len(), crate::metrics::rules().len(), "{rules:?}");
}
