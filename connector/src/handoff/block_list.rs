//! The block ids of a producer's reply, counted and checked while they are read; none of them is kept.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::limits::BLOCKS_PER_HANDOFF_MAX;

/// Groups of KV caches of one model (vLLM's hybrid models have two to four).
const GROUPS_MAX: usize = 64;

/// What `remote_block_ids` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum BlockList {
    /// Not there, or `null`.
    #[default]
    Absent,
    /// One list of ids per group of KV caches, or a flat one. Some group has blocks: a producer that lends nothing says
    /// nothing.
    Good,
    Bad,
}

/// An item of a list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    Null,
    Id,
    /// A list.
    List(Counts),
    Other,
}

/// The items of a list.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    ids: usize,
    /// Lists of at most [`BLOCKS_PER_HANDOFF_MAX`] ids and nothing else.
    groups: usize,
    /// Groups that hold an id.
    filled: usize,
    others: usize,
}

impl Counts {
    /// Ids and nothing else, perhaps none.
    fn is_table(self) -> bool {
        self.groups == 0 && self.others == 0 && self.ids <= BLOCKS_PER_HANDOFF_MAX
    }

    fn is_good(self) -> bool {
        let groups = self.others == 0 && self.ids == 0 && self.groups <= GROUPS_MAX && self.filled > 0;
        groups || self.is_table() && self.ids > 0
    }
}

impl<'de> Deserialize<'de> for BlockList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(match Item::deserialize(from)? {
            Item::Null => Self::Absent,
            Item::List(counts) if counts.is_good() => Self::Good,
            Item::List(_) | Item::Id | Item::Other => Self::Bad,
        })
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader)
    }
}

/// Takes any value. As deep as the parser goes, which is bounded.
struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<Item, E> {
        Ok(Item::Null)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
        Ok(if u32::try_from(id).is_ok() { Item::Id } else { Item::Other })
    }

    fn visit_i64<E: Error>(self, id: i64) -> Result<Item, E> {
        Ok(if u32::try_from(id).is_ok() { Item::Id } else { Item::Other })
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Item, E> {
        Ok(Item::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        let mut counts = Counts::default();
        while let Some(item) = items.next_element::<Item>()? {
            match item {
                Item::Id => counts.ids += 1,
                Item::List(inner) if inner.is_table() => {
                    counts.groups += 1;
                    counts.filled += usize::from(inner.ids > 0);
                }
                Item::List(_) | Item::Null | Item::Other => counts.others += 1,
            }
        }
        Ok(Item::List(counts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Item, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Item::Other)
    }
}
