//! Products with grouped integers: integers of 8 or 4 bits times activations that are rounded to 8 bits.
//!
//! Weights keep the integers of their file ([`IntegerGroup`]), in groups of 32 inputs. A group of 32 activations of a
//! row is rounded to signed 8 bits. Its scale is the largest magnitude over 127, and ties go to the even integer. The
//! sum of a group is an exact integer. Groups then follow one another in one chain of f32 multiply-adds, which `scalar`
//! defines. Every unit keeps this order for any number of rows, so prefill, decode, any batch and any machine give the
//! same bits.
//!
//! A panel of 32 outputs is two strips of 16 (`form`). Its rows may come from tensors of different forms, so each panel
//! has a form of its own.
#![allow(unsafe_code, reason = "vector intrinsics and raw pointers; the contracts are on the kernels")]

#[cfg(target_arch = "x86_64")]
mod avx2;
mod form;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::ops::Range;

use self::form::{Form, Halves8, Minimum4, Minimum8, Offset, Plain8, STRIP, StripOperands, Zero4};
use super::super::arena::{AlignedBuffer, WeightArena};
use super::super::isa::Isa;
use super::super::kernel::PANEL;
use super::super::rows::SharedPtr;
use super::super::thread_pool::{JobPanicked, ThreadPool};
use super::{TensorParts, WeightMode};
use crate::model::weights::{GROUP, IntegerForm, IntegerGroup, IntegerKind, Tensor};

/// Rows up to which an item streams its panels once.
pub(super) const FEW_ROWS: usize = 8;
/// Rows of an item of many rows.
pub(super) const BLOCK_ROWS: usize = 128;
/// Groups of a slice, if there are many rows.
const SLICE_GROUPS: usize = 32;

const _: () = assert!(GROUP == form::GROUP && PANEL == 2 * STRIP);

/// A packed matrix of integers.
#[derive(Debug)]
pub(super) struct IntegerPanels {
    bytes: AlignedBuffer<u8>,
    panels: Vec<IntegerPanel>,
    inputs: usize,
}

/// Where a panel begins, and its form.
#[derive(Clone, Copy, Debug)]
struct IntegerPanel {
    start: usize,
    form: IntegerForm,
}

/// Calls a function with the type of a form.
macro_rules! with_form {
    ($kind:expr, $function:ident, $($arg:expr),*) => {
        match $kind {
            IntegerKind::Plain8 => $function::<Plain8>($($arg),*),
            IntegerKind::Zero4 => $function::<Zero4>($($arg),*),
            IntegerKind::Minimum4 => $function::<Minimum4>($($arg),*),
            IntegerKind::Minimum8 => $function::<Minimum8>($($arg),*),
            IntegerKind::Halves8 => $function::<Halves8>($($arg),*),
        }
    };
}

/// Bytes of a strip of `groups` groups.
fn strip_bytes(form: IntegerForm, groups: usize) -> usize {
    fn of<F: Form>(groups: usize, span: usize) -> usize {
        F::strip_bytes(groups, span)
    }
    with_form!(form.kind, of, groups, form.span)
}

/// The form of each panel of a matrix of `parts`. `None` if a part is not integers and the mode does not round it, or
/// parts of different forms share a panel.
fn forms(parts: TensorParts<'_, '_>, inputs: usize, mode: WeightMode) -> Option<Vec<IntegerForm>> {
    let mut forms = Vec::new();
    // Rows of the last panel.
    let mut filled = PANEL;
    for (part, rows) in parts.iter().filter(|(_, rows)| *rows > 0) {
        let form = part.integer_form(inputs).or_else(|| rounded_form(mode))?;
        let into_last = (*rows).min(PANEL - filled);
        if into_last > 0 && forms.last() != Some(&form) {
            return None;
        }
        let others = rows - into_last;
        forms.resize(forms.len() + others.div_ceil(PANEL), form);
        filled = if others == 0 { filled + into_last } else { (others - 1) % PANEL + 1 };
    }
    Some(forms)
}

/// The form that weights are rounded to.
fn rounded_form(mode: WeightMode) -> Option<IntegerForm> {
    let kind = match mode {
        WeightMode::Integers8 => IntegerKind::Plain8,
        WeightMode::Integers4 => IntegerKind::Zero4,
        WeightMode::Integers | WeightMode::Stored | WeightMode::F32 | WeightMode::Int8 | WeightMode::Bf16 => {
            return None;
        }
    };
    Some(IntegerForm { kind, span: 1 })
}

