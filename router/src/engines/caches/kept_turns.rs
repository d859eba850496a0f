//! Turns of conversations whose blocks decode engines keep for the next turn. Pure.
//!
//! A turn is found by its owner and by its tokens: all of them must begin the prompt. Blocks of 16 tokens are hashed in a
//! chain, so a lookup compares few turns token by token. A turn is used once, because its engine frees the blocks at the
//! first read and does not refuse a second one.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use crate::message::block_chain::{self, BlockKeys};

/// Tokens of one link of the chains. A turn with fewer tokens is not worth a transfer.
const LINK_TOKENS: usize = 16;
/// Most turns, and most tokens of all of them (64 MiB).
const TURNS_MAX: usize = 4096;
const TOKENS_MAX: usize = 16 << 20;

/// Requests of one owner may use each other's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TurnOwner {
    /// The model's name at the engines, which also names an adapter.
    pub model: String,
    pub cache_salt: Option<String>,
}

/// A kept turn. `R` is what its release needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptTurn<R> {
    pub owner: TurnOwner,
    pub tokens: Box<[u32]>,
    pub params: String,
    pub release: R,
}

/// The kept turns.
#[derive(Debug)]
pub(crate) struct KeptTurns<R> {
    /// In the order of their ends.
    turns: BTreeMap<(Instant, u64), KeptTurn<R>>,
    by_link: HashMap<u64, Vec<(Instant, u64)>>,
    tokens: usize,
    next: u64,
}

impl<R> Default for KeptTurns<R> {
    fn default() -> Self {
        Self { turns: BTreeMap::new(), by_link: HashMap::new(), tokens: 0, next: 0 }
    }
}

impl<R> KeptTurns<R> {
    /// Adds a turn that ends `within`. Returns the turns that are no longer kept: those that ended, those that a full table
    /// has no place for, and the turn itself if it is too short or too long.
    pub(crate) fn add(&mut self, turn: KeptTurn<R>, within: Duration, now: Instant) -> Vec<KeptTurn<R>> {
        let mut ended = self.expire(now);
        let Some(link) = last_link(&turn).filter(|_| turn.tokens.len() <= TOKENS_MAX) else {
            ended.push(turn);
            return ended;
        };
        while self.turns.len() >= TURNS_MAX || self.tokens + turn.tokens.len() > TOKENS_MAX {
            let Some(key) = self.turns.keys().next().copied() else { break };
            ended.extend(self.remove(key));
        }
        let key = (now + within, self.next);
        self.next += 1;
        self.tokens += turn.tokens.len();
        self.by_link.entry(link).or_default().push(key);
        self.turns.insert(key, turn);
        ended
    }

    /// Takes the longest turn that begins the prompt.
    pub(crate) fn take(&mut self, owner: &TurnOwner, prompt: &[u32], now: Instant) -> Option<KeptTurn<R>> {
        if self.turns.is_empty() {
            return None;
        }
        let links = links_of(owner, prompt);
        let begins = |key: &(Instant, u64)| {
            let turn = self.turns.get(key)?;
            let fits = key.0 > now && turn.owner == *owner && prompt.starts_with(&turn.tokens);
            fits.then_some((turn.tokens.len(), *key))
        };
        let found =
            links.iter().rev().find_map(|link| self.by_link.get(link)?.iter().filter_map(begins).max());
        found.and_then(|(_, key)| self.remove(key))
    }

    /// Removes the turns that have ended.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<KeptTurn<R>> {
        let ended: Vec<_> = self.turns.range(..=(now, u64::MAX)).map(|(key, _)| *key).collect();
        ended.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Removes all turns.
    pub(crate) fn clear(&mut self) -> Vec<KeptTurn<R>> {
        std::mem::take(self).turns.into_values().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.turns.len()
    }

    fn remove(&mut self, key: (Instant, u64)) -> Option<KeptTurn<R>> {
        let turn = self.turns.remove(&key)?;
        self.tokens -= turn.tokens.len();
        if let Some(link) = last_link(&turn)
            && let Some(keys) = self.by_link.get_mut(&link)
        {
            keys.retain(|known| *known != key);
            if keys.is_empty() {
                self.by_link.remove(&link);
            }
        }
        Some(turn)
    }
}

