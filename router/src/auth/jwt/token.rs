//! A token: its form, its claims, and what they grant. Pure, but for the clock of the crate that checks `exp`.
//!
//! The cheap checks come first. Nothing of an unverified token is used but to choose the issuer and the key.

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, AlgorithmFamily, Header, Validation};
use serde_json::{Map, Value};

use super::key_set::IssuerKey;
use super::token_error::TokenError;
use crate::config::{JwtAlgorithm, JwtConfig, Priority};

/// Maximum length of a token. Issuers with many groups write 4 to 8 KiB.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Bounds of `models_claim`, as of a key's `models`.
const MODELS_MAX: usize = 1024;
const MODEL_BYTES_MAX: usize = 256;
/// Maximum length of a tenant's name, as of a configured tenant.
const TENANT_BYTES_MAX: usize = 128;

/// The claims of a token.
pub(super) type Claims = Map<String, Value>;

/// Whether a credential is a token and no key: it has two dots.
pub(in crate::auth) fn is_token(credential: &str) -> bool {
    credential.bytes().filter(|&byte| byte == b'.').count() == 2
}

/// A token whose signature is not checked.
pub(super) struct UnverifiedToken<'a> {
    text: &'a str,
    header: Header,
    claims: Claims,
}

/// What a verified token grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub tenant: String,
    pub models: Option<Vec<String>>,
    pub priority_max: Priority,
    /// The end of the token, with the leeway, in seconds since 1970.
    pub until_s: u64,
}

