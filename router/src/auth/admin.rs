//! Access to the admin listener. On loopback all users of the machine have access, unless a token is configured.
//! Beyond loopback a request needs a client certificate or the token.
//!
//! A browser lets pages of any site send requests to loopback. Without a token the router refuses requests with an
//! `Origin`. It also refuses a `Host` that a site could have pointed at loopback (DNS rebinding).

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use arc_swap::ArcSwap;
use hyper::header::{HOST, HeaderMap, ORIGIN};
use hyper::http::uri::Authority;
use subtle::ConstantTimeEq;

use crate::auth::bearer;
use crate::config::file_watch::FileWatch;
use crate::config::read::first_line_of;
use crate::config::{AdminConfig, ConfigError};

/// Minimum length of a token, against guessing.
const TOKEN_BYTES_MIN: usize = 16;

/// Why an admin listener is not opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The listener would be open to all hosts that can reach it.
    #[error(
        "admin.listen {0} is beyond loopback: it needs admin.token_file, or admin.tls with `client_auth: require`"
    )]
    Open(SocketAddr),
    /// The token cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The token is too short.
    #[error("{file}: the admin token must have {TOKEN_BYTES_MIN} bytes at least", file = .0.display())]
    Short(PathBuf),
}

/// The credentials that the admin listener requires.
pub(crate) struct AdminAccess {
    token: Option<AdminToken>,
    /// Address of the listener. It stays the same until a restart, whatever a later configuration contains.
    listen: SocketAddr,
    /// Every connected client has shown a certificate.
    certificates: bool,
}

struct AdminToken {
    file: PathBuf,
    current: ArcSwap<String>,
    watch: FileWatch,
}

impl AdminAccess {
    /// # Errors
    /// [`AdminError`]: the listener must not be opened like that.
    pub(crate) fn new(config: &AdminConfig) -> Result<Self, AdminError> {
        Self::at(config.listen, config.asks_for_certificates(), config)
    }

    /// The access rules of the next configuration, for the listener as it is.
    ///
    /// # Errors
    /// [`AdminError`]: the configuration must not take effect.
    pub(crate) fn next(&self, config: &AdminConfig) -> Result<Self, AdminError> {
        Self::at(self.listen, self.certificates, config)
    }

    fn at(listen: SocketAddr, certificates: bool, config: &AdminConfig) -> Result<Self, AdminError> {
        if config.is_open(listen, certificates) {
            return Err(AdminError::Open(listen));
        }
        let token = config.token_file.clone().map(|file| {
            let watch = FileWatch::new(vec![file.clone()]);
            let current = ArcSwap::from_pointee(read(&file)?);
            Ok::<_, AdminError>(AdminToken { file, current, watch })
        });
        Ok(Self { token: token.transpose()?, listen, certificates })
    }

    /// Whether the request may be answered. `/health` and `/ready` need no token, because probes have none. `/top`
    /// needs none either: the page asks for the token and contains no data.
    pub(crate) fn allows(&self, path: &str, headers: &HeaderMap) -> bool {
        let Some(expected) = &self.token else { return true };
        let has_token = || {
            let expected = expected.current.load();
            bearer(headers).is_some_and(|token| token.as_bytes().ct_eq(expected.as_bytes()).into())
        };
        matches!(path, "/health" | "/ready" | "/top") || has_token()
    }

    /// The sign that a page in a browser sent the request, if there is one. A request needs no check where a token
    /// is configured, because no page has the token.
    pub(crate) fn browser_signs(&self, path: &str, headers: &HeaderMap) -> Option<&'static str> {
        if self.token.is_some() {
            return None;
        }
        let site = headers.get("sec-fetch-site").map(|site| site.as_bytes());
        if headers.contains_key(ORIGIN) || !matches!(site, None | Some(b"none" | b"same-origin")) {
            return Some("requests from web pages need `admin.token_file`");
        }
        // Probes use any host name, and their responses contain nothing else.
        let probe = matches!(path, "/health" | "/ready");
        let named = || headers.get_all(HOST).iter().any(|host| !is_local(host.as_bytes()));
        (self.listen.ip().is_loopback() && !probe && named())
            .then_some("`Host` must be localhost or an IP address where there is no `admin.token_file`")
    }

    /// Reads the token again if its file has changed. An invalid file leaves the old token in effect.
    pub(crate) fn refresh(&self) {
        let Some(token) = self.token.as_ref().filter(|token| token.watch.has_changed()) else { return };
        match read(&token.file) {
            Ok(new) => token.current.store(new.into()),
            Err(error) => tracing::error!(
                event = "admin_token_reload_failed", %error,
                "cannot reload the admin token, the old one stays in effect"
            ),
        }
    }
}

/// Whether this `Host` needs no name server.
fn is_local(host: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(host) else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let name = name.strip_suffix('.').unwrap_or(&name);
    name.parse::<IpAddr>().is_ok() || name == "localhost" || name.ends_with(".localhost")
}

fn read(file: &Path) -> Result<String, AdminError> {
    let token = first_line_of("admin.token_file", file)?.filter(|token| token.len() >= TOKEN_BYTES_MIN);
    token.ok_or_else(|| AdminError::Short(file.to_owned()))
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn cross_site_browser_requests_are_refused_without_a_token() {
        let access = AdminAccess::new(&AdminConfig::default()).expect("on loopback");
        let suspects = |access: &AdminAccess, path: &str, lines: &[(&'static str, &'static str)]| {
            let lines = lines.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v)));
            access.browser_signs(path, &lines.collect()).is_some()
        };
        for host in [
            "localhost",
            "LOCALHOST:8081",
            "localhost.:80",
            "a.localhost",
            "127.0.0.1:8081",
            "[::1]:8081",
            "10.0.0.1",
        ] {
            assert!(!suspects(&access, "/config", &[("host", host)]), "{host}");
        }
        for host in
            ["evil.test", "evil.test:8081", "127.0.0.1.evil.test", "localhost.evil.test", "x", "", "a b"]
        {
            assert!(suspects(&access, "/config", &[("host", host)]), "{host}");
            assert!(!suspects(&access, "/ready", &[("host", host)]), "{host}");
        }
        let page = [("host", "localhost"), ("origin", "https://evil.test")];
        assert!(suspects(&access, "/engines/a:1/drain", &page) && suspects(&access, "/ready", &page));
        for (site, page) in
            [("cross-site", true), ("same-site", true), ("none", false), ("same-origin", false)]
        {
            assert_eq!(suspects(&access, "/", &[("host", "localhost"), ("sec-fetch-site", site)]), page);
        }
        let beyond = AdminAccess { token: None, listen: ([10, 0, 0, 1], 1).into(), certificates: true };
        assert!(!suspects(&beyond, "/metrics", &[("host", "router.serving.svc")]));
        assert!(suspects(&beyond, "/metrics", &page));
    }
}
