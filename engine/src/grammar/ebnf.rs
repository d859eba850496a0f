//! Grammars in EBNF, as GBNF and xgrammar have it (`root ::= "a" [0-9]+`), converted to Lark.
//!
//! Every rule gets a name of its own, and a class of characters becomes a regular expression of one character. Sizes
//! and nesting are bounded by the request and by the compiler of Lark.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

use serde_json::Value;

/// The first rule of a grammar.
const ROOT: &str = "root";

#[derive(Debug, PartialEq)]
enum EbnfToken {
    Name(String),
    /// `::=`
    Defines,
    Text(String),
    /// Begins a part of a rule, and is the same in Lark.
    Part(String),
    /// Follows a part, and is the same in Lark.
    Suffix(String),
}

/// Whether a grammar is in this form.
pub(super) fn is_ebnf(grammar: &str) -> bool {
    grammar.contains("::=")
}

/// The grammar in Lark's form.
///
/// # Errors
/// What is wrong, with the line.
pub(super) fn to_lark(grammar: &str) -> Result<String, String> {
    let tokens = tokens(grammar)?;
    let rules = tokens.windows(2).filter_map(|pair| match pair {
        [EbnfToken::Name(name), EbnfToken::Defines] => Some(name.as_str()),
        _ => None,
    });
    let mut names = BTreeMap::new();
    for rule in rules {
        let new = if rule == ROOT { "start".to_owned() } else { format!("r{}", names.len()) };
        names.entry(rule).or_insert(new);
    }
    if !names.contains_key(ROOT) {
        return Err(format!("the grammar has no rule `{ROOT}`"));
    }
    let mut lark = String::new();
    let mut rest = tokens.as_slice();
    while let [token, after @ ..] = rest {
        rest = after;
        match token {
            EbnfToken::Name(name) => {
                let known = names.get(name.as_str());
                let known = known.ok_or_else(|| format!("the rule `{name}` is not defined"))?;
                if let [EbnfToken::Defines, after @ ..] = rest {
                    rest = after;
                    lark += &format!("\n{known}:");
                } else {
                    lark += &format!(" {known}");
                }
            }
            EbnfToken::Defines => return Err("`::=` follows the name of a rule".into()),
            EbnfToken::Text(text) => lark += &format!(" {}", literal(text)),
            EbnfToken::Part(part) => lark += &format!(" {part}"),
            EbnfToken::Suffix(suffix) => lark += suffix,
        }
    }
    match tokens.get(1) {
        Some(EbnfToken::Defines) => Ok(lark),
        Some(_) | None => Err("a grammar begins with the name of a rule and `::=`".into()),
    }
}

