//! The settings of one core. An error names the key.

use std::net::SocketAddr;
use std::time::Duration;

use baton_connector_channel::{Secret, SecretTooShort};
use serde_json::{Map, Value};

/// Seconds of the longest lease.
const LEASE_S_MAX: f64 = 3_600.0;

/// The settings of one core.
#[derive(Debug)]
pub(crate) struct Config {
    /// Address of the HTTP port.
    pub(crate) http: SocketAddr,
    /// Address of the side channel.
    pub(crate) channel: SocketAddr,
    /// The side channel's host as other engines reach it, for display.
    pub(crate) channel_host: Option<String>,
    /// The cluster's secret: callers' header and key of the side channel. Needed beyond loopback.
    pub(crate) secret: Option<Secret>,
    /// Lifetime of a lease without a heartbeat.
    pub(crate) lease: Duration,
    /// The handling of a load that failed: `recompute` or `fail`.
    pub(crate) policy: &'static str,
    /// Port of NIXL's side channel, and the tensor-parallel ranks behind it.
    pub(crate) nixl: (u16, usize),
    /// What `/debug/kv` and the metrics report of this engine.
    pub(crate) identity: Identity,
}

/// What `/debug/kv` and the metrics report of an engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Identity {
    /// The data-parallel rank.
    pub(crate) rank: usize,
    /// The engine and its version.
    pub(crate) engine: String,
    /// vLLM's engine id.
    pub(crate) engine_id: String,
    /// The served model.
    pub(crate) model: String,
    /// `prefill`, `decode` or `both`.
    pub(crate) role: &'static str,
    /// Blocks of the pool.
    pub(crate) blocks: usize,
    /// Tokens of one block.
    pub(crate) block_tokens: usize,
}

impl Config {
    /// Parses the settings.
    ///
    /// # Errors
    /// A text that names the key.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut fields = match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => ConfigFields(fields),
            Ok(_) => return Err("the configuration must be an object".into()),
            Err(error) => return Err(format!("the configuration is no JSON: {error}")),
        };
        let config = Self {
            http: fields.address("http")?,
            channel: fields.address("channel")?,
            channel_host: fields.text("channel_host")?,
            secret: fields.secret()?,
            lease: fields.lease("lease_s")?,
            policy: fields.word("policy", &["recompute", "fail"])?,
            nixl: (fields.port("nixl_port")?, fields.count("tp_size", 1)?),
            identity: Identity {
                rank: fields.count("rank", 0)?,
                engine: fields.text("engine")?.unwrap_or_default(),
                engine_id: fields.text("engine_id")?.unwrap_or_default(),
                model: fields.text("model")?.unwrap_or_default(),
                role: fields.word("role", &["both", "prefill", "decode"])?,
                blocks: fields.count("blocks", 0)?,
                block_tokens: fields.count("block_tokens", 0)?,
            },
        };
        if let Some(unknown) = fields.0.keys().next() {
            return Err(format!("unknown key `{unknown}`"));
        }
        for (key, address) in [("http", config.http), ("channel", config.channel)] {
            if !address.ip().is_loopback() && config.secret.is_none() {
                return Err(format!(
                    "`{key}` is reachable from other machines: `secret_file` with a cluster secret is needed"
                ));
            }
        }
        Ok(config)
    }
}

/// Fields that are not read yet.
struct ConfigFields(Map<String, Value>);