impl<'a> UnverifiedToken<'a> {
    /// # Errors
    /// [`TokenError::Malformed`], or [`TokenError::Algorithm`] for a signature that every holder of a secret can make.
    pub(super) fn read(text: &'a str) -> Result<Self, TokenError> {
        if text.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::Malformed);
        }
        let header = jsonwebtoken::decode_header(text).map_err(|_| TokenError::Malformed)?;
        // Extensions that must be understood, and encrypted or compressed tokens.
        if header.crit.is_some() || header.enc.is_some() || header.zip.is_some() {
            return Err(TokenError::Malformed);
        }
        if header.alg.family() == AlgorithmFamily::Hmac {
            return Err(TokenError::Algorithm);
        }
        let claims =
            jsonwebtoken::dangerous::insecure_decode_claims(text).map_err(|_| TokenError::Malformed)?;
        Ok(Self { text, header, claims })
    }

    pub(super) fn key_id(&self) -> Option<&str> {
        self.header.kid.as_deref()
    }

    pub(super) fn algorithm(&self) -> Algorithm {
        self.header.alg
    }

    /// The index of the issuer's entry that accepts the token's audience and algorithm.
    ///
    /// # Errors
    /// [`TokenError`]: there is none.
    pub(super) fn entry<'c>(
        &self,
        entries: impl Iterator<Item = &'c JwtConfig>,
    ) -> Result<usize, TokenError> {
        let issuer = self.claims.get("iss").and_then(Value::as_str).ok_or(TokenError::Issuer)?;
        let mut error = TokenError::Issuer;
        for (at, entry) in entries.enumerate().filter(|(_, entry)| entry.issuer == issuer) {
            if !self.has_audience(&entry.audience) {
                error = TokenError::Audience;
            } else if entry.algorithms.iter().any(|own| algorithm(*own) == self.header.alg) {
                return Ok(at);
            } else {
                error = TokenError::Algorithm;
            }
        }
        Err(error)
    }

    fn has_audience(&self, audience: &str) -> bool {
        match self.claims.get("aud") {
            Some(Value::String(one)) => one == audience,
            Some(Value::Array(several)) => several.iter().any(|one| one.as_str() == Some(audience)),
            _ => false,
        }
    }

    /// Checks `exp`, which needs no key. A token that expires never becomes valid.
    ///
    /// # Errors
    /// [`TokenError::Expired`].
    pub(super) fn is_current(&self, leeway_s: u64, now_s: u64) -> Result<(), TokenError> {
        let expires = self.claims.get("exp").and_then(Value::as_f64).ok_or(TokenError::Claims)?;
        if expires + (leeway_s as f64) < now_s as f64 { Err(TokenError::Expired) } else { Ok(()) }
    }

    /// The least age of a token whose `iat` is true, in seconds; 0 without `iat`.
    pub(super) fn age_s(&self, leeway_s: u64, now_s: u64) -> u64 {
        let issued = self.claims.get("iat").and_then(Value::as_f64);
        // The conversion of a number out of range yields the nearest in range.
        issued.map_or(0, |issued| now_s.saturating_sub((issued.ceil() as u64).saturating_add(leeway_s)))
    }

    /// Checks signature and claims. It takes the time of a signature's check: 20 to 200 µs.
    ///
    /// # Errors
    /// [`TokenError`].
    pub(super) fn verify(&self, config: &JwtConfig, key: &IssuerKey) -> Result<Claims, TokenError> {
        let mut validation = Validation::new(self.header.alg);
        validation.leeway = config.leeway_s;
        validation.validate_nbf = true;
        validation.set_issuer(&[&config.issuer]);
        validation.set_audience(&[&config.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        let decoded = jsonwebtoken::decode(self.text, &key.decoding, &validation);
        decoded.map(|token| token.claims).map_err(|error| match error.kind() {
            ErrorKind::InvalidSignature => TokenError::Signature,
            ErrorKind::InvalidAlgorithm => TokenError::Algorithm,
            ErrorKind::ExpiredSignature => TokenError::Expired,
            ErrorKind::ImmatureSignature => TokenError::NotYetValid,
            ErrorKind::InvalidIssuer => TokenError::Issuer,
            ErrorKind::InvalidAudience => TokenError::Audience,
            ErrorKind::MissingRequiredClaim(_) | ErrorKind::InvalidClaimFormat(_) => TokenError::Claims,
            _ => TokenError::Malformed,
        })
    }
}

impl Grant {
    /// # Errors
    /// [`TokenError::Claims`]: a claim that the entry requires is missing or invalid.
    pub(super) fn read(claims: &Claims, config: &JwtConfig) -> Result<Self, TokenError> {
        let tenant = match (&config.tenant, &config.tenant_claim) {
            (Some(fixed), _) => fixed.clone(),
            (None, Some(claim)) => {
                let name = find(claims, claim).and_then(Value::as_str).ok_or(TokenError::Claims)?;
                let tenant = format!("{}{name}", config.tenant_prefix);
                let visible = name.bytes().all(|byte| byte.is_ascii_graphic());
                if name.is_empty() || !visible || tenant.len() > TENANT_BYTES_MAX {
                    return Err(TokenError::Claims);
                }
                tenant
            }
            (None, None) => return Err(TokenError::Claims),
        };
        let models = config.models_claim.as_ref().map(|claim| models(find(claims, claim)));
        let priority = config.priority_claim.as_ref().and_then(|claim| find(claims, claim));
        let priority_max = match priority {
            None => config.priority_max,
            Some(name) => name.as_str().and_then(Priority::named).ok_or(TokenError::Claims)?,
        };
        let expires = claims.get("exp").and_then(Value::as_f64).ok_or(TokenError::Claims)?;
        // The conversion of a number out of range yields the nearest in range.
        let until_s = (expires as u64).saturating_add(config.leeway_s);
        Ok(Self { tenant, models: models.transpose()?, priority_max, until_s })
    }
}

/// A claim by its name, or by a JSON pointer.
fn find<'a>(claims: &'a Claims, name: &str) -> Option<&'a Value> {
    let Some(path) = name.strip_prefix('/') else { return claims.get(name) };
    let (first, rest) = path.split_once('/').map_or((path, ""), |(first, _)| (first, &path[first.len()..]));
    claims.get(&first.replace("~1", "/").replace("~0", "~"))?.pointer(rest)
}

