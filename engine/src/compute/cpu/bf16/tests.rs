//! Units compared with each other, bit for bit, and with arithmetic in f64.

use super::*;
use crate::compute::cpu::arena::WeightArena;
use crate::compute::cpu::matrix::{Matrix, Product, SLICE_VALUES, WeightMode};
use crate::compute::cpu::thread_pool::ThreadPool;
use crate::model::weights::Weights;

/// A product in bfloat16 of generated weights.
struct ProductCase {
    inputs: usize,
    outputs: usize,
    x: Vec<f32>,
    weights: Vec<f32>,
}

impl ProductCase {
    fn new(rows: usize, inputs: usize, outputs: usize) -> Self {
        let source = Weights::random(11);
        let mut weights = vec![0.0; outputs * inputs];
        source.tensor("w", &[outputs, inputs]).unwrap().read_f32(0, &mut weights);
        // Not rounded to bf16, of both signs and many magnitudes.
        let value = |i: usize| {
            let spread = ((i * 7919) % 1009) as f32 / 504.0 - 1.0;
            spread * [1.0, 0.01, 30.0][i % 3]
        };
        Self { inputs, outputs, x: (0..rows * inputs).map(value).collect(), weights }
    }

    /// Rows `from ..` of the product, computed by one unit.
    fn run(&self, isa: Isa, unit: Bf16Unit, from: usize, rows: usize, workers: usize) -> Vec<f32> {
        let mut threads = ThreadPool::new(workers).unwrap();
        let source = Weights::random(11);
        let tensor = source.tensor("w", &[self.outputs, self.inputs]).unwrap();
        let matrix = Matrix::pack(
            &mut threads,
            &mut WeightArena::default(),
            &[(tensor, self.outputs)],
            self.inputs,
            WeightMode::Bf16,
            unit,
        )
        .unwrap();
        // The values between rows must not affect the result.
        let stride = self.inputs + 5;
        let mut wide = vec![f32::NAN; rows * stride];
        let mut packed = PackedBuffer::default();
        packed.fit(rows, self.inputs);
        let base = SharedPtr(wide.as_mut_ptr());
        let x =
            ProductInputs { wide: Rows { base, stride }, bf16: Some((unit, packed.share())), integers: None };
        for row in 0..rows {
            let values = &self.x[(from + row) * self.inputs..][..self.inputs];
            // SAFETY: the row's own values, in buffers of these sizes.
            unsafe {
                let row_values = std::slice::from_raw_parts_mut(base.at(row * stride), self.inputs);
                row_values.copy_from_slice(values);
                // Two parts whose border is inside a chunk.
                let (left, right) = row_values.split_at_mut(self.inputs.min(45));
                x.finish(isa, row, 0, left);
                x.finish(isa, row, left.len(), right);
            }
        }
        let mut out = vec![f32::NAN; rows * self.outputs];
        let to = Rows { base: SharedPtr(out.as_mut_ptr()), stride: self.outputs };
        // SAFETY: all buffers have these rows, and only this test uses them.
        let product = unsafe { Product::plan(isa, &matrix, x, rows, to, self.outputs, workers) };
        threads
            .run(&|worker| {
                let mut scratch = vec![0.0; SLICE_VALUES];
                worker.each(product.items(), |item| product.compute(isa, item, &mut scratch));
            })
            .unwrap();
        out
    }

    /// The result in the documented order, one value at a time; the exact product of rounded values; and the sum of the
    /// magnitudes.
    fn expected(&self, row: usize, output: usize) -> (f32, f64, f64) {
        let wide = |value: f32| f32::from_bits(u32::from(round(value)) << 16);
        let x: Vec<f32> = self.x[row * self.inputs..][..self.inputs].iter().map(|x| wide(*x)).collect();
        let weights = &self.weights[output * self.inputs..][..self.inputs];
        let weights: Vec<f32> = weights.iter().map(|weight| wide(*weight)).collect();
        let (mut sum, mut exact, mut magnitude) = (0.0_f32, 0.0_f64, 0.0_f64);
        for (x, weights) in x.chunks(CHUNK).zip(weights.chunks(CHUNK)) {
            let mut parity = [0.0_f32; 2];
            for (input, (x, weight)) in x.iter().zip(weights).enumerate() {
                parity[input % 2] += x * weight;
                exact += f64::from(*x) * f64::from(*weight);
                magnitude += (f64::from(*x) * f64::from(*weight)).abs();
            }
            sum += parity[0] + parity[1];
        }
        (sum, exact, magnitude)
    }
}

