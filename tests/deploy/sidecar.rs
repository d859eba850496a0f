//! The manifest of a decode engine with the routing sidecar: valid, its parts fit each other and the picker's pool, and
//! the real binary runs with its arguments.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::harness::Process;
use crate::{documents, ours, parsed, run};

fn manifest() -> Vec<Value> {
    documents(&ours("deploy/envoy/sidecar.yaml"))
}

/// The one object of a kind.
fn object(kind: &str) -> Value {
    let mut all = manifest();
    all.retain(|document| document["kind"] == kind);
    assert_eq!(all.len(), 1, "{kind}");
    all.remove(0)
}

/// The policy for the engines of a role.
fn policy(role: &str) -> Value {
    let mut all = manifest();
    all.retain(|document| document["kind"] == "NetworkPolicy" && selected(document)["llm-d.ai/role"] == role);
    assert_eq!(all.len(), 1, "{role}");
    all.remove(0)
}

/// The labels of the Pods to which a policy applies.
fn selected(policy: &Value) -> &Value {
    &policy["spec"]["podSelector"]["matchLabels"]
}

/// The one object of a kind in the manifest of the picker.
fn of_picker(kind: &str) -> Value {
    let mut all = documents(&ours("deploy/envoy/kubernetes.yaml"));
    all.retain(|document| document["kind"] == kind);
    assert_eq!(all.len(), 1, "{kind}");
    all.remove(0)
}

/// Whether Pods with `labels` are among those with the labels of a selector.
fn selects(selector: &Value, labels: &Value) -> bool {
    let selector = selector.as_object().expect("labels");
    !selector.is_empty() && selector.iter().all(|(name, value)| labels[name] == *value)
}

/// Whether a policy admits Pods of its namespace at a port.
fn admits(policy: &Value, labels: &Value, port: &Value) -> bool {
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let is_from = |peer: &Value| {
        peer["namespaceSelector"].is_null() && selects(&peer["podSelector"]["matchLabels"], labels)
    };
    let is_at = |open: &Value| match (open["port"].as_u64(), open["endPort"].as_u64(), port.as_u64()) {
        (Some(first), Some(last), Some(port)) => (first..=last).contains(&port),
        _ => open["port"] == *port,
    };
    let rules = list(&policy["spec"]["ingress"]);
    rules.iter().any(|rule| list(&rule["from"]).iter().any(is_from) && list(&rule["ports"]).iter().any(is_at))
}

fn arguments(container: &Value) -> Vec<String> {
    let arguments = container["args"].as_array().expect("arguments").iter();
    arguments.map(|argument| argument.as_str().expect("text").to_owned()).collect()
}

fn value(arguments: &[String], flag: &str) -> String {
    let value = arguments.iter().find_map(|argument| argument.strip_prefix(&format!("{flag}=")));
    value.unwrap_or_else(|| panic!("no {flag}: {arguments:?}")).to_owned()
}

#[test]
fn the_sidecars_manifest_conforms_to_the_api_and_its_parts_name_each_other() {
    fn typed<T: DeserializeOwned + Serialize>(written: Value) -> Value {
        let read: T =
            serde_json::from_value(written.clone()).unwrap_or_else(|error| panic!("{error}: {written}"));
        let again = serde_json::to_value(read).expect("a manifest is JSON");
        assert_eq!(again, written, "a misspelt or misplaced field");
        again
    }
    let deployment = typed::<Deployment>(object("Deployment"));
    let policy = typed::<NetworkPolicy>(policy("decode"));
    typed::<NetworkPolicy>(self::policy("prefill"));
    let account = typed::<ServiceAccount>(object("ServiceAccount"));
    let (role, binding) = (typed::<Role>(object("Role")), typed::<RoleBinding>(object("RoleBinding")));
    for resource in ["inferencepools", "pods"] {
        let rules = role["rules"].as_array().expect("rules");
        assert!(rules.iter().any(|rule| rule["resources"] == json!([resource])), "{resource}");
    }
    let template = &deployment["spec"]["template"];
    for named in [&binding["subjects"][0]["name"], &template["spec"]["serviceAccountName"]] {
        assert_eq!(*named, account["metadata"]["name"]);
    }
    let selected = &deployment["spec"]["selector"]["matchLabels"];
    assert_eq!(*selected, policy["spec"]["podSelector"]["matchLabels"]);
    for (name, value) in selected.as_object().expect("labels") {
        assert_eq!(template["metadata"]["labels"][name], *value);
    }

    let (sidecar, engine) = (&template["spec"]["initContainers"][0], &template["spec"]["containers"][0]);
    assert_eq!(sidecar["restartPolicy"], "Always", "a sidecar, and no step before the engine");
    let (of_sidecar, of_engine) = (arguments(sidecar), arguments(engine));
    assert_eq!(value(&of_sidecar, "--model-server-port"), value(&of_engine, "--port"));
    assert_eq!(value(&of_engine, "--host"), "127.0.0.1", "only the sidecar reaches the engine");
    let port = |name: &str| {
        let ports = sidecar["ports"].as_array().expect("ports");
        let port = ports.iter().find(|port| port["name"] == name).expect(name);
        port["containerPort"].to_string()
    };
    assert_eq!(value(&of_sidecar, "--port"), port("http"));
    assert_eq!(value(&of_sidecar, "--metrics-port"), port("metrics"));
    assert_eq!(engine["readinessProbe"]["httpGet"]["port"].to_string(), port("http"));

    // The picker's manifest has the pool: these Pods are in it, at the sidecar's port.
    let pool = of_picker("InferencePool");
    let name = |part: &str| pool["metadata"][part].as_str().expect(part);
    assert_eq!(value(&of_sidecar, "--inference-pool"), format!("{}/{}", name("namespace"), name("name")));
    assert_eq!(pool["spec"]["targetPorts"][0]["number"].to_string(), port("http"));
    for (label, value) in pool["spec"]["selector"]["matchLabels"].as_object().expect("labels") {
        assert_eq!(template["metadata"]["labels"][label], *value);
    }
}

