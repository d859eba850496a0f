//! The grammar of one sequence: its state, and the mask of its next token.
//!
//! ```text
//!  Ready ── a token, more are permitted ──▶ Computing ── the mask has arrived ──▶ Ready
//!    └───── the text is complete ─────────▶ Over            └ a limit ──▶ Failed
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use baton_openai::FinishReason;
use llguidance::Matcher;
use llguidance::toktrie::TokTrie;

use super::STATES_MAX;
use crate::sampling::TokenMask;

/// Why a text cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarFault {
    /// No token continues the text, or the next mask exceeds the work or the memory of one grammar.
    DeadEnd,
    /// Other fields of the request exclude every token that continues the text.
    Excluded,
    /// The threads have ended.
    Stopped,
}

impl GrammarFault {
    /// The message for the client.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::DeadEnd => "it permits no further token here, or is too complex",
            Self::Excluded => "other fields of the request exclude every token that it permits here",
            Self::Stopped => "the engine is shutting down",
        }
    }
}

/// Whether the mask of the next token is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskReadiness {
    /// It is.
    Ready,
    /// It is being computed.
    Late,
    /// There will be none.
    Failed(GrammarFault),
}

/// The tokens that a grammar permits next, without those that end the sequence for other reasons.
#[derive(Clone)]
pub(super) struct RawMask {
    pub(super) mask: TokenMask,
    /// Whether the text so far is complete.
    accepting: bool,
}

impl RawMask {
    /// The mask of a grammar, for a row of this length.
    pub(super) fn of(matcher: &mut Matcher, rows: usize) -> Result<Self, String> {
        let permitted = matcher.compute_mask().map_err(|error| error.to_string())?;
        let accepting = matcher.is_accepting().map_err(|error| error.to_string())?;
        let mut mask = TokenMask::new(permitted.as_slice().to_vec());
        let beyond = permitted.as_slice().len() * 32;
        (rows..beyond).for_each(|id| mask.set(id as u32, false));
        Ok(Self { mask, accepting })
    }

    /// The mask after a complete text.
    pub(super) fn complete(rows: usize) -> Self {
        Self { mask: TokenMask::new(vec![0; rows.div_ceil(32)]), accepting: true }
    }

    /// Permits tokens that end the sequence exactly when the text is complete. A grammar that needs such a token for
    /// its text gets it.
    pub(super) fn with_stops(self, stops: &[u32]) -> TokenMask {
        let mut mask = self.mask.clone();
        stops.iter().for_each(|stop| mask.set(*stop, self.accepting));
        if mask.is_empty() { self.mask } else { mask }
    }
}

/// Counts one state until it is dropped.
pub(super) struct StatePermit(Arc<AtomicUsize>);

impl StatePermit {
    /// Permits for so many states: all or none.
    pub(super) fn take(live: &Arc<AtomicUsize>, count: usize) -> Option<Vec<Self>> {
        let more = |now: usize| now.checked_add(count).filter(|sum| *sum <= STATES_MAX);
        live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some((0..count).map(|_| Self(Arc::clone(live))).collect())
    }
}

impl Drop for StatePermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A grammar after some tokens.
pub(super) struct GrammarCursor {
    pub(super) matcher: Matcher,
    pub(super) stops: Arc<[u32]>,
    pub(super) _permit: StatePermit,
}

/// A grammar, and the mask of its next token.
pub(super) struct MaskedCursor {
    cursor: Box<GrammarCursor>,
    mask: TokenMask,
    /// Whether the text so far is complete.
    accepting: bool,
}

impl MaskedCursor {
    fn new(cursor: Box<GrammarCursor>, raw: RawMask) -> Self {
        let accepting = raw.accepting;
        Self { mask: raw.with_stops(&cursor.stops), cursor, accepting }
    }
}

/// A grammar whose next mask is wanted.
pub(super) struct MaskOrder {
    cursor: Box<GrammarCursor>,
    reply: SyncSender<Result<MaskedCursor, GrammarFault>>,
}

impl MaskOrder {
    /// Computes the mask. A sequence that has left needs no answer.
    pub(super) fn carry_out(self, rows: usize) {
        let Self { mut cursor, reply } = self;
        let computed = RawMask::of(&mut cursor.matcher, rows);
        let masked = computed.ok().map(|raw| MaskedCursor::new(cursor, raw));
        let masked = masked.filter(|masked| !masked.mask.is_empty()).ok_or(GrammarFault::DeadEnd);
        let _ = reply.send(masked);
    }
}

enum MaskProgress {
    Ready(MaskedCursor),
    Computing(Receiver<Result<MaskedCursor, GrammarFault>>),
    Over,
    Failed(GrammarFault),
}

/// See the module's documentation.
pub struct GrammarState {
    progress: MaskProgress,
    masks: SyncSender<MaskOrder>,
}

