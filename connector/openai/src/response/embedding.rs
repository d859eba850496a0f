//! The reply of `/v1/embeddings`.

use serde::{Serialize, Serializer};

use crate::request::EmbeddingFormat;

/// Vectors of one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmbeddingReply {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Embedding>,
    usage: EmbeddingUsage,
}

/// One vector.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Embedding {
    index: usize,
    object: &'static str,
    embedding: Vector,
}

/// A vector in its form.
#[derive(Clone, Debug, PartialEq)]
struct Vector {
    values: Vec<f32>,
    format: EmbeddingFormat,
}

impl Serialize for Vector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.format {
            EmbeddingFormat::Float => self.values.serialize(serializer),
            EmbeddingFormat::Base64 => {
                let bytes: Vec<u8> = self.values.iter().flat_map(|value| value.to_le_bytes()).collect();
                serializer.serialize_str(&base64(&bytes))
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl EmbeddingReply {
    /// A reply with these vectors, in the order of the inputs.
    #[must_use]
    pub fn new(
        id: String,
        created: u64,
        model: String,
        vectors: Vec<Vec<f32>>,
        format: EmbeddingFormat,
        prompt_tokens: usize,
    ) -> Self {
        let one =
            |(index, values)| Embedding { index, object: "embedding", embedding: Vector { values, format } };
        Self {
            id,
            object: "list",
            created,
            model,
            data: vectors.into_iter().enumerate().map(one).collect(),
            usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
        }
    }

    /// The body of the reply.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and texts can be written as JSON")
    }
}

/// Base64 of RFC 4648 with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| chunk.get(at).map_or(0, |byte| u32::from(*byte));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = (bits >> (18 - 6 * digit)) & 63;
            text.push(if digit <= chunk.len() { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    #[test]
    fn a_reply_has_the_form_of_openai() {
        let reply = |format| {
            let reply = EmbeddingReply::new("embd-1".into(), 7, "m".into(), vec![vec![0.5, -2.0]], format, 3);
            serde_json::from_slice::<Value>(&reply.to_bytes()).expect("JSON")
        };
        let wanted = json!({
            "id": "embd-1", "object": "list", "created": 7, "model": "m",
            "data": [{"index": 0, "object": "embedding", "embedding": [0.5, -2.0]}],
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        });
        assert_eq!(reply(EmbeddingFormat::Float), wanted);
        assert_eq!(reply(EmbeddingFormat::Base64)["data"][0]["embedding"], "AAAAPwAAAMA=");
    }
}
