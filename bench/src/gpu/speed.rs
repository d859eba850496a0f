//! How fast, beside what the GPU can do.

use std::io::Write;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_engine::executor::cuda::device::{Buffer, Event, HostAt, Matmul, Slice, Stream};
use baton_engine::executor::cuda::kernels::{self, Attention, SPLIT_TOKENS, Shape};
use baton_engine::executor::cuda::{CudaExecutor, Device, DeviceError, DeviceOptions, Element};
use baton_engine::executor::{Executor, Logits, LogitsWanted, SeqStep};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::{Weights, parameter_count};
use baton_engine::sampling::{Draw, GenerationDefaults, Place, SamplingParams};
use serde::Serialize;

use super::{GpuBench, GpuBenchError, open};

/// Runs of each measurement; the best counts, and one more comes first.
const RUNS: usize = 5;
const GIB: usize = 1 << 30;
/// Of Llama 3.1 8B: heads, KV heads, elements of a head.
const HEADS: (usize, usize, usize) = (32, 8, 128);
const BLOCK_TOKENS: usize = 16;
/// Keys of the attention that is measured.
const CONTEXT: usize = 32_768;
/// Tokens of the prompt that is measured, and of the context that is decoded from.
const PROMPT: usize = 8_192;
const DECODED_FROM: usize = 512;
const DECODED: usize = 64;
const BATCHES: [usize; 3] = [1, 8, 64];

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    /// What was measured.
    pub what: String,
    /// The number, in `unit`; the best of several runs.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// What it could be at most by what was measured of the device, where that can be said.
    pub limit: Option<f64>,
    /// What it is to be at least, as a part of the limit or in its unit: the targets of this project on an H200.
    pub target: Option<f64>,
}

pub(super) fn print(speeds: &[Speed], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "{:<46}{:>10} {:<9}{:>10} {:>7}{:>9}", "", "best", "", "limit", "ratio", "target")?;
    for speed in speeds {
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1}"));
        let ratio =
            speed.limit.map_or_else(String::new, |limit| format!("{:.0} %", speed.value / limit * 100.0));
        let (limit, target) = (number(speed.limit), number(speed.target));
        writeln!(
            out,
            "{:<46}{:>10.1} {:<9}{limit:>10} {ratio:>7}{target:>9}",
            speed.what, speed.value, speed.unit
        )?;
    }
    Ok(())
}

/// Measures everything.
pub(super) fn measure(options: &GpuBench) -> Result<Vec<Speed>, GpuBenchError> {
    let mut device = open(options, Element::Bf16, HEADS.2)?;
    let mut bench = Raw::new(&mut device)?;
    let mut speeds = Vec::new();
    let copy = bench.copies(&mut speeds)?;
    let flops = bench.product(&mut speeds)?;
    bench.attention(copy, &mut speeds)?;
    drop(device);
    model(options, copy, flops, &mut speeds)?;
    Ok(speeds)
}

/// Work on a bare device.
struct Raw<'a, D: Device> {
    device: &'a mut D,
    stream: Stream,
    from: Event,
    to: Event,
}

