//! Token ids by what was asked: a bounded cache for requests that are repeated. Pure.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::message::prompt_ids::PromptIds;

/// Maximum ids of one model's cache, 4 MiB: eight prompts of 128,000 tokens, or a thousand of 1,000.
const IDS_MAX: usize = 1 << 20;
/// Maximum entries, for many short prompts.
const ENTRIES_MAX: usize = 4_096;
/// How long ids hold: another version of the model may start at the same address.
const TTL: Duration = Duration::from_secs(60);

/// The SHA-256 of a question. A client cannot find two questions with one key, so it cannot change another's ids.
pub(super) type QuestionKey = [u8; 32];

/// The cache. The oldest entries are removed first: a retry comes soon.
#[derive(Debug, Default)]
pub(super) struct IdCache {
    entries: HashMap<QuestionKey, (PromptIds, Instant)>,
    /// Keys by age.
    order: VecDeque<QuestionKey>,
    /// Sum of the entries' ids.
    ids: usize,
}

impl IdCache {
    /// The ids of a question that was answered before.
    pub(super) fn get(&self, key: &QuestionKey, now: Instant) -> Option<PromptIds> {
        let (ids, since) = self.entries.get(key)?;
        (now.saturating_duration_since(*since) < TTL).then(|| ids.clone())
    }

    /// Stores an answer.
    pub(super) fn insert(&mut self, key: QuestionKey, ids: PromptIds, now: Instant) {
        let size = ids.ids.len();
        if size > IDS_MAX {
            return;
        }
        if let Some((before, _)) = self.entries.remove(&key) {
            self.ids -= before.ids.len();
            self.order.retain(|other| *other != key);
        }
        while self.ids + size > IDS_MAX || self.entries.len() >= ENTRIES_MAX {
            let oldest = self.order.pop_front().expect("every entry has a place in the order");
            let (before, _) = self.entries.remove(&oldest).expect("the order has keys of entries only");
            self.ids -= before.ids.len();
        }
        self.ids += size;
        self.order.push_back(key);
        self.entries.insert(key, (ids, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> QuestionKey {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        key
    }

    #[test]
    fn ids_are_found_until_they_are_old() {
        let (mut cache, now) = (IdCache::default(), Instant::now());
        cache.insert(key(1), PromptIds::exact(vec![7, 8]), now);
        assert_eq!(cache.get(&key(1), now), Some(PromptIds::exact(vec![7, 8])));
        assert_eq!(cache.get(&key(2), now), None);
        assert_eq!(cache.get(&key(1), now + TTL), None);
        cache.insert(key(1), PromptIds::exact(vec![9]), now + TTL);
        assert_eq!(cache.get(&key(1), now + TTL), Some(PromptIds::exact(vec![9])));
        assert_eq!((cache.ids, cache.order.len()), (1, 1));
    }

    #[test]
    fn entries_and_ids_are_bounded_and_the_oldest_go_first() {
        let (mut cache, now) = (IdCache::default(), Instant::now());
        for number in 0..5_000 {
            cache.insert(key(number), PromptIds::exact(vec![1]), now);
        }
        assert_eq!(
            (cache.entries.len(), cache.order.len(), cache.ids),
            (ENTRIES_MAX, ENTRIES_MAX, ENTRIES_MAX)
        );
        assert!(cache.get(&key(0), now).is_none() && cache.get(&key(4_999), now).is_some());
        cache.insert(key(9_000), PromptIds::exact(vec![1; IDS_MAX]), now);
        assert_eq!((cache.entries.len(), cache.ids), (1, IDS_MAX));
        cache.insert(key(9_001), PromptIds::exact(vec![1; IDS_MAX + 1]), now);
        assert!(cache.get(&key(9_000), now).is_some(), "a prompt over the bound is not stored");
    }
}
