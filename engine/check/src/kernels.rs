//! Compares every kernel of a device with its reference kernel on the software device: the same bytes as input, the
//! same launches, and a comparison of the results.
//!
//! Cases are small and irregular on purpose: padding rows, lengths around tiles and splits, unordered block tables, and
//! groups of query heads that fill a block or do not. Cases of a target with features have the arguments of these.
//! Windows are shorter and longer than sequences, soft caps bend most values, and experts have equal probabilities.

mod features;

use baton_engine::compute::cuda::device::{
    Device, DeviceError, DeviceSlice, Element, HostSlice, Launch, Matmul, Priority,
};
use baton_engine::compute::cuda::kernels::{
    self, AttentionArgs, ChooseArgs, DRAW_WORDS, KernelFeature, KernelFeatures, KernelShape, KernelTarget,
    NormArgs, PARTS, RopeKvArgs, SPLIT_TOKENS, TILE_QUERIES,
};
use baton_engine::compute::cuda::narrow;
use baton_engine::model::spec::Activation;

use crate::parity::CheckLine;
use crate::software::{SoftwareDevice, widen};

/// Memory of the software device that runs the reference kernels.
const SOFT_BYTES: usize = 1 << 30;
/// Alignment of data in one buffer.
const ALIGN_BYTES: usize = 256;

/// One piece of work.
enum KernelWork {
    Launch(Launch),
    Matmul(Matmul),
    Copies(Vec<(DeviceSlice, DeviceSlice)>),
}

/// The work of a case on its buffers.
type EnqueueFn = dyn Fn(&[DeviceSlice]) -> Vec<KernelWork>;

/// Comparison of a result.
#[derive(Clone, Copy, Debug)]
enum Comparison {
    /// Each value within this bound, relative to the largest magnitude.
    Near(Element, f32),
    /// Equality of every byte.
    Bytes,
}

/// One case: contents of memory, work, and compared results.
struct KernelCase {
    name: String,
    buffers: Vec<Vec<u8>>,
    work: Box<EnqueueFn>,
    compared: Vec<(usize, Comparison)>,
}

/// Runs all cases of a target on `device`, whose kernels were made for it. A case that the device cannot run has
/// failed. The other cases run anyway, because time on a device is scarce.
///
/// # Errors
/// [`DeviceError`] if the reference kernels cannot run a case: a bug of the case.
pub fn kernels(device: &mut dyn Device, target: &KernelTarget) -> Result<Vec<CheckLine>, DeviceError> {
    let (mut lines, KernelTarget { element, head_dim, .. }) = (Vec::new(), *target);
    let stages = kernels::decode_stages(head_dim, device.shared_bytes_max());
    for case in cases(target, stages) {
        let mut soft = SoftwareDevice::new(SOFT_BYTES, element, head_dim);
        let reference = run(&mut soft, &case)?;
        let ours = match run(device, &case) {
            Ok(ours) => ours,
            Err(error) => {
                let what = format!("{} {} {head_dim}", case.name, element.label());
                lines.push(CheckLine::new(&what, false, error.to_string()));
                continue;
            }
        };
        for ((index, compare), (ours, reference)) in case.compared.iter().zip(ours.iter().zip(&reference)) {
            let what = format!("{} {} {head_dim}: buffer {index}", case.name, element.label());
            lines.push(compared(&what, *compare, ours, reference));
        }
    }
    Ok(lines)
}

fn compared(what: &str, compare: Comparison, ours: &[u8], reference: &[u8]) -> CheckLine {
    match compare {
        Comparison::Bytes => {
            let different = ours.iter().zip(reference).filter(|(a, b)| a != b).count();
            CheckLine::new(what, different == 0, format!("{different} of {} bytes differ", reference.len()))
        }
        Comparison::Near(element, bound) => {
            let (ours, reference) = (widen(ours, element), widen(reference, element));
            let largest = reference.iter().fold(1e-6_f32, |largest, value| largest.max(value.abs()));
            let mut far = 0.0_f32;
            for (a, b) in ours.iter().zip(&reference) {
                let difference = (a - b).abs();
                // NaN counts as far.
                far = if difference <= far { far } else { difference };
            }
            CheckLine::at_most(what, f64::from(far / largest), f64::from(bound))
        }
    }
}

