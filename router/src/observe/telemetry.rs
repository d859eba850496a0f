//! Traces for a collector: one trace per request, built from spans when the request ends.
//!
//! ```text
//! request ends ── try_send, never waits ──▶ [queue] ──▶ task: spans, batches ──▶ OTLP over HTTP, JSON
//!                    └ full: dropped, counted                └ fails twice: dropped, counted
//! ```
//!
//! While a request runs, only its trace context exists (see [`crate::message::trace_context`]). The spans are derived
//! from the exchange's timeline at the end. A collector that is down, slow or hostile costs spans, never requests.

mod spans;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::{mpsc, oneshot};

use crate::config::OtlpConfig;
use crate::metrics::Metrics;
use crate::metrics::log_limiter::LogLimiter;
use crate::observe::finished_request::FinishedRequest;

/// Limit on the spans of one batch; a request has six.
const BATCH: usize = 512;
/// Time that the first span of a batch waits for others.
const GATHER: Duration = Duration::from_secs(1);
/// Pause before the second attempt.
const PAUSE: Duration = Duration::from_millis(500);
/// Limit on the file of headers.
const HEADERS_BYTES_MAX: u64 = 64 * 1024;

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The file of headers cannot be read.
    #[error("{file}: {source}")]
    Headers {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// A line of it is not `name: value`.
    #[error("{file}:{line}: invalid header, expected `name: value`")]
    Header {
        /// The file.
        file: String,
        /// From 1.
        line: usize,
    },
    /// The exporter cannot be created.
    #[error("telemetry: {0}")]
    Exporter(String),
}

enum TelemetryMessage {
    Request(Arc<FinishedRequest>),
    Flush(oneshot::Sender<()>),
}

/// An active export of traces.
pub(crate) struct Telemetry {
    pub config: OtlpConfig,
    messages: mpsc::Sender<TelemetryMessage>,
    metrics: Arc<Metrics>,
}

impl Telemetry {
    /// # Errors
    /// [`TelemetryError`] contains the reason. An unreachable collector is no error here.
    pub(crate) fn start(
        config: OtlpConfig,
        metrics: &Arc<Metrics>,
        runtime: &tokio::runtime::Handle,
    ) -> Result<Arc<Self>, TelemetryError> {
        let exporter = exporter(&config)?;
        let (messages, received) = mpsc::channel(config.queue);
        let sender = SpanSender {
            exporter,
            scope: InstrumentationScope::builder("baton-router")
                .with_version(env!("CARGO_PKG_VERSION"))
                .build(),
            within: Duration::from_millis(config.timeout_ms),
            metrics: Arc::clone(metrics),
            error_log: LogLimiter::new(),
        };
        runtime.spawn(sender.run(received));
        Ok(Arc::new(Self { config, messages, metrics: Arc::clone(metrics) }))
    }

    /// Exports a request's spans, if they are recorded.
    pub(crate) fn send(&self, finished: &Arc<FinishedRequest>) {
        if self.messages.try_send(TelemetryMessage::Request(Arc::clone(finished))).is_err() {
            self.metrics.observers.spans_dropped_full.increment(spans::count(finished));
        }
    }

    /// Waits until all spans so far are exported, for a limited time.
    pub(crate) async fn flush(&self, within: Duration) {
        let (done, sent) = oneshot::channel();
        let flushed = async {
            // An error means that the task has ended, so there is nothing to wait for.
            if self.messages.send(TelemetryMessage::Flush(done)).await.is_ok() {
                let _ = sent.await;
            }
        };
        let _ = tokio::time::timeout(within, flushed).await;
    }
}

fn exporter(config: &OtlpConfig) -> Result<SpanExporter, TelemetryError> {
    let mut endpoint = config.endpoint.trim_end_matches('/').to_owned();
    let has_path = endpoint.parse::<hyper::Uri>().is_ok_and(|uri| uri.path().len() > 1);
    if !has_path {
        endpoint.push_str("/v1/traces");
    }
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpJson)
        .with_endpoint(endpoint)
        .with_timeout(Duration::from_millis(config.timeout_ms))
        .with_headers(headers(config)?)
        // The exporter's own retries would block a thread that serves requests.
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .map_err(|error| TelemetryError::Exporter(error.to_string()))?;
    let attributes = config.resource.iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone()));
    let resource = Resource::builder_empty()
        .with_attributes(attributes)
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_service_name(config.service_name.clone())
        .build();
    exporter.set_resource(&resource);
    Ok(exporter)
}

/// Reads `name: value` lines; the values are secret.
fn headers(config: &OtlpConfig) -> Result<HashMap<String, String>, TelemetryError> {
    let Some(path) = &config.headers_file else { return Ok(HashMap::new()) };
    let file = path.display().to_string();
    let read = crate::config::read::named_file::read_text(path, HEADERS_BYTES_MAX);
    let text = read.map_err(|source| TelemetryError::Headers { file: file.clone(), source })?;
    let mut headers = HashMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let pair = line.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
        let good = |(name, value): &(&str, &str)| {
            HeaderName::from_bytes(name.as_bytes()).is_ok() && HeaderValue::from_str(value).is_ok()
        };
        let Some((name, value)) = pair.filter(good) else {
            return Err(TelemetryError::Header { file, line: number + 1 });
        };
        headers.insert(name.to_owned(), value.to_owned());
    }
    Ok(headers)
}

/// The exporting task.
struct SpanSender {
    exporter: SpanExporter,
    scope: InstrumentationScope,
    within: Duration,
    metrics: Arc<Metrics>,
    error_log: LogLimiter,
}

impl SpanSender {
    async fn run(mut self, mut messages: mpsc::Receiver<TelemetryMessage>) {
        while let Some(first) = messages.recv().await {
            let (mut batch, mut flushed) = (Vec::with_capacity(BATCH), Vec::new());
            self.take(first, &mut batch, &mut flushed);
            let until = tokio::time::Instant::now() + GATHER;
            while flushed.is_empty() && batch.len() < BATCH {
                match tokio::time::timeout_at(until, messages.recv()).await {
                    Ok(Some(message)) => self.take(message, &mut batch, &mut flushed),
                    Ok(None) | Err(_) => break,
                }
            }
            if !batch.is_empty() {
                self.export_with_retry(batch).await;
            }
            for done in flushed {
                let _ = done.send(());
            }
        }
    }

    fn take(
        &self,
        message: TelemetryMessage,
        batch: &mut Vec<SpanData>,
        flushed: &mut Vec<oneshot::Sender<()>>,
    ) {
        match message {
            TelemetryMessage::Request(finished) => spans::add(&finished, &self.scope, batch),
            TelemetryMessage::Flush(done) => flushed.push(done),
        }
    }

    /// Exports a batch with one retry.
    async fn export_with_retry(&mut self, batch: Vec<SpanData>) {
        let count = batch.len() as u64;
        if self.export(batch.clone()).await.is_ok() {
            return self.metrics.observers.spans.increment(count);
        }
        tokio::time::sleep(PAUSE).await;
        match self.export(batch).await {
            Ok(()) => self.metrics.observers.spans.increment(count),
            Err(error) => {
                self.metrics.observers.spans_dropped_failed.increment(count);
                if let Some(held_back) = self.error_log.allow() {
                    tracing::warn!(event = "span_export_failed", %error, held_back, "span export failed");
                }
            }
        }
    }

    async fn export(&self, batch: Vec<SpanData>) -> Result<(), String> {
        match tokio::time::timeout(self.within, self.exporter.export(batch)).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_elapsed) => Err("no answer in time".to_owned()),
        }
    }
}
