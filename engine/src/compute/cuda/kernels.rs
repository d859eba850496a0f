//! The kernels: their sources and their launches.
//!
//! A source is generated for one element type, head width and set of [features](KernelFeatures), and includes nothing.
//! Arguments are built here for both devices. A test compares their number and kinds with the parameters in the sources.

mod experts;
mod features;

pub use self::experts::{CHOSEN_MAX, EXPERT_ROWS, EXPERTS_MAX, ExpertArgs, ExpertShape};
pub use self::features::{KernelFeature, KernelFeatures, KernelTarget};

use super::device::{DeviceSlice, Element, Kernel, KernelArg, Launch, Matmul};
use crate::model::spec::Activation;

const PTX: &str = include_str!("kernels/ptx.cu");
const PRELUDE: &str = include_str!("kernels/prelude.cu");
const ROWS: &str = include_str!("kernels/rows.cu");
const ROPE_KV: &str = include_str!("kernels/rope_kv.cu");
const TENSOR_CORE: &str = include_str!("kernels/tensor_core.cu");
const DECODE_BF16: &str = include_str!("kernels/decode_bf16.cu");
const PREFILL_BF16: &str = include_str!("kernels/prefill_bf16.cu");
const ATTENTION_F32: &str = include_str!("kernels/attention_f32.cu");
const MERGE: &str = include_str!("kernels/merge.cu");
const CHOOSE: &str = include_str!("kernels/choose.cu");
const FEW_ROWS: &str = include_str!("kernels/few_rows.cu");
const COPIES: &str = include_str!("kernels/copies.cu");
const ROUTING: &str = include_str!("kernels/routing.cu");
const EXPERTS_F32: &str = include_str!("kernels/experts_f32.cu");
const EXPERTS_BF16: &str = include_str!("kernels/experts_bf16.cu");

/// Queries of one tile of prefill attention.
pub const TILE_QUERIES: usize = 64;
/// Query heads of a block of decode attention.
const GROUP_HEADS: usize = 16;
/// Splits of decode attention are multiples of this number of tokens.
pub const SPLIT_TOKENS: usize = 64;
/// Most splits of one sequence.
pub const SPLITS_MAX: usize = 64;
/// Parts of a row of logits for the search of the best.
pub const PARTS: usize = 32;
/// Integers of one draw, see `choose.cu`.
pub const DRAW_WORDS: usize = 7;
/// Warps of a block of decode attention.
const DECODE_WARPS: usize = 4;
/// Numbers of stages of a warp's pipeline, the most first: see [`decode_stages`].
pub const DECODE_STAGES: [usize; 3] = [3, 2, 1];
/// Most rows of products of few rows.
pub const FEW_ROWS_MAX: usize = 8;
/// Inputs that these products read at a time.
const FEW_ROWS_INPUTS: usize = 64;
/// Name of the kernel that copies pieces of memory. No step launches it, only a device's copies of many pieces.
pub const COPY_KERNEL: &str = "copy_pieces";
/// Pieces of one launch of it: the parameters take 20 bytes per piece, of the 4 KiB of a launch.
pub const COPY_PIECES: usize = 128;
/// Bytes that one of its blocks copies. Larger parts are slower on an H200.
pub const COPY_PART: usize = 32 << 10;

/// Whether there are kernels for heads of this width.
///
/// # Errors
/// The supported widths.
pub fn supported(element: Element, head_dim: usize) -> Result<(), String> {
    match element {
        Element::F32 if head_dim <= 256 && head_dim.is_multiple_of(2) => Ok(()),
        Element::Bf16 if head_dim <= 256 && head_dim.is_multiple_of(16) => Ok(()),
        Element::F32 => Err(format!("head_dim {head_dim}: f32 on CUDA computes even widths up to 256")),
        Element::Bf16 => Err(format!("head_dim {head_dim}: bf16 on CUDA computes multiples of 16 up to 256")),
    }
}

/// Bytes of the pipelines of a block of decode attention.
fn pipeline_bytes(head_dim: usize, stages: usize) -> usize {
    DECODE_WARPS * stages * 2 * 16 * row_bytes(head_dim)
}