/// The compared buffers after the work of a case.
fn run(device: &mut dyn Device, case: &KernelCase) -> Result<Vec<Vec<u8>>, DeviceError> {
    let (stream, event) = (device.stream(Priority::Steps)?, device.event()?);
    let longest = case.buffers.iter().map(Vec::len).max().unwrap_or(1);
    let host = HostSlice { host: device.host(longest)?, offset: 0 };
    let mut slices = Vec::new();
    for bytes in &case.buffers {
        let buffer = device.alloc(bytes.len().next_multiple_of(ALIGN_BYTES))?;
        let slice = DeviceSlice::of(buffer, bytes.len());
        device.write_host(host, bytes)?;
        device.upload(stream, host, slice)?;
        device.record(event, stream)?;
        device.synchronize(event)?;
        slices.push(slice);
    }
    for work in (case.work)(&slices) {
        match work {
            KernelWork::Launch(launch) => device.launch(stream, &launch)?,
            KernelWork::Matmul(matmul) => device.matmul(stream, &matmul)?,
            KernelWork::Copies(pieces) => device.copy_many(stream, &pieces)?,
        }
    }
    let mut results = Vec::new();
    for (index, _) in &case.compared {
        device.download(stream, slices[*index], host)?;
        device.record(event, stream)?;
        device.synchronize(event)?;
        let mut bytes = vec![0; slices[*index].bytes];
        device.read_host(host, &mut bytes)?;
        results.push(bytes);
    }
    for slice in slices {
        device.free(slice.buffer)?;
    }
    Ok(results)
}

/// Pseudo-random numbers: SplitMix64.
struct RandomNumbers(u64);

