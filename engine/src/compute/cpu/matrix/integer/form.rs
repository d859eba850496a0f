//! Forms of grouped integers and their layout in memory.
//!
//! A weight is `factor * scale * quant` of its group, less a zero point or a minimum where the form has one. Integers,
//! scales and minima are those of the file. A strip of 16 outputs is a sequence of spans:
//!
//! ```text
//!   span    16 factors (f32) │ 16 factors of minima (f32), if any │ 16 zero points (u8), if any │ its groups
//!   group   scales: 16 bytes for each part, if any │ 16 minima (u8), if any │ integers of 32 inputs × 16 outputs
//!   8 bits  [8 quads of inputs][16 outputs][4 inputs], 512 bytes
//!   4 bits  [4 pairs of quads][16 outputs][4 inputs], 256 bytes: quads j and j + 4 share bytes
//! ```
//!
//! Signed integers are stored plus 128, because the units multiply unsigned by signed ones. A strip is one vector wide,
//! so that the sums of eight rows stay in registers.

pub(super) use crate::compute::cpu::bf16::{BIAS, FIRST_BIAS, GROUP, GROUP_WORDS, SCALE, SUM};

/// Outputs of a strip.
pub(super) const STRIP: usize = 16;
/// What a group adds to its sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Offset {
    /// Nothing.
    None,
    /// A zero point for each output and span, which is subtracted from the integers.
    Zero,
    /// A minimum for each output and group, with a factor of its own for each span, which is subtracted from the
    /// weights.
    Minimum,
}

/// A form of grouped integers.
pub(super) trait Form {
    /// Two integers in a byte.
    const NIBBLES: bool;
    /// Integers are stored plus 128.
    const BIASED: bool;
    /// Parts of a group with integer scales of their own: 0, 1 or 2.
    const SCALES: usize;
    const OFFSET: Offset;

    /// Bytes of a span before its groups.
    const SPAN_HEADER: usize = match Self::OFFSET {
        Offset::None => 4 * STRIP,
        Offset::Zero => 5 * STRIP,
        Offset::Minimum => 8 * STRIP,
    };
    /// Bytes of a group before its integers.
    const GROUP_HEADER: usize = match Self::OFFSET {
        Offset::Minimum => (Self::SCALES + 1) * STRIP,
        Offset::None | Offset::Zero => Self::SCALES * STRIP,
    };
    /// Bytes of a group's integers.
    const VALUES: usize = if Self::NIBBLES { GROUP * STRIP / 2 } else { GROUP * STRIP };

    /// Bytes of a strip of `groups` groups.
    fn strip_bytes(groups: usize, span: usize) -> usize {
        groups.div_ceil(span) * Self::SPAN_HEADER + groups * (Self::GROUP_HEADER + Self::VALUES)
    }

    /// Bytes of a strip before the group, and before the span that it is in.
    fn position(group: usize, span: usize) -> (usize, usize) {
        let group_bytes = Self::GROUP_HEADER + Self::VALUES;
        let span_at = group / span * (Self::SPAN_HEADER + span * group_bytes);
        (span_at + Self::SPAN_HEADER + group % span * group_bytes, span_at)
    }
}

/// Signed 8-bit integers with a factor.
pub(super) struct Plain8;
/// 4-bit integers with a factor and a zero point.
pub(super) struct Zero4;
/// 4-bit integers with a scale and a minimum.
pub(super) struct Minimum4;
/// The same with 5 bits, stored in 8.
pub(super) struct Minimum8;
/// Signed integers with a scale for 16 of them.
pub(super) struct Halves8;

impl Form for Plain8 {
    const NIBBLES: bool = false;
    const BIASED: bool = true;
    const SCALES: usize = 0;
    const OFFSET: Offset = Offset::None;
}
impl Form for Zero4 {
    const NIBBLES: bool = true;
    const BIASED: bool = false;
    const SCALES: usize = 0;
    const OFFSET: Offset = Offset::Zero;
}
impl Form for Minimum4 {
    const NIBBLES: bool = true;
    const BIASED: bool = false;
    const SCALES: usize = 1;
    const OFFSET: Offset = Offset::Minimum;
}
impl Form for Minimum8 {
    const NIBBLES: bool = false;
    const BIASED: bool = false;
    const SCALES: usize = 1;
    const OFFSET: Offset = Offset::Minimum;
}
impl Form for Halves8 {
    const NIBBLES: bool = false;
    const BIASED: bool = true;
    const SCALES: usize = 2;
    const OFFSET: Offset = Offset::None;
}

/// One strip by rows of activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct StripOperands {
    /// The strip's first byte.
    pub(super) strip: *const u8,
    /// The first group that is multiplied, which begins a span. If it is not the row's first, the sums continue.
    pub(super) first: usize,
    /// The end of the groups that are multiplied.
    pub(super) end: usize,
    /// Groups of a span.
    pub(super) span: usize,
    /// Whether the strip comes from memory, so that bytes ahead are requested.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vectors request bytes"))]
    pub(super) ahead: bool,
    /// The first row, in groups of [`GROUP_WORDS`] words.
    pub(super) x: *const u32,
    /// Words from one row to the next.
    pub(super) x_stride: usize,
    /// Sums: [`STRIP`] values of each row.
    pub(super) out: *mut f32,
    /// Values from one row of sums to the next.
    pub(super) out_stride: usize,
}

impl StripOperands {
    /// The same from `rows` rows on.
    ///
    /// # Safety
    /// There are that many rows.
    pub(super) unsafe fn after(&self, rows: usize) -> Self {
        // SAFETY: the caller's contract.
        unsafe {
            Self { x: self.x.add(rows * self.x_stride), out: self.out.add(rows * self.out_stride), ..*self }
        }
    }
}
