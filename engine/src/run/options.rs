//! The options of one engine, and its start errors.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::layout::KvDtype;
use baton_connector::lease::LeaseTerms;

use crate::compute::cpu::WeightMode;
use crate::compute::cuda::DeviceChoice;
use crate::handoff::transport::KvTransport;
use crate::kv_events::KvEventsConfig;
use crate::model::output::OutputOptions;
use crate::model::{ModelError, ModelFiles};
use crate::offload::open::OffloadOptions;
use crate::scheduler::sequence::Pooling;
use crate::scheduler::{PromptLookup, SchedulingPolicy};

/// Limit of the bytes of all request bodies: eight of the largest, or some thousand usual ones.
pub(crate) const BODY_BYTES_TOTAL: usize = 256 << 20;

/// The options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The checkpoint.
    pub model: ModelFiles,
    /// The device that computes.
    pub device: DeviceChoice,
    /// The names that requests use.
    pub served: ServedNames,
    /// The formats of calls and reasoning in chats; by the chat template by default.
    pub output: OutputOptions,
    /// Which legs it serves.
    pub role: Role,
    /// The address of the HTTP server; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Engine cores (vLLM's `--data-parallel-size`), each with its own KV pool, scheduler, leases and side channel.
    pub data_parallel_size: usize,
    /// The address at which other engines read blocks; port 0 takes a free one. Each further rank takes the next
    /// port: all KV ranks of the first data-parallel rank, then those of the second.
    pub side_channel: SocketAddr,
    /// The transport of blocks between engines.
    pub kv_transport: KvTransport,
    /// NIXL's library, for [`KvTransport::Nixl`]; by default its usual paths are searched.
    pub nixl_library: Option<PathBuf>,
    /// The host of the side channel in handoffs; its own address by default.
    pub side_channel_host: Option<String>,
    /// Shards of each KV pool, by heads: each has its own memory, side channel and fetch workers.
    pub kv_ranks: usize,
    /// Tokens of one KV block.
    pub block_tokens: usize,
    /// Bytes of the KV pool of each rank.
    pub kv_cache_bytes: usize,
    /// Blocks of the KV pool of each rank. They override the bytes and the share.
    pub kv_blocks: Option<usize>,
    /// The share of a device's memory for weights, buffers and KV pool. It overrides the bytes. Above 0, at most 1,
    /// and only on a device with memory of its own.
    pub gpu_memory_utilization: Option<f64>,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtype,
    /// Element type of the weights in memory and of their products. Engines share KV blocks only if they have the
    /// same quantization or bfloat16 products.
    pub weights: WeightMode,
    /// How embeddings are made of hidden states.
    pub pooling: Pooling,
    /// Token limit of one sequence; the model's own limit by default.
    pub max_model_len: Option<usize>,
    /// Sequences that run or fetch at once.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Drafts of the next tokens by prompt lookup, if any.
    pub speculation: Option<PromptLookup>,
    /// Time target of a step; zero for none. Then only tokens limit it, and prompts do not share it.
    pub step_target: Duration,
    /// Limit of the waiting sequences.
    pub max_waiting: usize,
    /// The order of sequences, and what admission leaves to running ones.
    pub scheduling: SchedulingOptions,
    /// Lifetime of an unread lease (`kv_lease_duration`).
    pub kv_lease_duration: Duration,
    /// The handling of a request whose blocks cannot be fetched.
    pub kv_load_failure_policy: LoadFailurePolicy,
    /// Tiers below the KV pool.
    pub offload: OffloadOptions,
    /// Where changes of the caches are published, if they are.
    pub kv_events: Option<KvEventsConfig>,
    /// Limit of the concurrent reads.
    pub fetch_workers: usize,
    /// Compute threads, divided among the ranks; all cores by default.
    pub threads: Option<usize>,
    /// Wait before each step; for demonstrations and tests.
    pub pace: Option<Duration>,
    /// The device fails after so many steps; for tests.
    pub device_fails_after: Option<u64>,
    /// The shared secret of this cluster's routers and engines. Required beyond loopback.
    pub cluster_secret: Option<String>,
    /// A secret that is accepted beside [`Self::cluster_secret`] while it is rotated.
    pub previous_cluster_secret: Option<String>,
    /// Limit of the bytes of all bodies that are being read.
    pub body_bytes_total: usize,
    /// A client whose host acknowledges nothing for this long has left. Zero leaves this to the system.
    pub client_lost: Duration,
    /// How long requests and leases may take to end at shutdown.
    pub shutdown_timeout: Duration,
}

