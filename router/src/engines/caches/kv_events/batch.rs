//! Events of one message. vLLM 0.32 writes maps with a `type`. Older versions write arrays: the first item is the
//! type, and the others have the order of the fields below. Unknown fields are skipped.
//!
//! ```text
//! [timestamp, [event, …], data_parallel_rank?]
//! BlockStored      block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys,
//!                  group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window, locality
//! BlockRemoved     block_hashes, medium, group_idx, locality
//! AllBlocksCleared
//! ```

use xxhash_rust::xxh3::xxh3_64;

use super::extra_keys::ExtraKeys;
use super::msgpack::{MsgpackError, MsgpackItem, MsgpackReader};
use crate::metrics::kv_events::IgnoredEventReason;

/// Maximum events of one message.
const EVENTS_MAX: usize = 65_536;
/// Maximum blocks and tokens of one event: more than any prompt has.
const BLOCKS_MAX: usize = 262_144;
const TOKENS_MAX: usize = 4 << 20;

/// The events of one message, read one at a time.
#[derive(Debug)]
pub(super) struct EventBatch<'a> {
    reader: MsgpackReader<'a>,
    /// Unread events, and unread parts of the message behind them.
    remaining: usize,
    parts: usize,
}

/// One event.
#[derive(Debug, PartialEq)]
pub(super) enum KvEvent {
    Stored(StoredBlocks),
    /// These blocks of a cache group are no longer on a medium.
    Removed {
        hashes: Vec<u64>,
        group: Option<u64>,
        medium: Medium,
    },
    /// No block is cached any more.
    Cleared,
    /// Blocks were removed, but their names are unreadable.
    UnreadableRemoval,
    LeftOut(IgnoredEventReason),
}

/// Consecutive blocks that were cached.
#[derive(Debug, Default, PartialEq)]
pub(super) struct StoredBlocks {
    /// The engine's names of the blocks.
    pub hashes: Vec<u64>,
    /// The engine's name of the preceding block; none at the beginning of a prompt.
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub block_size: usize,
    /// What separates the blocks from others with equal tokens.
    pub extra_keys: ExtraKeys,
    /// Where the blocks are.
    pub medium: Medium,
    /// The cache group: layers of one kind that share blocks.
    pub group: Option<u64>,
    /// The kind of its layers. Older versions do not send it.
    pub attention: Option<AttentionKind>,
}

/// A medium of an engine's cache. An engine reads a block on its host or disk in a fraction of the time in which it would
/// compute it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Medium {
    #[default]
    Device,
    Host,
    Storage,
}

/// The part of a prompt that the layers of a cache group keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionKind {
    /// Every token: any prompt that begins with a cached block can use it.
    Full,
    /// A window, a chunk, a state, or an unknown kind.
    Other,
}

/// The fields of an event, in either encoding.
#[derive(Default)]
struct EventFields {
    kind: EventKind,
    stored: StoredBlocks,
    /// The blocks are on another host.
    is_remote: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum EventKind {
    Stored,
    Removed,
    Cleared,
    #[default]
    Other,
}

impl<'a> EventBatch<'a> {
    /// Reads a message's last part up to its events.
    pub(super) fn of(payload: &'a [u8]) -> Result<Self, MsgpackError> {
        let mut reader = MsgpackReader::new(payload);
        let parts = reader.array()?;
        if parts < 2 {
            return Err(MsgpackError);
        }
        reader.skip()?;
        let left = reader.array()?;
        if left > EVENTS_MAX {
            return Err(MsgpackError);
        }
        Ok(Self { reader, remaining: left, parts: parts - 2 })
    }

    fn read(&mut self) -> Result<Option<KvEvent>, MsgpackError> {
        if let Some(left) = self.remaining.checked_sub(1) {
            self.remaining = left;
            return event(&mut self.reader).map(Some);
        }
        (0..std::mem::take(&mut self.parts)).try_for_each(|_| self.reader.skip())?;
        Ok(None)
    }
}

/// A malformed event is an event of its own. `Err` comes once, as the last item: the rest of the message is
/// unreadable.
impl Iterator for EventBatch<'_> {
    type Item = Result<KvEvent, MsgpackError>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read().transpose();
        if matches!(read, Some(Err(MsgpackError))) {
            (self.remaining, self.parts) = (0, 0);
        }
        read
    }
}

