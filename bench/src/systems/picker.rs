//! `baton bench picker`: the cost of a choice by the endpoint picker, beside that of a whole request through the router.
//!
//! Picker and router have the same pool and policy and run on named threads of this process, whose CPU time is
//! counted. The client plays a gateway (Envoy with response headers and no response body): per request one ext_proc
//! stream with headers, a body, the response's headers and the end. The router forwards the same body to a simulated
//! engine on its own thread, which answers at once. Rounds alternate. Each number is the median of the repetitions.
//!
//! The client's work (gRPC by tonic, on one thread) limits the decisions per second, not the CPU per decision.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_router::{Picker, Router, RouterConfig};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, ProcessingRequest};
use futures::stream;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::common::report::print_report;
use crate::common::stats::{SampleSummary, Spread};
use crate::sim::instant::{SimEngine, SimRole};
use crate::systems::router::RouterBenchError;
use crate::systems::router::connection::{KeptConnection, request};
use crate::systems::router::gateway::Gateway;

/// Options of `baton bench picker`.
#[derive(Clone, Debug, clap::Args)]
pub struct PickerArgs {
    /// Repetitions; medians and spread are over them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Requests per subject and repetition
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Concurrent requests
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,
    /// Bytes of a prompt
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_bytes: u32,
    /// Policy of the pool
    #[arg(long, value_name = "NAME", default_value = "prefix_aware")]
    pub policy: String,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What one subject needed.
#[derive(Clone, Debug, Serialize)]
struct PickerCosts {
    /// `picker` or `router`.
    subject: &'static str,
    /// CPU microseconds of the subject's threads per request.
    cpu_us: Spread,
    /// Requests per second.
    requests_per_second: Spread,
    /// Median time from the request to the reply (picker) or to the response (router), microseconds.
    p50_us: Spread,
    /// The same, 99th percentile.
    p99_us: Spread,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
struct PickerReport {
    /// Concurrent requests.
    concurrency: u32,
    /// Bytes of a prompt.
    prompt_bytes: u32,
    /// Policy of the pool.
    policy: String,
    /// Costs of both subjects.
    costs: Vec<PickerCosts>,
}

/// Measurements of one subject, one entry per repetition.
#[derive(Default)]
struct PickerSamples {
    cpu_us: Vec<f64>,
    requests_per_second: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
}

/// The latencies of a task's requests, microseconds.
type Latencies = Result<Vec<f64>, RouterBenchError>;

/// Measures, and writes the table or the JSON object to `out`.
///
/// # Errors
/// If a subject does not start or a request fails.
pub fn run(args: &PickerArgs, out: &mut dyn Write) -> Result<(), RouterBenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| RouterBenchError::System("no runtime", error))?;
    let report = runtime.block_on(measure(args))?;
    print_report(&report, args.json, out, |report, out| write!(out, "{}", table(report)))
        .map_err(|error| RouterBenchError::System("cannot write the report", error))
}

async fn measure(args: &PickerArgs) -> Result<PickerReport, RouterBenchError> {
    let role = SimRole::Decode { tokens: 1, pause: Duration::ZERO };
    let engine = SimEngine::start(role).map_err(|error| RouterBenchError::System("no engine", error))?;
    let config = config(args, engine.address())?;
    let picker = start_picker(config.clone()).await?;
    let router = start_router(config).await?;
    let mut samples = [PickerSamples::default(), PickerSamples::default()];
    let each = args.requests.div_ceil(args.concurrency);
    // The first round of each subject opens connections and fills the known caches.
    for repetition in 0..=args.repetitions {
        for (subject, samples) in [&picker, &router].into_iter().zip(&mut samples) {
            let (cpu, begun) = (subject.cpu()?, Instant::now());
            let tasks = if subject.name == "picker" {
                picks(args, subject.address, each).await?
            } else {
                requests(args, subject.address, each)
            };
            let latencies = all(tasks).await?;
            let (took, used) = (begun.elapsed(), subject.cpu()?.saturating_sub(cpu));
            if repetition > 0 {
                samples.add(latencies, took, used);
            }
        }
    }
    picker.stop();
    router.stop();
    let costs = ["picker", "router"].into_iter().zip(samples).filter_map(|(name, all)| all.costs(name));
    Ok(PickerReport {
        concurrency: args.concurrency,
        prompt_bytes: args.prompt_bytes,
        policy: args.policy.clone(),
        costs: costs.collect(),
    })
}

