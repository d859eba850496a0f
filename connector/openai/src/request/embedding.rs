//! `/v1/embeddings`: prompts to vectors.

use serde_json::{Map, Value, json};

use super::{Endpoint, GenerateRequest};
use crate::code::Code;
use crate::error::ApiError;
use crate::field::Fields;
use crate::limits::ParseLimits;

/// Fields that have the meaning of `/v1/completions`.
const SHARED: [&str; 8] = [
    "model",
    "user",
    "cache_salt",
    "priority",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "kv_transfer_params",
];

/// `POST /v1/embeddings`.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingRequest {
    /// The inputs as prompts, of which one token each would be generated.
    pub prompts: GenerateRequest,
    /// The form of the vectors.
    pub format: EmbeddingFormat,
}

/// `encoding_format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Little-endian 32-bit floats in base64.
    Base64,
}

impl EmbeddingRequest {
    /// Reads a request from a parsed body.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn from_map(map: &Map<String, Value>, limits: &ParseLimits) -> Result<Self, ApiError> {
        let fields = Fields::new(map);
        if fields.get("dimensions").is_some() {
            let message = "`dimensions` is not supported here: the model has one length of vectors";
            return Err(ApiError::invalid("dimensions", message).with_code(Code::UnsupportedParameter));
        }
        let format = match fields.string("encoding_format")? {
            None | Some("float") => EmbeddingFormat::Float,
            Some("base64") => EmbeddingFormat::Base64,
            Some(_) => {
                let message = "`encoding_format` must be \"float\" or \"base64\"";
                return Err(ApiError::invalid("encoding_format", message));
            }
        };
        let Some(input) = fields.get("input") else {
            return Err(ApiError::invalid("input", "`input` is missing"));
        };
        let shared = SHARED.iter().filter_map(|name| Some(((*name).to_owned(), map.get(*name)?.clone())));
        let mut prompts: Map<String, Value> = shared.collect();
        prompts.insert("prompt".to_owned(), input.clone());
        prompts.insert("max_tokens".to_owned(), json!(1));
        let prompts = GenerateRequest::from_map(Endpoint::Completions, &prompts, limits);
        Ok(Self { prompts: prompts.map_err(of_input)?, format })
    }
}

/// An error of a prompt, as one of an input.
#[must_use]
pub fn of_input(mut error: ApiError) -> ApiError {
    let rest = error.param.as_deref().and_then(|param| param.strip_prefix("prompt"));
    if let Some(param) = rest.map(|rest| format!("input{rest}")) {
        error.message = error.message.replace("`prompt", "`input");
        error.param = Some(param);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Input, Prompt};

    fn read(body: &Value) -> Result<EmbeddingRequest, ApiError> {
        EmbeddingRequest::from_map(body.as_object().expect("an object"), &ParseLimits::default())
    }

    #[test]
    fn inputs_are_prompts_in_every_form() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        for (input, wanted) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ] {
            let request = read(&json!({"model": "m", "input": input})).expect("valid");
            assert_eq!(request.prompts.input, Input::Prompts(wanted));
            assert_eq!((request.prompts.max_tokens, request.format), (Some(1), EmbeddingFormat::Float));
        }
        let base64 = read(&json!({"input": "a", "encoding_format": "base64", "user": "u", "n": 3}));
        let base64 = base64.expect("other fields are ignored");
        assert_eq!((base64.format, base64.prompts.n), (EmbeddingFormat::Base64, 1));
    }

    #[test]
    fn refusals_name_the_field_of_the_request() {
        for (body, field) in [
            (json!({}), "input"),
            (json!({"input": null}), "input"),
            (json!({"input": 3}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": "a", "dimensions": 64}), "dimensions"),
            (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
            (json!({"input": "a", "cache_salt": ""}), "cache_salt"),
        ] {
            let error = read(&body).expect_err("refused");
            assert_eq!(
                (error.status, error.param.as_deref()),
                (400, Some(field)),
                "{body}: {}",
                error.message
            );
            assert!(!error.message.contains("`prompt"), "{}", error.message);
        }
        assert!(read(&json!({"input": "a", "dimensions": null})).is_ok(), "null is absent");
    }
}
