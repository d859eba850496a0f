//! The prefill leg and the decode leg: one attempt at one engine, and the interpretation of its response.

pub(crate) mod clock;
pub(crate) mod decode;
pub(crate) mod liveness;
pub(crate) mod prefill;
pub(crate) mod request_error;
pub(crate) mod retries;
pub(crate) mod settle;

mod engine_error;
mod refusal;

pub(crate) use refusal::{ErrorClass, Fault, Refusal, Verdict};

use crate::engines::http::{CallError, ContentCodingError, Engine};

/// Classifies a response that cannot be decoded: the client's error and the engine's fault.
pub(crate) fn classify_unreadable(engine: &Engine, error: ContentCodingError) -> (Refusal, Fault) {
    log_unreadable(engine, error);
    match error {
        ContentCodingError::TooMany => (Refusal::no_memory(), Fault::None),
        ContentCodingError::Unknown | ContentCodingError::Malformed => (Refusal::unreadable(), Fault::Engine),
    }
}

/// Whether a failed call is the engine's fault. The router's own limits are not.
pub(crate) fn fault_of(error: &CallError) -> Fault {
    match error {
        CallError::NotConnected
        | CallError::OutOfResources(_)
        | CallError::BudgetExhausted
        | CallError::Undecodable(ContentCodingError::TooMany) => Fault::None,
        CallError::Broken(_)
        | CallError::TooLarge(_)
        | CallError::Undecodable(ContentCodingError::Unknown | ContentCodingError::Malformed) => {
            Fault::Engine
        }
    }
}

/// Logs, rate-limited, why a response cannot be decoded. The client's error does not contain the reason.
fn log_unreadable(engine: &Engine, error: ContentCodingError) {
    if let Some(held_back) = engine.log_limiters.response_undecodable.allow() {
        let engine = engine.authority();
        tracing::warn!(
            event = "response_undecodable", engine, %error, held_back,
            "cannot decode the engine's response"
        );
    }
}

/// Logs, rate-limited, that an engine lacks an endpoint. The client's error does not name the engine.
pub(crate) fn log_unsupported_endpoint(engine: &Engine, refusal: &Refusal) {
    if refusal.is_unsupported_endpoint()
        && let Some(held_back) = engine.log_limiters.endpoint_unsupported.allow()
    {
        tracing::warn!(
            event = "endpoint_unsupported",
            engine = engine.authority(),
            held_back,
            "engine does not have the request's endpoint"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::http::ConnectionError;

    #[test]
    fn the_routers_own_bounds_are_no_fault_of_an_engine() {
        let own_limits = [
            CallError::BudgetExhausted,
            CallError::Undecodable(ContentCodingError::TooMany),
            CallError::NotConnected,
        ];
        assert!(own_limits.iter().all(|error| fault_of(error) == Fault::None));
        let engines = [
            CallError::TooLarge(1),
            CallError::Broken(ConnectionError::Unanswered),
            CallError::Undecodable(ContentCodingError::Malformed),
            CallError::Undecodable(ContentCodingError::Unknown),
        ];
        assert!(engines.iter().all(|error| fault_of(error) == Fault::Engine));
        let refused = Refusal::no_memory().0;
        assert_eq!(refused.status, 429);
        assert!(refused.retry_after.is_some());
    }
}
