//! `docs/reference/cli.md`: every command and option, generated from the definitions by which the binary parses its
//! arguments.
//!
//! ```text
//! BATON_WRITE_DOCS=1 cargo test --bin baton the_page_of_commands
//! ```

use std::fmt::Write as _;
use std::path::Path;

use clap::builder::StyledStr;
use clap::{Arg, Command, CommandFactory};

use super::Cli;

const BEGIN: &str = "<!-- commands: begin -->\n";
const END: &str = "<!-- commands: end -->";

/// Formats text as one line, for a table cell.
fn line(text: &StyledStr) -> String {
    let words = text.to_string().replace('|', "\\|").replace('<', "&lt;");
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The argument's notation.
fn written(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let values = values.iter().map(|name| name.to_string()).collect::<Vec<_>>().join(" ");
    let values = if arg.get_action().takes_values() { values } else { String::new() };
    let many = if arg.get_num_args().is_some_and(|number| number.max_values() > 1) { "…" } else { "" };
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    let text = match names.is_empty() {
        true => format!("{values}{many}"),
        false => format!("{} {values}{many}", names.join(", ")),
    };
    text.trim_end().to_owned()
}

/// The value without the option.
fn default(arg: &Arg) -> String {
    let values: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    match values.is_empty() || !arg.get_action().takes_values() {
        true if arg.is_required_set() => "required".to_owned(),
        true => String::new(),
        false => format!("`{}`", values.join(" ")),
    }
}

fn row(arg: &Arg) -> String {
    let mut what = arg.get_long_help().or(arg.get_help()).map(line).unwrap_or_default();
    let values = arg.get_possible_values();
    let shown = values.iter().filter(|value| !value.is_hide_set() && arg.get_action().takes_values());
    let shown: Vec<_> = shown
        .map(|value| match value.get_help() {
            Some(help) => format!("`{}` ({})", value.get_name(), line(help)),
            None => format!("`{}`", value.get_name()),
        })
        .collect();
    if !shown.is_empty() {
        let _ = write!(what, ": {}", shown.join(", "));
    }
    let environment = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    format!("| `{}` | {} | {environment} | {what} |\n", written(arg).replace('|', "\\|"), default(arg))
}

/// Describes a command and its subcommands.
fn describe(command: &mut Command, path: &str, page: &mut String) {
    let about = command.get_long_about().or(command.get_about()).map(line).unwrap_or_default();
    let about = about.trim_end_matches('.');
    let usage = command.render_usage().to_string();
    let usage: Vec<_> = usage.trim_start_matches("Usage:").lines().map(str::trim).collect();
    let _ = write!(page, "## `{path}`\n\n{about}.\n\n```text\n{}\n```\n\n", usage.join("\n"));
    let is_root = path == "baton";
    let args = command.get_arguments().filter(|arg| {
        let of_clap = ["help", "version"].contains(&arg.get_id().as_str());
        !(arg.is_hide_set() || of_clap || (arg.is_global_set() && !is_root))
    });
    let rows: String = args.map(row).collect();
    if !rows.is_empty() {
        let _ = write!(page, "| option | default | environment | what |\n|---|---|---|---|\n{rows}\n");
    }
    for below in command.get_subcommands_mut() {
        if !below.is_hide_set() && below.get_name() != "help" {
            let path = format!("{path} {}", below.get_name());
            describe(below, &path, page);
        }
    }
}

fn commands() -> String {
    let mut command = Cli::command();
    command.build();
    let mut page = String::new();
    describe(&mut command, "baton", &mut page);
    page
}

/// `BATON_WRITE_DOCS=1` writes the generated part of the page instead of comparing it.
#[test]
fn the_page_of_commands_matches_the_binary() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/cli.md");
    let page = std::fs::read_to_string(&file).expect("docs/reference/cli.md is there");
    let (before, rest) = page.split_once(BEGIN).expect("the commands begin");
    let (old, after) = rest.split_once(END).expect("the commands end");
    let new = commands();
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&file, format!("{before}{BEGIN}{new}{END}{after}"))
            .expect("docs/reference/cli.md can be written");
        return;
    }
    let missing: Vec<_> = new.lines().filter(|line| !old.lines().any(|other| other == *line)).collect();
    let stale: Vec<_> = old.lines().filter(|line| !new.lines().any(|other| other == *line)).collect();
    assert!(
        old == new,
        "docs/reference/cli.md is not up to date; bring it up to date with\n  BATON_WRITE_DOCS=1 cargo test --bin baton \
         the_page_of_commands\nmissing:\n{}\nto be removed:\n{}",
        missing.join("\n"),
        stale.join("\n")
    );
}

#[test]
fn every_command_and_option_has_a_help_text() {
    fn look(command: &Command, path: &str, silent: &mut Vec<String>) {
        if command.get_about().is_none() {
            silent.push(path.to_owned());
        }
        let args = command.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_help().is_none());
        silent.extend(args.map(|arg| format!("{path} {}", written(arg))));
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            look(below, &format!("{path} {}", below.get_name()), silent);
        }
    }
    let mut silent = Vec::new();
    look(&Cli::command(), "baton", &mut silent);
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn the_command_definitions_are_valid() {
    Cli::command().debug_assert();
}
