//! The endpoint under load: a URL and a key.

use std::path::Path;

/// Why a target is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    /// The text is no URL.
    #[error("`{0}` is no URL of the form http(s)://HOST[:PORT][/PREFIX]")]
    Url(String),
    /// The header would end the request's head, or the client writes it itself.
    #[error("`{0}` is no header of the form NAME: VALUE, or one that the client writes itself")]
    Header(String),
    /// The key's file cannot be read.
    #[error("{0}: {1}")]
    Key(String, std::io::Error),
    /// The certificates of `--ca-file` or of the system cannot be loaded.
    #[error("no certificates from {0}: {1}")]
    Roots(String, String),
    /// The host name cannot be resolved.
    #[error("{0}: {1}")]
    Resolve(String, std::io::Error),
}

/// Whether TLS is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

/// An endpoint's address, a prefix of its paths, and the headers of every request.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(super) scheme: Scheme,
    pub(super) host: String,
    pub(super) port: u16,
    /// Prefix of every path: empty, or begins with a slash.
    pub(super) prefix: String,
    pub(super) headers: Vec<(String, String)>,
    /// Certificates in PEM that sign the endpoint's own.
    pub(super) ca_file: Option<std::path::PathBuf>,
}

impl Target {
    /// Accepts `http(s)://HOST[:PORT][/PREFIX]` or `HOST:PORT`. A prefix that ends with `/v1` is an SDK's base URL,
    /// and that ending is removed.
    ///
    /// # Errors
    /// [`TargetError::Url`].
    pub(crate) fn parse(url: &str) -> Result<Self, TargetError> {
        let wrong = || TargetError::Url(url.to_owned());
        let (scheme, rest) = match url.split_once("://") {
            Some(("http", rest)) => (Scheme::Http, rest),
            Some(("https", rest)) => (Scheme::Https, rest),
            Some(_) => return Err(wrong()),
            None => (Scheme::Http, url),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let plain =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#@\\".contains(&byte));
        if !plain(authority) || !plain(path) {
            return Err(wrong());
        }
        let path = path.trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/').to_owned();
        let (host, port) = match authority.rsplit_once(':') {
            // The last colon of an IPv6 address in brackets begins no port.
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
            _ if scheme == Scheme::Https => (authority, 443),
            _ if url.contains("://") => (authority, 80),
            _ => return Err(wrong()),
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if bare.is_empty() || port == 0 || (bare.contains(':') != (bare.len() != host.len())) {
            return Err(wrong());
        }
        Ok(Self { scheme, host: bare.to_owned(), port, prefix, headers: Vec::new(), ca_file: None })
    }

    /// `HOST:PORT` of an endpoint with plain HTTP at the root of its host. `None` for TLS or a prefix.
    pub(crate) fn plain(&self) -> Option<String> {
        (self.scheme == Scheme::Http && self.prefix.is_empty()).then(|| self.authority())
    }

    /// Sends this key.
    ///
    /// # Errors
    /// [`TargetError::Header`].
    pub(crate) fn with_key(self, key: &str) -> Result<Self, TargetError> {
        let bearer = format!("Bearer {key}");
        self.with_header_of("authorization".to_owned(), bearer)
            .map_err(|_| TargetError::Header("authorization".to_owned()))
    }

    /// Sends the first line of this file as a key.
    ///
    /// # Errors
    /// If the file cannot be read or contains no key.
    pub(crate) fn with_key_file(self, file: Option<&Path>) -> Result<Self, TargetError> {
        let Some(file) = file else { return Ok(self) };
        let text = std::fs::read_to_string(file)
            .map_err(|error| TargetError::Key(file.display().to_string(), error))?;
        self.with_key(text.lines().next().unwrap_or_default().trim())
    }

    /// Sends a header `NAME: VALUE` with every request.
    ///
    /// # Errors
    /// [`TargetError::Header`].
    pub(crate) fn with_header(self, line: &str) -> Result<Self, TargetError> {
        let (name, value) = line.split_once(':').ok_or_else(|| TargetError::Header(line.to_owned()))?;
        self.with_header_of(name.trim().to_ascii_lowercase(), value.trim().to_owned())
    }

    fn with_header_of(mut self, name: String, value: String) -> Result<Self, TargetError> {
        check_header(&name, &value)?;
        self.headers.push((name, value));
        Ok(self)
    }

    /// Trusts the certificates of this file, in PEM, instead of the system's.
    pub(crate) fn with_ca_file(mut self, file: Option<&Path>) -> Self {
        self.ca_file = file.map(Path::to_path_buf);
        self
    }

    /// `HOST:PORT` for the `host` header.
    pub(crate) fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// The complete URL.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.scheme == Scheme::Https { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(), self.prefix)
    }
}

/// Whether a header is valid and not one that the client writes itself.
pub(super) fn check_header(name: &str, value: &str) -> Result<(), TargetError> {
    const OURS: [&str; 5] = ["host", "content-length", "content-type", "transfer-encoding", "connection"];
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let named =
        !name.is_empty() && name.bytes().all(token) && !OURS.contains(&name.to_ascii_lowercase().as_str());
    let text = value.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte) || byte >= 0x80);
    if named && text { Ok(()) } else { Err(TargetError::Header(format!("{name}: {value}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_url_with_or_without_the_sdks_suffix() {
        for (url, authority, prefix) in [
            ("http://127.0.0.1:8000", "127.0.0.1:8000", ""),
            ("127.0.0.1:8000/", "127.0.0.1:8000", ""),
            ("http://engine.local:1/v1/", "engine.local:1", ""),
            ("https://api.example.com/v1", "api.example.com:443", ""),
            ("http://h/serving/llama/v1", "h:80", "/serving/llama"),
            ("http://[::1]:9000/a", "[::1]:9000", "/a"),
            ("https://[fe80::1]", "[fe80::1]:443", ""),
        ] {
            let target = Target::parse(url).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((target.authority().as_str(), target.prefix.as_str()), (authority, prefix), "{url}");
            let plain = !url.starts_with("https") && prefix.is_empty();
            assert_eq!(target.plain(), plain.then(|| authority.to_owned()), "{url}");
        }
        for bad in [
            "",
            "http://",
            "localhost",
            "ftp://a:1",
            "a b:1",
            "http://a:0",
            "http://a:70000",
            "http://a:1?x",
            "http://u@h:1",
            "http://::1:80",
            "http://a:1/x y",
            "http://[a]:1",
            "http://a:",
        ] {
            assert!(Target::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_header_cannot_end_the_head() {
        let target = || Target::parse("h:1").expect("a target");
        assert!(target().with_header("X-Test: some, value").is_ok());
        for bad in ["none", ": x", "a b: c", "host: other", "Content-Length: 0", "x: a\r\nb: c", "x: \u{7}"] {
            assert!(target().with_header(bad).is_err(), "{bad:?}");
        }
        assert!(target().with_key("two\nlines").is_err());
    }
}
