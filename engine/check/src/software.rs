//! A device in Rust that runs the work of the CUDA device, and rejects errors that a GPU accepts silently.
//!
//! Work is done when it is enqueued, in that order. The device checks whether a GPU would have had to do it in that
//! order. Every stream and the host have a vector clock. The device records every access with its stream and time until
//! the host has waited for it. It rejects:
//!
//! - freed memory, ranges beyond a buffer, and launches that no GPU accepts;
//! - two accesses to the same bytes, at least one of them a write, that no event and no wait orders;
//! - reads of host memory before a copy into it has landed, and writes while a copy from it is in flight.
//!
//! It is slow, and computes bf16 as the kernels do: stored in 16 bits, summed in f32.

mod emulated;
mod memory;
mod reference;
mod shared_memory_pool;

pub use self::emulated::{Emulation, EmulationError};
pub(crate) use self::reference::widen;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use baton_connector::region::Region;

use self::memory::{AccessLog, AccessSpan, MemoryBytes, VectorClock, lock};
pub use self::shared_memory_pool::CopyGate;
use self::shared_memory_pool::SharedMemoryPool;
use baton_engine::compute::cuda::device::{
    Device, DeviceBuffer, DeviceError, DeviceSlice, Element, Graph, HostBuffer, HostSlice, KernelArg, Launch,
    Matmul, PoolMemory, Priority, Stream, StreamEvent,
};

/// Most threads of a block, and blocks of a grid in y and z, on every GPU.
const THREADS_MAX: u32 = 1024;
const GRID_YZ_MAX: u32 = 65_535;
/// Dynamic shared memory of a block on compute capability 9.0.
const SHARED_BYTES_MAX: usize = 227 << 10;
/// Index of the host in clocks; streams follow.
const HOST: usize = 0;

/// Element type and head width of the kernels.
#[derive(Clone, Copy, Debug)]
struct SoftwareModule {
    element: Element,
    head_dim: usize,
}

struct SoftwareMemory {
    bytes: MemoryBytes,
    /// A pool's log is shared with the threads that copy from and to it.
    shadow: Arc<Mutex<AccessLog>>,
}

#[derive(Clone)]
enum GraphNode {
    Launch(Launch),
    Matmul(Matmul),
}

/// Faults that tests inject.
#[derive(Default)]
struct InjectedFaults {
    /// No wait ends in time any more.
    hangs: Arc<AtomicBool>,
    /// Copies to the device until one fails.
    uploads_left: Option<u64>,
    /// Held copies from the pools.
    copy_gate: Arc<OnceLock<CopyGate>>,
}

/// See the module's documentation.
pub struct SoftwareDevice {
    module: SoftwareModule,
    /// Runs the kernels themselves instead of the reference kernels.
    emulation: Option<Emulation>,
    shared_bytes_max: usize,
    memory_bytes: usize,
    /// Locked while the device works, because other threads touch its memory too.
    work: Arc<Mutex<()>>,
    buffers: Vec<Option<SoftwareMemory>>,
    hosts: Vec<SoftwareMemory>,
    /// Clocks of the host and of each stream.
    clocks: Vec<VectorClock>,
    /// Priority of each stream.
    priorities: Vec<Priority>,
    faults: InjectedFaults,
    events: Vec<VectorClock>,
    graphs: Vec<Vec<GraphNode>>,
    capturing: Option<(Stream, Vec<GraphNode>)>,
    /// Number of launches and products that ran, including those of graphs.
    pub launches: u64,
    /// Number of replayed graphs.
    pub replays: u64,
    /// Number of copies between host and device.
    pub copies: u64,
    /// Number of waits of the host for the device.
    pub waits: Arc<AtomicU64>,
}

fn undefined<T>(what: String) -> Result<T, DeviceError> {
    Err(DeviceError::Undefined(what))
}

/// The result of a wait: as on a GPU, an error if the work is not over within the bound.
fn wait(what: &'static str, hangs: &AtomicBool) -> Result<(), DeviceError> {
    match hangs.load(Ordering::Acquire) {
        true => Err(DeviceError::Hung { what, waited: Duration::ZERO }),
        false => Ok(()),
    }
}

