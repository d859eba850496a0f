//! Chained hashes of full KV blocks: the keys of the prefix cache.
//!
//! `hash_i = SHA-256(CBOR([hash_{i-1}, [token ids], extra]))` is exactly vLLM's `sha256_cbor` (vLLM 0.32, checked
//! against its golden vectors below). Routers that index vLLM's KV events therefore index these blocks alike. Only
//! the salted form differs: vLLM's golden vector does not contain its salt.
//!
//! The chain starts at `SHA-256(CBOR(seed))` with vLLM's default seed. `extra` contains a tenant's cache salt in the
//! first block: tenants with different salts never share a block (invariant 8). The chain of an adapter's blocks starts
//! at `SHA-256(CBOR([seed, "lora", digest]))`, which no salt can produce. vLLM's extra keys contain the adapter's name,
//! which does not distinguish two adapters with one name.

use std::fmt;

use sha2::{Digest, Sha256};

/// The hash of one full block and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

/// vLLM's `NONE_HASH` seed when `PYTHONHASHSEED` is not set.
const SEED: &str = "vllm-none-hash";

impl BlockHash {
    /// The parent of a sequence's first block.
    #[must_use]
    pub fn root() -> Self {
        let mut cbor = Vec::with_capacity(16);
        put_text(&mut cbor, SEED);
        Self(Sha256::digest(&cbor).into())
    }

    /// The parent of a first block whose KV depends on the adapter with this digest.
    #[must_use]
    pub fn root_of_adapter(digest: &[u8; 32]) -> Self {
        let mut cbor = Vec::with_capacity(64);
        put_head(&mut cbor, 4, 3);
        put_text(&mut cbor, SEED);
        put_text(&mut cbor, "lora");
        put_head(&mut cbor, 2, 32);
        cbor.extend_from_slice(digest);
        Self(Sha256::digest(&cbor).into())
    }

    /// The hash of a block with these tokens after `parent`. `salt` belongs to a first block only.
    #[must_use]
    pub fn of_block(parent: Self, tokens: &[u32], salt: Option<&str>) -> Self {
        let mut cbor = Vec::with_capacity(48 + 5 * tokens.len());
        put_head(&mut cbor, 4, 3);
        put_head(&mut cbor, 2, 32);
        cbor.extend_from_slice(&parent.0);
        put_head(&mut cbor, 4, tokens.len() as u64);
        for &token in tokens {
            put_head(&mut cbor, 0, u64::from(token));
        }
        match salt {
            None => cbor.push(0xf6),
            Some(salt) => {
                put_head(&mut cbor, 4, 1);
                put_head(&mut cbor, 4, 2);
                put_text(&mut cbor, "cache_salt");
                put_text(&mut cbor, salt);
            }
        }
        Self(Sha256::digest(&cbor).into())
    }
}

/// 64 hexadecimal digits.
impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Text that is not 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid block hash, expected 64 hexadecimal digits")]
pub struct BlockHashError;

impl std::str::FromStr for BlockHash {
    type Err = BlockHashError;

    fn from_str(text: &str) -> Result<Self, BlockHashError> {
        hex_bytes(text).map(Self).ok_or(BlockHashError)
    }
}

/// The bytes that hexadecimal digits spell; `None` unless there are two for each byte, and nothing else.
pub(crate) fn hex_bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let mut bytes = [0; N];
    if pairs.len() != N {
        return None;
    }
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = (digit(*high)? * 16 + digit(*low)?) as u8;
    }
    Some(bytes)
}

/// Extends `hashes` to cover every full block of `tokens`, computed by the model alone.
pub fn extend(hashes: &mut Vec<BlockHash>, tokens: &[u32], block_tokens: usize, salt: Option<&str>) {
    extend_with(hashes, tokens, block_tokens, salt, None);
}

/// As [`extend`], with the adapter of this digest.
pub fn extend_with(
    hashes: &mut Vec<BlockHash>,
    tokens: &[u32],
    block_tokens: usize,
    salt: Option<&str>,
    adapter: Option<&[u8; 32]>,
) {
    for block in tokens.chunks_exact(block_tokens).skip(hashes.len()) {
        let parent = hashes.last().copied();
        let salt = if parent.is_none() { salt } else { None };
        let root = || adapter.map_or_else(BlockHash::root, BlockHash::root_of_adapter);
        hashes.push(BlockHash::of_block(parent.unwrap_or_else(root), block, salt));
    }
}