/// The chained hashes of an owner's tokens.
fn links_of(owner: &TurnOwner, tokens: &[u32]) -> Vec<u64> {
    let keys = BlockKeys {
        adapter: Some(owner.model.as_bytes()),
        salt: owner.cache_salt.as_deref().map(str::as_bytes),
    };
    block_chain::links(tokens, block_chain::root(LINK_TOKENS, keys), LINK_TOKENS, usize::MAX)
}

/// The hash of a turn's whole links.
fn last_link<R>(turn: &KeptTurn<R>) -> Option<u64> {
    links_of(&turn.owner, &turn.tokens).last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = Duration::from_secs(60);

    fn owner(model: &str, salt: Option<&str>) -> TurnOwner {
        TurnOwner { model: model.to_owned(), cache_salt: salt.map(str::to_owned) }
    }

    fn turn(owner: TurnOwner, tokens: &[u32]) -> KeptTurn<u32> {
        KeptTurn { owner, tokens: tokens.into(), params: format!("{}", tokens.len()), release: 0 }
    }

    fn count(to: u32) -> Vec<u32> {
        (0..to).collect()
    }

    #[test]
    fn the_longest_turn_that_begins_the_prompt_is_taken_once() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        for length in [16, 40, 41, 64] {
            assert_eq!(turns.add(turn(owner("m", None), &count(length)), WITHIN, now), []);
        }
        let mut taken =
            |prompt: &[u32]| turns.take(&owner("m", None), prompt, now).map(|turn| turn.tokens.len());
        assert_eq!(taken(&count(50)), Some(41));
        assert_eq!(taken(&count(50)), Some(40));
        assert_eq!(taken(&count(50)), Some(16));
        assert_eq!(taken(&count(50)), None, "64 tokens do not begin a prompt of 50");
        assert_eq!(taken(&count(64)), Some(64));
        assert_eq!((turns.len(), turns.tokens, turns.by_link.len()), (0, 0, 0));
    }

    #[test]
    fn one_different_token_or_another_owner_is_no_match() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        turns.add(turn(owner("m", Some("a")), &count(40)), WITHIN, now);
        for different in [0, 20, 39] {
            let mut prompt = count(60);
            prompt[different] += 1_000;
            assert_eq!(turns.take(&owner("m", Some("a")), &prompt, now), None, "{different}");
        }
        for other in [owner("m", None), owner("m", Some("b")), owner("n", Some("a"))] {
            assert_eq!(turns.take(&other, &count(60), now), None, "{other:?}");
        }
        assert!(turns.take(&owner("m", Some("a")), &count(60), now).is_some());
    }

    #[test]
    fn a_turn_ends_in_time_and_is_returned_for_its_release() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        turns.add(turn(owner("m", None), &count(40)), WITHIN, now);
        assert_eq!(turns.take(&owner("m", None), &count(60), now + WITHIN), None);
        assert_eq!(turns.expire(now + WITHIN - Duration::from_nanos(1)), []);
        assert_eq!(turns.expire(now + WITHIN), [turn(owner("m", None), &count(40))]);
        let short = turn(owner("m", None), &count(15));
        assert_eq!(turns.add(short.clone(), WITHIN, now), [short]);
    }

    #[test]
    fn a_full_table_gives_up_the_oldest_turns() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        let step = Duration::from_micros(1);
        for at in 0..TURNS_MAX as u32 {
            turns.add(turn(owner("m", None), &[at; 16]), WITHIN, now + step * at);
        }
        let evicted = turns.add(turn(owner("m", None), &count(40)), WITHIN, now + step * TURNS_MAX as u32);
        assert_eq!(evicted, [turn(owner("m", None), &[0; 16])]);
        assert_eq!((turns.len(), turns.clear().len(), turns.len()), (TURNS_MAX, TURNS_MAX, 0));
    }
}