impl RandomNumbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Values in -1..1, as elements.
    fn values(&mut self, count: usize, element: Element) -> Vec<u8> {
        let mut value = || (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let values: Vec<f32> = (0..count).map(|_| value()).collect();
        let mut bytes = vec![0; count * element.bytes()];
        narrow(&values, element, &mut bytes);
        bytes
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

fn words(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

fn int(value: usize) -> i32 {
    i32::try_from(value).expect("cases are small")
}

/// Bound of a value with at most one rounding to the element.
fn rounding(element: Element) -> f32 {
    match element {
        Element::F32 => 2e-5,
        Element::Bf16 => 8e-3,
    }
}

/// Compares a buffer within one rounding to the element.
fn near(buffer: usize, element: Element) -> (usize, Comparison) {
    (buffer, Comparison::Near(element, rounding(element)))
}

/// The activation of models with these features.
fn activation(features: KernelFeatures) -> Activation {
    if features.has(KernelFeature::Gelu) { Activation::GeluTanh } else { Activation::Silu }
}

fn cases(target: &KernelTarget, stages: usize) -> Vec<KernelCase> {
    let KernelTarget { element, features, .. } = *target;
    let mut all = vec![embed(target), silu_mul(target, 1000, true), silu_mul(target, 77, false)];
    // Widths that a block keeps in registers, and widths that it does not.
    all.extend(
        [(1000, false), (1000, true), (1001, false), (8196, true)]
            .map(|(w, bare)| add_rms_norm(target, w, bare)),
    );
    for (heads, kv_heads, extras) in [(8, 2, true), (6, 6, false), (40, 2, false)] {
        let shape = KernelShape { decode_stages: stages, ..shape(target, heads, kv_heads) };
        all.push(rope_kv(shape, extras));
        for window in windows(features) {
            for lengths in [&[1, 17, 0, 200][..], &[2000, 64, 65]] {
                all.push(decode_attention(shape, lengths, window));
            }
            all.push(prefill_attention(shape, window));
        }
    }
    all.extend([(1, 96, 200), (37, 256, 64), (300, 64, 130)].map(|size| matmul(element, size)));
    all.extend([50, 5000, 40_003].map(choose));
    if element == Element::Bf16 {
        // Wide and deep blocks; fewer inputs than a round of the warps, and several rounds.
        for size in [(1, 64, 32), (3, 192, 4_800), (8, 2_368, 96), (5, 1_024, 17_024)] {
            all.push(few_rows(size));
        }
        all.extend([(1, 64, 16, true), (8, 2_368, 112, false)].map(|size| few_rows_gated(features, size)));
    }
    all.push(copies());
    all.extend(features::cases(target));
    all
}

/// Windows of the cases of attention: none, of one key, inside a tile, beyond a tile, and longer than some sequences.
fn windows(features: KernelFeatures) -> Vec<Option<usize>> {
    let all = [None, Some(1), Some(13), Some(70), Some(150)];
    all.into_iter().filter(|window| window.is_none() || features.has(KernelFeature::Windows)).collect()
}

fn embed(target: &KernelTarget) -> KernelCase {
    let (mut numbers, element) = (RandomNumbers(1), target.element);
    let scale = target.features.has(KernelFeature::ScaledEmbeddings).then_some(2.5);
    let (rows, vocab, width) = (5, 30, 300);
    let tokens = words((0..rows).map(|_| int(numbers.below(vocab))));
    KernelCase {
        name: "embed".into(),
        buffers: vec![tokens, numbers.values(vocab * width, element), vec![0; rows * width * 4]],
        work: Box::new(move |at| {
            let tables = [at[0], at[1], at[2]];
            vec![KernelWork::Launch(kernels::embed(tables, width, rows, scale))]
        }),
        compared: vec![(2, Comparison::Bytes)],
    }
}

fn silu_mul(target: &KernelTarget, width: usize, with_bias: bool) -> KernelCase {
    let (mut numbers, rows, element) = (RandomNumbers(2), 7, target.element);
    let activation = activation(target.features);
    KernelCase {
        name: format!("silu_mul of {width}"),
        buffers: vec![
            numbers.values(rows * 2 * width, element),
            numbers.values(2 * width, Element::F32),
            vec![0; rows * width * element.bytes()],
        ],
        work: Box::new(move |at| {
            let bias = with_bias.then_some(at[1]);
            vec![KernelWork::Launch(kernels::silu_mul(at[0], bias, at[2], (width, rows), activation))]
        }),
        compared: vec![near(2, element)],
    }
}

fn add_rms_norm(target: &KernelTarget, width: usize, bare: bool) -> KernelCase {
    let (mut numbers, rows) = (RandomNumbers(3), 6);
    let KernelTarget { element, features, .. } = *target;
    let has_post = features.has(KernelFeature::PostNorms) && !bare;
    // Rows in another order, one of them padding.
    let order = words([3, 1, -1, 5, 0]);
    let made = if bare { rows } else { 5 };
    KernelCase {
        name: format!("add_rms_norm of {width}, bare: {bare}"),
        buffers: vec![
            numbers.values(rows * width, Element::F32),
            numbers.values(rows * width, Element::F32),
            numbers.values(width, Element::F32),
            numbers.values(width, Element::F32),
            order,
            vec![0; rows * width * element.bytes()],
            numbers.values(width, Element::F32),
        ],
        work: Box::new(move |at| {
            let norm = NormArgs {
                hidden: at[0],
                delta: (!bare).then_some((at[1], Some(at[2]))),
                post: has_post.then_some(at[6]),
                weight: at[3],
                rows: (!bare).then_some(at[4]),
                out: at[5],
            };
            vec![KernelWork::Launch(kernels::add_rms_norm(features, &norm, width, 1e-5, made))]
        }),
        compared: vec![near(0, Element::F32), near(5, element)],
    }
}

const BLOCK_TOKENS: usize = 16;
const LAYERS: usize = 2;

fn shape(target: &KernelTarget, heads: usize, kv_heads: usize) -> KernelShape {
    let KernelTarget { element, head_dim, features } = *target;
    KernelShape {
        heads,
        kv_heads,
        block_tokens: BLOCK_TOKENS,
        block_stride: LAYERS * 2 * kv_heads * BLOCK_TOKENS * head_dim,
        features,
        score_cap: 0.3,
        // An odd number of pairs.
        rotary_dim: head_dim / 4 * 2 - 2,
        ..KernelShape::plain(element, head_dim)
    }
}

fn rope_kv(shape: KernelShape, extras: bool) -> KernelCase {
    let (mut numbers, rows, blocks, positions) = (RandomNumbers(4), 5, 3, 40);
    let KernelShape { element, head_dim, heads, kv_heads, .. } = shape;
    let at_positions = words((0..rows).map(|_| int(numbers.below(positions))));
    KernelCase {
        name: format!("rope_kv, {heads} and {kv_heads} heads"),
        buffers: vec![
            numbers.values(rows * shape.qkv_width(), element),
            numbers.values(shape.qkv_width(), Element::F32),
            numbers.values(head_dim, Element::F32),
            numbers.values(head_dim, Element::F32),
            numbers.values(positions * head_dim, Element::F32),
            at_positions,
            words([0, 47, -1, 20, 16]),
            vec![0; blocks * shape.block_stride * element.bytes()],
        ],
        work: Box::new(move |at| {
            let parts = RopeKvArgs {
                qkv: at[0],
                bias: extras.then_some(at[1]),
                norms: extras.then_some((at[2], at[3])),
                angles: at[4],
                positions: at[5],
                slots: at[6],
                pool: at[7],
            };
            vec![KernelWork::Launch(kernels::rope_kv(&shape, &parts, 1, rows))]
        }),
        compared: vec![near(0, element), near(7, element)],
    }
}

/// Block tables of sequences with these numbers of keys: distinct blocks in random order.
fn tables(numbers: &mut RandomNumbers, lengths: &[usize]) -> (Vec<i32>, Vec<usize>, usize) {
    let blocks: usize = lengths.iter().map(|length| length.div_ceil(BLOCK_TOKENS)).sum();
    let mut order: Vec<i32> = (0..int(blocks.max(1))).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last + 1));
    }
    let mut starts = Vec::new();
    let mut at = 0;
    for length in lengths {
        starts.push(at);
        at += length.div_ceil(BLOCK_TOKENS);
    }
    (order, starts, blocks.max(1))
}

