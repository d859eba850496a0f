//! Packing: rows of a checkpoint's matrices become panels, unchanged or quantized. Those of integers are in `integer`.

use super::super::arena::{AlignedBuffer, WeightArena, Zeroable};
use super::super::bf16::{self, Bf16Unit};
use super::super::kernel::{INTEGER_UNIT, PANEL, PanelBf16, PanelElement, PanelInt8};
use super::super::thread_pool::{JobPanicked, ThreadPool};
use super::integer::IntegerPanels;
use super::{Matrix, Panels, SharedPtr, TensorParts, WeightMode};
use crate::model::weights::{Tensor, WeightDtype};

impl Matrix {
    /// Packs the rows of all parts in order. Each part is `[outputs][inputs]`. `unit` is for bfloat16 mode.
    pub(in crate::compute::cpu) fn pack(
        threads: &mut ThreadPool,
        arena: &mut WeightArena,
        parts: TensorParts<'_, '_>,
        inputs: usize,
        mode: WeightMode,
        unit: Bf16Unit,
    ) -> Result<Self, JobPanicked> {
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum::<usize>();
        let all_bf16 = parts.iter().all(|(part, _)| part.dtype() == WeightDtype::Bf16);
        if mode.multiplies_integers()
            && let Some(panels) = IntegerPanels::pack(threads, arena, parts, inputs, mode)?
        {
            return Ok(Self { panels: Panels::Integers(panels), outputs, inputs });
        }
        let mut packer = PanelPacker { threads, arena, parts, inputs };
        let panels = match mode {
            WeightMode::Int8 => Panels::Int8(packer.pack(
                PanelInt8::panel_len(inputs),
                |part, start, out| part.read_f32(start, out),
                |rows, panel| quantize(rows, inputs, panel),
            )?),
            WeightMode::Bf16 if all_bf16 => Panels::Pairs(
                packer.pack(
                    bf16::panel_len(inputs),
                    |part, start, out| part.read_bf16_bits(start, out),
                    |rows, panel| pair(rows, inputs, unit, |weight: u16| weight, panel),
                )?,
                unit,
            ),
            WeightMode::Bf16 => Panels::Pairs(
                packer.pack(
                    bf16::panel_len(inputs),
                    |part, start, out| part.read_f32(start, out),
                    |rows, panel| pair(rows, inputs, unit, bf16::round, panel),
                )?,
                unit,
            ),
            WeightMode::F32 => packer.widened()?,
            // With integers: matrices that have none, and are not rounded to some.
            WeightMode::Stored | WeightMode::Integers | WeightMode::Integers8 | WeightMode::Integers4 => {
                if all_bf16 {
                    Panels::Bf16(packer.pack(
                        PanelBf16::panel_len(inputs),
                        |part, start, out| part.read_bf16_bits(start, out),
                        |rows, panel| transpose(rows, inputs, PanelBf16::column, panel),
                    )?)
                } else {
                    packer.widened()?
                }
            }
        };
        Ok(Self { panels, outputs, inputs })
    }
}

/// Packs the rows of `parts`, of `inputs` values each.
struct PanelPacker<'a, 'b> {
    threads: &'a mut ThreadPool,
    arena: &'a mut WeightArena,
    parts: TensorParts<'a, 'b>,
    inputs: usize,
}

impl PanelPacker<'_, '_> {
    /// Panels of f32.
    fn widened(&mut self) -> Result<Panels, JobPanicked> {
        let inputs = self.inputs;
        Ok(Panels::F32(self.pack(
            f32::panel_len(inputs),
            |part, start, out| part.read_f32(start, out),
            |rows, panel| transpose(rows, inputs, |position| position, panel),
        )?))
    }

