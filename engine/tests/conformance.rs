//! The device transport keeps every promise of a transport on memory of the engine's own devices, whose pools other processes
//! have exported: what a process has exported itself a GPU's driver does not open for it.
//!
//! ```text
//!   this process                                              the holder (this test again, started once)
//!     Lender ── ledger, what was lent ──┐                       a device
//!     ShmServer ── the holder's offer   │ bytes, before each      └─ a pool for each test, exported
//!        ▲                              └ batch that is granted ─────▶ written into it
//!        │ handshake, grants, verdict
//!     DeviceTransport ── a device of ours: opens the holder's pool, copies from it into a pool of its own, and from
//!                        there into the region of the test, which looks at every byte
//! ```
//!
//! By default both devices are software ones. `BATON_TEST_DEVICE=cuda:0` runs the same on a GPU, by CUDA IPC
//! (`bench/gpu/check.sh`).
#![allow(unsafe_code)] // bytes of runs go into a region; it says why that is sound

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
    DeviceId, DevicePool, DeviceTransport, Export, HANDLE_BYTES, Kind, Offer, Opened, Run, producer,
    transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions};
use baton_engine::compute::cuda::device::{Buffer, HostAt, HostRun, PoolMemory, Priority, Slice};
use baton_engine::compute::cuda::driver::CudaDevice;
use baton_engine::compute::cuda::software::SoftDevice;
use baton_engine::compute::cuda::{Accelerator, Device, DeviceChoice, Element, cubins};
use conformance::{Lender, Wire};

/// Smaller than in engines, so that a read of a few blocks has a middle.
const BATCH_BYTES: usize = 1 << 20;
const SILENCE: Duration = Duration::from_millis(700);
/// Where everything lands that one test reads: a slot for each of its regions.
const LANDING_BYTES: usize = 64 << 20;
/// What is copied to the host is a number of these.
const PAGE: usize = 4096;
/// The unit in which CUDA IPC shares memory, by NVIDIA's programming guide.
const GRANULE: usize = 2 << 20;
/// Bytes that the holder writes at once.
const STAGING: usize = 4 << 20;
const SOFTWARE_BYTES: usize = 4 << 30;
const ROLE: &str = "BATON_TEST_DEVICE_HOLDER";

/// A lender's host side. The listener is shared memory's, which wants a pool that can be shared; nobody here reads from it.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open() -> Box<dyn Device> {
    let name = std::env::var("BATON_TEST_DEVICE").unwrap_or_else(|_| "software".to_owned());
    let (element, head_dim) = (Element::Bf16, 128);
    match name.parse().expect("BATON_TEST_DEVICE is a device") {
        DeviceChoice::Cpu => panic!("the CPU has no memory of its own"),
        DeviceChoice::Accelerator(Accelerator::Software) => {
            Box::new(SoftDevice::new(SOFTWARE_BYTES, element, head_dim))
        }
        DeviceChoice::Accelerator(Accelerator::Cuda(ordinal)) => {
            let opened = CudaDevice::open(ordinal, element, head_dim, cubins::folder().as_deref());
            Box::new(opened.expect("a GPU and its libraries"))
        }
    }
}

/// The consumers' device.
fn ours() -> MutexGuard<'static, Box<dyn Device>> {
    static OURS: OnceLock<Mutex<Box<dyn Device>>> = OnceLock::new();
    lock(OURS.get_or_init(|| Mutex::new(open())))
}

/// Not a test: the process that has the producers' device. It makes pools and writes into them until its standard input
/// ends.
#[test]
#[ignore = "the other process of the tests below"]
#[allow(clippy::disallowed_methods)] // it ends for the one it was started by, and owes nobody anything
fn holder_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut device = open();
    let staging = HostAt { host: device.host(STAGING).expect("host memory"), offset: 0 };
    let (stream, event) = (device.stream(Priority::Steps), device.event());
    let (stream, event) = (stream.expect("a stream"), event.expect("an event"));
    let mut pools: Vec<(Buffer, Arc<dyn PoolMemory>, Export)> = Vec::new();
    let (mut asked, mut line) = (io::stdin().lock(), String::new());
    while asked.read_line(&mut line).expect("text") > 0 {
        let words: Vec<_> = line.split_whitespace().collect();
        let numbers: Vec<usize> = words[1..].iter().map(|word| word.parse().expect("a number")).collect();
        match (words[0], &numbers[..]) {
            ("pool", [bytes]) => {
                // Of smaller allocations CUDA IPC shares more than they are.
                let whole = bytes.next_multiple_of(GRANULE);
                let (buffer, memory) = device.alloc_shared(whole).expect("memory of the device");
                let export = memory.export().expect("it can be exported");
                let kind = if export.device.kind == Kind::Cuda { "cuda" } else { "software" };
                let descriptor = export.descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd);
                let (uuid, handle) = (hex(&export.device.uuid), hex(&export.handle));
                println!("\npool {} {kind} {uuid} {handle} {descriptor}", pools.len());
                pools.push((buffer, memory, export));
            }
            ("write", [pool, offset, bytes]) => {
                let mut what = vec![0; *bytes];
                asked.read_exact(&mut what).expect("as many bytes");
                for (at, part) in what.chunks(STAGING).enumerate() {
                    let to =
                        Slice { buffer: pools[*pool].0, offset: offset + at * STAGING, bytes: part.len() };
                    device.write_host(staging, part).expect("it fits");
                    device.upload(stream, staging, to).expect("it fits");
                    device.record(event, stream).expect("an event");
                    device.synchronize(event).expect("it ends");
                }
                println!("\nwritten");
            }
            _ => panic!("{line:?}"),
        }
        line.clear();
    }
    // Nobody is left who hears what a test says at its end.
    std::process::exit(0);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(text: &str) -> [u8; N] {
    let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal");
    std::array::from_fn(byte)
}

