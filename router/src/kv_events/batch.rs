//! One message's events. vLLM 0.32 writes maps with a `type`; older versions write arrays whose first item is the
//! type and whose order is the order of the fields below. Observed on 2026-11-20; fields that are not known are
//! passed over.
//!
//! ```text
//! [timestamp, [event, …], data_parallel_rank?]
//! BlockStored      block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys
//! BlockRemoved     block_hashes, medium
//! AllBlocksCleared
//! ```

use xxhash_rust::xxh3::xxh3_64;

use super::msgpack::{Item, Malformed, Reader};

/// Events of one message that are looked at.
const EVENTS_MAX: usize = 65_536;

/// One message.
#[derive(Debug, PartialEq)]
pub(super) struct Batch {
    pub events: Vec<Event>,
}

/// One event.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    Stored(Stored),
    /// These blocks are not held any more.
    Removed(Vec<u64>),
    /// Nothing is.
    Cleared,
    /// Of another kind, another tier, or another group of layers.
    Other,
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
}

/// The fields of an event, in whatever encoding.
#[derive(Default)]
struct Fields {
    kind: Kind,
    stored: Stored,
    /// On another medium than the device, or of another group than the first.
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

impl Batch {
    /// Reads a message's last part.
    pub(super) fn read(payload: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(payload);
        let parts = reader.array()?;
        if parts < 2 {
            return Err(Malformed);
        }
        reader.skip()?;
        let count = reader.array()?;
        if count > EVENTS_MAX {
            return Err(Malformed);
        }
        let events = (0..count).map(|_| event(&mut reader)).collect::<Result<_, _>>()?;
        (2..parts).try_for_each(|_| reader.skip())?;
        Ok(Self { events })
    }
}

fn event(reader: &mut Reader<'_>) -> Result<Event, Malformed> {
    let mut fields = Fields::default();
    match reader.item()? {
        Item::Map(pairs) => {
            for _ in 0..pairs {
                match reader.item()? {
                    Item::Text(name) => fields.field(name, reader)?,
                    _ => return Err(Malformed),
                }
            }
        }
        Item::Array(count) => {
            let names = (count > 0).then(|| fields.field(b"type", reader)).transpose()?;
            let order: &[&[u8]] = match (names, fields.kind) {
                (Some(()), Kind::Stored) => &[
                    b"block_hashes",
                    b"parent_block_hash",
                    b"token_ids",
                    b"block_size",
                    b"lora_id",
                    b"medium",
                    b"lora_name",
                    b"extra_keys",
                    b"group_idx",
                ],
                (Some(()), Kind::Removed) => &[b"block_hashes", b"medium", b"group_idx"],
                _ => &[],
            };
            for index in 1..count {
                fields.field(order.get(index - 1).copied().unwrap_or(b"?"), reader)?;
            }
        }
        _ => return Err(Malformed),
    }
    Ok(fields.event())
}

impl Fields {
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
                let count = reader.array()?;
                self.stored.hashes = (0..count).map(|_| hash(reader.item()?)).collect::<Result<_, _>>()?;
            }
            b"parent_block_hash" => {
                self.stored.parent = match reader.item()? {
                    Item::Nil => None,
                    item => Some(hash(item)?),
                }
            }
            b"token_ids" => {
                let count = reader.array()?;
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
            b"group_idx" => self.elsewhere |= !matches!(reader.item()?, Item::Nil | Item::Integer(0)),
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> Event {
        match self.kind {
            _ if self.elsewhere => Event::Other,
            Kind::Stored => Event::Stored(self.stored),
            Kind::Removed => Event::Removed(self.stored.hashes),
            Kind::Cleared => Event::Cleared,
            Kind::Other => Event::Other,
        }
    }
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

    fn read(batch: &Value) -> Result<Batch, Malformed> {
        Batch::read(&rmp_serde::to_vec(batch).expect("it can be written"))
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
        };
        let events = vec![Event::Stored(expected), Event::Removed(hashes), Event::Cleared, Event::Other];
        assert_eq!(read(&batch), Ok(Batch { events }));
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
            apart: false,
        };
        let events = vec![Event::Stored(first), Event::Removed(vec![5]), Event::Cleared];
        assert_eq!(read(&batch), Ok(Batch { events }));
    }

    #[test]
    fn names_of_bytes_are_names_too() {
        // [0, [["BlockRemoved", [bin(3)]]]]
        let mut bytes = vec![0x92, 0x00, 0x91, 0x92, 0xac];
        bytes.extend_from_slice(b"BlockRemoved");
        bytes.extend_from_slice(&[0x91, 0xc4, 3, 1, 2, 3]);
        let expected = Batch { events: vec![Event::Removed(vec![xxh3_64(&[1, 2, 3])])] };
        assert_eq!(Batch::read(&bytes), Ok(expected));
    }

    #[test]
    fn blocks_that_more_than_tokens_keeps_apart_are_marked_and_other_tiers_left_out() {
        for extra in [json!([["salt"]]), json!([null, [1]]), json!("x")] {
            let batch = read(&json!([0, [stored(&extra)]])).expect("a batch");
            assert!(matches!(&batch.events[0], Event::Stored(stored) if stored.apart), "{extra}");
        }
        let mut on_host = stored(&Value::Null);
        on_host["medium"] = json!("CPU");
        let mut second_group = stored(&Value::Null);
        second_group["group_idx"] = json!(1);
        let batch = read(&json!([0, [on_host, second_group, stored(&Value::Null)]])).expect("a batch");
        assert_eq!(batch.events[..2], [Event::Other, Event::Other]);
        assert!(matches!(&batch.events[2], Event::Stored(stored) if !stored.apart));
    }

    #[test]
    fn anything_else_is_malformed() {
        for bad in [
            json!({}),
            json!([]),
            json!([0]),
            json!([0, 1]),
            json!([0, [1]]),
            json!([0, [{"type": 3}]]),
            json!([0, [{"type": "BlockStored", "block_hashes": 3}]]),
            json!([0, [{"type": "BlockStored", "token_ids": [-1]}]]),
            json!([0, [{"type": "BlockStored", "block_size": "x"}]]),
        ] {
            assert_eq!(read(&bad), Err(Malformed), "{bad}");
        }
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
            let _ = Batch::read(&bytes);
        }
    }
}
