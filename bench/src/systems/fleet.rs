//! `baton bench fleet`: the cost of one router's decisions with 10, 100 and 1,000 engines and 100,000 live requests.
//!
//! A fleet in virtual time, determined by a seed, on one thread. The router's own pools, policies, health and
//! explanations choose engines. The connector's own exchanges, fetches and ledgers settle requests. Clients
//! disconnect in every phase, decode engines stop renewing leases, and engines die and restart. The command fails
//! unless, in the end, every lease has ended once, every block is free and no router counts a request anywhere.
//!
//! Times are real: one decision each, without the clock's own time. The simulated engines and clients share the
//! machine's caches. Between two decisions they touch about as much memory as a router's sockets would.
//!
//! `--json` prints one object:
//!
//! - `date`, `commit`, `machine`; the options `requests`, `turnover`, `routers`, `max_in_flight`, `max_waiting`,
//!   `room`, `explain` and `seed`; `clock_ns`;
//! - `memory` of the first run (the largest fleet of the first policy): its `policy` and `engines`,
//!   `bytes_per_engine` of one router, `bytes_per_request` of router and simulation together;
//! - `runs[]`: `policy`, `engines`, `begun`, `alive_most`, `engines_died`, `virtual_s`;
//! - `runs[].costs` of `choose_decode`, `choose_prefill`, `finish` and `lease`: `count`, `mean_ns`, `p50_ns`,
//!   `p99_ns`;
//! - `runs[].imbalance` of `prefill` and `decode`: the load of the busiest engine over the mean;
//! - `runs[].most_at_one` of `prefill` and `decode`: the maximum requests of one engine;
//! - `runs[]`: `prefix_hit_share`, `refused_share`, `room` (see below), `endings`, `leases`, `faults` by name,
//!   `digest` of all events;
//! - `growth[]`: for each run the `p50` and `mean` of each cost over those of the same policy's smallest fleet.
//!
//! `room`, with `--engine-capacity`, describes decode engines. `busiest` is the maximum of requests over capacity.
//! The others are means over one sample per virtual second while requests arrive:
//!
//! - `over_share`: engines above their capacity;
//! - `waiting_share`, `free_share`: requests above capacity, and free capacity, over all capacity;
//! - `turned_away_share`: clients that were refused and have not retried.

mod client;
mod costs;
mod engine;
mod probabilities;
mod simulation;
#[cfg(test)]
mod tests;

use std::io::{self, Write};

use baton_router::{GenerationError, sim_router};
use serde_json::{Map, Value, json};

use crate::common::machine;
use crate::common::report::print_report;
use crate::common::stats::{rounded, thousandths};
use costs::DecisionKind;
use engine::PlantedFault;
use simulation::{FleetOutcome, FleetSetup, simulate};

/// Maximum engines of one simulation. A pool holds half as many.
const ENGINES_MAX: usize = 8_192;
/// Maximum live requests, in total and for each prefill engine, whose ledger must hold them.
const REQUESTS_MAX: usize = 1_000_000;
const REQUESTS_PER_PREFILL_MAX: usize = 100_000;
const ROUTERS_MAX: usize = 64;

/// Options of `baton bench fleet`.
#[derive(Clone, Debug, clap::Args)]
pub struct FleetOptions {
    /// Fleet sizes, separated by commas; half of the engines prefill, half decode
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [10, 100, 1_000])]
    pub engines: Vec<usize>,
    /// Requests alive at once
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub requests: usize,
    /// Requests after the first ones, as a multiple of --requests; 0 or more
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub turnover: f64,
    /// Policies of both legs, as in a configuration, separated by `;` (in quotes)
    #[arg(
        long, value_name = "NAME;...",
        value_delimiter = ';',
        default_values_t = ["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix_aware"]
            .map(str::to_owned)
    )]
    pub policy: Vec<String>,
    /// Routers that share the fleet without knowing of each other
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub routers: usize,
    /// Maximum requests of one router at one decode engine [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_in_flight: Option<usize>,
    /// Waiting requests at which a decode engine is full, reported every second; needs --engine-capacity
    #[arg(long, value_name = "N", requires = "engine_capacity")]
    pub max_waiting: Option<u32>,
    /// Requests that one decode engine runs at once, from all routers; the excess is counted
    #[arg(long, value_name = "N")]
    pub engine_capacity: Option<u32>,
    /// Keep no explanations of decisions (`explain.requests: 0`)
    #[arg(long)]
    pub no_explain: bool,
    /// Seed of all random draws
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// One simulated fleet.
struct FleetRun {
    policy: String,
    engines: usize,
    outcome: FleetOutcome,
}

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// The routers cannot be created.
    #[error(transparent)]
    Router(#[from] GenerationError),
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Leases, blocks or requests were not settled.
    #[error("not everything was settled: {0}")]
    Faults(String),
}

