//! `baton bench compare`: compares several gateways under the same workload in one run.
//!
//! All gateways are in front of the same simulated engines ([`crate::sim::engines`]). Rounds alternate (ABCABC…), so
//! that other load of the machine affects all of them. The gateways are Baton's router, vllm-router, smg, a plain
//! proxy like vLLM's toy proxy (`toy_proxy`), and nginx. nginx does not use prefill engines and is the lower limit.
//! A missing gateway is skipped with a line on standard error. `--target NAME=URL` adds another one, which must have
//! its own engines.
//!
//! | measured | how |
//! |---|---|
//! | TTFT, gaps between tokens, requests per second | streams in a closed loop of `--concurrency` clients; percentiles by nearest rank over a round, then median and spread over the rounds |
//! | CPU per 1,000 requests | user and system time of all threads of the subject over the round |
//! | the gap | `--cancels` streams per round: each client cancels (FIN) after the prefill engine has logged `lease_opened` and before the decode engine, which takes `--admission-delay-ms`, has admitted the request. The prefill engine's log then reports when the blocks are free and why. **Stranded** is a request whose lease expired. Its block-seconds count from the cancel |
//!
//! Ratios are over the first target in the same round.

mod calm;
mod gap;
mod report;
mod toy_proxy;

use std::io::Write;
use std::str::FromStr;
use std::time::Duration;

use crate::BenchError;
use crate::common::report::print_report;
use crate::load::Target;
use crate::sim::engines::{Dialect, EnginePlan, FleetPlan, SimFleet};
use crate::systems::router::gateway::Gateway;
use crate::systems::router::peers::{self, EngineAddresses, ProgramArgs, SkipLog};
pub use gap::{CancelledRequest, GapOutcome};
pub use report::{CompareReport, GapReport, TargetReport};

/// Options of `baton bench compare`.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// Rounds; medians and spread are over them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub rounds: usize,
    /// Requests per target and round
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = at_least_one)]
    pub requests: usize,
    /// Concurrent clients
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub concurrency: usize,
    /// Words of a prompt, each one token of the simulated engines
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub prompt_tokens: usize,
    /// Tokens of a response
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub output_tokens: usize,
    /// Requests cancelled in the gap, per target and round; 0 skips the measurement
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub cancels: usize,
    /// Protocol and rules of the simulated engines
    #[arg(long, value_name = "NAME", value_enum, default_value_t = Dialect::Vllm)]
    pub dialect: Dialect,
    /// Milliseconds until a decode engine admits a request, where requests are cancelled
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub admission_delay_ms: u64,
    /// Lease duration in milliseconds, where requests are cancelled; vLLM's default is 30,000
    #[arg(long, value_name = "MS", default_value_t = 3_000)]
    pub lease_ms: u64,
    /// Further endpoint to compare (repeatable)
    #[arg(long, value_name = "NAME=URL")]
    pub target: Vec<NamedUrl>,
    /// Model name in all requests
    #[arg(long, value_name = "NAME", default_value = "sim")]
    pub model: String,
    /// The programs of the gateways
    #[command(flatten)]
    pub programs: ProgramArgs,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (1..=1_000_000).contains(number));
    number.ok_or_else(|| format!("`{text}` is no number from 1 to 1000000"))
}

/// An endpoint that this run does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedUrl {
    /// The name in reports.
    pub name: String,
    /// The URL of the endpoint.
    pub url: String,
}

impl FromStr for NamedUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, url) = text.split_once('=').ok_or_else(|| format!("`{text}` is not NAME=URL"))?;
        if name.is_empty() {
            return Err(format!("`{text}` has no name"));
        }
        Target::parse(url).map_err(|error| error.to_string())?;
        Ok(Self { name: name.to_owned(), url: url.to_owned() })
    }
}

impl CompareArgs {
    fn check(&self) -> Result<(), String> {
        if self.lease_ms <= self.admission_delay_ms + 500 {
            return Err(String::from(
                "--lease-ms must be 500 ms more than --admission-delay-ms, or nothing is in time",
            ));
        }
        let own = ["baton", "vllm-router", "smg", "toy-proxy", "nginx"];
        for (number, named) in self.target.iter().enumerate() {
            let twice = self.target[..number].iter().any(|other| other.name == named.name);
            if twice || own.contains(&named.name.as_str()) {
                return Err(format!("two targets of the name `{}`", named.name));
            }
        }
        self.engine().check()
    }

