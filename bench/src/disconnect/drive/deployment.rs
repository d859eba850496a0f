//! The deployment that is judged: one that runs, or one that is started for the run.

use std::net::Ipv4Addr;
use std::time::Duration;

use crate::BenchError;
use crate::common::http_client::Origin;
use crate::disconnect::drive::local::Own;
use crate::disconnect::drive::progress::Progress;
use crate::disconnect::plan::options::DisconnectOptions;

/// Tells anything that is looked at besides.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a run needs to know of its deployment.
pub(crate) struct Deployment {
    pub(crate) url: String,
    pub(crate) engines: Vec<(String, Option<String>, Origin)>,
    pub(crate) own: Option<Own>,
    // Kept until its processes have ended.
    _folder: Option<tempfile::TempDir>,
}

/// Starts it, to serve clients at this address, or meets it.
pub(crate) async fn deployment(
    options: &DisconnectOptions,
    listen: Ipv4Addr,
    progress: &Progress,
) -> Result<Deployment, BenchError> {
    let Some(url) = &options.url else {
        progress.say("starting router, prefill and decode engine");
        let folder = tempfile::tempdir()?;
        let (place, logs) = (folder.path().to_owned(), options.out.clone());
        let engine_options = options.engine_options.clone();
        let lost_ms = options.vanish_noticed_ms;
        let own = move || Own::start(&engine_options, &place, &logs, listen, lost_ms);
        let own = tokio::task::spawn_blocking(own).await??;
        let mut engines = Vec::new();
        for (name, place) in own.engines()? {
            engines.push((name.to_owned(), None, Origin::parse(place)?));
        }
        return Ok(Deployment { url: own.url()?, engines, own: Some(own), _folder: Some(folder) });
    };
    let secret = options.cluster_secret_file.as_deref();
    let engine = |name: &str, role: Option<&str>, url: &str| -> Result<_, BenchError> {
        Ok((name.to_owned(), role.map(str::to_owned), Origin::parse(url)?.with_secret_file(secret)?))
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
        let admin = Origin::parse(admin)?.with_token_file(options.admin_token_file.as_deref())?;
        let told = admin.get_json("/engines", PATIENCE).await?;
        for one in told["engines"].as_array().into_iter().flatten() {
            let Some(place) = one["engine"].as_str() else { continue };
            engines.push(engine(place, None, place)?);
        }
    }
    if engines.is_empty() && options.admin.is_some() {
        return Err("the router knows no engine".into());
    }
    // Named, and known to the router as well: the first word counts.
    let mut seen = std::collections::BTreeSet::new();
    engines.retain(|(.., origin)| seen.insert(origin.authority().to_owned()));
    Ok(Deployment { url: url.clone(), engines, own: None, _folder: None })
}
