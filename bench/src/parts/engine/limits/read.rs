//! How fast all threads together read the same memory repeatedly, as a decode step reads its weights.
//!
//! A limit is only valid if it considers two factors besides memory itself:
//!
//! - **Number of bytes.** Part of the bytes stays in the last-level cache until the next pass, so that a smaller
//!   buffer is read faster. A step is therefore compared with a loop over as many bytes.
//! - **Order of requests.** The number of streams and the distance of prefetches change the speed, and the best
//!   choice depends on the machine. Several loops therefore run, and the fastest counts.
#![allow(unsafe_code, reason = "prefetches, and a call that its own check guards; see each block")]

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct CacheLine([u64; 8]);

impl CacheLine {
    pub(super) const ONES: Self = Self([1; 8]);
}

/// Lines of one piece of work, 1 MiB, so that the cost of a start is negligible.
const PIECE_LINES: usize = (1 << 20) / size_of::<CacheLine>();
/// Passes over the buffer, without a pause.
const PASSES: usize = 4;

/// Prefetch into the first cache.
const NEAR: i32 = 3;
/// Prefetch into the second cache.
const FAR: i32 = 2;
/// `_MM_HINT_T0` and `_MM_HINT_T1`.
#[cfg(target_arch = "x86_64")]
const _: () = assert!(NEAR == std::arch::x86_64::_MM_HINT_T0 && FAR == std::arch::x86_64::_MM_HINT_T1);

/// A loop over a piece. Its result depends on every line, so that the compiler omits none.
type ReadLoop = fn(&[CacheLine]) -> u64;

/// Parallel streams, lines requested ahead, and the cache that is prefetched into.
const WAYS: [ReadLoop; 6] = [
    read::<1, 0, NEAR>,
    read::<1, 64, FAR>,
    read::<1, 128, NEAR>,
    read::<2, 32, NEAR>,
    read::<4, 0, NEAR>,
    read::<4, 32, NEAR>,
];

/// Which thread reads which piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceOrder {
    /// Each thread takes the next piece that is not taken.
    Next,
    /// Each thread reads its own stretch from front to back, as workers of the engine's thread pool do.
    Own,
}

/// Bytes per second of `threads` threads that read `lines` [`PASSES`] times, by the fastest loop.
pub(super) fn fastest(lines: &[CacheLine], threads: usize) -> f64 {
    let ways = WAYS.iter().flat_map(|way| [(way, PieceOrder::Next), (way, PieceOrder::Own)]);
    let shortest =
        ways.map(|(way, share)| passes(*way, share, lines, threads)).min().unwrap_or(Duration::MAX);
    let bytes = (PASSES * size_of_val(lines)) as f64;
    bytes / shortest.as_secs_f64()
}

/// The threads read all pieces and wait for each other only at the beginning and the end.
fn passes(way: ReadLoop, share: PieceOrder, lines: &[CacheLine], threads: usize) -> Duration {
    let pieces: Vec<_> = lines.chunks(PIECE_LINES).collect();
    let (next, together) = (&AtomicUsize::new(0), &Barrier::new(threads));
    let work = |thread: usize| {
        let mut sum = 0_u64;
        let own = stretch(lines, thread, threads);
        together.wait();
        let start = Instant::now();
        match share {
            PieceOrder::Next => {
                while let Some(piece) = claim(next, &pieces) {
                    sum = sum.wrapping_add(way(piece));
                }
            }
            PieceOrder::Own => {
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

/// The lines of one thread.
fn stretch(lines: &[CacheLine], thread: usize, threads: usize) -> &[CacheLine] {
    &lines[thread * lines.len() / threads..(thread + 1) * lines.len() / threads]
}

fn claim<'a>(next: &AtomicUsize, pieces: &[&'a [CacheLine]]) -> Option<&'a [CacheLine]> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    (index < PASSES * pieces.len()).then(|| pieces[index % pieces.len()])
}

/// The sum of all words, read in `STREAMS` parallel streams with `AHEAD` lines prefetched.
fn read<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[CacheLine]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was checked.
            return unsafe { read_avx512::<STREAMS, AHEAD, CACHE>(lines) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was checked.
            return unsafe { read_avx2::<STREAMS, AHEAD, CACHE>(lines) };
        }
    }
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_avx512<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[CacheLine]) -> u64 {
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[CacheLine]) -> u64 {
    read_lines::<STREAMS, AHEAD, CACHE>(lines)
}

#[inline(always)]
fn read_lines<const STREAMS: usize, const AHEAD: usize, const CACHE: i32>(lines: &[CacheLine]) -> u64 {
    let span = lines.len() / STREAMS;
    let (whole, rest) = lines.split_at(span * STREAMS);
    let streams: [&[CacheLine]; STREAMS] = std::array::from_fn(|stream| &whole[stream * span..][..span]);
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
fn request<const CACHE: i32>(line: *const CacheLine) {
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
    fn every_read_loop_covers_every_word() {
        for count in [0, 1, 3, PIECE_LINES, 2 * PIECE_LINES + 5] {
            let lines: Vec<_> =
                (0..count).map(|i| CacheLine(std::array::from_fn(|word| (8 * i + word) as u64))).collect();
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
        let lines = vec![CacheLine::ONES; 3 * PIECE_LINES + 1];
        let pieces: Vec<_> = lines.chunks(PIECE_LINES).collect();
        let next = AtomicUsize::new(0);
        let claimed = std::iter::from_fn(|| claim(&next, &pieces)).map(<[CacheLine]>::len).sum::<usize>();
        assert_eq!(claimed, PASSES * lines.len());
        let own: Vec<_> = (0..4).map(|thread| stretch(&lines, thread, 4).len()).collect();
        assert_eq!(own.iter().sum::<usize>(), lines.len());
        assert!(own.iter().all(|len| len.abs_diff(lines.len() / 4) <= 1), "{own:?}");
    }
}