    /// Engines whose speed leaves the overhead of a gateway visible.
    fn engine(&self) -> EnginePlan {
        EnginePlan {
            dialect: self.dialect,
            prefill_rate: 200_000,
            prefill_overhead: Duration::from_millis(1),
            decode_step: Duration::from_millis(5),
            context_tokens: (self.prompt_tokens + self.output_tokens + 64).max(4_096),
            blocks: 1 << 16,
            // Clients cancel in the gap, so replies are written at once: no gateway can release a lease whose reply
            // it has not received.
            reply_delay: Some(Duration::ZERO),
            ..EnginePlan::default()
        }
    }

    /// The same engines, with a gap that is long enough to cancel in.
    fn engine_with_a_gap(&self) -> EnginePlan {
        EnginePlan {
            admission_delay: Duration::from_millis(self.admission_delay_ms),
            lease: Duration::from_millis(self.lease_ms),
            ..self.engine()
        }
    }
}

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ComparePart {
    /// Speed, without cancels.
    Calm,
    /// Blocks stranded by cancels in the gap.
    Gap,
}

/// One gateway under test.
struct CompareTarget {
    name: String,
    version: String,
    address: String,
    /// Whether the gateway uses a prefill engine of this run.
    disaggregates: bool,
    /// `None` if this run did not start the gateway.
    subject: Option<Gateway>,
}

/// Compares, and writes the tables or the JSON object to `out`.
///
/// # Errors
/// If the options are invalid, a part does not start, or every request of a target fails.
pub fn run(args: &CompareArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    args.check()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(args))?;
    Ok(print_report(&report, args.json, out, |report, out| writeln!(out, "{}", report.table()))?)
}

async fn measure(args: &CompareArgs) -> Result<CompareReport, BenchError> {
    let skips = SkipLog::default();
    let (fleet, engines) = start(args.engine())?;
    let contenders = contenders(args, engines, ComparePart::Calm, &skips).await?;
    let mut report = CompareReport::new(args, &contenders);
    for round in 0..args.rounds {
        for turn in 0..contenders.len() {
            // Each round begins with another target.
            let at = (turn + round) % contenders.len();
            let measured = calm::round(args, &contenders[at], round).await?;
            report.targets[at].add(&measured);
        }
    }
    stop(contenders);
    drop(fleet);
    if args.cancels > 0 {
        let (fleet, engines) = start(args.engine_with_a_gap())?;
        let contenders = self::contenders(args, engines, ComparePart::Gap, &skips).await?;
        for round in 0..args.rounds {
            for turn in 0..contenders.len() {
                let contender = &contenders[(turn + round) % contenders.len()];
                let cancelled = gap::round(args, &fleet, contender, round).await?;
                report.of(&contender.name).gap.get_or_insert_default().add(cancelled);
            }
        }
        stop(contenders);
    }
    report.compare();
    Ok(report)
}

fn start(engine: EnginePlan) -> Result<(SimFleet, EngineAddresses), BenchError> {
    let fleet = SimFleet::start(FleetPlan::new(1, 1, engine))?;
    let engines = EngineAddresses { prefill: fleet.prefill()[0], decode: fleet.decode()[0] };
    Ok((fleet, engines))
}

