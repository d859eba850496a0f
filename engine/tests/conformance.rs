//! The conformance suite of the device transport on the memory of the engine's devices. Another process exports the
//! pools, because a GPU driver does not open a process's own exports.
//!
//! ```text
//!   this process                                              the holder (this test again, started once)
//!     TestProducer ── ledger, leased blocks ──┐                     a device
//!     ShmServer ── the holder's offer         │ bytes, before each  └─ a pool for each test, exported
//!        ▲                                    └ granted batch ─────────▶ written into it
//!        │ handshake, grants, verdict
//!     DeviceTransport ── this process's device: opens the holder's pool, copies from it into a pool of its own, and
//!                        from there into the region of the test, which checks every byte
//! ```
//!
//! By default both devices are software devices. `BATON_TEST_DEVICE=cuda:0` runs the suite on a GPU, with CUDA IPC
//! (`bench/gpu/check.sh`).
#![allow(unsafe_code, reason = "bytes of runs are copied into a region; the block states why that is sound")]

#[path = "../../connector/tests/conformance/mod.rs"]
#[macro_use]
mod conformance;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, Readiness, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Reader};
use baton_connector_device::{
    CopyRun, DeviceId, DeviceKind, DevicePool, DeviceTransport, HANDLE_BYTES, ImportedPool, Offer,
    PoolExport, transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions};
use baton_engine::compute::cuda::device::{
    DeviceBuffer, DeviceSlice, HostRun, HostSlice, PoolMemory, Priority,
};
use baton_engine::compute::cuda::driver::CudaDevice;
use baton_engine::compute::cuda::kernels::KernelTarget;
use baton_engine::compute::cuda::{Accelerator, Device, DeviceChoice, Element, cubins};
use baton_engine_check::software::SoftwareDevice;
use conformance::{TestProducer, TransportHarness};

/// Smaller than in engines, so that a read of a few blocks takes several batches.
const BATCH_BYTES: usize = 1 << 20;
const SILENCE: Duration = Duration::from_millis(700);
/// Memory for the landing blocks of one test, with a slot for each of its regions.
const LANDING_BYTES: usize = 64 << 20;
/// The unit of copies to the host.
const PAGE: usize = 4096;
/// The unit in which CUDA IPC shares memory, by NVIDIA's programming guide.
const GRANULE: usize = 2 << 20;
/// Bytes of one write of the holder.
const STAGING: usize = 4 << 20;
const SOFTWARE_BYTES: usize = 4 << 30;
const ROLE: &str = "BATON_TEST_DEVICE_HOLDER";

/// A producer's host side. The shared-memory listener requires a pool that can be shared. No test reads from it.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open() -> Box<dyn Device> {
    let name = std::env::var("BATON_TEST_DEVICE").unwrap_or_else(|_| "software".to_owned());
    let (element, head_dim) = (Element::Bf16, 128);
    match baton_engine_check::parse_device(&name).expect("BATON_TEST_DEVICE is a device") {
        DeviceChoice::Cpu => panic!("the CPU has no memory of its own"),
        DeviceChoice::Accelerator(Accelerator::Provided(_)) => {
            Box::new(SoftwareDevice::new(SOFTWARE_BYTES, element, head_dim))
        }
        DeviceChoice::Accelerator(Accelerator::Cuda(ordinal)) => {
            let target = KernelTarget::plain(element, head_dim);
            let opened = CudaDevice::open(ordinal, &target, cubins::folder().as_deref());
            Box::new(opened.expect("a GPU and its libraries"))
        }
    }
}

/// The device of the consumers.
fn consumer_device() -> MutexGuard<'static, Box<dyn Device>> {
    static DEVICE: OnceLock<Mutex<Box<dyn Device>>> = OnceLock::new();
    lock(DEVICE.get_or_init(|| Mutex::new(open())))
}

