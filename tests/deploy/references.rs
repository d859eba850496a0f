//! References between documents.

use serde_json::Value;

use crate::kustomize::{OVERLAYS, identity, overlay};
use crate::parsed;

/// Objects that an overlay needs and does not contain: the operator creates them (`docs/how-to/kubernetes.md`).
pub(crate) const BROUGHT_BY_OTHERS: [(&str, &str, &[&str]); 3] = [
    ("PersistentVolumeClaim", "model", &[]),
    ("Secret", "baton-tls", &["tls.crt", "tls.key", "ca.crt"]),
    ("Secret", "baton-api-keys", &["keys.yaml"]),
];

const ROUTER: &str = "baton-router";

/// The objects of one overlay.
pub(crate) struct Fleet {
    pub(crate) name: &'static str,
    objects: Vec<Value>,
}

impl Fleet {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        OVERLAYS.into_iter().map(|name| Self { name, objects: overlay(name) })
    }

    fn of(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |object| object["kind"] == *kind)
    }

    fn named(&self, kind: &str, name: &Value) -> &Value {
        let found = self.of(kind).find(|object| object["metadata"]["name"] == *name);
        found.unwrap_or_else(|| panic!("{}: no {kind} {name}", self.name))
    }

    /// The deployments' pods, with the deployments' names.
    pub(crate) fn pods(&self) -> impl Iterator<Item = (String, &Value)> {
        self.of("Deployment").map(|object| (identity(object).1, &object["spec"]["template"]))
    }

    pub(crate) fn router(&self) -> &Value {
        self.pods().find(|(name, _)| name == ROUTER).expect("every overlay has the router").1
    }

    /// The router's configuration from its ConfigMap.
    pub(crate) fn router_yaml(&self) -> &str {
        let map = self.named("ConfigMap", &"baton-router".into());
        map["data"]["router.yaml"].as_str().expect("the key that the router's arguments name")
    }

    fn router_config(&self) -> Value {
        parsed(self.router_yaml(), "router.yaml".as_ref())
    }

    /// The keys of a secret or ConfigMap.
    fn keys(&self, kind: &str, name: &Value) -> Vec<String> {
        let others = BROUGHT_BY_OTHERS.iter().find(|(of, known, _)| *of == kind && name == known);
        if let Some((_, _, keys)) = others {
            return keys.iter().map(|&key| key.to_owned()).collect();
        }
        let data = self.named(kind, name)["data"].as_object();
        data.unwrap_or_else(|| panic!("{}: {kind} {name} is empty", self.name)).keys().cloned().collect()
    }

    /// A pod's mounts: the path, and the keys that are files there.
    pub(crate) fn mounts(&self, pod: &Value) -> Vec<(String, Vec<String>)> {
        let container = &pod["spec"]["containers"][0];
        let mounts = list(&container["volumeMounts"]).map(|mount| {
            let volume = list(&pod["spec"]["volumes"]).find(|volume| volume["name"] == mount["name"]);
            let volume = volume.unwrap_or_else(|| panic!("{}: no volume for {mount}", self.name));
            let keys = if volume["secret"].is_object() {
                self.keys("Secret", &volume["secret"]["secretName"])
            } else if volume["configMap"].is_object() {
                self.keys("ConfigMap", &volume["configMap"]["name"])
            } else if volume["persistentVolumeClaim"].is_object() {
                let claim = volume["persistentVolumeClaim"]["claimName"].as_str().expect("a name");
                let known = BROUGHT_BY_OTHERS
                    .iter()
                    .any(|(kind, name, _)| *kind == "PersistentVolumeClaim" && *name == claim);
                assert!(known, "{}: who brings the claim {claim}?", self.name);
                Vec::new()
            } else {
                assert!(volume["emptyDir"].is_object(), "{volume}");
                Vec::new()
            };
            (mount["mountPath"].as_str().expect("a path").to_owned(), keys)
        });
        mounts.collect()
    }
}

