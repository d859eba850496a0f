//! A deployment of our own to judge: router, prefill and decode engine as processes, each of which can be killed and
//! started again where it was.

use std::io;
use std::path::PathBuf;

use serde_json::json;

use crate::running::{Running, word};

/// One of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Router,
    Prefill,
    Decode,
}

struct Process {
    arguments: Vec<String>,
    running: Running,
    ready: String,
}

/// See the module's documentation. Ends with this value: the router first.
pub(crate) struct Own {
    router: Process,
    prefill: Process,
    decode: Process,
    config: PathBuf,
}

impl Process {
    fn start(arguments: Vec<String>) -> io::Result<Self> {
        let mut running = Running::run(&arguments)?;
        let ready = running.ready_line()?;
        Ok(Self { arguments, running, ready })
    }

    fn http(&self) -> io::Result<&str> {
        word(&self.ready, "http")
    }
}

impl Own {
    /// Starts everything; `options` go to both engines. Blocks until all of it is ready.
    ///
    /// # Errors
    /// When a part does not start.
    pub(crate) fn start(options: &[String], folder: PathBuf) -> io::Result<Self> {
        let engine = |role: &str| {
            let fixed = ["engine", "--role", role, "--listen", "127.0.0.1:0"].map(str::to_owned);
            Process::start([&fixed, options].concat())
        };
        let (mut prefill, mut decode) = (engine("prefill")?, engine("decode")?);
        for process in [&mut prefill, &mut decode] {
            // From now on it is always found in the same place.
            process.arguments[4] = process.http()?.to_owned();
        }
        let model = word(&prefill.ready, "model")?.to_owned();
        let config = folder.join("router.yaml");
        let written = |listen: &str, admin: &str| -> io::Result<()> {
            let engines = |process: &Process| -> io::Result<serde_json::Value> {
                Ok(json!({"engines": [{"url": format!("http://{}", process.http()?)}]}))
            };
            // JSON is YAML.
            let text = json!({
                "listen": listen,
                "admin": {"listen": admin},
                "models": [{
                    "name": model, "prefill": engines(&prefill)?, "decode": engines(&decode)?,
                    "fallback": "aggregate",
                }],
            });
            std::fs::write(&config, text.to_string())
        };
        written("127.0.0.1:0", "127.0.0.1:0")?;
        let router = Process::start(vec!["router".into(), "--config".into(), config.display().to_string()])?;
        written(router.http()?, word(&router.ready, "admin")?)?;
        Ok(Self { router, prefill, decode, config })
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
        *process = Process::start(process.arguments.clone())?;
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

impl Drop for Own {
    fn drop(&mut self) {
        // Its folder may be gone by then; it is nobody's any more.
        let _ = std::fs::remove_file(&self.config);
    }
}
