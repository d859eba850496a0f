//! The cluster of one lane, and a round on it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{LinkFault, MODEL, PATIENCE, PendingCall, Proxy, digests, eventually};
use crate::plan::{Client, Injection, LEASE, Lane, Phase, Round, Target};
use crate::prompt::{CheckedPrompt, ClientOutcome};
use crate::server::{ProcessState, ResourceUsage, Server};
use crate::tally::Tally;

/// After this time without the phase the fault is injected anyway.
const PHASE_WITHIN: Duration = Duration::from_millis(1500);

/// Limit after a round until all blocks are free: at worst a lease (2 s), its drain (5 s), and a peer's silence (5 s),
/// one after the other.
const SETTLED_WITHIN: Duration = Duration::from_secs(15);

/// Blocks of the pools. A request takes some hundred tokens, so that exhaustion is normal.
const PREFILL_BLOCKS: u64 = 96;
const DECODE_BLOCKS: u64 = 80;

/// The cluster of the module's documentation.
pub(crate) struct FaultCluster {
    lane: Lane,
    prefill: Server,
    decode: Vec<Server>,
    router: Server,
    proxies: Option<Proxies>,
    /// The address for clients.
    url: String,
    expired: f64,
    _folder: TempDir,
}

/// A proxy on every link.
struct Proxies {
    client_router: Proxy,
    router_prefill: Proxy,
    router_decode: Proxy,
    side_channel: Proxy,
}

impl Proxies {
    fn link(&self, target: Target) -> &Proxy {
        match target {
            Target::ClientRouter => &self.client_router,
            Target::RouterPrefill => &self.router_prefill,
            Target::RouterDecode => &self.router_decode,
            Target::SideChannel => &self.side_channel,
            Target::Router | Target::Prefill | Target::Decode => unreachable!("a process is no link"),
        }
    }

    fn all(&self) -> [&Proxy; 4] {
        [&self.client_router, &self.router_prefill, &self.router_decode, &self.side_channel]
    }
}

/// Whether the lane of shared memory uses NIXL instead.
pub(crate) fn nixl() -> bool {
    std::env::var_os("BATON_NIXL_LIBRARY").is_some()
}

