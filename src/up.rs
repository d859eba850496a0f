//! `baton up`: router, prefill engine and decode engine as separate processes on this machine.
//!
//! ```text
//!  start engines ─▶ both ready ─▶ start router ─▶ banner ─▶ watch ─┬─ an engine ends: start it again, same ports
//!                                                                  ├─ the router ends: stop everything, fail
//!                                                                  └─ Ctrl-C: router drains, then the engines
//! ```
//!
//! Children hold the read end of a pipe. The pipe closes when this process ends, for any reason, and the children then
//! shut down. The children are in process groups of their own. A Ctrl-C in a terminal therefore reaches only this
//! process, and the order of the drain is kept.
//!
//! The router inherits its configuration as an open file without a name, so that no file stays behind when this process
//! ends.

mod child;
mod config;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_engine::compute::cuda::shared_out;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::cli::UpArgs;
use crate::output::{note, say};
use crate::{Failure, builtin, shutdown};
use child::Child;
use config::ConfigFile;

/// Maximum time to load a model.
const ENGINE_START: Duration = Duration::from_secs(600);

/// Maximum time until the router is ready.
const ROUTER_START: Duration = Duration::from_secs(30);

/// Longest wait for a child to drain before it is killed. Longer than the engines' own shutdown timeout.
const DRAIN: Duration = Duration::from_secs(45);

/// Default admin port of `baton top`, `baton explain` and `baton doctor`.
const ADMIN_PORT: u16 = 8081;

/// An engine that ends this many times within [`RESTART_WINDOW`] is not started again.
const RESTARTS_MAX: usize = 5;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// The options of one engine, kept for a restart with the same ports.
struct EngineSpec {
    role: &'static str,
    options: Vec<String>,
    /// The engine's ports, once known.
    address: Option<String>,
}

struct Stack {
    router: Child,
    prefill: Child,
    decode: Child,
    specs: [EngineSpec; 2],
    restarts: Vec<Instant>,
}

pub(crate) fn run(args: UpArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Checks the port before a model is loaded, so that an address in use is reported at once.
    let taken = |error| format!("cannot listen on {}: {error}; choose another with --listen", args.listen);
    drop(std::net::TcpListener::bind(args.listen).map_err(taken)?);
    if let Some(admin) = args.admin_listen {
        if !admin.ip().is_loopback() {
            return Err(format!(
                "--admin-listen {admin} is beyond loopback, and the admin listener of `baton up` has no token; run \
                 `baton router` with `admin.token_file`"
            )
            .into());
        }
        let taken = |error| format!("cannot listen on {admin}: {error}; choose another with --admin-listen");
        drop(std::net::TcpListener::bind(admin).map_err(taken)?);
    }
    if !args.listen.ip().is_loopback() {
        note(format_args!(
            "baton: warning: {} is reachable from other machines, and `baton up` asks for no API key: every client that \
             reaches it can use it; for keys run `baton router` with `auth` (docs/how-to/keys-and-tls.md)",
            args.listen
        ));
    }
    runtime.block_on(async {
        let stop = shutdown::on_signal(false)?;
        let started = Instant::now();
        let stack = tokio::select! {
            stack = Stack::start(&args) => stack?,
            () = stop.cancelled() => return Ok(()),
        };
        let url = format!("http://{}", stack.router.field("http")?);
        banner(&url, stack.prefill.field("model")?, args.model.is_none(), started.elapsed());
        let admin = stack.router.field("admin")?;
        say(format_args!(
            "Engines: prefill http://{}, decode http://{} (their blocks: GET /debug/kv). Router metrics: http://{admin}/metrics\n",
            stack.prefill.field("http")?,
            stack.decode.field("http")?,
        ));
        watching(&url, admin);
        stack.watch(stop).await
    })
}

impl Stack {
    async fn start(args: &UpArgs) -> Result<Self, Failure> {
        let mut options = args.engine_options.clone();
        if let Some(model) = &args.model {
            options.extend(["--model".to_owned(), model.display().to_string()]);
        }
        options.extend(shared_out(&options, 2));
        let mut specs =
            ["prefill", "decode"].map(|role| EngineSpec { role, options: options.clone(), address: None });
        note("baton: starting a prefill engine, a decode engine and the router; Ctrl-C stops them");
        let mut prefill = specs[0].spawn()?;
        // Both engines have the same options. The second starts when the first loads, so that an error is reported
        // once.
        prefill.begun(ENGINE_START).await?;
        let mut decode = specs[1].spawn()?;
        prefill.ready(ENGINE_START).await?;
        decode.ready(ENGINE_START).await?;
        for (spec, child) in specs.iter_mut().zip([&prefill, &decode]) {
            spec.address = Some(child.field("http")?.to_owned());
        }
        let start = async |admin: SocketAddr| -> Result<Child, Failure> {
            let config = ConfigFile::new(&router_config(args.listen, admin, &prefill, &decode)?)?;
            let mut router = Child::spawn("router", &["router", "--config", &config.path()])?;
            router.ready(ROUTER_START).await?;
            Ok(router)
        };
        let (usual, any) =
            (SocketAddr::from(([127, 0, 0, 1], ADMIN_PORT)), SocketAddr::from(([127, 0, 0, 1], 0)));
        let is_free = std::net::TcpListener::bind(usual).is_ok();
        let router = match args.admin_listen {
            Some(admin) => start(admin).await?,
            None => match start(if is_free { usual } else { any }).await {
                // Another process has taken the port since.
                Err(_) if is_free => start(any).await?,
                router => router?,
            },
        };
        Ok(Self { router, prefill, decode, specs, restarts: Vec::new() })
    }

