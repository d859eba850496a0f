//! Why a request has no response from an engine.

use baton_openai::ApiError;

use super::Refusal;
use crate::client::session::ClientGone;

/// Why a request has no response from an engine.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// The client has disconnected.
    ClientGone,
    /// The client gets this error.
    Refused(Refusal),
}

impl RequestError {
    /// With another error for the client.
    pub(crate) fn map(self, change: impl FnOnce(ApiError) -> ApiError) -> Self {
        match self {
            Self::ClientGone => Self::ClientGone,
            Self::Refused(Refusal(error)) => Self::Refused(Refusal(change(error))),
        }
    }
}

impl From<ClientGone> for RequestError {
    fn from(ClientGone: ClientGone) -> Self {
        Self::ClientGone
    }
}

impl From<ApiError> for RequestError {
    fn from(error: ApiError) -> Self {
        Self::Refused(Refusal(error))
    }
}

impl From<Refusal> for RequestError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
