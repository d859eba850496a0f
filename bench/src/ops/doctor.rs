//! `baton doctor`: looks at a running deployment, then leaves it in the middle of requests and proves that their blocks
//! came back.
//!
//! ```text
//! look    who answers, what they are, whether they fit together ─┐
//! probe   a lease: its duration, its side channel                │
//! leave   one forced disconnect per phase, by the event logs     ├─▶ checkup ─▶ verdict
//! epochs  the engines are still those that were looked at        ┘
//! ```
//!
//! Its requests are few, short and tagged by their `user` field, so that it can be pointed at a deployment in use. It
//! changes nothing, and what it holds for a moment it gives back.

mod checkup;
mod epochs;
mod leave;
mod look;
mod probe;
mod usage;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::BenchError;
use crate::common::http_client::Origin;
use crate::load::{Client, Connections, Limits, Target};
use checkup::{Checkup, Warning};
use look::Site;

/// Where `baton up` is.
const URL: &str = "http://127.0.0.1:8000";
const ADMIN: &str = "http://127.0.0.1:8081";

/// Where the deployment is, and how it is looked at.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Endpoint for clients: of a router, or of an engine
    #[arg(value_name = "URL", default_value = URL)]
    url: String,
    /// Admin URL of a router (repeatable) [default: http://127.0.0.1:8081, if URL is the default too]
    #[arg(long, value_name = "URL", env = "BATON_ADMIN")]
    admin: Vec<String>,
    /// Further engine, besides those that the routers list (repeatable)
    #[arg(long, value_name = "URL")]
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

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is wrong.
    Healthy,
    /// Something is.
    Findings,
    /// Nobody answered: nothing can be said.
    NotSeen,
    /// Nothing is wrong with what was looked at, and no disconnect was proved.
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

/// Looks, and prints what was found.
///
/// # Errors
/// When options make no sense: nothing was looked at.
pub fn run(args: &DoctorArgs, out: &mut dyn Write) -> Result<Verdict, BenchError> {
    let site = site(args)?;
    let target = Target::parse(&args.url)?
        .with_key_file(args.api_key_file.as_deref())?
        .with_ca_file(args.ca_file.as_deref());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let checkup = runtime.block_on(examine(args, site, target))?;
    let verdict = checkup.verdict();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&checkup.json())?)?;
    } else {
        write!(out, "{}", checkup.text())?;
    }
    Ok(verdict)
}

fn site(args: &DoctorArgs) -> Result<Site, BenchError> {
    let token = args.admin_token_file.as_deref();
    // What `baton up` says, where nobody says anything.
    let by_default = args.admin.is_empty() && args.engine.is_empty() && args.url == URL;
    let named = args.admin.iter().map(String::as_str).chain(by_default.then_some(ADMIN));
    let admins = named.map(|url| Origin::parse(url)?.with_token_file(token));
    let secret = args.cluster_secret_file.clone();
    let engines = args.engine.iter().map(|url| Origin::parse(url)?.with_secret_file(secret.as_deref()));
    Ok(Site {
        // What is over TLS or below a path is asked by the load client only.
        endpoint: Target::parse(&args.url)?.plain().map(|place| Origin::parse(&place)).transpose()?,
        url: args.url.clone(),
        admins: admins.collect::<Result<_, _>>()?,
        engines: engines.collect::<Result<_, _>>()?,
        secret,
        model: args.model.clone(),
    })
}

async fn examine(args: &DoctorArgs, site: Site, target: Target) -> Result<Checkup, BenchError> {
    let DoctorArgs { strict, no_requests, .. } = *args;
    let mut checkup = Checkup::new(checkup::Terms { strict, no_requests, accepted: args.ignore.clone() });
    let seen = look::look(&site, &mut checkup).await;
    let tried = try_out(args, &seen, target, &mut checkup).await;
    epochs::again(&seen.engines, &site.admins, &mut checkup).await;
    tried.map(|()| checkup)
}

/// Leases and disconnects.
async fn try_out(
    args: &DoctorArgs,
    seen: &look::Seen,
    target: Target,
    checkup: &mut Checkup,
) -> Result<(), BenchError> {
    if args.no_requests {
        for check in ["lease", "request", "disconnects"] {
            checkup.skip(check, "", "--no-requests");
        }
        return Ok(());
    }
    if !seen.answers {
        // Of a lease the engines are asked themselves.
        probe::leases(seen, checkup).await;
        for check in ["request", "disconnects"] {
            checkup.skip(check, "", "the endpoint does not respond");
        }
        return Ok(());
    }
    if !seen.engines.iter().any(|engine| engine.up) {
        checkup.unseen("no engine is known: add --admin or --engine");
        return Ok(());
    }
    probe::leases(seen, checkup).await;
    let Some(model) = args.model.clone().or_else(|| seen.model.clone()) else {
        checkup.skip("disconnects", "", "no model is listed: add --model");
        return Ok(());
    };
    let limits = Limits {
        total: Duration::from_secs(120),
        silence: Some(Duration::from_secs(60)),
        ..Limits::default()
    };
    let client = Client::open(target, limits, Connections::Fresh).await?;
    let terms = leave::Terms {
        model,
        tries: args.requests_per_phase,
        words: args.prompt_words as usize,
        within: Duration::from_secs(args.free_within),
    };
    let (told, untold): (Vec<_>, Vec<_>) = seen.engines.iter().filter(|e| e.up).partition(|e| e.events);
    if !told.is_empty() && untold.is_empty() && !args.metrics_only {
        leave::exactly(&client, &told, &terms, checkup).await;
    } else {
        let why = if args.metrics_only { "--metrics-only" } else { "not every engine has an event log" };
        usage::coarsely(&client, &seen.engines, &terms, why, checkup).await;
    }
    Ok(())
}