/// Stages of decode attention that fit into a block's shared memory. With heads of 128 elements three stages take 102
/// KiB, and devices of compute capability 8.6 and 8.9 have 99. With heads of 256 elements one stage takes 68 KiB.
#[must_use]
pub fn decode_stages(head_dim: usize, shared_bytes_max: usize) -> usize {
    let fits = |stages: &usize| pipeline_bytes(head_dim, *stages) <= shared_bytes_max;
    DECODE_STAGES.into_iter().find(fits).unwrap_or(1)
}

/// Keys of a tile of prefill attention. With wide heads two tiles of 64 do not fit into a block's shared memory.
fn tile_keys(head_dim: usize) -> usize {
    if head_dim > 128 { TILE_QUERIES / 2 } else { TILE_QUERIES }
}

/// The complete source for a target and a number of stages. `#line` makes errors refer to the source file.
#[must_use]
pub fn source(target: &KernelTarget, stages: usize) -> String {
    definitions(target, stages) + &lines("ptx.cu", PTX) + &bodies(target)
}

/// A source behind a `#line`, so that errors refer to its file.
#[must_use]
pub fn lines(name: &str, text: &str) -> String {
    format!("#line 1 \"{name}\"\n{text}\n")
}

/// The constants of the sources.
#[must_use]
pub fn definitions(target: &KernelTarget, stages: usize) -> String {
    let KernelTarget { element, head_dim, features } = *target;
    let (bf16, keys) = (u8::from(element == Element::Bf16), tile_keys(head_dim));
    let feature =
        |feature: KernelFeature| format!("#define {} {}\n", feature.label(), u8::from(features.has(feature)));
    let features: String = KernelFeature::ALL.into_iter().map(feature).collect();
    format!(
        "#define ELEMENT_BF16 {bf16}\n#define HEAD_DIM {head_dim}\n#define DECODE_WARPS {DECODE_WARPS}\n\
         #define DECODE_STAGES {stages}\n#define KEYS {keys}\n#define SPLIT_TOKENS {SPLIT_TOKENS}\n\
         #define COPY_PIECES {COPY_PIECES}\n#define COPY_PART {COPY_PART}u\n\
         #define EXPERT_ROWS {EXPERT_ROWS}\n#define EXPERTS_MAX {EXPERTS_MAX}\n#define CHOSEN_MAX {CHOSEN_MAX}\n\
         {features}"
    )
}

/// All sources except the PTX instructions.
#[must_use]
pub fn bodies(target: &KernelTarget) -> String {
    let of_element: &[(&str, &str)] = match target.element {
        Element::Bf16 => &[
            ("tensor_core.cu", TENSOR_CORE),
            ("decode_bf16.cu", DECODE_BF16),
            ("prefill_bf16.cu", PREFILL_BF16),
            ("few_rows.cu", FEW_ROWS),
        ],
        Element::F32 => &[("attention_f32.cu", ATTENTION_F32)],
    };
    let first = [("prelude.cu", PRELUDE), ("rows.cu", ROWS), ("rope_kv.cu", ROPE_KV)];
    let last = [("merge.cu", MERGE), ("choose.cu", CHOOSE), ("copies.cu", COPIES)];
    let experts: &[(&str, &str)] = match target.element {
        _ if !target.features.has(KernelFeature::Experts) => &[],
        Element::Bf16 => &[("routing.cu", ROUTING), ("experts_bf16.cu", EXPERTS_BF16)],
        Element::F32 => &[("routing.cu", ROUTING), ("experts_f32.cu", EXPERTS_F32)],
    };
    let all = first.iter().chain(of_element).chain(&last).chain(experts);
    all.map(|(name, text)| lines(name, text)).collect()
}

