//! A frame as an SVG, for the documentation. Only tests draw it.

use std::fmt::Write as _;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier};

use crate::disconnect::escaped;

const WIDE: f64 = 8.0;
const HIGH: f64 = 17.0;
const MARGIN: f64 = 12.0;

/// The colour of a 256-colour terminal, or its default.
fn colour(of: Color) -> Option<String> {
    let Color::Indexed(number) = of else { return None };
    let level = |step: u8| if step == 0 { 0 } else { 55 + 40 * u16::from(step) };
    let (red, green, blue) = match number {
        232.. => {
            let grey = 8 + 10 * u16::from(number - 232);
            (grey, grey, grey)
        }
        16.. => (level((number - 16) / 36), level((number - 16) / 6 % 6), level((number - 16) % 6)),
        _ => (170, 170, 170),
    };
    Some(format!("#{red:02x}{green:02x}{blue:02x}"))
}

/// Draws the frame as a dark terminal. Adjacent cells of one style are one text of their exact width.
pub(super) fn picture(frame: &Buffer, title: &str) -> String {
    let (columns, rows) = (frame.area.width, frame.area.height);
    let wide = f64::from(columns) * WIDE + 2.0 * MARGIN;
    let high = f64::from(rows) * HIGH + 2.0 * MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {wide} {high}\" width=\"{wide}\" height=\"{high}\" \
         role=\"img\" aria-label=\"{}\">\n<style>text{{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;\
         white-space:pre;fill:#e6edf3}}</style>\n<rect width=\"{wide}\" height=\"{high}\" rx=\"6\" fill=\"#0d1117\"/>\n",
        escaped(title)
    );
    for y in 0..rows {
        let mut x = 0;
        while x < columns {
            let style = |x| (frame[(x, y)].fg, frame[(x, y)].modifier);
            let end = (x..columns).find(|next| style(*next) != style(x)).unwrap_or(columns);
            let text: String = (x..end).map(|x| frame[(x, y)].symbol()).collect();
            let shown = text.trim_end();
            if !shown.trim().is_empty() {
                let (fg, modifier) = style(x);
                let fill = colour(fg).map_or_else(String::new, |colour| format!(" style=\"fill:{colour}\""));
                let bold = if modifier.contains(Modifier::BOLD) { " font-weight=\"700\"" } else { "" };
                let _ = writeln!(
                    out,
                    "<text x=\"{}\" y=\"{}\" textLength=\"{}\"{fill}{bold}>{}</text>",
                    MARGIN + f64::from(x) * WIDE,
                    MARGIN + f64::from(y) * HIGH + 13.0,
                    shown.chars().count() as f64 * WIDE,
                    escaped(shown)
                );
            }
            x = end;
        }
    }
    out.push_str("</svg>\n");
    out
}
