//! The service for clients: paths, the context of one request, responses.
//!
//! The session is pingora's; pingora's proxying is not used, for three reasons. It sends a request to one engine only.
//! It re-sends at most 64 KiB of a body (16,000 tokens). Its future reserves memory for HTTP/2, a cache and subrequests
//! in every open stream.

mod context;
mod cors;
mod models;
mod response;
pub(crate) mod sidecar;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_openai::{ApiError, RawBody, Translation};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderMap};
use serde_json::json;

use crate::admission::deadline::{self, ResponseDeadlines, ResponseForm};
use crate::admission::{AdmissionRequest, Claim};
use crate::auth::{self, Identity, Permit};
use crate::client::disconnect::race;
use crate::client::session::{ClientGone, Session};
use crate::config::Priority;
use crate::engines::body_budget::BudgetShare;
use crate::envelope::Envelope;
use crate::exchange::client_request::{self, ClientRequest};
use crate::exchange::driver::ExchangeDriver;
use crate::exchange::resume;
use crate::legs::Refusal;
use crate::legs::request_error::RequestError;
use crate::message::path::{Dialect, Route};
use crate::message::request_id;
use crate::message::rewrite::ClientRules;
use crate::routing::api_support::EngineForm;
use crate::state::readiness;
use crate::state::shared::Shared;
use context::RequestContext;
use response::{ReplyFormat, StreamTimeouts};
use sidecar::SidecarListener;

/// The service of one listener; with a sidecar, beside one decode engine.
pub(crate) struct ClientService(pub Arc<Shared>, pub Option<SidecarListener>);

/// What a body must be declared to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyRule {
    Json,
    Any,
}

impl ClientService {
    /// Serves one request.
    pub(crate) async fn request(&self, session: &mut Session) {
        let mut context = RequestContext::new(&self.0);
        if self.0.draining.load(Ordering::Relaxed) {
            session.close_after();
        }
        if let Some(echoed) = request_id::client_id(&session.req_header().headers) {
            context.ids.client_id = Some(echoed.clone());
            context.ids.common_headers.id = echoed;
        }
        let envelope = Envelope::at(session.req_header().uri.path());
        context.ids.common_headers.envelope = if self.1.is_some() { envelope.of_sidecar() } else { envelope };
        if let Some(bearer) = auth::bearer_of_api_key(&session.req_header().headers) {
            // A header's name and value are valid, so this cannot fail.
            let _ = session.req_header_mut().insert_header(AUTHORIZATION, bearer);
        }
        session.req_header_mut().remove_header(auth::X_API_KEY);
        context.read_head(session);
        if let Some(config) = &context.generation.config.cors {
            let head = session.req_header();
            context.ids.common_headers.cors = cors::headers(config, &head.method, &head.headers);
        }
        if let Err(ended) = self.serve(session, &mut context).await {
            context.accounting.status = match ended {
                RequestError::ClientGone => 499,
                RequestError::Refused(refusal) => {
                    // A client that cannot be reached has disconnected.
                    let _ = response::send_error(session, &refusal.0, &context.ids.common_headers).await;
                    refusal.0.status
                }
            };
        }
        context.accounting.request_bytes = session.request_bytes();
        context.accounting.response_bytes = session.body_bytes();
        self.0.metrics.server.request_bytes.increment(context.accounting.request_bytes);
        self.0.metrics.server.response_bytes.increment(context.accounting.response_bytes);
        if let Some(driver) = &context.driver {
            driver.record_end(context.accounting.status);
        }
        context.end();
    }