impl std::fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let progress = match &self.progress {
            MaskProgress::Ready(_) => "Ready",
            MaskProgress::Computing(_) => "Computing",
            MaskProgress::Over => "Over",
            MaskProgress::Failed(_) => "Failed",
        };
        f.debug_struct("GrammarState").field("progress", &progress).finish_non_exhaustive()
    }
}

impl GrammarState {
    /// A grammar before its first token.
    pub(super) fn new(cursor: GrammarCursor, first: RawMask, masks: SyncSender<MaskOrder>) -> Self {
        Self { progress: MaskProgress::Ready(MaskedCursor::new(Box::new(cursor), first)), masks }
    }

    /// Waits for the mask of the next token, at most this long.
    pub fn wait(&mut self, at_most: Duration) -> MaskReadiness {
        if let MaskProgress::Computing(arriving) = &self.progress {
            self.progress = match arriving.recv_timeout(at_most) {
                Ok(Ok(masked)) => MaskProgress::Ready(masked),
                Ok(Err(fault)) => MaskProgress::Failed(fault),
                Err(RecvTimeoutError::Timeout) => return MaskReadiness::Late,
                Err(RecvTimeoutError::Disconnected) => MaskProgress::Failed(GrammarFault::Stopped),
            };
        }
        match self.progress {
            MaskProgress::Ready(_) | MaskProgress::Over => MaskReadiness::Ready,
            MaskProgress::Failed(fault) => MaskReadiness::Failed(fault),
            MaskProgress::Computing(_) => MaskReadiness::Late,
        }
    }

    /// The mask of the next token, if it is there.
    #[must_use]
    pub fn mask(&self) -> Option<&TokenMask> {
        match &self.progress {
            MaskProgress::Ready(masked) => Some(&masked.mask),
            MaskProgress::Computing(_) | MaskProgress::Over | MaskProgress::Failed(_) => None,
        }
    }

    /// Whether the text so far is complete, as far as it is known.
    #[must_use]
    pub fn is_accepting(&self) -> bool {
        match &self.progress {
            MaskProgress::Ready(masked) => masked.accepting,
            MaskProgress::Over => true,
            MaskProgress::Computing(_) | MaskProgress::Failed(_) => false,
        }
    }

    /// Adds a token of which the scheduler reports `ended`. Returns why the sequence ends, if it does: a complete text
    /// ends with `stop`, also at the last permitted token.
    pub fn end_after(&mut self, token: u32, ended: Option<FinishReason>) -> Option<FinishReason> {
        if ended == Some(FinishReason::Stop) {
            return ended;
        }
        self.advance(&[token], ended)
    }

    /// Begins with a text that follows a marker in the same token. Whitespace there belongs to the marker, also for the
    /// parser of the response ([`OutputParser::skip_spaces`]).
    ///
    /// [`OutputParser::skip_spaces`]: crate::model::output::OutputParser::skip_spaces
    pub(super) fn begin(&mut self, text: &[u8], ended: Option<FinishReason>) -> Option<FinishReason> {
        let text = text.trim_ascii_start();
        let MaskProgress::Ready(masked) = &mut self.progress else { return ended };
        if text.is_empty() {
            return ended;
        }
        let matcher = &mut masked.cursor.matcher;
        let tokens = matcher.tok_env().map(|env| tokens_of(env.tok_trie(), text)).unwrap_or_default();
        let valid = matcher.validate_tokens(&tokens).unwrap_or(0);
        if valid > 0 && valid == tokens.len() {
            return self.advance(&tokens, ended);
        }
        self.progress = MaskProgress::Failed(GrammarFault::DeadEnd);
        ended
    }

    fn advance(&mut self, tokens: &[u32], ended: Option<FinishReason>) -> Option<FinishReason> {
        let MaskProgress::Ready(MaskedCursor { mut cursor, .. }) =
            std::mem::replace(&mut self.progress, MaskProgress::Over)
        else {
            self.progress = MaskProgress::Failed(GrammarFault::Stopped);
            return ended;
        };
        if cursor.matcher.consume_tokens(tokens).is_err() {
            self.progress = MaskProgress::Failed(GrammarFault::DeadEnd);
            return ended;
        }
        if cursor.matcher.is_stopped() {
            return Some(FinishReason::Stop);
        }
        if ended.is_none() {
            let (reply, arriving) = sync_channel(1);
            self.progress = match self.masks.try_send(MaskOrder { cursor, reply }) {
                Ok(()) => MaskProgress::Computing(arriving),
                Err(_) => MaskProgress::Failed(GrammarFault::Stopped),
            };
        }
        ended
    }
}

/// Any tokens with these bytes; none if there are none.
fn tokens_of(trie: &TokTrie, text: &[u8]) -> Vec<u32> {
    let tokens = trie.greedy_tokenize(text);
    // It leaves out bytes without a token.
    let bytes: usize = tokens.iter().map(|token| trie.token(*token).len()).sum();
    if bytes == text.len() { tokens } else { Vec::new() }
}
