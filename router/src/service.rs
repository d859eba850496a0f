//! The front door: pingora's phases, and what happens in them to one request.
//!
//! Both legs run inside `request_filter`, with a pump of our own, and pingora's built-in proxying is never
//! reached: it re-sends at most 64 KiB of a body that a filter has read, which is 16,000 tokens.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use baton_connector::exchange::{Event, Outcome, Phase};
use baton_connector::{RequestId, Time};
use baton_openai::ApiError;
use bytes::Bytes;
use hyper::header::HeaderValue;
use pingora::prelude::{Error, ErrorType, HttpPeer};
use pingora::proxy::{ProxyHttp, Session};
use serde_json::json;

use crate::exchange_driver::{Ended, ExchangeDriver};
use crate::generation::Generation;
use crate::intake::{self, Ask};
use crate::metrics::End;
use crate::route::Route;
use crate::shared::{Room, Shared};
use crate::{answer, passthrough, request_id};

/// The service that pingora drives.
pub(crate) struct FrontDoor(pub Arc<Shared>);

/// One request's context. Dropping it settles what the request still owes.
pub(crate) struct RequestContext {
    shared: Arc<Shared>,
    begun: Time,
    /// The configuration that was in effect when the request began.
    generation: Arc<Generation>,
    id: RequestId,
    /// What the client is told the id is: its own, where it sent a decent one.
    echoed: HeaderValue,
    driver: Option<ExchangeDriver>,
    model: Option<String>,
    status: u16,
    /// It was passed to one engine as it came.
    passed: bool,
    /// It has been counted.
    over: bool,
    room: Option<Room>,
}

#[async_trait]
impl ProxyHttp for FrontDoor {
    type CTX = RequestContext;

    fn new_ctx(&self) -> RequestContext {
        let id = request_id::mint();
        let echoed = HeaderValue::from_str(id.as_str()).expect("a request id is printable ASCII");
        let generation = self.0.generation();
        RequestContext {
            begun: self.0.now(),
            shared: Arc::clone(&self.0),
            generation,
            id,
            echoed,
            driver: None,
            model: None,
            status: 0,
            passed: false,
            over: false,
            room: None,
        }
    }

    async fn upstream_peer(&self, _: &mut Session, _: &mut RequestContext) -> pingora::Result<Box<HttpPeer>> {
        Err(Error::explain(ErrorType::InternalError, "request_filter answers every request"))
    }

    async fn request_filter(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> pingora::Result<bool> {
        let stall = Duration::from_millis(context.generation.config.timeouts.client_stall_ms);
        session.as_downstream_mut().set_write_timeout(Some(stall));
        if let Some(echoed) = request_id::decent(&session.req_header().headers) {
            context.echoed = echoed;
        }
        match self.serve(session, context).await {
            Ok(()) => Ok(true),
            Err(Ended::ClientGone) => {
                context.status = 499;
                Err(gone())
            }
            Err(Ended::Refused(refusal)) => {
                context.status = refusal.0.status;
                answer::error(session, &refusal.0, &context.echoed).await.map(|()| true)
            }
        }
    }

    fn suppress_error_log(&self, _: &Session, _: &RequestContext, _: &Error) -> bool {
        true
    }

    async fn logging(&self, session: &mut Session, _: Option<&Error>, context: &mut RequestContext) {
        let client = session.as_downstream();
        self.0.metrics.server.request_bytes.increment(client.body_bytes_read() as u64);
        self.0.metrics.server.response_bytes.increment(client.body_bytes_sent() as u64);
        context.log(session);
        context.end();
    }
}

impl FrontDoor {
    async fn serve(&self, session: &mut Session, context: &mut RequestContext) -> Result<(), Ended> {
        let head = session.req_header();
        let (method, uri) = (head.method.clone(), head.uri.clone());
        match Route::of(&method, uri.path())? {
            Route::Health => self.tell(session, context, json!({"status": "ok"})).await,
            Route::Version => {
                self.tell(session, context, json!({"version": env!("CARGO_PKG_VERSION")})).await
            }
            Route::Models => {
                let models: Vec<_> =
                    context.generation.models.list().iter().map(|m| self.card(&m.name)).collect();
                self.tell(session, context, json!({"object": "list", "data": models})).await
            }
            Route::Model(name) => {
                let name = context.generation.models.named(Some(name))?.name.clone();
                self.tell(session, context, self.card(&name)).await
            }
            Route::Pass(path) => {
                let body = self.body(session, context).await?;
                context.status = passthrough::pass(
                    session,
                    &context.generation,
                    path,
                    &body,
                    &context.id,
                    &context.echoed,
                )
                .await?;
                context.passed = true;
                Ok(())
            }
            Route::Generate(endpoint) => {
                let body = self.body(session, context).await?;
                let headers = &session.req_header().headers;
                let ask = Ask::read(endpoint, &body, headers, &context.generation)?;
                drop(body);
                self.generate(session, context, ask).await
            }
        }
    }

