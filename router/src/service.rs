//! The front door: pingora's phases, and what happens in them to one request.
//!
//! Both legs run inside `request_filter`, with a pump of our own, and pingora's built-in proxying is never
//! reached: it re-sends at most 64 KiB of a body that a filter has read, which is 16,000 tokens.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use baton_connector::exchange::{Event, Outcome, Phase};
use baton_connector::{RequestId, Time};
use baton_openai::ApiError;
use bytes::Bytes;
use hyper::header::HeaderValue;
use pingora::http::RequestHeader;
use pingora::prelude::{Error, ErrorType, HttpPeer};
use pingora::proxy::{ProxyHttp, Session};
use serde_json::json;

use crate::exchange_driver::{Ended, ExchangeDriver};
use crate::finished::{Finished, Head};
use crate::generation::Generation;
use crate::hygiene::Wire;
use crate::intake::{self, Ask};
use crate::metrics::End;
use crate::route::Route;
use crate::shared::{Room, Shared};
use crate::trace_context::Trace;
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
    /// The client's own id, where it sent a decent one.
    client_id: Option<HeaderValue>,
    driver: Option<ExchangeDriver>,
    status: u16,
    trace: Trace,
    /// What of the head is wanted at the end; `None` where nobody wants it.
    head: Option<Head>,
    request_bytes: u64,
    response_bytes: u64,
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
            client_id: None,
            driver: None,
            status: 0,
            trace: Trace::default(),
            head: None,
            request_bytes: 0,
            response_bytes: 0,
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
            context.client_id = Some(echoed.clone());
            context.echoed = echoed;
        }
        context.notice(session.req_header());
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
        let received = Wire::of(session).map_or(0, |wire| wire.body_bytes());
        context.request_bytes = received;
        context.response_bytes = client.body_bytes_sent() as u64;
        self.0.metrics.server.request_bytes.increment(context.request_bytes);
        self.0.metrics.server.response_bytes.increment(context.response_bytes);
        if let Some(driver) = &context.driver {
            driver.end(context.status);
        }
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
                    body,
                    &context.id,
                    &context.echoed,
                    &context.trace,
                )
                .await?;
                context.passed = true;
                Ok(())
            }
            Route::Generate(endpoint) => {
                let body = self.body(session, context).await?;
                let headers = &session.req_header().headers;
                let ask = Ask::read(endpoint, body, headers, &context.generation)?;
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
        let driver = context.driver.insert(ExchangeDriver::new(
            Arc::clone(&self.0),
            Arc::clone(&context.generation),
            context.id.clone(),
            context.client_id.as_ref(),
            Arc::clone(&ask.model),
        ));
        driver.watch(&context.trace, context.room.as_ref().map(|room| &room.entry));
        driver.reserve(&ask)?;
        // Boxed: an answer may be passed on for minutes, and would hold the room of what came before it.
        let handoff = Box::pin(driver.prefill(session, &ask)).await?;
        let answer = Box::pin(driver.decode(session, &ask, handoff)).await?;
        drop(ask);
        let silence = Duration::from_millis(context.generation.config.timeouts.stream_silence_ms);
        context.status = answer::pass(session, driver, answer, &context.echoed, silence).await?;
        Ok(())
    }

    /// A place among the requests in flight, and the body.
    async fn body(&self, session: &mut Session, context: &mut RequestContext) -> Result<Bytes, Ended> {
        let config = &context.generation.config;
        let Some(room) = self.0.room(config.limits.in_flight, &context.id, context.begun) else {
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
    /// Takes from the head what is wanted later.
    fn notice(&mut self, head: &RequestHeader) {
        let observers = &self.generation.observers;
        let random = |bytes: &mut [u8; 24]| {
            getrandom::fill(bytes).expect("the kernel's random numbers are there from boot on");
        };
        self.trace = Trace::begin(&head.headers, observers.sample_ratio(), random);
        if observers.is_any() {
            self.head = Some(Head::of(&head.method, head.uri.path(), &head.headers));
        }
    }

    /// Counts the request, once, whatever ended it, and tells those who want to know.
    fn end(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        // What the router answers itself, `/health` above all, is asked for all the time and of no interest.
        let Some(end) = self.count() else { return };
        let Some(head) = self.head.take() else { return };
        let driver = self.driver.as_ref();
        let watched = driver.map(|driver| &driver.watched);
        self.generation.observers.tell(Finished {
            head,
            id: self.id.clone(),
            echoed: self.echoed.clone(),
            trace: self.trace.clone(),
            model: driver.map(|driver| Arc::clone(&driver.model)),
            tenant: None,
            end,
            status: self.status,
            begun: self.begun,
            over: self.shared.now(),
            at: SystemTime::now(),
            line: driver.map(ExchangeDriver::timeline).unwrap_or_default(),
            engines: driver.map_or([None, None], |d| [d.prefill_engine.clone(), d.decode_engine.clone()]),
            attempts: watched.map_or([0, 0], |watched| watched.attempts),
            request_bytes: self.request_bytes,
            response_bytes: self.response_bytes,
            streamed: watched.is_some_and(|watched| watched.streamed),
            seen: watched.map(|watched| watched.seen).unwrap_or_default(),
        });
    }

    /// How it ended; `None` for the router's own answers, `/health` and the like.
    fn count(&mut self) -> Option<End> {
        let unknown = &self.shared.metrics.requests.unknown;
        match &mut self.driver {
            Some(driver) => {
                // Nothing, where it is over already.
                driver.apply(Event::Dropped);
                let outcome = driver.outcome().unwrap_or(Outcome::Dropped(Phase::Queue));
                let (end, line) = (End::Exchange(outcome), driver.timeline());
                driver.watched.ended(&driver.model.metrics, end, self.status, &line, self.begun);
                Some(end)
            }
            None => {
                let end = match self.status {
                    _ if self.passed => End::Passed,
                    0 => End::Exchange(Outcome::Dropped(Phase::Queue)),
                    499 => End::Exchange(Outcome::ClientGone(Phase::Queue)),
                    400.. => End::Rejected,
                    _ => return None,
                };
                if self.status == 499 {
                    self.shared.metrics.disconnect(Phase::Queue);
                }
                unknown.ended(end, self.status);
                Some(end)
            }
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
