//! Plots as SVG, with colours of the surrounding page.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// The area of the curves.
const PLOT_WIDE: f64 = WIDTH - LEFT - RIGHT;
const PLOT_HIGH: f64 = HEIGHT - TOP - BOTTOM;
/// The baselines of the rows of letters above a plot. More than two rows are drawn if necessary; four have room for 140
/// segments.
const LETTER_ROWS: [f64; 4] = [14.0, 30.0, 46.0, 62.0];
/// The width of two letters on a phone, where they are larger.
const LETTER_WIDE: f64 = 18.0;
/// Dash patterns that distinguish lines in print and without colours.
const DASHES: [&str; 7] = ["none", "6 3", "2 3", "9 3 2 3", "12 4", "4 4 1 4", "1 2"];

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AxisScale {
    /// From zero to this value.
    Linear(f64),
    /// From one positive value to another.
    Log(f64, f64),
}

/// An axis and its label.
pub(crate) struct Axis<'a> {
    pub(crate) label: &'a str,
    pub(crate) scale: AxisScale,
}

/// One line.
pub(crate) struct Curve<'a> {
    pub(crate) name: &'a str,
    pub(crate) points: Vec<(f64, f64)>,
    /// Draws each point as a horizontal and then a vertical line.
    pub(crate) steps: bool,
}

/// A named part of the horizontal axis. The plot shows a letter, and the legend below it the name: a part may be only
/// some pixels wide.
pub(crate) struct Span<'a> {
    pub(crate) name: &'a str,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

/// A whole plot.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) across: Axis<'a>,
    pub(crate) up: Axis<'a>,
    pub(crate) curves: Vec<Curve<'a>>,
    pub(crate) spans: Vec<Span<'a>>,
}

/// Escapes text for HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl AxisScale {
    /// A linear axis for these values.
    pub(crate) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let highest = values.fold(0.0_f64, f64::max);
        Self::Linear(if highest > 0.0 { highest * 1.05 } else { 1.0 })
    }

    /// A logarithmic axis between powers of ten.
    pub(crate) fn log(values: impl Iterator<Item = f64>, least: f64) -> Self {
        let (lowest, highest) =
            values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        let low = 10_f64.powf(lowest.clamp(least, 1e9).log10().floor());
        let high = 10_f64.powf(highest.clamp(low * 10.0, 1e12).log10().ceil());
        Self::Log(low, high)
    }

    fn place(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear(highest) => value / highest,
            Self::Log(low, high) => (value.max(low) / low).log10() / (high / low).log10(),
        };
        place.clamp(0.0, 1.0)
    }

    fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear(highest) => {
                let rough = highest / 5.0;
                let power = 10_f64.powf(rough.log10().floor());
                let nice = [1.0, 2.0, 2.5, 5.0, 10.0]
                    .into_iter()
                    .map(|step| step * power)
                    .find(|step| *step >= rough);
                let step = nice.unwrap_or(power);
                (0..=6).map(|tick| f64::from(tick) * step).filter(|tick| *tick <= highest * 1.001).collect()
            }
            Self::Log(low, high) => {
                let decades = (high / low).log10().round() as i32;
                (0..=decades).map(|decade| low * 10_f64.powi(decade)).collect()
            }
        }
    }
}

