//! Every address of a host name, asked for again and again. A name that is gone or a resolver that fails is a failure,
//! not an empty answer: a headless service without a ready pod and a broken resolver look the same.

use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;

use crate::config::{DnsConfig, EngineUrl, Scheme};
use crate::engines::endpoints::Endpoint;

/// One question takes at most this long.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Who is asked.
#[async_trait]
pub(super) trait Resolver: Send + Sync {
    /// The addresses of a name.
    ///
    /// # Errors
    /// The resolver's own.
    async fn addresses(&self, host: &str) -> std::io::Result<Vec<IpAddr>>;
}

/// The system's resolver.
pub(super) struct System;

#[async_trait]
impl Resolver for System {
    async fn addresses(&self, host: &str) -> std::io::Result<Vec<IpAddr>> {
        Ok(tokio::net::lookup_host((host, 0)).await?.map(|address| address.ip()).collect())
    }
}

/// Asks until it is dropped.
pub(super) async fn follow(
    config: &DnsConfig,
    resolver: &impl Resolver,
    tell: impl Fn(Result<Vec<Endpoint>, String>),
) {
    loop {
        tell(ask(config, resolver).await);
        tokio::time::sleep(Duration::from_millis(config.refresh_ms)).await;
    }
}

async fn ask(config: &DnsConfig, resolver: &impl Resolver) -> Result<Vec<Endpoint>, String> {
    let asked = tokio::time::timeout(ANSWER_WITHIN, resolver.addresses(&config.host)).await;
    let addresses = asked.map_err(|_| "no answer".to_owned())?.map_err(|error| error.to_string())?;
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

    struct Scripted(Mutex<Vec<std::io::Result<Vec<IpAddr>>>>);

    #[async_trait]
    impl Resolver for Scripted {
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
        let answer = Scripted(Mutex::new(vec![Ok(vec!["fd00::1".parse().expect("an address")])]));
        let found = ask(&config, &answer).await.expect("an answer");
        assert_eq!(found[0].url.to_string(), "https://[fd00::1]:8000");
    }

    #[tokio::test]
    async fn the_systems_resolver_knows_localhost() {
        let found = ask(&config("localhost"), &System).await.expect("every machine has a localhost");
        let urls: Vec<_> = found.iter().map(|endpoint| endpoint.url.to_string()).collect();
        assert!(urls.iter().any(|u| u == "http://127.0.0.1:8000" || u == "http://[::1]:8000"), "{urls:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_and_a_name_without_addresses_are_told_as_failures() {
        let address: IpAddr = "10.0.0.1".parse().expect("an address");
        let script = vec![
            Ok(vec![address, "fd00::1".parse().expect("an address")]),
            Ok(vec![]),
            Err(std::io::Error::other("SERVFAIL")),
            Ok(vec![address]),
        ];
        let (told, resolver) = (Mutex::new(Vec::new()), Scripted(Mutex::new(script)));
        let config = config("engines");
        let following = follow(&config, &resolver, |answer| told.lock().expect("one thread").push(answer));
        // The fifth question is never answered; the clock stands still otherwise.
        let _ = tokio::time::timeout(Duration::from_secs(60), following).await;
        let told = told.into_inner().expect("one thread");
        let said: Vec<_> = told
            .iter()
            .map(|answer| match answer {
                Ok(found) => found.iter().map(|e| e.url.to_string()).collect::<Vec<_>>().join(" "),
                Err(error) => error.clone(),
            })
            .collect();
        let wanted = [
            "http://10.0.0.1:8000",
            "SERVFAIL",
            "no address",
            "http://10.0.0.1:8000 http://[fd00::1]:8000",
            "no answer",
        ];
        assert_eq!(said[..5], wanted);
    }
}
