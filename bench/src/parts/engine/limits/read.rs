//! How fast all threads together read a stretch of memory again and again, as a decode step reads its weights.
//!
//! Two things decide that more than the memory itself, so a limit must have both right or it is none:
//!
//! - **How many bytes.** A part of what was read stays in the last-level cache until the next pass: on a 2-core guest
//!   with 480 MiB of it (2026-11-21) the same loop reads 128 MiB at 70 GB/s, 396 MiB at 42 and 2 GiB at 39. So a step
//!   is compared with a loop over as many bytes as it reads.
//! - **How they are asked for.** One stream of plain loads read 34 GB/s there, the same with lines requested ahead
//!   into the second cache 47, four streams 44; on another day and machine the order differs. So several loops run,
//!   and the fastest counts.
#![allow(unsafe_code)] // prefetches, and a call that its own check guards; see each block

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Line([u64; 8]);

impl Line {
    pub(super) const ONES: Self = Self([1; 8]);
}

/// Lines of one piece of work, 1 MiB: long enough that where it begins costs nothing.
const PIECE_LINES: usize = (1 << 20) / size_of::<Line>();
/// Passes over the stretch, back to back.
const PASSES: usize = 4;

/// Into the first cache.
const NEAR: i32 = 3;
/// Into the second.
const FAR: i32 = 2;
/// `_MM_HINT_T0` and `_MM_HINT_T1`.
#[cfg(target_arch = "x86_64")]
const _: () = assert!(NEAR == std::arch::x86_64::_MM_HINT_T0 && FAR == std::arch::x86_64::_MM_HINT_T1);

/// A loop over a piece. Its result depends on every line, so that none can be left out.
type Way = fn(&[Line]) -> u64;

/// Streams side by side, lines asked for ahead, and into which cache.
const WAYS: [Way; 6] = [
    read::<1, 0, NEAR>,
    read::<1, 64, FAR>,
    read::<1, 128, NEAR>,
    read::<2, 32, NEAR>,
    read::<4, 0, NEAR>,
    read::<4, 32, NEAR>,
];

/// Who reads which piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// Each thread the next one that nobody has.
    Next,
    /// Each thread those of its own stretch, from front to back, as members of the engine's team do.
    Own,
}

/// Bytes per second of `threads` threads that read `lines` [`PASSES`] times, by the fastest loop.
pub(super) fn fastest(lines: &[Line], threads: usize) -> f64 {
    let ways = WAYS.iter().flat_map(|way| [(way, Share::Next), (way, Share::Own)]);
    let shortest =
        ways.map(|(way, share)| passes(*way, share, lines, threads)).min().unwrap_or(Duration::MAX);
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    let bytes = (PASSES * size_of_val(lines)) as f64;
    bytes / shortest.as_secs_f64()
}

/// The threads read piece after piece, and never wait for each other between.
fn passes(way: Way, share: Share, lines: &[Line], threads: usize) -> Duration {
    let pieces: Vec<_> = lines.chunks(PIECE_LINES).collect();
    let (next, together) = (&AtomicUsize::new(0), &Barrier::new(threads));
    let work = |thread: usize| {
        let mut sum = 0_u64;
        let own = stretch(lines, thread, threads);
        together.wait();
        let start = Instant::now();
        match share {
            Share::Next => {
                while let Some(piece) = claim(next, &pieces) {
                    sum = sum.wrapping_add(way(piece));
                }
            }
            Share::Own => {
                for piece in (0..PASSES).flat_map(|_| own.chunks(PIECE_LINES)) {
                    sum = sum.wrapping_add(way(piece));
                }
            }
        }
        together.wait();
        black_box(sum);
        start.elapsed()
    };
    std::thread::scope(|scope| {
        for thread in 1..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
        work(0)
    })
}

/// A thread's own lines.
fn stretch(lines: &[Line], thread: usize, threads: usize) -> &[Line] {
    &lines[thread * lines.len() / threads..(thread + 1) * lines.len() / threads]
}

fn claim<'a>(next: &AtomicUsize, pieces: &[&'a [Line]]) -> Option<&'a [Line]> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    (index < PASSES * pieces.len()).then(|| pieces[index % pieces.len()])
}

/// The sum of all words, read in `STREAMS` places side by side with `AHEAD` lines requested before they are needed.
fn read<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[Line]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature has been seen.
            return unsafe { read_avx512::<STREAMS, AHEAD, CACHE>(lines) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature has been seen.
            return unsafe { read_avx2::<STREAMS, AHEAD, CACHE>(lines) };
        }
    }
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_avx512<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[Line]) -> u64 {
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[Line]) -> u64 {
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[inline(always)]
fn read_lines<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[Line]) -> u64 {
    let span = lines.len() / STREAMS;
    let (whole, rest) = lines.split_at(span * STREAMS);
    let streams: [&[Line]; STREAMS] = std::array::from_fn(|stream| &whole[stream * span..][..span]);
    let mut sums = [[0_u64; 8]; STREAMS];
    for index in 0..span {
        for (stream, sums) in streams.iter().zip(&mut sums) {
            let line = &stream[index];
            if AHEAD > 0 {
                request::<CACHE>(std::ptr::from_ref(line).wrapping_add(AHEAD));
            }
            for (sum, word) in sums.iter_mut().zip(line.0) {
                *sum = sum.wrapping_add(word);
            }
        }
    }
    let words = sums.iter().flatten().chain(rest.iter().flat_map(|line| &line.0));
    words.fold(0, |sum, word| sum.wrapping_add(*word))
}

#[inline(always)]
fn request<const CACHE: i32>(line: *const Line) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may point anywhere.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<CACHE>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_reads_every_word_of_every_piece() {
        for count in [0, 1, 3, PIECE_LINES, 2 * PIECE_LINES + 5] {
            let lines: Vec<_> =
                (0..count).map(|i| Line(std::array::from_fn(|word| (8 * i + word) as u64))).collect();
            let words = 8 * count as u64;
            let sum = words * words.saturating_sub(1) / 2;
            for (number, way) in WAYS.iter().enumerate() {
                let read = lines.chunks(PIECE_LINES).map(way).sum::<u64>();
                assert_eq!(read, sum, "way {number}, {count} lines");
            }
        }
    }

    #[test]
    fn every_piece_is_claimed_once_in_each_pass() {
        let lines = vec![Line::ONES; 3 * PIECE_LINES + 1];
        let pieces: Vec<_> = lines.chunks(PIECE_LINES).collect();
        let next = AtomicUsize::new(0);
        let claimed = std::iter::from_fn(|| claim(&next, &pieces)).map(<[Line]>::len).sum::<usize>();
        assert_eq!(claimed, PASSES * lines.len());
        let own: Vec<_> = (0..4).map(|thread| stretch(&lines, thread, 4).len()).collect();
        assert_eq!(own.iter().sum::<usize>(), lines.len());
        assert!(own.iter().all(|len| len.abs_diff(lines.len() / 4) <= 1), "{own:?}");
    }
}
