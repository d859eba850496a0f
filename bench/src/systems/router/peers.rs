//! Starts each proxy with its own documentation's recommendations for production hosts.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use baton_router::{Router, RouterConfig};

use super::RouterBenchError;
use super::gateway::{self, Gateway, HTTP2_THREADS, THREADS};
use crate::common::http_client::ServiceClient;

/// The addresses of the two simulated engines.
#[derive(Clone, Copy)]
pub(crate) struct EngineAddresses {
    pub prefill: SocketAddr,
    pub decode: SocketAddr,
}

/// Programs of the gateways: options of every benchmark that starts gateways.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ProgramArgs {
    /// `baton` binary to run the router as a process [default: this one, or threads if this is another
    /// program]
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
    /// Binary of nginx [default: the one in PATH]
    #[arg(long, value_name = "FILE", env = "BATON_BENCH_NGINX")]
    pub nginx: Option<PathBuf>,
    /// Directory with the programs of other routers, as made by `bench/peers.sh`
    #[arg(long, value_name = "DIR", env = "BATON_BENCH_PEERS")]
    pub peers: Option<PathBuf>,
}

/// Skipped gateways. Each is reported once, even if gateways are started several times.
#[derive(Default)]
pub(crate) struct SkipLog(std::cell::RefCell<Vec<String>>);

impl SkipLog {
    fn report(&self, who: &str, why: &str) {
        let line = format!("SKIPPED {who}: {why}");
        let mut reported = self.0.borrow_mut();
        if !reported.contains(&line) {
            crate::note(format_args!("baton bench: {line}"));
            reported.push(line);
        }
    }
}

/// Starts all available gateways. Missing ones are reported on standard error.
pub(crate) async fn start_all(
    programs: &ProgramArgs,
    engines: EngineAddresses,
    skips: &SkipLog,
) -> Result<Vec<Gateway>, RouterBenchError> {
    let mut subjects = Vec::new();
    let nginx = programs.nginx.clone().or_else(|| in_path("nginx"));
    match nginx {
        Some(binary) => subjects.push(nginx_proxy(&binary, engines).await?),
        None => skips.report("nginx", "not found; install it or name it with --nginx"),
    }
    subjects.push(baton(programs.binary.as_ref(), engines, EngineHttp::One).await?);
    match &programs.peers {
        Some(folder) => {
            for (name, start) in [("vllm-router", vllm_router as StartFn), ("smg", smg as StartFn)] {
                let binary = folder.join(name);
                if !binary.exists() {
                    skips.report(name, "not in the folder of --peers");
                    continue;
                }
                let (address, command) = start(&binary, engines)?;
                let version = package_version(folder, name);
                let registers = (name == "smg").then(|| tokio::spawn(register(address, engines)));
                match Gateway::process(name, version, address, command, Vec::new()).await {
                    Ok(subject) => subjects.push(subject),
                    Err(error) => skips.report(name, &error.to_string()),
                }
                if let Some(registers) = registers {
                    registers.abort();
                }
            }
        }
        None => skips.report("vllm-router and smg", "--peers names the folder where bench/peers.sh put them"),
    }
    Ok(subjects)
}

type StartFn = fn(&Path, EngineAddresses) -> Result<(SocketAddr, Command), RouterBenchError>;

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The first line of a program's version output.
fn version(binary: &Path, option: &str) -> String {
    let output = Command::new(binary).arg(option).output().ok();
    let text = output.map(|out| [out.stdout, out.stderr].concat()).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().next().unwrap_or("unknown").trim().to_owned()
}

fn package_version(folder: &Path, name: &str) -> String {
    let asked = Command::new(folder.join("python"))
        .args(["-c", "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))", name])
        .output();
    asked.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned()).unwrap_or_default()
}

/// Plain reverse proxy, one hop, to the decode engine, with kept connections and unbuffered events.
async fn nginx_proxy(binary: &Path, engines: EngineAddresses) -> Result<Gateway, RouterBenchError> {
    let address = gateway::free()?;
    let decode = engines.decode;
    // Several benchmarks may run in one process.
    let name = format!("baton-bench-nginx-{}-{}", std::process::id(), address.port());
    let folder = std::env::temp_dir().join(name);
    let system = |error| RouterBenchError::System("no configuration for nginx", error);
    std::fs::create_dir_all(&folder).map_err(system)?;
    let (folder_text, file) = (folder.display(), folder.join("nginx.conf"));
    let config = format!(
        "daemon off;\nuser root;\nworker_processes auto;\npid {folder_text}/pid;\n\
         error_log stderr error;\nworker_rlimit_nofile 20000;\nevents {{ worker_connections 16384; }}\n\
         http {{\n  access_log off;\n  client_body_temp_path {folder_text}/body;\n  \
         proxy_temp_path {folder_text}/proxy;\n  fastcgi_temp_path {folder_text}/f;\n  \
         uwsgi_temp_path {folder_text}/u;\n  scgi_temp_path {folder_text}/s;\n  \
         keepalive_requests 100000000;\n  upstream decode {{ server {decode}; keepalive 256; \
         keepalive_requests 100000000; }}\n  server {{\n    listen {address} backlog=4096;\n    location / {{\n      \
         proxy_pass http://decode;\n      proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n      \
         proxy_buffering off;\n      proxy_read_timeout 600s;\n    }}\n  }}\n}}\n"
    );
    std::fs::write(&file, config).map_err(system)?;
    let mut command = Command::new(binary);
    command.arg("-p").arg(&folder).arg("-c").arg(&file);
    let version = version(binary, "-v");
    let mut nginx = Gateway::process("nginx", version, address, command, vec![file]).await?;
    nginx.disaggregates = false;
    Ok(nginx)
}

