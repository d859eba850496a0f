//! `baton bench disconnect`: what clients that leave cost a deployment, measured from outside, with the engines' own word
//! on what became of every request.
//!
//! ```text
//!  clients (load) ──▶ router ──▶ engines          a run, part after part (acts)
//!     │ every call        ▲          │ event logs, books (watch)
//!     ▼                   │ kill     ▼
//!  events.jsonl ◀── recorder ◀───────┘
//!     └─▶ analyse (pure) ─▶ summary.json, report.html
//! ```
//!
//! The numbers are computed from `events.jsonl` and nothing else: `baton bench report DIR` computes them again.

mod acts;
pub(crate) mod aim;
mod analyse;
mod bystanders;
mod faults;
mod findings;
mod flight;
mod own;
pub(crate) mod phase;
mod raw;
pub(crate) mod recorder;
mod report;
mod series;
mod stage;
mod stall;
mod summary;
#[cfg(test)]
mod tests;
pub(crate) mod timeline;
mod untold;
pub(crate) mod watch;

use std::collections::BTreeMap;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::BenchError;
use crate::load::speaker::first_model;
use crate::load::{Client, Connections, Endpoint, Limits, Target};
use crate::web::Origin;
use own::{Own, Part};
use phase::{Kind, Phase};
use raw::{Record, Run};
use recorder::Recorder;
use stage::{Shape, Stage};
use summary::Summary;
use watch::Watch;

/// A call takes no longer.
const CALL_WITHIN: Duration = Duration::from_secs(60);
/// An answer is not read beyond this.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Tells anything that is looked at besides.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of what the deployment can do, so much is asked for by default.
const LOAD: f64 = 0.5;
/// Requests a second, at most, unless somebody says otherwise: a client on the same machine must not be what is measured.
const RATE_MAX: f64 = 150.0;
/// A round is no shorter.
const ROUND_SECONDS_MIN: f64 = 0.5;
/// Answers that are compared, at most.
const COMPARED: usize = 400;

/// Options of `baton bench disconnect`.
#[derive(Debug, clap::Args)]
pub struct DisconnectOptions {
    /// The deployment's OpenAI endpoint; without it a router, a prefill and a decode engine are started here
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The router's admin listener, which knows the engines
    #[arg(long, value_name = "URL", requires = "url")]
    admin: Option<String>,
    /// An engine to watch; again for each. ROLE is `prefill`, `decode` or `both`
    #[arg(long = "engine", value_name = "[ROLE=]URL", requires = "url")]
    engines: Vec<String>,
    /// Model that is asked for; the first that the endpoint lists by default
    #[arg(long)]
    model: Option<String>,
    /// Chat completions instead of completions
    #[arg(long)]
    chat: bool,
    /// File whose first line is the API key that clients show
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File whose first line is the token of the admin listener
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// File whose first line is the secret that engines want to see
    #[arg(long, value_name = "FILE")]
    cluster_secret_file: Option<PathBuf>,
    /// Where events.jsonl, summary.json and report.html go
    #[arg(long, value_name = "DIR", default_value = "baton-disconnect")]
    out: PathBuf,
    /// Share of the requests that leave in the storm
    #[arg(long, default_value_t = 0.5, value_parser = share)]
    share: f64,
    /// Requests a second in calm and storm; half of what the deployment can do by default
    #[arg(long)]
    rate: Option<f64>,
    /// Seconds of calm, and of storm, over all rounds
    #[arg(long, default_value_t = 18.0)]
    seconds: f64,
    /// Rounds of calm and storm, which share those seconds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Share of requests in calm and storm whose answer comes in one piece
    #[arg(long, default_value_t = 0.2, value_parser = share)]
    unary: f64,
    /// Phases in which clients leave
    #[arg(long, value_delimiter = ',', default_values_t = Phase::ALL, value_enum)]
    phases: Vec<Phase>,
    /// How clients leave
    #[arg(long, value_delimiter = ',', default_values_t = Kind::ALL, value_enum)]
    kinds: Vec<Kind>,
    /// Clients that leave in each phase
    #[arg(long, default_value_t = 60, value_parser = victims)]
    victims: usize,
    /// Seconds for each phase, at most
    #[arg(long, default_value_t = 10.0)]
    phase_seconds: f64,
    /// Words of a prompt
    #[arg(long, default_value_t = 120)]
    prompt_words: usize,
    /// Tokens of an answer
    #[arg(long, default_value_t = 48)]
    max_tokens: u32,
    /// Milliseconds after which blocks of a client that has left count as stranded
    #[arg(long, default_value_t = 1_000)]
    stranded_after_ms: u64,
    /// Seconds that engines get to come to rest after each part of the run, at most
    #[arg(long, default_value_t = 5.0)]
    settle: f64,
    /// Seconds that engines get at the end, at most: as long as a lease, to see what becomes of it
    #[arg(long, default_value_t = 35.0)]
    patience: f64,
    /// Seconds for asking prompts again to compare their answers, at most
    #[arg(long, default_value_t = 20.0)]
    verify_seconds: f64,
    /// Of the engines, look at metrics only, as if they had no event log
    #[arg(long)]
    metrics_only: bool,
    /// What to run to break a part of the deployment under load, for each NAME; by `sh -c`
    #[arg(long = "break", value_name = "NAME=COMMAND", requires = "url")]
    breaks: Vec<String>,
    /// What to run to mend it again, a moment later
    #[arg(long = "mend", value_name = "NAME=COMMAND", requires = "url")]
    mends: Vec<String>,
    /// What `baton bench compare --json` has written: other front doors, to be shown beside this deployment
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,
    /// Kill and restart nothing (only a deployment that was started here is killed at all)
    #[arg(long)]
    no_faults: bool,
    /// Options of engines that are started here, after `--`
    #[arg(last = true, value_name = "ENGINE OPTIONS")]
    engine_options: Vec<String>,
    /// For the arrivals, the prompts and who leaves when
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Fail when anything was found
    #[arg(long)]
    fail_on_findings: bool,
}