    async fn generate(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        ask: Ask,
    ) -> Result<(), Ended> {
        context.model = Some(ask.model.name.clone());
        let driver = context.driver.insert(ExchangeDriver::new(
            Arc::clone(&self.0),
            Arc::clone(&context.generation),
            context.id.clone(),
            Arc::clone(&ask.model),
        ));
        driver.reserve(session, &ask)?;
        let handoff = driver.prefill(session, &ask).await?;
        let answer = driver.decode(session, &ask, handoff).await?;
        let silence = ask.model.bounds.stream_silence;
        drop(ask);
        context.status = answer::pass(session, driver, answer, &context.echoed, silence).await?;
        Ok(())
    }

    /// A place among the requests in flight, and the body.
    async fn body(&self, session: &mut Session, context: &mut RequestContext) -> Result<Bytes, Ended> {
        let config = &context.generation.config;
        let Some(room) = self.0.room(config.limits.in_flight) else {
            return Err(ApiError::overloaded("the router is full", Duration::from_secs(1)).into());
        };
        context.room = Some(room);
        let within = Duration::from_millis(config.timeouts.body_ms);
        intake::body(session, config.limits.body_bytes, within).await
    }

    async fn tell(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        what: serde_json::Value,
    ) -> Result<(), Ended> {
        context.status = 200;
        let headers = [("content-type", "application/json".to_owned())];
        let body = Bytes::from(what.to_string());
        let told = answer::whole(session, 200, &headers, &context.echoed, body).await;
        told.map_err(|_| Ended::ClientGone)
    }

    fn card(&self, name: &str) -> serde_json::Value {
        json!({"id": name, "object": "model", "created": self.0.created, "owned_by": "baton"})
    }
}

impl RequestContext {
    fn log(&self, session: &Session) {
        let engine = |of: fn(&ExchangeDriver) -> Option<&str>| self.driver.as_ref().and_then(of);
        let timeline = self.driver.as_ref().map(ExchangeDriver::timeline).unwrap_or_default();
        let between = |from: Option<Time>, to: Option<Time>| {
            Some(u64::try_from(to?.since(from?).as_micros()).unwrap_or(u64::MAX))
        };
        let outcome = self.driver.as_ref().and_then(ExchangeDriver::outcome).map(|o| o.label());
        tracing::info!(
            target: "baton_router::access",
            request = %self.id,
            method = %session.req_header().method,
            path = session.req_header().uri.path(),
            model = self.model.as_deref(),
            prefill = engine(|d| d.prefill_engine.as_deref().map(|e| e.authority())),
            decode = engine(|d| d.decode_engine.as_deref().map(|e| e.authority())),
            status = self.status,
            outcome,
            finish = self.driver.as_ref().and_then(|d| d.watched.seen.finish).map(|f| f.label()),
            prefill_us = between(timeline.prefill_sent, timeline.held),
            gap_us = between(timeline.held, timeline.decode_sent),
            accept_us = between(timeline.decode_sent, timeline.accepted),
            first_byte_us = between(timeline.accepted, timeline.first_chunk),
            stream_us = between(timeline.first_chunk, timeline.ended),
            total_us = u64::try_from(self.shared.now().since(self.begun).as_micros()).unwrap_or(u64::MAX),
            "request"
        );
    }
}

impl RequestContext {
    /// Counts the request, once, whatever ended it.
    fn end(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let unknown = &self.shared.metrics.requests.unknown;
        match &mut self.driver {
            Some(driver) => {
                // Nothing, where it is over already.
                driver.apply(Event::Dropped);
                let outcome = driver.outcome().unwrap_or(Outcome::Dropped(Phase::Queue));
                let (end, line) = (End::Exchange(outcome), driver.timeline());
                driver.watched.ended(&driver.model.metrics, end, self.status, &line, self.begun);
            }
            None if self.passed => unknown.ended(End::Passed, self.status),
            None if self.status == 499 => {
                self.shared.metrics.disconnect(Phase::Queue);
                unknown.ended(End::Exchange(Outcome::ClientGone(Phase::Queue)), self.status);
            }
            None if self.status >= 400 => unknown.ended(End::Rejected, self.status),
            // The router's own answers: `/health` and the like.
            None => {}
        }
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        self.end();
    }
}

/// pingora's word for it: nothing is written, the connection is closed.
fn gone() -> Box<Error> {
    Error::explain(ErrorType::ConnectionClosed, "the client is gone").into_down()
}
