//! `baton bench gpu-ipc`: a handoff's blocks from one process to another on one device, through the transport that engines
//! use, checked byte by byte and timed beside copies inside the device.
//!
//! The command starts itself once more as the producer. Read and verdict are timed together, as a fetch needs both. On
//! `--device software` the same is run in host memory: a check of this command, and no measurement of a GPU.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader};
use baton_connector_device::{BATCH_BYTES, ClientOptions, DevicePool, ServerOptions, producer, transport};
use baton_connector_shm::{ShmServer, listen};
use baton_engine::executor::cuda::device::{Buffer, HostAt, Slice};
use baton_engine::executor::cuda::driver::CudaDevice;
use baton_engine::executor::cuda::port::Port;
use baton_engine::executor::cuda::software::SoftDevice;
use baton_engine::executor::cuda::{Accelerator, Device, DeviceChoice, DeviceError, Element, cubins};
use baton_engine::transport::shared_pool;
use clap::Args;
use serde::Serialize;

use super::Skipped;
use crate::BenchError;
use crate::transfer::lender::Lender;

/// One token of Llama 3.1 8B in bf16: 32 layers, K and V, 8 heads of 128 elements.
const TOKEN_BYTES: usize = 32 * 2 * 8 * 128 * 2;
const BLOCK_TOKENS: usize = 16;
const BLOCK_BYTES: usize = BLOCK_TOKENS * TOKEN_BYTES;
/// Element and head width decide about kernels, of which none is launched here.
const HEAD_DIM: usize = 128;
const READER: Reader = Reader::sole(1);
/// The producer's name on this host is its epoch; there is no other port of it.
const PORT: u16 = 1;
/// Copies inside the device that are not timed.
const WARM: usize = 2;
static GO: AtomicBool = AtomicBool::new(false);

/// Options of `baton bench gpu-ipc`.
#[derive(Args, Clone, Debug)]
pub struct GpuIpc {
    /// Which device: cuda:N, or software
    #[arg(long, default_value = "cuda:0")]
    pub device: DeviceChoice,
    /// Tokens of the handoff, in the shape of Llama 3.1 8B
    #[arg(long, default_value_t = 8192)]
    pub tokens: usize,
    /// Reads that are timed
    #[arg(long, default_value_t = 11)]
    pub repetitions: usize,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Be the producer: what the command starts itself
    #[arg(long, hide = true)]
    pub serve: bool,
}

/// One JSON object of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    tokens: usize,
    bytes: usize,
    blocks_checked: usize,
    /// Read and verdict, in ms.
    handoff_median_ms: f64,
    handoff_min_ms: f64,
    handoff_max_ms: f64,
    /// As many bytes in one piece inside the device, in ms.
    copy_median_ms: f64,
    /// What that takes, by what the handoff takes.
    of_copy_bandwidth: f64,
}

/// Runs one end or both.
///
/// # Errors
/// [`Skipped`] without a GPU; a block with other bytes, a verdict that should not be, and whatever the device says.
pub fn run(options: &GpuIpc, out: &mut dyn Write) -> Result<(), BenchError> {
    let DeviceChoice::Accelerator(accelerator) = options.device else {
        return Err("--device cpu has no memory of its own".into());
    };
    match accelerator {
        Accelerator::Software => {
            let bytes = 3 * options.tokens * TOKEN_BYTES + (64 << 20);
            ends(SoftDevice::new(bytes, Element::Bf16, HEAD_DIM), options, out)
        }
        Accelerator::Cuda(ordinal) => {
            match CudaDevice::open(ordinal, Element::Bf16, HEAD_DIM, cubins::folder().as_deref()) {
                Err(error @ (DeviceError::Library { .. } | DeviceError::Absent(_))) => {
                    Err(Skipped(error.to_string()).into())
                }
                Err(DeviceError::Call { call: call @ "cuInit", what }) => {
                    Err(Skipped(format!("{call}: {what}")).into())
                }
                other => ends(other?, options, out),
            }
        }
    }
}

fn ends(device: impl Device, options: &GpuIpc, out: &mut dyn Write) -> Result<(), BenchError> {
    let blocks = options.tokens.div_ceil(BLOCK_TOKENS).max(1);
    let pool = Pool::new(device, blocks)?;
    if options.serve { serve(pool) } else { measure(pool, options, out) }
}

/// A pool on a device, and what moves bytes in and out of it.
struct Pool<D> {
    device: D,
    buffer: Buffer,
    port: Arc<Port>,
    region: Region,
}