/// Simulates and prints.
///
/// # Errors
/// [`FleetError`]; [`FleetError::Faults`] after the report.
pub fn run(options: &FleetOptions, out: &mut dyn Write) -> Result<(), FleetError> {
    run_with(options, None, out)
}

fn run_with(
    options: &FleetOptions,
    plant: Option<PlantedFault>,
    out: &mut dyn Write,
) -> Result<(), FleetError> {
    check(options)?;
    let mut sizes = options.engines.clone();
    sizes.sort_unstable();
    sizes.dedup();
    let mut runs = Vec::new();
    for policy in &options.policy {
        // The largest first, because resident memory does not shrink.
        for &engines in sizes.iter().rev() {
            let setup = FleetSetup { options, engines, policy, plant };
            let outcome = sim_router::without_logs(|| simulate(setup))?;
            runs.push(FleetRun { policy: policy.clone(), engines, outcome });
        }
    }
    let report = report(options, &runs);
    print_report(&report, options.json, out, print)?;
    let faulty = runs.iter().filter(|run| run.outcome.faults.is_any());
    let violations: Vec<String> = faulty
        .map(|FleetRun { policy, engines, outcome }| {
            let wrong = outcome.faults.named().into_iter().filter(|(_, count)| *count > 0);
            let wrong: Vec<_> = wrong.map(|(name, count)| format!("{name} {count}")).collect();
            format!("{policy} with {engines} engines: {}", wrong.join(", "))
        })
        .collect();
    if violations.is_empty() { Ok(()) } else { Err(FleetError::Faults(violations.join("; "))) }
}

fn check(options: &FleetOptions) -> Result<(), FleetError> {
    let wrong = |message: String| Err(FleetError::Options(message));
    if options.engines.is_empty() || options.policy.is_empty() {
        return wrong("--engines and --policy need at least one value".to_owned());
    }
    if let Some(engines) = options.engines.iter().find(|engines| !(4..=ENGINES_MAX).contains(*engines)) {
        return wrong(format!("--engines {engines}: a fleet has 4 to {ENGINES_MAX} engines"));
    }
    let fewest = options.engines.iter().min().map_or(0, |engines| engines / 2);
    let most = REQUESTS_MAX.min(fewest * REQUESTS_PER_PREFILL_MAX);
    if !(1..=most).contains(&options.requests) {
        return wrong(format!("--requests {}: 1 to {most} with {fewest} prefill engines", options.requests));
    }
    if !(0.0..=1_000.0).contains(&options.turnover) {
        return wrong(format!("--turnover {}: 0 to 1000", options.turnover));
    }
    if !(1..=ROUTERS_MAX).contains(&options.routers) || options.routers > options.requests {
        return wrong(format!("--routers {}: 1 to {ROUTERS_MAX}, and one request for each", options.routers));
    }
    if options.max_in_flight == Some(0)
        || options.max_waiting == Some(0)
        || options.engine_capacity == Some(0)
    {
        return wrong(
            "--max-in-flight, --max-waiting and --engine-capacity: 0: no engine would accept a request"
                .to_owned(),
        );
    }
    if options.max_waiting.is_some() && options.engine_capacity.is_none() {
        return wrong("--max-waiting needs --engine-capacity".to_owned());
    }
    Ok(())
}

