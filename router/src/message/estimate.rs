//! Estimate of a prompt's tokens, before an engine counts them.
//!
//! Four bytes of JSON are about one token (`features.bytes_per_token`, for routing). That holds for text only.
//! Token ids are counted. Pictures, sounds and other base64 data or addresses in the body count as fixed numbers,
//! whatever their size in bytes:
//!
//! | part | tokens | from |
//! |---|---|---|
//! | image | 1,024 | 576 (LLaVA 1.5, 336 px) to 1,369 (Qwen2.5-VL, 1,024 px) and 4,096 (Pixtral, 1,024 px) |
//! | sound | 1,024 | 40 s at 25 tokens a second (Qwen2-Audio); 82 s at 12.5 (Voxtral) |
//! | video, file | 8,192 | 32 frames or pages at 256 |
//! | `prompt_embeds` | bytes / 8,192 | one token is 3,072 values of bf16, in base64 |
//!
//! The estimate is charged before the response, and the excess in `usage` after it.

use baton_openai::{MediaCounts, RawBody};

const IMAGE_TOKENS: u64 = 1024;
const SOUND_TOKENS: u64 = 1024;
const VIDEO_TOKENS: u64 = 8192;
const FILE_TOKENS: u64 = 8192;
const EMBEDDING_BYTES: usize = 8192;
/// Four bytes of English text are about one token. The JSON around it compensates for shorter tokens.
const BYTES_PER_TOKEN: usize = 4;

/// Fields that may contain a prompt, and fields in which only media count.
const PROMPT_FIELDS: [&str; 3] = ["messages", "prompt", "input"];
const MEDIA_FIELDS: [&str; 5] = ["documents", "query", "queries", "text_1", "text_2"];

/// The parts of a body that are no text: their tokens and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NonTextParts {
    pub tokens: u64,
    pub bytes: usize,
}

impl NonTextParts {
    pub(crate) fn of(body: &RawBody) -> Self {
        let mut parts = Self::default();
        for name in PROMPT_FIELDS {
            match body.field(name) {
                Some(ids) if is_token_ids(ids) => parts.add(token_ids(ids), ids.len()),
                Some(value) => parts.add_media(value),
                None => {}
            }
        }
        MEDIA_FIELDS.iter().filter_map(|name| body.field(name)).for_each(|value| parts.add_media(value));
        if let Some(embeds) = body.field("prompt_embeds") {
            parts.add((embeds.len() / EMBEDDING_BYTES) as u64, embeds.len());
        }
        parts
    }

    /// Whether the prompt is text.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Estimated tokens of a body's prompt.
    pub(crate) fn prompt_tokens(&self, body: &RawBody) -> u64 {
        self.tokens + (body.len().saturating_sub(self.bytes) / BYTES_PER_TOKEN) as u64
    }

    fn add(&mut self, tokens: u64, bytes: usize) {
        self.tokens = self.tokens.saturating_add(tokens);
        self.bytes += bytes;
    }

    fn add_media(&mut self, value: &[u8]) {
        let media = MediaCounts::of(value);
        let tokens = [
            (media.images, IMAGE_TOKENS),
            (media.sounds, SOUND_TOKENS),
            (media.videos, VIDEO_TOKENS),
            (media.files, FILE_TOKENS),
        ];
        self.add(tokens.iter().map(|(parts, each)| u64::from(*parts) * each).sum(), media.bytes);
    }
}

/// Whether a prompt is a list of token ids, or of such lists. Its JSON was checked before.
fn is_token_ids(prompt: &[u8]) -> bool {
    let mut bytes = prompt.iter().filter(|byte| !byte.is_ascii_whitespace());
    bytes.next() == Some(&b'[') && bytes.find(|byte| **byte != b'[').is_some_and(u8::is_ascii_digit)
}

/// Number of token ids: each but the last has a comma behind it.
fn token_ids(prompt: &[u8]) -> u64 {
    1 + memchr::memchr_iter(b',', prompt).count() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn tokens(body: &Value) -> u64 {
        let body = RawBody::any(body.to_string().into(), &Default::default(), &()).expect("an object");
        NonTextParts::of(&body).prompt_tokens(&body)
    }

    fn chat(part: Value) -> Value {
        json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]})
    }

    #[test]
    fn a_picture_costs_the_same_by_its_bytes_and_by_its_address() {
        let image = |url: String| tokens(&chat(json!({"type": "image_url", "image_url": {"url": url}})));
        let large = image(format!("data:image/png;base64,{}", "A".repeat(3 << 20)));
        assert_eq!(large, image("https://example.org/a.png".to_owned()));
        assert!((IMAGE_TOKENS..IMAGE_TOKENS + 40).contains(&large), "{large}");
        let sound = chat(
            json!({"type": "input_audio", "input_audio": {"data": "A".repeat(1 << 20), "format": "wav"}}),
        );
        assert!((SOUND_TOKENS..SOUND_TOKENS + 40).contains(&tokens(&sound)));
        let video = chat(json!({"type": "video_url", "video_url": {"url": "A".repeat(1 << 20)}}));
        assert!((VIDEO_TOKENS..VIDEO_TOKENS + 40).contains(&tokens(&video)));
    }

    #[test]
    fn a_text_costs_its_bytes_wherever_it_is_put() {
        let long = "x".repeat(4 << 10);
        for body in [
            json!({"model": "m", "prompt": long}),
            json!({"model": "m", "messages": [{"role": "user", "content": long}]}),
            chat(json!({"type": "text", "text": long})),
            json!({"model": "m", "input": [long]}),
        ] {
            assert!((1024..1080).contains(&tokens(&body)), "{}", tokens(&body));
        }
    }

    #[test]
    fn token_ids_are_counted_and_embeddings_are_not_text() {
        let ids: Vec<u32> = (100_000..101_000).collect();
        assert!((1000..1010).contains(&tokens(&json!({"model": "m", "prompt": ids}))));
        let lists = tokens(&json!({"model": "m", "prompt": [ids, ids]}));
        assert!((2000..2010).contains(&lists), "{lists}");
        let embeds = tokens(&json!({"model": "m", "prompt_embeds": "A".repeat(100 * EMBEDDING_BYTES)}));
        assert!((100..120).contains(&embeds), "{embeds}");
    }
}
