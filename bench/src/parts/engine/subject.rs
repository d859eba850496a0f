//! One engine under measurement: an executor and its timed steps.

use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::{CpuExecutor, CpuOptions};
use baton_engine::compute::{Executor, Logits, LogitsRequest, SeqStep};

use super::{BATCH, BLOCK_TOKENS, EngineBenchError, PROMPT_TOKENS};

pub(super) struct EngineSubject {
    executor: CpuExecutor,
    vocab: u32,
    decode_tokens: usize,
    tables: Vec<Vec<BlockId>>,
}

impl EngineSubject {
    /// Options of the executors of this benchmark.
    pub(super) fn options(kv_dtype: KvDtype, threads: usize, decode_tokens: usize) -> CpuOptions {
        CpuOptions {
            blocks: blocks_per_sequence(decode_tokens) * BATCH,
            block_tokens: BLOCK_TOKENS,
            threads,
            kv_dtype,
            ..CpuOptions::default()
        }
    }

    /// For an executor with [`Self::options`].
    pub(super) fn new(executor: CpuExecutor, decode_tokens: usize) -> Self {
        let per_sequence = blocks_per_sequence(decode_tokens);
        let block = |index: usize| BlockId(u32::try_from(index).expect("a small pool"));
        let tables = (0..BATCH)
            .map(|sequence| (0..per_sequence).map(|i| block(sequence * per_sequence + i)).collect())
            .collect();
        let vocab = u32::try_from(executor.vocab()).expect("a vocabulary fits");
        Self { executor, vocab, decode_tokens, tables }
    }

    pub(super) fn executor(&self) -> &CpuExecutor {
        &self.executor
    }

    fn tokens(&self, count: usize) -> Vec<u32> {
        (0..u32::try_from(count).expect("short"))
            .map(|i| i.wrapping_mul(2_654_435_761) % self.vocab)
            .collect()
    }

    /// Tokens/s of one prompt.
    pub(super) fn prefill(&mut self) -> Result<f64, EngineBenchError> {
        let (tokens, mut logits) = (self.tokens(PROMPT_TOKENS), Logits::default());
        let step = SeqStep {
            tokens: &tokens,
            start: 0,
            block_table: &self.tables[0],
            logits: LogitsRequest::Last,
            adapter: None,
        };
        let start = Instant::now();
        self.executor.execute(&[step], &mut logits)?;
        Ok(rate(PROMPT_TOKENS, start))
    }

    /// Tokens/s of `batch` sequences that continue at position 512. The contents of earlier positions do not affect
    /// the speed.
    pub(super) fn decode(&mut self, batch: usize) -> Result<f64, EngineBenchError> {
        let (tokens, mut logits) = (self.tokens(batch), Logits::default());
        let start = Instant::now();
        for position in PROMPT_TOKENS..PROMPT_TOKENS + self.decode_tokens {
            let steps: Vec<SeqStep<'_>> = (0..batch)
                .map(|sequence| SeqStep {
                    tokens: &tokens[sequence..=sequence],
                    start: position,
                    block_table: &self.tables[sequence],
                    logits: LogitsRequest::Last,
                    adapter: None,
                })
                .collect();
            self.executor.execute(&steps, &mut logits)?;
        }
        Ok(rate(self.decode_tokens * batch, start))
    }
}

fn blocks_per_sequence(decode_tokens: usize) -> usize {
    (PROMPT_TOKENS + decode_tokens).div_ceil(BLOCK_TOKENS)
}

fn rate(count: usize, start: Instant) -> f64 {
    count as f64 / start.elapsed().as_secs_f64()
}
