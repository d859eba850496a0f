//! HTTP client of the tools that watch a deployment: JSON and Prometheus samples over kept connections.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Maximum characters of a refusal in an error text.
const REFUSAL_CHARS_MAX: usize = 200;

/// Why a part of the deployment did not return what was requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WebError {
    /// The URL is invalid.
    #[error("`{0}` is no URL of the form http://HOST:PORT")]
    Url(String),
    /// A secret's file cannot be read.
    #[error("{0}: {1}")]
    Secret(String, std::io::Error),
    /// There was no connection or no response.
    #[error("{0}: {1}")]
    Unreachable(String, String),
    /// There was no response in time.
    #[error("{0}: no answer within {1:?}")]
    Late(String, Duration),
    /// The response has another status than 200.
    #[error("{0}: {1}: {2}")]
    Refused(String, StatusCode, String),
    /// The response is not what was requested.
    #[error("{0}: not JSON: {1}")]
    NotJson(String, serde_json::Error),
}

impl WebError {
    /// The status of a refusal.
    pub(crate) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused(_, status, _) => Some(*status),
            _ => None,
        }
    }
}

/// One part of a deployment, by its URL.
#[derive(Clone, Debug)]
pub(crate) struct ServiceClient {
    authority: String,
    /// `HOST:PORT` at which an engine answers its verbs and `/debug/kv` (`control_url`), if it is another one.
    control: Option<String>,
    bearer: Option<String>,
    /// The cluster's secret, which engines require.
    secret: Option<String>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl ServiceClient {
    /// Accepts `http://HOST:PORT` or `HOST:PORT`.
    ///
    /// # Errors
    /// If the text is neither.
    pub(crate) fn parse(url: &str) -> Result<Self, WebError> {
        Ok(Self {
            authority: authority_of(url)?,
            control: None,
            bearer: None,
            secret: None,
            client: Client::builder(TokioExecutor::new()).build_http(),
        })
    }

    /// An engine as options name it: `URL` or `URL,CONTROL_URL`.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub(crate) fn engine(option: &str) -> Result<Self, WebError> {
        let (url, control) = option.split_once(',').map_or((option, None), |(url, at)| (url, Some(at)));
        let mut engine = Self::parse(url)?;
        engine.set_control(control)?;
        Ok(engine)
    }

