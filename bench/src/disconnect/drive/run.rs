//! A run from its beginning to its end: what is started, watched, played in order, compared and put back.

use std::io::BufReader;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::BenchError;
use crate::disconnect::drive::clients::{Shape, Stage};
use crate::disconnect::drive::deployment::{Deployment, deployment};
use crate::disconnect::drive::ghosts::{Ghosts, Vanishing};
use crate::disconnect::drive::local::Part;
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::drive::rate::Rate;
use crate::disconnect::drive::segments;
use crate::disconnect::drive::stall::Stall;
use crate::disconnect::plan::options::{self, DisconnectOptions};
use crate::disconnect::plan::phase::{Kind, Phase};
use crate::disconnect::record::raw::{self, Record, Run};
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::watch::{self, Watch};
use crate::load::speaker::first_model;
use crate::load::{Client, Connections, Endpoint, Limits, Target};

/// A call takes no longer, but for the time in which its client stalls.
const CALL_WITHIN: Duration = Duration::from_secs(60);
/// An answer is not read beyond this.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Answers that are compared, at most.
const COMPARED: usize = 400;

/// Plays a run to its end, or until it is broken off, and writes its raw events.
pub(crate) async fn play(options: &DisconnectOptions) -> Result<(), BenchError> {
    let progress = Progress::new(options.json);
    // Before anything is started: what is wrong with a file should not take a minute to be said.
    let (beside, commands) = (options.compared_with()?, options.commands()?);
    let mut vanishing = Vanishing::begin(&options.cancel_by).await;
    // Before anything is started, and below once it is known whether the deployment can be reached from there.
    vanishing.kinds(&options.cancel_by)?;
    let listen = vanishing.near().unwrap_or(Ipv4Addr::LOCALHOST);
    let deployment = deployment(options, listen, &progress).await?;
    let target = Target::parse(&deployment.url)?.with_key_file(options.api_key_file.as_deref())?;
    let total = CALL_WITHIN + Duration::from_millis(options.stall_ms);
    let limits = Limits { total, answer_bytes: ANSWER_BYTES_MAX, ..Limits::default() };
    let client = Client::open(target, limits, Connections::Fresh).await?;
    let client = vanishing.client(client).await;
    let kinds = vanishing.kinds(&options.cancel_by)?;
    if let Some(why) = vanishing.why_not() {
        progress.say(&format!("no client vanishes: {why}"));
    }
    let model = match &options.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let recorder = Arc::new(Recorder::create(&options.out.join("events.jsonl"))?);
    let prefix = format!("baton-{:08x}-", crate::load::Moment::now().us() as u32);
    recorder.put(&Record::Run(described(options, &deployment, &model)));
    if let Some(why) = vanishing.why_not() {
        recorder.put(&Record::NotPlayed { kind: Kind::Vanish, why: why.to_owned() });
    }
    if let Some(compared) = beside {
        recorder.put(&Record::ComparedWith { compared });
    }
    let every = Duration::from_millis(40);
    let terms = watch::Terms { prefix: prefix.clone(), every, metrics_only: options.metrics_only };
    let watch = Watch::begin(deployment.engines, &terms, &recorder).await?;
    let stage = Arc::new(Stage {
        client,
        shape: Shape {
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
        aims: std::sync::Mutex::default(),
        next: AtomicU64::new(0),
        stall: std::sync::OnceLock::new(),
        ghosts: Ghosts::new(options.vanish_noticed_ms, options.stranded_after_ms),
        open: std::sync::Mutex::default(),
        cut: CancellationToken::new(),
    });
    let unmended = std::sync::Mutex::new(None);
    let deployed = std::sync::Mutex::new(deployment.own);
    let own = || deployed.lock().unwrap_or_else(PoisonError::into_inner);
    let play = async {
        let mut acts = segments::Acts {
            stage: &stage,
            watch: &watch,
            terms: options::Terms { kinds, ..options.terms() },
            progress: &progress,
            unmended: &unmended,
        };
        let able = acts.calibrate().await?;
        let stall = stage.stall.get().copied();
        let stall = stall.unwrap_or_else(|| Stall::usual(options.max_tokens, stage.shape.stall));
        let rate = Rate::of(able, options.rate, stall);
        recorder.put(&Record::Load(rate));
        acts.terms.rate = rate.rate_per_s;
        acts.rounds(options.cancel_share).await;
        for &phase in &options.phases {
            if !stage.exact && matches!(phase, Phase::Reply | Phase::Gap | Phase::Fetch) {
                // Nobody tells when that is.
                continue;
            }
            // Engines that do not log their replies have no such phase.
            let is_seen =
                || stage.aims.lock().unwrap_or_else(PoisonError::into_inner).median(phase).is_some();
            if phase == Phase::Reply && !is_seen() {
                continue;
            }
            acts.phase(phase).await;
        }
        acts.refused().await;
        for (name, (breaking, mending)) in &commands {
            acts.broken(name, breaking, mending.as_deref()).await?;
        }
        for part in [Part::Decode, Part::Prefill, Part::Router] {
            if options.no_faults {
                break;
            }
            let taken = own().take();
            if let Some(taken) = taken {
                let again = acts.killed(taken, part).await?;
                *own() = Some(again);
            }
        }
        watch.home(stage.ghosts.patience(Duration::from_secs_f64(options.final_wait))).await;
        recorder.finish()?;
        let file = std::fs::File::open(options.out.join("events.jsonl"))?;
        let records = raw::read(&mut BufReader::new(file))?;
        acts.verify(&compared(&records), Duration::from_secs_f64(options.verify_seconds)).await;
        watch.read_counters().await;
        Ok::<_, BenchError>(())
    };
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let at_us = || crate::load::Moment::now().us();
    let result = tokio::select! {
        played = play => played,
        () = async { tokio::select! { _ = tokio::signal::ctrl_c() => {}, _ = terminate.recv() => {} } } => {
            recorder.put(&Record::Interrupted { at_us: at_us() });
            progress.say("interrupted: the report is of what there is");
            Ok(())
        }
    };
    // Whatever still runs of it ends here, and the engines get their time to notice.
    stage.cut.cancel();
    if let Err(error) = &result {
        recorder.put(&Record::Failed { at_us: at_us(), why: error.to_string() });
    }
    watch.home(Duration::from_secs_f64(options.quiesce)).await;
    let mend = unmended.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(command) = mend {
        progress.say("mending what was broken");
        let shell = tokio::process::Command::new("sh")
            .args(["-c", &command])
            .stdout(std::process::Stdio::null())
            .status();
        let mended = shell.await;
        if !mended.as_ref().is_ok_and(std::process::ExitStatus::success) {
            crate::note(format_args!("baton: `{command}`: {mended:?}"));
        }
    }
    drop(watch);
    recorder.finish()?;
    // Its processes take their time to end.
    let own = own().take();
    tokio::task::spawn_blocking(move || drop(own)).await?;
    result
}

/// Answers that are worth comparing: of clients that others harmed, or may have harmed, evenly over the run.
fn compared(records: &[Record]) -> Vec<&raw::CallRecord> {
    let calls: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Call(call) if !call.text.is_empty() && call.act != "refused" => Some(call),
            _ => None,
        })
        .collect();
    // Some of every part of the run first: the time for all may not be there.
    let (mut chosen, mut step) = (Vec::new(), calls.len().next_power_of_two());
    while step > 0 && chosen.len() < COMPARED {
        let fresh = |at: &usize| !at.is_multiple_of(step * 2) || step == calls.len().next_power_of_two();
        chosen.extend((0..calls.len()).step_by(step).filter(fresh).map(|at| calls[at]));
        step /= 2;
    }
    chosen.truncate(COMPARED);
    chosen
}

fn described(options: &DisconnectOptions, deployment: &Deployment, model: &str) -> Run {
    let described = if options.url.is_some() {
        "a running deployment"
    } else {
        "started for this run: router, prefill engine, decode engine"
    };
    Run {
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
        options: options.described(deployment.engines.len()),
    }
}
