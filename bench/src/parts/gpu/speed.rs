//! Speeds, with the GPU's limits.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_engine::compute::cuda::device::{
    DeviceSlice, HostRun, HostSlice, Launch, Matmul, Priority, Stream, StreamEvent,
};
use baton_engine::compute::cuda::kernels::{self, AttentionArgs, KernelShape, SPLIT_TOKENS};
use baton_engine::compute::cuda::{CudaExecutor, Device, DeviceError, DeviceOptions, Element, PoolSize};
use baton_engine::compute::{Executor, Logits, LogitsRequest, SeqStep};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::files::ModelFiles;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::weights::{Weights, parameter_count};
use baton_engine::run::options::EngineOptions;
use baton_engine::sampling::{Draw, SamplingParams, TokenPosition};
use serde::Serialize;

use super::GpuBenchError;

/// Runs of each measurement, after an untimed one. The best counts.
const RUNS: usize = 5;
const BLOCK_TOKENS: usize = 16;
/// Length of the noise, which is repeated in larger buffers.
const NOISE_BYTES: usize = 64 << 20;

/// Sizes of all measurements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Heads, KV heads, elements of a head.
    heads: (usize, usize, usize),
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    layers: usize,
    /// Bytes of a copy inside the device, and of one over the link.
    copy: usize,
    link: usize,
    /// Bytes of a block, and how many are copied.
    block: usize,
    blocks: usize,
    /// Rows and columns of the product.
    product: usize,
    /// Keys of the measured attention, and layers that it cycles through.
    context: usize,
    attended: usize,
    /// Tokens of the measured prompts, and of the context of decode.
    prompts: [usize; 2],
    /// Tokens of one step of the longest prompt, if it takes several steps.
    chunk: usize,
    decoded_from: usize,
    decoded: usize,
    batches: [usize; 3],
}

impl Sizes {
    /// The sizes of Llama 3.1 8B, with this number of layers.
    pub(super) fn llama(layers: usize) -> Self {
        Self {
            heads: (32, 8, 128),
            hidden: 4_096,
            intermediate: 14_336,
            vocab: 128_256,
            layers,
            copy: 4 << 30,
            link: 1 << 30,
            block: 2 << 20,
            blocks: 512,
            product: 8_192,
            context: 32_768,
            // Half a GiB for one sequence: the first layer is no longer cached when it is used again.
            attended: 4,
            prompts: [1_024, 8_192],
            // The engine's default, which does not depend on the model.
            chunk: EngineOptions::new(ModelFiles::Dir(PathBuf::new())).max_num_batched_tokens,
            decoded_from: 512,
            decoded: 64,
            batches: [1, 8, 64],
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    /// The quantity.
    pub what: String,
    /// The value in `unit`, the best of several runs.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The limit by measurements of the device, if known.
    pub limit: Option<f64>,
    /// The minimum in the same unit: a target of this project. Targets of whole models hold for an H200.
    pub target: Option<f64>,
}

pub(super) fn print(speeds: &[Speed], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "{:<50}{:>10} {:<9}{:>10} {:>7}{:>9}", "", "best", "", "limit", "ratio", "target")?;
    for speed in speeds {
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1}"));
        let ratio =
            speed.limit.map_or_else(String::new, |limit| format!("{:.0} %", speed.value / limit * 100.0));
        let (limit, target) = (number(speed.limit), number(speed.target));
        writeln!(
            out,
            "{:<50}{:>10.1} {:<9}{limit:>10} {ratio:>7}{target:>9}",
            speed.what, speed.value, speed.unit
        )?;
    }
    Ok(())
}