impl PickerSamples {
    fn add(&mut self, latencies: Vec<f64>, took: Duration, used: Duration) {
        let count = latencies.len() as f64;
        self.cpu_us.push(used.as_secs_f64() * 1e6 / count);
        self.requests_per_second.push(count / took.as_secs_f64());
        if let Some(summary) = SampleSummary::of(latencies, &[50.0, 99.0]) {
            self.p50_us.extend(summary.percentile(50.0));
            self.p99_us.extend(summary.percentile(99.0));
        }
    }

    fn costs(self, subject: &'static str) -> Option<PickerCosts> {
        Some(PickerCosts {
            subject,
            cpu_us: Spread::of(self.cpu_us)?,
            requests_per_second: Spread::of(self.requests_per_second)?,
            p50_us: Spread::of(self.p50_us)?,
            p99_us: Spread::of(self.p99_us)?,
        })
    }
}

fn config(args: &PickerArgs, engine: SocketAddr) -> Result<RouterConfig, RouterBenchError> {
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\n\
         models:\n  - {{name: sim, decode: {{policy: {}, engines: [{{url: 'http://{engine}'}}]}}}}\n",
        args.policy
    );
    let mut config = RouterConfig::from_yaml(&yaml, "bench")
        .map_err(|error| RouterBenchError::Router(error.to_string()))?;
    config.picker.listen.set_port(0);
    config.picker.health_listen.set_port(0);
    Ok(config)
}

async fn start_picker(config: RouterConfig) -> Result<Gateway, RouterBenchError> {
    let start = || async {
        let picker = Picker::bind(config).await;
        let picker = picker.map_err(|error| RouterBenchError::Router(error.to_string()))?;
        let address = picker.local_addr();
        Ok((address, picker.run(CancellationToken::new())))
    };
    Gateway::threads("picker", "bench-picker", start).await
}

async fn start_router(config: RouterConfig) -> Result<Gateway, RouterBenchError> {
    let start = || async {
        let router = Router::bind(config).await;
        let router = router.map_err(|error| RouterBenchError::Router(error.to_string()))?;
        let address = router.local_addr();
        Ok((address, router.run(CancellationToken::new())))
    };
    Gateway::threads("router", "bench-router", start).await
}

