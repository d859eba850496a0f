//! `baton router`, `baton check` and `baton key`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use baton_router::{
    ConfigError, ConfigFile, InheritedListeners, NamedFile, NewKey, ReloadHandle, Router, RouterConfig,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::admin_client::AdminClient;
use crate::cli::{CheckArgs, KeyVerb, RouterArgs};
use crate::output::{self, CommandOutput, note};
use crate::{Failure, shutdown};

pub(crate) fn run(args: &RouterArgs) -> Result<(), Failure> {
    let (file, config) = ConfigFile::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal(args.until_stdin_ends)?;
        let supervised =
            InheritedListeners::from_supervisor().map_err(|error| format!("LISTEN_FDS: {error}"))?;
        let inherited = match &args.takeover_socket {
            Some(path) if supervised.is_empty() => {
                let path = path.clone();
                let asked = move || {
                    InheritedListeners::from_router(&path)
                        .map_err(|error| format!("{}: {error}", path.display()))
                };
                tokio::task::spawn_blocking(asked).await??
            }
            _ => supervised,
        };
        let mut router = Router::bind_with(config, inherited).await?;
        if let Some(path) = &args.takeover_socket {
            router.take_over_at(path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        say(&format!("ready http={} admin={}", router.local_addr(), router.admin_addr()));
        let _following = follow(router.reload(), file)?;
        router.run(stop).await;
        say("stopped");
        Ok(())
    });
    // A look-up on a hanging file system or name server does not delay the exit.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}

/// Applies the configuration file when its content changes, and on SIGHUP.
pub(crate) fn follow(reload: ReloadHandle, file: ConfigFile) -> Result<AbortOnDropHandle<()>, Failure> {
    let mut hangups = signal(SignalKind::hangup())?;
    // One pending signal is as good as several.
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

/// Prints one line to standard output for people and supervisors: `baton router: ready http=ADDR admin=ADDR`.
fn say(line: &str) {
    output::say(format_args!("baton router: {line}"));
}

/// Problems go to standard error, one line each: `FILE:LINE:COLUMN: what`. `--print` writes the effective configuration
/// to standard output, with every default and with masked secrets.
pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let Some(file) = &args.file else {
        writeln!(CommandOutput, "{}", serde_json::to_string_pretty(&RouterConfig::schema())?)?;
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
    // The router also fails at its start if a referenced file is unreadable. The check finds this earlier.
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
        None if args.print => {
            write!(CommandOutput, "# {}: OK. In effect:\n{}", file.display(), config.effective())?
        }
        None => writeln!(CommandOutput, "{}: OK", file.display())?,
        Some(old) => {
            let old = match old.starts_with("http://") {
                true => running(old, args)?,
                false => RouterConfig::load(Path::new(old))?,
            };
            old.changes(&config).iter().try_for_each(|line| writeln!(CommandOutput, "{line}"))?;
        }
    }
    Ok(())
}

pub(crate) fn key(verb: &KeyVerb) -> Result<(), Failure> {
    let KeyVerb::New { id, tenant } = verb;
    let new = NewKey::make();
    writeln!(
        CommandOutput,
        "# The key, for the client. It is shown only now:\n#   {}\n# Its entry for `auth.keys`, or `keys` of the keys \
         file:\n{}",
        new.key,
        new.entry(id, tenant).trim_end()
    )?;
    Ok(())
}

/// The effective configuration of a running router, from its admin listener.
fn running(address: &str, args: &CheckArgs) -> Result<RouterConfig, Failure> {
    let admin = AdminClient { address, token_file: args.admin_token_file.as_deref() };
    let mut told = admin.ask("GET", "/config", &[], b"")?;
    Ok(serde_json::from_value(told["config"].take())?)
}