impl IntegerPanels {
    /// Packs the rows of all parts in order. `None` if they have no common form, see [`forms`].
    pub(super) fn pack(
        threads: &mut ThreadPool,
        arena: &mut WeightArena,
        parts: TensorParts<'_, '_>,
        inputs: usize,
        mode: WeightMode,
    ) -> Result<Option<Self>, JobPanicked> {
        let Some(forms) = forms(parts, inputs, mode) else { return Ok(None) };
        let groups = inputs.div_ceil(GROUP);
        let mut bytes = 0;
        let place = |form| {
            let panel = IntegerPanel { start: bytes, form };
            bytes += 2 * strip_bytes(form, groups);
            panel
        };
        let panels: Vec<IntegerPanel> = forms.into_iter().map(place).collect();
        let mut packed = arena.zeroed::<u8>(bytes);
        let base = SharedPtr(packed.as_mut_ptr());
        threads.run(&|worker| {
            worker.each(panels.len(), |index| {
                let IntegerPanel { start, form } = panels[index];
                let strip = strip_bytes(form, groups);
                // SAFETY: panels are disjoint, and each index is claimed by one worker.
                let panel = unsafe { std::slice::from_raw_parts_mut(base.at(start), 2 * strip) };
                for column in 0..PANEL {
                    let Some((part, row)) = row_of(parts, index * PANEL + column) else { break };
                    let strip = &mut panel[column / STRIP * strip..][..strip];
                    for group in 0..groups {
                        let read = read_group(part, row * inputs, inputs, group, form);
                        with_form!(form.kind, write, strip, form.span, group, column % STRIP, &read);
                    }
                }
            });
        })?;
        Ok(Some(Self { bytes: packed, panels, inputs }))
    }

    /// Bytes that one pass over the matrix reads.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// One row of the matrix: the bits that a conversion of its integers to f32 gives.
    pub(super) fn row(&self, output: usize, out: &mut [f32]) {
        let (panel, column) = (self.panels[output / PANEL], output % PANEL);
        let strip = strip_bytes(panel.form, self.inputs.div_ceil(GROUP));
        let strip = &self.bytes[panel.start + column / STRIP * strip..][..strip];
        for (group, out) in out[..self.inputs].chunks_mut(GROUP).enumerate() {
            let read = with_form!(panel.form.kind, read, strip, panel.form.span, group, column % STRIP);
            for (input, out) in out.iter_mut().enumerate() {
                *out = read.value(panel.form.kind, input);
            }
        }
    }

    /// Sums of `rows` rows of activations, from `x` on, with some panels: for each panel [`PANEL`] values of each row.
    ///
    /// Many rows are multiplied slice by slice of the inputs: the slices of the panels stay in the second-level cache,
    /// and those of a few rows in the first.
    ///
    /// # Safety
    /// `x` has that many rows of this matrix's inputs, and no code writes them meanwhile. `isa` is of this machine.
    pub(super) unsafe fn multiply(
        &self,
        isa: Isa,
        panels: Range<usize>,
        (x, x_stride): (*const u32, usize),
        rows: usize,
        sums: &mut [f32],
    ) {
        let groups = self.inputs.div_ceil(GROUP);
        let panels = &self.panels[panels];
        assert!(sums.len() >= rows * panels.len() * PANEL, "sums of all rows and panels");
        // A slice begins a span in every panel.
        let sliced =
            rows > FEW_ROWS && panels.iter().all(|panel| SLICE_GROUPS.is_multiple_of(panel.form.span));
        let slice = if sliced { SLICE_GROUPS } else { groups.max(1) };
        for first in (0..groups).step_by(slice) {
            for row in (0..rows).step_by(FEW_ROWS) {
                for (panel, sums) in panels.iter().zip(sums.chunks_exact_mut(rows * PANEL)) {
                    let strip = strip_bytes(panel.form, groups);
                    let bytes = &self.bytes[panel.start..][..2 * strip];
                    for (half, bytes) in bytes.chunks_exact(strip).enumerate() {
                        let call = StripOperands {
                            strip: bytes.as_ptr(),
                            first,
                            end: groups.min(first + slice),
                            span: panel.form.span,
                            ahead: rows <= FEW_ROWS,
                            x: x.wrapping_add(row * x_stride),
                            x_stride,
                            out: sums[row * PANEL + half * STRIP..].as_mut_ptr(),
                            out_stride: PANEL,
                        };
                        let rows = FEW_ROWS.min(rows - row);
                        // SAFETY: the strip has all groups, `sums` has a panel for each row, and the caller's contract.
                        unsafe { with_form!(panel.form.kind, multiply, isa, rows, &call) };
                    }
                }
            }
        }
    }
}

/// The part that has a row of the matrix, and the row's number in it.
fn row_of<'a, 'b>(parts: TensorParts<'a, 'b>, output: usize) -> Option<(&'a Tensor<'b>, usize)> {
    let mut local = output;
    for (part, rows) in parts {
        if local < *rows {
            return Some((part, local));
        }
        local -= rows;
    }
    None
}

