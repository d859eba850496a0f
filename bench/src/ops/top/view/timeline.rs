//! One request from its arrival to the release of its last block.

use baton_router::snapshot::Timeline;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::super::app::TimelineDetail;
use super::super::text::{clean, fit};
use super::Theme;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, detail: &TimelineDetail, theme: Theme) {
    let width = usize::from(area.width);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut lines = vec![Line::from(vec![
        Span::styled("REQUEST  ", theme.heading()),
        Span::styled(fit(&clean(&detail.id), width.saturating_sub(9)), bold),
    ])];
    match &detail.line {
        None => lines.push(Line::raw("loading from the router and its engines…")),
        Some(Err(why)) => lines.push(Line::styled(clean(why), theme.alarm())),
        Some(Ok(line)) => {
            lines.push(Line::styled(fit(&summary(line), width), theme.dim()));
            let rows = usize::from(area.height).saturating_sub(lines.len());
            lines.extend(moments(line, theme, width).into_iter().skip(detail.scroll).take(rows));
        }
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn summary(line: &Timeline) -> String {
    let mut parts = Vec::new();
    parts.extend(line.client_id.as_ref().map(|id| format!("client's id {}", clean(id))));
    parts.extend(line.model.as_ref().map(|model| format!("model {}", clean(model))));
    parts.push(match (line.status, line.took_us) {
        (Some(status), Some(took)) => {
            let outcome = clean(line.outcome.as_deref().unwrap_or("")).replace('_', " ");
            format!("{status} {outcome} after {:.3} ms", took as f64 / 1e3)
        }
        _ if line.moments.is_empty() => "unknown request".to_owned(),
        _ => "in flight, as far as is known".to_owned(),
    });
    parts.join(", ")
}

fn moments(line: &Timeline, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let who = line.moments.iter().map(|moment| clean(&moment.who).chars().count()).max().unwrap_or(0);
    let who = who.min((width / 4).max(8));
    // The router's own steps are styled differently from events of engines.
    let engines: Vec<&str> = {
        let mut engines: Vec<&str> = Vec::new();
        for moment in &line.moments {
            if moment.who != "router" && !engines.contains(&moment.who.as_str()) {
                engines.push(&moment.who);
            }
        }
        engines
    };
    let colour = |name: &str| match engines.iter().position(|engine| *engine == name) {
        None => Style::new(),
        Some(at) => theme.colour([37, 135, 172, 67][at % 4]),
    };
    let mut lines: Vec<Line<'static>> = Vec::new();
    for moment in &line.moments {
        let text = fit(&clean(&moment.text), width.saturating_sub(15 + who + 14));
        lines.push(Line::from(vec![
            Span::styled(format!("{:>11.3} ms ", moment.at_us as f64 / 1e3), theme.dim()),
            Span::styled(format!("{:<who$} ", fit(&clean(&moment.who), who)), colour(&moment.who)),
            Span::styled(
                format!("{:<12} ", fit(&clean(&moment.kind).replace('_', " "), 12)),
                Style::new().add_modifier(Modifier::BOLD),
            ),
            Span::raw(text),
        ]));
    }
    lines.extend(line.notes.iter().map(|note| Line::styled(fit(&clean(note), width), theme.dim())));
    lines
}
