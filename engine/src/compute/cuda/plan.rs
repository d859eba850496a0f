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

/// The sections of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sections {
    pub(super) tokens: Section,
    pub(super) positions: Section,
    pub(super) slots: Section,
    pub(super) decode: Section,
    pub(super) wanted: Section,
    pub(super) draws: Section,
    pub(super) tiles: Section,
    pub(super) tables: Section,
}

/// One step.
#[derive(Debug)]
pub(super) struct StepPlan {
    /// The integers.
    pub(super) words: Vec<i32>,
    pub(super) sections: Sections,
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

/// The integers of a step, by section.
#[derive(Default)]
struct StepWords {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    decode: Vec<i32>,
    wanted: Vec<i32>,
    draws: Vec<i32>,
    tiles: Vec<[i32; 4]>,
    tables: Vec<i32>,
    sampled: bool,
    to_host: Vec<Range<usize>>,
}

impl StepWords {
    fn add(&mut self, step: &SeqStep<'_>, block_tokens: usize) {
        let (row, table) = (self.tokens.len(), self.tables.len());
        let end = step.start + step.tokens.len();
        for (position, token) in (step.start..end).zip(step.tokens) {
            self.tokens.push(token.cast_signed());
            self.positions.push(int(position));
            let block = step.block_table[position / block_tokens].index();
            self.slots.push(int(block * block_tokens + position % block_tokens));
        }
        let used = &step.block_table[..end.div_ceil(block_tokens)];
        self.tables.extend(used.iter().map(|block| int(block.index())));
        if step.tokens.len() == 1 {
            self.decode.extend([int(row), int(end), int(table)]);
        } else {
            for first in (0..step.tokens.len()).step_by(TILE_QUERIES) {
                let queries = TILE_QUERIES.min(step.tokens.len() - first);
                self.tiles.push([int(row + first), int(queries), int(step.start + first), int(table)]);
            }
        }
        let last = row + step.tokens.len() - 1;
        match &step.logits {
            // No sequence wants hidden states of a device that does not compute them.
            LogitsRequest::No | LogitsRequest::Hidden => {}
            LogitsRequest::Last => self.want(last..last + 1, None),
            LogitsRequest::All => self.want(row..last + 1, None),
            LogitsRequest::Draw(draw) => self.want(last..last + 1, Some(draw)),
            LogitsRequest::DrawEach(draws) => (row..=last).enumerate().for_each(|(offset, row)| {
                self.want(row..row + 1, Some(&draws.at(offset)));
            }),
        }
    }

    /// Adds wanted rows: drawn from on the device, or copied to the host.
    fn want(&mut self, rows: Range<usize>, draw: Option<&Draw>) {
        if draw.is_some() {
            self.sampled = true;
        } else {
            let (first, end) = (self.wanted.len(), self.wanted.len() + rows.len());
            match self.to_host.last_mut().filter(|last| last.end == first) {
                Some(last) => last.end = end,
                None => self.to_host.push(first..end),
            }
        }
        for row in rows {
            self.wanted.push(int(row));
            self.draws.extend(draw_words(draw));
        }
    }

    /// Pads a decode step to its bucket.
    fn pad(&mut self, bucket: usize) {
        self.tokens.resize(bucket, 0);
        self.positions.resize(bucket, 0);
        self.slots.resize(bucket, -1);
        self.decode.resize(3 * bucket, 0);
        self.wanted.resize(bucket, -1);
        self.draws.resize(DRAW_WORDS * bucket, 0);
    }

