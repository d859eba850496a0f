//! Routing features of a request: its session, its user, and the beginning of its prompt.
//!
//! A prompt is compared as the bytes of its JSON, in chunks whose hashes are chained. Equal hashes mean that
//! everything up to the chunk's end is equal. The first link separates prompts whose cached blocks differ for
//! equal text: it hashes the model, the salt and the tools.
//!
//! Only features that a policy of the model needs are computed; see [`FeatureNeeds`].

use baton_openai::RawBody;
use hyper::header::HeaderMap;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::config::{AffinityKey, FeaturesConfig, LoadUnit, ModelConfig, PolicyConfig, TokenizeSource};
use crate::message::block_chain::{BlockKeys, links, root};
use crate::message::estimate::NonTextParts;
use crate::message::prompt_ids::PromptIds;

/// The features that a model's policies need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FeatureNeeds {
    pub session: bool,
    pub user: bool,
    pub prefix: bool,
    /// The prompt's size. Without it the body's size suffices.
    pub tokens: bool,
    /// The ids of a prompt of token ids.
    pub ids: bool,
}

/// The features of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Features {
    session: Option<u64>,
    user: Option<u64>,
    prefix: Vec<u64>,
    blocks: Vec<u64>,
    /// Estimated tokens of the prompt.
    pub tokens: u64,
    /// Estimated tokens of one chunk of `prefix`, and of the tools in front of the first.
    chunk_tokens: f64,
    head_tokens: f64,
    /// Tokens of one block of `blocks`, and the parent of the first; none if no engine reports blocks.
    block_tokens: usize,
    block_root: Option<u64>,
    /// The prompt's token ids, if known.
    ids: Option<PromptIds>,
}

/// The parts of a request from which features are computed.
pub(crate) struct FeatureInput<'a> {
    pub model: &'a str,
    pub headers: &'a HeaderMap,
    pub body: &'a RawBody,
    /// Anthropic's `system`, in front of the messages; empty if the body has none.
    pub system: &'a [u8],
    pub user: Option<&'a str>,
    /// Values that separate this request's cache from others': `cache_salt`, tenant.
    pub salts: &'a [&'a str],
    /// The parts of the body that are no text.
    pub non_text: NonTextParts,
    /// Tokens of one KV block, of engines that report it.
    pub block_size: Option<usize>,
    /// The model is a LoRA adapter of its engines.
    pub is_adapter: bool,
}

impl<'a> FeatureInput<'a> {
    /// What separates the prompt's blocks from others with equal tokens.
    fn block_keys(&self) -> BlockKeys<'a> {
        let salt = self.salts.iter().find(|salt| !salt.is_empty());
        BlockKeys {
            adapter: self.is_adapter.then_some(self.model.as_bytes()),
            salt: salt.map(|salt| salt.as_bytes()),
        }
    }
}

impl FeatureNeeds {
    /// The needs of a model's policies.
    pub(crate) fn of(model: &ModelConfig) -> Self {
        let mut needs = Self { prefix: model.disaggregate.asks_what_is_cached(), ..Self::default() };
        needs.tokens = needs.prefix || model.disaggregate.min_prompt_tokens > 0;
        needs.ids = model.tokenize.from != TokenizeSource::Off || model.bidirectional_kv.is_some();
        for pool in [&model.prefill, &model.decode] {
            match &pool.policy {
                PolicyConfig::RoundRobin(_) | PolicyConfig::Random(_) => {}
                PolicyConfig::LeastLoad(load) | PolicyConfig::PowerOfTwo(load) => {
                    needs.tokens |= load.by == LoadUnit::Tokens;
                }
                PolicyConfig::ConsistentHash(hash) => {
                    needs.session |= hash.keys.contains(&AffinityKey::Session);
                    needs.user |= hash.keys.contains(&AffinityKey::User);
                    needs.prefix |= hash.keys.contains(&AffinityKey::Prefix);
                }
                PolicyConfig::PrefixAware(_) => needs.prefix = true,
            }
        }
        needs
    }
}

