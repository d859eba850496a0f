//! The `auth` part and the keys file: API keys, client certificates, issuers of tokens, tenants, and their limits.

pub(crate) mod jwt;
pub(crate) mod shared_limits;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::LazyLock;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use time::macros::format_description;
use time::{Date, PrimitiveDateTime};

use super::limits::Priority;
use jwt::JwtConfig;
use shared_limits::SharedLimitsConfig;

/// Clients that may use the router. With this part every request needs a key, a token of an issuer listed here, or
/// a client certificate listed here.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AuthConfig {
    /// A file with further `keys`, `certificates` and `tenants`, in addition to those here. Read again when
    /// it changes; an invalid file leaves the old entries in effect. Default: none.
    #[garde(skip)]
    pub keys_file: Option<PathBuf>,
    /// API keys, by their hashes. `baton key new` makes one. At most 100,000. Default: none.
    #[garde(length(max = 100_000), dive)]
    pub keys: Vec<KeyConfig>,
    /// Clients identified by their certificate (`listen_tls.client_auth`). At most 10,000. Default: none.
    #[garde(length(max = 10_000), dive)]
    pub certificates: Vec<CertificateConfig>,
    /// Tenants with limits, or with a share other than 1. Other tenants need no entry. At most 10,000.
    /// Default: none.
    #[garde(length(max = 10_000), dive)]
    pub tenants: Vec<TenantConfig>,
    /// Issuers of tokens (JWT, OpenID Connect). With an issuer, a credential with two dots is a token, and any other
    /// one a key. At most 16. Default: none.
    #[garde(length(max = 16), dive)]
    pub jwt: Vec<JwtConfig>,
    /// A server through which several routers share the limits of keys and tenants. Default: each router has its
    /// own limits.
    #[garde(dive)]
    pub shared_limits: Option<SharedLimitsConfig>,
    /// A file whose first line is the secret from which each tenant's `cache_salt` is derived. Use the same
    /// for all routers in front of the same engines. Default: derived from the cluster secret. Without that,
    /// each start makes a new one, and prefix caches start empty.
    #[garde(skip)]
    pub cache_salt_file: Option<PathBuf>,
}

/// What a keys file holds.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct KeysFile {
    /// As `auth.keys`.
    #[garde(length(max = 100_000), dive)]
    pub keys: Vec<KeyConfig>,
    /// As `auth.certificates`.
    #[garde(length(max = 10_000), dive)]
    pub certificates: Vec<CertificateConfig>,
    /// As `auth.tenants`.
    #[garde(length(max = 10_000), dive)]
    pub tenants: Vec<TenantConfig>,
}

/// An API key.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct KeyConfig {
    /// Name of the key in logs and limits; unique and not secret.
    #[garde(length(bytes, min = 1, max = 128))]
    pub id: String,
    /// `sha256:` and the SHA-256 of the key in 64 hexadecimal digits. Hashes of common words are refused.
    #[garde(custom(is_hash))]
    pub hash: String,
    /// Tenant of the key.
    #[garde(length(bytes, min = 1, max = 128))]
    pub tenant: String,
    /// Highest priority that its requests may have. Default `normal`.
    #[serde(default)]
    #[garde(skip)]
    pub priority_max: Priority,
    /// The models it may use, by name or alias. Default: all.
    #[serde(default)]
    #[garde(inner(length(max = 1024), inner(length(bytes, min = 1, max = 256))))]
    pub models: Option<Vec<String>>,
    /// Its limits, in addition to its tenant's. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub limits: RateLimitsConfig,
    /// Time from which it is refused: `2027-01-31` or `2027-01-31T12:00:00Z`. Default: never.
    #[serde(default)]
    #[garde(inner(custom(is_moment)))]
    pub expires: Option<String>,
}

/// A client identified by its certificate.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct CertificateConfig {
    /// A name in the certificate, compared exactly; unique. It is a DNS name or URI (SPIFFE) of the subject
    /// alternative names. If there is neither, it is the subject's common name.
    #[garde(length(bytes, min = 1, max = 512))]
    pub name: String,
    /// Tenant of the certificate.
    #[garde(length(bytes, min = 1, max = 128))]
    pub tenant: String,
    /// As for a key. Default `normal`.
    #[serde(default)]
    #[garde(skip)]
    pub priority_max: Priority,
    /// As for a key. Default: all.
    #[serde(default)]
    #[garde(inner(length(max = 1024), inner(length(bytes, min = 1, max = 256))))]
    pub models: Option<Vec<String>>,
    /// As for a key. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub limits: RateLimitsConfig,
}

/// A tenant. Its requests share a queue, limits and a prefix cache.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// The name that keys use; unique.
    #[garde(length(bytes, min = 1, max = 128))]
    pub name: String,
    /// Share of the queue, relative to the other tenants of the same priority. 1 to 1,000; default 1.
    #[serde(default = "one")]
    #[garde(range(min = 1, max = 1000))]
    pub weight: u32,
    /// Its limits, for all its keys together. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub limits: RateLimitsConfig,
}

/// Limits of rates and of concurrency. By default there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct RateLimitsConfig {
    /// Requests per minute, as a bucket that holds one minute's worth. 1 to 1,000,000,000; default: no bound.
    #[garde(inner(range(min = 1_u64, max = 1_000_000_000_u64)))]
    #[schemars(range(min = 1_u64, max = 1_000_000_000_u64))]
    pub requests_per_minute: Option<u64>,
    /// Tokens per minute, as a bucket: those of the prompt, and the most that the request may generate. Four
    /// bytes of text are one token, an image is 1,024. Further tokens in `usage` are charged when the
    /// response ends. 1 to 1,000,000,000,000; default: no bound.
    #[garde(inner(range(min = 1_u64, max = 1_000_000_000_000_u64)))]
    #[schemars(range(min = 1_u64, max = 1_000_000_000_000_u64))]
    pub tokens_per_minute: Option<u64>,
    /// Concurrent requests. 1 to 1,000,000; default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub concurrent_requests: Option<u32>,
}

