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
        let lost_ms = options.vanish_noticed_ms;
        let local = move || LocalDeployment::start(&engine_options, &logs, listen, lost_ms);
        let local = tokio::task::spawn_blocking(local).await??;
        let mut engines = Vec::new();
        for (name, place) in local.engines()? {
            let (name, service) = (name.to_owned(), ServiceClient::parse(place)?);
            engines.push(EngineEndpoint { name, role: None, service });
        }
        return Ok(Deployment { url: local.url()?, engines, local: Some(local) });
    };
    let secret = options.cluster_secret_file.as_deref();
    let engine = |name: &str, role: Option<&str>, url: &str| -> Result<_, BenchError> {
        let service = ServiceClient::parse(url)?.with_secret_file(secret)?;
        Ok(EngineEndpoint { name: name.to_owned(), role: role.map(str::to_owned), service })
    };
    let mut engines = Vec::new();
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
        engines.push(engine(url.trim_start_matches("http://"), role, url)?);
    }
    if let Some(admin) = &options.admin {
        let admin = ServiceClient::parse(admin)?.with_token_file(options.admin_token_file.as_deref())?;
        let listed = admin.get_json("/engines", PATIENCE).await?;
        for one in listed["engines"].as_array().into_iter().flatten() {
            let Some(place) = one["engine"].as_str() else { continue };
            engines.push(engine(place, None, place)?);
        }
    }
    if engines.is_empty() && options.admin.is_some() {
        return Err("the router knows no engine".into());
    }
    // An engine may be in the options and in the router's list. The first entry counts.
    let mut seen = std::collections::BTreeSet::new();
    engines.retain(|engine| seen.insert(engine.service.authority().to_owned()));
    Ok(Deployment { url: url.clone(), engines, local: None })
}