impl SoftwareDevice {
    /// A device with this size of memory, and kernels for heads of `head_dim` elements.
    #[must_use]
    pub fn new(memory_bytes: usize, element: Element, head_dim: usize) -> Self {
        Self {
            module: SoftwareModule { element, head_dim },
            emulation: None,
            shared_bytes_max: SHARED_BYTES_MAX,
            memory_bytes,
            work: Arc::default(),
            buffers: Vec::new(),
            hosts: Vec::new(),
            clocks: vec![VectorClock::default()],
            priorities: Vec::new(),
            faults: InjectedFaults::default(),
            events: Vec::new(),
            graphs: Vec::new(),
            capturing: None,
            launches: 0,
            replays: 0,
            copies: 0,
            waits: Arc::default(),
        }
    }

    /// A device with at most `most` bytes of shared memory per block.
    #[must_use]
    pub fn with_shared_bytes(mut self, most: usize) -> Self {
        self.shared_bytes_max = most;
        self
    }

    /// A device that runs the kernels' own code, compiled for this CPU. Accesses of the kernels are not recorded byte
    /// by byte.
    #[must_use]
    pub fn emulating(mut self, emulation: Emulation) -> Self {
        self.emulation = Some(emulation);
        self
    }

    /// Number of pieces of work that were enqueued on streams of a priority.
    #[must_use]
    pub fn work(&self, priority: Priority) -> u64 {
        let streams = self.priorities.iter().enumerate().filter(|(_, known)| **known == priority);
        streams.map(|(at, _)| self.clocks[at + 1].at(at + 1)).sum()
    }

    /// Number of recorded graphs.
    #[must_use]
    pub fn graphs(&self) -> usize {
        self.graphs.len()
    }

    /// From now on no work is over in time: neither steps nor copies from and to its pools.
    pub fn hang(&mut self) {
        self.faults.hangs.store(true, Ordering::Release);
    }

    /// Makes the device work again, unlike a GPU. Tests use it to check that a disabled device gets no more calls.
    pub fn recover(&mut self) {
        self.faults.hangs.store(false, Ordering::Release);
    }

    /// Holds copies from the pools at a gate. Called once.
    pub fn hold_copies(&mut self, gate: CopyGate) {
        assert!(self.faults.copy_gate.set(gate).is_ok(), "a device has one gate");
    }

    /// The `nth` copy to the device from now on fails, and no other.
    pub fn fail_upload(&mut self, nth: u64) {
        self.faults.uploads_left = nth.checked_sub(1);
    }

    fn check(&self, slice: &DeviceSlice) -> Result<&SoftwareMemory, DeviceError> {
        match self.buffers.get(slice.buffer.0 as usize) {
            Some(Some(memory)) if slice.offset + slice.bytes <= memory.bytes.len() => Ok(memory),
            Some(Some(memory)) => undefined(format!(
                "bytes {} to {} of a buffer of {}",
                slice.offset,
                slice.offset + slice.bytes,
                memory.bytes.len()
            )),
            Some(None) => undefined(format!("buffer {} was freed", slice.buffer.0)),
            None => undefined(format!("buffer {} never was", slice.buffer.0)),
        }
    }

    fn check_host(&self, at: HostSlice, bytes: usize) -> Result<(), DeviceError> {
        let len = self.hosts[at.host.0 as usize].bytes.len();
        if at.offset + bytes <= len {
            Ok(())
        } else {
            undefined(format!("bytes {} to {} of {len} bytes of host memory", at.offset, at.offset + bytes))
        }
    }

    /// Begins a piece of work on a stream. It follows the stream's earlier work and the host's clock.
    fn begin(&mut self, on: Stream) -> (usize, VectorClock) {
        let place = on.0 as usize;
        let host = self.clocks[HOST].clone();
        self.clocks[place].join(&host);
        self.clocks[place].tick(place);
        (place, self.clocks[place].clone())
    }

    fn record_access(
        &mut self,
        slice: &DeviceSlice,
        spans: &[AccessSpan],
        place: usize,
        now: &VectorClock,
        what: &str,
    ) -> Result<(), DeviceError> {
        let memory = self.buffers[slice.buffer.0 as usize].as_mut().expect("it was checked");
        for span in spans {
            let span = AccessSpan { start: slice.offset + span.start, end: slice.offset + span.end, ..*span };
            lock(&memory.shadow).record(span, place, now).map_err(|conflict| {
                DeviceError::Undefined(format!("{what}: buffer {}: {conflict}", slice.buffer.0))
            })?;
        }
        Ok(())
    }