fn report(options: &FleetOptions, runs: &[FleetRun]) -> Value {
    let memory = runs.first().map(|FleetRun { policy, engines, outcome }| {
        json!({
            "policy": policy, "engines": engines,
            "bytes_per_engine": outcome.bytes_per_engine.round(),
            "bytes_per_request": outcome.bytes_per_request.round(),
        })
    });
    let rows: Vec<Value> = runs.iter().map(|run| of_run(options, run)).collect();
    json!({
        "date": machine::today(), "commit": machine::commit(), "machine": machine::described(),
        "requests": options.requests, "turnover": options.turnover, "routers": options.routers,
        "max_in_flight": options.max_in_flight, "max_waiting": options.max_waiting, "engine_capacity": options.engine_capacity,
        "explain": !options.no_explain, "seed": options.seed,
        "clock_ns": runs.first().map(|run| run.outcome.costs.clock_ns()),
        "memory": memory,
        "growth": growth(&rows),
        "runs": rows,
    })
}

fn of_run(options: &FleetOptions, run: &FleetRun) -> Value {
    let FleetRun { policy, engines, outcome } = run;
    let costs: Map<_, _> =
        DecisionKind::ALL.iter().map(|&kind| (kind.label().to_owned(), outcome.costs.of(kind))).collect();
    let imbalance = outcome
        .imbalance
        .each_ref()
        .map(|leg| json!({"mean": rounded(leg.mean()), "worst": rounded(leg.worst)}));
    let room = options.engine_capacity.map(|room| {
        json!({
            "busiest": rounded(f64::from(outcome.most_at_one[1]) / f64::from(room)),
            "over_share": rounded(share(outcome.crowd.over, outcome.crowd.engines)),
            "waiting_share": rounded(share(outcome.crowd.waiting, outcome.crowd.engines * u64::from(room))),
            "free_share": rounded(share(outcome.crowd.free, outcome.crowd.engines * u64::from(room))),
            "turned_away_share":
                rounded(share(outcome.crowd.turned_away, outcome.crowd.looks * options.requests as u64)),
        })
    });
    let refused = outcome.endings.get("not_admitted").copied().unwrap_or(0);
    let faults: Map<_, _> =
        outcome.faults.named().into_iter().map(|(name, count)| (name.to_owned(), json!(count))).collect();
    json!({
        "policy": policy, "engines": engines, "begun": outcome.begun, "alive_most": outcome.alive_most,
        "engines_died": outcome.engines_died, "virtual_s": rounded(outcome.virtual_s),
        "costs": costs,
        "imbalance": {"prefill": imbalance[0], "decode": imbalance[1]},
        "most_at_one": {"prefill": outcome.most_at_one[0], "decode": outcome.most_at_one[1]},
        "prefix_hit_share": rounded(share(outcome.hits[0], outcome.hits[1])),
        "refused_share": rounded(share(refused, outcome.begun)),
        "room": room,
        "endings": outcome.endings,
        "leases": outcome.leases,
        "faults": faults,
        "digest": format!("{:016x}", outcome.digest),
    })
}

fn share(part: u64, of: u64) -> f64 {
    part as f64 / of.max(1) as f64
}

/// The costs of every run over those of its policy's smallest fleet.
fn growth(runs: &[Value]) -> Vec<Value> {
    let smallest = |policy: &Value| {
        runs.iter().filter(|run| run["policy"] == *policy).min_by_key(|run| run["engines"].as_u64())
    };
    let of = |run: &Value| {
        let base = smallest(&run["policy"])?;
        let mut row = Map::from_iter([
            ("policy".to_owned(), run["policy"].clone()),
            ("engines".to_owned(), run["engines"].clone()),
        ]);
        for kind in DecisionKind::ALL.map(DecisionKind::label) {
            let ratio = |which: &str| {
                let (now, then) = (run["costs"][kind][which].as_f64()?, base["costs"][kind][which].as_f64()?);
                (then > 0.0).then(|| thousandths(now / then))
            };
            row.insert(kind.to_owned(), json!({"p50": ratio("p50_ns"), "mean": ratio("mean_ns")}));
        }
        Some(Value::Object(row))
    };
    runs.iter().filter_map(of).collect()
}

