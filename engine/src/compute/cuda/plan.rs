//! One step for the device: its integers in one piece, and its sizes. Pure.
//!
//! ```text
//!   tokens | positions | slots | decode entries | wanted rows | draws | tiles | block tables, in sequence
//! ```
//!
//! A step of one token for each sequence (a *decode step*) is padded to a bucket. Every section except the block tables
//! then has the same place in all steps of the bucket, so that recorded launches fit. Padding has no slot, no keys and
//! no draw, and kernels skip it.

use std::ops::Range;

use baton_connector::BlockId;

use super::kernels::{DRAW_WORDS, TILE_QUERIES};
use crate::compute::{LogitsRequest, SeqStep};
use crate::sampling::Draw;

/// Sizes that decode steps are padded to.
pub(super) const BUCKETS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Rows of larger products are multiples of this. It bounds the number of shapes, and no shape is just past a tile.
const ROWS_STEP: usize = 128;

/// Rows of products for `rows` rows, with padding.
pub(super) fn padded_rows(rows: usize) -> usize {
    BUCKETS.into_iter().find(|bucket| *bucket >= rows).unwrap_or_else(|| rows.next_multiple_of(ROWS_STEP))
}

/// Place of a section, in integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Section {
    pub(super) at: usize,
    pub(super) len: usize,
}

/// One step.
#[derive(Debug, Default)]
pub(super) struct StepPlan {
    /// The integers.
    pub(super) words: Vec<i32>,
    pub(super) tokens: Section,
    pub(super) positions: Section,
    pub(super) slots: Section,
    pub(super) decode: Section,
    pub(super) wanted: Section,
    pub(super) draws: Section,
    pub(super) tiles: Section,
    pub(super) tables: Section,
    /// Rows, padding included.
    pub(super) rows: usize,
    /// Sequences of one token, padding included.
    pub(super) sequences: usize,
    /// Tiles of queries of the other sequences.
    pub(super) tile_count: usize,
    /// Rows whose logits are wanted, padding included.
    pub(super) wanted_rows: usize,
    /// Wanted rows without padding.
    pub(super) wanted_real: usize,
    /// Whether any wanted row is drawn from on the device.
    pub(super) sampled: bool,
    /// Runs of wanted rows whose logits go to the host, in order: those that are not drawn from.
    pub(super) to_host: Vec<Range<usize>>,
    /// The bucket of a decode step.
    pub(super) bucket: Option<usize>,
}

/// Bounds of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepBounds {
    pub(super) rows: usize,
    pub(super) positions: usize,
    pub(super) vocab: usize,
    pub(super) blocks: usize,
    pub(super) block_tokens: usize,
    /// Integers of all sections.
    pub(super) words: usize,
    pub(super) sequences: usize,
    /// Largest bucket.
    pub(super) bucket: usize,
}

fn int(value: usize) -> i32 {
    i32::try_from(value).expect("bounds of a step fit 31 bits")
}

/// The integers of one draw.
fn draw_words(draw: Option<&Draw>) -> [i32; DRAW_WORDS] {
    let Some(draw) = draw else { return [0; DRAW_WORDS] };
    if draw.is_greedy() {
        return [1, 0, 0, 0, 0, 0, 0];
    }
    let float = |value: f32| value.to_bits().cast_signed();
    let half = |value: u64| (value as u32).cast_signed();
    [
        2,
        float(draw.temperature.recip()),
        draw.top_k.min(i32::MAX as u32).cast_signed(),
        float(draw.top_p),
        float(draw.min_p),
        half(draw.fraction),
        half(draw.fraction >> 32),
    ]
}

