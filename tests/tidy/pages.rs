//! Rules for pages: links resolve, commands parse, tests exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use super::{assert_none, code, files, root, sources};

/// Pages on which every test name in backticks must exist.
const PAGES_WITH_TESTS: &[&str] = &["docs/reference/contract.md", "docs/explanation/threat-model.md"];

/// Every page, by its path from the root.
pub(super) fn pages() -> impl Iterator<Item = (String, String)> {
    files().into_iter().filter(|(name, _)| name.ends_with(".md")).map(|(name, path)| {
        let text = fs::read_to_string(path).expect("a page is text");
        (name, text)
    })
}

/// The place of a line on a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LineContext {
    Prose,
    /// Between two fences.
    Code,
    /// A fence itself.
    Fence,
}

/// A page's lines with their numbers. Prose whose code span continues on the next line is one line.
pub(super) fn lines(page: &str) -> Vec<(usize, LineContext, String)> {
    let (mut lines, mut fenced): (Vec<(usize, LineContext, String)>, bool) = (Vec::new(), false);
    for (number, line) in page.lines().enumerate() {
        let within = match (line.trim_start().starts_with("```"), fenced) {
            (true, _) => LineContext::Fence,
            (false, true) => LineContext::Code,
            (false, false) => LineContext::Prose,
        };
        fenced ^= within == LineContext::Fence;
        match lines.last_mut() {
            Some((_, LineContext::Prose, open))
                if within == LineContext::Prose && open.matches('`').count() % 2 == 1 =>
            {
                open.push(' ');
                open.push_str(line.trim_start());
            }
            _ => lines.push((number + 1, within, line.to_owned())),
        }
    }
    lines
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let plain: String = match (heading.find('['), heading.find("](")) {
        (Some(_), Some(_)) => heading.split(['[', ']']).filter(|part| !part.starts_with('(')).collect(),
        _ => heading.to_owned(),
    };
    let kept = plain.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// The anchors of a page. Later headings with the same text get a number.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, within, line) in lines(page) {
        let heading = line.trim_start_matches('#');
        if within == LineContext::Prose && heading.len() < line.len() && heading.starts_with(' ') {
            let anchor = anchor(heading);
            let again = (0..).map(|n| if n == 0 { anchor.clone() } else { format!("{anchor}-{n}") });
            found.extend(again.into_iter().find(|one| !found.contains(one)));
        }
    }
    found
}

/// The link targets of a line, `](…)` and `[…]: …`.
fn targets(line: &str) -> Vec<&str> {
    // Text between backticks is code.
    let prose = line.split('`').step_by(2);
    let mut found: Vec<&str> = line
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .filter(|target| !target.contains('`'))
        .collect();
    if line.starts_with('[') && prose.count() == 1 {
        found.extend(line.split_once("]: ").map(|(_, target)| target.trim()));
    }
    found
}

#[test]
fn every_link_between_pages_resolves() {
    let (mut broken, mut followed) = (Vec::new(), 0);
    for (name, text) in pages() {
        let folder = root().join(&name).parent().expect("a page is in a folder").to_path_buf();
        for (number, within, line) in lines(&text) {
            for target in targets(&line).into_iter().filter(|_| within == LineContext::Prose) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                followed += 1;
                let (path, wanted) = target.split_once('#').unwrap_or((target, ""));
                let path = if path.is_empty() { root().join(&name) } else { folder.join(path) };
                let there = if wanted.is_empty() {
                    path.exists()
                } else {
                    fs::read_to_string(&path).is_ok_and(|page| anchors(&page).contains(wanted))
                };
                if !there {
                    broken.push(format!("{name}:{number}: {target}"));
                }
            }
        }
    }
    assert!(followed > 60, "only {followed} links were seen");
    assert_none(&broken, "links that lead nowhere");
}

