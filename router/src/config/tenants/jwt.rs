//! `auth.jwt`: issuers of tokens (JWT, OpenID Connect).

use std::net::IpAddr;
use std::path::PathBuf;

use garde::Validate;
use hyper::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RateLimitsConfig;
use crate::config::limits::Priority;

/// An issuer of tokens that clients send instead of a key. A token is a JWT, signed with a key of the issuer.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct JwtConfig {
    /// A token's `iss`, compared exactly: `https://login.example.com/realms/ai`.
    #[garde(length(bytes, min = 1, max = 512), custom(is_visible))]
    pub issuer: String,
    /// A token's `aud` must be this, or contain it.
    #[garde(length(bytes, min = 1, max = 512))]
    pub audience: String,
    /// Address of the issuer's public keys (JWKS): `https://`, or `http://` on loopback. Default: the `jwks_uri`
    /// of `ISSUER/.well-known/openid-configuration`.
    #[serde(default)]
    #[garde(inner(custom(is_key_url)))]
    pub jwks_url: Option<String>,
    /// A file with the public keys (JWKS) instead. A changed file takes effect like a changed configuration.
    /// Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub jwks_file: Option<PathBuf>,
    /// Roots of the certificate at these addresses, in PEM. Default: the system's.
    #[serde(default)]
    #[garde(skip)]
    pub ca_file: Option<PathBuf>,
    /// The claim that names a token's tenant. If it begins with `/`, it is a JSON pointer: `/org/team`. A name has
    /// 1 to 128 visible ASCII characters; other tokens are refused. Either this or `tenant` is required.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 256)))]
    pub tenant_claim: Option<String>,
    /// The tenant of all tokens of this issuer.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 128)))]
    pub tenant: Option<String>,
    /// Precedes the names that `tenant_claim` yields, so that two issuers cannot name one tenant. Default: none.
    #[serde(default)]
    #[garde(length(bytes, max = 64), custom(is_visible))]
    pub tenant_prefix: String,
    /// The claim with the models that a token may use: a list, or a text with spaces between names. With this key a
    /// token without the claim is refused. Default: all models.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 256)))]
    pub models_claim: Option<String>,
    /// The claim with the highest priority of a token's requests: `high`, `normal` or `low`. Default: none.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 256)))]
    pub priority_claim: Option<String>,
    /// Highest priority of tokens without `priority_claim`. Default `normal`.
    #[serde(default)]
    #[garde(skip)]
    pub priority_max: Priority,
    /// Accepted algorithms. The algorithm must also be that of the key. Default: all.
    #[serde(default = "all_algorithms")]
    #[garde(length(min = 1, max = 9))]
    pub algorithms: Vec<JwtAlgorithm>,
    /// Tolerance for `exp` and `nbf`, in seconds. 0 to 300; default 30.
    #[serde(default = "default_leeway_s")]
    #[garde(range(max = 300))]
    pub leeway_s: u64,
    /// Interval of fetches of the keys, in seconds. An unknown key id causes a fetch at most every 10 s. 10 to
    /// 86,400; default 600.
    #[serde(default = "default_refresh_s")]
    #[garde(range(min = 10, max = 86_400))]
    pub refresh_s: u64,
    /// Time for which keys are used after the last successful fetch, in seconds. Afterwards tokens are refused with
    /// 503. 60 to 604,800; default 86,400.
    #[serde(default = "default_stale_s")]
    #[garde(range(min = 60, max = 604_800))]
    pub stale_s: u64,
    /// Limits of each tenant that a token names and `auth.tenants` does not list. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub limits: RateLimitsConfig,
}

/// An algorithm of signatures with a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[allow(missing_docs, reason = "the names are those of RFC 7518 and RFC 8037")]
pub enum JwtAlgorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl JwtConfig {
    /// The address of the issuer's OpenID configuration.
    #[must_use]
    pub fn discovery_url(&self) -> String {
        format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'))
    }

    /// Contradictions between the keys of one issuer: the key and its problem.
    pub(crate) fn contradictions(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        if self.tenant.is_some() == self.tenant_claim.is_some() {
            found.push(("tenant", "exactly one of `tenant` and `tenant_claim` is required".to_owned()));
        }
        if self.jwks_url.is_some() && self.jwks_file.is_some() {
            found.push(("jwks_file", "conflicts with `jwks_url`; set one of them".to_owned()));
        }
        let discovers = self.jwks_url.is_none() && self.jwks_file.is_none();
        if discovers && let Err(problem) = key_url(&self.discovery_url()) {
            found.push(("issuer", format!("{problem}; or set `jwks_url` or `jwks_file`")));
        }
        if self.stale_s < self.refresh_s {
            found.push(("stale_s", "must not be shorter than `refresh_s`".to_owned()));
        }
        found
    }
}

/// Parses an address of keys.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn key_url(text: &str) -> Result<Uri, String> {
    let wrong = || format!("`{}` must be https://HOST/PATH, or http:// on loopback", shortened(text));
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(wrong()) };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let is_loopback =
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let allowed = scheme == "https" || (scheme == "http" && is_loopback);
    if !allowed || authority.as_str().contains('@') || text.len() > 2048 { Err(wrong()) } else { Ok(uri) }
}

fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(128)]
}

fn is_key_url(text: &str, _: &()) -> garde::Result {
    key_url(text).map(drop).map_err(garde::Error::new)
}

fn is_visible(text: &str, _: &()) -> garde::Result {
    let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
    visible.then_some(()).ok_or_else(|| garde::Error::new("must be visible ASCII characters"))
}

fn all_algorithms() -> Vec<JwtAlgorithm> {
    use JwtAlgorithm::{ES256, ES384, EdDSA, PS256, PS384, PS512, RS256, RS384, RS512};
    vec![RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, EdDSA]
}

fn default_leeway_s() -> u64 {
    30
}

fn default_refresh_s() -> u64 {
    600
}

fn default_stale_s() -> u64 {
    86_400
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_over_tls_or_from_the_same_host() {
        for good in
            ["https://a.test/keys", "https://a.test:8443/", "http://127.0.0.1:1/k", "http://[::1]:1/k"]
        {
            assert!(key_url(good).is_ok(), "{good}");
        }
        for bad in [
            "http://a.test/keys",
            "http://127.0.0.1.evil.test/",
            "ftp://a/",
            "https://u:p@a/",
            "https://",
            "/keys",
            "a",
            "",
        ] {
            assert!(key_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_tenant_is_fixed_or_a_claim() {
        let problems = |more: &str| {
            let yaml = format!("{{issuer: 'https://i.test', audience: a, {more}}}");
            let config: JwtConfig = serde_saphyr::from_str(&yaml).expect("a shape");
            config.contradictions().into_iter().map(|(key, _)| key).collect::<Vec<_>>()
        };
        assert_eq!(problems("tenant: t"), Vec::<&str>::new());
        assert_eq!(problems("tenant_claim: t"), Vec::<&str>::new());
        assert_eq!(problems("tenant: t, tenant_claim: t"), ["tenant"]);
        assert_eq!(problems("refresh_s: 100, stale_s: 60"), ["tenant", "stale_s"]);
        assert_eq!(problems("tenant: t, jwks_url: 'https://a/', jwks_file: f"), ["jwks_file"]);
    }
}
