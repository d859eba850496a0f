//! An NVIDIA GPU, through the driver's own interface. No CUDA library is linked: libraries are found at run time.
//!
//! The device creates its own streams and never uses the legacy default one. Memory is allocated plainly, so that it
//! can be shared with other processes (`pool`). The context is made current on each thread that uses the device.
//!
//! `bench/gpu/check.sh` checks this module on a GPU.
#![allow(unsafe_code, reason = "calls into the driver; see each block")]

mod blas;
mod bounded_wait;
pub mod libraries;
mod module;
mod pool;
mod stream;

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::path::Path;
use std::sync::Arc;
use std::thread::ThreadId;

use baton_connector::BlockId;
use baton_connector::region::Region;
use cudarc::driver::sys;

use self::blas::Blas;
use self::module::{DriverModule, LaunchSize};
use self::pool::CudaPool;
use super::copy_pieces::CopyPiece;
use super::device::{
    Device, DeviceBuffer, DeviceError, DeviceSlice, Graph, HostBuffer, HostSlice, Kernel, Launch, Matmul,
    PoolMemory, Priority, Stream, StreamEvent,
};
use super::kernels::KernelTarget;
use super::{cubins, kernels, nvrtc};

/// Compute capability of the oldest devices with bf16 tensor cores.
const CAPABILITY_MIN: (i32, i32) = (8, 0);
/// Dynamic shared memory that a kernel may use without an attribute.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

/// Converts a result of the driver; `what` of the error is the driver's name of it.
fn check(call: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes a pointer to a constant string of its own, or leaves null.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut name) };
    let what = if known == sys::CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        format!("error {}", result as u32)
    };
    Err(DeviceError::Call { call, what })
}

/// Host memory for copies of the device.
enum HostMemory {
    /// Allocated by the driver.
    Own { base: *mut u8, bytes: usize },
    /// A region's memory, and whether it is page-locked.
    Region { region: Region, locked: bool },
}

