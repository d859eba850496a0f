//! A parser for the metric and label names of PromQL expressions. `tests/peers/prometheus.sh` checks with Prometheus
//! whether they are valid, and what they evaluate to.

use std::collections::BTreeSet;

/// The names of an expression.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct NamedSeries {
    /// Metrics, each with the labels of its selector.
    pub(crate) metrics: Vec<(String, Vec<String>)>,
    /// Labels for grouping and joining.
    pub(crate) grouped: BTreeSet<String>,
}

/// Words with labels in parentheses after them.
const OF_LABELS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
/// Words that are no names.
const OPERATORS: [&str; 6] = ["and", "or", "unless", "bool", "offset", "atan2"];

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Mark(char),
}

/// Parses an expression.
pub(crate) fn named(expression: &str) -> NamedSeries {
    let tokens = tokens(expression);
    let (mut found, mut at) = (NamedSeries::default(), 0);
    while at < tokens.len() {
        let Token::Word(word) = &tokens[at] else {
            at += 1;
            continue;
        };
        at += 1;
        match tokens.get(at) {
            Some(Token::Mark('(')) if OF_LABELS.contains(&word.as_str()) => {
                let (labels, end) = names_until(&tokens, at, ')');
                found.grouped.extend(labels);
                at = end;
            }
            // A function, or an aggregation.
            Some(Token::Mark('(')) => {}
            // An aggregation whose labels come first.
            Some(Token::Word(next)) if OF_LABELS.contains(&next.as_str()) => {}
            Some(Token::Mark('{')) => {
                let (labels, end) = names_until(&tokens, at, '}');
                found.metrics.push((word.clone(), labels));
                at = end;
            }
            _ if OPERATORS.contains(&word.as_str()) => {}
            _ => found.metrics.push((word.clone(), Vec::new())),
        }
    }
    found
}

fn names_until(tokens: &[Token], from: usize, end: char) -> (Vec<String>, usize) {
    let length =
        tokens[from..].iter().position(|token| *token == Token::Mark(end)).expect("a bracket is closed");
    let words = tokens[from..from + length].iter().filter_map(|token| match token {
        Token::Word(word) => Some(word.clone()),
        Token::Mark(_) => None,
    });
    (words.collect(), from + length + 1)
}

/// Words and marks, without texts, numbers and durations.
fn tokens(expression: &str) -> Vec<Token> {
    let (mut tokens, mut rest) = (Vec::new(), expression);
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    while let Some(first) = rest.chars().next() {
        if first == '"' {
            let end = rest[1..].find('"').expect("a text is closed") + 2;
            rest = &rest[end..];
        } else if is_word(first) {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            if !first.is_ascii_digit() {
                tokens.push(Token::Word(rest[..end].to_owned()));
            }
            rest = &rest[end..];
        } else {
            if !first.is_whitespace() {
                tokens.push(Token::Mark(first));
            }
            rest = &rest[first.len_utf8()..];
        }
    }
    tokens
}

#[test]
fn metrics_of_an_expression_are_found() {
    let found = named(
        "histogram_quantile(0.99, sum by (le, leg) (rate(a_bucket{x=\"y{z}\", u!~\"v|w\"}[5m]))) > 0.25 and on (leg) vllm:b == 1",
    );
    let metric = |name: &str, labels: &[&str]| {
        (name.to_owned(), labels.iter().map(|&l| l.to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(found.metrics, [metric("a_bucket", &["x", "u"]), metric("vllm:b", &[])]);
    assert_eq!(found.grouped.into_iter().collect::<Vec<_>>(), ["le", "leg"]);
    assert_eq!(named("sum(a) by (b) / 7 * 24").metrics, [metric("a", &[])]);
    assert_eq!(named("sum(a) by (b)").grouped.len(), 1);
}
