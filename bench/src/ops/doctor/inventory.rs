//! Which components respond, their properties, and whether they match.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_router::snapshot::EngineEvents;
use serde_json::Value;

use super::checkup::{Checkup, Warning};
use super::engine::{EngineInfo, EnginePool, Incarnation, PATIENCE};
use crate::common::http_client::{Samples, ServiceClient, WebError};
use crate::ops::top::source::now_us;

/// A router queries its engines for up to four seconds.
pub(super) const ROUTER_PATIENCE: Duration = Duration::from_secs(8);
/// Times of machines whose clocks differ by more are hard to compare.
const CLOCKS_MS: f64 = 100.0;
/// Interval between two reads of leases that seem stranded.
const LOOK_AGAIN: Duration = Duration::from_millis(1_500);

/// The components to inspect.
pub(super) struct DoctorTargets {
    pub(super) endpoint: Option<ServiceClient>,
    pub(super) url: String,
    pub(super) admins: Vec<ServiceClient>,
    pub(super) engines: Vec<ServiceClient>,
    pub(super) secret: Option<PathBuf>,
    pub(super) model: Option<String>,
}

/// Results of the inspection.
#[derive(Default)]
pub(super) struct Inventory {
    /// The endpoint responds, as far as is known. Requests can be sent.
    pub(super) answers: bool,
    pub(super) engines: Vec<EngineInfo>,
    pub(super) model: Option<String>,
    /// The routers' configurations.
    pub(super) configs: Vec<Value>,
}

/// Inspects all components and records the results.
pub(super) async fn inspect(targets: &DoctorTargets, checkup: &mut Checkup) -> Inventory {
    let mut inventory = Inventory::default();
    endpoint(targets, &mut inventory, checkup).await;
    let mut engines = KnownEngines::new();
    for service in &targets.engines {
        let known = KnownEngine { service: Some(service.clone()), ..KnownEngine::default() };
        engines.insert(service.authority().to_owned(), known);
    }
    for admin in &targets.admins {
        router(admin, &mut engines, &mut inventory, checkup).await;
    }
    if targets.admins.is_empty() {
        checkup.skip("admin", "", "no admin listener is known: add --admin to check the router");
    }
    for (name, KnownEngine { service, control, pools }) in engines {
        let service = service.map_or_else(
            || {
                ServiceClient::parse(&name)
                    .and_then(|service| service.with_secret_file(targets.secret.as_deref()))
            },
            Ok,
        );
        match service {
            Ok(mut service) => {
                if service.set_control(control.as_deref()).is_err() {
                    let control = control.unwrap_or_default();
                    let message = format!(
                        "is observed at its own address: control_url {control:?} is not http://HOST:PORT"
                    );
                    checkup.skip("engine", &name, message);
                }
                inventory.engines.push(engine(service, pools, checkup).await);
            }
            Err(WebError::Url(url)) => {
                checkup.skip("engine", &name, format!("{url} is not an address that can be checked"))
            }
            Err(error) => checkup.fail("engine", &name, error.to_string()),
        }
    }
    if inventory.engines.is_empty() {
        checkup.skip("engines", "", "no engine is known: add --admin or --engine");
    }
    check_compatibility(&inventory, checkup);
    for admin in &targets.admins {
        check_stranded(admin, checkup).await;
    }
    if inventory.model.is_none() {
        inventory.model = targets
            .model
            .clone()
            .or_else(|| inventory.engines.iter().find_map(|e| e.models.first().cloned()));
    }
    inventory
}

