//! Rules for prose: words per sentence, banned words, line width, length of pages, help texts. The numbers of
//! exceptions only shrink: a test that finds fewer than allowed fails and prints the smaller number.

use std::fs;

use super::pages::{LineContext, lines, pages};
use super::{assert_none, root, sources};

/// Maximum words of a sentence on a page, and in a comment.
const SENTENCE_MAX: usize = 30;
const COMMENT_MAX: usize = 35;
/// Maximum characters of a line of prose.
const WIDTH_MAX: usize = 120;
/// Maximum lines of a page, by its path or folder. The first match counts.
const LENGTHS: &[(&str, usize)] = &[
    ("README.md", 150),
    ("ARCHITECTURE.md", 250),
    ("bench/results/README.md", 60),
    ("deploy/", 300),
    // One line per key of the configuration.
    ("docs/reference/configuration.md", 400),
    ("docs/", 300),
];
/// Pages whose text or tables are generated.
const GENERATED: &[&str] = &["docs/reference/cli.md"];
/// Words that name no component, or that stand for a term of the glossary.
const BANNED: &[&str] = &[
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "whoever",
    "anew",
    "untold",
    "mend",
    "mends",
    "mended",
    "desk",
    "bell",
    "bells",
    "deaf",
    "mute",
    "bystander",
    "bystanders",
    "leaver",
    "leavers",
    "victim",
    "victims",
    "twin",
    "twins",
    "owed",
    "debt",
    "debts",
    "whom",
    "is told",
    "are told",
    "tells of",
    "says of",
    "lives at",
    "of which it can be said",
    "come back",
    "comes back",
    "came back",
];
/// Allowed banned words in comments, by folder, until they are replaced.
const IN_COMMENTS: &[(&str, usize)] =
    &[("bench/", 0), ("connector/", 0), ("engine/", 0), ("router/", 0), ("src/", 0), ("tests/", 0)];
/// Allowed comments with a long sentence, by folder.
const LONG_COMMENTS: &[(&str, usize)] =
    &[("bench/", 0), ("connector/", 0), ("engine/", 6), ("router/", 4), ("src/", 0), ("tests/", 0)];
/// Allowed banned words in string literals, such as log lines and errors, by folder.
const IN_STRINGS: &[(&str, usize)] =
    &[("bench/", 0), ("connector/", 0), ("engine/", 0), ("router/", 0), ("src/", 0), ("tests/", 0)];
/// Maximum characters of a help text.
const HELP_MAX: usize = 120;

/// The paragraphs of a page and the numbers of their first lines. A code span is one word, a link is its text.
fn paragraphs(page: &str) -> Vec<(usize, String)> {
    let (mut found, mut open): (Vec<(usize, String)>, bool) = (Vec::new(), false);
    for (number, within, line) in lines(page) {
        let text = line.trim_start();
        let item = text.starts_with("- ")
            || text.starts_with("* ")
            || text.split_once(". ").is_some_and(|(n, _)| n.parse::<u8>().is_ok());
        let prose = within == LineContext::Prose && !text.is_empty() && !text.starts_with(['#', '|', '<']);
        if prose && open && !item {
            let (_, last) = found.last_mut().expect("a paragraph is open");
            last.push(' ');
            last.push_str(text);
        } else if prose {
            found.push((number, text.to_owned()));
        }
        open = prose;
    }
    found.into_iter().map(|(number, text)| (number, plain(&text))).collect()
}

/// Text without code spans and link targets.
fn plain(text: &str) -> String {
    let spans: Vec<&str> = text.split('`').collect();
    let mut out = String::new();
    for (turn, span) in spans.iter().enumerate() {
        out.push_str(if turn % 2 == 0 { span } else { "CODE" });
    }
    out = out.replace("**", "");
    while let Some((before, rest)) = out.split_once("](") {
        let Some((_, after)) = rest.split_once(')') else { break };
        out = format!("{before}]{after}");
    }
    out
}

/// The sentences of a text. A sentence ends with a period, a question mark or a colon before a space.
fn sentences(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let ends = |(at, letter): (usize, char)| {
            let next = rest[at + letter.len_utf8()..].chars().next();
            (matches!(letter, '.' | '?' | '!' | ':') && next.is_none_or(|next| next == ' ')).then_some(at + 1)
        };
        let end = rest.char_indices().find_map(ends).unwrap_or(rest.len());
        let (sentence, after) = rest.split_at(end);
        rest = after.trim_start();
        Some(sentence)
    })
}

