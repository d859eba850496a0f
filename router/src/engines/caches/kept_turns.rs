//! Turns of conversations whose blocks decode engines keep for the next turn. Pure.
//!
//! A turn is found by its owner and by its tokens: all of them must begin the prompt. Blocks of 16 tokens are hashed in a
//! chain, so a lookup compares few turns token by token. A turn is used once, because its engine frees the blocks at the
//! first read and does not refuse a second one.
//!
//! A full table gives up the oldest turns of the tenant with the most of what is short, turns or tokens. So no tenant
//! displaces the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    /// Hash of the tenant whose share of the table it takes.
    pub tenant: u64,
    /// Empty if a prefill engine may still read the blocks: no other request may.
    pub tokens: Box<[u32]>,
    pub params: String,
    /// The engine id of the process that keeps the blocks.
    pub engine: String,
    pub release: R,
}

/// The end of a turn, and its place among turns of the same time.
type TurnKey = (Instant, u64);

/// The share of one tenant.
#[derive(Debug, Default)]
struct TenantTurns {
    keys: BTreeSet<TurnKey>,
    tokens: usize,
}

/// The kept turns.
#[derive(Debug)]
pub(crate) struct KeptTurns<R> {
    /// In the order of their ends.
    turns: BTreeMap<TurnKey, KeptTurn<R>>,
    by_link: HashMap<u64, Vec<TurnKey>>,
    by_tenant: HashMap<u64, TenantTurns>,
    tokens: usize,
    next: u64,
}

impl<R> Default for KeptTurns<R> {
    fn default() -> Self {
        Self {
            turns: BTreeMap::new(),
            by_link: HashMap::new(),
            by_tenant: HashMap::new(),
            tokens: 0,
            next: 0,
        }
    }
}

impl<R> KeptTurns<R> {
    /// Adds a turn that ends `within`. Returns the turns that are no longer kept: those that ended, an equal one, those
    /// that a full table has no place for, and the turn itself if it is too short or too long.
    pub(crate) fn add(&mut self, turn: KeptTurn<R>, within: Duration, now: Instant) -> Vec<KeptTurn<R>> {
        let mut ended = self.expire(now);
        let Some(link) = last_link(&turn).filter(|_| turn.tokens.len() <= TOKENS_MAX) else {
            ended.push(turn);
            return ended;
        };
        let is_equal = |key: &&TurnKey| {
            self.turns.get(key).is_some_and(|known| known.owner == turn.owner && known.tokens == turn.tokens)
        };
        let equal = self.by_link.get(&link).and_then(|keys| keys.iter().find(is_equal)).copied();
        ended.extend(equal.and_then(|key| self.remove(key)));
        self.make_room(turn.tokens.len(), &mut ended);
        let key = self.insert(turn, within, now);
        self.by_link.entry(link).or_default().push(key);
        ended
    }

    /// Keeps a turn that a prefill engine may still read until it can be released. Returns the turns that are no longer
    /// kept.
    pub(crate) fn add_spent(
        &mut self,
        turn: KeptTurn<R>,
        within: Duration,
        now: Instant,
    ) -> Vec<KeptTurn<R>> {
        let mut ended = self.expire(now);
        self.make_room(0, &mut ended);
        self.insert(KeptTurn { tokens: Box::default(), ..turn }, within, now);
        ended
    }

    /// Gives up turns until one of `tokens` fits. Those that may still be read are left to their engine.
    fn make_room(&mut self, tokens: usize, ended: &mut Vec<KeptTurn<R>>) {
        let is_full = |table: &Self| table.turns.len() >= TURNS_MAX || table.tokens + tokens > TOKENS_MAX;
        while is_full(self) {
            let lacks_tokens = self.tokens + tokens > TOKENS_MAX;
            let share = |of: &TenantTurns| if lacks_tokens { of.tokens } else { of.keys.len() };
            let most = self.by_tenant.iter().max_by_key(|(_, of)| share(of)).map(|(tenant, _)| *tenant);
            let Some(tenant) = most else { break };
            // Without a new choice for each turn: one of many tokens takes the place of thousands.
            while is_full(self)
                && let Some(key) = self.by_tenant.get(&tenant).and_then(|of| of.keys.first()).copied()
            {
                ended.extend(self.remove(key).filter(|turn| !turn.tokens.is_empty()));
            }
        }
    }

    fn insert(&mut self, turn: KeptTurn<R>, within: Duration, now: Instant) -> TurnKey {
        let key = (now + within, self.next);
        self.next += 1;
        self.tokens += turn.tokens.len();
        let share = self.by_tenant.entry(turn.tenant).or_default();
        share.keys.insert(key);
        share.tokens += turn.tokens.len();
        self.turns.insert(key, turn);
        key
    }

    /// Takes the longest turn that begins the prompt.
    pub(crate) fn take(&mut self, owner: &TurnOwner, prompt: &[u32], now: Instant) -> Option<KeptTurn<R>> {
        if self.turns.is_empty() {
            return None;
        }
        let links = links_of(owner, prompt);
        let begins = |key: &TurnKey| {
            let turn = self.turns.get(key)?;
            // The tokens behind the last link first: turns with one link differ there.
            let tail = turn.tokens.len() / LINK_TOKENS * LINK_TOKENS;
            let fits = key.0 > now
                && turn.owner == *owner
                && prompt.get(tail..)?.starts_with(&turn.tokens[tail..])
                && prompt.starts_with(&turn.tokens);
            fits.then_some((turn.tokens.len(), *key))
        };
        let found =
            links.iter().rev().find_map(|link| self.by_link.get(link)?.iter().filter_map(begins).max());
        found.and_then(|(_, key)| self.remove(key))
    }