/// Inspects the client endpoint.
async fn endpoint(targets: &DoctorTargets, inventory: &mut Inventory, checkup: &mut Checkup) {
    let Some(endpoint) = &targets.endpoint else {
        checkup.skip("endpoint", &targets.url, "TLS, or a path in the URL: checked by requests only");
        (inventory.answers, inventory.model) = (true, targets.model.clone());
        checkup.mark_reachable();
        return;
    };
    match endpoint.get("/health", PATIENCE).await {
        Ok(_) => {
            checkup.mark_reachable();
            inventory.answers = true;
            checkup.ok("endpoint", endpoint.authority(), "responds to /health");
        }
        Err(error @ WebError::Refused(..)) => {
            checkup.mark_reachable();
            inventory.answers = true;
            checkup.fail("endpoint", endpoint.authority(), format!("is not healthy: {error}"));
        }
        Err(error) => return checkup.dead_endpoint(endpoint.authority(), &error),
    }
    // Not every gateway has this path.
    match endpoint.get("/ready", PATIENCE).await {
        Ok(_) => checkup.ok("ready", endpoint.authority(), "accepts requests"),
        Err(error) if error.status().is_some_and(|status| status.is_server_error()) => {
            checkup.fail("ready", endpoint.authority(), format!("refuses requests: {error}"));
        }
        Err(_) => {}
    }
    // If clients need a key, the models are read from the engines.
    if let Ok(models) = endpoint.get_json("/v1/models", PATIENCE).await {
        inventory.model = models["data"][0]["id"].as_str().map(str::to_owned);
    }
}

/// Engines by name.
type KnownEngines = BTreeMap<String, KnownEngine>;

/// An engine that was given or that a router lists.
#[derive(Default)]
struct KnownEngine {
    /// Its client, if the address was given.
    service: Option<ServiceClient>,
    /// Its `control_url`, if a router lists one.
    control: Option<String>,
    pools: BTreeSet<EnginePool>,
}

/// Inspects a router's admin listener: configuration, engines, file descriptors.
async fn router(
    admin: &ServiceClient,
    engines: &mut KnownEngines,
    inventory: &mut Inventory,
    checkup: &mut Checkup,
) {
    let name = admin.authority();
    let config = match admin.get_json("/config", PATIENCE).await {
        Ok(config) => config,
        Err(error) if error.status().is_some_and(|status| status.as_u16() == 401) => {
            checkup.mark_reachable();
            return checkup.fail("admin", name, "requires a token: add --admin-token-file");
        }
        Err(error) => return checkup.fail("admin", name, error.to_string()),
    };
    checkup.mark_reachable();
    checkup.ok("admin", name, format!("configuration {} is in effect", config["generation"]));
    if config["reloads"]["last"]["result"].as_str() == Some("rejected") {
        let message = "the last configuration read was rejected; the previous one is in effect (see /config)";
        checkup.warn(Warning::Reload, name, message);
    }
    let config = config["config"].clone();
    exposure(admin, &config, checkup).await;
    match admin.get_json("/engines", PATIENCE).await {
        Ok(page) => {
            for engine in page["engines"].as_array().into_iter().flatten() {
                known_engine(engine, engines, checkup);
            }
        }
        Err(error) => checkup.fail("admin", name, error.to_string()),
    }
    match admin.samples(PATIENCE).await {
        Ok(samples) => descriptors(name, &samples, &config, checkup),
        Err(error) => checkup.fail("admin", name, error.to_string()),
    }
    inventory.configs.push(config);
}

fn known_engine(entry: &Value, engines: &mut KnownEngines, checkup: &mut Checkup) {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let name = text(&entry["engine"]);
    let pools = entry["pools"].as_array().into_iter().flatten();
    let pools = pools.map(|pool| EnginePool { model: text(&pool["model"]), leg: text(&pool["leg"]) });
    let is_tls = entry["url"].as_str().is_some_and(|url| url.starts_with("https://"));
    if is_tls && !engines.contains_key(&name) {
        checkup.skip("engine", &name, "uses TLS: checked through the router only");
    } else {
        let known = engines.entry(name.clone()).or_default();
        known.pools.extend(pools);
        known.control = entry["control_url"].as_str().map(str::to_owned).or(known.control.take());
    }
    for (leg, standing) in entry["legs"].as_object().into_iter().flatten() {
        match standing["standing"].as_str() {
            Some("usable") | None => {}
            Some("draining") => checkup.warn(Warning::Standing, &name, format!("{leg}: draining")),
            Some(how) => {
                let reasons = entry["reasons"].as_array().into_iter().flatten().map(text).collect::<Vec<_>>();
                let message = format!("{leg}: {how}, by the router: {}", reasons.join(", "));
                checkup.fail("standing", &name, message);
            }
        }
    }
}