/// Measures everything, on devices that `open` creates for a head width. If a part fails, the others continue, and
/// its name and reason are returned.
pub(super) fn measure<D: Device>(
    sizes: &Sizes,
    mut open: impl FnMut(usize) -> Result<D, DeviceError>,
) -> (Vec<Speed>, Vec<String>) {
    let (mut speeds, mut failed) = (Vec::new(), Vec::new());
    let (mut copy, mut flops) = (f64::NAN, f64::NAN);
    let mut raw = || -> Result<(), GpuBenchError> {
        let mut device = open(sizes.heads.2)?;
        let mut bench = BareDevice::new(&mut device, *sizes)?;
        copy = bench.copies(&mut speeds)?;
        flops = bench.product(&mut speeds)?;
        bench.attention(copy, &mut speeds)
    };
    if let Err(error) = raw() {
        failed.push(format!("the device by itself: {error}"));
    }
    let modelled = open(sizes.heads.2)
        .map_err(GpuBenchError::from)
        .and_then(|device| model(device, sizes, copy, flops, &mut speeds));
    if let Err(error) = modelled {
        failed.push(format!("a model: {error}"));
    }
    (speeds, failed)
}

/// Measurements on a bare device.
struct BareDevice<'a, D: Device> {
    device: &'a mut D,
    sizes: Sizes,
    stream: Stream,
    from: StreamEvent,
    to: StreamEvent,
}

impl<'a, D: Device> BareDevice<'a, D> {
    fn new(device: &'a mut D, sizes: Sizes) -> Result<Self, DeviceError> {
        let (stream, from, to) = (device.stream(Priority::Steps)?, device.event()?, device.event()?);
        Ok(Self { device, sizes, stream, from, to })
    }

    /// Seconds of the fastest of several runs of `work`.
    fn best(
        &mut self,
        mut work: impl FnMut(&mut D, Stream) -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for run in 0..=RUNS {
            self.device.record(self.from, self.stream)?;
            work(self.device, self.stream)?;
            self.wait()?;
            if run > 0 {
                best = best.min(f64::from(self.device.elapsed_ms(self.from, self.to)?) / 1e3);
            }
        }
        Ok(best)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.device.record(self.to, self.stream)?;
        self.device.synchronize(self.to)
    }

    fn room(&mut self, bytes: usize) -> Result<DeviceSlice, DeviceError> {
        Ok(DeviceSlice::of(self.device.alloc(bytes)?, bytes))
    }

    fn free(&mut self, slices: &[DeviceSlice]) -> Result<(), DeviceError> {
        slices.iter().try_for_each(|slice| self.device.free(slice.buffer))
    }

    /// Fills memory with bf16 noise. Zeros draw less power than numbers, and let a GPU run faster than it would in
    /// practice.
    fn fill(&mut self, slices: &[DeviceSlice]) -> Result<(), DeviceError> {
        let longest = slices.iter().map(|slice| slice.bytes).max().unwrap_or_default().clamp(2, NOISE_BYTES);
        let host = HostSlice { host: self.device.host(longest)?, offset: 0 };
        self.device.write_host(host, &noise(longest))?;
        for slice in slices {
            for at in (0..slice.bytes).step_by(longest) {
                let piece = slice.part(at, longest.min(slice.bytes - at));
                self.device.upload(self.stream, host, piece)?;
            }
        }
        self.wait()
    }

    /// Copies inside the device and over the link. Returns GB/s inside, with each byte counted as read and as
    /// written.
    fn copies(&mut self, speeds: &mut Vec<Speed>) -> Result<f64, GpuBenchError> {
        let Sizes { copy: bytes, link, block, blocks: count, .. } = self.sizes;
        let (places, linked) = (bytes / block, link / block);
        let (a, b) = (self.room(bytes)?, self.room(bytes)?);
        self.fill(&[a])?;
        let seconds = self.best(|device, stream| device.copy(stream, a, b))?;
        let copy = gigabytes(2 * bytes) / seconds;
        speeds.push(plain(format!("copy inside the device, {} MiB, r+w", bytes >> 20), copy, "GB/s"));

        // Scattered to scattered, as in a handoff on one GPU.
        let piece = |i| (a.part(i * 797 % places * block, block), b.part(i * 1201 % places * block, block));
        let pieces: Vec<_> = (0..count).map(piece).collect();
        let seconds = self.best(|device, stream| device.copy_many(stream, &pieces))?;
        let limited = |what, value, limit, part: f64| Speed {
            what,
            value,
            unit: "GB/s",
            limit: Some(limit),
            target: Some(limit * part),
        };
        let many = format!("{count} blocks of {} KiB", block >> 10);
        let blocks = gigabytes(2 * block * count) / seconds;
        speeds.push(limited(format!("copies of {many}, r+w"), blocks, copy, 0.85));

        let host = HostSlice { host: self.device.host(link)?, offset: 0 };
        let near = a.part(0, link);
        for (name, up) in [("host to device", true), ("device to host", false)] {
            let send = |device: &mut D, stream, host, slice| match up {
                true => device.upload(stream, host, slice),
                false => device.download(stream, slice, host),
            };
            let whole = gigabytes(link) / self.best(|device, stream| send(device, stream, host, near))?;
            let parts = self.best(|device, stream| {
                (0..count).try_for_each(|i| {
                    let at = i * 797 % linked * block;
                    send(device, stream, HostSlice { offset: at, ..host }, near.part(at, block))
                })
            })?;
            let parts = gigabytes(block * count) / parts;
            speeds.push(plain(format!("pinned {name}, {} MiB", link >> 20), whole, "GB/s"));
            speeds.push(limited(format!("pinned {name}, {many}"), parts, whole, 0.9));
        }
        self.free(&[a, b])?;
        self.tiers(speeds)?;
        Ok(copy)
    }

