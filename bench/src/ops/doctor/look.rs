//! Who answers, what they are, and whether they fit together.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_router::snapshot::EngineEvents;
use serde_json::Value;

use super::checkup::{Checkup, Warning};
use super::epochs::Run;
use crate::common::http_client::{Origin, Samples, WebError};
use crate::ops::top::source::now_us;

/// Whoever is asked answers within this time, or is taken not to.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// A router asks its engines for up to four seconds.
pub(super) const ROUTER_PATIENCE: Duration = Duration::from_secs(8);
/// Clocks that differ by more make times of different machines hard to compare.
const CLOCKS_MS: f64 = 100.0;
/// Between two looks at leases that seem stranded.
const LOOK_AGAIN: Duration = Duration::from_millis(1_500);

/// Who is asked.
pub(super) struct Site {
    pub(super) endpoint: Option<Origin>,
    pub(super) url: String,
    pub(super) admins: Vec<Origin>,
    pub(super) engines: Vec<Origin>,
    pub(super) secret: Option<PathBuf>,
    pub(super) model: Option<String>,
}

/// What is known after the look.
#[derive(Default)]
pub(super) struct Seen {
    /// The endpoint answers, as far as is known: requests can be tried.
    pub(super) answers: bool,
    pub(super) engines: Vec<Engine>,
    pub(super) model: Option<String>,
    /// The routers' configurations.
    pub(super) configs: Vec<Value>,
}

/// One engine.
pub(super) struct Engine {
    pub(super) origin: Origin,
    pub(super) name: String,
    /// It answers, and lets us in.
    pub(super) up: bool,
    /// `prefill`, `decode`, `both`, or nothing of a stock engine.
    pub(super) role: Option<String>,
    pub(super) version: Option<String>,
    /// What changes when it is started anew.
    pub(super) run: Option<Run>,
    pub(super) models: BTreeSet<String>,
    pub(super) layout: Option<String>,
    pub(super) block_size: Option<u64>,
    /// It keeps a log of events.
    pub(super) events: bool,
    /// The routers' pools that it is in: model and leg.
    pub(super) pools: BTreeSet<(String, String)>,
}

impl Engine {
    /// One of which nothing is known yet.
    pub(super) fn at(origin: Origin) -> Self {
        Self {
            name: origin.authority().to_owned(),
            origin,
            up: false,
            role: None,
            version: None,
            run: None,
            models: BTreeSet::new(),
            layout: None,
            block_size: None,
            events: false,
            pools: BTreeSet::new(),
        }
    }
}

/// Asks everybody, and writes down what is found.
pub(super) async fn look(site: &Site, checkup: &mut Checkup) -> Seen {
    let mut seen = Seen::default();
    endpoint(site, &mut seen, checkup).await;
    let mut engines = Pools::new();
    for origin in &site.engines {
        engines.insert(origin.authority().to_owned(), (Some(origin.clone()), BTreeSet::new()));
    }
    for admin in &site.admins {
        router(admin, &mut engines, &mut seen, checkup).await;
    }
    if site.admins.is_empty() {
        checkup.skip("admin", "", "no admin listener is known: add --admin to check the router");
    }
    for (name, (origin, pools)) in engines {
        let origin = origin.map_or_else(
            || Origin::parse(&name).and_then(|origin| origin.with_secret_file(site.secret.as_deref())),
            Ok,
        );
        match origin {
            Ok(origin) => seen.engines.push(engine(origin, pools, checkup).await),
            Err(WebError::Url(url)) => {
                checkup.skip("engine", &name, format!("{url} is not an address that can be checked"))
            }
            Err(error) => checkup.fail("engine", &name, error.to_string()),
        }
    }
    if seen.engines.is_empty() {
        checkup.skip("engines", "", "no engine is known: add --admin or --engine");
    }
    together(&seen, checkup);
    for admin in &site.admins {
        held(admin, checkup).await;
    }
    if seen.model.is_none() {
        seen.model =
            site.model.clone().or_else(|| seen.engines.iter().find_map(|e| e.models.first().cloned()));
    }
    seen
}