/// The integers of a group of the row that begins at `start`: stored ones, or rounded weights.
fn read_group(
    part: &Tensor<'_>,
    start: usize,
    inputs: usize,
    group: usize,
    form: IntegerForm,
) -> IntegerGroup {
    let first = group * GROUP;
    if part.integer_form(inputs).is_some() {
        return part.read_group(start + first);
    }
    let mut weights = [0.0; GROUP];
    let weights = &mut weights[..GROUP.min(inputs - first)];
    part.read_f32(start + first, weights);
    match form.kind {
        IntegerKind::Zero4 => IntegerGroup::rounded_to_4(weights),
        IntegerKind::Plain8 | IntegerKind::Minimum4 | IntegerKind::Minimum8 | IntegerKind::Halves8 => {
            IntegerGroup::rounded_to_8(weights)
        }
    }
}

/// Writes one output's group into its strip.
fn write<F: Form>(strip: &mut [u8], span: usize, group: usize, column: usize, read: &IntegerGroup) {
    let (at, span_at) = F::position(group, span);
    let header = &mut strip[span_at..][..F::SPAN_HEADER];
    let mut number = |index: usize, value: f32| {
        header[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
    };
    number(column, read.factor);
    match F::OFFSET {
        Offset::None => {}
        Offset::Zero => header[4 * STRIP + column] = read.offset,
        Offset::Minimum => number(STRIP + column, read.minimum_factor),
    }
    let (header, values) = strip[at..][..F::GROUP_HEADER + F::VALUES].split_at_mut(F::GROUP_HEADER);
    for (part, scale) in read.scales.iter().enumerate().take(F::SCALES) {
        header[part * STRIP + column] = scale.cast_unsigned();
    }
    if F::OFFSET == Offset::Minimum {
        header[F::SCALES * STRIP + column] = read.offset;
    }
    for (input, quant) in read.quants.iter().enumerate() {
        let (index, shift) = value_index::<F>(input, column);
        let stored = quant.cast_unsigned().wrapping_add(if F::BIASED { 128 } else { 0 });
        values[index] |= stored << shift;
    }
}

/// Reads one output's group from its strip, as [`write`] got it.
fn read<F: Form>(strip: &[u8], span: usize, group: usize, column: usize) -> IntegerGroup {
    let (at, span_at) = F::position(group, span);
    let (header, values) = strip[at..][..F::GROUP_HEADER + F::VALUES].split_at(F::GROUP_HEADER);
    let span = &strip[span_at..][..F::SPAN_HEADER];
    let mut read = IntegerGroup { factor: scalar::f32_at(span, column), ..IntegerGroup::default() };
    for (part, scale) in read.scales.iter_mut().enumerate().take(F::SCALES.max(1)) {
        *scale = header.get(part * STRIP + column).map_or(1, |scale| scale.cast_signed());
    }
    if F::SCALES == 1 {
        read.scales[1] = read.scales[0];
    }
    match F::OFFSET {
        Offset::None => {}
        Offset::Zero => read.offset = span[4 * STRIP + column],
        Offset::Minimum => {
            read.minimum_factor = scalar::f32_at(span, STRIP + column);
            read.offset = header[F::SCALES * STRIP + column];
        }
    }
    for (input, quant) in read.quants.iter_mut().enumerate() {
        let (index, shift) = value_index::<F>(input, column);
        let stored = if F::NIBBLES { (values[index] >> shift) & 15 } else { values[index] };
        *quant = stored.wrapping_sub(if F::BIASED { 128 } else { 0 }).cast_signed();
    }
    read
}

/// The byte of an integer among those of its group, and its first bit.
fn value_index<F: Form>(input: usize, column: usize) -> (usize, u32) {
    let (quad, lane) = (input / 4, input % 4);
    let (line, shift) = match (F::NIBBLES, quad) {
        (true, 4..) => (quad - 4, 4),
        (true, _) | (false, _) => (quad, 0),
    };
    ((line * STRIP + column) * 4 + lane, shift)
}

/// Multiplies rows with a kernel, as many at once as it takes.
#[cfg(target_arch = "x86_64")]
macro_rules! by_rows {
    ($unit:ident, $form:ty, $rows:expr, $call:expr, [$($at_once:literal),*]) => {{
        let mut done = 0;
        $(while $rows - done >= $at_once {
            $unit::rows::<$form, $at_once>(&$call.after(done));
            done += $at_once;
        })*
    }};
}

/// Rows by one strip, on the best unit of the instruction set.
///
/// # Safety
/// Strip, rows and sums are valid for what `call` says, and `isa` is of this machine.
unsafe fn multiply<F: Form>(isa: Isa, rows: usize, call: &StripOperands) {
    // SAFETY: the caller's contract. An instruction set of this machine has its unit, and VNNI is detected.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if is_x86_feature_detected!("avx512vnni") => {
                by_rows!(vnni, F, rows, call, [8, 4, 2, 1]);
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => by_rows!(avx2, F, rows, call, [4, 2, 1]),
            Isa::Portable => (0..rows).for_each(|row| scalar::row::<F>(&call.after(row))),
        }
    }
}

#[cfg(test)]
mod tests;
