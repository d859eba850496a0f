//! Envoy's configuration and that of the picker beside it agree, and no client chooses an address.
//! `tests/peers/envoy/run.sh` runs both with a real Envoy.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{baton, documents, ours, parsed, read};

fn file(path: &str) -> Value {
    let path = ours(path);
    parsed(&read(&path), &path)
}

#[test]
fn envoy_removes_a_clients_destination_and_holds_requests_for_the_picker() {
    let envoy = file("deploy/envoy/envoy.yaml");
    let resources = &envoy["static_resources"];
    let http = &resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let early = http["early_header_mutation_extensions"][0]["typed_config"]["mutations"].to_string();
    for header in ["x-gateway-destination-endpoint", "x-prefiller-host-port", "x-data-parallel-rank"] {
        assert!(early.contains(header), "a client's {header} passes: {early}");
    }
    let picker = &http["http_filters"][0]["typed_config"];
    assert_eq!(picker["failure_mode_allow"], false);
    let modes = &picker["processing_mode"];
    assert_eq!(
        (&modes["request_body_mode"], &modes["request_trailer_mode"]),
        (&"FULL_DUPLEX_STREAMED".into(), &"SEND".into())
    );
    assert_eq!(
        (&modes["response_header_mode"], &modes["response_body_mode"]),
        (&"SEND".into(), &"NONE".into())
    );
    // Otherwise Envoy closes the stream at the response's head, and places are free too early.
    assert_eq!(modes["response_trailer_mode"], "SEND");
    let header = &resources["clusters"][0]["original_dst_lb_config"]["http_header_name"];
    assert_eq!(header, "x-gateway-destination-endpoint");
}

#[test]
fn envoy_reaches_the_picker_and_waits_longer_than_its_queue() {
    let (envoy, picker) = (file("deploy/envoy/envoy.yaml"), file("deploy/envoy/picker.yaml"));
    let clusters = &envoy["static_resources"]["clusters"];
    let address = &clusters[1]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"];
    let socket = &address["socket_address"];
    let listen = format!("{}:{}", socket["address"].as_str().expect("an address"), socket["port_value"]);
    assert_eq!(picker["picker"]["listen"], listen.as_str());
    let http = &envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let timeout = http["http_filters"][0]["typed_config"]["message_timeout"].as_str().expect("a time");
    let seconds: u64 = timeout.trim_end_matches('s').parse().expect("seconds");
    // The default of `queue.timeout_ms` and of `timeouts.body_ms`; the file has neither key.
    assert!(picker["queue"].is_null() && picker["timeouts"].is_null() && seconds >= 60, "{timeout}");
}

/// The pool as the API of the inference extension defines it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PoolSpec {
    selector: PoolSelector,
    target_ports: Vec<PortNumber>,
    endpoint_picker_ref: PickerRef,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PoolSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PortNumber {
    number: u16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PickerRef {
    name: String,
    port: PortNumber,
    failure_mode: String,
}

/// The one object of a kind in the manifest.
fn object(kind: &str) -> Value {
    let mut all = documents(&ours("deploy/envoy/kubernetes.yaml"));
    all.retain(|document| document["kind"] == kind);
    assert_eq!(all.len(), 1, "{kind}");
    all.remove(0)
}

#[test]
fn the_manifest_conforms_to_the_api_and_its_parts_name_each_other() {
    fn typed<T: DeserializeOwned + Serialize>(kind: &str) -> Value {
        let written = object(kind);
        let read: T =
            serde_json::from_value(written.clone()).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let again = serde_json::to_value(read).expect("a manifest is JSON");
        assert_eq!(again, written, "{kind}: a misspelt or misplaced field");
        again
    }
    let deployment = typed::<Deployment>("Deployment");
    let service = typed::<Service>("Service");
    let config = typed::<ConfigMap>("ConfigMap");
    typed::<NetworkPolicy>("NetworkPolicy");
    typed::<ServiceAccount>("ServiceAccount");
    typed::<RoleBinding>("RoleBinding");
    let role = typed::<Role>("Role");
    for resource in ["inferencepools", "pods"] {
        let rules = role["rules"].as_array().expect("rules");
        assert!(rules.iter().any(|rule| rule["resources"] == json!([resource])), "{resource}");
    }

    let pool: PoolSpec = serde_json::from_value(object("InferencePool")["spec"].clone()).expect("a pool");
    assert_eq!(pool.endpoint_picker_ref.name, service["metadata"]["name"]);
    assert_eq!(pool.endpoint_picker_ref.failure_mode, "FailClose", "a bypassed picker lets clients choose");
    assert_eq!(service["spec"]["ports"][0]["port"], pool.endpoint_picker_ref.port.number);
    assert!(!pool.selector.match_labels.is_empty() && !pool.target_ports.is_empty());
    assert!(pool.target_ports.iter().all(|port| port.number > 0));
    let route = object("HTTPRoute");
    let rule = &route["spec"]["rules"][0];
    assert_eq!(rule["backendRefs"][0]["name"], object("InferencePool")["metadata"]["name"]);
    let removed = rule["filters"][0]["requestHeaderModifier"]["remove"].to_string();
    assert!(removed.contains("x-gateway-destination-endpoint"), "{removed}");

    let template = &deployment["spec"]["template"];
    assert_eq!(service["spec"]["selector"], template["metadata"]["labels"]);
    let container = &template["spec"]["containers"][0];
    let text = config["data"]["picker.yaml"].as_str().expect("a configuration");
    let picker = parsed(text, "picker.yaml".as_ref());
    let port = |name: &str| {
        let ports = container["ports"].as_array().expect("ports");
        ports
            .iter()
            .find(|port| port["name"] == name)
            .map(|port| format!("0.0.0.0:{}", port["containerPort"]))
    };
    assert_eq!(port("grpc").as_deref(), picker["picker"]["listen"].as_str());
    assert_eq!(port("health").as_deref(), picker["picker"]["health_listen"].as_str());
    assert_eq!(port("admin").as_deref(), picker["admin"]["listen"].as_str());
    let source = &picker["models"][0]["decode"]["discover"]["inference_pool"];
    assert_eq!(source["name"], object("InferencePool")["metadata"]["name"]);
    for (probe, service) in [("livenessProbe", "liveness"), ("readinessProbe", "readiness")] {
        assert_eq!(container[probe]["grpc"]["service"], service);
    }
    let ms = |key: &str| picker[key].as_u64().expect("a time");
    let grace = template["spec"]["terminationGracePeriodSeconds"].as_u64().expect("a time");
    assert!(grace * 1000 >= ms("drain_delay_ms") + ms("drain_timeout_ms") + 30_000);

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("picker.yaml");
    std::fs::write(&path, text).expect("written");
    let (sound, printed) = baton(&["check".to_owned(), "--no-files".to_owned(), path.display().to_string()]);
    assert!(sound && !printed.contains("warning:"), "{printed}");
}
