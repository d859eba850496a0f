//! A router with its engines, each a process of its own.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::ask::MODEL;
use super::books::metric;
use super::{Ask, Books, Call, PATIENCE, Process, Proxy, Reply, Signal, eventually};

/// What a cluster is to be made of.
pub(crate) struct Plan {
    prefill: Vec<Vec<String>>,
    decode: Vec<Vec<String>>,
    router: Value,
    fallback: &'static str,
    resume: bool,
    early: bool,
    links: bool,
}

/// A running cluster.
pub(crate) struct Cluster {
    pub(crate) prefill: Vec<Engine>,
    pub(crate) decode: Vec<Engine>,
    pub(crate) url: String,
    pub(crate) admin: String,
    router: Process,
    router_alive: bool,
    /// With [`Plan::links`]: from the router to the first decode engine, and from decode engines to the side channel
    /// of the first prefill engine.
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
    /// One prefill engine and one decode engine, unless the plan says otherwise.
    #[allow(clippy::new_ret_no_self)] // reads as a sentence: Cluster::new().decode(..).start()
    pub(crate) fn new() -> Plan {
        Plan {
            prefill: Vec::new(),
            decode: Vec::new(),
            router: json!({}),
            fallback: "aggregate",
            resume: false,
            early: true,
            links: false,
        }
    }

    /// Sends a request to the router.
    pub(crate) fn send(&self, ask: &Ask) -> Call {
        Call::new(&self.url, "POST", ask.path, ask.body.to_string().as_bytes())
    }

    /// Asks the router and waits for the whole answer.
    pub(crate) fn ask(&self, ask: &Ask) -> Reply {
        self.send(ask).reply()
    }

    /// The sum of a metric of the router.
    pub(crate) fn router_metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.router_metrics(), name, labels)
    }

    /// All metrics of the router.
    pub(crate) fn router_metrics(&self) -> String {
        let reply = Call::new(&self.admin, "GET", "/metrics", b"").reply();
        String::from_utf8_lossy(&reply.body).into_owned()
    }

    /// Waits until nobody holds anything: every engine that lives is at its baseline, no lease has ended by
    /// expiry, and the router has nothing in flight.
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
        // What was still on its way to an engine when we looked has arrived by now.
        for engine in self.engines() {
            engine.settled(within);
            engine.expired_nothing();
        }
    }

    /// One more request is served, and everything is settled after it too.
    pub(crate) fn still_serves(&self) {
        let reply = self.ask(&Ask::fresh(40));
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

    /// After [`Self::interrupt_router`].
    pub(crate) fn router_ends_well(&mut self) {
        self.router.ends_well(PATIENCE);
    }
}

impl Plan {
    /// One more prefill engine, with these options.
    pub(crate) fn prefill(mut self, options: &str) -> Self {
        self.prefill.push(words(options));
        self
    }

    /// One more decode engine, with these options.
    pub(crate) fn decode(mut self, options: &str) -> Self {
        self.decode.push(words(options));
        self
    }

    /// Without a prefill engine a request is refused.
    pub(crate) fn no_fallback(mut self) -> Self {
        self.fallback = "none";
        self
    }

    /// Handoffs come when their prefill is done.
    pub(crate) fn not_early(mut self) -> Self {
        self.early = false;
        self
    }

    /// A stream whose decode engine dies is continued by another.
    pub(crate) fn resume(mut self) -> Self {
        self.resume = true;
        self
    }

    /// A fault proxy between the router and the first decode engine, and one in front of the first prefill engine's
    /// side channel, which is TCP then.
    pub(crate) fn links(mut self) -> Self {
        self.links = true;
        self
    }

    /// A part of the router's configuration.
    pub(crate) fn router(mut self, key: &str, value: Value) -> Self {
        self.router[key] = value;
        self
    }

