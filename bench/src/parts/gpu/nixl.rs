//! `baton bench gpu-nixl`: a handoff's blocks from one process to another by NIXL, from device memory to device memory:
//! compared byte by byte, timed, and broken off in every way that NIXL does not promise anything about.
//!
//! The command starts itself once more for each producer. Reads go through the transport that engines use. On
//! `--device software` the same is run in host memory: a check of this command and of NIXL, and no measurement of a GPU.

use std::io::{self, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use baton_connector::transport::Producer;
use baton_connector::{BlockId, Epoch};
use baton_connector_nixl::{DevicePool, Library, device_producer, find};
use baton_connector_tcp::{ServerOptions, TcpServer};
use baton_engine::compute::cuda::driver::CudaDevice;
use baton_engine::compute::cuda::software::SoftDevice;
use baton_engine::compute::cuda::{Accelerator, Device, DeviceChoice, DeviceError, Element, cubins};
use clap::Args;
use serde::Serialize;

use super::pool::{BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, Pool, TOKEN_BYTES, table};
use super::{Skipped, unusable};
use crate::BenchError;
use crate::common::machine::Origin;
use crate::parts::transfer::lender::Lender;

mod trials;

/// Options of `baton bench gpu-nixl`.
#[derive(Args, Clone, Debug)]
pub struct GpuNixl {
    /// Device to use
    #[arg(long, value_name = "cuda:N|software", default_value = "cuda:0")]
    pub device: DeviceChoice,
    /// Tokens of the handoff, in the shape of Llama 3.1 8B
    #[arg(long, value_name = "N", default_value_t = 8192)]
    pub tokens: usize,
    /// Timed reads
    #[arg(long, value_name = "N", default_value_t = 11)]
    pub repetitions: usize,
    /// Size of one batch in MiB; engines use 32
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub batch_mib: u16,
    /// Run only trials whose name contains this text (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub trial: Vec<String>,
    /// NIXL library; no other one is searched for
    #[arg(long, env = find::VARIABLE, value_name = "FILE")]
    pub nixl_library: Option<PathBuf>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
    /// Be a producer with so many blocks: what the command starts itself
    #[arg(long, hide = true, requires = "block_bytes")]
    pub serve: Option<usize>,
    /// Bytes of the producer's blocks
    #[arg(long, hide = true)]
    pub block_bytes: Option<usize>,
}

/// One JSON object of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    device: String,
    library: String,
    tokens: usize,
    bytes: usize,
    blocks_checked: usize,
    batch_mib: u16,
    /// The first read, which meets the producer, in ms.
    first_ms: f64,
    /// Read and verdict, in ms.
    handoff_median_ms: f64,
    handoff_min_ms: f64,
    handoff_max_ms: f64,
    /// As many bytes in one piece inside the device, in ms.
    copy_median_ms: f64,
    /// What that takes, by what the handoff takes.
    of_copy_bandwidth: f64,
    trials: Vec<Trial>,
}

/// One way to break a read off, or to ask for more than one request may have.
#[derive(Debug, Serialize)]
struct Trial {
    name: &'static str,
    seen: Seen,
    took_ms: f64,
}

/// What came of a trial.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Seen {
    /// What should be.
    Right(String),
    /// What should not.
    Wrong(String),
    /// Nothing, because this device cannot show it.
    Skipped(String),
}

impl Seen {
    fn is_wrong(&self) -> bool {
        matches!(self, Self::Wrong(_))
    }

    /// How it begins a line, and what follows.
    fn shown(&self) -> (&'static str, &str) {
        match self {
            Self::Right(seen) => ("ok", seen),
            Self::Wrong(seen) => ("WRONG", seen),
            Self::Skipped(why) => ("skipped", why),
        }
    }
}

