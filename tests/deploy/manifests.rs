//! Every document is read into the type that the Kubernetes API has for it and written again: what is misspelt, misplaced or
//! missing does not come back as it was.

use std::collections::BTreeSet;
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
use crate::{documents, files_below, ours};

/// The Prometheus operator's, as far as it is used here.
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

/// What its type makes of a document.
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
        "Role" => again::<Role>(document),
        "RoleBinding" => again::<RoleBinding>(document),
        "Secret" => again::<Secret>(document),
        "Service" => again::<Service>(document),
        "ServiceAccount" => again::<ServiceAccount>(document),
        "ServiceMonitor" => again::<ServiceMonitor>(document),
        kind => Err(format!("no type for the kind {kind:?}")),
    }
}

/// What of `a` is not so in `b`, by its place.
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
        _ => vec![format!("{place}: {a} came back as {b}")],
    }
}

/// What is wrong with a document: what its type does not know, and what it must have and has not.
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

/// Every file that overlays lead to, and those of them that are patches.
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
fn every_document_is_what_the_api_says_to_the_last_field() {
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
fn what_is_misspelt_misplaced_or_missing_is_noticed() {
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
    let mut without = find("Deployment");
    without["spec"].as_object_mut().expect("a map").remove("selector");
    assert_ne!(problems(&without), Vec::<String>::new(), "a Deployment has a selector");
}

#[test]
fn every_file_is_part_of_an_overlay() {
    let (files, patches) = reached();
    let all = files_below(&ours("deploy/kubernetes")).into_iter();
    let yaml = all.filter(|path| path.extension().is_some_and(|kind| kind == "yaml"));
    let unused: Vec<_> = yaml
        .filter(|path| {
            let path = path.canonicalize().expect("it exists");
            !files.contains(&path) && !patches.contains(&path)
        })
        .collect();
    assert!(unused.is_empty(), "no overlay uses {unused:?}");
}
