//! The command line's shape.

#[cfg(test)]
mod page;

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_bench::Benchmark;
use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::layout::KvDtype;
use baton_engine::executor::cuda::DeviceChoice;
use baton_engine::server::Role;
use baton_engine::transport::KvTransport;
use baton_router::listen_address;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// A front door and engines for disaggregated LLM serving
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 100)]
pub(crate) struct Cli {
    /// Log as JSON lines
    #[arg(long, global = true)]
    pub(crate) log_json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run router, prefill engine and decode engine on this machine
    Up(UpArgs),
    /// Run one engine
    Engine(Box<EngineArgs>),
    /// Run the router
    Router(RouterArgs),
    /// Check a router configuration and print what is in effect
    Check(CheckArgs),
    /// Say why a request went where it went, or where one would go
    Explain(ExplainArgs),
    /// Watch a deployment: blocks by state, leases and why they are held, requests by phase
    Top(Box<baton_bench::top::TopArgs>),
    /// Examine a deployment: leave it in every phase of a request and prove that the blocks came back. Exits with 1 if
    /// something is wrong, with 2 if it could not look: nobody answers, no engine is in view, no disconnect was proved, or the
    /// options make no sense
    Doctor(Box<baton_bench::doctor::DoctorArgs>),
    /// API keys of the router's clients
    Key(KeyArgs),
    /// Ask a router or an engine how it is: exits with 0 if the answer is 200, else with 1
    Health(HealthArgs),
    /// Compare the engine with golden outputs made by make_tiny.py
    Parity(ParityArgs),
    /// Measure: what disconnects cost a deployment (`disconnect`), load (`serve`), front doors side by side (`compare`), and
    /// the parts against baselines from the same run
    Bench(BenchArgs),
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Hugging Face checkpoint folder; the built-in demo model by default
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Where the router serves clients
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Where the router serves people and monitors, on loopback. Without it the admin listener is at 127.0.0.1:8081, or at
    /// any free port where that one is taken; which it is gets printed
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// Options passed on to both engines, after `--`
    #[arg(last = true, value_name = "ENGINE OPTIONS")]
    pub(crate) engine_options: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RoleArg {
    /// Prefills and lends its blocks
    Prefill,
    /// Fetches blocks and decodes
    Decode,
    /// Everything
    Both,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Prefill => Self::Prefill,
            RoleArg::Decode => Self::Decode,
            RoleArg::Both => Self::Both,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvTransportArg {
    /// Device to device or shared memory between engines of one host, TCP between others
    Auto,
    /// Shared memory only
    Shm,
    /// TCP only; shared memory is not offered either
    Tcp,
    /// NIXL where both engines have its library, otherwise as auto
    Nixl,
}

impl From<KvTransportArg> for KvTransport {
    fn from(transport: KvTransportArg) -> Self {
        match transport {
            KvTransportArg::Auto => Self::Auto,
            KvTransportArg::Shm => Self::Shm,
            KvTransportArg::Tcp => Self::Tcp,
            KvTransportArg::Nixl => Self::Nixl,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvDtypeArg {
    /// Exact
    F32,
    /// Half the memory
    F16,
    /// Half the memory, coarser
    Bf16,
}

impl From<KvDtypeArg> for KvDtype {
    fn from(dtype: KvDtypeArg) -> Self {
        match dtype {
            KvDtypeArg::F32 => Self::F32,
            KvDtypeArg::F16 => Self::F16,
            KvDtypeArg::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// Exact
    #[value(name = "float32", alias = "float")]
    Float32,
    /// The inputs of matrix products are rounded to bf16: coarser, and many times faster where the machine has AMX
    Bfloat16,
}

impl From<DtypeArg> for KvDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::Float32 => Self::F32,
            DtypeArg::Bfloat16 => Self::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum QuantizeArg {
    /// 8-bit integers with a scale for every 64 weights of a row
    Int8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LoadFailureArg {
    /// Compute the prompt on the decode engine
    Recompute,
    /// Answer with an error that the router can act on
    Fail,
}

impl From<LoadFailureArg> for LoadFailurePolicy {
    fn from(policy: LoadFailureArg) -> Self {
        match policy {
            LoadFailureArg::Recompute => Self::Recompute,
            LoadFailureArg::Fail => Self::Fail,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Hugging Face checkpoint folder; the built-in demo model by default
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Name that requests use; the folder's name by default
    #[arg(long)]
    pub(crate) served_model_name: Option<String>,
    /// Which legs it serves
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) role: RoleArg,
    /// Device to compute on: cpu, or cuda:N
    #[arg(long, default_value = "cpu")]
    pub(crate) device: DeviceChoice,
    /// Where HTTP is served; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8100", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Where other engines read KV blocks; by default a free port of the HTTP address's host
    #[arg(long, value_parser = listen_address)]
    pub(crate) side_channel: Option<SocketAddr>,
    /// How KV blocks travel between engines
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) kv_transport: KvTransportArg,
    /// NIXL's library, libnixl_capi.so, for --kv-transport nixl; by default looked for where the system and Python keep it
    #[arg(long, value_name = "FILE", env = "BATON_NIXL_LIBRARY")]
    pub(crate) nixl_library: Option<PathBuf>,
    /// Host that other engines are told to reach the side channel at
    #[arg(long)]
    pub(crate) side_channel_host: Option<String>,
    /// Shards of the KV cache, by heads: each has its own memory, side channel and fetch workers
    #[arg(long, default_value_t = 1)]
    pub(crate) kv_ranks: usize,
    /// Tokens of one KV block
    #[arg(long, default_value_t = 16)]
    pub(crate) block_size: usize,
    /// Size of the KV pool, in MiB; by default 512, and on a GPU what --gpu-memory-utilization leaves
    #[arg(long, value_name = "MIB", conflicts_with = "gpu_memory_utilization")]
    pub(crate) kv_cache_mib: Option<usize>,
    /// Share of a GPU's memory for weights, buffers and KV pool together; by default 0.9, unless the pool's size is given.
    /// The pool's copy in host memory is as large, and takes at most half of what the host has available
    #[arg(long, value_name = "SHARE")]
    pub(crate) gpu_memory_utilization: Option<f64>,
    /// Blocks of the KV pool; wins over --kv-cache-mib and --gpu-memory-utilization
    #[arg(long)]
    pub(crate) kv_blocks: Option<usize>,
    /// What is computed with; by default float32 on the CPU and, on a GPU, the element type of the KV cache
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<DtypeArg>,
    /// Element type of the KV cache, on a GPU of everything; by default f32 on the CPU and bf16 on a GPU
    #[arg(long, value_enum)]
    pub(crate) kv_cache_dtype: Option<KvDtypeArg>,
    /// Round the weights' matrices when they are loaded; by default they stay as they are
    #[arg(long, value_enum)]
    pub(crate) quantize: Option<QuantizeArg>,
    /// Tokens of one sequence at most; the model's own limit by default, which is the largest value
    #[arg(long)]
    pub(crate) max_model_len: Option<usize>,
    /// Sequences that run or fetch at once
    #[arg(long, default_value_t = 64)]
    pub(crate) max_num_seqs: usize,
    /// Tokens of one step
    #[arg(long, default_value_t = 512)]
    pub(crate) max_num_batched_tokens: usize,
    /// Engine cores in this process, each with its own KV pool, scheduler and side channel (`X-data-parallel-rank`)
    #[arg(long, default_value_t = 1)]
    pub(crate) data_parallel_size: usize,
    /// Sequences that wait; more are answered 429
    #[arg(long, default_value_t = 1024)]
    pub(crate) max_waiting: usize,
    /// Seconds that an unread lease lives
    #[arg(long, default_value_t = 30.0)]
    pub(crate) kv_lease_duration: f64,
    /// What becomes of a request whose blocks cannot be fetched
    #[arg(long, value_enum, default_value = "recompute")]
    pub(crate) kv_load_failure_policy: LoadFailureArg,
    /// Host memory that KV blocks are offloaded to, in MiB; 0 is none
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub(crate) kv_offload_host_mib: usize,
    /// Directory that KV blocks are offloaded to; they survive a restart. One engine per directory
    #[arg(long, value_name = "DIR", requires = "kv_offload_disk_mib")]
    pub(crate) kv_offload_disk: Option<PathBuf>,
    /// Size of the files there, in MiB. Those of another model, layout or rank are neither counted nor deleted
    #[arg(long, value_name = "MIB", requires = "kv_offload_disk")]
    pub(crate) kv_offload_disk_mib: Option<u64>,
    /// Reads from prefill engines at once
    #[arg(long, default_value_t = 4)]
    pub(crate) fetch_workers: usize,
    /// Threads that compute; all cores by default
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Milliseconds to wait before each step: for demonstrations and tests
    #[arg(long, hide = true)]
    pub(crate) pace_ms: Option<u64>,
    /// The device fails after so many steps: for tests
    #[arg(long, hide = true)]
    pub(crate) device_fails_after: Option<u64>,
    /// File with the cluster secret; needed beyond loopback
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER_SECRET_FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
    /// Seconds after which a client whose host acknowledges nothing has left; 0 is what the system does, at least 1 otherwise
    #[arg(long, default_value_t = 20.0)]
    pub(crate) client_lost: f64,
    /// Seconds that requests and leases may take to end at shutdown
    #[arg(long, default_value_t = 30.0)]
    pub(crate) shutdown_timeout: f64,
    /// Shut down when standard input ends: for supervisors
    #[arg(long, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RouterArgs {
    /// Configuration file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Take the listening sockets of the router that waits at this path, if one does; it ends when this one serves. And
    /// wait there for the next
    #[arg(long, value_name = "PATH")]
    pub(crate) handover: Option<PathBuf>,
    /// Shut down when standard input ends: for supervisors
    #[arg(long, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Configuration file
    #[arg(value_name = "FILE", required_unless_present = "schema")]
    pub(crate) file: Option<PathBuf>,
    /// Print the JSON schema of configuration files
    #[arg(long, conflicts_with = "file")]
    pub(crate) schema: bool,
    /// The files that it names (secrets, keys, certificates) are elsewhere: they are named, and not looked at
    #[arg(long)]
    pub(crate) no_files: bool,
    /// Print instead what changes from this file, or from what a router has in effect (its admin address), to FILE:
    /// `- key: old` and `+ key: new`
    #[arg(long, value_name = "OLD|http://HOST:PORT")]
    pub(crate) diff: Option<String>,
    /// File with the token of that router's admin listener
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    pub(crate) verb: KeyVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyVerb {
    /// Make a key: prints it, once, and its entry for `auth.keys`
    New {
        /// Its name in logs and limits
        #[arg(long)]
        id: String,
        /// Whose key it is
        #[arg(long)]
        tenant: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The request's id: the router's, or the client's `x-request-id`. Without it, the latest requests
    #[arg(value_name = "ID", conflicts_with = "dry_run")]
    pub(crate) id: Option<String>,
    /// Say instead where a request with this body would go; no engine hears of it
    #[arg(long, value_name = "FILE")]
    pub(crate) dry_run: Option<PathBuf>,
    /// The endpoint of the dry run; by default what the body is for
    #[arg(long, requires = "dry_run")]
    pub(crate) path: Option<String>,
    /// Whose request it is, where the router has `auth`
    #[arg(long, requires = "dry_run")]
    pub(crate) tenant: Option<String>,
    /// A header of the dry run's request, `NAME: VALUE`
    #[arg(long = "header", value_name = "HEADER", requires = "dry_run")]
    pub(crate) headers: Vec<String>,
    /// The router's admin listener
    #[arg(long, default_value = "http://127.0.0.1:8081", value_name = "URL", env = "BATON_ADMIN")]
    pub(crate) admin: String,
    /// File with the admin listener's token
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// What to ask: `http://HOST:PORT` whether it takes requests (`/ready`, or `/health` of an engine, which has no `/ready`);
    /// `http://HOST:PORT/health` whether the process lives, which a router without engines and one that drains does, too
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8081/ready")]
    pub(crate) url: String,
    /// How long to wait for each step of the answer, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub(crate) timeout_ms: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ParityArgs {
    /// Device to compute on: cpu, or cuda:N
    #[arg(long, default_value = "cpu")]
    pub(crate) device: DeviceChoice,
    /// Folder made by make_tiny.py
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) benchmark: Benchmark,
}
