//! Certificates and handshakes.

use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::registry::{Counter, Gauge, Registry, families};

families! {
    gauge EXPIRY("baton_router_certificate_expiry_seconds", ["use"]):
        "Seconds until the router's certificate for `clients`, `admin`, `picker` or `engines` expires. Negative: it has \
         expired.";
    counter RELOADS("baton_router_certificate_reloads_total", ["use", "result"]):
        "Reloads of changed certificate files. After `failed` the old ones stay in effect.";
    counter HANDSHAKES("baton_router_tls_handshakes_total", ["use", "result"]):
        "TLS handshakes with clients and monitors.";
}

/// The result of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeResult {
    Done,
    Failed,
    TimedOut,
}

/// Handles of one listener.
pub(crate) struct ListenerTlsMetrics {
    pub files: EngineTlsMetrics,
    handshakes: [Counter; 3],
}

/// Handles of a set of files.
pub(crate) struct EngineTlsMetrics {
    registry: Arc<Registry>,
    purpose: &'static str,
    /// Created with the first certificate whose expiry is known.
    expiry: Mutex<Option<Gauge>>,
    reloads: [Counter; 2],
}

impl ListenerTlsMetrics {
    pub(super) fn new(registry: &Arc<Registry>, purpose: &'static str) -> Self {
        let results = ["ok", "failed", "timeout"];
        Self {
            files: EngineTlsMetrics::new(registry, purpose),
            handshakes: results.map(|result| registry.counter(&HANDSHAKES, &[purpose, result])),
        }
    }

    pub(crate) fn count_handshake(&self, result: HandshakeResult) {
        self.handshakes[result as usize].increment(1);
    }
}

impl EngineTlsMetrics {
    pub(super) fn new(registry: &Arc<Registry>, purpose: &'static str) -> Self {
        Self {
            registry: Arc::clone(registry),
            purpose,
            expiry: Mutex::default(),
            reloads: ["ok", "failed"].map(|result| registry.counter(&RELOADS, &[purpose, result])),
        }
    }

    pub(crate) fn count_reload(&self, fine: bool) {
        self.reloads[usize::from(!fine)].increment(1);
    }

    /// Sets the certificate's expiry, in seconds since 1970; `None`: there is no certificate.
    pub(crate) fn set_expiry(&self, at_s: Option<u64>) {
        let mut expiry = self.expiry.lock().unwrap_or_else(PoisonError::into_inner);
        *expiry = at_s.map(|at_s| {
            let gauge = expiry.take().unwrap_or_else(|| self.registry.gauge(&EXPIRY, &[self.purpose]));
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            gauge.set(at_s as f64 - now);
            gauge
        });
    }
}
