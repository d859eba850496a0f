//! Products with integers, bit for bit: units against the reference kernel, and the same products divided otherwise.

use super::*;
use crate::compute::cpu::bf16::{Bf16Unit, IntegerBuffer, ProductInputs};
use crate::compute::cpu::matrix::{Matrix, Panels, Product, SLICE_VALUES};
use crate::compute::cpu::rows::Rows;
use crate::model::weights::Weights;

/// Numbers of GGUF's types in a file, and bytes of 256 values of each.
const Q4_0: (u32, usize) = (2, 144);
const Q4_1: (u32, usize) = (3, 160);
const Q8_0: (u32, usize) = (8, 272);
const Q2_K: (u32, usize) = (10, 84);
const Q3_K: (u32, usize) = (11, 110);
const Q4_K: (u32, usize) = (12, 144);
const Q5_K: (u32, usize) = (13, 176);
const Q6_K: (u32, usize) = (14, 210);
const IQ4_XS: (u32, usize) = (23, 136);

const KINDS: [IntegerKind; 5] = [
    IntegerKind::Plain8,
    IntegerKind::Zero4,
    IntegerKind::Minimum4,
    IntegerKind::Minimum8,
    IntegerKind::Halves8,
];

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32 % end
    }

    fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }

    /// A group with the whole range of a kind, and every second time with its extremes only.
    fn group(&mut self, kind: IntegerKind, extreme: bool) -> IntegerGroup {
        let (least, most, scale, offset) = match kind {
            IntegerKind::Plain8 => (-128, 127, 1, 0),
            IntegerKind::Zero4 => (0, 15, 1, 15),
            IntegerKind::Minimum4 => (0, 15, 63, 63),
            IntegerKind::Minimum8 => (0, 31, 63, 63),
            // IQ4_XS has the largest products.
            IntegerKind::Halves8 => (-127, 127, -32, 0),
        };
        let mut group = IntegerGroup {
            factor: self.below(1000) as f32 / 1.0e5,
            minimum_factor: self.below(1000) as f32 / 1.0e5,
            offset: if extreme { offset } else { self.below(u32::from(offset) + 1) as u8 },
            ..IntegerGroup::default()
        };
        for quant in &mut group.quants {
            let random = match extreme {
                true => [least, most][self.below(2) as usize],
                false => least + self.below((most - least + 1) as u32) as i32,
            };
            *quant = random as i8;
        }
        match kind {
            IntegerKind::Plain8 | IntegerKind::Zero4 => {}
            IntegerKind::Minimum4 | IntegerKind::Minimum8 => {
                group.scales = [if extreme { scale as i8 } else { self.below(64) as i8 }; 2];
            }
            IntegerKind::Halves8 => {
                group.scales = [0; 2].map(|_| if extreme { scale as i8 } else { self.below(64) as i8 - 32 });
            }
        }
        group
    }
}

/// One panel of random groups, and the groups of each output.
fn panel(form: IntegerForm, groups: usize, extreme: bool) -> (IntegerPanels, Vec<Vec<IntegerGroup>>) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ groups as u64);
    let strip = strip_bytes(form, groups);
    let mut bytes = AlignedBuffer::<u8>::zeroed(2 * strip);
    let mut all = Vec::new();
    for column in 0..PANEL {
        let mut of_output: Vec<IntegerGroup> = Vec::new();
        for group in 0..groups {
            let mut made = random.group(form.kind, extreme);
            // A span has one factor.
            if let Some(first) = of_output.get(group / form.span * form.span) {
                (made.factor, made.minimum_factor) = (first.factor, first.minimum_factor);
                if form.kind == IntegerKind::Zero4 {
                    made.offset = first.offset;
                }
            }
            let strip = &mut bytes[column / STRIP * strip..][..strip];
            with_form!(form.kind, write, strip, form.span, group, column % STRIP, &made);
            of_output.push(made);
        }
        all.push(of_output);
    }
    let panels = vec![IntegerPanel { start: 0, form }];
    (IntegerPanels { bytes, panels, inputs: groups * GROUP }, all)
}

/// Rows of activations, rounded.
fn rounded(rows: usize, inputs: usize, values: &[f32]) -> IntegerBuffer {
    let mut buffer = IntegerBuffer::default();
    buffer.fit(rows, inputs);
    let shared = buffer.share().expect("rows");
    for (row, values) in values.chunks_exact(inputs).enumerate() {
        // SAFETY: the row is inside the buffer, and only this test uses it.
        unsafe { shared.finish(Isa::Portable, row, 0, values) };
    }
    buffer
}

