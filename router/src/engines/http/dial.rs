//! New connections to an engine, and their effect on the engine's standing.

use std::time::Duration;

use super::connection::DialTerms;
use super::{Connection, Engine, connection};
use crate::engines::health::FailureKind;
use crate::metrics::Leg;

/// Maximum wait of a failed connection for the name's new address. A later answer is there for the next request.
const NEW_ADDRESS_TIMEOUT: Duration = Duration::from_millis(500);

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum DialError {
    /// This machine lacks a resource.
    OutOfResources(std::io::Error),
    /// The host reports that no process listens there.
    Refused,
    /// The engine does not speak HTTP/2, which its configuration requires.
    NoHttp2,
    /// No reply in time, or an error that may be the network's.
    Unanswered,
    /// The name has no address, and never had one.
    Unresolved,
}

impl Engine {
    /// Opens a connection. Only a report of the host that no process listens counts against the engine here. A
    /// packet may be lost, and a resolver may fail, while the engine works.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the connection.
    pub(crate) async fn dial(&self, within: Duration) -> Result<Connection, DialError> {
        let terms = self.connections.terms.load_full();
        let dialled = tokio::time::timeout(within, async {
            let addresses = self.connections.addresses.get().await.map_err(|_| DialError::Unresolved)?;
            let activity = &self.connections.activity;
            let dial =
                DialTerms { tls: terms.tls.as_ref(), http2: terms.http2, lost_after: terms.lost_after };
            let failed = match Connection::dial(&addresses, dial, activity).await {
                Ok(connection) => return Ok(connection),
                Err(error) if connection::is_local_error(&error) => {
                    return Err(DialError::OutOfResources(error));
                }
                Err(error) => error,
            };
            let moved = tokio::time::timeout(
                NEW_ADDRESS_TIMEOUT,
                self.connections.addresses.new_addresses(&addresses),
            )
            .await;
            let failed = match moved.ok().flatten() {
                None => failed,
                Some(moved) => match Connection::dial(&moved, dial, activity).await {
                    Ok(connection) => return Ok(connection),
                    Err(error) => error,
                },
            };
            Err(match failed.kind() {
                std::io::ErrorKind::ConnectionRefused => DialError::Refused,
                std::io::ErrorKind::Unsupported => DialError::NoHttp2,
                _ => DialError::Unanswered,
            })
        });
        let dialled = dialled.await.unwrap_or(Err(DialError::Unanswered));
        match &dialled {
            Err(DialError::OutOfResources(error)) => {
                if let Some(held_back) = self.log_limiters.sockets_exhausted.allow() {
                    let engine = self.authority();
                    tracing::error!(
                        event = "sockets_exhausted", engine, %error, held_back,
                        "no socket available for a connection"
                    );
                }
            }
            Err(DialError::Refused) => self.refused(),
            Err(DialError::NoHttp2) => {
                if let Some(held_back) = self.log_limiters.http2_missing.allow() {
                    let engine = self.authority();
                    tracing::error!(
                        event = "engine_without_http2",
                        engine,
                        held_back,
                        "the engine does not speak HTTP/2, which `http2: on` requires"
                    );
                }
            }
            Ok(connection) => self.connections.http2.learn(connection.is_http2()),
            Err(DialError::Unanswered | DialError::Unresolved) => {}
        }
        dialled
    }

    /// Records that no process listens at the engine's address.
    fn refused(&self) {
        self.connections.idle.close_unready();
        if self.connections.activity.connections() == 0 {
            // The process is gone, and its successor has an empty cache.
            self.known_caches.forget_routed(self.cache_ids());
        }
        self.failed(Leg::Decode, FailureKind::Unreachable);
    }
}