/// Options of `baton bench report`.
#[derive(Debug, clap::Args)]
pub struct ReportOptions {
    /// A folder that `baton bench disconnect` has written; its events may be packed (`events.jsonl.gz`)
    folder: PathBuf,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1".into()),
    }
}

fn victims(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(victims) if (1..=100_000).contains(&victims) => Ok(victims),
        _ => Err("a number of clients, from 1 to 100,000".into()),
    }
}

/// How the parts of a run are played.
pub(crate) struct Terms {
    /// A calm, or a storm, of one round.
    pub(crate) act: Duration,
    pub(crate) rounds: u32,
    pub(crate) phase: Duration,
    pub(crate) fault: Duration,
    /// Share of the requests that leave while something is broken: half of the storm's, for who stays is what it is judged by.
    pub(crate) fault_share: f64,
    pub(crate) settle: Duration,
    pub(crate) rate: f64,
    pub(crate) unary: f64,
    pub(crate) victims: usize,
    pub(crate) kinds: Vec<Kind>,
}

impl DisconnectOptions {
    fn check(&self) -> Result<(), BenchError> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 && value < 1e6 {
                Ok(())
            } else {
                Err(format!("--{name} must be a positive number"))
            }
        };
        positive("seconds", self.seconds)?;
        positive("phase-seconds", self.phase_seconds)?;
        positive("settle", self.settle)?;
        positive("patience", self.patience)?;
        positive("verify-seconds", self.verify_seconds)?;
        positive("rate", self.rate.unwrap_or(1.0))?;
        if self.seconds / f64::from(self.rounds) < ROUND_SECONDS_MIN {
            return Err(format!(
                "--seconds must be at least {ROUND_SECONDS_MIN} for each of the {} --rounds",
                self.rounds
            )
            .into());
        }
        if self.prompt_words == 0 || self.prompt_words > 1_000_000 {
            return Err("--prompt-words must be from 1 to 1,000,000".into());
        }
        if self.max_tokens < 2 {
            return Err("--max-tokens must be at least 2".into());
        }
        if self.url.is_none() && self.admin.is_none() && self.engines.is_empty() {
            return Ok(());
        }
        if self.admin.is_none() && self.engines.is_empty() {
            return Err(
                "--url needs --admin or --engine: what becomes of blocks is seen at the engines".into()
            );
        }
        if !self.engine_options.is_empty() {
            return Err("engine options are for engines that are started here, without --url".into());
        }
        Ok(())
    }

    fn beside(&self) -> Result<Option<serde_json::Value>, BenchError> {
        let Some(file) = &self.beside else { return Ok(None) };
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = std::fs::read(file).map_err(|error| wrong(&error))?;
        let compared: serde_json::Value = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
        if !compared["targets"].is_array() {
            return Err(wrong(&"not what `baton bench compare --json` writes").into());
        }
        Ok(Some(compared))
    }

    /// How to break and to mend parts of a running deployment, by name.
    fn commands(&self) -> Result<BTreeMap<String, (String, Option<String>)>, BenchError> {
        let named = |option: &str, text: &str| match text.split_once('=') {
            Some((name, command)) if !name.is_empty() && !command.is_empty() => {
                Ok((name.to_owned(), command.to_owned()))
            }
            _ => Err(format!("--{option} must be NAME=COMMAND, not `{text}`")),
        };
        let mut commands = BTreeMap::new();
        for text in &self.breaks {
            let (name, command) = named("break", text)?;
            commands.insert(name, (command, None));
        }
        for text in &self.mends {
            let (name, command) = named("mend", text)?;
            match commands.get_mut(&name) {
                Some((_, mend)) => *mend = Some(command),
                None => return Err(format!("--mend {name}=… mends what no --break breaks").into()),
            }
        }
        Ok(commands)
    }

    fn terms(&self) -> Terms {
        let seconds = Duration::from_secs_f64;
        Terms {
            act: seconds(self.seconds / f64::from(self.rounds)),
            rounds: self.rounds,
            phase: seconds(self.phase_seconds),
            fault: seconds((self.seconds / 2.0).max(4.0)),
            fault_share: self.share / 2.0,
            settle: seconds(self.settle),
            // Calibration finds a better one.
            rate: self.rate.unwrap_or(1.0),
            unary: self.unary,
            victims: self.victims,
            kinds: self.kinds.clone(),
        }
    }
}

