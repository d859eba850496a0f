//! Checks during the walk that the large fields of a request have the usual shape.
//!
//! Each check accepts no more than its counterpart in [`crate::request`], and everything that clients usually send.
//! Other input is in doubt, and the counterpart decides. So the two cannot disagree on a body as long as this side
//! accepts less. A test with generated bodies verifies that.

use crate::limits::{ParseLimits, Scope};
use crate::request::{Endpoint, ROLES, TOOL_CALLS_MAX};
use crate::sanitize::decoded;
use crate::scan::Scanner;

/// The shape check of one body.
pub(crate) struct ShapeCheck<'l> {
    endpoint: Option<Endpoint>,
    limits: &'l ParseLimits,
    /// Number of prompts, after their field.
    prompts: Option<usize>,
    doubt: bool,
}

impl<'l> ShapeCheck<'l> {
    pub(crate) fn of(endpoint: Option<Endpoint>, limits: &'l ParseLimits) -> Self {
        Self { endpoint, limits, prompts: None, doubt: false }
    }

    /// Number of prompts in the body; `None` in doubt.
    pub(crate) fn prompts(&self) -> Option<usize> {
        self.prompts.filter(|_| !self.doubt)
    }

    /// Walks the value of a top-level field.
    pub(crate) fn walk(&mut self, scanner: &mut Scanner<'_>, name: &str) -> Option<()> {
        let limits = self.limits;
        let mut count = 0;
        let sure = match (self.endpoint, name) {
            (Some(Endpoint::Completions), "prompt") => {
                scanner.attempt(|scanner| prompt(scanner, limits).map(|prompts| count = prompts))?
            }
            (Some(Endpoint::Chat), "messages") => {
                count = 1;
                scanner.attempt(|scanner| messages(scanner, limits))?
            }
            (Some(Endpoint::Chat), "tools" | "documents") => {
                scanner.attempt(|scanner| objects(scanner, limits))?
            }
            (Some(Endpoint::Chat), "chat_template_kwargs") => {
                scanner.attempt(|scanner| scanner.object(|scanner, _| scanner.value()))?
            }
            _ => return scanner.value(),
        };
        if count > 0 {
            self.prompts = Some(count);
        }
        // The parser decides which value of a duplicate name counts.
        self.doubt |= !sure || scanner.ambiguous;
        Some(())
    }
}

fn objects(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<()> {
    scanner.array(|scanner, index| {
        (index < limits.tools).then_some(())?;
        scanner.object(|scanner, _| scanner.value())
    })
}

fn messages(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<()> {
    let mut count = 0;
    scanner.array(|scanner, index| {
        count = index + 1;
        (count <= limits.messages).then_some(())?;
        message(scanner, limits)
    })?;
    (count > 0).then_some(())
}

fn message(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<()> {
    let (mut role, mut has_content) = (None, false);
    scanner.object(|scanner, name| {
        match scanner.slice(name) {
            "role" => {
                let text = scanner.string()?;
                role = Some(scanner.slice(text));
            }
            "content" => match scanner.peek()? {
                b'n' => scanner.word("null")?,
                b'[' => {
                    scanner.array(|scanner, _| part(scanner, limits))?;
                    has_content = true;
                }
                _ => {
                    scanner.string()?;
                    has_content = true;
                }
            },
            "tool_calls" if scanner.peek() == Some(b'n') => scanner.word("null")?,
            "tool_calls" => scanner.array(|scanner, index| {
                (index < limits.scope.most(TOOL_CALLS_MAX)).then_some(())?;
                tool_call(scanner)
            })?,
            _ => scanner.value()?,
        }
        Some(())
    })?;
    let any = limits.scope == Scope::AnyEngine;
    let role = role.filter(|role| any || ROLES.contains(role))?;
    (has_content || role == "assistant").then_some(())
}

/// A part of a message's content: a text, or an object with a text.
fn part(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<()> {
    if scanner.peek()? == b'"' {
        return scanner.string().map(drop);
    }
    let (mut kind, mut text, mut refusal) = (None, false, false);
    scanner.object(|scanner, name| {
        let is_string = scanner.peek()? == b'"';
        match scanner.slice(name) {
            "type" => {
                let text = scanner.string()?;
                kind = Some(scanner.slice(text));
                return Some(());
            }
            "text" => text = is_string,
            "refusal" => refusal = is_string,
            _ => {}
        }
        scanner.value()
    })?;
    match (kind?, text, refusal) {
        ("text", true, _) | ("refusal", _, true) => Some(()),
        ("text" | "refusal", ..) => None,
        _ => (limits.scope == Scope::AnyEngine).then_some(()),
    }
}

fn tool_call(scanner: &mut Scanner<'_>) -> Option<()> {
    let mut good = false;
    scanner.object(|scanner, name| match scanner.slice(name) {
        "function" => {
            good = function(scanner)?;
            Some(())
        }
        _ => scanner.value(),
    })?;
    good.then_some(())
}

/// Whether the function has a name. Its arguments must be an object, or an object in a string.
fn function(scanner: &mut Scanner<'_>) -> Option<bool> {
    let mut named = false;
    scanner.object(|scanner, name| {
        match scanner.slice(name) {
            "name" => {
                scanner.string()?;
                named = true;
            }
            "arguments" => match scanner.peek()? {
                b'n' => scanner.word("null")?,
                b'{' => scanner.object(|scanner, _| scanner.value())?,
                _ => {
                    let written = scanner.string()?;
                    let text = decoded(scanner, written)?;
                    (text.trim().is_empty() || is_object(&text)).then_some(())?;
                }
            },
            _ => scanner.value()?,
        }
        Some(())
    })?;
    Some(named)
}

fn is_object(text: &str) -> bool {
    let mut scanner = Scanner::new(text, &());
    scanner.space();
    let object = scanner.object(|scanner, _| scanner.value());
    scanner.space();
    object.is_some() && scanner.peek().is_none()
}

/// The number of prompts.
fn prompt(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<usize> {
    if scanner.peek()? == b'"' {
        return text(scanner).map(|()| 1);
    }
    let (mut texts_or_lists, mut ids) = (0, 0);
    scanner.array(|scanner, _| match scanner.peek()? {
        b'"' => {
            texts_or_lists += 1;
            text(scanner)
        }
        b'[' => {
            texts_or_lists += 1;
            let mut count = 0;
            scanner.array(|scanner, index| {
                count = index + 1;
                token(scanner, limits)
            })?;
            (1..=limits.prompt_tokens).contains(&count).then_some(())
        }
        _ => {
            ids += 1;
            token(scanner, limits)
        }
    })?;
    match (texts_or_lists, ids) {
        (prompts, 0) if (1..=limits.prompts).contains(&prompts) => Some(prompts),
        (0, ids) if (1..=limits.prompt_tokens).contains(&ids) => Some(1),
        _ => None,
    }
}

fn text(scanner: &mut Scanner<'_>) -> Option<()> {
    let text = scanner.string()?;
    (text.end > text.start).then_some(())
}

fn token(scanner: &mut Scanner<'_>, limits: &ParseLimits) -> Option<()> {
    let most = limits.vocab.map_or(i32::MAX as u32, |vocab| vocab.saturating_sub(1));
    let start = scanner.offset();
    scanner.number()?.then_some(())?;
    let digits = &scanner.text()[start..scanner.offset()];
    (digits.parse::<u32>().ok()? <= most).then_some(())
}