/// Engines whose leases can be released by the verbs only, which they do not answer: after the requests of the other
/// checks the routers have seen their handoffs.
pub(super) async fn missing_verbs(admins: &[ServiceClient], inventory: &Inventory, checkup: &mut Checkup) {
    let mut found = BTreeSet::new();
    for admin in admins {
        let Ok(page) = admin.get_json("/engines", PATIENCE).await else { continue };
        let listed = page["engines"].as_array().into_iter().flatten();
        found.extend(
            listed.filter(|entry| entry["handles"] == true).filter_map(|entry| text(&entry["engine"])),
        );
    }
    for engine in inventory.engines.iter().filter(|engine| engine.up && engine.role.is_none()) {
        if found.contains(&engine.name) {
            let message = "returns handles, but answers neither /debug/kv nor the verbs: load vLLM's plugin \
                           (VLLM_PLUGINS=baton), or name the port of its engine process as control_url";
            checkup.fail("engine", &engine.name, message);
        }
    }
}

/// What clients without credentials can reach.
async fn exposure(admin: &ServiceClient, config: &Value, checkup: &mut Checkup) {
    let beyond = |key: &Value| {
        key.as_str()
            .and_then(|address| address.parse::<std::net::SocketAddr>().ok())
            .filter(|a| !a.ip().is_loopback())
    };
    // A client with a certificate signed by `client_ca` has credentials.
    let certified = config["listen_tls"]["client_auth"] == "require";
    if let Some(listen) = beyond(&config["listen"])
        && config["auth"].is_null()
        && !certified
    {
        let message = format!(
            "clients need neither key nor certificate, and {listen} is beyond loopback: set `auth` or `listen_tls`"
        );
        checkup.warn(Warning::Exposure, admin.authority(), message);
    }
    match beyond(&config["admin"]["listen"]) {
        None => checkup.ok("exposure", admin.authority(), "the admin listener is on loopback"),
        Some(listen) => {
            let stranger = ServiceClient::parse(admin.authority());
            let open = match &stranger {
                Ok(stranger) => stranger.get("/config", PATIENCE).await.is_ok(),
                Err(_) => false,
            };
            if open {
                let message = format!("{listen} requires no token: set `admin.token_file`");
                checkup.fail("exposure", admin.authority(), message);
            } else {
                let message = "the admin listener requires a token or a certificate";
                checkup.ok("exposure", admin.authority(), message);
            }
        }
    }
}

/// Whether the router can hold the connections that its configuration allows. Each may need one to an engine.
fn descriptors(name: &str, samples: &Samples, config: &Value, checkup: &mut Checkup) {
    let (Some(most), Some(open)) =
        (samples.sum("process_max_fds", &[]), samples.sum("process_open_fds", &[]))
    else {
        return checkup.skip("descriptors", name, "its limit of file descriptors is unknown");
    };
    let limit = |key: &str| config["limits"][key].as_f64().unwrap_or(0.0);
    let (connections, in_flight) = (limit("connections"), limit("in_flight"));
    // Either all allowed clients are connected, or all allowed requests are in flight, each with a connection to an
    // engine. The rest is for files, listeners and monitors.
    let needed = connections.max(2.0 * in_flight) + 256.0;
    let message = format!("{open:.0} of {most:.0} file descriptors are open");
    if open > 0.8 * most {
        checkup.fail("descriptors", name, message);
    } else if most < needed {
        let message = format!(
            "{message}; limits.connections {connections:.0} and limits.in_flight {in_flight:.0} may need \
                 {needed:.0}: raise `ulimit -n` or lower them"
        );
        checkup.warn(Warning::Descriptors, name, message);
    } else {
        checkup.ok("descriptors", name, message);
    }
}

