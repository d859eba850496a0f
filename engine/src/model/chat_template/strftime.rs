//! `strftime_now`: Python's `strftime` in the C locale, as far as chat templates use it.

use std::time::SystemTime;

use minijinja::{Error, ErrorKind};
use time::OffsetDateTime;

/// The time in UTC, so that engines in all time zones render the same text.
pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let now = OffsetDateTime::from(now);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = rest.next();
        let padded = directive != Some('-');
        if !padded {
            directive = rest.next();
        }
        let field = directive.and_then(|directive| field(directive, padded, now));
        out.push_str(&field.ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot show {format:?}"))
        })?);
    }
    Ok(out)
}

fn field(directive: char, padded: bool, now: OffsetDateTime) -> Option<String> {
    let number =
        |value: u16, width: usize| if padded { format!("{value:0width$}") } else { value.to_string() };
    let (weekday, month) = (now.weekday(), u8::from(now.month()));
    let hour12 = match now.hour() % 12 {
        0 => 12,
        hour => hour,
    };
    Some(match directive {
        'Y' => now.year().to_string(),
        'y' => format!("{:02}", now.year().rem_euclid(100)),
        'm' => number(month.into(), 2),
        'd' => number(now.day().into(), 2),
        'e' => format!("{:2}", now.day()),
        'j' => number(now.ordinal(), 3),
        'H' => number(now.hour().into(), 2),
        'I' => number(hour12.into(), 2),
        'M' => number(now.minute().into(), 2),
        'S' => number(now.second().into(), 2),
        'p' => if now.hour() < 12 { "AM" } else { "PM" }.to_owned(),
        'A' => weekday.to_string(),
        'a' => weekday.to_string()[..3].to_owned(),
        'B' => now.month().to_string(),
        'b' | 'h' => now.month().to_string()[..3].to_owned(),
        'w' => weekday.number_days_from_sunday().to_string(),
        'u' => weekday.number_from_monday().to_string(),
        'F' => format!("{}-{:02}-{:02}", now.year(), month, now.day()),
        'D' => format!("{:02}/{:02}/{:02}", month, now.day(), now.year().rem_euclid(100)),
        'T' => format!("{:02}:{:02}:{:02}", now.hour(), now.minute(), now.second()),
        'R' => format!("{:02}:{:02}", now.hour(), now.minute()),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}
