//! The engines of a picker are the Pods of an InferencePool.

use serde_json::{Value, json};

use crate::operations::discovery::{FakeKubernetes, kubeconfig};
use crate::picker::gateway::TestPicker;

fn inference_pool(ports: &[u16]) -> Value {
    let ports: Vec<_> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": "serving", "resourceVersion": "7"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": ports},
    })
}

fn pod(name: &str, ip: &str, role: &str, ready: bool) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "resourceVersion": "7",
            "labels": {"app": "vllm", "llm-d.ai/role": role}},
        "spec": {"containers": []},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]},
    })
}

#[tokio::test]
async fn the_pods_of_an_inference_pool_are_watched_and_follow_its_ports() {
    let api = FakeKubernetes::default();
    api.set_objects("inferencepools", vec![inference_pool(&[7001])]);
    api.set_objects(
        "pods",
        vec![pod("d-0", "127.0.0.2", "decode", true), pod("p-0", "127.0.0.3", "prefill", true)],
    );
    let (address, _serving) = api.start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kubeconfig");
    std::fs::write(&file, kubeconfig(address)).unwrap();
    let source = format!(
        "{{inference_pool: {{namespace: serving, name: pool, kubeconfig_file: '{}'}}}}",
        file.display()
    );
    let model = format!(
        "    prefill: {{select: {{llm-d.ai/role: prefill}}, discover: {source}}}\n    \
         decode: {{policy: round_robin, select: {{llm-d.ai/role: decode}}, discover: {source}}}"
    );
    let picker = TestPicker::start(&model, "").await;
    let members = |leg: &str| format!("baton_router_pool_engines{{model=\"m\",leg=\"{leg}\"}}");
    picker.counts(&members("decode"), 1.0).await;
    let mut stream = picker.request(&[], &crate::picker::gateway::completion("p")).await;
    let choice = stream.choice().await;
    assert_eq!(choice.destination, "127.0.0.2:7001");
    assert_eq!(choice.headers["x-prefiller-host-port"], "127.0.0.3:7001");

    // One more Pod; then it is not ready.
    api.watched_at("/pods").await;
    let event = |kind: &str, object: Value| json!({"type": kind, "object": object});
    api.send_to("/pods", Some(&event("ADDED", pod("d-1", "127.0.0.4", "decode", true))));
    picker.counts(&members("decode"), 2.0).await;
    api.send_to("/pods", Some(&event("MODIFIED", pod("d-1", "127.0.0.4", "decode", false))));
    picker.counts(&members("decode"), 1.0).await;

    // Every target port is an engine.
    api.watched_at("/inferencepools").await;
    api.send_to("/inferencepools", Some(&event("MODIFIED", inference_pool(&[7001, 7002]))));
    picker.counts(&members("decode"), 2.0).await;

    // Without the pool the last engines stay.
    api.send_to("/inferencepools", Some(&event("DELETED", inference_pool(&[7001]))));
    picker.counts("baton_router_discovery_failures_total{source=\"inference_pool:serving/pool\"}", 1.0).await;
    picker.counts(&members("decode"), 2.0).await;
}