    async fn serve(&self, session: &mut Session, context: &mut RequestContext) -> Result<(), RequestError> {
        if let Some(listener) = &self.1 {
            // Boxed, so that a router's requests have no memory for it.
            return Box::pin(self.serve_beside_engine(listener, session, context)).await;
        }
        let head = session.req_header();
        let (method, uri) = (head.method.clone(), head.uri.clone());
        match Route::of(&method, uri.path())? {
            Route::Health => self.send_json(session, context, json!({"status": "ok"})).await,
            Route::Ready => {
                let (status, what) = match readiness::readiness(&self.0) {
                    Ok(()) => (200, "ready"),
                    Err(reason) => (503, reason),
                };
                self.send_json_with_status(status, session, context, json!({"status": what})).await
            }
            Route::Version => {
                self.send_json(session, context, json!({"version": env!("CARGO_PKG_VERSION")})).await
            }
            Route::Models => {
                let identity = self.identify(session, context).await?;
                let list = models::list(&self.0, context, identity.as_deref()).await;
                self.send_json(session, context, list).await
            }
            Route::Model(name) => {
                let identity = self.identify(session, context).await?;
                let card = models::find(&self.0, context, identity.as_deref(), &name).await?;
                self.send_json(session, context, card).await
            }
            Route::Options(allowed) => {
                context.accounting.status = 200;
                let headers = [("allow", allowed.to_owned())];
                let sent =
                    response::send_whole(session, 200, &headers, &context.ids.common_headers, Bytes::new())
                        .await;
                sent.map_err(|_| RequestError::ClientGone)
            }
            Route::Ask(dialect) => {
                self.permit(session, context).await?;
                let body = self.body(session, context, BodyRule::Json).await?;
                let read = match self.engine_form(session, context, dialect, &body).await? {
                    EngineForm::Native => ClientRequest::read,
                    EngineForm::Chat => ClientRequest::read_translated,
                    EngineForm::BatonsChat => ClientRequest::read_for_batons,
                };
                let owner = context.request_owner();
                let headers = &session.req_header().headers;
                let request = read(dialect, body, headers, &context.generation, owner.as_ref())?;
                let request = Box::new(request);
                race(session, pin!(context.limit(&request))).await??;
                context.accounting.passed = !dialect.generates();
                let api = request.translation.as_ref().map(Translation::api);
                let asked = self.ask(session, context, request).await;
                // The engines know the chat's fields, and the client its own.
                let named = |error: ApiError| match api {
                    Some(api) => api.named(error),
                    None => error,
                };
                match asked.map_err(|error| error.map(named)) {
                    Err(RequestError::Refused(refusal)) if session.has_begun() => {
                        end_stream(session, context, &refusal).await
                    }
                    ended => ended,
                }
            }
        }
    }

    async fn ask(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        mut request: Box<ClientRequest>,
    ) -> Result<(), RequestError> {
        if context.generation.models.tokenizer(&request.model).is_some() {
            // Boxed, because the response would keep its memory.
            let mut ids = Box::pin(request.tokenize(&context.generation.models));
            if let Err(gone) = race(session, ids.as_mut()).await {
                context.client.permit.iter_mut().for_each(Permit::return_tokens);
                return Err(gone.into());
            }
        }
        let bounds = request.model.bounds;
        let until = bounds.request.and_then(|most| context.began().checked_add(most));
        let identity = context.client.permit.as_ref().map(|permit| &*permit.identity);
        let headers = &session.req_header().headers;
        let response = response_deadlines(headers, &request, context.began());
        let longest = Instant::now() + Duration::from_millis(context.generation.config.queue.timeout_ms);
        let admission = AdmissionRequest {
            claim: claim(headers, &request, identity),
            deadline: response.first().map_or(longest, |ends| ends.min(longest)),
            request_deadline: response.first(),
            response,
        };
        let driver = context.driver.insert(ExchangeDriver::new(
            Arc::clone(&self.0),
            Arc::clone(&context.generation),
            context.ids.id.clone(),
            context.ids.client_id.as_ref(),
            request.dialect.path(),
            Arc::clone(&request.model),
        ));
        driver.attach_trace(
            &context.accounting.trace,
            context.client.in_flight.as_ref().map(|guard| &guard.entry),
        );
        if let Some(interval) = bounds.sse_keepalive.filter(|_| request.is_streamed()) {
            let translation = request.translation.as_ref();
            let dialect = translation.map_or(request.dialect, |used| Dialect::of(used.api()));
            session.send_comments(response::comments(&context.ids.common_headers, dialect, interval));
        }
        if let Err(refused) = driver.reserve(session, &request, admission).await {
            context.client.permit.iter_mut().for_each(Permit::return_tokens);
            return Err(refused);
        }
        let format = ReplyFormat { dialect: request.dialect, translation: request.translation.clone() };
        let transcript = resume::Transcript::of(&mut request);
        driver.record_turn(&request);
        driver.progress.reading = request.stream_reading();
        // Boxed: a response may be relayed for minutes, and would keep the memory of the earlier steps.
        let legs = Box::pin(driver.run_legs(session, &request));
        let answer = match until {
            None => legs.await,
            Some(until) => match tokio::time::timeout_at(until.into(), legs).await {
                Ok(answer) => answer,
                Err(_elapsed) => Err(driver.time_out()),
            },
        };
        if answer.is_err() && driver.progress.attempts == [0, 0] {
            // No engine has received the request.
            context.client.permit.iter_mut().for_each(Permit::return_tokens);
        }
        let resume_state =
            transcript.map(|transcript| Box::new(resume::ResumeState::new(transcript, *request)));
        context.client.body_bytes = None;
        let timeouts = StreamTimeouts { silence: bounds.stream_silence, deadline: until };
        context.accounting.status = response::relay(
            session,
            driver,
            answer?,
            &context.ids.common_headers,
            timeouts,
            resume_state,
            format,
        )
        .await?;
        Ok(())
    }

