//! The routing sidecar: beside one decode engine, with the prefill engine from a header of each request.
//!
//! ```text
//! gateway ─ x-prefiller-host-port: P ─▶ sidecar ─┬─▶ P, the prefill leg
//!                                                └─▶ D on localhost: the decode leg, and every other request
//! ```
//!
//! The header names are those of llm-d's routing sidecar. The legs, with disconnects, settlements and retries, are the
//! router's own: each request gets a [`Model`] with the decode engine of its rank and a prefill pool of one engine.
//!
//! Invariants:
//! - No engine receives a routing header of a client.
//! - The prefill engine that a client names is checked against the allow-list, if there is one, before any byte is sent.

mod allow_list;
mod error;
mod headers;
pub(crate) mod options;
pub(crate) mod pass;
mod prefillers;
mod serve;
mod settings;

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use baton_openai::ApiError;

pub(crate) use allow_list::PodAddresses;
pub(crate) use headers::{ROUTING_HEADERS, RoutingHeaders};
use options::{Sampling, SidecarOptions};
use prefillers::{Prefiller, Prefillers};

use crate::legs::Refusal;
use crate::message::random;
use crate::metrics::log_limiter::LogLimiter;
use crate::routing::models::Model;
use crate::state::generation::Generation;
use crate::state::shared::Shared;

/// The delay before a retry after a failure of an engine.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Limits the log of forbidden engines, because each request can name one.
static FORBIDDEN_LOG: LogLimiter = LogLimiter::new();

/// What all listeners of a sidecar share.
pub(crate) struct Sidecar {
    pub options: SidecarOptions,
    /// The addresses of the InferencePool's Pods, once they are known.
    pods: ArcSwapOption<PodAddresses>,
    prefillers: Prefillers,
}

/// The service of one listener.
pub(crate) struct SidecarListener {
    pub sidecar: Arc<Sidecar>,
    /// The data-parallel rank.
    pub rank: u16,
}

impl Sidecar {
    pub(crate) fn new(options: SidecarOptions) -> Self {
        Self { options, pods: ArcSwapOption::empty(), prefillers: Prefillers::default() }
    }

    /// Replaces the addresses that the InferencePool allows.
    pub(crate) fn set_pods(&self, pods: PodAddresses) {
        self.pods.store(Some(Arc::new(pods)));
    }

    /// Forgets prefill engines that no request has named for a while.
    pub(crate) fn remove_idle_prefillers(&self) {
        self.prefillers.remove_idle(Instant::now());
    }
}

impl SidecarListener {
    /// The rank that serves the request.
    ///
    /// # Errors
    /// 400: the header names another host, or no port of this sidecar.
    pub(crate) fn rank(&self, headers: &RoutingHeaders) -> Result<u16, ApiError> {
        match headers.data_parallel.as_deref().filter(|_| self.rank == 0) {
            None => Ok(self.rank),
            Some(named) => self.sidecar.options.rank_at(named).ok_or_else(|| {
                ApiError::invalid(
                    headers::DATA_PARALLEL,
                    "the header names no data-parallel rank of this sidecar",
                )
            }),
        }
    }

    /// The prefill engine that the request names; `None`: the decode engine computes the prompt.
    ///
    /// # Errors
    /// - 400: the header contains no `HOST:PORT`.
    /// - 403: the engine is not allowed.
    /// - 429: requests in flight use too many different engines.
    pub(crate) fn prefiller(
        &self,
        headers: &RoutingHeaders,
        shared: &Shared,
        generation: &Generation,
    ) -> Result<Option<Arc<Prefiller>>, ApiError> {
        let Sidecar { options, pods, prefillers } = &*self.sidecar;
        let Some(named) = headers.prefiller(match options.sampling {
            Sampling::First => 0,
            Sampling::Random => random::seed(),
        }) else {
            return Ok(None);
        };
        let url = headers::engine_url(named, options.prefill_scheme)?;
        let has_pool = options.inference_pool.is_some();
        if !allow_list::allows(&options.allowed, has_pool, url.host(), pods.load().as_deref()) {
            if let Some(held_back) = FORBIDDEN_LOG.allow() {
                tracing::warn!(
                    event = "prefill_engine_forbidden", engine = %url, held_back,
                    "prefill engine of a request not allowed"
                );
            }
            let mut error = ApiError::invalid(headers::PREFILLER, "the prefill engine is not allowed");
            error.status = 403;
            return Err(error);
        }
        prefillers.get(url, options, shared, generation).map(Some)
    }

    /// The model of one request, under the name that the client gave.
    pub(crate) fn model(
        &self,
        generation: &Generation,
        rank: u16,
        name: Option<&str>,
        prefiller: Option<&Prefiller>,
    ) -> Arc<Model> {
        let base = &generation.models.list()[usize::from(rank)];
        Arc::new(base.of_client(name, prefiller.map(|prefiller| &prefiller.pool)))
    }
}

/// The error of a request whose legs failed, with llm-d's statuses: 503 if the decode engine could not be reached, 502
/// for the prefill engine. `has_decoded`: a decode leg was sent.
pub(crate) fn gateway_error(refusal: Refusal, has_decoded: bool) -> Refusal {
    if refusal != Refusal::unreachable() {
        return refusal;
    }
    Refusal(match has_decoded {
        true => decode_unreachable(),
        false => ApiError::bad_gateway("the prefill engine cannot be reached"),
    })
}

fn decode_unreachable() -> ApiError {
    ApiError::unavailable(
        "the decode engine cannot be reached: check that it runs and listens at the configured port",
        RETRY_AFTER,
    )
}

fn too_many_prefillers() -> ApiError {
    ApiError::overloaded("requests in flight use too many prefill engines", RETRY_AFTER)
}
