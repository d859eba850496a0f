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
//! - Only engines that the options name get the cluster's secret, and no engine that a client may choose freely.

mod allow_list;
mod error;
mod headers;
pub(crate) mod options;
pub(crate) mod pass;
mod prefillers;
mod secret;
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
use secret::ClusterSecret;

use crate::config::ProtocolSetting;
use crate::engines::health::Standing;
use crate::exchange::driver::ExchangeDriver;
use crate::legs::Refusal;
use crate::message::random;
use crate::metrics::Leg;
use crate::metrics::log_limiter::LogLimiter;
use crate::routing::models::Model;
use crate::state::generation::{Generation, GenerationError};
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
    secret: Option<ClusterSecret>,
}

/// The service of one listener.
pub(crate) struct SidecarListener {
    pub sidecar: Arc<Sidecar>,
    /// The data-parallel rank.
    pub rank: u16,
}

impl Sidecar {
    /// # Errors
    /// The file of the cluster's secret is unusable.
    pub(crate) fn new(options: SidecarOptions) -> Result<Self, GenerationError> {
        let secret = options.secret().cloned().map(ClusterSecret::read).transpose()?;
        Ok(Self { options, pods: ArcSwapOption::empty(), prefillers: Prefillers::default(), secret })
    }

    /// Reads the file of the cluster's secret again. A changed secret applies to all requests that follow.
    ///
    /// # Errors
    /// The file is unusable; the secret stays.
    pub(crate) fn refresh_secret(&self, generation: &Generation) -> Result<(), GenerationError> {
        let Some(secret) = &self.secret else { return Ok(()) };
        if secret.refresh()? {
            self.apply_secret(generation);
        }
        Ok(())
    }

    /// Gives the cluster's secret to the engines that get it.
    pub(crate) fn apply_secret(&self, generation: &Generation) {
        let Some(secret) = &self.secret else { return };
        if secret.options.for_decode {
            let decode = generation.models.list().iter().flat_map(|model| model.decode.members());
            decode.for_each(|member| member.engine.set_secret(secret.value()));
        }
        self.prefillers.apply_secret(&self.options, secret);
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
        let Sidecar { options, pods, prefillers, secret } = &*self.sidecar;
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
        prefillers.get(url, options, secret.as_ref(), shared, generation).map(Some)
    }

    /// The leg whose engine fails a request, as far as it is known. A request without a driver is passed to the decode
    /// engine.
    pub(crate) fn last_leg(&self, driver: Option<&ExchangeDriver>) -> Option<Leg> {
        let Some(driver) = driver else { return Some(Leg::Decode) };
        let [prefills, decodes] = driver.progress.attempts;
        let last = driver.progress.failed;
        // Both legs of SGLang are sent at once. An engine that failed is out of use.
        let is_concurrent = self.sidecar.options.protocol() == ProtocolSetting::Sglang;
        let is_out = |leg: &Leg| {
            driver.last_engine(*leg).is_some_and(|engine| engine.health().standing(*leg) != Standing::Usable)
        };
        match (prefills > 0, decodes > 0) {
            (true, true) if is_concurrent => [Leg::Decode, Leg::Prefill].into_iter().find(is_out),
            (_, true) => last.or(Some(Leg::Decode)),
            (true, false) => last.or(Some(Leg::Prefill)),
            (false, false) => None,
        }
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
/// for the prefill engine. `last`: the leg whose engine failed.
pub(crate) fn gateway_error(refusal: Refusal, last: Option<Leg>) -> Refusal {
    if refusal != Refusal::unreachable() {
        return refusal;
    }
    Refusal(match last {
        Some(Leg::Decode) => decode_unreachable(),
        Some(Leg::Prefill) | None => ApiError::bad_gateway("the prefill engine cannot be reached"),
    })
}

/// Whether an error is the failure of an engine. Other errors with these statuses are those of a full engine.
pub(crate) fn is_failure(error: &ApiError) -> bool {
    matches!(error.status, 502 | 504) || *error == decode_unreachable()
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
