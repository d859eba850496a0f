//! The payload of a message: vLLM 0.32's `KVEventBatch` in MessagePack, byte for byte as vLLM writes it.
//!
//! ```text
//! [timestamp, [event, …], data_parallel_rank]         events are maps with a `type`
//! ```
//!
//! A block's name is the last eight bytes of its hash as a number, as in vLLM: other routers accept only numbers. All
//! layers have full attention, so all blocks belong to group 0. Events of tiers contain no tokens, as those of vLLM.

use crate::blocks::adapter::BlockAdapter;
use crate::blocks::cache_events::{CacheEvent, CacheMedium, StoredRun};
use crate::blocks::hash::BlockHash;

/// The kind of the only cache group.
const FULL_ATTENTION: &str = "full_attention";

/// Encodes the events of one message. `at`: seconds since the epoch.
pub(super) fn encode(at: f64, events: &[CacheEvent], rank: usize, block_tokens: usize) -> Vec<u8> {
    let mut out = Packer(Vec::with_capacity(events.iter().map(wire_bytes).sum::<usize>() + 16));
    out.array(3);
    out.float(at);
    out.array(events.len());
    for event in events {
        match event {
            CacheEvent::Stored(run) => out.stored(run, block_tokens),
            CacheEvent::Copied { medium, hashes } => out.copied(*medium, hashes, block_tokens),
            CacheEvent::Removed { medium, hashes } => out.removed(*medium, hashes),
            CacheEvent::Cleared => {
                out.map(1);
                out.kind("AllBlocksCleared");
            }
        }
    }
    out.integer(rank as u64);
    out.0
}

/// Bytes of an encoded event, at most.
pub(super) fn wire_bytes(event: &CacheEvent) -> usize {
    // Field names and lengths take less than 256 bytes. Names, tokens and keys take at most 9, 5 and 1 bytes each.
    const FIELDS: usize = 256;
    match event {
        CacheEvent::Stored(run) => {
            let salt = run.salt.as_ref().map_or(0, |salt| salt.len() + 8);
            // Once in a field, and once for each block.
            let adapter = run.adapter.as_ref().map_or(0, |adapter| adapter.name.len() + 3);
            let adapters = adapter * (run.hashes.len() + 1) + 9;
            FIELDS + 10 * run.hashes.len() + 5 * run.tokens.len() + salt + adapters
        }
        CacheEvent::Copied { hashes, .. } | CacheEvent::Removed { hashes, .. } => FIELDS + 9 * hashes.len(),
        CacheEvent::Cleared => FIELDS,
    }
}

/// vLLM's names of media. The pool is `GPU` on every device.
fn medium_name(medium: CacheMedium) -> &'static str {
    match medium {
        CacheMedium::Device => "GPU",
        CacheMedium::Host => "CPU",
        CacheMedium::Disk => "STORAGE",
    }
}

