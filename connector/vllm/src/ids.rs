//! vLLM's internal request ids, the router's request id in them, and the handles of leases.
//!
//! | internal id | made by | the router's id |
//! |---|---|---|
//! | `cmpl-<X>-<i>-<8 hex>` | `/v1/completions`, prompt *i* | `<X>` |
//! | `chatcmpl-<X>-<8 hex>`, `chatcmpl-<X>_<i>-<8 hex>` | `/v1/chat/completions` | `<X>` |
//! | `<k>_<id>` | choice *k* of a request with `n > 1` | that of `<id>` |
//! | any other | | the internal id |
//!
//! A last group of digits of `chatcmpl-<X>` stays: the last group of one UUID in 280 has no letter.

use baton_connector::limits::REQUEST_ID_MAX_BYTES;
use baton_connector::{Handle, RequestId};
use sha2::{Digest, Sha256};

/// Digits of the random suffix that vLLM appends to an id.
const SUFFIX_DIGITS: usize = 8;

/// Distance between the choices of two prompts of one request, for their number in the event log.
const CHOICES_PER_PROMPT: u32 = 1_024;

/// The request of an internal id, as router and tools know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestName {
    pub(crate) request: RequestId,
    /// The choice within the request.
    pub(crate) index: u32,
}

impl RequestName {
    /// The name of an internal id. `router` is the id that the router wrote into the request.
    pub(crate) fn of(internal: &str, router: Option<&str>) -> Self {
        let child = child(internal);
        let (name, prompt) = parse(child.map_or(internal, |(_, parent)| parent)).unwrap_or((internal, 0));
        let request = router.and_then(|router| RequestId::new(router).ok());
        // Either all sequences of a request are children, or none is.
        let of_child = |choice| prompt.saturating_mul(CHOICES_PER_PROMPT).saturating_add(choice);
        let index = child.map_or(prompt, |(choice, _)| of_child(choice));
        Self { request: request.unwrap_or_else(|| printable(name)), index }
    }
}

/// The choice and the parent of a child of a request with `n > 1`.
pub(crate) fn child(internal: &str) -> Option<(u32, &str)> {
    let (choice, parent) = internal.split_once('_')?;
    let is_known = parent.starts_with("cmpl-") || parent.starts_with("chatcmpl-");
    Some((digits(choice)?, parent)).filter(|_| is_known || suffix(parent).is_some())
}

/// The request id in an id that a caller names: an internal one, that of a reply, or the router's own.
pub(crate) fn bare(id: &str) -> &str {
    let parent = child(id).map_or(id, |(_, parent)| parent);
    let of_reply = || parent.strip_prefix("chatcmpl-").or_else(|| parent.strip_prefix("cmpl-"));
    parse(parent).map_or_else(|| of_reply().unwrap_or(id), |(name, _)| name)
}

/// The router's id, and the number of the prompt.
fn parse(parent: &str) -> Option<(&str, u32)> {
    let rest = suffix(parent)?;
    if let Some(name) = rest.strip_prefix("chatcmpl-") {
        let numbered = name.rsplit_once('_').and_then(|(name, at)| Some((name, digits(at)?)));
        return Some(numbered.unwrap_or((name, 0))).filter(|(name, _)| !name.is_empty());
    }
    let (name, prompt) = rest.strip_prefix("cmpl-")?.rsplit_once('-')?;
    Some((name, digits(prompt)?)).filter(|(name, _)| !name.is_empty())
}

/// An id without its random suffix.
fn suffix(id: &str) -> Option<&str> {
    let (rest, hex) = id.rsplit_once('-')?;
    let is_hex = hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    (hex.len() == SUFFIX_DIGITS && is_hex).then_some(rest)
}

fn digits(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// A request id of any text. Clients may choose vLLM's ids.
fn printable(text: &str) -> RequestId {
    RequestId::new(text).unwrap_or_else(|_| {
        let visible = text.bytes().map(|byte| if byte.is_ascii_graphic() { char::from(byte) } else { '?' });
        let visible: String = visible.take(REQUEST_ID_MAX_BYTES).collect();
        let visible = if visible.is_empty() { "?" } else { visible.as_str() };
        RequestId::new(visible).expect("short printable ASCII")
    })
}

/// What a handle proves: a consumer recomputes it from the handoff and from its own prompt, and refuses another one
/// (invariant 8).
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandleFacts<'a> {
    /// The producer's internal id.
    pub(crate) id: &'a str,
    /// The fingerprint of the prompt.
    pub(crate) prompt: &'a str,
    pub(crate) block_tokens: usize,
    /// Blocks of each KV cache group.
    pub(crate) groups: &'a [usize],
}

