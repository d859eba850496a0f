//! A run from start to end: it starts and watches the deployment, runs the segments, and ends the processes.

use std::io::BufReader;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::BenchError;
use crate::disconnect::drive::deployment::{Deployment, deployment};
use crate::disconnect::drive::driver::{CallDriver, RequestShape};
use crate::disconnect::drive::local::DeploymentPart;
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::drive::segments;
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::drive::vanished_clients::{VanishSupport, VanishedClients};
use crate::disconnect::plan::options::{self, DisconnectOptions};
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::rate::CalibratedRate;
use crate::disconnect::record::raw::{self, Record, RunRecord};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::watch::{self, EngineWatch};
use crate::load::endpoint_profile::first_model;
use crate::load::{Client, Connections, Endpoint, Limits, Target};

/// Maximum duration of a call, without the time of a stall.
const CALL_WITHIN: Duration = Duration::from_secs(60);
/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum number of compared responses.
const COMPARED: usize = 400;

/// Runs all segments, or until the run is stopped, and writes the raw events.
pub(crate) async fn run(options: &DisconnectOptions) -> Result<(), BenchError> {
    let progress = Progress::new(options.json);
    // Before anything starts, so that an error in a file shows at once.
    let (compared_with, commands) = (options.compared_with()?, options.commands()?);
    let mut vanish_support = VanishSupport::begin(&options.cancel_by).await;
    // Checked before anything starts, and again below when the deployment is known to be reachable or not.
    vanish_support.kinds(&options.cancel_by)?;
    let listen = vanish_support.near().unwrap_or(Ipv4Addr::LOCALHOST);
    let deployment = deployment(options, listen, &progress).await?;
    let target = Target::parse(&deployment.url)?.with_key_file(options.api_key_file.as_deref())?;
    let total = CALL_WITHIN + Duration::from_millis(options.stall_ms);
    let limits = Limits { total, answer_bytes: ANSWER_BYTES_MAX, ..Limits::default() };
    let client = Client::open(target, limits, Connections::Fresh).await?;
    let client = vanish_support.client(client).await;
    let kinds = vanish_support.kinds(&options.cancel_by)?;
    if let Some(why) = vanish_support.unavailable_reason() {
        progress.print_status(&format!("no client vanishes: {why}"));
    }
    let model = match &options.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let recorder = Arc::new(Recorder::create(&options.out.join("events.jsonl"))?);
    let prefix = format!("baton-{:08x}-", crate::load::Moment::now().us() as u32);
    recorder.put(&Record::Run(describe_run(options, &deployment, &model)));
    if let Some(why) = vanish_support.unavailable_reason() {
        recorder.put(&Record::NotPlayed { kind: CancelKind::Vanish, why: why.to_owned() });
    }
    if let Some(compared) = compared_with {
        recorder.put(&Record::ComparedWith { compared });
    }
    let every = Duration::from_millis(40);
    let terms = watch::WatchOptions { prefix: prefix.clone(), every, metrics_only: options.metrics_only };
    let watch = EngineWatch::begin(deployment.engines, &terms, &recorder).await?;
    let driver = Arc::new(CallDriver {
        client,
        shape: RequestShape {
            endpoint: if options.chat { Endpoint::Chat } else { Endpoint::Completions },
            model,
            words: options.prompt_words,
            max_tokens: options.max_tokens,
            stall: Duration::from_millis(options.stall_ms),
        },
        feed: Arc::clone(&watch.feed),
        exact: watch.exact(),
        recorder: Arc::clone(&recorder),
        prefix,
        seed: options.seed,
        phase_times: std::sync::Mutex::default(),
        next: AtomicU64::new(0),
        stall: std::sync::OnceLock::new(),
        vanished: VanishedClients::new(options.vanish_noticed_ms, options.stranded_after_ms),
        open: std::sync::Mutex::default(),
        cut: CancellationToken::new(),
    });
    let unrecovered = std::sync::Mutex::new(None);
    let deployed = std::sync::Mutex::new(deployment.local);
    let local = || deployed.lock().unwrap_or_else(PoisonError::into_inner);
    let segments_run = async {
        let mut runner = segments::SegmentRunner {
            driver: &driver,
            watch: &watch,
            terms: options::SegmentOptions { kinds, ..options.segment_options() },
            progress: &progress,
            unrecovered: &unrecovered,
        };
        let able_per_s = runner.calibrate().await?;
        let stall = driver.stall.get().copied();
        let stall = stall.unwrap_or_else(|| Stall::usual(options.max_tokens, driver.shape.stall));
        let rate = CalibratedRate::of(able_per_s, options.rate, stall);
        recorder.put(&Record::Load(rate));
        runner.terms.rate = rate.rate_per_s;
        runner.rounds(options.cancel_share).await;
        for &phase in &options.phases {
            if !driver.exact && matches!(phase, Phase::Reply | Phase::Gap | Phase::Fetch) {
                // Without event logs these phases are unknown.
                continue;
            }
            // Engines that do not log their replies have no such phase.
            let is_seen =
                || driver.phase_times.lock().unwrap_or_else(PoisonError::into_inner).median(phase).is_some();
            if phase == Phase::Reply && !is_seen() {
                continue;
            }
            runner.phase(phase).await;
        }
        runner.refused().await;
        for (name, (fault_command, recover_command)) in &commands {
            runner.inject_fault(name, fault_command, recover_command.as_deref()).await?;
        }
        for part in [DeploymentPart::Decode, DeploymentPart::Prefill, DeploymentPart::Router] {
            if options.no_faults {
                break;
            }
            let running = local().take();
            if let Some(running) = running {
                let restarted = runner.kill_part(running, part).await?;
                *local() = Some(restarted);
            }
        }
        watch
            .wait_until_all_free(driver.vanished.settle_timeout(Duration::from_secs_f64(options.final_wait)))
            .await;
        recorder.finish()?;
        let file = std::fs::File::open(options.out.join("events.jsonl"))?;
        let records = raw::read(&mut BufReader::new(file))?;
        runner.verify(&calls_to_verify(&records), Duration::from_secs_f64(options.verify_seconds)).await;
        watch.read_counters().await;
        Ok::<_, BenchError>(())
    };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let at_us = || crate::load::Moment::now().us();
    let result = tokio::select! {
        result = segments_run => result,
        () = async { tokio::select! { _ = tokio::signal::ctrl_c() => {}, _ = terminate.recv() => {} } } => {
            recorder.put(&Record::Interrupted { at_us: at_us() });
            progress.print_status("interrupted: the report is of what there is");
            Ok(())
        }
    };
    // Open calls end here, and the engines get time to notice.
    driver.cut.cancel();
    if let Err(error) = &result {
        recorder.put(&Record::Failed { at_us: at_us(), why: error.to_string() });
    }
    watch.wait_until_all_free(Duration::from_secs_f64(options.quiesce)).await;
    let command = unrecovered.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(command) = command {
        progress.print_status("running the recovery command");
        let shell = tokio::process::Command::new("sh")
            .args(["-c", &command])
            .stdout(std::process::Stdio::null())
            .status();
        let recovered = shell.await;
        if !recovered.as_ref().is_ok_and(std::process::ExitStatus::success) {
            crate::note(format_args!("baton: `{command}`: {recovered:?}"));
        }
    }
    drop(watch);
    recorder.finish()?;
    // The processes need time to end.
    let local = local().take();
    tokio::task::spawn_blocking(move || drop(local)).await?;
    result
}

