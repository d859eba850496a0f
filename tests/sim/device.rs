//! A device whose KV cache can be checked: position `i` of a sequence stores its token and a hash of all tokens up to
//! `i`. A forward pass reads every stored position, as attention does. The pass detects a position that does not
//! continue the one before it: a block that was freed, reused, not yet landed, or another sequence's. The next token
//! depends on all positions, so a client receives wrong text if this check fails to detect a fault.
//!
//! With an attention window a pass reads only the stored positions that its first token sees. The hash of the first of
//! them stands for all tokens before, so the next token still depends on all positions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::layout::KvDtype;
use baton_connector::region::Region;
use baton_connector::{BlockId, KvLayout};
use baton_engine::compute::step_hazards::StepHazards;
use baton_engine::compute::{Executor, ExecutorError, Logits, LogitsRequest, SeqStep};

use crate::rng::mix;

/// Tokens that the model knows.
pub const VOCAB: u64 = 29;

/// One position: the hash's upper 48 bits, and the token.
pub type Slot = u64;

fn hash_after(before: u64, token: u32) -> u64 {
    mix(before ^ mix(u64::from(token) + 1)) >> 16
}

fn slot(hash: u64, token: u32) -> Slot {
    hash << 16 | u64::from(token)
}

fn choice(hash: u64) -> u32 {
    (mix(hash) % VOCAB) as u32
}

/// The model's output for a prompt, computed in one pass without a cache.
pub fn reference(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut hash = prompt.iter().fold(0, |hash, &token| hash_after(hash, token));
    let mut text = Vec::with_capacity(count);
    for _ in 0..count {
        let token = choice(hash);
        text.push(token);
        hash = hash_after(hash, token);
    }
    text
}

/// The paged pool of one engine process. A reader's mapping keeps it alive after the process ends.
#[derive(Debug)]
pub struct Memory {
    slots: Vec<Slot>,
    block_tokens: usize,
}

pub type SharedMemory = Arc<Mutex<Memory>>;

pub fn memory(blocks: usize, block_tokens: usize, garbage: u64) -> SharedMemory {
    let slots = (0..blocks * block_tokens).map(|i| mix(garbage ^ i as u64)).collect();
    Arc::new(Mutex::new(Memory { slots, block_tokens }))
}

impl Memory {
    pub fn block(&self, id: BlockId) -> &[Slot] {
        &self.slots[id.index() * self.block_tokens..][..self.block_tokens]
    }

    pub fn write(&mut self, id: BlockId, contents: &[Slot]) {
        self.slots[id.index() * self.block_tokens..][..self.block_tokens].copy_from_slice(contents);
    }
}

/// What a pass reads of the positions before it.
#[derive(Clone, Debug, Default)]
pub struct DeviceWindow {
    /// Keys that a position sees, its own included; at least 3, so that a pass reads two stored ones. `None` for all.
    pub keys: Option<usize>,
    /// Planted: a pass reads one position behind the window.
    pub reads_behind: bool,
    /// Parts of steps behind blocks that their sequence had released.
    pub passed: Arc<AtomicU64>,
}

impl DeviceWindow {
    /// The first stored position that a pass from `start` on reads.
    fn first_read(&self, start: usize) -> usize {
        let Some(keys) = self.keys else { return 0 };
        (start + 1).saturating_sub(keys + usize::from(self.reads_behind))
    }
}

/// The device of the module's documentation.
pub struct Device {
    memory: SharedMemory,
    region: Region,
    layout: KvLayout,
    window: DeviceWindow,
    /// The fault in the cache, if a pass read a wrong position.
    fault: Arc<Mutex<Option<String>>>,
    /// Set by a test: the next pass fails.
    broken: Arc<AtomicBool>,
    apart: StepHazards,
}

impl Device {
    pub fn new(
        memory: SharedMemory,
        blocks: usize,
        window: DeviceWindow,
        fault: Arc<Mutex<Option<String>>>,
        broken: Arc<AtomicBool>,
    ) -> Self {
        let block_tokens = memory.lock().unwrap_or_else(PoisonError::into_inner).block_tokens;
        let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 1, block_tokens, dtype: KvDtype::F32 };
        let apart = StepHazards::new(blocks);
        Self { memory, region: Region::allocate(blocks, 1), layout, window, fault, broken, apart }
    }

    /// The place of a position in the pool.
    fn place(&self, step: &SeqStep<'_>, position: usize) -> usize {
        let block = step.block_table[position / self.layout.block_tokens];
        block.index() * self.layout.block_tokens + position % self.layout.block_tokens
    }

    /// The hash of all tokens before a step, from the stored positions that it reads.
    fn hash_before(&self, memory: &Memory, step: &SeqStep<'_>) -> u64 {
        let first = self.window.first_read(step.start);
        if first > 0 && step.block_table.get(1) == step.block_table.first() {
            // The table names a later block in the place of a released one.
            self.window.passed.fetch_add(1, Ordering::Relaxed);
        }
        let mut hash = 0;
        for position in first..step.start {
            let stored = memory.slots[self.place(step, position)];
            if position == first && first > 0 {
                hash = stored >> 16;
                continue;
            }
            hash = hash_after(hash, (stored & 0xFFFF) as u32);
            if stored >> 16 != hash {
                let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
                let block = step.block_table[position / self.layout.block_tokens];
                fault
                    .get_or_insert_with(|| format!("I3: stale KV at position {position}, block {}", block.0));
                break;
            }
        }
        hash
    }
}

impl Executor for Device {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn regions(&self) -> &[Region] {
        std::slice::from_ref(&self.region)
    }

    fn vocab(&self) -> usize {
        VOCAB as usize
    }

    fn run(
        &mut self,
        batch: &[SeqStep<'_>],
        logits: &mut Logits,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ExecutorError> {
        if self.broken.swap(false, Ordering::Relaxed) {
            return Err(ExecutorError::Device("the simulator broke it".into()));
        }
        meanwhile();
        logits.vocab = VOCAB as usize;
        logits.values.clear();
        if let Err(why) = self.apart.check(batch, self.layout.block_tokens) {
            let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
            fault.get_or_insert_with(|| format!("I3: {why}"));
        }
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        for step in batch {
            let mut hash = self.hash_before(&memory, step);
            for (at, &token) in step.tokens.iter().enumerate() {
                hash = hash_after(hash, token);
                memory.slots[self.place(step, step.start + at)] = slot(hash, token);
                let is_wanted = match step.logits {
                    LogitsRequest::No => false,
                    LogitsRequest::All | LogitsRequest::DrawEach(_) => true,
                    LogitsRequest::Last | LogitsRequest::Draw(_) | LogitsRequest::Hidden => {
                        at + 1 == step.tokens.len()
                    }
                };
                if is_wanted {
                    let row = logits.values.len();
                    logits.values.resize(row + VOCAB as usize, 0.0);
                    logits.values[row + choice(hash) as usize] = 1.0;
                }
            }
        }
        drop(memory);
        meanwhile();
        Ok(())
    }
}