fn print(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    print_head(report, out)?;
    let growth = report["growth"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (run, growth) in runs_of(report).zip(growth) {
        print_run(run, growth, out)?;
    }
    for run in runs_of(report).filter(|run| !run["room"].is_null()) {
        print_room(run, out)?;
    }
    print_totals(report, out)
}

fn runs_of(report: &Value) -> impl Iterator<Item = &Value> {
    report["runs"].as_array().into_iter().flatten()
}

/// The simulation, the unit of the costs, and the heads of the columns.
fn print_head(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    let (requests, routers, seed) = (&report["requests"], &report["routers"], &report["seed"]);
    let explanations = if report["explain"] == true { "kept" } else { "not kept" };
    let on = report["machine"].as_str().unwrap_or_default();
    writeln!(
        out,
        "{requests} requests alive, {routers} router(s), explanations {explanations}, seed {seed}; {on}"
    )?;
    writeln!(
        out,
        "nanoseconds: median / mean / p99 of a decision, less {} of the clock; × is the median over the smallest fleet's\n",
        report["clock_ns"]
    )?;
    writeln!(
        out,
        "policy           engines                choose decode               choose prefill                 finish                  lease  max/mean P D   hits  refused"
    )
}

fn print_run(run: &Value, growth: &Value, out: &mut dyn Write) -> io::Result<()> {
    let cost = |kind: &str| {
        let of = &run["costs"][kind];
        let ratio = growth[kind]["p50"].as_f64().map_or(String::new(), |ratio| format!(" ×{ratio:.1}"));
        format!("{}/{}/{}{ratio}", of["p50_ns"], of["mean_ns"].as_f64().unwrap_or(0.0), of["p99_ns"])
    };
    let balance = |leg: &str| run["imbalance"][leg]["mean"].as_f64().unwrap_or(0.0);
    let percent = |share: &str| run[share].as_f64().unwrap_or(0.0) * 100.0;
    let [decode, prefill, finish, lease] = ["choose_decode", "choose_prefill", "finish", "lease"].map(cost);
    let (over_p, over_d) = (balance("prefill"), balance("decode"));
    let (hits, refused) = (percent("prefix_hit_share"), percent("refused_share"));
    writeln!(
        out,
        "{:<16} {:>7}  {decode:>27}  {prefill:>27}  {finish:>21}  {lease:>21}  {over_p:>5.2} {over_d:>5.2}  {hits:>4.0}%  {refused:>6.2}%",
        run["policy"].as_str().unwrap_or_default(),
        run["engines"],
    )
}

fn print_room(run: &Value, out: &mut dyn Write) -> io::Result<()> {
    let percent = |name: &str| run["room"][name].as_f64().unwrap_or(0.0) * 100.0;
    writeln!(
        out,
        "\nroom, {} of {}: busiest decode engine {:.0} % of it, {:.1} % of engines over it, by {:.1} % of all room, {:.1} % of it free, {:.1} % of clients turned away",
        run["policy"].as_str().unwrap_or_default(),
        run["engines"],
        percent("busiest"),
        percent("over_share"),
        percent("waiting_share"),
        percent("free_share"),
        percent("turned_away_share"),
    )
}

fn print_totals(report: &Value, out: &mut dyn Write) -> io::Result<()> {
    let memory = &report["memory"];
    writeln!(
        out,
        "\nmemory, {} engines: {:.0} bytes an engine and router (what is fixed, too: some 8 MB), {:.0} bytes a request (with \
         what simulates it)",
        memory["engines"],
        memory["bytes_per_engine"].as_f64().unwrap_or_default(),
        memory["bytes_per_request"].as_f64().unwrap_or_default()
    )?;
    let all = |name: &str| -> u64 { runs_of(report).filter_map(|run| run["leases"][name].as_u64()).sum() };
    let [opened, fetched, released] = ["opened", "fetched", "released"].map(all);
    let (expired, lost) = (all("expired"), all("lost_with_engine"));
    writeln!(
        out,
        "leases: {opened} opened = {fetched} fetched + {released} released + {expired} expired + {lost} lost with their engine"
    )
}
