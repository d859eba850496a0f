//! Log lines: the first field of each is `event`, a stable name that `docs/reference/log-events.md` lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::layers::code;
use super::{assert_none, root, sources};

/// The page with the table of all names.
const PAGE: &str = "docs/reference/log-events.md";

/// The macros of `tracing` that write a log line, most severe first.
const LEVELS: &[&str] = &["error", "warn", "info", "debug", "trace"];

/// One name, over all its log lines.
#[derive(Default)]
struct LogEvent {
    /// Places in [`LEVELS`].
    levels: BTreeSet<usize>,
    components: BTreeSet<String>,
    messages: BTreeSet<String>,
}

type LogEvents = BTreeMap<String, LogEvent>;

/// The component whose sources contain a file; `None` for tests.
fn component(file: &str) -> Option<&str> {
    let is_test = file.ends_with("tests.rs") || file.contains("/tests/");
    let folder = file.split('/').next().filter(|_| !is_test)?;
    match folder {
        "src" => Some("baton"),
        _ => file.contains("/src/").then_some(folder),
    }
}

/// The arguments of a macro, from behind its opening parenthesis to the closing one. Empty if there is none.
fn arguments(text: &str) -> Vec<&str> {
    let (mut found, mut start, mut depth) = (Vec::new(), 0, 0);
    let (mut in_string, mut escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            '(' | '[' | '{' => depth += 1,
            ')' if depth == 0 => {
                found.push(text[start..at].trim());
                found.retain(|argument| !argument.is_empty());
                return found;
            }
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    Vec::new()
}

/// The name of a log line. Only the line's span may stand before it.
fn name<'a>(arguments: &[&'a str]) -> Option<&'a str> {
    let first = arguments.iter().find(|argument| !argument.starts_with("parent:"))?;
    let name = first.strip_prefix("event = \"")?.strip_suffix('"')?;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    (name.starts_with(|c: char| c.is_ascii_lowercase()) && name.chars().all(plain)).then_some(name)
}

/// Adds the log lines of a source to `events`, and returns those without a name.
fn collect(file: &str, text: &str, events: &mut LogEvents) -> Vec<String> {
    let Some(component) = component(file) else { return Vec::new() };
    let (code, mut broken) = (code(text), Vec::new());
    broken.extend(code.contains("tracing::event!").then(|| format!("{file}: tracing::event!")));
    for (severity, level) in LEVELS.iter().enumerate() {
        let start = format!("{level}!(");
        for (at, _) in code.match_indices(&start) {
            let before = &code[..at];
            if before.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let arguments = arguments(&code[at + start.len()..]);
            let place = || format!("{file}:{}", before.matches('\n').count() + 1);
            if !before.ends_with("tracing::") {
                broken.push(format!("{}: {level}! without tracing::", place()));
            }
            let message = arguments.last().filter(|message| message.starts_with('"'));
            let (Some(name), Some(message)) = (name(&arguments), message) else {
                broken.push(place());
                continue;
            };
            let event = events.entry(name.to_owned()).or_default();
            event.levels.insert(severity);
            event.components.insert(component.to_owned());
            event.messages.insert((*message).to_owned());
        }
    }
    broken
}

/// The rows of the page's table: name, levels, components and meaning.
fn rows(page: &str) -> Vec<[&str; 4]> {
    let table = page.split_once("<!-- events: begin -->").map_or("", |(_, rest)| rest);
    let table = table.split_once("<!-- events: end -->").map_or("", |(table, _)| table);
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.split('|').skip(1).map(|cell| cell.trim().trim_matches('`'));
        [(); 4].map(|()| cells.next().unwrap_or_default())
    })
    .collect()
}

