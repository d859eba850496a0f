//! Tiles: AMX-BF16.
//!
//! ```text
//!            B   6    7       two halves of a panel's chunk
//!   A  4         0    1       rows  0..16
//!      5         2    3       rows 16..32
//! ```
//!
//! The intrinsics are not stable in Rust, so the loop over chunks is written in assembly. The compiler never uses the
//! tile registers. A thread's tiles are released at the end of each call, which keeps its context small. Blocks of 32 ×
//! 32 outputs load as many tiles as they multiply. This hides all loads from the first-level cache and most from the
//! second.

use std::arch::asm;
use std::sync::OnceLock;

use super::{Bf16Operands, Bf16Unit, PANEL_CHUNK, ROW_STEP, TILE_ROWS};

/// Bytes of a row of a tile.
const ROW_BYTES: usize = 64;

/// Whether this machine has the tiles and the system permits them for this process. Requested once: the permission is
/// for the process, with all its current and later threads.
pub(super) fn permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| has_tiles() && request())
}

/// AMX-TILE and AMX-BF16, with the tiles of palette 1 that this file relies on: eight of 16 rows of 64 bytes.
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    if __cpuid(0).eax < 0x1d {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    let palette = __cpuid_count(0x1d, 1);
    let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    features >> 22 & 1 == 1
        && features >> 24 & 1 == 1
        && row_bytes as usize >= ROW_BYTES
        && tiles >= 8
        && rows as usize >= TILE_ROWS
}

/// Linux saves tiles only for processes that have requested it (`ARCH_REQ_XCOMP_PERM` of `XFEATURE_XTILE_DATA`,
/// Documentation/arch/x86/xstate.rst). It refuses if a thread's signal stack is too small for them.
#[cfg(target_os = "linux")]
fn request() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILE_DATA: libc::c_ulong = 18;
    // SAFETY: a request of the process for itself; it changes no memory of this program.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the tiles for blocks whose upper and lower halves have these numbers of rows.
///
/// # Safety
/// The process is permitted.
unsafe fn configure(upper: usize, lower: usize) {
    let (upper, lower, whole) = (upper as u8, lower as u8, TILE_ROWS as u8);
    let mut config =
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    config.rows[..8].copy_from_slice(&[upper, upper, lower, lower, upper, lower, whole, whole]);
    for (bytes, rows) in config.row_bytes.iter_mut().zip(config.rows) {
        *bytes = if rows > 0 { ROW_BYTES as u16 } else { 0 };
    }
    // SAFETY: a configuration within palette 1; the compiler does not use the tile registers.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            config = in(reg) &raw const config,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags)
        );
    }
}

/// # Safety
/// As [`super::multiply`], on a permitted process.
pub(super) unsafe fn multiply(rows: usize, operands: &Bf16Operands) {
    assert!(operands.inputs > 0, "a product without inputs");
    let whole = rows / ROW_STEP * ROW_STEP;
    // SAFETY: every block is inside the operands.
    unsafe {
        if whole == ROW_STEP {
            configure(TILE_ROWS, TILE_ROWS);
            two_by_two::<FROM_MEMORY>(operands, operands.next);
        } else if whole > 0 {
            configure(TILE_ROWS, TILE_ROWS);
            blocks(whole, operands);
        }
        let rest = rows - whole;
        if rest > TILE_ROWS {
            configure(TILE_ROWS, rest - TILE_ROWS);
            two_by_two::<FROM_MEMORY>(&operands.after(Bf16Unit::Amx, whole), operands.next);
        } else if rest > 0 {
            configure(rest, 0);
            one_by_two(&operands.after(Bf16Unit::Amx, whole));
        }
        asm!("tilerelease", options(nomem, nostack, preserves_flags));
    }
}

/// Several blocks of 32 rows of one panel. The first one leaves the panel's chunks in the cache. Each block prefetches
/// its part of the next panel.
///
/// # Safety
/// As [`multiply`], for whole tiles as configured.
unsafe fn blocks(rows: usize, operands: &Bf16Operands) {
    let chunk_lines = CHUNK_BYTES / LINE_BYTES;
    let lines = match chunk_lines.div_ceil(rows / ROW_STEP) {
        _ if operands.next.is_null() => 0,
        0..=2 => 2,
        3..=4 => 4,
        5..=8 => 8,
        _ => 16,
    };
    for row in (0..rows).step_by(ROW_STEP) {
        // SAFETY: the caller's contract; prefetches may point anywhere.
        unsafe {
            let block = operands.after(Bf16Unit::Amx, row);
            let next = operands.next.wrapping_add(row / ROW_STEP * operands.chunks() * lines * LINE_BYTES);
            match lines {
                0 => two_by_two::<0>(&block, next),
                2 => two_by_two::<2>(&block, next),
                4 => two_by_two::<4>(&block, next),
                8 => two_by_two::<8>(&block, next),
                _ => two_by_two::<16>(&block, next),
            }
        }
    }
}

