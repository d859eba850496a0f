//! The observers of ended requests: the access log and the traces. They are part of a generation. A reload passes
//! unchanged ones to the next generation with their file, queue and connection.

use std::sync::Arc;
use std::time::Duration;

use crate::config::RouterConfig;
use crate::metrics::Metrics;
use crate::observe::access_log::AccessLog;
use crate::observe::finished_request::FinishedRequest;
use crate::observe::telemetry::{Telemetry, TelemetryError};

/// Limit on the wait for each observer at shutdown.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Why an observer cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ObserverError {
    /// The access log cannot be opened.
    #[error("access log {file}: {source}")]
    AccessLog {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// Traces cannot be sent.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
}

/// The observers of ended requests.
#[derive(Clone, Default)]
pub(crate) struct Observers {
    pub access_log: Option<Arc<AccessLog>>,
    pub telemetry: Option<Arc<Telemetry>>,
}

impl Observers {
    /// # Errors
    /// [`ObserverError`] contains the reason.
    pub(crate) fn build(
        config: &RouterConfig,
        previous: &Self,
        metrics: &Arc<Metrics>,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Self, ObserverError> {
        let wanted = &config.access_log;
        let access_log = match &previous.access_log {
            _ if !wanted.enabled => None,
            Some(old) if old.config == *wanted => Some(Arc::clone(old)),
            _ => Some(AccessLog::open(wanted.clone(), metrics).map_err(|source| {
                let file =
                    wanted.path.as_ref().map_or("(standard output)".to_owned(), |p| p.display().to_string());
                ObserverError::AccessLog { file, source }
            })?),
        };
        let telemetry = match (&config.telemetry.otlp, &previous.telemetry) {
            (None, _) => None,
            (Some(wanted), Some(old)) if old.config == *wanted => Some(Arc::clone(old)),
            (Some(wanted), _) => Some(Telemetry::start(wanted.clone(), metrics, runtime)?),
        };
        Ok(Self { access_log, telemetry })
    }

    /// The share of new traces that are recorded; `None` without telemetry.
    pub(crate) fn sample_ratio(&self) -> Option<f64> {
        self.telemetry.as_ref().map(|telemetry| telemetry.config.sample_ratio)
    }

    /// Whether there is an observer.
    pub(crate) fn has_any(&self) -> bool {
        self.access_log.is_some() || self.telemetry.is_some()
    }

    /// Notifies the observers of an ended request.
    pub(crate) fn notify(&self, finished: FinishedRequest) {
        let finished = Arc::new(finished);
        if let Some(log) = &self.access_log {
            log.log(&finished);
        }
        if let Some(telemetry) = self.telemetry.as_ref().filter(|_| finished.trace.is_recorded()) {
            telemetry.send(&finished);
        }
    }

    /// Waits until the observers have processed all requests so far, for a limited time.
    pub(crate) async fn flush(&self) {
        if let Some(log) = &self.access_log {
            log.flush(FLUSH_WITHIN).await;
        }
        if let Some(telemetry) = &self.telemetry {
            telemetry.flush(FLUSH_WITHIN).await;
        }
    }
}
