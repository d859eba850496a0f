//! Who may use the admin listener: on loopback whoever is on this machine, unless a token is asked for; beyond it
//! only who shows a certificate or the token.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use arc_swap::ArcSwap;
use hyper::header::HeaderMap;

use crate::config::{AdminConfig, ClientAuth, ConfigError, first_line_of};
use crate::file_watch::FileWatch;
use crate::tenants::{bearer, same};

/// A shorter token could be guessed.
const TOKEN_BYTES_MIN: usize = 16;

/// Why an admin listener is not opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Everybody who can reach it could use it.
    #[error(
        "admin.listen {0} is beyond loopback: it needs admin.token_file, or admin.tls with `client_auth: require`"
    )]
    Open(SocketAddr),
    /// The token cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The token could be guessed.
    #[error("{file}: the admin token must have {TOKEN_BYTES_MIN} bytes at least", file = .0.display())]
    Short(PathBuf),
}

/// What is asked of people and monitors.
pub(crate) struct Access {
    token: Option<Token>,
    /// Where the listener is, whatever a later configuration says: it stays there until a restart.
    listen: SocketAddr,
    /// Everybody who is connected has shown a certificate.
    certificates: bool,
}

struct Token {
    file: PathBuf,
    current: ArcSwap<String>,
    watch: FileWatch,
}

impl Access {
    /// # Errors
    /// [`AdminError`]: the listener must not be opened like that.
    pub(crate) fn new(config: &AdminConfig) -> Result<Self, AdminError> {
        let certificates = config.tls.as_ref().is_some_and(|tls| tls.client_auth == ClientAuth::Require);
        Self::at(config.listen, certificates, config)
    }

    /// What the next configuration asks of those who come to the listener as it is.
    ///
    /// # Errors
    /// [`AdminError`]: the configuration must not take effect.
    pub(crate) fn next(&self, config: &AdminConfig) -> Result<Self, AdminError> {
        Self::at(self.listen, self.certificates, config)
    }

    fn at(listen: SocketAddr, certificates: bool, config: &AdminConfig) -> Result<Self, AdminError> {
        if !listen.ip().is_loopback() && config.token_file.is_none() && !certificates {
            return Err(AdminError::Open(listen));
        }
        let token = config.token_file.clone().map(|file| {
            let watch = FileWatch::new(vec![file.clone()]);
            let current = ArcSwap::from_pointee(read(&file)?);
            Ok::<_, AdminError>(Token { file, current, watch })
        });
        Ok(Self { token: token.transpose()?, listen, certificates })
    }

    /// Whether the request may be answered. Whether the router lives is told to everybody: probes bring no token.
    pub(crate) fn allows(&self, path: &str, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let shown =
            || bearer(headers).is_some_and(|shown| same(shown.as_bytes(), token.current.load().as_bytes()));
        matches!(path, "/health" | "/ready") || shown()
    }

    /// Reads the token again if its file has changed; one that cannot be used leaves the old one in effect.
    pub(crate) fn refresh(&self) {
        let Some(token) = self.token.as_ref().filter(|token| token.watch.has_changed()) else { return };
        match read(&token.file) {
            Ok(new) => token.current.store(new.into()),
            Err(error) => {
                tracing::error!(%error, "the admin token cannot be read again; the old one stays in effect")
            }
        }
    }
}

fn read(file: &Path) -> Result<String, AdminError> {
    let token = first_line_of(file)?.filter(|token| token.len() >= TOKEN_BYTES_MIN);
    token.ok_or_else(|| AdminError::Short(file.to_owned()))
}
