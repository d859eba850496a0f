//! The terms of the shared limits, with what their files contain.

use std::time::Duration;

use crate::auth::AuthError;
use crate::config::{OnStoreFailure, SharedLimitsConfig, StoreAddress};
use crate::tls::service::ServiceTls;

/// The terms of the shared limits.
pub(in crate::auth) struct SharedLimitsTerms {
    config: SharedLimitsConfig,
    pub(super) address: StoreAddress,
    pub(super) password: Option<String>,
    pub(super) tls: Option<ServiceTls>,
    pub(super) timeout: Duration,
    pub(super) prefix: String,
    pub(super) on_failure: OnStoreFailure,
}

impl SharedLimitsTerms {
    /// # Errors
    /// [`AuthError`] names the invalid file.
    pub(in crate::auth) fn read(config: &SharedLimitsConfig) -> Result<Self, AuthError> {
        let address = config.address().ok_or(AuthError::StoreAddress)?;
        let file = config.password_file.as_ref();
        let password =
            file.map(|file| crate::config::read::first_line_of("auth.shared_limits.password_file", file));
        let tls = address.is_tls.then(|| ServiceTls::new(config.ca_file.as_deref())).transpose()?;
        Ok(Self {
            config: config.clone(),
            address,
            password: password.transpose()?.flatten(),
            tls,
            timeout: Duration::from_millis(config.timeout_ms),
            prefix: config.prefix.clone(),
            on_failure: config.on_failure,
        })
    }

    /// Whether a connection with these terms serves the other ones. Root certificates may have changed in their
    /// file, so a connection with TLS is made again.
    pub(super) fn fit(&self, other: &Self) -> bool {
        self.config == other.config && self.password == other.password && self.config.ca_file.is_none()
    }
}