pub(crate) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["spec"]["containers"])
}

/// The number of a container's port.
pub(crate) fn port_of(container: &Value, name: &str) -> Option<u64> {
    list(&container["ports"]).find(|port| port["name"] == name)?["containerPort"].as_u64()
}

/// Whether a label selector matches these labels.
fn selects(selector: &Value, labels: &Value) -> bool {
    let matches = selector["matchLabels"].as_object().into_iter().flatten();
    let expressions = list(&selector["matchExpressions"]);
    matches.into_iter().all(|(key, value)| labels[key] == *value)
        && expressions.into_iter().all(|expression| {
            assert_eq!(expression["operator"], "In", "{expression}");
            let label = &labels[expression["key"].as_str().expect("a key")];
            list(&expression["values"]).any(|value| value == label)
        })
}

/// A service's selector is a plain map.
fn as_selector(map: &Value) -> Value {
    serde_json::json!({"matchLabels": map})
}

#[test]
fn every_selector_matches_its_pods() {
    for fleet in Fleet::all() {
        let meant = |selector: &Value| -> Vec<String> {
            let pods = fleet.pods().filter(|(_, pod)| selects(selector, &pod["metadata"]["labels"]));
            pods.map(|(name, _)| name).collect()
        };
        for deployment in fleet.of("Deployment") {
            assert_eq!(meant(&deployment["spec"]["selector"]), [identity(deployment).1], "{}", fleet.name);
            let spread = list(&deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]);
            for constraint in spread {
                assert_eq!(meant(&constraint["labelSelector"]), [identity(deployment).1]);
            }
        }
        for service in fleet.of("Service") {
            let pods = meant(&as_selector(&service["spec"]["selector"]));
            assert_eq!(pods.len(), 1, "{}: {:?} means {pods:?}", fleet.name, identity(service));
            let pod = fleet.pods().find(|(name, _)| *name == pods[0]).expect("it was found").1;
            for port in list(&service["spec"]["ports"]) {
                let target = port["targetPort"].as_str().expect("a name, so that numbers stand in one place");
                let number = containers(pod).find_map(|container| port_of(container, target));
                let number = number.unwrap_or_else(|| panic!("{pods:?} has no port {target}"));
                // A headless service does not translate ports.
                if service["spec"]["clusterIP"] == "None" {
                    assert_eq!(port["port"], number, "{:?}", identity(service));
                }
            }
        }
        for budget in fleet.of("PodDisruptionBudget") {
            assert_eq!(meant(&budget["spec"]["selector"]), [identity(budget).1], "{}", fleet.name);
            // Otherwise a pod that never becomes ready would block the drain of its node.
            assert_eq!(budget["spec"]["unhealthyPodEvictionPolicy"], "AlwaysAllow", "{}", fleet.name);
        }
        let budgets: Vec<_> = fleet.of("PodDisruptionBudget").map(|budget| identity(budget).1).collect();
        assert_eq!(budgets.len(), fleet.pods().count(), "every deployment has a budget: {budgets:?}");
    }
}

#[test]
fn monitors_find_every_listener_that_has_metrics() {
    for fleet in Fleet::all() {
        let mut seen = Vec::new();
        for monitor in fleet.of("ServiceMonitor") {
            let labels =
                |service: &&Value| selects(&monitor["spec"]["selector"], &service["metadata"]["labels"]);
            let services: Vec<_> = fleet.of("Service").filter(labels).collect();
            for endpoint in list(&monitor["spec"]["endpoints"]) {
                assert_eq!(endpoint["path"], "/metrics");
                for service in &services {
                    let port = list(&service["spec"]["ports"]).any(|port| port["name"] == endpoint["port"]);
                    assert!(port, "{}: {:?} has no port {}", fleet.name, identity(service), endpoint["port"]);
                    seen.push(identity(service).1);
                }
                if let Some(key) = endpoint.pointer("/authorization/credentials") {
                    let keys = fleet.keys("Secret", &key["name"]);
                    assert!(keys.iter().any(|known| key["key"] == **known), "{key}");
                }
            }
        }
        seen.sort();
        assert_eq!(seen, ["baton-admin", "decode", "prefill"], "{}", fleet.name);
    }
}

