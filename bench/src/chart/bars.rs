//! Horizontal bars as a standalone SVG: light and dark by the reader's setting, readable at the width of a phone.

use std::fmt::Write as _;

use crate::disconnect::escaped;

/// Width in SVG units. At 360 pixels a letter is 11 pixels high.
const WIDTH: f64 = 480.0;
const MARGIN: f64 = 16.0;
const ROW: f64 = 40.0;
const BAR: f64 = 12.0;
const LETTERS_PER_LINE: usize = 58;

const STYLE: &str = "text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1f2328}\
.title{font-size:17px;font-weight:600}.group{font-weight:600}.value{text-anchor:end}.small{font-size:11px;fill:#59636e}\
.paper{fill:#fff}.bar{fill:#8c959f}.own{fill:#0969da}.line{stroke:#1f2328;stroke-width:2}.track{fill:#eaeef2}\
.limit{fill:none;stroke:#1f2328}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.paper{fill:#0d1117}.bar{fill:#6e7681}\
.own{fill:#4493f8}.line,.limit{stroke:#e6edf3}.track{fill:#21262d}}";

/// How a value becomes the length of a bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum BarScale {
    /// From zero to the greatest value of the chart.
    Linear,
    /// From zero to the greatest value of the group.
    PerGroup,
    /// Logarithmic, from the first value to the second. Both are positive.
    Log(f64, f64),
}

/// One bar, with its name above it on the left and its value on the right.
#[derive(Clone, Debug, Default)]
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) value: f64,
    pub(super) text: String,
    /// A line from the bar's end to here.
    pub(super) end: Option<f64>,
    /// A stroke across the bar.
    pub(super) mark: Option<f64>,
    /// A frame around the bar.
    pub(super) limit: Option<f64>,
}

impl Bar {
    pub(super) fn new(name: &str, value: f64) -> Self {
        Self { name: name.to_owned(), value, ..Self::default() }
    }

    fn greatest(&self) -> f64 {
        [self.end, self.mark, self.limit].into_iter().flatten().fold(self.value, f64::max)
    }
}

/// Bars below one heading.
pub(super) struct BarGroup {
    pub(super) title: Option<String>,
    pub(super) rows: Vec<Bar>,
}

/// A whole chart.
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) scale: BarScale,
    /// The quantity that a bar's length shows.
    pub(super) axis: String,
    pub(super) groups: Vec<BarGroup>,
    /// Machine and date; and the file, on a line of its own.
    pub(super) source: String,
}

impl Chart {
    pub(super) fn draw(&self) -> String {
        let wide = WIDTH - 2.0 * MARGIN;
        let greatest = |rows: &[Bar]| rows.iter().map(Bar::greatest).fold(0.0, f64::max);
        let all = self.groups.iter().map(|group| greatest(&group.rows)).fold(0.0, f64::max);
        // Without other subjects all bars are Baton's.
        let others = self.groups.iter().flat_map(|group| &group.rows).any(|row| row.name == "baton");
        let mut body = String::new();
        let mut y = 28.0;
        let _ =
            writeln!(body, "<text class=\"title\" x=\"{MARGIN}\" y=\"{y}\">{}</text>", escaped(&self.title));
        for line in lines(&self.axis) {
            y += 17.0;
            let _ =
                writeln!(body, "<text class=\"small\" x=\"{MARGIN}\" y=\"{y}\">{}</text>", escaped(&line));
        }
        for group in &self.groups {
            if let Some(title) = &group.title {
                y += 28.0;
                let _ = writeln!(
                    body,
                    "<text class=\"group\" x=\"{MARGIN}\" y=\"{y}\">{}</text>",
                    escaped(title)
                );
            }
            let end = if self.scale == BarScale::PerGroup { greatest(&group.rows) } else { all };
            let place = |value: f64| match self.scale {
                BarScale::Log(low, high) => (value.clamp(low, high) / low).ln() / (high / low).ln() * wide,
                BarScale::Linear | BarScale::PerGroup => value / end * wide,
            };
            for row in &group.rows {
                y += ROW;
                row.draw(y, wide, !others || row.name == "baton", place, &mut body);
            }
        }
        y += 14.0;
        for line in self.source.split('\n').flat_map(lines) {
            y += 15.0;
            let _ =
                writeln!(body, "<text class=\"small\" x=\"{MARGIN}\" y=\"{y}\">{}</text>", escaped(&line));
        }
        let high = y + 14.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {high}\" width=\"{WIDTH}\" height=\"{high}\" \
             role=\"img\" aria-label=\"{}\">\n<style>{STYLE}</style>\n<rect class=\"paper\" width=\"{WIDTH}\" \
             height=\"{high}\" rx=\"6\"/>\n{body}</svg>\n",
            escaped(&self.described())
        )
    }

    /// The chart in words, for readers that do not see it.
    fn described(&self) -> String {
        let rows = self.groups.iter().flat_map(|group| {
            let title = group.title.as_deref();
            group.rows.iter().map(move |row| {
                title.map_or_else(String::new, |title| format!("{title}, "))
                    + &format!("{}: {}", row.name, row.text)
            })
        });
        format!("{} ({}). {}.", self.title, self.axis, rows.collect::<Vec<_>>().join("; "))
    }
}