/// Where clients come in.
async fn endpoint(site: &Site, seen: &mut Seen, checkup: &mut Checkup) {
    let Some(endpoint) = &site.endpoint else {
        checkup.skip("endpoint", &site.url, "TLS, or a path in the URL: checked by requests only");
        (seen.answers, seen.model) = (true, site.model.clone());
        checkup.saw();
        return;
    };
    match endpoint.get("/health", PATIENCE).await {
        Ok(_) => {
            checkup.saw();
            seen.answers = true;
            checkup.ok("endpoint", endpoint.authority(), "responds to /health");
        }
        Err(error @ WebError::Refused(..)) => {
            checkup.saw();
            seen.answers = true;
            checkup.fail("endpoint", endpoint.authority(), format!("is not healthy: {error}"));
        }
        Err(error) => return checkup.dead_endpoint(endpoint.authority(), &error),
    }
    // Not every gateway has one.
    match endpoint.get("/ready", PATIENCE).await {
        Ok(_) => checkup.ok("ready", endpoint.authority(), "accepts requests"),
        Err(error) if error.status().is_some_and(|status| status.is_server_error()) => {
            checkup.fail("ready", endpoint.authority(), format!("refuses requests: {error}"));
        }
        Err(_) => {}
    }
    // Where clients need a key, models are asked of the engines.
    if let Ok(models) = endpoint.get_json("/v1/models", PATIENCE).await {
        seen.model = models["data"][0]["id"].as_str().map(str::to_owned);
    }
}

/// Engines by name: how they are asked, where that was said, and the pools that they are in.
type Pools = BTreeMap<String, (Option<Origin>, BTreeSet<(String, String)>)>;

/// A router's admin listener: its configuration, its engines, its descriptors.
async fn router(admin: &Origin, engines: &mut Pools, seen: &mut Seen, checkup: &mut Checkup) {
    let name = admin.authority();
    let config = match admin.get_json("/config", PATIENCE).await {
        Ok(config) => config,
        Err(error) if error.status().is_some_and(|status| status.as_u16() == 401) => {
            checkup.saw();
            return checkup.fail("admin", name, "requires a token: add --admin-token-file");
        }
        Err(error) => return checkup.fail("admin", name, error.to_string()),
    };
    checkup.saw();
    checkup.ok("admin", name, format!("configuration {} is in effect", config["generation"]));
    if config["reloads"]["last"]["result"].as_str() == Some("rejected") {
        checkup.warn(
            Warning::Reload,
            name,
            "the last configuration read was rejected; the previous one is in effect (see /config)",
        );
    }
    let config = config["config"].clone();
    exposure(admin, &config, checkup).await;
    match admin.get_json("/engines", PATIENCE).await {
        Ok(told) => {
            for engine in told["engines"].as_array().into_iter().flatten() {
                known_engine(engine, engines, checkup);
            }
        }
        Err(error) => checkup.fail("admin", name, error.to_string()),
    }
    match admin.samples(PATIENCE).await {
        Ok(samples) => descriptors(name, &samples, &config, checkup),
        Err(error) => checkup.fail("admin", name, error.to_string()),
    }
    seen.configs.push(config);
}

fn known_engine(told: &Value, engines: &mut Pools, checkup: &mut Checkup) {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let name = text(&told["engine"]);
    let pools = told["pools"].as_array().into_iter().flatten();
    let pools = pools.map(|pool| (text(&pool["model"]), text(&pool["leg"])));
    let (origin, known) = engines.entry(name.clone()).or_default();
    known.extend(pools);
    if origin.is_none() && told["url"].as_str().is_some_and(|url| url.starts_with("https://")) {
        checkup.skip("engine", &name, "uses TLS: checked through the router only");
    }
    for (leg, standing) in told["legs"].as_object().into_iter().flatten() {
        match standing["standing"].as_str() {
            Some("usable") | None => {}
            Some("draining") => checkup.warn(Warning::Standing, &name, format!("{leg}: draining")),
            Some(how) => {
                let reasons = told["reasons"].as_array().into_iter().flatten().map(text).collect::<Vec<_>>();
                checkup.fail(
                    "standing",
                    &name,
                    format!("{leg}: {how}, by the router: {}", reasons.join(", ")),
                );
            }
        }
    }
}

