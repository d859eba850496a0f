//! The `baton` command line. Thin: every command is a function of a crate below it.
#![allow(clippy::print_stdout)] // a command line prints

mod admin_client;
mod builtin;
mod cli;
mod engine;
mod explain;
mod health;
mod parity;
mod router;
mod shutdown;
mod up;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

/// glibc's allocator locks an arena for each block that another thread frees, and with a scheduler that moves tasks between
/// threads many blocks are. ARCHITECTURE.md has the number.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a check that could not be made: neither success nor failure.
const SKIPPED: u8 = 77;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    init_logging(cli.log_json);
    let result = match cli.command {
        cli::Command::Up(args) => up::run(args),
        cli::Command::Engine(args) => engine::run(*args),
        cli::Command::Router(args) => router::run(&args),
        cli::Command::Check(args) => router::check(&args),
        cli::Command::Explain(args) => explain::run(&args),
        cli::Command::Top(args) => baton_bench::top::run(&args, &mut std::io::stdout()),
        cli::Command::Doctor(args) => return doctor(&args),
        cli::Command::Key(args) => {
            router::key(&args.verb);
            Ok(())
        }
        cli::Command::Health(args) => health::run(&args),
        cli::Command::Parity(args) => parity::run(&args),
        cli::Command::Bench(args) => baton_bench::run(args.benchmark, &mut std::io::stdout()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error}");
            match error.is::<baton_bench::gpu::Skipped>() {
                true => ExitCode::from(SKIPPED),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// What the doctor found is its exit code.
fn doctor(args: &baton_bench::doctor::DoctorArgs) -> ExitCode {
    match baton_bench::doctor::run(args, &mut std::io::stdout()) {
        Ok(verdict) => ExitCode::from(verdict.code()),
        Err(error) => {
            eprintln!("baton: {error}");
            ExitCode::from(baton_bench::doctor::Verdict::NotSeen.code())
        }
    }
}

/// What a command failed with, for people.
type Failure = Box<dyn std::error::Error>;

/// Log lines go to stderr; `RUST_LOG` chooses them (`info` by default).
fn init_logging(json: bool) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    if json {
        lines.json().init();
    } else {
        lines.with_target(false).compact().init();
    }
}