/// All available gateways, Baton first. Gateways without prefill engines are omitted for the gap.
async fn contenders(
    args: &CompareArgs,
    engines: EngineAddresses,
    part: ComparePart,
    skips: &SkipLog,
) -> Result<Vec<CompareTarget>, BenchError> {
    let mut subjects = peers::start_all(&args.programs, engines, skips).await?;
    subjects.push(toy_proxy::start(engines).await?);
    subjects.sort_by_key(|subject| match subject.name {
        "baton" => 0,
        "nginx" => 2,
        _ => 1,
    });
    let mut contenders = Vec::new();
    for subject in subjects {
        if part == ComparePart::Gap && !subject.disaggregates {
            subject.stop();
            continue;
        }
        contenders.push(CompareTarget {
            name: subject.name.to_owned(),
            version: subject.version.clone(),
            address: format!("http://{}", subject.address),
            disaggregates: subject.disaggregates,
            subject: Some(subject),
        });
    }
    for NamedUrl { name, url } in args.target.iter().filter(|_| part == ComparePart::Calm) {
        let (name, address) = (name.clone(), url.clone());
        contenders.push(CompareTarget {
            name,
            version: String::new(),
            address,
            disaggregates: false,
            subject: None,
        });
    }
    Ok(contenders)
}

fn stop(contenders: Vec<CompareTarget>) {
    contenders.into_iter().filter_map(|contender| contender.subject).for_each(Gateway::stop);
}

/// A value of a target's `gap` in a report of this or an earlier version, by its current key.
pub(crate) fn gap_value<'a>(gap: &'a serde_json::Value, key: &str) -> &'a serde_json::Value {
    let earlier = [
        key.replace("time_to_free", "blocks_back"),
        key.replace("time_to_free", "freed"),
        key.replace("cancels", "victims"),
    ];
    let found = std::iter::once(key).chain(earlier.iter().map(String::as_str)).find_map(|key| gap.get(key));
    found.unwrap_or(&serde_json::Value::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_measures_every_number_and_strands_what_it_must() {
        let args = CompareArgs {
            rounds: 2,
            requests: 8,
            concurrency: 4,
            prompt_tokens: 40,
            output_tokens: 4,
            cancels: 3,
            dialect: Dialect::Vllm,
            admission_delay_ms: 150,
            lease_ms: 1_000,
            target: Vec::new(),
            model: String::from("sim"),
            programs: ProgramArgs::default(),
            json: false,
        };
        args.check().expect("options that make sense");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let mut report = runtime.block_on(measure(&args)).expect("everything starts on loopback");
        let table = report.table();
        for name in ["baton", "toy-proxy"] {
            let target = report.of(name);
            assert_eq!(target.failed, 0, "{table}");
            assert!(target.requests_per_second.median > 0.0, "{table}");
            assert!(target.ttft_p99_ms.median >= target.ttft_p50_ms.median, "{table}");
            assert!(target.cpu_s_per_1000.as_ref().is_some_and(|cpu| cpu.median > 0.0), "{table}");
            let gap = target.gap.as_ref().expect("cancelled");
            assert_eq!((gap.cancels, gap.missed), (6, 0), "{table}");
        }
        // The toy proxy releases nothing. The router releases at P.
        let toy = report.of("toy-proxy").gap.clone().expect("cancelled");
        assert_eq!(toy.stranded, 6, "{table}");
        assert!(toy.stranded_block_seconds_per_1000 > 0.0, "{table}");
        let baton = report.of("baton").gap.clone().expect("cancelled");
        assert_eq!((baton.stranded, baton.stranded_block_seconds_per_1000), (0, 0.0), "{table}");
        // The JSON object contains the raw data and its provenance.
        let json = serde_json::to_value(&report).expect("JSON");
        assert!(json["command"].as_str().is_some_and(|command| command.contains("baton_bench")), "{json:#}");
        assert!(json["machine"].is_string() && json.get("commit").is_some());
        let toy =
            json["targets"].as_array().into_iter().flatten().find(|target| target["name"] == "toy-proxy");
        let raw = toy.and_then(|toy| toy["gap"]["raw"].as_array()).expect("cancelled");
        assert!(raw.len() == 6 && raw.iter().all(|one| one["reason"] == "lease_expired"), "{raw:#?}");
        assert!(raw.iter().all(|one| one["freed_us"].as_u64() > one["left_us"].as_u64()), "{raw:#?}");
    }

    #[test]
    fn targets_have_names_and_urls() {
        assert!("mine=http://127.0.0.1:1".parse::<NamedUrl>().is_ok());
        for bad in ["mine", "=http://127.0.0.1:1", "mine=ftp://x", "mine="] {
            assert!(bad.parse::<NamedUrl>().is_err(), "{bad}");
        }
    }
}
