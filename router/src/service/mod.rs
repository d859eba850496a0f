//! The service for clients: paths, the context of one request, responses.
//!
//! pingora's session reads its head and writes the answer's; pingora's built-in proxying is not used. It asks one engine,
//! re-sends at most 64 KiB of a body (16,000 tokens), and its future has room for HTTP/2, a cache and subrequests in
//! every open stream.

pub(crate) mod response;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use baton_connector::exchange::{Event, Outcome, Phase};
use baton_connector::{RequestId, Time};
use baton_openai::ApiError;
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde_json::json;

use crate::admission::{Claim, Ticket, deadline};
use crate::auth::{self, Identity, Permit};
use crate::client::address;
use crate::client::session::Session;
use crate::config::Priority;
use crate::engines::body_budget::{Held, Share};
use crate::exchange::ask::{self, Ask, Owner};
use crate::exchange::driver::ExchangeDriver;
use crate::exchange::resume;
use crate::legs::outcome::Ended;
use crate::message::path::Route;
use crate::message::request_id;
use crate::message::trace_context::Trace;
use crate::metrics::{End, Leg};
use crate::observe::finished::{Finished, Head};
use crate::routing::models::Model;
use crate::state::generation::Generation;
use crate::state::readiness;
use crate::state::shared::{Room, Shared};
use response::{Patience, Stamp};

/// Engines of one leg that are asked for the context length of a model; the engines of a pool are alike.
const ENGINES_ASKED_MAX: usize = 16;

/// The service of one router.
pub(crate) struct FrontDoor(pub Arc<Shared>);

/// One request's context. Dropping it settles what the request still owes.
pub(crate) struct RequestContext {
    shared: Arc<Shared>,
    begun: Time,
    /// The configuration that was in effect when the request began.
    generation: Arc<Generation>,
    id: RequestId,
    /// What every answer carries: the id (the client's own, where it sent a decent one), and its limits.
    stamp: Stamp,
    /// The client's own id, where it sent a decent one.
    client_id: Option<HeaderValue>,
    /// With `auth`: whose request it is, and its place within their limits.
    permit: Option<Permit>,
    /// Tokens of its prompt, estimated.
    prompt_tokens: u64,
    driver: Option<ExchangeDriver>,
    status: u16,
    trace: Trace,
    /// What of the head is wanted at the end; `None` where nobody wants it.
    head: Option<Head>,
    request_bytes: u64,
    response_bytes: u64,
    /// One engine answers it by itself.
    passed: bool,
    /// It has been counted.
    over: bool,
    room: Option<Room>,
    /// What its body takes of the budget of all bodies.
    body_bytes: Option<Held>,
}

impl FrontDoor {
    /// Serves one request.
    pub(crate) async fn request(&self, session: &mut Session) {
        let mut context = self.context();
        if self.0.draining.load(Ordering::Relaxed) {
            session.close_after();
        }
        if let Some(echoed) = request_id::decent(&session.req_header().headers) {
            context.client_id = Some(echoed.clone());
            context.stamp.id = echoed;
        }
        context.notice(session);
        if let Err(ended) = self.serve(session, &mut context).await {
            context.status = match ended {
                Ended::ClientGone => 499,
                Ended::Refused(refusal) => {
                    // A client that does not take it is gone.
                    let _ = response::error(session, &refusal.0, &context.stamp).await;
                    refusal.0.status
                }
            };
        }
        context.request_bytes = session.wire().body_bytes();
        context.response_bytes = session.body_bytes();
        self.0.metrics.server.request_bytes.increment(context.request_bytes);
        self.0.metrics.server.response_bytes.increment(context.response_bytes);
        if let Some(driver) = &context.driver {
            driver.end(context.status);
        }
        context.end();
    }

    fn context(&self) -> RequestContext {
        let id = request_id::mint();
        let echoed = HeaderValue::from_str(id.as_str()).expect("a request id is printable ASCII");
        let generation = self.0.generation();
        RequestContext {
            begun: self.0.now(),
            shared: Arc::clone(&self.0),
            generation,
            id,
            stamp: Stamp { id: echoed, limits: Vec::new() },
            client_id: None,
            permit: None,
            prompt_tokens: 0,
            driver: None,
            status: 0,
            trace: Trace::default(),
            head: None,
            request_bytes: 0,
            response_bytes: 0,
            passed: false,
            over: false,
            room: None,
            body_bytes: None,
        }
    }

