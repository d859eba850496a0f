//! Divides copies of many pieces within a device into launches of the kernel that copies pieces (`copies.cu`) and
//! separate copies. Pure; used for GPUs and for emulated kernels.

use super::kernels::{COPY_PART, COPY_PIECES};

/// Longest piece of one launch, so that all pieces take similar times.
const PIECE_BYTES: usize = 2 << 20;
/// Alignment of pieces, which are whole multiples of it.
const PIECE_ALIGN: u64 = 16;
/// Threads of a block of the kernel.
pub const THREADS: u32 = 512;

/// Bytes that are copied together, by addresses in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPiece {
    /// Address of the source.
    pub from: u64,
    /// Address of the destination.
    pub into: u64,
    /// Length.
    pub bytes: usize,
}

/// One command to enqueue.
#[derive(Debug)]
pub enum CopyCommand {
    /// A piece with unaligned addresses or length. The device's own copy runs it, which takes as long as several
    /// aligned pieces.
    Alone(CopyPiece),
    /// One launch of the kernel.
    Together(Box<CopyKernelArg>, [u32; 3]),
}

/// The parameter of the kernel, as declared in `copies.cu`.
#[repr(C)]
#[derive(Debug)]
pub struct CopyKernelArg {
    from: [u64; COPY_PIECES],
    into: [u64; COPY_PIECES],
    bytes: [u32; COPY_PIECES],
}

/// Calls `enqueue` with one command after the other. No two pieces overlap.
///
/// # Errors
/// The first error of `enqueue`.
pub fn cut<E>(
    pieces: impl IntoIterator<Item = CopyPiece>,
    mut enqueue: impl FnMut(CopyCommand) -> Result<(), E>,
) -> Result<(), E> {
    let mut batch = Vec::with_capacity(COPY_PIECES);
    for piece in pieces {
        let all = piece.from | piece.into | piece.bytes as u64;
        if !all.is_multiple_of(PIECE_ALIGN) {
            enqueue(CopyCommand::Alone(piece))?;
            continue;
        }
        for at in (0..piece.bytes).step_by(PIECE_BYTES) {
            let bytes = PIECE_BYTES.min(piece.bytes - at);
            let (from, into) = (piece.from + at as u64, piece.into + at as u64);
            batch.push(CopyPiece { from, into, bytes });
            if batch.len() == COPY_PIECES {
                enqueue(together(&batch))?;
                batch.clear();
            }
        }
    }
    if batch.is_empty() { Ok(()) } else { enqueue(together(&batch)) }
}

/// One launch of at least one and at most [`COPY_PIECES`] pieces.
fn together(batch: &[CopyPiece]) -> CopyCommand {
    let mut pieces =
        Box::new(CopyKernelArg { from: [0; COPY_PIECES], into: [0; COPY_PIECES], bytes: [0; COPY_PIECES] });
    for (at, piece) in batch.iter().enumerate() {
        (pieces.from[at], pieces.into[at], pieces.bytes[at]) = (piece.from, piece.into, piece.bytes as u32);
    }
    let longest = batch.iter().map(|piece| piece.bytes).max().unwrap_or(0);
    CopyCommand::Together(pieces, [longest.div_ceil(COPY_PART) as u32, batch.len() as u32, 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_by_launches_that_are_full_and_pieces_that_fit() {
        let small =
            (0..300).map(|i| CopyPiece { from: i << 24, into: (1 << 40) + (i << 24), bytes: 64 << 10 });
        let odd = [(1, 0, 32), (0, 8, 32), (0, 0, 40)];
        let odd = odd.map(|(from, into, bytes)| CopyPiece { from: from + (1 << 50), into, bytes });
        let long = CopyPiece { from: 1 << 51, into: 1 << 52, bytes: (5 << 20) + 16 };
        let empty = CopyPiece { bytes: 0, ..long };
        let (mut alone, mut launches, mut bytes) = (Vec::new(), Vec::new(), 0);
        let cut = cut(small.chain(odd).chain([long, empty]), |part| {
            match part {
                CopyCommand::Alone(piece) => alone.push(piece),
                CopyCommand::Together(pieces, grid) => {
                    let used = grid[1] as usize;
                    assert!(pieces.bytes[..used].iter().all(|&bytes| bytes > 0 && bytes <= 2 << 20));
                    assert!(pieces.bytes[used..].iter().all(|&bytes| bytes == 0));
                    bytes += pieces.bytes.iter().map(|&bytes| bytes as usize).sum::<usize>();
                    launches.push(grid);
                }
            }
            Ok::<_, ()>(())
        });
        assert_eq!(cut, Ok(()));
        assert_eq!(alone, odd);
        // 303 pieces: the long one is divided into three.
        assert_eq!(launches, [[2, 128, 1], [2, 128, 1], [64, 47, 1]]);
        assert_eq!(bytes, 300 * (64 << 10) + long.bytes);
    }

    #[test]
    fn a_failed_enqueue_ends_the_copy() {
        let piece = CopyPiece { from: 3, into: 0, bytes: 1 };
        let mut enqueued = 0;
        let cut = cut([piece, piece], |_| {
            enqueued += 1;
            Err("full")
        });
        assert_eq!((cut, enqueued), (Err("full"), 1));
    }
}