/// What a stranger could reach.
async fn exposure(admin: &Origin, config: &Value, checkup: &mut Checkup) {
    let beyond = |key: &Value| {
        key.as_str()
            .and_then(|address| address.parse::<std::net::SocketAddr>().ok())
            .filter(|a| !a.ip().is_loopback())
    };
    // Who must show a certificate that `client_ca` signed is no stranger.
    let certified = config["listen_tls"]["client_auth"] == "require";
    if let Some(listen) = beyond(&config["listen"])
        && config["auth"].is_null()
        && !certified
    {
        checkup.warn(
            Warning::Exposure,
            admin.authority(),
            format!("clients need neither key nor certificate, and {listen} is beyond loopback: set `auth` or `listen_tls`"),
        );
    }
    match beyond(&config["admin"]["listen"]) {
        None => checkup.ok("exposure", admin.authority(), "the admin listener is on loopback"),
        Some(listen) => {
            let stranger = Origin::parse(admin.authority());
            let open = match &stranger {
                Ok(stranger) => stranger.get("/config", PATIENCE).await.is_ok(),
                Err(_) => false,
            };
            if open {
                checkup.fail(
                    "exposure",
                    admin.authority(),
                    format!("{listen} requires no token: set `admin.token_file`"),
                );
            } else {
                checkup.ok(
                    "exposure",
                    admin.authority(),
                    "the admin listener requires a token or a certificate",
                );
            }
        }
    }
}

/// Whether the router can hold the connections that its configuration lets in: each may have one to an engine.
fn descriptors(name: &str, samples: &Samples, config: &Value, checkup: &mut Checkup) {
    let (Some(most), Some(open)) =
        (samples.sum("process_max_fds", &[]), samples.sum("process_open_fds", &[]))
    else {
        return checkup.skip("descriptors", name, "its limit of file descriptors is unknown");
    };
    let limit = |key: &str| config["limits"][key].as_f64().unwrap_or(0.0);
    let (connections, in_flight) = (limit("connections"), limit("in_flight"));
    // Either every client that may connect does, or every request that may be in flight has an engine's connection, too;
    // and there are files, listeners and monitors.
    let needed = connections.max(2.0 * in_flight) + 256.0;
    let told = format!("{open:.0} of {most:.0} file descriptors are open");
    if open > 0.8 * most {
        checkup.fail("descriptors", name, told);
    } else if most < needed {
        checkup.warn(
            Warning::Descriptors,
            name,
            format!(
                "{told}; limits.connections {connections:.0} and limits.in_flight {in_flight:.0} may need \
                 {needed:.0}: raise `ulimit -n` or lower them"
            ),
        );
    } else {
        checkup.ok("descriptors", name, told);
    }
}