/// Sizes of a model that launches depend on.
#[derive(Clone, Copy, Debug)]
pub struct KernelShape {
    /// Element type.
    pub element: Element,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Stages of decode attention in the device's kernels: [`decode_stages`].
    pub decode_stages: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// Elements of a KV block over all layers.
    pub block_stride: usize,
    /// Added to mean squares.
    pub norm_eps: f32,
    /// Features of the kernels.
    pub features: KernelFeatures,
    /// Multiplier of scores.
    pub factor: f32,
    /// Soft cap of scores, with [`KernelFeature::ScoreCaps`].
    pub score_cap: f32,
    /// Elements of a head that are rotated, with [`KernelFeature::PartialRotary`].
    pub rotary_dim: usize,
}

impl KernelShape {
    /// A shape of Llama with one head, one layer and one slot.
    #[must_use]
    pub fn plain(element: Element, head_dim: usize) -> Self {
        Self {
            element,
            heads: 1,
            kv_heads: 1,
            head_dim,
            decode_stages: DECODE_STAGES[0],
            block_tokens: 1,
            block_stride: 2 * head_dim,
            norm_eps: 1e-5,
            features: KernelFeatures::NONE,
            factor: 1.0 / (head_dim as f32).sqrt(),
            score_cap: 0.0,
            rotary_dim: head_dim,
        }
    }

    /// Elements of a row of q, k and v.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Blocks of decode attention per KV head, each with up to [`GROUP_HEADS`] of its query heads.
    fn group_tiles(&self) -> usize {
        (self.heads / self.kv_heads).div_ceil(GROUP_HEADS)
    }

    /// Splits of decode attention for this number of sequences. Two blocks run on a processor at a time, and the time
    /// of all rounds counts: more splits are chosen if they save a tenth of it.
    #[must_use]
    pub fn splits(&self, sequences: usize, multiprocessors: u32) -> usize {
        let blocks = (sequences * self.kv_heads * self.group_tiles()).max(1);
        let at_once = (2 * multiprocessors as usize).max(1);
        let time = |splits: usize| (blocks * splits).div_ceil(at_once) as f64 / splits as f64;
        let better = |best: usize, splits: usize| if time(splits) < 0.9 * time(best) { splits } else { best };
        // Starts with the most splits that run in one round.
        let first = (at_once / blocks).clamp(1, SPLITS_MAX);
        (first..=SPLITS_MAX.min(4 * first)).fold(first, better)
    }

    /// First element of a layer's KV in a block.
    fn layer_offset(&self, layer: usize) -> usize {
        layer * 2 * self.kv_heads * self.block_tokens * self.head_dim
    }
}

fn n(value: usize) -> KernelArg {
    KernelArg::U32(u32::try_from(value).expect("sizes of a step fit 32 bits"))
}

fn grid(value: usize) -> u32 {
    u32::try_from(value).expect("a grid fits 32 bits")
}

/// A launch without dynamic shared memory.
fn launch(kernel: Kernel, grid: [u32; 3], threads: u32, args: Vec<KernelArg>) -> Launch {
    Launch { kernel, grid, threads, shared_bytes: 0, args }
}

fn read_or_null(slice: Option<DeviceSlice>) -> KernelArg {
    slice.map_or(KernelArg::Null, KernelArg::In)
}

/// `hidden[row] = table[tokens[row]]`, times `scale` if the model has one.
#[must_use]
pub fn embed(
    [tokens, table, hidden]: [DeviceSlice; 3],
    width: usize,
    rows: usize,
    scale: Option<f32>,
) -> Launch {
    let mut args = vec![KernelArg::In(tokens), KernelArg::In(table), KernelArg::Out(hidden), n(width)];
    args.extend(scale.map(KernelArg::F32));
    launch(Kernel::Embed, [grid(rows), 1, 1], 256, args)
}

/// Arguments of [`add_rms_norm`].
#[derive(Clone, Copy, Debug)]
pub struct NormArgs {
    /// The residual stream, f32.
    pub hidden: DeviceSlice,
    /// Values to add to it, and their bias, f32.
    pub delta: Option<(DeviceSlice, Option<DeviceSlice>)>,
    /// Weights of the norm of these values, f32, with [`KernelFeature::PostNorms`].
    pub post: Option<DeviceSlice>,
    /// The norm's weights, f32.
    pub weight: DeviceSlice,
    /// The input row of each row of `out`; the same row by default.
    pub rows: Option<DeviceSlice>,
    /// The result.
    pub out: DeviceSlice,
}