/// Reads one event and moves the reader behind it.
fn event(reader: &mut MsgpackReader<'_>) -> Result<KvEvent, MsgpackError> {
    let (mut inside, mut fields) = (*reader, EventFields::default());
    match fields.read(&mut inside) {
        Ok(()) => {
            *reader = inside;
            Ok(fields.event())
        }
        Err(MsgpackError) => {
            let mut whole = *reader;
            reader.skip()?;
            Ok(match kind_of(&mut whole) {
                EventKind::Removed | EventKind::Cleared => KvEvent::UnreadableRemoval,
                EventKind::Stored | EventKind::Other => KvEvent::LeftOut(IgnoredEventReason::Malformed),
            })
        }
    }
}

/// The type of an event, wherever it is and even if the other fields are unreadable.
fn kind_of(reader: &mut MsgpackReader<'_>) -> EventKind {
    let mut fields = EventFields::default();
    let mut found = || -> Result<(), MsgpackError> {
        match reader.item()? {
            MsgpackItem::Map(pairs) => {
                for _ in 0..pairs {
                    match reader.item()? {
                        MsgpackItem::Text(b"type") => return fields.field(b"type", reader),
                        MsgpackItem::Array(_) | MsgpackItem::Map(_) => return Err(MsgpackError),
                        _ => reader.skip()?,
                    }
                }
                Ok(())
            }
            MsgpackItem::Array(1..) => fields.field(b"type", reader),
            _ => Ok(()),
        }
    };
    let _ = found();
    fields.kind
}

const STORED: &[&[u8]] = &[
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
    b"kv_cache_spec_sliding_window",
    b"locality",
];
const REMOVED: &[&[u8]] = &[b"block_hashes", b"medium", b"group_idx", b"locality"];

impl EventFields {
    fn read(&mut self, reader: &mut MsgpackReader<'_>) -> Result<(), MsgpackError> {
        match reader.item()? {
            MsgpackItem::Map(pairs) => {
                for _ in 0..pairs {
                    match reader.item()? {
                        MsgpackItem::Text(name) => self.field(name, reader)?,
                        _ => return Err(MsgpackError),
                    }
                }
            }
            MsgpackItem::Array(count) if count > 0 => {
                self.field(b"type", reader)?;
                let order = match self.kind {
                    EventKind::Stored => STORED,
                    EventKind::Removed => REMOVED,
                    EventKind::Cleared | EventKind::Other => &[],
                };
                for index in 1..count {
                    self.field(order.get(index - 1).copied().unwrap_or(b"?"), reader)?;
                }
            }
            _ => return Err(MsgpackError),
        }
        Ok(())
    }