/// A 64-bit name of a whole prompt. Producer and consumer compare it before a handoff is used.
#[must_use]
pub fn prompt_fingerprint(tokens: &[u32]) -> u64 {
    prompt_fingerprint_with(tokens, None)
}

/// As [`prompt_fingerprint`], for blocks that depend on the adapter of this digest.
#[must_use]
pub fn prompt_fingerprint_with(tokens: &[u32], adapter: Option<&[u8; 32]>) -> u64 {
    let mut hash = Sha256::new();
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    if let Some(digest) = adapter {
        hash.update(b"lora");
        hash.update(digest);
    }
    let digest = hash.finalize();
    u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
}

/// A CBOR head in its shortest form (RFC 8949, section 4.2).
fn put_head(out: &mut Vec<u8>, major: u8, value: u64) {
    let major = major << 5;
    match value {
        0..=23 => out.push(major | value as u8),
        24..=0xff => out.extend([major | 24, value as u8]),
        0x100..=0xffff => {
            out.push(major | 25);
            out.extend((value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(major | 26);
            out.extend((value as u32).to_be_bytes());
        }
        _ => {
            out.push(major | 27);
            out.extend(value.to_be_bytes());
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_head(out, 3, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(hash: BlockHash) -> String {
        hash.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn hashes_are_those_of_vllm() {
        assert_eq!(
            hex(BlockHash::root()),
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
        );
        let mut small = Vec::new();
        extend(&mut small, &(1..=10).collect::<Vec<_>>(), 4, None);
        assert_eq!(
            small.into_iter().map(hex).collect::<Vec<_>>(),
            [
                "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
                "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
            ]
        );
        let mut large = Vec::new();
        extend(&mut large, &(100_000..=100_063).collect::<Vec<_>>(), 16, None);
        assert_eq!(hex(large[3]), "89485889dcbe9184323088f60f5ced6fcf5af2806129e7a1df62a8f33e668d00");
    }

    #[test]
    fn a_hash_round_trips_as_text() {
        let text = BlockHash::root().to_string();
        assert_eq!(text.parse(), Ok(BlockHash::root()));
        for bad in ["", "0", &text[1..], &text.replace('9', "g"), &format!("{text}0"), &"é".repeat(32)] {
            assert_eq!(bad.parse::<BlockHash>(), Err(BlockHashError), "{bad}");
        }
    }

    #[test]
    fn a_salted_tenant_shares_no_block() {
        let mut salted = Vec::new();
        extend(&mut salted, &(1..=10).collect::<Vec<_>>(), 4, Some("salt"));
        let mut plain = Vec::new();
        extend(&mut plain, &(1..=10).collect::<Vec<_>>(), 4, None);
        assert!(salted.iter().all(|hash| !plain.contains(hash)));
    }

    #[test]
    fn an_adapter_shares_no_block_and_no_prompt() {
        let tokens: Vec<u32> = (1..=10).collect();
        let digest = [7_u8; 32];
        let of = |salt, adapter| {
            let mut hashes = Vec::new();
            extend_with(&mut hashes, &tokens, 4, salt, adapter);
            hashes
        };
        let text = digest.map(char::from).iter().collect::<String>();
        let mut all = Vec::new();
        for adapter in [None, Some(&digest), Some(&[8; 32])] {
            for salt in [None, Some("salt"), Some("lora"), Some(text.as_str())] {
                all.extend(of(salt, adapter));
            }
        }
        assert_eq!(all.len(), 24);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 24, "all are different");
        let prompts =
            [None, Some(&digest), Some(&[8; 32])].map(|adapter| prompt_fingerprint_with(&tokens, adapter));
        assert_eq!(prompts[0], prompt_fingerprint(&tokens));
        assert!(prompts[0] != prompts[1] && prompts[1] != prompts[2] && prompts[0] != prompts[2]);
    }
}