/// `hidden += post_norm(delta + bias); out = norm(hidden)`, for `rows` rows of `out`.
#[must_use]
pub fn add_rms_norm(
    features: KernelFeatures,
    norm: &NormArgs,
    width: usize,
    eps: f32,
    rows: usize,
) -> Launch {
    let mut args = vec![
        KernelArg::Out(norm.hidden),
        read_or_null(norm.delta.map(|(delta, _)| delta)),
        read_or_null(norm.delta.and_then(|(_, bias)| bias)),
        KernelArg::In(norm.weight),
        read_or_null(norm.rows),
        KernelArg::Out(norm.out),
        n(width),
        KernelArg::F32(eps),
    ];
    if features.has(KernelFeature::PostNorms) {
        args.push(read_or_null(norm.post));
    }
    launch(Kernel::AddRmsNorm, [grid(rows), 1, 1], 512, args)
}

/// Arguments of [`rope_kv`].
#[derive(Clone, Copy, Debug)]
pub struct RopeKvArgs {
    /// Rows of q, k and v; q is rotated in place.
    pub qkv: DeviceSlice,
    /// Bias of q, k and v, f32.
    pub bias: Option<DeviceSlice>,
    /// Weights of the norms of q's and k's heads, f32.
    pub norms: Option<(DeviceSlice, DeviceSlice)>,
    /// Cosines, then sines, of each position, f32; of pairs that are not rotated 1 and 0.
    pub angles: DeviceSlice,
    /// Position of each row.
    pub positions: DeviceSlice,
    /// Slot of each row in the pool, or negative.
    pub slots: DeviceSlice,
    /// The KV pool.
    pub pool: DeviceSlice,
}

/// Bias, head norms, rotation and KV write of one layer.
#[must_use]
pub fn rope_kv(shape: &KernelShape, parts: &RopeKvArgs, layer: usize, rows: usize) -> Launch {
    let mut args = [
        &[KernelArg::Out(parts.qkv), read_or_null(parts.bias)][..],
        &[parts.norms.map(|(q, _)| q), parts.norms.map(|(_, k)| k)].map(read_or_null),
        &[parts.angles, parts.positions, parts.slots].map(KernelArg::In),
        &[KernelArg::Out(parts.pool)],
        &layer_args(shape, layer),
        &[KernelArg::F32(shape.norm_eps)],
    ]
    .concat();
    if shape.features.has(KernelFeature::PartialRotary) {
        args.push(n(shape.rotary_dim));
    }
    let units = grid((shape.heads + 2 * shape.kv_heads).div_ceil(4));
    launch(Kernel::RopeKv, [grid(rows), units, 1], 128, args)
}

/// Arguments of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// Rows of q, k and v, q rotated.
    pub qkv: DeviceSlice,
    /// The KV pool.
    pub pool: DeviceSlice,
    /// Block tables, in sequence.
    pub tables: DeviceSlice,
    /// Entries of three integers (decode) or four (prefill), see the kernels.
    pub entries: DeviceSlice,
    /// Rows of attended heads.
    pub out: DeviceSlice,
    /// Numerators of splits, f32: decode only.
    pub partial: DeviceSlice,
    /// Maxima and denominators of splits, f32: decode only.
    pub summary: DeviceSlice,
    /// Keys that a query sees, its own included, with [`KernelFeature::Windows`]. `None`: all.
    pub window: Option<usize>,
}

/// The place of a layer in the pool, and the pool's heads and blocks.
fn layer_args(shape: &KernelShape, layer: usize) -> [KernelArg; 5] {
    let (stride, offset) = (shape.block_stride as u64, shape.layer_offset(layer) as u64);
    let [stride, offset] = [stride, offset].map(KernelArg::U64);
    [stride, offset, n(shape.heads), n(shape.kv_heads), n(shape.block_tokens)]
}

