//! Products compared with the `gemm` crate, and with the same products divided into other items.

use super::*;
use crate::compute::cpu::arena::WeightArena;
use crate::compute::cpu::thread_pool::ThreadPool;
use crate::model::weights::Weights;

fn activations(rows: usize, width: usize, stride: usize) -> Vec<f32> {
    let mut x = vec![f32::NAN; rows * stride];
    for row in 0..rows {
        for i in 0..width {
            x[row * stride + i] = ((row * 31 + i * 17) % 97) as f32 / 48.0 - 1.0;
        }
    }
    x
}

fn product(isa: Isa, matrix: &Matrix, x: &mut [f32], stride: usize, rows: usize, workers: usize) -> Vec<f32> {
    let outputs = matrix.outputs();
    let mut out = vec![f32::NAN; rows * outputs];
    let mut threads = ThreadPool::new(workers).unwrap();
    let wide = Rows { base: SharedPtr(x.as_mut_ptr()), stride };
    let x = ProductInputs { wide, bf16: None, integers: None };
    let base = Rows { base: SharedPtr(out.as_mut_ptr()), stride: outputs };
    // SAFETY: both buffers have `rows` rows, and only this test uses them.
    let product = unsafe { Product::plan(isa, matrix, x, rows, base, outputs, workers) };
    threads
        .run(&|worker| {
            let mut scratch = vec![0.0; SLICE_VALUES];
            worker.each(product.items(), |item| product.compute(isa, item, &mut scratch));
        })
        .unwrap();
    out
}

