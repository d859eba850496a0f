//! A router with its engines, each a separate process.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::engine_snapshot::metric;
use super::generate_request::MODEL;
use super::{
    EngineSnapshot, GenerateRequest, PATIENCE, PendingCall, Process, Proxy, Reply, Signal, eventually,
};

/// The processes of a cluster and their options.
pub(crate) struct ClusterPlan {
    prefill: Vec<Vec<String>>,
    decode: Vec<Vec<String>>,
    router: Value,
    /// Keys of both pools.
    pools: Value,
    fallback: &'static str,
    resume: bool,
    early: bool,
    links: bool,
    /// Further models of the same engines.
    adapters: Vec<&'static str>,
}

/// A running cluster.
pub(crate) struct Cluster {
    pub(crate) prefill: Vec<Engine>,
    pub(crate) decode: Vec<Engine>,
    pub(crate) url: String,
    pub(crate) admin: String,
    router: Process,
    router_alive: bool,
    /// With [`ClusterPlan::links`]: from the router to the first decode engine, and from decode engines to the side
    /// channel of the first prefill engine.
    pub(crate) router_decode: Option<Proxy>,
    pub(crate) side_channel: Option<Proxy>,
    _folder: TempDir,
}

/// A running engine.
pub(crate) struct Engine {
    name: String,
    process: Process,
    pub(crate) address: String,
    alive: bool,
}

impl Cluster {
    /// Plans one prefill engine and one decode engine. The plan's methods change this.
    #[allow(clippy::new_ret_no_self, reason = "a readable chain: Cluster::new().decode(..).start()")]
    pub(crate) fn new() -> ClusterPlan {
        ClusterPlan {
            prefill: Vec::new(),
            decode: Vec::new(),
            router: json!({}),
            pools: json!({}),
            fallback: "aggregate",
            resume: false,
            early: true,
            links: false,
            adapters: Vec::new(),
        }
    }

    /// Sends a request to the router.
    pub(crate) fn send(&self, ask: &GenerateRequest) -> PendingCall {
        PendingCall::new(&self.url, "POST", ask.path, ask.body.to_string().as_bytes())
    }

    /// Sends a request to the router and waits for the whole response.
    pub(crate) fn ask(&self, ask: &GenerateRequest) -> Reply {
        self.send(ask).reply()
    }

    /// The sum of a metric of the router.
    pub(crate) fn router_metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.router_metrics(), name, labels)
    }

    /// All metrics of the router.
    pub(crate) fn router_metrics(&self) -> String {
        let reply = PendingCall::new(&self.admin, "GET", "/metrics", b"").reply();
        String::from_utf8_lossy(&reply.body).into_owned()
    }

    /// Waits until nothing is held: every live engine is at its baseline, no lease has expired, and the router has no
    /// request in flight.
    pub(crate) fn settled(&self, within: Duration) {
        let begun = Instant::now();
        for engine in self.engines() {
            engine.settled(within.saturating_sub(begun.elapsed()));
        }
        let quiet = || {
            let busy = self.router_metric("baton_router_requests_in_flight", "")
                + self.router_metric("baton_router_settlements_in_flight", "");
            if busy == 0.0 { Ok(()) } else { Err(format!("{busy} requests or settlements in flight")) }
        };
        if self.router_alive {
            eventually(PATIENCE, "the router is quiet", quiet);
        }
        // Data that was on its way to an engine at the last look has arrived by now.
        for engine in self.engines() {
            engine.settled(within);
            engine.expired_nothing();
        }
    }

    /// Serves one more request and waits until everything is settled.
    pub(crate) fn still_serves(&self) {
        let reply = self.ask(&GenerateRequest::fresh(40));
        assert_eq!(reply.status, 200, "{}", reply.json());
        self.settled(PATIENCE);
    }

    fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.prefill.iter().chain(&self.decode).filter(|engine| engine.alive)
    }

    /// Open file descriptors of the router and of every engine.
    pub(crate) fn descriptors(&self) -> Vec<usize> {
        let engines = self.prefill.iter().chain(&self.decode).map(|engine| engine.process.descriptors());
        std::iter::once(self.router.descriptors()).chain(engines).collect()
    }

    /// `kill -9` of the router.
    pub(crate) fn kill_router(&mut self) {
        self.router.signal(Signal::Kill);
        self.router_alive = false;
    }

    /// Ctrl-C to the router.
    pub(crate) fn interrupt_router(&mut self) {
        self.router.signal(Signal::Interrupt);
        self.router_alive = false;
    }

    /// Waits for the end of the router after [`Self::interrupt_router`].
    pub(crate) fn router_ends_well(&mut self) {
        self.router.ends_well(PATIENCE);
    }
}

