//! What no single value shows: keys that contradict each other.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClientAuth, EngineConfig, ModelConfig, PoolConfig, PortName, RouterConfig};

/// Every contradiction: the path of the key that it is told at, and what it is.
pub(super) fn find(config: &RouterConfig) -> Vec<(String, String)> {
    let mut found = Vec::new();
    listeners(config, &mut found);
    secrets(config, &mut found);
    names(&config.models, &mut found);
    releases(&config.models, &mut found);
    for (at, model) in config.models.iter().enumerate() {
        if model.decode.engines.is_empty() && model.decode.discover.is_none() {
            found.push((format!("models[{at}].decode"), "needs at least one engine, or `discover`".into()));
        }
        for (side, pool) in [("prefill", &model.prefill), ("decode", &model.decode)] {
            engines(pool, &format!("models[{at}].{side}"), &mut found);
            if config.engine_tls.is_none() {
                plain(pool, &format!("models[{at}].{side}"), &mut found);
            }
        }
    }
    found
}

/// What is allowed and yet is hardly what was meant.
pub(super) fn doubts(config: &RouterConfig) -> Vec<String> {
    let mut doubts = Vec::new();
    for (at, model) in config.models.iter().enumerate() {
        for (side, pool) in [("prefill", &model.prefill), ("decode", &model.decode)] {
            let template = pool.discover.as_ref().map(|discover| discover.template.keys());
            let mut engines = pool.engines.iter().chain(template);
            let tells = |engine: &EngineConfig| engine.kv_events.is_some() || pool.kv_events.is_some();
            if config.auth.is_some() && (pool.kv_events.is_some() || engines.clone().any(tells)) {
                doubts.push(format!(
                    "models[{at}].{side}: `kv_events` has no effect with `auth`: every request is salted for its \
                     tenant, and engines' names of salted blocks mean nothing to the router"
                ));
            }
            if engines.any(|engine| engine.data_parallel_size > 1 && tells(engine)) {
                doubts.push(format!(
                    "models[{at}].{side}: `kv_events` hears the first rank of an engine with `data_parallel_size` \
                     only; vLLM publishes rank N at the port + N"
                ));
            }
        }
    }
    doubts
}

fn listeners(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    if config.listen.port() != 0 && config.listen == config.admin.listen {
        found.push(("admin.listen".into(), "is the clients' address `listen` as well".into()));
    }
    let admin = &config.admin;
    let certificates = admin.tls.as_ref().is_some_and(|tls| tls.client_auth == ClientAuth::Require);
    if !admin.listen.ip().is_loopback() && admin.token_file.is_none() && !certificates {
        let what =
            "is beyond loopback: it needs `admin.token_file`, or `admin.tls` with `client_auth: require`";
        found.push(("admin.listen".into(), what.into()));
    }
}

fn secrets(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    if config.cluster_secret.is_some() && config.cluster_secret_file.is_some() {
        let what = "is given beside `cluster_secret`; one of them says the secret";
        found.push(("cluster_secret_file".into(), what.into()));
    }
}

/// No name and no alias is given twice: a request must mean one model.
fn names(models: &[ModelConfig], found: &mut Vec<(String, String)>) {
    let mut seen = BTreeMap::new();
    for (at, model) in models.iter().enumerate() {
        let aliases = model.aliases.iter().enumerate();
        let aliases = aliases.map(|(n, alias)| (format!("models[{at}].aliases[{n}]"), alias));
        for (path, name) in std::iter::once((format!("models[{at}].name"), &model.name)).chain(aliases) {
            match seen.get(name) {
                Some(first) => {
                    found.push((path, format!("the name `{name}` is given twice, first as {first}")))
                }
                None => drop(seen.insert(name, path)),
            }
        }
    }
}

/// An engine has one way of ending a lease, in however many pools it lends. That of a pool in which it decodes counts
/// only where it prefills in none.
fn releases(models: &[ModelConfig], found: &mut Vec<(String, String)>) {
    let mut seen = BTreeMap::new();
    for (at, model) in models.iter().enumerate() {
        for (n, engine) in model.prefill.engines.iter().enumerate() {
            let path = format!("models[{at}].prefill.engines[{n}].release");
            match seen.get(&engine.url.authority()) {
                Some((first, release)) if *release != engine.release => {
                    found.push((path, format!("the same engine has another `release` at {first}")));
                }
                Some(_) => {}
                None => drop(seen.insert(engine.url.authority(), (path, engine.release))),
            }
        }
    }
}

/// Without roots no engine's certificate can be checked.
fn plain(pool: &PoolConfig, path: &str, found: &mut Vec<(String, String)>) {
    for (at, engine) in pool.engines.iter().enumerate().filter(|(_, engine)| engine.url.is_tls()) {
        let what = format!("`{}` needs `engine_tls.ca`: the roots of the engines' certificates", engine.url);
        found.push((format!("{path}.engines[{at}].url"), what));
    }
}

/// An engine that stands in a pool twice would be asked again after it failed.
fn engines(pool: &PoolConfig, path: &str, found: &mut Vec<(String, String)>) {
    if let Some(discover) = &pool.discover {
        if !discover.has_sources() {
            found.push((format!("{path}.discover"), "names no source: `dns`, `file` or `kubernetes`".into()));
        }
        if discover.kubernetes.as_ref().is_some_and(|k| k.service.is_none() && k.selector.is_empty()) {
            let what = "needs a `service` or a `selector`; else every slice of the namespace is taken";
            found.push((format!("{path}.discover.kubernetes"), what.into()));
        }
        if discover.kubernetes.as_ref().is_some_and(|k| k.port == PortName::Number(0)) {
            found.push((format!("{path}.discover.kubernetes.port"), "0 is no port".into()));
        }
    }
    let mut seen = BTreeSet::new();
    for (at, engine) in pool.engines.iter().enumerate() {
        if !seen.insert(engine.url.authority()) {
            found.push((format!("{path}.engines[{at}].url"), "the engine stands in this pool twice".into()));
        }
    }
}
