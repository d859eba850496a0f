//! The interface of a device for the CUDA executor: memory, streams, events, copies, launches, matrix products, graphs.
//!
//! ```text
//!   executor ──▶ Device ──┬─▶ driver::CudaDevice        an NVIDIA GPU
//!                         └─▶ SoftwareDevice            this CPU, with checks that no GPU makes (baton-engine-check)
//! ```
//!
//! Every call except [`Device::synchronize`] only enqueues: it returns before the work is done, and only events order
//! work on different streams. Memory is named by handle and offset instead of an address, so that a checking device can
//! find mistakes.

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::region::Region;
use baton_connector_device::{ImportedPool, Offer, PoolExport};
use baton_connector_nixl::api::Memory;

baton_connector::labelled! {
    /// Element type of weights, activations and KV.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Element {
        /// 32-bit float, for exactness.
        F32 => "f32",
        /// bfloat16, with sums in f32.
        Bf16 => "bf16",
    }
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Device memory. The owner frees it, or the device at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceBuffer(pub u32);

/// Host memory that copies can use while the host continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostBuffer(pub u32);

/// A queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u32);

/// Order of streams whose kernels wait for processors. Running kernels are not interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Steps, which a thread waits for.
    Steps,
    /// Copies for transports and tiers, which use the processors that steps leave free.
    Copies,
}

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamEvent(pub u32);

/// Recorded work that is launched as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub u32);

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// The buffer.
    pub buffer: DeviceBuffer,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
}

impl DeviceSlice {
    /// The first `bytes` bytes of a buffer.
    #[must_use]
    pub fn of(buffer: DeviceBuffer, bytes: usize) -> Self {
        Self { buffer, offset: 0, bytes }
    }

    /// The `bytes` bytes from `at` on.
    ///
    /// # Panics
    /// When they are not all inside: a bug of the executor.
    #[must_use]
    pub fn part(&self, at: usize, bytes: usize) -> Self {
        assert!(at + bytes <= self.bytes, "{bytes} bytes from {at} of a slice of {}", self.bytes);
        Self { buffer: self.buffer, offset: self.offset + at, bytes }
    }
}

/// A range of host memory. Its length is that of the other side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSlice {
    /// The host memory.
    pub host: HostBuffer,
    /// First byte.
    pub offset: usize,
}

/// One argument of a kernel, in the order of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelArg {
    /// A pointer that the kernel only reads.
    In(DeviceSlice),
    /// A pointer that the kernel writes, and possibly reads.
    Out(DeviceSlice),
    /// A null pointer.
    Null,
    /// An unsigned 32-bit number.
    U32(u32),
    /// An unsigned 64-bit number.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
}

impl KernelArg {
    /// The parameter's value in eight bytes, of which a kernel reads those of the parameter's type. `address` finds a
    /// slice.
    ///
    /// # Errors
    /// That of `address`.
    pub fn bits<E>(&self, address: impl FnOnce(&DeviceSlice) -> Result<u64, E>) -> Result<u64, E> {
        match self {
            Self::In(slice) | Self::Out(slice) => address(slice),
            Self::Null => Ok(0),
            Self::U32(value) => Ok(u64::from(*value)),
            Self::U64(value) => Ok(*value),
            Self::F32(value) => Ok(u64::from(value.to_bits())),
        }
    }
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: super::device::Kernel,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Arguments in the order of the kernel's parameters.
    pub args: Vec<KernelArg>,
}

/// `out = x · weightsᵀ`: `rows × inputs` by `outputs × inputs`, all row-major. Sums are in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matmul {
    /// `rows × inputs` elements.
    pub x: DeviceSlice,
    /// `outputs × inputs` elements.
    pub weights: DeviceSlice,
    /// `rows × outputs` of `result`.
    pub out: DeviceSlice,
    /// Rows of `x`; at least one.
    pub rows: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Columns of `out`.
    pub outputs: usize,
    /// Element type of `x` and `weights`.
    pub element: Element,
    /// Element type of `out`.
    pub result: Element,
}

