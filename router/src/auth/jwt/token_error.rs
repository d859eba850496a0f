//! Why a token is refused, and how that is counted. Pure.

use crate::metrics::tenants::UnauthorizedReason;

/// Why a token is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenError {
    Malformed,
    Issuer,
    Audience,
    Algorithm,
    KeyId,
    Signature,
    Expired,
    NotYetValid,
    Claims,
}

impl TokenError {
    pub(super) fn reason(self) -> UnauthorizedReason {
        match self {
            Self::Malformed => UnauthorizedReason::TokenMalformed,
            Self::Issuer => UnauthorizedReason::TokenIssuer,
            Self::Audience => UnauthorizedReason::TokenAudience,
            Self::Algorithm => UnauthorizedReason::TokenAlgorithm,
            Self::KeyId => UnauthorizedReason::TokenKeyId,
            Self::Signature => UnauthorizedReason::TokenSignature,
            Self::Expired => UnauthorizedReason::TokenExpired,
            Self::NotYetValid => UnauthorizedReason::TokenNotYetValid,
            Self::Claims => UnauthorizedReason::TokenClaims,
        }
    }
}
