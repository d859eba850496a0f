//! Bidirectional KV: a decode engine keeps the blocks of its response, and the prefill engine of the conversation's next
//! turn reads them.
//!
//! ```text
//! turn 1: P ─▶ D: response with transfer parameters ─▶ kept with the tokens of prompt and response
//! turn 2: the prompt begins with exactly these tokens ─▶ P gets the parameters, reads D's blocks, and D frees them
//! no turn 2 in time, or the router ends ─▶ a prefill engine refuses a request with the parameters, and D frees them
//! ```
//!
//! A release while a prefill engine reads would free blocks that are being read. So a turn whose read has an unknown end
//! is released only after the time of a kept turn. Blocks whose tokens are unknown are released at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_connector::exchange::Failure;
use baton_openai::Endpoint;
use bytes::Bytes;
use hyper::header::HeaderValue;

use super::ExchangeDriver;
use crate::engines::caches::kept_turns::{KeptTurn, TurnOwner};
use crate::engines::http::Engine;
use crate::engines::protocol::ProtocolKind;
use crate::exchange::client_request::ClientRequest;
use crate::legs::Fault;
use crate::legs::prefill::PrefillResult;
use crate::legs::settle::TurnRelease;
use crate::message::handoff_params::with_prompt_ids;
use crate::message::path::Dialect;
use crate::message::turn::{EndedTurn, KeptBlocks, TurnRecorder};
use crate::metrics::KeptTurnEnd;
use crate::state::shared::{Shared, TurnClaim};

/// How long a turn is kept for its release if the model no longer keeps turns.
const SPENT_FOR: Duration = Duration::from_secs(60);

/// Records one response.
pub(super) struct TurnRecording {
    recorder: TurnRecorder,
    /// `None` if no request may read the blocks.
    owner: Option<TurnOwner>,
    tenant: u64,
    authorization: Option<HeaderValue>,
}

impl ExchangeDriver {
    /// Begins to record the response of a request whose decode engine may keep its blocks.
    pub(crate) fn record_turn(&mut self, request: &ClientRequest) {
        let records = self.model.handoff.keep_turns.is_some() && request.dialect.generates();
        self.prefill.next_turn = records.then(|| {
            let keeps_ids = request.body.field("return_token_ids") == Some(b"true");
            let authorization = request.authorization.clone();
            let owner = request.turn_owner();
            let (recorder, tenant) = (TurnRecorder::new(keeps_ids), request.tenant_hash());
            Box::new(TurnRecording { recorder, owner, tenant, authorization })
        });
    }

    /// Records a whole reply and returns the client's.
    pub(crate) fn record_reply(&mut self, reply: Bytes) -> Bytes {
        match &mut self.prefill.next_turn {
            Some(recording) if recording.owner.is_some() => recording.recorder.read_whole(reply),
            Some(recording) => {
                recording.recorder.read_params(&reply);
                reply
            }
            None => reply,
        }
    }

    /// Records whole frames of a stream and returns the client's.
    pub(crate) fn record_frames(&mut self, frames: Bytes) -> Bytes {
        match &mut self.prefill.next_turn {
            Some(recording) if recording.owner.is_some() => recording.recorder.read_frames(&frames),
            Some(_) | None => {
                self.record_params(&frames);
                frames
            }
        }
    }

    /// Records the parameters in frames whose tokens another reader needs.
    pub(crate) fn record_params(&mut self, frames: &[u8]) {
        if let Some(recording) = &mut self.prefill.next_turn {
            recording.recorder.read_params(frames);
        }
    }

    /// Keeps the turn of a completed response, or releases its blocks.
    pub(super) fn keep_turn(&mut self) {
        let Some(recording) = self.prefill.next_turn.take() else { return };
        let TurnRecording { recorder, owner, tenant, authorization } = *recording;
        let (Some(blocks), Some(within)) = (recorder.finish(), self.model.handoff.keep_turns) else { return };
        let request = self.settlement.request.clone();
        match (blocks, owner) {
            (KeptBlocks::Turn(EndedTurn { tokens, params, engine }), Some(owner)) => {
                let release = TurnClaim { request, authorization };
                self.shared.keep_turn(KeptTurn { owner, tenant, tokens, params, engine, release }, within);
            }
            (KeptBlocks::Turn(EndedTurn { params, .. }) | KeptBlocks::Unknown(params), _) => {
                self.shared.metrics.legs.count_kept_turn(KeptTurnEnd::Unknown);
                let model = Arc::clone(&self.model);
                self.shared.settler.release_turn(TurnRelease { model, params, request, authorization });
            }
        }
    }