    /// The step, padded to the bucket of a decode step.
    fn plan(mut self, bucket: Option<usize>) -> StepPlan {
        // Tiles with the most keys first, so that the blocks of the device finish together.
        self.tiles.sort_by_key(|tile| std::cmp::Reverse(tile[1] + tile[2]));
        let wanted_real = self.wanted.len();
        if let Some(bucket) = bucket {
            self.pad(bucket);
        }
        let mut words = Vec::new();
        let mut put = |section: &[i32]| {
            words.extend_from_slice(section);
            Section { at: words.len() - section.len(), len: section.len() }
        };
        let sections = Sections {
            tokens: put(&self.tokens),
            positions: put(&self.positions),
            slots: put(&self.slots),
            decode: put(&self.decode),
            wanted: put(&self.wanted),
            draws: put(&self.draws),
            tiles: put(self.tiles.as_flattened()),
            tables: put(&self.tables),
        };
        StepPlan {
            words,
            sections,
            rows: self.tokens.len(),
            sequences: self.decode.len() / 3,
            tile_count: self.tiles.len(),
            wanted_rows: self.wanted.len(),
            wanted_real,
            sampled: self.sampled,
            to_host: self.to_host,
            bucket,
        }
    }
}

impl StepPlan {
    /// The step over `batch`.
    ///
    /// # Errors
    /// What is out of bounds: a bug of the scheduler, found before anything is enqueued.
    pub(super) fn new(batch: &[SeqStep<'_>], bounds: &StepBounds) -> Result<Self, String> {
        check(batch, bounds)?;
        let one_each = batch.iter().all(|step| {
            step.tokens.len() == 1 && matches!(step.logits, LogitsRequest::Last | LogitsRequest::Draw(_))
        });
        let bucket = BUCKETS.into_iter().find(|bucket| *bucket >= batch.len());
        let bucket = bucket.filter(|bucket| one_each && *bucket <= bounds.bucket);
        let mut words = StepWords::default();
        batch.iter().for_each(|step| words.add(step, bounds.block_tokens));
        let plan = words.plan(bucket);
        if plan.words.len() > bounds.words {
            return Err(format!("a step of {} integers, at most {}", plan.words.len(), bounds.words));
        }
        Ok(plan)
    }

    /// A decode step of padding only.
    pub(super) fn padding(bucket: usize, sampled: bool) -> Self {
        StepWords { sampled, ..StepWords::default() }.plan(Some(bucket))
    }

    /// The runs of rows whose logits go to the host, among `rows` wanted rows from `first` on, counted from `first`.
    pub(super) fn rows_to_host(&self, first: usize, rows: usize) -> Vec<Range<usize>> {
        let within = |run: &Range<usize>| run.start.max(first)..run.end.min(first + rows);
        let runs = self.to_host.iter().map(within).filter(|run| run.start < run.end);
        runs.map(|run| run.start - first..run.end - first).collect()
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
    use crate::sampling::{DrawSeries, SamplingParams, TokenPosition};

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
        let step = |start| SeqStep {
            tokens: &[7],
            start,
            block_table: &table,
            logits: LogitsRequest::Last,
            adapter: None,
        };
        let three = StepPlan::new(&[step(0), step(20), step(79)], &BOUNDS).unwrap();
        let four = StepPlan::new(&[step(1), step(2), step(3), step(70)], &BOUNDS).unwrap();
        assert_eq!((three.bucket, three.rows, three.sequences, three.wanted_real), (Some(4), 4, 4, 3));
        for (a, b) in [
            (three.sections.tokens, four.sections.tokens),
            (three.sections.positions, four.sections.positions),
            (three.sections.slots, four.sections.slots),
            (three.sections.decode, four.sections.decode),
            (three.sections.wanted, four.sections.wanted),
            (three.sections.draws, four.sections.draws),
        ] {
            assert_eq!(a, b);
        }
        assert_eq!(three.sections.tables.at, four.sections.tables.at);
        let padding = StepPlan::padding(4, false);
        assert_eq!(
            (
                padding.sections.tokens,
                padding.sections.slots,
                padding.sections.wanted,
                padding.sections.draws,
                padding.sections.tables.at
            ),
            (
                four.sections.tokens,
                four.sections.slots,
                four.sections.wanted,
                four.sections.draws,
                four.sections.tables.at
            )
        );
        // Tables of 1, 2 and 5 blocks, and padding without keys.
        assert_eq!(words(&three, three.sections.decode), [0, 1, 0, 1, 21, 1, 2, 80, 3, 0, 0, 0]);
        assert_eq!(words(&three, three.sections.tables), [4, 4, 3, 4, 3, 2, 1, 0]);
        assert_eq!(words(&three, three.sections.slots), [64, 3 * 16 + 4, 15, -1]);
        assert_eq!(words(&three, three.sections.wanted), [0, 1, 2, -1]);
    }

    #[test]
    fn a_prompt_is_cut_into_tiles_beside_sequences_of_one_token() {
        let (table, prompt) = (table(10), [1; 130]);
        let batch = [
            SeqStep {
                tokens: &[7],
                start: 30,
                block_table: &table,
                logits: LogitsRequest::Last,
                adapter: None,
            },
            SeqStep {
                tokens: &prompt,
                start: 20,
                block_table: &table,
                logits: LogitsRequest::No,
                adapter: None,
            },
        ];
        let plan = StepPlan::new(&batch, &BOUNDS).unwrap();
        assert_eq!((plan.bucket, plan.rows, plan.sequences, plan.tile_count), (None, 131, 1, 3));
        assert_eq!(words(&plan, plan.sections.tiles), [129, 2, 148, 2, 65, 64, 84, 2, 1, 64, 20, 2]);
        assert_eq!((plan.wanted_rows, plan.sampled), (1, false));
    }

    #[test]
    fn rows_are_sampled_on_the_device_where_supported_and_else_on_the_host() {
        let table = table(5);
        let draw = Draw { temperature: 0.5, top_k: 3, top_p: 0.9, min_p: 0.0, fraction: 5 << 32 | 6 };
        let step = |logits| SeqStep { tokens: &[7], start: 0, block_table: &table, logits, adapter: None };
        let both =
            StepPlan::new(&[step(LogitsRequest::Draw(draw)), step(LogitsRequest::Draw(draw))], &BOUNDS);
        let both = both.unwrap();
        assert!(both.sampled);
        let float = |value: f32| value.to_bits().cast_signed();
        assert_eq!(words(&both, both.sections.draws)[..7], [2, float(2.0), 3, float(0.9), 0, 6, 5]);
        assert!(both.to_host.is_empty());
        let (draw, last) = (LogitsRequest::Draw(draw), LogitsRequest::Last);
        let mixed = [draw, last, last, LogitsRequest::No, draw, last].map(step);
        let mixed = StepPlan::new(&mixed, &BOUNDS).unwrap();
        assert!(mixed.sampled);
        assert_eq!((mixed.wanted_real, mixed.to_host.clone()), (5, vec![1..3, 4..5]));
        let kinds: Vec<i32> =
            words(&mixed, mixed.sections.draws).chunks(DRAW_WORDS).map(|draw| draw[0]).collect();
        assert_eq!(kinds, [2, 0, 0, 2, 0]);
        let none = StepPlan::new(&[step(last), step(LogitsRequest::No), step(last)], &BOUNDS).unwrap();
        assert_eq!((none.sampled, none.to_host.len(), &none.to_host[0]), (false, 1, &(0..2)));
    }

    #[test]
    fn each_row_of_a_part_with_drafts_is_drawn_from() {
        let table = table(5);
        let params = SamplingParams { temperature: 0.5, seed: 9, ..SamplingParams::default() };
        let draws = DrawSeries::of(&params, TokenPosition { position: 21, generated: 2 }).unwrap();
        let step = |tokens, logits| SeqStep { tokens, start: 20, block_table: &table, logits, adapter: None };
        let batch = [step(&[7, 8, 9], LogitsRequest::DrawEach(draws)), step(&[7], LogitsRequest::Last)];
        let plan = StepPlan::new(&batch, &BOUNDS).unwrap();
        assert_eq!((plan.bucket, plan.sampled), (None, true));
        assert_eq!((plan.to_host.len(), &plan.to_host[0]), (1, &(3..4)));
        let rows: Vec<&[i32]> = words(&plan, plan.sections.draws).chunks(DRAW_WORDS).collect();
        for (offset, row) in rows[..3].iter().enumerate() {
            assert_eq!(*row, &draw_words(Some(&draws.at(offset)))[..], "{offset}");
        }
        assert!(rows.len() == 4 && rows[0] != rows[1]);
    }

    #[test]
    fn out_of_range_values_are_refused_before_conversion() {
        let (table, far) = (table(5), [BlockId(64)]);
        let step = |tokens, start, block_table| SeqStep {
            tokens,
            start,
            block_table,
            logits: LogitsRequest::No,
            adapter: None,
        };
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
