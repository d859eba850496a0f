//! `baton router`, `baton check` and `baton key`.

use std::io::Write;

use baton_router::{NewKey, Router, RouterConfig};

use crate::cli::{CheckArgs, KeyVerb, RouterArgs};
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

pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let config = RouterConfig::load(&args.file)?;
    println!(
        "{}: sound. In effect (JSON is YAML):\n{}",
        args.file.display(),
        serde_json::to_string_pretty(&config)?
    );
    Ok(())
}

pub(crate) fn key(verb: &KeyVerb) {
    let KeyVerb::New { id, tenant } = verb;
    let new = NewKey::make();
    println!(
        "# The key, for the client. It is shown only now:\n#   {}\n# Its entry for `auth.keys`, or `keys` of the keys \
         file:\n{}",
        new.key,
        new.entry(id, tenant).trim_end()
    );
}