#[test]
fn network_policies_let_through_what_must_pass_and_nothing_else() {
    for fleet in Fleet::all() {
        let policies: Vec<_> = fleet.of("NetworkPolicy").map(|policy| &policy["spec"]).collect();
        let (pods, stranger) = (fleet.pods().collect::<Vec<_>>(), "a stranger");
        let labels = |name: &str| {
            let pod = pods.iter().find(|(other, _)| other == name);
            pod.map_or(Value::Null, |(_, pod)| pod["metadata"]["labels"].clone())
        };
        let known = |peer: &Value| {
            peer["namespaceSelector"].is_object()
                || pods.iter().any(|(_, pod)| selects(&peer["podSelector"], &pod["metadata"]["labels"]))
        };
        // Whether the rules of one direction allow a peer at a port of the listening pod.
        let passes =
            |direction: &str, rules: &str, peers: &str, who: &str, with: &str, listener: &str, port: u64| {
                let container =
                    containers(pods.iter().find(|(name, _)| name == listener).expect("it is there").1)
                        .next()
                        .expect("a container");
                let bound: Vec<_> = policies
                    .iter()
                    .filter(|policy| list(&policy["policyTypes"]).any(|kind| kind == direction))
                    .filter(|policy| selects(&policy["podSelector"], &labels(who)))
                    .collect();
                bound.is_empty()
                    || bound.iter().flat_map(|policy| list(&policy[rules])).any(|rule| {
                        let allowed = rule[peers].is_null()
                            || list(&rule[peers]).any(|peer| match peer["namespaceSelector"].is_object() {
                                true => with == "monitoring",
                                false => {
                                    with != stranger
                                        && with != "monitoring"
                                        && selects(&peer["podSelector"], &labels(with))
                                }
                            });
                        let at = rule["ports"].is_null()
                            || list(&rule["ports"]).any(|open| match open["port"].as_str() {
                                Some(name) => port_of(container, name) == Some(port),
                                None => open["port"] == port,
                            });
                        allowed && at
                    })
            };
        let reaches = |from: &str, to: &str, port: u64| {
            let out = from == stranger
                || from == "monitoring"
                || passes("Egress", "egress", "to", from, to, to, port);
            out && passes("Ingress", "ingress", "from", to, from, to, port)
        };
        for policy in &policies {
            for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
                let named = list(&policy[rules]).flat_map(|rule| list(&rule[peers]));
                named.for_each(|peer| assert!(known(peer), "{}: no pod is {peer}", fleet.name));
            }
        }
        let yes = [
            (stranger, ROUTER, 8080),
            ("monitoring", ROUTER, 8081),
            ("monitoring", "prefill", 8000),
            ("monitoring", "decode", 8000),
            (ROUTER, "prefill", 8000),
            (ROUTER, "decode", 8000),
            ("decode", "prefill", 5600),
        ];
        // Engines with Baton's connector have a channel of their own beside NIXL's.
        let channels: &[u64] = if fleet.name == "vllm-baton" { &[9600] } else { &[] };
        let of_channels = channels.iter().map(|port| ("decode", "prefill", *port));
        for (from, to, port) in yes.into_iter().chain(of_channels) {
            assert!(reaches(from, to, port), "{}: {from} must reach {to}:{port}", fleet.name);
        }
        let no = [
            (stranger, ROUTER, 8081),
            (stranger, "prefill", 8000),
            (stranger, "decode", 8000),
            (stranger, "prefill", 5600),
            (stranger, "decode", 5600),
            ("monitoring", "prefill", 5600),
            (ROUTER, "prefill", 5600),
            ("decode", ROUTER, 8081),
            ("prefill", ROUTER, 8080),
        ];
        let strangers = [stranger, "monitoring", ROUTER];
        let of_channels = channels.iter().flat_map(|port| strangers.map(|from| (from, "prefill", *port)));
        for (from, to, port) in no.into_iter().chain(of_channels) {
            assert!(!reaches(from, to, port), "{}: {from} reaches {to}:{port}", fleet.name);
        }
    }
}