fn everywhere() -> impl Iterator<Item = (Isa, Bf16Unit)> {
    let packing = Bf16Unit::available().into_iter().filter(|unit| unit.packs());
    let widened = Isa::available().into_iter().map(|isa| (isa, Bf16Unit::Widened));
    packing.map(|unit| (Isa::detect(), unit)).chain(widened)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_unit_keeps_the_documented_order_to_the_bit() {
    // The last three have more rows than an item, and more inputs than a slice. The last one ends with a single row.
    for (rows, inputs, outputs) in
        [(1, 5, 7), (3, 33, 40), (19, 96, 64), (70, 600, 33), (530, 40, 33), (40, 1300, 33), (33, 700, 70)]
    {
        let case = ProductCase::new(rows, inputs, outputs);
        let mut expected = Vec::new();
        for (row, output) in (0..rows).flat_map(|row| (0..outputs).map(move |output| (row, output))) {
            let (chain, exact, magnitude) = case.expected(row, output);
            // Every addition of a chain may round once.
            let bound = magnitude * inputs as f64 * f64::from(f32::EPSILON);
            assert!((f64::from(chain) - exact).abs() <= bound, "{chain} for {exact}");
            expected.push(chain);
        }
        for (isa, unit) in everywhere() {
            let ours = case.run(isa, unit, 0, rows, 2);
            assert!(bits(&ours) == bits(&expected), "{isa:?} {unit:?}: {rows} rows of {inputs} inputs");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_unit_and_team() {
    let case = ProductCase::new(75, 1100, 200);
    let alone: Vec<u32> =
        (0..75).flat_map(|row| bits(&case.run(Isa::detect(), Bf16Unit::detect(), row, 1, 1))).collect();
    for (isa, unit) in everywhere() {
        for (rows, workers) in [
            (75, 1),
            (75, 3),
            (64, 2),
            (33, 2),
            (32, 1),
            (17, 2),
            (15, 1),
            (14, 2),
            (13, 1),
            (12, 2),
            (8, 2),
            (2, 1),
        ] {
            let together = bits(&case.run(isa, unit, 0, rows, workers));
            assert!(together == alone[..rows * 200], "{isa:?} {unit:?}, {rows} rows, {workers} workers");
        }
    }
}

#[test]
fn a_product_is_as_near_to_f32_as_rounding_its_inputs_allows() {
    let case = ProductCase::new(4, 1024, 64);
    let ours = case.run(Isa::detect(), Bf16Unit::detect(), 0, 4, 2);
    let mut rounded_at_all = false;
    for (index, ours) in ours.iter().enumerate() {
        let (row, output) = (index / 64, index % 64);
        let pairs = case.x[row * 1024..][..1024].iter().zip(&case.weights[output * 1024..][..1024]);
        let (mut exact, mut magnitude) = (0.0_f64, 0.0_f64);
        for (x, weight) in pairs {
            exact += f64::from(*x) * f64::from(*weight);
            magnitude += (f64::from(*x) * f64::from(*weight)).abs();
        }
        // Half a unit in the last of eight places for each factor that is rounded; the weights are bf16.
        let error = (f64::from(*ours) - exact).abs();
        assert!(error <= magnitude / 256.0, "{ours} for {exact}");
        rounded_at_all |= error > magnitude * 1e-6;
    }
    assert!(rounded_at_all, "inputs of 24 bits went through unrounded");
}

#[test]
fn rounding_is_to_the_nearest_and_flushes_what_tiles_flush() {
    let exponents = (0..=255_u32).map(|exponent| exponent << 23);
    let mantissas = [0, 1, 0x7fff, 0x8000, 0x8001, 0x1_7fff, 0x1_8000, 0x1_8001, 0x7f_ffff];
    let all = exponents.flat_map(|exponent| mantissas.map(|mantissa| exponent | mantissa));
    for value in all.flat_map(|bits| [bits, bits | 1 << 31]).map(f32::from_bits) {
        let rounded = half::bf16::from_bits(round(value));
        if value.is_subnormal() {
            assert_eq!(rounded.to_f32(), 0.0, "{value:e}");
        } else if value.is_nan() {
            assert!(rounded.is_nan());
        } else {
            assert_eq!(rounded.to_bits(), half::bf16::from_f32(value).to_bits(), "{value:e}");
        }
        for isa in Isa::available() {
            let (mut out, mut in_place) = ([0_u16; 1], [value]);
            round_into(isa, &[value], &mut out);
            round_in_place(isa, &mut in_place);
            assert_eq!((out[0], (in_place[0].to_bits() >> 16) as u16), (round(value), round(value)));
        }
    }
}

#[test]
fn rows_of_packed_pairs_are_the_original_rows() {
    let case = ProductCase::new(1, 70, 50);
    let source = Weights::random(11);
    for unit in Bf16Unit::available() {
        let parts = [(source.tensor("w", &[50, 70]).unwrap(), 50)];
        let (mut threads, mut arena) = (ThreadPool::new(2).unwrap(), WeightArena::default());
        let matrix = Matrix::pack(&mut threads, &mut arena, &parts, 70, WeightMode::Bf16, unit).unwrap();
        let mut row = [0.0; 70];
        for (output, weights) in case.weights.chunks_exact(70).enumerate() {
            matrix.row(output, &mut row);
            assert_eq!(row, weights, "{unit:?}");
        }
    }
}

#[test]
fn chunks_lie_in_the_order_of_their_unit_and_the_rest_of_a_row_in_its_own() {
    for (rows, width) in [(1, CHUNK), (3, 2 * CHUNK), (5, 40), (2, 7)] {
        let values: Vec<f32> = (0..rows * width).map(|i| (i as f32 - 31.5) * 1.01).collect();
        for unit in Bf16Unit::available() {
            let mut expected = vec![0; values.len()];
            for (index, value) in values.iter().enumerate() {
                let (row, column) = (index / width, index % width);
                let chunk = column / CHUNK * CHUNK;
                let whole = chunk + CHUNK <= width;
                let place = if whole { chunk + unit.position(column % CHUNK) } else { column };
                expected[row * width + place] = round(*value);
            }
            for isa in Isa::available() {
                let mut out = vec![0xaaaa; values.len()];
                round_rows(isa, unit, &values, width, &mut out);
                assert_eq!(out, expected, "{rows} rows of {width}, {unit:?}, {isa:?}");
            }
        }
    }
}