impl<D: Device> Pool<D> {
    fn new(mut device: D, blocks: usize) -> Result<Self, DeviceError> {
        let (buffer, memory) = device.alloc_shared(blocks * BLOCK_BYTES)?;
        let region = shared_pool(blocks, BLOCK_BYTES);
        let port = Arc::new(Port::new(memory, region.clone()));
        Ok(Self { device, buffer, port, region })
    }

    fn block(&self, block: usize) -> Slice {
        Slice { buffer: self.buffer, offset: block * BLOCK_BYTES, bytes: BLOCK_BYTES }
    }

    /// Writes blocks in which no two are equal.
    fn fill(&mut self) -> Result<(), DeviceError> {
        let host = HostAt { host: self.device.host(BLOCK_BYTES)?, offset: 0 };
        let (stream, event) = (self.device.stream()?, self.device.event()?);
        for block in 0..self.region.blocks() {
            self.device.write_host(host, &contents(block))?;
            self.device.upload(stream, host, self.block(block))?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
        }
        Ok(())
    }

    /// Compares what has landed with what was lent to it. Says how many blocks.
    fn compare(&mut self, table: &[usize]) -> Result<usize, BenchError> {
        let host = HostAt { host: self.device.host(BLOCK_BYTES)?, offset: 0 };
        let (stream, event) = (self.device.stream()?, self.device.event()?);
        let mut bytes = vec![0; BLOCK_BYTES];
        for (block, &lent) in table.iter().enumerate() {
            self.device.download(stream, self.block(block), host)?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
            self.device.read_host(host, &mut bytes)?;
            if bytes != contents(lent) {
                return Err(format!("block {block} has not the bytes of the producer's block {lent}").into());
            }
        }
        Ok(table.len())
    }

    /// As many bytes inside the device, in one piece: what it can do at most.
    fn copy(&mut self, blocks: usize, repetitions: usize) -> Result<Vec<Duration>, DeviceError> {
        let bytes = blocks * BLOCK_BYTES;
        let there = self.device.alloc(bytes)?;
        let (stream, event) = (self.device.stream()?, self.device.event()?);
        let mut times = Vec::new();
        for _ in 0..WARM + repetitions {
            let begun = Instant::now();
            self.device.copy(stream, Slice::of(self.buffer, bytes), Slice::of(there, bytes))?;
            self.device.record(event, stream)?;
            self.device.synchronize(event)?;
            times.push(begun.elapsed());
        }
        self.device.free(there)?;
        Ok(times.split_off(WARM))
    }
}

fn contents(block: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at ^ (at >> 8) ^ block) as u8).collect();
    bytes[..8].copy_from_slice(&(block as u64).to_le_bytes());
    bytes
}