fn too_long(text: &str, most: usize) -> Option<usize> {
    sentences(text).map(|sentence| sentence.split_whitespace().count()).filter(|words| *words > most).max()
}

/// Banned words of a text.
fn banned(text: &str) -> impl Iterator<Item = &'static str> {
    let words: String =
        text.to_lowercase().chars().map(|c| if c.is_alphanumeric() { c } else { ' ' }).collect();
    let words = format!(" {} ", words.split_whitespace().collect::<Vec<_>>().join(" "));
    BANNED.iter().copied().filter(move |word| words.contains(&format!(" {word} ")))
}

fn is_checked(page: &str) -> bool {
    !GENERATED.contains(&page) && !page.starts_with("tests/") && !page.starts_with("engine/")
}

#[test]
fn sentences_of_pages_are_short() {
    let mut broken = Vec::new();
    for (name, text) in pages().filter(|(name, _)| is_checked(name)) {
        for (number, text) in paragraphs(&text) {
            let words = too_long(&text, SENTENCE_MAX);
            broken.extend(words.map(|words| format!("{name}:{number}: a sentence of {words} words")));
        }
    }
    assert_none(&broken, "sentences of more than 30 words");
}

#[test]
fn pages_use_the_terms_of_the_glossary() {
    let mut broken = Vec::new();
    for (name, text) in pages().filter(|(name, _)| is_checked(name)) {
        // These pages contain banned words and earlier names.
        if matches!(name.as_str(), "docs/reference/glossary.md" | "CHANGELOG.md") {
            continue;
        }
        for (number, within, line) in lines(&text) {
            let text = plain(&line);
            let found = banned(&text).filter(|_| within == LineContext::Prose);
            broken.extend(found.map(|word| format!("{name}:{number}: {word}")));
        }
    }
    assert_none(&broken, "banned words on pages");
}

#[test]
fn lines_of_pages_fit() {
    let mut broken = Vec::new();
    for (name, text) in pages().filter(|(name, _)| is_checked(name)) {
        let (mut fenced, mut number) = (false, 0);
        for line in text.lines() {
            number += 1;
            let fence = line.trim_start().starts_with("```");
            fenced ^= fence;
            // A table row or a link cannot be wrapped.
            let whole = line.starts_with('|') || line.contains("](") || line.trim_start().starts_with('<');
            if !fenced && !whole && line.chars().count() > WIDTH_MAX {
                broken.push(format!("{name}:{number}: {} characters", line.chars().count()));
            }
        }
    }
    assert_none(&broken, "lines of more than 120 characters");
}

#[test]
fn pages_are_short() {
    let most = |name: &str| {
        let of =
            |(path, _): &&(&str, usize)| name == *path || (path.ends_with('/') && name.starts_with(path));
        LENGTHS.iter().find(of).map(|(_, most)| *most).filter(|_| !GENERATED.contains(&name))
    };
    let long = pages().filter_map(|(name, text)| {
        let (most, lines) = (most(&name)?, text.lines().count());
        (lines > most).then(|| format!("{name}: {lines} lines of {most}"))
    });
    assert_none(&long.collect::<Vec<_>>(), "long pages");
}

/// The comments of a source. Consecutive lines are one text.
fn comments(source: &str) -> Vec<String> {
    let (mut found, mut open): (Vec<String>, bool) = (Vec::new(), false);
    for line in source.lines() {
        let line = line.trim_start();
        let text = ["//! ", "/// ", "// "].into_iter().find_map(|mark| line.strip_prefix(mark));
        let text = text.filter(|text| !text.starts_with('|'));
        match (text, open) {
            (Some(text), true) => {
                let last = found.last_mut().expect("a comment is open");
                last.push(' ');
                last.push_str(text);
            }
            (Some(text), false) => found.push(text.to_owned()),
            (None, _) => {}
        }
        open = text.is_some();
    }
    found
}