/// A number on an axis.
fn tick(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        value if value.abs() >= 1e6 => format!("{}M", value / 1e6),
        value if value.abs() >= 1e4 => format!("{}k", value / 1e3),
        value => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

impl Plot<'_> {
    /// The plot with its legend.
    pub(crate) fn draw(&self) -> String {
        let letters = letters(self.spans.iter().map(|span| (self.x(span.from) + self.x(span.to)) / 2.0));
        let rows = letters.iter().map(|(row, _)| row + 1).max().unwrap_or(0).max(2);
        let top = if self.spans.is_empty() { TOP } else { LETTER_ROWS[rows - 1] + 4.0 };
        let mut out = format!(
            "<figure><svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">",
            top + PLOT_HIGH + BOTTOM,
            escaped(self.title)
        );
        self.draw_bands(top, &mut out);
        // Drawn after all parts, because a letter may be wider than its part.
        for (turn, (row, middle)) in letters.iter().enumerate() {
            let _ = write!(
                out,
                "<text class=\"part\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text>",
                LETTER_ROWS[*row],
                letter(turn)
            );
        }
        self.draw_grid(top, &mut out);
        self.draw_labels(top, &mut out);
        self.draw_curves(top, &mut out);
        out.push_str("</svg><figcaption>");
        self.draw_legend(&mut out);
        out.push_str("</figcaption></figure>");
        out
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.across.scale.place(value) * PLOT_WIDE
    }

    /// `top`: where the area of the curves begins.
    fn y(&self, value: f64, top: f64) -> f64 {
        top + (1.0 - self.up.scale.place(value)) * PLOT_HIGH
    }

    /// The backgrounds of the parts.
    fn draw_bands(&self, top: f64, out: &mut String) {
        for (turn, span) in self.spans.iter().enumerate() {
            let shade = if turn % 2 == 0 { "band" } else { "band other" };
            let (from, to) = (self.x(span.from), self.x(span.to));
            let _ = write!(
                out,
                "<rect class=\"{shade}\" x=\"{from:.1}\" y=\"0\" width=\"{:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
                (to - from).max(0.0),
                top + PLOT_HIGH,
                escaped(span.name)
            );
        }
    }

    /// The lines of the grid and their numbers.
    fn draw_grid(&self, top: f64, out: &mut String) {
        for value in self.across.scale.ticks() {
            let at = self.x(value);
            // A centred number at the edge would be cut off.
            let anchor = if at > WIDTH - RIGHT - 24.0 { "end" } else { "middle" };
            let beside = if anchor == "end" { (at + RIGHT - 1.0).min(WIDTH - 1.0) } else { at };
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{:.1}\"/><text class=\"tick across\" x=\"{beside:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                top + PLOT_HIGH,
                top + PLOT_HIGH + 14.0,
                tick(value)
            );
        }
        for value in self.up.scale.ticks() {
            let at = self.y(value, top);
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT + PLOT_WIDE,
                LEFT - 5.0,
                at + 3.5,
                tick(value)
            );
        }
    }

    /// The labels of the axes.
    fn draw_labels(&self, top: f64, out: &mut String) {
        let _ = write!(
            out,
            "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text class=\"axis\" x=\"12\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 12 {:.1})\">{}</text>",
            LEFT + PLOT_WIDE / 2.0,
            top + PLOT_HIGH + BOTTOM - 6.0,
            escaped(self.across.label),
            top + PLOT_HIGH / 2.0,
            top + PLOT_HIGH / 2.0,
            escaped(self.up.label)
        );
    }

    fn draw_curves(&self, top: f64, out: &mut String) {
        for (turn, curve) in self.curves.iter().enumerate() {
            let mut path = String::new();
            for (at, &(across, up)) in curve.points.iter().enumerate() {
                let (x, y) = (self.x(across), self.y(up, top));
                let _ = match at {
                    0 => write!(path, "M{x:.1} {y:.1}"),
                    _ if curve.steps => write!(path, "H{x:.1}V{y:.1}"),
                    _ => write!(path, "L{x:.1} {y:.1}"),
                };
            }
            let _ = write!(
                out,
                "<path class=\"curve c{}\" stroke-dasharray=\"{}\" d=\"{path}\"/>",
                turn % DASHES.len(),
                DASHES[turn % DASHES.len()]
            );
        }
    }

    /// The names of the curves and of the parts.
    fn draw_legend(&self, out: &mut String) {
        for (turn, curve) in self.curves.iter().enumerate() {
            let _ = write!(
                out,
                "<span class=\"key\"><svg viewBox=\"0 0 28 8\" width=\"28\" height=\"8\" aria-hidden=\"true\"><path class=\"curve c{}\" stroke-dasharray=\"{}\" d=\"M0 4H28\"/></svg>{}</span>",
                turn % DASHES.len(),
                DASHES[turn % DASHES.len()],
                escaped(curve.name)
            );
        }
        if self.spans.is_empty() {
            return;
        }
        out.push_str("<div class=\"parts\">");
        for (turn, span) in self.spans.iter().enumerate() {
            let _ = write!(
                out,
                "<span class=\"key\"><strong>{}</strong> {} <small>{}–{} s</small></span>",
                letter(turn),
                escaped(span.name),
                span.from.round(),
                span.to.round()
            );
        }
        out.push_str("</div>");
    }
}

/// The row and centre of each letter: the first row with room above the part, otherwise the row with the nearest room.
fn letters(middles: impl Iterator<Item = f64>) -> Vec<(usize, f64)> {
    let half = LETTER_WIDE / 2.0;
    // The right edge of the last letter in each row.
    let mut taken = [0.0_f64; LETTER_ROWS.len()];
    let place = |middle: f64| {
        let free = taken.iter().position(|edge| *edge <= middle - half);
        let row = free.unwrap_or_else(|| {
            (0..taken.len()).min_by(|a, b| taken[*a].total_cmp(&taken[*b])).unwrap_or_default()
        });
        let middle = middle.max(taken[row] + half).min(WIDTH - half);
        taken[row] = middle + half;
        (row, middle)
    };
    middles.map(place).collect()
}

/// The letter of a part: a to z, then aa, ab and so on.
fn letter(turn: usize) -> String {
    let last = char::from(b'a' + (turn % 26) as u8);
    match turn / 26 {
        0 => last.to_string(),
        more => letter(more - 1) + &last.to_string(),
    }
}