    /// Makes panels in parallel. `fill` makes one panel of 32 rows.
    fn pack<R: Zeroable + Default, T: Zeroable>(
        &mut self,
        panel_len: usize,
        read: impl Fn(&Tensor<'_>, usize, &mut [R]) + Sync,
        fill: impl Fn(&[R], &mut [T]) + Sync,
    ) -> Result<AlignedBuffer<T>, JobPanicked> {
        let (parts, inputs) = (self.parts, self.inputs);
        let outputs: usize = parts.iter().map(|(_, outputs)| outputs).sum();
        let count = outputs.div_ceil(PANEL);
        let mut packed = self.arena.zeroed::<T>(count * panel_len);
        let base = SharedPtr(packed.as_mut_ptr());
        self.threads.run(&|worker| {
            let mut rows = vec![R::default(); PANEL * inputs];
            worker.each(count, |index| {
                // SAFETY: panels are disjoint, and each index is claimed by one worker.
                let panel = unsafe { std::slice::from_raw_parts_mut(base.at(index * panel_len), panel_len) };
                for (slot, row) in rows.chunks_exact_mut(inputs).enumerate() {
                    let output = index * PANEL + slot;
                    if output >= outputs {
                        row.fill(R::default());
                        continue;
                    }
                    let (mut part, mut local) = (0, output);
                    while local >= parts[part].1 {
                        local -= parts[part].1;
                        part += 1;
                    }
                    read(&parts[part].0, local * inputs, row);
                }
                fill(&rows, panel);
            });
        })?;
        Ok(packed)
    }
}

/// `column(position)` is the row whose value is at that position of a panel's row.
fn transpose<T: Copy>(rows: &[T], inputs: usize, column: impl Fn(usize) -> usize, panel: &mut [T]) {
    for (input, out) in panel.chunks_exact_mut(PANEL).enumerate() {
        for (position, out) in out.iter_mut().enumerate() {
            *out = rows[column(position) * inputs + input];
        }
    }
}

/// The layout of `bf16`. The padding of the inputs is zero already.
fn pair<T: Copy>(rows: &[T], inputs: usize, unit: Bf16Unit, bits: impl Fn(T) -> u16, panel: &mut [u16]) {
    for (column, row) in rows.chunks_exact(inputs).enumerate() {
        for (input, weight) in row.iter().enumerate() {
            panel[bf16::panel_position(unit, input, column)] = bits(*weight);
        }
    }
}

/// Per group of inputs a row of scales, then the rounded quotients.
///
/// A scale is the group's largest magnitude over 127, rounded up to bf16, so that no quotient leaves the range. The
/// error of a weight is at most half a scale.
pub(super) fn quantize(rows: &[f32], inputs: usize, panel: &mut [i8]) {
    for (group, packed) in panel.chunks_mut(PanelInt8::panel_len(PanelInt8::GROUP)).enumerate() {
        let from = group * PanelInt8::GROUP;
        let inputs_of_group = PanelInt8::GROUP.min(inputs - from);
        let (header, packed) = packed.split_at_mut(PanelInt8::HEADER);
        for (position, bytes) in header.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let column = PanelBf16::column(position);
            let weights = &rows[column * inputs + from..][..inputs_of_group];
            let scale = scale_of(weights);
            *bytes = scale.0.to_ne_bytes().map(u8::cast_signed);
            let scale = scale.widen() * INTEGER_UNIT;
            for (row, weight) in weights.iter().enumerate() {
                let quotient = if scale > 0.0 { weight / scale } else { 0.0 };
                // Saturates; NaN becomes 0.
                let rounded = quotient.round_ties_even().clamp(-127.0, 127.0) as i8;
                packed[PanelInt8::position(row, column)] = rounded;
            }
        }
    }
}

/// The smallest bf16 that is, times the unit of widened integers, at least the largest magnitude over 127.
fn scale_of(weights: &[f32]) -> PanelBf16 {
    let largest = weights.iter().fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
    let bits = (largest / 127.0 / INTEGER_UNIT).to_bits();
    PanelBf16(
        u16::try_from((bits >> 16) + u32::from(bits & 0xffff != 0))
            .expect("the upper half of a sum below 2^32"),
    )
}