#[test]
fn files_and_secrets_of_pods_exist() {
    for fleet in Fleet::all() {
        for (name, pod) in fleet.pods() {
            let mounts = fleet.mounts(pod);
            for container in containers(pod) {
                let mounted = |path: &str| {
                    mounts.iter().any(|(at, keys)| {
                        let key = path.strip_prefix(at.as_str()).and_then(|rest| rest.strip_prefix('/'));
                        key.is_some_and(|key| keys.iter().any(|known| known == key))
                            || (path == at && keys.is_empty())
                    })
                };
                let args = list(&container["args"]).map(|arg| arg.as_str().expect("arguments are text"));
                let paths = args.map(|arg| arg.split_once('=').map_or(arg, |(_, value)| value));
                for path in paths.filter(|path| path.starts_with('/')) {
                    assert!(mounted(path), "{}: {name} gets {path}; it has {mounts:?}", fleet.name);
                }
                for variable in list(&container["env"]) {
                    if let Some(key) = variable.pointer("/valueFrom/secretKeyRef") {
                        let keys = fleet.keys("Secret", &key["name"]);
                        assert!(keys.iter().any(|known| key["key"] == **known), "{key}");
                    }
                }
            }
        }
        // Every file that the router's configuration names.
        let mounts = fleet.mounts(fleet.router());
        let words = fleet.router_yaml().split([' ', ',', '}', '\n']);
        for path in words.filter(|word| word.starts_with("/run/") || word.starts_with("/etc/")) {
            let there = mounts.iter().any(|(at, keys)| keys.iter().any(|key| format!("{at}/{key}") == path));
            assert!(there, "{}: the configuration names {path}; there is {mounts:?}", fleet.name);
        }
    }
}

