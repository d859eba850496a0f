//! The routing sidecar beside a scripted decode engine, with prefill engines from headers.

mod headers;
mod legs;
mod passing;
mod secret;

use std::net::{SocketAddr, TcpListener};

use baton_router::{SidecarOptions, SidecarServer, SidecarSettings};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::client::{Client, ClientResponse, completion};
use crate::harness::engine::FakeEngine;
use crate::harness::system;

/// A running sidecar.
struct TestSidecar {
    address: SocketAddr,
    admin: SocketAddr,
    running: JoinHandle<()>,
    shutdown: CancellationToken,
}

/// Free ports in a row. Another process may take them before the sidecar does, so a caller tries again.
fn free_ports(count: u16) -> u16 {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let rest = (1..count).map(|n| TcpListener::bind(("127.0.0.1", port.checked_add(n)?)).ok());
        if rest.collect::<Option<Vec<_>>>().is_some() {
            return port;
        }
    }
}

impl TestSidecar {
    async fn beside(decode: &FakeEngine) -> Self {
        Self::with(decode, "").await
    }

    /// `yaml` has further settings, as lines.
    async fn with(decode: &FakeEngine, yaml: &str) -> Self {
        Self::at_port(decode.address.port(), 1, yaml).await
    }

    /// Beside the decode engine of each of `ranks` ports.
    async fn at_port(decode: u16, ranks: u16, yaml: &str) -> Self {
        loop {
            let text = format!(
                "host: 127.0.0.1\nport: {}\nmodel-server-port: {decode}\ndata-parallel-size: {ranks}\n{}{yaml}\n",
                free_ports(ranks),
                if yaml.contains("secure-proxy") { "" } else { "secure-proxy: false\n" }
            );
            let options = SidecarOptions::new(SidecarSettings::from_yaml(&text).unwrap()).unwrap();
            let Ok(server) = SidecarServer::bind(options).await else { continue };
            let (address, admin) = (server.local_addr(), server.admin_addr());
            let shutdown = CancellationToken::new();
            let running = tokio::spawn(server.run(shutdown.clone()));
            return Self { address, admin, running, shutdown };
        }
    }

    async fn settled(&self) {
        system::settled(self.admin).await;
    }

    async fn counts(&self, series: &str, value: f64) {
        system::counts(self.admin, series, value).await;
    }

    /// A client that has sent a completion with these header lines.
    async fn begin(&self, headers: &str, stream: bool) -> Client {
        let mut client = Client::connect(self.address).await;
        let body = completion(stream).to_string();
        client.post_bytes("/v1/completions", headers, body.as_bytes()).await;
        client
    }

    /// The response to a completion with these header lines.
    async fn complete(&self, headers: &str) -> ClientResponse {
        self.begin(headers, false).await.answer().await
    }
}

impl Drop for TestSidecar {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// The header line that names a prefill engine.
fn named(prefill: &FakeEngine) -> String {
    format!("x-prefiller-host-port: {}\r\n", prefill.address)
}

/// The address of an engine that does not listen.
async fn nowhere() -> SocketAddr {
    let gone = FakeEngine::always(crate::harness::engine::Action::Hang).await;
    let address = gone.address;
    gone.die().await;
    address
}
