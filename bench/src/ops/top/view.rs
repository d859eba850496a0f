//! Draws the screen as a function of its state.
//!
//! ```text
//! baton top │ summary, and errors of routers
//! ENGINES     a bar of blocks by state for each engine
//! PHASES │ RELEASES
//! LEASES      or requests: the list with the selection
//! keys
//! ```
//!
//! Every state has its own letter in the bars, so that they are readable without colours. Text has the terminal's
//! own colours. Other colours have medium lightness: readable on light and dark.

mod bars;
mod lists;
mod timeline;

use baton_router::snapshot::{PHASES, Snapshot, phase_name};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::app::{App, List};
use super::text::{clean, fit, known, short};

/// Whether colours may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    Plain,
    Colours,
}

impl Theme {
    /// One of the 256 colours, or none.
    fn colour(self, number: u8) -> Style {
        match self {
            Self::Plain => Style::new(),
            Self::Colours => Style::new().fg(Color::Indexed(number)),
        }
    }

    /// Style of errors: bold, and red if there are colours.
    fn alarm(self) -> Style {
        self.colour(196).add_modifier(Modifier::BOLD)
    }

    fn heading(self) -> Style {
        self.colour(37).add_modifier(Modifier::BOLD)
    }

    fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }
}

/// Rows of the complete screen, for a printed frame.
pub(super) fn rows(app: &App) -> u16 {
    const LEASES_MAX: usize = 20;
    // One row of leases, and one that the middle needs before engines get their second row.
    let lists = app.snapshot.leases.len().clamp(2, LEASES_MAX);
    let rows = 1 + bars::rows(app, usize::MAX) + 1 + PHASES.len() + 2 + lists + trouble(&app.snapshot).len();
    u16::try_from(rows).unwrap_or(u16::MAX)
}

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App, theme: Theme) {
    let mut rest = frame.area();
    if rest.height < 3 || rest.width < 20 {
        frame.render_widget(Paragraph::new("too small"), rest);
        return;
    }
    frame.render_widget(Paragraph::new(title(app, theme)), cut(&mut rest, 1));
    let foot = Rect { y: rest.bottom() - 1, height: 1, ..rest };
    rest.height -= 1;
    frame.render_widget(Paragraph::new(keys(app, theme)), foot);
    if app.waiting {
        frame.render_widget(Paragraph::new("loading…"), rest);
        return;
    }
    if app.help {
        frame.render_widget(Paragraph::new(help(theme)), rest);
        return;
    }
    if let Some(detail) = &app.detail {
        timeline::draw(frame, rest, detail, theme);
        return;
    }
    for line in trouble(&app.snapshot) {
        let line = Line::styled(fit(&line, usize::from(rest.width)), theme.alarm());
        frame.render_widget(Paragraph::new(line), cut(&mut rest, 1));
    }
    // The list needs a heading and some rows. The middle is dropped before the engines.
    let middle_rows = PHASES.len() as u16 + 1;
    let for_engines = rest.height.saturating_sub(middle_rows + 4).max(rest.height.min(4));
    let engines = bars::lines(app, theme, rest.width, usize::from(for_engines));
    let engines_area = cut(&mut rest, engines.len() as u16);
    frame.render_widget(Paragraph::new(engines), engines_area);
    if rest.height >= middle_rows + 3 {
        let area = cut(&mut rest, middle_rows);
        let left = Rect { width: (area.width * 2 / 5).max(30).min(area.width), ..area };
        let right = Rect { x: left.right(), width: area.width - left.width, ..area };
        frame.render_widget(Paragraph::new(phases(app, theme, left.width)), left);
        let releases = bars::releases(app, theme, right.width, usize::from(right.height));
        frame.render_widget(Paragraph::new(releases), right);
    }
    lists::draw(frame, rest, app, theme);
}

/// Takes rows from the top.
fn cut(rest: &mut Rect, rows: u16) -> Rect {
    let rows = rows.min(rest.height);
    let top = Rect { height: rows, ..*rest };
    rest.y += rows;
    rest.height -= rows;
    top
}

/// Errors of routers.
fn trouble(snapshot: &Snapshot) -> Vec<String> {
    let text = |router: &baton_router::snapshot::RouterView| {
        let error = router.error.as_ref()?;
        Some(format!("! router {}: {}", clean(&router.admin), clean(error)))
    };
    snapshot.routers.iter().filter_map(text).take(3).collect()
}

