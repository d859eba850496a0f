//! The served model: its name, texts as tokens, and the bounds of a prompt.

use std::sync::Arc;
use std::time::SystemTime;

use baton_openai::limits::COMPLETIONS_MAX_TOKENS_DEFAULT;
use baton_openai::{ApiError, Code, Endpoint, GenerateRequest, Input, ModelCard, Prompt};

use crate::blocks::adapter::BlockAdapter;
use crate::grammar::GrammarService;
use crate::model::chat_template::ChatTemplate;
use crate::model::generation::GenerationDefaults;
use crate::model::output::OutputFormat;
use crate::model::tokenizer::{SpecialTokens, Tokenizer};
use crate::model::truncation::PromptCut;
use crate::scheduler::sequence::{Pooling, StopRule};

/// The served model.
pub struct ServedModel {
    /// Its name in requests.
    pub name: String,
    /// When the engine started, in seconds since 1970.
    pub created: u64,
    /// Converts text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Converts conversations to text.
    pub template: ChatTemplate,
    /// The formats of calls and reasoning in its chats.
    pub output: OutputFormat,
    /// The model's sampling defaults.
    pub defaults: GenerationDefaults,
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Compiles constraints of texts.
    pub grammars: GrammarService,
    /// Rows of the model's vocabulary.
    pub vocab: usize,
    /// Tokens of one sequence, prompt and output.
    pub capacity: usize,
    /// How embeddings are made; `None` if the device computes none.
    pub pooling: Option<Pooling>,
    /// Adapters of the model, each served under its own name.
    pub adapters: Vec<ServedAdapter>,
}

/// An adapter of the served model.
pub struct ServedAdapter {
    /// What its blocks depend on, with its name in requests.
    pub blocks: Arc<BlockAdapter>,
    /// The name of its folder.
    pub root: Option<String>,
}

impl ServedModel {
    /// The entries of the model and its adapters in the list of models.
    pub(super) fn cards(&self) -> Vec<ModelCard> {
        let base = ModelCard {
            id: self.name.clone(),
            created: self.created,
            root: None,
            parent: None,
            max_model_len: Some(self.capacity),
        };
        let of_adapter = |adapter: &ServedAdapter| ModelCard {
            id: adapter.blocks.name.to_string(),
            root: adapter.root.clone(),
            parent: Some(self.name.clone()),
            ..base.clone()
        };
        let adapters: Vec<_> = self.adapters.iter().map(of_adapter).collect();
        std::iter::once(base).chain(adapters).collect()
    }

    /// The adapter that a request names; `None` for the model alone. Refuses a model that is not served here.
    pub(super) fn adapter(&self, model: Option<&str>) -> Result<Option<&Arc<BlockAdapter>>, ApiError> {
        match model {
            Some(name) if name != self.name => {
                let found = self.adapters.iter().find(|adapter| *adapter.blocks.name == *name);
                found.map(|adapter| Some(&adapter.blocks)).ok_or_else(|| ApiError::model_not_found(name))
            }
            Some(_) | None => Ok(None),
        }
    }

    /// The name in the reply to a request that names a model, or none.
    pub(super) fn reply_name(&self, model: Option<&str>) -> String {
        model.unwrap_or(&self.name).to_owned()
    }

    /// The prompts of a request to generate, as tokens, truncated if requested.
    pub(super) fn prompts(&self, request: &GenerateRequest) -> Result<Vec<Vec<u32>>, ApiError> {
        let cut = |truncation| PromptCut::of(truncation, self.capacity, &self.tokenizer);
        let cut = request.prompt.truncation.map(cut).transpose()?;
        let prompts = self.encode(&request.input, request.add_special_tokens, cut)?;
        Ok(match cut {
            Some(cut) => prompts.into_iter().map(|prompt| cut.apply(prompt)).collect(),
            None => prompts,
        })
    }

    /// Prompts as tokens. `add_special` replaces the default for special tokens. With a `cut`, only the part of a text
    /// that can stay is encoded.
    pub(super) fn encode(
        &self,
        input: &Input,
        add_special: Option<bool>,
        cut: Option<PromptCut>,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let most = self.tokenizer.max_bytes(self.capacity);
        let text = |text: &str, field: &str, default: SpecialTokens| {
            let special = match add_special {
                None => default,
                Some(true) => SpecialTokens::Add,
                Some(false) => SpecialTokens::AsWritten,
            };
            let text = cut.map_or(text, |cut| cut.text(text, most));
            let tokens = self.tokenizer.encode(text, special, self.capacity);
            tokens.map_err(|error| {
                ApiError::invalid(field, error.to_string()).with_code(Code::ContextLengthExceeded)
            })
        };
        match input {
            Input::Prompts(prompts) => prompts
                .iter()
                .map(|prompt| match prompt {
                    Prompt::Text(prompt) => text(prompt, "prompt", SpecialTokens::Add),
                    Prompt::Tokens(ids) => Ok(ids.clone()),
                })
                .collect(),
            Input::Chat(chat) => {
                let rendered = self.template.render(chat, SystemTime::now())?;
                Ok(vec![text(&rendered, "messages", SpecialTokens::AsWritten)?])
            }
        }
    }

    /// Checks a prompt against vocabulary and context. Returns how many tokens may be generated.
    pub(super) fn check_prompt(&self, request: &GenerateRequest, prompt: &[u32]) -> Result<usize, ApiError> {
        let field = if request.endpoint == Endpoint::Chat { "messages" } else { "prompt" };
        if prompt.is_empty() {
            return Err(ApiError::invalid(field, "the prompt has no tokens"));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= self.vocab) {
            let message = format!("token id {id} is not below the vocabulary's size {}", self.vocab);
            return Err(ApiError::invalid(field, message));
        }
        let most = self.max_new(request, prompt.len());
        if prompt.len() + most > self.capacity || most == 0 {
            let mut error = match request.max_tokens {
                Some(asked) => ApiError::context_length(prompt.len(), asked as usize, self.capacity),
                None => ApiError::prompt_too_long(prompt.len(), self.capacity),
            };
            error.param = Some(field.into());
            return Err(error);
        }
        Ok(most)
    }

    /// Tokens to generate: the request's limit, the model's default, or the rest of the context.
    fn max_new(&self, request: &GenerateRequest, prompt_len: usize) -> usize {
        let left = self.capacity.saturating_sub(prompt_len);
        // Without a new token there are no logits of the prompt's last position: one is generated and left out.
        let wish = request.max_tokens.map(|max| max.max(1) as usize);
        wish.unwrap_or_else(|| match request.endpoint {
            Endpoint::Completions => left.min(COMPLETIONS_MAX_TOKENS_DEFAULT as usize),
            Endpoint::Chat => left.min(self.defaults.max_new_tokens.map_or(left, |max| max as usize)),
        })
    }

    /// When the generation for a prompt stops.
    pub(super) fn stop_rule(&self, request: &GenerateRequest, prompt_len: usize) -> StopRule {
        let eos = if request.ignore_eos { &[][..] } else { &self.eos };
        let nothing = request.max_tokens == Some(0);
        StopRule {
            max_new: self.max_new(request, prompt_len),
            stop_ids: if nothing { Vec::new() } else { [eos, &request.stop_token_ids].concat() },
            min_new: request.min_tokens as usize,
        }
    }
}