    async fn serve(&self, session: &mut Session, context: &mut RequestContext) -> Result<(), Ended> {
        let head = session.req_header();
        let (method, uri) = (head.method.clone(), head.uri.clone());
        match Route::of(&method, uri.path())? {
            Route::Health => self.tell(session, context, json!({"status": "ok"})).await,
            Route::Ready => {
                let (status, what) = match readiness::readiness(&self.0) {
                    Ok(()) => (200, "ready"),
                    Err(why) => (503, why),
                };
                self.tell_with(status, session, context, json!({"status": what})).await
            }
            Route::Version => {
                self.tell(session, context, json!({"version": env!("CARGO_PKG_VERSION")})).await
            }
            Route::Models => {
                let identity = self.identify(session, context)?;
                let models = context.generation.models.list().iter();
                let models = models.filter(|m| may_use(identity.as_deref(), &context.generation, &m.name));
                let names = async |model: &Arc<Model>| {
                    let context = context_of(model).await;
                    let names = std::iter::once(&model.name).chain(&model.aliases);
                    names.map(|name| self.card(name, &model.name, context)).collect::<Vec<_>>()
                };
                let models: Vec<_> = models.collect();
                let cards = futures::future::join_all(models.into_iter().map(names)).await;
                let models: Vec<_> = cards.into_iter().flatten().collect();
                self.tell(session, context, json!({"object": "list", "data": models})).await
            }
            Route::Model(name) => {
                let identity = self.identify(session, context)?;
                let model = Arc::clone(context.generation.models.named(Some(&name))?);
                if !may_use(identity.as_deref(), &context.generation, &model.name) {
                    return Err(auth::forbidden(&model.name).into());
                }
                let card = self.card(&name, &model.name, context_of(&model).await);
                self.tell(session, context, card).await
            }
            Route::Options(allowed) => {
                context.status = 200;
                let headers = [("allow", allowed.to_owned())];
                let told = response::whole(session, 200, &headers, &context.stamp, Bytes::new()).await;
                told.map_err(|_| Ended::ClientGone)
            }
            Route::Ask(dialect) => {
                self.permit(session, context)?;
                let body = self.body(session, context).await?;
                let headers = &session.req_header().headers;
                let ask = Ask::read(dialect, body, headers, &context.generation, context.owner().as_ref())?;
                context.limit(&ask)?;
                context.passed = !dialect.generates();
                self.ask(session, context, ask).await
            }
        }
    }

    async fn ask(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        mut ask: Ask,
    ) -> Result<(), Ended> {
        let bounds = ask.model.bounds;
        let until = bounds.request.and_then(|most| context.began().checked_add(most));
        let identity = context.permit.as_ref().map(|permit| &*permit.identity);
        let headers = &session.req_header().headers;
        let ticket = Ticket {
            claim: claim(headers, (ask.priority, ask.body.len(), ask.tokens), identity),
            deadline: context.until(headers, bounds.request, context.generation.config.queue.timeout_ms),
            ends: context.ends(headers, bounds.request),
        };
        let driver = context.driver.insert(ExchangeDriver::new(
            Arc::clone(&self.0),
            Arc::clone(&context.generation),
            context.id.clone(),
            context.client_id.as_ref(),
            ask.dialect.path(),
            Arc::clone(&ask.model),
        ));
        driver.watch(&context.trace, context.room.as_ref().map(|room| &room.entry));
        if let Err(refused) = driver.reserve(session, &ask, ticket).await {
            context.permit.iter_mut().for_each(Permit::give_tokens_back);
            return Err(refused);
        }
        let dialect = ask.dialect;
        let transcript = resume::Transcript::of(&mut ask);
        driver.watched.reading = ask.reading();
        // Boxed: an answer may be passed on for minutes, and would hold the room of what came before it.
        let legs = Box::pin(async {
            let handoff = driver.prefill(session, &ask).await?;
            driver.decode(session, &ask, handoff).await
        });
        let answer = match until {
            None => legs.await,
            Some(until) => match tokio::time::timeout_at(until.into(), legs).await {
                Ok(answer) => answer,
                Err(_elapsed) => Err(driver.out_of_time()),
            },
        };
        if answer.is_err() && driver.watched.attempts == [0, 0] {
            // No engine was asked.
            context.permit.iter_mut().for_each(Permit::give_tokens_back);
        }
        let answer = answer?;
        let resuming = transcript.map(|transcript| Box::new(response::Resuming::new(transcript, ask)));
        context.body_bytes = None;
        let patience = Patience { silence: bounds.stream_silence, until };
        context.status =
            response::pass(session, driver, answer, &context.stamp, patience, resuming, dialect).await?;
        Ok(())
    }