    fn run_launch(&mut self, on: Stream, launch: &Launch) -> Result<(), DeviceError> {
        let work = Arc::clone(&self.work);
        let _working = lock(&work);
        let name = launch.kernel.label();
        let [x, y, z] = launch.grid;
        if x == 0 || y == 0 || z == 0 || y > GRID_YZ_MAX || z > GRID_YZ_MAX {
            return undefined(format!("{name}: a grid of {x} × {y} × {z}"));
        }
        let too_much = launch.shared_bytes as usize > self.shared_bytes_max;
        if launch.threads == 0 || launch.threads > THREADS_MAX || too_much {
            return undefined(format!(
                "{name}: {} threads, {} bytes of shared memory",
                launch.threads, launch.shared_bytes
            ));
        }
        for arg in &launch.args {
            if let KernelArg::In(slice) | KernelArg::Out(slice) = arg {
                self.check(slice)?;
            }
        }
        let (place, now) = self.begin(on);
        if let Some(emulation) = &self.emulation {
            emulation.run(&mut self.buffers, launch).map_err(DeviceError::Undefined)?;
            for arg in &launch.args {
                if let KernelArg::In(slice) | KernelArg::Out(slice) = arg {
                    let span = AccessSpan::first(slice.bytes, matches!(arg, KernelArg::Out(_)));
                    self.record_access(slice, &[span], place, &now, name)?;
                }
            }
            self.launches += 1;
            return Ok(());
        }
        let mut run = reference::KernelRun::new(&mut self.buffers, launch, self.module);
        reference::run(&mut run).map_err(|what| DeviceError::Undefined(format!("{name}: {what}")))?;
        let touched = run.touched();
        for (arg, spans) in launch.args.iter().zip(touched) {
            if let KernelArg::In(slice) | KernelArg::Out(slice) = arg {
                self.record_access(slice, &spans, place, &now, name)?;
            }
        }
        self.launches += 1;
        Ok(())
    }

    fn run_matmul(&mut self, on: Stream, matmul: &Matmul) -> Result<(), DeviceError> {
        let work = Arc::clone(&self.work);
        let _working = lock(&work);
        let (rows, inputs, outputs) = (matmul.rows, matmul.inputs, matmul.outputs);
        let wanted = [
            (matmul.x, rows * inputs * matmul.element.bytes()),
            (matmul.weights, outputs * inputs * matmul.element.bytes()),
            (matmul.out, rows * outputs * matmul.result.bytes()),
        ];
        for (slice, bytes) in wanted {
            self.check(&slice)?;
            if bytes == 0 || bytes > slice.bytes {
                return undefined(format!("a product needs {bytes} bytes and has {}", slice.bytes));
            }
        }
        let (place, now) = self.begin(on);
        reference::matmul(&mut self.buffers, matmul);
        for (index, (slice, bytes)) in wanted.into_iter().enumerate() {
            self.record_access(&slice, &[AccessSpan::first(bytes, index == 2)], place, &now, "product")?;
        }
        self.launches += 1;
        Ok(())
    }

    fn copy_host(
        &mut self,
        on: Stream,
        host: HostSlice,
        slice: DeviceSlice,
        to_host: bool,
    ) -> Result<(), DeviceError> {
        let work = Arc::clone(&self.work);
        let _working = lock(&work);
        self.check(&slice)?;
        self.check_host(host, slice.bytes)?;
        if self.capturing.is_some() {
            return undefined("a copy to or from the host while recording".into());
        }
        let (place, now) = self.begin(on);
        self.record_access(&slice, &[AccessSpan::first(slice.bytes, !to_host)], place, &now, "copy")?;
        let side = &mut self.hosts[host.host.0 as usize];
        let span = AccessSpan { start: host.offset, end: host.offset + slice.bytes, write: to_host };
        lock(&side.shadow)
            .record(span, place, &now)
            .map_err(|conflict| DeviceError::Undefined(format!("copy: host memory: {conflict}")))?;
        let device = self.buffers[slice.buffer.0 as usize].as_mut().expect("it was checked");
        let range = slice.offset..slice.offset + slice.bytes;
        if to_host {
            side.bytes.write(host.offset, &device.bytes.as_slice()[range]);
        } else {
            let mut bytes = vec![0; slice.bytes];
            side.bytes.read(host.offset, &mut bytes);
            device.bytes.write(slice.offset, &bytes);
        }
        self.copies += 1;
        Ok(())
    }

    /// All effects of a copy inside the device except its bytes.
    fn follow_copy(&mut self, on: Stream, from: DeviceSlice, to: DeviceSlice) -> Result<(), DeviceError> {
        self.check(&from)?;
        self.check(&to)?;
        if from.bytes != to.bytes {
            return undefined(format!("a copy of {} bytes into {}", from.bytes, to.bytes));
        }
        let (place, now) = self.begin(on);
        let span = |write| AccessSpan::first(from.bytes, write);
        self.record_access(&from, &[span(false)], place, &now, "copy")?;
        self.record_access(&to, &[span(true)], place, &now, "copy")
    }