/// One engine.
async fn engine(origin: Origin, pools: BTreeSet<(String, String)>, checkup: &mut Checkup) -> Engine {
    let mut engine = Engine { pools, ..Engine::at(origin) };
    let name = engine.name.clone();
    match engine.origin.get("/health", PATIENCE).await {
        Ok(_) => checkup.saw(),
        Err(error @ WebError::Refused(..)) => {
            checkup.saw();
            checkup.fail("engine", &name, format!("is not healthy: {error}"));
            return engine;
        }
        Err(_) if checkup.has_failed("endpoint", &name) => {
            checkup.skip("engine", &name, "is the endpoint, which does not respond");
            return engine;
        }
        Err(error) => {
            checkup.fail("engine", &name, error.to_string());
            return engine;
        }
    }
    let of = |value: &Value| value.as_str().map(str::to_owned);
    if let Ok(version) = engine.origin.get_json("/version", PATIENCE).await {
        engine.version = of(&version["version"]);
    }
    if let Ok(models) = engine.origin.get_json("/v1/models", PATIENCE).await {
        let listed = models["data"].as_array().into_iter().flatten();
        engine.models = listed.filter_map(|model| of(&model["id"])).collect();
    }
    if let Ok(samples) = engine.origin.samples(PATIENCE).await {
        let sizes = samples
            .of("vllm:cache_config_info")
            .filter_map(|(labels, _)| labels.get("block_size")?.parse().ok());
        engine.block_size = sizes.last();
    }
    match engine.origin.get_json("/debug/kv", PATIENCE).await {
        Ok(books) => {
            engine.up = true;
            engine.role = of(&books["engine"]["role"]);
            engine.run = Run::told(&books);
            if let Some(why) = of(&books["failed"]) {
                checkup.fail("engine", &name, format!("its device has failed: {why}"));
            }
        }
        Err(error) => match error.status().map(|status| status.as_u16()) {
            Some(401 | 403) => {
                checkup.fail(
                    "secret",
                    &name,
                    "refuses the cluster secret: --cluster-secret-file must contain the engine's",
                );
                return engine;
            }
            Some(400..500) => engine.up = true,
            _ => {
                checkup.fail("engine", &name, error.to_string());
                return engine;
            }
        },
    }
    clock(&mut engine, checkup).await;
    if engine.run.is_none() {
        // What it cannot say is a line of its own, at the end.
        engine.run = Run::of(&engine.origin).await.ok().flatten();
    }
    let role = engine.role.as_deref().unwrap_or("stock");
    let epoch = match &engine.run {
        Some(epoch @ Run::Epoch(_)) => format!(", {epoch}"),
        Some(Run::Started(_)) | None => String::new(),
    };
    let version = engine.version.as_deref().unwrap_or("?");
    checkup.ok("engine", &name, format!("{role}, version {version}{epoch}"));
    if engine.role.is_some() {
        // Nothing is after the last hash: only the layout is told.
        let digests = format!("/debug/kv/digests?after={}", "f".repeat(64));
        let digests = engine.origin.get_json(&digests, PATIENCE).await;
        engine.layout = digests.ok().and_then(|digests| of(&digests["layout"]));
        stranger(&engine, checkup).await;
    }
    engine
}

/// Whether an engine beyond loopback lets in whoever asks.
async fn stranger(engine: &Engine, checkup: &mut Checkup) {
    let host = engine.name.rsplit_once(':').map_or(engine.name.as_str(), |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
        return;
    }
    let open = match Origin::parse(&engine.name) {
        Ok(stranger) => stranger.get("/debug/kv", PATIENCE).await.is_ok(),
        Err(_) => false,
    };
    if open {
        checkup.fail(
            "exposure",
            &engine.name,
            "any client can release its blocks: start it with --cluster-secret-file",
        );
    } else {
        checkup.ok("exposure", &engine.name, "requires the cluster secret");
    }
}

async fn clock(engine: &mut Engine, checkup: &mut Checkup) {
    let asked = now_us();
    let Ok(page) = engine.origin.get_json("/debug/kv/events?after=latest", PATIENCE).await else {
        return checkup.skip("clock", &engine.name, "no event log, so its time is unknown");
    };
    engine.events = true;
    engine.role = engine.role.take().or_else(|| page["engine"]["role"].as_str().map(str::to_owned));
    let Some(now) = page["now_us"].as_u64() else { return };
    let ahead = EngineEvents::ahead(now, asked, now_us()) as f64 / 1e3;
    if ahead.abs() > CLOCKS_MS {
        checkup.warn(
            Warning::Clock,
            &engine.name,
            format!("{ahead:+.0} ms from this machine: nothing fails, but times in logs do not match"),
        );
    } else {
        checkup.ok(
            "clock",
            &engine.name,
            if ahead == 0.0 {
                "equals this machine's".to_owned()
            } else {
                format!("{ahead:+.1} ms from this machine's")
            },
        );
    }
}

