//! What the CUDA executor needs of a device: memory, streams, events, copies, launches, matrix products, graphs.
//!
//! ```text
//!   executor ──▶ Device ──┬─▶ driver::CudaDevice      an NVIDIA GPU
//!                         └─▶ software::SoftDevice    this CPU, with checks that no GPU makes
//! ```
//!
//! Everything but [`Device::synchronize`] only enqueues: it returns before the work is done, and work on different
//! streams is ordered by events alone. Memory is named by handle and offset, so that a mistake is found by whoever
//! checks instead of being an address.

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::region::Region;
use baton_connector_device::{Export, Offer, Opened};
use baton_connector_nixl::api::Memory;

/// Element type of weights, activations and KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit float: for exactness.
    F32,
    /// bfloat16, with sums in f32.
    Bf16,
}

impl Element {
    /// Bytes of one.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Its name in reports.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Device memory. Its owner frees it, or the device does at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buffer(pub(super) u32);

/// Host memory that copies can run from and to while the host goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Host(pub(super) u32);

/// A queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub(super) u32);

/// Whose kernels get processors first, where those of several streams wait for some. What runs is not interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Steps: somebody waits for every one of them.
    Steps,
    /// Copies for transports and tiers, which take what steps leave.
    Copies,
}

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub(super) u32);

/// Recorded work that is launched as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub(super) u32);

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Whose.
    pub buffer: Buffer,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
}

impl Slice {
    /// The first `bytes` bytes of a buffer.
    #[must_use]
    pub fn of(buffer: Buffer, bytes: usize) -> Self {
        Self { buffer, offset: 0, bytes }
    }

    /// `bytes` bytes from `at` on.
    ///
    /// # Panics
    /// When they are not all inside: the executor's mistake.
    #[must_use]
    pub fn part(&self, at: usize, bytes: usize) -> Self {
        assert!(at + bytes <= self.bytes, "{bytes} bytes from {at} of a slice of {}", self.bytes);
        Self { buffer: self.buffer, offset: self.offset + at, bytes }
    }
}

/// A range of host memory; its length is that of the other side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAt {
    /// Whose.
    pub host: Host,
    /// First byte.
    pub offset: usize,
}

/// One argument of a kernel, in the order of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A pointer that is only read through.
    In(Slice),
    /// A pointer that is written through, and perhaps read.
    Out(Slice),
    /// A null pointer.
    Null,
    /// A 32-bit number without sign.
    U32(u32),
    /// A 64-bit number without sign.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Which kernel.
    pub kernel: super::device::Kernel,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// In the order of the kernel's parameters.
    pub args: Vec<Arg>,
}

/// `out = x · weightsᵀ`: `rows × inputs` by `outputs × inputs`, all row-major. Sums are in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matmul {
    /// `rows × inputs` elements.
    pub x: Slice,
    /// `outputs × inputs` elements.
    pub weights: Slice,
    /// `rows × outputs` of `result`.
    pub out: Slice,
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

/// Why a device did not do what it was asked to.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// A library that is loaded at run time is not there.
    #[error("{library} was not found; looked for {names} in {places}")]
    Library {
        /// What is missing.
        library: &'static str,
        /// The file names that were tried.
        names: String,
        /// Where the loader looks.
        places: String,
    },
    /// There is no such device, or it cannot be used.
    #[error("{0}")]
    Absent(String),
    /// It does not have that much memory.
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
        /// For which architecture.
        arch: String,
        /// What the compiler says.
        log: String,
    },
    /// A call into a library failed.
    #[error("{call}: {what}")]
    Call {
        /// Which one.
        call: &'static str,
        /// Its own word for it.
        what: String,
    },
    /// A step is larger than the executor was made for.
    #[error("step out of bounds: {0}")]
    Step(String),
    /// Work was not over in time. It cannot be called off, so the device is given up: whatever this work may still write is
    /// used for nothing else any more.
    #[error("{what} not completed after {} s; the device is disabled", waited.as_secs())]
    Hung {
        /// Which work.
        what: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The engine ends, and waits for no copy any more.
    #[error("the engine is shutting down")]
    Closed,
    /// The executor used the device in a way that is undefined. Only the software device can tell.
    #[error("undefined device operation: {0}")]
    Undefined(String),
}