/// The multiplier of scores, and the window and the soft cap of models with them.
fn score_args(shape: &KernelShape, window: Option<usize>) -> Vec<KernelArg> {
    let mut args = vec![KernelArg::F32(shape.factor)];
    if shape.features.has(KernelFeature::Windows) {
        // Positions are below 2^31.
        let all = i32::MAX as usize;
        args.push(n(window.unwrap_or(all).min(all)));
    }
    if shape.features.has(KernelFeature::ScoreCaps) {
        args.push(KernelArg::F32(shape.score_cap));
    }
    args
}

/// The activation, for kernels of models with another one than silu.
fn activation_arg(activation: Activation) -> Option<KernelArg> {
    match activation {
        Activation::Silu => None,
        Activation::GeluTanh => Some(n(1)),
        Activation::SwigluOai => unreachable!("`supported` refuses the only family with clamped gates"),
    }
}

/// Bytes of a head's row in shared memory, see `tensor_core.cu`.
fn row_bytes(head_dim: usize) -> usize {
    head_dim * 2 + 16
}

/// The two launches of decode attention over `sequences` entries.
#[must_use]
pub fn decode_attention(
    shape: &KernelShape,
    parts: &AttentionArgs,
    layer: usize,
    sequences: usize,
    splits: usize,
) -> [Launch; 2] {
    // A warp of the merge kernel holds this many.
    assert!(splits <= SPLITS_MAX, "{splits} splits, at most {SPLITS_MAX}");
    let pipeline = pipeline_bytes(shape.head_dim, shape.decode_stages);
    let meeting = DECODE_WARPS * 16 * (shape.head_dim + 8 + 2) * 4;
    let read = [parts.qkv, parts.pool, parts.tables, parts.entries].map(KernelArg::In);
    let written = [parts.partial, parts.summary].map(KernelArg::Out);
    let scores = score_args(shape, parts.window);
    let args = [&read[..], &written, &layer_args(shape, layer), &[n(splits)], &scores[..]].concat();
    let blocks = [grid(splits), grid(shape.kv_heads * shape.group_tiles()), grid(sequences)];
    let attend = Launch {
        shared_bytes: shared_bytes(shape, pipeline.max(meeting)),
        ..launch(Kernel::DecodeAttention, blocks, 128, args)
    };
    let read = [parts.partial, parts.summary, parts.entries].map(KernelArg::In);
    let args = [&read[..], &[KernelArg::Out(parts.out), n(shape.heads), n(splits)]].concat();
    let merge = launch(Kernel::MergeAttention, [grid(shape.heads), grid(sequences), 1], 256, args);
    [attend, merge]
}

fn shared_bytes(shape: &KernelShape, bytes: usize) -> u32 {
    match shape.element {
        Element::F32 => 0,
        Element::Bf16 => grid(bytes),
    }
}

/// Prefill attention over `tiles` entries.
#[must_use]
pub fn prefill_attention(shape: &KernelShape, parts: &AttentionArgs, layer: usize, tiles: usize) -> Launch {
    let read = [parts.qkv, parts.pool, parts.tables, parts.entries].map(KernelArg::In);
    let scores = score_args(shape, parts.window);
    let args = [&read[..], &[KernelArg::Out(parts.out)], &layer_args(shape, layer), &scores[..]].concat();
    Launch {
        shared_bytes: shared_bytes(shape, 2 * 2 * tile_keys(shape.head_dim) * row_bytes(shape.head_dim)),
        ..launch(Kernel::PrefillAttention, [grid(tiles), grid(shape.heads), 1], 128, args)
    }
}

/// `out = activation(gate + bias) * (up + bias)`.
#[must_use]
pub fn silu_mul(
    gate_up: DeviceSlice,
    bias: Option<DeviceSlice>,
    out: DeviceSlice,
    (width, rows): (usize, usize),
    activation: Activation,
) -> Launch {
    let mut args = vec![KernelArg::In(gate_up), read_or_null(bias), KernelArg::Out(out), n(width)];
    args.extend(activation_arg(activation));
    launch(Kernel::SiluMul, [grid(width.div_ceil(256)), grid(rows), 1], 256, args)
}