fn decode_attention(shape: KernelShape, lengths: &'static [usize], window: Option<usize>) -> KernelCase {
    let mut numbers = RandomNumbers(5);
    let KernelShape { element, head_dim, heads, kv_heads, .. } = shape;
    let (order, starts, blocks) = tables(&mut numbers, lengths);
    let rows = lengths.len();
    let entries = lengths.iter().zip(&starts).enumerate();
    let entries: Vec<i32> =
        entries.flat_map(|(row, (length, start))| [row, *length, *start].map(int)).collect();
    // Some splits are left without tokens.
    let splits = lengths.iter().max().map_or(1, |most| most.div_ceil(SPLIT_TOKENS) + 2);
    let per_head = rows * heads * splits;
    KernelCase {
        name: format!(
            "decode_attention, {heads} and {kv_heads} heads, keys {lengths:?}{}",
            window_name(window)
        ),
        buffers: vec![
            numbers.values(rows * shape.qkv_width(), element),
            numbers.values(blocks * shape.block_stride, element),
            words(order),
            words(entries),
            vec![0; rows * heads * head_dim * element.bytes()],
            vec![0; per_head * head_dim * 4],
            vec![0; per_head * 2 * 4],
        ],
        work: Box::new(move |at| {
            let parts = AttentionArgs {
                qkv: at[0],
                pool: at[1],
                tables: at[2],
                entries: at[3],
                out: at[4],
                partial: at[5],
                summary: at[6],
                window,
            };
            kernels::decode_attention(&shape, &parts, 1, rows, splits).map(KernelWork::Launch).into()
        }),
        compared: vec![(4, Comparison::Near(element, 2.0 * rounding(element)))],
    }
}

fn window_name(window: Option<usize>) -> String {
    window.map_or_else(String::new, |window| format!(", window {window}"))
}