/// Not a test: the process with the producers' device. It creates pools and writes into them until its standard input
/// ends.
#[test]
#[ignore = "the process that holds the pools of the other tests"]
#[allow(clippy::disallowed_methods, reason = "a child process of a test, which has nothing to clean up")]
fn holder_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut device = open();
    let staging = HostSlice { host: device.host(STAGING).expect("host memory"), offset: 0 };
    let (stream, event) = (device.stream(Priority::Steps), device.event());
    let (stream, event) = (stream.expect("a stream"), event.expect("an event"));
    let mut pools: Vec<(DeviceBuffer, Arc<dyn PoolMemory>, PoolExport)> = Vec::new();
    let (mut stdin, mut line) = (io::stdin().lock(), String::new());
    while stdin.read_line(&mut line).expect("text") > 0 {
        let words: Vec<_> = line.split_whitespace().collect();
        let numbers: Vec<usize> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        match (words[0], &numbers[..]) {
            ("pool", [bytes]) => {
                // CUDA IPC shares whole granules, which exceed a smaller allocation.
                let whole = bytes.next_multiple_of(GRANULE);
                let (buffer, memory) = device.alloc_shared(whole).expect("memory of the device");
                let export = memory.export().expect("the pool can be exported");
                let kind = if export.device.kind == DeviceKind::Cuda { "cuda" } else { "software" };
                let descriptor = export.descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd);
                let (uuid, handle) = (hex(&export.device.uuid), hex(&export.handle));
                println!("\npool {} {kind} {uuid} {handle} {descriptor}", pools.len());
                pools.push((buffer, memory, export));
            }
            ("write", [pool, offset, bytes]) => {
                let mut what = vec![0; *bytes];
                stdin.read_exact(&mut what).expect("the bytes of the write");
                for (at, part) in what.chunks(STAGING).enumerate() {
                    let to = DeviceSlice {
                        buffer: pools[*pool].0,
                        offset: offset + at * STAGING,
                        bytes: part.len(),
                    };
                    device.write_host(staging, part).expect("the part fits");
                    device.upload(stream, staging, to).expect("the part fits");
                    device.record(event, stream).expect("an event");
                    device.synchronize(event).expect("the upload ends");
                }
                println!("\nwritten");
            }
            _ => panic!("{line:?}"),
        }
        line.clear();
    }
    // The test harness would print to a closed pipe at the end of the test.
    std::process::exit(0);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> [u8; N] {
    let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal");
    std::array::from_fn(byte)
}

/// The other process. The end of this process closes its standard input, which ends it.
struct PoolProcess {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl PoolProcess {
    fn get() -> MutexGuard<'static, Self> {
        static HOLDER: OnceLock<Mutex<PoolProcess>> = OnceLock::new();
        lock(HOLDER.get_or_init(|| Mutex::new(Self::start())))
    }

    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "holder_process", "--ignored", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary starts");
        let (stdin, stdout) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        Self { process, stdin, stdout: BufReader::new(stdout) }
    }

    fn await_reply(&mut self, word: &str) -> Vec<String> {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).expect("text") > 0, "the holder has ended");
            let mut words = line.split_whitespace();
            if words.next() == Some(word) {
                return words.map(str::to_owned).collect();
            }
        }
    }

    fn pool(&mut self, bytes: usize) -> RemotePool {
        writeln!(self.stdin, "pool {bytes}").expect("the holder reads its input");
        let reply = self.await_reply("pool");
        let [pool, kind, uuid, handle, descriptor] = &reply[..] else { panic!("{reply:?}") };
        let kind = if kind == "cuda" { DeviceKind::Cuda } else { DeviceKind::Software };
        let device = DeviceId { kind, uuid: unhex(uuid) };
        let descriptor = (descriptor != "-1").then(|| {
            let path = format!("/proc/{}/fd/{descriptor}", self.process.id());
            OwnedFd::from(File::open(path).expect("the holder keeps the descriptor open"))
        });
        RemotePool { pool: pool.parse().expect("a number"), device, handle: unhex(handle), descriptor }
    }

    fn write(&mut self, pool: usize, offset: usize, bytes: &[u8]) {
        writeln!(self.stdin, "write {pool} {offset} {}", bytes.len()).expect("the holder reads its input");
        self.stdin.write_all(bytes).expect("the holder reads its input");
        self.stdin.flush().expect("the holder reads its input");
        self.await_reply("written");
    }
}