    /// Blocks from and to a host tier, as the engine's thread moves them: one after the other.
    fn tiers(&mut self, speeds: &mut Vec<Speed>) -> Result<(), GpuBenchError> {
        let Sizes { link, block, blocks: count, .. } = self.sizes;
        let linked = link / block;
        let (pool, memory) = self.device.alloc_shared(link)?;
        self.fill(&[DeviceSlice::of(pool, link)])?;
        let slots = Region::allocate(linked, block);
        memory.pin(&slots);
        let run = |i| {
            let (from, to) = (i * 797 % linked, i * 1201 % linked);
            [HostRun { pool: from * block, host: to * block, bytes: block }]
        };
        for (what, store) in [("stored into", true), ("loaded from", false)] {
            let mut best = f64::INFINITY;
            for _ in 0..RUNS {
                let begun = Instant::now();
                for i in 0..count {
                    match store {
                        true => memory.copy_out(&run(i), &slots)?,
                        false => memory.copy_in(&run(i), &slots)?,
                    }
                }
                best = best.min(begun.elapsed().as_secs_f64());
            }
            let what = format!("{count} blocks of {} KiB {what} the host tier, one by one", block >> 10);
            speeds.push(plain(what, gigabytes(block * count) / best, "GB/s"));
        }
        drop(memory);
        Ok(self.device.free(pool)?)
    }

    /// One large bf16 product. Returns FLOP/s.
    fn product(&mut self, speeds: &mut Vec<Speed>) -> Result<f64, GpuBenchError> {
        let size = self.sizes.product;
        let mut room = || self.room(size * size * 2);
        let (x, weights, out) = (room()?, room()?, room()?);
        self.fill(&[x, weights])?;
        let element = Element::Bf16;
        let matmul =
            Matmul { x, weights, out, rows: size, inputs: size, outputs: size, element, result: element };
        let seconds = self.best(|device, stream| device.matmul(stream, &matmul))?;
        let flops = 2.0 * (size as f64).powi(3) / seconds;
        speeds.push(plain(format!("bf16 product of {size} × {size} × {size}"), flops / 1e12, "TFLOP/s"));
        self.free(&[x, weights, out])?;
        Ok(flops)
    }