/// Whether the engines fit together.
fn together(seen: &Seen, checkup: &mut Checkup) {
    let up: Vec<&Engine> = seen.engines.iter().filter(|engine| engine.up).collect();
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
        for (model, leg) in engine.pools.iter().filter(|(model, _)| !engine.models.contains(model)) {
            let served = engine.models.iter().cloned().collect::<Vec<_>>().join(", ");
            checkup.fail(
                "models",
                &engine.name,
                format!("is in the {leg} pool of `{model}`, but serves {served}"),
            );
        }
    }
    let models: BTreeSet<&str> =
        up.iter().flat_map(|engine| &engine.pools).map(|(model, _)| model.as_str()).collect();
    for model in models {
        let of = |leg: &str| -> Vec<&Engine> {
            let is_in =
                |engine: &&&Engine| engine.pools.iter().any(|(name, its)| name == model && its == leg);
            up.iter().filter(is_in).copied().collect()
        };
        pairs(model, &of("prefill"), &of("decode"), checkup);
    }
    let (prefill, decode) = (by_role(&up, "prefill"), by_role(&up, "decode"));
    if up.iter().all(|engine| engine.pools.is_empty()) && !prefill.is_empty() && !decode.is_empty() {
        pairs("", &prefill, &decode, checkup);
    }
}

fn by_role<'a>(engines: &[&'a Engine], role: &str) -> Vec<&'a Engine> {
    engines.iter().filter(|engine| engine.role.as_deref() == Some(role)).copied().collect()
}

/// What prefill engines lend must be what decode engines can read.
fn pairs(model: &str, prefill: &[&Engine], decode: &[&Engine], checkup: &mut Checkup) {
    let before = checkup.findings();
    let (mut compared, mut sizes) = (0, BTreeSet::new());
    for p in prefill {
        for d in decode {
            let pair = || format!("{} and {}", p.name, d.name);
            if let (Some(one), Some(other)) = (&p.layout, &d.layout) {
                compared += 1;
                if one != other {
                    checkup.fail(
                        "layout",
                        model,
                        format!("{} have different models or layouts ({one}, {other})", pair()),
                    );
                }
            }
            if let (Some(one @ 1..), Some(other @ 1..)) = (p.block_size, d.block_size) {
                compared += 1;
                sizes.extend([one, other]);
                if one % other != 0 && other % one != 0 {
                    let told = format!(
                        "{} have blocks of {one} and {other} tokens: one must be a multiple of the other",
                        pair()
                    );
                    checkup.fail("layout", model, told);
                }
            }
        }
    }
    if compared > 0 && checkup.findings() == before {
        let sizes = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(" and ");
        checkup.ok("layout", model, format!("prefill and decode engines match; blocks of {sizes} tokens"));
    }
}

/// What is held for nobody now, and has been lost before.
async fn held(admin: &Origin, checkup: &mut Checkup) {
    let name = admin.authority();
    let first = admin.get_json("/debug/kv", ROUTER_PATIENCE).await;
    let books = match first {
        Ok(books) if books["stranded_leases"].as_u64() == Some(0) => books,
        Ok(_) => {
            tokio::time::sleep(LOOK_AGAIN).await;
            match admin.get_json("/debug/kv", ROUTER_PATIENCE).await {
                Ok(books) => books,
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
    for engine in books["engines"].as_array().into_iter().flatten() {
        let of = engine["engine"].as_str().unwrap_or("?");
        if let Some(error) = engine["error"].as_str() {
            checkup.fail("router's view", of, error);
        }
        if let Some(expired @ 1..) = engine["releases"]["lease_expired"].as_u64() {
            checkup.warn(
                Warning::Expiries,
                of,
                format!("{expired} leases ended by expiry since its start: neither fetched nor released"),
            );
        }
    }
    match (books["stranded_leases"].as_u64(), books["stranded_blocks"].as_u64()) {
        (Some(0), _) => checkup.ok("stranded", name, "no stranded blocks"),
        (Some(leases), Some(blocks)) => {
            let oldest =
                books["leases"].as_array().into_iter().flatten().find(|lease| lease["stranded"] == true);
            let why = oldest.and_then(|lease| lease["why"].as_str()).unwrap_or_default();
            checkup.fail(
                "stranded",
                name,
                format!("{blocks} stranded blocks of {leases} leases; the oldest: {why}"),
            );
        }
        _ => checkup.skip("stranded", name, "unknown: not every engine or router responds"),
    }
}