impl HostMemory {
    fn base(&self) -> *mut u8 {
        match self {
            Self::Own { base, .. } => *base,
            Self::Region { region, .. } => region.block_ptr(BlockId(0)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Own { bytes, .. } => *bytes,
            Self::Region { region, .. } => region.blocks() * region.block_bytes(),
        }
    }
}

/// What the driver reports about a device.
struct DeviceProperties {
    device: sys::CUdevice,
    name: String,
    /// Compute capability: major, minor.
    capability: (i32, i32),
    multiprocessors: u32,
    shared_bytes_max: usize,
}

/// Handles of queued work, by number.
#[derive(Default)]
struct QueueHandles {
    streams: Vec<sys::CUstream>,
    events: Vec<sys::CUevent>,
    graphs: Vec<sys::CUgraphExec>,
}

/// See the module's documentation.
pub struct CudaDevice {
    properties: DeviceProperties,
    arch: String,
    context: sys::CUcontext,
    bound: Option<ThreadId>,
    module: Arc<DriverModule>,
    /// Each function with its dynamic shared memory.
    functions: HashMap<Kernel, (sys::CUfunction, u32)>,
    buffers: Vec<Option<(sys::CUdeviceptr, usize)>>,
    /// Buffers with other owners, which the device must not free.
    pools: HashMap<DeviceBuffer, Arc<CudaPool>>,
    hosts: Vec<HostMemory>,
    queues: QueueHandles,
    blas: Blas,
    /// Work was not over in time. Memory that it may still write is kept until the end of the process.
    hung: bool,
}

impl DeviceProperties {
    /// The properties of device `ordinal`.
    fn query(ordinal: usize) -> Result<Self, DeviceError> {
        libraries::load(&libraries::DRIVER)?;
        // SAFETY: plain calls whose symbols were found; out-parameters are valid for their types.
        let properties = unsafe {
            check("cuInit", sys::cuInit(0))?;
            let mut count = 0;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            let at = i32::try_from(ordinal).ok().filter(|at| *at < count);
            let at = at.ok_or_else(|| {
                DeviceError::Absent(format!("no device cuda:{ordinal}: the driver reports {count} devices"))
            })?;
            let mut device = 0;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, at))?;
            let mut name = [0; 256];
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            let attribute = |attribute| {
                let mut value = 0;
                check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, attribute, device))?;
                Ok(value)
            };
            use sys::CUdevice_attribute_enum as A;
            Self {
                device,
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                capability: (
                    attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                    attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                ),
                multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.cast_unsigned(),
                shared_bytes_max: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                    .cast_unsigned() as usize,
            }
        };
        if properties.capability < CAPABILITY_MIN {
            return Err(DeviceError::Absent(format!(
                "{} has compute capability {}.{}, expected at least 8.0 (bf16)",
                properties.name, properties.capability.0, properties.capability.1
            )));
        }
        Ok(properties)
    }
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `bind` ensures; a
// device is used by one thread at a time, as every method takes it exclusively.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// Device `ordinal`, with kernels for a target, compiled now or read from `cache`.
    ///
    /// # Errors
    /// [`DeviceError`]: the missing part and the places that were searched.
    pub fn open(ordinal: usize, target: &KernelTarget, cache: Option<&Path>) -> Result<Self, DeviceError> {
        let properties = DeviceProperties::query(ordinal)?;
        libraries::load(&libraries::BLAS)?;
        let (device, capability) = (properties.device, properties.capability);
        let arch = nvrtc::arch(capability);
        let stages = kernels::decode_stages(target.head_dim, properties.shared_bytes_max);
        let cubin = cubins::get(cache, &kernels::source(target, stages), &arch)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: as above; the context is released when the device is dropped.
        unsafe {
            let retained = sys::cuDevicePrimaryCtxRetain(&raw mut context, device);
            check("cuDevicePrimaryCtxRetain", retained)?;
        }
        let loaded = (|| {
            // SAFETY: the context is retained.
            check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
            // Kernels can begin early from compute capability 9.0 on.
            DriverModule::load(device, &cubin, target, capability.0 >= 9)
        })();
        let (module, functions) = loaded.inspect_err(|_| {
            // SAFETY: retained once, and released once.
            let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
        })?;
        let functions =
            functions.into_iter().map(|(kernel, function)| (kernel, (function, SHARED_BYTES_UNASKED)));
        // From here on the destructor frees everything.
        let mut opened = Self {
            properties,
            arch,
            context,
            bound: None,
            module,
            functions: functions.collect(),
            buffers: Vec::new(),
            pools: HashMap::new(),
            hosts: Vec::new(),
            queues: QueueHandles::default(),
            blas: Blas::default(),
            hung: false,
        };
        opened.bind()?;
        let workspace = opened.alloc(blas::WORKSPACE_BYTES)?;
        opened.blas.open(opened.address(&DeviceSlice::of(workspace, blas::WORKSPACE_BYTES))?)?;
        Ok(opened)
    }

    /// The architecture of the compiled kernels.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.arch
    }

    fn bind(&mut self) -> Result<(), DeviceError> {
        let here = std::thread::current().id();
        if self.bound != Some(here) {
            // SAFETY: the context is retained as long as `self` lives.
            check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
            self.bound = Some(here);
        }
        Ok(())
    }

    /// The address of a range.
    fn address(&self, slice: &DeviceSlice) -> Result<sys::CUdeviceptr, DeviceError> {
        let held = self.buffers.get(slice.buffer.0 as usize).copied().flatten();
        match held {
            Some((base, bytes)) if slice.offset + slice.bytes <= bytes => Ok(base + slice.offset as u64),
            _ => Err(DeviceError::Undefined(format!("{slice:?} is not in a buffer"))),
        }
    }

    fn host_address(&self, at: HostSlice, bytes: usize) -> Result<*mut u8, DeviceError> {
        let memory = &self.hosts[at.host.0 as usize];
        if at.offset + bytes > memory.bytes() {
            return Err(DeviceError::Undefined(format!("{bytes} bytes at {at:?} of {}", memory.bytes())));
        }
        // SAFETY: the offset was checked.
        Ok(unsafe { memory.base().add(at.offset) })
    }

    fn on(&self, stream: Stream) -> sys::CUstream {
        self.queues.streams[stream.0 as usize]
    }

    fn count(len: usize) -> u32 {
        u32::try_from(len - 1).expect("handles are counted in 32 bits")
    }
}