fn activations(rows: usize, inputs: usize) -> Vec<f32> {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    // Often the largest magnitude, so that sums are large too.
    (0..rows * inputs)
        .map(|_| match random.below(3) {
            0 => 1.0,
            1 => -1.0,
            _ => random.below(2001) as f32 / 1000.0 - 1.0,
        })
        .collect()
}

#[test]
fn every_unit_has_the_bits_of_the_reference_kernel_for_every_form() {
    for kind in KINDS {
        for (groups, span) in [(1, 1), (3, 1), (8, 8), (17, 8), (6, 4), (67, 8), (40, 5)] {
            for extreme in [false, true] {
                let (panels, _) = panel(IntegerForm { kind, span }, groups, extreme);
                let inputs = groups * GROUP;
                let mut x = rounded(19, inputs, &activations(19, inputs));
                let x = x.share().expect("rows");
                let run = |isa: Isa, rows: usize| {
                    let mut sums = vec![f32::NAN; rows * PANEL];
                    // SAFETY: the buffer has 19 rows.
                    unsafe { panels.multiply(isa, 0..1, x.at(19 - rows), rows, &mut sums) };
                    sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                for rows in [1, 2, 3, 4, 7, 8, 19] {
                    let reference = run(Isa::Portable, rows);
                    for isa in Isa::available() {
                        assert!(
                            run(isa, rows) == reference,
                            "{kind:?}, {groups} groups, {isa:?}, {rows} rows"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_reference_kernel_computes_what_the_integers_mean() {
    for kind in KINDS {
        for extreme in [false, true] {
            let (groups, form) = (9, IntegerForm { kind, span: 4 });
            let (panels, all) = panel(form, groups, extreme);
            let inputs = groups * GROUP;
            let values = activations(1, inputs);
            let mut x = rounded(1, inputs, &values);
            let x = x.share().expect("rows");
            let mut sums = vec![f32::NAN; PANEL];
            // SAFETY: the buffer has one row.
            unsafe { panels.multiply(Isa::Portable, 0..1, x.at(0), 1, &mut sums) };
            for (output, of_output) in all.iter().enumerate() {
                let (mut exact, mut size) = (0.0_f64, 0.0_f64);
                for (group, values) in of_output.iter().zip(values.chunks(GROUP)) {
                    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                    let scale = largest / 127.0;
                    for (input, value) in values.iter().enumerate() {
                        let x = f64::from((value / scale).round_ties_even()) * f64::from(scale);
                        let product = x * f64::from(group.value(kind, input));
                        (exact, size) = (exact + product, size + product.abs());
                    }
                }
                let error = (f64::from(sums[output]) - exact).abs();
                assert!(error <= 1.0e-5 * size + 1.0e-9, "{kind:?}: {} is not {exact}", sums[output]);
            }
        }
    }
}

#[test]
fn rows_of_a_packed_panel_are_the_integers_that_were_written() {
    for kind in KINDS {
        let (panels, all) = panel(IntegerForm { kind, span: 2 }, 5, false);
        for (output, of_output) in all.iter().enumerate() {
            let mut row = vec![f32::NAN; 5 * GROUP];
            panels.row(output, &mut row);
            for (at, value) in row.iter().enumerate() {
                let wanted = of_output[at / GROUP].value(kind, at % GROUP);
                assert_eq!(value.to_bits(), wanted.to_bits(), "{kind:?}, output {output}, input {at}");
            }
        }
    }
}

/// A tensor of random blocks of a type, with finite factors.
fn blocks((kind, bytes): (u32, usize), outputs: usize, inputs: usize) -> Tensor<'static> {
    let mut random = Random(u64::from(kind) + 99);
    let mut all: Vec<u8> = (0..outputs * inputs / 256 * bytes).map(|_| random.byte()).collect();
    // Every second bit of a possible upper exponent is cleared: 0x40 in a byte of an f16.
    for byte in &mut all {
        *byte &= 0xbf;
    }
    Tensor::of_blocks(kind, all, &[outputs, inputs])
}

fn packed(parts: &[(Tensor<'_>, usize)], inputs: usize, mode: WeightMode) -> Matrix {
    let mut threads = ThreadPool::new(2).unwrap();
    Matrix::pack(&mut threads, &mut WeightArena::default(), parts, inputs, mode, Bf16Unit::Widened).unwrap()
}

#[test]
fn the_rows_of_a_file_keep_their_bits_and_take_little_more_memory_than_in_the_file() {
    let (outputs, inputs) = (64, 512);
    // Bytes in memory over bytes of the file.
    for (kind, most) in [
        (Q4_0, 1.17),
        (Q4_1, 1.31),
        (Q8_0, 1.06),
        (Q4_K, 1.06),
        (Q5_K, 1.6),
        (Q6_K, 1.32),
        (Q3_K, 2.52),
        (IQ4_XS, 2.04),
    ] {
        let tensor = blocks(kind, outputs, inputs);
        let matrix = packed(&[(tensor.clone(), outputs)], inputs, WeightMode::Integers);
        assert!(matrix.has_integers(), "{kind:?}");
        let share = matrix.bytes() as f64 / tensor.bytes() as f64;
        assert!(share <= most, "{kind:?} takes {share} times the bytes of the file");
        let (mut stored, mut ours) = (vec![0.0; inputs], vec![f32::NAN; inputs]);
        for output in 0..outputs {
            tensor.read_f32(output * inputs, &mut stored);
            matrix.row(output, &mut ours);
            // Zeros may differ in their sign.
            assert!(stored == ours, "{kind:?}, output {output}");
        }
    }
}

#[test]
fn parts_of_several_types_are_integers_if_no_panel_has_two() {
    let inputs = 256;
    let (four, six) = (blocks(Q4_K, 64, inputs), blocks(Q6_K, 32, inputs));
    let apart = packed(&[(four.clone(), 64), (six.clone(), 32)], inputs, WeightMode::Integers);
    assert!(apart.has_integers());
    let mut row = vec![0.0; inputs];
    let mut stored = vec![0.0; inputs];
    for (tensor, local, output) in [(&four, 63, 63), (&six, 0, 64), (&six, 31, 95)] {
        tensor.read_f32(local * inputs, &mut stored);
        apart.row(output, &mut row);
        assert!(row == stored, "row {output}");
    }
    // The border is inside a panel, and a type without such groups.
    let within = [(four.clone().into_part(0, 40 * inputs), 40), (six, 32)];
    let others = [(blocks(Q2_K, 32, inputs), 32)];
    for parts in [&within[..], &others[..]] {
        assert!(matches!(packed(parts, inputs, WeightMode::Integers).panels, Panels::F32(_)));
    }
    let same = [(four.clone().into_part(0, 40 * inputs), 40), (four, 64)];
    assert!(packed(&same, inputs, WeightMode::Integers).has_integers());
    // Floats are rounded only if the mode does it.
    let weights = Weights::random(3);
    let floats = [(weights.tensor("w", &[40, inputs]).unwrap(), 40)];
    assert!(matches!(packed(&floats, inputs, WeightMode::Integers).panels, Panels::Bf16(_)));
    for mode in [WeightMode::Integers8, WeightMode::Integers4] {
        assert!(packed(&floats, inputs, mode).has_integers());
    }
}

/// A product of rows with a matrix, on a number of workers.
fn product(isa: Isa, matrix: &Matrix, x: &mut [f32], rows: usize, workers: usize) -> Vec<u32> {
    let (outputs, inputs) = (matrix.outputs(), x.len() / rows);
    let mut out = vec![f32::NAN; rows * outputs];
    let mut buffer = rounded(rows, inputs, x);
    let wide = Rows { base: SharedPtr(x.as_mut_ptr()), stride: inputs };
    let x = ProductInputs { wide, bf16: None, integers: buffer.share() };
    let base = Rows { base: SharedPtr(out.as_mut_ptr()), stride: outputs };
    // SAFETY: the buffers have `rows` rows, and only this test uses them.
    let product = unsafe { Product::plan(isa, matrix, x, rows, base, outputs, workers) };
    ThreadPool::new(workers)
        .unwrap()
        .run(&|worker| {
            let mut scratch = vec![0.0; SLICE_VALUES];
            worker.each(product.items(), |item| product.compute(isa, item, &mut scratch));
        })
        .unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_unit_and_team() {
    // Partial panels and groups.
    for (outputs, inputs) in [(200, 1100), (7, 5)] {
        let weights = Weights::random(11);
        let tensor = weights.tensor("w", &[outputs, inputs]).unwrap();
        for mode in [WeightMode::Integers8, WeightMode::Integers4] {
            let matrix = packed(&[(tensor.clone(), outputs)], inputs, mode);
            let mut x = activations(70, inputs);
            let alone: Vec<u32> = x
                .chunks_exact_mut(inputs)
                .flat_map(|row| product(Isa::Portable, &matrix, row, 1, 1))
                .collect();
            for isa in Isa::available() {
                for (rows, workers) in [(70, 1), (70, 3), (30, 2), (9, 2), (8, 2), (5, 2), (2, 1)] {
                    let together = product(isa, &matrix, &mut x[..rows * inputs], rows, workers);
                    assert!(
                        together[..] == alone[..rows * outputs],
                        "{mode:?}, {isa:?}, {rows} rows, {workers} workers"
                    );
                }
            }
        }
    }
}