    /// Decode attention with a long context: the bytes of one layer's keys and values over the time. Each launch
    /// reads another layer than the previous one, as in a step, so that cached bytes are not reused.
    fn attention(&mut self, copy: f64, speeds: &mut Vec<Speed>) -> Result<(), GpuBenchError> {
        let Sizes { heads: (heads, kv_heads, head_dim), context, attended, .. } = self.sizes;
        for sequences in [1, 8] {
            let blocks = sequences * context / BLOCK_TOKENS;
            let shape = KernelShape {
                element: Element::Bf16,
                heads,
                kv_heads,
                head_dim,
                decode_stages: kernels::decode_stages(head_dim, self.device.shared_bytes_max()),
                block_tokens: BLOCK_TOKENS,
                block_stride: attended * 2 * kv_heads * BLOCK_TOKENS * head_dim,
                ..KernelShape::plain(Element::Bf16, head_dim)
            };
            let splits = shape.splits(sequences, self.device.multiprocessors()).min(context / SPLIT_TOKENS);
            let parts = AttentionArgs {
                qkv: self.room(sequences * shape.qkv_width() * 2)?,
                pool: self.room(blocks * shape.block_stride * 2)?,
                tables: self.room(blocks * 4)?,
                entries: self.room(sequences * 12)?,
                out: self.room(sequences * heads * head_dim * 2)?,
                partial: self.room(sequences * heads * splits * head_dim * 4)?,
                summary: self.room(sequences * heads * splits * 8)?,
                window: None,
            };
            self.fill(&[parts.pool, parts.qkv])?;
            let host = HostSlice { host: self.device.host(blocks * 4)?, offset: 0 };
            let table: Vec<usize> = (0..blocks).map(|block| block * 4_099 % blocks).collect();
            let entry = |row| [row, context, row * context / BLOCK_TOKENS];
            let entries: Vec<usize> = (0..sequences).flat_map(entry).collect();
            for (words, to) in [(table, parts.tables), (entries, parts.entries)] {
                let bytes: Vec<u8> = words.into_iter().flat_map(|word| (word as i32).to_le_bytes()).collect();
                self.device.write_host(host, &bytes)?;
                self.device.upload(self.stream, host, to)?;
                self.wait()?;
            }
            // Two passes over all layers, recorded as decode steps are, so that the time of launches is not
            // included.
            self.device.begin_capture(self.stream)?;
            let launches = in_turn(&shape, &parts, attended, sequences, splits);
            let issued = launches.iter().try_for_each(|launch| self.device.launch(self.stream, launch));
            let graph = self.device.end_capture(self.stream);
            issued?;
            let graph = graph?;
            let seconds = self.best(|device, stream| device.replay(graph, stream))?;
            speeds.push(Speed {
                what: format!("decode attention, {sequences} × {context} keys, a layer of {attended}"),
                value: 2.0 * gigabytes(parts.pool.bytes) / seconds,
                unit: "GB/s",
                limit: Some(copy),
                target: Some(copy * 0.8),
            });
            let AttentionArgs { qkv, pool, tables, entries, out, partial, summary, .. } = parts;
            self.free(&[qkv, pool, tables, entries, out, partial, summary])?;
        }
        Ok(())
    }
}

/// Launches of decode attention, in two passes over all layers.
fn in_turn(
    shape: &KernelShape,
    parts: &AttentionArgs,
    layers: usize,
    sequences: usize,
    splits: usize,
) -> Vec<Launch> {
    let attend = |at: usize| kernels::decode_attention(shape, parts, at % layers, sequences, splits);
    (0..2 * layers).flat_map(attend).collect()
}

/// Bytes of bf16 numbers, an even count. Each number has a sign, an exponent near 1 and a mantissa.
fn noise(bytes: usize) -> Vec<u8> {
    let number = |i: u32| {
        let mixed = i.wrapping_mul(2_654_435_761) ^ (i >> 7);
        ((mixed & 0x8000) | 0x3e80 | ((mixed >> 16) & 0x17f)) as u16
    };
    (0..(bytes / 2) as u32).flat_map(|i| number(i).to_le_bytes()).collect()
}

fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn plain(what: impl Into<String>, value: f64, unit: &'static str) -> Speed {
    Speed { what: what.into(), value, unit, limit: None, target: None }
}