impl KeyConfig {
    /// The 32 bytes of [`Self::hash`]. `None` if the text is not a hash, which validation excludes.
    #[must_use]
    pub fn digest(&self) -> Option<[u8; 32]> {
        digest(&self.hash)
    }

    /// When the key expires, in seconds since 1970.
    #[must_use]
    pub fn expires_s(&self) -> Option<u64> {
        self.expires.as_deref().and_then(moment)
    }
}

fn one() -> u32 {
    1
}

/// Words that operators write instead of a key: words of examples, placeholders, values of empty variables, and single
/// digits.
const GUESSABLE: &str = "0 1 2 3 4 5 6 7 8 9 a abc abc123 admin api-key api_key apikey baton bearer changeme demo \
    dummy empty EMPTY example false foo hello hi key letmein master none None null password password123 placeholder \
    qwerty root secret sk sk-1234 sk-baton sk-baton- sk-test sk-xxx test test-key token token-abc123 true undefined user \
    vllm x xxx 0000 00000000 12 123 1234 12345 123456 1234567 12345678 123456789 1234567890 your-api-key YOUR_API_KEY";

static GUESSED: LazyLock<HashSet<[u8; 32]>> = LazyLock::new(|| {
    // `echo` appends a line feed to its argument, so the hash of each word with a line feed is refused too.
    let words =
        GUESSABLE.split_whitespace().chain([""]).flat_map(|word| [word.to_owned(), format!("{word}\n")]);
    let zeros = [[0_u8; 32].to_vec(), [b'0'; 32].to_vec(), [b'0'; 64].to_vec()];
    let hashes = words.map(String::into_bytes).chain(zeros).map(|text| Sha256::digest(text).into());
    // A digest with only zero bits or only one bits is a placeholder.
    hashes.chain([[0; 32], [0xff; 32]]).collect()
});

fn digest(hash: &str) -> Option<[u8; 32]> {
    let hex = hash.strip_prefix("sha256:")?;
    let mut digest = [0_u8; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digit = |c: u8| char::from(c).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(digest)
}

fn is_hash(hash: &str, _: &()) -> garde::Result {
    match digest(hash) {
        None => Err(garde::Error::new(
            "must be `sha256:` and 64 hexadecimal digits, as `baton key new` prints them",
        )),
        Some(digest) if GUESSED.contains(&digest) => {
            Err(garde::Error::new("is the hash of a key that is easy to guess; `baton key new` makes one"))
        }
        Some(_) => Ok(()),
    }
}

fn is_moment(text: &str, _: &()) -> garde::Result {
    let wrong = || garde::Error::new("must be a date (2027-01-31) or a time in UTC (2027-01-31T12:00:00Z)");
    moment(text).map(drop).ok_or_else(wrong)
}

/// Seconds since 1970 of `YYYY-MM-DD` or `YYYY-MM-DDTHH:MM:SSZ`, from 1970 to 9999.
pub(crate) fn moment(text: &str) -> Option<u64> {
    // The parser takes a sign before the year.
    text.bytes().next().filter(u8::is_ascii_digit)?;
    let date = format_description!("[year]-[month]-[day]");
    let time = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
    let moment = match Date::parse(text, date) {
        Ok(day) => day.midnight(),
        Err(_) => PrimitiveDateTime::parse(text, time).ok()?,
    };
    u64::try_from(moment.assume_utc().unix_timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_counted_as_the_calendar_counts_them() {
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("1970-01-02T00:00:01Z", 86_401),
            ("2000-03-01", 951_868_800),
            ("2024-02-29T23:59:59Z", 1_709_251_199),
            ("2026-11-20T16:34:52Z", 1_795_192_492),
        ] {
            assert_eq!(moment(text), Some(seconds), "{text}");
        }
        for wrong in [
            "2023-02-29",
            "2026-13-01",
            "2026-00-10",
            "26-01-01",
            "+2027-01-31",
            "2026-1-1",
            "2026-01-01T25:00:00Z",
            "2026-01-01T00:00:00",
            "1969-12-31",
            "",
            "2026-01-01-01",
            "é026-01-01",
        ] {
            assert_eq!(moment(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hashes_of_guessable_keys_are_refused() {
        let hash = |text: &[u8]| format!("sha256:{:x}", Sha256::digest(text));
        for word in ["", "0", "hi", "changeme", "test\n", "EMPTY"] {
            assert!(is_hash(&hash(word.as_bytes()), &()).is_err(), "{word}");
        }
        assert!(is_hash(&hash(&[0; 32]), &()).is_err());
        assert!(is_hash(&format!("sha256:{}", "0".repeat(64)), &()).is_err());
        assert!(is_hash(&hash(b"sk-baton-5b1f0c9d"), &()).is_ok());
    }

    #[test]
    fn example_keys_are_refused() {
        let folders = ["deploy/config", "examples/router"]
            .map(|folder| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder));
        let mut keys = 0;
        for file in folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("the examples")) {
            let path = file.expect("an entry").path();
            let config = crate::config::RouterConfig::load(&path).expect("an example is sound");
            for key in config.auth.iter().flat_map(|auth| &auth.keys) {
                assert!(!GUESSED.contains(&key.digest().expect("a hash")), "{}: {}", path.display(), key.id);
                keys += 1;
            }
        }
        assert!(keys >= 2);
    }
}
