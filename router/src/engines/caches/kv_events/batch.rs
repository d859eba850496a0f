//! One message's events. vLLM 0.32 writes maps with a `type`; older versions write arrays whose first item is the
//! type and whose order is the order of the fields below. Unknown fields are skipped.
//!
//! ```text
//! [timestamp, [event, …], data_parallel_rank?]
//! BlockStored      block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys,
//!                  group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window, locality
//! BlockRemoved     block_hashes, medium, group_idx, locality
//! AllBlocksCleared
//! ```

use xxhash_rust::xxh3::xxh3_64;

use super::msgpack::{Item, Malformed, Reader};
use crate::metrics::kv_events::LeftOut;

/// Events of one message that are looked at.
const EVENTS_MAX: usize = 65_536;
/// Blocks, and tokens, of one event: more than any prompt has.
const BLOCKS_MAX: usize = 262_144;
const TOKENS_MAX: usize = 4 << 20;

/// The events of one message, read one at a time.
#[derive(Debug)]
pub(super) struct Events<'a> {
    reader: Reader<'a>,
    /// Events, and parts of the message behind them, that are still to be read.
    left: usize,
    parts: usize,
}

/// One event.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    Stored(Stored),
    /// These blocks of a cache group are not held any more.
    Removed {
        hashes: Vec<u64>,
        group: Option<u64>,
    },
    /// No block is held any more.
    Cleared,
    /// Blocks were removed, and which cannot be read.
    Lost,
    LeftOut(LeftOut),
}

/// Blocks in a row that are held now.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Stored {
    /// The engine's names of the blocks.
    pub hashes: Vec<u64>,
    /// The engine's name of the block before them; none at the beginning of a prompt.
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub block_size: usize,
    /// They differ from blocks of equal tokens by something else.
    pub apart: bool,
    /// The cache group: layers of one kind that share blocks.
    pub group: Option<u64>,
    /// The kind of its layers; older versions do not send it.
    pub attention: Option<Attention>,
}

/// What the layers of a cache group keep of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attention {
    /// Every token: a block that is held can be used by any prompt that begins with it.
    Full,
    /// A window, a chunk, a state, or a kind that the router does not know.
    Other,
}

/// The fields of an event, in whatever encoding.
#[derive(Default)]
struct Fields {
    kind: Kind,
    stored: Stored,
    /// On another medium than the device, or another host.
    elsewhere: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Kind {
    Stored,
    Removed,
    Cleared,
    #[default]
    Other,
}

impl<'a> Events<'a> {
    /// Reads a message's last part up to its events.
    pub(super) fn of(payload: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(payload);
        let parts = reader.array()?;
        if parts < 2 {
            return Err(Malformed);
        }
        reader.skip()?;
        let left = reader.array()?;
        if left > EVENTS_MAX {
            return Err(Malformed);
        }
        Ok(Self { reader, left, parts: parts - 2 })
    }

    fn read(&mut self) -> Result<Option<Event>, Malformed> {
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return event(&mut self.reader).map(Some);
        }
        (0..std::mem::take(&mut self.parts)).try_for_each(|_| self.reader.skip())?;
        Ok(None)
    }
}

/// A malformed event costs that event. `Err`, once and last: the items of the message have no ends.
impl Iterator for Events<'_> {
    type Item = Result<Event, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read().transpose();
        if matches!(read, Some(Err(Malformed))) {
            (self.left, self.parts) = (0, 0);
        }
        read
    }
}

/// Reads one event and leaves the reader behind it.
fn event(reader: &mut Reader<'_>) -> Result<Event, Malformed> {
    let (mut inside, mut fields) = (*reader, Fields::default());
    match fields.read(&mut inside) {
        Ok(()) => {
            *reader = inside;
            Ok(fields.event())
        }
        Err(Malformed) => {
            let mut whole = *reader;
            reader.skip()?;
            Ok(match kind_of(&mut whole) {
                Kind::Removed | Kind::Cleared => Event::Lost,
                Kind::Stored | Kind::Other => Event::LeftOut(LeftOut::Malformed),
            })
        }
    }
}