impl Bar {
    /// `y` is the lower edge of the bar.
    fn draw(&self, y: f64, wide: f64, own: bool, place: impl Fn(f64) -> f64, out: &mut String) {
        let (top, name) = (y - BAR, y - BAR - 5.0);
        let kind = if own { "own" } else { "bar" };
        let length = place(self.value).max(2.0);
        let _ = writeln!(
            out,
            "<text x=\"{MARGIN}\" y=\"{name}\">{}</text><text class=\"value\" x=\"{}\" y=\"{name}\">{}</text>\n\
             <rect class=\"track\" x=\"{MARGIN}\" y=\"{top}\" width=\"{wide}\" height=\"{BAR}\" rx=\"2\"/>\
             <rect class=\"{kind}\" x=\"{MARGIN}\" y=\"{top}\" width=\"{length:.1}\" height=\"{BAR}\" rx=\"2\"/>",
            escaped(&self.name),
            WIDTH - MARGIN,
            escaped(&self.text),
        );
        if let Some(end) = self.end {
            let (from, to, middle) = (MARGIN + length, MARGIN + place(end), y - BAR / 2.0);
            let _ = writeln!(
                out,
                "<path class=\"line\" fill=\"none\" d=\"M{from:.1} {middle}H{to:.1}M{to:.1} {}V{}\"/>",
                top + 2.0,
                y - 2.0
            );
        }
        if let Some(mark) = self.mark {
            let at = MARGIN + place(mark);
            let _ = writeln!(out, "<path class=\"line\" d=\"M{at:.1} {}V{}\"/>", top - 2.0, y + 2.0);
        }
        if let Some(limit) = self.limit {
            let _ = writeln!(
                out,
                "<rect class=\"limit\" x=\"{MARGIN}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"2\"/>",
                place(limit)
            );
        }
    }
}

/// Text in lines that fit.
fn lines(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > LETTERS_PER_LINE {
            lines.push(word.to_owned());
        } else {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: BarScale, rows: Vec<Bar>) -> String {
        let groups = vec![BarGroup { title: Some("<g>".to_owned()), rows }];
        Chart { title: "t".to_owned(), scale, axis: "ms".to_owned(), groups, source: "s".to_owned() }.draw()
    }

    #[test]
    fn a_bar_is_as_long_as_its_value() {
        let rows = || vec![Bar::new("baton", 1.0), Bar { limit: Some(4.0), ..Bar::new("other", 2.0) }];
        let drawn = chart(BarScale::Linear, rows());
        assert!(drawn.contains("class=\"own\" x=\"16\" y=\"101\" width=\"112.0\""), "{drawn}");
        assert!(drawn.contains("class=\"bar\" x=\"16\" y=\"141\" width=\"224.0\""), "{drawn}");
        assert!(drawn.contains("class=\"limit\" x=\"16\" y=\"141\" width=\"448.0\""), "{drawn}");
        let drawn = chart(BarScale::Log(0.1, 1_000.0), vec![Bar::new("a", 10.0), Bar::new("b", 0.01)]);
        assert!(drawn.contains("width=\"224.0\"") && drawn.contains("width=\"2.0\""), "{drawn}");
    }

    #[test]
    fn text_is_escaped_and_fits() {
        let drawn = chart(BarScale::Linear, vec![Bar::new("<script>", 1.0)]);
        assert!(!drawn.contains("<script>") && !drawn.contains("<g>"), "{drawn}");
        assert!(lines(&"word ".repeat(40)).iter().all(|line| line.len() <= LETTERS_PER_LINE));
    }
}