/// Differences between the names of the sources and those of the page.
fn differences(events: &LogEvents, page: &str) -> Vec<String> {
    let rows = rows(page);
    let mut found = Vec::new();
    for (name, event) in events {
        let levels: Vec<_> = event.levels.iter().map(|severity| LEVELS[*severity]).collect();
        let components: Vec<_> = event.components.iter().map(String::as_str).collect();
        let (levels, components) = (levels.join(", "), components.join(", "));
        match rows.iter().find(|row| row[0] == name) {
            None => found.push(format!("`{name}` ({levels}, {components}) is not on the page")),
            Some(row) if row[1] != levels || row[2] != components || row[3].is_empty() => {
                found.push(format!("`{name}` is {levels}, {components}, and {row:?} on the page"));
            }
            Some(_) => {}
        }
        if event.messages.len() > 1 {
            found.push(format!("`{name}` has several messages: {:?}", event.messages));
        }
    }
    found.extend(rows.iter().filter(|row| !events.contains_key(row[0])).map(|row| format!("{row:?} is old")));
    let unordered = rows.windows(2).filter(|pair| pair[0][0] >= pair[1][0]);
    found.extend(unordered.map(|pair| format!("`{}` does not stand after `{}`", pair[1][0], pair[0][0])));
    found
}

#[test]
fn every_log_line_has_a_name_that_the_page_lists() {
    let mut events = LogEvents::new();
    let broken: Vec<_> = sources().flat_map(|(file, text)| collect(&file, &text, &mut events)).collect();
    assert_none(&broken, "log lines whose first field is not `event = \"snake_case_name\"`");
    assert!(events.len() > 100, "only {} names were seen", events.len());
    let page = fs::read_to_string(root().join(PAGE)).expect("the page is there");
    assert_none(&differences(&events, &page), "log lines and docs/reference/log-events.md");
}

#[test]
fn planted_log_lines_are_found() {
    let lines = r#"
fn f() {
    tracing::warn!(
        parent: span!(of("a)", [1, 2])), event = "a_1", x = g(1, 2),
        "one, \" two)",
    );
    tracing::debug!(event = "b", %error, "three");
}

#[cfg(test)]
mod tests {
    fn g() {
        tracing::info!("four");
    }
}
"#;
    let mut events = LogEvents::new();
    assert_none(&collect("router/src/a.rs", lines, &mut events), "lines that are in order");
    assert_eq!(events.keys().collect::<Vec<_>>(), ["a_1", "b"]);
    let table =
        |rows: &str| format!("<!-- events: begin -->\n|---|\n{rows}<!-- events: end -->\n| `c` | |\n");
    let (a, b) = ("| `a_1` | warn | router | One. | |\n", "| `b` | debug | router | Two. | |\n");
    assert_none(&differences(&events, &table(&[a, b].concat())), "a page that is in order");

    let old = [a, b, "| `c` | info | engine | Three. | |\n"].concat();
    let changed = |from: &str, to: &str| format!("{a}{}", b.replace(from, to));
    let (level, component) = (changed("debug", "info"), changed("router", "engine"));
    for rows in [a.to_owned(), [b, a].concat(), old, level, component, changed("Two.", "")] {
        assert_eq!(differences(&events, &table(&rows)).len(), 1, "{rows}");
    }

    for line in [
        "tracing::info!(\"no name\");",
        "tracing::info!(x, event = \"late\", \"text\");",
        "tracing::info!(event = name, \"text\");",
        "tracing::info!(event = \"Not-Snake\", \"text\");",
        "tracing::info!(\n    engine,\n    \"text\"\n);",
        "info!(event = \"other\", \"text\");",
        "tracing::info!(event = \"open\"",
        "tracing::info!(event = \"no_message\");",
        "tracing::event!(Level::INFO, event = \"level\", \"text\");",
    ] {
        assert_eq!(collect("engine/src/a.rs", line, &mut LogEvents::new()).len(), 1, "{line}");
        assert!(collect("engine/src/a/tests.rs", line, &mut LogEvents::new()).is_empty(), "{line}");
    }
    collect("engine/src/b.rs", "tracing::warn!(event = \"b\", \"five\");", &mut events);
    let page = table(&[a, "| `b` | warn, debug | engine, router | Two. | |\n"].concat());
    assert_eq!(
        differences(&events, &page),
        ["`b` has several messages: {\"\\\"five\\\"\", \"\\\"three\\\"\"}"]
    );
}
