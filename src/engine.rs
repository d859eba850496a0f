//! `baton engine`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::{WeightLoadProgress, WeightMode};
use baton_engine::compute::cuda::{Accelerator, DeviceChoice, GPU_MEMORY_UTILIZATION};
use baton_engine::engine::Engine;
use baton_engine::kv_events::KvEventsConfig;
use baton_engine::model::ModelFiles;
use baton_engine::model::output::OutputOptions;
use baton_engine::offload::open::DiskOptions;
use baton_engine::run::options::{EngineOptions, ServedNames};
use baton_engine::run::speculation::parse_speculation;

use crate::cli::{DtypeArg, EngineArgs, QuantizeArg};
use crate::{Failure, builtin, output, shutdown};

/// Keepalive counts in seconds. A value of more than an hour is a mistake.
const CLIENT_LOST: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);

/// Default time targets of a step. A reader follows a text that has ten tokens a second.
const STEP_TARGET_CPU: Duration = Duration::from_millis(100);
const STEP_TARGET_GPU: Duration = Duration::from_millis(30);

/// Threads that serve HTTP. The engine computes on threads of its own.
const HTTP_THREADS: usize = 2;

pub(crate) fn run(args: EngineArgs) -> Result<(), Failure> {
    let until_stdin_ends = args.until_stdin_ends;
    let options = options(args)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(HTTP_THREADS).enable_all().build()?;
    runtime.block_on(async {
        let stop = shutdown::on_signal(until_stdin_ends)?;
        let mut shown = None;
        let mut progress = |progress: WeightLoadProgress| {
            let percent = progress.bytes_done * 100 / progress.bytes_total.max(1);
            // The first line shows a supervisor that options, device and model are valid.
            if shown.is_none_or(|shown| percent >= shown + 25) {
                shown = Some(percent);
                say(&format!("loading {percent} %"));
            }
        };
        let engine = tokio::task::block_in_place(|| Engine::start(options, &mut progress))?;
        let side_channels: Vec<_> = engine.side_channels().iter().map(ToString::to_string).collect();
        let side_channels =
            if side_channels.is_empty() { "none".to_owned() } else { side_channels.join(",") };
        say(&format!("ready http={} side_channel={side_channels} model={}", engine.http(), engine.model()));
        engine.run(stop).await?;
        say("stopped");
        Ok(())
    })
}

/// Prints one line to standard output for people and supervisors: `baton engine: ready http=ADDR …`.
fn say(line: &str) {
    output::say(format_args!("baton engine: {line}"));
}

fn options(args: EngineArgs) -> Result<EngineOptions, Failure> {
    let model = args.model.as_deref().map_or_else(|| Ok(builtin::model()), checkpoint)?;
    let element_types = (kv_dtype(&args)?, weights(&args, &model)?);
    let mut options = EngineOptions::new(model);
    options.served = ServedNames { model: args.served_model_name, adapters: args.lora };
    options.output =
        OutputOptions { calls: args.tool_call_parser.into(), reasoning: args.reasoning_parser.into() };
    options.role = args.role.into();
    options.listen = args.listen;
    options.data_parallel_size = args.data_parallel_size;
    if args.side_channel.is_some() && !options.role.has_handoffs() {
        return Err("--side-channel has no effect with --role standalone, which opens none".into());
    }
    options.side_channel =
        args.side_channel.unwrap_or_else(|| std::net::SocketAddr::new(args.listen.ip(), 0));
    options.side_channel_host = args.side_channel_host;
    options.kv_transport = args.kv_transport.into();
    options.nixl_library = args.nixl_library;
    options.kv_ranks = args.kv_ranks;
    options.block_tokens = args.block_size;
    let is_gpu = matches!(args.device, DeviceChoice::Accelerator(Accelerator::Cuda(_)));
    options.gpu_memory_utilization = match (args.gpu_memory_utilization, args.kv_cache_mib, args.kv_blocks) {
        (None, None, None) if is_gpu => Some(GPU_MEMORY_UTILIZATION),
        (share, _, _) => share,
    };
    if let Some(mib) = args.kv_cache_mib {
        options.kv_cache_bytes = mib.checked_mul(1 << 20).ok_or("--kv-cache-mib is too large")?;
    }
    options.kv_blocks = args.kv_blocks;
    options.device = args.device;
    (options.kv_dtype, options.weights) = element_types;
    options.pooling = args.pooling.into();
    options.max_model_len = args.max_model_len;
    options.max_num_seqs = args.max_num_seqs;
    options.max_num_batched_tokens = args.max_num_batched_tokens.max(args.max_num_seqs);
    let step_target = args.step_target_ms.map(Duration::from_millis);
    options.step_target = step_target.unwrap_or(if is_gpu { STEP_TARGET_GPU } else { STEP_TARGET_CPU });
    options.max_waiting = args.max_waiting;
    options.scheduling.policy = args.scheduling_policy.into();
    options.kv_lease_duration = seconds(args.kv_lease_duration, "--kv-lease-duration")?;
    options.kv_load_failure_policy = args.kv_load_failure_policy.into();
    options.offload.host_bytes =
        args.kv_offload_host_mib.checked_mul(1 << 20).ok_or("--kv-offload-host-mib is too large")?;
    if let (Some(dir), Some(mib)) = (args.kv_offload_disk, args.kv_offload_disk_mib) {
        let bytes = mib.checked_mul(1 << 20).ok_or("--kv-offload-disk-mib is too large")?;
        options.offload.disk = Some(DiskOptions { dir, bytes });
    }
    if let Some(json) = &args.kv_events_config {
        let config = KvEventsConfig::parse(json);
        options.kv_events = config.map_err(|error| format!("--kv-events-config: {error}"))?;
    }
    if let Some(json) = &args.speculative_config {
        let lookup = parse_speculation(json).map_err(|error| format!("--speculative-config: {error}"))?;
        options.speculation = Some(lookup);
    }
    options.fetch_workers = args.fetch_workers;
    options.threads = args.threads;
    options.pace = args.pace_ms.map(Duration::from_millis);
    options.device_fails_after = args.device_fails_after;
    let secret = |path: Option<PathBuf>, flag| path.map(|path| secret(&path, flag)).transpose();
    options.cluster_secret = secret(args.cluster_secret_file, "--cluster-secret-file")?;
    options.previous_cluster_secret =
        secret(args.previous_cluster_secret_file, "--previous-cluster-secret-file")?;
    options.client_lost = seconds(args.client_lost, "--client-lost")?;
    if !(options.client_lost.is_zero() || CLIENT_LOST.contains(&options.client_lost)) {
        return Err("--client-lost must be 0, or from 1 to 3600 seconds".into());
    }
    options.shutdown_timeout = seconds(args.shutdown_timeout, "--shutdown-timeout")?;
    Ok(options)
}

