//! A run from start to end: it starts and watches the deployment, runs the segments, and ends the processes.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::BenchError;
use crate::disconnect::drive::deployment::{Deployment, deployment};
use crate::disconnect::drive::driver::{CallDriver, RequestShape};
use crate::disconnect::drive::local::{DeploymentPart, LocalDeployment};
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::drive::segments::SegmentRunner;
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::drive::vanished_clients::{VanishSupport, VanishedClients};
use crate::disconnect::plan::options::{DisconnectOptions, FaultCommands, SegmentOptions};
use crate::disconnect::plan::phase::{CancelKind, Phase};
use crate::disconnect::record::rate::CalibratedRate;
use crate::disconnect::record::raw::{self, Record, RunRecord};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::watch::{EngineWatch, WatchOptions};
use crate::load::endpoint_profile::first_model;
use crate::load::{Client, Connections, Endpoint, Limits, Moment, Target};

/// Maximum duration of a call, without the time of a stall.
const CALL_WITHIN: Duration = Duration::from_secs(60);
/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum number of compared responses.
const COMPARED: usize = 400;
/// The file of the raw events.
const EVENTS: &str = "events.jsonl";

/// A run whose deployment is watched and whose clients are ready.
struct LiveRun<'a> {
    options: &'a DisconnectOptions,
    progress: Progress,
    /// The kinds of cancels that are possible.
    kinds: Vec<CancelKind>,
    faults: BTreeMap<String, FaultCommands>,
    /// The recovery command that has to run if the run is stopped now.
    unrecovered: Mutex<Option<String>>,
    /// The processes that were started for this run.
    local: Mutex<Option<LocalDeployment>>,
    driver: Arc<CallDriver>,
    watch: EngineWatch,
}

/// Runs all segments, or until the run is stopped, and writes the raw events.
pub(crate) async fn run(options: &DisconnectOptions) -> Result<(), BenchError> {
    let live = LiveRun::begin(options).await?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let result = tokio::select! {
        result = live.play() => result,
        () = async { tokio::select! { _ = tokio::signal::ctrl_c() => {}, _ = terminate.recv() => {} } } => {
            live.driver.recorder.put(&Record::Interrupted { at_us: Moment::now().us() });
            live.progress.print_status("interrupted: the report is of what there is");
            Ok(())
        }
    };
    live.end(&result).await?;
    result
}

impl<'a> LiveRun<'a> {
    /// Starts the deployment, or connects to it, and begins to watch its engines.
    async fn begin(options: &'a DisconnectOptions) -> Result<Self, BenchError> {
        let progress = Progress::new(options.json);
        // Before anything starts, so that an error in a file shows at once.
        let (compared_with, faults) = (options.compared_with()?, options.faults()?);
        let mut vanish_support = VanishSupport::begin(&options.cancel_by).await;
        // Checked before anything starts, and again below when the deployment is known to be reachable or not.
        vanish_support.kinds(&options.cancel_by)?;
        let listen = vanish_support.near().unwrap_or(Ipv4Addr::LOCALHOST);
        let deployment = deployment(options, listen, &progress).await?;
        let client = vanish_support.client(open_client(options, &deployment.url).await?).await;
        let kinds = vanish_support.kinds(&options.cancel_by)?;
        if let Some(why) = vanish_support.unavailable_reason() {
            progress.print_status(&format!("no client vanishes: {why}"));
        }
        let model = match &options.model {
            Some(model) => model.clone(),
            None => first_model(&client).await?,
        };
        let recorder = Arc::new(Recorder::create(&options.out.join(EVENTS))?);
        recorder.put(&Record::Run(describe_run(options, &deployment, &model)));
        if let Some(why) = vanish_support.unavailable_reason() {
            recorder.put(&Record::NotPlayed { kind: CancelKind::Vanish, why: why.to_owned() });
        }
        if let Some(compared) = compared_with {
            recorder.put(&Record::ComparedWith { compared });
        }
        let prefix = format!("baton-{:08x}-", Moment::now().us() as u32);
        let every = Duration::from_millis(40);
        let terms = WatchOptions { prefix: prefix.clone(), every, metrics_only: options.metrics_only };
        let watch = EngineWatch::begin(deployment.engines, &terms, &recorder).await?;
        let driver = Arc::new(CallDriver {
            client,
            shape: request_shape(options, model),
            feed: Arc::clone(&watch.feed),
            exact: watch.exact(),
            recorder,
            prefix,
            seed: options.seed,
            phase_times: Mutex::default(),
            next: AtomicU64::new(0),
            stall: OnceLock::new(),
            vanished: VanishedClients::new(options.vanish_noticed_ms, options.stranded_after_ms),
            open: Mutex::default(),
            cut: CancellationToken::new(),
        });
        let (unrecovered, local) = (Mutex::default(), Mutex::new(deployment.local));
        Ok(Self { options, progress, kinds, faults, unrecovered, local, driver, watch })
    }

