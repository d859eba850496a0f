//! Discovery by DNS: all addresses of a host name, looked up repeatedly. A missing name or a failing resolver is a
//! failure, not an empty result. A headless service without a ready pod and a broken resolver look the same.

use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;

use crate::config::{DnsConfig, EngineUrl, Scheme};
use crate::engines::discovery_sources::Endpoint;

/// Timeout of one lookup.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A resolver of names.
#[async_trait]
pub(super) trait Resolver: Send + Sync {
    /// The addresses of a name.
    ///
    /// # Errors
    /// The resolver's error.
    async fn addresses(&self, host: &str) -> std::io::Result<Vec<IpAddr>>;
}

/// The system's resolver.
pub(super) struct SystemResolver;

#[async_trait]
impl Resolver for SystemResolver {
    async fn addresses(&self, host: &str) -> std::io::Result<Vec<IpAddr>> {
        Ok(tokio::net::lookup_host((host, 0)).await?.map(|address| address.ip()).collect())
    }
}

/// Looks the name up repeatedly, until it is dropped.
pub(super) async fn follow(
    config: &DnsConfig,
    resolver: &impl Resolver,
    report: impl Fn(Result<Vec<Endpoint>, String>),
) {
    loop {
        report(resolve(config, resolver).await);
        tokio::time::sleep(Duration::from_millis(config.refresh_ms)).await;
    }
}

async fn resolve(config: &DnsConfig, resolver: &impl Resolver) -> Result<Vec<Endpoint>, String> {
    let answer = tokio::time::timeout(ANSWER_WITHIN, resolver.addresses(&config.host)).await;
    let addresses = answer.map_err(|_| "no answer".to_owned())?.map_err(|error| error.to_string())?;
    if addresses.is_empty() {
        return Err("no address".into());
    }
    let endpoint = |address| Endpoint {
        url: url(config.scheme, address, config.port),
        weight: None,
        labels: Default::default(),
    };
    Ok(addresses.into_iter().map(endpoint).collect())
}

/// The engine at an address.
pub(super) fn url(scheme: Scheme, address: IpAddr, port: u16) -> EngineUrl {
    let text = format!("{}://{}", scheme.as_str(), std::net::SocketAddr::new(address, port));
    text.parse().expect("an address and a port other than 0 are an engine's URL")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct ScriptedResolver(Mutex<Vec<std::io::Result<Vec<IpAddr>>>>);

    #[async_trait]
    impl Resolver for ScriptedResolver {
        async fn addresses(&self, _: &str) -> std::io::Result<Vec<IpAddr>> {
            let next = self.0.lock().expect("one thread").pop();
            match next {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        }
    }

    fn config(host: &str) -> DnsConfig {
        DnsConfig { host: host.into(), port: 8000, scheme: Scheme::Http, refresh_ms: 100 }
    }

    #[tokio::test]
    async fn engines_that_are_talked_to_with_tls_are_found_with_it() {
        let config = DnsConfig { scheme: Scheme::Https, ..config("engines") };
        let answer = ScriptedResolver(Mutex::new(vec![Ok(vec!["fd00::1".parse().expect("an address")])]));
        let found = resolve(&config, &answer).await.expect("an answer");
        assert_eq!(found[0].url.to_string(), "https://[fd00::1]:8000");
    }

    #[tokio::test]
    async fn the_systems_resolver_knows_localhost() {
        let found =
            resolve(&config("localhost"), &SystemResolver).await.expect("every machine has a localhost");
        let urls: Vec<_> = found.iter().map(|endpoint| endpoint.url.to_string()).collect();
        assert!(urls.iter().any(|u| u == "http://127.0.0.1:8000" || u == "http://[::1]:8000"), "{urls:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_lookup_and_a_name_without_addresses_are_failures() {
        let address: IpAddr = "10.0.0.1".parse().expect("an address");
        let script = vec![
            Ok(vec![address, "fd00::1".parse().expect("an address")]),
            Ok(vec![]),
            Err(std::io::Error::other("SERVFAIL")),
            Ok(vec![address]),
        ];
        let (reports, resolver) = (Mutex::new(Vec::new()), ScriptedResolver(Mutex::new(script)));
        let config = config("engines");
        let following = follow(&config, &resolver, |answer| reports.lock().expect("one thread").push(answer));
        // The fifth lookup never completes, because the clock is paused otherwise.
        let _ = tokio::time::timeout(Duration::from_secs(60), following).await;
        let reports = reports.into_inner().expect("one thread");
        let texts: Vec<_> = reports
            .iter()
            .map(|answer| match answer {
                Ok(found) => found.iter().map(|e| e.url.to_string()).collect::<Vec<_>>().join(" "),
                Err(error) => error.clone(),
            })
            .collect();
        let expected = [
            "http://10.0.0.1:8000",
            "SERVFAIL",
            "no address",
            "http://10.0.0.1:8000 http://[fd00::1]:8000",
            "no answer",
        ];
        assert_eq!(texts[..5], expected);
    }
}
