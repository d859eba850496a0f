//! How an engine is asked for the token ids of a prompt, and what its answers show. Pure.
//!
//! | prompt | forms, the best first |
//! |---|---|
//! | chat | `/v1/chat/completions/render`, `/tokenize` |
//! | text | `/tokenize` |
//! | Messages | `/v1/messages/render`, `/tokenize` with the chat that they are translated to |
//! | Responses | `/v1/responses/render` |
//!
//! vLLM answers 403 at a render path without `--enable-scale-out`, and its Rust front end 501. A missing form is tried
//! again after a minute, because another version may start at the same address. After several failures in a row an engine
//! is not asked for a while, which doubles with each further failure. A late answer about a long body shows that the
//! body is long, so it is no failure: other requests of the model still get their ids.

use std::time::{Duration, Instant};

/// How long a form counts as missing.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Failures in a row after which an engine is not asked, and for how long.
const FAILURES_MAX: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause is 64 times [`PAUSE`].
const DOUBLINGS_MAX: u32 = 6;
/// Bodies up to this size are answered in time by any engine that is not stuck: about 4,000 tokens, or 10 ms.
const SHORT_BYTES: usize = 16 << 10;

/// The kind of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromptKind {
    Chat,
    Text,
    Messages,
    Responses,
}

/// A request for token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenForm {
    RenderChat,
    RenderMessages,
    RenderResponses,
    TokenizeChat,
    TokenizeText,
    TokenizeMessages,
}

impl PromptKind {
    fn forms(self) -> &'static [TokenForm] {
        match self {
            Self::Chat => &[TokenForm::RenderChat, TokenForm::TokenizeChat],
            Self::Text => &[TokenForm::TokenizeText],
            Self::Messages => &[TokenForm::RenderMessages, TokenForm::TokenizeMessages],
            Self::Responses => &[TokenForm::RenderResponses],
        }
    }
}

impl TokenForm {
    const COUNT: usize = 6;

    pub(super) fn path(self) -> &'static str {
        match self {
            Self::RenderChat => "/v1/chat/completions/render",
            Self::RenderMessages => "/v1/messages/render",
            Self::RenderResponses => "/v1/responses/render",
            Self::TokenizeChat | Self::TokenizeText | Self::TokenizeMessages => "/tokenize",
        }
    }

    /// Whether the engine renders the request itself, so that the ids are those of the request.
    pub(super) fn renders(self) -> bool {
        matches!(self, Self::RenderChat | Self::RenderMessages | Self::RenderResponses)
    }
}

/// What an engine's answer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormOutcome {
    Answered,
    /// The engine lacks the form.
    Missing,
    /// The request is at fault.
    Refused,
    /// The engine failed, or sent nonsense.
    Failed,
    /// No answer in time.
    Late,
}

impl FormOutcome {
    /// The outcome of an answer that is not 2xx.
    pub(super) fn of_status(status: u16) -> Self {
        match status {
            403 | 404 | 405 | 501 => Self::Missing,
            // A full engine is asked later.
            408 | 429 | 500.. => Self::Failed,
            _ => Self::Refused,
        }
    }
}

/// Why an engine is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoForm {
    Missing,
    Paused,
}

/// What is known of one engine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineForms {
    /// Until when each form counts as missing.
    missing: [Option<Instant>; TokenForm::COUNT],
    /// The longest body that was answered in time. A late answer about a shorter one lowers it.
    answered_bytes: usize,
    row: FormFailures,
    /// Late answers about bodies longer than any that was answered in time, and the shortest of them.
    long: FormFailures,
    long_bytes: usize,
}

/// Failures in a row, and the pause after them.
#[derive(Clone, Copy, Debug, Default)]
struct FormFailures {
    failures: u32,
    paused_until: Option<Instant>,
}

impl FormFailures {
    fn add(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if let Some(further) = self.failures.checked_sub(FAILURES_MAX) {
            self.paused_until = now.checked_add(PAUSE * (1 << further.min(DOUBLINGS_MAX)));
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }
}

impl EngineForms {
    /// The best form that the engine may have, for a body of `bytes`.
    pub(super) fn best(&self, kind: PromptKind, bytes: usize, now: Instant) -> Result<TokenForm, NoForm> {
        let is_long = bytes >= self.long_bytes;
        if self.row.is_paused(now) || is_long && self.long.is_paused(now) {
            return Err(NoForm::Paused);
        }
        let is_missing = |form: TokenForm| self.missing[form as usize].is_some_and(|until| now < until);
        kind.forms().iter().copied().find(|form| !is_missing(*form)).ok_or(NoForm::Missing)
    }

