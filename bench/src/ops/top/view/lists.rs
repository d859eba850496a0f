//! Leases, or requests in flight, the oldest first.

use baton_router::snapshot::phase_name;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::super::app::{App, List};
use super::super::text::{clean, fit, short, span};
use super::Theme;

/// Minimum rows of the other list: its heading, its columns and two entries.
const OTHER_ROWS: usize = 4;

/// A column: its heading, its width, whether it is a number.
type Column = (&'static str, usize, bool);

/// Draws the list with the selection and, if there is room, the other list below. Leases exist for milliseconds, so
/// that the screen of a healthy deployment would often be empty.
pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, app: &App, theme: Theme) {
    if area.height == 0 {
        return;
    }
    let width = usize::from(area.width);
    let of = |list: List| match list {
        List::Leases => leases(app, theme, width),
        List::Requests => requests(app, width),
    };
    let mut lines = list(of(app.list), theme, width, usize::from(area.height), Some(app.selected()));
    let other = match app.list {
        List::Leases => List::Requests,
        List::Requests => List::Leases,
    };
    let left = usize::from(area.height).saturating_sub(lines.len() + 1);
    let beside = of(other);
    if left >= OTHER_ROWS && !beside.2.is_empty() {
        lines.push(Line::raw(""));
        lines.extend(list(beside, theme, width, left, None));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// One list in at most `room` rows. One row is selected.
fn list(
    of: ListTable,
    theme: Theme,
    width: usize,
    height: usize,
    selected: Option<usize>,
) -> Vec<Line<'static>> {
    let (head, columns, rows, empty) = of;
    let mut lines = vec![Line::styled(fit(&head, width), theme.heading())];
    let room = height.saturating_sub(2);
    if rows.is_empty() {
        lines.push(Line::styled(empty, theme.dim()));
    } else {
        let heads: Vec<String> = columns.iter().map(|(head, ..)| (*head).to_owned()).collect();
        lines
            .push(Line::styled(row(&columns, &heads, width), theme.dim().add_modifier(Modifier::UNDERLINED)));
    }
    // The selected row is always visible.
    let first = selected.unwrap_or(0).saturating_sub(room.saturating_sub(1));
    for (at, (cells, style)) in rows.iter().enumerate().skip(first).take(room) {
        let style = if Some(at) == selected { style.add_modifier(Modifier::REVERSED) } else { *style };
        lines.push(Line::styled(row(&columns, cells, width), style));
    }
    lines
}

fn row(columns: &[Column], cells: &[String], width: usize) -> String {
    let mut line = String::new();
    for ((_, width, number), cell) in columns.iter().zip(cells) {
        let cell = fit(cell, *width);
        line.push_str(&if *number { format!("{cell:>width$} ") } else { format!("{cell:<width$} ") });
    }
    fit(line.trim_end(), width)
}

type ListTable = (String, Vec<Column>, Vec<(Vec<String>, Style)>, &'static str);

fn leases(app: &App, theme: Theme, width: usize) -> ListTable {
    let leases = app.leases();
    let live: u64 = app.snapshot.engines.iter().filter_map(|engine| engine.leases).sum();
    let mut head = format!("LEASES BY AGE  {} of {}", leases.len(), short(live.max(leases.len() as u64)));
    if leases.len() as u64 == live {
        head = format!("LEASES BY AGE  {}", short(live));
    }
    let engine =
        leases.iter().map(|lease| place(&lease.engine, lease.rank).chars().count()).max().unwrap_or(6);
    let engine = engine.clamp(6, (width / 4).max(10));
    let id = match width {
        0..100 => 9,
        100..120 => 13,
        _ => 36,
    };
    let fixed = id + engine + 6 + 8 + 7 + 7 + 6;
    let why = width.saturating_sub(fixed).max(10);
    let columns = vec![
        ("request", id, false),
        ("engine", engine, false),
        ("blocks", 6, true),
        ("state", 8, false),
        ("age", 7, true),
        ("left", 7, true),
        ("reason", why, false),
    ];
    let rows = leases.iter().map(|lease| {
        let stranded = lease.stranded == Some(true);
        let state = if stranded { "STRANDED".to_owned() } else { clean(&lease.state) };
        let cells = vec![
            clean(&lease.request_id),
            place(&lease.engine, lease.rank),
            short(lease.blocks),
            state,
            span(lease.age_ms),
            lease.left_ms.map_or("-".to_owned(), span),
            clean(&lease.why),
        ];
        (cells, if stranded { theme.alarm() } else { Style::new() })
    });
    (head, columns, rows.collect(), if app.filter.is_empty() { "no live leases" } else { "no lease matches" })
}

fn place(engine: &str, rank: u64) -> String {
    if rank == 0 { clean(engine) } else { format!("{}/{rank}", clean(engine)) }
}

fn requests(app: &App, width: usize) -> ListTable {
    let requests = app.requests();
    let head = format!("REQUESTS BY AGE  {} of {}", requests.len(), short(app.snapshot.requests.in_flight));
    let (id, engine) = match width {
        0..100 => (9, 16),
        100..120 => (13, 16),
        _ => (36, 28),
    };
    // A space follows each column.
    let fixed = (id + 1) + (18 + 1) + (7 + 1) + 2 * (engine + 1);
    let columns = vec![
        ("request", id, false),
        ("phase", 18, false),
        ("age", 7, true),
        ("prefill", engine, false),
        ("decode", engine, false),
        ("model", width.saturating_sub(fixed).max(4), false),
    ];
    let text = |text: &Option<String>| text.as_ref().map_or("-".to_owned(), |text| clean(text));
    let rows = requests.iter().map(|request| {
        let cells = vec![
            clean(&request.request_id),
            clean(phase_name(&request.phase)),
            span(request.age_ms),
            text(&request.prefill_engine),
            text(&request.decode_engine),
            text(&request.model),
        ];
        (cells, Style::new())
    });
    let empty = match (app.snapshot.routers.is_empty(), app.filter.is_empty()) {
        (true, _) => "no router is known: add --admin",
        (false, true) => "no requests in flight",
        (false, false) => "no request matches",
    };
    (head, columns, rows.collect(), empty)
}