impl FaultCluster {
    /// Starts the lane's processes.
    pub(crate) fn start(lane: Lane) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let proxied = lane == Lane::Links;
        let start = |name: &str, role: &str, options: &str| {
            let mut server = engine(name, role, options, &folder);
            restart_server(&mut server, role, options);
            server
        };
        let (of_all, of_p, of_one) = match lane {
            Lane::Links => ("--kv-transport tcp", "--side-channel-host 127.0.0.2", ""),
            Lane::Crashes => ("--kv-transport tcp", "", ""),
            // NIXL copies within a host as shared memory does.
            Lane::Shared if nixl() => ("--kv-transport nixl", "", ""),
            Lane::Shared => ("--kv-transport shm", "", ""),
            Lane::Ranks => ("", "--kv-ranks 2", "--kv-ranks 2"),
            Lane::Tiers => ("--kv-offload-host-mib 2 --kv-offload-disk-mib 8", "", ""),
        };
        let tier = |name: &str| {
            let disk = folder.path().join(format!("tier-{name}"));
            std::fs::create_dir(&disk).expect("the test's folder can be written");
            if lane == Lane::Tiers { format!("--kv-offload-disk {}", disk.display()) } else { String::new() }
        };
        let prefill = start("P", "prefill", &format!("{PREFILL_OPTIONS} {of_all} {of_p} {}", tier("P")));
        let decode: Vec<Server> = (0..if proxied { 1 } else { 2 })
            .map(|at| {
                let own = if at == 0 { of_one } else { "" };
                let name = format!("D{at}");
                start(&name, "decode", &format!("{DECODE_OPTIONS} {of_all} {own} {}", tier(&name)))
            })
            .collect();
        let local = |target: &str| {
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            Proxy::start(any, target.parse().expect("an address")).expect("a free port")
        };
        // All addresses of 127/8 are this machine: the same port at another address.
        let side = |target: &str| {
            let target: SocketAddr = target.parse().expect("an address");
            Proxy::start(SocketAddr::from(([127, 0, 0, 2], target.port())), target).expect("a free port")
        };
        let links =
            proxied.then(|| (local(&prefill.address), local(&decode[0].address), side(&prefill.second)));
        let url = |direct: &str, proxy: Option<&Proxy>| {
            let address = proxy.map_or(direct.to_owned(), |proxy| proxy.address.to_string());
            json!({"url": format!("http://{address}")})
        };
        let prefill_url = url(&prefill.address, links.as_ref().map(|links| &links.0));
        let decode_urls: Vec<Value> =
            decode.iter().map(|server| url(&server.address, links.as_ref().map(|links| &links.1))).collect();
        let mut config = json!({
            "listen": free_address(), "admin": {"listen": free_address()},
            "models": [{"name": MODEL, "prefill": {"engines": [prefill_url]}, "decode": {"engines": decode_urls}}],
            // Shorter than for users, so that a round does not take minutes.
            "timeouts": {
                "connect_ms": 500, "prefill_silence_ms": 3000, "decode_first_byte_ms": 6000,
                "stream_silence_ms": 2000, "client_stall_ms": 3000, "settle_ms": 1000, "engine_idle_ms": 500,
            },
        });
        let file = folder.path().join("router.yaml");
        let write = |config: &Value| {
            std::fs::write(&file, config.to_string()).expect("the test's folder can be written");
        };
        write(&config);
        let args = ["router", "--config", &file.display().to_string()].map(str::to_owned).to_vec();
        let router = Server::start("router", args, "admin", folder.path());
        config["listen"] = json!(router.address);
        config["admin"] = json!({"listen": router.second});
        write(&config);
        let proxies = links.map(|(router_prefill, router_decode, side_channel)| Proxies {
            client_router: local(&router.address),
            router_prefill,
            router_decode,
            side_channel,
        });
        let url = proxies
            .as_ref()
            .map_or(router.address.clone(), |proxies| proxies.client_router.address.to_string());
        Self { lane, prefill, decode, router, proxies, url, expired: 0.0, _folder: folder }
    }

    /// Sends every question once without a fault: all responses are right, and later growth of descriptors and memory
    /// is a leak.
    pub(crate) fn warm_up(&mut self, questions: &[CheckedPrompt]) {
        for question in questions {
            let outcome = question.put_to(&self.url, crate::prompt::ClientBehaviour::Waits);
            assert_eq!(
                outcome,
                Ok(ClientOutcome::Right),
                "undisturbed, {}: {}",
                self.lane.name(),
                question.ask.body
            );
        }
        let fetched = self
            .decode
            .iter()
            .map(|server| server.metric(&server.address, "vllm:external_prefix_cache_hits_total", ""));
        assert!(fetched.sum::<f64>() > 500.0, "the blocks are fetched, not computed again");
        self.settle();
    }

    /// Plays one round: a fault in a phase, its end, and the checks.
    ///
    /// # Errors
    /// The violation.
    ///
    /// # Panics
    /// If a wait times out.
    pub(crate) fn play(
        &mut self,
        round: &Round,
        questions: &[CheckedPrompt],
        tally: &Tally,
    ) -> Result<(), String> {
        if round.forget {
            for server in self.engines() {
                let _ = PendingCall::new(&server.address, "POST", "/reset_prefix_cache", b"{}").reply();
            }
        }
        let url = self.url.clone();
        let wrong = std::thread::scope(|scope| {
            let put = |client: &Client| {
                let (client, url) = (*client, url.as_str());
                scope.spawn(move || {
                    after(client.after);
                    questions[client.question].put_to(url, client.manner)
                })
            };
            let clients: Vec<_> = if round.phase == Phase::Idle {
                self.inject(round, tally);
                round.clients.iter().map(put).collect()
            } else {
                self.stretch_before(round);
                let clients: Vec<_> = round.clients.iter().map(put).collect();
                self.wait_for(round);
                after(round.aim);
                self.inject(round, tally);
                clients
            };
            after(round.hold);
            self.heal();
            let mut wrong = Vec::new();
            for client in clients {
                match client.join() {
                    Ok(Ok(outcome)) => {
                        tally.record_outcome(outcome);
                        let excused = matches!(round.target, Target::Router | Target::ClientRouter);
                        if !(excused || outcome.is_final()) {
                            wrong.push(format!("a client got no end of its request: {outcome:?}"));
                        }
                    }
                    Ok(Err(violation)) => wrong.push(violation),
                    Err(_) => wrong.push("a client could not make sense of its answer".to_owned()),
                }
            }
            wrong
        });
        if !wrong.is_empty() {
            return Err(wrong.join("\n"));
        }
        tally.settled(self.settle());
        self.afterwards(round, questions)?;
        let expired = self.prefill.metric(&self.prefill.address, "vllm:nixl_num_kv_expired_reqs", "");
        tally.expired(expired - self.expired);
        self.expired = expired;
        self.servers().try_for_each(Server::is_well)
    }

    /// Prolongs the phase, so that the fault can be injected in it.
    fn stretch_before(&mut self, round: &Round) {
        match (&self.proxies, round.phase) {
            (Some(proxies), Phase::Lent) => {
                proxies.router_decode.set(LinkFault::Delay(Duration::from_millis(80)))
            }
            (Some(proxies), Phase::Fetch) => {
                let slow = LinkFault::Slow { bytes: 4096, pause: Duration::from_millis(4) };
                proxies.side_channel.set(slow);
            }
            (None, Phase::Lent | Phase::Fetch) => self.decode.iter_mut().for_each(Server::pause),
            _ => {}
        }
    }

    /// Waits until a request is in the phase.
    fn wait_for(&mut self, round: &Round) {
        let begun = Instant::now();
        let comes = |site: &Self, phase: Phase| {
            while begun.elapsed() < PHASE_WITHIN && !site.seen().contains(&phase) {
                after(Duration::from_millis(1));
            }
        };
        match (self.proxies.is_some(), round.phase) {
            (false, Phase::Fetch) => {
                comes(self, Phase::Lent);
                // Requests that the decode engines get now read from a silent producer.
                after(Duration::from_millis(20));
                self.prefill.pause();
                self.decode.iter_mut().for_each(Server::revive);
                comes(self, Phase::Fetch);
            }
            _ => comes(self, round.phase),
        }
    }

    /// The phases of the current requests.
    fn seen(&self) -> BTreeSet<Phase> {
        let mut seen = BTreeSet::new();
        let prefill = self.prefill.snapshot();
        let decode: Vec<_> = self.decode.iter().filter_map(Server::snapshot).collect();
        let fetching: u64 = decode.iter().map(|snapshot| snapshot.fetching).sum();
        if let Some(snapshot) = &prefill {
            let phases = [
                (Phase::Queued, snapshot.waiting > 0),
                (Phase::Prefill, snapshot.running > 0),
                (Phase::Lent, snapshot.leases > fetching),
            ];
            seen.extend(phases.into_iter().filter(|(_, is)| *is).map(|(phase, _)| phase));
        }
        if fetching > 0 {
            seen.insert(Phase::Fetch);
        }
        if decode.iter().any(|snapshot| snapshot.running + snapshot.waiting > 0) {
            seen.insert(Phase::Decode);
        }
        seen
    }

    fn inject(&mut self, round: &Round, tally: &Tally) {
        let mut seen = self.seen();
        if seen.is_empty() {
            seen.insert(Phase::Idle);
        }
        tally.record_injection(round, &seen);
        match round.injection {
            Injection::Link(fault) => {
                self.proxies.as_ref().expect("a lane with proxies").link(round.target).set(fault);
            }
            Injection::Pause => self.process(round.target).pause(),
            Injection::Kill => self.process(round.target).kill(),
        }
        if round.target == Target::Prefill && round.injection == Injection::Kill {
            self.expired = 0.0;
        }
        // A process that was stopped only to prolong the phase continues. Only the injected fault remains.
        let target = round.target;
        let others = self.processes().filter(|(which, _)| *which != target);
        others
            .filter(|(_, server)| server.state == ProcessState::Paused)
            .for_each(|(_, server)| server.revive());
    }

    /// Restarts and continues every process, and removes every link's fault.
    fn heal(&mut self) {
        if let Some(proxies) = &self.proxies {
            proxies.all().iter().for_each(|proxy| proxy.set(LinkFault::None));
        }
        self.servers().for_each(Server::revive);
    }

    /// Waits until nothing is held. Returns the time that this took.
    fn settle(&mut self) -> Duration {
        let begun = Instant::now();
        let engines = std::iter::once((&self.prefill, PREFILL_BLOCKS));
        for (server, blocks) in engines.chain(self.decode.iter().map(|server| (server, DECODE_BLOCKS))) {
            let back = || {
                let snapshot = server.snapshot().ok_or("it does not answer")?;
                if snapshot.is_baseline() && snapshot.total == blocks {
                    Ok(())
                } else {
                    Err(format!("{snapshot:?}"))
                }
            };
            let left = SETTLED_WITHIN.saturating_sub(begun.elapsed());
            eventually(left, &format!("every block of {} is back", server.name), back);
        }
        eventually(PATIENCE, "the router is quiet", || {
            let gauge = |name| self.router.metric(&self.router.second, name, "");
            let busy = gauge("baton_router_requests_in_flight") + gauge("baton_router_settlements_in_flight");
            if busy == 0.0 { Ok(()) } else { Err(format!("{busy} requests or settlements in flight")) }
        });
        begun.elapsed()
    }

    /// Checks the caches after the fault: a block has the same bytes in every cache, and plain requests that find
    /// cached blocks get the right response.
    fn afterwards(&self, round: &Round, questions: &[CheckedPrompt]) -> Result<(), String> {
        let mut known: BTreeMap<String, (String, String)> = BTreeMap::new();
        for server in self.engines() {
            for (hash, digest) in digests(&server.address) {
                let (name, first) =
                    known.entry(hash.clone()).or_insert_with(|| (server.name.clone(), digest.clone()));
                if *first != digest {
                    return Err(format!("block {hash} differs between {name} and {}", server.name));
                }
            }
        }
        let asked: BTreeSet<usize> = round.clients.iter().map(|client| client.question).collect();
        std::thread::scope(|scope| {
            let decode = self.decode.iter();
            let again: Vec<_> = decode
                .flat_map(|server| asked.iter().map(move |&at| (server, at)))
                .map(|(server, at)| scope.spawn(move || questions[at].begins_right_at(&server.address)))
                .collect();
            again.into_iter().try_for_each(|asked| asked.join().map_err(|_| "a panic".to_owned())?)
        })
    }

    fn process(&mut self, target: Target) -> &mut Server {
        match target {
            Target::Router => &mut self.router,
            Target::Prefill => &mut self.prefill,
            Target::Decode => &mut self.decode[0],
            _ => unreachable!("a link is no process"),
        }
    }

    /// Every process. Decode engines beyond the first are no target.
    fn processes(&mut self) -> impl Iterator<Item = (Target, &mut Server)> {
        let fixed = [(Target::Router, &mut self.router), (Target::Prefill, &mut self.prefill)];
        let decode = self.decode.iter_mut().enumerate();
        let which = |at| if at == 0 { Target::Decode } else { Target::SideChannel };
        fixed.into_iter().chain(decode.map(move |(at, server)| (which(at), server)))
    }

    fn servers(&mut self) -> impl Iterator<Item = &mut Server> {
        self.processes().map(|(_, server)| server)
    }

    fn engines(&self) -> impl Iterator<Item = &Server> {
        std::iter::once(&self.prefill).chain(&self.decode)
    }

    /// The resources of every process.
    pub(crate) fn vitals(&self) -> Vec<(String, ResourceUsage)> {
        let all = std::iter::once(&self.router).chain(self.engines());
        all.map(|server| (server.name.clone(), server.vitals())).collect()
    }
}

