//! `baton health`: asks a router or an engine over HTTP how it is, and exits accordingly. For supervisors and containers
//! whose images have no shell and no `curl`.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::Failure;
use crate::cli::HealthArgs;

/// An answer is not read beyond this.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Succeeds if the answer is 200.
pub(crate) fn run(args: &HealthArgs) -> Result<(), Failure> {
    let asked = args.url.strip_prefix("http://").ok_or("an address begins with http://")?;
    let (authority, path) = asked.split_once('/').unwrap_or((asked, "health"));
    if asked.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return Err(format!("`{asked}` has spaces, or what cannot be printed").into());
    }
    let within = Duration::from_millis(args.timeout_ms.max(1));
    let silent = |error: std::io::Error| format!("{authority}: {error}");
    let address = authority.to_socket_addrs().map_err(silent)?.next().ok_or("the name has no address")?;
    let mut stream = TcpStream::connect_timeout(&address, within).map_err(silent)?;
    stream.set_read_timeout(Some(within))?;
    stream.set_write_timeout(Some(within))?;
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n")
        .map_err(silent)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).map_err(silent)?;
    let text = String::from_utf8_lossy(&answer);
    let status = text.split(' ').nth(1).unwrap_or_default();
    match (text.starts_with("HTTP/1."), status) {
        (true, "200") => Ok(()),
        (true, _) => {
            let said = text.split_once("\r\n\r\n").map_or("", |(_, body)| body.trim());
            Err(format!("{authority} answers {status}: {said}").into())
        }
        _ => Err(format!("what answers at {authority} is not HTTP").into()),
    }
}
