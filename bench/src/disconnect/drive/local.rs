//! A deployment that is started for the run: router, prefill and decode engine as processes. Each can be killed and
//! restarted at its address. Simulated engines without a network between them are one process, which is not killed.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use baton_engine::compute::cuda::shared_out;
use serde_json::json;

use crate::common::processes::{ChildProcess, word};
use crate::disconnect::plan::options::StartedEngines;

/// A process of the deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeploymentPart {
    Router,
    Prefill,
    Decode,
}

impl DeploymentPart {
    /// All parts, in the order in which they are killed.
    pub(crate) const ALL: [Self; 3] = [Self::Decode, Self::Prefill, Self::Router];
}

struct Process {
    arguments: Vec<String>,
    /// A restart appends to the log.
    log: PathBuf,
    running: ChildProcess,
    ready: String,
    /// The name of the address in the "ready" line.
    address: &'static str,
}

/// See the module's documentation. Dropping the value ends the processes, the router first.
pub(crate) struct LocalDeployment {
    router: Process,
    prefill: Process,
    /// `None`: in the process of the prefill engine.
    decode: Option<Process>,
    /// The configurations. Kept until the processes have ended.
    _folder: tempfile::TempDir,
}

impl Process {
    fn start(arguments: Vec<String>, log: PathBuf, address: &'static str) -> io::Result<Self> {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
        let mut running = ChildProcess::run(&arguments, file)?;
        let unready = |error| io::Error::other(format!("{error}; its log is {}", log.display()));
        let ready = running.ready_line().map_err(unready)?;
        Ok(Self { arguments, log, running, ready, address })
    }

    fn http(&self) -> io::Result<&str> {
        word(&self.ready, self.address)
    }

    /// Sets the value of an option.
    fn set(&mut self, option: &str, value: String) {
        let at = self.arguments.iter().position(|argument| argument == option).expect("it has the option");
        self.arguments[at + 1] = value;
    }
}

/// Baton's engines, on one device if there is only one.
fn baton_engines(options: &[String], logs: &Path) -> io::Result<[Process; 2]> {
    let options = [options, &shared_out(options, 2)].concat();
    let engine = |role: &str| {
        let fixed = ["engine", "--role", role, "--listen", "127.0.0.1:0"].map(str::to_owned);
        Process::start([fixed.as_slice(), &options].concat(), logs.join(format!("{role}.log")), "http")
    };
    let mut engines = [engine("prefill")?, engine("decode")?];
    for process in &mut engines {
        // A restart uses the same address.
        let at = process.http()?.to_owned();
        process.set("--listen", at);
    }
    Ok(engines)
}

/// Simulated SGLang engines. They find each other by the bootstrap address in requests.
fn sglang_engines(options: &[String], logs: &Path) -> io::Result<[Process; 2]> {
    let engine = |role: &'static str, other: &str| {
        let numbers = [format!("--{role}"), "1".to_owned(), format!("--{other}"), "0".to_owned()];
        let fixed = ["bench", "sim", "--dialect", "sglang", "--port", "0", "--bootstrap-port", "0"];
        let arguments = [fixed.map(str::to_owned).as_slice(), &numbers, options].concat();
        Process::start(arguments, logs.join(format!("{role}.log")), role)
    };
    let mut engines = [engine("prefill", "decode")?, engine("decode", "prefill")?];
    for process in &mut engines {
        let port = split_port(process.http()?)?.1;
        process.set("--port", port.to_string());
    }
    let bootstrap = split_port(word(&engines[0].ready, "bootstrap")?)?.1;
    engines[0].set("--bootstrap-port", bootstrap.to_string());
    Ok(engines)
}

/// Simulated engines that find each other within their process.
fn engines_of_one_process(dialect: &str, options: &[String], logs: &Path) -> io::Result<Process> {
    let fixed = ["bench", "sim", "--prefill", "1", "--decode", "1", "--dialect", dialect].map(str::to_owned);
    Process::start([fixed.as_slice(), options].concat(), logs.join("engines.log"), "prefill")
}

/// The model name of simulated engines with these options.
fn served_model(options: &[String]) -> String {
    let named = options.iter().position(|option| option == "--served-model-name");
    named.and_then(|at| options.get(at + 1)).map_or("sim", String::as_str).to_owned()
}

/// The decode engine's address.
fn decode_address<'a>(prefill: &'a Process, decode: Option<&'a Process>) -> io::Result<&'a str> {
    decode.map_or_else(|| word(&prefill.ready, "decode"), Process::http)
}