/// Why a device call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// A library that is loaded at run time was not found.
    #[error("{library} was not found; looked for {names} in {places}")]
    Library {
        /// The missing library.
        library: &'static str,
        /// The file names that were tried.
        names: String,
        /// The places that were searched.
        places: String,
    },
    /// The device does not exist or cannot be used.
    #[error("{0}")]
    Absent(String),
    /// The device has too little memory.
    #[error("device memory: {wanted} bytes wanted, {free} free")]
    Memory {
        /// Bytes of the allocation.
        wanted: usize,
        /// Bytes that are free.
        free: usize,
    },
    /// A kernel does not compile.
    #[error("kernels for {arch}: {log}")]
    Compile {
        /// The architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A call into a library failed.
    #[error("{call}: {what}")]
    Call {
        /// The function.
        call: &'static str,
        /// The library's name of the error.
        what: String,
    },
    /// A step is larger than the executor's bounds.
    #[error("step out of bounds: {0}")]
    Step(String),
    /// Work was not over in time. It cannot be cancelled, so the device is disabled. Memory that this work may still
    /// write is never used again.
    #[error("{what} not completed after {} s; the device is disabled", waited.as_secs())]
    Hung {
        /// The work.
        what: &'static str,
        /// Duration of the wait.
        waited: Duration,
    },
    /// The engine is shutting down and waits for no copy any more.
    #[error("the engine is shutting down")]
    Closed,
    /// The executor used the device in an undefined way. Only the software device can detect this.
    #[error("undefined device operation: {0}")]
    Undefined(String),
}

/// See the module's documentation.
pub trait Device: Send {
    /// A description for logs and reports.
    fn name(&self) -> String;

    /// The version of the driver, for reports. `None`: the device has no driver.
    fn driver(&self) -> Option<String> {
        None
    }

    /// Processors that run blocks at the same time.
    fn multiprocessors(&self) -> u32;

    /// Largest shared memory of a block in bytes: 227 KiB on compute capability 9.0, 163 on 8.0, 99 on 8.6 and 8.9.
    fn shared_bytes_max(&self) -> usize;

    /// Bytes of memory, free or not.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn total_bytes(&self) -> Result<usize, DeviceError>;

    /// Bytes of memory that are free.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn free_bytes(&self) -> Result<usize, DeviceError>;

    /// Zeroed memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    fn alloc(&mut self, bytes: usize) -> Result<DeviceBuffer, DeviceError>;

    /// Zeroed memory as one allocation of its own, which other threads copy from and to, and other processes if the
    /// device supports that. It is freed when the device and all other owners have dropped it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    fn alloc_shared(&mut self, bytes: usize) -> Result<(DeviceBuffer, Arc<dyn PoolMemory>), DeviceError>;

    /// Frees memory. No work may use it any more.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn free(&mut self, buffer: DeviceBuffer) -> Result<(), DeviceError>;

    /// Page-locked host memory of its own.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn host(&mut self, bytes: usize) -> Result<HostBuffer, DeviceError>;

    /// The memory of a region, page-locked if the system permits that. Copies work either way. The device keeps the
    /// region.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn host_over(&mut self, region: &Region) -> Result<HostBuffer, DeviceError>;