/// `out = x · weightsᵀ`, if one of Baton's own kernels computes it: bf16, and few rows. `multiprocessors` determines
/// the division of the outputs and with that the order of summation; the number of rows does not.
#[must_use]
pub fn few_rows(matmul: &Matmul, multiprocessors: u32) -> Option<Launch> {
    let Matmul { x, weights, out, rows, inputs, outputs, element, result } = *matmul;
    if element != Element::Bf16 || rows > FEW_ROWS_MAX || !inputs.is_multiple_of(FEW_ROWS_INPUTS) {
        return None;
    }
    // If all blocks run at the same time, blocks with more warps are faster.
    let is_deep = outputs.div_ceil(16) <= 2 * multiprocessors as usize;
    let (kernel, at_once, threads) = match is_deep {
        true => (Kernel::FewRowsDeep, 16, 512),
        false => (Kernel::FewRowsWide, 32, 256),
    };
    if !outputs.is_multiple_of(at_once) {
        return None;
    }
    let (narrow, wide) = match result {
        Element::Bf16 => (KernelArg::Out(out), KernelArg::Null),
        Element::F32 => (KernelArg::Null, KernelArg::Out(out)),
    };
    let args = vec![KernelArg::In(x), KernelArg::In(weights), narrow, wide, n(rows), n(inputs), n(outputs)];
    Some(launch(kernel, [grid(outputs / at_once), 1, 1], threads, args))
}

/// The product with gate and up (rows of gate, then rows of up), and their gated activation, if one of Baton's own
/// kernels computes it. `matmul` is the product with both, `out` the result.
#[must_use]
pub fn few_rows_gated(
    matmul: &Matmul,
    bias: Option<DeviceSlice>,
    out: DeviceSlice,
    activation: Activation,
) -> Option<Launch> {
    let Matmul { x, weights, rows, inputs, outputs, element, .. } = *matmul;
    let width = outputs / 2;
    let is_ours = element == Element::Bf16 && rows <= FEW_ROWS_MAX;
    if !is_ours || !inputs.is_multiple_of(FEW_ROWS_INPUTS) || !width.is_multiple_of(16) {
        return None;
    }
    let [x, weights] = [x, weights].map(KernelArg::In);
    let mut args = vec![x, weights, read_or_null(bias), KernelArg::Out(out), n(rows), n(inputs), n(width)];
    args.extend(activation_arg(activation));
    Some(launch(Kernel::FewRowsGated, [grid(width / 16), 1, 1], 256, args))
}

/// `logits = cap * tanh(logits / cap)`, with [`KernelFeature::LogitCap`].
#[must_use]
pub fn cap_logits(logits: DeviceSlice, width: usize, rows: usize, cap: f32) -> Launch {
    let args = vec![KernelArg::Out(logits), n(width), KernelArg::F32(cap)];
    launch(Kernel::CapLogits, [grid(width.div_ceil(256)), grid(rows), 1], 256, args)
}

/// Arguments of [`choose`].
#[derive(Clone, Copy, Debug)]
pub struct ChooseArgs {
    /// Rows of logits, f32.
    pub logits: DeviceSlice,
    /// Best value of each part of each row, f32.
    pub values: DeviceSlice,
    /// Index of the best value.
    pub indices: DeviceSlice,
    /// The draw of each row.
    pub draws: DeviceSlice,
    /// The tokens.
    pub chosen: DeviceSlice,
}

/// The two launches that choose a token for each of `rows` rows.
#[must_use]
pub fn choose(parts: &ChooseArgs, vocab: usize, rows: usize) -> [Launch; 2] {
    let best = [KernelArg::In(parts.logits), KernelArg::Out(parts.values), KernelArg::Out(parts.indices)];
    let args = [&best[..], &[n(vocab), n(PARTS)]].concat();
    let best = launch(Kernel::BestOfParts, [grid(PARTS), grid(rows), 1], 256, args);
    let read = [parts.logits, parts.values, parts.indices, parts.draws].map(KernelArg::In);
    let args = [&read[..], &[KernelArg::Out(parts.chosen), n(vocab), n(PARTS)]].concat();
    let choose = launch(Kernel::Choose, [grid(rows), 1, 1], 512, args);
    [best, choose]
}

#[cfg(test)]
mod tests;
