//! Conditional decode: the decode engine gets the request before any prefill engine, and serves it if it has cached
//! enough of the prompt. If it has not, it generates nothing, and the legs follow as usual.

use std::sync::Arc;

use baton_connector::exchange::{Event, SettlementCause};

use super::decode::{DecodeOutcome, DecodeRequest, HandoffAfterError};
use super::selection::EngineSelection;
use super::{DecodeResponse, ExchangeDriver};
use crate::client::session::{ClientGone, Session};
use crate::engines::protocol::{LegInput, Link};
use crate::exchange::client_request::ClientRequest;
use crate::legs::ErrorClass;
use crate::legs::decode::PlainBody;
use crate::legs::request_error::RequestError;
use crate::message::path::Dialect;
use crate::metrics::Leg;
use crate::metrics::routing::DisaggregationReason;

impl ExchangeDriver {
    /// The response of the reserved decode engine, if it has cached enough of the prompt. `None`: the legs follow, with
    /// an engine reserved again.
    ///
    /// # Errors
    /// The engine refused the request, or the client has disconnected.
    pub(crate) async fn decode_conditionally(
        &mut self,
        session: &mut Session,
        request: &ClientRequest,
    ) -> Result<Option<DecodeResponse>, RequestError> {
        let threshold = request.model.disaggregate.cache_hit_threshold;
        let is_openai = matches!(request.dialect, Dialect::OpenAi(_));
        let Some(share) = threshold.filter(|_| is_openai && self.would_disaggregate(request).is_some())
        else {
            return Ok(None);
        };
        // A prefill engine is chosen for the decode engine of the next attempt.
        self.selection.reserved_prefill = None;
        let Some(reservation) = self.selection.reserved.take() else { return Ok(None) };
        let engine = Arc::clone(reservation.engine());
        let (protocol, id) = (self.protocol, self.settlement.request.clone());
        let fields = request.owned.clone().with_cache_hit_threshold(share);
        let plain = fields.without_usage();
        let leg = LegInput { fields: &fields, ..request.leg_input(&id) };
        let body = protocol.decode_body(&leg, Link::None);
        let plain_body = || protocol.decode_body(&LegInput { fields: &plain, ..leg }, Link::None);
        let mut decode_request = DecodeRequest {
            request: self.engine_request(request, Leg::Decode, body),
            plain_body: fields.asks_for_usage().then_some(&plain_body as PlainBody<'_>),
            after_error: HandoffAfterError::Usable,
            is_conditional: true,
        };
        self.apply(Event::PrefillSkipped);
        let tried = match self.attempt_decode(session, request, reservation, &mut decode_request).await? {
            DecodeOutcome::Accepted(response) => {
                self.shared.metrics.routing.count_disaggregation(DisaggregationReason::DecodedFirst);
                return Ok(Some(response));
            }
            DecodeOutcome::Refused(refusal) => return Err(RequestError::Refused(refusal)),
            DecodeOutcome::Failed { class: ErrorClass::PrefixMissing, .. } => Vec::new(),
            DecodeOutcome::Failed { refusal, reached, .. } => {
                // The legs that follow are a retry.
                if !self.take_retry(session, Leg::Decode, 1).await? {
                    let unreached = SettlementCause::DecodeUnreachable;
                    let cause = if reached { SettlementCause::DecodeFailed } else { unreached };
                    self.apply(Event::ExhaustedFor(cause));
                    return Err(RequestError::Refused(refusal));
                }
                vec![engine]
            }
        };
        match self.select_decode(session, request, &tried).await {
            Ok(EngineSelection::Engine(reserved)) => self.selection.reserved = Some(reserved),
            // The decode leg selects again.
            Ok(EngineSelection::Unavailable(_)) => {}
            Ok(EngineSelection::Busy(busy)) => {
                self.apply(Event::NotAdmitted);
                return Err(busy.into());
            }
            Err(ClientGone) => return Err(self.cancel()),
        }
        Ok(None)
    }
}