/// The type of an event, wherever it stands and whatever else cannot be read.
fn kind_of(reader: &mut Reader<'_>) -> Kind {
    let mut fields = Fields::default();
    let mut found = || -> Result<(), Malformed> {
        match reader.item()? {
            Item::Map(pairs) => {
                for _ in 0..pairs {
                    match reader.item()? {
                        Item::Text(b"type") => return fields.field(b"type", reader),
                        Item::Array(_) | Item::Map(_) => return Err(Malformed),
                        _ => reader.skip()?,
                    }
                }
                Ok(())
            }
            Item::Array(1..) => fields.field(b"type", reader),
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

impl Fields {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Malformed> {
        match reader.item()? {
            Item::Map(pairs) => {
                for _ in 0..pairs {
                    match reader.item()? {
                        Item::Text(name) => self.field(name, reader)?,
                        _ => return Err(Malformed),
                    }
                }
            }
            Item::Array(count) if count > 0 => {
                self.field(b"type", reader)?;
                let order = match self.kind {
                    Kind::Stored => STORED,
                    Kind::Removed => REMOVED,
                    Kind::Cleared | Kind::Other => &[],
                };
                for index in 1..count {
                    self.field(order.get(index - 1).copied().unwrap_or(b"?"), reader)?;
                }
            }
            _ => return Err(Malformed),
        }
        Ok(())
    }

    fn field(&mut self, name: &[u8], reader: &mut Reader<'_>) -> Result<(), Malformed> {
        match name {
            b"type" => {
                self.kind = match reader.item()? {
                    Item::Text(b"BlockStored") => Kind::Stored,
                    Item::Text(b"BlockRemoved") => Kind::Removed,
                    Item::Text(b"AllBlocksCleared") => Kind::Cleared,
                    Item::Text(_) => Kind::Other,
                    _ => return Err(Malformed),
                }
            }
            b"block_hashes" => {
                let count = at_most(reader.array()?, BLOCKS_MAX)?;
                self.stored.hashes = (0..count).map(|_| hash(reader.item()?)).collect::<Result<_, _>>()?;
            }
            b"parent_block_hash" => {
                self.stored.parent = match reader.item()? {
                    Item::Nil => None,
                    item => Some(hash(item)?),
                }
            }
            b"token_ids" => {
                let count = at_most(reader.array()?, TOKENS_MAX)?;
                self.stored.tokens = (0..count).map(|_| token(reader.item()?)).collect::<Result<_, _>>()?;
            }
            b"block_size" => match reader.item()? {
                Item::Integer(size) => {
                    self.stored.block_size = usize::try_from(size).map_err(|_| Malformed)?;
                }
                _ => return Err(Malformed),
            },
            b"lora_id" | b"lora_name" => self.stored.apart |= !is_empty(reader)?,
            b"extra_keys" => self.stored.apart |= !all_empty(reader)?,
            b"medium" => {
                self.elsewhere |= !matches!(reader.item()?, Item::Nil | Item::Text(b"GPU" | b"gpu"));
            }
            b"locality" => self.elsewhere |= !matches!(reader.item()?, Item::Nil | Item::Text(b"LOCAL")),
            b"group_idx" => {
                self.stored.group = match reader.item()? {
                    Item::Nil => None,
                    Item::Integer(group) => Some(group),
                    _ => return Err(Malformed),
                }
            }
            b"kv_cache_spec_kind" => {
                self.stored.attention = match reader.item()? {
                    Item::Nil => None,
                    Item::Text(b"full_attention" | b"mla_attention" | b"sink_full_attention") => {
                        Some(Attention::Full)
                    }
                    Item::Text(_) => Some(Attention::Other),
                    _ => return Err(Malformed),
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> Event {
        match self.kind {
            Kind::Other => Event::LeftOut(LeftOut::Type),
            Kind::Cleared => Event::Cleared,
            Kind::Stored | Kind::Removed if self.elsewhere => Event::LeftOut(LeftOut::Tier),
            Kind::Stored => Event::Stored(self.stored),
            Kind::Removed => Event::Removed { hashes: self.stored.hashes, group: self.stored.group },
        }
    }
}

fn at_most(count: usize, most: usize) -> Result<usize, Malformed> {
    if count <= most { Ok(count) } else { Err(Malformed) }
}

/// A block's name: a number, or bytes.
fn hash(item: Item<'_>) -> Result<u64, Malformed> {
    match item {
        Item::Integer(number) => Ok(number),
        Item::Bytes(bytes) | Item::Text(bytes) => Ok(xxh3_64(bytes)),
        _ => Err(Malformed),
    }
}

fn token(item: Item<'_>) -> Result<u32, Malformed> {
    match item {
        Item::Integer(number) => u32::try_from(number).map_err(|_| Malformed),
        _ => Err(Malformed),
    }
}

/// Passes an item over; whether it was nil.
fn is_empty(reader: &mut Reader<'_>) -> Result<bool, Malformed> {
    let nil = matches!(Reader::new(reader.left()).item()?, Item::Nil);
    reader.skip()?;
    Ok(nil)
}

/// Passes an item over; whether it was nil, or a list of nothing but nils.
fn all_empty(reader: &mut Reader<'_>) -> Result<bool, Malformed> {
    match Reader::new(reader.left()).item()? {
        Item::Array(_) => {
            let count = reader.array()?;
            let mut all = true;
            for _ in 0..count {
                all &= is_empty(reader)?;
            }
            Ok(all)
        }
        _ => is_empty(reader),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn all(payload: &[u8]) -> Result<Vec<Event>, Malformed> {
        Events::of(payload)?.collect()
    }

    fn read(batch: &Value) -> Result<Vec<Event>, Malformed> {
        all(&rmp_serde::to_vec(batch).expect("it can be written"))
    }

    fn stored(extra: &Value) -> Value {
        json!({"type": "BlockStored", "block_hashes": [12_816_320_719_491_906_270_u64],
            "parent_block_hash": 12_131_603_041_379_581_109_u64, "token_ids": [301, 7], "block_size": 2,
            "lora_id": null, "medium": "GPU", "lora_name": null, "extra_keys": extra, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention"})
    }

    #[test]
    fn what_vllm_0_32_sends_is_read() {
        let batch = json!([1_795_163_885.054_947_8, [
            stored(&json!([null])),
            {"type": "BlockRemoved", "block_hashes": [12_816_320_719_491_906_270_u64], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
            {"type": "Novelty", "with": [{"what": ["ever"]}]},
        ], 0]);
        let hashes = vec![12_816_320_719_491_906_270];
        let expected = Stored {
            hashes: hashes.clone(),
            parent: Some(12_131_603_041_379_581_109),
            tokens: vec![301, 7],
            block_size: 2,
            apart: false,
            group: Some(0),
            attention: Some(Attention::Full),
        };
        let removed = Event::Removed { hashes, group: Some(0) };
        let events = vec![Event::Stored(expected), removed, Event::Cleared, Event::LeftOut(LeftOut::Type)];
        assert_eq!(read(&batch), Ok(events));
    }

    #[test]
    fn what_older_versions_send_is_read_the_same() {
        let batch = json!([
            1.5,
            [
                ["BlockStored", [5, 6], null, [1, 2, 3, 4], 2, null],
                ["BlockRemoved", [5]],
                ["AllBlocksCleared"],
            ]
        ]);
        let first = Stored {
            hashes: vec![5, 6],
            parent: None,
            tokens: vec![1, 2, 3, 4],
            block_size: 2,
            ..Stored::default()
        };
        let removed = Event::Removed { hashes: vec![5], group: None };
        let events = vec![Event::Stored(first), removed, Event::Cleared];
        assert_eq!(read(&batch), Ok(events));
    }

    #[test]
    fn names_of_bytes_are_names_too() {
        // [0, [["BlockRemoved", [bin(3)]]]]
        let mut bytes = vec![0x92, 0x00, 0x91, 0x92, 0xac];
        bytes.extend_from_slice(b"BlockRemoved");
        bytes.extend_from_slice(&[0x91, 0xc4, 3, 1, 2, 3]);
        let removed = Event::Removed { hashes: vec![xxh3_64(&[1, 2, 3])], group: None };
        assert_eq!(all(&bytes), Ok(vec![removed]));
    }

    #[test]
    fn blocks_that_more_than_tokens_keeps_apart_are_marked_and_other_tiers_left_out() {
        for extra in [json!([["salt"]]), json!([null, [1]]), json!("x")] {
            let batch = read(&json!([0, [stored(&extra)]])).expect("a batch");
            assert!(matches!(&batch[0], Event::Stored(stored) if stored.apart), "{extra}");
        }
        let (mut on_host, mut remote) = (stored(&Value::Null), stored(&Value::Null));
        on_host["medium"] = json!("CPU");
        remote["locality"] = json!("REMOTE");
        let removed = json!(["BlockRemoved", [1], "CPU"]);
        let batch = read(&json!([0, [on_host, remote, removed, stored(&Value::Null)]])).expect("a batch");
        assert!(batch[..3].iter().all(|event| *event == Event::LeftOut(LeftOut::Tier)));
        assert!(matches!(&batch[3], Event::Stored(stored) if !stored.apart));
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
                Event::Stored(stored) => (stored.group, stored.attention),
                event => panic!("{event:?}"),
            }
        };
        for array in [false, true] {
            for kind in ["full_attention", "mla_attention", "sink_full_attention"] {
                assert_eq!(read(kind, array), (Some(1), Some(Attention::Full)), "{kind}");
            }
            for kind in
                ["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "unknown"]
            {
                assert_eq!(read(kind, array), (Some(1), Some(Attention::Other)), "{kind}");
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
            assert_eq!(events[..2], [Event::Cleared, Event::LeftOut(LeftOut::Malformed)], "{bad}");
            assert!(matches!(events[2], Event::Stored(_)), "{bad}");
        }
    }

    #[test]
    fn a_removal_that_cannot_be_read_may_be_of_any_block() {
        for bad in [
            json!({"type": "BlockRemoved", "block_hashes": [[1]]}),
            json!({"block_hashes": [[1]], "type": "BlockRemoved"}),
            json!(["BlockRemoved", "all"]),
            json!({"type": "AllBlocksCleared", "medium": 7, "block_hashes": 3}),
        ] {
            assert_eq!(read(&json!([0, [bad], 0])), Ok(vec![Event::Lost]), "{bad}");
        }
    }

    #[test]
    fn an_event_has_no_more_blocks_than_any_prompt() {
        let hashes = |count: usize| json!([0, [["BlockRemoved", vec![1; count]]]]);
        assert!(matches!(read(&hashes(BLOCKS_MAX)).expect("events")[0], Event::Removed { .. }));
        assert_eq!(read(&hashes(BLOCKS_MAX + 1)), Ok(vec![Event::Lost]));
    }

    #[test]
    fn anything_else_is_malformed() {
        for bad in [json!({}), json!([]), json!([0]), json!([0, 1])] {
            assert_eq!(read(&bad), Err(Malformed), "{bad}");
        }
        // [0, [an array of two items, of which one is there]]
        assert_eq!(all(&[0x92, 0x00, 0x91, 0x92, 0xac]), Err(Malformed));
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
