//! `baton sidecar`.

use std::time::Duration;

use baton_router::{SidecarOptions, SidecarServer, SidecarSettings};

use crate::cli::sidecar::SidecarArgs;
use crate::{Failure, output, shutdown};

/// Prints one line to standard output for people and supervisors: `baton sidecar: ready http=ADDR admin=ADDR`.
pub(crate) fn run(args: &SidecarArgs) -> Result<(), Failure> {
    let options = SidecarOptions::new(settings(args)?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal(args.until_stdin_ends)?;
        let server = SidecarServer::bind(options).await?;
        output::say(format_args!(
            "baton sidecar: ready http={} admin={}",
            server.local_addr(),
            server.admin_addr()
        ));
        server.run(stop).await;
        output::say(format_args!("baton sidecar: stopped"));
        Ok(())
    });
    // A look-up on a hanging name server does not delay the exit.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// The settings by precedence: flags, YAML, environment.
fn settings(args: &SidecarArgs) -> Result<SidecarSettings, Failure> {
    let yaml = match (&args.configuration, &args.configuration_file) {
        (Some(text), _) => SidecarSettings::from_yaml(text)?,
        (None, Some(file)) => {
            let text =
                std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            SidecarSettings::from_yaml(&text).map_err(|error| format!("{}: {error}", file.display()))?
        }
        (None, None) => SidecarSettings::default(),
    };
    let environment = SidecarSettings::from_environment(|name| std::env::var(name).ok());
    Ok(args.settings().or(yaml).or(environment))
}