/// A block table without neighbours, the same at both ends: an odd step through a ring.
fn table(blocks: usize) -> Vec<usize> {
    let step = (blocks / 3).max(1) | 1;
    let step = (step..).find(|step| gcd(*step, blocks) == 1).expect("one of them is prime to it");
    (0..blocks).map(|at| at * step % blocks).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The producer: lends all its blocks, as often as it is asked to, until its standard input ends.
fn serve<D: Device>(mut pool: Pool<D>) -> Result<(), BenchError> {
    pool.fill()?;
    let lender = Arc::new(Lender::over(pool.region.clone()));
    let offered = producer(Arc::clone(&pool.port) as Arc<dyn DevicePool>, &pool.region, BATCH_BYTES)?;
    let listener = listen(lender.epoch(), PORT)?;
    let served = Arc::clone(&lender) as Arc<dyn Producer>;
    let server = ShmServer::start_beside(listener, served, vec![offered], ServerOptions::default())?;
    let ids: Vec<_> = table(pool.region.blocks()).into_iter().map(|block| BlockId(block as u32)).collect();
    let mut out = io::stdout().lock();
    writeln!(out, "epoch {}", lender.epoch().0)?;
    for line in io::stdin().lines() {
        line?;
        writeln!(out, "lent {}", lender.lend(&ids).0)?;
        out.flush()?;
    }
    server.shutdown();
    Ok(())
}

/// The producer, as its consumer sees it.
struct Other {
    process: Child,
    asks: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Other {
    fn start(options: &GpuIpc) -> Result<Self, BenchError> {
        let DeviceChoice::Accelerator(device) = options.device else { return Err("no device".into()) };
        let mut process = Command::new(std::env::current_exe()?)
            .args(["bench", "gpu-ipc", "--serve", "--device", &device.to_string()])
            .args(["--tokens", &options.tokens.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (asks, says) = (process.stdin.take(), process.stdout.take());
        let (Some(asks), Some(says)) = (asks, says) else { return Err("pipes were asked for".into()) };
        Ok(Self { process, asks, says: BufReader::new(says) })
    }

    /// The number after a word, on a line of its own.
    fn hears(&mut self, word: &str) -> Result<u128, BenchError> {
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        let number = line.trim().strip_prefix(word).and_then(|rest| rest.trim().parse().ok());
        number.ok_or_else(|| format!("the producer said {line:?} and not {word:?}").into())
    }

    fn lends(&mut self) -> Result<Handle, BenchError> {
        writeln!(self.asks, "lend")?;
        Ok(Handle(self.hears("lent")?))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn measure<D: Device>(mut pool: Pool<D>, options: &GpuIpc, out: &mut dyn Write) -> Result<(), BenchError> {
    let mut other = Other::start(options)?;
    let epoch = Epoch(u64::try_from(other.hears("epoch")?)?);
    let peer = Peer { address: ([127, 0, 0, 1], PORT).into(), epoch, fingerprint: 1 };
    let consumer = transport(Arc::clone(&pool.port) as Arc<dyn DevicePool>, ClientOptions::default());
    let blocks = pool.region.blocks();
    let table = table(blocks);
    let order = |handle| ReadOrder {
        handle,
        reader: READER,
        part: Part::Blocks { first: 0 },
        into: (0..blocks as u32).map(BlockId).collect(),
    };
    let (mut times, mut blocks_checked) = (Vec::new(), 0);
    for repetition in 0..=options.repetitions.max(1) {
        let order = order(other.lends()?);
        let begun = Instant::now();
        consumer.read(&peer, &order, &pool.region, &GO)?;
        let verdict = consumer.finish(&peer, order.handle, READER)?;
        let took = begun.elapsed();
        if verdict != Verdict::Valid {
            return Err("a live lease's verdict is not valid".into());
        }
        if repetition == 0 {
            // Opens the pool, and is not timed.
            blocks_checked = pool.compare(&table)?;
        } else {
            times.push(took);
        }
    }
    blocks_checked += pool.compare(&table)?;
    let stale = order(other.lends()?);
    consumer.release(&peer, stale.handle, "over")?;
    match consumer.read(&peer, &stale, &pool.region, &GO) {
        Err(TransportError::Gone) => {}
        read => return Err(format!("a read after the lease was over: {read:?}").into()),
    }
    // A dead producer's pool stays open for a while, and nothing that is read from it is valid.
    let orphan = order(other.lends()?);
    let copy = pool.copy(blocks, options.repetitions.max(1))?;
    let read = consumer.read(&peer, &orphan, &pool.region, &GO);
    drop(other);
    if read.is_ok() && consumer.finish(&peer, orphan.handle, READER) == Ok(Verdict::Valid) {
        return Err("a dead producer has said that its blocks are valid".into());
    }
    consumer.sweep();
    if consumer.way().open_pools() > 0 {
        return Err("a dead producer's pool is still open".into());
    }
    let (handoff, copy) = (milliseconds(times), milliseconds(copy));
    let report = Report {
        device: pool.device.name(),
        tokens: blocks * BLOCK_TOKENS,
        bytes: blocks * BLOCK_BYTES,
        blocks_checked,
        handoff_median_ms: handoff[handoff.len() / 2],
        handoff_min_ms: handoff[0],
        handoff_max_ms: handoff[handoff.len() - 1],
        copy_median_ms: copy[copy.len() / 2],
        of_copy_bandwidth: copy[copy.len() / 2] / handoff[handoff.len() / 2],
    };
    print(&report, options.json, out)
}

/// In order.
fn milliseconds(times: Vec<Duration>) -> Vec<f64> {
    let mut all: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn print(report: &Report, json: bool, out: &mut dyn Write) -> Result<(), BenchError> {
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(report).map_err(io::Error::other)?)?;
        return Ok(());
    }
    writeln!(
        out,
        "{}: {} tokens, {} MiB, from process to process in {:.2} ms ({:.2} to {:.2}), target 5 ms for 8192 tokens",
        report.device,
        report.tokens,
        report.bytes >> 20,
        report.handoff_median_ms,
        report.handoff_min_ms,
        report.handoff_max_ms
    )?;
    writeln!(
        out,
        "one copy of as many bytes inside the device takes {:.2} ms: {:.0} % of copy bandwidth",
        report.copy_median_ms,
        report.of_copy_bandwidth * 100.0
    )?;
    writeln!(out, "{} blocks compared, all the producer's", report.blocks_checked)?;
    Ok(())
}