/// Calls whose responses are compared: with text, spread evenly over the run.
fn calls_to_verify(records: &[Record]) -> Vec<&raw::CallRecord> {
    let calls: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Call(call) if !call.text.is_empty() && call.segment != "refused" => Some(call),
            _ => None,
        })
        .collect();
    // Some calls of every segment first: the time may not suffice for all.
    let (mut chosen, mut step) = (Vec::new(), calls.len().next_power_of_two());
    while step > 0 && chosen.len() < COMPARED {
        let fresh = |at: &usize| !at.is_multiple_of(step * 2) || step == calls.len().next_power_of_two();
        chosen.extend((0..calls.len()).step_by(step).filter(fresh).map(|at| calls[at]));
        step /= 2;
    }
    chosen.truncate(COMPARED);
    chosen
}

fn describe_run(options: &DisconnectOptions, deployment: &Deployment, model: &str) -> RunRecord {
    let described = if options.url.is_some() {
        "a running deployment"
    } else {
        "started for this run: router, prefill engine, decode engine"
    };
    RunRecord {
        version: env!("CARGO_PKG_VERSION").into(),
        commit: crate::common::machine::commit(),
        command: crate::common::machine::command(),
        nice: crate::common::machine::nice(),
        date: crate::common::machine::today(),
        machine: crate::common::machine::described(),
        target: described.into(),
        model: model.into(),
        seed: options.seed,
        stranded_after_us: options.stranded_after_ms * 1_000,
        options: options.describe(deployment.engines.len()),
    }
}