const PREFILL_OPTIONS: &str = "--kv-blocks 96 --max-num-batched-tokens 64 --max-num-seqs 2 --pace-ms 6";
const DECODE_OPTIONS: &str = "--kv-blocks 80 --max-num-seqs 8 --pace-ms 6";

fn split_options(options: &str) -> Vec<String> {
    options.split_ascii_whitespace().map(str::to_owned).collect()
}

fn engine_args(role: &str, options: &str, listen: &str, side: &str) -> Vec<String> {
    let lease = LEASE.as_secs();
    split_options(&format!(
        "engine --role {role} --threads 1 --kv-lease-duration {lease} --listen {listen} --side-channel {side} {options}"
    ))
}

/// An address for restarts. Its port is below the range of outgoing connections, so that no such connection takes the
/// port while the process is dead.
fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const FIRST: u32 = 10_000;
    const PORTS: u32 = 22_000;
    // The side channels of an engine's ranks have consecutive ports.
    const APART: u32 = 8;
    // Concurrent runs begin at different ports.
    let start = std::process::id() * APART;
    for _ in 0..PORTS / APART {
        let port = FIRST + (start + NEXT.fetch_add(APART, Ordering::Relaxed)) % PORTS;
        let free = |port: u32| TcpListener::bind(format!("127.0.0.1:{port}")).is_ok();
        if (port..port + APART).all(free) {
            return format!("127.0.0.1:{port}");
        }
    }
    panic!("no port below 32,000 is free");
}

fn engine(name: &str, role: &str, options: &str, folder: &TempDir) -> Server {
    let args = engine_args(role, options, &free_address(), &free_address());
    Server::start(name, args, "side_channel", folder.path())
}

/// Makes the process restart with its current addresses.
fn restart_server(server: &mut Server, role: &str, options: &str) {
    // The first of several ranks has the configured side channel, the others have free ports.
    let side = server.second.split(',').next().expect("there is a first");
    let args = engine_args(role, options, &server.address, side);
    server.restarts_with(args);
}

#[allow(clippy::disallowed_methods, reason = "the seed chose the time of a round's events")]
fn after(time: Duration) {
    std::thread::sleep(time);
}
