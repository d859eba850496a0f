//! The consumer of `baton bench gpu-nixl`, and its trials.
#![allow(unsafe_code, reason = "kill(2) of a child; it says why it is sound")]

use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::transport::{Part, ReadOrder, StopFlag, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_nixl::{
    DESCRIPTORS_MAX, DEVICE_BATCH_BYTES, DevicePool, Library, NixlDeviceTransport, device_transport,
};
use baton_connector_tcp::ClientOptions;
use baton_engine::compute::cuda::{Device, DeviceChoice, DeviceError};

use super::super::pool::{BenchPool, HandoffTimes, table};
use super::super::process::ProducerProcess;
use super::{BLOCK_BYTES, BLOCK_TOKENS, GpuNixl, NixlReport, Trial, TrialResult};
use crate::BenchError;
use crate::common::machine::Provenance;

const READER: Reader = Reader::sole(1);
/// After this time without progress the consumer gives up.
const SILENCE: Duration = Duration::from_secs(2);
/// Maximum time of a broken read: two such limits (its own, and its agent's end) on a busy machine.
const BROKEN: Duration = Duration::from_secs(9);
/// Time to wait for late bytes.
const LATE: Duration = Duration::from_millis(300);
/// Maximum time until a dead producer's memory is free.
const FREED: Duration = Duration::from_secs(10);
/// Times after the start of a read at which it is interrupted.
const MOMENTS_US: [u64; 4] = [100, 700, 2_000, 6_000];
/// Bytes of a block of [`MANY`]: one batch has more descriptors than one request.
const MANY_BLOCK_BYTES: usize = 16 << 10;
const _: () = assert!(DEVICE_BATCH_BYTES / MANY_BLOCK_BYTES > DESCRIPTORS_MAX);
/// Value of bytes that no read has written.
const MARK: u8 = 0xee;

/// The trials of [`all`], by name.
const STALE: &str = "a stale read";
const ENDED: &str = "a lease that ends unread";
const ABORTED: &str = "an abort in mid-read";
const KILLED: &str = "kill -9 in mid-read";
const STOPPED: &str = "SIGSTOP, and SIGCONT later";
const FREE: &str = "a dead producer's memory";
const MANY: &str = "more descriptors than one request has";
const LARGE: &str = "blocks larger than a batch";
const NAMES: [&str; 8] = [STALE, ENDED, ABORTED, KILLED, STOPPED, FREE, MANY, LARGE];

static GO: AtomicBool = AtomicBool::new(false);

/// A pool and the transport that reads into it.
struct NixlConsumer<'a, D> {
    pool: BenchPool<D>,
    transport: NixlDeviceTransport,
    library: Arc<dyn Library>,
    options: &'a GpuNixl,
}

fn start_producer(
    options: &GpuNixl,
    blocks: usize,
    block_bytes: usize,
) -> Result<ProducerProcess, BenchError> {
    let DeviceChoice::Accelerator(device) = options.device else { return Err("no device".into()) };
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["bench", "gpu-nixl", "--device", &device.to_string()]);
    command.args(["--tokens", &options.tokens.to_string()]);
    command.args(["--batch-mib", &options.batch_mib.to_string()]);
    command.args(["--serve", &blocks.to_string(), "--block-bytes", &block_bytes.to_string()]);
    if let Some(library) = &options.nixl_library {
        command.arg("--nixl-library").arg(library);
    }
    // UCX logs to standard output by default, but a producer's last output is not read.
    if std::env::var_os("UCX_LOG_FILE").is_none() {
        command.env("UCX_LOG_FILE", "stderr");
    }
    ProducerProcess::start(&mut command)
}

fn send_signal(process: &Child, signal: i32) {
    // SAFETY: sends a signal to our own child, which has not been waited for.
    unsafe { libc::kill(process.id().cast_signed(), signal) };
}

fn pause(time: Duration) {
    let begun = Instant::now();
    while let Some(left) = time.checked_sub(begun.elapsed()) {
        thread::park_timeout(left);
    }
}

fn wrong(what: impl Into<String>) -> BenchError {
    what.into().into()
}

fn connected<D: Device>(pool: &BenchPool<D>, library: &Arc<dyn Library>) -> NixlDeviceTransport {
    let client = ClientOptions { silence: SILENCE, ..ClientOptions::default() };
    device_transport(Arc::clone(library), Arc::clone(&pool.port) as Arc<dyn DevicePool>, client)
}

