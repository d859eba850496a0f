//! `/v1/embeddings`: from a body to vectors. Each input is a sequence that computes its prompt and generates nothing.
//!
//! A client that leaves drops the future, and with it the guard of its sequences.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_connector::RequestId;
use baton_openai::{ApiError, Code, EmbeddingReply, EmbeddingRequest, parse_object};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use tokio::sync::mpsc::Receiver;

use super::access::random_u64;
use super::admit::{self, AdmittedRequest};
use super::body_budget::QUEUE_RETRY;
use super::guard::SequenceGuard;
use super::reply::{self, Reply};
use super::task_spawner::TaskSpawner;
use super::transfer_params::{self, PARAMS, TransferIntent};
use super::{Frontend, generate};
use crate::engine_core::SeqEvent;
use crate::engine_core::mailbox::MailboxError;
use crate::scheduler::sequence::{Purpose, SeqId};

/// Answers one request. Reading has begun when this returns, and continues if the future is dropped: a handoff that came
/// with the request must be released.
pub(super) fn answer(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
    begin: &TaskSpawner,
) -> impl Future<Output = Result<Reply, ApiError>> + Send + use<> {
    let reading = begin.spawn(read(Arc::clone(&frontend), request));
    async move {
        let (id, request, admitted) = reading.await?;
        embed(&frontend, &id, &request, admitted).await
    }
}

/// Reads a request and checks it.
async fn read(
    frontend: Arc<Frontend>,
    request: Request<Incoming>,
) -> Result<(RequestId, EmbeddingRequest, AdmittedRequest), ApiError> {
    let arrived = Instant::now();
    let bodies = Arc::clone(&frontend.bodies.requests);
    let (headers, body) = generate::read_body(&frontend, request).await?;
    let work = move || -> Result<_, ApiError> {
        let id = generate::request_id(&headers).map_or_else(minted, Ok)?;
        let (request, admitted) = prepare(&frontend, &headers, &id, &body, arrived)?;
        Ok((id, request, admitted))
    };
    bodies.run_blocking(work).await
}

/// Queues the sequences of a request, and waits for their vectors.
async fn embed(
    frontend: &Frontend,
    id: &RequestId,
    request: &EmbeddingRequest,
    admitted: AdmittedRequest,
) -> Result<Reply, ApiError> {
    let AdmittedRequest { submissions, events, prompts, request_guard, .. } = admitted;
    let ids: Vec<SeqId> = submissions.iter().map(|submission| submission.sequence.id).collect();
    if let Some(why) = request_guard.status.snapshot().failed {
        return Err(ApiError::unavailable(why, QUEUE_RETRY).with_code(Code::EngineFailed));
    }
    request_guard.mailbox.submit(submissions).map_err(|(_, why)| match why {
        MailboxError::Full => ApiError::overloaded("the engine's queue is full", QUEUE_RETRY),
        MailboxError::Closing => {
            ApiError::unavailable("the engine is shutting down", QUEUE_RETRY).with_code(Code::Draining)
        }
    })?;
    let guard = SequenceGuard::new(request_guard, id.clone(), ids.clone());
    let vectors = collect(events, &ids, guard).await?;
    let tokens = prompts.iter().map(Vec::len).sum();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let reply_id = format!("embd-{id}.{:016x}", random_u64()?);
    let model = frontend.model.reply_name(request.prompts.model.as_deref());
    let reply = EmbeddingReply::new(reply_id, created, model, vectors, request.format, tokens);
    Ok(reply::json(StatusCode::OK, reply.to_bytes()))
}

/// A name for a request without one.
fn minted() -> Result<RequestId, ApiError> {
    let name = format!("{:016x}{:016x}", random_u64()?, random_u64()?);
    RequestId::new(&name).map_err(|_| ApiError::internal("no name for the request"))
}

/// Prepares a request for the queue.
fn prepare(
    frontend: &Arc<Frontend>,
    headers: &HeaderMap,
    id: &RequestId,
    body: &[u8],
    arrived: Instant,
) -> Result<(EmbeddingRequest, AdmittedRequest), ApiError> {
    let judge = || -> Result<_, ApiError> {
        let map = parse_object(body, &frontend.limits)?;
        if map.get(PARAMS).is_some_and(|params| !params.is_null()) {
            let message = "a handoff is of a request to generate";
            return Err(ApiError::invalid(PARAMS, message).with_code(Code::KvUnsupported));
        }
        let deadlines = admit::deadlines(headers, arrived)?;
        let request = EmbeddingRequest::from_map(&map, &frontend.limits)?;
        let Some(pooling) = frontend.model.pooling else {
            let message = "embeddings are computed on the CPU only, and this engine has another device";
            return Err(ApiError::of(Code::UnsupportedEndpoint, message));
        };
        let request_guard = frontend.begin_request(headers)?;
        let plain = &TransferIntent::Plain;
        let admitted = admit::admit(frontend, &request.prompts, id, plain, request_guard, arrived);
        let mut admitted = admitted.map_err(baton_openai::request::of_input)?.within(deadlines);
        for submission in &mut admitted.submissions {
            submission.sequence.purpose = Purpose::Pool(pooling);
        }
        Ok((request, admitted))
    };
    // A handoff that came with the request is released.
    judge().inspect_err(|error| transfer_params::release_broken(frontend, headers, body, error))
}

/// The vector of each sequence, once all have ended.
async fn collect(
    mut events: Receiver<(u32, SeqEvent)>,
    ids: &[SeqId],
    mut guard: SequenceGuard,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut vectors = vec![None; ids.len()];
    while vectors.iter().any(Option::is_none) {
        let Some((index, event)) = events.recv().await else {
            return Err(ApiError::unavailable("the engine stopped", QUEUE_RETRY));
        };
        match event {
            SeqEvent::Finished(end) => {
                guard.ended(ids[index as usize]);
                let Some(vector) = end.embedding else {
                    return Err(ApiError::unavailable("the request was aborted", QUEUE_RETRY));
                };
                vectors[index as usize] = Some(vector);
            }
            SeqEvent::Refused(refusal) => return Err(generate::refused(refusal)),
            SeqEvent::TimedOut(kind) => return Err(admit::timed_out(kind)),
            SeqEvent::DeadEnd(why) | SeqEvent::Unavailable(why) => {
                return Err(ApiError::unavailable(why, QUEUE_RETRY));
            }
            SeqEvent::Started { .. }
            | SeqEvent::Token(..)
            | SeqEvent::EarlyHandoff(_)
            | SeqEvent::LoadFailed(_) => {}
        }
    }
    Ok(vectors.into_iter().flatten().collect())
}