#[test]
fn nothing_that_could_be_used_as_a_secret_is_in_the_repository() {
    for fleet in Fleet::all() {
        for secret in fleet.of("Secret") {
            let values = secret["data"].as_object().into_iter().flatten();
            assert!(values.into_iter().all(|(_, value)| value == ""), "{secret}");
        }
        // Each overlay needs secrets of its own. Without them kustomize renders nothing (see `kustomize`).
        assert!(fleet.of("Secret").count() >= 2, "{}", fleet.name);
    }
    let (tracked, files) = crate::run(
        std::process::Command::new("git").current_dir(crate::ours("")).args(["ls-files", "deploy"]),
    );
    if !tracked {
        return crate::skipped("this is no clone: whether secrets are tracked was not looked at");
    }
    let secrets = files.lines().filter(|file| file.contains("/secrets/") && !file.ends_with(".gitignore"));
    assert_eq!(secrets.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn only_the_router_may_query_the_api_and_only_for_slices() {
    for fleet in Fleet::all() {
        for (name, pod) in fleet.pods() {
            let token = pod["spec"]["automountServiceAccountToken"] == true;
            assert_eq!(token, name == ROUTER, "{}: {name}", fleet.name);
        }
        let account = &fleet.router()["spec"]["serviceAccountName"];
        let account = fleet.named("ServiceAccount", account);
        let bindings: Vec<_> = fleet.of("RoleBinding").collect();
        assert_eq!(bindings.len(), 1);
        let subject = &bindings[0]["subjects"][0];
        assert_eq!(subject["name"], account["metadata"]["name"]);
        assert_eq!(subject["namespace"], account["metadata"]["namespace"]);
        let role = fleet.named("Role", &bindings[0]["roleRef"]["name"]);
        // `router/src/process/discovery/kubernetes.rs` lists and watches, in one namespace.
        let rules = serde_json::json!([
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ]);
        assert_eq!(role["rules"], rules);
    }
}

#[test]
fn the_router_discovers_engines_at_their_service() {
    for fleet in Fleet::all() {
        let config = fleet.router_config();
        for model in list(&config["models"]) {
            for leg in ["prefill", "decode"] {
                let found = &model[leg]["discover"]["kubernetes"];
                let service = fleet.named("Service", &found["service"]);
                assert!(found["namespace"].is_null(), "its own is the engines'");
                let port = list(&service["spec"]["ports"]).any(|port| port["name"] == found["port"]);
                assert!(port, "{}: {leg}: {found}", fleet.name);
                let pod = fleet.pods().find(|(name, _)| name == leg).expect("the pods of the leg").1;
                let argument = |key: &str| {
                    let args = containers(pod).flat_map(|container| list(&container["args"]));
                    let value = args
                        .filter_map(Value::as_str)
                        .find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='));
                    value.unwrap_or_else(|| panic!("{}: {leg} has no {key}", fleet.name)).to_owned()
                };
                assert_eq!(model["name"], argument("--served-model-name"), "{}: {leg}", fleet.name);
                if let Some(most) = model[leg]["discover"]["template"]["max_in_flight"].as_u64() {
                    assert_eq!(argument("--max-num-seqs"), most.to_string(), "{}: {leg}", fleet.name);
                }
            }
        }
    }
}

#[test]
fn termination_grace_periods_cover_the_drain() {
    for fleet in Fleet::all() {
        let config = fleet.router_config();
        for (name, pod) in fleet.pods() {
            let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64().expect("it is said");
            let container = containers(pod).next().expect("a container");
            let sleep = container.pointer("/lifecycle/preStop/sleep/seconds").and_then(Value::as_u64);
            let needed = if name == ROUTER {
                let ms = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("{key} is said"));
                assert!(ms("drain_delay_ms") >= 2 * 2 * 1000, "two readiness probes that fail come first");
                // The 30 s are the maximum time of settlement (`deploy/config/kubernetes.yaml`).
                (ms("drain_delay_ms") + ms("drain_timeout_ms")).div_ceil(1000) + 30
            } else {
                let stop = list(&container["args"])
                    .find_map(|arg| arg.as_str()?.strip_prefix("--shutdown-timeout="));
                let stop: u64 = stop.expect("it is said").parse().expect("seconds");
                // vLLM does not wait for leases. On Baton's engines they are part of the shutdown.
                let leases = if fleet.name.starts_with("vllm") && name == "prefill" { 30 } else { 0 };
                let sleep = sleep.unwrap_or_else(|| panic!("{name}: routers must hear of it first"));
                assert!(sleep >= 10 + leases, "{}: {name}: {sleep}", fleet.name);
                sleep + stop + 15
            };
            assert!(grace >= needed, "{}: {name}: {grace} s, and {needed} s are needed", fleet.name);
        }
    }
}

#[test]
fn containers_have_no_unneeded_privileges() {
    for fleet in Fleet::all() {
        for (name, pod) in fleet.pods() {
            for container in containers(pod) {
                let security = &container["securityContext"];
                assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
                assert_eq!(security["capabilities"]["drop"][0], "ALL", "{name}");
                assert_eq!(pod["spec"]["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
                let image = container["image"].as_str().expect("an image");
                let tag = image.rsplit_once(':').map(|(_, tag)| tag);
                if image.starts_with("vllm/") {
                    assert!(tag.is_some_and(|tag| tag.starts_with('v')), "{image}");
                    continue;
                }
                assert_eq!(tag, Some(env!("CARGO_PKG_VERSION")), "{image}");
                assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
                assert_eq!(pod["spec"]["securityContext"]["runAsNonRoot"], true, "{name}");
            }
        }
    }
}
