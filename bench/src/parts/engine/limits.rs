//! Current limits of this machine: read bandwidth, and the `gemm` crate on a model's matrices.
#![allow(unsafe_code, reason = "huge-page advice and gemm's raw interface; see each block")]

mod peak;
mod read;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use baton_engine::compute::cpu::Bf16Unit;
use baton_engine::model::config::ModelConfig;

use crate::common::machine::kib;

/// Size of the buffer for the bandwidth of memory: more than twice the largest last-level caches.
const MEMORY_BYTES: usize = 1 << 30;
/// Passes per measurement of the peak.
const PASSES: usize = 4;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Baselines with their buffers.
pub(super) struct MachineLimits {
    threads: usize,
    memory: Vec<read::CacheLine>,
    products: Vec<Gemm>,
}

struct Gemm {
    rows: usize,
    outputs: usize,
    inputs: usize,
    x: Vec<f32>,
    weights: Vec<f32>,
    out: Vec<f32>,
}

/// Matrices of one layer, `(outputs, inputs)`.
pub(super) fn shapes(config: &ModelConfig) -> Vec<(usize, usize)> {
    vec![
        (config.query_width() + 2 * config.kv_width(), config.hidden),
        (config.hidden, config.query_width()),
        (2 * config.intermediate, config.hidden),
        (config.hidden, config.intermediate),
    ]
}

impl MachineLimits {
    /// For steps that read up to `step_bytes`.
    pub(super) fn new(config: &ModelConfig, rows: usize, threads: usize, step_bytes: usize) -> Self {
        let products = shapes(config)
            .into_iter()
            .map(|(outputs, inputs)| Gemm {
                rows,
                outputs,
                inputs,
                x: vec![0.5; rows * inputs],
                weights: huge(outputs * inputs, 0.25),
                out: vec![0.0; rows * outputs],
            })
            .collect();
        let lines = MEMORY_BYTES.max(step_bytes).div_ceil(size_of::<read::CacheLine>());
        Self { threads, memory: huge(lines, read::CacheLine::ONES), products }
    }

    /// GB/s of all threads that read `bytes` repeatedly, including the part in caches. This is the limit of a step
    /// that reads as many bytes.
    pub(super) fn read_gbps(&self, bytes: usize) -> f64 {
        let lines = bytes.div_ceil(size_of::<read::CacheLine>()).min(self.memory.len());
        read::fastest(&self.memory[..lines], self.threads) / 1e9
    }

    /// GB/s from memory.
    pub(super) fn memory_gbps(&self) -> f64 {
        self.read_gbps(MEMORY_BYTES)
    }

    /// GFLOP/s of f32 multiply-adds that stay in registers, on all threads. The best of a few passes.
    pub(super) fn peak_gflops(&self) -> Option<f64> {
        Some(self.gflops_of(peak::detect()?))
    }

    /// The same for bf16 by a unit of the engine. `None` if that unit multiplies f32.
    pub(super) fn bf16_peak_gflops(&self, unit: Option<Bf16Unit>) -> Option<f64> {
        Some(self.gflops_of(peak::of_unit(unit?)?))
    }

    fn gflops_of(&self, chains: peak::Chains) -> f64 {
        let fastest = fastest_pass(self.threads, |_| {
            black_box(chains.run());
        });
        gigas(self.threads * chains.flops(), fastest)
    }

    /// GFLOP/s of one layer's products.
    pub(super) fn gemm_gflops(&mut self) -> f64 {
        let parallelism = match self.threads {
            1 => gemm::Parallelism::None,
            threads => gemm::Parallelism::Rayon(threads),
        };
        let start = Instant::now();
        let mut flops = 0;
        for product in &mut self.products {
            flops += 2 * product.rows * product.outputs * product.inputs;
            product.run(parallelism);
        }
        gigas(flops, start.elapsed())
    }
}

impl Gemm {
    fn run(&mut self, parallelism: gemm::Parallelism) {
        // SAFETY: sizes and strides describe the three buffers: `out[rows][outputs] = x[rows][inputs] ·
        // weights[outputs][inputs]ᵀ`.
        unsafe {
            gemm::gemm(
                self.rows,
                self.outputs,
                self.inputs,
                self.out.as_mut_ptr(),
                1,
                self.outputs.cast_signed(),
                false,
                self.x.as_ptr(),
                1,
                self.inputs.cast_signed(),
                self.weights.as_ptr(),
                self.inputs.cast_signed(),
                1,
                0.0_f32,
                1.0_f32,
                false,
                false,
                false,
                parallelism,
            );
        }
        black_box(&self.out);
    }
}

/// The processor's name, if the system reports it.
pub(super) fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// A filled buffer, in huge pages if the system grants them, as the engine's weights.
fn huge<T: Copy>(len: usize, value: T) -> Vec<T> {
    let mut buffer = Vec::with_capacity(len);
    #[cfg(target_os = "linux")]
    {
        let base: *mut T = buffer.as_mut_ptr();
        let start = base.addr().next_multiple_of(HUGE_PAGE_BYTES);
        let end = (base.addr() + len * size_of::<T>()) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if end > start {
            // SAFETY: advice about whole pages inside our own allocation, which changes no contents.
            let _ = unsafe { libc::madvise(base.with_addr(start).cast(), end - start, libc::MADV_HUGEPAGE) };
        }
    }
    buffer.resize(len, value);
    buffer
}

/// Anonymous memory of this process in huge pages, and all of it, in bytes. `None` if the system does not report it.
pub(super) fn huge_pages() -> Option<(u64, u64)> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    Some((kib(&rollup, "AnonHugePages:")? << 10, kib(&rollup, "Anonymous:")? << 10))
}

/// The shortest of [`PASSES`] in which every thread does its work once, all beginning together.
///
/// A limit must not be lower than the engine's own speed. A single pass on threads that have just been started is
/// slower than the engine's waiting threads.
fn fastest_pass(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let (barrier, work) = (&Barrier::new(threads), &work);
    std::thread::scope(|scope| {
        let passes = |thread| {
            let mut fastest = Duration::MAX;
            for _ in 0..PASSES {
                barrier.wait();
                let start = Instant::now();
                work(thread);
                barrier.wait();
                fastest = fastest.min(start.elapsed());
            }
            fastest
        };
        for thread in 1..threads {
            scope.spawn(move || passes(thread));
        }
        passes(0)
    })
}

fn gigas(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64() / 1e9
}
