//! Cases of kernels that only models with a feature have: the soft cap of logits, and layers with experts.

use baton_engine::compute::cuda::device::Element;
use baton_engine::compute::cuda::kernels::{self, ExpertArgs, ExpertShape, KernelFeature, KernelTarget};

use super::{Comparison, KernelCase, KernelWork, RandomNumbers, activation, int, near, words};

/// The cases of a target's features.
pub(super) fn cases(target: &KernelTarget) -> Vec<KernelCase> {
    let mut all = Vec::new();
    if target.features.has(KernelFeature::LogitCap) {
        all.extend([50, 5000].map(cap_logits));
    }
    if target.features.has(KernelFeature::Experts) {
        // Few rows and many; widths that fill the blocks of a product and widths that do not; tiles that are full.
        for (rows, count, per_token, hidden, intermediate) in [
            (1, 4, 2, 64, 48),
            (5, 8, 3, 72, 96),
            (3, 130, 8, 64, 40),
            (150, 5, 2, 136, 64),
            (70, 1, 1, 64, 32),
        ] {
            for normalized in [true, false] {
                let shape = ExpertShape {
                    element: target.element,
                    count,
                    per_token,
                    hidden,
                    intermediate,
                    normalized,
                    activation: activation(target.features),
                };
                all.push(experts(shape, rows));
            }
        }
    }
    all
}

fn cap_logits(vocab: usize) -> KernelCase {
    let (mut numbers, rows) = (RandomNumbers(12), 3);
    KernelCase {
        name: format!("cap_logits of {vocab}"),
        buffers: vec![numbers.values(rows * vocab, Element::F32)],
        work: Box::new(move |at| vec![KernelWork::Launch(kernels::cap_logits(at[0], vocab, rows, 0.7))]),
        compared: vec![near(0, Element::F32)],
    }
}

/// A layer with experts, and everything that its kernels leave behind. Every third row is padding. The first experts of
/// every other row are equal.
fn experts(shape: ExpertShape, rows: usize) -> KernelCase {
    let ExpertShape { element, count, per_token, hidden, intermediate, normalized, .. } = shape;
    let (mut numbers, pairs, size) = (RandomNumbers(13), rows * per_token, element.bytes());
    let mut logits = numbers.values(rows * count, Element::F32);
    for row in (0..rows).step_by(2) {
        for expert in 0..count.div_ceil(2) {
            logits[(row * count + expert) * 4..][..4].copy_from_slice(&1.25_f32.to_le_bytes());
        }
    }
    let slots = words((0..rows).map(|row| if row % 3 == 2 { -1 } else { int(row) }));
    KernelCase {
        name: format!("{per_token} of {count} experts, {rows} rows, {hidden} × {intermediate}, {normalized}"),
        buffers: vec![
            logits,
            slots,
            vec![0; pairs * 4],
            vec![0; pairs * 4],
            vec![0; pairs * 4],
            vec![0; shape.tiles(rows) * 3 * 4],
            numbers.values(rows * hidden, element),
            numbers.values(count * 2 * intermediate * hidden, element),
            numbers.values(count * hidden * intermediate, element),
            vec![0; pairs * intermediate * size],
            vec![0; pairs * hidden * 4],
            vec![0; rows * hidden * 4],
        ],
        work: Box::new(move |at| {
            let parts = ExpertArgs {
                logits: at[0],
                slots: at[1],
                chosen: at[2],
                weights: at[3],
                order: at[4],
                tiles: at[5],
                x: at[6],
                gate_up: at[7],
                down: at[8],
                activated: at[9],
                results: at[10],
                projected: at[11],
            };
            shape.launches(&parts, rows).map(KernelWork::Launch).into()
        }),
        compared: vec![
            (2, Comparison::Bytes),
            near(3, Element::F32),
            (4, Comparison::Bytes),
            (5, Comparison::Bytes),
            near(9, element),
            // Sums of rounded values.
            near(11, element),
        ],
    }
}