/// Inspects one engine.
async fn engine(service: ServiceClient, pools: BTreeSet<EnginePool>, checkup: &mut Checkup) -> EngineInfo {
    let mut engine = EngineInfo { pools, ..EngineInfo::at(service) };
    if !is_healthy(&engine, checkup).await {
        return engine;
    }
    read_properties(&mut engine).await;
    if !read_debug_kv(&mut engine, checkup).await {
        return engine;
    }
    clock(&mut engine, checkup).await;
    if engine.run.is_none() {
        // The check of epochs reports an engine without an incarnation.
        engine.run = Incarnation::of(&engine.service).await.ok().flatten();
    }
    let role = engine.role.as_deref().unwrap_or("stock");
    let epoch = match &engine.run {
        Some(epoch @ Incarnation::Epoch(_)) => format!(", {epoch}"),
        Some(Incarnation::Started(_)) | None => String::new(),
    };
    let version = engine.version.as_deref().unwrap_or("?");
    checkup.ok("engine", &engine.name, format!("{role}, version {version}{epoch}"));
    if engine.role.is_some() {
        // No digest is greater than this hash: only the layout is returned.
        let digests = format!("/debug/kv/digests?after={}", "f".repeat(64));
        let digests = engine.service.get_json(&digests, PATIENCE).await;
        engine.layout = digests.ok().and_then(|digests| text(&digests["layout"]));
        check_authentication(&engine, checkup).await;
    }
    engine
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

async fn is_healthy(engine: &EngineInfo, checkup: &mut Checkup) -> bool {
    let name = &engine.name;
    match engine.service.get("/health", PATIENCE).await {
        Ok(_) => {
            checkup.mark_reachable();
            return true;
        }
        Err(error @ WebError::Refused(..)) => {
            checkup.mark_reachable();
            checkup.fail("engine", name, format!("is not healthy: {error}"));
        }
        Err(_) if checkup.has_failed("endpoint", name) => {
            checkup.skip("engine", name, "is the endpoint, which does not respond");
        }
        Err(error) => checkup.fail("engine", name, error.to_string()),
    }
    false
}

/// Reads what stock engines report too: version, models and the size of a block.
async fn read_properties(engine: &mut EngineInfo) {
    if let Ok(version) = engine.service.get_json("/version", PATIENCE).await {
        engine.version = text(&version["version"]);
    }
    if let Ok(models) = engine.service.get_json("/v1/models", PATIENCE).await {
        let listed = models["data"].as_array().into_iter().flatten();
        engine.models = listed.filter_map(|model| text(&model["id"])).collect();
    }
    if let Ok(samples) = engine.service.samples(PATIENCE).await {
        let sizes = samples
            .of("vllm:cache_config_info")
            .filter_map(|(labels, _)| labels.get("block_size")?.parse().ok());
        engine.block_size = sizes.last();
    }
}

/// Reads role and incarnation. Returns whether the engine can be used.
async fn read_debug_kv(engine: &mut EngineInfo, checkup: &mut Checkup) -> bool {
    let page = engine.service.get_json("/debug/kv", PATIENCE).await;
    let status = page.as_ref().err().and_then(WebError::status).map(|status| status.as_u16());
    match (page, status) {
        (Ok(page), _) => {
            engine.up = true;
            engine.role = text(&page["engine"]["role"]);
            engine.run = Incarnation::from_page(&page);
            engine.has_connector = page["cores"].is_array();
            if let Some(why) = text(&page["failed"]) {
                checkup.fail("engine", &engine.name, format!("its device has failed: {why}"));
            }
        }
        (Err(_), Some(401 | 403)) => checkup.fail(
            "secret",
            &engine.name,
            "refuses the cluster secret: --cluster-secret-file must contain the engine's",
        ),
        // A stock engine has no such page.
        (Err(_), Some(400..500)) => engine.up = true,
        (Err(error), _) => checkup.fail("engine", &engine.name, error.to_string()),
    }
    engine.up
}

/// Whether an address of the engine beyond loopback requires no credentials. The verbs may be at both addresses.
async fn check_authentication(engine: &EngineInfo, checkup: &mut Checkup) {
    let mut addresses = vec![engine.service.authority(), engine.service.control_authority()];
    addresses.dedup();
    addresses.retain(|address| !is_loopback(address));
    let mut open = Vec::new();
    for address in &addresses {
        if let Ok(stranger) = ServiceClient::parse(address)
            && stranger.get("/debug/kv", PATIENCE).await.is_ok()
        {
            open.push(*address);
        }
    }
    if !open.is_empty() {
        let message = format!(
            "any client can release its blocks at {}: start it with --cluster-secret-file",
            open.join(" and ")
        );
        checkup.fail("exposure", &engine.name, message);
    } else if !addresses.is_empty() {
        let message = "answers no /debug/kv beyond loopback without the cluster secret";
        checkup.ok("exposure", &engine.name, message);
    }
}

/// Whether `HOST:PORT` is on loopback.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

async fn clock(engine: &mut EngineInfo, checkup: &mut Checkup) {
    let asked = now_us();
    let Ok(page) = engine.service.get_json("/debug/kv/events?after=latest", PATIENCE).await else {
        return checkup.skip("clock", &engine.name, "no event log, so its time is unknown");
    };
    engine.events = true;
    engine.role = engine.role.take().or_else(|| page["engine"]["role"].as_str().map(str::to_owned));
    let Some(now) = page["now_us"].as_u64() else { return };
    let ahead = EngineEvents::ahead(now, asked, now_us()) as f64 / 1e3;
    if ahead.abs() > CLOCKS_MS {
        let message =
            format!("{ahead:+.0} ms from this machine: nothing fails, but times in logs do not match");
        checkup.warn(Warning::Clock, &engine.name, message);
    } else {
        let message = if ahead == 0.0 {
            "equals this machine's".to_owned()
        } else {
            format!("{ahead:+.1} ms from this machine's")
        };
        checkup.ok("clock", &engine.name, message);
    }
}

/// Whether the engines match.
fn check_compatibility(inventory: &Inventory, checkup: &mut Checkup) {
    let up: Vec<&EngineInfo> = inventory.engines.iter().filter(|engine| engine.up).collect();
    let versions: BTreeSet<&str> = up.iter().filter_map(|engine| engine.version.as_deref()).collect();
    match versions.len() {
        0 => {}
        1 => checkup.ok("versions", "", versions.first().copied().unwrap_or_default()),
        _ => checkup.warn(
            Warning::Versions,
            "",
            format!("differ: {}", versions.into_iter().collect::<Vec<_>>().join(", ")),
        ),
    }
    for engine in up.iter().filter(|engine| !engine.models.is_empty()) {
        for EnginePool { model, leg } in
            engine.pools.iter().filter(|pool| !engine.models.contains(&pool.model))
        {
            let served = engine.models.iter().cloned().collect::<Vec<_>>().join(", ");
            let message = format!("is in the {leg} pool of `{model}`, but serves {served}");
            checkup.fail("models", &engine.name, message);
        }
    }
    let models: BTreeSet<&str> =
        up.iter().flat_map(|engine| &engine.pools).map(|pool| pool.model.as_str()).collect();
    for model in models {
        let of = |leg: &str| -> Vec<&EngineInfo> {
            let is_in = |engine: &&&EngineInfo| {
                engine.pools.iter().any(|pool| pool.model == model && pool.leg == leg)
            };
            up.iter().filter(is_in).copied().collect()
        };
        pairs(model, &of("prefill"), &of("decode"), checkup);
    }
    let (prefill, decode) = (by_role(&up, "prefill"), by_role(&up, "decode"));
    if up.iter().all(|engine| engine.pools.is_empty()) && !prefill.is_empty() && !decode.is_empty() {
        pairs("", &prefill, &decode, checkup);
    }
}

fn by_role<'a>(engines: &[&'a EngineInfo], role: &str) -> Vec<&'a EngineInfo> {
    engines.iter().filter(|engine| engine.role.as_deref() == Some(role)).copied().collect()
}