impl StepPlan {
    /// The step over `batch`.
    ///
    /// # Errors
    /// What is out of bounds: a bug of the scheduler, found before anything is enqueued.
    pub(super) fn new(batch: &[SeqStep<'_>], bounds: &StepBounds) -> Result<Self, String> {
        check(batch, bounds)?;
        let real_rows: usize = batch.iter().map(|step| step.tokens.len()).sum();
        let one_each = batch.iter().all(|step| {
            step.tokens.len() == 1 && matches!(step.logits, LogitsRequest::Last | LogitsRequest::Draw(_))
        });
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= batch.len());
        let bucket = bucket.filter(|bucket| one_each && *bucket <= bounds.bucket);

        let (mut tokens, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut decode, mut tiles, mut tables) = (Vec::new(), Vec::new(), Vec::new());
        let (mut wanted, mut draws, mut sampled) = (Vec::new(), Vec::new(), false);
        let mut to_host: Vec<Range<usize>> = Vec::new();
        for step in batch {
            let (row, table) = (tokens.len(), tables.len());
            let end = step.start + step.tokens.len();
            for (position, token) in (step.start..end).zip(step.tokens) {
                tokens.push(token.cast_signed());
                positions.push(int(position));
                let block = step.block_table[position / bounds.block_tokens].index();
                slots.push(int(block * bounds.block_tokens + position % bounds.block_tokens));
            }
            let used = &step.block_table[..end.div_ceil(bounds.block_tokens)];
            tables.extend(used.iter().map(|block| int(block.index())));
            if step.tokens.len() == 1 {
                decode.extend([int(row), int(end), int(table)]);
            } else {
                for first in (0..step.tokens.len()).step_by(TILE_QUERIES) {
                    let queries = TILE_QUERIES.min(step.tokens.len() - first);
                    tiles.push([int(row + first), int(queries), int(step.start + first), int(table)]);
                }
            }
            let draw = match &step.logits {
                LogitsRequest::Draw(draw) => Some(draw),
                LogitsRequest::No | LogitsRequest::Last | LogitsRequest::All => None,
            };
            let rows = match step.logits {
                LogitsRequest::No => continue,
                LogitsRequest::Last | LogitsRequest::Draw(_) => row + step.tokens.len() - 1..tokens.len(),
                LogitsRequest::All => row..tokens.len(),
            };
            if draw.is_some() {
                sampled = true;
            } else {
                let (first, end) = (wanted.len(), wanted.len() + rows.len());
                match to_host.last_mut().filter(|last| last.end == first) {
                    Some(last) => last.end = end,
                    None => to_host.push(first..end),
                }
            }
            for row in rows {
                wanted.push(int(row));
                draws.extend(draw_words(draw));
            }
        }
        // Tiles with the most keys first, so that the blocks of the device finish together.
        tiles.sort_by_key(|tile| std::cmp::Reverse(tile[1] + tile[2]));
        let wanted_real = wanted.len();
        if let Some(bucket) = bucket {
            let missing = bucket - batch.len();
            tokens.resize(bucket, 0);
            positions.resize(bucket, 0);
            slots.resize(bucket, -1);
            decode.resize(3 * bucket, 0);
            wanted.resize(bucket, -1);
            draws.resize(draws.len() + missing * DRAW_WORDS, 0);
        }
        let mut plan = Self {
            rows: bucket.unwrap_or(real_rows),
            sequences: decode.len() / 3,
            tile_count: tiles.len(),
            wanted_rows: wanted.len(),
            wanted_real,
            sampled,
            to_host,
            bucket,
            ..Self::default()
        };
        plan.tokens = plan.put(&tokens);
        plan.positions = plan.put(&positions);
        plan.slots = plan.put(&slots);
        plan.decode = plan.put(&decode);
        plan.wanted = plan.put(&wanted);
        plan.draws = plan.put(&draws);
        plan.tiles = plan.put(tiles.as_flattened());
        plan.tables = plan.put(&tables);
        if plan.words.len() > bounds.words {
            return Err(format!("a step of {} integers, at most {}", plan.words.len(), bounds.words));
        }
        Ok(plan)
    }