fn title(app: &App, theme: Theme) -> Line<'static> {
    let snapshot = &app.snapshot;
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let live: u64 = snapshot.engines.iter().filter_map(|engine| engine.leases).sum();
    let mut spans = vec![Span::styled("baton top", Style::new().add_modifier(Modifier::BOLD))];
    let mut part = |text: String, style: Style| {
        spans.push(Span::styled("  ", Style::new()));
        spans.push(Span::styled(text, style));
    };
    if !app.waiting {
        let stranded = match (snapshot.stranded_blocks, snapshot.stranded_leases) {
            (Some(0), _) => ("stranded 0".to_owned(), Style::new()),
            (Some(blocks), leases) => {
                let leases = known(leases);
                let what = if leases == "1" { "lease" } else { "leases" };
                (format!("STRANDED {} blocks of {leases} {what}", short(blocks)), theme.alarm())
            }
            (None, _) => ("stranded ?".to_owned(), Style::new()),
        };
        part(stranded.0, stranded.1);
        let requests = if snapshot.routers.is_empty() { None } else { Some(snapshot.requests.in_flight) };
        part(format!("in flight {}", known(requests)), Style::new());
        part(format!("leases {}", short(live)), Style::new());
        part(format!("ended {:.1}/s", app.history.ended_per_second()), Style::new());
        part(
            format!(
                "{}, {}",
                plural(snapshot.routers.len(), "router"),
                plural(snapshot.engines.len(), "engine")
            ),
            theme.dim(),
        );
        if snapshot.routers.iter().any(|router| router.draining) {
            part("draining".to_owned(), theme.alarm());
        }
    }
    if app.paused {
        part("PAUSED".to_owned(), theme.alarm());
    }
    Line::from(spans)
}

fn phases(app: &App, theme: Theme, width: u16) -> Vec<Line<'static>> {
    const NAME: usize = 20;
    let counts = &app.snapshot.requests.phases;
    let of = |phase: &str| counts.get(phase).copied().unwrap_or(0);
    let most = PHASES.iter().map(|phase| of(phase)).max().unwrap_or(0).max(1);
    let room = usize::from(width).saturating_sub(NAME + 8);
    let mut lines = vec![Line::styled("REQUESTS BY PHASE", theme.heading())];
    for phase in PHASES {
        let count = of(phase);
        let cells = if count == 0 { 0 } else { (count as usize * room / most as usize).max(1) };
        let known = if app.snapshot.routers.is_empty() { "?".to_owned() } else { short(count) };
        lines.push(Line::from(vec![
            Span::raw(format!("{:<NAME$}", phase_name(phase))),
            Span::raw(format!("{known:>5} ")),
            Span::styled("█".repeat(cells), theme.colour(33)),
        ]));
    }
    lines
}

fn keys(app: &App, theme: Theme) -> Line<'static> {
    if app.filtering {
        return Line::from(vec![
            Span::styled("/", theme.heading()),
            Span::raw(clean(&app.filter)),
            Span::raw("▏"),
            Span::styled("  Enter: keep, Esc: clear", theme.dim()),
        ]);
    }
    let mut text = match (&app.detail, app.list) {
        (Some(_), _) => "q back  j/k move  r reload",
        (None, List::Leases) => "q quit  j/k move  Enter timeline  Tab requests  / filter  p pause  ? help",
        (None, List::Requests) => "q quit  j/k move  Enter timeline  Tab leases  / filter  p pause  ? help",
    }
    .to_owned();
    if !app.filter.is_empty() {
        text = format!("filter `{}`, Esc clears it  {text}", clean(&app.filter));
    }
    Line::styled(text, theme.dim())
}

fn help(theme: Theme) -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled("BLOCKS BY STATE", theme.heading())];
    for (state, meaning) in bars::STATES {
        let (letter, colour) = state.look();
        lines.push(Line::from(vec![
            Span::styled(format!("  {letter} "), theme.colour(colour)),
            Span::raw(format!("{:<9} {meaning}", state.name())),
        ]));
    }
    lines.push(Line::raw(""));
    lines.push(Line::styled("KEYS", theme.heading()));
    // Short enough for 80 columns.
    for (keys, what) in [
        ("j k, arrows, PgUp PgDn, g G", "move in the list"),
        ("Enter, x", "timeline of the selected request"),
        ("Tab", "switch between leases and requests in flight"),
        ("/", "filter the rows"),
        ("p, Space", "pause the screen; rates are still measured"),
        ("q, Ctrl-C", "quit"),
    ] {
        lines.push(Line::raw(format!("  {keys:<28} {what}")));
    }
    lines
}

#[cfg(test)]
mod tests;