    /// Who asks; `None` without `auth`. The client's credentials end here: no engine and no log gets them.
    fn identify(
        &self,
        session: &mut Session,
        context: &RequestContext,
    ) -> Result<Option<Arc<Identity>>, ApiError> {
        let Some(auth) = &context.generation.auth else { return Ok(None) };
        let identity = {
            let names = session.wire().certificate_names().unwrap_or_default();
            auth.identify(&session.req_header().headers, &names, &self.0.tenants)?
        };
        session.req_header_mut().remove_header(&AUTHORIZATION);
        Ok(Some(identity))
    }

    /// Who asks, and a place within their limits.
    fn permit(&self, session: &mut Session, context: &mut RequestContext) -> Result<(), ApiError> {
        if let Some(identity) = self.identify(session, context)? {
            let permit = context.permit.insert(Permit::begin(identity, &self.0.tenants)?);
            context.stamp.limits = permit.headers();
        }
        Ok(())
    }

    /// A place among the requests in flight, and the body.
    async fn body(&self, session: &mut Session, context: &mut RequestContext) -> Result<Bytes, Ended> {
        let config = &context.generation.config;
        let Some(room) = self.0.room(config.limits.in_flight, &context.id, context.begun) else {
            return Err(ApiError::overloaded("the router is full", Duration::from_secs(1)).into());
        };
        context.room = Some(room);
        let longest = context.generation.models.longest_request();
        let until = context.until(&session.req_header().headers, longest, config.timeouts.body_ms);
        let within = until.saturating_duration_since(Instant::now());
        let held = context.body_bytes.insert(self.0.bodies.begin());
        let share = Share { held, total_bytes: config.limits.body_bytes_total };
        ask::body(session, config.limits.body_bytes, share, within).await
    }

    async fn tell(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        what: serde_json::Value,
    ) -> Result<(), Ended> {
        self.tell_with(200, session, context, what).await
    }

    async fn tell_with(
        &self,
        status: u16,
        session: &mut Session,
        context: &mut RequestContext,
        what: serde_json::Value,
    ) -> Result<(), Ended> {
        // Whatever the router says of itself is no failed request.
        context.status = 200;
        let headers = [("content-type", "application/json".to_owned())];
        let body = Bytes::from(what.to_string());
        let told = response::whole(session, status, &headers, &context.stamp, body).await;
        told.map_err(|_| Ended::ClientGone)
    }

    /// One of a model's names, as vLLM lists each.
    fn card(&self, name: &str, model: &str, context: Option<u64>) -> serde_json::Value {
        let created = self.0.created;
        let mut card = json!({"id": name, "object": "model", "created": created, "owned_by": "baton", "root": model,
            "parent": null});
        if let Some(context) = context {
            card["max_model_len"] = context.into();
        }
        card
    }
}

/// Tokens that a prompt and its answer may have together: the least that an engine of either leg takes, as far as they say.
async fn context_of(model: &Model) -> Option<u64> {
    let engines = Leg::BOTH.iter().flat_map(|leg| {
        let members = model.pool(*leg).members().iter();
        members.filter(|member| member.engine.is_known()).take(ENGINES_ASKED_MAX)
    });
    let lengths = engines.map(|member| member.engine.shown_context_of(&model.name));
    futures::future::join_all(lengths).await.into_iter().flatten().min()
}

/// What the request is to the queue: what its head says, and its priority, bytes and cost in tokens.
fn claim(
    headers: &HeaderMap,
    (priority, bytes, cost): (Option<i64>, usize, u64),
    identity: Option<&Identity>,
) -> Claim {
    let most = identity.map_or(Priority::High, |identity| identity.priority_max);
    Claim {
        tenant: identity.map(|identity| identity.tenant.id),
        weight: identity.map_or(1, |identity| identity.tenant.weight),
        priority: deadline::priority(headers, priority, most),
        bytes,
        cost,
    }
}

