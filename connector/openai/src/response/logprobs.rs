//! Log-probabilities in the forms of the two endpoints.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::request::Endpoint;

/// vLLM's value for minus infinity, which JSON cannot represent.
const LOGPROB_MIN: f32 = -9999.0;

/// One token of a reply with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The text of the token; a replacement character if its bytes are only a part of a character.
    pub token: String,
    /// The bytes of the token.
    pub bytes: Vec<u8>,
    /// Natural logarithm; `None` for the first token of an echoed prompt, which has no prediction.
    pub logprob: Option<f32>,
    /// The most likely tokens at this position, best first, as many as requested.
    pub top: Vec<TopLogprob>,
}

/// An alternative.
#[derive(Clone, Debug, PartialEq)]
pub struct TopLogprob {
    /// The text of the token.
    pub token: String,
    /// The bytes of the token.
    pub bytes: Vec<u8>,
    /// Natural logarithm.
    pub logprob: f32,
}

/// A token of the prompt, or an alternative to it, with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptTokenLogprob {
    /// The token.
    pub id: u32,
    /// Its text.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
}

/// Tokens of one choice or delta, for the form of the endpoint.
pub(super) enum Logprobs<'a> {
    Completions { tokens: &'a [TokenLogprob], text_offset: usize },
    Chat { tokens: &'a [TokenLogprob] },
}

impl<'a> Logprobs<'a> {
    pub(super) fn new(endpoint: Endpoint, tokens: &'a [TokenLogprob], text_offset: usize) -> Self {
        match endpoint {
            Endpoint::Completions => Self::Completions { tokens, text_offset },
            Endpoint::Chat => Self::Chat { tokens },
        }
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob >= LOGPROB_MIN { logprob.min(0.0) } else { LOGPROB_MIN }
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match *self {
            Self::Completions { tokens, text_offset } => {
                let mut offset = text_offset;
                let mut offsets = Vec::with_capacity(tokens.len());
                for token in tokens {
                    offsets.push(offset);
                    offset += token.token.chars().count();
                }
                map.serialize_entry("text_offset", &offsets)?;
                let logprobs: Vec<_> = tokens.iter().map(|token| token.logprob.map(finite)).collect();
                map.serialize_entry("token_logprobs", &logprobs)?;
                let texts: Vec<_> = tokens.iter().map(|token| token.token.as_str()).collect();
                map.serialize_entry("tokens", &texts)?;
                let tops: Vec<_> = tokens.iter().map(|token| token.logprob.map(|_| TopMap(token))).collect();
                map.serialize_entry("top_logprobs", &tops)?;
            }
            Self::Chat { tokens } => map.serialize_entry("content", &ChatTokens(tokens))?,
        }
        map.end()
    }
}

/// Completions: an object from token text to log-probability, with the chosen token. Of two tokens with the same text
/// the likelier one counts.
struct TopMap<'a>(&'a TokenLogprob);

impl Serialize for TopMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let chosen = self.0.logprob.map(|logprob| (self.0.token.as_str(), logprob));
        let top = self.0.top.iter().map(|top| (top.token.as_str(), top.logprob));
        let mut seen: Vec<&str> = Vec::with_capacity(self.0.top.len() + 1);
        for (token, logprob) in top.chain(chosen) {
            if !seen.contains(&token) {
                seen.push(token);
                map.serialize_entry(token, &finite(logprob))?;
            }
        }
        map.end()
    }
}

struct ChatTokens<'a>(&'a [TokenLogprob]);

#[derive(serde::Serialize)]
struct ChatToken<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<ChatToken<'a>>>,
}

impl Serialize for ChatTokens<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.len()))?;
        for token in self.0 {
            seq.serialize_element(&ChatToken {
                token: &token.token,
                logprob: finite(token.logprob.unwrap_or(LOGPROB_MIN)),
                bytes: &token.bytes,
                top_logprobs: Some(token.top.iter().map(alternative).collect()),
            })?;
        }
        seq.end()
    }
}

fn alternative(top: &TopLogprob) -> ChatToken<'_> {
    ChatToken { token: &top.token, logprob: finite(top.logprob), bytes: &top.bytes, top_logprobs: None }
}

/// `prompt_logprobs`, as in vLLM: an object from token id to value for each token of the prompt, `null` for the first.
pub(super) struct PromptLogprobs<'a>(pub(super) &'a [Vec<PromptTokenLogprob>]);

struct PromptPosition<'a>(&'a [PromptTokenLogprob]);

#[derive(serde::Serialize)]
struct PromptEntry<'a> {
    logprob: f32,
    rank: u32,
    decoded_token: &'a str,
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let positions = self.0.iter().map(|tokens| (!tokens.is_empty()).then_some(PromptPosition(tokens)));
        serializer.collect_seq(positions)
    }
}

impl Serialize for PromptPosition<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for PromptTokenLogprob { id, token, logprob, rank } in self.0 {
            let entry = PromptEntry { logprob: finite(*logprob), rank: *rank, decoded_token: token };
            map.serialize_entry(&id.to_string(), &entry)?;
        }
        map.end()
    }
}
