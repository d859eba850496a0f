//! A deployment of our own to judge: router, prefill and decode engine as processes, each of which can be killed and
//! started again where it was.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use baton_engine::compute::cuda::shared_out;
use serde_json::json;

use crate::common::processes::{Running, word};

/// One of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Router,
    Prefill,
    Decode,
}

struct Process {
    arguments: Vec<String>,
    /// Every start goes on where the one before ended.
    log: PathBuf,
    running: Running,
    ready: String,
}

/// See the module's documentation. Ends with this value: the router first.
pub(crate) struct Own {
    router: Process,
    prefill: Process,
    decode: Process,
}

impl Process {
    fn start(arguments: Vec<String>, log: PathBuf) -> io::Result<Self> {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
        let mut running = Running::run(&arguments, file)?;
        let unready = |error| io::Error::other(format!("{error}; its log is {}", log.display()));
        let ready = running.ready_line().map_err(unready)?;
        Ok(Self { arguments, log, running, ready })
    }

    fn http(&self) -> io::Result<&str> {
        word(&self.ready, "http")
    }
}

impl Own {
    /// Starts everything; `options` go to both engines, configurations to `folder`, logs to `logs`. Clients are served at
    /// this address, and one that vanishes is lost after so long. Blocks until all of it is ready.
    ///
    /// # Errors
    /// When a part does not start.
    pub(crate) fn start(
        options: &[String],
        folder: &Path,
        logs: &Path,
        listen: Ipv4Addr,
        client_lost_ms: u64,
    ) -> io::Result<Self> {
        let options = [options, &shared_out(options, 2)].concat();
        let options = options.as_slice();
        let engine = |role: &str| {
            let fixed = ["engine", "--role", role, "--listen", "127.0.0.1:0"].map(str::to_owned);
            Process::start([fixed.as_slice(), options].concat(), logs.join(format!("{role}.log")))
        };
        let (mut prefill, mut decode) = (engine("prefill")?, engine("decode")?);
        for process in [&mut prefill, &mut decode] {
            // From now on it is always found in the same place.
            process.arguments[4] = process.http()?.to_owned();
        }
        let model = word(&prefill.ready, "model")?.to_owned();
        let written = |listen: &str, admin: &str| -> io::Result<String> {
            let config = folder.join(if listen.ends_with(":0") { "first.yaml" } else { "again.yaml" });
            let engines = |process: &Process| -> io::Result<serde_json::Value> {
                Ok(json!({"engines": [{"url": format!("http://{}", process.http()?)}]}))
            };
            // JSON is YAML.
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
        Ok(Self { router, prefill, decode })
    }

    /// Where clients go.
    pub(crate) fn url(&self) -> io::Result<String> {
        Ok(format!("http://{}", self.router.http()?))
    }

    /// Each engine's name and place.
    pub(crate) fn engines(&self) -> io::Result<[(&'static str, &str); 2]> {
        Ok([("prefill", self.prefill.http()?), ("decode", self.decode.http()?)])
    }

    /// Ends a part at once.
    pub(crate) fn kill(&mut self, part: Part) -> io::Result<()> {
        self.part(part).running.kill()
    }

    /// Starts a killed part again where it was; blocks until it is ready.
    pub(crate) fn start_again(&mut self, part: Part) -> io::Result<()> {
        let process = self.part(part);
        *process = Process::start(process.arguments.clone(), process.log.clone())?;
        Ok(())
    }

    fn part(&mut self, part: Part) -> &mut Process {
        match part {
            Part::Router => &mut self.router,
            Part::Prefill => &mut self.prefill,
            Part::Decode => &mut self.decode,
        }
    }
}
