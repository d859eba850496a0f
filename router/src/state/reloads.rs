//! What became of configurations that were read again, for `GET /config` and the metrics.

use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde_json::{Value, json};

use crate::config::RouterConfig;

/// Keys that take effect at a restart only, and where they stand.
const AT_A_RESTART: [(&str, &str); 5] = [
    ("listen", "/listen"),
    ("listen_tls", "/listen_tls"),
    ("admin.listen", "/admin/listen"),
    ("admin.tls", "/admin/tls"),
    ("limits.connections", "/limits/connections"),
];

/// What became of configurations that were read again.
pub(crate) struct Reloads {
    /// What the router started with.
    booted: Value,
    last: Mutex<Option<Last>>,
}

struct Last {
    at: SystemTime,
    error: Option<String>,
    restart: Vec<&'static str>,
}

impl Reloads {
    pub(crate) fn new(booted: &RouterConfig) -> Self {
        Self { booted: booted.value(), last: Mutex::default() }
    }

    /// Keys that differ from what the router started with and that it cannot change while it runs.
    pub(crate) fn restart(&self, next: &RouterConfig) -> Vec<&'static str> {
        let next = next.value();
        AT_A_RESTART
            .iter()
            .filter(|(_, path)| self.booted.pointer(path) != next.pointer(path))
            .map(|(key, _)| *key)
            .collect()
    }

    pub(crate) fn note(&self, error: Option<String>, restart: Vec<&'static str>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // What a rejected configuration would need does not matter; what the accepted one needs still does.
        let restart = match (&error, last.take()) {
            (Some(_), Some(before)) => before.restart,
            _ => restart,
        };
        *last = Some(Last { at: SystemTime::now(), error, restart });
    }

    /// The last one, for people.
    pub(crate) fn report(&self) -> Value {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = last.as_ref() else { return json!({"last": null, "needs_restart": []}) };
        let at = last.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let result = if last.error.is_some() { "rejected" } else { "accepted" };
        json!({
            "last": {"result": result, "unix_seconds": at, "error": last.error},
            "needs_restart": last.restart,
        })
    }
}