    /// Removes accesses that the host has waited for: all work that is enqueued from here on comes after them.
    fn forget(&mut self) {
        let host = self.clocks[HOST].clone();
        let shadows = self.buffers.iter_mut().flatten().chain(&mut self.hosts);
        shadows.for_each(|memory| lock(&memory.shadow).forget(&host));
    }

    fn keep_host(&mut self, bytes: MemoryBytes) -> HostBuffer {
        self.hosts.push(SoftwareMemory { bytes, shadow: Arc::default() });
        HostBuffer(self.hosts.len() as u32 - 1)
    }

    /// The host's own access to host memory.
    fn touch_host(&mut self, at: HostSlice, bytes: usize, write: bool) -> Result<(), DeviceError> {
        self.check_host(at, bytes)?;
        self.clocks[HOST].tick(HOST);
        let now = self.clocks[HOST].clone();
        let span = AccessSpan { start: at.offset, end: at.offset + bytes, write };
        lock(&self.hosts[at.host.0 as usize].shadow).record(span, HOST, &now).map_err(|conflict| {
            let what = if write { "written" } else { "read" };
            DeviceError::Undefined(format!("host memory is {what}: {conflict}"))
        })
    }
}

impl Device for SoftwareDevice {
    fn name(&self) -> String {
        "software".into()
    }

    fn multiprocessors(&self) -> u32 {
        8
    }

    fn shared_bytes_max(&self) -> usize {
        self.shared_bytes_max
    }

    fn total_bytes(&self) -> Result<usize, DeviceError> {
        Ok(self.memory_bytes)
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        let used: usize = self.buffers.iter().flatten().map(|memory| memory.bytes.len()).sum();
        Ok(self.memory_bytes.saturating_sub(used))
    }