    /// Sets the engine's `control_url`, unless an option has set it.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub(crate) fn set_control(&mut self, url: Option<&str>) -> Result<(), WebError> {
        if self.control.is_none() {
            self.control = url.map(authority_of).transpose()?;
        }
        Ok(())
    }

    /// Sends the first line of this file as a bearer token.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn with_token_file(mut self, file: Option<&Path>) -> Result<Self, WebError> {
        self.bearer = file.map(first_line).transpose()?.map(|token| format!("Bearer {token}"));
        Ok(self)
    }

    /// Sends the first line of this file as the cluster's secret.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn with_secret_file(mut self, file: Option<&Path>) -> Result<Self, WebError> {
        self.secret = file.map(first_line).transpose()?;
        Ok(self)
    }

    /// `HOST:PORT`.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// `HOST:PORT` of the verbs and `/debug/kv`.
    pub(crate) fn control_authority(&self) -> &str {
        self.control.as_deref().unwrap_or(&self.authority)
    }

    /// The body of a response of status 200.
    ///
    /// # Errors
    /// See [`WebError`].
    pub(crate) async fn get(&self, path: &str, patience: Duration) -> Result<Bytes, WebError> {
        self.ask(Method::GET, path, Bytes::new(), patience).await
    }

    /// As [`Self::get`], read as JSON.
    ///
    /// # Errors
    /// See [`WebError`].
    pub(crate) async fn get_json(&self, path: &str, patience: Duration) -> Result<Value, WebError> {
        let body = self.get(path, patience).await?;
        serde_json::from_slice(&body).map_err(|error| WebError::NotJson(self.url(path), error))
    }

    /// Sends JSON and reads JSON. An empty response is `null`.
    ///
    /// # Errors
    /// See [`WebError`].
    pub(crate) async fn post_json(
        &self,
        path: &str,
        body: &Value,
        patience: Duration,
    ) -> Result<Value, WebError> {
        let body = self.ask(Method::POST, path, Bytes::from(body.to_string()), patience).await?;
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|error| WebError::NotJson(self.url(path), error))
    }

    /// The samples of `/metrics`.
    ///
    /// # Errors
    /// See [`WebError`].
    pub(crate) async fn samples(&self, patience: Duration) -> Result<Samples, WebError> {
        Ok(Samples::parse(&String::from_utf8_lossy(&self.get("/metrics", patience).await?)))
    }

    fn url(&self, path: &str) -> String {
        let is_control =
            ["/debug/kv", "/kv/release", "/abort_requests"].iter().any(|of| path.starts_with(of));
        let authority = if is_control { self.control_authority() } else { self.authority() };
        format!("http://{authority}{path}")
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<Bytes, WebError> {
        let url = self.url(path);
        let mut request = Request::builder().method(method).uri(&url);
        if let Some(bearer) = &self.bearer {
            request = request.header(AUTHORIZATION, bearer);
        }
        if let Some(secret) = &self.secret {
            request = request.header("x-baton-cluster-secret", secret);
        }
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body)).map_err(|_| WebError::Url(url.clone()))?;
        let answer = async {
            let unreachable = |what: &str, error: &(dyn Error + 'static)| {
                WebError::Unreachable(url.clone(), format!("{what}{}", cause(error)))
            };
            let reply = self.client.request(request).await;
            let reply = reply.map_err(|error| {
                unreachable(if error.is_connect() { "cannot connect: " } else { "no answer: " }, &error)
            })?;
            let status = reply.status();
            let body = Limited::new(reply.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| unreachable("the answer broke off: ", &*error))?.to_bytes();
            if !status.is_success() {
                return Err(WebError::Refused(url.clone(), status, first_words(&body)));
            }
            Ok(body)
        };
        tokio::time::timeout(patience, answer).await.map_err(|_| WebError::Late(url.clone(), patience))?
    }
}

/// `HOST:PORT` of `http://HOST:PORT` or `HOST:PORT`.
fn authority_of(url: &str) -> Result<String, WebError> {
    let authority = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/').to_owned();
    let parsed = authority.parse::<hyper::http::uri::Authority>();
    if !parsed.is_ok_and(|authority| authority.port().is_some()) {
        return Err(WebError::Url(url.to_owned()));
    }
    Ok(authority)
}

/// The root cause of an error. The errors above only name the layer.
fn cause(error: &(dyn Error + 'static)) -> String {
    let (mut bottom, mut is_no_http) = (error, false);
    loop {
        is_no_http |= bottom.downcast_ref().is_some_and(hyper::Error::is_parse);
        match bottom.source() {
            Some(below) => bottom = below,
            None => break,
        }
    }
    match is_no_http {
        true => format!("what listens there does not speak HTTP, or wants TLS ({bottom})"),
        false => bottom.to_string(),
    }
}

/// The beginning of a refusal, in one line: control characters of a body are not shown.
fn first_words(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().take(REFUSAL_CHARS_MAX).collect()
}

fn first_line(file: &Path) -> Result<String, WebError> {
    let text =
        std::fs::read_to_string(file).map_err(|error| WebError::Secret(file.display().to_string(), error))?;
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// The samples of one scrape, in Prometheus' text format.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<(String, BTreeMap<String, String>, f64)>);

impl Samples {
    /// Reads a scrape. Lines that are no samples are skipped.
    pub(crate) fn parse(text: &str) -> Self {
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// The sum of the samples of this name that have these labels. `None` if there are none.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |of: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| of.get(*key).is_some_and(|held| held == value))
        };
        let mut found =
            self.0.iter().filter(|(of, held, _)| of == name && has(held)).map(|(.., value)| *value);
        let first = found.next()?;
        Some(found.fold(first, |sum, value| sum + value))
    }

    /// Every sample of this name.
    pub(crate) fn of<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a BTreeMap<String, String>, f64)> + 'a {
        self.0.iter().filter(move |(of, ..)| of == name).map(|(_, labels, value)| (labels, *value))
    }
}

