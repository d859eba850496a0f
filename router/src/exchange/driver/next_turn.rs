//! Bidirectional KV: a decode engine keeps the blocks of its response, and the prefill engine of the conversation's next
//! turn reads them.
//!
//! ```text
//! turn 1: P ─▶ D: response with transfer parameters ─▶ kept with the tokens of prompt and response
//! turn 2: the prompt begins with exactly these tokens ─▶ P gets the parameters, reads D's blocks, and D frees them
//! no turn 2 in time, or the router ends ─▶ a prefill engine refuses a request with the parameters, and D frees them
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_openai::Endpoint;
use bytes::Bytes;
use hyper::header::HeaderValue;

use super::ExchangeDriver;
use crate::engines::caches::kept_turns::{KeptTurn, TurnOwner};
use crate::exchange::client_request::ClientRequest;
use crate::legs::settle::TurnRelease;
use crate::message::handoff_params::with_prompt_ids;
use crate::message::path::Dialect;
use crate::message::turn::TurnRecorder;
use crate::metrics::KeptTurnEnd;
use crate::state::shared::{Shared, TurnClaim};

/// Records one response.
pub(super) struct TurnRecording {
    recorder: TurnRecorder,
    owner: TurnOwner,
    authorization: Option<HeaderValue>,
}

impl ExchangeDriver {
    /// Begins to record the response of a request whose decode engine may keep its blocks.
    pub(crate) fn record_turn(&mut self, request: &ClientRequest) {
        self.prefill.next_turn = request.turn_owner().map(|owner| {
            let keeps_ids = request.body.field("return_token_ids") == Some(b"true");
            let authorization = request.authorization.clone();
            Box::new(TurnRecording { recorder: TurnRecorder::new(keeps_ids), owner, authorization })
        });
    }

    /// Records a whole reply and returns the client's.
    pub(crate) fn record_reply(&mut self, reply: Bytes) -> Bytes {
        match &mut self.prefill.next_turn {
            Some(recording) => recording.recorder.read_whole(reply),
            None => reply,
        }
    }

    /// Records whole frames of a stream and returns the client's.
    pub(crate) fn record_frames(&mut self, frames: Bytes) -> Bytes {
        match &mut self.prefill.next_turn {
            Some(recording) => recording.recorder.read_frames(&frames),
            None => frames,
        }
    }

    /// Keeps the turn of a completed response.
    pub(super) fn keep_turn(&mut self) {
        let Some(recording) = self.prefill.next_turn.take() else { return };
        let TurnRecording { recorder, owner, authorization } = *recording;
        let (Some(turn), Some(within)) = (recorder.finish(), self.model.handoff.keep_turns) else { return };
        let release = TurnClaim { request: self.settlement.request.clone(), authorization };
        let turn = KeptTurn { owner, tokens: turn.tokens, params: turn.params, release };
        self.shared.keep_turn(turn, within);
    }

    /// The transfer parameters of the kept turn that begins the request's prompt.
    pub(super) fn take_turn(&self, request: &ClientRequest) -> Option<String> {
        // Other ids may differ from those that the engine computes.
        let (owner, prompt) = (request.turn_owner()?, request.prompt_ids().filter(|prompt| prompt.exact)?);
        let params = self.shared.take_turn(&owner, &prompt.ids)?;
        // Of a chat the engine computes these tokens, whatever its template makes of the messages.
        let is_chat = request.dialect == Dialect::OpenAi(Endpoint::Chat);
        let given = is_chat.then(|| with_prompt_ids(&params, &prompt.ids)).flatten();
        Some(given.unwrap_or(params))
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

    fn take_turn(&self, owner: &TurnOwner, prompt: &[u32]) -> Option<String> {
        let mut turns = self.kept_turns.lock();
        let turn = turns.take(owner, prompt, Instant::now())?;
        self.metrics.legs.kept_turns.set(turns.len() as f64);
        self.metrics.legs.count_kept_turn(KeptTurnEnd::Used);
        Some(turn.params)
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
