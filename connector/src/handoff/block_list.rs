//! The block ids of a producer's reply: counted and checked during parsing, and not stored.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::limits::BLOCKS_PER_HANDOFF_MAX;

/// Groups of KV caches of one model (vLLM's hybrid models have two to four).
const GROUPS_MAX: usize = 64;

/// The kind of a `remote_block_ids` value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum BlockList {
    /// Missing, or `null`.
    #[default]
    Absent,
    /// One list of ids per group of KV caches, or a flat one. At least one group has blocks: a producer without a lease
    /// omits the field.
    Valid,
    Invalid,
}

/// An item of a list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListItem {
    Null,
    Id,
    /// A list.
    List(ItemCounts),
    Other,
}

/// The items of a list.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct ItemCounts {
    ids: usize,
    /// Lists of at most [`BLOCKS_PER_HANDOFF_MAX`] ids and nothing else.
    groups: usize,
    /// Groups that hold an id.
    filled: usize,
    others: usize,
}

impl ItemCounts {
    /// Whether the list contains only ids. It may be empty.
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
        Ok(match ListItem::deserialize(from)? {
            ListItem::Null => Self::Absent,
            ListItem::List(counts) if counts.is_good() => Self::Valid,
            ListItem::List(_) | ListItem::Id | ListItem::Other => Self::Invalid,
        })
    }
}

impl<'de> Deserialize<'de> for ListItem {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ListItemVisitor)
    }
}

/// Accepts any value. The parser bounds the depth.
struct ListItemVisitor;

impl<'de> Visitor<'de> for ListItemVisitor {
    type Value = ListItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: Error>(self) -> Result<ListItem, E> {
        Ok(ListItem::Null)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<ListItem, E> {
        Ok(ListItem::Other)
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<ListItem, E> {
        Ok(if u32::try_from(id).is_ok() { ListItem::Id } else { ListItem::Other })
    }

    fn visit_i64<E: Error>(self, id: i64) -> Result<ListItem, E> {
        Ok(if u32::try_from(id).is_ok() { ListItem::Id } else { ListItem::Other })
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<ListItem, E> {
        Ok(ListItem::Other)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<ListItem, E> {
        Ok(ListItem::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ListItem, A::Error> {
        let mut counts = ItemCounts::default();
        while let Some(item) = items.next_element::<ListItem>()? {
            match item {
                ListItem::Id => counts.ids += 1,
                ListItem::List(inner) if inner.is_table() => {
                    counts.groups += 1;
                    counts.filled += usize::from(inner.ids > 0);
                }
                ListItem::List(_) | ListItem::Null | ListItem::Other => counts.others += 1,
            }
        }
        Ok(ListItem::List(counts))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<ListItem, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(ListItem::Other)
    }
}
