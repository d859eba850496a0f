//! A client whose host vanishes: no FIN, no RST. The test needs a network namespace.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_engine::run::options::Role;
use serde_json::json;

use super::harness::cluster::{LLAMA, Node, greedy, options, prompt, with};

/// A separate host at the other end of a virtual cable.
struct NetworkNamespace {
    name: String,
    net: String,
    clients: Vec<Child>,
}

fn ip(words: &str) -> bool {
    let run = Command::new("ip").args(words.split(' ')).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

impl NetworkNamespace {
    /// `None`, with a message, if the test has no permission.
    fn new() -> Option<Self> {
        let process = std::process::id();
        let (name, net) = (format!("be{process}"), format!("10.232.{}", process % 250));
        let host = Self { name: name.clone(), net: net.clone(), clients: Vec::new() };
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

    /// Starts a client that sends a request to the engine at this port.
    fn ask(&mut self, port: u16, body: &str) {
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let talk =
            format!("exec 3<>/dev/tcp/{}.1/{port}; printf %s \"$REQUEST\" >&3; exec cat <&3", self.net);
        let client = Command::new("ip")
            .args(["netns", "exec", &self.name, "bash", "-c", &talk])
            .env("REQUEST", request)
            .stdout(Stdio::null())
            .spawn();
        self.clients.push(client.expect("`ip` has run before"));
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        for client in &mut self.clients {
            let _ = client.kill();
            let _ = client.wait();
        }
        ip(&format!("netns del {}", self.name));
        ip(&format!("link del {}", self.name));
    }
}

#[test]
fn a_client_that_vanishes_is_noticed_whether_its_answer_flows_or_is_computed_whole() {
    let Some(mut host) = NetworkNamespace::new() else { return };
    let mut options = options(LLAMA, Role::Both);
    options.listen = format!("{}.1:0", host.net).parse().expect("an address");
    options.cluster_secret = Some("a secret of the whole cluster".to_owned());
    options.client_lost = Duration::from_secs(1);
    // Each answer takes far longer than any test waits.
    options.pace = Some(Duration::from_secs(1));
    let node = Node::start(options);
    let body = greedy(&prompt(1, 9), 120);
    host.ask(node.http.port(), &body.to_string());
    host.ask(node.http.port(), &with(&body, "stream", json!(true)).to_string());
    node.until("two requests run", || node.metric("vllm:num_requests_running") == 2.0);
    assert!(ip(&format!("-n {} link set eth0 down", host.name)));
    node.until("both have left", || node.metric("vllm:num_requests_running") == 0.0);
    assert_eq!(node.metric("vllm:request_success_total"), 2.0);
    assert!(node.get("/metrics").text.contains("finished_reason=\"abort\"} 2"));
}