/// The other process. It ends with this one, whose end closes its standard input.
struct Holder {
    process: Child,
    asks: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Holder {
    fn get() -> MutexGuard<'static, Self> {
        static HOLDER: OnceLock<Mutex<Holder>> = OnceLock::new();
        lock(HOLDER.get_or_init(|| Mutex::new(Self::start())))
    }

    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "holder_process", "--ignored", "--nocapture"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test again");
        let (asks, says) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        Self { process, asks, says: BufReader::new(says) }
    }

    fn hears(&mut self, word: &str) -> Vec<String> {
        loop {
            let mut line = String::new();
            assert!(self.says.read_line(&mut line).expect("text") > 0, "the holder has ended");
            let mut words = line.split_whitespace();
            if words.next() == Some(word) {
                return words.map(str::to_owned).collect();
            }
        }
    }

    fn pool(&mut self, bytes: usize) -> Held {
        writeln!(self.asks, "pool {bytes}").expect("it reads");
        let said = self.hears("pool");
        let [pool, kind, uuid, handle, descriptor] = &said[..] else { panic!("{said:?}") };
        let kind = if kind == "cuda" { Kind::Cuda } else { Kind::Software };
        let device = DeviceId { kind, uuid: unhex(uuid) };
        let descriptor = (descriptor != "-1").then(|| {
            let path = format!("/proc/{}/fd/{descriptor}", self.process.id());
            OwnedFd::from(File::open(path).expect("the holder keeps it"))
        });
        Held { pool: pool.parse().expect("a number"), device, handle: unhex(handle), descriptor }
    }

    fn write(&mut self, pool: usize, offset: usize, bytes: &[u8]) {
        writeln!(self.asks, "write {pool} {offset} {}", bytes.len()).expect("it reads");
        self.asks.write_all(bytes).expect("it reads");
        self.asks.flush().expect("it reads");
        self.hears("written");
    }
}

/// A pool of the holder's.
#[derive(Debug)]
struct Held {
    pool: usize,
    device: DeviceId,
    handle: [u8; HANDLE_BYTES],
    descriptor: Option<OwnedFd>,
}

impl DevicePool for Held {
    fn export(&self) -> io::Result<Export> {
        let descriptor = self.descriptor.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(Export { device: self.device, handle: self.handle, descriptor })
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        Err(ErrorKind::Unsupported.into())
    }

    fn landed(&self, _: &[BlockId]) {
        panic!("nothing is read into a producer's pool");
    }
}

/// Of each read its first entry, and its blocks.
type Reads = HashMap<(Handle, Reader), (usize, Vec<BlockId>)>;

/// A lender whose bytes are where they are read: in the holder's pool, before a batch is granted.
struct Beside {
    lender: Arc<Lender>,
    held: Arc<Held>,
    reads: Mutex<Reads>,
    /// What was written of each block.
    written: Mutex<HashMap<BlockId, Vec<u8>>>,
}

impl Beside {
    fn bring(&self, blocks: &[BlockId]) {
        let mut written = lock(&self.written);
        for &block in blocks {
            let bytes = self.lender.region().read_block(block);
            if written.get(&block) != Some(&bytes) {
                Holder::get().write(self.held.pool, block.index() * bytes.len(), &bytes);
                written.insert(block, bytes);
            }
        }
    }
}

impl Producer for Beside {
    fn epoch(&self) -> Epoch {
        self.lender.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.lender.fingerprint()
    }

    fn layout(&self) -> Option<KvLayout> {
        self.lender.layout()
    }

    fn read_begun(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        let blocks = self.lender.read_begun(handle, reader, first, count)?;
        lock(&self.reads).insert((handle, reader), (first, blocks.clone()));
        Ok(blocks)
    }

    fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.lender.read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let readiness = self.lender.await_ready(handle, reader, upto, within);
        if readiness == Readiness::Ready {
            let (first, blocks) = lock(&self.reads)[&(handle, reader)].clone();
            self.bring(&blocks[..upto - first]);
        }
        readiness
    }

    fn read_done(&self, handle: Handle, reader: Reader) -> Verdict {
        self.lender.read_done(handle, reader)
    }

    fn read_failed(&self, handle: Handle, reader: Reader) {
        self.lender.read_failed(handle, reader);
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        self.lender.release(handle, reason)
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        self.lender.leave(handle, consumer, reason)
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        self.lender.heartbeat(handle)
    }

    fn region(&self) -> &Region {
        self.lender.region()
    }

    fn in_region(&self, _: &[BlockId]) -> Result<(), TransportError> {
        panic!("nothing is read in the host's memory");
    }
}

/// Where a test's regions have their blocks on our device.
#[derive(Clone, Debug)]
struct Landing {
    memory: Arc<dyn PoolMemory>,
    /// Its host side, and the slots: which region, its bytes, where it begins.
    host: Arc<Mutex<(Region, Vec<Slot>)>>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The address of the region's first byte: no two that live have the same.
    region: usize,
    bytes: usize,
    at: usize,
}

impl Landing {
    fn over(memory: Arc<dyn PoolMemory>) -> Self {
        let host = Region::allocate(LANDING_BYTES / PAGE, PAGE);
        Self { memory, host: Arc::new(Mutex::new((host, Vec::new()))) }
    }

    /// The host side, and the place of this region.
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

impl DevicePool for Landing {
    fn export(&self) -> io::Result<Export> {
        Err(ErrorKind::Unsupported.into())
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        let opened = self.memory.open(offer, descriptor)?;
        Ok(Box::new(Landed { opened, landing: self.clone() }))
    }

    fn landed(&self, _: &[BlockId]) {}
}

/// The holder's pool, opened.
#[derive(Debug)]
struct Landed {
    opened: Box<dyn Opened>,
    landing: Landing,
}

impl Opened for Landed {
    fn copy(&self, runs: &[Run], region: &Region) -> io::Result<()> {
        let (host, at) = self.landing.slot(region);
        let shifted: Vec<_> = runs.iter().map(|run| Run { into: at + run.into, ..*run }).collect();
        self.opened.copy(&shifted, &host)?;
        // One after the other: whole pages are copied, and others' bytes may be on them.
        let _host = lock(&self.landing.host);
        self.landing.memory.copy_out(&pages(&shifted), &host).map_err(io::Error::other)?;
        for (run, there) in runs.iter().zip(&shifted) {
            assert!(run.into + run.len <= region.blocks() * region.block_bytes(), "{run:?}");
            let (from, into) = (host.block_ptr(BlockId(0)), region.block_ptr(BlockId(0)));
            // SAFETY: inside the host side, which nobody writes meanwhile because it is locked, and inside the region, whose
            // landing blocks are nobody else's until the read is over.
            unsafe { std::ptr::copy_nonoverlapping(from.add(there.into), into.add(run.into), run.len) };
        }
        Ok(())
    }
}

/// The pages that these runs land on, each once.
fn pages(runs: &[Run]) -> Vec<HostRun> {
    let page = |run: &Run| run.into / PAGE * PAGE..(run.into + run.len).next_multiple_of(PAGE);
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

/// A name that no other test of this process or of another has: there is nothing to listen on but names.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 5], port))
}

struct OneHost {
    servers: Vec<ShmServer>,
    transport: Option<Arc<DeviceTransport>>,
    peer: Peer,
    lender: Arc<Lender>,
    landing: Buffer,
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let address = address();
    let region = lender.region();
    let held = Arc::new(Holder::get().pool(region.blocks() * region.block_bytes()));
    let (reads, written) = (Mutex::default(), Mutex::default());
    let beside = Arc::new(Beside { lender: Arc::clone(&lender), held: Arc::clone(&held), reads, written });
    // It answers to the name of another epoch too: the name only finds a producer, the handshake decides.
    let servers = [lender.epoch(), Epoch(1)].map(|epoch| {
        let listener = listen(epoch, address.port()).expect("a free name");
        let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
        let offered = producer(Arc::clone(&held) as _, region, BATCH_BYTES).expect("it was exported");
        ShmServer::start_beside(listener, Arc::clone(&beside) as _, vec![offered], options).expect("a server")
    });
    let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let (landing, memory) = ours().alloc_shared(LANDING_BYTES).expect("memory of the device");
    let transport = Some(Arc::new(transport(Arc::new(Landing::over(memory)), options)));
    Box::new(OneHost { servers: servers.into(), transport, peer, lender, landing })
}

impl OneHost {
    fn device(&self) -> &Arc<DeviceTransport> {
        self.transport.as_ref().expect("it goes with the wire")
    }
}

impl Wire for OneHost {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(self.device()) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.servers.clear();
    }

    fn kept(&self) -> usize {
        self.device().idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for OneHost {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not keep the server's shutdown waiting.
        self.lender.open_gate();
        self.transport = None;
        // Its memory goes with the last that has it.
        ours().free(self.landing).expect("every copy was waited for");
    }
}

transport_conformance!(start);