/// Compares the number in the comments of each folder with the allowed number.
fn assert_shrinks(allowed: &[(&str, usize)], rule: &str, count: impl Fn(&str) -> usize) {
    let mut broken = Vec::new();
    for (folder, allowed) in allowed {
        let of_folder =
            sources().filter(|(name, _)| name.starts_with(folder) && name != "tests/tidy/words.rs");
        let found: usize =
            of_folder.map(|(_, text)| comments(&text).iter().map(|text| count(text)).sum::<usize>()).sum();
        if found != *allowed {
            broken.push(format!("{folder}: {found}, and {allowed} in tests/tidy/words.rs"));
        }
    }
    assert_none(&broken, rule);
}

#[test]
fn banned_words_of_comments_only_shrink() {
    assert_shrinks(IN_COMMENTS, "banned words in comments", |text| {
        let text = plain(text);
        banned(&text).count()
    });
}

/// String literals of a source that are text: those that contain a space.
fn strings(source: &str) -> impl Iterator<Item = &str> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split('"').skip(1).step_by(2)).filter(|text| text.contains(' '))
}

#[test]
fn banned_words_of_strings_only_shrink() {
    let mut broken = Vec::new();
    for (folder, allowed) in IN_STRINGS {
        let of_folder =
            sources().filter(|(name, _)| name.starts_with(folder) && name != "tests/tidy/words.rs");
        let found: usize =
            of_folder.map(|(_, text)| strings(&text).map(|text| banned(text).count()).sum::<usize>()).sum();
        if found != *allowed {
            broken.push(format!("{folder}: {found}, and {allowed} in tests/tidy/words.rs"));
        }
    }
    assert_none(&broken, "banned words in string literals");
}

#[test]
fn long_sentences_of_comments_only_shrink() {
    let long = |text: &str| usize::from(too_long(&plain(text), COMMENT_MAX).is_some());
    assert_shrinks(LONG_COMMENTS, "comments with a sentence of more than 35 words", long);
}

#[test]
fn help_texts_are_short_and_metavars_are_types() {
    let page = fs::read_to_string(root().join("docs/reference/cli.md")).expect("the page is there");
    let (mut broken, mut seen) = (Vec::new(), 0);
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let (option, help) = (cells[0].trim_matches('`'), cells[cells.len() - 1]);
        // The values of the option follow, each with a text of its own.
        let help = help.split(": `").next().unwrap_or_default();
        seen += 1;
        let metavar = option
            .split_once(' ')
            .map(|(name, metavar)| (name.trim_start_matches('-').replace('-', "_"), metavar));
        if metavar.is_some_and(|(name, metavar)| {
            name.eq_ignore_ascii_case(metavar) && !matches!(metavar, "URL" | "DIR" | "FILE")
        }) {
            broken.push(format!("{option}: the metavar repeats the name"));
        }
        let first = help.chars().next().unwrap_or('-');
        if first.is_lowercase() || help.ends_with('.') || help.chars().count() > HELP_MAX {
            broken.push(format!("{option}: {help}"));
        }
    }
    assert!(seen > 200, "only {seen} options were seen");
    assert_none(&broken, "help texts");
}

#[test]
fn each_term_of_the_glossary_is_defined_once() {
    let page = fs::read_to_string(root().join("docs/reference/glossary.md")).expect("the page is there");
    let terms: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| term"))
        .filter_map(|line| line.trim_matches('|').split(" | ").next().map(str::trim))
        .collect();
    let twice = terms.iter().filter(|term| terms.iter().filter(|other| other == term).count() > 1);
    assert!(terms.len() > 80, "only {} terms were seen", terms.len());
    assert_none(&twice.map(|term| (*term).to_owned()).collect::<Vec<_>>(), "terms with two meanings");
}

#[test]
fn the_rules_detect_planted_violations() {
    let long = format!("One. {} end.", "word ".repeat(40));
    assert_eq!(too_long(&long, 30), Some(41));
    assert_eq!(too_long(&plain("Short: yes. `a b c` is one word."), 3), Some(4));
    assert_eq!(banned("Nobody is told anew").collect::<Vec<_>>(), ["nobody", "anew", "is told"]);
    assert_eq!(banned("a debtor with bellows").count(), 0);
    assert_eq!(plain("see [the page](x.md#y) and `code span`"), "see [the page] and CODE");
}