    /// Watches until `stop`; then drains in order.
    async fn watch(mut self, stop: CancellationToken) -> Result<(), Failure> {
        let failure = loop {
            let (which, status) = tokio::select! {
                () = stop.cancelled() => break None,
                status = self.router.wait() => break Some(format!("the router ended: {status}")),
                status = self.prefill.wait() => (0, status),
                status = self.decode.wait() => (1, status),
            };
            tokio::select! {
                () = stop.cancelled() => break None,
                restarted = self.restart(which, &status) => if let Err(error) = restarted { break Some(error) },
            }
        };
        note("baton: draining");
        self.router.stop(DRAIN).await;
        tokio::join!(self.prefill.stop(DRAIN), self.decode.stop(DRAIN));
        match failure {
            None => {
                note("baton: stopped");
                Ok(())
            }
            Some(failure) => Err(failure.into()),
        }
    }

    /// Restarts an engine with the same ports. Its leases are gone with its epoch, and the engine answers its peers
    /// accordingly.
    async fn restart(&mut self, which: usize, status: &str) -> Result<(), String> {
        let role = self.specs[which].role;
        note(format_args!("baton: the {role} engine ended ({status}); starting it again"));
        self.restarts.retain(|at| at.elapsed() < RESTART_WINDOW);
        if self.restarts.len() >= RESTARTS_MAX {
            return Err(format!("the {role} engine ended {RESTARTS_MAX} times within a minute ({status})"));
        }
        self.restarts.push(Instant::now());
        let mut child = self.specs[which].spawn().map_err(|error| error.to_string())?;
        child.ready(ENGINE_START).await.map_err(|error| error.to_string())?;
        match which {
            0 => self.prefill = child,
            _ => self.decode = child,
        }
        Ok(())
    }
}

impl EngineSpec {
    fn spawn(&self) -> Result<Child, Failure> {
        let http = self.address.as_deref().unwrap_or("127.0.0.1:0");
        // The side channels (one per rank) may use any port, because each handoff contains the address.
        let mut args = vec!["engine", "--role", self.role, "--listen", http, "--side-channel", "127.0.0.1:0"];
        args.extend(self.options.iter().map(String::as_str));
        Child::spawn(self.role, &args)
    }
}

fn router_config(
    listen: SocketAddr,
    admin: SocketAddr,
    prefill: &Child,
    decode: &Child,
) -> Result<String, Failure> {
    let engines = |child: &Child| -> Result<serde_json::Value, Failure> {
        Ok(json!({"engines": [{"url": format!("http://{}", child.field("http")?)}]}))
    };
    // JSON is YAML.
    let config = json!({
        "listen": listen.to_string(),
        "admin": {"listen": admin.to_string()},
        "models": [{
            "name": prefill.field("model")?,
            "prefill": engines(prefill)?,
            "decode": engines(decode)?,
            "fallback": "aggregate",
        }],
    });
    Ok(config.to_string())
}

/// Prints the commands that observe the deployment.
fn watching(url: &str, admin: &str) {
    let named = match admin.ends_with(&format!(":{ADMIN_PORT}")) {
        true => String::new(),
        false => format!(" --admin http://{admin}"),
    };
    say(format_args!(
        "Watch it: http://{admin}/top, or `baton top{named}`. Examine it: `baton doctor {url} --admin http://{admin}`\n"
    ));
}

fn banner(url: &str, model: &str, builtin: bool, took: Duration) {
    let question = if builtin { builtin::QUESTION } else { "Hello! Who are you?" };
    // Greedy sampling: a repeated request returns the same text.
    let body = json!({"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0});
    say(format_args!("\nBaton is up after {:.1} s: {url}/v1, model {model}\n", took.as_secs_f64()));
    say(format_args!(
        "Try it:\n\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n"
    ));
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn the_help_contains_the_admin_address() {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut("up").expect("the command").render_long_help().to_string();
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("127.0.0.1:{ADMIN_PORT}, or a free port")), "{words}");
    }
}