fn split_port(address: &str) -> io::Result<(&str, u16)> {
    let split = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    split.ok_or_else(|| io::Error::other(format!("`{address}` is no address")))
}

impl LocalDeployment {
    /// Starts all processes and blocks until they are ready. `options` are for both engines; `logs` is the folder of
    /// their logs. The router listens at `listen` and drops a vanished client after `client_lost_ms`.
    ///
    /// # Errors
    /// If a process does not start.
    pub(crate) fn start(
        kind: StartedEngines,
        options: &[String],
        logs: &Path,
        listen: Ipv4Addr,
        client_lost_ms: u64,
    ) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let in_two = |[prefill, decode]: [Process; 2]| (prefill, Some(decode));
        let in_one = |dialect| engines_of_one_process(dialect, options, logs).map(|engines| (engines, None));
        let (prefill, decode) = match kind {
            StartedEngines::Baton => in_two(baton_engines(options, logs)?),
            StartedEngines::Sglang => in_two(sglang_engines(options, logs)?),
            StartedEngines::SimBaton => in_one("baton")?,
            StartedEngines::Vllm => in_one("vllm")?,
            StartedEngines::VllmPush => in_one("vllm-push")?,
            StartedEngines::Simulated => return Err(io::Error::other("each protocol is a run of its own")),
        };
        let model = match kind {
            StartedEngines::Baton => word(&prefill.ready, "model")?.to_owned(),
            _ => served_model(options),
        };
        let addresses = [prefill.http()?.to_owned(), decode_address(&prefill, decode.as_ref())?.to_owned()];
        let written = |listen: &str, admin: &str| -> io::Result<String> {
            let config = folder.path().join(if listen.ends_with(":0") { "first.yaml" } else { "again.yaml" });
            let [prefills, decodes] =
                addresses.each_ref().map(|at| json!({"engines": [{"url": format!("http://{at}")}]}));
            let mut served = json!({"name": model, "prefill": prefills, "decode": decodes});
            match kind {
                StartedEngines::Baton => served["fallback"] = "aggregate".into(),
                StartedEngines::Sglang => {
                    let (host, port) = split_port(word(&prefill.ready, "bootstrap")?)?;
                    served["protocol"] = "sglang".into();
                    let engine = &mut served["prefill"]["engines"][0];
                    (engine["bootstrap_host"], engine["bootstrap_port"]) = (host.into(), port.into());
                }
                _ => {}
            }
            // JSON is valid YAML.
            let text = json!({
                "listen": listen,
                "admin": {"listen": admin},
                "timeouts": {"client_lost_ms": client_lost_ms},
                "models": [served],
            });
            std::fs::write(&config, text.to_string())?;
            Ok(config.display().to_string())
        };
        let config = written(&format!("{listen}:0"), "127.0.0.1:0")?;
        let arguments = vec!["router".into(), "--config".into(), config];
        let mut router = Process::start(arguments, logs.join("router.log"), "http")?;
        router.arguments[2] = written(router.http()?, word(&router.ready, "admin")?)?;
        Ok(Self { router, prefill, decode, _folder: folder })
    }

    /// The URL for clients.
    pub(crate) fn url(&self) -> io::Result<String> {
        Ok(format!("http://{}", self.router.http()?))
    }

    /// Name and address of each engine.
    pub(crate) fn engines(&self) -> io::Result<[(&'static str, &str); 2]> {
        let decode = decode_address(&self.prefill, self.decode.as_ref())?;
        Ok([("prefill", self.prefill.http()?), ("decode", decode)])
    }

    /// Whether a part is a process of its own.
    pub(crate) fn can_kill(&self, part: DeploymentPart) -> bool {
        part == DeploymentPart::Router || self.decode.is_some()
    }

    /// Kills a process.
    pub(crate) fn kill(&mut self, part: DeploymentPart) -> io::Result<()> {
        self.part(part).running.kill()
    }

    /// Restarts a killed process at its address; blocks until it is ready.
    pub(crate) fn start_again(&mut self, part: DeploymentPart) -> io::Result<()> {
        let process = self.part(part);
        *process = Process::start(process.arguments.clone(), process.log.clone(), process.address)?;
        Ok(())
    }

    fn part(&mut self, part: DeploymentPart) -> &mut Process {
        match part {
            DeploymentPart::Router => &mut self.router,
            DeploymentPart::Prefill => &mut self.prefill,
            DeploymentPart::Decode => self.decode.as_mut().expect("engines of one process are not killed"),
        }
    }
}