/// Every command line on a page that begins with `what`: in fences and between backticks, without the text that
/// follows.
fn commands(page: &str, what: &str) -> Vec<(usize, String)> {
    let begun = |text: &str| {
        let at = text.find(what)?;
        // A separate word: after a space, a variable or a slash of its path.
        let alone = text[..at].chars().last().is_none_or(|c| matches!(c, ' ' | '/'));
        let command = text[at..].split(" #").next().unwrap_or_default();
        let command = command.split([';', '>', '&']).next().unwrap_or_default();
        let command = command.split(" | ").next().unwrap_or_default();
        alone.then(|| command.trim_end_matches('\\').trim().to_owned())
    };
    let mut found = Vec::new();
    for (number, within, line) in lines(page) {
        let pieces: Vec<&str> = match within {
            LineContext::Prose => code(&line).collect(),
            LineContext::Code => vec![&line],
            LineContext::Fence => Vec::new(),
        };
        found.extend(pieces.into_iter().filter_map(begun).map(|command| (number, command)));
    }
    found
}

/// The folder of each package, by its name.
fn packages() -> BTreeMap<String, String> {
    let manifests = files().into_iter().filter(|(name, _)| name.ends_with("Cargo.toml"));
    let named = manifests.filter_map(|(name, path)| {
        let text = fs::read_to_string(path).expect("a manifest is text");
        let package = text.split_once("[package]")?.1.split_once("name = \"")?.1.split('"').next()?;
        Some((package.to_owned(), name.strip_suffix("Cargo.toml")?.to_owned()))
    });
    named.collect()
}

/// A `cargo test` command: its package, its target and its filters.
#[derive(Debug, Default)]
struct TestCommand<'a> {
    package: Option<&'a str>,
    target: Option<&'a str>,
    all: bool,
    filters: Vec<&'a str>,
}

impl<'a> TestCommand<'a> {
    fn of(command: &'a str) -> Self {
        let (mut read, mut words) = (Self::default(), command.split_whitespace().skip(2));
        while let Some(word) = words.next() {
            match word {
                "--test" => read.target = words.next(),
                "-p" => read.package = words.next(),
                "--workspace" => read.all = true,
                // Options of a harness that have values.
                "--seed" | "--seeds" | "--from" | "--rounds" | "--test-threads" => drop(words.next()),
                option if option.starts_with(['-', '[', ']']) || option.ends_with(']') => {}
                filter => read.filters.push(filter),
            }
        }
        read
    }

    /// The path of a function as a test harness of this command would print it; `None` if it runs another target.
    fn path(&self, folder: Option<&str>, file: &str) -> Option<String> {
        let below = match folder {
            Some(folder) => file.strip_prefix(folder)?,
            None => &file[file.find("src/").or_else(|| file.find("tests/"))?..],
        };
        let module = match (below.strip_prefix("src/"), below.strip_prefix("tests/")) {
            (Some(module), _) if self.target.is_none() => module.to_owned(),
            (_, Some(rest)) => {
                let (target, module) = rest.split_once(['/', '.'])?;
                self.target.is_none_or(|wanted| wanted == target).then(|| module.to_owned())?
            }
            _ => return None,
        };
        let module = module.strip_suffix(".rs").unwrap_or(&module);
        let module = module.strip_suffix("/mod").or(module.strip_suffix("main")).unwrap_or(module);
        Some(module.replace('/', "::"))
    }
}

/// What is wrong with a `cargo test` command.
fn mistake(command: &str, packages: &BTreeMap<String, String>) -> Option<String> {
    let read = TestCommand::of(command);
    let folder = match (read.package, read.all) {
        (Some(package), _) => match packages.get(package) {
            Some(folder) => Some(folder.as_str()),
            None => return Some(format!("no package {package}")),
        },
        (None, true) => None,
        (None, false) => Some(""),
    };
    let mut paths = Vec::new();
    for (file, text) in sources() {
        let Some(module) = read.path(folder, &file) else { continue };
        paths.push(format!("{module}::"));
        for rest in text.split("fn ").skip(1) {
            let name = rest.split(['(', '<']).next().unwrap_or_default();
            paths.extend([format!("{module}::{name}"), format!("{module}::tests::{name}")]);
        }
    }
    if paths.is_empty() {
        return Some("no such target".to_owned());
    }
    let unknown = read.filters.iter().find(|filter| !paths.iter().any(|path| path.contains(**filter)));
    unknown.map(|filter| format!("no test matches {filter}"))
}