    /// Applies what an answer about a body of `bytes` shows.
    pub(super) fn record(&mut self, form: TokenForm, outcome: FormOutcome, bytes: usize, now: Instant) {
        match outcome {
            FormOutcome::Missing => self.missing[form as usize] = now.checked_add(RECHECK_INTERVAL),
            FormOutcome::Answered => {
                self.missing[form as usize] = None;
                self.row = FormFailures::default();
                self.answered_bytes = self.answered_bytes.max(bytes);
                if bytes >= self.long_bytes {
                    self.long = FormFailures::default();
                }
            }
            FormOutcome::Refused => {}
            FormOutcome::Failed => self.row.add(now),
            FormOutcome::Late if bytes > self.answered_bytes.max(SHORT_BYTES) => {
                let shortest = if self.long.failures == 0 { bytes } else { self.long_bytes.min(bytes) };
                self.long_bytes = shortest;
                self.long.add(now);
            }
            FormOutcome::Late => {
                self.answered_bytes = self.answered_bytes.min(bytes / 2);
                self.row.add(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_form_is_used_while_a_better_one_is_missing() {
        let (mut engine, now) = (EngineForms::default(), Instant::now());
        assert_eq!(engine.best(PromptKind::Chat, 1, now), Ok(TokenForm::RenderChat));
        for status in [403, 404, 405, 501] {
            assert_eq!(FormOutcome::of_status(status), FormOutcome::Missing);
        }
        engine.record(TokenForm::RenderChat, FormOutcome::Missing, 1, now);
        assert_eq!(engine.best(PromptKind::Chat, 1, now), Ok(TokenForm::TokenizeChat));
        engine.record(TokenForm::TokenizeChat, FormOutcome::Missing, 1, now);
        assert_eq!(engine.best(PromptKind::Chat, 1, now), Err(NoForm::Missing));
        assert_eq!(engine.best(PromptKind::Text, 1, now), Ok(TokenForm::TokenizeText), "a form of its own");
        assert_eq!(engine.best(PromptKind::Messages, 1, now), Ok(TokenForm::RenderMessages));
        let later = now + RECHECK_INTERVAL;
        assert_eq!(engine.best(PromptKind::Chat, 1, later), Ok(TokenForm::RenderChat), "tried again");
    }

    #[test]
    fn an_engine_that_fails_repeatedly_is_not_asked_for_a_while() {
        let (mut engine, mut now) = (EngineForms::default(), Instant::now());
        let form = TokenForm::TokenizeText;
        let is_asked = |engine: &EngineForms, now| engine.best(PromptKind::Text, 1, now).is_ok();
        for _ in 1..FAILURES_MAX {
            engine.record(form, FormOutcome::Failed, 1, now);
            assert!(is_asked(&engine, now));
        }
        // Refusals show nothing.
        engine.record(form, FormOutcome::of_status(400), 1, now);
        for doubling in 0..10 {
            engine.record(form, FormOutcome::Failed, 1, now);
            let pause = PAUSE * (1 << doubling.min(DOUBLINGS_MAX));
            assert_eq!(engine.best(PromptKind::Text, 1, now), Err(NoForm::Paused));
            assert!(!is_asked(&engine, now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(is_asked(&engine, now));
        }
        engine.record(form, FormOutcome::Answered, 1, now);
        engine.record(form, FormOutcome::of_status(503), 1, now);
        assert!(is_asked(&engine, now), "an answer ends the row");
    }

    #[test]
    fn late_answers_about_long_bodies_do_not_stop_the_questions_about_others() {
        let (form, now) = (TokenForm::TokenizeText, Instant::now());
        let is_asked = |engine: &EngineForms| engine.best(PromptKind::Text, 1, now).is_ok();
        let mut engine = EngineForms::default();
        let late = |engine: &mut EngineForms, bytes, times| {
            (0..times).for_each(|_| engine.record(form, FormOutcome::Late, bytes, now));
        };
        // No body of this length was ever answered in time.
        late(&mut engine, SHORT_BYTES + 1, 100);
        assert_eq!(engine.row.failures, 0);
        // One was, and under load the same length is late: it counts once.
        engine.record(form, FormOutcome::Answered, 200_000, now);
        late(&mut engine, 200_001, 100);
        assert_eq!(engine.row.failures, 0);
        late(&mut engine, 180_000, 100);
        assert_eq!(engine.row.failures, 1);
        assert!(is_asked(&engine));
        // Long bodies have a pause of their own.
        assert_eq!(engine.best(PromptKind::Text, 200_001, now), Err(NoForm::Paused));
        assert_eq!(engine.best(PromptKind::Text, SHORT_BYTES, now), Ok(form));
        let later = now + PAUSE * (1 << DOUBLINGS_MAX);
        assert_eq!(engine.best(PromptKind::Text, 200_001, later), Ok(form));
        engine.record(form, FormOutcome::Answered, 300_000, now);
        assert_eq!(engine.best(PromptKind::Text, 300_000, now), Ok(form));
        late(&mut engine, 180_000, 1);
        // A short body shows that the engine is stuck.
        late(&mut engine, SHORT_BYTES, 2);
        assert!(!is_asked(&engine));
    }
}
