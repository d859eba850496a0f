//! What one engine of the decode pool answers by itself: tokens, embeddings, scores. Cleaned, and passed with all fields
//! that nobody here knows; what `/tokenize` and `/detokenize` mean is checked too.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_openai::{
    ApiError, DetokenizeRequest, Object, ParseLimits, RawBody, TokenizeRequest, parse_object, strip,
};
use bytes::Bytes;
use hyper::Method;
use pingora::proxy::Session;

use crate::answer::Stamp;
use crate::client_watch::{ClientGone, race};
use crate::exchange_driver::Ended;
use crate::generation::Generation;
use crate::legs::{Meaning, Refusal};
use crate::metrics::Leg;
use crate::policy::Wanted;
use crate::rewrite::{ClientRules, Owned};
use crate::tenants::{self, Identity};
use crate::trace_context::Trace;
use crate::upstream::{CallError, Engine, Outgoing};
use crate::{answer, intake, rewrite};

/// Tokens of the longest context, with their texts.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Whether a body means something.
type Reader = fn(&Object, &ParseLimits) -> Result<(), ApiError>;

/// Passes one request and its answer; gives the answer's status.
pub(crate) async fn pass(
    session: &mut Session,
    generation: &Generation,
    path: &'static str,
    body: Bytes,
    (id, trace): (&RequestId, &Trace),
    identity: Option<&Identity>,
    stamp: &Stamp,
) -> Result<u16, Ended> {
    let limits = &generation.parse_limits;
    let checked = |read: Reader| {
        let mut map = parse_object(&body, limits)?;
        strip(&mut map, &ClientRules);
        read(&map, limits)
    };
    match path {
        "/tokenize" => checked(|map, limits| TokenizeRequest::from_map(map, limits).map(drop))?,
        "/detokenize" => checked(|map, limits| DetokenizeRequest::from_map(map, limits).map(drop))?,
        _ => {}
    }
    let body = RawBody::any(body, limits, &ClientRules)?;
    let name = body.string("model");
    if name.is_none() && body.field("model").is_some_and(|model| model != b"null") {
        return Err(ApiError::invalid("model", "`model` must be a string").into());
    }
    let model = Arc::clone(generation.models.named(name.as_deref())?);
    let means =
        |name: &str| generation.models.named(Some(name)).is_ok_and(|found| Arc::ptr_eq(found, &model));
    if identity.is_some_and(|identity| !identity.may_use(means)) {
        return Err(tenants::forbidden(&model.name).into());
    }
    let mut headers = intake::named(intake::passed(&session.req_header().headers), id);
    trace.inject(&mut headers, Leg::Decode);
    let body = rewrite::decode_body(&body, &Owned::default(), &model.name, None);
    let mut outgoing = Outgoing { method: Method::POST, path, headers, body };
    let mut tried: Vec<Arc<Engine>> = Vec::new();
    let mut last = Refusal::none_left();
    let silence = Duration::from_millis(generation.config.timeouts.stream_silence_ms);
    while tried.len() < usize::from(generation.config.attempts.decode) {
        let Ok(reserved) = model.decode.reserve(&Wanted::default(), &tried) else { break };
        let engine = reserved.engine();
        outgoing.aim_at_rank(reserved.member.rank);
        let call = async { engine.call(&outgoing, |_| {}).await?.whole(ANSWER_BYTES_MAX).await };
        let called = race(session, tokio::time::timeout(silence, call)).await;
        tried.push(Arc::clone(engine));
        match called.map_err(|ClientGone| Ended::ClientGone)? {
            Ok(Ok(whole)) if whole.status.is_success() => {
                let headers = [("content-type", "application/json".to_owned())];
                let status = whole.status.as_u16();
                let told = answer::whole(session, status, &headers, stamp, whole.body).await;
                return told.map(|()| status).map_err(|_| Ended::ClientGone);
            }
            Ok(Ok(whole)) => {
                last = Refusal::of(&whole);
                if Meaning::of(&whole).failure().is_none() {
                    return Err(Ended::Refused(last));
                }
            }
            Ok(Err(CallError::NotReached)) => last = Refusal::unreachable(),
            Ok(Err(CallError::TooLarge(_))) => {
                return Err(ApiError::bad_gateway("an engine's answer is too large").into());
            }
            Ok(Err(CallError::Broken(_))) => last = Refusal::broken(),
            Err(_elapsed) => last = Refusal::silent(),
        }
    }
    Err(Ended::Refused(last))
}