    /// Writes host memory. No copy from it may be in flight.
    ///
    /// # Errors
    /// [`DeviceError::Undefined`].
    fn write_host(&mut self, to: HostSlice, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads host memory. Copies into it must have landed.
    ///
    /// # Errors
    /// [`DeviceError::Undefined`].
    fn read_host(&mut self, from: HostSlice, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// A new stream.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn stream(&mut self, priority: Priority) -> Result<Stream, DeviceError>;

    /// A new event, which counts as reached until it is recorded.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn event(&mut self) -> Result<StreamEvent, DeviceError>;

    /// Host to device.
    ///
    /// # Errors
    /// As every call that enqueues: [`DeviceError::Call`], also for work enqueued earlier.
    fn upload(&mut self, on: Stream, from: HostSlice, to: DeviceSlice) -> Result<(), DeviceError>;

    /// Device to host.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn download(&mut self, on: Stream, from: DeviceSlice, to: HostSlice) -> Result<(), DeviceError>;

    /// Device to device. The ranges have equal lengths and do not overlap.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn copy(&mut self, on: Stream, from: DeviceSlice, to: DeviceSlice) -> Result<(), DeviceError>;

    /// Many such copies at once, from pieces of one buffer to pieces of another. No two of them overlap.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn copy_many(&mut self, on: Stream, pieces: &[(DeviceSlice, DeviceSlice)]) -> Result<(), DeviceError>;

    /// Runs a kernel.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn launch(&mut self, on: Stream, launch: &Launch) -> Result<(), DeviceError>;

    /// Runs a matrix product. The first product of a shape may take long, because several plans are timed. It must not
    /// be part of a graph.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn matmul(&mut self, on: Stream, matmul: &Matmul) -> Result<(), DeviceError>;

    /// The event is reached when the stream's work so far is done.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn record(&mut self, event: StreamEvent, on: Stream) -> Result<(), DeviceError>;

    /// The stream's later work begins after the event.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn wait(&mut self, on: Stream, event: StreamEvent) -> Result<(), DeviceError>;

    /// Waits here until the event is reached, for a bounded time. Calls `meanwhile` repeatedly.
    ///
    /// # Errors
    /// [`DeviceError::Call`], for whatever has failed before it; [`DeviceError::Hung`].
    fn synchronize_with(
        &mut self,
        event: StreamEvent,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), DeviceError>;

    /// As [`Self::synchronize_with`], with nothing to do meanwhile.
    ///
    /// # Errors
    /// As there.
    fn synchronize(&mut self, event: StreamEvent) -> Result<(), DeviceError> {
        self.synchronize_with(event, &mut || ())
    }

    /// Milliseconds from one event to another, both reached. A device without a clock returns 0.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn elapsed_ms(&mut self, from: StreamEvent, to: StreamEvent) -> Result<f32, DeviceError>;

    /// Records launches and products on the stream from now on, instead of running them.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn begin_capture(&mut self, on: Stream) -> Result<(), DeviceError>;

    /// The recorded work.
    ///
    /// # Errors
    /// [`DeviceError::Call`] for work that could not be recorded. Recording has ended then too.
    fn end_capture(&mut self, on: Stream) -> Result<Graph, DeviceError>;

    /// Runs recorded work.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn replay(&mut self, graph: Graph, on: Stream) -> Result<(), DeviceError>;
}

baton_connector::labelled! {
    /// A kernel, with its name in the sources.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Kernel {
        /// Rows of the embedding.
        Embed => "embed",
        /// Residual, norm.
        AddRmsNorm => "add_rms_norm",
        /// Bias, head norms, rotation, KV write.
        RopeKv => "rope_kv",
        /// Attention of one query per sequence, in splits.
        DecodeAttention => "decode_attention",
        /// Puts the splits together.
        MergeAttention => "merge_attention",
        /// Attention of many queries per sequence.
        PrefillAttention => "prefill_attention",
        /// Gated activation.
        SiluMul => "silu_mul",
        /// First stage of choosing a token.
        BestOfParts => "best_of_parts",
        /// Second stage.
        Choose => "choose",
        /// A product of few rows with a matrix of many outputs.
        FewRowsWide => "few_rows_wide",
        /// The same of few outputs.
        FewRowsDeep => "few_rows_deep",
        /// The same of two matrices, and the gated activation of both.
        FewRowsGated => "few_rows_gated",
        /// Soft cap of logits.
        CapLogits => "cap_logits",
        /// Chooses the experts of rows.
        Route => "route",
        /// Orders rows by expert.
        GroupExperts => "group_experts",
        /// Gate, up and activation of experts.
        ExpertGateUp => "expert_gate_up",
        /// The last projection of experts.
        ExpertDown => "expert_down",
        /// Adds the results of each row's experts.
        CombineExperts => "combine_experts",
    }
}

/// Bytes that are copied between the pool and host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRun {
    /// First byte in the pool.
    pub pool: usize,
    /// First byte in the host memory.
    pub host: usize,
    /// Number of bytes.
    pub bytes: usize,
}

impl HostRun {
    /// Whether the run is inside a pool and host memory of these sizes.
    #[must_use]
    pub fn is_inside(&self, pool: usize, host: usize) -> bool {
        let fits = |at: usize, all| at.checked_add(self.bytes).is_some_and(|end| end <= all);
        fits(self.pool, pool) && fits(self.host, host)
    }
}

/// Device memory that other threads and processes use too. Each call uses a stream of its own.
pub trait PoolMemory: Debug + Send + Sync {
    /// Exports the memory, so that another process can open it.
    ///
    /// # Errors
    /// Why it cannot be exported.
    fn export(&self) -> io::Result<PoolExport>;

    /// Opens another process's memory, for copies into this one.
    ///
    /// # Errors
    /// Why it cannot be read from this device, or how it differs from the offer.
    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>>;

    /// Copies bytes of the pool to host memory, and waits until they have landed.
    ///
    /// # Errors
    /// [`DeviceError`]. The bytes in host memory are undefined then.
    fn copy_out(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError>;

    /// Copies bytes of host memory to the pool, and waits until they have landed.
    ///
    /// # Errors
    /// As [`Self::copy_out`].
    fn copy_in(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError>;

    /// Page-locks host memory, if the system permits it, so that copies run at the link's speed. Copies work either
    /// way.
    fn pin(&self, host: &Region) {
        let _ = host;
    }

    /// The address and size, for a library that exports the memory itself. From then on it counts as exported.
    ///
    /// # Errors
    /// Why other processes cannot open it.
    fn place(&self) -> io::Result<Memory> {
        Err(ErrorKind::Unsupported.into())
    }

    /// Makes the device current on the calling thread, for calls of such a library.
    ///
    /// # Errors
    /// Errors of the device.
    fn enter(&self) -> io::Result<()> {
        Ok(())
    }
}