#[test]
fn every_test_command_of_a_page_names_a_test() {
    let packages = packages();
    let (mut broken, mut seen) = (Vec::new(), 0);
    for (page, text) in pages() {
        for (number, command) in commands(&text, "cargo test") {
            seen += 1;
            let wrong = mistake(&command, &packages);
            broken.extend(wrong.map(|wrong| format!("{page}:{number}: {command}: {wrong}")));
        }
    }
    assert!(seen > 30, "only {seen} commands were seen");
    assert_none(&broken, "tests that are not there");
    for wrong in [
        "cargo test -p baton-absent",
        "cargo test --test absent",
        "cargo test -p baton-engine check::",
        "cargo test -p baton-connector --test golden scheduler",
        "cargo test --workspace no_test_has_this_name",
    ] {
        assert!(mistake(wrong, &packages).is_some(), "{wrong}");
    }
}

#[test]
fn every_baton_command_on_a_page_parses() {
    let help = |command: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(command).arg("--help").output();
        let output = output.expect("the binary runs");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (mut broken, mut seen) = (Vec::new(), BTreeSet::new());
    let ours = |page: &str| {
        page.starts_with("docs/") || matches!(page, "README.md" | "deploy/README.md" | "examples/README.md")
    };
    for (page, text) in pages().filter(|(page, _)| ours(page)) {
        for (number, command) in commands(&text, "baton ") {
            // Text after ` -- ` is engine options, which their own table checks.
            let command = command.split(" -- ").next().unwrap_or_default();
            let words: Vec<&str> = command.split_whitespace().skip(1).collect();
            let is_name = |word: &&&str| word.bytes().all(|b| b.is_ascii_lowercase() || b"-|\\".contains(&b));
            let Some(first) = words.first().filter(is_name) else { continue };
            // `engine|transfer` stands for both commands.
            let second = words.get(1).filter(|word| matches!(*first, "bench" | "key") && is_name(word));
            let named: Vec<Vec<&str>> = match second {
                Some(second) => {
                    second.split('|').map(|one| vec![*first, one.trim_end_matches('\\')]).collect()
                }
                // Options of all commands.
                None if first.starts_with('-') => vec![Vec::new()],
                None => vec![vec![*first]],
            };
            let options = words.iter().map(|word| word.trim_matches(['[', ']']));
            let options: Vec<&str> =
                options.filter(|word| word.starts_with("--") && word.len() > 2).collect();
            for named in named {
                let Some(known) = help(&named) else {
                    broken.push(format!("{page}:{number}: {command}"));
                    continue;
                };
                seen.insert(named.join(" "));
                let unknown = options.iter().filter(|option| {
                    let option = option.split(['=', '|']).next().unwrap_or_default();
                    !known.contains(option)
                });
                broken.extend(unknown.map(|option| format!("{page}:{number}: {option} of {command}")));
            }
        }
    }
    assert!(seen.len() > 15, "only {seen:?} were seen");
    assert_none(&broken, "commands that are not understood");
}

