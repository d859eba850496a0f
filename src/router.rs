//! `baton router`, `baton check` and `baton key`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use baton_router::{ConfigError, ConfigFile, Inherited, NamedFile, NewKey, Reload, Router, RouterConfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::admin_client::AdminClient;
use crate::cli::{CheckArgs, KeyVerb, RouterArgs};
use crate::out::{self, Out, note};
use crate::{Failure, shutdown};

pub(crate) fn run(args: &RouterArgs) -> Result<(), Failure> {
    let (file, config) = ConfigFile::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal(args.until_stdin_ends)?;
        let supervised = Inherited::from_supervisor().map_err(|error| format!("LISTEN_FDS: {error}"))?;
        let inherited = match &args.takeover_socket {
            Some(path) if supervised.is_empty() => {
                let path = path.clone();
                let asked = move || {
                    Inherited::from_router(&path).map_err(|error| format!("{}: {error}", path.display()))
                };
                tokio::task::spawn_blocking(asked).await??
            }
            _ => supervised,
        };
        let mut router = Router::bind_with(config, inherited).await?;
        if let Some(path) = &args.takeover_socket {
            router.hand_over_at(path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        say(&format!("ready http={} admin={}", router.local_addr(), router.admin_addr()));
        let _following = follow(router.reload(), file)?;
        router.run(stop).await;
        say("stopped");
        Ok(())
    });
    // A file or a name that is still looked up, on a file system or a server that hangs, holds up no exit.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Keeps the router's configuration as its file says: when its content changes, and on SIGHUP.
fn follow(reload: Reload, file: ConfigFile) -> Result<AbortOnDropHandle<()>, Failure> {
    let mut hangups = signal(SignalKind::hangup())?;
    // One that waits says as much as many.
    let (tell, told) = mpsc::channel(1);
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let pass_on = async {
            while hangups.recv().await.is_some() {
                let _ = tell.try_send(());
            }
        };
        tokio::join!(pass_on, reload.follow(file, told));
    })))
}

/// One line on standard output for people and supervisors: `baton router: ready http=ADDR admin=ADDR`.
fn say(line: &str) {
    out::say(format_args!("baton router: {line}"));
}

/// Problems go to standard error, one line each: `FILE:LINE:COLUMN: what`. `--print` writes the effective configuration to
/// standard output: a configuration file with every default and with masked secrets.
pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let Some(file) = &args.file else {
        writeln!(Out, "{}", serde_json::to_string_pretty(&RouterConfig::schema())?)?;
        return Ok(());
    };
    let config = match RouterConfig::load(file) {
        Err(problems @ ConfigError::Invalid { .. }) => {
            note(&problems);
            return Err(match problems.to_string().lines().count() {
                1 => "1 problem".into(),
                count => format!("{count} problems").into(),
            });
        }
        other => other?,
    };
    // A file that it names and that cannot be read is found at the start as well; here it is found before.
    let unreadable = |named: &NamedFile| {
        let NamedFile { key, file, .. } = named;
        Some(format!("{key}: {}: {}", file.display(), File::open(file).err()?))
    };
    let named = config.named_files();
    if args.no_files {
        let not_seen = |NamedFile { key, file: of, .. }: &NamedFile| {
            note(format_args!("{}: not checked: {key}: {}", file.display(), of.display()));
        };
        named.iter().for_each(not_seen);
    } else {
        let problems: Vec<_> = named.iter().filter_map(unreadable).collect();
        if !problems.is_empty() {
            let hint = "`--no-files` skips these files";
            return Err(format!("{}: {}\n{hint}", file.display(), problems.join("\n")).into());
        }
        config.secret()?;
    }
    let warned = |warning| note(format_args!("{}: warning: {warning}", file.display()));
    config.warnings().iter().for_each(warned);
    match &args.diff {
        None if args.print => write!(Out, "# {}: OK. In effect:\n{}", file.display(), config.effective())?,
        None => writeln!(Out, "{}: OK", file.display())?,
        Some(old) => {
            let old = match old.starts_with("http://") {
                true => running(old, args)?,
                false => RouterConfig::load(Path::new(old))?,
            };
            old.changes(&config).iter().try_for_each(|line| writeln!(Out, "{line}"))?;
        }
    }
    Ok(())
}

pub(crate) fn key(verb: &KeyVerb) -> Result<(), Failure> {
    let KeyVerb::New { id, tenant } = verb;
    let new = NewKey::make();
    writeln!(
        Out,
        "# The key, for the client. It is shown only now:\n#   {}\n# Its entry for `auth.keys`, or `keys` of the keys \
         file:\n{}",
        new.key,
        new.entry(id, tenant).trim_end()
    )?;
    Ok(())
}

/// What is in effect in a router that runs, from its admin listener.
fn running(address: &str, args: &CheckArgs) -> Result<RouterConfig, Failure> {
    let admin = AdminClient { address, token_file: args.admin_token_file.as_deref() };
    let mut told = admin.ask("GET", "/config", &[], b"")?;
    Ok(serde_json::from_value(told["config"].take())?)
}