    /// Starts everything and waits until it serves.
    pub(crate) fn start(mut self) -> Cluster {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for options in [&mut self.prefill, &mut self.decode] {
            if options.is_empty() {
                options.push(Vec::new());
            }
        }
        if self.links {
            // Everything of 127/8 is this machine: the same port, another address.
            self.prefill[0].extend(words("--side-channel-host 127.0.0.2"));
            for options in self.prefill.iter_mut().chain(&mut self.decode) {
                options.extend(words("--kv-transport tcp"));
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
            json!({"engines": urls.iter().map(|url| json!({"url": format!("http://{url}")})).collect::<Vec<_>>()})
        };
        let mut config = self.router;
        config["listen"] = json!("127.0.0.1:0");
        config["admin"] = json!({"listen": "127.0.0.1:0"});
        config["models"] = json!([{
            "name": MODEL, "prefill": urls(&prefill, None), "decode": urls(&decode, router_decode.as_ref()),
            "fallback": self.fallback, "resume": self.resume, "early_handoff": self.early,
        }]);
        let file = folder.path().join("router.yaml");
        std::fs::write(&file, config.to_string()).expect("the test's folder can be written");
        let args = ["router", "--config", &file.display().to_string()].map(str::to_owned);
        let mut router = Process::start("router", &args, folder.path());
        router.wait_ready();
        let (url, admin) = (router.fact("http"), router.fact("admin"));
        // Its first questions are answered: what an engine is sent from now on is a test's.
        eventually(PATIENCE, "every engine is known to the router", || {
            let shown = Call::new(&admin, "GET", "/engines", b"").reply().json();
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
        let mut args = words(&format!("engine --role {role} {fixed}"));
        args.extend_from_slice(options);
        let process = Process::start(&name, &args, folder.path());
        Self { name, process, address: String::new(), alive: true }
    }

    fn wait_ready(&mut self) {
        self.process.wait_ready();
        self.address = self.process.fact("http");
    }

    /// Sends a request to this engine itself, past the router.
    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> Call {
        Call::new(&self.address, method, path, body.to_string().as_bytes())
    }

    /// As [`Self::send`], a request to generate, under a name of the caller's choice.
    pub(crate) fn send_as(&self, request: &str, ask: &Ask) -> Call {
        let headers = format!("x-request-id: {request}\r\n");
        let call = Call::try_with(&self.address, "POST", ask.path, &headers, ask.body.to_string().as_bytes());
        call.expect("it listens")
    }

    /// Has it prefill this and lend the blocks; its handoff.
    pub(crate) fn lends(&self, ask: &Ask) -> Value {
        let ask = ask
            .clone()
            .with("kv_transfer_params", json!({"do_remote_decode": true, "do_remote_prefill": false}));
        let ask = ask.with("max_tokens", json!(1));
        let mut reply = self.send("POST", ask.path, &ask.body).reply().json();
        let handoff = reply["kv_transfer_params"].take();
        assert!(handoff["remote_block_ids"].is_array(), "{}: no handoff: {reply}", self.name);
        handoff
    }

    /// Gives up a handoff of it, in the router's words.
    pub(crate) fn release(&self, handoff: &Value) -> Value {
        let body = json!({"handle": handoff["remote_handle"], "reason": "router_release"});
        self.send("POST", "/kv/release", &body).reply().json()["result"].take()
    }

    /// How its leases are held: "offered", "reading", "draining".
    pub(crate) fn lease_states(&self) -> Vec<String> {
        let shown = self.send("GET", "/debug/kv", &json!({})).reply().json();
        let leases = shown["oldest_leases"].as_array().expect("a list").iter();
        leases.map(|lease| lease["state"].as_str().expect("a state").to_owned()).collect()
    }

    /// Producers' pools that it has mapped.
    pub(crate) fn mapped_pools(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.process.pid())).unwrap_or_default();
        // Its own is mapped for writing.
        maps.lines().filter(|line| line.contains("baton-kv-pool") && line.contains(" r--s ")).count()
    }

    /// The request whose lease is its only one.
    pub(crate) fn lease_of_one(&self) -> String {
        let shown = self.send("GET", "/debug/kv", &json!({})).reply().json();
        let leases = shown["oldest_leases"].as_array().expect("a list");
        assert_eq!(leases.len(), 1, "{}: {shown}", self.name);
        leases[0]["request_id"].as_str().expect("a name").to_owned()
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        self.process.log()
    }

    pub(crate) fn books(&self) -> Books {
        let reply = Call::new(&self.address, "GET", "/debug/kv", b"").reply();
        assert_eq!(reply.status, 200, "{}", self.name);
        Books::read(&reply.json())
    }

    /// The sum of a metric of this engine.
    pub(crate) fn metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.metrics(), name, labels)
    }

    /// All metrics of this engine.
    pub(crate) fn metrics(&self) -> String {
        let reply = Call::new(&self.address, "GET", "/metrics", b"").reply();
        String::from_utf8_lossy(&reply.body).into_owned()
    }

    /// Waits until its books show what is looked for.
    pub(crate) fn shows(&self, what: &str, found: impl Fn(&Books) -> bool) -> Books {
        self.shows_within(PATIENCE, what, found)
    }

    /// As [`Self::shows`], within a time.
    pub(crate) fn shows_within(&self, within: Duration, what: &str, found: impl Fn(&Books) -> bool) -> Books {
        let look = || {
            let books = self.books();
            if found(&books) { Ok(books) } else { Err(format!("{books:?}")) }
        };
        eventually(within, &format!("{} shows: {what}", self.name), look)
    }

    /// Waits until it holds nothing and serves nobody.
    pub(crate) fn settled(&self, within: Duration) {
        self.shows_within(within, "everything is back", Books::is_baseline);
    }

    /// No lease of it has ended by its expiry.
    pub(crate) fn expired_nothing(&self) {
        assert_eq!(self.metric("vllm:nixl_num_kv_expired_reqs", ""), 0.0, "{}: leases expired", self.name);
    }

    /// Waits until a request of the router lies unread in one of its sockets; for an engine that stands still, which
    /// cannot say so itself. The ports at the other ends of such sockets.
    pub(crate) fn is_sent_something(&self) -> Vec<u16> {
        let unread = || match self.peers(|unread| unread > 0) {
            ports if ports.is_empty() => Err("its sockets have been read".to_owned()),
            ports => Ok(ports),
        };
        eventually(PATIENCE, &format!("a request is sent to {}", self.name), unread)
    }

    /// The ports at the other ends of its connections.
    pub(crate) fn connections(&self) -> Vec<u16> {
        self.peers(|_| true)
    }

    fn peers(&self, of: impl Fn(u64) -> bool) -> Vec<u16> {
        let (_, port) = self.address.rsplit_once(':').expect("HOST:PORT");
        peers_of(port.parse().expect("a port"), of)
    }

    /// It stands still until [`Self::go_on`]; its sockets stay open.
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

    /// After [`Self::interrupt`] or [`Self::terminate`].
    pub(crate) fn ends_well(&mut self) {
        self.process.ends_well(PATIENCE);
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.process.signal(Signal::Kill);
        self.alive = false;
    }
}

fn words(options: &str) -> Vec<String> {
    options.split_ascii_whitespace().map(str::to_owned).collect()
}

/// The peers' ports of the connections to this port of loopback of whose unread bytes `of` says so: `local_address`,
/// `rem_address` and `rx_queue` of the kernel's table.
fn peers_of(port: u16, of: impl Fn(u64) -> bool) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel shows its sockets");
    let local = format!("0100007F:{port:04X}");
    let peer = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, address, peer, state, queues, ..] = fields[..] else { return None };
        let unread = queues.split_once(':').and_then(|(_, bytes)| u64::from_str_radix(bytes, 16).ok())?;
        let port = peer.split_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok())?;
        // The queue of a listener counts connections, not bytes.
        (address == local && state != "0A" && of(unread)).then_some(port)
    };
    table.lines().filter_map(peer).collect()
}
