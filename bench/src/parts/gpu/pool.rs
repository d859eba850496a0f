//! A pool on a device for benchmarks: filled, compared, and copied inside the device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_engine::compute::cuda::device::{DeviceBuffer, DeviceSlice, HostSlice, Priority};
use baton_engine::compute::cuda::shared_kv_pool::SharedKvPool;
use baton_engine::compute::cuda::{Device, DeviceError};
use baton_engine::compute::shared_pool::shared_pool;
use serde::Serialize;

use crate::BenchError;
use crate::parts::transfer::gcd;

/// One token of Llama 3.1 8B in bf16: 32 layers, K and V, 8 heads of 128 elements.
pub(super) const TOKEN_BYTES: usize = 32 * 2 * 8 * 128 * 2;
pub(super) const BLOCK_TOKENS: usize = 16;
pub(super) const BLOCK_BYTES: usize = BLOCK_TOKENS * TOKEN_BYTES;
/// Head width, which selects kernels. Only the copy kernel is launched here.
pub(super) const HEAD_DIM: usize = 128;
/// Untimed copies inside the device.
const WARM: usize = 2;

/// A pool on a device, with the buffers to write and read it.
pub(super) struct BenchPool<D> {
    pub(super) device: D,
    buffer: DeviceBuffer,
    pub(super) port: Arc<SharedKvPool>,
    pub(super) region: Region,
}

impl<D: Device> BenchPool<D> {
    pub(super) fn new(mut device: D, blocks: usize, block_bytes: usize) -> Result<Self, DeviceError> {
        let (buffer, memory) = device.alloc_shared(blocks * block_bytes)?;
        let region = shared_pool(blocks, block_bytes);
        let port = Arc::new(SharedKvPool::new(memory, region.clone()));
        Ok(Self { device, buffer, port, region })
    }

    fn block(&self, block: usize) -> DeviceSlice {
        let bytes = self.region.block_bytes();
        DeviceSlice { buffer: self.buffer, offset: block * bytes, bytes }
    }

    /// Writes blocks of which no two are equal.
    pub(super) fn fill(&mut self) -> Result<(), DeviceError> {
        let bytes = self.region.block_bytes();
        self.write(|block| contents(block, bytes))
    }

    /// Writes every block.
    pub(super) fn write(&mut self, bytes: impl Fn(usize) -> Vec<u8>) -> Result<(), DeviceError> {
        let host = HostSlice { host: self.device.host(self.region.block_bytes())?, offset: 0 };
        let (stream, event) = (self.device.stream(Priority::Steps)?, self.device.event()?);
        for block in 0..self.region.blocks() {
            self.device.write_host(host, &bytes(block))?;
            self.device.upload(stream, host, self.block(block))?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
        }
        Ok(())
    }

    /// Compares the read blocks with the producer's. Returns their number.
    pub(super) fn compare(&mut self, table: &[usize]) -> Result<usize, BenchError> {
        let block_bytes = self.region.block_bytes();
        self.look(table.len(), |block, bytes| {
            if bytes == contents(table[block], block_bytes) {
                return Ok(());
            }
            let source = table[block];
            Err(format!("block {block} has not the bytes of the producer's block {source}").into())
        })?;
        Ok(table.len())
    }

    /// Passes the contents of the first blocks to `each`.
    pub(super) fn look(
        &mut self,
        blocks: usize,
        each: impl Fn(usize, &[u8]) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let block_bytes = self.region.block_bytes();
        let host = HostSlice { host: self.device.host(block_bytes)?, offset: 0 };
        let (stream, event) = (self.device.stream(Priority::Steps)?, self.device.event()?);
        let mut bytes = vec![0; block_bytes];
        for block in 0..blocks {
            self.device.download(stream, self.block(block), host)?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
            self.device.read_host(host, &mut bytes)?;
            each(block, &bytes)?;
        }
        Ok(())
    }

    /// Times of a copy of as many bytes inside the device, in one piece: the device's limit.
    pub(super) fn copy(&mut self, repetitions: usize) -> Result<Vec<Duration>, DeviceError> {
        let bytes = self.region.blocks() * self.region.block_bytes();
        let there = self.device.alloc(bytes)?;
        let (stream, event) = (self.device.stream(Priority::Steps)?, self.device.event()?);
        let mut times = Vec::new();
        for _ in 0..WARM + repetitions {
            let begun = Instant::now();
            self.device.copy(stream, DeviceSlice::of(self.buffer, bytes), DeviceSlice::of(there, bytes))?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
            times.push(begun.elapsed());
        }
        self.device.free(there)?;
        Ok(times.split_off(WARM))
    }
}

/// No two blocks are equal.
fn contents(block: usize, block_bytes: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..block_bytes).map(|at| (at ^ (at >> 8) ^ block) as u8).collect();
    bytes[..8].copy_from_slice(&(block as u64).to_le_bytes());
    bytes
}

/// A block table without neighbours, the same at both ends: multiples of an odd step, modulo the number of blocks.
pub(super) fn table(blocks: usize) -> Vec<usize> {
    let step = (blocks / 3).max(1) | 1;
    let step = (step..).find(|step| gcd(*step, blocks) == 1).expect("one of them is prime to it");
    (0..blocks).map(|at| at * step % blocks).collect()
}

/// Times of handoffs between two processes, and of copies inside the device.
#[derive(Debug, Serialize)]
pub(super) struct HandoffTimes {
    /// Read and verdict, in ms.
    handoff_median_ms: f64,
    handoff_min_ms: f64,
    handoff_max_ms: f64,
    /// A copy of as many bytes in one piece inside the device, in ms.
    copy_median_ms: f64,
    /// Time of the copy over the time of the handoff.
    of_copy_bandwidth: f64,
}

impl HandoffTimes {
    pub(super) fn of(handoffs: &[Duration], copies: &[Duration]) -> Self {
        let (handoff, copy) = (milliseconds(handoffs), milliseconds(copies));
        let (handoff_median_ms, copy_median_ms) = (handoff[handoff.len() / 2], copy[copy.len() / 2]);
        Self {
            handoff_median_ms,
            handoff_min_ms: handoff[0],
            handoff_max_ms: handoff[handoff.len() - 1],
            copy_median_ms,
            of_copy_bandwidth: copy_median_ms / handoff_median_ms,
        }
    }

    /// The handoffs in words.
    pub(super) fn handoffs(&self) -> String {
        let Self { handoff_median_ms: median, handoff_min_ms: min, handoff_max_ms: max, .. } = self;
        format!("from process to process in {median:.2} ms ({min:.2} to {max:.2})")
    }

    /// The copies in words.
    pub(super) fn copies(&self) -> String {
        let (median, percent) = (self.copy_median_ms, self.of_copy_bandwidth * 100.0);
        format!(
            "one copy of as many bytes inside the device takes {median:.2} ms: {percent:.0} % of copy bandwidth"
        )
    }
}

/// Sorted times in milliseconds.
fn milliseconds(times: &[Duration]) -> Vec<f64> {
    let mut all: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    all.sort_by(f64::total_cmp);
    all
}