/// Bytes of a chunk of a panel.
const CHUNK_BYTES: usize = 2 * PANEL_CHUNK;
const LINE_BYTES: usize = 64;
/// As [`two_by_two`]'s number of lines: the panel comes from memory, and is prefetched some chunks ahead.
const FROM_MEMORY: usize = usize::MAX;

/// Prefetches the chunk that begins `$ahead` bytes after the current one, into the second-level cache. 2 KiB reach the
/// bandwidth of plain loads; 6 KiB into either cache are slower.
macro_rules! request_chunk {
    ($ahead:literal) => {
        concat!(
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024, 1088, \
             1152, 1216, 1280, 1344, 1408, 1472, 1536, 1600, 1664, 1728, 1792, 1856, 1920, 1984\n",
            "prefetcht1 [{b} + \\line + ",
            $ahead,
            "]\n",
            ".endr"
        )
    };
}

/// Prefetches lines of the next panel, into the second-level cache.
macro_rules! request_next {
    ($lines:literal, $bytes:literal) => {
        concat!(".irp line, ", $lines, "\nprefetcht1 [{next} + \\line]\n.endr\n", "add {next}, ", $bytes)
    };
}

/// Up to 32 rows, as configured. Each chunk prefetches `LINES` lines of the next panel.
///
/// Rows of activations, and sums that were stored before, are read without filling the first-level cache. The panel's
/// slice then stays there for the next block, which is about a third faster.
///
/// # Safety
/// As [`multiply`].
unsafe fn two_by_two<const LINES: usize>(operands: &Bf16Operands, next: *const u8) {
    let chunks = operands.chunks();
    macro_rules! block {
        ($request:expr) => {
            // SAFETY: tiles are read and written within the operands' ranges, by the contract of `multiply`; a prefetch
            // may point anywhere.
            unsafe {
                asm!(
                    "test {accumulate:e}, {accumulate:e}",
                    "jz 2f",
                    "tileloaddt1 tmm0, [{c} + {c_stride}]",
                    "tileloaddt1 tmm1, [{c} + {c_stride} + 64]",
                    "tileloaddt1 tmm2, [{c_lower} + {c_stride}]",
                    "tileloaddt1 tmm3, [{c_lower} + {c_stride} + 64]",
                    "jmp 3f",
                    "2:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "3:",
                    "tileloaddt1 tmm4, [{a} + {row}]",
                    "tileloadd tmm6, [{b} + {row}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {row} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloaddt1 tmm5, [{a_lower} + {row}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    $request,
                    "add {a}, 1024",
                    "add {a_lower}, 1024",
                    "add {b}, 2048",
                    "dec {chunks}",
                    "jnz 3b",
                    "/* {next} */",
                    "tilestored [{c} + {c_stride}], tmm0",
                    "tilestored [{c} + {c_stride} + 64], tmm1",
                    "tilestored [{c_lower} + {c_stride}], tmm2",
                    "tilestored [{c_lower} + {c_stride} + 64], tmm3",
                    accumulate = in(reg) u32::from(operands.accumulate),
                    a = inout(reg) operands.a => _,
                    a_lower = inout(reg) operands.a.add(operands.a_tile) => _,
                    b = inout(reg) operands.b => _,
                    c = in(reg) operands.c,
                    c_lower = in(reg) operands.c.wrapping_add(TILE_ROWS * operands.c_stride),
                    c_stride = in(reg) 4 * operands.c_stride,
                    row = in(reg) ROW_BYTES,
                    chunks = inout(reg) chunks => _,
                    next = inout(reg) next => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        };
    }
    match LINES {
        FROM_MEMORY => block!(request_chunk!("2048")),
        16 => block!(request_next!(
            "0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960",
            "1024"
        )),
        8 => block!(request_next!("0, 64, 128, 192, 256, 320, 384, 448", "512")),
        4 => block!(request_next!("0, 64, 128, 192", "256")),
        2 => block!(request_next!("0, 64", "128")),
        _ => block!(""),
    }
}

/// Up to 16 rows, as configured, with a panel from memory.
///
/// # Safety
/// As [`multiply`].
unsafe fn one_by_two(operands: &Bf16Operands) {
    let chunks = operands.chunks();
    // SAFETY: as in `two_by_two`.
    unsafe {
        asm!(
            "test {accumulate:e}, {accumulate:e}",
            "jz 2f",
            "tileloadd tmm0, [{c} + {c_stride}]",
            "tileloadd tmm1, [{c} + {c_stride} + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "3:",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm6, [{b} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            request_chunk!("2048"),
            "add {a}, 1024",
            "add {b}, 2048",
            "dec {chunks}",
            "jnz 3b",
            "tilestored [{c} + {c_stride}], tmm0",
            "tilestored [{c} + {c_stride} + 64], tmm1",
            accumulate = in(reg) u32::from(operands.accumulate),
            a = inout(reg) operands.a => _,
            b = inout(reg) operands.b => _,
            c = in(reg) operands.c,
            c_stride = in(reg) 4 * operands.c_stride,
            row = in(reg) ROW_BYTES,
            chunks = inout(reg) chunks => _,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}