/// `name{key="value",…} number`.
fn sample(line: &str) -> Option<(String, BTreeMap<String, String>, f64)> {
    let name_ends = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(name_ends);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (key, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        other => other,
                    }),
                    (_, other) => value.push(other),
                }
            };
            labels.insert(key.to_owned(), value);
            rest = &after[end + 1..];
        }
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name.to_owned(), labels, value))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn samples_are_found_by_their_labels() {
        let text = "# HELP a b\na 1\nb{x=\"1\",y=\"} \\\"q\\\"\"} 2.5 1700000000\nb{x=\"2\"} +Inf\nb{x=\"1\"} 4\nbad\n";
        let samples = Samples::parse(text);
        assert_eq!(samples.sum("a", &[]), Some(1.0));
        assert_eq!(samples.sum("b", &[("x", "1")]), Some(6.5));
        assert_eq!(samples.sum("b", &[("y", "} \"q\"")]), Some(2.5));
        assert_eq!(samples.sum("b", &[("x", "2")]), Some(f64::INFINITY));
        assert_eq!(samples.sum("c", &[]), None);
        assert_eq!(samples.of("b").count(), 3);
    }

    #[test]
    fn a_refusal_is_one_line_cut_at_a_character_boundary() {
        assert_eq!(first_words(b"show the token\r\n as a bearer\n"), "show the token as a bearer");
        assert_eq!(first_words("é".repeat(999).as_bytes()), "é".repeat(REFUSAL_CHARS_MAX));
    }

    #[tokio::test]
    async fn an_unreachable_service_is_named_with_the_cause() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let there = listener.local_addr().expect("an address");
        let ask = async |place: &str| {
            let service = ServiceClient::parse(place).expect("an address");
            service.get("/health", Duration::from_secs(20)).await.expect_err("nothing listens").to_string()
        };
        // A TLS listener's response to a request in plain text.
        let alert = async {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let _ = stream.read(&mut [0; 512]).await;
            stream.write_all(b"\x15\x03\x03\x00\x02\x02\x32").await.expect("a client that reads");
        };
        let place = there.to_string();
        let (error, ()) = tokio::join!(ask(&place), alert);
        assert!(error.starts_with(&format!("http://{there}/health: no answer: ")), "{error}");
        assert!(error.contains("does not speak HTTP, or wants TLS"), "{error}");
        drop(listener);
        let error = ask(&place).await;
        let refused = format!("http://{there}/health: cannot connect: Connection refused");
        assert!(error.starts_with(&refused), "{error}");
        let error = ask("absent.invalid:80").await;
        assert!(error.contains("absent.invalid:80/health: cannot connect: failed to lookup"), "{error}");
    }

    #[test]
    fn an_origin_has_a_host_and_a_port() {
        for good in ["http://127.0.0.1:8000", "127.0.0.1:8000/", "http://engine.local:1"] {
            assert!(ServiceClient::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "http://", "localhost", "https://a:1", "http://a:1/x", "a b:1"] {
            assert!(ServiceClient::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn verbs_and_debug_kv_of_an_engine_are_at_its_control_address() {
        let mut engine = ServiceClient::engine("http://a:1,http://b:2/").expect("two addresses");
        // An option takes precedence over a router.
        engine.set_control(Some("c:3")).expect("an address");
        for path in ["/debug/kv", "/debug/kv/events?after=1", "/kv/release", "/abort_requests"] {
            assert_eq!(engine.url(path), format!("http://b:2{path}"));
        }
        for path in ["/metrics", "/health", "/version", "/v1/models", "/v1/completions"] {
            assert_eq!(engine.url(path), format!("http://a:1{path}"));
        }
        let mut engine = ServiceClient::engine("a:1").expect("an address");
        engine.set_control(None).expect("no address");
        assert_eq!(engine.url("/debug/kv"), "http://a:1/debug/kv");
        engine.set_control(Some("http://c:3")).expect("an address");
        assert_eq!((engine.url("/debug/kv").as_str(), engine.authority()), ("http://c:3/debug/kv", "a:1"));
        for bad in ["a:1,", ",b:2", "a:1,b", "a:1,https://b:2"] {
            assert!(ServiceClient::engine(bad).is_err(), "{bad}");
        }
    }
}
