//! Engines as bars of blocks by state, and leases that ended per second as sparklines.

use baton_router::snapshot::{BlockCounts, EngineView};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};

use super::super::app::App;
use super::super::text::{clean, fit, known, short};
use super::Theme;

/// A state of blocks in a bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockState {
    Active,
    Leased,
    Draining,
    Stranded,
    Landing,
    Storing,
    Cached,
    Free,
}

/// In the order of a bar, with a description.
pub(super) const STATES: [(BlockState, &str); 8] = [
    (BlockState::Active, "of running requests"),
    (BlockState::Leased, "leased to a decode engine"),
    (BlockState::Draining, "of ended leases, until their readers are quiet"),
    (BlockState::Stranded, "of leases without a reader, whose request has ended"),
    (BlockState::Landing, "being written by a transfer"),
    (BlockState::Storing, "being copied to a lower tier"),
    (BlockState::Cached, "unused; a repeated prompt finds them"),
    (BlockState::Free, "unused"),
];

impl BlockState {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Leased => "leased",
            Self::Draining => "draining",
            Self::Stranded => "stranded",
            Self::Landing => "landing",
            Self::Storing => "storing",
            Self::Cached => "cached",
            Self::Free => "free",
        }
    }

    /// The letter and the colour.
    pub(super) fn look(self) -> (char, u8) {
        match self {
            Self::Active => ('█', 33),
            Self::Leased => ('▓', 37),
            Self::Draining => ('▚', 172),
            Self::Stranded => ('X', 196),
            Self::Landing => ('»', 135),
            Self::Storing => ('↓', 245),
            Self::Cached => ('░', 67),
            Self::Free => ('·', 244),
        }
    }

    /// The number of blocks in this state. Blocks of leases are leased, or active if their request also runs.
    fn of(self, blocks: &BlockCounts) -> u64 {
        let stranded = blocks.stranded.unwrap_or(0);
        let over = blocks.draining + stranded;
        match self {
            Self::Active => blocks.active.saturating_sub(over.saturating_sub(blocks.leased)),
            Self::Leased => blocks.leased.saturating_sub(over),
            Self::Draining => blocks.draining,
            Self::Stranded => stranded,
            Self::Landing => blocks.landing,
            Self::Storing => blocks.storing,
            Self::Cached => blocks.cached,
            Self::Free => blocks.free,
        }
    }
}

/// Cells for counts that fill `room` in total. Each nonzero count has at least one cell. The largest absorbs the
/// difference.
fn cells(counts: &[u64], room: usize) -> Vec<usize> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return vec![0; counts.len()];
    }
    let share = |count: &u64| {
        let cells = (u128::from(*count) * room as u128 / u128::from(total)) as usize;
        if *count > 0 { cells.max(1) } else { 0 }
    };
    let mut cells: Vec<usize> = counts.iter().map(share).collect();
    loop {
        let sum: usize = cells.iter().sum();
        let Some(largest) = (0..cells.len()).max_by_key(|at| cells[*at]) else { return cells };
        match sum.cmp(&room) {
            std::cmp::Ordering::Less => cells[largest] += room - sum,
            std::cmp::Ordering::Equal => return cells,
            std::cmp::Ordering::Greater if cells[largest] == 0 => return cells,
            std::cmp::Ordering::Greater => cells[largest] -= 1,
        }
    }
}

/// Rows of all engines, if there is room.
pub(super) fn rows(app: &App, room: usize) -> usize {
    let engines = app.snapshot.engines.len().max(1);
    if 2 + 2 * engines <= room { 2 + 2 * engines } else { (2 + engines).min(room) }
}

/// The engines in at most `most` rows. Engines without a row are counted.
pub(super) fn lines(app: &App, theme: Theme, width: u16, most: usize) -> Vec<Line<'static>> {
    let (engines, width) = (&app.snapshot.engines, usize::from(width));
    let mut legend = vec![Span::styled("ENGINES  ", theme.heading())];
    // Few engines have lower tiers, and the legend must fit.
    let stores = engines.iter().any(|e| e.blocks.as_ref().is_some_and(|blocks| blocks.storing > 0));
    for (state, _) in STATES.iter().filter(|(state, _)| stores || *state != BlockState::Storing) {
        let (letter, colour) = state.look();
        legend.push(Span::styled(letter.to_string(), theme.colour(colour)));
        legend.push(Span::raw(format!(" {} ", state.name())));
    }
    let mut lines = vec![Line::from(legend)];
    if engines.is_empty() {
        lines.push(Line::raw("no engine is known: add --admin or --engine"));
        return lines;
    }
    let two = 1 + 2 * engines.len() < most;
    let name = engines.iter().map(|engine| clean(&engine.engine).chars().count()).max().unwrap_or(0);
    let name = name.min((width / 3).max(12));
    let each = if two { 2 } else { 1 };
    let shown = (most.saturating_sub(2) / each).max(1).min(engines.len());
    // Engines with errors are shown first.
    let mut order: Vec<&EngineView> = engines.iter().collect();
    if shown < engines.len() {
        order.sort_by_key(|engine| !is_troubled(engine));
    }
    for engine in &order[..shown] {
        lines.push(bar(engine, theme, name, width));
        if two {
            lines.push(counts(engine, theme, if width < 100 { 1 } else { name }, width));
        }
    }
    if shown < engines.len() {
        lines.push(Line::styled(format!("and {} more engines", engines.len() - shown), theme.dim()));
    }
    lines
}