/// The checkpoint at the path of `--model`: a Hugging Face folder or a GGUF file.
fn checkpoint(path: &Path) -> Result<ModelFiles, Failure> {
    if !path.exists() {
        let hint = download(path).map_or_else(String::new, |hint| format!("; {hint}"));
        return Err(format!("--model {}: there is no such folder or file{hint}", path.display()).into());
    }
    ModelFiles::at(path).map_err(|error| format!("--model {}: {error}", path.display()).into())
}

/// A hint for a folder that does not exist and has the form of a model name of the Hugging Face hub: `ORG/NAME`.
fn download(folder: &Path) -> Option<String> {
    let (organisation, name) = folder.to_str()?.split_once('/')?;
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    (is_part(organisation) && is_part(name)).then(|| {
        format!(
            "models are not downloaded: `hf download {organisation}/{name} --local-dir {name}` fetches that model of \
             the Hugging Face hub, for `--model {name}`"
        )
    })
}

/// The element type of the KV cache. A GPU has one element type for everything, which either option can set.
fn kv_dtype(args: &EngineArgs) -> Result<KvDtype, Failure> {
    let (cache, computed) = (args.kv_cache_dtype.map(KvDtype::from), args.dtype.map(KvDtype::from));
    match (args.device, cache, computed) {
        (DeviceChoice::Cpu, cache, _) => Ok(cache.unwrap_or(KvDtype::F32)),
        (DeviceChoice::Accelerator(_), Some(cache), Some(computed)) if cache != computed => {
            Err("--dtype and --kv-cache-dtype must be equal on this device".into())
        }
        (DeviceChoice::Accelerator(_), cache, computed) => Ok(cache.or(computed).unwrap_or(KvDtype::Bf16)),
    }
}

/// How matrices are stored and multiplied. Integers of a GGUF file are multiplied as integers if nothing else is asked
/// for, as in llama.cpp: that takes the memory of the file.
fn weights(args: &EngineArgs, model: &ModelFiles) -> Result<WeightMode, Failure> {
    let on_cpu = args.device == DeviceChoice::Cpu;
    match (args.dtype, args.quantize) {
        (None, None) if on_cpu && model.has_gguf_integers() => Ok(WeightMode::Integers),
        (Some(DtypeArg::Bfloat16), None) if on_cpu => Ok(WeightMode::Bf16),
        (None | Some(DtypeArg::Float32 | DtypeArg::Bfloat16), None) => Ok(WeightMode::Stored),
        (Some(DtypeArg::Int8), None) => Ok(WeightMode::Integers),
        (None | Some(DtypeArg::Int8), Some(QuantizeArg::Int8)) => Ok(WeightMode::Integers8),
        (None | Some(DtypeArg::Int8), Some(QuantizeArg::Int4)) => Ok(WeightMode::Integers4),
        (Some(DtypeArg::Float32), Some(QuantizeArg::Int8)) => Ok(WeightMode::Int8),
        (Some(DtypeArg::Float32), Some(QuantizeArg::Int4)) => {
            Err("--dtype float32 conflicts with --quantize int4: 4-bit weights are multiplied in int8".into())
        }
        (Some(DtypeArg::Bfloat16), Some(_)) => {
            Err("--dtype bfloat16 conflicts with --quantize: its weights are multiplied in int8 or float32"
                .into())
        }
    }
}

fn seconds(value: f64, flag: &str) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(value).map_err(|error| format!("{flag}: {error}").into())
}

/// Reads the first line of the file.
fn secret(path: &Path, flag: &str) -> Result<String, Failure> {
    let wrong = |what: String| format!("{flag} {}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let line = text.lines().next().unwrap_or_default().trim();
    if line.is_empty() {
        Err(wrong("no secret in its first line".into()).into())
    } else {
        Ok(line.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_named_as_on_the_hub_gets_the_command_that_downloads_it() {
        let said = download(Path::new("Qwen/Qwen2.5-0.5B-Instruct")).expect("a hint");
        assert!(
            said.contains("`hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct`"),
            "{said}"
        );
        for folder in ["/models/mine", "./models/mine", "../mine", "models", "~/mine", "a/b/c", "a/b c", "a/"]
        {
            assert_eq!(download(Path::new(folder)), None, "{folder}");
        }
    }
}
