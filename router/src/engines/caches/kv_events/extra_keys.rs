//! The extra keys of stored blocks, which separate them from others with equal tokens (vLLM's
//! `generate_block_hash_extra_keys`): an adapter's name is the first key of every block, and a salt the last one of a
//! prompt's first block. Images and embeddings are keys of the blocks in which they are. Events contain no kinds of keys.

use super::msgpack::{MsgpackError, MsgpackItem, MsgpackReader};
use crate::message::block_chain::BlockKeys;

/// Maximum blocks of one event, as for their names.
const BLOCKS_MAX: usize = 262_144;
/// Maximum extra keys of one block that are read: an adapter, a salt, and more images than a block has tokens of text.
const KEYS_MAX: usize = 64;

/// The extra keys of consecutive blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ExtraKeys {
    /// The LoRA adapter of the prompt: its name and number.
    pub adapter: Option<Box<[u8]>>,
    pub adapter_id: Option<u64>,
    /// Of each block. A missing entry is empty.
    of_blocks: Vec<Vec<ExtraKey>>,
}

/// One extra key of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ExtraKey {
    /// An adapter's name, or a salt.
    Text(Box<[u8]>),
    /// An adapter's number, in older versions.
    Number(u64),
    /// An image with its place, embeddings, tokens looked ahead, or an unknown key.
    Other,
}

impl ExtraKeys {
    #[cfg(test)]
    pub(super) fn of(adapter: Option<&str>, of_blocks: Vec<Vec<ExtraKey>>) -> Self {
        Self { adapter: adapter.map(|name| name.as_bytes().into()), adapter_id: None, of_blocks }
    }

    /// Whether the event contains the keys of its blocks, if only that they have none.
    pub(super) fn is_given(&self) -> bool {
        !self.of_blocks.is_empty()
    }

    /// Reads the field `extra_keys`: nil, or a list with nil or a list of keys per block.
    pub(super) fn read(&mut self, reader: &mut MsgpackReader<'_>) -> Result<(), MsgpackError> {
        self.of_blocks = match reader.peek()? {
            MsgpackItem::Array(count) if count <= BLOCKS_MAX => {
                let count = reader.array()?;
                (0..count).map(|_| keys_of_block(reader)).collect::<Result<_, _>>()?
            }
            MsgpackItem::Array(_) => return Err(MsgpackError),
            item => {
                reader.skip()?;
                if item == MsgpackItem::Nil { Vec::new() } else { vec![vec![ExtraKey::Other]] }
            }
        };
        Ok(())
    }

    /// What separates the prompt from others with equal tokens, and how many of so many blocks have no further key.
    pub(super) fn of_prompt(&self, blocks: usize, begins_prompt: bool) -> (BlockKeys<'_>, usize) {
        let adapter = self.adapter.as_deref();
        let mut keys = BlockKeys { adapter, salt: None };
        if adapter.is_none() && self.adapter_id.is_some() {
            return (keys, 0);
        }
        let is_adapter = |key: &ExtraKey| match key {
            ExtraKey::Text(name) => adapter == Some(&**name),
            ExtraKey::Number(id) => self.adapter_id == Some(*id),
            ExtraKey::Other => false,
        };
        for (at, of_block) in self.of_blocks.iter().take(blocks).enumerate() {
            let others = of_block.split_first().filter(|(first, _)| is_adapter(first));
            match others.map_or(&of_block[..], |(_, others)| others) {
                [] => {}
                [ExtraKey::Text(salt)] if at == 0 && begins_prompt => keys.salt = Some(salt),
                _ => return (keys, at),
            }
        }
        (keys, blocks)
    }
}

fn keys_of_block(reader: &mut MsgpackReader<'_>) -> Result<Vec<ExtraKey>, MsgpackError> {
    match reader.peek()? {
        MsgpackItem::Nil => reader.skip().map(|()| Vec::new()),
        MsgpackItem::Array(count) if count <= KEYS_MAX => {
            let count = reader.array()?;
            (0..count).map(|_| extra_key(reader)).collect()
        }
        _ => reader.skip().map(|()| vec![ExtraKey::Other]),
    }
}

fn extra_key(reader: &mut MsgpackReader<'_>) -> Result<ExtraKey, MsgpackError> {
    let key = match reader.peek()? {
        MsgpackItem::Text(text) => ExtraKey::Text(text.into()),
        MsgpackItem::Integer(number) => ExtraKey::Number(number),
        _ => ExtraKey::Other,
    };
    reader.skip()?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The keys of three blocks: adapter, salt, and how many have no others.
    fn of(
        adapter: Option<&str>,
        begins_prompt: bool,
        extra: &Value,
    ) -> (Option<String>, Option<String>, usize) {
        let bytes = rmp_serde::to_vec(extra).expect("it can be written");
        let mut keys = ExtraKeys { adapter_id: adapter.map(|_| 7), ..ExtraKeys::of(adapter, Vec::new()) };
        let mut reader = MsgpackReader::new(&bytes);
        keys.read(&mut reader).expect("it is read");
        assert!(reader.is_empty());
        let (BlockKeys { adapter, salt }, named) = keys.of_prompt(3, begins_prompt);
        let text = |key: Option<&[u8]>| key.map(|key| String::from_utf8(key.to_vec()).expect("UTF-8"));
        (text(adapter), text(salt), named)
    }

    #[test]
    fn adapters_and_salts_are_keys_of_a_prompt_and_other_keys_end_it() {
        let key = |key: &str| Some(key.to_owned());
        let plain = |extra: Value| of(None, true, &extra);
        assert_eq!(plain(json!([null, null, null])), (None, None, 3));
        assert_eq!(plain(json!(null)), (None, None, 3));
        assert_eq!(plain(json!([["s"], null, null])), (None, key("s"), 3));
        let lora = |extra: Value| of(Some("sql"), true, &extra);
        assert_eq!(lora(json!([["sql"], ["sql"], ["sql"]])), (key("sql"), None, 3));
        assert_eq!(lora(json!([["sql", "s"], ["sql"], ["sql"]])), (key("sql"), key("s"), 3));
        assert_eq!(lora(json!([[7], [7], [7]])), (key("sql"), None, 3), "by its number");
        // Behind other blocks no key is a salt.
        assert_eq!(of(None, false, &json!([["s"], null, null])), (None, None, 0));
        assert_eq!(of(Some("sql"), false, &json!([["sql"], ["sql"], ["sql"]])), (key("sql"), None, 3));
        // An image in the second block, a key behind the first, an unknown form, too many keys.
        assert_eq!(plain(json!([["s"], [["img", 3]], null])), (None, key("s"), 1));
        assert_eq!(plain(json!([[["img", 3], "s"], null, null])), (None, None, 0));
        assert_eq!(plain(json!([null, ["s"], null])), (None, None, 1));
        assert_eq!(plain(json!("x")), (None, None, 0));
        assert_eq!(plain(json!([vec!["s"; KEYS_MAX + 1], null, null])), (None, None, 0));
        // Older versions send the adapter's number only.
        let unnamed = ExtraKeys { adapter_id: Some(7), ..ExtraKeys::default() };
        assert_eq!(unnamed.of_prompt(3, true).1, 0);
    }
}