/// The cumulative share of samples, in per cent; `sorted` is ascending. With infinite samples the curve ends below 100
/// %.
pub(crate) fn cumulative(sorted: &[f64]) -> Vec<(f64, f64)> {
    const POINTS_MAX: usize = 300;
    let finite = sorted.partition_point(|value| value.is_finite());
    let step = finite.div_ceil(POINTS_MAX).max(1);
    let at = |index: usize| (sorted[index], (index + 1) as f64 * 100.0 / sorted.len() as f64);
    let mut points: Vec<_> = (0..finite).step_by(step).map(at).collect();
    if let Some(last) = finite.checked_sub(1).filter(|last| last % step != 0) {
        points.push(at(last));
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_ticks_within_them() {
        for scale in [
            AxisScale::Linear(7.3),
            AxisScale::Linear(0.02),
            AxisScale::Log(0.1, 1000.0),
            AxisScale::linear([].into_iter()),
        ] {
            let ticks = scale.ticks();
            assert!((2..=7).contains(&ticks.len()), "{scale:?}: {ticks:?}");
            assert!(ticks.iter().all(|tick| (0.0..=1.0).contains(&scale.place(*tick))), "{scale:?}");
        }
        assert_eq!(AxisScale::log([0.3, 40.0].into_iter(), 0.01), AxisScale::Log(0.1, 100.0));
        assert_eq!((tick(0.1), tick(20_000.0), tick(1.0)), ("0.1".into(), "20k".into(), "1".into()));
    }

    #[test]
    fn names_are_escaped_in_the_svg() {
        let plot = Plot {
            title: "a\"><script>",
            across: Axis { label: "s", scale: AxisScale::Linear(1.0) },
            up: Axis { label: "<b>", scale: AxisScale::Linear(1.0) },
            curves: vec![Curve { name: "<i>", points: vec![(0.0, 0.0), (1.0, 1.0)], steps: true }],
            spans: vec![Span { name: "</svg>", from: 0.0, to: 1.0 }],
        };
        let drawn = plot.draw();
        assert!(!drawn.contains("<script>") && !drawn.contains("<i>") && !drawn.contains("<b>"), "{drawn}");
        assert_eq!(drawn.matches("</svg>").count(), 2);
    }

    #[test]
    fn every_segment_has_a_letter_in_the_plot_and_a_legend() {
        let names: Vec<String> = (0..30).map(|n| format!("part number {n}")).collect();
        let spans = names.iter().enumerate().map(|(n, name)| {
            let from = n as f64 * 4.0;
            Span { name, from, to: from + 4.0 }
        });
        let plot = Plot {
            title: "t",
            across: Axis { label: "seconds", scale: AxisScale::Linear(120.0) },
            up: Axis { label: "blocks", scale: AxisScale::Linear(1.0) },
            curves: Vec::new(),
            spans: spans.collect(),
        };
        let drawn = plot.draw();
        let (svg, below) = drawn.split_once("</svg>").expect("a plot");
        // 22 units each: letters do not overlap.
        assert_eq!(svg.matches("class=\"part\"").count(), 30, "{svg}");
        assert!(svg.rfind("<rect") < svg.find("class=\"part\""), "no part covers another's letter");
        assert!(svg.contains(">a</text>") && svg.contains(">ad</text>"));
        assert!(below.contains("<strong>a</strong> part number 0 <small>0–4 s</small>"), "{below}");
        assert!(below.contains("<strong>ad</strong> part number 29 <small>116–120 s</small>"), "{below}");
        // With less room, every other letter is in the second row, without overlap.
        let crowded =
            Plot { across: Axis { label: "seconds", scale: AxisScale::Linear(220.0) }, ..plot }.draw();
        let rows = |at: f64| crowded.matches(&format!("y=\"{at:.1}\">")).count();
        assert!(rows(LETTER_ROWS[0]) > 10 && rows(LETTER_ROWS[1]) > 10, "{crowded}");
    }

    #[test]
    fn parts_that_last_no_time_have_their_letters_too() {
        let names: Vec<String> = (0..24).map(|n| format!("part {n}")).collect();
        let spans = names.iter().enumerate().map(|(n, name)| {
            let from = 100.0 + n as f64 * 0.2;
            Span { name, from, to: from + 0.2 }
        });
        let plot = Plot {
            title: "t",
            across: Axis { label: "seconds", scale: AxisScale::Linear(120.0) },
            up: Axis { label: "blocks", scale: AxisScale::Linear(1.0) },
            curves: Vec::new(),
            spans: spans.collect(),
        };
        let drawn = plot.draw();
        assert_eq!(drawn.matches("class=\"part\"").count(), 24, "{drawn}");
        let found = letters((0..24).map(|n| 600.0 + f64::from(n)));
        for (at, (row, middle)) in found.iter().enumerate() {
            let apart = |(other, x): &(usize, f64)| other != row || (x - middle).abs() >= LETTER_WIDE - 0.01;
            assert!(found[..at].iter().all(apart) && *middle <= WIDTH, "{found:?}");
        }
    }

    #[test]
    fn a_cumulative_curve_ends_at_100_percent() {
        let samples: Vec<f64> = (0..1000).map(f64::from).collect();
        let points = cumulative(&samples);
        assert!(points.len() <= 302);
        assert_eq!(points.last(), Some(&(999.0, 100.0)));
        assert_eq!(cumulative(&[]), []);
        // Samples that did not end count in the total.
        assert_eq!(cumulative(&[1.0, 2.0, f64::INFINITY, f64::INFINITY]), [(1.0, 25.0), (2.0, 50.0)]);
        assert_eq!(cumulative(&[f64::INFINITY]), []);
    }
}