/// See the module's documentation.
pub trait Device: Send {
    /// What it is, for people.
    fn name(&self) -> String;

    /// The version of its driver, for reports. `None`: it has none.
    fn driver(&self) -> Option<String> {
        None
    }

    /// Processors that run blocks at the same time.
    fn multiprocessors(&self) -> u32;

    /// Bytes of shared memory that a block can have. 227 KiB on compute capability 9.0, 163 on 8.0, 99 on 8.6 and 8.9.
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
    fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// The same as one allocation of its own, which other threads copy from and to, and other processes where the device
    /// lets them. It is freed when the device and whoever has it have let go of it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    fn alloc_shared(&mut self, bytes: usize) -> Result<(Buffer, Arc<dyn PoolMemory>), DeviceError>;

    /// Gives memory back. Nothing may use it any more.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn free(&mut self, buffer: Buffer) -> Result<(), DeviceError>;

    /// Page-locked host memory of its own.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn host(&mut self, bytes: usize) -> Result<Host, DeviceError>;

    /// The memory of a region, page-locked where the system lets it be; copies work either way. The device keeps the
    /// region.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn host_over(&mut self, region: &Region) -> Result<Host, DeviceError>;

    /// Writes host memory. No copy from it may be on its way.
    ///
    /// # Errors
    /// [`DeviceError::Undefined`].
    fn write_host(&mut self, to: HostAt, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads host memory. Copies into it must have landed.
    ///
    /// # Errors
    /// [`DeviceError::Undefined`].
    fn read_host(&mut self, from: HostAt, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// A new stream.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn stream(&mut self, priority: Priority) -> Result<Stream, DeviceError>;

    /// A new event, which counts as reached until it is recorded.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn event(&mut self) -> Result<Event, DeviceError>;

    /// Host to device.
    ///
    /// # Errors
    /// As every call that enqueues: [`DeviceError::Call`], also for work enqueued earlier.
    fn upload(&mut self, on: Stream, from: HostAt, to: Slice) -> Result<(), DeviceError>;

    /// Device to host.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn download(&mut self, on: Stream, from: Slice, to: HostAt) -> Result<(), DeviceError>;

    /// Device to device, of equal lengths that do not overlap.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn copy(&mut self, on: Stream, from: Slice, to: Slice) -> Result<(), DeviceError>;

    /// Many such copies at once, from pieces of one buffer to pieces of another; no two of them overlap.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn copy_many(&mut self, on: Stream, pieces: &[(Slice, Slice)]) -> Result<(), DeviceError>;

    /// Runs a kernel.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn launch(&mut self, on: Stream, launch: &Launch) -> Result<(), DeviceError>;

    /// Runs a matrix product. The first of a shape may take long, because ways to compute it are compared; it may not
    /// be part of a graph.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn matmul(&mut self, on: Stream, matmul: &Matmul) -> Result<(), DeviceError>;

    /// The event is reached when the stream's work so far is done.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn record(&mut self, event: Event, on: Stream) -> Result<(), DeviceError>;

    /// The stream's later work begins after the event.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn wait(&mut self, on: Stream, event: Event) -> Result<(), DeviceError>;

    /// Waits here until the event is reached, and no longer than is ever right; `meanwhile` is called again and again.
    ///
    /// # Errors
    /// [`DeviceError::Call`], for whatever has failed before it; [`DeviceError::Hung`].
    fn synchronize_beside(&mut self, event: Event, meanwhile: &mut dyn FnMut()) -> Result<(), DeviceError>;

    /// As [`Self::synchronize_beside`], with nothing to do meanwhile.
    ///
    /// # Errors
    /// As there.
    fn synchronize(&mut self, event: Event) -> Result<(), DeviceError> {
        self.synchronize_beside(event, &mut || ())
    }

    /// Milliseconds from one event to another, both reached. A device without a clock of its own answers 0.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn elapsed_ms(&mut self, from: Event, to: Event) -> Result<f32, DeviceError>;

    /// From here on, launches and products on the stream are recorded instead of run.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    fn begin_capture(&mut self, on: Stream) -> Result<(), DeviceError>;

    /// What was recorded.
    ///
    /// # Errors
    /// [`DeviceError::Call`], for whatever could not be recorded; recording has ended then too.
    fn end_capture(&mut self, on: Stream) -> Result<Graph, DeviceError>;

    /// Runs recorded work.
    ///
    /// # Errors
    /// As [`Self::upload`].
    fn replay(&mut self, graph: Graph, on: Stream) -> Result<(), DeviceError>;
}

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Rows of the embedding.
    Embed,
    /// Residual, norm.
    AddRmsNorm,
    /// Bias, head norms, rotation, KV write.
    RopeKv,
    /// Attention of one query per sequence, in splits.
    DecodeAttention,
    /// Puts the splits together.
    MergeAttention,
    /// Attention of many queries per sequence.
    PrefillAttention,
    /// Gated activation.
    SiluMul,
    /// First stage of choosing a token.
    BestOfParts,
    /// Second stage.
    Choose,
    /// A product of few rows with a matrix of many outputs.
    FewRowsWide,
    /// The same of few outputs.
    FewRowsDeep,
    /// The same of two matrices, and the gated activation of both.
    FewRowsGated,
}

impl Kernel {
    /// All of them; those of bf16 alone come last.
    const ALL: [Self; 12] = [
        Self::Embed,
        Self::AddRmsNorm,
        Self::RopeKv,
        Self::DecodeAttention,
        Self::MergeAttention,
        Self::PrefillAttention,
        Self::SiluMul,
        Self::BestOfParts,
        Self::Choose,
        Self::FewRowsWide,
        Self::FewRowsDeep,
        Self::FewRowsGated,
    ];