fn prefill_attention(shape: KernelShape, window: Option<usize>) -> KernelCase {
    let mut numbers = RandomNumbers(6);
    let KernelShape { element, head_dim, heads, kv_heads, .. } = shape;
    // Position of the first query and number of queries of each sequence.
    let sequences = [(0, 130), (100, 3), (63, 64), (7, 2)];
    let lengths = sequences.map(|(first, queries)| first + queries);
    let (order, starts, blocks) = tables(&mut numbers, &lengths);
    let (mut tiles, mut rows) = (Vec::new(), 0);
    for ((first, queries), start) in sequences.into_iter().zip(starts) {
        for at in (0..queries).step_by(TILE_QUERIES) {
            tiles.extend([rows + at, TILE_QUERIES.min(queries - at), first + at, start].map(int));
        }
        rows += queries;
    }
    let count = tiles.len() / 4;
    KernelCase {
        name: format!("prefill_attention, {heads} and {kv_heads} heads{}", window_name(window)),
        buffers: vec![
            numbers.values(rows * shape.qkv_width(), element),
            numbers.values(blocks * shape.block_stride, element),
            words(order),
            words(tiles),
            vec![0; rows * heads * head_dim * element.bytes()],
        ],
        work: Box::new(move |at| {
            let (unused, out) = (at[4].part(0, 0), at[4]);
            let parts = AttentionArgs {
                qkv: at[0],
                pool: at[1],
                tables: at[2],
                entries: at[3],
                out,
                partial: unused,
                summary: unused,
                window,
            };
            vec![KernelWork::Launch(kernels::prefill_attention(&shape, &parts, 1, count))]
        }),
        compared: vec![(4, Comparison::Near(element, 2.0 * rounding(element)))],
    }
}

/// A product into a narrow and a wide buffer.
fn product(
    name: String,
    seed: u64,
    element: Element,
    (rows, inputs, outputs): (usize, usize, usize),
    enqueue: fn(Matmul) -> KernelWork,
) -> KernelCase {
    let mut numbers = RandomNumbers(seed);
    KernelCase {
        name,
        buffers: vec![
            numbers.values(rows * inputs, element),
            numbers.values(outputs * inputs, element),
            vec![0; rows * outputs * element.bytes()],
            vec![0; rows * outputs * 4],
        ],
        work: Box::new(move |at| {
            let into = |out, result| {
                enqueue(Matmul { x: at[0], weights: at[1], out, rows, inputs, outputs, element, result })
            };
            vec![into(at[2], element), into(at[3], Element::F32)]
        }),
        compared: vec![near(2, element), near(3, Element::F32)],
    }
}

fn matmul(element: Element, size @ (rows, inputs, outputs): (usize, usize, usize)) -> KernelCase {
    let name = format!("product of {rows} × {inputs} × {outputs}");
    product(name, 7, element, size, KernelWork::Matmul)
}

fn few_rows(size @ (rows, inputs, outputs): (usize, usize, usize)) -> KernelCase {
    let name = format!("few_rows of {rows} × {inputs} × {outputs}");
    product(name, 9, Element::Bf16, size, |matmul| {
        // The narrow product has few warps per output, the wide one many.
        let multiprocessors = if matmul.result == Element::Bf16 { 1 } else { 1 << 20 };
        KernelWork::Launch(kernels::few_rows(&matmul, multiprocessors).expect("it fits"))
    })
}

fn few_rows_gated(
    features: KernelFeatures,
    (rows, inputs, width, with_bias): (usize, usize, usize, bool),
) -> KernelCase {
    let (mut numbers, element, activation) = (RandomNumbers(10), Element::Bf16, activation(features));
    KernelCase {
        name: format!("few_rows_gated of {rows} × {inputs} × {width}"),
        buffers: vec![
            numbers.values(rows * inputs, element),
            numbers.values(2 * width * inputs, element),
            numbers.values(2 * width, Element::F32),
            vec![0; rows * width * 2],
        ],
        work: Box::new(move |at| {
            let (x, weights, out, outputs) = (at[0], at[1], at[3], 2 * width);
            let matmul = Matmul { x, weights, out, rows, inputs, outputs, element, result: element };
            let bias = with_bias.then_some(at[2]);
            let launch = kernels::few_rows_gated(&matmul, bias, out, activation);
            vec![KernelWork::Launch(launch.expect("it fits"))]
        }),
        compared: vec![near(3, element)],
    }
}

