//! Where the numbers come from: routers' admin listeners, and engines that are asked directly.
//!
//! A router's `/debug/kv` is a whole snapshot already. An engine that is asked directly is read as a router reads it, so
//! that there is one truth.

use std::path::Path;
use std::time::{Duration, SystemTime};

use baton_router::snapshot::{EngineEvents, EngineView, RouterView, Snapshot, Source, Timeline, concerns};
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};

use crate::common::http_client::{Origin, WebError};

/// A router asks its engines for up to four seconds.
const ROUTER_PATIENCE: Duration = Duration::from_secs(6);
const ENGINE_PATIENCE: Duration = Duration::from_secs(2);
/// Events of one page of an engine's log, and pages that are read: the whole ring.
const EVENTS_OF_A_PAGE: u64 = 2_000;
const PAGES_MAX: usize = 34;

/// Whoever is asked.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    pub(crate) admins: Vec<Origin>,
    pub(crate) engines: Vec<Origin>,
}

impl Sources {
    /// # Errors
    /// When an address or a file cannot be used.
    pub(crate) fn new(
        admins: &[String],
        engines: &[String],
        token: Option<&Path>,
        secret: Option<&Path>,
    ) -> Result<Self, WebError> {
        let admins = admins.iter().map(|url| Origin::parse(url)?.with_token_file(token));
        let engines = engines.iter().map(|url| Origin::parse(url)?.with_secret_file(secret));
        Ok(Self { admins: admins.collect::<Result<_, _>>()?, engines: engines.collect::<Result<_, _>>()? })
    }

    /// Asks everybody at once. Who does not answer is in it as such.
    pub(crate) async fn snapshot(&self) -> Snapshot {
        let (mut views, engines) =
            tokio::join!(join_all(self.admins.iter().map(router)), join_all(self.engines.iter().map(engine)));
        views.push(Snapshot { at_us: now_us(), ..Snapshot::default() });
        views.extend(engines);
        Snapshot::merge(views)
    }

    /// One request from its arrival to the release of its last block.
    ///
    /// # Errors
    /// Why nobody can tell.
    pub(crate) async fn timeline(&self, id: &str) -> Result<Timeline, String> {
        let path = &format!("/debug/kv/requests/{}", escaped(id));
        let ask = async |admin: &Origin| match admin.get_json(path, ROUTER_PATIENCE).await {
            Ok(told) => match serde_json::from_value::<Timeline>(told) {
                Ok(line) => Ok(Some(line)),
                Err(error) => Err(format!("router {}: {error}", admin.authority())),
            },
            Err(error) if error.status().is_some_and(|status| status.as_u16() == 404) => Ok(None),
            Err(error) => Err(error.to_string()),
        };
        // A router that does not know the request tells what its engines logged of it: it is the one that had it who knows
        // how it went.
        let mut asked: FuturesUnordered<_> = self.admins.iter().map(ask).collect();
        let (mut best, mut errors) = (None::<Timeline>, Vec::new());
        while let Some(told) = asked.next().await {
            match told {
                Ok(Some(line)) if line.has_account() => return Ok(line),
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
            // Who was not heard may have the account.
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

/// Bytes that a path may not have, escaped.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    id.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

async fn router(admin: &Origin) -> Snapshot {
    let asked = admin.get_json("/debug/kv", ROUTER_PATIENCE).await;
    let told = asked.map_err(|error| match error.status() {
        Some(status) if status.as_u16() == 404 => "no /debug/kv: an older router, or none".to_owned(),
        _ => error.to_string(),
    });
    let told = told.and_then(|told| serde_json::from_value(told).map_err(|error| error.to_string()));
    let mut view: Snapshot = told.unwrap_or_else(|error| Snapshot {
        routers: vec![RouterView { error: Some(error), ..RouterView::default() }],
        ..Snapshot::default()
    });
    for router in &mut view.routers {
        admin.authority().clone_into(&mut router.admin);
    }
    view
}

async fn engine(origin: &Origin) -> Snapshot {
    let mut view = EngineView { engine: origin.authority().to_owned(), ..EngineView::default() };
    let mut leases = Vec::new();
    let books = async {
        let books = origin.get_json("/debug/kv", ENGINE_PATIENCE).await;
        (books, now_us())
    };
    let (books, metrics) = tokio::join!(books, origin.get("/metrics", ENGINE_PATIENCE));
    let (books, at_us) = books;
    view.at_us = at_us;
    match books {
        Ok(told) if view.read_books(&told, &mut leases) => {}
        Ok(_) => view.error = Some("its /debug/kv is not that of a Baton engine".to_owned()),
        Err(error) => match error.status().map(|status| status.as_u16()) {
            Some(401 | 403) => view.error = Some("it refuses the cluster secret".to_owned()),
            // A stock engine has no books.
            Some(400..500) => {}
            _ => view.error = Some(error.to_string()),
        },
    }
    if let Ok(text) = metrics {
        view.read_metrics(&String::from_utf8_lossy(&text));
    }
    if view.source == Source::None && view.error.is_none() {
        view.error = Some("it has neither /debug/kv nor metrics".to_owned());
    }
    Snapshot { at_us, engines: vec![view], leases, ..Snapshot::default() }
}

/// Every event of a request that the engine still has.
async fn events_of(origin: &Origin, id: &str) -> EngineEvents {
    let mut found = EngineEvents { engine: origin.authority().to_owned(), ..EngineEvents::default() };
    let mut after = 0;
    for _ in 0..PAGES_MAX {
        let path = format!("/debug/kv/events?after={after}&wait_ms=0&limit={EVENTS_OF_A_PAGE}");
        let asked_us = now_us();
        let page = match origin.get_json(&path, ENGINE_PATIENCE).await {
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
