//! `baton bench gpu-nixl`: moves a handoff's blocks between the device memories of two processes by NIXL. Compares
//! all bytes, measures the time, and interrupts reads in every way for which NIXL gives no guarantee.
//!
//! The command starts itself again for each producer. Reads use the transport that engines use. With
//! `--device software` the blocks are in host memory, which checks this command and NIXL but measures no GPU.

use std::io::{self, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

use baton_connector::transport::Producer;
use baton_connector_nixl::{DevicePool, Library, device_producer, find};
use baton_connector_tcp::{ServerOptions, TcpServer};
use baton_engine::compute::cuda::{Accelerator, Device, DeviceChoice, DeviceError, Element};
use baton_engine_check::software::SoftwareDevice;
use clap::Args;
use serde::Serialize;

use super::pool::{BLOCK_BYTES, BLOCK_TOKENS, BenchPool, HEAD_DIM, HandoffTimes, TOKEN_BYTES};
use super::process::open_leases;
use super::{Skipped, open, plain, unusable};
use crate::BenchError;
use crate::common::machine::Provenance;
use crate::common::report::print_report;
use crate::parts::transfer::producer::BenchProducer;

mod consumer;

/// Options of `baton bench gpu-nixl`.
#[derive(Args, Clone, Debug)]
pub struct GpuNixl {
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
struct NixlReport {
    #[serde(flatten)]
    origin: Provenance,
    device: String,
    library: String,
    tokens: usize,
    bytes: usize,
    blocks_checked: usize,
    batch_mib: u16,
    /// The first read, which includes connecting to the producer, in ms.
    first_ms: f64,
    #[serde(flatten)]
    times: HandoffTimes,
    trials: Vec<Trial>,
}

/// One way to interrupt a read, or to exceed the limits of one NIXL request.
#[derive(Debug, Serialize)]
struct Trial {
    name: &'static str,
    seen: TrialResult,
    took_ms: f64,
}

/// The result of a trial.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum TrialResult {
    /// As expected.
    Right(String),
    /// Not as expected.
    Wrong(String),
    /// This device cannot show the effect.
    Skipped(String),
}

impl TrialResult {
    fn is_wrong(&self) -> bool {
        matches!(self, Self::Wrong(_))
    }

    /// The first word of a line, and its text.
    fn shown(&self) -> (&'static str, &str) {
        match self {
            Self::Right(seen) => ("ok", seen),
            Self::Wrong(seen) => ("WRONG", seen),
            Self::Skipped(why) => ("skipped", why),
        }
    }
}

/// Runs the producer, or both ends.
///
/// # Errors
/// [`Skipped`] without a GPU or without the library. An error for a block with wrong bytes, a wrong verdict, a byte
/// that arrives after its read, or a failure of device or library.
pub fn run(options: &GpuNixl, out: &mut dyn Write) -> Result<(), BenchError> {
    let DeviceChoice::Accelerator(accelerator) = options.device else {
        return Err("--device cpu has no memory of its own".into());
    };
    consumer::known(&options.trial)?;
    let library = match find::library(options.nixl_library.as_deref()) {
        Ok(library) => library,
        Err(why) => return Err(Skipped(why.to_string()).into()),
    };
    let bytes = 3 * options.tokens * TOKEN_BYTES + (1 << 30);
    match accelerator {
        Accelerator::Provided(_) => {
            ends(|| Ok(SoftwareDevice::new(bytes, Element::Bf16, HEAD_DIM)), &library, options, out)
        }
        Accelerator::Cuda(ordinal) => {
            let open = || open(ordinal, &plain(HEAD_DIM));
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
        let pool = BenchPool::new(open()?, blocks, block_bytes)?;
        return serve(pool, &**library, usize::from(options.batch_mib) << 20);
    }
    let report = consumer::all(open, library, options)?;
    let wrong: Vec<_> = report.trials.iter().filter(|trial| trial.seen.is_wrong()).collect();
    let verdict = match wrong.len() {
        0 => Ok(()),
        count => Err(format!("{count} of {} trials went wrong", report.trials.len()).into()),
    };
    print_report(&report, options.json, out, print)?;
    verdict
}

/// A producer: opens a lease of all its blocks on each request, until its standard input ends.
fn serve<D: Device>(
    mut pool: BenchPool<D>,
    library: &dyn Library,
    batch_bytes: usize,
) -> Result<(), BenchError> {
    pool.fill()?;
    let bench_producer = Arc::new(BenchProducer::over(pool.region.clone()));
    let offered = device_producer(library, Arc::clone(&pool.port) as Arc<dyn DevicePool>, batch_bytes)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let served = Arc::clone(&bench_producer) as Arc<dyn Producer>;
    let server = TcpServer::start_with_services(listener, served, vec![offered], ServerOptions::default())?;
    open_leases(&bench_producer, port)?;
    server.shutdown();
    Ok(())
}

fn print(report: &NixlReport, out: &mut dyn Write) -> io::Result<()> {
    let NixlReport { device, tokens, bytes, first_ms, times, .. } = report;
    let (mib, handoffs) = (*bytes >> 20, times.handoffs());
    writeln!(out, "NIXL: {}", report.library)?;
    writeln!(out, "{device}: {tokens} tokens, {mib} MiB, {handoffs}; the first read {first_ms:.1} ms")?;
    writeln!(out, "{}", times.copies())?;
    writeln!(out, "{} blocks compared, all the producer's", report.blocks_checked)?;
    for trial in &report.trials {
        let (mark, seen) = trial.seen.shown();
        writeln!(out, "{mark:<7} {:<28} {:>7.0} ms  {seen}", trial.name, trial.took_ms)?;
    }
    writeln!(out, "{}", report.origin.line())
}
