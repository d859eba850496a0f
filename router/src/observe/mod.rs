//! Observability of requests: access log, traces, requests in flight and finished, the deployment snapshot.

pub(crate) mod access_log;
pub(crate) mod finished_request;
pub(crate) mod in_flight;
pub(crate) mod observers;
pub(crate) mod progress;
pub mod snapshot;
pub(crate) mod telemetry;
