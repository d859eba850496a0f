//! Structured output: compiles a request's constraint before its sequences are queued.

use baton_openai::{ApiError, GenerateRequest};

use crate::grammar::GrammarRefusal;
use crate::server::Frontend;
use crate::server::admit::AdmittedRequest;
use crate::server::body_budget::QUEUE_RETRY;

/// Gives each sequence of a request the grammar of its constraint, if the request has one. An error also settles the
/// handoff.
pub(super) async fn constrain(
    frontend: &Frontend,
    request: &GenerateRequest,
    mut admitted: AdmittedRequest,
) -> Result<AdmittedRequest, ApiError> {
    let Some(wanted) = &request.structured else { return Ok(admitted) };
    let stops = admitted.submissions[0].sequence.stop.stop_ids.clone();
    let count = admitted.submissions.len();
    match frontend.model.grammars.states(&wanted.constraint, &stops, count).await {
        Ok(states) => {
            for (submission, state) in admitted.submissions.iter_mut().zip(states) {
                submission.grammar = Some(state);
            }
            Ok(admitted)
        }
        Err(refusal) => {
            let error = refused(&wanted.field, &refusal);
            if let Some(guard) = admitted.handoff.take() {
                guard.refuse(&error);
            }
            Err(error)
        }
    }
}

fn refused(field: &str, refusal: &GrammarRefusal) -> ApiError {
    match refusal {
        GrammarRefusal::Invalid(_) | GrammarRefusal::TooSlow => {
            ApiError::invalid(field, format!("`{field}` is not supported here: {refusal}"))
        }
        GrammarRefusal::Busy(why) => ApiError::overloaded(*why, QUEUE_RETRY),
    }
}
