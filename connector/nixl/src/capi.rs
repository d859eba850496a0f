//! The library's plain C interface (`src/bindings/rust/wrapper.h` of NIXL 1.5.1), opened at run time.
//!
//! Twenty-two functions and one struct. Handles are opaque pointers. Every call returns a number: negative for an
//! error, 0 for success, 1 for in progress. The number does not distinguish errors: a lost peer and a bad argument
//! return the same.
#![allow(unsafe_code, reason = "calls into a C library; each block states why it is sound")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::api::{
    Agent, AgentRole, Library, Memory, NixlError, ReadDescriptor, Segment, TransferRequest, TransferState,
};

/// `NIXL_CAPI_MEM_DRAM`.
const HOST_MEMORY: c_int = 0;
/// `NIXL_CAPI_MEM_VRAM`.
const DEVICE_MEMORY: c_int = 1;
/// `NIXL_CAPI_XFER_OP_READ`.
const READ: c_int = 0;
/// `NIXL_CAPI_IN_PROG`.
const IN_PROGRESS: c_int = 1;
/// `NIXL_CAPI_THREAD_SYNC_STRICT`: an agent may be used from any thread.
const STRICT: c_int = 1;

/// Interval between two polls of a producer's progress thread when no descriptor wakes it. At 0, the default, it spins.
const PROGRESS_DELAY_US: u64 = 10_000;

/// The UCX configuration, which environment variables override (`UCX_TLS`, `UCX_MM_ERROR_HANDLING`). UCX's TCP emulates
/// reads in the producer's process, and aborts that process if the reader has ended meanwhile (UCX 1.23: "Fatal:
/// unexpected error: Endpoint timeout"). Baton's TCP transport does not.
///
/// Keepalive is off, and so is the request of the first connection that only keepalive needs (`RESOLVE_REMOTE_EP_ID`).
/// The bound on silence and the lease replace keepalive. A producer may be stopped while a reader's agent connects, and
/// continue after the end of that agent. Then its endpoint briefly has no lanes, and a round of keepalive reads a null
/// pointer (UCX 1.23: SIGSEGV in `ucp_ep_do_uct_ep_am_keepalive`, called by `ucp_worker_do_ep_keepalive`). Without
/// keepalive a producer survives such a request of any reader. Without the second option no such request is sent.
///
/// Between GPUs, without `ENABLE_GET_ZCOPY`, UCX copies from another process's GPU only over NVLink. Otherwise the
/// producer's processor sends the bytes. With `CACHE` (`src/uct/cuda/cuda_ipc` of UCX), another process's memory would
/// stay open for the life of this one, even after the death of its owner, and occupy the GPU. A UCX without CUDA
/// ignores both.
const UCX: &CStr = c"TLS=^tcp,MM_ERROR_HANDLING=y,KEEPALIVE_INTERVAL=inf,RESOLVE_REMOTE_EP_ID=n,\
CUDA_IPC_ENABLE_GET_ZCOPY=on,CUDA_IPC_CACHE=n";

/// NIXL's number of a kind of memory, and the device's number.
fn memory_kind(segment: Segment) -> (c_int, u64) {
    match segment {
        Segment::Host => (HOST_MEMORY, 0),
        Segment::Cuda(ordinal) => (DEVICE_MEMORY, u64::from(ordinal)),
    }
}

type Ptr = *mut c_void;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
struct CapiAgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

macro_rules! symbols {
    ($($field:ident: $name:literal ($($argument:ty),*);)*) => {
        struct Symbols { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Symbols {
            /// Every function, or the name of the first missing one.
            fn resolve(library: Ptr) -> Result<Self, &'static CStr> {
                Ok(Self { $($field: {
                    // SAFETY: an open library and a zero-terminated name.
                    let found = unsafe { libc::dlsym(library, $name.as_ptr()) };
                    if found.is_null() {
                        return Err($name);
                    }
                    // SAFETY: the C interface declares this function with these arguments and an `int` enum as result.
                    unsafe { std::mem::transmute::<Ptr, unsafe extern "C" fn($($argument),*) -> c_int>(found) }
                },)* })
            }
        }
    };
}