/// Runs the benchmark and writes its folder.
///
/// # Errors
/// When the deployment cannot be used or the folder not be written; with `--fail-on-findings` also when anything was found.
pub fn run(options: &DisconnectOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    options.check()?;
    std::fs::create_dir_all(&options.out).map_err(|error| format!("{}: {error}", options.out.display()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let played = runtime.block_on(play(options));
    let summary = match (written(&options.out), &played) {
        (Ok(summary), _) => summary,
        (Err(error), Ok(())) => return Err(error),
        (Err(_), Err(_)) => return played,
    };
    if played.is_err() && summary.calm.is_none() && summary.left == 0 {
        // Nothing was learnt before it went wrong: a report would say that nothing was found.
        for file in ["summary.json", "report.html"] {
            std::fs::remove_file(options.out.join(file))?;
        }
        return played;
    }
    told(&summary, &options.out, options.json, out)?;
    played?;
    if options.fail_on_findings && summary.interrupted {
        return Err("the run was broken off".into());
    }
    if options.fail_on_findings && !summary.findings.is_empty() {
        return Err(format!("{} findings", summary.findings.len()).into());
    }
    Ok(())
}

/// Computes the summary and the report of a folder again.
///
/// # Errors
/// When its raw events cannot be read, or the report not be written.
pub fn report(options: &ReportOptions, out: &mut dyn Write) -> Result<(), BenchError> {
    let summary = written(&options.folder)?;
    told(&summary, &options.folder, options.json, out)
}

/// From the raw events of a folder to its summary and its report.
fn written(folder: &Path) -> Result<Summary, BenchError> {
    let (plain, packed) = (folder.join("events.jsonl"), folder.join("events.jsonl.gz"));
    let is_packed = !plain.exists() && packed.exists();
    let raw = if is_packed { packed } else { plain };
    let name = |error: &dyn std::fmt::Display| format!("{}: {error}", raw.display());
    let file = std::fs::File::open(&raw).map_err(|error| name(&error))?;
    let records = if is_packed {
        raw::read(&mut BufReader::new(flate2::read::GzDecoder::new(file)))
    } else {
        raw::read(&mut BufReader::new(file))
    };
    let records = records.map_err(|error| name(&error))?;
    let summary = analyse::summary(&records);
    std::fs::write(folder.join("summary.json"), serde_json::to_string_pretty(&summary)? + "\n")?;
    std::fs::write(folder.join("report.html"), report::page(&summary))?;
    Ok(summary)
}

fn told(summary: &Summary, folder: &Path, as_json: bool, out: &mut dyn Write) -> Result<(), BenchError> {
    if as_json {
        serde_json::to_writer(&mut *out, summary)?;
        writeln!(out)?;
    } else {
        out.write_all(report::text(summary).as_bytes())?;
        writeln!(out, "\nreport: {}", folder.join("report.html").display())?;
    }
    Ok(())
}

/// What a run needs to know of its deployment.
struct Deployment {
    url: String,
    engines: Vec<(String, Option<String>, Origin)>,
    own: Option<Own>,
    // Kept until its processes have ended.
    _folder: Option<tempfile::TempDir>,
}

async fn deployment(options: &DisconnectOptions, progress: &dyn Fn(&str)) -> Result<Deployment, BenchError> {
    let Some(url) = &options.url else {
        progress("starting router, prefill and decode engine");
        let folder = tempfile::tempdir()?;
        let (place, logs) = (folder.path().to_owned(), options.out.clone());
        let engine_options = options.engine_options.clone();
        let own = tokio::task::spawn_blocking(move || Own::start(&engine_options, &place, &logs)).await??;
        let mut engines = Vec::new();
        for (name, place) in own.engines()? {
            engines.push((name.to_owned(), None, Origin::parse(place)?));
        }
        return Ok(Deployment { url: own.url()?, engines, own: Some(own), _folder: Some(folder) });
    };
    let secret = options.cluster_secret_file.as_deref();
    let engine = |name: &str, role: Option<&str>, url: &str| -> Result<_, BenchError> {
        Ok((name.to_owned(), role.map(str::to_owned), Origin::parse(url)?.with_secret_file(secret)?))
    };
    let mut engines = Vec::new();
    for named in &options.engines {
        let (role, url) = match named.split_once('=') {
            Some((role, url)) => (Some(role), url),
            None => (None, named.as_str()),
        };
        engines.push(engine(url.trim_start_matches("http://"), role, url)?);
    }
    if let Some(admin) = &options.admin {
        let admin = Origin::parse(admin)?.with_token_file(options.admin_token_file.as_deref())?;
        let told = admin.get_json("/engines", PATIENCE).await?;
        for one in told["engines"].as_array().into_iter().flatten() {
            let Some(place) = one["engine"].as_str() else { continue };
            engines.push(engine(place, None, place)?);
        }
    }
    if engines.is_empty() {
        return Err("the router knows no engine".into());
    }
    // Named, and known to the router as well: the first word counts.
    let mut seen = std::collections::BTreeSet::new();
    engines.retain(|(.., origin)| seen.insert(origin.authority().to_owned()));
    Ok(Deployment { url: url.clone(), engines, own: None, _folder: None })
}

async fn play(options: &DisconnectOptions) -> Result<(), BenchError> {
    let begun = Instant::now();
    let progress = |what: &str| {
        if !options.json {
            eprintln!("baton: {:5.1} s  {what}", begun.elapsed().as_secs_f64());
        }
    };
    // Before anything is started: what is wrong with a file should not take a minute to be said.
    let (beside, commands) = (options.beside()?, options.commands()?);
    let deployment = deployment(options, &progress).await?;
    let target = Target::parse(&deployment.url)?.with_key_file(options.api_key_file.as_deref())?;
    let limits = Limits { total: CALL_WITHIN, answer_bytes: ANSWER_BYTES_MAX, ..Limits::default() };
    let client = Client::open(target, limits, Connections::Fresh).await?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let recorder = Arc::new(Recorder::create(&options.out.join("events.jsonl"))?);
    let prefix = format!("baton-{:08x}-", crate::load::Moment::now().us() as u32);
    recorder.put(&Record::Run(described(options, &deployment, &model)));
    if let Some(compared) = beside {
        recorder.put(&Record::Beside { compared });
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
        },
        feed: Arc::clone(&watch.feed),
        exact: watch.exact(),
        recorder: Arc::clone(&recorder),
        prefix,
        seed: options.seed,
        aims: std::sync::Mutex::default(),
        next: AtomicU64::new(0),
        stall: std::sync::OnceLock::new(),
        open: std::sync::Mutex::default(),
        cut: CancellationToken::new(),
    });
    let unmended = std::sync::Mutex::new(None);
    let deployed = std::sync::Mutex::new(deployment.own);
    let own = || deployed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let play = async {
        let mut acts = acts::Acts {
            stage: &stage,
            watch: &watch,
            terms: options.terms(),
            progress: &progress,
            unmended: &unmended,
        };
        let able = acts.calibrate().await?;
        acts.terms.rate = options.rate.unwrap_or((able * LOAD).clamp(1.0, RATE_MAX));
        acts.rounds(options.share).await;
        for &phase in &options.phases {
            if !stage.exact && matches!(phase, Phase::Gap | Phase::Fetch) {
                // Nobody tells when that is.
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
        watch.home(Duration::from_secs_f64(options.patience)).await;
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
            progress("interrupted: the report is of what there is");
            Ok(())
        }
    };
    // Whatever still runs of it ends here, and the engines get their time to notice.
    stage.cut.cancel();
    if let Err(error) = &result {
        recorder.put(&Record::Failed { at_us: at_us(), why: error.to_string() });
    }
    watch.home(Duration::from_secs_f64(options.settle)).await;
    let mend = unmended.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(command) = mend {
        progress("mending what was broken");
        let shell = tokio::process::Command::new("sh")
            .args(["-c", &command])
            .stdout(std::process::Stdio::null())
            .status();
        let mended = shell.await;
        if !mended.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("baton: `{command}`: {mended:?}");
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
        commit: crate::machine::commit(),
        command: crate::machine::command(),
        date: crate::machine::today(),
        machine: crate::machine::described(),
        target: described.into(),
        model: model.into(),
        seed: options.seed,
        stranded_after_us: options.stranded_after_ms * 1_000,
        options: json!({
            "share": options.share, "seconds": options.seconds, "rounds": options.rounds, "victims": options.victims,
            "prompt_words": options.prompt_words, "max_tokens": options.max_tokens, "unary": options.unary,
            "engines": deployment.engines.len(),
            "kinds": options.kinds, "engine_options": options.engine_options,
        }),
    }
}
