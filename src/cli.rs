//! The definition of the command line.

#[cfg(test)]
mod page;
pub(crate) mod sidecar;

use std::net::SocketAddr;
use std::path::PathBuf;

use baton_bench::Benchmark;
use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::layout::KvDtype;
use baton_engine::compute::cuda::DeviceChoice;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::model::output::{CallFormat, FormatChoice, ReasoningFormat};
use baton_engine::run::options::Role;
use baton_engine::scheduler::SchedulingPolicy;
use baton_engine::scheduler::sequence::Pooling;
use baton_router::listen_address;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Converts the values of an option to the engine's enum with the same variants.
macro_rules! same_variants {
    ($arg:ident => $ours:ident: $($variant:ident),+) => {
        impl From<$arg> for $ours {
            fn from(arg: $arg) -> Self {
                match arg {
                    $($arg::$variant => Self::$variant,)+
                }
            }
        }
    };
}

/// Router and inference engine for disaggregated LLM serving
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
    /// Run the endpoint picker: choose engines for a gateway (Envoy) that forwards requests itself
    Picker(PickerArgs),
    /// Run the routing sidecar: beside a decode engine, with the prefill engine from a header of each request
    #[command(
        after_help = "The options are those of llm-d's routing sidecar. An error names those that are not supported"
    )]
    Sidecar(Box<sidecar::SidecarArgs>),
    /// Validate a router configuration
    Check(CheckArgs),
    /// Explain how a request was routed, or how one would be
    Explain(ExplainArgs),
    /// Show blocks by state, leases and why they are held, and requests by phase, as they change
    Top(Box<baton_bench::ops::top::TopArgs>),
    /// Cancel requests in each phase and verify that all KV blocks are freed
    #[command(
        after_help = "Exit codes: 0 healthy, 1 findings, 2 nothing could be checked, or no disconnect was verified"
    )]
    Doctor(Box<baton_bench::ops::doctor::DoctorArgs>),
    /// Create API keys for clients of the router
    Key(KeyArgs),
    /// Check a router or an engine: exit with 0 if it responds with 200, otherwise with 1
    #[command(
        after_help = "Without a path it requests /ready, and /health of an engine, which has no /ready"
    )]
    Health(HealthArgs),
    /// Compare the engine with golden outputs made by make_tiny.py
    Parity(ParityArgs),
    /// Measure disconnects, load, gateways, engines and transfers, most beside a baseline of the same run
    Bench(BenchArgs),
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Hugging Face checkpoint directory or GGUF file [default: built-in demo model]
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
    /// Address of the router for clients
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Admin address of the router, on loopback [default: 127.0.0.1:8081, or a free port if it is taken]
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub(crate) admin_listen: Option<SocketAddr>,
    /// Options of both engines, after `--`
    #[arg(last = true, value_name = "ENGINE OPTIONS")]
    pub(crate) engine_options: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RoleArg {
    /// Computes prompts and leases their blocks
    Prefill,
    /// Fetches blocks and decodes
    Decode,
    /// Serves both legs
    Both,
    /// Serves requests without handoffs: no side channel, no copy of a GPU's KV pool in host memory
    Standalone,
}

same_variants!(RoleArg => Role: Prefill, Decode, Both, Standalone);

/// Names as in vLLM.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ToolCallParserArg {
    /// The format whose markers the chat template contains
    Auto,
    /// Calls stay in the text
    None,
    /// `<tool_call>{…}</tool_call>`: Hermes, Qwen
    Hermes,
    /// `<tool_call><function=f><parameter=a>…`
    #[value(name = "qwen3_coder", alias = "qwen3_xml")]
    Qwen3Coder,
    /// `{"name": …, "parameters": {…}}`
    #[value(name = "llama3_json")]
    Llama3Json,
    /// `[f(a=1)]`: Llama 3.2 and 4
    Pythonic,
    /// `[TOOL_CALLS]`
    Mistral,
    /// DeepSeek V3, R1 and V3.1
    #[value(name = "deepseek_v3", alias = "deepseek_v31")]
    DeepseekV3,
    /// Channels of gpt-oss
    #[value(name = "openai")]
    Harmony,
}

