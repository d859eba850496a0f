//! `GET /v1/models` and `GET /v1/models/{name}`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::context::{RequestContext, may_use};
use crate::auth::{self, Identity};
use crate::legs::request_error::RequestError;
use crate::metrics::Leg;
use crate::routing::models::Model;
use crate::state::shared::Shared;

/// Limit on the engines of one leg that are queried for the context length of a model; the engines of a pool are alike.
const ENGINES_ASKED_MAX: usize = 16;

/// All models that the client may use, with an entry per name.
pub(super) async fn list(shared: &Shared, context: &RequestContext, identity: Option<&Identity>) -> Value {
    let models = context.generation.models.list().iter();
    let models = models.filter(|model| may_use(identity, &context.generation, &model.name));
    let entries = async |model: &Arc<Model>| {
        let context = context_of(model).await;
        let names = std::iter::once(&model.name).chain(&model.aliases);
        names.map(|name| model_card(shared, name, &model.name, context)).collect::<Vec<_>>()
    };
    let models: Vec<_> = models.collect();
    let cards = futures::future::join_all(models.into_iter().map(entries)).await;
    json!({"object": "list", "data": cards.into_iter().flatten().collect::<Vec<_>>()})
}

/// The entry of the model of this name.
///
/// # Errors
/// The model does not exist, or the client may not use it.
pub(super) async fn find(
    shared: &Shared,
    context: &RequestContext,
    identity: Option<&Identity>,
    name: &str,
) -> Result<Value, RequestError> {
    let model = Arc::clone(context.generation.models.named(Some(name))?);
    if !may_use(identity, &context.generation, &model.name) {
        return Err(auth::forbidden(&model.name).into());
    }
    Ok(model_card(shared, name, &model.name, context_of(&model).await))
}

/// The entry of one of a model's names, in vLLM's form.
fn model_card(shared: &Shared, name: &str, model: &str, context: Option<u64>) -> Value {
    let created = shared.created;
    let mut card = json!({"id": name, "object": "model", "created": created, "owned_by": "baton", "root": model,
        "parent": null});
    if let Some(context) = context {
        card["max_model_len"] = context.into();
    }
    card
}

/// Tokens that a prompt and its response may have together: the minimum over the engines of both legs that report it.
async fn context_of(model: &Model) -> Option<u64> {
    let engines = Leg::BOTH.iter().flat_map(|leg| {
        let members = model.pool(*leg).members().iter();
        members.filter(|member| member.engine.is_known()).take(ENGINES_ASKED_MAX)
    });
    let lengths = engines.map(|member| member.engine.shown_context_of(&model.name));
    futures::future::join_all(lengths).await.into_iter().flatten().min()
}
