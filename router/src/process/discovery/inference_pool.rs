//! Discovery by an InferencePool of the Gateway API inference extension: a watch of the pool and of its Pods.
//!
//! ```text
//! watch the pool ─▶ selector and target ports ─▶ watch the Pods ─▶ endpoints (pure)
//!       └── another selector or other ports ────────▶ a new watch of Pods
//! ```
//!
//! Every target port of a ready Pod is an engine, so data-parallel ranks with ports of their own are engines. An engine
//! has the labels of its Pod, and `pod` and `node`. A deleted pool keeps the last engines.

use std::collections::BTreeMap;
use std::net::IpAddr;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use serde::Deserialize;

use super::dns::url;
use super::kubernetes::connect;
use crate::config::{InferencePoolConfig, Scheme};
use crate::engines::discovery_sources::{ENDPOINTS_MAX, Endpoint};

/// Target ports of a pool, as in its definition.
const PORTS_MAX: usize = 8;

/// The part of a pool that selects engines.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolSpec {
    selector: String,
    ports: Vec<u16>,
}

/// The known Pods, by name.
type PodMap = BTreeMap<String, Pod>;

/// Watches until it is dropped.
pub(crate) async fn follow(
    config: &InferencePoolConfig,
    report: impl Fn(Result<Vec<Endpoint>, String>) + Sync,
) {
    let client = connect(config.kubeconfig_file.as_deref(), &report).await;
    let kind = GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool");
    let resource = ApiResource::from_gvk_with_plural(&kind, "inferencepools");
    let api: Api<DynamicObject> = match &config.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::default_namespaced_with(client.clone(), &resource),
    };
    let fields = format!("metadata.name={}", config.name);
    let events = watcher::watcher(api, watcher::Config::default().fields(&fields)).default_backoff();
    futures::pin_mut!(events);
    let mut pods: Option<(PoolSpec, BoxFuture<'_, ()>)> = None;
    loop {
        let watching = async {
            match &mut pods {
                Some((_, watch)) => watch.await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            event = events.next() => event,
            // A watch of Pods does not end by itself.
            () = watching => continue,
        };
        let pool = match event {
            None => return,
            Some(Ok(Event::InitApply(pool) | Event::Apply(pool))) => pool,
            Some(Ok(Event::Init | Event::InitDone)) => continue,
            Some(Ok(Event::Delete(_))) => {
                report(Err(format!("the InferencePool {} does not exist", config.name)));
                pods = None;
                continue;
            }
            Some(Err(error)) => {
                report(Err(error.to_string()));
                continue;
            }
        };
        match spec(&pool.data) {
            // A change of the status is no change of the engines.
            Ok(spec) if pods.as_ref().is_some_and(|(known, _)| *known == spec) => {}
            Ok(spec) => {
                let watch = follow_pods(client.clone(), config, spec.clone(), &report).boxed();
                pods = Some((spec, watch));
            }
            Err(error) => report(Err(error)),
        }
    }
}

async fn follow_pods(
    client: Client,
    config: &InferencePoolConfig,
    spec: PoolSpec,
    report: impl Fn(Result<Vec<Endpoint>, String>),
) {
    let api: Api<Pod> = match &config.namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::default_namespaced(client),
    };
    let events = watcher::watcher(api, watcher::Config::default().labels(&spec.selector)).default_backoff();
    futures::pin_mut!(events);
    let (mut pods, mut listed) = (PodMap::new(), PodMap::new());
    let found = |pods: &PodMap| report(Ok(endpoints(pods.values(), &spec.ports, config.scheme)));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(pod)) => put(&mut listed, pod),
            Ok(Event::InitDone) => {
                pods = std::mem::take(&mut listed);
                found(&pods);
            }
            Ok(Event::Apply(pod)) => {
                put(&mut pods, pod);
                found(&pods);
            }
            Ok(Event::Delete(pod)) => {
                pods.remove(&pod.metadata.name.unwrap_or_default());
                found(&pods);
            }
            Err(error) => report(Err(error.to_string())),
        }
    }
}

