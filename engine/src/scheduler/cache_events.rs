//! The scheduler's changes of caches, for KV events: those of the pool, and those of the tiers in their order.

use super::Scheduler;
use crate::blocks::cache_events::{CacheEvent, CacheEventLog, CacheMedium};
use crate::blocks::hash::BlockHash;
use crate::offload::Tier;
use crate::offload::tier_index::TierChange;

impl Scheduler {
    /// The same scheduler, which records the changes of its caches. The caller drains them
    /// ([`Self::take_cache_events`]).
    #[must_use]
    pub fn with_cache_events(mut self) -> Self {
        self.pool.record_events();
        self
    }

    /// Later changes are for this audience: blocks without an event for it are recorded again when a sequence uses
    /// them.
    pub fn set_event_audience(&mut self, audience: u64) {
        if let Some(events) = self.pool.events_mut() {
            events.set_audience(audience);
        }
    }

    /// Removes and returns the changes since the last call, in order. Empty unless they are recorded.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.record_tier_changes();
        self.pool.events_mut().map(CacheEventLog::take).unwrap_or_default()
    }

    /// Announces the copies of a block in the tiers, if subscribers know its tokens: from the pool, or from another
    /// copy.
    pub(super) fn announce_copies(&mut self, hash: BlockHash) {
        let is_known = self.pool.is_known(hash);
        let audience = self.pool.events_mut().map(|events| events.audience());
        if let Some(audience) = audience
            && let Some(index) = self.tier_index_mut()
            && (is_known || index.is_announced(hash, audience))
        {
            index.announce(hash, audience);
        }
    }

    /// The same for blocks of the pool that were just recorded again, before one of them can leave it.
    pub(super) fn announce_copies_of(&mut self, hashes: &[BlockHash]) {
        hashes.iter().for_each(|hash| self.announce_copies(*hash));
        self.record_tier_changes();
    }

    /// Moves changes of the tiers behind those of the pool. A copy is recorded before its block can leave the pool:
    /// the store holds the block until then.
    pub(super) fn record_tier_changes(&mut self) {
        let Some(index) = self.tier_index_mut() else { return };
        let changes = index.take_changes();
        let Some(events) = self.pool.events_mut() else { return };
        for change in changes {
            match change {
                TierChange::Announced(tier, hash) => events.copied(medium(tier), hash),
                TierChange::Withdrawn(tier, hash) => events.removed(medium(tier), hash),
            }
        }
    }
}

