//! Sources of snapshots: routers' admin listeners, and engines that are queried directly.
//!
//! A router's `/debug/kv` is a whole snapshot. A direct query of an engine is parsed by the router's code, so that
//! both agree.

use std::path::Path;
use std::time::{Duration, SystemTime};

use baton_router::snapshot::{
    EngineEvents, EngineView, RouterView, Snapshot, SnapshotSource, Timeline, concerns,
};
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};

use crate::common::http_client::{ServiceClient, WebError};

/// A router queries its engines for up to four seconds.
const ROUTER_PATIENCE: Duration = Duration::from_secs(6);
const ENGINE_PATIENCE: Duration = Duration::from_secs(2);
/// Events per page of an engine's log, and maximum pages: the whole ring.
const EVENTS_OF_A_PAGE: u64 = 2_000;
const PAGES_MAX: usize = 34;

/// The routers and engines to query.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    pub(crate) admins: Vec<ServiceClient>,
    pub(crate) engines: Vec<ServiceClient>,
}

impl Sources {
    /// # Errors
    /// If an address or a file cannot be used.
    pub(crate) fn new(
        admins: &[String],
        engines: &[String],
        token: Option<&Path>,
        secret: Option<&Path>,
    ) -> Result<Self, WebError> {
        let admins = admins.iter().map(|url| ServiceClient::parse(url)?.with_token_file(token));
        let engines = engines.iter().map(|url| ServiceClient::engine(url)?.with_secret_file(secret));
        Ok(Self { admins: admins.collect::<Result<_, _>>()?, engines: engines.collect::<Result<_, _>>()? })
    }

    /// Queries all sources at once. A source that does not respond is included with its error.
    pub(crate) async fn snapshot(&self) -> Snapshot {
        let (mut views, engines) =
            tokio::join!(join_all(self.admins.iter().map(router)), join_all(self.engines.iter().map(engine)));
        views.push(Snapshot { at_us: now_us(), ..Snapshot::default() });
        views.extend(engines);
        super::merge::merge(views)
    }

    /// One request from its arrival to the release of its last block.
    ///
    /// # Errors
    /// Why there is no timeline.
    pub(crate) async fn timeline(&self, id: &str) -> Result<Timeline, String> {
        let path = &format!("/debug/kv/requests/{}", escaped(id));
        let ask = async |admin: &ServiceClient| match admin.get_json(path, ROUTER_PATIENCE).await {
            Ok(value) => match serde_json::from_value::<Timeline>(value) {
                Ok(line) => Ok(Some(line)),
                Err(error) => Err(format!("router {}: {error}", admin.authority())),
            },
            Err(error) if error.status().is_some_and(|status| status.as_u16() == 404) => Ok(None),
            Err(error) => Err(error.to_string()),
        };
        // A router that does not know the request returns the engines' events about it. The router that had the
        // request also returns its own steps.
        let mut queries: FuturesUnordered<_> = self.admins.iter().map(ask).collect();
        let (mut best, mut errors) = (None::<Timeline>, Vec::new());
        while let Some(result) = queries.next().await {
            match result {
                Ok(Some(line)) if line.has_router_steps() => return Ok(line),
                Ok(Some(line))
                    if best.as_ref().is_none_or(|best| best.moments.len() < line.moments.len()) =>
                {
                    best = Some(line);
                }
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        if let Some(mut line) = best {
            // A router that did not respond may have the steps.
            line.notes.append(&mut errors);
            return Ok(line);
        }
        if errors.is_empty() && !self.admins.is_empty() {
            errors.push("no known router has this request".to_owned());
        }
        let why = errors.join("; ");
        if self.engines.is_empty() {
            return Err(why);
        }
        let events = join_all(self.engines.iter().map(|engine| events_of(engine, id))).await;
        let line = Timeline::join(id, None, &events);
        if line.moments.is_empty() {
            return Err(format!("{why}; no engine logged it").trim_start_matches("; ").to_owned());
        }
        Ok(line)
    }
}

/// Escapes bytes that a path must not contain.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    id.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

async fn router(admin: &ServiceClient) -> Snapshot {
    let response = admin.get_json("/debug/kv", ROUTER_PATIENCE).await;
    let response = response.map_err(|error| match error.status() {
        Some(status) if status.as_u16() == 404 => "no /debug/kv: an older router, or none".to_owned(),
        _ => error.to_string(),
    });
    let response =
        response.and_then(|value| serde_json::from_value(value).map_err(|error| error.to_string()));
    let mut view: Snapshot = response.unwrap_or_else(|error| Snapshot {
        routers: vec![RouterView { error: Some(error), ..RouterView::default() }],
        ..Snapshot::default()
    });
    for router in &mut view.routers {
        admin.authority().clone_into(&mut router.admin);
    }
    view
}

async fn engine(service: &ServiceClient) -> Snapshot {
    let mut view = EngineView { engine: service.authority().to_owned(), ..EngineView::default() };
    let mut leases = Vec::new();
    let debug_kv = async {
        let debug_kv = service.get_json("/debug/kv", ENGINE_PATIENCE).await;
        (debug_kv, now_us())
    };
    let (debug_kv, metrics) = tokio::join!(debug_kv, service.get("/metrics", ENGINE_PATIENCE));
    let (debug_kv, at_us) = debug_kv;
    view.at_us = at_us;
    match debug_kv {
        Ok(page) if view.read_debug_kv(&page, &mut leases) => {}
        Ok(_) => view.error = Some("its /debug/kv is not that of a Baton engine".to_owned()),
        Err(error) => match error.status().map(|status| status.as_u16()) {
            Some(401 | 403) => view.error = Some("it refuses the cluster secret".to_owned()),
            // A stock engine has no such page.
            Some(400..500) => {}
            _ => view.error = Some(error.to_string()),
        },
    }
    if let Ok(text) = metrics {
        view.read_metrics(&String::from_utf8_lossy(&text));
    }
    if view.source == SnapshotSource::None && view.error.is_none() {
        view.error = Some("it has neither /debug/kv nor metrics".to_owned());
    }
    Snapshot { at_us, engines: vec![view], leases, ..Snapshot::default() }
}

/// Every event of a request that is still in the engine's log.
async fn events_of(service: &ServiceClient, id: &str) -> EngineEvents {
    let mut found = EngineEvents { engine: service.authority().to_owned(), ..EngineEvents::default() };
    let mut after = 0;
    for _ in 0..PAGES_MAX {
        let path = format!("/debug/kv/events?after={after}&wait_ms=0&limit={EVENTS_OF_A_PAGE}");
        let asked_us = now_us();
        let page = match service.get_json(&path, ENGINE_PATIENCE).await {
            Ok(page) => page,
            Err(error) => {
                found.error = Some(error.to_string());
                break;
            }
        };
        let now = page["now_us"].as_u64().unwrap_or(asked_us);
        found.ahead_us = EngineEvents::ahead(now, asked_us, now_us());
        let events = page["events"].as_array().map_or(&[][..], Vec::as_slice);
        found.events.extend(events.iter().filter(|event| concerns(event, id)).cloned());
        let Some(next) = page["next"].as_u64().filter(|next| *next > after && !events.is_empty()) else {
            break;
        };
        after = next;
    }
    found
}

/// Now, in microseconds since the Unix epoch.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