impl<'a, D: Device> Raw<'a, D> {
    fn new(device: &'a mut D) -> Result<Self, DeviceError> {
        let (stream, from, to) = (device.stream()?, device.event()?, device.event()?);
        Ok(Self { device, stream, from, to })
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
            self.device.record(self.to, self.stream)?;
            self.device.synchronize(self.to)?;
            if run > 0 {
                best = best.min(f64::from(self.device.elapsed_ms(self.from, self.to)?) / 1e3);
            }
        }
        Ok(best)
    }

    fn room(&mut self, bytes: usize) -> Result<Slice, DeviceError> {
        Ok(Slice::of(self.device.alloc(bytes)?, bytes))
    }

    fn free(&mut self, slices: &[Slice]) -> Result<(), DeviceError> {
        let buffers: Vec<Buffer> = slices.iter().map(|slice| slice.buffer).collect();
        buffers.into_iter().try_for_each(|buffer| self.device.free(buffer))
    }

    /// Copies inside the device, and over the link; GB/s inside, each byte counted as read and as written.
    fn copies(&mut self, speeds: &mut Vec<Speed>) -> Result<f64, GpuBenchError> {
        let (a, b) = (self.room(4 * GIB)?, self.room(4 * GIB)?);
        let seconds = self.best(|device, stream| device.copy(stream, a, b))?;
        let copy = gigabytes(2 * a.bytes) / seconds;
        speeds.push(plain("copy inside the device, one of 4 GiB, r+w", copy, "GB/s"));

        // Blocks of 2 MiB from everywhere to everywhere: what an offload or a handoff on one GPU is made of.
        let (block, count) = (2 << 20, 512);
        let seconds = self.best(|device, stream| {
            for i in 0..count {
                let (from, to) = (i * 797 % 2048 * block, i * 1201 % 2048 * block);
                device.copy(stream, a.part(from, block), b.part(to, block))?;
            }
            Ok(())
        })?;
        let blocks = gigabytes(2 * block * count) / seconds;
        let limited = |what: &str, value, limit, part: f64| Speed {
            what: what.into(),
            value,
            unit: "GB/s",
            limit: Some(limit),
            target: Some(limit * part),
        };
        speeds.push(limited("copies of 512 blocks of 2 MiB, r+w", blocks, copy, 0.85));

        let host = HostAt { host: self.device.host(GIB)?, offset: 0 };
        let link = a.part(0, GIB);
        let mut directions = Vec::new();
        for up in [true, false] {
            let whole = self.best(|device, stream| match up {
                true => device.upload(stream, host, link),
                false => device.download(stream, link, host),
            })?;
            let parts = self.best(|device, stream| {
                for i in 0..count {
                    let at = i * 797 % 512 * block;
                    let (host, part) = (HostAt { offset: at, ..host }, link.part(at, block));
                    match up {
                        true => device.upload(stream, host, part)?,
                        false => device.download(stream, part, host)?,
                    }
                }
                Ok(())
            })?;
            let name = if up { "host to device" } else { "device to host" };
            directions.push((name, gigabytes(GIB) / whole, gigabytes(block * count) / parts));
        }
        for (name, whole, parts) in directions {
            speeds.push(plain(&format!("pinned {name}, one of 1 GiB"), whole, "GB/s"));
            speeds.push(limited(&format!("pinned {name}, 512 blocks of 2 MiB"), parts, whole, 0.9));
        }
        self.free(&[a, b])?;
        Ok(copy)
    }

    /// One large bf16 product; FLOP/s.
    fn product(&mut self, speeds: &mut Vec<Speed>) -> Result<f64, GpuBenchError> {
        let size = 8_192;
        let mut room = || self.room(size * size * 2);
        let (x, weights, out) = (room()?, room()?, room()?);
        // Zeros draw less power than numbers do, and let a GPU run faster than it ever will.
        let host = HostAt { host: self.device.host(x.bytes)?, offset: 0 };
        let noise: Vec<u8> = (0..x.bytes as u32 / 2)
            .flat_map(|i| {
                let mixed = i.wrapping_mul(2_654_435_761) ^ (i >> 7);
                // A sign, an exponent near 1 and a mantissa.
                ((mixed & 0x8000 | 0x3e80 | (mixed >> 16) & 0x17f) as u16).to_le_bytes()
            })
            .collect();
        self.device.write_host(host, &noise)?;
        for slice in [x, weights] {
            self.device.upload(self.stream, host, slice)?;
        }
        self.device.record(self.to, self.stream)?;
        self.device.synchronize(self.to)?;
        let element = Element::Bf16;
        let matmul =
            Matmul { x, weights, out, rows: size, inputs: size, outputs: size, element, result: element };
        let seconds = self.best(|device, stream| device.matmul(stream, &matmul))?;
        let flops = 2.0 * (size as f64).powi(3) / seconds;
        speeds.push(plain("bf16 product of 8192 × 8192 × 8192", flops / 1e12, "TFLOP/s"));
        self.free(&[x, weights, out])?;
        Ok(flops)
    }

    /// Decode attention at a long context, one layer: the bytes of keys and values over its time.
    fn attention(&mut self, copy: f64, speeds: &mut Vec<Speed>) -> Result<(), GpuBenchError> {
        let (heads, kv_heads, head_dim) = HEADS;
        for sequences in [1, 8] {
            let blocks = sequences * CONTEXT / BLOCK_TOKENS;
            let shape = Shape {
                element: Element::Bf16,
                heads,
                kv_heads,
                head_dim,
                block_tokens: BLOCK_TOKENS,
                block_stride: 2 * kv_heads * BLOCK_TOKENS * head_dim,
                norm_eps: 1e-5,
            };
            let splits = shape.splits(sequences, self.device.multiprocessors()).min(CONTEXT / SPLIT_TOKENS);
            let parts = Attention {
                qkv: self.room(sequences * shape.qkv_width() * 2)?,
                pool: self.room(blocks * shape.block_stride * 2)?,
                tables: self.room(blocks * 4)?,
                entries: self.room(sequences * 12)?,
                out: self.room(sequences * heads * head_dim * 2)?,
                partial: self.room(sequences * heads * splits * head_dim * 4)?,
                summary: self.room(sequences * heads * splits * 8)?,
            };
            let host = HostAt { host: self.device.host(blocks * 4)?, offset: 0 };
            let table = (0..blocks).map(|block| (block * 4_099 % blocks) as i32);
            let entries = (0..sequences)
                .flat_map(|row| [row, CONTEXT, row * CONTEXT / BLOCK_TOKENS].map(|word| word as i32));
            for (words, to) in [(table.collect::<Vec<_>>(), parts.tables), (entries.collect(), parts.entries)]
            {
                let bytes: Vec<u8> = words.into_iter().flat_map(i32::to_le_bytes).collect();
                self.device.write_host(host, &bytes)?;
                self.device.upload(self.stream, host, to)?;
                self.device.record(self.to, self.stream)?;
                self.device.synchronize(self.to)?;
            }
            let launches = kernels::decode_attention(&shape, &parts, 0, sequences, splits);
            // Layers follow each other: ten at once, so that launches are not what is measured. One sequence's keys
            // and values are larger than the cache.
            let seconds = self.best(|device, stream| {
                (0..10).try_for_each(|_| launches.iter().try_for_each(|launch| device.launch(stream, launch)))
            })? / 10.0;
            speeds.push(Speed {
                what: format!("decode attention, {sequences} × {CONTEXT} keys, one layer"),
                value: gigabytes(parts.pool.bytes) / seconds,
                unit: "GB/s",
                limit: Some(copy),
                target: Some(copy * 0.8),
            });
            self.free(&[
                parts.qkv,
                parts.pool,
                parts.tables,
                parts.entries,
                parts.out,
                parts.partial,
                parts.summary,
            ])?;
        }
        Ok(())
    }
}

