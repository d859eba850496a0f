//! `baton doctor`: inspects a running deployment, then cancels a request in each phase and verifies that all blocks
//! are freed.
//!
//! ```text
//! inventory   which components respond, their properties, whether they match ─┐
//! probe       a lease: its duration, its side channel                         │
//! disconnect  one forced disconnect per phase, by the event logs              ├─▶ checkup ─▶ verdict
//! epochs      the engines have not restarted                                  ┘
//! ```
//!
//! The requests are few, short and tagged by their `user` field, so that a deployment in use can be checked. No
//! setting is changed, and leases are released at once.

mod checkup;
mod disconnect;
mod engine;
mod epochs;
mod inventory;
mod metrics_usage;
mod probe;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::BenchError;
use crate::common::http_client::ServiceClient;
use crate::load::{Client, Connections, Limits, Target};
use checkup::{Checkup, Warning};
use inventory::DoctorTargets;

/// The addresses of `baton up`.
const URL: &str = "http://127.0.0.1:8000";
const ADMIN: &str = "http://127.0.0.1:8081";

/// Addresses of the deployment, and how it is inspected.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Endpoint for clients: of a router, or of an engine
    #[arg(value_name = "URL", default_value = URL)]
    url: String,
    /// Admin URL of a router (repeatable) [default: http://127.0.0.1:8081, if URL is the default too]
    #[arg(long, value_name = "URL", env = "BATON_ADMIN")]
    admin: Vec<String>,
    /// Further engine, besides those that the routers list (repeatable)
    #[arg(long, value_name = "URL[,CONTROL_URL]")]
    engine: Vec<String>,
    /// Model to request [default: the first that is listed]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// File with the clients' API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// File with the token of the admin listeners
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    admin_token_file: Option<PathBuf>,
    /// File with the cluster secret
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER_SECRET_FILE")]
    cluster_secret_file: Option<PathBuf>,
    /// Certificates in PEM that sign the URL's own, instead of the system's
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Inspect the deployment without sending requests to a model
    #[arg(long)]
    no_requests: bool,
    /// Use only the engines' metrics, as if they had no event log
    #[arg(long)]
    metrics_only: bool,
    /// Maximum requests per phase
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1000), value_name = "N")]
    requests_per_phase: u32,
    /// Words of a prompt
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(16..=100_000), value_name = "N")]
    prompt_words: u32,
    /// Maximum seconds until all blocks are freed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600), value_name = "SECONDS")]
    free_within: u64,
    /// Treat warnings as findings; skipped checks are no findings
    #[arg(long)]
    strict: bool,
    /// Ignore warnings of this check (repeatable)
    #[arg(long, value_enum, value_name = "CHECK")]
    ignore: Vec<Warning>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No check failed.
    Healthy,
    /// At least one check failed.
    Findings,
    /// No component responded.
    NotSeen,
    /// No check failed, but no disconnect was verified.
    NotProved,
}

impl Verdict {
    /// The exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Healthy => 0,
            Self::Findings => 1,
            Self::NotSeen | Self::NotProved => 2,
        }
    }
}

/// Inspects the deployment and prints the result.
///
/// # Errors
/// If options are invalid. No component was inspected then.
pub fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<Verdict, BenchError> {
    let targets = doctor_targets(args)?;
    let target = Target::parse(&args.url)?
        .with_key_file(args.api_key_file.as_deref())?
        .with_ca_file(args.ca_file.as_deref());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let checkup = runtime.block_on(examine(args, targets, target))?;
    let verdict = checkup.verdict();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&checkup.json())?)?,
        false => write!(out, "{}", checkup.text())?,
    }
    Ok(verdict)
}

fn doctor_targets(args: &DoctorArgs) -> Result<DoctorTargets, BenchError> {
    let token = args.admin_token_file.as_deref();
    // The defaults are the addresses of `baton up`.
    let by_default = args.admin.is_empty() && args.engine.is_empty() && args.url == URL;
    let named = args.admin.iter().map(String::as_str).chain(by_default.then_some(ADMIN));
    let admins = named.map(|url| ServiceClient::parse(url)?.with_token_file(token));
    let secret = args.cluster_secret_file.clone();
    let engines =
        args.engine.iter().map(|url| ServiceClient::engine(url)?.with_secret_file(secret.as_deref()));
    Ok(DoctorTargets {
        // An endpoint with TLS or below a path is reachable by the load client only.
        endpoint: Target::parse(&args.url)?.plain().map(|place| ServiceClient::parse(&place)).transpose()?,
        url: args.url.clone(),
        admins: admins.collect::<Result<_, _>>()?,
        engines: engines.collect::<Result<_, _>>()?,
        secret,
        model: args.model.clone(),
    })
}

async fn examine(args: &DoctorArgs, targets: DoctorTargets, target: Target) -> Result<Checkup, BenchError> {
    let DoctorArgs { strict, no_requests, .. } = *args;
    let mut checkup =
        Checkup::new(checkup::CheckupOptions { strict, no_requests, ignored: args.ignore.clone() });
    let inventory = inventory::inspect(&targets, &mut checkup).await;
    let tried = try_out(args, &inventory, target, &mut checkup).await;
    inventory::missing_verbs(&targets.admins, &inventory, &mut checkup).await;
    epochs::check_epochs(&inventory.engines, &targets.admins, &mut checkup).await;
    tried.map(|()| checkup)
}

/// Checks leases and disconnects.
async fn try_out(
    args: &DoctorArgs,
    inventory: &inventory::Inventory,
    target: Target,
    checkup: &mut Checkup,
) -> Result<(), BenchError> {
    if args.no_requests {
        for check in ["lease", "request", "disconnects"] {
            checkup.skip(check, "", "--no-requests");
        }
        return Ok(());
    }
    if !inventory.answers {
        // Leases are checked at the engines directly.
        probe::leases(inventory, checkup).await;
        for check in ["request", "disconnects"] {
            checkup.skip(check, "", "the endpoint does not respond");
        }
        return Ok(());
    }
    if !inventory.engines.iter().any(|engine| engine.up) {
        checkup.mark_unreachable("no engine is known: add --admin or --engine");
        return Ok(());
    }
    probe::leases(inventory, checkup).await;
    let Some(model) = args.model.clone().or_else(|| inventory.model.clone()) else {
        checkup.skip("disconnects", "", "no model is listed: add --model");
        return Ok(());
    };
    let limits = Limits {
        total: Duration::from_secs(120),
        silence: Some(Duration::from_secs(60)),
        ..Limits::default()
    };
    let client = Client::open(target, limits, Connections::Fresh).await?;
    let terms = disconnect::ProbeOptions {
        model,
        tries: args.requests_per_phase,
        words: args.prompt_words as usize,
        within: Duration::from_secs(args.free_within),
    };
    let (with_log, without_log): (Vec<_>, Vec<_>) =
        inventory.engines.iter().filter(|e| e.up).partition(|e| e.events);
    if !with_log.is_empty() && without_log.is_empty() && !args.metrics_only {
        disconnect::probe_phases(&client, &with_log, &terms, checkup).await;
    } else {
        let why = if args.metrics_only { "--metrics-only" } else { "not every engine has an event log" };
        metrics_usage::probe_by_metrics(&client, &inventory.engines, &terms, why, checkup).await;
    }
    Ok(())
}
