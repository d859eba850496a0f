//! `baton health`: sends an HTTP request to a router or an engine and exits with its health. For supervisors, and for
//! containers whose images have no shell and no `curl`.
//!
//! A URL with a path is requested as given: `/health` reports whether the process runs, `/ready` whether it accepts
//! requests. Without a path the command checks readiness, as `pg_isready` and `grpc_health_probe` do. The path is then
//! `/ready`, or `/health` at an engine, which has no `/ready`.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::Failure;
use crate::cli::HealthArgs;

/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Succeeds if the response is 200.
pub(crate) fn run(args: &HealthArgs) -> Result<(), Failure> {
    if args.url.starts_with("https://") {
        return Err("https is not supported; use the router's admin listener: http://HOST:8081".into());
    }
    let asked = args.url.strip_prefix("http://").ok_or("the address must begin with http://")?;
    if asked.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return Err(format!("`{asked}` contains spaces or unprintable characters").into());
    }
    let (authority, path) = asked.split_once('/').unwrap_or((asked, ""));
    if authority.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(format!("`{authority}` has no port, expected http://HOST:PORT").into());
    }
    let within = Duration::from_millis(args.timeout_ms.max(1));
    let (path, answer) = match path {
        "" => match ask(authority, "ready", within)? {
            answer if answer.status == "404" => ("health", ask(authority, "health", within)?),
            answer => ("ready", answer),
        },
        path => (path, ask(authority, path, within)?),
    };
    match answer.status.as_str() {
        "200" => Ok(()),
        status => Err(format!("{authority} returned status {status} for /{path}: {}", answer.body).into()),
    }
}

struct HealthResponse {
    status: String,
    body: String,
}

fn ask(authority: &str, path: &str, within: Duration) -> Result<HealthResponse, Failure> {
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
    if !text.starts_with("HTTP/1.") {
        return Err(format!("the server at {authority} does not use HTTP, or requires TLS").into());
    }
    Ok(HealthResponse {
        status: text.split(' ').nth(1).unwrap_or_default().to_owned(),
        body: text.split_once("\r\n\r\n").map_or("", |(_, body)| body.trim()).to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    use super::*;

    /// Runs the check against a server with these responses by path. Returns the result and the requested paths.
    fn asked(path: &str, answers: &'static [(&str, &str)]) -> (Result<(), String>, Vec<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let served = std::thread::spawn(move || {
            let mut asked = Vec::new();
            for (of, status) in answers {
                let (stream, _) = listener.accept().expect("a question");
                let mut line = String::new();
                let mut lines = BufReader::new(&stream);
                lines.read_line(&mut line).expect("a line");
                while lines.read_line(&mut String::new()).expect("a line") > 2 {}
                asked.push(line.split(' ').nth(1).expect("a path").to_owned());
                assert_eq!(asked.last().map(String::as_str), Some(*of));
                write!(&stream, "HTTP/1.1 {status} x\r\nconnection: close\r\n\r\nwhy\n").expect("a client");
            }
            asked
        });
        let args = HealthArgs { url: format!("http://{address}{path}"), timeout_ms: 20_000 };
        let told = run(&args).map_err(|error| error.to_string().replace(&address.to_string(), "it"));
        (told, served.join().expect("it ends"))
    }

    #[test]
    fn without_a_path_readiness_is_queried() {
        for path in ["", "/"] {
            let (told, _) = asked(path, &[("/ready", "503")]);
            assert_eq!(
                told,
                Err("it returned status 503 for /ready: why".to_owned()),
                "a router without engines"
            );
            assert!(asked(path, &[("/ready", "200")]).0.is_ok());
            let (told, paths) = asked(path, &[("/ready", "404"), ("/health", "200")]);
            assert!(told.is_ok() && paths.len() == 2, "an engine");
            assert!(asked(path, &[("/ready", "404"), ("/health", "503")]).0.is_err());
        }
    }

    #[test]
    fn with_a_path_only_that_path_is_queried() {
        assert!(asked("/health", &[("/health", "200")]).0.is_ok());
        let (told, paths) = asked("/ready", &[("/ready", "404")]);
        assert!(told.is_err() && paths.len() == 1);
    }
}