impl From<ToolCallParserArg> for FormatChoice<CallFormat> {
    fn from(arg: ToolCallParserArg) -> Self {
        match arg {
            ToolCallParserArg::Auto => Self::Auto,
            ToolCallParserArg::None => Self::Off,
            ToolCallParserArg::Hermes => Self::Is(CallFormat::Hermes),
            ToolCallParserArg::Qwen3Coder => Self::Is(CallFormat::Qwen3Coder),
            ToolCallParserArg::Llama3Json => Self::Is(CallFormat::Llama3Json),
            ToolCallParserArg::Pythonic => Self::Is(CallFormat::Pythonic),
            ToolCallParserArg::Mistral => Self::Is(CallFormat::Mistral),
            ToolCallParserArg::DeepseekV3 => Self::Is(CallFormat::DeepseekV3),
            ToolCallParserArg::Harmony => Self::Is(CallFormat::Harmony),
        }
    }
}

/// Names as in vLLM.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ReasoningParserArg {
    /// The format whose tags the chat template contains
    Auto,
    /// Reasoning stays in the text
    None,
    /// `<think>…</think>`
    Qwen3,
    /// The same; text without a tag is reasoning
    #[value(name = "deepseek_r1")]
    DeepseekR1,
    /// `[THINK]…[/THINK]`
    Mistral,
    /// Channels of gpt-oss
    #[value(name = "openai_gptoss")]
    Harmony,
}

impl From<ReasoningParserArg> for FormatChoice<ReasoningFormat> {
    fn from(arg: ReasoningParserArg) -> Self {
        match arg {
            ReasoningParserArg::Auto => Self::Auto,
            ReasoningParserArg::None => Self::Off,
            ReasoningParserArg::Qwen3 => Self::Is(ReasoningFormat::Qwen3),
            ReasoningParserArg::DeepseekR1 => Self::Is(ReasoningFormat::DeepseekR1),
            ReasoningParserArg::Mistral => Self::Is(ReasoningFormat::Mistral),
            ReasoningParserArg::Harmony => Self::Is(ReasoningFormat::Harmony),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvTransportArg {
    /// Device to device or shared memory on one host, TCP between hosts
    Auto,
    /// Shared memory only
    Shm,
    /// TCP only, without an offer of shared memory
    Tcp,
    /// NIXL if both engines have its library, otherwise as auto
    Nixl,
}

same_variants!(KvTransportArg => KvTransport: Auto, Shm, Tcp, Nixl);

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum KvDtypeArg {
    /// Exact
    F32,
    /// Half the memory
    F16,
    /// Half the memory, less precise than f16
    Bf16,
}

same_variants!(KvDtypeArg => KvDtype: F32, F16, Bf16);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// Exact
    #[value(name = "float32", alias = "float")]
    Float32,
    /// Rounds inputs of matrix products to bf16: less precise, and many times faster with AMX
    Bfloat16,
    /// On the CPU: rounds inputs of products to 8-bit integers, for matrices of integers of at most 8 bits
    Int8,
}

impl From<DtypeArg> for KvDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            // A device refuses int8, which keeps its cache in f32.
            DtypeArg::Float32 | DtypeArg::Int8 => Self::F32,
            DtypeArg::Bfloat16 => Self::Bf16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizeArg {
    /// 8-bit integers with one scale per 32 weights of a row, per 64 with --dtype float32
    Int8,
    /// 4-bit integers with one scale and zero point per 32 weights of a row
    Int4,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LoadFailureArg {
    /// Recomputes the prompt on the decode engine
    Recompute,
    /// Fails with an error code that the router acts on
    Fail,
}

same_variants!(LoadFailureArg => LoadFailurePolicy: Recompute, Fail);

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PoolingArg {
    /// Those of the last token
    Last,
    /// The mean over all tokens
    Mean,
}

same_variants!(PoolingArg => Pooling: Last, Mean);

/// An adapter: its name and its folder.
fn adapter(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(folder)))
        }
        Some(_) | None => Err("expected NAME=DIR".into()),
    }
}

/// Names as in vLLM.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SchedulingPolicyArg {
    /// The order of arrival; a `priority` other than 0 is refused
    Fcfs,
    /// The order of the requests' `priority`, lowest first
    Priority,
}

