//! `baton router` and `baton check`.

use std::io::Write;

use baton_router::{ConfigError, Router, RouterConfig};

use crate::cli::{CheckArgs, RouterArgs};
use crate::{Failure, shutdown};

pub(crate) fn run(args: &RouterArgs) -> Result<(), Failure> {
    let config = RouterConfig::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = shutdown::on_signal(args.until_stdin_ends)?;
        let router = Router::bind(config).await?;
        say(&format!("ready http={} admin={}", router.local_addr(), router.admin_addr()));
        router.run(stop).await;
        say("stopped");
        Ok(())
    })
}

/// One line on standard output for people and supervisors: `baton router: ready http=ADDR admin=ADDR`.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A supervisor that has left reads no more; the router notices that in another way.
    let _ = writeln!(out, "baton router: {line}").and_then(|()| out.flush());
}

/// Problems go to standard error, one line each: `FILE:LINE:COLUMN: what`. What is in effect goes to standard
/// output and is a configuration again, with every default written out and secrets masked.
pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let Some(file) = &args.file else {
        println!("{}", serde_json::to_string_pretty(&RouterConfig::schema())?);
        return Ok(());
    };
    let config = match RouterConfig::load(file) {
        Err(problems @ ConfigError::Invalid { .. }) => {
            eprintln!("{problems}");
            return Err(match problems.to_string().lines().count() {
                1 => "1 problem".into(),
                count => format!("{count} problems").into(),
            });
        }
        other => other?,
    };
    // A file that it names and that cannot be used is found at the start as well; here it is found before.
    config.secret()?;
    match &args.diff {
        None => print!("# {}: sound. In effect:\n{}", file.display(), config.effective()),
        Some(old) => RouterConfig::load(old)?.changes(&config).iter().for_each(|line| println!("{line}")),
    }
    Ok(())
}
