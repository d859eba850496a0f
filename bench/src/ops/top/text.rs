//! Text for a terminal: foreign text made harmless, times and counts in few characters.

use std::time::Duration;

/// Foreign text without characters that move the cursor, change the writing direction, or have no width.
pub(crate) fn clean(text: &str) -> String {
    let harmless = |letter: char| !letter.is_control() && !is_format(letter);
    text.chars().map(|letter| if harmless(letter) { letter } else { '\u{fffd}' }).collect()
}

/// Characters that are invisible and change how others are shown.
fn is_format(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// A text of at most `width` letters. Cut text ends in `…`.
pub(crate) fn fit(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        cut.push('…');
    }
    cut
}

/// A time in at most seven letters.
pub(crate) fn span(ms: u64) -> String {
    let time = Duration::from_millis(ms);
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{:.1}s", time.as_secs_f64()),
        60_000..3_600_000 => format!("{}m{:02}s", ms / 60_000, ms % 60_000 / 1_000),
        _ => format!("{}h{:02}m", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

/// A count in at most five letters.
pub(crate) fn short(count: u64) -> String {
    match count {
        0..10_000 => count.to_string(),
        10_000..1_000_000 => format!("{}k", count / 1_000),
        1_000_000..1_000_000_000 => format!("{:.1}M", count as f64 / 1e6),
        _ => format!("{:.0}G", count as f64 / 1e9),
    }
}

/// A count, or `?`.
pub(crate) fn known(count: Option<u64>) -> String {
    count.map_or("?".to_owned(), short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_control_characters_are_removed() {
        for hostile in
            ["\u{1b}[2J", "a\rb", "\u{9b}31m", "\u{202e}abc", "a\u{200b}b", "\u{7}", "\u{0}", "\u{e0041}"]
        {
            let clean = clean(hostile);
            assert!(clean.contains('\u{fffd}') && !clean.chars().any(char::is_control), "{hostile:?}");
            assert_eq!(clean.chars().count(), hostile.chars().count());
        }
        assert_eq!(clean("chatcmpl-é-日本"), "chatcmpl-é-日本");
    }

    #[test]
    fn times_and_counts_are_short() {
        let spans = [0, 999, 1_000, 59_949, 60_000, 3_599_999, 360_000_000].map(span);
        assert_eq!(spans, ["0ms", "999ms", "1.0s", "59.9s", "1m00s", "59m59s", "100h00m"]);
        assert_eq!([9_999, 10_000, 1_500_000, 2_000_000_000].map(short), ["9999", "10k", "1.5M", "2G"]);
        assert_eq!(
            (fit("abcdef", 4), fit("abc", 3), fit("abc", 0)),
            ("abc…".into(), "abc".into(), String::new())
        );
    }
}