impl ConfigFields {
    /// The value of a key; `None` also for null.
    fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !value.is_null())
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(format!("`{key}` must be a text, found {other}")),
        }
    }

    fn address(&mut self, key: &str) -> Result<SocketAddr, String> {
        let text = self.text(key)?.unwrap_or_else(|| "127.0.0.1:0".into());
        text.parse().map_err(|_| format!("`{key}` must be IP:PORT, found `{text}`"))
    }

    fn count(&mut self, key: &str, default: usize) -> Result<usize, String> {
        let Some(value) = self.take(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| format!("`{key}` must be a count, found {value}"))
    }

    fn port(&mut self, key: &str) -> Result<u16, String> {
        let port = self.count(key, 0)?;
        u16::try_from(port).map_err(|_| format!("`{key}` must be a port, found {port}"))
    }

    /// One of several words, by default the first.
    fn word(&mut self, key: &str, words: &[&'static str]) -> Result<&'static str, String> {
        let Some(text) = self.text(key)? else { return Ok(words[0]) };
        let known = words.iter().find(|word| **word == text);
        known.copied().ok_or_else(|| format!("`{key}` must be one of {words:?}, found `{text}`"))
    }

    fn lease(&mut self, key: &str) -> Result<Duration, String> {
        let Some(value) = self.take(key) else { return Ok(baton_connector::limits::KV_LEASE_DURATION) };
        let seconds = value.as_f64().filter(|seconds| *seconds > 0.0 && *seconds <= LEASE_S_MAX);
        let seconds = seconds.ok_or_else(|| {
            format!("`{key}` must be seconds above 0, at most {LEASE_S_MAX}, found {value}")
        })?;
        Ok(Duration::from_secs_f64(seconds))
    }

    /// The cluster's secret, and during a rotation the previous one beside it.
    fn secret(&mut self) -> Result<Option<Secret>, String> {
        let secret = self.first_line("secret_file", Secret::new)?;
        let with_previous = |line: &[u8]| secret.clone().map(|secret| secret.with_previous(line)).transpose();
        match self.first_line("previous_secret_file", with_previous)? {
            None => Ok(secret),
            Some(None) => Err("`previous_secret_file` needs `secret_file`".into()),
            Some(both) => Ok(both),
        }
    }

    /// What `read` makes of the first line of a file.
    fn first_line<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&[u8]) -> Result<T, SecretTooShort>,
    ) -> Result<Option<T>, String> {
        let Some(path) = self.text(key)? else { return Ok(None) };
        let wrong = |what: String| format!("`{key}` {path}: {what}");
        let text = std::fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
        let line = text.lines().next().unwrap_or_default().trim();
        if line.is_empty() {
            return Err(wrong("no secret in its first line".into()));
        }
        read(line.as_bytes()).map(Some).map_err(|error| wrong(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    #[test]
    fn every_wrong_key_is_named() {
        for (text, named) in [
            ("7", "object"),
            ("{", "JSON"),
            (r#"{"htpp": "127.0.0.1:0"}"#, "htpp"),
            (r#"{"http": "localhost"}"#, "http"),
            (r#"{"http": 1}"#, "http"),
            (r#"{"http": "0.0.0.0:1"}"#, "http"),
            (r#"{"channel": "0.0.0.0:0"}"#, "channel"),
            (r#"{"channel_host": 5}"#, "channel_host"),
            (r#"{"secret_file": "/does/not/exist"}"#, "secret_file"),
            (r#"{"previous_secret_file": "/does/not/exist"}"#, "previous_secret_file"),
            (r#"{"lease_s": 0}"#, "lease_s"),
            (r#"{"lease_s": "30"}"#, "lease_s"),
            (r#"{"lease_s": 4000}"#, "lease_s"),
            (r#"{"rank": -1}"#, "rank"),
            (r#"{"blocks": 1.5}"#, "blocks"),
            (r#"{"policy": "hope"}"#, "policy"),
            (r#"{"role": "both", "model": []}"#, "model"),
        ] {
            let error = Config::parse(text).expect_err(text);
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn the_settings_of_the_python_half_are_accepted() {
        let text = r#"{"http": "127.0.0.1:0", "channel": "127.0.0.1:0", "channel_host": null,
            "secret_file": null, "lease_s": 0.5, "rank": 1, "engine": "vllm 0.32.0", "engine_id": "e",
            "blocks": 64, "block_tokens": 32, "policy": "fail", "model": "m"}"#;
        let config = Config::parse(text).expect("it is in order");
        assert_eq!((config.lease, config.policy), (Duration::from_millis(500), "fail"));
        assert_eq!((config.identity.rank, config.identity.blocks, config.identity.role), (1, 64, "both"));
    }

    #[test]
    fn a_secret_opens_an_address_for_other_machines() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().to_str().expect("UTF-8").to_owned();
        let text = format!(r#"{{"http": "0.0.0.0:0", "secret_file": "{path}"}}"#);
        writeln!(file, "short").expect("it is written");
        assert!(Config::parse(&text).expect_err("too short").contains("16"));
        file.as_file_mut().set_len(0).expect("it is emptied");
        std::fs::write(&path, "a secret of this cluster \nmore\n").expect("it is written");
        let secret = Config::parse(&text).expect("it is in order").secret.expect("a secret");
        assert!(secret.accepted().eq([b"a secret of this cluster"]));
        let mut previous = tempfile::NamedTempFile::new().expect("a file");
        let pair = json!({"secret_file": path, "previous_secret_file": previous.path()});
        writeln!(previous, "short").expect("it is written");
        assert!(Config::parse(&pair.to_string()).expect_err("too short").contains("`previous_secret_file`"));
        std::fs::write(previous.path(), "the secret of before").expect("it is written");
        let secret = Config::parse(&pair.to_string()).expect("it is in order").secret.expect("a secret");
        assert!(secret.accepted().eq([&b"a secret of this cluster"[..], b"the secret of before"]));
        let alone = json!({"previous_secret_file": previous.path()}).to_string();
        assert!(Config::parse(&alone).expect_err("no current secret").contains("needs `secret_file`"));
    }
}