symbols! {
    create_agent: c"nixl_capi_create_configured_agent" (*const c_char, *const CapiAgentConfig, *mut Ptr);
    destroy_agent: c"nixl_capi_destroy_agent" (Ptr);
    create_params: c"nixl_capi_create_params" (*mut Ptr);
    params_add: c"nixl_capi_params_add" (Ptr, *const c_char, *const c_char);
    destroy_params: c"nixl_capi_destroy_params" (Ptr);
    create_backend: c"nixl_capi_create_backend" (Ptr, *const c_char, Ptr, *mut Ptr);
    destroy_backend: c"nixl_capi_destroy_backend" (Ptr);
    create_reg_dlist: c"nixl_capi_create_reg_dlist" (c_int, *mut Ptr);
    reg_dlist_add: c"nixl_capi_reg_dlist_add_desc" (Ptr, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist: c"nixl_capi_destroy_reg_dlist" (Ptr);
    register: c"nixl_capi_register_mem" (Ptr, Ptr, Ptr);
    local_metadata: c"nixl_capi_get_local_md" (Ptr, *mut Ptr, *mut usize);
    load_remote: c"nixl_capi_load_remote_md" (Ptr, *const c_void, usize, *mut *mut c_char);
    invalidate_remote: c"nixl_capi_invalidate_remote_md" (Ptr, *const c_char);
    create_dlist: c"nixl_capi_create_xfer_dlist" (c_int, *mut Ptr);
    dlist_add: c"nixl_capi_xfer_dlist_add_desc" (Ptr, usize, usize, u64);
    destroy_dlist: c"nixl_capi_destroy_xfer_dlist" (Ptr);
    create_request: c"nixl_capi_create_xfer_req" (Ptr, c_int, Ptr, Ptr, *const c_char, *mut Ptr, Ptr);
    post: c"nixl_capi_post_xfer_req" (Ptr, Ptr, Ptr);
    status: c"nixl_capi_get_xfer_status" (Ptr, Ptr);
    release_request: c"nixl_capi_release_xfer_req" (Ptr, Ptr);
    destroy_request: c"nixl_capi_destroy_xfer_req" (Ptr);
}

/// An open library.
pub(crate) struct Capi {
    origin: String,
    symbols: Arc<Symbols>,
}

impl std::fmt::Debug for Capi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capi").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl Capi {
    /// Opens a library and resolves all functions. The library is never closed.
    pub(crate) fn open(path: &Path) -> Result<Self, NixlError> {
        let origin = path.display().to_string();
        let name = CString::new(path.as_os_str().as_bytes());
        let name = name
            .map_err(|_| NixlError(format!("invalid file name {origin:?}: contains a zero byte").into()))?;
        // SAFETY: a zero-terminated name. Opening runs the library's constructors. The operator trusts a library that
        // is named, or that is in the system's search path.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: called right after the failure, on the same thread.
            let why = unsafe { libc::dlerror() };
            if why.is_null() {
                return Err(NixlError(origin.into()));
            }
            // SAFETY: zero-terminated text, valid until the next call of this family on this thread.
            let why = unsafe { CStr::from_ptr(why) }.to_string_lossy();
            // The text usually begins with the name.
            let why = if why.contains(&origin) { why.into_owned() } else { format!("{origin}: {why}") };
            return Err(NixlError(why.into()));
        }
        let symbols = Symbols::resolve(library);
        let symbols = symbols
            .map_err(|name| NixlError(format!("{origin} has no {}", name.to_string_lossy()).into()))?;
        Ok(Self { origin, symbols: Arc::new(symbols) })
    }
}

/// The result of a call, or an error with the name of the call.
fn check_status(call: &str, answer: c_int) -> Result<c_int, NixlError> {
    if answer < 0 { Err(NixlError(format!("{call} failed with {answer}").into())) } else { Ok(answer) }
}

impl Library for Capi {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn agent(&self, name: &str, side: AgentRole) -> Result<Box<dyn Agent>, NixlError> {
        let name = c_name(name)?;
        let symbols = Arc::clone(&self.symbols);
        let config = CapiAgentConfig {
            progress_thread: side == AgentRole::Target,
            listen_thread: false,
            listen_port: 0,
            thread_sync: STRICT,
            workers: 1,
            progress_delay_us: PROGRESS_DELAY_US,
            listen_delay_us: 0,
            telemetry: false,
        };
        let mut agent = null_mut();
        // SAFETY: a zero-terminated name, a config as the library declares it, and memory for one pointer.
        let answer = unsafe { (symbols.create_agent)(name.as_ptr(), &raw const config, &raw mut agent) };
        check_status("create_configured_agent", answer)?;
        // From here on the drop destroys the agent.
        let agent = CapiAgent { symbols, agent };
        agent.add_backend()?;
        Ok(Box::new(agent))
    }
}

