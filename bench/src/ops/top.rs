//! `baton top`: a live view of a deployment. Shows engines with their blocks by state, leases by age and reason,
//! requests by phase, and leases ended per second. Also shows one request from its arrival to the release of its
//! last block.
//!
//! ```text
//! source ─ snapshot ─▶ app ◀─ key ─ screen
//!                       └─▶ view ─ frame ─▶ screen, or a page of text
//! ```
//!
//! The view shows a value ([`baton_router::snapshot::Snapshot`]). The screen's state and its drawing are pure.

mod app;
mod history;
mod merge;
mod screen;
pub(crate) mod source;
pub(crate) mod text;
mod view;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use app::App;
use source::Sources;
use view::Theme;

use crate::BenchError;

/// Columns of a printed frame if the terminal's width is unknown.
const COLUMNS: u16 = 100;
/// Maximum rows of a printed frame.
const ROWS_MAX: u16 = 400;

/// Options of `baton top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Admin URL of a router; of each router that shares the engines [default: http://127.0.0.1:8081]
    #[arg(long, value_name = "URL", env = "BATON_ADMIN")]
    admin: Vec<String>,
    /// Engine to query directly (repeatable); without --admin no router is queried
    #[arg(long, value_name = "URL[,CONTROL_URL]")]
    engine: Vec<String>,
    /// File with the token of the admin listeners
    #[arg(long, value_name = "FILE", env = "BATON_ADMIN_TOKEN_FILE")]
    admin_token_file: Option<PathBuf>,
    /// File with the cluster secret, for --engine
    #[arg(long, value_name = "FILE", env = "BATON_CLUSTER_SECRET_FILE")]
    cluster_secret_file: Option<PathBuf>,
    /// Seconds between two updates; routers query their engines once a second
    #[arg(long, default_value_t = 1.0, value_parser = interval, value_name = "SECONDS")]
    interval: f64,
    /// Print one frame as text and exit; also if standard output is no terminal
    #[arg(long)]
    once: bool,
    /// Print one line of JSON per update
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.1 to 3600".to_owned()) }
}

impl TopArgs {
    fn sources(&self) -> Result<Sources, BenchError> {
        let default = vec!["http://127.0.0.1:8081".to_owned()];
        let admins = if self.admin.is_empty() && self.engine.is_empty() { &default } else { &self.admin };
        let (token, secret) = (self.admin_token_file.as_deref(), self.cluster_secret_file.as_deref());
        Ok(Sources::new(admins, &self.engine, token, secret)?)
    }
}

/// Watches until a signal or a key, or prints one frame.
///
/// # Errors
/// If options are invalid, the terminal cannot be used, or no component responds for one frame.
pub fn run(args: &TopArgs, out: &mut dyn Write) -> Result<(), BenchError> {
    let sources = args.sources()?;
    let every = Duration::from_secs_f64(args.interval);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    runtime.block_on(async {
        if args.json {
            return lines(&sources, every, args.once, out).await;
        }
        if args.once || !terminal || dumb {
            return print(&sources, out).await;
        }
        screen::run(sources, every, theme(), out).await
    })
}

/// Colours, unless `NO_COLOR` is set (see no-color.org).
fn theme() -> Theme {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if unwanted { Theme::Plain } else { Theme::Colours }
}

/// The error text if no component responds.
fn unreachable_text(snapshot: &baton_router::snapshot::Snapshot) -> Option<String> {
    let routers = snapshot
        .routers
        .iter()
        .filter_map(|router| router.error.as_ref().map(|error| format!("router {}: {error}", router.admin)));
    let engines = snapshot
        .engines
        .iter()
        .filter(|engine| engine.source == baton_router::snapshot::SnapshotSource::None);
    let engines =
        engines.map(|engine| format!("engine {}: {}", engine.engine, engine.error.as_deref().unwrap_or("?")));
    let answered = snapshot.routers.iter().any(|router| router.error.is_none())
        || snapshot.engines.iter().any(|e| e.source != baton_router::snapshot::SnapshotSource::None);
    (!answered).then(|| text::clean(&routers.chain(engines).collect::<Vec<_>>().join("; ")))
}

async fn print(sources: &Sources, out: &mut dyn Write) -> Result<(), BenchError> {
    let snapshot = sources.snapshot().await;
    if let Some(why) = unreachable_text(&snapshot) {
        return Err(why.into());
    }
    let mut app = App::new();
    app.take(snapshot);
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let size = ratatui::crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
    let columns = size.map(|(columns, _)| columns).or(columns).unwrap_or(COLUMNS).clamp(40, 400);
    for line in frame(&app, columns, view::rows(&app).min(ROWS_MAX)) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// A frame as text, without the line of keys.
fn frame(app: &App, columns: u16, rows: u16) -> Vec<String> {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, rows + 1));
    let Ok(_) = terminal.draw(|frame| {
        view::draw(frame, app, Theme::Plain);
        // Text output has no selection.
        let style = ratatui::style::Style::reset();
        let area = frame.area();
        frame.buffer_mut().set_style(area, style);
    });
    let buffer = terminal.backend().buffer();
    let row = |y| {
        let line: String = (0..columns).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_owned()
    };
    let mut lines: Vec<String> = (0..rows).map(row).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

async fn lines(
    sources: &Sources,
    every: Duration,
    once: bool,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    let mut due = tokio::time::interval(every);
    due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut stop = std::pin::pin!(screen::wait_for_stop());
    loop {
        let snapshot = tokio::select! {
            stopped = &mut stop => return Ok(stopped?),
            snapshot = async { due.tick().await; sources.snapshot().await } => snapshot,
        };
        if let Some(why) = unreachable_text(&snapshot).filter(|_| once) {
            return Err(why.into());
        }
        match writeln!(out, "{}", serde_json::to_string(&snapshot)?).and_then(|()| out.flush()) {
            Ok(()) if once => return Ok(()),
            Ok(()) => {}
            // The reader has closed the pipe.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