fn gigabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn plain(what: &str, value: f64, unit: &'static str) -> Speed {
    Speed { what: what.into(), value, unit, limit: None, target: None }
}

/// A whole model with made-up weights: decode and prefill.
fn model(options: &GpuBench, copy: f64, flops: f64, speeds: &mut Vec<Speed>) -> Result<(), GpuBenchError> {
    let text = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": {},
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
            "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": false}}"#,
        options.layers
    );
    let config = ModelConfig::parse(text.as_bytes(), GenerationDefaults::default())?;
    let most = BATCHES[BATCHES.len() - 1];
    let per_sequence = (DECODED_FROM + 2 * DECODED).div_ceil(BLOCK_TOKENS);
    let blocks = (most * per_sequence).max(PROMPT / BLOCK_TOKENS);
    let device_options = DeviceOptions {
        blocks,
        block_tokens: BLOCK_TOKENS,
        element: Element::Bf16,
        max_rows: PROMPT,
        max_sequences: most,
        max_positions: PROMPT,
        pool: Region::allocate,
    };
    let device = open(options, Element::Bf16, config.head_dim)?;
    let weights = Weights::random(1);
    let started = Instant::now();
    let mut executor = CudaExecutor::load(device, &weights, &config, &device_options, &mut |_| ())?;
    speeds.push(plain("load, weights made up on the way", started.elapsed().as_secs_f64(), "s"));
    let whole = options.layers == 32;
    let matrices = parameter_count(&config) - config.vocab * config.hidden;
    let kv = executor.layout().block_bytes() / BLOCK_TOKENS * DECODED_FROM;
    // A copy reads and writes; decoding reads.
    for batch in BATCHES {
        let tokens_per_second = decode(&mut executor, batch, per_sequence)?;
        let bytes = gigabytes(matrices * 2 + batch * kv);
        speeds.push(Speed {
            what: format!("decode, {} layers, batch {batch}", options.layers),
            value: tokens_per_second,
            unit: "tok/s",
            limit: Some(copy / bytes * batch as f64),
            target: (whole && batch == 1).then_some(200.0),
        });
    }
    for prompt in [1024, PROMPT] {
        let seconds = prefill(&mut executor, prompt)?;
        let layers = (matrices - config.vocab * config.hidden) as f64;
        let attention = (config.layers * config.heads * config.head_dim) as f64 * 2.0 * prompt as f64;
        let needed = prompt as f64 * (2.0 * layers + attention);
        speeds.push(Speed {
            what: format!("prefill of {prompt}, {} layers", options.layers),
            value: prompt as f64 / seconds,
            unit: "tok/s",
            limit: Some(flops / needed * prompt as f64),
            target: (whole && prompt == PROMPT).then_some(25_000.0),
        });
    }
    let table: Vec<BlockId> = (0..PROMPT / BLOCK_TOKENS).map(|block| BlockId(block as u32)).collect();
    let started = Instant::now();
    executor.publish(&table)?;
    let bytes = gigabytes(table.len() * executor.layout().block_bytes());
    speeds.push(plain(
        &format!("publish {PROMPT} tokens to the mirror"),
        bytes / started.elapsed().as_secs_f64(),
        "GB/s",
    ));
    Ok(())
}