/// Pods beyond the engines of a source are left out, as a warning of the source states.
fn put(pods: &mut PodMap, pod: Pod) {
    let name = pod.metadata.name.clone().unwrap_or_default();
    if pods.len() <= ENDPOINTS_MAX || pods.contains_key(&name) {
        pods.insert(name, pod);
    }
}

fn spec(data: &serde_json::Value) -> Result<PoolSpec, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Spec {
        selector: Selector,
        target_ports: Vec<TargetPort>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Selector {
        match_labels: BTreeMap<String, String>,
    }
    #[derive(Deserialize)]
    struct TargetPort {
        number: u16,
    }
    let spec = Spec::deserialize(&data["spec"]).map_err(|error| format!("the InferencePool: {error}"))?;
    // An empty selector selects every Pod of the namespace.
    if spec.selector.match_labels.is_empty() {
        return Err("the InferencePool has no selector".to_owned());
    }
    let labels = spec.selector.match_labels.iter().map(|(name, value)| format!("{name}={value}"));
    let ports = spec.target_ports.iter().map(|port| port.number).filter(|port| *port > 0);
    Ok(PoolSpec { selector: labels.collect::<Vec<_>>().join(","), ports: ports.take(PORTS_MAX).collect() })
}

/// The engines of some Pods: every port of those that are ready and do not terminate.
fn endpoints<'a>(pods: impl Iterator<Item = &'a Pod>, ports: &[u16], scheme: Scheme) -> Vec<Endpoint> {
    let mut found = Vec::new();
    for pod in pods.filter(|pod| is_ready(pod)) {
        let status = pod.status.as_ref();
        let address = status.and_then(|status| status.pod_ip.as_deref()?.parse::<IpAddr>().ok());
        let Some(address) = address else { continue };
        let mut labels = pod.metadata.labels.clone().unwrap_or_default();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        for (name, value) in [("pod", pod.metadata.name.clone()), ("node", node)] {
            labels.extend(value.map(|value| (name.to_owned(), value)));
        }
        let engine =
            |port: &u16| Endpoint { url: url(scheme, address, *port), weight: None, labels: labels.clone() };
        found.extend(ports.iter().map(engine));
    }
    found
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    pod.metadata.deletion_timestamp.is_none() && ready.any(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, ip: &str, ready: &str, terminating: bool) -> Pod {
        let mut pod = json!({
            "metadata": {"name": name, "labels": {"app": "vllm", "llm-d.ai/role": "decode", "pod": "other"}},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
        });
        if terminating {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        serde_json::from_value(pod).expect("a pod")
    }

    #[test]
    fn every_port_of_a_ready_pod_is_an_engine_with_its_labels() {
        let pods = [
            pod("a", "10.0.0.1", "True", false),
            pod("b", "10.0.0.2", "False", false),
            pod("c", "10.0.0.3", "True", true),
            pod("d", "", "True", false),
        ];
        let found = endpoints(pods.iter(), &[8000, 8001], Scheme::Http);
        let urls: Vec<_> = found.iter().map(|endpoint| endpoint.url.to_string()).collect();
        assert_eq!(urls, ["http://10.0.0.1:8000", "http://10.0.0.1:8001"]);
        let labels = &found[0].labels;
        assert_eq!((&*labels["llm-d.ai/role"], &*labels["pod"], &*labels["node"]), ("decode", "a", "n"));
    }

    #[test]
    fn a_pool_selects_by_labels_and_one_without_them_is_refused() {
        let of = |spec: Value| super::spec(&json!({"spec": spec}));
        let spec_of_pool = of(json!({
            "selector": {"matchLabels": {"app": "vllm", "tier": "x"}},
            "targetPorts": [{"number": 8000}, {"number": 8001}],
            "endpointPickerRef": {"name": "baton-picker", "port": {"number": 9002}},
        }));
        let expected = PoolSpec { selector: "app=vllm,tier=x".to_owned(), ports: vec![8000, 8001] };
        assert_eq!(spec_of_pool, Ok(expected));
        for wrong in [
            json!({}),
            json!({"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}),
            json!({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 70_000}]}),
        ] {
            assert!(of(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