impl Features {
    /// Computes the needed features of a request.
    pub(crate) fn read(input: &FeatureInput<'_>, needs: FeatureNeeds, config: &FeaturesConfig) -> Self {
        let non_text = input.non_text;
        let estimate =
            |bytes: usize| non_text.tokens + estimate(bytes.saturating_sub(non_text.bytes), config);
        let mut features = Self { tokens: estimate(input.body.len()), ..Self::default() };
        if needs.session {
            let header = input.headers.get(&config.session_header);
            features.session = header.filter(|v| !v.is_empty()).map(|v| xxh3_64(v.as_bytes()));
        }
        if needs.user {
            features.user = input.user.filter(|user| !user.is_empty()).map(|user| xxh3_64(user.as_bytes()));
        }
        if needs.prefix || needs.tokens {
            let body = input.body;
            let prompt = ["messages", "prompt", "input"].iter().find_map(|name| body.field(name));
            let (prompt, tools) = (prompt.unwrap_or_default(), body.field("tools").unwrap_or_default());
            let embeds = body.field("prompt_embeds").unwrap_or_default();
            features.tokens = estimate(input.system.len() + prompt.len() + tools.len() + embeds.len());
            if needs.prefix {
                features.prefix = chunks(first_link(input, tools), [input.system, prompt], config);
                // Derived from the whole, because its tokens may have been counted.
                let bytes = input.system.len() + prompt.len() + tools.len();
                let per_byte = features.tokens as f64 / bytes.max(1) as f64;
                features.chunk_tokens = config.chunk_bytes as f64 * per_byte;
                features.head_tokens = tools.len() as f64 * per_byte;
                features.block_root = input.block_size.map(|size| root(size, input.block_keys()));
                features.block_tokens = input.block_size.unwrap_or_default();
            }
        }
        if needs.ids || features.block_root.is_some() {
            let prompt = input.body.field("prompt").filter(|prompt| is_token_ids(prompt));
            if let Some(ids) = prompt.and_then(|prompt| serde_json::from_slice(prompt).ok()) {
                features.set_prompt_ids(PromptIds::of_prompt(ids, input.body), config);
            }
        }
        features
    }

    /// Names the prompt's blocks by its token ids, and counts its tokens.
    pub(crate) fn set_prompt_ids(&mut self, ids: PromptIds, config: &FeaturesConfig) {
        if let Some(root) = self.block_root {
            // As much of the prompt as is compared in chunks.
            let chunks = config.chunks_max as f64 * config.chunk_bytes as f64 / config.bytes_per_token;
            let most = (chunks / self.block_tokens.max(1) as f64) as usize;
            self.blocks = links(&ids.ids, root, self.block_tokens, most.max(config.chunks_max));
        }
        let tokens = ids.ids.len() as u64;
        let scale = tokens as f64 / self.tokens.max(1) as f64;
        (self.chunk_tokens, self.head_tokens) = (self.chunk_tokens * scale, self.head_tokens * scale);
        (self.tokens, self.ids) = (tokens, Some(ids));
    }

    /// The prompt's token ids, if a client or an engine's tokenizer gave them.
    pub(crate) fn prompt_ids(&self) -> Option<&PromptIds> {
        self.ids.as_ref()
    }

    /// Frees the token ids. The names of blocks stay.
    pub(crate) fn drop_prompt_ids(&mut self) {
        self.ids = None;
    }

    /// Features of a request of which only the tokens matter.
    pub(crate) fn of_tokens(tokens: u64) -> Self {
        Self { tokens, ..Self::default() }
    }

    /// The features as policies read them.
    pub(crate) fn routing_features(&self) -> RoutingFeatures<'_> {
        RoutingFeatures {
            session: self.session,
            user: self.user,
            prefix: &self.prefix,
            blocks: &self.blocks,
            tokens: self.tokens,
            chunk_tokens: self.chunk_tokens,
            head_tokens: self.head_tokens,
            block_tokens: self.block_tokens,
            pair: None,
            compatibility: None,
        }
    }
}

/// Whether a prompt is a list of token ids. Its JSON was checked before.
fn is_token_ids(prompt: &[u8]) -> bool {
    let [b'[', rest @ ..] = prompt else { return false };
    rest.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(u8::is_ascii_digit)
}

fn estimate(bytes: usize, config: &FeaturesConfig) -> u64 {
    // Bodies are bounded far below 2^53 bytes.
    (bytes as f64 / config.bytes_per_token) as u64
}

/// The first link, which separates chains before any byte of the prompt.
fn first_link(input: &FeatureInput<'_>, tools: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    let salts = input.salts.iter().map(|salt| salt.as_bytes());
    for part in [input.model.as_bytes(), tools].into_iter().chain(salts) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.digest()
}