fn oracle(weights: &[f32], x: &[f32], stride: usize, rows: usize, inputs: usize, outputs: usize) -> Vec<f32> {
    let mut out = vec![0.0_f32; rows * outputs];
    // SAFETY: strides and sizes describe the three buffers.
    unsafe {
        gemm::gemm(
            rows,
            outputs,
            inputs,
            out.as_mut_ptr(),
            1,
            outputs as isize,
            false,
            x.as_ptr(),
            1,
            stride as isize,
            weights.as_ptr(),
            inputs as isize,
            1,
            0.0_f32,
            1.0_f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    out
}

fn matrices(outputs: usize, inputs: usize) -> (Vec<f32>, Matrix, Matrix) {
    let weights = Weights::random(3);
    let tensor = weights.tensor("w", &[outputs, inputs]).unwrap();
    let mut plain = vec![0.0; outputs * inputs];
    tensor.read_f32(0, &mut plain);
    let mut threads = ThreadPool::new(2).unwrap();
    // Two parts whose border is inside a panel.
    let cut = outputs / 3;
    let whole = [(tensor.clone(), outputs)];
    let stored = Matrix::pack(
        &mut threads,
        &mut WeightArena::default(),
        &whole,
        inputs,
        WeightMode::Stored,
        Bf16Unit::Widened,
    )
    .unwrap();
    assert!(matches!(stored.panels, Panels::Bf16(_)));
    let top = weights.tensor("w", &[outputs, inputs]).unwrap();
    let wide = Matrix::pack(
        &mut threads,
        &mut WeightArena::default(),
        &[(top, cut), (tensor, outputs)],
        inputs,
        WeightMode::F32,
        Bf16Unit::Widened,
    )
    .unwrap();
    assert!(matches!(wide.panels, Panels::F32(_)));
    (plain, stored, wide)
}

#[test]
fn products_agree_with_gemm_on_every_instruction_set() {
    for (outputs, inputs) in [(7, 5), (96, 64), (200, 600)] {
        let (plain, stored, _) = matrices(outputs, inputs);
        let stride = inputs + 16;
        for rows in [1, 2, 5, 13, 30, 70] {
            let mut x = activations(rows, inputs, stride);
            let exact = oracle(&plain, &x, stride, rows, inputs, outputs);
            for isa in Isa::available() {
                let ours = product(isa, &stored, &mut x, stride, rows, 2);
                for (ours, exact) in ours.iter().zip(&exact) {
                    assert!((ours - exact).abs() < 1e-5, "{isa:?} {rows} rows: {ours} {exact}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_on_any_instruction_set_and_team() {
    let (outputs, inputs) = (200, 1100);
    let (_, stored, _) = matrices(outputs, inputs);
    let stride = inputs + 16;
    let mut x = activations(70, inputs, stride);
    let alone: Vec<f32> = (0..70)
        .flat_map(|row| product(Isa::detect(), &stored, &mut x[row * stride..], stride, 1, 1))
        .collect();
    for isa in Isa::available() {
        for (rows, workers) in [(70, 1), (70, 3), (30, 2), (12, 2), (5, 2), (2, 1)] {
            let together = product(isa, &stored, &mut x, stride, rows, workers);
            let same = together.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{isa:?}, {rows} rows, {workers} workers");
        }
    }
}

#[test]
fn panels_in_items_of_any_size_have_the_bits_of_a_single_one() {
    // 35 panels, the last one partial, and a partial last group of scales.
    let (outputs, inputs) = (1100, 130);
    let (_, stored, wide) = matrices(outputs, inputs);
    let (_, int8, _) = quantized(outputs, inputs);
    for matrix in [stored, wide, int8] {
        for rows in [1, 2, 3, 4, 5] {
            let mut x = activations(rows, inputs, inputs);
            for isa in Isa::available() {
                // With more workers an item has fewer panels: eight, four, two, one.
                let [alone, others @ ..] =
                    [5, 4, 2, 1].map(|workers| product(isa, &matrix, &mut x, inputs, rows, workers));
                assert!(others.iter().all(|other| *other == alone), "{isa:?}, {rows} rows");
            }
        }
    }
}

/// `rows` rows of the first seven panels, up to `at_once` of them side by side, independent of the machine's
/// preference.
fn side_by_side<E: PanelElement>(
    isa: Isa,
    panels: *const E,
    x: &[f32],
    rows: usize,
    at_once: usize,
) -> Vec<u32> {
    let depth = x.len() / rows;
    let mut out = vec![f32::NAN; rows * 7 * PANEL];
    let tile = TileOperands {
        a: x.as_ptr(),
        a_stride: depth,
        b: panels,
        b_stride: PANEL,
        c: out.as_mut_ptr(),
        c_stride: 7 * PANEL,
        depth,
        accumulate: false,
        ahead: true,
    };
    // SAFETY: seven panels with the inputs of a row, and space for their sums.
    unsafe { multiply_beside(isa, rows, &tile, 7, E::panel_len(depth), at_once) };
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn adjacent_panels_have_the_bits_of_a_single_one() {
    let (outputs, inputs) = (7 * PANEL, 130);
    let (_, stored, wide) = matrices(outputs, inputs);
    let (_, int8, _) = quantized(outputs, inputs);
    for isa in Isa::available() {
        for rows in [1, 2, 3, 4] {
            let x = activations(rows, inputs, inputs);
            let most = if rows <= 2 { 4 } else { 2 };
            for at_once in [2, most] {
                for matrix in [&stored, &wide, &int8] {
                    let [alone, together] = [1, at_once].map(|at_once| match &matrix.panels {
                        Panels::F32(values) => side_by_side(isa, values.as_ptr(), &x, rows, at_once),
                        Panels::Bf16(values) => {
                            side_by_side(isa, values.as_ptr().cast::<PanelBf16>(), &x, rows, at_once)
                        }
                        Panels::Int8(values) => {
                            side_by_side(isa, values.as_ptr().cast::<PanelInt8>(), &x, rows, at_once)
                        }
                        Panels::Pairs(..) | Panels::Integers(_) => unreachable!("f32 arithmetic"),
                    });
                    assert!(together == alone, "{isa:?}: {rows} rows, {at_once} panels at once");
                }
            }
        }
    }
}

#[test]
fn widened_weights_and_concatenated_parts_change_nothing() {
    let (outputs, inputs) = (96, 40);
    let (_, stored, wide) = matrices(outputs, inputs);
    let mut x = activations(3, inputs, inputs);
    let narrow = product(Isa::detect(), &stored, &mut x, inputs, 3, 1);
    let both = product(Isa::detect(), &wide, &mut x, inputs, 3, 1);
    let (cut, total) = (outputs / 3, outputs + outputs / 3);
    for row in 0..3 {
        assert_eq!(both[row * total..][..cut], narrow[row * outputs..][..cut]);
        assert_eq!(both[row * total + cut..][..outputs], narrow[row * outputs..][..outputs]);
    }
}

fn quantized(outputs: usize, inputs: usize) -> (Vec<f32>, Matrix, Vec<f32>) {
    let weights = Weights::random(7);
    let tensor = weights.tensor("w", &[outputs, inputs]).unwrap();
    let mut plain = vec![0.0; outputs * inputs];
    tensor.read_f32(0, &mut plain);
    let matrix = Matrix::pack(
        &mut ThreadPool::new(2).unwrap(),
        &mut WeightArena::default(),
        &[(tensor, outputs)],
        inputs,
        WeightMode::Int8,
        Bf16Unit::Widened,
    )
    .unwrap();
    assert!(matches!(matrix.panels, Panels::Int8(_)));
    let mut rounded = vec![f32::NAN; outputs * inputs];
    for (output, row) in rounded.chunks_exact_mut(inputs).enumerate() {
        matrix.row(output, row);
    }
    (plain, matrix, rounded)
}

#[test]
fn a_quantized_weight_is_off_by_at_most_half_a_step_of_its_group() {
    for (outputs, inputs) in [(7, 5), (70, 200), (33, 64)] {
        let (plain, _, rounded) = quantized(outputs, inputs);
        for (plain, rounded) in plain.chunks_exact(inputs).zip(rounded.chunks_exact(inputs)) {
            for (plain, rounded) in plain.chunks(PanelInt8::GROUP).zip(rounded.chunks(PanelInt8::GROUP)) {
                let largest = plain.iter().fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
                // A scale rounded up to 8 significant bits is at most 1/128 too large.
                let bound = largest / 127.0 * (1.0 + 1.0 / 128.0) * 0.5001;
                for (plain, rounded) in plain.iter().zip(rounded) {
                    assert!((plain - rounded).abs() <= bound, "{plain} became {rounded}, largest {largest}");
                }
            }
        }
    }
}

#[test]
fn a_quantized_product_keeps_the_documented_order_to_the_bit() {
    // Whole groups, a partial last group, and one whose last rows are not four.
    for (outputs, inputs) in [(70, 1100), (33, 64), (40, 131), (7, 5)] {
        let (_, matrix, rounded) = quantized(outputs, inputs);
        let Panels::Int8(values) = &matrix.panels else { unreachable!("quantized") };
        let stride = inputs + 16;
        let mut x = activations(70, inputs, stride);
        // Group by group: a chain over the integers times 2^24, from zero; then its sum times the scale, in one
        // multiply-add.
        let chain = |row: usize, output: usize| {
            let (panel, column) = (output / PANEL, output % PANEL);
            let panel = &values[panel * PanelInt8::panel_len(inputs)..][..PanelInt8::panel_len(inputs)];
            let mut sum = 0.0_f32;
            for (group, from) in
                panel.chunks(PanelInt8::panel_len(PanelInt8::GROUP)).zip((0..inputs).step_by(64))
            {
                let at = 2 * (2 * (column % 16) + column / 16);
                let scale = f32::from_bits(u32::from_ne_bytes([0, 0, group[at] as u8, group[at + 1] as u8]));
                let mut part = 0.0_f32;
                for input in from..inputs.min(from + 64) {
                    let (four, which) = ((input - from) / 4, (input - from) % 4);
                    let integer = group[64 + 128 * four + 64 * (column / 16) + 4 * (column % 16) + which];
                    let weight = f32::from(integer) * 16_777_216.0;
                    assert_eq!(weight * scale, rounded[output * inputs + input]);
                    part = x[row * stride + input].mul_add(weight, part);
                }
                sum = scale.mul_add(part, sum);
            }
            sum.to_bits()
        };
        let expected: Vec<u32> = (0..70 * outputs).map(|i| chain(i / outputs, i % outputs)).collect();
        for isa in Isa::available() {
            for (rows, workers) in (1..=12).map(|rows| (rows, 1)).chain([(70, 2), (25, 1), (24, 3), (1, 2)]) {
                let ours = product(isa, &matrix, &mut x, stride, rows, workers);
                let same = ours.iter().zip(&expected).all(|(ours, bits)| ours.to_bits() == *bits);
                assert!(same, "{isa:?}, {rows} rows of {inputs} inputs, {workers} workers");
            }
        }
    }
}

#[test]
fn groups_of_zeros_and_of_huge_weights_are_quantized_without_harm() {
    let inputs = 2 * PanelInt8::GROUP;
    let mut rows = vec![0.0_f32; PANEL * inputs];
    rows[PanelInt8::GROUP..inputs].fill(-3.0e38);
    rows[inputs + 3] = f32::NAN;
    let mut panel = vec![0_i8; PanelInt8::panel_len(inputs)];
    pack::quantize(&rows, inputs, &mut panel);
    let mut values = AlignedBuffer::<i8>::zeroed(panel.len());
    values.copy_from_slice(&panel);
    let matrix = Matrix { panels: Panels::Int8(values), outputs: PANEL, inputs };
    let mut row = vec![f32::NAN; inputs];
    matrix.row(0, &mut row);
    assert!(row[..PanelInt8::GROUP].iter().all(|weight| *weight == 0.0));
    assert!(
        row[PanelInt8::GROUP..].iter().all(|weight| (weight / -3.0e38 - 1.0).abs() < 0.01),
        "{}",
        row[64]
    );
    matrix.row(1, &mut row);
    assert!(row.iter().all(|weight| *weight == 0.0), "what is not a number is nothing");
}

#[test]
fn rows_of_the_packed_matrix_are_the_original_rows() {
    let (outputs, inputs) = (70, 24);
    let (plain, stored, wide) = matrices(outputs, inputs);
    let mut row = vec![0.0; inputs];
    for output in 0..outputs {
        stored.row(output, &mut row);
        assert_eq!(row, plain[output * inputs..][..inputs]);
        wide.row(outputs / 3 + output, &mut row);
        assert_eq!(row, plain[output * inputs..][..inputs]);
    }
}
