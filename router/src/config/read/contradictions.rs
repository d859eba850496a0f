//! Checks that need several keys: contradictions between keys, and settings that are probably unintended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use crate::config::{
    DisaggregateConfig, EngineConfig, EngineUrl, Fallback, ModelConfig, PoolConfig, PortName,
    ProtocolSetting, RouterConfig, Scheme, TokenizeSource,
};

/// Every contradiction: the path of the key that the problem names, and its description.
pub(crate) fn find(config: &RouterConfig) -> Vec<(String, String)> {
    let mut found = Vec::new();
    listeners(config, &mut found);
    secrets(config, &mut found);
    issuers(config, &mut found);
    names(&config.models, &mut found);
    publishers(config, &mut found);
    releases(&config.models, &mut found);
    controls(&config.models, &mut found);
    protocols(&config.models, &mut found);
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

/// Settings that are valid but probably unintended.
pub(crate) fn find_warnings(config: &RouterConfig) -> Vec<String> {
    let mut warnings = Vec::new();
    without_effect(config, &mut warnings);
    if let Some(auth) = &config.auth
        && auth.keys_file.is_none()
        && auth.keys.is_empty()
        && auth.certificates.is_empty()
        && auth.jwt.is_empty()
    {
        warnings.push(
            "auth: has no `keys`, `keys_file`, `certificates` or `jwt`, so every request gets 401".to_owned(),
        );
    }
    for (at, model) in config.models.iter().enumerate() {
        both_pools(model, at, &mut warnings);
        let mut has_events = false;
        for pool in [&model.prefill, &model.decode] {
            let template = pool.discover.as_ref().map(|discover| discover.template.keys());
            let mut engines = pool.engines.iter().chain(template);
            has_events |= pool.kv_events.is_some() || engines.any(|engine| engine.kv_events.is_some());
        }
        let is_used = has_events || model.bidirectional_kv.is_some();
        if model.tokenize.from != TokenizeSource::Off && !is_used {
            warnings.push(format!(
                "models[{at}].tokenize: no engine has `kv_events`, and without reported blocks the token ids choose \
                 no engine"
            ));
        }
    }
    warnings
}

fn listeners(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    if config.listen.port() != 0 && config.listen == config.admin.listen {
        found.push(("admin.listen".into(), "is the same address as `listen`".into()));
    }
    let admin = &config.admin;
    if admin.is_open(admin.listen, admin.asks_for_certificates()) {
        let what =
            "is beyond loopback: it needs `admin.token_file`, or `admin.tls` with `client_auth: require`";
        found.push(("admin.listen".into(), what.into()));
    }
}

fn secrets(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    if config.cluster_secret.is_some() && config.cluster_secret_file.is_some() {
        let what = "conflicts with `cluster_secret`; set one of them";
        found.push(("cluster_secret_file".into(), what.into()));
    }
}

/// Reports contradictions of issuers, and two entries for the same tokens.
fn issuers(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    let mut seen = BTreeSet::new();
    for (at, issuer) in config.auth.iter().flat_map(|auth| &auth.jwt).enumerate() {
        let problems = issuer.contradictions().into_iter();
        found.extend(problems.map(|(key, what)| (format!("auth.jwt[{at}].{key}"), what)));
        if !seen.insert((&issuer.issuer, &issuer.audience)) {
            found.push((format!("auth.jwt[{at}]"), "has the issuer and audience of another entry".into()));
        }
    }
}

/// Reports names and aliases that appear twice: a request must name one model.
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

/// Reports engines that publish to the same address of the router, which cannot distinguish engines that connect to one
/// address, and ranks without a port.
fn publishers(config: &RouterConfig, found: &mut Vec<(String, String)>) {
    let mut taken: Vec<(IpAddr, RangeInclusive<u16>, &EngineUrl, String)> = Vec::new();
    for (at, model) in config.models.iter().enumerate() {
        for (side, pool) in [("prefill", &model.prefill), ("decode", &model.decode)] {
            let path = format!("models[{at}].{side}");
            let template = pool
                .discover
                .as_ref()
                .and_then(|discover| discover.template.keys().kv_events.as_ref().or(pool.kv_events.as_ref()));
            if template.is_some_and(|events| events.bind.is_some()) {
                let what = "`kv_events.bind` is an address for one engine, and any number of them may be discovered: \
                            let the engines publish at an address of their own";
                found.push((format!("{path}.discover"), what.into()));
            }
            for (number, engine) in pool.engines.iter().enumerate() {
                let Some(events) = engine.kv_events.as_ref().or(pool.kv_events.as_ref()) else { continue };
                let path = format!("{path}.engines[{number}].url");
                let Some(first_port) = events.port else {
                    if events.bind.is_some() {
                        found.push((path, "`kv_events.bind` needs `kv_events.port`".into()));
                    }
                    continue;
                };
                let Some(last_port) = first_port.checked_add(engine.data_parallel_size.saturating_sub(1))
                else {
                    found.push((path, format!("has no port {first_port} + N for each of its ranks")));
                    continue;
                };
                let Some(bind) = events.bind else { continue };
                let ports = first_port..=last_port;
                let same = |bound: &IpAddr, others: &RangeInclusive<u16>| {
                    let meets = others.start() <= ports.end() && ports.start() <= others.end();
                    meets && (*bound == bind || bound.is_unspecified() || bind.is_unspecified())
                };
                match taken.iter().find(|(bound, others, url, _)| same(bound, others) && *url != &engine.url)
                {
                    Some((.., first)) => {
                        let what = format!(
                            "publishes its `kv_events` to port {first_port} of the router, and so does {first}: each \
                             engine needs a port of its own"
                        );
                        found.push((path, what));
                    }
                    None => taken.push((bind, ports, &engine.url, path)),
                }
            }
        }
    }
}

/// Reports prefill engines with two values of `release`: an engine has one way to end a lease, in all pools. The value
/// in a decode pool counts only for engines that are in no prefill pool.
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

/// Reports engines with two protocols or two settings of HTTP/2, and settings that SGLang's engines cannot serve: a decode engine of a pair
/// computes no prompt.
fn protocols(models: &[ModelConfig], found: &mut Vec<(String, String)>) {
    let mut seen = BTreeMap::new();
    for (at, model) in models.iter().enumerate() {
        for engine in model.prefill.engines.iter().chain(&model.decode.engines) {
            let own = (model.protocol, model.http2);
            let (first, known) = *seen.entry(engine.url.authority()).or_insert((at, own));
            for (key, differs) in [("protocol", known.0 != own.0), ("http2", known.1 != own.1)] {
                if differs {
                    let url = engine.url.authority();
                    let message = format!("{url} has another `{key}` at models[{first}].{key}");
                    found.push((format!("models[{at}].{key}"), message));
                }
            }
        }
        if model.bidirectional_kv.is_some() {
            let path = format!("models[{at}].bidirectional_kv");
            if matches!(model.protocol, ProtocolSetting::Sglang | ProtocolSetting::VllmStore) {
                let message = "only vLLM's NixlConnector keeps blocks for a next turn";
                found.push((path.clone(), message.into()));
            }
            if model.resume {
                let message = "not together with `resume`: both record the tokens of a stream";
                found.push((path, message.into()));
            }
        }
        if model.protocol == ProtocolSetting::Sglang {
            if model.resume {
                let message = "SGLang's decode engines cannot continue a stream";
                found.push((format!("models[{at}].resume"), message.into()));
            }
            if model.disaggregate != DisaggregateConfig::default() {
                let message = "with `protocol: sglang` every request has both legs";
                found.push((format!("models[{at}].disaggregate"), message.into()));
            }
            if model.reuse_tokens {
                let message = "both of SGLang's legs are sent at once, so there are no token ids to reuse";
                found.push((format!("models[{at}].reuse_tokens"), message.into()));
            }
        }
    }
}

/// Reports engines with two control addresses, and engines that share one: a verb would end another engine's request.
fn controls(models: &[ModelConfig], found: &mut Vec<(String, String)>) {
    let (mut seen, mut owners) = (BTreeMap::new(), BTreeMap::<String, String>::new());
    let engines =
        || models.iter().flat_map(|model| [&model.prefill, &model.decode]).flat_map(|pool| &pool.engines);
    let urls: BTreeSet<String> = engines().map(|engine| engine.url.authority()).collect();
    for (at, model) in models.iter().enumerate() {
        for (side, pool) in [("prefill", &model.prefill), ("decode", &model.decode)] {
            for (n, engine) in pool.engines.iter().enumerate() {
                let Some(control) = &engine.control_url else { continue };
                let path = format!("models[{at}].{side}.engines[{n}].control_url");
                let (own, address) = (engine.url.authority(), control.authority());
                let owner = owners.entry(address.clone()).or_insert_with(|| own.clone());
                if *owner != own || (address != own && urls.contains(&address)) {
                    found.push((path.clone(), format!("{address} is the address of another engine")));
                }
                match seen.get(&engine.url.authority()) {
                    Some((first, known)) if *known != control => {
                        found.push((path, format!("the same engine has another `control_url` at {first}")));
                    }
                    Some(_) => {}
                    None => drop(seen.insert(engine.url.authority(), (path, control))),
                }
            }
        }
    }
}

/// Warns of keys without an effect.
fn without_effect(config: &RouterConfig, warnings: &mut Vec<String>) {
    let load = &config.health.load;
    if load.interval_ms > load.stale_ms {
        warnings.push(format!(
            "health.load: a reading is used for {} ms (`stale_ms`) and taken every {} ms (`interval_ms`): in between \
             the engines' load is not known",
            load.stale_ms, load.interval_ms
        ));
    }
    for (at, model) in config.models.iter().enumerate() {
        if model.resume && model.fallback == Fallback::None {
            warnings.push(format!(
                "models[{at}].resume: has no effect with `fallback: none`: the engine that continues a stream computes \
                 its prompt"
            ));
        }
        for (side, pool) in [("prefill", &model.prefill), ("decode", &model.decode)] {
            let capacity = &pool.capacity;
            if load.interval_ms == 0 && (capacity.max_waiting.is_some() || capacity.max_kv_usage.is_some()) {
                warnings.push(format!(
                    "models[{at}].{side}.capacity: `max_waiting` and `max_kv_usage` have no effect while \
                     `health.load.interval_ms` is 0: the router does not read the load of engines"
                ));
            }
        }
    }
    let pools = || config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
    let is_tls = |engine: &EngineConfig| {
        engine.url.is_tls() || engine.control_url.as_ref().is_some_and(EngineUrl::is_tls)
    };
    let listed = pools().any(|pool| pool.engines.iter().any(is_tls));
    // A file may contain any address.
    let found = |pool: &PoolConfig| {
        pool.discover.as_ref().is_some_and(|discover| discover.finds_https() || discover.file.is_some())
    };
    if config.engine_tls.is_some() && !listed && !pools().any(found) {
        warnings.push(
            "engine_tls: has no effect: no engine's address begins with https://, and no source of engines has \
             `scheme: https`"
                .to_owned(),
        );
    }
}

/// Warns of engines that would hand off blocks to themselves.
fn both_pools(model: &ModelConfig, at: usize, warnings: &mut Vec<String>) {
    /// Most engines in one warning.
    const NAMED_MAX: usize = 3;
    let prefill: BTreeSet<_> = model.prefill.engines.iter().map(|engine| engine.url.authority()).collect();
    let decode = model.decode.engines.iter();
    let both: Vec<_> = decode.filter(|engine| prefill.contains(&engine.url.authority())).collect();
    if both.is_empty() {
        return;
    }
    let mut named: Vec<_> = both.iter().take(NAMED_MAX).map(|engine| engine.url.to_string()).collect();
    if both.len() > NAMED_MAX {
        named.push(format!("{} more", both.len() - NAMED_MAX));
    }
    let whole = "without `prefill`, the engines of `decode` compute whole requests";
    warnings.push(format!(
        "models[{at}]: {} in `prefill` and in `decode`: a handoff from an engine to itself gains nothing; {whole}",
        named.join(", ")
    ));
}

/// Reports `https` engines without `engine_tls`: the router needs roots to check their certificates.
fn plain(pool: &PoolConfig, path: &str, found: &mut Vec<(String, String)>) {
    if let Some(discover) = &pool.discover {
        let sources = [
            ("dns", discover.dns.as_ref().map(|dns| dns.scheme)),
            ("kubernetes", discover.kubernetes.as_ref().map(|kubernetes| kubernetes.scheme)),
            ("inference_pool", discover.inference_pool.as_ref().map(|pool| pool.scheme)),
        ];
        for (source, _) in sources.iter().filter(|(_, scheme)| *scheme == Some(Scheme::Https)) {
            let what = "`https` needs `engine_tls.ca`: the roots of the engines' certificates";
            found.push((format!("{path}.discover.{source}.scheme"), what.into()));
        }
    }
    for (at, engine) in pool.engines.iter().enumerate() {
        let control = engine.control_url.as_ref().map(|url| ("control_url", url));
        let urls = std::iter::once(("url", &engine.url)).chain(control);
        for (key, url) in urls.filter(|(_, url)| url.is_tls()) {
            let what = format!("`{url}` needs `engine_tls.ca`: the roots of the engines' certificates");
            found.push((format!("{path}.engines[{at}].{key}"), what));
        }
    }
}

/// Reports invalid sources and engines that are in a pool twice: a request would try such an engine again after a
/// failure.
fn engines(pool: &PoolConfig, path: &str, found: &mut Vec<(String, String)>) {
    if let Some(discover) = &pool.discover {
        if !discover.has_sources() {
            found.push((
                format!("{path}.discover"),
                "names no source: `dns`, `file`, `kubernetes` or `inference_pool`".into(),
            ));
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
            found.push((format!("{path}.engines[{at}].url"), "the engine is in this pool twice".into()));
        }
    }
}