    /// A decode step of padding only.
    pub(super) fn padding(bucket: usize, sampled: bool) -> Self {
        let mut plan = Self {
            rows: bucket,
            sequences: bucket,
            wanted_rows: bucket,
            sampled,
            bucket: Some(bucket),
            ..Self::default()
        };
        plan.tokens = plan.put(&vec![0; bucket]);
        plan.positions = plan.put(&vec![0; bucket]);
        plan.slots = plan.put(&vec![-1; bucket]);
        plan.decode = plan.put(&vec![0; 3 * bucket]);
        plan.wanted = plan.put(&vec![-1; bucket]);
        plan.draws = plan.put(&vec![0; DRAW_WORDS * bucket]);
        plan.tiles = plan.put(&[]);
        plan.tables = plan.put(&[]);
        plan
    }

    /// The runs of rows whose logits go to the host, among `rows` wanted rows from `first` on, counted from `first`.
    pub(super) fn rows_to_host(&self, first: usize, rows: usize) -> Vec<Range<usize>> {
        let within = |run: &Range<usize>| run.start.max(first)..run.end.min(first + rows);
        let runs = self.to_host.iter().map(within).filter(|run| run.start < run.end);
        runs.map(|run| run.start - first..run.end - first).collect()
    }

    fn put(&mut self, words: &[i32]) -> Section {
        let at = self.words.len();
        self.words.extend_from_slice(words);
        Section { at, len: words.len() }
    }
}