impl<'a, D: Device> NixlConsumer<'a, D> {
    fn new(
        device: D,
        library: &Arc<dyn Library>,
        options: &'a GpuNixl,
        blocks: usize,
        block_bytes: usize,
    ) -> Result<Self, BenchError> {
        let pool = BenchPool::new(device, blocks, block_bytes)?;
        Ok(Self { transport: connected(&pool, library), pool, library: Arc::clone(library), options })
    }

    /// Replaces the agent. The previous one ends.
    fn renew(&mut self) {
        self.transport = connected(&self.pool, &self.library);
    }

    fn producer(&self) -> Result<ProducerProcess, BenchError> {
        start_producer(self.options, self.pool.region.blocks(), self.pool.region.block_bytes())
    }

    fn order(&self, handle: Handle) -> ReadOrder {
        let into = (0..self.pool.region.blocks() as u32).map(BlockId).collect();
        ReadOrder { handle, reader: READER, part: Part::Blocks { first: 0 }, into }
    }

    fn read(
        &self,
        other: &ProducerProcess,
        order: &ReadOrder,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        self.transport.read(&other.peer, order, &self.pool.region, stop)
    }

    /// One read with its verdict.
    fn handoff(&self, other: &mut ProducerProcess) -> Result<Duration, BenchError> {
        let order = self.order(other.request_lease()?);
        let begun = Instant::now();
        self.read(other, &order, &GO)?;
        let verdict = self.transport.finish(&other.peer, order.handle, READER)?;
        let took = begun.elapsed();
        if verdict == Verdict::Valid { Ok(took) } else { Err(wrong("a live lease's verdict is not valid")) }
    }

    /// Compares all blocks. Returns their number.
    fn compare(&mut self) -> Result<usize, BenchError> {
        let table = table(self.pool.region.blocks());
        self.pool.compare(&table)
    }

    fn mark(&mut self) -> Result<(), BenchError> {
        let bytes = self.pool.region.block_bytes();
        Ok(self.pool.write(|_| vec![MARK; bytes])?)
    }

    /// Checks that no bytes have arrived since the blocks were marked, and that none arrive for a while.
    fn stays_marked(&mut self) -> Result<(), BenchError> {
        let begun = Instant::now();
        while begun.elapsed() < LATE {
            self.transport.sweep();
            pause(LATE / 10);
        }
        let blocks = self.pool.region.blocks();
        self.pool.look(blocks, |block, bytes| match bytes.iter().all(|&byte| byte == MARK) {
            true => Ok(()),
            false => Err(wrong(format!("block {block} was written after its read had returned"))),
        })
    }

    /// Reads, and acts on the producer after `moment`. Returns the result of the read if it ends within the limit.
    fn broken(
        &self,
        other: &ProducerProcess,
        order: &ReadOrder,
        moment: Duration,
        stop: &StopFlag,
        act: impl FnOnce(),
    ) -> Result<Result<(), TransportError>, BenchError> {
        let (transport, region) = (&self.transport, &self.pool.region);
        let (read, took) = thread::scope(|scope| {
            let read = scope.spawn(|| transport.read(&other.peer, order, region, stop));
            pause(moment);
            act();
            let acted = Instant::now();
            (read.join(), acted.elapsed())
        });
        let read = read.map_err(|_| wrong("the read panicked"))?;
        if took > BROKEN { Err(wrong(format!("it took {took:?} to end"))) } else { Ok(read) }
    }

    fn next_works(&mut self) -> Result<(), BenchError> {
        self.handoff(&mut self.producer()?)?;
        self.compare()?;
        Ok(())
    }
}

/// Whether this trial was selected. Without a selection all are.
fn wanted(texts: &[String], name: &str) -> bool {
    texts.is_empty() || texts.iter().any(|text| name.contains(text.as_str()))
}

/// Why this device cannot show the effect of a trial, if so.
fn unseen(name: &str, software: bool) -> Option<&'static str> {
    (name == FREE && software).then_some("processes share no device memory on a software device")
}

/// # Errors
/// If a text is not part of any trial's name.
pub(super) fn known(texts: &[String]) -> Result<(), BenchError> {
    let strange = texts.iter().find(|&text| !NAMES.iter().any(|name| name.contains(text.as_str())));
    match strange {
        None => Ok(()),
        Some(text) => Err(wrong(format!("--trial {text:?} is in none of the names: {}", NAMES.join("; ")))),
    }
}