fn tokens(grammar: &str) -> Result<Vec<EbnfToken>, String> {
    let mut chars = grammar.chars().peekable();
    let mut line = 1;
    let mut tokens = Vec::new();
    while let Some(first) = chars.next() {
        let token = match first {
            '\n' => {
                line += 1;
                None
            }
            '#' => {
                while chars.next_if(|c| *c != '\n').is_some() {}
                None
            }
            space if space.is_whitespace() => None,
            '"' => Some(text(&mut chars).map(EbnfToken::Text)),
            '[' => Some(class(&mut chars).map(EbnfToken::Part)),
            '.' => Some(Some(EbnfToken::Part("/(?s:.)/".into()))),
            '(' | ')' | '|' => Some(Some(EbnfToken::Part(first.into()))),
            '*' | '+' | '?' => Some(Some(EbnfToken::Suffix(first.into()))),
            '{' => Some(repetition(&mut chars).map(EbnfToken::Suffix)),
            ':' => Some(defines(&mut chars)),
            letter if is_of_name(letter) => {
                let mut name = String::from(letter);
                while let Some(letter) = chars.next_if(|c| is_of_name(*c)) {
                    name.push(letter);
                }
                Some(Some(EbnfToken::Name(name)))
            }
            _ => Some(None),
        };
        match token {
            None => {}
            Some(Some(token)) => tokens.push(token),
            Some(None) => return Err(format!("line {line} of the grammar: wrong after `{first}`")),
        }
    }
    Ok(tokens)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// `:=` of `::=`.
fn defines(chars: &mut Peekable<Chars<'_>>) -> Option<EbnfToken> {
    (chars.next()? == ':' && chars.next()? == '=').then_some(EbnfToken::Defines)
}

/// The rest of `{2,3}`, with the braces.
fn repetition(chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    let mut written = String::from('{');
    while let Some(c) = chars.next_if(|c| c.is_ascii_digit() || matches!(c, ',' | ' ')) {
        written.push(c);
    }
    (chars.next()? == '}').then(|| written.replace(' ', "") + "}")
}

/// The rest of a literal.
fn text(chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    let mut text = String::new();
    while chars.next_if_eq(&'"').is_none() {
        text.push(character(chars)?);
    }
    Some(text)
}

/// The rest of a class, as a regular expression of one character.
fn class(chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    let mut class = String::from("/[");
    if chars.next_if_eq(&'^').is_some() {
        class.push('^');
    }
    let escaped = |c: char| format!("\\u{{{:X}}}", u32::from(c));
    let mut members = 0;
    while chars.next_if_eq(&']').is_none() {
        let low = character(chars)?;
        class += &escaped(low);
        members += 1;
        if chars.next_if_eq(&'-').is_some() {
            match chars.peek()? {
                ']' => class += &escaped('-'),
                _ => {
                    let high = character(chars).filter(|high| *high >= low)?;
                    class += &format!("-{}", escaped(high));
                }
            }
        }
    }
    (members > 0).then_some(class + "]/")
}

/// The next character, which may be escaped.
fn character(chars: &mut Peekable<Chars<'_>>) -> Option<char> {
    let plain = chars.next()?;
    if plain != '\\' {
        return Some(plain);
    }
    match chars.next()? {
        'n' => Some('\n'),
        'r' => Some('\r'),
        't' => Some('\t'),
        'x' => hex(chars, 2),
        'u' => hex(chars, 4),
        'U' => hex(chars, 8),
        other => Some(other),
    }
}

/// The character with a number of so many digits.
fn hex(chars: &mut Peekable<Chars<'_>>, digits: usize) -> Option<char> {
    let digits: String = chars.by_ref().take(digits).collect();
    u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)
}

/// A text as a literal of Lark: a JSON string, without a bare DEL.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_construct_has_its_form_in_lark() {
        let ebnf = "# a comment with ::=\nroot  ::= \"SELECT \" ( col | \"b\" )+ tail? \"\"\n  | root-2\n\
                    col::=[a-z\\-]{2, 3} | [^\"\\\\] .\ntail ::= \"\\x41\\u00e9\\\"\\n/\" [-x]* [a-]\nroot-2 ::= col{2}";
        let lark = "\nstart: \"SELECT \" ( r1 | \"b\" )+ r2? \"\" | r3\
                    \nr1: /[\\u{61}-\\u{7A}\\u{2D}]/{2,3} | /[^\\u{22}\\u{5C}]/ /(?s:.)/\
                    \nr2: \"Aé\\\"\\n/\" /[\\u{2D}\\u{78}]/* /[\\u{61}\\u{2D}]/\
                    \nr3: r1{2}";
        assert_eq!(to_lark(ebnf).as_deref(), Ok(lark));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (ebnf, words) in [
            ("a ::= \"x\"", "no rule `root`"),
            ("root ::= missing", "`missing` is not defined"),
            ("\"x\" root ::= \"y\"", "begins with the name"),
            ("root ::= ::= \"y\"", "follows the name"),
            ("root ::=\n \"y", "line 2"),
            ("root ::= [z-a]", "line 1"),
            ("root ::= []", "line 1"),
            ("root ::= [a", "line 1"),
            ("root ::= \"\\xZZ\"", "line 1"),
            ("root ::= \"a\"{x}", "line 1"),
            ("root := \"a\" ::=", "line 1"),
            ("root ::= <b>", "line 1"),
        ] {
            let error = to_lark(ebnf).expect_err(ebnf);
            assert!(error.contains(words), "{ebnf}: {error}");
        }
    }
}