/// A pool of the holder process.
#[derive(Debug)]
struct RemotePool {
    pool: usize,
    device: DeviceId,
    handle: [u8; HANDLE_BYTES],
    descriptor: Option<OwnedFd>,
}

impl DevicePool for RemotePool {
    fn export(&self) -> io::Result<PoolExport> {
        let descriptor = self.descriptor.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(PoolExport { device: self.device, handle: self.handle, descriptor })
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        Err(ErrorKind::Unsupported.into())
    }

    fn landed(&self, _: &[BlockId]) {
        panic!("nothing is read into a producer's pool");
    }
}

/// The first entry and the blocks of each read.
type ReadTable = HashMap<(Handle, Reader), (usize, Vec<BlockId>)>;

/// A producer that writes its blocks into the holder's pool before it grants a batch.
struct RemoteProducer {
    producer: Arc<TestProducer>,
    pool: Arc<RemotePool>,
    reads: Mutex<ReadTable>,
    /// The content of each block in the holder's pool.
    written: Mutex<HashMap<BlockId, Vec<u8>>>,
}

impl RemoteProducer {
    fn upload(&self, blocks: &[BlockId]) {
        let mut written = lock(&self.written);
        for &block in blocks {
            let bytes = self.producer.region().read_block(block);
            if written.get(&block) != Some(&bytes) {
                PoolProcess::get().write(self.pool.pool, block.index() * bytes.len(), &bytes);
                written.insert(block, bytes);
            }
        }
    }
}

impl Producer for RemoteProducer {
    fn epoch(&self) -> Epoch {
        self.producer.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.producer.fingerprint()
    }

    fn layout(&self) -> Option<KvLayout> {
        self.producer.layout()
    }

    fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        let blocks = self.producer.begin_read(handle, reader, first, count)?;
        lock(&self.reads).insert((handle, reader), (first, blocks.clone()));
        Ok(blocks)
    }

    fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.producer.is_read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let readiness = self.producer.await_ready(handle, reader, upto, within);
        if readiness == Readiness::Ready {
            let (first, blocks) = lock(&self.reads)[&(handle, reader)].clone();
            self.upload(&blocks[..upto - first]);
        }
        readiness
    }

    fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
        self.producer.finish_read(handle, reader)
    }

    fn fail_read(&self, handle: Handle, reader: Reader) {
        self.producer.fail_read(handle, reader);
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        self.producer.release(handle, reason)
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        self.producer.leave(handle, consumer, reason)
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        self.producer.heartbeat(handle)
    }

    fn region(&self) -> &Region {
        self.producer.region()
    }

    fn download_blocks(&self, _: &[BlockId]) -> Result<(), TransportError> {
        panic!("nothing is read in the host's memory");
    }
}

/// The device memory for the landing blocks of a test's regions.
#[derive(Clone, Debug)]
struct LandingMemory {
    memory: Arc<dyn PoolMemory>,
    /// The host side, and the slots of the regions.
    host: Arc<Mutex<(Region, Vec<Slot>)>>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The address of the region's first byte, which is unique among live regions.
    region: usize,
    bytes: usize,
    at: usize,
}

impl LandingMemory {
    fn over(memory: Arc<dyn PoolMemory>) -> Self {
        let host = Region::allocate(LANDING_BYTES / PAGE, PAGE);
        Self { memory, host: Arc::new(Mutex::new((host, Vec::new()))) }
    }

    /// The host side, and the offset of this region in it.
    fn slot(&self, region: &Region) -> (Region, usize) {
        let mut host = lock(&self.host);
        let (bytes, address) = (region.blocks() * region.block_bytes(), region.block_ptr(BlockId(0)).addr());
        if let Some(slot) = host.1.iter().find(|slot| slot.region == address && slot.bytes >= bytes) {
            return (host.0.clone(), slot.at);
        }
        let at = host.1.last().map_or(0, |last| (last.at + last.bytes).next_multiple_of(PAGE));
        assert!(at + bytes <= LANDING_BYTES, "the regions of one test are larger than LANDING_BYTES");
        host.1.push(Slot { region: address, bytes, at });
        (host.0.clone(), at)
    }
}

