//! `baton bench gpu-ipc`: moves a handoff's blocks between two processes on one device, with the transport that
//! engines use. Compares all bytes, and measures the time against copies inside the device.
//!
//! The command starts itself again as the producer. Read and verdict are timed together, as a fetch needs both. With
//! `--device software` the blocks are in host memory, which checks this command but measures no GPU.

use std::io::{self, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use baton_connector::transport::{Part, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Reader};
use baton_connector_device::{BATCH_BYTES, ClientOptions, DevicePool, ServerOptions, producer, transport};
use baton_connector_shm::{ShmServer, listen};
use baton_engine::compute::cuda::{Accelerator, Device, DeviceChoice, Element};
use baton_engine_check::software::SoftwareDevice;
use clap::Args;
use serde::Serialize;

use super::pool::{BLOCK_BYTES, BLOCK_TOKENS, BenchPool, HEAD_DIM, HandoffTimes, TOKEN_BYTES, table};
use super::process::{ProducerProcess, open_leases};
use super::{open, plain, unusable};
use crate::BenchError;
use crate::common::machine::Provenance;
use crate::common::report::print_report;
use crate::parts::transfer::producer::BenchProducer;

const READER: Reader = Reader::sole(1);
/// The producer's epoch is its name on this host. It has only one port.
const PORT: u16 = 1;
static GO: AtomicBool = AtomicBool::new(false);

/// Options of `baton bench gpu-ipc`.
#[derive(Args, Clone, Debug)]
pub struct GpuIpc {
    /// Device to use
    #[arg(long, value_name = "cuda:N|software", default_value = "cuda:0",
          value_parser = baton_engine_check::parse_device)]
    pub device: DeviceChoice,
    /// Tokens of the handoff, in the shape of Llama 3.1 8B
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub tokens: usize,
    /// Timed reads
    #[arg(long, value_name = "N", default_value_t = 11)]
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
struct IpcReport {
    #[serde(flatten)]
    origin: Provenance,
    device: String,
    tokens: usize,
    bytes: usize,
    blocks_checked: usize,
    #[serde(flatten)]
    times: HandoffTimes,
}

/// Runs the producer, or both ends.
///
/// # Errors
/// [`super::Skipped`] without a GPU. An error for a block with wrong bytes, a wrong verdict, or a failure of the
/// device.
pub fn run(options: &GpuIpc, out: &mut dyn Write) -> Result<(), BenchError> {
    let DeviceChoice::Accelerator(accelerator) = options.device else {
        return Err("--device cpu has no memory of its own".into());
    };
    match accelerator {
        Accelerator::Provided(_) => {
            let bytes = 3 * options.tokens * TOKEN_BYTES + (64 << 20);
            ends(SoftwareDevice::new(bytes, Element::Bf16, HEAD_DIM), options, out)
        }
        Accelerator::Cuda(ordinal) => ends(open(ordinal, &plain(HEAD_DIM)).map_err(unusable)?, options, out),
    }
}

fn ends(device: impl Device, options: &GpuIpc, out: &mut dyn Write) -> Result<(), BenchError> {
    let blocks = options.tokens.div_ceil(BLOCK_TOKENS).max(1);
    let pool = BenchPool::new(device, blocks, BLOCK_BYTES)?;
    if options.serve { serve(pool) } else { measure(pool, options, out) }
}

/// The producer: opens a lease of all its blocks on each request, until its standard input ends.
fn serve<D: Device>(mut pool: BenchPool<D>) -> Result<(), BenchError> {
    pool.fill()?;
    let bench_producer = Arc::new(BenchProducer::over(pool.region.clone()));
    let offered = producer(Arc::clone(&pool.port) as Arc<dyn DevicePool>, &pool.region, BATCH_BYTES)?;
    let listener = listen(bench_producer.epoch(), PORT)?;
    let served = Arc::clone(&bench_producer) as Arc<dyn Producer>;
    let server = ShmServer::start_with_services(listener, served, vec![offered], ServerOptions::default())?;
    open_leases(&bench_producer, PORT)?;
    server.shutdown();
    Ok(())
}

fn start_producer(options: &GpuIpc) -> Result<ProducerProcess, BenchError> {
    let DeviceChoice::Accelerator(device) = options.device else { return Err("no device".into()) };
    ProducerProcess::start(
        Command::new(std::env::current_exe()?)
            .args(["bench", "gpu-ipc", "--serve", "--device", &device.to_string()])
            .args(["--tokens", &options.tokens.to_string()]),
    )
}

fn measure<D: Device>(
    mut pool: BenchPool<D>,
    options: &GpuIpc,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    let mut other = start_producer(options)?;
    let peer = other.peer.clone();
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
        let order = order(other.request_lease()?);
        let begun = Instant::now();
        consumer.read(&peer, &order, &pool.region, &GO)?;
        let verdict = consumer.finish(&peer, order.handle, READER)?;
        let took = begun.elapsed();
        if verdict != Verdict::Valid {
            return Err("a live lease's verdict is not valid".into());
        }
        if repetition == 0 {
            // The first read opens the pool and is not timed.
            blocks_checked = pool.compare(&table)?;
        } else {
            times.push(took);
        }
    }
    blocks_checked += pool.compare(&table)?;
    let stale = order(other.request_lease()?);
    consumer.release(&peer, stale.handle, "over")?;
    match consumer.read(&peer, &stale, &pool.region, &GO) {
        Err(TransportError::Gone) => {}
        read => return Err(format!("a read after the lease was over: {read:?}").into()),
    }
    // The pool of a dead producer stays open for a while, but its verdicts must not be valid.
    let orphan = order(other.request_lease()?);
    let copy = pool.copy(options.repetitions.max(1))?;
    let read = consumer.read(&peer, &orphan, &pool.region, &GO);
    drop(other);
    if read.is_ok() && consumer.finish(&peer, orphan.handle, READER) == Ok(Verdict::Valid) {
        return Err("a dead producer confirmed its blocks as valid".into());
    }
    consumer.sweep();
    if consumer.dialer().open_pools() > 0 {
        return Err("a dead producer's pool is still open".into());
    }
    let report = IpcReport {
        origin: Provenance::of(pool.device.driver()),
        device: pool.device.name(),
        tokens: blocks * BLOCK_TOKENS,
        bytes: blocks * BLOCK_BYTES,
        blocks_checked,
        times: HandoffTimes::of(&times, &copy),
    };
    Ok(print_report(&report, options.json, out, print)?)
}

fn print(report: &IpcReport, out: &mut dyn Write) -> io::Result<()> {
    let IpcReport { device, tokens, bytes, times, .. } = report;
    let (mib, handoffs) = (*bytes >> 20, times.handoffs());
    writeln!(out, "{device}: {tokens} tokens, {mib} MiB, {handoffs}, target 5 ms for 8192 tokens")?;
    writeln!(out, "{}", times.copies())?;
    writeln!(out, "{} blocks compared, all the producer's", report.blocks_checked)?;
    writeln!(out, "{}", report.origin.line())
}
