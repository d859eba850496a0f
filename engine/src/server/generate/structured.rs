//! Structured output: compiles a request's constraint before its sequences are queued.

use baton_openai::{ApiError, GenerateRequest, Input, Prompt};

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
    let text = match text_so_far(request, wanted.continues as usize, &admitted.prompts) {
        Ok(text) => text,
        Err(error) => return Err(settled(admitted, error)),
    };
    let stops = admitted.submissions[0].sequence.stop.stop_ids.clone();
    let count = admitted.submissions.len();
    match frontend.model.grammars.states(&wanted.constraint, &stops, text, count).await {
        Ok(states) => {
            for (submission, state) in admitted.submissions.iter_mut().zip(states) {
                submission.grammar = Some(state);
            }
            Ok(admitted)
        }
        Err(refusal) => Err(settled(admitted, refused(&wanted.field, &refusal))),
    }
}

/// Refuses the request at its producer, too.
fn settled(mut admitted: AdmittedRequest, error: ApiError) -> ApiError {
    if let Some(guard) = admitted.handoff.take() {
        guard.refuse(&error);
    }
    error
}

/// The last tokens of the prompt, which belong to the text already.
fn text_so_far(
    request: &GenerateRequest,
    continues: usize,
    prompts: &[Vec<u32>],
) -> Result<Vec<u32>, ApiError> {
    let is_ids =
        matches!(&request.input, Input::Prompts(prompts) if matches!(prompts[..], [Prompt::Tokens(_)]));
    match prompts {
        _ if continues == 0 => Ok(Vec::new()),
        [prompt] if is_ids && continues < prompt.len() => Ok(prompt[prompt.len() - continues..].to_vec()),
        _ => {
            let field = "structured_outputs.continues";
            let message = format!("`{field}` needs one prompt of more token ids than {continues}");
            Err(ApiError::invalid(field, message))
        }
    }
}

/// A text that the constraint ends before it is complete: 400, because every engine ends it at the same token.
pub(super) fn dead_end(request: &GenerateRequest, why: &str) -> ApiError {
    let field = request.structured.as_ref().map_or("structured_outputs", |wanted| wanted.field.as_str());
    ApiError::invalid(field, format!("`{field}` cannot be met: {why}"))
}

fn refused(field: &str, refusal: &GrammarRefusal) -> ApiError {
    match refusal {
        GrammarRefusal::Invalid(_) | GrammarRefusal::TooSlow => {
            ApiError::invalid(field, format!("`{field}` is not supported here: {refusal}"))
        }
        GrammarRefusal::Busy(why) => ApiError::overloaded(*why, QUEUE_RETRY),
    }
}