/// Whether somebody may use the model of this name; without `auth` everybody may.
fn may_use(identity: Option<&Identity>, generation: &Generation, model: &str) -> bool {
    let means = |name: &str| generation.models.named(Some(name)).is_ok_and(|found| found.name == model);
    identity.is_none_or(|identity| identity.may_use(means))
}

impl RequestContext {
    /// When it began, as deadlines have it.
    fn began(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(self.shared.now().since(self.begun)).unwrap_or(now)
    }

    /// Until when one step of it may take: so long from now, and not beyond what the whole request may take or the time
    /// at which its client gives up.
    fn until(&self, headers: &HeaderMap, request: Option<Duration>, step_ms: u64) -> Instant {
        let step = Instant::now() + Duration::from_millis(step_ms);
        self.ends(headers, request).map_or(step, |ends| ends.min(step))
    }

    /// When the whole request has taken as long as it may, or its client gives up.
    fn ends(&self, headers: &HeaderMap, request: Option<Duration>) -> Option<Instant> {
        let began = self.began();
        let whole = request.and_then(|most| began.checked_add(most));
        [whole, deadline::client_gives_up(headers, began)].into_iter().flatten().min()
    }

    /// Takes from the head what is wanted later.
    fn notice(&mut self, session: &Session) {
        let (head, config) = (session.req_header(), &self.generation.config);
        let observers = &self.generation.observers;
        let random = |bytes: &mut [u8; 24]| {
            bytes[..16].copy_from_slice(&request_id::random());
            bytes[16..].copy_from_slice(&request_id::random()[..8]);
        };
        self.trace = Trace::begin(&head.headers, observers.sample_ratio(), random);
        if observers.is_any() {
            let told = config.access_log.client;
            let client = told.then(|| address::of(session, &config.trusted_proxies));
            self.head = Some(Head::of(&head.method, head.uri.path(), &head.headers, client));
        }
    }

    /// What a known client may do with this request, and what it costs; with `auth` only.
    fn limit(&mut self, ask: &Ask) -> Result<(), ApiError> {
        let Some(permit) = &mut self.permit else { return Ok(()) };
        if !may_use(Some(&permit.identity), &self.generation, &ask.model.name) {
            return Err(auth::forbidden(&ask.model.name));
        }
        self.prompt_tokens = ask.prompt_tokens;
        let taken = permit.take_tokens(ask.tokens);
        self.stamp.limits = permit.headers();
        taken
    }

    /// Whose request it is; with `auth` only.
    fn owner(&self) -> Option<Owner<'_>> {
        let (auth, permit) = (self.generation.auth.as_deref()?, self.permit.as_ref()?);
        Some(Owner { identity: &permit.identity, auth })
    }

    /// Counts the request, once, whatever ended it, and tells those who want to know.
    fn end(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        // What the router answers itself, `/health` above all, is asked for all the time and of no interest.
        let Some(end) = self.count() else { return };
        self.charge();
        let Some(head) = self.head.take() else { return };
        let driver = self.driver.as_ref();
        let watched = driver.map(|driver| &driver.watched);
        self.generation.observers.tell(Finished {
            head,
            id: self.id.clone(),
            echoed: self.stamp.id.clone(),
            trace: self.trace.clone(),
            model: driver.map(|driver| Arc::clone(&driver.model)),
            tenant: self.permit.as_ref().map(|permit| Arc::clone(&permit.identity.tenant.name)),
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

    /// Charges what the answer turned out to cost beyond what was taken for it.
    fn charge(&mut self) {
        let (Some(permit), Some(driver)) = (&mut self.permit, &self.driver) else { return };
        if let Some(cost) = driver.watched.seen.cost(self.prompt_tokens) {
            permit.has_cost(cost);
        }
    }

    /// How it ended; `None` for the router's own answers, `/health` and the like.
    fn count(&mut self) -> Option<End> {
        let unknown = &self.shared.metrics.requests.unknown;
        match &mut self.driver {
            Some(driver) => {
                // Nothing, where it is over already.
                driver.apply(Event::Dropped);
                let outcome = driver.outcome().unwrap_or(Outcome::Dropped(Phase::Queue));
                let end = match outcome {
                    Outcome::Completed if self.passed => End::Passed,
                    outcome => End::Exchange(outcome),
                };
                let line = driver.timeline();
                driver.watched.ended(&driver.model.metrics, end, self.status, &line, self.begun);
                Some(end)
            }
            None => {
                let end = match self.status {
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