/// Tokens/s of so many sequences together, tokens drawn on the device.
fn decode<D: Device>(
    executor: &mut CudaExecutor<D>,
    batch: usize,
    per_sequence: usize,
) -> Result<f64, GpuBenchError> {
    let tables: Vec<Vec<BlockId>> = (0..batch)
        .map(|row| (0..per_sequence).map(|block| BlockId((row * per_sequence + block) as u32)).collect())
        .collect();
    let place = Place { position: 0, generated: 0 };
    let draw = Draw::of(&SamplingParams::default(), place).expect("greedy needs no more than the row");
    let mut logits = Logits::default();
    let mut best = 0.0_f64;
    for _ in 0..2 {
        let started = Instant::now();
        for position in DECODED_FROM..DECODED_FROM + DECODED {
            let steps: Vec<SeqStep<'_>> = tables
                .iter()
                .map(|table| SeqStep {
                    tokens: &[7],
                    start: position,
                    block_table: table,
                    logits: LogitsWanted::Draw(draw),
                })
                .collect();
            executor.execute(&steps, &mut logits)?;
        }
        best = best.max((DECODED * batch) as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Seconds of the fastest of three prompts.
fn prefill<D: Device>(executor: &mut CudaExecutor<D>, prompt: usize) -> Result<f64, GpuBenchError> {
    let table: Vec<BlockId> = (0..prompt / BLOCK_TOKENS).map(|block| BlockId(block as u32)).collect();
    let tokens: Vec<u32> = (0..prompt as u32).map(|i| i.wrapping_mul(2_654_435_761) % 128_256).collect();
    let (mut best, mut logits) = (f64::INFINITY, Logits::default());
    for run in 0..4 {
        let step = SeqStep { tokens: &tokens, start: 0, block_table: &table, logits: LogitsWanted::Last };
        let started = Instant::now();
        executor.execute(&[step], &mut logits)?;
        if run > 0 {
            best = best.min(started.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}