/// Runs all trials and returns their results.
pub(super) fn all<D: Device>(
    open: impl Fn() -> Result<D, DeviceError>,
    library: &Arc<dyn Library>,
    options: &GpuNixl,
) -> Result<NixlReport, BenchError> {
    let blocks = options.tokens.div_ceil(BLOCK_TOKENS).max(1);
    let consumer = |blocks, block_bytes| NixlConsumer::new(open()?, library, options, blocks, block_bytes);
    let mut main = consumer(blocks, BLOCK_BYTES)?;
    let mut other = main.producer()?;
    let first = main.handoff(&mut other)?;
    let mut blocks_checked = main.compare()?;
    let times = (0..options.repetitions.max(1)).map(|_| main.handoff(&mut other));
    let times = times.collect::<Result<Vec<_>, _>>()?;
    blocks_checked += main.compare()?;
    let copy = main.pool.copy(options.repetitions.max(1))?;
    let mut trials = Vec::new();
    let software = options.device == baton_engine_check::SOFTWARE;
    let mut tried = |name: &'static str, run: &mut dyn FnMut() -> Result<String, BenchError>| {
        if !wanted(&options.trial, name) {
            return;
        }
        if let Some(why) = unseen(name, software) {
            return trials.push(Trial { name, seen: TrialResult::Skipped(why.into()), took_ms: 0.0 });
        }
        let begun = Instant::now();
        let seen = run().map_or_else(|error| TrialResult::Wrong(error.to_string()), TrialResult::Right);
        trials.push(Trial { name, seen, took_ms: begun.elapsed().as_secs_f64() * 1e3 });
    };
    tried(STALE, &mut || stale(&main, &mut other));
    tried(ENDED, &mut || ended(&main, &mut other));
    tried(ABORTED, &mut || aborted(&mut main, &mut other));
    drop(other);
    tried(KILLED, &mut || killed(&mut main));
    tried(STOPPED, &mut || stopped(&mut main));
    tried(FREE, &mut || freed(&mut main));
    drop(main);
    tried(MANY, &mut || shaped(consumer(3 * DEVICE_BATCH_BYTES / MANY_BLOCK_BYTES, MANY_BLOCK_BYTES)?));
    tried(LARGE, &mut || shaped(consumer(5, DEVICE_BATCH_BYTES + 4096)?));
    let device = open()?;
    Ok(NixlReport {
        origin: Provenance::of(device.driver()),
        device: device.name(),
        library: library.origin().to_owned(),
        tokens: blocks * BLOCK_TOKENS,
        bytes: blocks * BLOCK_BYTES,
        blocks_checked,
        batch_mib: options.batch_mib,
        first_ms: first.as_secs_f64() * 1e3,
        times: HandoffTimes::of(&times, &copy),
        trials,
    })
}

fn stale<D: Device>(main: &NixlConsumer<'_, D>, other: &mut ProducerProcess) -> Result<String, BenchError> {
    let order = main.order(other.request_lease()?);
    main.transport.release(&other.peer, order.handle, "over")?;
    match main.read(other, &order, &GO) {
        Err(TransportError::Gone) => Ok("gone".into()),
        read => Err(wrong(format!("a read after the lease was over: {read:?}"))),
    }
}

/// All bytes have arrived, and the lease ends before the verdict.
fn ended<D: Device>(main: &NixlConsumer<'_, D>, other: &mut ProducerProcess) -> Result<String, BenchError> {
    let order = main.order(other.request_lease()?);
    main.read(other, &order, &GO)?;
    main.transport.give_up(&other.peer, order.handle, READER)?;
    main.transport.release(&other.peer, order.handle, "over")?;
    match main.transport.finish(&other.peer, order.handle, READER)? {
        Verdict::Gone => Ok("read, and no valid verdict".into()),
        verdict => Err(wrong(format!("the verdict is {verdict:?}"))),
    }
}

fn aborted<D: Device>(
    main: &mut NixlConsumer<'_, D>,
    other: &mut ProducerProcess,
) -> Result<String, BenchError> {
    let mut in_time = 0;
    for moment in MOMENTS_US {
        let (order, stop) = (main.order(other.request_lease()?), AtomicBool::new(false));
        let raise = || stop.store(true, Ordering::Release);
        match main.broken(other, &order, Duration::from_micros(moment), &stop, raise)? {
            Err(TransportError::Stopped) => in_time += 1,
            Ok(()) => {}
            read => return Err(wrong(format!("{read:?}"))),
        }
        main.mark()?;
        main.stays_marked()?;
    }
    main.handoff(other)?;
    main.compare()?;
    Ok(format!("{in_time} of {} were in time; nothing came later; the next read is right", MOMENTS_US.len()))
}

