//! The `baton` command line. Every command is a thin call of a function in another crate.
#![deny(clippy::print_stderr)] // `eprintln!` panics where standard error is closed: `output::note`

mod admin_client;
mod builtin;
mod cli;
mod engine;
mod explain;
mod health;
mod output;
mod parity;
mod picker;
mod router;
mod shutdown;
mod sidecar;
mod up;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

use output::{CLOSED, CommandOutput, is_closed, note};

/// glibc's allocator locks an arena for each block that another thread frees. A scheduler that moves tasks between
/// threads frees many such blocks. docs/explanation/decisions/0013-allocator.md has the measurement.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a check that could not run: neither success nor failure.
const SKIPPED: u8 = 77;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => return explain_options(&told),
    };
    init_logging(cli.log_json);
    // A server does not end because the reader of its first lines has closed the pipe.
    let serves = matches!(
        cli.command,
        cli::Command::Up(_)
            | cli::Command::Engine(_)
            | cli::Command::Router(_)
            | cli::Command::Picker(_)
            | cli::Command::Sidecar(_)
    );
    let result = match cli.command {
        cli::Command::Up(args) => up::run(args),
        cli::Command::Engine(args) => engine::run(*args),
        cli::Command::Router(args) => router::run(&args),
        cli::Command::Picker(args) => picker::run(&args),
        cli::Command::Sidecar(args) => sidecar::run(&args),
        cli::Command::Check(args) => router::check(&args),
        cli::Command::Explain(args) => explain::run(&args),
        cli::Command::Top(args) => baton_bench::ops::top::run(&args, &mut CommandOutput),
        cli::Command::Doctor(args) => return doctor(&args),
        cli::Command::Key(args) => router::key(&args.verb),
        cli::Command::Health(args) => health::run(&args),
        cli::Command::Parity(args) => parity::run(&args),
        cli::Command::Bench(args) => baton_bench::run(args.benchmark, &mut CommandOutput),
    };
    match result {
        _ if !serves && is_closed() => ExitCode::from(CLOSED),
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(format_args!("baton: {error}"));
            match error.is::<baton_bench::parts::gpu::Skipped>() {
                true => ExitCode::from(SKIPPED),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Prints `--help` and `--version` to standard output, and errors in options to standard error.
fn explain_options(told: &clap::Error) -> ExitCode {
    match told.print() {
        Err(error) if !told.use_stderr() && error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::from(CLOSED)
        }
        _ if !told.use_stderr() && is_closed() => ExitCode::from(CLOSED),
        _ => ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(2)),
    }
}

/// The doctor's findings determine the exit code.
fn doctor(args: &baton_bench::ops::doctor::DoctorArgs) -> ExitCode {
    match baton_bench::ops::doctor::run(args, &mut CommandOutput) {
        // A verdict that nothing reads does not count.
        _ if is_closed() => ExitCode::from(CLOSED),
        Ok(verdict) => ExitCode::from(verdict.code()),
        Err(error) => {
            note(format_args!("baton: {error}"));
            ExitCode::from(baton_bench::ops::doctor::Verdict::NotSeen.code())
        }
    }
}

/// The error of a command, for people.
type Failure = Box<dyn std::error::Error>;

/// Log lines go to stderr. `RUST_LOG` selects them (`info` by default).
fn init_logging(json: bool) {
    use tracing_subscriber::EnvFilter;
    let wanted = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    let (filter, invalid) = match EnvFilter::try_new(if wanted.is_empty() { "info" } else { &wanted }) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error)),
    };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // The subscriber reports a failed write to standard error, which is what failed, with a macro that panics in
        // this case.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    if json {
        // A line has one span at most, `span`. `spans` would list only those that a thread has entered.
        lines.json().with_span_list(false).init();
    } else {
        lines.with_target(false).init();
    }
    if let Some(error) = invalid {
        tracing::warn!(event = "log_filter_invalid", %error, "RUST_LOG is invalid, the filter is info");
    }
}