fn is_troubled(engine: &EngineView) -> bool {
    let stranded = engine.blocks.as_ref().and_then(|blocks| blocks.stranded).unwrap_or(0);
    engine.error.is_some() || engine.failed.is_some() || stranded > 0
}

fn bar(engine: &EngineView, theme: Theme, name: usize, width: usize) -> Line<'static> {
    let mut spans = vec![
        Span::styled(
            format!("{:<name$} ", fit(&clean(&engine.engine), name)),
            Style::new().add_modifier(Modifier::BOLD),
        ),
        Span::styled(format!("{:<8}", fit(&clean(&engine.role), 7)), theme.dim()),
    ];
    let left = width.saturating_sub(name + 9);
    if let Some(error) =
        engine.error.as_ref().filter(|_| engine.blocks.is_none() && engine.kv_usage.is_none())
    {
        spans.push(Span::styled(fit(&format!("! {}", clean(error)), left), theme.alarm()));
        return Line::from(spans);
    }
    let used = engine.kv_usage.map_or("    ?".to_owned(), share);
    let stranded = engine.blocks.as_ref().map(|blocks| blocks.stranded);
    let tail = match stranded {
        Some(Some(0)) | None => used,
        Some(Some(count)) => format!("{used} {} stranded", short(count)),
        Some(None) => format!("{used} ? stranded"),
    };
    let room = left.saturating_sub(tail.chars().count() + 1);
    match &engine.blocks {
        Some(blocks) => {
            let counts = STATES.map(|(state, _)| state.of(blocks));
            for ((state, _), cells) in STATES.iter().zip(cells(&counts, room)) {
                let (letter, colour) = state.look();
                spans.push(Span::styled(letter.to_string().repeat(cells), theme.colour(colour)));
            }
        }
        None => {
            let usage = engine.kv_usage.unwrap_or(0.0).clamp(0.0, 1.0);
            let used = ((usage * room as f64).round() as usize).min(room);
            spans.push(Span::styled("█".repeat(used), theme.colour(33)));
            spans.push(Span::styled("·".repeat(room - used), theme.colour(244)));
        }
    }
    let alarm = matches!(stranded, Some(Some(1..)));
    spans.push(Span::styled(format!(" {tail}"), if alarm { theme.alarm() } else { Style::new() }));
    Line::from(spans)
}

/// A fraction in five letters. A small one is not shown as zero.
fn share(of: f64) -> String {
    match of * 100.0 {
        0.0 => "   0%".to_owned(),
        small if small < 0.05 => "<0.1%".to_owned(),
        some if some < 9.95 => format!("{some:>4.1}%"),
        many => format!("{many:>4.0}%"),
    }
}

/// The second row: numbers by state, requests, and errors.
///
/// Parts that do not fit are omitted as a whole, the least important first, because a cut number is wrong.
fn counts(engine: &EngineView, theme: Theme, name: usize, width: usize) -> Line<'static> {
    let is_known = engine.blocks.is_some() || engine.kv_usage.is_some();
    // If nothing else is known, the error is in place of the bar.
    let wrong = engine.error.iter().filter(|_| is_known).chain(&engine.failed).map(|why| clean(why));
    let standing = engine.standing.iter().filter(|(_, how)| *how != "usable");
    let wrong: Vec<String> =
        wrong.chain(standing.map(|(leg, how)| format!("{}: {}", clean(leg), clean(how)))).collect();
    // A text, its style, and its rank: the highest is omitted first.
    let mut parts: Vec<(String, Style, u8)> = Vec::new();
    if !wrong.is_empty() {
        parts.push((format!("! {}", wrong.join("; ")), theme.alarm(), 0));
    }
    let doing = engine.requests.iter().filter(|(_, count)| **count > 0);
    parts.extend(doing.map(|(what, count)| (format!("{} {}", clean(what), short(*count)), Style::new(), 1)));
    match &engine.blocks {
        Some(blocks) => {
            for (state, _) in STATES {
                let count = state.of(blocks);
                let unknown = state == BlockState::Stranded && blocks.stranded.is_none();
                if count > 0 || unknown || state == BlockState::Free {
                    let alarm = state == BlockState::Stranded && count > 0;
                    let style = if alarm { theme.alarm() } else { Style::new() };
                    let shown = if unknown { "?".to_owned() } else { short(count) };
                    let rank = match state {
                        BlockState::Stranded => 0,
                        BlockState::Cached => 3,
                        BlockState::Free => 4,
                        _ => 1,
                    };
                    parts.push((format!("{} {shown}", state.name()), style, rank));
                }
            }
            parts.push((format!("of {}", short(blocks.total)), theme.dim(), 2));
        }
        None if is_known => {
            let all = known(engine.blocks_total);
            parts.push((format!("of {all} blocks; only its metrics are known"), theme.dim(), 2));
        }
        None => {}
    }
    const APART: usize = 2;
    let room = width.saturating_sub(name + 1);
    let wide = |parts: &[(String, Style, u8)]| {
        parts.iter().map(|(text, ..)| text.chars().count() + APART).sum::<usize>().saturating_sub(APART)
    };
    while parts.len() > 1 && wide(&parts) > room {
        let least = (0..parts.len()).max_by_key(|at| parts[*at].2).unwrap_or(0);
        parts.remove(least);
    }
    let mut spans = vec![Span::raw(" ".repeat(name + 1))];
    for (at, (text, style, _)) in parts.into_iter().enumerate() {
        if at > 0 {
            spans.push(Span::raw(" ".repeat(APART)));
        }
        spans.push(Span::styled(fit(&text, room), style));
    }
    Line::from(spans)
}

const SPARKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Leases ended per second, by cause.
pub(super) fn releases(app: &App, theme: Theme, width: u16, most: usize) -> Vec<Line<'static>> {
    const NAME: usize = 18;
    let heads = format!("{:<NAME$}{:>6} {:>7}", "LEASES ENDED", "per s", "total");
    let mut lines = vec![Line::styled(fit(&heads, usize::from(width)), theme.heading())];
    let causes = app.history.causes();
    if causes.is_empty() {
        lines.push(Line::styled("none so far", theme.dim()));
    }
    let room = usize::from(width).saturating_sub(NAME + 16).min(60);
    for (cause, rates) in causes.iter().take(most.saturating_sub(1)) {
        let rate = rates.per_second.last().map_or("     -".to_owned(), |rate| format!("{rate:>6.1}"));
        let style = if *cause == "lease_expired" { theme.alarm() } else { Style::new() };
        let seen = &rates.per_second[rates.per_second.len().saturating_sub(room)..];
        let highest = seen.iter().copied().fold(0.0, f64::max);
        let spark = |rate: &f64| match *rate {
            rate if rate <= 0.0 || highest <= 0.0 => ' ',
            rate => SPARKS[((rate / highest * 7.0).round() as usize).min(7)],
        };
        lines.push(Line::from(vec![
            Span::styled(format!("{:<NAME$}", fit(&clean(cause).replace('_', " "), NAME - 1)), style),
            Span::styled(format!("{rate} "), style),
            Span::styled(format!("{:>7} ", short(rates.total)), theme.dim()),
            Span::styled(seen.iter().map(spark).collect::<String>(), theme.colour(33)),
        ]));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_fill_the_bar_and_every_nonzero_part_has_one() {
        assert_eq!(cells(&[1, 0, 1_000_000], 20), [1, 0, 19]);
        assert_eq!(cells(&[50, 50], 10), [5, 5]);
        assert_eq!(cells(&[0, 0], 10), [0, 0]);
        assert_eq!(cells(&[3, 3, 3], 2).iter().sum::<usize>(), 2, "too little room");
        assert_eq!(cells(&[u64::MAX / 4, 1, 1], 30), [28, 1, 1]);
        for room in 0..50 {
            for counts in [[1, 2, 3, 4], [1000, 1, 0, 1], [7, 0, 0, 0]] {
                assert_eq!(cells(&counts, room).iter().sum::<usize>(), room, "{counts:?} in {room}");
            }
        }
    }

    #[test]
    fn a_small_share_has_at_least_one_cell() {
        let shares = [0.0, 0.000_1, 0.004, 0.0994, 0.0996, 0.3, 1.0].map(share);
        assert_eq!(shares, ["   0%", "<0.1%", " 0.4%", " 9.9%", "  10%", "  30%", " 100%"]);
    }

    #[test]
    fn numbers_that_do_not_fit_are_omitted() {
        let blocks = BlockCounts {
            total: 8192,
            active: 180,
            free: 7295,
            cached: 717,
            stranded: Some(0),
            ..BlockCounts::default()
        };
        let engine = EngineView { blocks: Some(blocks), kv_usage: Some(0.02), ..EngineView::default() };
        let row = |width| {
            let line = counts(&engine, Theme::Plain, 1, width);
            line.spans.iter().map(|span| span.content.clone()).collect::<String>()
        };
        assert_eq!(row(80), "  active 180  cached 717  free 7295  of 8192");
        assert_eq!(row(43), "  active 180  cached 717  of 8192", "one column too few");
        assert_eq!(row(25), "  active 180  of 8192");
        assert_eq!(row(12), "  active 180");
    }

    #[test]
    fn leases_beyond_the_leased_blocks_are_subtracted_from_active_blocks() {
        let blocks = BlockCounts {
            total: 100,
            active: 10,
            leased: 4,
            stranded: Some(6),
            free: 86,
            ..BlockCounts::default()
        };
        assert_eq!(
            (
                BlockState::Leased.of(&blocks),
                BlockState::Active.of(&blocks),
                BlockState::Stranded.of(&blocks)
            ),
            (0, 8, 6)
        );
        let sum: u64 = STATES.iter().map(|(state, _)| state.of(&blocks)).sum();
        assert_eq!(sum, blocks.total);
    }
}
