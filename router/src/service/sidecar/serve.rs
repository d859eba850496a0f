//! Requests of a routing sidecar: both legs for those that name a prefill engine, and the decode engine for all others.

use std::sync::Arc;

use hyper::Method;
use serde_json::json;

use super::pass::{PassedRequest, check_path};
use super::{ROUTING_HEADERS, RoutingHeaders, SidecarListener, gateway_error, is_failure};
use crate::client::session::Session;
use crate::exchange::client_request::ClientRequest;
use crate::legs::request_error::RequestError;
use crate::message::path::Dialect;
use crate::service::context::RequestContext;
use crate::service::{BodyRule, ClientService, end_stream};

impl ClientService {
    /// Serves one request of a sidecar. The error of an engine names its leg for a picker, which sees only the sidecar.
    pub(in crate::service) async fn serve_beside_engine(
        &self,
        listener: &SidecarListener,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<(), RequestError> {
        let served = self.serve_legs_or_pass(listener, session, context).await;
        if let Err(RequestError::Refused(refusal)) = &served
            && is_failure(&refusal.0)
        {
            context.ids.common_headers.failed_leg = listener.last_leg(context.driver.as_ref());
        }
        served
    }

    async fn serve_legs_or_pass(
        &self,
        listener: &SidecarListener,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<(), RequestError> {
        let head = session.req_header_mut();
        let headers = RoutingHeaders::read(&head.headers);
        for name in ROUTING_HEADERS {
            head.remove_header(name);
        }
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        if matches!(method, Method::GET | Method::HEAD) && path == "/health" {
            return self.send_json(session, context, json!({"status": "ok"})).await;
        }
        let rank = listener.rank(&headers)?;
        let Some(dialect) = Dialect::at(&path).filter(|_| method == Method::POST) else {
            return self.pass(listener, rank, &path, session, context).await;
        };
        let prefiller = listener.prefiller(&headers, &self.0, &context.generation)?;
        let body = self.body(session, context, BodyRule::Json).await?;
        let find =
            |name: Option<&str>| Ok(listener.model(&context.generation, rank, name, prefiller.as_deref()));
        let headers = &session.req_header().headers;
        let request = ClientRequest::read_for(dialect, body, headers, &context.generation, None, &find)?;
        match self.ask(session, context, Box::new(request)).await {
            Err(RequestError::Refused(refusal)) => {
                let last = context.driver.as_ref().and_then(|driver| listener.last_leg(Some(driver)));
                let refusal = gateway_error(refusal, last);
                match session.has_begun() {
                    true => end_stream(session, context, &refusal).await,
                    false => Err(RequestError::Refused(refusal)),
                }
            }
            ended => ended,
        }
    }

    /// Passes a request to the decode engine as it is.
    async fn pass(
        &self,
        listener: &SidecarListener,
        rank: u16,
        path: &str,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<(), RequestError> {
        check_path(path)?;
        let body = self.body(session, context, BodyRule::Any).await?;
        let generation = Arc::clone(&context.generation);
        let request = PassedRequest::new(session, body, &generation)?;
        let model = listener.model(&generation, rank, None, None);
        let status = request.relay(session, &model, &generation).await?;
        // The engine's own errors are no failures of the sidecar.
        context.accounting.status = if status < 400 { status } else { 200 };
        Ok(())
    }
}
