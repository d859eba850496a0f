//! Structured output: compiles a request's constraint before its sequences are queued.

use baton_openai::{ApiError, GenerateRequest, Input, Prompt};
use tokio::sync::oneshot;

use super::thinking;
use crate::grammar::{GrammarRefusal, GrammarState, TokenGate};
use crate::server::Frontend;
use crate::server::admit::AdmittedRequest;
use crate::server::body_budget::QUEUE_RETRY;

/// Gives each sequence of a request the bounds of its reasoning and the grammar of its constraint, as far as it has
/// them. An error also settles the handoff. The compilation ends when the caller does, which drops the sender of `gone`.
pub(super) async fn constrain(
    frontend: &Frontend,
    request: &GenerateRequest,
    mut admitted: AdmittedRequest,
    gone: oneshot::Receiver<()>,
) -> Result<AdmittedRequest, ApiError> {
    let rules = thinking::rules(&frontend.model, request, &admitted.submissions[0].sequence);
    let rules = match rules {
        Ok(rules) => rules,
        Err(error) => return Err(settled(admitted, error)),
    };
    let wanted = match wanted(request, &admitted) {
        Ok(wanted) => wanted,
        Err(error) => return Err(settled(admitted, error)),
    };
    let grammars = tokio::select! {
        biased;
        grammars = compiled(frontend, request, wanted) => grammars,
        // Dropping the request settles its handoff.
        _ = gone => return Err(ApiError::client_gone()),
    };
    match grammars {
        Ok(grammars) => {
            let mut grammars = grammars.into_iter();
            for submission in &mut admitted.submissions {
                submission.grammar = TokenGate::new(rules.as_ref(), grammars.next());
            }
            Ok(admitted)
        }
        Err(error) => Err(settled(admitted, error)),
    }
}

/// What the compiler needs of a request's sequences.
struct WantedStates {
    stops: Vec<u32>,
    /// The tokens that belong to the text already.
    text: Vec<u32>,
    count: usize,
}

fn wanted(request: &GenerateRequest, admitted: &AdmittedRequest) -> Result<WantedStates, ApiError> {
    let continues = request.structured.as_ref().map_or(0, |structured| structured.continues as usize);
    Ok(WantedStates {
        stops: admitted.submissions[0].sequence.stop.stop_ids.clone(),
        text: text_so_far(request, continues, &admitted.prompts)?,
        count: admitted.submissions.len(),
    })
}

/// The grammars of a request's sequences; none without a constraint.
async fn compiled(
    frontend: &Frontend,
    request: &GenerateRequest,
    wanted: WantedStates,
) -> Result<Vec<GrammarState>, ApiError> {
    let Some(structured) = &request.structured else { return Ok(Vec::new()) };
    let WantedStates { stops, text, count } = wanted;
    let states = frontend.model.grammars.states(&structured.constraint, &stops, text, count).await;
    states.map_err(|refusal| refused(&structured.field, &refusal))
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
    let field = request.structured.as_ref().map_or(thinking::BUDGET, |wanted| wanted.field.as_str());
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
