//! `/v1/models`, `/tokenize` and `/detokenize`.

use bytes::Bytes;
use serde::Serialize;

/// A served model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The origin of its weights: a name, never a path.
    pub root: Option<String>,
    /// The model that an adapter changes.
    pub parent: Option<String>,
    /// Tokens of its context, if known.
    pub max_model_len: Option<usize>,
}

impl ModelCard {
    /// `GET /v1/models/{id}`.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(super::json(&Card::from(self)))
    }
}

/// `GET /v1/models`.
#[must_use]
pub fn models(cards: &[ModelCard]) -> Bytes {
    #[derive(Serialize)]
    struct List<'a> {
        object: &'static str,
        data: Vec<Card<'a>>,
    }
    Bytes::from(super::json(&List { object: "list", data: cards.iter().map(Card::from).collect() }))
}

#[derive(Serialize)]
struct Card<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    root: Option<&'a str>,
    parent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
}

impl<'a> From<&'a ModelCard> for Card<'a> {
    fn from(card: &'a ModelCard) -> Self {
        Self {
            id: &card.id,
            object: "model",
            created: card.created,
            owned_by: "baton",
            root: card.root.as_deref(),
            parent: card.parent.as_deref(),
            max_model_len: card.max_model_len,
        }
    }
}

/// `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenizeReply {
    /// Number of tokens.
    pub count: usize,
    /// Tokens of the model's context.
    pub max_model_len: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Each token's text, if requested.
    pub token_strs: Option<Vec<String>>,
}

/// `POST /detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DetokenizeReply {
    /// The text.
    pub prompt: String,
}

impl TokenizeReply {
    /// The reply's body.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(super::json(self))
    }
}

impl DetokenizeReply {
    /// The reply's body.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(super::json(self))
    }
}