fn c_name(name: &str) -> Result<CString, NixlError> {
    CString::new(name).map_err(|_| NixlError("agent name contains a zero byte".into()))
}

struct CapiAgent {
    symbols: Arc<Symbols>,
    agent: Ptr,
}

// SAFETY: an agent is a handle without a thread affinity.
unsafe impl Send for CapiAgent {}
// SAFETY: created with `NIXL_CAPI_THREAD_SYNC_STRICT`: the library takes its own lock around every call.
unsafe impl Sync for CapiAgent {}

/// A list of descriptors of the library; the drop destroys it.
struct DescriptorList<'a> {
    list: Ptr,
    destroy: &'a unsafe extern "C" fn(Ptr) -> c_int,
}

impl Drop for DescriptorList<'_> {
    fn drop(&mut self) {
        // SAFETY: a handle that the library created, destroyed once.
        unsafe { (self.destroy)(self.list) };
    }
}

impl CapiAgent {
    fn add_backend(&self) -> Result<(), NixlError> {
        let symbols = &*self.symbols;
        let mut params = null_mut();
        // SAFETY: memory for one pointer.
        check_status("create_params", unsafe { (symbols.create_params)(&raw mut params) })?;
        let params = DescriptorList { list: params, destroy: &symbols.destroy_params };
        // SAFETY: live parameters, and zero-terminated texts, which the library copies.
        let added = unsafe { (symbols.params_add)(params.list, c"engine_config".as_ptr(), UCX.as_ptr()) };
        check_status("params_add", added)?;
        let mut backend = null_mut();
        // SAFETY: a live agent and parameters, a zero-terminated text, and memory for one pointer.
        let created =
            unsafe { (symbols.create_backend)(self.agent, c"UCX".as_ptr(), params.list, &raw mut backend) };
        check_status("create_backend(UCX)", created)?;
        // SAFETY: the handle of the new backend. The backend itself stays with the agent.
        unsafe { (symbols.destroy_backend)(backend) };
        Ok(())
    }

    /// A list of descriptors of one kind of memory.
    fn list(
        &self,
        segment: Segment,
        descriptors: impl Iterator<Item = (usize, usize)>,
    ) -> Result<DescriptorList<'_>, NixlError> {
        let (symbols, (kind, device)) = (&*self.symbols, memory_kind(segment));
        let mut list = null_mut();
        // SAFETY: memory for one pointer.
        check_status("create_xfer_dlist", unsafe { (symbols.create_dlist)(kind, &raw mut list) })?;
        let list = DescriptorList { list, destroy: &symbols.destroy_dlist };
        for (address, len) in descriptors {
            // SAFETY: a live list and numbers.
            check_status("xfer_dlist_add_desc", unsafe {
                (symbols.dlist_add)(list.list, address, len, device)
            })?;
        }
        Ok(list)
    }
}

fn state(call: &str, answer: c_int) -> Result<TransferState, NixlError> {
    check_status(call, answer)
        .map(|answer| if answer == IN_PROGRESS { TransferState::InFlight } else { TransferState::Done })
}

fn handle(request: &TransferRequest) -> Ptr {
    // A handle is stored as a number. This one came from `prepare`.
    std::ptr::with_exposed_provenance_mut(usize::try_from(request.0).expect("it was an address"))
}

impl Agent for CapiAgent {
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError> {
        let (symbols, (kind, device)) = (&*self.symbols, memory_kind(memory.segment));
        let mut list = null_mut();
        // SAFETY: memory for one pointer.
        check_status("create_reg_dlist", unsafe { (symbols.create_reg_dlist)(kind, &raw mut list) })?;
        let list = DescriptorList { list, destroy: &symbols.destroy_reg_dlist };
        // SAFETY: a live list, numbers, and no metadata.
        let added = unsafe { (symbols.reg_dlist_add)(list.list, memory.base, memory.len, device, null(), 0) };
        check_status("reg_dlist_add_desc", added)?;
        // SAFETY: a live agent and list; the caller keeps the memory for the agent's life.
        check_status("register_mem", unsafe { (symbols.register)(self.agent, list.list, null_mut()) })?;
        Ok(())
    }

    fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: a live agent, and memory for a pointer and a length.
        let answer = unsafe { (self.symbols.local_metadata)(self.agent, &raw mut data, &raw mut len) };
        check_status("get_local_md", answer)?;
        // SAFETY: `len` bytes that the library allocated with `malloc` for the caller.
        let metadata = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec();
        // SAFETY: as above, freed once.
        unsafe { libc::free(data) };
        Ok(metadata)
    }

    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        owner(metadata)
    }

    fn add(&self, metadata: &[u8]) -> Result<String, NixlError> {
        let mut name: *mut c_char = null_mut();
        // SAFETY: a live agent, bytes that outlive the call, and memory for one pointer.
        let answer = unsafe {
            (self.symbols.load_remote)(self.agent, metadata.as_ptr().cast(), metadata.len(), &raw mut name)
        };
        check_status("load_remote_md", answer)?;
        // SAFETY: zero-terminated text from `strdup`, for the caller.
        let text = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // SAFETY: as above, freed once.
        unsafe { libc::free(name.cast()) };
        Ok(text)
    }

    fn remove(&self, peer: &str) {
        if let Ok(peer) = c_name(peer) {
            // SAFETY: a live agent and a zero-terminated name. The error for an unknown name is ignored.
            unsafe { (self.symbols.invalidate_remote)(self.agent, peer.as_ptr()) };
        }
    }

    fn prepare(
        &self,
        peer: &str,
        from: Segment,
        into: Segment,
        descriptors: &[ReadDescriptor],
    ) -> Result<TransferRequest, NixlError> {
        let peer = c_name(peer)?;
        let here = self.list(into, descriptors.iter().map(|descriptor| (descriptor.into, descriptor.len)))?;
        let there =
            self.list(from, descriptors.iter().map(|descriptor| (descriptor.from, descriptor.len)))?;
        let mut request = null_mut();
        // SAFETY: a live agent and lists, which the library copies, a zero-terminated name, memory for one pointer, and
        // no options. The call transfers nothing; `post` does.
        let answer = unsafe {
            (self.symbols.create_request)(
                self.agent,
                READ,
                here.list,
                there.list,
                peer.as_ptr(),
                &raw mut request,
                null_mut(),
            )
        };
        check_status("create_xfer_req", answer)?;
        Ok(TransferRequest(request.expose_provenance() as u64))
    }

    unsafe fn post(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        // SAFETY: a live agent and a request of it. The landing memory is registered, and only the caller uses it until
        // the end of the request.
        let answer = unsafe { (self.symbols.post)(self.agent, handle(request), null_mut()) };
        state("post_xfer_req", answer)
    }

    fn status(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        // SAFETY: a live agent and a request of it.
        state("get_xfer_status", unsafe { (self.symbols.status)(self.agent, handle(request)) })
    }

    fn release(&self, request: TransferRequest) {
        let request = handle(&request);
        // SAFETY: a live agent and a request of it, released once. The library destroys the wrapper only if the wrapped
        // request is gone. Otherwise it refuses, and a few bytes are leaked.
        unsafe {
            (self.symbols.release_request)(self.agent, request);
            (self.symbols.destroy_request)(request);
        }
    }
}

/// The name at the head of metadata as NIXL 1.5.1 writes it: a tag, its length in eight bytes, the name.
fn owner(metadata: &[u8]) -> Option<&str> {
    let (len, rest) = metadata.strip_prefix(b"nixlSerDes|Agent")?.split_first_chunk()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    std::str::from_utf8(rest.get(..len)?).ok()
}

impl Drop for CapiAgent {
    fn drop(&mut self) {
        // SAFETY: created by `create_configured_agent`, destroyed once, and not used any more.
        unsafe { (self.symbols.destroy_agent)(self.agent) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_name_is_parsed_before_metadata_is_loaded() {
        let of = |len: u64, rest: &[u8]| [b"nixlSerDes|Agent", &len.to_le_bytes()[..], rest].concat();
        assert_eq!(owner(&of(3, b"p-1|Conns\x08")), Some("p-1"));
        assert_eq!(owner(&of(3, b"p-")), None, "cut off");
        assert_eq!(owner(&of(u64::MAX, b"p-1|")), None);
        assert_eq!(owner(&of(2, &[0xff, 0xff])), None, "no text");
        assert_eq!((owner(b""), owner(b"nixlSerDes|Agent"), owner(b"something else")), (None, None, None));
    }
}
