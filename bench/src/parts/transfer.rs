//! `baton bench transfer`: speed of block transfers over the transports, compared with this machine's limits.
//!
//! Each repetition alternates, over the same memory (pools as in an engine) and the same scattered block tables:
//!
//! - **shm**: shared memory with a real server and client. The client copies from the producer's pool;
//! - **tcp**: TCP on loopback with a real server and client;
//! - **nixl**: NIXL with a real producer and consumer, if its library is found. Within a host UCX copies with
//!   `process_vm_readv`;
//! - **bare**: a loop of `writev` and `readv` over one loopback connection, a megabyte per call, with the
//!   transport's socket options and without leases;
//! - **polling**: the same loop, but the writer waits for room in `poll` as the transport does, and not inside
//!   `writev`. This is the maximum of TCP;
//! - **memcpy**: one thread that copies the blocks within this process.
//!
//! The time of a transport includes read and verdict, as a fetch needs both.
//!
//! `--json` prints one object:
//!
//! - `blocks[]` with `block_bytes` and `blocks`;
//! - `blocks[].shm`, `tcp`, `bare`, `polling`, `memcpy` and perhaps `nixl`: each `median_gb_per_s`, `min_gb_per_s`,
//!   `max_gb_per_s` (10⁹ bytes);
//! - `blocks[].shm_to_memcpy`, `tcp_to_bare`, `tcp_to_polling`, `tcp_to_memcpy` and perhaps `nixl_to_memcpy`:
//!   medians of the ratios within each repetition;
//! - `nixl`, the library's file or null;
//! - `latency` by transport, each with `read_one_block_us`, `finish_us` and `release_us` with `p50`, `p99` and
//!   `rounds`;
//! - `block_bytes_of_latency`, `repetitions`, `bytes_per_repetition`.

mod bare;
pub(crate) mod producer;

use std::io::{self, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_nixl::{Library, find};
use baton_connector_shm::{ShmServer, ShmTransport, shared_pool};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpServer, TcpTransport};
use serde_json::{Value, json};

use crate::common::report::print_report;
use crate::common::stats::{median, thousandths};
use bare::{BlockList, Sender};
use producer::BenchProducer;

const READER: Reader = Reader::sole(1);

/// Block size whose latency is measured, in bytes.
const LATENCY_BLOCK_BYTES: usize = 64 << 10;