    /// Logs once per model that a learned protocol keeps no turns. With a configured one the configuration is refused.
    pub(super) fn warn_of_unkept_turns(&self, engine: &Engine) {
        let handoff = &self.model.handoff;
        if handoff.keep_turns.is_some()
            && engine.known_protocol() == Some(ProtocolKind::Sglang)
            && !handoff.has_warned_of_turns.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                event = "turns_not_kept",
                model = self.model.name,
                "bidirectional_kv has no effect, SGLang keeps no blocks for a next turn"
            );
        }
    }

    /// The transfer parameters of the kept turn that begins the request's prompt. The request owes its release.
    pub(super) fn take_turn(&mut self, request: &ClientRequest) -> Option<String> {
        // Other ids may differ from those that the engine computes.
        let (owner, prompt) = (request.turn_owner()?, request.prompt_ids().filter(|prompt| prompt.exact)?);
        let turn = self.prefill.turn.insert(Box::new(self.shared.take_turn(&owner, &prompt.ids)?));
        // Of a chat the engine computes these tokens, whatever its template makes of the messages.
        let is_chat = request.dialect == Dialect::OpenAi(Endpoint::Chat);
        let given = is_chat.then(|| with_prompt_ids(&turn.params, &prompt.ids)).flatten();
        Some(given.unwrap_or_else(|| turn.params.clone()))
    }

    /// An attempt at a prefill engine has ended.
    pub(super) fn end_turn(&mut self, engine: &Arc<Engine>, result: &PrefillResult) {
        match result {
            PrefillResult::Leased(..) | PrefillResult::NoLease => {
                if self.prefill.turn.take().is_some() {
                    self.shared.metrics.legs.count_kept_turn(KeptTurnEnd::Used);
                } else if let Some((reader, owner)) = self.prefill.unread.take()
                    && Arc::ptr_eq(&reader, engine)
                {
                    // The same engine computes the prompt: the engine that kept the blocks is at fault.
                    self.shared.kept_turns.lock().spend_engine(&owner);
                }
            }
            // The request has not begun at the engine.
            PrefillResult::Refused(_)
            | PrefillResult::Failed(Failure::NotReached, ..)
            | PrefillResult::Failed(Failure::Answered, _, Fault::None | Fault::Draining) => {
                let unread = self.prefill.turn.take().map(|turn| *turn);
                self.shared.release_turns(unread.into_iter().collect(), KeptTurnEnd::Unread);
            }
            PrefillResult::Failed(..) => self.suspect_turn(engine),
        }
    }

    /// The engine may have failed because it could not read the kept blocks.
    pub(super) fn suspect_turn(&mut self, engine: &Arc<Engine>) {
        if let Some(turn) = &self.prefill.turn {
            self.prefill.unread = Some((Arc::clone(engine), turn.engine.clone()));
        }
    }

    /// An attempt has failed or the client has left, and a prefill engine may still read the kept blocks.
    pub(super) fn leave_turn(&mut self) {
        if let Some(turn) = self.prefill.turn.take() {
            self.shared.spend_turn(*turn, self.model.handoff.keep_turns.unwrap_or(SPENT_FOR));
        }
    }
}

impl Shared {
    fn keep_turn(&self, turn: KeptTurn<TurnClaim>, within: Duration) {
        let mut turns = self.kept_turns.lock();
        let ended = turns.add(turn, within, Instant::now());
        self.metrics.legs.kept_turns.set(turns.len() as f64);
        drop(turns);
        self.release_turns(ended, KeptTurnEnd::Evicted);
    }

    fn take_turn(&self, owner: &TurnOwner, prompt: &[u32]) -> Option<KeptTurn<TurnClaim>> {
        let mut turns = self.kept_turns.lock();
        let turn = turns.take(owner, prompt, Instant::now())?;
        self.metrics.legs.kept_turns.set(turns.len() as f64);
        Some(turn)
    }

    /// Keeps a turn that may still be read, for its release.
    fn spend_turn(&self, turn: KeptTurn<TurnClaim>, within: Duration) {
        let mut turns = self.kept_turns.lock();
        let ended = turns.add_spent(turn, within, Instant::now());
        self.metrics.legs.kept_turns.set(turns.len() as f64);
        drop(turns);
        self.release_turns(ended, KeptTurnEnd::Evicted);
    }

    /// Releases the turns whose time has passed.
    pub(crate) fn expire_turns(&self) {
        let mut turns = self.kept_turns.lock();
        let ended = turns.expire(Instant::now());
        self.metrics.legs.kept_turns.set(turns.len() as f64);
        drop(turns);
        self.release_turns(ended, KeptTurnEnd::Expired);
    }

    /// Releases all turns, because the router ends.
    pub(crate) fn release_all_turns(&self) {
        let all = self.kept_turns.lock().clear();
        self.release_turns(all, KeptTurnEnd::Shutdown);
    }

    fn release_turns(&self, turns: Vec<KeptTurn<TurnClaim>>, end: KeptTurnEnd) {
        if turns.is_empty() {
            return;
        }
        let generation = self.generation();
        for KeptTurn { owner, params, release, .. } in turns {
            self.metrics.legs.count_kept_turn(end);
            // The engines of a model that is no longer configured end its turns themselves.
            let Ok(model) = generation.models.named(Some(&owner.model)) else { continue };
            let TurnClaim { request, authorization } = release;
            let model = Arc::clone(model);
            self.settler.release_turn(TurnRelease { model, params, request, authorization });
        }
    }
}