impl HandleFacts<'_> {
    /// A handle: one half is random, the other one depends on it and on the facts.
    pub(crate) fn handle(&self, random: u64) -> Handle {
        let Self { id, prompt, block_tokens, groups } = self;
        let digest = Sha256::digest(format!("{random:016x} {prompt} {block_tokens} {groups:?} {id}"));
        let proof = u64::from_be_bytes(digest[..8].try_into().expect("a digest has 32 bytes"));
        Handle(u128::from(random) << 64 | u128::from(proof))
    }

    /// Whether a producer has made this handle for these facts.
    pub(crate) fn are_of(&self, handle: Handle) -> bool {
        self.handle((handle.0 >> 64) as u64) == handle
    }
}

/// Random bytes of the system.
///
/// # Errors
/// When the system has none.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| format!("no random numbers: {error}"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_of_its_facts_only() {
        let facts = HandleFacts { id: "a", prompt: "cc", block_tokens: 16, groups: &[5, 10] };
        let handle = facts.handle(7);
        assert!(facts.are_of(handle) && handle != facts.handle(8));
        assert!(!facts.are_of(Handle(handle.0 ^ 1)) && !facts.are_of(Handle(handle.0 ^ 1 << 64)));
        for other in [
            HandleFacts { id: "b", ..facts },
            HandleFacts { prompt: "cd", ..facts },
            HandleFacts { block_tokens: 32, ..facts },
            HandleFacts { groups: &[10, 5], ..facts },
            HandleFacts { groups: &[5, 10, 0], ..facts },
        ] {
            assert!(!other.are_of(handle), "{other:?}");
        }
    }

    #[test]
    fn the_routers_id_is_found_in_every_form() {
        let uuid = "1b79ddd1-9e39-434e-8a57-123456789012";
        let table = [
            (format!("cmpl-{uuid}-0-0a1b2c3d"), uuid, 0),
            (format!("cmpl-{uuid}-3-0a1b2c3d"), uuid, 3),
            (format!("cmpl-{uuid}-2-0-0a1b2c3d"), "1b79ddd1-9e39-434e-8a57-123456789012-2", 0),
            (format!("2_cmpl-{uuid}-0-0a1b2c3d"), uuid, 2),
            (format!("2_cmpl-{uuid}-3-0a1b2c3d"), uuid, 3 * 1_024 + 2),
            // The last group of this UUID has digits only.
            (format!("chatcmpl-{uuid}-0a1b2c3d"), uuid, 0),
            (format!("chatcmpl-{uuid}_1-0a1b2c3d"), uuid, 1),
            (format!("0_chatcmpl-{uuid}-0a1b2c3d"), uuid, 0),
            ("chatcmpl-12345678-0a1b2c3d".into(), "12345678", 0),
            ("cmpl-a-b-0-0a1b2c3d".into(), "a-b", 0),
        ];
        for (internal, request, index) in table {
            let name = RequestName::of(&internal, None);
            assert_eq!((name.request.as_str(), name.index), (request, index), "{internal}");
            assert_eq!(bare(&internal), request);
        }
    }

    #[test]
    fn any_other_id_is_its_own_request() {
        for id in [
            "resp_12ab-0a1b2c3d",
            "cmpl-x-0a1b2c3d",
            "cmpl--0-0a1b2c3d",
            "chatcmpl--0a1b2c3d",
            "cmpl-x-0-0A1B2C3D",
            "cmpl-x-0-0a1b2c3",
            "cmpl-x-y-0a1b2c3d",
            "x",
            "_x",
            "1_x",
        ] {
            let name = RequestName::of(id, None);
            assert_eq!((name.request.as_str(), name.index), (id, 0), "{id}");
        }
        for (reply, request) in [("cmpl-u-1", "u-1"), ("chatcmpl-u", "u"), ("u", "u"), ("7_u", "7_u")] {
            assert_eq!(bare(reply), request);
        }
    }

    #[test]
    fn the_routers_own_word_is_preferred_and_odd_texts_become_printable() {
        let name = RequestName::of("3_cmpl-x-0-0a1b2c3d", Some("router-1"));
        assert_eq!((name.request.as_str(), name.index), ("router-1", 3));
        let name = RequestName::of("cmpl-x-0-0a1b2c3d", Some("with space"));
        assert_eq!(name.request.as_str(), "x");
        assert_eq!(RequestName::of("a b\u{e9}", None).request.as_str(), "a?b??");
        assert_eq!(RequestName::of("", None).request.as_str(), "?");
        let long = "x".repeat(REQUEST_ID_MAX_BYTES + 9);
        assert_eq!(RequestName::of(&long, None).request.as_str().len(), REQUEST_ID_MAX_BYTES);
    }

    #[test]
    fn children_differ_from_ids_that_only_look_like_one() {
        assert_eq!(child("12_cmpl-x-0-0a1b2c3d"), Some((12, "cmpl-x-0-0a1b2c3d")));
        assert_eq!(child("0_resp_1-0a1b2c3d"), Some((0, "resp_1-0a1b2c3d")));
        for id in ["chatcmpl-x_1-0a1b2c3d", "x_cmpl-1-0-0a1b2c3d", "_cmpl-x-0-0a1b2c3d", "1_x", "12"] {
            assert_eq!(child(id), None, "{id}");
        }
    }
}
