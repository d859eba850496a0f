//! What would be decided about a request, without asking any engine and without leaving a trace.

use std::sync::Arc;

use baton_openai::ApiError;
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};

use super::page::disaggregated;
use crate::disaggregation::{self, Facts};
use crate::generation::Generation;
use crate::intake::Ask;
use crate::pool::{Trial, another_first};
use crate::route::Dialect;

/// Decides as for a client's request with this path, body and headers.
///
/// # Errors
/// What the client would be told.
pub(crate) fn dry_run(
    path: &str,
    body: &Bytes,
    headers: &HeaderMap,
    generation: &Generation,
) -> Result<Value, ApiError> {
    let dialect = Dialect::at(path).ok_or_else(|| ApiError::not_found(path))?;
    let ask = Ask::read(dialect, body.clone(), headers, generation, None)?;
    let mut wanted = ask.wanted();
    let decode: Trial = ask.model.decode.try_out(&wanted, &[]);
    let facts = Facts::of(&ask, decode.sight.holding);
    let decided = disaggregation::decide(&ask.model.disaggregate, &facts);
    let prefill = decode.chosen.as_ref().filter(|_| decided.is_remote()).map(|chosen| {
        wanted.pair = chosen.pair();
        let pool = &ask.model.prefill;
        let chosen = another_first(&[&[Arc::clone(&chosen.engine)], &[]], |tried| {
            let trial = pool.try_out(&wanted, tried);
            if trial.chosen.is_some() { Ok(trial) } else { Err(trial) }
        });
        chosen.unwrap_or_else(|none| none)
    });
    Ok(json!({
        "model": ask.model.name,
        "generation": generation.number,
        "decode": decode.sight.json(),
        "disaggregation": disaggregated(decided, &facts),
        "prefill": prefill.map(|trial| trial.sight.json()),
    }))
}