impl ClusterPlan {
    /// Adds a prefill engine with these options.
    pub(crate) fn prefill(mut self, options: &str) -> Self {
        self.prefill.push(split_options(options));
        self
    }

    /// Adds a decode engine with these options.
    pub(crate) fn decode(mut self, options: &str) -> Self {
        self.decode.push(split_options(options));
        self
    }

    /// The router refuses requests without a prefill engine.
    pub(crate) fn no_fallback(mut self) -> Self {
        self.fallback = "none";
        self
    }

    /// Handoffs follow the end of their prefill.
    pub(crate) fn not_early(mut self) -> Self {
        self.early = false;
        self
    }

    /// Another decode engine continues the stream of one that dies.
    pub(crate) fn resume(mut self) -> Self {
        self.resume = true;
        self
    }

    /// The router has a further model of this name, with the same engines.
    pub(crate) fn adapter(mut self, name: &'static str) -> Self {
        self.adapters.push(name);
        self
    }

    /// Adds a fault proxy between the router and the first decode engine, and one in front of the first prefill
    /// engine's side channel, which then uses TCP.
    pub(crate) fn links(mut self) -> Self {
        self.links = true;
        self
    }

    /// Sets a key of the router's configuration.
    pub(crate) fn router(mut self, key: &str, value: Value) -> Self {
        self.router[key] = value;
        self
    }

    /// Sets a key of both pools in the router's configuration.
    pub(crate) fn pools(mut self, key: &str, value: Value) -> Self {
        self.pools[key] = value;
        self
    }

    /// Starts all processes and waits until the router serves.
    pub(crate) fn start(mut self) -> Cluster {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for options in [&mut self.prefill, &mut self.decode] {
            if options.is_empty() {
                options.push(Vec::new());
            }
        }
        if self.links {
            // All addresses of 127/8 are this machine: the same port at another address.
            self.prefill[0].extend(split_options("--side-channel-host 127.0.0.2"));
            for options in self.prefill.iter_mut().chain(&mut self.decode) {
                options.extend(split_options("--kv-transport tcp"));
            }
        }
        let start = |role: &str, options: &[Vec<String>]| -> Vec<Engine> {
            let name = |at| format!("{role}-{at}");
            let engines = options.iter().enumerate();
            engines.map(|(at, options)| Engine::start(name(at), role, options, &folder)).collect()
        };
        let (mut prefill, mut decode) = (start("prefill", &self.prefill), start("decode", &self.decode));
        prefill.iter_mut().chain(&mut decode).for_each(Engine::wait_ready);
        let proxy = |host: [u8; 4], port: u16, target: SocketAddr| {
            Proxy::start(SocketAddr::from((host, port)), target).expect("a free port")
        };
        let parsed = |address: &str| -> SocketAddr { address.parse().expect("an address") };
        let router_decode = self.links.then(|| proxy([127, 0, 0, 1], 0, parsed(&decode[0].address)));
        let side_channel = self.links.then(|| {
            let target = parsed(&prefill[0].process.fact("side_channel"));
            proxy([127, 0, 0, 2], target.port(), target)
        });
        let urls = |engines: &[Engine], first: Option<&Proxy>| -> Value {
            let mut urls: Vec<String> = engines.iter().map(|engine| engine.address.clone()).collect();
            if let Some(proxy) = first {
                urls[0] = proxy.address.to_string();
            }
            let mut pool = self.pools.clone();
            pool["engines"] = urls.iter().map(|url| json!({"url": format!("http://{url}")})).collect();
            pool
        };
        let mut config = self.router;
        config["listen"] = json!("127.0.0.1:0");
        config["admin"] = json!({"listen": "127.0.0.1:0"});
        let model = |name: &str| {
            json!({
                "name": name, "prefill": urls(&prefill, None), "decode": urls(&decode, router_decode.as_ref()),
                "fallback": self.fallback, "resume": self.resume, "early_handoff": self.early,
            })
        };
        config["models"] = std::iter::once(MODEL).chain(self.adapters.iter().copied()).map(model).collect();
        let file = folder.path().join("router.yaml");
        std::fs::write(&file, config.to_string()).expect("the test's folder can be written");
        let args = ["router", "--config", &file.display().to_string()].map(str::to_owned);
        let mut router = Process::start("router", &args, folder.path());
        router.wait_ready();
        let (url, admin) = (router.fact("http"), router.fact("admin"));
        // The router's first probes are answered: from now on only the test sends requests to an engine.
        eventually(PATIENCE, "every engine is known to the router", || {
            let shown = PendingCall::new(&admin, "GET", "/engines", b"").reply().json();
            let engines = shown["engines"].as_array().cloned().unwrap_or_default();
            if engines.iter().all(|engine| engine["known"] == true) { Ok(()) } else { Err(shown.to_string()) }
        });
        Cluster {
            prefill,
            decode,
            url,
            admin,
            router,
            router_alive: true,
            router_decode,
            side_channel,
            _folder: folder,
        }
    }
}