fn models(claim: Option<&Value>) -> Result<Vec<String>, TokenError> {
    let names: Vec<&str> = match claim {
        Some(Value::String(names)) => names.split(' ').filter(|name| !name.is_empty()).collect(),
        Some(Value::Array(names)) => {
            names.iter().map(Value::as_str).collect::<Option<_>>().ok_or(TokenError::Claims)?
        }
        _ => return Err(TokenError::Claims),
    };
    if names.len() > MODELS_MAX || names.iter().any(|name| name.is_empty() || name.len() > MODEL_BYTES_MAX) {
        return Err(TokenError::Claims);
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

fn algorithm(configured: JwtAlgorithm) -> Algorithm {
    match configured {
        JwtAlgorithm::RS256 => Algorithm::RS256,
        JwtAlgorithm::RS384 => Algorithm::RS384,
        JwtAlgorithm::RS512 => Algorithm::RS512,
        JwtAlgorithm::PS256 => Algorithm::PS256,
        JwtAlgorithm::PS384 => Algorithm::PS384,
        JwtAlgorithm::PS512 => Algorithm::PS512,
        JwtAlgorithm::ES256 => Algorithm::ES256,
        JwtAlgorithm::ES384 => Algorithm::ES384,
        JwtAlgorithm::EdDSA => Algorithm::EdDSA,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(more: &str) -> JwtConfig {
        let yaml = format!("{{issuer: 'https://i.test', audience: a, {more}}}");
        serde_saphyr::from_str(&yaml).expect("an entry")
    }

    fn grant(claims: Value, more: &str) -> Result<Grant, TokenError> {
        let Value::Object(mut claims) = claims else { panic!("an object") };
        claims.entry("exp").or_insert(json!(1000));
        Grant::read(&claims, &config(more))
    }

    #[test]
    fn a_tenant_is_a_short_visible_name() {
        let tenant = |value: Value, more: &str| grant(json!({"org": value}), more).map(|grant| grant.tenant);
        assert_eq!(tenant(json!("chat"), "tenant_claim: org"), Ok("chat".into()));
        assert_eq!(tenant(json!("chat"), "tenant_claim: org, tenant_prefix: 'i:'"), Ok("i:chat".into()));
        assert_eq!(tenant(json!({"a/b": ["x", "t"]}), "tenant_claim: /org/a~1b/1"), Ok("t".into()));
        assert_eq!(tenant(json!(7), "tenant: fixed"), Ok("fixed".into()));
        let long = "x".repeat(129);
        for wrong in [json!(""), json!("a b"), json!("a\nb"), json!("é"), json!(long), json!(7), json!(null)]
        {
            assert_eq!(tenant(wrong.clone(), "tenant_claim: org"), Err(TokenError::Claims), "{wrong}");
        }
        assert_eq!(tenant(json!("x"), "tenant_claim: other"), Err(TokenError::Claims));
        assert_eq!(tenant(json!("x"), "tenant_claim: /org/more"), Err(TokenError::Claims));
    }

    #[test]
    fn models_and_priority_are_granted_by_claims_only_where_configured() {
        let of = |claims: Value, more: &str| {
            grant(claims, &format!("tenant: t, {more}")).map(|grant| (grant.models, grant.priority_max))
        };
        let models = "models_claim: m";
        let two = Some(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(of(json!({"m": ["a", "b"]}), models), Ok((two.clone(), Priority::Normal)));
        assert_eq!(of(json!({"m": "a  b"}), models), Ok((two, Priority::Normal)));
        assert_eq!(of(json!({"m": []}), models), Ok((Some(vec![]), Priority::Normal)));
        assert_eq!(of(json!({"m": ["a"]}), ""), Ok((None, Priority::Normal)));
        for wrong in
            [json!({}), json!({"m": [1]}), json!({"m": [""]}), json!({"m": 1}), json!({"m": "x".repeat(257)})]
        {
            assert_eq!(of(wrong.clone(), models), Err(TokenError::Claims), "{wrong}");
        }
        let priority = "priority_claim: p, priority_max: low";
        assert_eq!(of(json!({"p": "HIGH"}), priority), Ok((None, Priority::High)));
        assert_eq!(of(json!({}), priority), Ok((None, Priority::Low)));
        assert_eq!(of(json!({"p": "x"}), priority), Err(TokenError::Claims));
    }

    #[test]
    fn a_credential_with_two_dots_is_a_token() {
        assert!(is_token("a.b.c") && is_token(".."));
        assert!(!is_token("sk-baton-0") && !is_token("a.b") && !is_token("a.b.c.d.e"));
    }

    #[test]
    fn malformed_tokens_are_refused_before_anything_is_verified() {
        // {"alg":"none"}, {"alg":"HS256"}, {"alg":"ES256","crit":["x"]}
        let (none, hmac) = ("eyJhbGciOiJub25lIn0", "eyJhbGciOiJIUzI1NiJ9");
        let critical = "eyJhbGciOiJFUzI1NiIsImNyaXQiOlsieCJdfQ";
        let error = |text: &str| UnverifiedToken::read(text).err();
        for text in
            ["..", "a.b.c", &format!("{none}.e30."), &format!("{critical}.e30.AA"), &"x.".repeat(9000)]
        {
            assert_eq!(error(text), Some(TokenError::Malformed), "{text}");
        }
        assert_eq!(error(&format!("{hmac}.e30.AA")), Some(TokenError::Algorithm));
        // {"alg":"ES256"} with claims that are no object.
        assert_eq!(error("eyJhbGciOiJFUzI1NiJ9.W10.AA"), Some(TokenError::Malformed));
    }
}
