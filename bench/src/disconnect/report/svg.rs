//! Plots, as SVG that takes its colours from the page it stands in.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// Lines that can be told apart, by colour and by dashes (for print, and for who does not see colours).
const DASHES: [&str; 7] = ["none", "6 3", "2 3", "9 3 2 3", "12 4", "4 4 1 4", "1 2"];

/// How values lie on an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// From zero to this.
    Linear(f64),
    /// From one to the other, both positive.
    Log(f64, f64),
}

/// One line.
pub(crate) struct Curve<'a> {
    pub(crate) name: &'a str,
    pub(crate) points: Vec<(f64, f64)>,
    /// From each point straight to the right, then up or down.
    pub(crate) steps: bool,
}

/// A part of the horizontal axis with a name.
pub(crate) struct Span<'a> {
    pub(crate) name: &'a str,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

/// A whole plot.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) across: (&'a str, Scale),
    pub(crate) up: (&'a str, Scale),
    pub(crate) curves: Vec<Curve<'a>>,
    pub(crate) spans: Vec<Span<'a>>,
}

/// Text as it may stand in HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Scale {
    /// A linear axis that has room for these.
    pub(crate) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let highest = values.fold(0.0_f64, f64::max);
        Self::Linear(if highest > 0.0 { highest * 1.05 } else { 1.0 })
    }

    /// A logarithmic axis from one power of ten to another.
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
                let nice =
                    [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power).find(|step| *step >= rough);
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
    /// The plot, with a list of its lines below it.
    pub(crate) fn draw(&self) -> String {
        let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        let x = |value: f64| LEFT + self.across.1.place(value) * wide;
        let y = |value: f64| TOP + (1.0 - self.up.1.place(value)) * high;
        let mut out = format!(
            "<figure><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            escaped(self.title)
        );
        for (turn, span) in self.spans.iter().enumerate() {
            let (from, to) = (x(span.from), x(span.to));
            let shade = if turn % 2 == 0 { "band" } else { "band other" };
            let _ = write!(
                out,
                "<rect class=\"{shade}\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{high}\"><title>{}</title></rect>",
                (to - from).max(0.0),
                escaped(span.name)
            );
            if to - from > 7.0 * span.name.len() as f64 {
                let middle = (from + to) / 2.0;
                let _ = write!(
                    out,
                    "<text class=\"part\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text>",
                    TOP + 11.0,
                    escaped(span.name)
                );
            }
        }
        for value in self.across.1.ticks() {
            let at = x(value);
            // A number in the middle of the edge would be cut, and read as another.
            let anchor = if at > WIDTH - RIGHT - 24.0 { "end" } else { "middle" };
            let beside = if anchor == "end" { (at + RIGHT - 1.0).min(WIDTH - 1.0) } else { at };
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{:.1}\"/><text class=\"tick\" x=\"{beside:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                TOP + high,
                TOP + high + 14.0,
                tick(value)
            );
        }
        for value in self.up.1.ticks() {
            let at = y(value);
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT + wide,
                LEFT - 5.0,
                at + 3.5,
                tick(value)
            );
        }
        let _ = write!(
            out,
            "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text class=\"axis\" x=\"12\" y=\"{:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 12 {:.1})\">{}</text>",
            LEFT + wide / 2.0,
            HEIGHT - 6.0,
            escaped(self.across.0),
            TOP + high / 2.0,
            TOP + high / 2.0,
            escaped(self.up.0)
        );
        for (turn, curve) in self.curves.iter().enumerate() {
            let mut path = String::new();
            let mut before = None;
            for &(across, up) in &curve.points {
                let (across, up) = (x(across), y(up));
                match before {
                    None => {
                        let _ = write!(path, "M{across:.1} {up:.1}");
                    }
                    Some(_) if curve.steps => {
                        let _ = write!(path, "H{across:.1}V{up:.1}");
                    }
                    Some(_) => {
                        let _ = write!(path, "L{across:.1} {up:.1}");
                    }
                }
                before = Some((across, up));
            }
            let _ = write!(
                out,
                "<path class=\"curve c{}\" stroke-dasharray=\"{}\" d=\"{path}\"/>",
                turn % DASHES.len(),
                DASHES[turn % DASHES.len()]
            );
        }
        out.push_str("</svg><figcaption>");
        for (turn, curve) in self.curves.iter().enumerate() {
            let _ = write!(
                out,
                "<span class=\"key\"><svg viewBox=\"0 0 28 8\" width=\"28\" height=\"8\" aria-hidden=\"true\"><path class=\"curve c{}\" stroke-dasharray=\"{}\" d=\"M0 4H28\"/></svg>{}</span>",
                turn % DASHES.len(),
                DASHES[turn % DASHES.len()],
                escaped(curve.name)
            );
        }
        out.push_str("</figcaption></figure>");
        out
    }
}

/// The share of samples up to each value, in per cent; `sorted` is ascending.
pub(crate) fn cumulative(sorted: &[f64]) -> Vec<(f64, f64)> {
    const POINTS_MAX: usize = 300;
    let step = sorted.len().div_ceil(POINTS_MAX).max(1);
    let at = |index: usize| (sorted[index], (index + 1) as f64 * 100.0 / sorted.len() as f64);
    let mut points: Vec<_> = (0..sorted.len()).step_by(step).map(at).collect();
    if let Some(last) = sorted.len().checked_sub(1).filter(|last| last % step != 0) {
        points.push(at(last));
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_ticks_within_them() {
        for scale in
            [Scale::Linear(7.3), Scale::Linear(0.02), Scale::Log(0.1, 1000.0), Scale::linear([].into_iter())]
        {
            let ticks = scale.ticks();
            assert!((2..=7).contains(&ticks.len()), "{scale:?}: {ticks:?}");
            assert!(ticks.iter().all(|tick| (0.0..=1.0).contains(&scale.place(*tick))), "{scale:?}");
        }
        assert_eq!(Scale::log([0.3, 40.0].into_iter(), 0.01), Scale::Log(0.1, 100.0));
        assert_eq!((tick(0.1), tick(20_000.0), tick(1.0)), ("0.1".into(), "20k".into(), "1".into()));
    }

    #[test]
    fn names_cannot_leave_their_place() {
        let plot = Plot {
            title: "a\"><script>",
            across: ("s", Scale::Linear(1.0)),
            up: ("<b>", Scale::Linear(1.0)),
            curves: vec![Curve { name: "<i>", points: vec![(0.0, 0.0), (1.0, 1.0)], steps: true }],
            spans: vec![Span { name: "</svg>", from: 0.0, to: 1.0 }],
        };
        let drawn = plot.draw();
        assert!(!drawn.contains("<script>") && !drawn.contains("<i>") && !drawn.contains("<b>"), "{drawn}");
        assert_eq!(drawn.matches("</svg>").count(), 2);
    }

    #[test]
    fn a_cumulative_curve_ends_at_everything() {
        let samples: Vec<f64> = (0..1000).map(f64::from).collect();
        let points = cumulative(&samples);
        assert!(points.len() <= 302);
        assert_eq!(points.last(), Some(&(999.0, 100.0)));
        assert_eq!(cumulative(&[]), []);
    }
}
