//! Discovery by Kubernetes: a watch of a service's EndpointSlices.
//!
//! ```text
//! list ─▶ watch ─▶ event ─▶ slices (by name) ─▶ endpoints (pure)
//!   ▲        │ 410 Gone, a broken connection, a time limit
//!   └────────┘ with a growing pause; the last endpoints stay meanwhile
//! ```
//!
//! `kube`'s watcher lists, resumes and pauses. A list takes effect when it is complete, so that a restart of the
//! watch never exposes half of the slices.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::discovery::v1::{Endpoint as Ready, EndpointSlice};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config};

use super::dns::url;
use crate::config::{KubernetesConfig, PortName, Scheme};
use crate::engines::discovery_sources::{ENDPOINTS_MAX, Endpoint};

/// The label with the name of a slice's service.
const SERVICE: &str = "kubernetes.io/service-name";
/// Maximum slices of one service. Each has at most 1,000 endpoints, and usually 100.
const SLICES_MAX: usize = 1024;
/// Pause between two attempts to create a client, doubled from the first to the second.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// The known slices, by name.
type SliceMap = BTreeMap<String, EndpointSlice>;

/// Watches until it is dropped.
pub(super) async fn follow(config: &KubernetesConfig, report: impl Fn(Result<Vec<Endpoint>, String>)) {
    let client = connect(config.kubeconfig_file.as_deref(), &report).await;
    let api: Api<EndpointSlice> = match &config.namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::default_namespaced(client),
    };
    let events =
        watcher::watcher(api, watcher::Config::default().labels(&selector(config))).default_backoff();
    futures::pin_mut!(events);
    let (mut slices, mut listed) = (SliceMap::new(), SliceMap::new());
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(slice)) => put(&mut listed, slice),
            Ok(Event::InitDone) => {
                slices = std::mem::take(&mut listed);
                report(Ok(endpoints(slices.values(), &config.port, config.scheme)));
            }
            Ok(Event::Apply(slice)) => {
                put(&mut slices, slice);
                report(Ok(endpoints(slices.values(), &config.port, config.scheme)));
            }
            Ok(Event::Delete(slice)) => {
                slices.remove(&name(&slice));
                report(Ok(endpoints(slices.values(), &config.port, config.scheme)));
            }
            Err(error) => report(Err(error.to_string())),
        }
    }
}

/// A client of the API, from a kubeconfig or from the Pod's account. It is tried until it succeeds.
pub(super) async fn connect(
    kubeconfig: Option<&Path>,
    report: &impl Fn(Result<Vec<Endpoint>, String>),
) -> Client {
    let mut pause = PAUSES[0];
    loop {
        match client(kubeconfig).await {
            Ok(client) => return client,
            Err(error) => report(Err(error)),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES[1]);
    }
}

async fn client(kubeconfig: Option<&Path>) -> Result<Client, String> {
    let reached = match kubeconfig {
        Some(path) => {
            let read = kube::config::Kubeconfig::read_from(path).map_err(|error| error.to_string())?;
            let made = Config::from_custom_kubeconfig(read, &Default::default()).await;
            made.map_err(|error| error.to_string())?
        }
        None => Config::incluster().map_err(|error| error.to_string())?,
    };
    Client::try_from(reached).map_err(|error| error.to_string())
}

fn selector(config: &KubernetesConfig) -> String {
    let service = config.service.iter().map(|service| format!("{SERVICE}={service}"));
    let labels = config.selector.iter().map(|(name, value)| format!("{name}={value}"));
    service.chain(labels).collect::<Vec<_>>().join(",")
}

fn name(slice: &EndpointSlice) -> String {
    slice.metadata.name.clone().unwrap_or_default()
}

fn put(slices: &mut SliceMap, slice: EndpointSlice) {
    let name = name(&slice);
    if slices.len() < SLICES_MAX || slices.contains_key(&name) {
        slices.insert(name, slice);
    } else {
        tracing::warn!(
            event = "endpoint_slice_ignored",
            slice = name,
            limit = SLICES_MAX,
            "too many slices, slice ignored"
        );
    }
}

/// Whether an endpoint can be used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EndpointUse {
    Ready,
    /// It terminates and still serves: used only if no endpoint is ready, as in kube-proxy.
    LastResort,
    No,
}

fn usable(endpoint: &Ready) -> EndpointUse {
    let conditions = endpoint.conditions.as_ref();
    // Missing conditions have the API's defaults.
    let ready = conditions.and_then(|c| c.ready).unwrap_or(true);
    let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
    let serving = conditions.and_then(|c| c.serving).unwrap_or(ready);
    match (ready, terminating, serving) {
        (true, false, _) => EndpointUse::Ready,
        (_, true, true) => EndpointUse::LastResort,
        _ => EndpointUse::No,
    }
}