/// A whole model with generated weights: decode and prefill. Limits: the device's copies in GB/s, products in FLOP/s.
fn model<D: Device>(
    device: D,
    sizes: &Sizes,
    copy: f64,
    flops: f64,
    speeds: &mut Vec<Speed>,
) -> Result<(), GpuBenchError> {
    let config = config(sizes)?;
    let (most, longest) = (sizes.batches[2], sizes.prompts[1]);
    let per_sequence = (sizes.decoded_from + sizes.decoded).div_ceil(BLOCK_TOKENS);
    let options = DeviceOptions {
        pool_size: PoolSize::Blocks((most * per_sequence).max(longest / BLOCK_TOKENS)),
        block_tokens: BLOCK_TOKENS,
        element: Element::Bf16,
        max_rows: longest,
        max_sequences: most,
        max_positions: longest.max(sizes.decoded_from + sizes.decoded),
        mirror: Some(Region::allocate),
    };
    let started = Instant::now();
    let mut executor = CudaExecutor::load(device, &Weights::random(1), &config, &options, &mut |_| ())?;
    speeds.push(plain("load, weights made up on the way", started.elapsed().as_secs_f64(), "s"));
    let started = Instant::now();
    executor.warm_up()?;
    speeds.push(plain("recording of decode steps", started.elapsed().as_secs_f64(), "s"));
    let whole = sizes.layers == 32;
    let matrices = parameter_count(&config) - config.vocab * config.hidden;
    let kv = executor.layout().block_bytes() / BLOCK_TOKENS * sizes.decoded_from;
    for batch in sizes.batches {
        let bytes = gigabytes(matrices * 2 + batch * kv);
        speeds.push(Speed {
            what: format!("decode, {} layers, batch {batch}", sizes.layers),
            value: decode(&mut executor, sizes, batch, per_sequence)?,
            unit: "tok/s",
            limit: Some((copy / bytes * batch as f64).min(flops / (2.0 * matrices as f64))),
            target: (whole && batch == 1).then_some(200.0),
        });
    }
    // Each prompt in one step, and the longest also in steps of the engine's default size.
    let chunked = sizes.prompts.map(|prompt| (prompt, prompt)).into_iter().chain([(longest, sizes.chunk)]);
    for (prompt, chunk) in chunked {
        let layers = (matrices - config.vocab * config.hidden) as f64;
        let attention = (config.layers * config.heads * config.head_dim) as f64 * 2.0 * prompt as f64;
        speeds.push(Speed {
            what: format!("prefill of {prompt} in steps of {chunk}, {} layers", sizes.layers),
            value: prompt as f64 / prefill(&mut executor, sizes, prompt, chunk)?,
            unit: "tok/s",
            limit: Some(flops / (2.0 * layers + attention)),
            target: (whole && prompt == longest).then_some(25_000.0),
        });
    }
    let started = Instant::now();
    executor.publish(&table(0, longest / BLOCK_TOKENS))?;
    let bytes = gigabytes(longest / BLOCK_TOKENS * executor.layout().block_bytes());
    let rate = bytes / started.elapsed().as_secs_f64();
    speeds.push(plain(format!("publish {longest} tokens to the mirror"), rate, "GB/s"));
    Ok(())
}

fn config(sizes: &Sizes) -> Result<ModelConfig, GpuBenchError> {
    let Sizes { heads: (heads, kv_heads, head_dim), hidden, intermediate, vocab, layers, .. } = sizes;
    let text = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": {hidden}, "num_hidden_layers": {layers},
            "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads}, "head_dim": {head_dim},
            "intermediate_size": {intermediate}, "vocab_size": {vocab}, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false}}"#
    );
    Ok(ModelConfig::parse(text.as_bytes(), GenerationDefaults::default())?)
}

fn table(first: usize, blocks: usize) -> Vec<BlockId> {
    (first..first + blocks).map(|block| BlockId(block as u32)).collect()
}

