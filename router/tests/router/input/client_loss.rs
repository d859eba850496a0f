//! Clients whose host vanishes without FIN or RST. The tests use network namespaces, if the machine permits them.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::harness::client::{Client, completion};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

const PATH: &str = "/v1/completions";

/// A host in its own network namespace, behind one virtual cable.
struct Host {
    name: String,
    net: String,
    clients: Vec<Child>,
}

fn ip(words: &str) -> bool {
    let run = Command::new("ip").args(words.split(' ')).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

impl Host {
    /// `None`, with a message, if this machine does not permit network namespaces.
    fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let name = format!("bv{process}-{n}");
        let net = format!("10.231.{}", (process * 7 + n) % 250);
        let host = Self { name: name.clone(), net: net.clone(), clients: Vec::new() };
        // An interface's name has at most 15 bytes.
        let made = ip(&format!("netns add {name}"))
            && ip(&format!("link add {name} type veth peer name eth0 netns {name}"))
            && ip(&format!("addr add {net}.1/24 dev {name}"))
            && ip(&format!("link set {name} up"))
            && ip(&format!("-n {name} addr add {net}.2/24 dev eth0"))
            && ip(&format!("-n {name} link set eth0 up"));
        if !made {
            eprintln!(
                "SKIPPED: this machine makes no network namespaces (`ip netns add`), so no client can vanish"
            );
        }
        made.then_some(host)
    }

    /// Starts a client on this host that sends a request to the router at this port.
    fn ask(&mut self, port: u16, stream: bool) {
        let body = completion(stream).to_string();
        let request = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let talk =
            format!("exec 3<>/dev/tcp/{}.1/{port}; printf %s \"$REQUEST\" >&3; exec cat <&3", self.net);
        let client = Command::new("ip")
            .args(["netns", "exec", &self.name, "bash", "-c", &talk])
            .env("REQUEST", request)
            .stdout(Stdio::null())
            .spawn();
        self.clients.push(client.unwrap());
    }

    /// Disconnects the cable.
    fn vanish(&self) {
        assert!(ip(&format!("-n {} link set eth0 down", self.name)));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for client in &mut self.clients {
            let _ = client.kill();
            let _ = client.wait();
        }
        ip(&format!("netns del {}", self.name));
        ip(&format!("link del {}", self.name));
    }
}

/// A router that this host can reach; it detects a lost client after one second.
async fn system(host: &Host, prefill: &[&FakeEngine], decode: &FakeEngine) -> TestRouter {
    let urls: Vec<_> = prefill.iter().map(|p| format!("{{url: '{}'}}", p.url())).collect();
    TestRouter::of(&format!(
        "listen: '{}.1:0'\nadmin: {{listen: '127.0.0.1:0'}}\ntimeouts: {{client_lost_ms: 1000, liveness_probe_ms: 3600000}}\n\
         queue: {{timeout_ms: 3600000}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - name: m\n    prefill: \
         {{engines: [{}]}}\n    decode: {{engines: [{{url: '{}', max_in_flight: 1}}]}}\n",
        host.net,
        urls.join(", "),
        decode.url()
    ))
    .await
}

#[tokio::test]
async fn a_client_that_vanishes_in_the_prefill_is_noticed() {
    let Some(mut host) = Host::new() else { return };
    let (p, d) = (FakeEngine::always(Action::Hang).await, FakeEngine::always(Action::Whole(1)).await);
    let system = system(&host, &[&p], &d).await;
    host.ask(system.address.port(), false);
    await_requests(&p, 1).await;
    host.vanish();
    p.wait("the prefill is aborted", |p| !p.aborts().is_empty()).await;
    system.counts("baton_router_requests_in_flight", 0.0).await;
    assert_eq!(d.received().len(), 0);
}

#[tokio::test]
async fn a_client_that_vanishes_while_a_whole_answer_is_computed_is_noticed() {
    let Some(mut host) = Host::new() else { return };
    let d = FakeEngine::always(Action::Hang).await;
    let system = system(&host, &[], &d).await;
    host.ask(system.address.port(), false);
    await_requests(&d, 1).await;
    host.vanish();
    d.wait("its work is ended", |d| d.cut() == 1).await;
    system.counts("baton_router_requests_in_flight", 0.0).await;
}

#[tokio::test]
async fn a_client_that_vanishes_from_a_stream_is_noticed_whether_it_flows_or_pauses() {
    for flows in [true, false] {
        let Some(mut host) = Host::new() else { return };
        let d = FakeEngine::always(Action::StreamGated(100_000)).await;
        let system = system(&host, &[], &d).await;
        host.ask(system.address.port(), true);
        await_requests(&d, 1).await;
        d.open_gate();
        system.counts("baton_router_requests_in_flight", 1.0).await;
        host.vanish();
        let flowing = async {
            loop {
                if flows {
                    d.open_gate();
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = d.wait("its work is ended", |d| d.cut() == 1) => {}
            () = flowing => {}
        }
        system.counts("baton_router_requests_in_flight", 0.0).await;
    }
}

#[tokio::test]
async fn a_client_that_vanishes_in_the_queue_is_noticed() {
    let Some(mut host) = Host::new() else { return };
    let d = FakeEngine::always(Action::Hang).await;
    let system = system(&host, &[], &d).await;
    // This request keeps the only place.
    let mut first = Client::connect(system.address).await;
    first.post(PATH, &completion(false)).await;
    await_requests(&d, 1).await;
    host.ask(system.address.port(), false);
    system.counts("baton_router_requests_in_flight", 2.0).await;
    host.vanish();
    system.counts("baton_router_requests_in_flight", 1.0).await;
    assert_eq!((d.received().len(), d.cut()), (1, 0), "the one that stays is served");
}
