//! A report: one JSON object, or lines for people.

use std::io::{self, Write};

use serde::Serialize;

/// Prints a report as indented JSON, else by `table`.
pub(crate) fn print_report<T: Serialize>(
    report: &T,
    json: bool,
    out: &mut dyn Write,
    table: impl FnOnce(&T, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    match json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(report)?),
        false => table(report, out),
    }
}