fn name_of(hash: &BlockHash) -> u64 {
    let [.., a, b, c, d, e, f, g, h] = hash.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// MessagePack in its shortest forms.
struct Packer(Vec<u8>);

impl Packer {
    fn stored(&mut self, run: &StoredRun, block_tokens: usize) {
        self.map(11);
        self.kind("BlockStored");
        self.names(&run.hashes);
        self.text("parent_block_hash");
        match &run.parent {
            Some(parent) => self.integer(name_of(parent)),
            None => self.nil(),
        }
        self.text("token_ids");
        self.array(run.tokens.len());
        run.tokens.iter().for_each(|token| self.integer(u64::from(*token)));
        let adapter = run.adapter.as_deref();
        self.block_fields(block_tokens, CacheMedium::Device, adapter);
        self.text("extra_keys");
        self.array(run.hashes.len());
        for at in 0..run.hashes.len() {
            let salt = run.salt.as_deref().filter(|_| at == 0);
            let keys = [adapter.map(|adapter| &*adapter.name), salt];
            match keys.iter().flatten().count() {
                0 => self.nil(),
                count => {
                    self.array(count);
                    keys.into_iter().flatten().for_each(|key| self.text(key));
                }
            }
        }
        self.group();
        self.attention();
    }

    /// A store on a tier: vLLM's form of blocks whose tokens an earlier event contains.
    fn copied(&mut self, medium: CacheMedium, hashes: &[BlockHash], block_tokens: usize) {
        self.map(10);
        self.kind("BlockStored");
        self.names(hashes);
        self.text("parent_block_hash");
        self.nil();
        self.text("token_ids");
        self.array(0);
        self.block_fields(block_tokens, medium, None);
        self.group();
        self.attention();
    }

    fn removed(&mut self, medium: CacheMedium, hashes: &[BlockHash]) {
        self.map(4);
        self.kind("BlockRemoved");
        self.names(hashes);
        self.text("medium");
        self.text(medium_name(medium));
        self.group();
    }

    fn kind(&mut self, kind: &str) {
        self.text("type");
        self.text(kind);
    }

    fn names(&mut self, hashes: &[BlockHash]) {
        self.text("block_hashes");
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.integer(name_of(hash)));
    }

    /// Size, adapter and medium.
    fn block_fields(&mut self, block_tokens: usize, medium: CacheMedium, adapter: Option<&BlockAdapter>) {
        self.text("block_size");
        self.integer(block_tokens as u64);
        self.text("lora_id");
        match adapter {
            Some(adapter) => self.integer(adapter.number()),
            None => self.nil(),
        }
        self.text("medium");
        self.text(medium_name(medium));
        self.text("lora_name");
        match adapter {
            Some(adapter) => self.text(&adapter.name),
            None => self.nil(),
        }
    }

    fn group(&mut self) {
        self.text("group_idx");
        self.integer(0);
    }

    fn attention(&mut self) {
        self.text("kv_cache_spec_kind");
        self.text(FULL_ATTENTION);
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    fn integer(&mut self, value: u64) {
        match value {
            0..=0x7f => self.0.push(value as u8),
            0x80..=0xff => self.0.extend([0xcc, value as u8]),
            0x100..=0xffff => {
                self.0.push(0xcd);
                self.0.extend((value as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.0.push(0xce);
                self.0.extend((value as u32).to_be_bytes());
            }
            _ => {
                self.0.push(0xcf);
                self.0.extend(value.to_be_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) {
        match text.len() {
            length @ 0..=31 => self.0.push(0xa0 | length as u8),
            length @ 32..=0xff => self.0.extend([0xd9, length as u8]),
            length => {
                let length =
                    u16::try_from(length).expect("names are short, and a reported salt is below 64 KiB");
                self.0.push(0xda);
                self.0.extend(length.to_be_bytes());
            }
        }
        self.0.extend_from_slice(text.as_bytes());
    }

    fn array(&mut self, count: usize) {
        self.count(count, 0x90, 0xdc);
    }

    fn map(&mut self, count: usize) {
        self.count(count, 0x80, 0xde);
    }

    /// The head of an array or a map: in one byte, or behind `long` in two or (`long + 1`) four bytes.
    fn count(&mut self, count: usize, short: u8, long: u8) {
        match (count, u16::try_from(count)) {
            (0..=15, _) => self.0.push(short | count as u8),
            (_, Ok(count)) => {
                self.0.push(long);
                self.0.extend(count.to_be_bytes());
            }
            (_, Err(_)) => {
                let count = u32::try_from(count).expect("an event has fewer items");
                self.0.push(long + 1);
                self.0.extend(count.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::model::lora::AdapterIndex;

    fn named(name: u64) -> BlockHash {
        let mut hash = [0xee; 32];
        hash[24..].copy_from_slice(&name.to_be_bytes());
        BlockHash(hash)
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn stored(hashes: Vec<BlockHash>, parent: Option<BlockHash>, tokens: Vec<u32>, salt: bool) -> CacheEvent {
        let salt = salt.then(|| "salt".into());
        CacheEvent::Stored(StoredRun { hashes, parent, tokens, salt, adapter: None })
    }

    /// What vLLM 0.32's `msgspec` classes write for the same events (`tests/fixtures/kv_events/make.py`).
    #[test]
    fn messages_are_byte_for_byte_those_of_vllm() {
        // The first two blocks of tokens 1 to 8 without a salt, in blocks of 4.
        let mut chain = Vec::new();
        crate::blocks::hash::extend(&mut chain, &[1, 2, 3, 4, 5, 6, 7, 8], 4, None);
        let events = [
            stored(chain.clone(), None, vec![1, 2, 3, 4, 5, 200, 70_000, 8], true),
            stored(vec![named(1)], Some(chain[1]), vec![9, 10, 11, 12], false),
            CacheEvent::Copied { medium: CacheMedium::Host, hashes: vec![chain[0]] },
            CacheEvent::Removed { medium: CacheMedium::Device, hashes: vec![chain[0], named(1)] },
            CacheEvent::Removed { medium: CacheMedium::Disk, hashes: vec![chain[1]] },
            CacheEvent::Cleared,
        ];
        let payload = encode(1_795_163_885.5, &events, 3, 4);
        let golden = include_str!("../../tests/fixtures/kv_events/golden.txt");
        let [short, long, many] = golden.lines().collect::<Vec<_>>()[..] else { panic!("three lines") };
        assert_eq!(hex(&payload), short);
        // Long forms of arrays and numbers.
        let tokens = (65_500..65_540).chain([u32::MAX]).collect();
        let events = [stored((0..20).map(named).collect(), Some(chain[1]), tokens, false)];
        assert_eq!(hex(&encode(0.25, &events, 0, 2)), long);
        let hashes = (0..70_000).map(named).collect();
        let events = [CacheEvent::Removed { medium: CacheMedium::Host, hashes }];
        assert_eq!(hex(&Sha256::digest(encode(0.25, &events, 0, 2))), many, "its digest");
    }

    #[test]
    fn blocks_of_an_adapter_have_its_number_and_its_name_as_in_vllm() {
        let adapter = BlockAdapter { index: AdapterIndex(1), name: "sql".into(), digest: [5; 32] };
        let run = StoredRun {
            hashes: vec![named(1), named(2)],
            parent: None,
            tokens: vec![1, 2, 3, 4],
            salt: Some("tenant".into()),
            adapter: Some(Arc::new(adapter)),
        };
        let payload = encode(0.5, &[CacheEvent::Stored(run)], 0, 2);
        let batch: serde_json::Value = rmp_serde::from_slice(&payload).expect("MessagePack");
        let event = &batch[1][0];
        assert_eq!((&event["lora_id"], &event["lora_name"]), (&2.into(), &"sql".into()), "{event}");
        assert_eq!(event["extra_keys"], serde_json::json!([["sql", "tenant"], ["sql"]]));
    }

    #[test]
    fn no_event_is_larger_than_its_estimate() {
        let salted = StoredRun {
            hashes: vec![named(u64::MAX); 70_000],
            parent: Some(named(u64::MAX)),
            tokens: vec![u32::MAX; 70_000],
            salt: Some("s".repeat(1_024).into()),
            adapter: Some(Arc::new(BlockAdapter {
                index: AdapterIndex(63),
                name: "n".repeat(256).into(),
                digest: [0; 32],
            })),
        };
        let hashes = || vec![named(u64::MAX); 70_000];
        for event in [
            CacheEvent::Stored(salted),
            CacheEvent::Copied { medium: CacheMedium::Disk, hashes: hashes() },
            CacheEvent::Removed { medium: CacheMedium::Disk, hashes: hashes() },
            CacheEvent::Cleared,
        ] {
            let frame = encode(0.0, &[], 0, 1).len();
            let bytes = encode(0.0, std::slice::from_ref(&event), 0, 1).len() - frame;
            assert!(bytes <= wire_bytes(&event), "{bytes} > {}", wire_bytes(&event));
        }
    }
}