/// Runs one end or both.
///
/// # Errors
/// [`Skipped`] without a GPU or without the library; a block with other bytes, a verdict that should not be, a byte that
/// came after its read had returned, and whatever device and library say.
pub fn run(options: &GpuNixl, out: &mut dyn Write) -> Result<(), BenchError> {
    let DeviceChoice::Accelerator(accelerator) = options.device else {
        return Err("--device cpu has no memory of its own".into());
    };
    trials::known(&options.trial)?;
    let library = match find::library(options.nixl_library.as_deref()) {
        Ok(library) => library,
        Err(why) => return Err(Skipped(why.to_string()).into()),
    };
    let bytes = 3 * options.tokens * TOKEN_BYTES + (1 << 30);
    match accelerator {
        Accelerator::Software => {
            ends(|| Ok(SoftDevice::new(bytes, Element::Bf16, HEAD_DIM)), &library, options, out)
        }
        Accelerator::Cuda(ordinal) => {
            let open = || CudaDevice::open(ordinal, Element::Bf16, HEAD_DIM, cubins::folder().as_deref());
            drop(open().map_err(unusable)?);
            ends(open, &library, options, out)
        }
    }
}

fn ends<D: Device>(
    open: impl Fn() -> Result<D, DeviceError>,
    library: &Arc<dyn Library>,
    options: &GpuNixl,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    if let (Some(blocks), Some(block_bytes)) = (options.serve, options.block_bytes) {
        return serve(
            Pool::new(open()?, blocks, block_bytes)?,
            &**library,
            usize::from(options.batch_mib) << 20,
        );
    }
    let report = trials::all(open, library, options)?;
    let wrong: Vec<_> = report.trials.iter().filter(|trial| trial.seen.is_wrong()).collect();
    let verdict = match wrong.len() {
        0 => Ok(()),
        count => Err(format!("{count} of {} trials went wrong", report.trials.len()).into()),
    };
    print(&report, options.json, out)?;
    verdict
}

/// A producer: lends all its blocks, as often as it is asked to, until its standard input ends.
fn serve<D: Device>(mut pool: Pool<D>, library: &dyn Library, batch_bytes: usize) -> Result<(), BenchError> {
    pool.fill()?;
    let lender = Arc::new(Lender::over(pool.region.clone()));
    let begun = Instant::now();
    let offered = device_producer(library, Arc::clone(&pool.port) as Arc<dyn DevicePool>, batch_bytes)?;
    let registered = begun.elapsed().as_millis();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let served = Arc::clone(&lender) as Arc<dyn Producer>;
    let server = TcpServer::start_beside(listener, served, vec![offered], ServerOptions::default())?;
    let ids: Vec<_> = table(pool.region.blocks()).into_iter().map(|block| BlockId(block as u32)).collect();
    let Epoch(epoch) = lender.epoch();
    let mut out = io::stdout().lock();
    writeln!(out, "\nproducer {epoch} {port} {registered}")?;
    out.flush()?;
    for line in io::stdin().lines() {
        line?;
        writeln!(out, "\nlent {}", lender.lend(&ids).0)?;
        out.flush()?;
    }
    server.shutdown();
    Ok(())
}

fn print(report: &Report, json: bool, out: &mut dyn Write) -> Result<(), BenchError> {
    if json {
        writeln!(out, "{}", serde_json::to_string_pretty(report).map_err(io::Error::other)?)?;
        return Ok(());
    }
    writeln!(out, "NIXL: {}", report.library)?;
    writeln!(
        out,
        "{}: {} tokens, {} MiB, from process to process in {:.2} ms ({:.2} to {:.2}); the first read {:.1} ms",
        report.device,
        report.tokens,
        report.bytes >> 20,
        report.handoff_median_ms,
        report.handoff_min_ms,
        report.handoff_max_ms,
        report.first_ms,
    )?;
    writeln!(
        out,
        "one copy of as many bytes inside the device takes {:.2} ms: {:.0} % of copy bandwidth",
        report.copy_median_ms,
        report.of_copy_bandwidth * 100.0
    )?;
    writeln!(out, "{} blocks compared, all the producer's", report.blocks_checked)?;
    for trial in &report.trials {
        let (mark, seen) = trial.seen.shown();
        writeln!(out, "{mark:<7} {:<28} {:>7.0} ms  {seen}", trial.name, trial.took_ms)?;
    }
    writeln!(out, "{}", report.origin.line())?;
    Ok(())
}