    fn field(&mut self, name: &[u8], reader: &mut MsgpackReader<'_>) -> Result<(), MsgpackError> {
        match name {
            b"type" => {
                self.kind = match reader.item()? {
                    MsgpackItem::Text(b"BlockStored") => EventKind::Stored,
                    MsgpackItem::Text(b"BlockRemoved") => EventKind::Removed,
                    MsgpackItem::Text(b"AllBlocksCleared") => EventKind::Cleared,
                    MsgpackItem::Text(_) => EventKind::Other,
                    _ => return Err(MsgpackError),
                }
            }
            b"block_hashes" => {
                let count = check_count(reader.array()?, BLOCKS_MAX)?;
                self.stored.hashes = (0..count).map(|_| hash(reader.item()?)).collect::<Result<_, _>>()?;
            }
            b"parent_block_hash" => {
                self.stored.parent = match reader.item()? {
                    MsgpackItem::Nil => None,
                    item => Some(hash(item)?),
                }
            }
            b"token_ids" => {
                let count = check_count(reader.array()?, TOKENS_MAX)?;
                self.stored.tokens = (0..count).map(|_| token(reader.item()?)).collect::<Result<_, _>>()?;
            }
            b"block_size" => match reader.item()? {
                MsgpackItem::Integer(size) => {
                    self.stored.block_size = usize::try_from(size).map_err(|_| MsgpackError)?;
                }
                _ => return Err(MsgpackError),
            },
            b"lora_id" => {
                self.stored.extra_keys.adapter_id = match reader.item()? {
                    MsgpackItem::Nil => None,
                    MsgpackItem::Integer(id) => Some(id),
                    _ => return Err(MsgpackError),
                }
            }
            b"lora_name" => {
                self.stored.extra_keys.adapter = match reader.item()? {
                    MsgpackItem::Nil => None,
                    MsgpackItem::Text(name) => Some(name.into()),
                    _ => return Err(MsgpackError),
                }
            }
            b"extra_keys" => self.stored.extra_keys.read(reader)?,
            b"medium" => {
                self.stored.medium = match reader.item()? {
                    MsgpackItem::Nil | MsgpackItem::Text(b"GPU" | b"gpu") => Medium::Device,
                    MsgpackItem::Text(name) if name.starts_with(b"CPU") || name.starts_with(b"cpu") => {
                        Medium::Host
                    }
                    MsgpackItem::Text(_) => Medium::Storage,
                    _ => return Err(MsgpackError),
                }
            }
            b"locality" => {
                self.is_remote |= !matches!(reader.item()?, MsgpackItem::Nil | MsgpackItem::Text(b"LOCAL"))
            }
            b"group_idx" => {
                self.stored.group = match reader.item()? {
                    MsgpackItem::Nil => None,
                    MsgpackItem::Integer(group) => Some(group),
                    _ => return Err(MsgpackError),
                }
            }
            b"kv_cache_spec_kind" => {
                self.stored.attention = match reader.item()? {
                    MsgpackItem::Nil => None,
                    MsgpackItem::Text(b"full_attention" | b"mla_attention" | b"sink_full_attention") => {
                        Some(AttentionKind::Full)
                    }
                    MsgpackItem::Text(_) => Some(AttentionKind::Other),
                    _ => return Err(MsgpackError),
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> KvEvent {
        match self.kind {
            EventKind::Other => KvEvent::LeftOut(IgnoredEventReason::Type),
            EventKind::Cleared => KvEvent::Cleared,
            EventKind::Stored | EventKind::Removed if self.is_remote => {
                KvEvent::LeftOut(IgnoredEventReason::Tier)
            }
            EventKind::Stored => KvEvent::Stored(self.stored),
            EventKind::Removed => {
                let StoredBlocks { hashes, group, medium, .. } = self.stored;
                KvEvent::Removed { hashes, group, medium }
            }
        }
    }
}

fn check_count(count: usize, most: usize) -> Result<usize, MsgpackError> {
    if count <= most { Ok(count) } else { Err(MsgpackError) }
}

/// Parses a block's name: a number, or bytes.
fn hash(item: MsgpackItem<'_>) -> Result<u64, MsgpackError> {
    match item {
        MsgpackItem::Integer(number) => Ok(number),
        MsgpackItem::Bytes(bytes) | MsgpackItem::Text(bytes) => Ok(xxh3_64(bytes)),
        _ => Err(MsgpackError),
    }
}

fn token(item: MsgpackItem<'_>) -> Result<u32, MsgpackError> {
    match item {
        MsgpackItem::Integer(number) => u32::try_from(number).map_err(|_| MsgpackError),
        _ => Err(MsgpackError),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn all(payload: &[u8]) -> Result<Vec<KvEvent>, MsgpackError> {
        EventBatch::of(payload)?.collect()
    }

    fn read(batch: &Value) -> Result<Vec<KvEvent>, MsgpackError> {
        all(&rmp_serde::to_vec(batch).expect("it can be written"))
    }

    fn stored(extra: &Value) -> Value {
        json!({"type": "BlockStored", "block_hashes": [12_816_320_719_491_906_270_u64],
            "parent_block_hash": 12_131_603_041_379_581_109_u64, "token_ids": [301, 7], "block_size": 2,
            "lora_id": null, "medium": "GPU", "lora_name": null, "extra_keys": extra, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention"})
    }

    #[test]
    fn events_of_vllm_0_32_are_parsed() {
        let batch = json!([1_795_163_885.054_947_8, [
            stored(&json!([null])),
            {"type": "BlockRemoved", "block_hashes": [12_816_320_719_491_906_270_u64], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
            {"type": "Novelty", "with": [{"what": ["ever"]}]},
        ], 0]);
        let hashes = vec![12_816_320_719_491_906_270];
        let expected = StoredBlocks {
            hashes: hashes.clone(),
            parent: Some(12_131_603_041_379_581_109),
            tokens: vec![301, 7],
            block_size: 2,
            extra_keys: ExtraKeys::of(None, vec![vec![]]),
            group: Some(0),
            attention: Some(AttentionKind::Full),
            ..StoredBlocks::default()
        };
        let removed = KvEvent::Removed { hashes, group: Some(0), medium: Medium::Device };
        let events = vec![
            KvEvent::Stored(expected),
            removed,
            KvEvent::Cleared,
            KvEvent::LeftOut(IgnoredEventReason::Type),
        ];
        assert_eq!(read(&batch), Ok(events));
    }

    #[test]
    fn events_of_older_vllm_versions_are_parsed_alike() {
        let batch = json!([
            1.5,
            [
                ["BlockStored", [5, 6], null, [1, 2, 3, 4], 2, null],
                ["BlockRemoved", [5]],
                ["AllBlocksCleared"],
            ]
        ]);
        let first = StoredBlocks {
            hashes: vec![5, 6],
            parent: None,
            tokens: vec![1, 2, 3, 4],
            block_size: 2,
            ..StoredBlocks::default()
        };
        let removed = KvEvent::Removed { hashes: vec![5], group: None, medium: Medium::Device };
        let events = vec![KvEvent::Stored(first), removed, KvEvent::Cleared];
        assert_eq!(read(&batch), Ok(events));
    }

    #[test]
    fn names_of_bytes_are_names_too() {
        // [0, [["BlockRemoved", [bin(3)]]]]
        let mut bytes = vec![0x92, 0x00, 0x91, 0x92, 0xac];
        bytes.extend_from_slice(b"BlockRemoved");
        bytes.extend_from_slice(&[0x91, 0xc4, 3, 1, 2, 3]);
        let hashes = vec![xxh3_64(&[1, 2, 3])];
        let removed = KvEvent::Removed { hashes, group: None, medium: Medium::Device };
        assert_eq!(all(&bytes), Ok(vec![removed]));
    }

    #[test]
    fn the_medium_is_read_and_blocks_on_other_hosts_are_ignored() {
        let on = |medium: &str| {
            let mut event = stored(&Value::Null);
            event["medium"] = json!(medium);
            event
        };
        let mut remote = on("GPU");
        remote["locality"] = json!("REMOTE");
        let events = [on("GPU"), on("CPU"), on("cpu"), on("STORAGE"), remote];
        let batch = read(&json!([0, events])).expect("a batch");
        let media: Vec<_> = batch
            .iter()
            .map(|event| match event {
                KvEvent::Stored(stored) => Some(stored.medium),
                _ => None,
            })
            .collect();
        let (device, host, storage) = (Medium::Device, Medium::Host, Medium::Storage);
        assert_eq!(media, [Some(device), Some(host), Some(host), Some(storage), None]);
        assert_eq!(batch[4], KvEvent::LeftOut(IgnoredEventReason::Tier));
        let removed = read(&json!([0, [["BlockRemoved", [1], "CPU"]]])).expect("a batch");
        assert_eq!(removed, [KvEvent::Removed { hashes: vec![1], group: None, medium: host }]);
    }

    #[test]
    fn the_kind_of_a_group_is_read_in_either_encoding() {
        let read = |kind: &str, array: bool| {
            let map = stored(&Value::Null);
            let mut event = map.clone();
            event["kv_cache_spec_kind"] = json!(kind);
            event["group_idx"] = json!(1);
            if array {
                let names = STORED.iter().map(|name| std::str::from_utf8(name).expect("ASCII"));
                let items = names.map(|name| event[name].clone());
                event = std::iter::once(json!("BlockStored")).chain(items).collect();
            }
            match &read(&json!([0, [event]])).expect("a batch")[0] {
                KvEvent::Stored(stored) => (stored.group, stored.attention),
                event => panic!("{event:?}"),
            }
        };
        for array in [false, true] {
            for kind in ["full_attention", "mla_attention", "sink_full_attention"] {
                assert_eq!(read(kind, array), (Some(1), Some(AttentionKind::Full)), "{kind}");
            }
            for kind in
                ["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "unknown"]
            {
                assert_eq!(read(kind, array), (Some(1), Some(AttentionKind::Other)), "{kind}");
            }
        }
    }

    #[test]
    fn a_malformed_event_costs_itself() {
        let mut pairs = stored(&Value::Null);
        pairs["token_ids"] = json!([[301, 7], [7, 9]]);
        for bad in [
            pairs,
            json!(1),
            json!([]),
            json!({"type": 3}),
            json!({"type": "BlockStored", "block_hashes": 3}),
            json!({"type": "BlockStored", "token_ids": [-1]}),
            json!({"type": "BlockStored", "block_size": "x"}),
            json!({"type": "BlockStored", "group_idx": "x"}),
            json!(["BlockStored", [1], null, "tokens"]),
            json!({"block_hashes": 3, "type": "BlockStored"}),
        ] {
            let batch = read(&json!([0, [["AllBlocksCleared"], bad, stored(&Value::Null)], 0]));
            let events = batch.expect("the message is sound");
            assert_eq!(
                events[..2],
                [KvEvent::Cleared, KvEvent::LeftOut(IgnoredEventReason::Malformed)],
                "{bad}"
            );
            assert!(matches!(events[2], KvEvent::Stored(_)), "{bad}");
        }
    }

    #[test]
    fn an_unreadable_removal_may_mean_any_block() {
        for bad in [
            json!({"type": "BlockRemoved", "block_hashes": [[1]]}),
            json!({"block_hashes": [[1]], "type": "BlockRemoved"}),
            json!(["BlockRemoved", "all"]),
            json!({"type": "AllBlocksCleared", "medium": 7, "block_hashes": 3}),
        ] {
            assert_eq!(read(&json!([0, [bad], 0])), Ok(vec![KvEvent::UnreadableRemoval]), "{bad}");
        }
    }

    #[test]
    fn an_event_has_no_more_blocks_than_any_prompt() {
        let hashes = |count: usize| json!([0, [["BlockRemoved", vec![1; count]]]]);
        assert!(matches!(read(&hashes(BLOCKS_MAX)).expect("events")[0], KvEvent::Removed { .. }));
        assert_eq!(read(&hashes(BLOCKS_MAX + 1)), Ok(vec![KvEvent::UnreadableRemoval]));
    }

    #[test]
    fn anything_else_is_malformed() {
        for bad in [json!({}), json!([]), json!([0]), json!([0, 1])] {
            assert_eq!(read(&bad), Err(MsgpackError), "{bad}");
        }
        // [0, [an array of two items, of which one is there]]
        assert_eq!(all(&[0x92, 0x00, 0x91, 0x92, 0xac]), Err(MsgpackError));
    }

    proptest! {
        #[test]
        fn a_message_that_is_damaged_anywhere_is_read_or_refused(at in 0_usize..400, byte in any::<u8>(), cut in 0_usize..400) {
            let batch = json!([0.5, [stored(&json!([["a"]])), ["BlockRemoved", [1, 2]], stored(&Value::Null)], 3]);
            let mut bytes = rmp_serde::to_vec(&batch).expect("it can be written");
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            bytes.truncate(bytes.len().saturating_sub(cut.saturating_sub(100)));
            let _ = all(&bytes);
        }
    }
}
