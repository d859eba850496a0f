//! One request to a router's admin listener.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::Failure;

/// The router is on this machine or near it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// The address of an admin listener and the credentials that it requires.
pub(crate) struct AdminClient<'a> {
    /// `http://HOST:PORT`, or `HOST:PORT`.
    pub address: &'a str,
    pub token_file: Option<&'a Path>,
}

impl AdminClient<'_> {
    /// Sends a request and parses the response as JSON. `headers` are `NAME: VALUE`.
    ///
    /// # Errors
    /// The router's error message, or the reason why no response arrived.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[String],
        body: &[u8],
    ) -> Result<Value, Failure> {
        let authority = self.address.strip_prefix("http://").unwrap_or(self.address).trim_end_matches('/');
        if authority.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
            return Err(format!("`{}` has no port, expected http://HOST:PORT", self.address).into());
        }
        if path.bytes().any(|byte| !byte.is_ascii_graphic()) {
            return Err(
                format!("`{path}` is not a path: it contains spaces or unprintable characters").into()
            );
        }
        let mut lines = String::new();
        if let Some(file) = self.token_file {
            let text =
                std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
            let token = text.lines().next().unwrap_or_default().trim();
            let _ = write!(lines, "authorization: Bearer {token}\r\n");
        }
        for header in headers {
            if !header.contains(':') || header.contains(['\r', '\n']) {
                return Err(format!("invalid header `{header}`, expected `NAME: VALUE`").into());
            }
            let _ = write!(lines, "{header}\r\n");
        }
        let unreachable = |error| format!("no router answers at {authority}: {error}");
        let mut stream = TcpStream::connect(authority).map_err(unreachable)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\ncontent-type: application/json\r\n\
             {lines}content-length: {}\r\n\r\n",
            body.len()
        )?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
        let text = String::from_utf8_lossy(&answer);
        let (head, body) = text.split_once("\r\n\r\n").ok_or("the server at this address is not a router")?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        let value: Value = serde_json::from_str(body).unwrap_or(Value::Null);
        match (status, &value["error"]["message"]) {
            ("200", _) if !value.is_null() => Ok(value),
            (_, Value::String(message)) => Err(format!("{status}: {message}").into()),
            _ => Err(format!("the router returned status {status}").into()),
        }
    }
}