/// Tokens/s of several sequences together, with tokens sampled on the device.
fn decode<D: Device>(
    executor: &mut CudaExecutor<D>,
    sizes: &Sizes,
    batch: usize,
    per_sequence: usize,
) -> Result<f64, GpuBenchError> {
    let tables: Vec<_> = (0..batch).map(|row| table(row * per_sequence, per_sequence)).collect();
    let place = TokenPosition { position: 0, generated: 0 };
    let draw = Draw::of(&SamplingParams::default(), place).expect("greedy needs no more than the row");
    let mut logits = Logits::default();
    let mut best = 0.0_f64;
    // The first round records the graph of its bucket.
    for _ in 0..3 {
        let started = Instant::now();
        for start in sizes.decoded_from..sizes.decoded_from + sizes.decoded {
            let step = |table| SeqStep {
                tokens: &[1],
                start,
                block_table: table,
                logits: LogitsRequest::Draw(draw),
                adapter: None,
            };
            let steps: Vec<SeqStep<'_>> = tables.iter().map(|table| step(table)).collect();
            executor.execute(&steps, &mut logits)?;
        }
        best = best.max((sizes.decoded * batch) as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Seconds of the fastest of three prompts, computed in steps of `chunk` tokens.
fn prefill<D: Device>(
    executor: &mut CudaExecutor<D>,
    sizes: &Sizes,
    prompt: usize,
    chunk: usize,
) -> Result<f64, GpuBenchError> {
    let table = table(0, prompt / BLOCK_TOKENS);
    let tokens: Vec<u32> =
        (0..prompt as u32).map(|i| i.wrapping_mul(2_654_435_761) % sizes.vocab as u32).collect();
    let (mut best, mut logits) = (f64::INFINITY, Logits::default());
    for run in 0..4 {
        let started = Instant::now();
        for start in (0..prompt).step_by(chunk) {
            let end = prompt.min(start + chunk);
            let wanted = if end == prompt { LogitsRequest::Last } else { LogitsRequest::No };
            let block_table = &table[..end.div_ceil(BLOCK_TOKENS)];
            let step =
                SeqStep { tokens: &tokens[start..end], start, block_table, logits: wanted, adapter: None };
            executor.execute(&[step], &mut logits)?;
        }
        best = if run == 0 { best } else { best.min(started.elapsed().as_secs_f64()) };
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use baton_engine::compute::cuda::device::Kernel;
    use baton_engine_check::software::SoftwareDevice;

    use super::*;

    #[test]
    fn each_measured_attention_launch_reads_another_layer() {
        let mut device = SoftwareDevice::new(1 << 20, Element::Bf16, 16);
        let slice = DeviceSlice::of(device.alloc(1 << 16).unwrap(), 1 << 16);
        let parts = AttentionArgs {
            qkv: slice,
            pool: slice,
            tables: slice,
            entries: slice,
            out: slice,
            partial: slice,
            summary: slice,
            window: None,
        };
        let shape = KernelShape {
            element: Element::Bf16,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            decode_stages: 3,
            block_tokens: BLOCK_TOKENS,
            block_stride: 3 * 2 * 2 * BLOCK_TOKENS * 16,
            ..KernelShape::plain(Element::Bf16, 16)
        };
        let launches = in_turn(&shape, &parts, 3, 1, 2);
        let attention: Vec<_> =
            launches.iter().filter(|launch| launch.kernel == Kernel::DecodeAttention).collect();
        assert_eq!(attention.len(), 6);
        for pair in attention.windows(2) {
            assert_ne!(pair[0].args, pair[1].args);
        }
        assert_eq!(attention[0].args, attention[3].args, "the second time through the same layers");
        let noise = noise(1 << 12);
        let zero = |word: &&[u8; 2]| u16::from_le_bytes(**word) & 0x7fff == 0;
        assert_eq!((noise.len(), noise.as_chunks::<2>().0.iter().filter(zero).count()), (1 << 12, 0));
    }

    #[test]
    fn all_measured_steps_fit_the_device() {
        let sizes = Sizes {
            heads: (4, 2, 16),
            hidden: 32,
            intermediate: 48,
            vocab: 100,
            layers: 2,
            copy: 1 << 20,
            link: 1 << 18,
            block: 1 << 12,
            blocks: 40,
            product: 32,
            context: 512,
            attended: 3,
            prompts: [32, 64],
            chunk: 24,
            decoded_from: 16,
            decoded: 4,
            batches: [1, 2, 3],
        };
        let (speeds, failed) =
            measure(&sizes, |head_dim| Ok(SoftwareDevice::new(256 << 20, Element::Bf16, head_dim)));
        assert!(failed.is_empty(), "{failed:?}");
        assert_eq!(speeds.len(), 20, "{speeds:?}");
        let chunked = |speed: &Speed| speed.what == "prefill of 64 in steps of 24, 2 layers";
        assert!(speeds.iter().any(chunked), "{speeds:?}");
        // If a part fails, the others continue.
        let (speeds, failed) =
            measure(&sizes, |head_dim| Ok(SoftwareDevice::new(1 << 20, Element::Bf16, head_dim)));
        assert!(failed.len() == 2 && speeds.is_empty(), "{failed:?} {speeds:?}");
    }
}
