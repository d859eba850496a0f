//! What would be decided about a request, without asking any engine and without leaving a trace.

use std::sync::Arc;

use baton_openai::{ApiError, path};
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};

use crate::admin::explain::disaggregated;
use crate::engines::caches::kv_events::Subscriptions;
use crate::exchange::ask::{Ask, Owner};
use crate::message::path::Dialect;
use crate::routing::disaggregation;
use crate::routing::pool::{Trial, another_first};
use crate::state::generation::Generation;

/// Decides as for a client's request with this path, body and headers, of this tenant: with `auth` each has a salt of
/// its own, and so prefixes of its own.
///
/// # Errors
/// What the client would be told.
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
    let owner = identity.as_ref().map(|(auth, identity)| Owner { identity, auth });
    let ask = Ask::read(dialect, body.clone(), headers, generation, owner.as_ref())?;
    let mut wanted = ask.wanted();
    let decode: Trial = ask.model.decode.try_out(&wanted, &[]);
    let facts = ask.facts(decode.sight.holding);
    let decided = disaggregation::decide(&ask.model.disaggregate, &facts);
    let prefill = decode.chosen.as_ref().filter(|_| decided.is_remote()).map(|chosen| {
        wanted.pair = chosen.pair();
        let pool = &ask.model.prefill;
        let chosen = another_first(&[&[Arc::clone(&chosen.engine)], &[]], |tried| {
            let trial = pool.try_out(&wanted, tried);
            if trial.chosen.is_some() { Ok(trial) } else { Err(Box::new(trial)) }
        });
        chosen.unwrap_or_else(|none| *none)
    });
    let told = |trial: &Trial| {
        let mut told = trial.sight.json();
        let events = trial.chosen.as_ref().and_then(|chosen| kv_events.of(chosen.engine.id()));
        if let Some((_, events)) = events {
            told["held"]["kv_events_left_out"] = events.left_out_json();
        }
        told
    };
    Ok(json!({
        "model": ask.model.name,
        "generation": generation.number,
        "decode": told(&decode),
        "disaggregation": disaggregated(decided, &facts),
        "prefill": prefill.as_ref().map(told),
    }))
}