impl EngineOptions {
    /// Defaults for a checkpoint: loopback, free ports, 512 MiB of KV cache.
    #[must_use]
    pub fn new(model: ModelFiles) -> Self {
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            model,
            device: DeviceChoice::Cpu,
            served: ServedNames::default(),
            output: OutputOptions::default(),
            role: Role::Both,
            listen: loopback,
            data_parallel_size: 1,
            side_channel: loopback,
            kv_transport: KvTransport::Auto,
            nixl_library: None,
            side_channel_host: None,
            kv_ranks: 1,
            block_tokens: 16,
            kv_cache_bytes: 512 << 20,
            kv_blocks: None,
            gpu_memory_utilization: None,
            kv_dtype: KvDtype::F32,
            weights: WeightMode::Stored,
            pooling: Pooling::Last,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            speculation: None,
            step_target: Duration::ZERO,
            max_waiting: 1024,
            scheduling: SchedulingOptions::default(),
            kv_lease_duration: LeaseTerms::default().duration,
            kv_load_failure_policy: LoadFailurePolicy::Recompute,
            offload: OffloadOptions::default(),
            kv_events: None,
            fetch_workers: 4,
            threads: None,
            pace: None,
            device_fails_after: None,
            cluster_secret: None,
            previous_cluster_secret: None,
            body_bytes_total: BODY_BYTES_TOTAL,
            client_lost: Duration::from_secs(20),
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}

/// The names that requests use.
#[derive(Clone, Debug, Default)]
pub struct ServedNames {
    /// That of the model; the checkpoint's own by default.
    pub model: Option<String>,
    /// Those of adapters, in PEFT's format, with their folders. Only on the CPU.
    pub adapters: Vec<(String, PathBuf)>,
}

/// The order of an engine's sequences.
#[derive(Clone, Copy, Debug)]
pub struct SchedulingOptions {
    /// The order in which waiting sequences are served.
    pub policy: SchedulingPolicy,
    /// Whether admission leaves blocks for the growth of running sequences. Without it, a full pool preempts more
    /// often; for comparisons and tests.
    pub growth_reserve: bool,
}

impl Default for SchedulingOptions {
    fn default() -> Self {
        Self { policy: SchedulingPolicy::default(), growth_reserve: true }
    }
}

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An option is out of its range.
    #[error("{0}")]
    Options(String),
    /// A socket or thread is not available.
    #[error("{what}: {source}")]
    System {
        /// Its purpose.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> StartError {
    let what = what.into();
    move |source| StartError::System { what, source }
}

baton_connector::labelled! {
    /// The legs that an engine serves.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Role {
        /// Prefills and leases. Plain requests are served too.
        Prefill => "prefill",
        /// Fetches and decodes. Plain requests are served too.
        Decode => "decode",
        /// Both legs.
        Both => "both",
        /// No leg, only plain requests: vLLM without `--kv-transfer-config`. Other engines cannot reach its blocks.
        Standalone => "standalone",
    }
}

impl Role {
    /// Whether the engine leases the blocks of prompts.
    #[must_use]
    pub fn produces(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether the engine reads the blocks of other engines.
    #[must_use]
    pub fn consumes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }

    /// Whether the engine takes part in handoffs, and so has leases, a side channel and transports.
    #[must_use]
    pub fn has_handoffs(self) -> bool {
        self.produces() || self.consumes()
    }
}