impl Engine {
    fn start(name: String, role: &str, options: &[String], folder: &TempDir) -> Self {
        let fixed = "--listen 127.0.0.1:0 --kv-cache-mib 32 --threads 1";
        let mut args = split_options(&format!("engine --role {role} {fixed}"));
        args.extend_from_slice(options);
        let process = Process::start(&name, &args, folder.path());
        Self { name, process, address: String::new(), alive: true }
    }

    fn wait_ready(&mut self) {
        self.process.wait_ready();
        self.address = self.process.fact("http");
    }

    /// Sends a request directly to this engine.
    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> PendingCall {
        PendingCall::new(&self.address, method, path, body.to_string().as_bytes())
    }

    /// As [`Self::send`], for a request to generate with a request id of the caller's choice.
    pub(crate) fn send_as(&self, request: &str, ask: &GenerateRequest) -> PendingCall {
        let headers = format!("x-request-id: {request}\r\n");
        let call =
            PendingCall::try_with(&self.address, "POST", ask.path, &headers, ask.body.to_string().as_bytes());
        call.expect("it listens")
    }

    /// Makes the engine prefill a request and lease the blocks. Returns the handoff.
    pub(crate) fn open_lease(&self, ask: &GenerateRequest) -> Value {
        let ask = ask
            .clone()
            .with("kv_transfer_params", json!({"do_remote_decode": true, "do_remote_prefill": false}));
        let ask = ask.with("max_tokens", json!(1));
        let mut reply = self.send("POST", ask.path, &ask.body).reply().json();
        let handoff = reply["kv_transfer_params"].take();
        assert!(handoff["remote_block_ids"].is_array(), "{}: no handoff: {reply}", self.name);
        handoff
    }

    /// Releases a handoff of this engine with the router's message.
    pub(crate) fn release(&self, handoff: &Value) -> Value {
        let body = json!({"handle": handoff["remote_handle"], "reason": "router_release"});
        self.send("POST", "/kv/release", &body).reply().json()["result"].take()
    }

    /// States of the engine's leases: "offered", "reading", "draining".
    pub(crate) fn lease_states(&self) -> Vec<String> {
        let shown = self.send("GET", "/debug/kv", &json!({})).reply().json();
        let leases = shown["oldest_leases"].as_array().expect("a list").iter();
        leases.map(|lease| lease["state"].as_str().expect("a state").to_owned()).collect()
    }