#[test]
fn the_policies_admit_the_picker_and_the_other_leg_and_no_other_pod() {
    let (of_decode, of_prefill) = (policy("decode"), policy("prefill"));
    let (decode, prefill) = (selected(&of_decode).clone(), selected(&of_prefill).clone());
    let picker = of_picker("Deployment")["spec"]["template"]["metadata"]["labels"].clone();
    let pool = of_picker("InferencePool")["spec"].clone();
    // The sidecar's port by its name, the prefill engine's by its number, NIXL's, and one that UCX may choose.
    let (sidecar, engine) = (json!("http"), pool["targetPorts"][0]["number"].clone());
    let between = [json!(5600), json!(40_000)];
    assert!(admits(&of_decode, &picker, &sidecar), "without health checks the engine is ejected");
    assert!(admits(&of_prefill, &picker, &engine));
    assert!(admits(&of_prefill, &decode, &engine), "the prefill leg, and its verbs");
    assert!(!admits(&of_decode, &prefill, &sidecar), "a prefill engine is no gateway");
    for port in &between {
        assert!(admits(&of_prefill, &decode, port) && admits(&of_decode, &prefill, port), "{port}");
    }
    let other = json!({"app.kubernetes.io/name": "other"});
    for port in between.iter().chain([&sidecar, &engine, &json!(8200)]) {
        assert!(!admits(&of_decode, &other, port) && !admits(&of_prefill, &other, port), "{port}");
    }
    assert!(!of_prefill["spec"]["ingress"].to_string().contains("namespaceSelector"), "no gateway");

    // The picker takes each role for its leg, and both roles are in the pool.
    let config = of_picker("ConfigMap");
    let text = config["data"]["picker.yaml"].as_str().expect("a configuration");
    let model = parsed(text, "picker.yaml".as_ref())["models"][0].clone();
    for (leg, own, others) in [("prefill", &prefill, &decode), ("decode", &decode, &prefill)] {
        assert!(selects(&pool["selector"]["matchLabels"], own), "{leg}");
        assert!(selects(&model[leg]["select"], own) && !selects(&model[leg]["select"], others), "{leg}");
        assert_eq!(model[leg]["discover"], model["decode"]["discover"]);
    }
}

#[test]
fn the_binary_runs_with_the_sidecars_arguments_and_answers_its_probes() {
    let container = object("Deployment")["spec"]["template"]["spec"]["initContainers"][0].clone();
    // Ports of this machine that are free at the moment.
    let free = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address").port()
    };
    let local = |argument: String| match argument.split_once('=') {
        Some((flag @ ("--port" | "--metrics-port"), _)) => format!("{flag}={}", free()),
        _ => argument,
    };
    let arguments: Vec<_> = arguments(&container).into_iter().map(local).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let mut sidecar = Process::start("sidecar", &arguments, folder.path());
    sidecar.wait_ready();
    let port = value(&arguments, "--port");
    for probe in ["startupProbe", "livenessProbe"] {
        let path = container[probe]["httpGet"]["path"].as_str().expect("a path");
        let url = format!("http://127.0.0.1:{port}{path}");
        let binary = env!("CARGO_BIN_EXE_baton");
        let (healthy, printed) = run(std::process::Command::new(binary).args(["health", &url]));
        assert!(healthy, "{probe}: {printed}");
    }
}
