//! A router in front of scripted engines.

use std::net::SocketAddr;

use baton_router::{ReloadHandle, Router, RouterConfig};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::harness::client::get;
use crate::harness::engine::{FakeEngine, eventually};

/// A running router.
pub(crate) struct TestRouter {
    pub address: SocketAddr,
    pub admin: SocketAddr,
    pub reload: ReloadHandle,
    shutdown: CancellationToken,
    running: Option<JoinHandle<()>>,
}

/// The pool of these engines, as YAML.
fn pool(engines: &[&FakeEngine]) -> String {
    let urls: Vec<_> = engines.iter().map(|e| format!("{{url: '{}'}}", e.url())).collect();
    format!("{{policy: round_robin, engines: [{}]}}", urls.join(", "))
}

impl TestRouter {
    pub(crate) async fn start(prefill: &[&FakeEngine], decode: &[&FakeEngine]) -> Self {
        Self::with(prefill, decode, "", "").await
    }

    /// `model` and `top` are further lines of YAML.
    pub(crate) async fn with(
        prefill: &[&FakeEngine],
        decode: &[&FakeEngine],
        model: &str,
        top: &str,
    ) -> Self {
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    aliases: [alias]\n    \
             prefill: {}\n    decode: {}\n{model}\n{top}\n",
            pool(prefill),
            pool(decode)
        );
        // Tests count the requests at engines, so the periodic probes are disabled.
        let quiet = if top.contains("health:") { "" } else { "health: {active: {interval_ms: 0}}\n" };
        Self::of(&(yaml + quiet)).await
    }

    /// A router with this configuration file.
    pub(crate) async fn of(yaml: &str) -> Self {
        let config = RouterConfig::from_yaml(yaml, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{yaml}"));
        Self::running(config).await
    }

    pub(crate) async fn running(config: RouterConfig) -> Self {
        let router = Router::bind(config).await.unwrap();
        let (address, admin) = (router.local_addr(), router.admin_addr());
        let reload = router.reload();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(router.run(shutdown.clone()));
        Self { address, admin, reload, shutdown, running: Some(running) }
    }

    /// Begins the drain.
    pub(crate) fn shut_down(&self) {
        self.shutdown.cancel();
    }

    /// Waits until the router has drained.
    pub(crate) async fn stopped(&mut self) {
        let running = self.running.take().expect("stopped once");
        tokio::time::timeout(std::time::Duration::from_secs(20), running).await.unwrap().unwrap();
    }

    /// The sum of the samples of `/metrics` with this name and at least these labels: `name{a="b"}`.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        metric(self.admin, series).await
    }

    /// Waits until a sample has a value.
    pub(crate) async fn counts(&self, series: &str, value: f64) {
        counts(self.admin, series, value).await;
    }

    /// Waits until nothing is in flight and nothing is being settled.
    pub(crate) async fn settled(&self) {
        settled(self.admin).await;
    }
}

/// As [`TestRouter::metric`], for any admin listener.
async fn metric(admin: SocketAddr, series: &str) -> f64 {
    let text = get(admin, "/metrics").await.text();
    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
    let labels: Vec<_> = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
    let sample = |line: &str| -> Option<f64> {
        let (found, value) = line.rsplit_once(' ')?;
        let (found, its) = found.split_once('{').unwrap_or((found, ""));
        let its: Vec<_> = its.trim_end_matches('}').split(',').collect();
        let fits = found == name && labels.iter().all(|label| its.contains(label));
        fits.then(|| value.parse().ok()).flatten()
    };
    text.lines().filter_map(sample).sum()
}

/// As [`TestRouter::counts`], for any admin listener.
pub(crate) async fn counts(admin: SocketAddr, series: &str, value: f64) {
    let begun = std::time::Instant::now();
    loop {
        let found = metric(admin, series).await;
        if found == value {
            return;
        }
        assert!(begun.elapsed().as_secs() < 10, "{series} is {found}, not {value}");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// As [`TestRouter::settled`], for any admin listener.
pub(crate) async fn settled(admin: SocketAddr) {
    counts(admin, "baton_router_requests_in_flight", 0.0).await;
    counts(admin, "baton_router_settlements_in_flight", 0.0).await;
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

/// Waits until an engine has received this many requests to generate.
pub(crate) async fn await_requests(engine: &FakeEngine, times: usize) {
    eventually("an engine has the requests", || engine.received().len() == times).await;
}