    /// Runs all segments, then compares responses.
    async fn play(&self) -> Result<(), BenchError> {
        let mut runner = SegmentRunner {
            driver: &self.driver,
            watch: &self.watch,
            terms: SegmentOptions { kinds: self.kinds.clone(), ..self.options.segment_options() },
            progress: &self.progress,
            unrecovered: &self.unrecovered,
        };
        let rate = self.rate(runner.calibrate().await?);
        self.driver.recorder.put(&Record::Load(rate));
        runner.terms.rate = rate.rate_per_s;
        runner.rounds(self.options.cancel_share).await;
        for &phase in self.options.phases.iter().filter(|phase| self.is_visible(**phase)) {
            runner.phase(phase).await;
        }
        runner.refused().await;
        for (name, commands) in &self.faults {
            runner.inject_fault(name, commands).await?;
        }
        if !self.options.no_faults {
            self.kill_parts(&runner).await?;
        }
        let final_wait = Duration::from_secs_f64(self.options.final_wait);
        self.watch.wait_until_all_free(self.driver.vanished.settle_timeout(final_wait)).await;
        self.driver.recorder.finish()?;
        let file = std::fs::File::open(self.options.out.join(EVENTS))?;
        let records = raw::read(&mut BufReader::new(file))?;
        let within = Duration::from_secs_f64(self.options.verify_seconds);
        runner.verify(&calls_to_verify(&records), within).await;
        self.watch.read_counters().await;
        Ok(())
    }

    /// The rate of calm, storm and faults. `able_per_s`: the result of calibration.
    fn rate(&self, able_per_s: f64) -> CalibratedRate {
        let usual = || Stall::usual(self.options.max_tokens, self.driver.shape.stall);
        let stall = self.driver.stall.get().copied().unwrap_or_else(usual);
        CalibratedRate::of(able_per_s, self.options.rate, stall)
    }

    /// Whether requests can be cancelled in this phase.
    fn is_visible(&self, phase: Phase) -> bool {
        let is_seen = || {
            let times = self.driver.phase_times.lock().unwrap_or_else(PoisonError::into_inner);
            times.median(phase).is_some()
        };
        match phase {
            Phase::Queued | Phase::Prefill | Phase::FirstToken | Phase::Stream | Phase::Unary => true,
            // Without event logs these phases are unknown. A reply is a phase only of a prefill for another engine.
            Phase::Reply => self.driver.exact && !self.options.start.sends_both_legs() && is_seen(),
            // A prefill engine that writes does so at once: there is no gap.
            Phase::Gap => self.driver.exact && !self.options.start.sends_both_legs(),
            Phase::Fetch => self.driver.exact,
        }
    }

    /// Kills and restarts each process that was started for this run.
    async fn kill_parts(&self, runner: &SegmentRunner<'_>) -> Result<(), BenchError> {
        for part in DeploymentPart::ALL {
            let running = self.local().take_if(|local| local.can_kill(part));
            if let Some(running) = running {
                let restarted = runner.kill_part(running, part).await?;
                *self.local() = Some(restarted);
            }
        }
        Ok(())
    }

    fn local(&self) -> MutexGuard<'_, Option<LocalDeployment>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends calls, faults, the watch and processes.
    async fn end(self, result: &Result<(), BenchError>) -> Result<(), BenchError> {
        // Open calls end here, and the engines get time to notice.
        self.driver.cut.cancel();
        if let Err(error) = result {
            let (at_us, why) = (Moment::now().us(), error.to_string());
            self.driver.recorder.put(&Record::Failed { at_us, why });
        }
        self.watch.wait_until_all_free(Duration::from_secs_f64(self.options.quiesce)).await;
        if let Some(command) = self.unrecovered.into_inner().unwrap_or_else(PoisonError::into_inner) {
            self.progress.print_status("running the recovery command");
            recover(&command).await;
        }
        drop(self.watch);
        self.driver.recorder.finish()?;
        // The processes need time to end.
        let local = self.local.into_inner().unwrap_or_else(PoisonError::into_inner);
        tokio::task::spawn_blocking(move || drop(local)).await?;
        Ok(())
    }
}

async fn open_client(options: &DisconnectOptions, url: &str) -> Result<Client, BenchError> {
    let target = Target::parse(url)?.with_key_file(options.api_key_file.as_deref())?;
    let total = CALL_WITHIN + Duration::from_millis(options.stall_ms);
    let limits = Limits { total, answer_bytes: ANSWER_BYTES_MAX, ..Limits::default() };
    Ok(Client::open(target, limits, Connections::Fresh).await?)
}

fn request_shape(options: &DisconnectOptions, model: String) -> RequestShape {
    RequestShape {
        endpoint: if options.chat { Endpoint::Chat } else { Endpoint::Completions },
        model,
        words: options.prompt_words,
        max_tokens: options.max_tokens,
        stall: Duration::from_millis(options.stall_ms),
    }
}

/// Runs the recovery command of a run that was stopped.
async fn recover(command: &str) {
    let mut shell = tokio::process::Command::new("sh");
    let recovered = shell.args(["-c", command]).stdout(std::process::Stdio::null()).status().await;
    if !recovered.as_ref().is_ok_and(std::process::ExitStatus::success) {
        crate::note(format_args!("baton: `{command}`: {recovered:?}"));
    }
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
    let described = match &options.url {
        Some(_) => "a running deployment".to_owned(),
        None => format!("started for this run: router, {}", options.start.describe()),
    };
    RunRecord {
        version: env!("CARGO_PKG_VERSION").into(),
        commit: crate::common::machine::commit(),
        command: crate::common::machine::command(),
        nice: crate::common::machine::nice(),
        date: crate::common::machine::today(),
        machine: crate::common::machine::described(),
        target: described,
        model: model.into(),
        seed: options.seed,
        stranded_after_us: options.stranded_after_ms * 1_000,
        options: options.describe(deployment.engines.len()),
    }
}