    fn alloc(&mut self, bytes: usize) -> Result<DeviceBuffer, DeviceError> {
        let free = self.free_bytes()?;
        if bytes > free {
            return Err(DeviceError::Memory { wanted: bytes, free });
        }
        self.buffers.push(Some(SoftwareMemory { bytes: MemoryBytes::zeroed(bytes), shadow: Arc::default() }));
        Ok(DeviceBuffer(self.buffers.len() as u32 - 1))
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<(DeviceBuffer, Arc<dyn PoolMemory>), DeviceError> {
        let free = self.free_bytes()?;
        if bytes > free {
            return Err(DeviceError::Memory { wanted: bytes, free });
        }
        let pool = SharedMemoryPool::zeroed(bytes, Arc::clone(&self.work), &self.faults);
        let shadow = Arc::clone(&pool.shadow);
        self.buffers.push(Some(SoftwareMemory { bytes: MemoryBytes::Shared(pool.clone()), shadow }));
        Ok((DeviceBuffer(self.buffers.len() as u32 - 1), Arc::new(pool)))
    }

    fn free(&mut self, buffer: DeviceBuffer) -> Result<(), DeviceError> {
        let now = self.clocks[HOST].clone();
        match self.buffers.get_mut(buffer.0 as usize).and_then(Option::take) {
            None => undefined(format!("buffer {} was freed twice", buffer.0)),
            Some(memory) if lock(&memory.shadow).is_quiet(&now) => Ok(()),
            Some(_) => undefined(format!("buffer {} is freed while it is used", buffer.0)),
        }
    }

    fn host(&mut self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        Ok(self.keep_host(MemoryBytes::zeroed(bytes)))
    }

    fn host_over(&mut self, region: &Region) -> Result<HostBuffer, DeviceError> {
        Ok(self.keep_host(MemoryBytes::Region(region.clone())))
    }

    fn write_host(&mut self, to: HostSlice, bytes: &[u8]) -> Result<(), DeviceError> {
        self.touch_host(to, bytes.len(), true)?;
        self.hosts[to.host.0 as usize].bytes.write(to.offset, bytes);
        Ok(())
    }

    fn read_host(&mut self, from: HostSlice, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.touch_host(from, bytes.len(), false)?;
        self.hosts[from.host.0 as usize].bytes.read(from.offset, bytes);
        Ok(())
    }

    fn stream(&mut self, priority: Priority) -> Result<Stream, DeviceError> {
        self.clocks.push(VectorClock::default());
        self.priorities.push(priority);
        Ok(Stream(self.clocks.len() as u32 - 1))
    }

    fn event(&mut self) -> Result<StreamEvent, DeviceError> {
        self.events.push(VectorClock::default());
        Ok(StreamEvent(self.events.len() as u32 - 1))
    }

    fn upload(&mut self, on: Stream, from: HostSlice, to: DeviceSlice) -> Result<(), DeviceError> {
        if self.faults.uploads_left.take_if(|left| *left == 0).is_some() {
            return Err(DeviceError::Call { call: "upload", what: "injected failure".into() });
        }
        self.faults.uploads_left.iter_mut().for_each(|left| *left -= 1);
        self.copy_host(on, from, to, false)
    }

    fn download(&mut self, on: Stream, from: DeviceSlice, to: HostSlice) -> Result<(), DeviceError> {
        self.copy_host(on, to, from, true)
    }

    fn copy(&mut self, on: Stream, from: DeviceSlice, to: DeviceSlice) -> Result<(), DeviceError> {
        let work = Arc::clone(&self.work);
        let _working = lock(&work);
        self.follow_copy(on, from, to)?;
        let bytes = self.check(&from)?.bytes.as_slice()[from.offset..from.offset + from.bytes].to_vec();
        self.buffers[to.buffer.0 as usize].as_mut().expect("it was checked").bytes.write(to.offset, &bytes);
        Ok(())
    }

    fn copy_many(&mut self, on: Stream, pieces: &[(DeviceSlice, DeviceSlice)]) -> Result<(), DeviceError> {
        if self.emulation.is_none() {
            return pieces.iter().try_for_each(|(from, to)| self.copy(on, *from, *to));
        }
        let work = Arc::clone(&self.work);
        let _working = lock(&work);
        pieces.iter().try_for_each(|(from, to)| self.follow_copy(on, *from, *to))?;
        let emulation = self.emulation.as_ref().expect("it is there");
        self.launches += emulation.copy(&mut self.buffers, pieces).map_err(DeviceError::Undefined)?;
        Ok(())
    }

    fn launch(&mut self, on: Stream, launch: &Launch) -> Result<(), DeviceError> {
        match &mut self.capturing {
            Some((stream, recorded)) if *stream == on => {
                recorded.push(GraphNode::Launch(launch.clone()));
                Ok(())
            }
            _ => self.run_launch(on, launch),
        }
    }

    fn matmul(&mut self, on: Stream, matmul: &Matmul) -> Result<(), DeviceError> {
        match &mut self.capturing {
            Some((stream, recorded)) if *stream == on => {
                recorded.push(GraphNode::Matmul(*matmul));
                Ok(())
            }
            _ => self.run_matmul(on, matmul),
        }
    }

    fn record(&mut self, event: StreamEvent, on: Stream) -> Result<(), DeviceError> {
        let (_, now) = self.begin(on);
        self.events[event.0 as usize] = now;
        Ok(())
    }

    fn wait(&mut self, on: Stream, event: StreamEvent) -> Result<(), DeviceError> {
        let reached = self.events[event.0 as usize].clone();
        self.clocks[on.0 as usize].join(&reached);
        Ok(())
    }

    fn synchronize_with(
        &mut self,
        event: StreamEvent,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        self.waits.fetch_add(1, Ordering::AcqRel);
        meanwhile();
        wait("work on the device", &self.faults.hangs)?;
        let reached = self.events[event.0 as usize].clone();
        self.clocks[HOST].join(&reached);
        self.forget();
        Ok(())
    }

    fn elapsed_ms(&mut self, _from: StreamEvent, _to: StreamEvent) -> Result<f32, DeviceError> {
        Ok(0.0)
    }

    fn begin_capture(&mut self, on: Stream) -> Result<(), DeviceError> {
        if self.capturing.is_some() {
            return undefined("two recordings at once".into());
        }
        self.capturing = Some((on, Vec::new()));
        Ok(())
    }

    fn end_capture(&mut self, on: Stream) -> Result<Graph, DeviceError> {
        match self.capturing.take() {
            Some((stream, recorded)) if stream == on => {
                self.graphs.push(recorded);
                Ok(Graph(self.graphs.len() as u32 - 1))
            }
            _ => undefined("nothing is being recorded on this stream".into()),
        }
    }

    fn replay(&mut self, graph: Graph, on: Stream) -> Result<(), DeviceError> {
        self.replays += 1;
        for work in self.graphs[graph.0 as usize].clone() {
            match work {
                GraphNode::Launch(launch) => self.run_launch(on, &launch)?,
                GraphNode::Matmul(matmul) => self.run_matmul(on, &matmul)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
