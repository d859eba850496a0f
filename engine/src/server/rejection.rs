//! Early rejection: whatever makes this engine refuse a request that came with a handoff, the lease goes back.
//!
//! ```text
//! body ── unread (413, 408, cut off, 404) ─┐
//!      ── does not parse ──────────────────┴▶ salvage `kv_transfer_params` from what is there ─┐
//!      ── parses ─▶ handoff read first, guard armed ─▶ 401, rank, role, validation, template,  ├▶ guard: release at P,
//!                   model, length, layout, prompt, queue full, draining, device ───────────────┘   or left to a router
//! ```
//!
//! Only a complete and valid handoff is used, never a guess; a malformed one is named, counted and left alone.
//! A router that settles itself (`x-baton-router-settles`) keeps the lease where another engine might take the request.

use std::sync::Arc;

use baton_connector::Handoff;
use baton_connector::handoff::KvIntent;
use baton_openai::{ApiError, Code, salvage_member};
use hyper::Request;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName};
use serde_json::Value;

use super::guard::HandoffGuard;
use super::reply::{Unread, read_what_comes};
use super::{Frontend, access, seal};
use crate::engine_core::fetch_target::FetchTarget;
use crate::run::rank::DpRank;

/// The field of a request that carries a handoff.
pub(super) const PARAMS: &str = "kv_transfer_params";

/// A router that tries other engines with the same handoff shows this.
const ROUTER_SETTLES: HeaderName = HeaderName::from_static("x-baton-router-settles");

/// A router that can use a handoff before its blocks are computed shows this.
const EARLY_HANDOFF: HeaderName = HeaderName::from_static("x-baton-early-handoff");

/// What `kv_transfer_params` asked for.
pub(super) enum Intent {
    Plain,
    Produce { consumers: u16, early: bool },
    Consume(Box<Handoff>),
}

/// What came with a request: the intent, or why it is refused, and the guard that gives a refused handoff back.
pub(super) struct Offer {
    pub(super) intent: Result<Intent, ApiError>,
    pub(super) guard: Option<HandoffGuard>,
}

impl Offer {
    /// Reads the intent before anything else of the request is judged, so that every later refusal gives the handoff
    /// back. `core` sends the notice.
    pub(super) fn read(
        frontend: &Frontend,
        core: &Arc<DpRank>,
        params: Option<&Value>,
        headers: &HeaderMap,
    ) -> Self {
        let refused = |error| Self { intent: Err(error), guard: None };
        let Some(params) = params.filter(|params| !params.is_null()) else {
            return Self { intent: Ok(Intent::Plain), guard: None };
        };
        let authorized = access::authorize(frontend, headers);
        let intent = match (KvIntent::parse(params), &authorized) {
            (Ok(intent), _) => intent,
            // A stranger learns nothing.
            (Err(_), Err(unauthorized)) => return refused(unauthorized.clone()),
            (Err(error), Ok(())) => {
                frontend.metrics.early_rejection("malformed_handoff");
                let error = ApiError::invalid(PARAMS, error.to_string());
                return refused(error.with_code(Code::InvalidKvTransferParams));
            }
        };
        let handoff = match intent {
            None => return Self { intent: authorized.map(|()| Intent::Plain), guard: None },
            Some(KvIntent::Produce { consumers }) => {
                let early = headers.contains_key(&EARLY_HANDOFF);
                let intent = authorized.map(|()| Intent::Produce { consumers, early });
                return Self { intent, guard: None };
            }
            Some(KvIntent::Consume(handoff)) => handoff,
        };
        if authorized.is_err()
            && !frontend.secret.as_ref().is_some_and(|s| seal::is_genuine(s, &handoff, params))
        {
            frontend.metrics.early_rejection("unproven");
            return Self { intent: authorized.map(|()| Intent::Plain), guard: None };
        }
        let mut random = [0; 8];
        if getrandom::fill(&mut random).is_err() {
            return refused(ApiError::internal("the system has no randomness"));
        }
        let mut target = FetchTarget::new(&handoff, u64::from_ne_bytes(random));
        if headers.contains_key(&ROUTER_SETTLES) {
            target.leave_to_router(frontend.load_failure);
        }
        let guard = HandoffGuard::new(Arc::clone(core), target);
        Self { intent: authorized.map(|()| Intent::Consume(handoff)), guard: Some(guard) }
    }

    /// The request is refused: whatever came with it is given back.
    pub(super) fn refuse(self, error: &ApiError) {
        if let Some(guard) = self.guard {
            guard.refuse(error);
        }
    }
}

/// A body that cannot be read as a whole: gives back the handoff that is complete in what is there.
pub(super) fn of_broken(frontend: &Frontend, headers: &HeaderMap, body: &[u8], error: &ApiError) {
    if let Some(params) = salvage_member(body, PARAMS) {
        let core = frontend.seat(headers);
        let core = core.as_ref().map_or(&frontend.cores[0], |seat| seat);
        Offer::read(frontend, core, Some(&params), headers).refuse(error);
    }
}

/// Refuses a request whose body is of no use here, and gives back the handoff in it.
pub(super) async fn of_unread(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    error: ApiError,
) -> ApiError {
    let headers = request.headers().clone();
    let told = error.clone();
    let (limit, bodies) = (frontend.limits.body_bytes, Arc::clone(&frontend.bodies));
    let body = read_what_comes(request, limit, &bodies).await.unwrap_or_else(|Unread { read, .. }| read);
    // Off the HTTP threads: a scan of megabytes would hold up aborts and releases.
    let giving_back = move || of_broken(&frontend, &headers, &body, &error);
    drop(tokio::task::spawn_blocking(giving_back).await);
    told
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::server::guard::Cause;

    #[test]
    fn an_engines_own_trouble_leaves_the_lease_to_a_router_that_settles_and_the_requests_does_not() {
        let now = Duration::ZERO;
        for (error, cause, elsewhere) in [
            (ApiError::unauthorized(), Cause::Unauthorized, true),
            (ApiError::overloaded("full", now), Cause::QueueFull, true),
            (ApiError::unavailable("stopping", now).with_code(Code::Draining), Cause::Draining, true),
            (ApiError::unavailable("broken", now), Cause::EngineFailed, true),
            (ApiError::internal("broken"), Cause::EngineFailed, true),
            (ApiError::invalid(PARAMS, "role").with_code(Code::KvWrongRole), Cause::WrongRole, true),
            (ApiError::model_not_found("x"), Cause::UnknownModel, false),
            (ApiError::not_found("/v1/x"), Cause::UnknownPath, false),
            (ApiError::malformed("x"), Cause::Unreadable, false),
            (ApiError::payload_too_large(1), Cause::TooLarge, false),
            (ApiError::request_timeout(now), Cause::SlowBody, false),
            (ApiError::client_gone(), Cause::CutOff, false),
            (ApiError::context_length(1, 1, 1), Cause::TooLong, false),
            (ApiError::invalid("n", "x"), Cause::Invalid, false),
        ] {
            assert_eq!(Cause::of(&error), cause, "{error}");
            assert_eq!(cause.another_may_take_it(), elsewhere, "{error}");
        }
    }
}
