//! The measured deployment: a running one, or one that is started for the run.

use std::net::Ipv4Addr;
use std::time::Duration;

use crate::BenchError;
use crate::common::http_client::ServiceClient;
use crate::disconnect::drive::local::LocalDeployment;
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::plan::options::DisconnectOptions;
use crate::disconnect::record::watch::EngineEndpoint;

/// Timeout of a request to the admin listener.
const PATIENCE: Duration = Duration::from_secs(10);

/// The addresses of a deployment.
pub(crate) struct Deployment {
    pub(crate) url: String,
    pub(crate) engines: Vec<EngineEndpoint>,
    pub(crate) local: Option<LocalDeployment>,
}

/// Starts a deployment whose router listens at this address, or connects to a running one.
pub(crate) async fn deployment(
    options: &DisconnectOptions,
    listen: Ipv4Addr,
    progress: &Progress,
) -> Result<Deployment, BenchError> {
    let Some(url) = &options.url else {
        progress.print_status("starting router, prefill and decode engine");
        let (engine_options, logs) = (options.engine_options.clone(), options.out.clone());
        let (kind, lost_ms) = (options.start, options.vanish_noticed_ms);
        let local = move || LocalDeployment::start(kind, &engine_options, &logs, listen, lost_ms);
        let local = tokio::task::spawn_blocking(local).await??;
        let mut engines = Vec::new();
        for (name, place) in local.engines()? {
            let (name, service) = (name.to_owned(), ServiceClient::parse(place)?);
            engines.push(EngineEndpoint { name, role: None, service });
        }
        return Ok(Deployment { url: local.url()?, engines, local: Some(local) });
    };
    let secret = options.cluster_secret_file.as_deref();
    let engine = |role: Option<&str>, url: &str| -> Result<_, BenchError> {
        let service = ServiceClient::engine(url)?.with_secret_file(secret)?;
        let name = service.authority().to_owned();
        Ok(EngineEndpoint { name, role: role.map(str::to_owned), service })
    };
    let mut engines: Vec<EngineEndpoint> = Vec::new();
    for named in &options.engines {
        let (role, url) = match named.split_once('=') {
            Some((role @ ("prefill" | "decode" | "both"), url)) => (Some(role), url),
            Some((role, _)) => {
                return Err(format!(
                    "--engine {named}: a role is `prefill`, `decode` or `both`, not `{role}`"
                )
                .into());
            }
            None => (None, named.as_str()),
        };
        engines.push(engine(role, url)?);
    }
    if let Some(admin) = &options.admin {
        let admin = ServiceClient::parse(admin)?.with_token_file(options.admin_token_file.as_deref())?;
        let listed = admin.get_json("/engines", PATIENCE).await?;
        for one in listed["engines"].as_array().into_iter().flatten() {
            let Some(place) = one["engine"].as_str() else { continue };
            // An engine of the options keeps its role.
            let known = engines.iter().position(|known| known.service.authority() == place);
            let at = known.unwrap_or(engines.len());
            if known.is_none() {
                engines.push(engine(None, place)?);
            }
            let control = one["control_url"].as_str();
            if engines[at].service.set_control(control).is_err() {
                let control = control.unwrap_or_default();
                progress.print_status(&format!(
                    "warning: {place} is observed at its own address: control_url {control:?} is not \
                     http://HOST:PORT"
                ));
            }
        }
    }
    if engines.is_empty() && options.admin.is_some() {
        return Err("the router knows no engine".into());
    }
    // Options may repeat an engine. The first one counts.
    let mut seen = std::collections::BTreeSet::new();
    engines.retain(|engine| seen.insert(engine.service.authority().to_owned()));
    Ok(Deployment { url: url.clone(), engines, local: None })
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};
    use serde_json::{Value, json};

    use super::*;
    use crate::common::test_server::serve;

    #[tokio::test]
    async fn engines_are_observed_at_the_control_addresses_of_options_and_router() {
        let listed = |engine: &str, control: Value| json!({"engine": engine, "control_url": control});
        let engines = [
            listed("p:1", json!("http://p:2")),
            listed("d:1", json!("http://d:2")),
            listed("stock:1", Value::Null),
            // With `engine_tls.ca`.
            listed("tls:1", json!("https://tls:2")),
            // As from an older router.
            json!({"engine": "old:1"}),
        ];
        let admin = serve(&[("/engines", json!({"engines": engines}))]).await;
        let named = ["prefill=http://p:1", "decode=http://d:1/,http://d:3", "x:1,x:2"];
        let mut arguments = vec!["disconnect", "--url", "http://router:1", "--admin", &admin];
        arguments.extend(named.iter().flat_map(|engine| ["--engine", engine]));
        let command = DisconnectOptions::augment_args(clap::Command::new("disconnect"));
        let options = DisconnectOptions::from_arg_matches(&command.get_matches_from(arguments));
        let options = options.expect("valid options");
        let found = deployment(&options, Ipv4Addr::LOCALHOST, &Progress::new(true)).await.expect("engines");
        let seen = found
            .engines
            .iter()
            .map(|engine| (engine.name.as_str(), engine.service.control_authority(), engine.role.as_deref()));
        let expected = [
            ("p:1", "p:2", Some("prefill")),
            ("d:1", "d:3", Some("decode")),
            ("x:1", "x:2", None),
            ("stock:1", "stock:1", None),
            ("tls:1", "tls:1", None),
            ("old:1", "old:1", None),
        ];
        assert_eq!(seen.collect::<Vec<_>>(), expected);
    }
}