    /// Those that there are for an element type.
    #[must_use]
    pub fn all(element: Element) -> &'static [Self] {
        match element {
            Element::F32 => &Self::ALL[..9],
            Element::Bf16 => &Self::ALL,
        }
    }

    /// Its name in the sources.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::AddRmsNorm => "add_rms_norm",
            Self::RopeKv => "rope_kv",
            Self::DecodeAttention => "decode_attention",
            Self::MergeAttention => "merge_attention",
            Self::PrefillAttention => "prefill_attention",
            Self::SiluMul => "silu_mul",
            Self::BestOfParts => "best_of_parts",
            Self::Choose => "choose",
            Self::FewRowsWide => "few_rows_wide",
            Self::FewRowsDeep => "few_rows_deep",
            Self::FewRowsGated => "few_rows_gated",
        }
    }
}

/// Bytes of the pool, and of host memory, that are copied from one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRun {
    /// First byte in the pool.
    pub pool: usize,
    /// First byte in the host memory.
    pub host: usize,
    /// How many.
    pub bytes: usize,
}

impl HostRun {
    /// Whether it is inside a pool and host memory of so many bytes.
    #[must_use]
    pub fn is_inside(&self, pool: usize, host: usize) -> bool {
        let fits = |at: usize, all| at.checked_add(self.bytes).is_some_and(|end| end <= all);
        fits(self.pool, pool) && fits(self.host, host)
    }
}

/// Device memory that other threads and processes use too, each call on a stream of its own.
pub trait PoolMemory: Debug + Send + Sync {
    /// What opens it in another process.
    ///
    /// # Errors
    /// Why it cannot be exported.
    fn export(&self) -> io::Result<Export>;

    /// Opens another process's memory, for copies into this one.
    ///
    /// # Errors
    /// Why it cannot be read from this device, or is not what the offer says.
    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>>;

    /// Copies bytes of the pool to host memory, and waits until they have landed.
    ///
    /// # Errors
    /// [`DeviceError`]; what is there is then of no use.
    fn copy_out(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError>;

    /// Copies bytes of host memory to the pool, and waits until they have landed.
    ///
    /// # Errors
    /// As [`Self::copy_out`].
    fn copy_in(&self, runs: &[HostRun], host: &Region) -> Result<(), DeviceError>;

    /// Page-locks host memory, if the system lets it be, so that copies run at the link's speed. They work either way.
    fn pin(&self, host: &Region) {
        let _ = host;
    }

    /// Where it lies, for a library that opens it to other processes by itself. From then on it counts as exported.
    ///
    /// # Errors
    /// Why others cannot have it.
    fn place(&self) -> io::Result<Memory> {
        Err(ErrorKind::Unsupported.into())
    }

    /// Makes the device the calling thread's, for calls of such a library.
    ///
    /// # Errors
    /// The device's.
    fn enter(&self) -> io::Result<()> {
        Ok(())
    }
}