fn medium(tier: Tier) -> CacheMedium {
    match tier {
        Tier::Host => CacheMedium::Host,
        Tier::Disk => CacheMedium::Disk,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use baton_connector::RequestId;

    use super::*;
    use crate::blocks::cache_events::StoredRun;
    use crate::offload::OffloadReport;
    use crate::offload::tier_index::TierConfig;
    use crate::scheduler::sequence::{NewSequence, Purpose, SeqId, StopRule};
    use crate::scheduler::{Effect, SchedulerConfig};

    const BLOCK: usize = 4;
    const CONFIG: SchedulerConfig = SchedulerConfig {
        block_tokens: BLOCK,
        max_num_seqs: 8,
        max_num_batched_tokens: 16,
        max_waiting: 64,
        max_model_len: 256,
        window: None,
    };

    fn submit(scheduler: &mut Scheduler, id: u64, prompt: &[u32], salt: Option<&str>) {
        let new = NewSequence {
            id: SeqId(id),
            request: RequestId::new(&format!("r{id}")).expect("a test id"),
            prompt: prompt.to_vec(),
            stop: StopRule { max_new: 1, stop_ids: vec![], min_new: 0 },
            purpose: Purpose::Plain,
            follows: None,
            admitted_with_first: false,
            cache_salt: salt.map(Into::into),
            adapter: None,
            prompt_logprobs: None,
            priority: 0,
        };
        scheduler.submit(new).expect("accepted");
    }

    /// Computes until nothing can run, and ends every order of the tiers.
    fn run(scheduler: &mut Scheduler) {
        for _ in 0..10_000 {
            let plan = scheduler.schedule();
            for part in &plan {
                if let Some(reason) = scheduler.commit(part, part.samples.then_some(9)) {
                    scheduler.finish(part.id, reason);
                }
            }
            let effects = scheduler.take_effects();
            if plan.is_empty() && effects.is_empty() {
                return;
            }
            for effect in effects {
                if let Effect::Offload(order) = effect {
                    scheduler.offload_event(OffloadReport::Ended(order.id(), Ok(())));
                }
            }
        }
        panic!("no progress");
    }

    fn compute(scheduler: &mut Scheduler, id: u64, prompt: &[u32], salt: Option<&str>) -> Vec<CacheEvent> {
        submit(scheduler, id, prompt, salt);
        run(scheduler);
        scheduler.take_cache_events()
    }

    fn hashes(tokens: &[u32], salt: Option<&str>) -> Vec<BlockHash> {
        let mut hashes = Vec::new();
        crate::blocks::hash::extend(&mut hashes, tokens, BLOCK, salt);
        hashes
    }

    #[test]
    fn a_prompt_is_recorded_once_and_its_eviction_too() {
        let mut scheduler = Scheduler::new(CONFIG, 4).with_cache_events();
        let prompt: Vec<u32> = (1..=9).collect();
        let of_prompt = hashes(&prompt, Some("s"));
        let run = StoredRun {
            hashes: of_prompt.clone(),
            parent: None,
            tokens: prompt[..8].to_vec(),
            salt: Some("s".into()),
            adapter: None,
        };
        assert_eq!(compute(&mut scheduler, 1, &prompt, Some("s")), [CacheEvent::Stored(run)]);
        assert_eq!(compute(&mut scheduler, 2, &prompt, Some("s")), [], "all of it is cached");
        let mut longer = prompt.clone();
        longer.extend([10, 11, 12, 13]);
        let run = StoredRun {
            hashes: hashes(&longer, Some("s"))[2..].to_vec(),
            parent: Some(of_prompt[1]),
            tokens: vec![9, 10, 11, 12],
            salt: None,
            adapter: None,
        };
        assert_eq!(compute(&mut scheduler, 3, &longer, Some("s")), [CacheEvent::Stored(run)]);
        // Another prompt needs every block.
        let other: Vec<u32> = (50..65).collect();
        let events = compute(&mut scheduler, 4, &other, None);
        let [CacheEvent::Removed { medium: CacheMedium::Device, hashes: gone }, CacheEvent::Stored(run)] =
            &events[..]
        else {
            panic!("{events:?}")
        };
        let gone: BTreeSet<_> = gone.iter().copied().collect();
        assert_eq!(gone, hashes(&longer, Some("s")).into_iter().collect());
        assert_eq!((run.hashes.len(), run.parent), (3, None));
        scheduler.reset_prefix_cache();
        assert_eq!(scheduler.take_cache_events(), [CacheEvent::Cleared]);
    }

    #[test]
    fn a_cached_prompt_is_recorded_again_for_a_new_audience_when_it_is_used() {
        let mut scheduler = Scheduler::new(CONFIG, 16).with_cache_events();
        let prompt: Vec<u32> = (1..=9).collect();
        let first = compute(&mut scheduler, 1, &prompt, Some("s"));
        assert_eq!(first.len(), 1);
        scheduler.set_event_audience(1);
        assert_eq!(scheduler.take_cache_events(), [], "nothing has changed");
        assert_eq!(compute(&mut scheduler, 2, &prompt, Some("s")), first);
        assert_eq!(compute(&mut scheduler, 3, &prompt, Some("s")), [], "once");
        // A longer prompt: its beginning is known to the audience, and the rest is new.
        let longer: Vec<u32> = (1..=13).collect();
        assert_eq!(compute(&mut scheduler, 4, &longer, Some("s")).len(), 1);
        scheduler.set_event_audience(2);
        let events = compute(&mut scheduler, 5, &longer, Some("s"));
        let [CacheEvent::Stored(run)] = &events[..] else { panic!("{events:?}") };
        assert_eq!((run.hashes.len(), run.parent, run.salt.as_deref()), (3, None, Some("s")));
    }

    #[test]
    fn nothing_is_recorded_without_a_reader_or_with_an_oversized_salt() {
        let mut silent = Scheduler::new(CONFIG, 8);
        assert_eq!(compute(&mut silent, 1, &[1, 2, 3, 4, 5], None), []);
        let mut scheduler = Scheduler::new(CONFIG, 8).with_cache_events();
        let long = "s".repeat(1_025);
        assert_eq!(compute(&mut scheduler, 1, &[1, 2, 3, 4, 5], Some(&long)), []);
        assert_eq!(scheduler.usage().cached, 1, "it is cached all the same");
        // Nor are its copies, whose tokens no event contains.
        let tiers = TierConfig { host_blocks: 1, disk_blocks: 1 };
        let mut tiered = Scheduler::new(CONFIG, 8).with_cache_events().with_tiers(tiers, []);
        assert_eq!(compute(&mut tiered, 1, &[1, 2, 3, 4, 5], Some(&long)), []);
    }

    #[test]
    fn copies_in_the_tiers_follow_the_event_with_their_tokens() {
        let tiers = TierConfig { host_blocks: 1, disk_blocks: 0 };
        let mut scheduler = Scheduler::new(CONFIG, 8).with_cache_events().with_tiers(tiers, []);
        let prompt: Vec<u32> = (1..=9).collect();
        let of_prompt = hashes(&prompt, None);
        let events = compute(&mut scheduler, 1, &prompt, None);
        let copied = |hash: BlockHash| CacheEvent::Copied { medium: CacheMedium::Host, hashes: vec![hash] };
        let evicted = CacheEvent::Removed { medium: CacheMedium::Host, hashes: vec![of_prompt[0]] };
        assert!(matches!(&events[0], CacheEvent::Stored(run) if run.hashes == of_prompt), "{events:?}");
        assert_eq!(events[1..], [copied(of_prompt[0]), evicted, copied(of_prompt[1])]);
        // Subscribers forget the copies too, so these are not withdrawn.
        scheduler.reset_prefix_cache();
        scheduler.reset_tiers();
        assert_eq!(scheduler.take_cache_events(), [CacheEvent::Cleared]);
    }

    #[test]
    fn copies_are_announced_again_to_a_new_audience_and_withdrawn_before() {
        let tiers = TierConfig { host_blocks: 2, disk_blocks: 0 };
        let mut scheduler = Scheduler::new(CONFIG, 8).with_cache_events().with_tiers(tiers, []);
        let prompt: Vec<u32> = (1..=9).collect();
        let of_prompt = hashes(&prompt, None);
        let first = compute(&mut scheduler, 1, &prompt, None);
        assert_eq!(first.len(), 2, "the blocks and their copies: {first:?}");
        scheduler.set_event_audience(1);
        let copied = |hash: BlockHash| CacheEvent::Copied { medium: CacheMedium::Host, hashes: vec![hash] };
        let removed = |hash: BlockHash| CacheEvent::Removed { medium: CacheMedium::Host, hashes: vec![hash] };
        let events = compute(&mut scheduler, 2, &prompt, None);
        assert_eq!(events[0], first[0]);
        let copies = of_prompt.iter().flat_map(|hash| [removed(*hash), copied(*hash)]);
        assert_eq!(events[1..], copies.collect::<Vec<_>>());
        assert_eq!(compute(&mut scheduler, 3, &prompt, None), [], "once");
    }

    #[test]
    fn blocks_behind_an_unknown_one_are_recorded_again_with_it() {
        let mut scheduler = Scheduler::new(CONFIG, 16).with_cache_events();
        let prompt: Vec<u32> = (1..=33).collect();
        let of_prompt = hashes(&prompt, None);
        submit(&mut scheduler, 1, &prompt, None);
        for part in &scheduler.schedule() {
            assert_eq!(scheduler.commit(part, None), None, "16 of 33 tokens");
        }
        // The rest of the prompt is recorded behind blocks that the new audience does not know.
        scheduler.set_event_audience(1);
        run(&mut scheduler);
        let stored = |events: Vec<CacheEvent>| -> Vec<(usize, Option<BlockHash>)> {
            let stored = |event| match event {
                CacheEvent::Stored(run) => (run.hashes.len(), run.parent),
                other => panic!("{other:?}"),
            };
            events.into_iter().map(stored).collect()
        };
        let parent = Some(of_prompt[3]);
        let all = stored(scheduler.take_cache_events());
        assert_eq!((all[0], all[1]), ((4, None), (4, parent)), "{all:?}");
        assert_eq!(stored(compute(&mut scheduler, 2, &prompt[..17], None)), [(4, None)]);
        assert_eq!(stored(compute(&mut scheduler, 3, &prompt, None)), [(4, parent)]);
        assert_eq!(compute(&mut scheduler, 4, &prompt, None), [], "once");
    }

    #[test]
    fn a_disk_block_of_an_earlier_run_is_announced_when_the_pool_has_it() {
        let prompt: Vec<u32> = (1..=9).collect();
        let of_prompt = hashes(&prompt, None);
        let tiers = TierConfig { host_blocks: 0, disk_blocks: 8 };
        let mut scheduler =
            Scheduler::new(CONFIG, 8).with_cache_events().with_tiers(tiers, of_prompt.iter().copied());
        assert_eq!(scheduler.take_cache_events(), [], "no event names their tokens yet");
        let events = compute(&mut scheduler, 1, &prompt, None);
        let copied = CacheEvent::Copied { medium: CacheMedium::Disk, hashes: of_prompt.clone() };
        assert!(matches!(&events[0], CacheEvent::Stored(run) if run.hashes == of_prompt), "{events:?}");
        assert_eq!(events[1..], [copied]);
    }

    /// A subscriber that applies the events knows exactly the blocks of the pool, and can compute their hashes.
    #[test]
    fn a_subscriber_knows_exactly_the_cached_blocks() {
        let mut scheduler = Scheduler::new(CONFIG, 12).with_cache_events();
        let (mut known, mut orphans) = (BTreeSet::<BlockHash>::new(), BTreeSet::<BlockHash>::new());
        let mut draw = 7_u64;
        let mut next = |below: u64| {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draw >> 33) % below
        };
        for round in 0..300 {
            for at in 0..3 {
                // Few first tokens, so that prompts share prefixes.
                let first = next(3) as u32;
                let prompt: Vec<u32> = (0..5 + next(25) as u32).map(|at| first + at).collect();
                submit(&mut scheduler, 10 * round + at, &prompt, None);
            }
            run(&mut scheduler);
            if next(40) == 0 {
                scheduler.reset_prefix_cache();
            }
            for event in scheduler.take_cache_events() {
                match event {
                    CacheEvent::Stored(run) => {
                        // A block behind one that has left the pool is recorded again with it.
                        let is_of = |parent: &BlockHash| known.contains(parent) && !orphans.contains(parent);
                        let follows = run.parent.as_ref().is_none_or(is_of);
                        let (mut parent, mut again) = (run.parent.unwrap_or_else(BlockHash::root), false);
                        for (hash, tokens) in run.hashes.iter().zip(run.tokens.chunks_exact(BLOCK)) {
                            parent = BlockHash::of_block(parent, tokens, None);
                            assert_eq!(parent, *hash);
                            again |= orphans.remove(hash);
                            assert!(known.insert(*hash) || again, "a block is stored once");
                            if !follows {
                                orphans.insert(*hash);
                            }
                        }
                    }
                    CacheEvent::Removed { hashes, .. } => {
                        assert!(hashes.iter().all(|hash| known.remove(hash)));
                        hashes.iter().for_each(|hash| _ = orphans.remove(hash));
                    }
                    CacheEvent::Cleared => {
                        known.clear();
                        orphans.clear();
                    }
                    CacheEvent::Copied { .. } => panic!("there is no tier"),
                }
            }
            let cached: BTreeSet<_> =
                scheduler.cached_blocks(None, usize::MAX).into_iter().map(|(hash, _)| hash).collect();
            assert_eq!(known, cached);
        }
        assert!(!known.is_empty());
    }
}