/// The chained hashes of the whole chunks of the system prompt and of the prompt. The end of the system prompt is no
/// chunk, but part of the links behind it.
fn chunks(first_link: u64, [system, prompt]: [&[u8]; 2], config: &FeaturesConfig) -> Vec<u64> {
    // The bracket that closes a list of messages is not part of the next turn's prompt.
    let prompt = prompt.strip_suffix(b"]").unwrap_or(prompt);
    let mut link = first_link;
    let mut links = Vec::new();
    let mut chain = |chunk: &[u8], is_whole: bool| {
        link = xxh3_64_with_seed(chunk, link);
        links.extend(is_whole.then_some(link));
    };
    let system = system.chunks_exact(config.chunk_bytes);
    let (system_end, system_chunks) = (system.remainder(), system.len());
    system.take(config.chunks_max).for_each(|chunk| chain(chunk, true));
    if !system_end.is_empty() {
        chain(system_end, false);
    }
    let left = config.chunks_max.saturating_sub(system_chunks);
    prompt.chunks_exact(config.chunk_bytes).take(left).for_each(|chunk| chain(chunk, true));
    links
}

/// The features that a policy may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoutingFeatures<'a> {
    /// A hash of the request's session.
    pub session: Option<u64>,
    /// A hash of the request's user.
    pub user: Option<u64>,
    /// The prompt's beginning in chunks: each hash covers everything up to the chunk's end.
    pub prefix: &'a [u64],
    /// The same in the engines' KV blocks, if the prompt's tokens are known.
    pub blocks: &'a [u64],
    /// Estimated tokens of the prompt.
    pub tokens: u64,
    /// Estimated tokens of one chunk of `prefix`, and of the text that chat templates put in front of the first.
    pub chunk_tokens: f64,
    pub head_tokens: f64,
    /// Tokens of one block of `blocks`.
    pub block_tokens: usize,
    /// The partner's values of the labels that pairs should share.
    pub pair: Option<u64>,
    /// The partner's value of the label that pairs must share; `None`: any engine fits.
    pub compatibility: Option<u64>,
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;
    use serde_json::{Value, json};

    use super::*;

    fn raw(body: &str) -> RawBody {
        RawBody::any(body.to_owned().into(), &Default::default(), &()).expect("an object")
    }

    const ALL: FeatureNeeds =
        FeatureNeeds { session: true, user: true, prefix: true, tokens: true, ids: true };

    fn features(body: &Value, salts: &[&str]) -> Features {
        let headers = HeaderMap::new();
        let body = raw(&body.to_string());
        let input = FeatureInput {
            model: "m",
            headers: &headers,
            body: &body,
            system: body.field("system").unwrap_or_default(),
            user: None,
            salts,
            block_size: None,
            is_adapter: false,
            non_text: NonTextParts::of(&body),
        };
        Features::read(&input, ALL, &FeaturesConfig { chunk_bytes: 64, ..FeaturesConfig::default() })
    }

    fn common(a: &Features, b: &Features) -> usize {
        a.prefix.iter().zip(&b.prefix).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn the_next_turn_of_a_conversation_has_the_chunks_of_the_last_one() {
        let turn = |n: usize| json!({"role": "user", "content": format!("{n} {}", "x".repeat(200))});
        let first = features(&json!({"model": "m", "messages": [turn(1), turn(2)]}), &[]);
        let second = json!({"temperature": 1, "messages": [turn(1), turn(2), turn(3)], "stream": true});
        let second = features(&second, &[]);
        assert!(first.prefix.len() >= 6 && second.prefix.len() > first.prefix.len());
        assert_eq!(common(&first, &second), first.prefix.len());
        let other = features(&json!({"messages": [turn(1), turn(9), turn(3)]}), &[]);
        assert_eq!(common(&second, &other), 4, "up to the chunk in which they part");
    }

    #[test]
    fn salts_tools_and_models_keep_equal_prompts_apart() {
        let body = json!({"prompt": "y".repeat(500)});
        let with_tools = json!({"prompt": "y".repeat(500), "tools": [{"type": "function"}]});
        let plain = features(&body, &[]);
        assert_eq!(plain.prefix.len(), 7);
        for other in [features(&body, &["a"]), features(&body, &["b"]), features(&with_tools, &[])] {
            assert_eq!(common(&plain, &other), 0);
        }
        assert_eq!(common(&features(&body, &["a", ""]), &features(&body, &["", "a"])), 0);
        assert_eq!(features(&body, &["a"]), features(&body, &["a"]));
    }

    #[test]
    fn a_system_prompt_precedes_the_messages() {
        let turn = json!({"role": "user", "content": "x".repeat(200)});
        let with = |system: &str| features(&json!({"system": system, "messages": [turn]}), &[]);
        let (long, other_end) = ("s".repeat(150), "s".repeat(140) + "t");
        assert_eq!(with(&long), with(&long));
        assert_eq!(common(&with(&long), &with(&other_end)), 2, "whole chunks of the system prompt");
        assert_eq!(common(&with("a"), &with("b")), 0);
        assert!(with(&long).tokens > with("a").tokens);
    }

    #[test]
    fn a_short_prompt_has_no_chunk_and_a_body_without_a_prompt_neither() {
        assert!(features(&json!({"prompt": "short"}), &[]).prefix.is_empty());
        assert!(features(&json!({"model": "m"}), &[]).prefix.is_empty());
        assert_eq!(features(&json!({"prompt": "z".repeat(398)}), &[]).tokens, 100);
    }

    #[test]
    fn tokens_that_are_given_by_their_ids_are_counted_and_others_are_estimated() {
        assert_eq!(features(&json!({"prompt": [1, 2, 128_000]}), &[]).tokens, 3);
        assert_eq!(features(&json!({"prompt": [7]}), &["a"]).tokens, 1, "a salt changes nothing about it");
        assert_eq!(features(&json!({"prompt": ["a, b, c, d, e, f"]}), &[]).tokens, 5);
        assert_eq!(features(&json!({"prompt": []}), &[]).tokens, 0);
    }

    #[test]
    fn the_examined_chunks_of_a_prompt_are_bounded() {
        let config = FeaturesConfig { chunk_bytes: 64, chunks_max: 3, ..FeaturesConfig::default() };
        assert_eq!(chunks(0, [&[], &[b'x'; 1_000]], &config).len(), 3);
        assert_eq!(chunks(0, [&[b'x'; 90], &[b'x'; 1_000]], &config).len(), 3);
        assert_eq!(chunks(0, [&[b'x'; 1_000], &[b'x'; 1_000]], &config).len(), 3);
        assert_eq!(chunks(0, [&[], &[b'x'; 190]], &config).len(), 2, "whole ones");
    }

    #[test]
    fn sessions_and_users_are_distinct_and_empty_ones_absent() {
        let read = |session: &'static str, user: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-session-id", HeaderValue::from_static(session));
            let input = FeatureInput {
                model: "m",
                headers: &headers,
                body: &raw("{}"),
                system: &[],
                user: Some(user),
                salts: &[],
                non_text: NonTextParts::default(),
                block_size: None,
                is_adapter: false,
            };
            let features = Features::read(&input, ALL, &FeaturesConfig::default());
            (features.session, features.user)
        };
        assert_eq!(read("s1", "u1"), read("s1", "u1"));
        assert_ne!(read("s1", "u1").0, read("s2", "u1").0);
        assert_ne!(read("s1", "u1").1, read("s1", "u2").1);
        assert_eq!(read("", ""), (None, None));
    }

    #[test]
    fn blocks_follow_from_the_token_ids_of_a_client_or_an_engine() {
        let body = json!({"prompt": [1, 2, 3, 4, 5, 6, 7]});
        let of = |body: &Value, salts: &[&str], is_adapter| {
            let (headers, body) = (HeaderMap::new(), raw(&body.to_string()));
            let input = FeatureInput {
                model: "m",
                headers: &headers,
                body: &body,
                system: &[],
                user: None,
                salts,
                non_text: NonTextParts::of(&body),
                block_size: Some(2),
                is_adapter,
            };
            Features::read(&input, ALL, &FeaturesConfig::default())
        };
        let given = of(&body, &[], false);
        assert_eq!((given.blocks.len(), given.tokens), (3, 7));
        assert_eq!(given.prompt_ids(), Some(&PromptIds::exact((1..=7).collect())));
        let mut asked = of(&json!({"prompt": "seven words of text"}), &[], false);
        assert_eq!((asked.blocks.len(), asked.prompt_ids()), (0, None));
        asked.set_prompt_ids(PromptIds::exact((1..=7).collect()), &FeaturesConfig::default());
        assert_eq!((&asked.blocks, asked.tokens), (&given.blocks, 7));
        for other in [of(&body, &["salt"], false), of(&body, &[], true), of(&body, &["salt"], true)] {
            assert_eq!(other.blocks.len(), 3);
            assert_ne!(other.blocks, given.blocks);
        }
        assert_eq!(of(&body, &[""], false).blocks, given.blocks, "an empty salt is none");
    }

    #[test]
    fn features_that_no_policy_uses_are_not_computed() {
        let config: ModelConfig = serde_saphyr::from_str(
            "{name: m, prefill: {policy: random}, decode: {engines: [{url: 'http://h:1'}]}}",
        )
        .expect("a model");
        assert_eq!(FeatureNeeds::of(&config), FeatureNeeds::default());
        let config: ModelConfig = serde_saphyr::from_str(
            "{name: m, prefill: {policy: prefix_aware}, decode: {policy: {consistent_hash: {keys: [user]}}}}",
        )
        .expect("a model");
        assert_eq!(
            FeatureNeeds::of(&config),
            FeatureNeeds { prefix: true, user: true, ..FeatureNeeds::default() }
        );
    }
}
