//! Fetches an issuer's keys: one request, or two with OpenID Connect's discovery.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{ACCEPT, HOST, USER_AGENT};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio_util::task::AbortOnDropHandle;

use super::key_set::{KeySet, KeySetError};
use crate::config::{JwtConfig, key_url};
use crate::tls::service::{ServiceTls, dial};

/// Time for all requests of a fetch.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of a document. Issuers publish 1 to 20 KiB.
const DOCUMENT_BYTES_MAX: usize = 256 << 10;

/// Why keys could not be fetched. It contains nothing that the issuer sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("no complete answer within {} s", FETCH_TIMEOUT.as_secs())]
    Timeout,
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    #[error("the connection failed: {0}")]
    Http(#[from] hyper::Error),
    #[error("status {0} instead of 200")]
    Status(u16),
    #[error("no document of at most {DOCUMENT_BYTES_MAX} bytes")]
    Document,
    #[error("the OpenID configuration is not valid, or that of another issuer")]
    Configuration,
    #[error("{0}")]
    Address(String),
    #[error("{0}")]
    Keys(#[from] KeySetError),
}

/// What is needed of an OpenID configuration (OpenID Connect Discovery 1.0, section 4.2).
#[derive(Deserialize)]
struct OpenIdConfiguration {
    issuer: String,
    jwks_uri: String,
}

/// # Errors
/// [`FetchError`].
pub(super) async fn fetch(config: &JwtConfig, tls: Option<&ServiceTls>) -> Result<KeySet, FetchError> {
    let fetched = async {
        let url = match &config.jwks_url {
            Some(url) => url.clone(),
            None => {
                let document = get(&config.discovery_url(), tls).await?;
                let found: OpenIdConfiguration =
                    serde_json::from_slice(&document).map_err(|_| FetchError::Configuration)?;
                // An issuer elsewhere cannot make the router ask services of its own host.
                let is_downgrade =
                    config.issuer.starts_with("https:") && !found.jwks_uri.starts_with("https:");
                if found.issuer != config.issuer || is_downgrade {
                    return Err(FetchError::Configuration);
                }
                found.jwks_uri
            }
        };
        Ok(KeySet::read(&get(&url, tls).await?)?)
    };
    tokio::time::timeout(FETCH_TIMEOUT, fetched).await.unwrap_or(Err(FetchError::Timeout))
}

/// The document at an address. Redirects are not followed: the configured address is the trusted one.
async fn get(url: &str, tls: Option<&ServiceTls>) -> Result<Bytes, FetchError> {
    let uri: Uri = key_url(url).map_err(FetchError::Address)?;
    let (Some(authority), is_tls) = (uri.authority(), uri.scheme_str() == Some("https")) else {
        return Err(FetchError::Address("no host".to_owned()));
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let tls = tls.filter(|_| is_tls);
    if is_tls && tls.is_none() {
        return Err(FetchError::Address("`https://` needs root certificates".to_owned()));
    }
    let port = authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let stream = dial(host, port, tls).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends with this function.
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let request = Request::get(uri.path_and_query().map_or("/", |path| path.as_str()))
        .header(HOST, authority.as_str())
        .header(ACCEPT, "application/json")
        .header(USER_AGENT, concat!("baton/", env!("CARGO_PKG_VERSION")))
        .body(Empty::<Bytes>::new())
        .map_err(|_| FetchError::Document)?;
    let response = sender.send_request(request).await?;
    if response.status() != 200 {
        return Err(FetchError::Status(response.status().as_u16()));
    }
    let body = Limited::new(response.into_body(), DOCUMENT_BYTES_MAX).collect().await;
    body.map(|body| body.to_bytes()).map_err(|_| FetchError::Document)
}
