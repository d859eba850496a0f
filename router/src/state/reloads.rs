//! The results of reloads, for `GET /config` and the metrics.

use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde_json::{Value, json};

use crate::config::RouterConfig;

/// Keys that take effect only at a restart, and their JSON pointers.
const AT_A_RESTART: [(&str, &str); 9] = [
    ("listen", "/listen"),
    ("http2", "/http2"),
    ("listen_tls", "/listen_tls"),
    ("admin.listen", "/admin/listen"),
    ("admin.tls", "/admin/tls"),
    ("limits.connections", "/limits/connections"),
    ("picker.listen", "/picker/listen"),
    ("picker.health_listen", "/picker/health_listen"),
    ("picker.tls", "/picker/tls"),
];

/// The results of reloads.
pub(crate) struct ReloadStatus {
    /// The configuration at the router's start.
    booted: Value,
    last: Mutex<Option<LastReload>>,
}

struct LastReload {
    at: SystemTime,
    error: Option<String>,
    restart: Vec<&'static str>,
}

impl ReloadStatus {
    pub(crate) fn new(booted: &RouterConfig) -> Self {
        Self { booted: booted.value(), last: Mutex::default() }
    }

    /// Keys that differ from the configuration at the start and require a restart.
    pub(crate) fn restart(&self, next: &RouterConfig) -> Vec<&'static str> {
        let next = next.value();
        AT_A_RESTART
            .iter()
            .filter(|(_, path)| self.booted.pointer(path) != next.pointer(path))
            .map(|(key, _)| *key)
            .collect()
    }

    pub(crate) fn record(&self, error: Option<String>, restart: Vec<&'static str>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // The keys of a rejected configuration do not matter; those of the accepted one still do.
        let restart = match (&error, last.take()) {
            (Some(_), Some(before)) => before.restart,
            _ => restart,
        };
        *last = Some(LastReload { at: SystemTime::now(), error, restart });
    }

    /// The last reload, for the admin API.
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