/// The body of one request. Each has a prompt of its own, whose beginning many share.
fn body(args: &PickerArgs, task: u32, number: u32) -> String {
    let start = format!("conversation {} ", task % 16);
    let shared = start.repeat(args.prompt_bytes as usize / start.len());
    format!(r#"{{"model":"sim","prompt":"{shared}{number}","max_tokens":1}}"#)
}

/// Choices by the picker: one connection, as of one worker thread of a gateway.
async fn picks(
    args: &PickerArgs,
    address: SocketAddr,
    each: u32,
) -> Result<JoinSet<Latencies>, RouterBenchError> {
    let channel = Channel::from_shared(format!("http://{address}")).map_err(failed)?;
    let client = ExternalProcessorClient::new(channel.connect().await.map_err(failed)?);
    let mut tasks = JoinSet::new();
    for task in 0..args.concurrency {
        let (client, args) = (client.clone(), args.clone());
        tasks.spawn(async move {
            let mut latencies = Vec::with_capacity(each as usize);
            for number in 0..each {
                latencies.push(pick(client.clone(), body(&args, task, number)).await?);
            }
            Ok(latencies)
        });
    }
    Ok(tasks)
}

/// One stream. Returns the time from its last request message to the endpoint.
async fn pick(mut client: ExternalProcessorClient<Channel>, body: String) -> Result<f64, RouterBenchError> {
    // A stream sends four messages at most.
    let (sender, receiver) = mpsc::channel(4);
    let messages =
        stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
    let send = |request| {
        let message = ProcessingRequest { request: Some(request), ..ProcessingRequest::default() };
        sender.try_send(message).map_err(failed)
    };
    let head = [(":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json")];
    send(Request::RequestHeaders(headers(&head)))?;
    send(Request::RequestBody(HttpBody { body: body.into(), ..HttpBody::default() }))?;
    send(Request::RequestBody(HttpBody { end_of_stream: true, ..HttpBody::default() }))?;
    let begun = Instant::now();
    let mut replies = client.process(messages).await.map_err(failed)?.into_inner();
    let reply = replies.message().await.map_err(failed)?;
    let latency = begun.elapsed().as_secs_f64() * 1e6;
    if !matches!(reply.and_then(|reply| reply.response), Some(Response::RequestHeaders(_))) {
        return Err(failed("no endpoint"));
    }
    replies.message().await.map_err(failed)?;
    send(Request::ResponseHeaders(headers(&[(":status", "200")])))?;
    replies.message().await.map_err(failed)?;
    drop(sender);
    match replies.message().await.map_err(failed)? {
        None => Ok(latency),
        Some(_) => Err(failed("a message after the response")),
    }
}

fn headers(fields: &[(&str, &str)]) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = HeaderMap { headers: fields.iter().map(field).collect() };
    HttpHeaders { headers: Some(headers), ..HttpHeaders::default() }
}

/// Whole requests through the router, each task on its own connection.
fn requests(args: &PickerArgs, address: SocketAddr, each: u32) -> JoinSet<Latencies> {
    let mut tasks = JoinSet::new();
    for task in 0..args.concurrency {
        let args = args.clone();
        tasks.spawn(async move {
            let mut connection = KeptConnection::connect(address).await?;
            let mut latencies = Vec::with_capacity(each as usize);
            for number in 0..each {
                let request = request(&body(&args, task, number));
                let begun = Instant::now();
                connection.post(&request).await?;
                latencies.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            Ok(latencies)
        });
    }
    tasks
}

async fn all(mut tasks: JoinSet<Latencies>) -> Latencies {
    let mut latencies = Vec::new();
    while let Some(done) = tasks.join_next().await {
        latencies.extend(done.map_err(failed)??);
    }
    Ok(latencies)
}

fn failed(error: impl std::fmt::Display) -> RouterBenchError {
    RouterBenchError::Request(error.to_string())
}

fn table(report: &PickerReport) -> String {
    let mut text = format!(
        "{} concurrent, prompts of {} bytes, {}\n{:<8} {:>16} {:>12} {:>10} {:>10}\n",
        report.concurrency,
        report.prompt_bytes,
        report.policy,
        "",
        "CPU µs/request",
        "requests/s",
        "p50 µs",
        "p99 µs"
    );
    for costs in &report.costs {
        let [cpu, rate, p50, p99] =
            [&costs.cpu_us, &costs.requests_per_second, &costs.p50_us, &costs.p99_us].map(|s| s.median);
        text.push_str(&format!("{:<8} {cpu:>16.1} {rate:>12.0} {p50:>10.0} {p99:>10.0}\n", costs.subject));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_measures_picker_and_router() {
        let args = PickerArgs {
            repetitions: 1,
            requests: 40,
            concurrency: 4,
            prompt_bytes: 500,
            policy: "prefix_aware".to_owned(),
            json: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let report = runtime.block_on(measure(&args)).expect("everything starts on loopback");
        assert_eq!(report.costs.iter().map(|costs| costs.subject).collect::<Vec<_>>(), ["picker", "router"]);
        for costs in &report.costs {
            assert!(
                costs.cpu_us.median > 1.0 && costs.requests_per_second.median > 1.0,
                "{}",
                table(&report)
            );
            assert!(costs.p99_us.median >= costs.p50_us.median, "{}", table(&report));
        }
    }
}