/// Decode engines must be able to read the blocks of prefill engines.
fn pairs(model: &str, prefill: &[&EngineInfo], decode: &[&EngineInfo], checkup: &mut Checkup) {
    let before = checkup.findings();
    let (mut compared, mut sizes) = (0, BTreeSet::new());
    for p in prefill {
        for d in decode {
            let pair = || format!("{} and {}", p.name, d.name);
            if let (Some(one), Some(other)) = (&p.layout, &d.layout) {
                compared += 1;
                if one != other {
                    let message = format!("{} have different models or layouts ({one}, {other})", pair());
                    checkup.fail("layout", model, message);
                }
            }
            if let (Some(one @ 1..), Some(other @ 1..)) = (p.block_size, d.block_size) {
                compared += 1;
                sizes.extend([one, other]);
                if one % other != 0 && other % one != 0 {
                    let message = format!(
                        "{} have blocks of {one} and {other} tokens: one must be a multiple of the other",
                        pair()
                    );
                    checkup.fail("layout", model, message);
                }
            }
        }
    }
    if compared > 0 && checkup.findings() == before {
        let sizes = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(" and ");
        checkup.ok("layout", model, format!("prefill and decode engines match; blocks of {sizes} tokens"));
    }
}

/// Blocks that are stranded now, and leases that ended by expiry.
async fn check_stranded(admin: &ServiceClient, checkup: &mut Checkup) {
    let name = admin.authority();
    let first = admin.get_json("/debug/kv", ROUTER_PATIENCE).await;
    let page = match first {
        Ok(page) if page["stranded_leases"].as_u64() == Some(0) => page,
        Ok(_) => {
            tokio::time::sleep(LOOK_AGAIN).await;
            match admin.get_json("/debug/kv", ROUTER_PATIENCE).await {
                Ok(page) => page,
                Err(error) => return checkup.fail("stranded", name, error.to_string()),
            }
        }
        Err(error) if error.status().is_some_and(|status| status.as_u16() == 404) => {
            return checkup.skip("stranded", name, "no /debug/kv: an older router");
        }
        Err(error) if error.status().is_none() => {
            return checkup.skip("stranded", name, "the admin listener does not respond");
        }
        Err(error) => return checkup.fail("stranded", name, error.to_string()),
    };
    for engine in page["engines"].as_array().into_iter().flatten() {
        let of = engine["engine"].as_str().unwrap_or("?");
        if let Some(error) = engine["error"].as_str() {
            checkup.fail("router's view", of, error);
        }
        if let Some(expired @ 1..) = engine["releases"]["lease_expired"].as_u64() {
            let message =
                format!("{expired} leases ended by expiry since its start: neither fetched nor released");
            checkup.warn(Warning::Expiries, of, message);
        }
    }
    match (page["stranded_leases"].as_u64(), page["stranded_blocks"].as_u64()) {
        (Some(0), _) => checkup.ok("stranded", name, "no stranded blocks"),
        (Some(leases), Some(blocks)) => {
            let oldest =
                page["leases"].as_array().into_iter().flatten().find(|lease| lease["stranded"] == true);
            let why = oldest.and_then(|lease| lease["why"].as_str()).unwrap_or_default();
            let message = format!("{blocks} stranded blocks of {leases} leases; the oldest: {why}");
            checkup.fail("stranded", name, message);
        }
        _ => checkup.skip("stranded", name, "unknown: not every engine or router responds"),
    }
}

#[cfg(test)]
mod tests;
