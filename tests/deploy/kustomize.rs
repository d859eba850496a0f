//! The subset of kustomize that `deploy/kubernetes/` uses, so that tests check a cluster's final manifests on every
//! machine. Where `kubectl` is installed, a test compares the two.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{documents, files_below, installed, ours, parsed, read, run, skipped};

/// The overlays for a cluster.
pub(crate) const OVERLAYS: [&str; 4] = ["baton", "baton-edge", "vllm", "vllm-baton"];

/// The used part of `kustomization.yaml`. Any other key is a mistake, or a reason to extend this file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct Kustomization {
    api_version: String,
    kind: String,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    pub(crate) resources: Vec<String>,
    #[serde(default)]
    pub(crate) components: Vec<String>,
    #[serde(default)]
    pub(crate) patches: Vec<Patch>,
    #[serde(default)]
    images: Vec<Image>,
    #[serde(default)]
    pub(crate) config_map_generator: Vec<Generator>,
    #[serde(default)]
    secret_generator: Vec<Generator>,
    #[serde(default)]
    generator_options: GeneratorOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Patch {
    pub(crate) path: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Image {
    name: String,
    new_name: Option<String>,
    new_tag: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Generator {
    name: String,
    pub(crate) files: Vec<String>,
    behavior: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GeneratorOptions {
    disable_name_suffix_hash: bool,
}

impl Kustomization {
    pub(crate) fn read(folder: &Path) -> Self {
        let path = folder.join("kustomization.yaml");
        let text = read(&path);
        let read: Self =
            serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let known =
            ["kustomize.config.k8s.io/v1beta1 Kustomization", "kustomize.config.k8s.io/v1alpha1 Component"];
        let kind = format!("{} {}", read.api_version, read.kind);
        assert!(known.contains(&&*kind), "{}: {kind}", path.display());
        let generates = !read.config_map_generator.is_empty() || !read.secret_generator.is_empty();
        let suffix = !read.generator_options.disable_name_suffix_hash;
        assert!(!(generates && suffix), "{}: routers follow changes without a new name", path.display());
        read
    }
}

/// The composed documents of an overlay of the repository.
pub(crate) fn overlay(name: &str) -> Vec<Value> {
    compose(&ours("deploy/kubernetes/overlays").join(name))
}

/// The output of `kubectl kustomize FOLDER`, without the content of secrets.
pub(crate) fn compose(folder: &Path) -> Vec<Value> {
    let kustomization = Kustomization::read(folder);
    let mut objects = Vec::new();
    for resource in kustomization.resources.iter().chain(&kustomization.components) {
        let path = folder.join(resource);
        objects.extend(if path.is_dir() { compose(&path) } else { documents(&path) });
    }
    for map in &kustomization.config_map_generator {
        let content = |file: &str| json!(read(&folder.join(file)));
        generate(&mut objects, "ConfigMap", map, content);
    }
    for secret in &kustomization.secret_generator {
        generate(&mut objects, "Secret", secret, |_| json!(""));
    }
    for Patch { path } in &kustomization.patches {
        for patch in documents(&folder.join(path)) {
            let meant = objects.iter_mut().find(|object| identity(object) == identity(&patch));
            merge(meant.unwrap_or_else(|| panic!("{path} patches nothing: {patch}")), &patch);
        }
    }
    for object in &mut objects {
        if let (Some(namespace), true) = (&kustomization.namespace, object["kind"] != "Namespace") {
            object["metadata"]["namespace"] = json!(namespace);
        }
        for container in containers_mut(object) {
            for image in &kustomization.images {
                if container["image"] == *image.name {
                    let name = image.new_name.as_ref().unwrap_or(&image.name);
                    container["image"] = json!(format!("{name}:{}", image.new_tag));
                }
            }
        }
    }
    objects
}

/// The identity of an object.
pub(crate) fn identity(object: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&object["kind"]), text(&object["metadata"]["name"]))
}

fn generate(objects: &mut Vec<Value>, kind: &str, made: &Generator, content: impl Fn(&str) -> Value) {
    let entries = made.files.iter().map(|file| {
        let (key, file) = file.split_once('=').unwrap_or((file, file));
        (key.to_owned(), content(file))
    });
    let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": made.name}, "data": entries.collect::<Map<_, _>>()});
    if kind == "Secret" {
        object["type"] = json!("Opaque");
    }
    let there = objects.iter().position(|other| identity(other) == identity(&object));
    match (made.behavior.as_deref(), there) {
        (None, None) => objects.push(object),
        (Some("replace"), Some(at)) => objects[at] = object,
        (behavior, there) => panic!("{}: behavior {behavior:?} with {there:?}", made.name),
    }
}

fn containers_mut(object: &mut Value) -> impl Iterator<Item = &mut Value> {
    let pod = object.pointer_mut("/spec/template/spec").and_then(Value::as_object_mut);
    let fields = pod.into_iter().flat_map(|pod| pod.iter_mut());
    let lists = fields.filter(|(key, _)| matches!(key.as_str(), "initContainers" | "containers"));
    lists.filter_map(|(_, list)| list.as_array_mut()).flatten()
}

/// A strategic merge: maps by key, lists of items with a name (or a mount path) by that, other lists as a whole.
fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (Value::Array(into), Value::Array(patch)) if patch.iter().all(|item| merge_key(item).is_some()) => {
            let mut inserted = 0;
            for item in patch {
                match into.iter_mut().find(|other| merge_key(other) == merge_key(item)) {
                    Some(other) => merge(other, item),
                    // kustomize inserts new items at the front, in their order.
                    None => {
                        into.insert(inserted, item.clone());
                        inserted += 1;
                    }
                }
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

fn merge_key(item: &Value) -> Option<&str> {
    item["mountPath"].as_str().or_else(|| item["name"].as_str())
}

/// Sorts the lists whose order has no meaning.
fn sorted(mut object: Value) -> Value {
    if let Some(pod) = object.pointer_mut("/spec/template/spec") {
        let sort = |list: Option<&mut Vec<Value>>| {
            list.into_iter().for_each(|list| list.sort_by_key(|item| merge_key(item).map(str::to_owned)));
        };
        sort(pod["volumes"].as_array_mut());
        for container in pod["containers"].as_array_mut().into_iter().flatten() {
            sort(container["volumeMounts"].as_array_mut());
        }
    }
    if object["kind"] == "Secret" {
        let values = object["data"].as_object_mut().into_iter().flatten();
        values.for_each(|(_, value)| *value = json!(""));
    }
    object
}

/// A copy of the manifests.
fn copy(into: &Path) {
    let from = ours("deploy/kubernetes");
    for file in files_below(&from) {
        let to = into.join(file.strip_prefix(&from).expect("it was found below it"));
        fs::create_dir_all(to.parent().expect("it is in a folder")).expect("a folder of the test");
        fs::copy(&file, to).expect("a file of the test");
    }
}

#[test]
fn overlays_match_kubectl_and_fail_without_secrets() {
    if !installed("kubectl") {
        return skipped(
            "kubectl is not installed: our reading of the overlays was not compared with kustomize's",
        );
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    copy(folder.path());
    let render = |overlay: &str| {
        run(Command::new("kubectl").arg("kustomize").arg(folder.path().join("overlays").join(overlay)))
    };
    for overlay in OVERLAYS {
        let (rendered, printed) = render(overlay);
        assert!(!rendered && printed.contains("secrets/"), "{overlay} without secrets: {printed}");
    }
    // The script expects its folders and creates files in them.
    for below in ["base", "overlays/baton", "overlays/vllm", "overlays/vllm-baton"] {
        fs::create_dir_all(folder.path().join(below).join("secrets")).expect("a folder of the test");
    }
    let (made, printed) = run(&mut Command::new(folder.path().join("secrets.sh")));
    assert!(made && printed.matches(": made").count() == 4, "{printed}");
    let (kept, printed) = run(&mut Command::new(folder.path().join("secrets.sh")));
    assert!(kept && printed.matches(": kept").count() == 4, "{printed}");
    for overlay in OVERLAYS {
        let (rendered, text) = render(overlay);
        assert!(rendered, "{overlay}: {text}");
        let mut theirs: Vec<_> =
            text.split("\n---\n").map(|text| sorted(parsed(text, Path::new(overlay)))).collect();
        let mut ours: Vec<_> =
            compose(&folder.path().join("overlays").join(overlay)).into_iter().map(sorted).collect();
        theirs.sort_by_key(identity);
        ours.sort_by_key(identity);
        assert_eq!(ours.len(), theirs.len(), "{overlay}");
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(ours, theirs, "{overlay}");
        }
    }
}
