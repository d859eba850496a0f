//! A new connection to an engine, and how a failed one changes the engine's standing.

use std::time::Duration;

use super::{Connection, Engine, connection};
use crate::engines::health::Sign;
use crate::metrics::Leg;

/// How long a failed connection waits for the name's new address. The next request finds an answer that comes later.
const MOVED_WITHIN: Duration = Duration::from_millis(500);

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum NoConnection {
    /// This machine lacks something of its own.
    Ours(std::io::Error),
    /// The host answers that no process listens there.
    Refused,
    /// Nothing came of it in time, or an error that may be the network's.
    Unanswered,
    /// The name has no address, and never had one.
    Nameless,
}

impl Engine {
    /// A new connection. Only the host's own word that no process listens is held against the engine here: a packet may
    /// be lost, and a resolver may fail, while the engine works.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the connection.
    pub(crate) async fn dial(&self, within: Duration) -> Result<Connection, NoConnection> {
        let terms = self.terms.load_full();
        let dialled = tokio::time::timeout(within, async {
            let addresses = self.addresses.get().await.map_err(|_| NoConnection::Nameless)?;
            let failed = match Connection::dial(&addresses, &terms, &self.life).await {
                Ok(connection) => return Ok(connection),
                Err(error) if connection::is_ours(&error) => return Err(NoConnection::Ours(error)),
                Err(error) => error,
            };
            let moved = tokio::time::timeout(MOVED_WITHIN, self.addresses.moved_from(&addresses)).await;
            let failed = match moved.ok().flatten() {
                None => failed,
                Some(moved) => match Connection::dial(&moved, &terms, &self.life).await {
                    Ok(connection) => return Ok(connection),
                    Err(error) => error,
                },
            };
            Err(match failed.kind() {
                std::io::ErrorKind::ConnectionRefused => NoConnection::Refused,
                _ => NoConnection::Unanswered,
            })
        });
        let dialled = dialled.await.unwrap_or(Err(NoConnection::Unanswered));
        match &dialled {
            Err(NoConnection::Ours(error)) => {
                if let Some(held_back) = self.trouble.due() {
                    let engine = self.authority();
                    tracing::error!(engine, %error, held_back, "no socket available for a connection");
                }
            }
            Err(NoConnection::Refused) => self.refused(),
            Ok(_) | Err(NoConnection::Unanswered | NoConnection::Nameless) => {}
        }
        dialled
    }

    /// No process listens at its address.
    fn refused(&self) {
        self.pool().retain_mut(Connection::is_ready);
        if self.life.open() == 0 {
            // The process is gone, and what comes up in its place has an empty cache.
            self.memory.forget_sent(self.holders());
        }
        self.failed(Leg::Decode, Sign::Unreachable);
    }
}
