//! A connection that is ready for requests.

use crate::socket::ChannelSocket;

/// A connection after its handshake.
#[derive(Debug)]
pub struct Connection<K> {
    /// The socket.
    pub socket: ChannelSocket,
    /// The transport's data of this connection.
    pub context: K,
}
