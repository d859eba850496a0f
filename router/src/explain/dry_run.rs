//! What would be decided about a request, without asking any engine and without leaving a trace.

use baton_openai::ApiError;
use bytes::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};

use super::page::disaggregated;
use crate::disaggregation::{self, Disaggregation, Facts};
use crate::generation::Generation;
use crate::intake::Ask;
use crate::pool::Trial;
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
    let facts = Facts {
        has_prefill: !ask.model.prefill.is_empty(),
        several_prompts: ask.aggregate,
        prompt_logprobs: ask.prompt_logprobs,
        prompt_tokens: wanted.tokens,
        cached_share: decode.sight.holding.share(&wanted),
        prefill_in_flight: ask.model.prefill.least_in_flight(),
    };
    let decided = disaggregation::decide(&ask.model.disaggregate, &facts);
    let prefill = match (&decode.chosen, decided) {
        (Some(chosen), Disaggregation::Remote(_)) => {
            wanted.pair = chosen.pair();
            let itself = [std::sync::Arc::clone(&chosen.engine)];
            let other = ask.model.prefill.try_out(&wanted, &itself);
            let any = || ask.model.prefill.try_out(&wanted, &[]);
            Some(if other.chosen.is_some() { other } else { any() })
        }
        _ => None,
    };
    Ok(json!({
        "model": ask.model.name,
        "generation": generation.number,
        "decode": decode.sight.json(),
        "disaggregation": disaggregated(decided, &facts),
        "prefill": prefill.map(|trial| trial.sight.json()),
    }))
}
