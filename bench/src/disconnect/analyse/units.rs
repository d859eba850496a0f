//! Milliseconds: from microseconds, and as text.

/// Microseconds as milliseconds.
pub(crate) fn us_to_ms(us: u64) -> f64 {
    us as f64 / 1e3
}

/// Milliseconds as text.
pub(crate) fn format_ms(value: f64) -> String {
    match value {
        value if value.is_infinite() => "never".into(),
        value if value >= 10_000.0 => format!("{:.1} s", value / 1e3),
        value if value >= 100.0 => format!("{value:.0} ms"),
        value if value >= 1.0 => format!("{value:.1} ms"),
        value => format!("{value:.2} ms"),
    }
}