    /// No request reads the turns of an engine's process any more. They are released at their ends.
    pub(crate) fn spend_engine(&mut self, engine: &str) {
        let of_engine =
            |(_, turn): &(&TurnKey, &KeptTurn<R>)| turn.engine == engine && !turn.tokens.is_empty();
        let found: Vec<_> = self.turns.iter().filter(of_engine).map(|(key, _)| *key).collect();
        for key in found {
            if let Some(turn) = self.remove(key) {
                self.by_tenant.entry(turn.tenant).or_default().keys.insert(key);
                self.turns.insert(key, KeptTurn { tokens: Box::default(), ..turn });
            }
        }
    }

    /// Removes the turns that have ended.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<KeptTurn<R>> {
        let ended: Vec<_> = self.turns.range(..=(now, u64::MAX)).map(|(key, _)| *key).collect();
        ended.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Removes all turns. Returns those that no prefill engine reads.
    pub(crate) fn clear(&mut self) -> Vec<KeptTurn<R>> {
        std::mem::take(self).turns.into_values().filter(|turn| !turn.tokens.is_empty()).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.turns.len()
    }

    fn remove(&mut self, key: TurnKey) -> Option<KeptTurn<R>> {
        let turn = self.turns.remove(&key)?;
        self.tokens -= turn.tokens.len();
        if let Some(share) = self.by_tenant.get_mut(&turn.tenant) {
            share.tokens -= turn.tokens.len();
            share.keys.remove(&key);
            if share.keys.is_empty() {
                self.by_tenant.remove(&turn.tenant);
            }
        }
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
        let engine = "d-1".to_owned();
        let params = format!("{}", tokens.len());
        KeptTurn { owner, tenant: 1, tokens: tokens.into(), params, engine, release: 0 }
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
        assert_eq!((turns.len(), turns.tokens, turns.by_link.len(), turns.by_tenant.len()), (0, 0, 0, 0));
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

    #[test]
    fn an_equal_turn_replaces_the_older_one() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        let named =
            |params: &str| KeptTurn { params: params.to_owned(), ..turn(owner("m", None), &count(40)) };
        turns.add(named("older"), WITHIN, now);
        assert_eq!(turns.add(named("newer"), WITHIN, now), [named("older")]);
        assert_eq!(turns.take(&owner("m", None), &count(60), now), Some(named("newer")));
        assert_eq!(turns.len(), 0);
    }

    #[test]
    fn the_tenant_with_the_most_turns_makes_room() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        let of = |tenant, salt: u32, tokens: &[u32]| KeptTurn {
            tenant,
            ..turn(owner("m", Some(&salt.to_string())), tokens)
        };
        turns.add(of(1, 0, &count(40)), WITHIN, now);
        // Each turn of the other tenant has a salt of its own.
        for at in 1..TURNS_MAX as u32 {
            turns.add(of(2, at, &[at; 16]), WITHIN, now);
        }
        for at in 0..100 {
            let given_up = turns.add(of(2, 9_000 + at, &[at; 16]), WITHIN, now);
            assert_eq!(given_up, [of(2, 1 + at, &[1 + at; 16])]);
        }
        assert!(turns.take(&owner("m", Some("0")), &count(40), now).is_some());
    }

    #[test]
    fn the_tenant_with_the_most_tokens_makes_room_for_tokens() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        let of = |tenant, first: u32, tokens: usize| {
            let tokens: Vec<u32> = (first..).take(tokens).collect();
            KeptTurn { tenant, ..turn(owner("m", None), &tokens) }
        };
        for at in 0..15 {
            turns.add(of(1, at, 1 << 20), WITHIN, now);
        }
        for at in 0..100 {
            turns.add(of(2, 100 + at, 1000), WITHIN, now);
        }
        assert_eq!(turns.add(of(1, 15, 1 << 20), WITHIN, now), [of(1, 0, 1 << 20)]);
        assert_eq!(turns.len(), 115);
    }

    #[test]
    fn a_spent_turn_is_read_by_no_request_and_returned_at_its_end_only() {
        let (mut turns, now) = (KeptTurns::default(), Instant::now());
        let spent = KeptTurn { tokens: Box::default(), ..turn(owner("m", None), &count(40)) };
        turns.add_spent(turn(owner("m", None), &count(40)), WITHIN, now);
        turns.add(turn(owner("m", None), &count(32)), WITHIN, now);
        assert!(turns.take(&owner("m", None), &count(60), now).is_some());
        turns.add(turn(owner("m", None), &count(32)), WITHIN, now);
        turns.spend_engine("d-2");
        turns.spend_engine("d-1");
        assert_eq!((turns.take(&owner("m", None), &count(60), now), turns.len()), (None, 2));
        let of_engine = KeptTurn { params: "32".to_owned(), ..spent.clone() };
        assert_eq!(turns.expire(now + WITHIN), [spent, of_engine]);
        assert_eq!((turns.tokens, turns.by_tenant.len()), (0, 0));
        turns.add_spent(turn(owner("m", None), &count(40)), WITHIN, now);
        assert_eq!((turns.clear(), turns.len()), (Vec::new(), 0));
    }
}