impl DevicePool for LandingMemory {
    fn export(&self) -> io::Result<PoolExport> {
        Err(ErrorKind::Unsupported.into())
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        let opened = self.memory.open(offer, descriptor)?;
        Ok(Box::new(OpenedRemotePool { opened, landing: self.clone() }))
    }

    fn landed(&self, _: &[BlockId]) {}
}

/// The holder's pool, opened in this process.
#[derive(Debug)]
struct OpenedRemotePool {
    opened: Box<dyn ImportedPool>,
    landing: LandingMemory,
}

impl ImportedPool for OpenedRemotePool {
    fn copy(&self, runs: &[CopyRun], region: &Region) -> io::Result<()> {
        let (host, at) = self.landing.slot(region);
        let shifted: Vec<_> = runs.iter().map(|run| CopyRun { into: at + run.into, ..*run }).collect();
        self.opened.copy(&shifted, &host)?;
        // One copy at a time: whole pages are copied, which may contain bytes of other regions.
        let _host = lock(&self.landing.host);
        self.landing.memory.copy_out(&pages(&shifted), &host).map_err(io::Error::other)?;
        for (run, there) in runs.iter().zip(&shifted) {
            assert!(run.into + run.len <= region.blocks() * region.block_bytes(), "{run:?}");
            let (from, into) = (host.block_ptr(BlockId(0)), region.block_ptr(BlockId(0)));
            // SAFETY: inside the host side, which is locked against writes, and inside the region. Only this read uses
            // the region's landing blocks until its end.
            unsafe { std::ptr::copy_nonoverlapping(from.add(there.into), into.add(run.into), run.len) };
        }
        Ok(())
    }
}

/// The pages of these runs, each once.
fn pages(runs: &[CopyRun]) -> Vec<HostRun> {
    let page = |run: &CopyRun| run.into / PAGE * PAGE..(run.into + run.len).next_multiple_of(PAGE);
    let mut all: Vec<_> = runs.iter().map(page).collect();
    all.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<HostRun> = Vec::new();
    for range in all {
        match merged.last_mut() {
            Some(last) if range.start <= last.pool + last.bytes => {
                last.bytes = last.bytes.max(range.end - last.pool);
            }
            _ => merged.push(HostRun { pool: range.start, host: range.start, bytes: range.len() }),
        }
    }
    merged
}

/// An address that no other test of this process or of another uses. Listeners bind names made from it.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 5], port))
}

struct DeviceHarness {
    servers: Vec<ShmServer>,
    transport: Option<Arc<DeviceTransport>>,
    peer: Peer,
    producer: Arc<TestProducer>,
    landing: DeviceBuffer,
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let address = address();
    let region = producer.region();
    let pool = Arc::new(PoolProcess::get().pool(region.blocks() * region.block_bytes()));
    let (reads, written) = (Mutex::default(), Mutex::default());
    let remote =
        Arc::new(RemoteProducer { producer: Arc::clone(&producer), pool: Arc::clone(&pool), reads, written });
    // The producer also listens on the name of another epoch: the handshake decides, not the name.
    let servers = [producer.epoch(), Epoch(1)].map(|epoch| {
        let listener = listen(epoch, address.port()).expect("a free name");
        let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
        let offered = baton_connector_device::producer(Arc::clone(&pool) as _, region, BATCH_BYTES)
            .expect("the pool was exported");
        ShmServer::start_with_services(listener, Arc::clone(&remote) as _, vec![offered], options)
            .expect("a server")
    });
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let (landing, memory) = consumer_device().alloc_shared(LANDING_BYTES).expect("memory of the device");
    let transport = Some(Arc::new(transport(Arc::new(LandingMemory::over(memory)), options)));
    Box::new(DeviceHarness { servers: servers.into(), transport, peer, producer, landing })
}

impl DeviceHarness {
    fn device(&self) -> &Arc<DeviceTransport> {
        self.transport.as_ref().expect("dropped with the harness")
    }
}

impl TransportHarness for DeviceHarness {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(self.device()) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.servers.clear();
    }

    fn idle_connections(&self) -> usize {
        self.device().idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for DeviceHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
        self.transport = None;
        // The device frees the memory with its last user.
        consumer_device().free(self.landing).expect("every copy was waited for");
    }
}

transport_conformance!(start);