#[test]
fn test_names_on_pages_exist() {
    let all: String = sources().map(|(_, text)| text).collect();
    let plain = |word: &&str| {
        word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let (mut missing, mut seen) = (Vec::new(), 0);
    for page in PAGES_WITH_TESTS {
        let text = fs::read_to_string(root().join(page)).expect("the page is there");
        // Fields and metrics have fewer underscores, or a prefix of their own.
        let test = |word: &&str| word.matches('_').count() >= 4 && !word.starts_with("baton_");
        for word in code(&text).filter(plain).filter(test) {
            seen += 1;
            if !all.contains(&format!("fn {word}(")) {
                missing.push(format!("{page}: {word}"));
            }
        }
    }
    assert!(seen > 10, "only {seen} tests were seen");
    assert_none(&missing, "tests that are not there");
}

/// The rows of the first table in a text, without its head, as cells.
fn first_table(text: &str) -> Vec<Vec<&str>> {
    let lines =
        text.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    lines.skip(2).map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

#[test]
fn every_table_of_figures_in_the_comparison_names_its_command_its_day_and_its_report() {
    let page = fs::read_to_string(root().join("docs/explanation/comparison.md")).expect("the page is there");
    let mut measured = Vec::new();
    for section in page.split("\n## ").skip(1) {
        let (title, text) = section.split_once('\n').expect("a title");
        let cells: Vec<&str> = first_table(text).iter().flat_map(|row| row[1..].to_vec()).collect();
        let figures = cells.iter().filter(|cell| cell.starts_with(|c: char| c.is_ascii_digit())).count();
        if figures * 2 <= cells.len() || cells.is_empty() {
            continue;
        }
        measured.push(title);
        let (above, _) = text.split_once("\n|").expect("the table");
        let above = above.replace('\n', " ");
        for needed in ["`baton bench ", " 2026-", "-core ", "bench/results/"] {
            assert!(above.contains(needed), "{title}: {needed:?} is not above the table");
        }
    }
    assert_eq!(measured, ["Clients that leave between the legs", "What a hop costs", "Engines on a CPU"]);
}

#[test]
fn the_comparison_of_cancels_matches_its_report() {
    let read = |path: &str| fs::read_to_string(root().join(path)).expect("it is there");
    let report: serde_json::Value =
        serde_json::from_str(&read("bench/results/compare/2026-11-23-vllm-zen5.json")).expect("JSON");
    let page = read("docs/explanation/comparison.md");
    let (_, section) = page.split_once("\n## Clients that leave").expect("the section");
    let rows = first_table(section);
    let targets = report["targets"].as_array().expect("gateways");
    assert_eq!(rows.len(), targets.len());
    for (row, target) in rows.iter().zip(targets) {
        let cpu = target["cpu_s_per_1000"]["median"].as_f64().expect("seconds");
        assert_eq!(row[4], format!("{cpu:.2}"), "{row:?}");
        let gap = &target["gap"];
        if gap.is_null() {
            continue;
        }
        assert_eq!(row[1], format!("{} of {}", gap["stranded"], gap["victims"]), "{row:?}");
        let number = |cell: &str| cell.replace(',', "").parse::<f64>().expect("a number");
        let (p50, p99) = row[2].trim_end_matches(" ms").split_once(" / ").expect("two");
        for (told, key) in
            [(p50, "freed_p50_ms"), (p99, "freed_p99_ms"), (row[3], "stranded_block_seconds_per_1000")]
        {
            let measured = gap[key].as_f64().expect("a number");
            // Compares as many digits as the page has, at least to a millisecond.
            let off = (number(told) - measured).abs();
            assert!(off <= 0.5 && off <= 0.05 + measured * 0.005, "{row:?}: {key} is {measured}");
        }
    }
}

/// The states of each diagram of ARCHITECTURE.md, with the source that the line above the diagram names.
fn diagrams(page: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut found = Vec::new();
    for part in page.split("```mermaid\nstateDiagram-v2\n").collect::<Vec<_>>().windows(2) {
        let above = part[0].trim_end().lines().last().unwrap_or_default();
        let source = above.split('`').nth(1).unwrap_or_default().to_owned();
        let diagram = part[1].split("```").next().unwrap_or_default();
        let ends = |line: &str| -> Vec<String> {
            let arrow = line.split(':').next().unwrap_or_default();
            arrow.split("-->").map(|end| end.trim().to_owned()).collect()
        };
        let states = diagram.lines().flat_map(ends).filter(|state| state != "[*]" && !state.is_empty());
        found.push((source, states.collect()));
    }
    found
}

/// The variants of `enum State` in a source.
fn states(source: &str) -> BTreeSet<String> {
    let body = source.split_once("pub enum State {\n").map_or("", |(_, rest)| rest);
    let body = body.split_once("\n}").map_or("", |(body, _)| body);
    let variants = body.lines().map(str::trim).filter(|line| line.starts_with(|c: char| c.is_uppercase()));
    variants.map(|line| line.trim_end_matches(',').split('(').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn state_diagrams_have_the_states_of_their_machines() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("it is there");
    let diagrams = diagrams(&page);
    assert_eq!(diagrams.len(), 3);
    for (source, drawn) in diagrams {
        let text = fs::read_to_string(root().join(&source)).expect("the source of a machine");
        assert_eq!(drawn, states(&text), "{source}: states of ARCHITECTURE.md, then of the machine");
    }
}