/// Free and total bytes of the current context's device.
fn memory_info() -> Result<(usize, usize), DeviceError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the out-parameters are valid. Without a current context the driver returns an error.
    check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok((free, total))
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.properties.name.clone()
    }

    fn driver(&self) -> Option<String> {
        libraries::driver_version()
    }

    fn multiprocessors(&self) -> u32 {
        self.properties.multiprocessors
    }

    fn shared_bytes_max(&self) -> usize {
        self.properties.shared_bytes_max
    }

    fn total_bytes(&self) -> Result<usize, DeviceError> {
        memory_info().map(|(_, total)| total)
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        memory_info().map(|(free, _)| free)
    }

    fn alloc(&mut self, bytes: usize) -> Result<DeviceBuffer, DeviceError> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the out-parameter is valid; the memory is set within what was allocated.
        unsafe {
            match sys::cuMemAlloc_v2(&raw mut address, bytes) {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    return Err(DeviceError::Memory { wanted: bytes, free: self.free_bytes()? });
                }
                other => check("cuMemAlloc", other)?,
            }
            self.buffers.push(Some((address, bytes)));
            check("cuMemsetD8", sys::cuMemsetD8_v2(address, 0, bytes))?;
            // The zeroing may still run on the default stream, which the other streams do not wait for.
            stream::await_all("the zeroing of device memory", std::ptr::null_mut())?;
        }
        Ok(DeviceBuffer(Self::count(self.buffers.len())))
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<(DeviceBuffer, Arc<dyn PoolMemory>), DeviceError> {
        let buffer = self.alloc(bytes)?;
        let address = self.address(&DeviceSlice::of(buffer, bytes))?;
        let pool =
            Arc::new(CudaPool::over(self.properties.device, Arc::clone(&self.module), address, bytes)?);
        self.pools.insert(buffer, Arc::clone(&pool));
        Ok((buffer, Arc::new(pool)))
    }

    fn free(&mut self, buffer: DeviceBuffer) -> Result<(), DeviceError> {
        self.bind()?;
        if self.pools.remove(&buffer).is_some() {
            // Its last owner frees it.
            self.buffers[buffer.0 as usize] = None;
            return Ok(());
        }
        let held = self.buffers.get_mut(buffer.0 as usize).and_then(Option::take);
        let (address, _) = held.ok_or_else(|| DeviceError::Undefined("a buffer is freed twice".into()))?;
        // SAFETY: it came from the allocator and was not freed before.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }

    fn host(&mut self, bytes: usize) -> Result<HostBuffer, DeviceError> {
        self.bind()?;
        let mut base = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid; the memory is zeroed within what was allocated.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut base, bytes.max(1), 0))?;
            base.cast::<u8>().write_bytes(0, bytes);
        }
        self.hosts.push(HostMemory::Own { base: base.cast(), bytes });
        Ok(HostBuffer(Self::count(self.hosts.len())))
    }

    fn host_over(&mut self, region: &Region) -> Result<HostBuffer, DeviceError> {
        self.bind()?;
        let bytes = region.blocks() * region.block_bytes();
        let base: *mut c_void = region.block_ptr(BlockId(0)).cast();
        // SAFETY: the region's memory stays in place while `self` keeps it, and is unregistered before.
        let result = unsafe { sys::cuMemHostRegister_v2(base, bytes, 0) };
        let locked = check("cuMemHostRegister", result);
        if let Err(error) = &locked {
            tracing::warn!(
                event = "kv_mirror_not_page_locked", %error, bytes,
                "KV mirror not page-locked, block copies are slower"
            );
        }
        self.hosts.push(HostMemory::Region { region: region.clone(), locked: locked.is_ok() });
        Ok(HostBuffer(Self::count(self.hosts.len())))
    }

    fn write_host(&mut self, to: HostSlice, bytes: &[u8]) -> Result<(), DeviceError> {
        let base = self.host_address(to, bytes.len())?;
        // SAFETY: the range was checked; the caller keeps the trait's contract that no copy is in flight.
        unsafe { base.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read_host(&mut self, from: HostSlice, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let base = self.host_address(from, bytes.len())?;
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(base, bytes.len()) };
        Ok(())
    }

    fn stream(&mut self, priority: Priority) -> Result<Stream, DeviceError> {
        self.bind()?;
        self.queues.streams.push(stream::create(priority)?);
        Ok(Stream(Self::count(self.queues.streams.len())))
    }

    fn event(&mut self) -> Result<StreamEvent, DeviceError> {
        self.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the out-parameter is valid.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, 0) })?;
        self.queues.events.push(event);
        Ok(StreamEvent(Self::count(self.queues.events.len())))
    }

    fn upload(&mut self, on: Stream, from: HostSlice, to: DeviceSlice) -> Result<(), DeviceError> {
        self.bind()?;
        let (host, device) = (self.host_address(from, to.bytes)?, self.address(&to)?);
        // SAFETY: both ranges were checked; the owner guarantees that memory stays until work on it is done.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(device, host.cast_const().cast(), to.bytes, self.on(on)) };
        check("cuMemcpyHtoDAsync", result)
    }

    fn download(&mut self, on: Stream, from: DeviceSlice, to: HostSlice) -> Result<(), DeviceError> {
        self.bind()?;
        let (host, device) = (self.host_address(to, from.bytes)?, self.address(&from)?);
        // SAFETY: as above.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), device, from.bytes, self.on(on)) };
        check("cuMemcpyDtoHAsync", result)
    }

    fn copy(&mut self, on: Stream, from: DeviceSlice, to: DeviceSlice) -> Result<(), DeviceError> {
        self.bind()?;
        if from.bytes != to.bytes {
            return Err(DeviceError::Undefined(format!("a copy of {} bytes into {}", from.bytes, to.bytes)));
        }
        let (source, target) = (self.address(&from)?, self.address(&to)?);
        // SAFETY: as above.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, from.bytes, self.on(on)) };
        check("cuMemcpyDtoDAsync", result)
    }

    fn copy_many(&mut self, on: Stream, pieces: &[(DeviceSlice, DeviceSlice)]) -> Result<(), DeviceError> {
        self.bind()?;
        let piece = |(from, into): &(DeviceSlice, DeviceSlice)| {
            if from.bytes != into.bytes {
                return Err(DeviceError::Undefined(format!("{} bytes into {}", from.bytes, into.bytes)));
            }
            Ok(CopyPiece { from: self.address(from)?, into: self.address(into)?, bytes: from.bytes })
        };
        let pieces = pieces.iter().map(piece).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: every range was checked; the owner guarantees that none overlap and that memory stays.
        unsafe { self.module.copy(self.on(on), pieces) }
    }

    fn launch(&mut self, on: Stream, launch: &Launch) -> Result<(), DeviceError> {
        self.bind()?;
        let (function, granted) = self.functions[&launch.kernel];
        // Every parameter in eight bytes of its own: the driver reads only the bytes of the parameter's type.
        let mut values = Vec::with_capacity(launch.args.len());
        for arg in &launch.args {
            values.push(arg.bits(|slice| self.address(slice))?);
        }
        let mut parameters: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let size =
            LaunchSize { grid: launch.grid, threads: launch.threads, shared_bytes: launch.shared_bytes };
        // SAFETY: the parameters are those of the kernel (a test compares them with its source), little-endian as on
        // every device and host of CUDA; the ranges of its pointers were checked to be in buffers.
        unsafe {
            if launch.shared_bytes > granted {
                let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let asked = sys::cuFuncSetAttribute(function, most, launch.shared_bytes.cast_signed());
                check("cuFuncSetAttribute (shared memory)", asked)?;
                self.functions.insert(launch.kernel, (function, launch.shared_bytes));
            }
            self.module.launch(launch.kernel.label(), function, self.on(on), size, &mut parameters)
        }
    }

    fn matmul(&mut self, on: Stream, matmul: &Matmul) -> Result<(), DeviceError> {
        self.bind()?;
        let at = [self.address(&matmul.x)?, self.address(&matmul.weights)?, self.address(&matmul.out)?];
        let stream = self.on(on);
        self.blas.matmul(stream, matmul, at)
    }

    fn record(&mut self, event: StreamEvent, on: Stream) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: both handles live as long as `self`.
        let result = unsafe { sys::cuEventRecord(self.queues.events[event.0 as usize], self.on(on)) };
        check("cuEventRecord", result)
    }

    fn wait(&mut self, on: Stream, event: StreamEvent) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: as above.
        let result = unsafe { sys::cuStreamWaitEvent(self.on(on), self.queues.events[event.0 as usize], 0) };
        check("cuStreamWaitEvent", result)
    }

    fn synchronize_with(
        &mut self,
        event: StreamEvent,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        self.bind()?;
        let (what, event) = ("work on the device", self.queues.events[event.0 as usize]);
        // SAFETY: as above.
        let waited = unsafe { stream::await_event(what, event, meanwhile) };
        self.hung |= matches!(waited, Err(DeviceError::Hung { .. }));
        waited
    }

    fn elapsed_ms(&mut self, from: StreamEvent, to: StreamEvent) -> Result<f32, DeviceError> {
        self.bind()?;
        let (from, to) = (self.queues.events[from.0 as usize], self.queues.events[to.0 as usize]);
        let mut elapsed = 0.0;
        // SAFETY: as above, and the out-parameter is valid.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&raw mut elapsed, from, to) })?;
        Ok(elapsed)
    }

    fn begin_capture(&mut self, on: Stream) -> Result<(), DeviceError> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.on(on), mode) })
    }

    fn end_capture(&mut self, on: Stream) -> Result<Graph, DeviceError> {
        self.bind()?;
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the out-parameters are valid; the graph is not used after it was destroyed.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(self.on(on), &raw mut graph))?;
            let made = sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0);
            let destroyed = sys::cuGraphDestroy(graph);
            check("cuGraphInstantiate", made)?;
            check("cuGraphDestroy", destroyed)?;
        }
        self.queues.graphs.push(executable);
        Ok(Graph(Self::count(self.queues.graphs.len())))
    }

    fn replay(&mut self, graph: Graph, on: Stream) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: both handles live as long as `self`.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.queues.graphs[graph.0 as usize], self.on(on))
        })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: everything is destroyed once, after the work on every stream is done. Errors are ignored: the process
        // is ending, or the device is lost.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            self.hung |= self.pools.values().any(|pool| pool.has_hung());
            for stream in &self.queues.streams {
                let finished = || stream::await_all("the last work on the device", *stream);
                self.hung = self.hung || matches!(finished(), Err(DeviceError::Hung { .. }));
            }
            if self.hung {
                // The work may still write this memory, and freeing would wait for it without a bound.
                std::mem::forget((std::mem::take(&mut self.hosts), std::mem::take(&mut self.pools)));
                std::mem::forget(Arc::clone(&self.module));
                return;
            }
            self.blas.close();
            for graph in self.queues.graphs.drain(..) {
                let _ = sys::cuGraphExecDestroy(graph);
            }
            for event in self.queues.events.drain(..) {
                let _ = sys::cuEventDestroy_v2(event);
            }
            for stream in self.queues.streams.drain(..) {
                let _ = sys::cuStreamDestroy_v2(stream);
            }
            for (index, held) in self.buffers.drain(..).enumerate() {
                let pooled = self.pools.contains_key(&DeviceBuffer(index as u32));
                if let (Some((address, _)), false) = (held, pooled) {
                    let _ = sys::cuMemFree_v2(address);
                }
            }
            self.pools.clear();
            for memory in self.hosts.drain(..) {
                let _ = match &memory {
                    HostMemory::Own { base, .. } => sys::cuMemFreeHost(base.cast()),
                    HostMemory::Region { locked: true, .. } => sys::cuMemHostUnregister(memory.base().cast()),
                    HostMemory::Region { locked: false, .. } => continue,
                };
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.properties.device);
        }
    }
}