same_variants!(SchedulingPolicyArg => SchedulingPolicy: Fcfs, Priority);

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    /// Hugging Face checkpoint directory or GGUF file [default: built-in demo model]
    #[arg(long, value_name = "PATH")]
    pub(crate) model: Option<PathBuf>,
    /// Model name in requests [default: name of the checkpoint directory or file]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// LoRA adapter to serve as a model of this name; may be repeated
    #[arg(long, value_name = "NAME=DIR", value_parser = adapter)]
    pub(crate) lora: Vec<(String, PathBuf)>,
    /// Format of tool calls in chats
    #[arg(long, value_name = "NAME", value_enum, default_value = "auto")]
    pub(crate) tool_call_parser: ToolCallParserArg,
    /// Format of reasoning in chats
    #[arg(long, value_name = "NAME", value_enum, default_value = "auto")]
    pub(crate) reasoning_parser: ReasoningParserArg,
    /// Legs that this engine serves
    #[arg(long, value_name = "NAME", value_enum, default_value = "both")]
    pub(crate) role: RoleArg,
    /// Device to compute on
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", value_parser = baton_engine_check::parse_device)]
    pub(crate) device: DeviceChoice,
    /// HTTP address; port 0 picks a free port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8100", value_parser = listen_address)]
    pub(crate) listen: SocketAddr,
    /// Address where other engines read KV blocks [default: a free port on the host of --listen]
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    pub(crate) side_channel: Option<SocketAddr>,
    /// Transport of KV blocks between engines
    #[arg(long, value_name = "NAME", value_enum, default_value = "auto")]
    pub(crate) kv_transport: KvTransportArg,
    /// NIXL library for --kv-transport nixl [default: libnixl_capi.so of the system or of Python]
    #[arg(long, value_name = "FILE", env = "BATON_NIXL_LIBRARY")]
    pub(crate) nixl_library: Option<PathBuf>,
    /// Host that other engines use to reach the side channel [default: the address of --side-channel]
    #[arg(long, value_name = "HOST")]
    pub(crate) side_channel_host: Option<String>,
    /// Shards of the KV cache, by heads, each with its own memory, side channel and fetch workers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) kv_ranks: usize,
    /// Tokens per KV block
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) block_size: usize,
    /// Size of the KV pool in MiB [default: 512; on a GPU what --gpu-memory-utilization leaves]
    #[arg(long, value_name = "MIB", conflicts_with = "gpu_memory_utilization")]
    pub(crate) kv_cache_mib: Option<usize>,
    /// Share of GPU memory for weights, buffers and KV pool [default: 0.9, unless the pool's size is given]
    #[arg(long, value_name = "FRACTION")]
    pub(crate) gpu_memory_utilization: Option<f64>,
    /// Blocks of the KV pool; overrides --kv-cache-mib and --gpu-memory-utilization
    #[arg(long, value_name = "N")]
    pub(crate) kv_blocks: Option<usize>,
    /// Element type of computation [default: float32; int8 for GGUF integers and --quantize; on a GPU the cache's]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) dtype: Option<DtypeArg>,
    /// Element type of the KV cache, on a GPU of everything [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) kv_cache_dtype: Option<KvDtypeArg>,
    /// Quantize weight matrices that are not integers yet when they are loaded [default: keep them as stored]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) quantize: Option<QuantizeArg>,
    /// Hidden states that are the embedding of a text
    #[arg(long, value_name = "NAME", value_enum, default_value = "last")]
    pub(crate) pooling: PoolingArg,
    /// Maximum tokens per sequence [default and upper limit: the model's own limit]
    #[arg(long, value_name = "N")]
    pub(crate) max_model_len: Option<usize>,
    /// Maximum sequences that run or fetch at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_num_seqs: usize,
    /// Maximum tokens per step, at least --max-num-seqs
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) max_num_batched_tokens: usize,
    /// Time target per step in milliseconds; 0 for none, only tokens then limit it [default: 100; on a GPU 30]
    #[arg(long, value_name = "MS")]
    pub(crate) step_target_ms: Option<u64>,
    /// Order in which waiting requests are served
    #[arg(long, value_name = "NAME", value_enum, default_value = "fcfs")]
    pub(crate) scheduling_policy: SchedulingPolicyArg,
    /// Engine cores in this process, each with its own KV pool and side channel (`X-data-parallel-rank`)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) data_parallel_size: usize,
    /// Maximum waiting sequences; further ones are refused with 429
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_waiting: usize,
    /// Lifetime of an unread lease in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(crate) kv_lease_duration: f64,
    /// Handling of a request whose blocks cannot be fetched
    #[arg(long, value_name = "NAME", value_enum, default_value = "recompute")]
    pub(crate) kv_load_failure_policy: LoadFailureArg,
    /// Size of the host memory tier in MiB; 0 disables it
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    pub(crate) kv_offload_host_mib: usize,
    /// Directory of the disk tier, which survives a restart; one engine per directory
    #[arg(long, value_name = "DIR", requires = "kv_offload_disk_mib")]
    pub(crate) kv_offload_disk: Option<PathBuf>,
    /// Size of the disk tier in MiB; files of other models, layouts or ranks are not counted or deleted
    #[arg(long, value_name = "MIB", requires = "kv_offload_disk")]
    pub(crate) kv_offload_disk_mib: Option<u64>,
    /// KV events for routers as vLLM's JSON: `enable_kv_cache_events`, `endpoint`, `topic` and others
    #[arg(long, value_name = "JSON")]
    pub(crate) kv_events_config: Option<String>,
    /// Speculative decoding as vLLM's JSON: `method` ("ngram"), `num_speculative_tokens`, `prompt_lookup_max`, `_min`
    #[arg(long, value_name = "JSON")]
    pub(crate) speculative_config: Option<String>,
    /// Concurrent reads from prefill engines
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) fetch_workers: usize,
    /// Compute threads [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Milliseconds to wait before each step: for demonstrations and tests
    #[arg(long, hide = true)]
    pub(crate) pace_ms: Option<u64>,
    /// The device fails after so many steps: for tests
    #[arg(long, hide = true)]
    pub(crate) device_fails_after: Option<u64>,
    /// File with the cluster secret; required beyond loopback
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER_SECRET_FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
    /// File with a second cluster secret that is accepted too, for a rotation
    #[arg(
        long,
        value_name = "FILE",
        env = "BATON_PREVIOUS_CLUSTER_SECRET_FILE",
        requires = "cluster_secret_file"
    )]
    pub(crate) previous_cluster_secret_file: Option<PathBuf>,
    /// Seconds until a client whose host acknowledges nothing counts as gone: 1 or more, or 0 for the
    /// system's own limit
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0)]
    pub(crate) client_lost: f64,
    /// Maximum seconds for requests and leases to end at shutdown
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
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
    /// Unix socket for a restart without downtime: take over the running router's listeners, then wait for
    /// the next one
    #[arg(long, value_name = "PATH")]
    pub(crate) takeover_socket: Option<PathBuf>,
    /// Shut down when standard input ends: for supervisors
    #[arg(long, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PickerArgs {
    /// Configuration file, the same as the router's
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Shut down when standard input ends: for supervisors
    #[arg(long, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Configuration file
    #[arg(value_name = "FILE", required_unless_present = "schema")]
    pub(crate) file: Option<PathBuf>,
    /// Print the effective configuration, with all defaults
    #[arg(long, conflicts_with = "schema")]
    pub(crate) print: bool,
    /// Print the JSON schema of configuration files
    #[arg(long, conflicts_with = "file")]
    pub(crate) schema: bool,
    /// Skip referenced files (secrets, keys, certificates) and list them
    #[arg(long)]
    pub(crate) no_files: bool,
    /// Print changes to FILE instead, from another file or from a running router (its admin URL)
    #[arg(long, value_name = "FILE|URL", conflicts_with = "print")]
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
    /// Create a key and print it once, with its entry for `auth.keys`
    New {
        /// Name of the key in logs and limits
        #[arg(long, value_name = "NAME")]
        id: String,
        /// Tenant of the key
        #[arg(long, value_name = "NAME")]
        tenant: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Request id, from the router or the client's `x-request-id` [default: list the latest requests]
    #[arg(value_name = "ID", conflicts_with = "dry_run")]
    pub(crate) id: Option<String>,
    /// Explain where a request with this body would go, without sending it to an engine
    #[arg(long, value_name = "FILE")]
    pub(crate) dry_run: Option<PathBuf>,
    /// Endpoint of the dry run [default: the chat endpoint if the body has `messages`, else completions]
    #[arg(long, value_name = "ENDPOINT", requires = "dry_run")]
    pub(crate) path: Option<String>,
    /// Tenant of the dry run, if the router has `auth`
    #[arg(long, value_name = "NAME", requires = "dry_run")]
    pub(crate) tenant: Option<String>,
    /// Header of the dry run's request (repeatable)
    #[arg(long = "header", value_name = "NAME: VALUE", requires = "dry_run")]
    pub(crate) headers: Vec<String>,
    /// Admin URL of the router
    #[arg(long, default_value = "http://127.0.0.1:8081", value_name = "URL", env = "BATON_ADMIN")]
    pub(crate) admin: String,
    /// File with the token of the admin listener
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// URL to check: without a path that it takes requests (`/ready`), with `/health` that the process runs
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8081/ready")]
    pub(crate) url: String,
    /// Timeout of each step in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub(crate) timeout_ms: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ParityArgs {
    /// Device to compute on
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", value_parser = baton_engine_check::parse_device)]
    pub(crate) device: DeviceChoice,
    /// Directory made by make_tiny.py
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) benchmark: Benchmark,
}