/// Options of `baton bench transfer`.
#[derive(Clone, Debug, clap::Args)]
pub struct TransferOptions {
    /// Block sizes in KiB, separated by commas
    #[arg(long, value_name = "KIB,...", value_delimiter = ',', default_values_t = [16, 64, 256, 2048])]
    pub block_kib: Vec<usize>,
    /// Data moved per repetition in MiB
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub mib: usize,
    /// Repetitions per block size
    #[arg(long, value_name = "N", default_value_t = 11)]
    pub repetitions: usize,
    /// Reads of one block, and releases, that are timed for the latency
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub rounds: usize,
    /// NIXL library [default: libnixl_capi.so of the system or of Python]
    #[arg(long, value_name = "FILE", env = find::VARIABLE)]
    pub nixl_library: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// A socket, or the output, failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The transport failed on loopback.
    #[error("the transport failed: {0}")]
    Transport(#[from] TransportError),
    /// The lease ended during a read, or a release failed: the measurement would be meaningless.
    #[error("the producer did not keep its lease")]
    Lease,
    /// The specified library cannot be used.
    #[error(transparent)]
    Nixl(#[from] find::LibraryNotFound),
    /// Zero repetitions, rounds or bytes.
    #[error("block sizes, bytes, repetitions and rounds must be positive")]
    Options,
}

/// The transports, in the order of the report. The last only if NIXL is found.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "nixl"];

/// All ways to move the blocks, in the order of the report.
const WAYS: [&str; 6] = ["shm", "tcp", "bare", "polling", "memcpy", "nixl"];

/// Pairs of ways that are compared, and the key of the ratio.
const RATIOS: [(usize, usize, &str); 5] = [
    (0, 4, "shm_to_memcpy"),
    (1, 2, "tcp_to_bare"),
    (1, 3, "tcp_to_polling"),
    (1, 4, "tcp_to_memcpy"),
    (5, 4, "nixl_to_memcpy"),
];

/// NIXL, if its library was found.
type Nixl = Option<Arc<dyn Library>>;

/// One producer on this machine, and a consumer for each transport.
struct TransferBench {
    producer: Arc<BenchProducer>,
    /// In the order of [`TRANSPORTS`].
    transports: Vec<Box<dyn Transport>>,
    peer: Peer,
    _servers: (TcpServer, ShmServer),
}

impl TransferBench {
    fn start(nixl: &Nixl, blocks: usize, block_bytes: usize) -> Result<Self, TransferError> {
        let secret = Secret::new(b"a secret for one benchmark").expect("longer than 16 bytes");
        let bench_producer = Arc::new(BenchProducer::new(blocks, block_bytes)?);
        let limits = ServerOptions { secret: Some(secret.clone()), ..ServerOptions::default() };
        let producer: Arc<dyn Producer> = Arc::clone(&bench_producer) as _;
        let offered =
            nixl.as_deref().map(|library| baton_connector_nixl::producer(library, bench_producer.region()));
        let beside = offered.transpose().map_err(io::Error::other)?.into_iter().collect();
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let tcp = TcpServer::start_with_services(listener, Arc::clone(&producer), beside, limits.clone())?;
        let address = tcp.local_addr();
        let listener = baton_connector_shm::listen(bench_producer.epoch(), address.port())?;
        let shm = ShmServer::start(listener, producer, limits)?;
        let options = ClientOptions { secret: Some(secret), ..ClientOptions::default() };
        let mut transports: Vec<Box<dyn Transport>> =
            vec![Box::new(ShmTransport::new(options.clone())), Box::new(TcpTransport::new(options.clone()))];
        if let Some(library) = nixl {
            transports.push(Box::new(baton_connector_nixl::transport(Arc::clone(library), options)));
        }
        let peer = Peer { address, epoch: bench_producer.epoch(), fingerprint: bench_producer.fingerprint() };
        Ok(Self { producer: bench_producer, transports, peer, _servers: (tcp, shm) })
    }

    fn read(
        &self,
        transport: usize,
        handle: Handle,
        into: &[BlockId],
        region: &Region,
    ) -> Result<(), TransferError> {
        let order =
            ReadOrder { handle, reader: READER, part: Part::Blocks { first: 0 }, into: into.to_vec() };
        Ok(self.transports[transport].read(&self.peer, &order, region, &AtomicBool::new(false))?)
    }

    fn finish(&self, transport: usize, handle: Handle) -> Result<(), TransferError> {
        match self.transports[transport].finish(&self.peer, handle, READER)? {
            Verdict::Valid => Ok(()),
            Verdict::Gone => Err(TransferError::Lease),
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// [`TransferError`]. A failed measurement prints nothing.
pub fn run(options: &TransferOptions, out: &mut dyn Write) -> Result<(), TransferError> {
    let positive = options.mib > 0 && options.repetitions > 0 && options.rounds > 0;
    if !positive || options.block_kib.is_empty() || options.block_kib.contains(&0) {
        return Err(TransferError::Options);
    }
    let nixl: Nixl = match &options.nixl_library {
        Some(named) => Some(find::library(Some(named))?),
        None => find::library(None).ok(),
    };
    let mut sizes = Vec::new();
    for &kib in &options.block_kib {
        sizes.push(throughput(&nixl, kib << 10, options)?);
    }
    let mut latencies = serde_json::Map::new();
    for (at, transport) in TRANSPORTS.into_iter().take(if nixl.is_some() { 3 } else { 2 }).enumerate() {
        let [read, finish, release] = latency(&nixl, at, options.rounds)?;
        let entry = json!({ "read_one_block_us": read, "finish_us": finish, "release_us": release });
        latencies.insert(transport.to_owned(), entry);
    }
    let report = json!({
        "bytes_per_repetition": options.mib << 20,
        "repetitions": options.repetitions,
        "nixl": nixl.as_ref().map(|library| library.origin()),
        "blocks": sizes,
        "block_bytes_of_latency": LATENCY_BLOCK_BYTES,
        "latency": latencies,
    });
    Ok(print_report(&report, options.json, out, print)?)
}

/// The greatest common divisor.
pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// `n` numbers in a scattered but repeatable order: steps of a stride that is coprime to `n`.
fn scattered(n: usize, seed: usize) -> Vec<BlockId> {
    let stride = (n * 5 / 8 + seed..)
        .find(|stride| gcd(*stride, n) == 1)
        .expect("some number shares no factor with n");
    (0..n).map(|i| BlockId((i * stride % n) as u32)).collect()
}

fn throughput(nixl: &Nixl, block_bytes: usize, options: &TransferOptions) -> Result<Value, TransferError> {
    let blocks = ((options.mib << 20) / block_bytes).max(1);
    let bytes = blocks * block_bytes;
    let bench = TransferBench::start(nixl, blocks, block_bytes)?;
    let region = shared_pool(blocks, block_bytes)?;
    let (from, into) = (scattered(blocks, 1), scattered(blocks, 7));
    let there = BlockList { region: bench.producer.region(), blocks: &from };
    let here = BlockList { region: &region, blocks: &into };
    let mut bare = bare::LoopbackStream::start(Sender::Blocking, there, here)?;
    let mut polling = bare::LoopbackStream::start(Sender::Polling, there, here)?;
    let mut times: [Vec<Duration>; WAYS.len()] = Default::default();
    // The first round touches all pages and opens the connections. It does not count.
    for round in 0..=options.repetitions {
        let fetch = |transport| {
            let handle = bench.producer.open_lease(&from);
            if round == 0 {
                region.write_block(into[0], &vec![0xff; block_bytes]);
            }
            let begun = Instant::now();
            bench.read(transport, handle, &into, &region)?;
            bench.finish(transport, handle)?;
            let took = begun.elapsed();
            if round == 0 {
                compare(bench.producer.region(), &from, &region, &into)?;
            }
            Ok::<_, TransferError>(took)
        };
        let mut took = vec![
            fetch(0)?,
            fetch(1)?,
            timed(|| Ok(bare.run()?))?,
            timed(|| Ok(polling.run()?))?,
            timed(|| {
                bare::memcpy(there, here);
                Ok(())
            })?,
        ];
        if nixl.is_some() {
            took.push(fetch(2)?);
        }
        if round > 0 {
            for (list, time) in times.iter_mut().zip(took) {
                list.push(time);
            }
        }
    }
    let mut report = serde_json::Map::new();
    report.insert("block_bytes".into(), json!(block_bytes));
    report.insert("blocks".into(), json!(blocks));
    let measured = |way: usize| !times[way].is_empty();
    for (at, way) in WAYS.into_iter().enumerate().filter(|(at, _)| measured(*at)) {
        report.insert(way.into(), speeds(bytes, &times[at]));
    }
    for (ours, theirs, key) in RATIOS.into_iter().filter(|(ours, ..)| measured(*ours)) {
        report.insert(key.into(), json!(ratio(&times[theirs], &times[ours])));
    }
    Ok(Value::Object(report))
}

fn timed(run: impl FnOnce() -> Result<(), TransferError>) -> Result<Duration, TransferError> {
    let begun = Instant::now();
    run()?;
    Ok(begun.elapsed())
}

/// Checks that all bytes arrived. A speed without them would be meaningless.
fn compare(
    source: &Region,
    from: &[BlockId],
    landing: &Region,
    into: &[BlockId],
) -> Result<(), TransferError> {
    let same =
        from.iter().zip(into).all(|(&from, &into)| source.read_block(from) == landing.read_block(into));
    if same { Ok(()) } else { Err(TransferError::Lease) }
}

fn latency(nixl: &Nixl, transport: usize, rounds: usize) -> Result<[Value; 3], TransferError> {
    let bench = TransferBench::start(nixl, 64, LATENCY_BLOCK_BYTES)?;
    let region = shared_pool(64, LATENCY_BLOCK_BYTES)?;
    let (mut reads, mut finishes, mut releases) = (Vec::new(), Vec::new(), Vec::new());
    let warm_up = 50;
    for round in 0..warm_up + rounds {
        let block = BlockId((round * 37 % 64) as u32);
        let (handle, other) = (bench.producer.open_lease(&[block]), bench.producer.open_lease(&[block]));
        let begun = Instant::now();
        bench.read(transport, handle, &[block], &region)?;
        let read = begun.elapsed();
        bench.finish(transport, handle)?;
        let finished = begun.elapsed() - read;
        let begun = Instant::now();
        bench.transports[transport].release(&bench.peer, other, "measured")?;
        let release = begun.elapsed();
        if round >= warm_up {
            reads.push(read);
            finishes.push(finished);
            releases.push(release);
        }
    }
    if bench.producer.live_leases() > 0 {
        return Err(TransferError::Lease);
    }
    Ok([reads, finishes, releases].map(percentiles))
}

fn percentiles(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |share: f64| {
        let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1;
        thousandths(times[index].as_secs_f64() * 1e6)
    };
    json!({ "p50": at(0.50), "p99": at(0.99), "rounds": times.len() })
}

fn speeds(bytes: usize, times: &[Duration]) -> Value {
    let speeds: Vec<f64> = times.iter().map(|time| bytes as f64 / time.as_secs_f64() / 1e9).collect();
    let (min, max) = speeds.iter().fold((f64::MAX, 0.0_f64), |(min, max), &s| (min.min(s), max.max(s)));
    let median = median(speeds).expect("there is a repetition");
    json!({
        "median_gb_per_s": thousandths(median), "min_gb_per_s": thousandths(min), "max_gb_per_s": thousandths(max),
    })
}

/// The speed of `ours` over that of `theirs`: the median over the repetitions, whose parts ran alternately.
fn ratio(theirs: &[Duration], ours: &[Duration]) -> f64 {
    let ratios = theirs.iter().zip(ours).map(|(t, o)| t.as_secs_f64() / o.as_secs_f64());
    thousandths(median(ratios.collect()).expect("there is a repetition"))
}

fn print(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "GB/s, median (min–max) of {} repetitions", report["repetitions"])?;
    write!(out, "{:>9}  ", "block")?;
    let ways = if report["nixl"].is_null() { &WAYS[..5] } else { &WAYS };
    ways.iter().try_for_each(|way| write!(out, "{way:<21}"))?;
    writeln!(out, "% of")?;
    for size in report["blocks"].as_array().into_iter().flatten() {
        write!(out, "{:>5} KiB  ", size["block_bytes"].as_u64().unwrap_or(0) >> 10)?;
        for &way in ways {
            let number = |key: &str| size[way][key].as_f64().unwrap_or(f64::NAN);
            let (median, min, max) =
                (number("median_gb_per_s"), number("min_gb_per_s"), number("max_gb_per_s"));
            write!(out, "{:<21}", format!("{median:.2} ({min:.2}–{max:.2})"))?;
        }
        let percent = |(_, _, key): &(usize, usize, &str)| {
            format!("{} {:.0}", key.replace("_to_", "/"), 100.0 * size[*key].as_f64().unwrap_or(f64::NAN))
        };
        let ratios = RATIOS.iter().filter(|(_, _, key)| !size[*key].is_null());
        writeln!(out, "{}", ratios.map(percent).collect::<Vec<_>>().join(", "))?;
    }
    for transport in TRANSPORTS.into_iter().filter(|transport| !report["latency"][*transport].is_null()) {
        for (what, key) in [
            ("read of one 64 KiB block", "read_one_block_us"),
            ("its verdict", "finish_us"),
            ("release", "release_us"),
        ] {
            let times = &report["latency"][transport][key];
            writeln!(out, "{transport}: {what}: p50 {} µs, p99 {} µs", times["p50"], times["p99"])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> TransferOptions {
        let block_kib = vec![16];
        TransferOptions { block_kib, mib: 4, repetitions: 1, rounds: 20, nixl_library: None, json: true }
    }

    #[test]
    fn a_small_run_prints_every_documented_number() {
        let options = TransferOptions { block_kib: vec![16, 2048], repetitions: 2, ..small() };
        let mut out = Vec::new();
        run(&options, &mut out).expect("loopback works");
        let report: Value = serde_json::from_slice(&out).expect("one JSON object");
        for size in report["blocks"].as_array().expect("a list") {
            let there = |key: &str| !key.starts_with("nixl") || !report["nixl"].is_null();
            for way in WAYS.into_iter().filter(|way| there(way)) {
                assert!(size[way]["median_gb_per_s"].as_f64().expect("a number") > 0.0);
            }
            for (_, _, ratio) in RATIOS.into_iter().filter(|(_, _, key)| there(key)) {
                assert!(size[ratio].as_f64().expect("a number") > 0.0);
            }
        }
        for transport in ["shm", "tcp"] {
            let latency = &report["latency"][transport];
            assert!(latency["release_us"]["p99"].as_f64() >= latency["release_us"]["p50"].as_f64());
            assert_eq!(latency["read_one_block_us"]["rounds"], 20);
        }
    }

    #[test]
    fn a_scattered_table_names_every_block_once() {
        for n in [1, 2, 3, 64, 100, 8192] {
            let mut blocks = scattered(n, 7);
            blocks.sort_unstable();
            assert_eq!(blocks, (0..n as u32).map(BlockId).collect::<Vec<_>>());
        }
    }

    #[test]
    fn nothing_to_measure_is_an_error() {
        let options = TransferOptions { repetitions: 0, json: false, ..small() };
        assert!(matches!(run(&options, &mut Vec::new()), Err(TransferError::Options)));
    }
}
