//! The decisions about a request, without contacting any engine and without leaving a trace.

use std::sync::Arc;

use baton_openai::{ApiError, path};
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};

use crate::admin::explain::disaggregated;
use crate::engines::caches::kv_events::Subscriptions;
use crate::engines::http::Engine;
use crate::exchange::client_request::{ClientRequest, RequestOwner};
use crate::message::features::RoutingFeatures;
use crate::message::path::Dialect;
use crate::routing::disaggregation;
use crate::routing::pool::{DryRun, Pool, another_first};
use crate::state::generation::Generation;

/// Decides as for a client's request with this path, body and headers, of this tenant. With `auth` each tenant has
/// its own salt, and so its own prefixes.
///
/// # Errors
/// The error that the client would receive.
pub(crate) fn dry_run(
    path: &str,
    body: &Bytes,
    headers: &HeaderMap,
    generation: &Generation,
    kv_events: &Subscriptions,
    tenant: Option<&str>,
) -> Result<Value, ApiError> {
    let dialect =
        Dialect::at(path).ok_or_else(|| path::not_found(path, |meant| Dialect::at(meant).is_some()))?;
    let identity = match (&generation.auth, tenant) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(ApiError::invalid(
                "tenant",
                "with `auth` a dry run needs a tenant: `?tenant=NAME`, or `--tenant NAME` of `baton explain`",
            ));
        }
        (Some(auth), Some(name)) => match auth.of_tenant(name) {
            Some(identity) => Some((auth, identity)),
            None => return Err(ApiError::invalid("tenant", "no key or certificate belongs to this tenant")),
        },
    };
    let owner = identity.as_ref().map(|(auth, identity)| RequestOwner { identity, auth });
    let request = ClientRequest::read(dialect, body.clone(), headers, generation, owner.as_ref())?;
    let mut features = request.routing_features();
    let without_partner = match dialect.generates() {
        true => request.model.decode.without_partner(&request.model.prefill),
        false => Vec::new(),
    };
    let decode = choose(&request.model.decode, &features, &[without_partner.as_slice(), &[]]);
    let compatibility = decode.chosen.as_ref().and_then(|chosen| chosen.compatibility());
    let inputs = request.disaggregation_inputs(decode.decision.cached, compatibility);
    let decided = disaggregation::decide(&request.model.disaggregate, &inputs);
    let prefill = decode.chosen.as_ref().filter(|_| decided.is_remote()).map(|chosen| {
        chosen.require_partner(&mut features);
        choose(&request.model.prefill, &features, &[&[Arc::clone(&chosen.engine)], &[]])
    });
    let explain = |trial: &DryRun| {
        let mut explained = trial.decision.json();
        let events = trial.chosen.as_ref().and_then(|chosen| kv_events.of(&chosen.engine));
        if let Some(events) = events {
            explained["held"]["kv_events_left_out"] = events.ignored_json();
        }
        explained
    };
    Ok(json!({
        "model": request.model.name,
        "generation": generation.version.number,
        "decode": explain(&decode),
        "disaggregation": disaggregated(decided, &inputs),
        "prefill": prefill.as_ref().map(explain),
    }))
}

/// The choice outside the first list of `avoided`, or else the next list.
fn choose(pool: &Pool, features: &RoutingFeatures<'_>, avoided: &[&[Arc<Engine>]]) -> DryRun {
    let chosen = another_first(avoided, |tried| {
        let trial = pool.dry_run(features, tried);
        if trial.chosen.is_some() { Ok(trial) } else { Err(Box::new(trial)) }
    });
    chosen.unwrap_or_else(|none| *none)
}