    /// What the engines get for the request. Those of some models have only chats.
    async fn engine_form(
        &self,
        session: &mut Session,
        context: &RequestContext,
        dialect: Dialect,
        body: &Bytes,
    ) -> Result<EngineForm, RequestError> {
        let generation = &context.generation;
        let Some(api) = dialect.translated_api() else { return Ok(EngineForm::Native) };
        let raw = RawBody::any(body.clone(), &generation.parse_limits, &ClientRules)?;
        let name = raw.string("model");
        let model = generation.models.named(name.as_deref())?;
        let Some(support) = generation.models.api_support(model, api) else {
            return Ok(EngineForm::Native);
        };
        let authorization = session.req_header().headers.get(AUTHORIZATION).cloned();
        Ok(race(session, pin!(support.form(&model.decode, authorization.as_ref()))).await?)
    }

    /// Identifies the client; `None` without `auth`. The client's credentials are removed here, so no engine or log
    /// gets them.
    async fn identify(
        &self,
        session: &mut Session,
        context: &RequestContext,
    ) -> Result<Option<Arc<Identity>>, RequestError> {
        let Some(auth) = &context.generation.auth else { return Ok(None) };
        let credentials = {
            let names = session.certificate_names().unwrap_or_default();
            auth.identify(&session.req_header().headers, &names, &self.0.limits.tenants)?
        };
        session.req_header_mut().remove_header(&AUTHORIZATION);
        // Pinned here, so that the race has no memory for it.
        let checked = race(session, pin!(auth.check(credentials, &self.0.limits.tenants))).await?;
        Ok(Some(checked?))
    }

    /// Identifies the client and takes a place within its limits. A client that leaves meanwhile has none: what the
    /// server of shared limits has counted is undone as after a late answer.
    async fn permit(&self, session: &mut Session, context: &mut RequestContext) -> Result<(), RequestError> {
        if let Some(identity) = self.identify(session, context).await? {
            let shared = context.generation.auth.as_ref().and_then(|auth| auth.shared());
            let tenants = &self.0.limits.tenants;
            let permit = race(session, pin!(Permit::begin(identity, tenants, shared))).await??;
            context.ids.common_headers.limits = context.client.permit.insert(permit).headers();
        }
        Ok(())
    }