fn check(batch: &[SeqStep<'_>], bounds: &StepBounds) -> Result<(), String> {
    let rows: usize = batch.iter().map(|step| step.tokens.len()).sum();
    if rows > bounds.rows {
        return Err(format!("a step of {rows} tokens, at most {}", bounds.rows));
    }
    if batch.len() > bounds.sequences {
        return Err(format!("a step of {} sequences, at most {}", batch.len(), bounds.sequences));
    }
    for step in batch {
        let end = step.start + step.tokens.len();
        let inside = |block: &BlockId| block.index() < bounds.blocks;
        if step.tokens.is_empty() || end > bounds.positions {
            return Err(format!("positions {} to {end} of at most {}", step.start, bounds.positions));
        }
        if step.block_table.len() < end.div_ceil(bounds.block_tokens) || !step.block_table.iter().all(inside)
        {
            return Err(format!("a block table of {} blocks for {end} positions", step.block_table.len()));
        }
        if let Some(token) = step.tokens.iter().find(|token| **token as usize >= bounds.vocab) {
            return Err(format!("token {token} of a vocabulary of {}", bounds.vocab));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: StepBounds = StepBounds {
        rows: 512,
        positions: 1024,
        vocab: 100,
        blocks: 64,
        block_tokens: 16,
        words: 1 << 20,
        sequences: 64,
        bucket: 64,
    };

    fn table(blocks: u32) -> Vec<BlockId> {
        (0..blocks).rev().map(BlockId).collect()
    }

    fn words(plan: &StepPlan, section: Section) -> &[i32] {
        &plan.words[section.at..][..section.len]
    }

    #[test]
    fn a_decode_step_lies_where_every_step_of_its_bucket_lies() {
        let table = table(5);
        let step = |start| SeqStep { tokens: &[7], start, block_table: &table, logits: LogitsRequest::Last };
        let three = StepPlan::new(&[step(0), step(20), step(79)], &BOUNDS).unwrap();
        let four = StepPlan::new(&[step(1), step(2), step(3), step(70)], &BOUNDS).unwrap();
        assert_eq!((three.bucket, three.rows, three.sequences, three.wanted_real), (Some(4), 4, 4, 3));
        for (a, b) in [
            (three.tokens, four.tokens),
            (three.positions, four.positions),
            (three.slots, four.slots),
            (three.decode, four.decode),
            (three.wanted, four.wanted),
            (three.draws, four.draws),
        ] {
            assert_eq!(a, b);
        }
        assert_eq!(three.tables.at, four.tables.at);
        let padding = StepPlan::padding(4, false);
        assert_eq!(
            (padding.tokens, padding.slots, padding.wanted, padding.draws, padding.tables.at),
            (four.tokens, four.slots, four.wanted, four.draws, four.tables.at)
        );
        // Tables of 1, 2 and 5 blocks, and padding without keys.
        assert_eq!(words(&three, three.decode), [0, 1, 0, 1, 21, 1, 2, 80, 3, 0, 0, 0]);
        assert_eq!(words(&three, three.tables), [4, 4, 3, 4, 3, 2, 1, 0]);
        assert_eq!(words(&three, three.slots), [64, 3 * 16 + 4, 15, -1]);
        assert_eq!(words(&three, three.wanted), [0, 1, 2, -1]);
    }

    #[test]
    fn a_prompt_is_cut_into_tiles_beside_sequences_of_one_token() {
        let (table, prompt) = (table(10), [1; 130]);
        let batch = [
            SeqStep { tokens: &[7], start: 30, block_table: &table, logits: LogitsRequest::Last },
            SeqStep { tokens: &prompt, start: 20, block_table: &table, logits: LogitsRequest::No },
        ];
        let plan = StepPlan::new(&batch, &BOUNDS).unwrap();
        assert_eq!((plan.bucket, plan.rows, plan.sequences, plan.tile_count), (None, 131, 1, 3));
        assert_eq!(words(&plan, plan.tiles), [129, 2, 148, 2, 65, 64, 84, 2, 1, 64, 20, 2]);
        assert_eq!((plan.wanted_rows, plan.sampled), (1, false));
    }

    #[test]
    fn every_row_that_can_be_is_drawn_from_on_the_device_and_the_others_are_for_the_host() {
        let table = table(5);
        let draw = Draw { temperature: 0.5, top_k: 3, top_p: 0.9, min_p: 0.0, fraction: 5 << 32 | 6 };
        let step = |logits| SeqStep { tokens: &[7], start: 0, block_table: &table, logits };
        let both =
            StepPlan::new(&[step(LogitsRequest::Draw(draw)), step(LogitsRequest::Draw(draw))], &BOUNDS);
        let both = both.unwrap();
        assert!(both.sampled);
        let float = |value: f32| value.to_bits().cast_signed();
        assert_eq!(words(&both, both.draws)[..7], [2, float(2.0), 3, float(0.9), 0, 6, 5]);
        assert!(both.to_host.is_empty());
        let (draw, last) = (LogitsRequest::Draw(draw), LogitsRequest::Last);
        let mixed = [draw, last, last, LogitsRequest::No, draw, last].map(step);
        let mixed = StepPlan::new(&mixed, &BOUNDS).unwrap();
        assert!(mixed.sampled);
        assert_eq!((mixed.wanted_real, mixed.to_host.clone()), (5, vec![1..3, 4..5]));
        let kinds: Vec<i32> = words(&mixed, mixed.draws).chunks(DRAW_WORDS).map(|draw| draw[0]).collect();
        assert_eq!(kinds, [2, 0, 0, 2, 0]);
        let none = StepPlan::new(&[step(last), step(LogitsRequest::No), step(last)], &BOUNDS).unwrap();
        assert_eq!((none.sampled, none.to_host.len(), &none.to_host[0]), (false, 1, &(0..2)));
    }

    #[test]
    fn what_is_out_of_bounds_is_refused_before_it_is_a_number() {
        let (table, far) = (table(5), [BlockId(64)]);
        let step =
            |tokens, start, block_table| SeqStep { tokens, start, block_table, logits: LogitsRequest::No };
        for wrong in [
            step(&[], 0, &table),
            step(&[100], 0, &table),
            step(&[1; 600], 0, &table),
            step(&[1], 80, &table),
            step(&[1], 1024, &table),
            step(&[1], 0, &far),
        ] {
            assert!(StepPlan::new(std::slice::from_ref(&wrong), &BOUNDS).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn products_have_few_different_numbers_of_rows() {
        assert_eq!([1, 3, 17, 256, 257, 1025].map(padded_rows), [1, 4, 32, 256, 384, 1152]);
    }
}
