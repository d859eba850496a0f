//! Early rejection: whenever this engine refuses a request with a handoff, it releases the lease.
//!
//! ```text
//! body ── unread (413, 408, cut off, 404) ─┐
//!      ── does not parse ──────────────────┴▶ recover `kv_transfer_params` from the rest ─┐
//!      ── parses ─▶ handoff read first, guard armed ─▶ 401, rank, role, validation, template,  ├▶ guard: release at P,
//!                   model, length, layout, prompt, queue full, draining, device ───────────────┘   or left to a router
//! ```
//!
//! Only a complete and valid handoff is used, never a guess. A malformed one is counted and otherwise ignored. A
//! router that settles (`x-baton-router-settles`) keeps the lease if another engine might take the request.

use std::sync::Arc;

use baton_connector::Handoff;
use baton_connector::handoff::KvIntent;
use baton_openai::{ApiError, Code, recover_member};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName};
use serde_json::Value;

use super::guard::HandoffGuard;
use super::reply::{BodyError, read_remaining};
use super::{Frontend, access, seal};
use crate::engine_core::fetch_target::FetchTarget;
use crate::run::rank::DpRank;

/// The field of a request that carries a handoff.
pub(super) const PARAMS: &str = "kv_transfer_params";

/// Sent by a router that tries other engines with the same handoff.
pub(super) const ROUTER_SETTLES: HeaderName = HeaderName::from_static("x-baton-router-settles");

/// Sent by a router that can use a handoff before its blocks are computed.
const EARLY_HANDOFF: HeaderName = HeaderName::from_static("x-baton-early-handoff");

/// The intent in `kv_transfer_params`.
pub(super) enum TransferIntent {
    Plain,
    Produce { consumers: u16, early: bool },
    Consume(Box<Handoff>),
}

/// The offer of a request: the intent, or why it is refused, and the guard that releases a refused handoff.
pub(super) struct TransferOffer {
    pub(super) intent: Result<TransferIntent, ApiError>,
    pub(super) guard: Option<HandoffGuard>,
}

impl TransferOffer {
    /// Reads the intent before the rest of the request is checked, so that every later refusal releases the handoff.
    /// `core` sends the notice.
    pub(super) fn read(
        frontend: &Frontend,
        core: &Arc<DpRank>,
        params: Option<&Value>,
        headers: &HeaderMap,
    ) -> Self {
        let refused = |error| Self { intent: Err(error), guard: None };
        let Some(params) = params.filter(|params| !params.is_null()) else {
            return Self { intent: Ok(TransferIntent::Plain), guard: None };
        };
        let authorized = access::authorize(frontend, headers);
        let intent = match (KvIntent::parse(params), &authorized) {
            (Ok(intent), _) => intent,
            // An unauthorized caller gets no details.
            (Err(_), Err(unauthorized)) => return refused(unauthorized.clone()),
            (Err(error), Ok(())) => {
                frontend.metrics.early_rejection("malformed_handoff");
                let error = ApiError::invalid(PARAMS, error.to_string());
                return refused(error.with_code(Code::InvalidKvTransferParams));
            }
        };
        let handoff = match intent {
            None => return Self { intent: authorized.map(|()| TransferIntent::Plain), guard: None },
            Some(KvIntent::Produce { consumers }) => {
                let early = headers.contains_key(&EARLY_HANDOFF);
                let intent = authorized.map(|()| TransferIntent::Produce { consumers, early });
                return Self { intent, guard: None };
            }
            Some(KvIntent::Consume(handoff)) => handoff,
        };
        if authorized.is_err()
            && !frontend.secret.as_ref().is_some_and(|secret| seal::is_genuine(secret, &handoff, params))
        {
            frontend.metrics.early_rejection("unproven");
            return Self { intent: authorized.map(|()| TransferIntent::Plain), guard: None };
        }
        let consumer = match access::random_u64() {
            Ok(consumer) => consumer,
            Err(error) => return refused(error),
        };
        let mut target = FetchTarget::new(&handoff, consumer);
        if headers.contains_key(&ROUTER_SETTLES) {
            target.leave_to_router(frontend.load_failure);
        }
        let guard = HandoffGuard::new(Arc::clone(core), target);
        Self { intent: authorized.map(|()| TransferIntent::Consume(handoff)), guard: Some(guard) }
    }

    /// Refuses the request, and releases its handoff.
    pub(super) fn refuse(self, error: &ApiError) {
        if let Some(guard) = self.guard {
            guard.refuse(error);
        }
    }
}

/// Releases the complete handoff in a body that cannot be parsed as a whole.
pub(super) fn release_broken(frontend: &Frontend, headers: &HeaderMap, body: &[u8], error: &ApiError) {
    if let Some(params) = recover_member(body, PARAMS) {
        let core = frontend.begin_request(headers);
        let core = core.as_ref().map_or(&frontend.cores[0], |guard| guard);
        TransferOffer::read(frontend, core, Some(&params), headers).refuse(error);
    }
}

/// Refuses a request whose body is not needed, and releases the handoff in it.
pub(super) async fn release_unread(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    error: ApiError,
) -> ApiError {
    let headers = request.headers().clone();
    let refusal = error.clone();
    let (limit, bodies) = (frontend.limits.body_bytes, Arc::clone(&frontend.bodies.requests));
    let body = read_remaining(request, limit, &bodies).await.unwrap_or_else(|BodyError { read, .. }| read);
    // Off the HTTP threads: a scan of megabytes would delay aborts and releases.
    let release = move || release_broken(&frontend, &headers, &body, &error);
    drop(tokio::task::spawn_blocking(release).await);
    refusal
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::server::guard::RejectionCause;

    #[test]
    fn an_engine_failure_leaves_the_lease_to_a_settling_router_and_a_bad_request_does_not() {
        let now = Duration::ZERO;
        for (error, label, elsewhere) in [
            (ApiError::unauthorized(), "unauthorized", true),
            (ApiError::overloaded("full", now), "queue_full", true),
            (ApiError::unavailable("stopping", now).with_code(Code::Draining), "draining", true),
            (ApiError::unavailable("broken", now), "engine_failed", true),
            (ApiError::internal("broken"), "engine_failed", true),
            (ApiError::invalid(PARAMS, "role").with_code(Code::KvWrongRole), "wrong_role", true),
            (ApiError::model_not_found("x"), "unknown_model", true),
            (ApiError::not_found("/v1/x"), "unknown_path", false),
            (ApiError::malformed("x"), "unreadable", false),
            (ApiError::payload_too_large(1), "too_large", false),
            (ApiError::request_timeout(now), "slow_body", false),
            (ApiError::client_gone(), "cut_off", false),
            (ApiError::context_length(1, 1, 1), "too_long", false),
            (ApiError::invalid("n", "x"), "invalid", false),
        ] {
            let cause = RejectionCause::of(&error);
            assert_eq!((cause.label, cause.is_retryable), (label, elsewhere), "{error}");
        }
    }
}