    /// Begins the request and reads its body.
    async fn body(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        rule: BodyRule,
    ) -> Result<Bytes, RequestError> {
        let config = &context.generation.config;
        let Some(guard) = self.0.begin(config.limits.in_flight, &context.ids.id, context.begun) else {
            return Err(ApiError::overloaded("the router is full", Duration::from_secs(1)).into());
        };
        context.client.in_flight = Some(guard);
        let longest = context.generation.models.longest_request();
        let until = context.until(&session.req_header().headers, longest, config.timeouts.body_ms);
        let within = until.saturating_duration_since(Instant::now());
        let reservation = context.client.body_bytes.insert(self.0.limits.request_bodies.new_reservation());
        let share = BudgetShare { reservation, total_bytes: config.limits.body_bytes_total };
        match rule {
            BodyRule::Json => {
                client_request::read_body(session, config.limits.body_bytes, share, within).await
            }
            BodyRule::Any => {
                client_request::read_any_body(session, config.limits.body_bytes, share, within).await
            }
        }
    }

    async fn send_json(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        value: serde_json::Value,
    ) -> Result<(), RequestError> {
        self.send_json_with_status(200, session, context, value).await
    }

    async fn send_json_with_status(
        &self,
        status: u16,
        session: &mut Session,
        context: &mut RequestContext,
        value: serde_json::Value,
    ) -> Result<(), RequestError> {
        // The router's own responses are no failed requests, whatever their status.
        context.accounting.status = 200;
        let headers = [("content-type", "application/json".to_owned())];
        let body = Bytes::from(value.to_string());
        let sent = response::send_whole(session, status, &headers, &context.ids.common_headers, body).await;
        sent.map_err(|_| RequestError::ClientGone)
    }
}

/// Ends a stream that a comment has begun. Its status is the 200 that the client has received.
async fn end_stream(
    session: &mut Session,
    context: &mut RequestContext,
    refusal: &Refusal,
) -> Result<(), RequestError> {
    if let Some(driver) = &mut context.driver {
        driver.progress.streamed = true;
    }
    context.accounting.status = 200;
    let sent = response::end_with_error(session, &refusal.0, &context.ids.common_headers).await;
    sent.map_err(|ClientGone| RequestError::ClientGone)
}

/// The request's claim in the queue.
fn claim(headers: &HeaderMap, request: &ClientRequest, identity: Option<&Identity>) -> Claim {
    let most = identity.map_or(Priority::High, |identity| identity.priority_max);
    Claim {
        tenant: identity.map(|identity| identity.tenant.id),
        weight: identity.map_or(1, |identity| identity.tenant.weight),
        priority: deadline::priority(headers, request.priority, most),
        bytes: request.body.len(),
        cost: request.tokens,
    }
}

/// Until when the response to a request that began then is useful.
fn response_deadlines(headers: &HeaderMap, request: &ClientRequest, began: Instant) -> ResponseDeadlines {
    let bounds = &request.model.bounds;
    let form = if request.is_streamed() {
        ResponseForm::Stream { comments: bounds.sse_keepalive }
    } else {
        ResponseForm::Whole
    };
    ResponseDeadlines::read(headers, began, form, bounds.request)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of the future that a function returns.
    fn future_bytes<'a, F: Future>(_: impl FnOnce(&'a ClientService, &'a mut Session) -> F) -> usize {
        size_of::<F>()
    }

    /// The memory of the future of a request's legs.
    fn legs_bytes<'a, F: Future>(
        _: impl FnOnce(&'a mut ExchangeDriver, &'a mut Session, &'a ClientRequest) -> F,
    ) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_request_has_memory_for_its_usual_steps_only() {
        // Each is allocated, and moved there, once per request. An open stream keeps the first.
        let request = future_bytes(|service, session| service.request(session));
        let legs = legs_bytes(|driver, session, request| driver.run_legs(session, request));
        let sizes = [request, legs, size_of::<ExchangeDriver>(), size_of::<ClientRequest>()];
        let most = [6 << 10, 8 << 10, 2 << 10, 2 << 10];
        assert!(sizes.iter().zip(&most).all(|(bytes, most)| bytes <= most), "{sizes:?}, at most {most:?}");
    }
}
