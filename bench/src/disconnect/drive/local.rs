//! A deployment that is started for the run: router, prefill and decode engine as processes. Each can be killed and
//! restarted at its address.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use baton_engine::compute::cuda::shared_out;
use serde_json::json;

use crate::common::processes::{ChildProcess, word};

/// A process of the deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeploymentPart {
    Router,
    Prefill,
    Decode,
}

struct Process {
    arguments: Vec<String>,
    /// A restart appends to the log.
    log: PathBuf,
    running: ChildProcess,
    ready: String,
}

/// See the module's documentation. Dropping the value ends the processes, the router first.
pub(crate) struct LocalDeployment {
    router: Process,
    prefill: Process,
    decode: Process,
    /// The configurations. Kept until the processes have ended.
    _folder: tempfile::TempDir,
}

impl Process {
    fn start(arguments: Vec<String>, log: PathBuf) -> io::Result<Self> {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
        let mut running = ChildProcess::run(&arguments, file)?;
        let unready = |error| io::Error::other(format!("{error}; its log is {}", log.display()));
        let ready = running.ready_line().map_err(unready)?;
        Ok(Self { arguments, log, running, ready })
    }

    fn http(&self) -> io::Result<&str> {
        word(&self.ready, "http")
    }
}

impl LocalDeployment {
    /// Starts all processes and blocks until they are ready. `options` are for both engines; `logs` is the folder of
    /// their logs. The router listens at `listen` and drops a vanished client after `client_lost_ms`.
    ///
    /// # Errors
    /// If a process does not start.
    pub(crate) fn start(
        options: &[String],
        logs: &Path,
        listen: Ipv4Addr,
        client_lost_ms: u64,
    ) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let options = [options, &shared_out(options, 2)].concat();
        let options = options.as_slice();
        let engine = |role: &str| {
            let fixed = ["engine", "--role", role, "--listen", "127.0.0.1:0"].map(str::to_owned);
            Process::start([fixed.as_slice(), options].concat(), logs.join(format!("{role}.log")))
        };
        let (mut prefill, mut decode) = (engine("prefill")?, engine("decode")?);
        for process in [&mut prefill, &mut decode] {
            // A restart uses the same address.
            process.arguments[4] = process.http()?.to_owned();
        }
        let model = word(&prefill.ready, "model")?.to_owned();
        let written = |listen: &str, admin: &str| -> io::Result<String> {
            let config = folder.path().join(if listen.ends_with(":0") { "first.yaml" } else { "again.yaml" });
            let engines = |process: &Process| -> io::Result<serde_json::Value> {
                Ok(json!({"engines": [{"url": format!("http://{}", process.http()?)}]}))
            };
            // JSON is valid YAML.
            let text = json!({
                "listen": listen,
                "admin": {"listen": admin},
                "timeouts": {"client_lost_ms": client_lost_ms},
                "models": [{
                    "name": model, "prefill": engines(&prefill)?, "decode": engines(&decode)?,
                    "fallback": "aggregate",
                }],
            });
            std::fs::write(&config, text.to_string())?;
            Ok(config.display().to_string())
        };
        let config = written(&format!("{listen}:0"), "127.0.0.1:0")?;
        let arguments = vec!["router".into(), "--config".into(), config];
        let mut router = Process::start(arguments, logs.join("router.log"))?;
        router.arguments[2] = written(router.http()?, word(&router.ready, "admin")?)?;
        Ok(Self { router, prefill, decode, _folder: folder })
    }

    /// The URL for clients.
    pub(crate) fn url(&self) -> io::Result<String> {
        Ok(format!("http://{}", self.router.http()?))
    }

    /// Name and address of each engine.
    pub(crate) fn engines(&self) -> io::Result<[(&'static str, &str); 2]> {
        Ok([("prefill", self.prefill.http()?), ("decode", self.decode.http()?)])
    }

    /// Kills a process.
    pub(crate) fn kill(&mut self, part: DeploymentPart) -> io::Result<()> {
        self.part(part).running.kill()
    }

    /// Restarts a killed process at its address; blocks until it is ready.
    pub(crate) fn start_again(&mut self, part: DeploymentPart) -> io::Result<()> {
        let process = self.part(part);
        *process = Process::start(process.arguments.clone(), process.log.clone())?;
        Ok(())
    }

    fn part(&mut self, part: DeploymentPart) -> &mut Process {
        match part {
            DeploymentPart::Router => &mut self.router,
            DeploymentPart::Prefill => &mut self.prefill,
            DeploymentPart::Decode => &mut self.decode,
        }
    }
}