fn killed<D: Device>(main: &mut NixlConsumer<'_, D>) -> Result<String, BenchError> {
    let mut failed = 0;
    for moment in MOMENTS_US {
        let mut other = main.producer()?;
        let order = main.order(other.request_lease()?);
        let kill = || send_signal(&other.process, libc::SIGKILL);
        let read = main.broken(&other, &order, Duration::from_micros(moment), &GO, kill)?;
        failed += usize::from(read.is_err());
        if let Ok(verdict) = main.transport.finish(&other.peer, order.handle, READER) {
            return Err(wrong(format!("a dead producer says {verdict:?}")));
        }
        main.mark()?;
        main.stays_marked()?;
    }
    main.next_works()?;
    let (rounds, agents) = (MOMENTS_US.len(), main.transport.dialer().agents_made());
    Ok(format!(
        "{failed} of {rounds} reads failed, none had a verdict; nothing came later; the next is right; agents made: {agents}"
    ))
}

fn stopped<D: Device>(main: &mut NixlConsumer<'_, D>) -> Result<String, BenchError> {
    let mut results = Vec::new();
    for moment in MOMENTS_US {
        let mut other = main.producer()?;
        let order = main.order(other.request_lease()?);
        let stop = || send_signal(&other.process, libc::SIGSTOP);
        let read = main.broken(&other, &order, Duration::from_micros(moment), &GO, stop)?;
        if let Ok(verdict) = main.transport.finish(&other.peer, order.handle, READER) {
            return Err(wrong(format!("a stopped producer says {verdict:?}")));
        }
        main.mark()?;
        // After SIGCONT, the producer finds requests of an agent that has ended, whether or not the read was
        // interrupted.
        main.renew();
        send_signal(&other.process, libc::SIGCONT);
        main.stays_marked()?;
        let ended = other.process.try_wait()?;
        results.push(match (read.is_ok(), ended) {
            (_, Some(status)) => return Err(wrong(format!("the producer, continued, has ended: {status}"))),
            (true, None) => "all was granted before",
            (false, None) => "failed",
        });
    }
    main.next_works()?;
    Ok(format!("{}; nothing came later; the next is right", results.join(", ")))
}

/// Whether the device's memory is freed after a producer that was read from has died.
fn freed<D: Device>(main: &mut NixlConsumer<'_, D>) -> Result<String, BenchError> {
    let before = main.pool.device.free_bytes()?;
    let mut other = main.producer()?;
    main.handoff(&mut other)?;
    let with = main.pool.device.free_bytes()?;
    let taken = before.saturating_sub(with);
    if taken < main.pool.region.blocks() * main.pool.region.block_bytes() / 2 {
        return Err(wrong(format!("a living producer takes {taken} bytes: others use this device too")));
    }
    other.process.kill()?;
    other.process.wait()?;
    let begun = Instant::now();
    loop {
        main.transport.sweep();
        let after = main.pool.device.free_bytes()?;
        if after >= with + taken / 2 {
            return Ok(format!("free again after {:?}", begun.elapsed()));
        }
        if begun.elapsed() > FREED {
            let still = before.saturating_sub(after) >> 20;
            return Err(wrong(format!("{still} MiB are still taken after {FREED:?}")));
        }
        pause(LATE / 10);
    }
}

fn shaped<D: Device>(mut consumer: NixlConsumer<'_, D>) -> Result<String, BenchError> {
    let mut other = consumer.producer()?;
    consumer.handoff(&mut other)?;
    let took = consumer.handoff(&mut other)?;
    let blocks = consumer.compare()?;
    let bytes = blocks * consumer.pool.region.block_bytes();
    Ok(format!("{blocks} blocks, {} MiB in {took:.1?}, all the producer's", bytes >> 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_a_software_device_cannot_run_is_skipped() {
        for name in NAMES {
            assert_eq!(unseen(name, true).is_some(), name == FREE, "{name}");
            assert_eq!(unseen(name, false), None, "{name}");
        }
        let skipped = TrialResult::Skipped("no device memory".into());
        assert_eq!((skipped.shown().0, skipped.is_wrong()), ("skipped", false));
        assert_eq!(serde_json::to_string(&skipped).unwrap(), r#"{"skipped":"no device memory"}"#);
        assert_eq!(TrialResult::Wrong(String::new()).shown().0, "WRONG");
    }
}