/// The engines of some slices: ready ones, or, if there is none, terminating ones that still serve. A pod with an
/// IPv4 and an IPv6 address is one engine, by its IPv4 address.
fn endpoints<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    port: &PortName,
    scheme: Scheme,
) -> Vec<Endpoint> {
    let (mut ready, mut last_resort) = (BTreeMap::new(), BTreeMap::new());
    for slice in slices {
        let Some(port) = port_of(slice, port) else { continue };
        for endpoint in &slice.endpoints {
            let engines = match usable(endpoint) {
                EndpointUse::Ready => &mut ready,
                EndpointUse::LastResort => &mut last_resort,
                EndpointUse::No => continue,
            };
            // Further addresses of an endpoint belong to the same pod.
            let Some(address) = endpoint.addresses.first().and_then(|a| a.parse::<IpAddr>().ok()) else {
                continue;
            };
            let pod = endpoint.target_ref.as_ref().and_then(|target| target.name.clone());
            let key = (pod.clone().unwrap_or_else(|| address.to_string()), port);
            let other = engines.get(&key).is_some_and(|(known, _): &(IpAddr, Endpoint)| known.is_ipv4());
            if other || engines.len() >= ENDPOINTS_MAX {
                continue;
            }
            let labels =
                [("pod", pod), ("zone", endpoint.zone.clone()), ("node", endpoint.node_name.clone())];
            let labels = labels.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
            let engine = Endpoint { url: url(scheme, address, port), weight: None, labels: labels.collect() };
            engines.insert(key, (address, engine));
        }
    }
    let engines = if ready.is_empty() { last_resort } else { ready };
    engines.into_values().map(|(_, endpoint)| endpoint).collect()
}

fn port_of(slice: &EndpointSlice, wanted: &PortName) -> Option<u16> {
    let ports = slice.ports.iter().flatten();
    let number = |port: Option<i32>| port.and_then(|p| u16::try_from(p).ok()).filter(|p| *p > 0);
    match wanted {
        // A number is what the engines listen on, also when the service does not list it.
        PortName::Number(wanted) => Some(*wanted),
        PortName::Name(wanted) => {
            let named = ports.into_iter().find(|port| port.name.as_deref().unwrap_or_default() == wanted)?;
            number(named.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(endpoints: Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": endpoints,
            "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
        }))
        .expect("a slice")
    }

    fn found(slices: &[EndpointSlice], port: PortName) -> Vec<String> {
        endpoints(slices.iter(), &port, Scheme::Http)
            .iter()
            .map(|endpoint| endpoint.url.to_string())
            .collect()
    }

    fn http() -> PortName {
        PortName::Name("http".into())
    }

    #[test]
    fn engines_that_are_ready_and_do_not_end_are_members() {
        let all = slice(json!([
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": true, "terminating": false}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": false}},
            {"addresses": ["10.0.0.4", "10.0.0.44"]},
            {"addresses": ["not an address"]},
        ]));
        assert_eq!(found(&[all], http()), ["http://10.0.0.1:8000", "http://10.0.0.4:8000"]);
    }

    #[test]
    fn terminating_pods_that_serve_are_members_when_all_terminate() {
        let ending = slice(json!([
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": false, "terminating": true}},
        ]));
        assert_eq!(found(&[ending], http()), ["http://10.0.0.2:8000"]);
    }

    #[test]
    fn a_pod_of_two_address_families_is_one_engine() {
        let target = json!({"kind": "Pod", "name": "p-0"});
        let v6 =
            slice(json!([{"addresses": ["fd00::1"], "targetRef": target, "zone": "a", "nodeName": "n"}]));
        let v4 =
            slice(json!([{"addresses": ["10.0.0.1"], "targetRef": target, "zone": "a", "nodeName": "n"}]));
        for slices in [[v4.clone(), v6.clone()], [v6, v4]] {
            let found = endpoints(slices.iter(), &http(), Scheme::Http);
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].url.to_string(), "http://10.0.0.1:8000");
            assert_eq!(found[0].labels["pod"], "p-0");
            assert_eq!((&*found[0].labels["zone"], &*found[0].labels["node"]), ("a", "n"));
        }
    }

    #[test]
    fn a_port_is_found_by_its_name_or_given_by_its_number() {
        let one = [slice(json!([{"addresses": ["10.0.0.1"]}]))];
        assert_eq!(found(&one, PortName::Name("metrics".into())), ["http://10.0.0.1:9"]);
        assert_eq!(found(&one, PortName::Number(8100)), ["http://10.0.0.1:8100"]);
        assert!(found(&one, PortName::Name("other".into())).is_empty());
    }
}