fn vllm_router(binary: &Path, engines: EngineAddresses) -> Result<(SocketAddr, Command), RouterBenchError> {
    let (address, metrics) = (gateway::free()?, gateway::free()?);
    let mut command = Command::new(binary);
    command
        .args(["--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error"])
        .args(["--host", "127.0.0.1", "--port", &address.port().to_string()])
        .args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.port().to_string()])
        .args(["--kv-connector", "nixl", "--max-concurrent-requests", "16384"])
        .args(["--prefill", &format!("http://{}", engines.prefill)])
        .args(["--decode", &format!("http://{}", engines.decode)]);
    Ok((address, command))
}

fn smg(binary: &Path, _registered_later: EngineAddresses) -> Result<(SocketAddr, Command), RouterBenchError> {
    let (address, metrics) = (gateway::free()?, gateway::free()?);
    let mut command = Command::new(binary);
    command
        .args(["launch", "--pd-disaggregation", "--policy", "round_robin", "--log-level", "error"])
        .args(["--host", "127.0.0.1", "--port", &address.port().to_string()])
        .args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.port().to_string()])
        .args(["--disable-tokenizer-autoload", "--backend", "vllm", "--max-concurrent-requests", "16384"]);
    Ok((address, command))
}

/// Registers the engines at smg as engines with the NixlConnector. Engines on smg's command line count as engines
/// without a connector, which get no handoff (smg 1.13.0). Retries until smg accepts.
async fn register(address: SocketAddr, engines: EngineAddresses) {
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(100);
    let Ok(smg) = ServiceClient::parse(&address.to_string()) else { return };
    for (role, engine) in [("prefill", engines.prefill), ("decode", engines.decode)] {
        let worker = serde_json::json!({
            "url": format!("http://{engine}"), "worker_type": role, "runtime_type": "vllm",
            "kv_connector": "NixlConnector", "kv_role": "kv_both",
        });
        while smg.post_json("/workers", &worker, PATIENCE).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The version of HTTP between the router and its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineHttp {
    One,
    Two,
}

impl EngineHttp {
    fn subject(self) -> &'static str {
        match self {
            Self::One => "baton",
            Self::Two => "baton-http2",
        }
    }
}

fn yaml(listen: SocketAddr, admin: SocketAddr, engines: EngineAddresses, http: EngineHttp) -> String {
    let EngineAddresses { prefill, decode } = engines;
    let http2 = match http {
        EngineHttp::One => "auto",
        EngineHttp::Two => "on",
    };
    format!(
        "listen: {listen}\nadmin: {{listen: '{admin}'}}\nmodels:\n  - name: sim\n    http2: {http2}\n    \
         prefill: {{engines: [{{url: 'http://{prefill}'}}]}}\n    \
         decode: {{engines: [{{url: 'http://{decode}'}}]}}\n"
    )
}

/// The router with only its engines configured.
pub(super) async fn baton(
    binary: Option<&PathBuf>,
    engines: EngineAddresses,
    http: EngineHttp,
) -> Result<Gateway, RouterBenchError> {
    let Some(binary) = binary.cloned().or_else(this_binary) else { return threads(engines, http).await };
    let (address, admin) = (gateway::free()?, gateway::free()?);
    let name = http.subject();
    let file = std::env::temp_dir().join(format!("baton-bench-router-{}-{name}.yaml", std::process::id()));
    std::fs::write(&file, yaml(address, admin, engines, http))
        .map_err(|error| RouterBenchError::System("no configuration", error))?;
    let mut command = Command::new(&binary);
    command.args(["router", "-c"]).arg(&file);
    let version = version(&binary, "--version");
    Gateway::process(name, version, address, command, vec![file]).await
}

/// The running program, if it has a `router` command.
fn this_binary() -> Option<PathBuf> {
    std::env::current_exe().ok().filter(|path| path.file_stem().is_some_and(|stem| stem == "baton"))
}

async fn threads(engines: EngineAddresses, http: EngineHttp) -> Result<Gateway, RouterBenchError> {
    let not_started = |error: &dyn std::fmt::Display| RouterBenchError::Router(error.to_string());
    let config = RouterConfig::from_yaml(&yaml(gateway::any(), gateway::any(), engines, http), "bench")
        .map_err(|error| not_started(&error))?;
    let start = move || async move {
        let router = Router::bind(config).await.map_err(|error| not_started(&error))?;
        Ok::<_, RouterBenchError>((router.local_addr(), router.run(Default::default())))
    };
    let threads = match http {
        EngineHttp::One => THREADS,
        EngineHttp::Two => HTTP2_THREADS,
    };
    Gateway::threads(http.subject(), threads, start).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::instant::{SimEngine, SimRole};

    #[tokio::test]
    async fn a_missing_program_is_reported_once_per_run() {
        let start = |role| SimEngine::start(role).expect("a simulated engine");
        let (prefill, decode) =
            (start(SimRole::Prefill), start(SimRole::Decode { tokens: 1, pause: Duration::ZERO }));
        let engines = EngineAddresses { prefill: prefill.address(), decode: decode.address() };
        let folder = tempfile::tempdir().expect("a folder");
        let programs = ProgramArgs { peers: Some(folder.path().to_owned()), ..ProgramArgs::default() };
        let skips = SkipLog::default();
        for _ in 0..2 {
            let subjects = start_all(&programs, engines, &skips).await.expect("ours starts");
            assert!(subjects.iter().any(|subject| subject.name == "baton"));
            subjects.into_iter().for_each(Gateway::stop);
        }
        let reported = skips.0.borrow();
        let of = |who: &str| reported.iter().filter(|line| line.contains(&format!(" {who}:"))).count();
        assert_eq!((of("vllm-router"), of("smg")), (1, 1), "{reported:?}");
    }
}