/// More pieces than one launch takes, of different lengths: some are no multiple of 16 bytes, some are longer than one
/// part or than one piece of a launch.
fn copies() -> KernelCase {
    let mut numbers = RandomNumbers(11);
    let small = (0..300).map(|i| (i, i * 997 % 300, 16 + i % 40 * 100));
    // In units of 4 KiB, as the others.
    let large = [(300, 300, (32 << 10) + 16), (320, 1700, (2 << 20) + 16), (1000, 320, (5 << 20) + 4096)];
    let pieces: Vec<(usize, usize, usize)> = small.chain(large).collect();
    let bytes = 2_300 * 4096;
    KernelCase {
        name: "copies".into(),
        buffers: vec![numbers.values(bytes / 4, Element::F32), vec![0; bytes]],
        work: Box::new(move |at| {
            let (from, into) = (at[0], at[1]);
            let piece = |&(at, to, len): &(usize, usize, usize)| {
                (from.part(at * 4096, len), into.part(to * 4096, len))
            };
            vec![KernelWork::Copies(pieces.iter().map(piece).collect())]
        }),
        compared: vec![(1, Comparison::Bytes)],
    }
}

/// Draws of every kind, at a temperature where a few tokens have large weights. Exponentials that differ in the last
/// bit move a boundary by 1e-7 of the range of a draw.
fn choose(vocab: usize) -> KernelCase {
    let mut numbers = RandomNumbers(8);
    let draw = |kind: i32, temperature: f32, top_k: i32, top_p: f32, min_p: f32, fraction: u64| {
        let float = |value: f32| value.to_bits().cast_signed();
        let half = |value: u64| (value as u32).cast_signed();
        [
            kind,
            float(temperature.recip()),
            top_k,
            float(top_p),
            float(min_p),
            half(fraction),
            half(fraction >> 32),
        ]
    };
    let mut draws = vec![draw(0, 1.0, 0, 1.0, 0.0, 0), draw(1, 1.0, 0, 1.0, 0.0, 0)];
    for (top_k, top_p, min_p) in
        [(0, 1.0, 0.0), (1, 0.9, 0.0), (7, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (40, 0.9, 0.05)]
    {
        for _ in 0..6 {
            draws.push(draw(2, 0.1, top_k, top_p, min_p, numbers.next() >> 11 << 11));
        }
    }
    let rows = draws.len();
    let mut logits = numbers.values(rows * vocab, Element::F32);
    // Row 1 has equal values and a NaN. The lowest of the equal ones must be chosen.
    for (index, value) in [(vocab / 2, 9.0_f32), (vocab - 1, 9.0), (3, f32::NAN)] {
        logits[(vocab + index) * 4..][..4].copy_from_slice(&value.to_le_bytes());
    }
    // Every other drawn row has many equal values.
    for value in (2..rows).step_by(2).flat_map(|row| row * vocab..(row + 1) * vocab) {
        let at = &mut logits[value * 4..][..4];
        let near = <[u8; 4]>::try_from(&*at).map_or(0.0, |it| (f32::from_le_bytes(it) * 8.0).round() / 8.0);
        at.copy_from_slice(&near.to_le_bytes());
    }
    KernelCase {
        name: format!("choose of {vocab}"),
        buffers: vec![
            logits,
            vec![0; rows * PARTS * 4],
            vec![0; rows * PARTS * 4],
            words(draws.into_iter().flat_map(|draw: [i32; DRAW_WORDS]| draw)),
            vec![0; rows * 4],
        ],
        work: Box::new(move |at| {
            let parts =
                ChooseArgs { logits: at[0], values: at[1], indices: at[2], draws: at[3], chosen: at[4] };
            kernels::choose(&parts, vocab, rows).map(KernelWork::Launch).into()
        }),
        compared: vec![(1, Comparison::Bytes), (2, Comparison::Bytes), (4, Comparison::Bytes)],
    }
}

#[cfg(test)]
mod tests;
