//! The cluster's secret of a sidecar: which engines get it, and its value, which is read again while the sidecar runs.
//!
//! Invariant: an engine that a request names gets the secret only if an allow-list admits it. Options without a list are
//! refused.

use std::io::{Error, ErrorKind};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use hyper::header::HeaderValue;

use crate::config::ConfigError;
use crate::config::read::first_line_of;
use crate::state::generation::{GenerationError, secret_header};

const FLAG: &str = "--cluster-secret-file";
/// Bytes of a secret, as in the configuration of a router.
const BYTES: RangeInclusive<usize> = 16..=512;

/// The file of the secret, and the engines that get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SecretOptions {
    pub file: PathBuf,
    pub for_prefill: bool,
    pub for_decode: bool,
}

/// The secret in use.
pub(super) struct ClusterSecret {
    pub options: SecretOptions,
    current: ArcSwap<HeaderValue>,
}

impl ClusterSecret {
    /// # Errors
    /// The file is unreadable, or its first line is no secret.
    pub(super) fn read(options: SecretOptions) -> Result<Self, GenerationError> {
        let current = ArcSwap::from_pointee(read(&options.file)?);
        Ok(Self { options, current })
    }

    /// The value of the header.
    pub(super) fn value(&self) -> HeaderValue {
        HeaderValue::clone(&self.current.load())
    }

    /// Reads the file again. Returns whether the secret has changed.
    ///
    /// # Errors
    /// As [`Self::read`]; the secret stays.
    pub(super) fn refresh(&self) -> Result<bool, GenerationError> {
        let next = read(&self.options.file)?;
        let has_changed = next != self.value();
        if has_changed {
            self.current.store(Arc::new(next));
        }
        Ok(has_changed)
    }
}

fn read(file: &Path) -> Result<HeaderValue, GenerationError> {
    let text = first_line_of(FLAG, file)?.filter(|text| BYTES.contains(&text.len()));
    let text = text.ok_or_else(|| ConfigError::Unreadable {
        name: format!("{FLAG}: {}", file.display()),
        source: Error::new(ErrorKind::InvalidData, "the first line must have 16 to 512 bytes"),
    })?;
    secret_header(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_replaces_the_secret_and_an_unusable_one_does_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("secret");
        let write = |text: &str| std::fs::write(&file, text).expect("written");
        let options = SecretOptions { file: file.clone(), for_prefill: true, for_decode: false };
        assert!(ClusterSecret::read(options.clone()).is_err(), "no file");
        write("too short\n");
        let Err(error) = ClusterSecret::read(options.clone()) else { panic!("a short secret") };
        assert!(error.to_string().starts_with("--cluster-secret-file: "), "{error}");
        write("0123456789abcdef\nrest\n");
        let secret = ClusterSecret::read(options).expect("a secret");
        assert_eq!(secret.value(), "0123456789abcdef");
        assert!(secret.value().is_sensitive(), "logs do not show it");
        assert!(!secret.refresh().expect("readable"));
        write("fedcba9876543210\n");
        assert!(secret.refresh().expect("readable"));
        assert_eq!(secret.value(), "fedcba9876543210");
        write("short\n");
        assert!(secret.refresh().is_err());
        std::fs::remove_file(&file).expect("removed");
        assert!(secret.refresh().is_err());
        assert_eq!(secret.value(), "fedcba9876543210");
    }
}