    /// Number of producers' pools that the engine has mapped.
    pub(crate) fn mapped_pools(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.process.pid())).unwrap_or_default();
        // The engine maps its own pool for writing.
        maps.lines().filter(|line| line.contains("baton-kv-pool") && line.contains(" r--s ")).count()
    }

    /// The request id of the engine's only lease.
    pub(crate) fn lease_of_one(&self) -> String {
        let shown = self.send("GET", "/debug/kv", &json!({})).reply().json();
        let leases = shown["oldest_leases"].as_array().expect("a list");
        assert_eq!(leases.len(), 1, "{}: {shown}", self.name);
        leases[0]["request_id"].as_str().expect("a name").to_owned()
    }

    /// The engine's log.
    pub(crate) fn log(&self) -> String {
        self.process.log()
    }

    pub(crate) fn snapshot(&self) -> EngineSnapshot {
        let reply = PendingCall::new(&self.address, "GET", "/debug/kv", b"").reply();
        assert_eq!(reply.status, 200, "{}", self.name);
        EngineSnapshot::read(&reply.json())
    }

    /// The sum of a metric of this engine.
    pub(crate) fn metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.metrics(), name, labels)
    }

    /// All metrics of this engine.
    pub(crate) fn metrics(&self) -> String {
        let reply = PendingCall::new(&self.address, "GET", "/metrics", b"").reply();
        String::from_utf8_lossy(&reply.body).into_owned()
    }

    /// Waits until the engine's snapshot satisfies `found`.
    pub(crate) fn shows(&self, what: &str, found: impl Fn(&EngineSnapshot) -> bool) -> EngineSnapshot {
        self.shows_within(PATIENCE, what, found)
    }

    /// As [`Self::shows`], with a time limit.
    pub(crate) fn shows_within(
        &self,
        within: Duration,
        what: &str,
        found: impl Fn(&EngineSnapshot) -> bool,
    ) -> EngineSnapshot {
        let look = || {
            let snapshot = self.snapshot();
            if found(&snapshot) { Ok(snapshot) } else { Err(format!("{snapshot:?}")) }
        };
        eventually(within, &format!("{} shows: {what}", self.name), look)
    }

    /// Waits until the engine holds nothing and serves no request.
    pub(crate) fn settled(&self, within: Duration) {
        self.shows_within(within, "everything is back", EngineSnapshot::is_baseline);
    }

    /// Asserts that no lease of this engine has expired.
    pub(crate) fn expired_nothing(&self) {
        assert_eq!(self.metric("vllm:nixl_num_kv_expired_reqs", ""), 0.0, "{}: leases expired", self.name);
    }

    /// Waits until a request of the router is unread in one of the engine's sockets, for an engine that is stopped and
    /// cannot report this. Returns the ports at the other ends of such sockets.
    pub(crate) fn is_sent_something(&self) -> Vec<u16> {
        let unread = || match self.peers(|unread| unread > 0) {
            ports if ports.is_empty() => Err("its sockets have been read".to_owned()),
            ports => Ok(ports),
        };
        eventually(PATIENCE, &format!("a request is sent to {}", self.name), unread)
    }

    /// The ports at the other ends of the engine's connections.
    pub(crate) fn connections(&self) -> Vec<u16> {
        self.peers(|_| true)
    }

    fn peers(&self, of: impl Fn(u64) -> bool) -> Vec<u16> {
        let (_, port) = self.address.rsplit_once(':').expect("HOST:PORT");
        peers_of(port.parse().expect("a port"), of)
    }

    /// Stops the process until [`Self::go_on`]. Its sockets stay open.
    pub(crate) fn pause(&mut self) {
        self.process.signal(Signal::Pause);
    }

    pub(crate) fn go_on(&mut self) {
        self.process.signal(Signal::Continue);
    }

    /// Ctrl-C.
    pub(crate) fn interrupt(&mut self) {
        self.process.signal(Signal::Interrupt);
        self.alive = false;
    }

    /// SIGTERM.
    pub(crate) fn terminate(&mut self) {
        self.process.signal(Signal::Terminate);
        self.alive = false;
    }

    /// Waits for the end of the engine after [`Self::interrupt`] or [`Self::terminate`].
    pub(crate) fn ends_well(&mut self) {
        self.process.ends_well(PATIENCE);
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.process.signal(Signal::Kill);
        self.alive = false;
    }
}

fn split_options(options: &str) -> Vec<String> {
    options.split_ascii_whitespace().map(str::to_owned).collect()
}

/// The peers' ports of connections to this port of loopback whose unread bytes satisfy `of`: `local_address`,
/// `rem_address` and `rx_queue` of the kernel's table.
fn peers_of(port: u16, of: impl Fn(u64) -> bool) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel shows its sockets");
    let local = format!("0100007F:{port:04X}");
    let peer = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, address, peer, state, queues, ..] = fields[..] else { return None };
        let unread = queues.split_once(':').and_then(|(_, bytes)| u64::from_str_radix(bytes, 16).ok())?;
        let port = peer.split_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok())?;
        // A listener's queue counts connections, not bytes.
        (address == local && state != "0A" && of(unread)).then_some(port)
    };
    table.lines().filter_map(peer).collect()
}
