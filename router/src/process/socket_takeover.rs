//! Socket takeover: another process continues with the same listeners, without any time at which no process
//! listens.
//!
//! Two ways, both of which pass on the listening sockets themselves, so that the next process accepts the
//! connections in their queues:
//!
//! - **From a running router** (`--takeover-socket PATH`): the router waits for the next one at a Unix socket at
//!   PATH. The next router connects there, receives the sockets, reads its configuration and confirms that it
//!   serves. Only then does the old router stop accepting. Its last message contains the operators' orders, and
//!   the next router accepts no client before it has them. The old router finishes its requests in flight, and
//!   ends.
//! - **From a supervisor** (systemd's socket activation, `LISTEN_FDS`): the first socket is for clients, the
//!   second is the admin listener.
//!
//! The socket at PATH belongs to this user, and the next router must run as the same user.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};

use crate::config::EngineUrl;
use crate::engines::health::OperatorOrder;

/// Timeout of the peer's messages during a takeover.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Maximum time between sending the sockets and the confirmation: the next router reads its configuration and its
/// keys.
const SERVES_WITHIN: Duration = Duration::from_secs(60);
/// Maximum wait for the orders. Clients that connect meanwhile wait, too.
const ORDERS_WITHIN: Duration = Duration::from_secs(2);
/// Maximum text of orders: 8,192 of 512 bytes. A fleet stores half of these for absent engines, and a full pool
/// has as many.
const ORDERS_BYTES_MAX: usize = 4 << 20;
/// The byte that is sent with the sockets.
const SOCKETS: u8 = b'L';
/// The byte by which the next router confirms that it serves.
const SERVING: u8 = b'S';
/// Number of listeners: for clients, and the admin listener.
const LISTENERS: usize = 2;

/// Listening sockets that another process has opened.
#[derive(Debug, Default)]
pub struct InheritedListeners {
    clients: Option<std::net::TcpListener>,
    admin: Option<std::net::TcpListener>,
    /// The previous router, which waits for the confirmation.
    previous: Option<UnixStream>,
}

impl InheritedListeners {
    /// The sockets of a supervisor, if it has passed any (`LISTEN_FDS`).
    ///
    /// # Errors
    /// If they are not listening TCP sockets.
    pub fn from_supervisor() -> io::Result<Self> {
        let mut passed = listenfd::ListenFd::from_env();
        if passed.len() > LISTENERS {
            return Err(io::Error::other(format!(
                "{} sockets were inherited, expected at most two: for clients and for the admin listener",
                passed.len()
            )));
        }
        let mut take = |at| if at < passed.len() { passed.take_tcp_listener(at) } else { Ok(None) };
        Ok(Self { clients: take(0)?, admin: take(1)?, previous: None })
    }

    /// The sockets of the router that waits at this path; none if no router does.
    ///
    /// # Errors
    /// If the router does not send two listening sockets.
    pub fn from_router(path: &Path) -> io::Result<Self> {
        let mut from = match UnixStream::connect(path) {
            Ok(stream) => stream,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(Self::default());
            }
            Err(error) => return Err(error),
        };
        from.set_read_timeout(Some(ANSWER_WITHIN))?;
        from.set_write_timeout(Some(ANSWER_WITHIN))?;
        let mut sockets = receive_sockets(&mut from)?.into_iter();
        let mut listener = || -> io::Result<_> {
            let socket = sockets.next().ok_or_else(|| io::Error::other("expected two listening sockets"))?;
            if !rustix::net::sockopt::socket_acceptconn(&socket)? {
                return Err(io::Error::other("an inherited socket does not listen"));
            }
            Ok(Some(std::net::TcpListener::from(socket)))
        };
        Ok(Self { clients: listener()?, admin: listener()?, previous: Some(from) })
    }

    /// Whether there are no sockets.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.is_none() && self.admin.is_none()
    }

    pub(crate) fn take_clients(&mut self, configured: SocketAddr) -> io::Result<Option<TcpListener>> {
        matching_listener(self.clients.take(), "listen", configured)
    }

    pub(crate) fn take_admin(&mut self, configured: SocketAddr) -> io::Result<Option<TcpListener>> {
        matching_listener(self.admin.take(), "admin.listen", configured)
    }

    /// Confirms to the previous router that this one serves, and returns the operators' orders.
    pub(crate) async fn announce_ready(&mut self) -> Vec<(EngineUrl, OperatorOrder)> {
        let Some(mut from) = self.previous.take() else { return Vec::new() };
        if let Err(error) = from.write_all(&[SERVING]) {
            tracing::warn!(event = "takeover_not_confirmed", %error, "cannot notify the previous router");
            return Vec::new();
        }
        match tokio::time::timeout(ORDERS_WITHIN, read_orders(from)).await {
            Ok(Ok(text)) => parse_orders(&text),
            Ok(Err(error)) => without_orders(&error),
            Err(_) => without_orders(&"no response in time"),
        }
    }
}

/// Reads the last message of the previous router; empty from an older version.
async fn read_orders(from: UnixStream) -> io::Result<String> {
    from.set_nonblocking(true)?;
    let mut text = String::new();
    let from = tokio::net::UnixStream::from_std(from)?;
    from.take(ORDERS_BYTES_MAX as u64).read_to_string(&mut text).await?;
    Ok(text)
}

fn without_orders(error: &dyn std::fmt::Display) -> Vec<(EngineUrl, OperatorOrder)> {
    tracing::warn!(
        event = "operator_orders_not_received", %error,
        "cannot read operator orders of the previous router, its drained engines get requests again"
    );
    Vec::new()
}

/// Orders as text, one per line: `drain URL`.
fn format_orders(orders: &[(EngineUrl, OperatorOrder)]) -> String {
    let mut text = String::new();
    for (number, (url, order)) in orders.iter().enumerate() {
        let verb = match order {
            OperatorOrder::None => continue,
            OperatorOrder::Drain => "drain",
            OperatorOrder::Undrain => "undrain",
        };
        let line = format!("{verb} {url}\n");
        if text.len() + line.len() > ORDERS_BYTES_MAX {
            tracing::warn!(
                event = "operator_orders_truncated",
                left_out = orders.len() - number,
                "too many operator orders for the next router"
            );
            break;
        }
        text += &line;
    }
    text
}

fn parse_orders(text: &str) -> Vec<(EngineUrl, OperatorOrder)> {
    let order = |line: &str| {
        let (verb, url) = line.split_once(' ')?;
        let order = match verb {
            "drain" => OperatorOrder::Drain,
            "undrain" => OperatorOrder::Undrain,
            _ => return None,
        };
        Some((url.parse().ok()?, order))
    };
    let parse = |line: &str| {
        let order = order(line);
        if order.is_none() {
            tracing::warn!(
                event = "operator_order_unknown",
                line,
                "unknown operator order from the previous router"
            );
        }
        order
    };
    text.lines().filter_map(parse).collect()
}

/// The next router, which has the sockets and waits for the orders.
pub(crate) struct TakeoverClient(tokio::net::UnixStream);

impl TakeoverClient {
    /// Sends the operators' orders.
    pub(crate) async fn send_orders(mut self, orders: &[(EngineUrl, OperatorOrder)]) {
        let text = format_orders(orders);
        let sending = async {
            self.0.write_all(text.as_bytes()).await?;
            self.0.shutdown().await
        };
        let error = match tokio::time::timeout(ANSWER_WITHIN, sending).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        // An older version does not read the orders.
        if !text.is_empty() {
            tracing::warn!(
                event = "operator_orders_not_sent", %error, orders = text.trim_end(),
                "cannot send operator orders to the next router; repeat them there"
            );
        }
    }
}

/// Returns an inherited socket that matches the configuration: the same address, or any port if none is
/// configured.
fn matching_listener(
    inherited: Option<std::net::TcpListener>,
    key: &str,
    configured: SocketAddr,
) -> io::Result<Option<TcpListener>> {
    let Some(inherited) = inherited else { return Ok(None) };
    let address = inherited.local_addr()?;
    if address.ip() != configured.ip() || (configured.port() != 0 && address.port() != configured.port()) {
        tracing::warn!(
            event = "inherited_socket_closed", key, %address, %configured,
            "inherited socket does not match the configured address, socket closed"
        );
        return Ok(None);
    }
    inherited.set_nonblocking(true)?;
    TcpListener::from_std(inherited).map(Some)
}

/// Receives the sockets that are sent with one byte.
fn receive_sockets(from: &mut UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let message = recvmsg(&*from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if message.bytes != 1 || byte[0] != SOCKETS {
        return Err(io::Error::other(
            "the peer at the takeover socket is not a router or runs as another user",
        ));
    }
    let sockets = control.drain().filter_map(|control_message| match control_message {
        RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
        _ => None,
    });
    Ok(sockets.flatten().collect())
}

/// Waits at a path for the next router.
pub(crate) struct TakeoverListener {
    path: PathBuf,
    /// Inode of the socket at the path.
    inode: u64,
    listener: UnixListener,
    clients: OwnedFd,
    admin: OwnedFd,
}

impl TakeoverListener {
    /// Creates the socket at this path, in place of an earlier one.
    pub(crate) fn bind(path: &Path, clients: &TcpListener, admin: &TcpListener) -> io::Result<Self> {
        let (clients, admin) = (clients.as_fd().try_clone_to_owned()?, admin.as_fd().try_clone_to_owned()?);
        // The socket is created beside the path and then renamed, with permissions set in between. So a socket
        // exists at the path at all times, and no other user can ever connect.
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&fresh)?;
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&fresh, path)?;
        let inode = std::fs::metadata(path)?.ino();
        Ok(Self { path: path.to_owned(), inode, listener, clients, admin })
    }

    /// Returns when the next router serves.
    pub(crate) async fn accept(&self) -> TakeoverClient {
        loop {
            match self.try_accept().await {
                Ok(client) => return client,
                Err(error) => tracing::warn!(
                    event = "socket_takeover_failed", %error,
                    "socket takeover failed; this router continues"
                ),
            }
        }
    }

    async fn try_accept(&self) -> io::Result<TakeoverClient> {
        let (mut stream, _) = self.listener.accept().await?;
        let (peer_uid, own_uid) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
        if peer_uid != own_uid {
            return Err(io::Error::other(format!("user {peer_uid} requested the sockets of user {own_uid}")));
        }
        stream.writable().await?;
        stream.try_io(tokio::io::Interest::WRITABLE, || {
            send_sockets(stream.as_fd(), [self.clients.as_fd(), self.admin.as_fd()])
        })?;
        tracing::info!(event = "sockets_passed", "sockets passed to the next router");
        let mut byte = [0];
        tokio::time::timeout(SERVES_WITHIN, stream.read_exact(&mut byte)).await??;
        if byte[0] == SERVING {
            Ok(TakeoverClient(stream))
        } else {
            Err(io::Error::other("the next router did not confirm that it serves"))
        }
    }
}

impl Drop for TakeoverListener {
    fn drop(&mut self) {
        // Only if it is still this router's: the next router may already wait there.
        if std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn send_sockets(to: BorrowedFd<'_>, sockets: [BorrowedFd<'_>; LISTENERS]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&sockets)) {
        return Err(io::Error::other("no room for two sockets"));
    }
    match sendmsg(to, &[IoSlice::new(&[SOCKETS])], &mut control, SendFlags::NOSIGNAL)? {
        1 => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u8, order: OperatorOrder) -> (EngineUrl, OperatorOrder) {
        (format!("http://engine-{n}:8000").parse().expect("an address"), order)
    }

    /// Both ends of a takeover, after the sockets were sent.
    fn ends() -> (InheritedListeners, tokio::net::UnixStream) {
        let (next, previous) = UnixStream::pair().expect("two sockets");
        previous.set_nonblocking(true).expect("a socket");
        let previous = tokio::net::UnixStream::from_std(previous).expect("a socket");
        (InheritedListeners { previous: Some(next), ..InheritedListeners::default() }, previous)
    }

    #[tokio::test]
    async fn the_last_message_of_a_router_contains_the_operator_orders() {
        let (mut next, mut before) = ends();
        let orders =
            [order(1, OperatorOrder::Drain), order(2, OperatorOrder::Undrain), order(3, OperatorOrder::None)];
        let orders_of_previous = tokio::spawn(async move { next.announce_ready().await });
        let mut byte = [0];
        before.read_exact(&mut byte).await.expect("it says that it serves");
        assert_eq!(byte[0], SERVING);
        TakeoverClient(before).send_orders(&orders).await;
        assert_eq!(orders_of_previous.await.expect("it hears"), orders[..2]);
    }

    #[tokio::test]
    async fn an_older_router_sends_and_receives_no_orders() {
        let (mut next, before) = ends();
        drop(before);
        assert_eq!(next.announce_ready().await, []);
        let (next, before) = ends();
        drop(next);
        TakeoverClient(before).send_orders(&[order(1, OperatorOrder::Drain)]).await;
    }

    #[test]
    fn orders_that_are_none_are_passed_over() {
        let text = "drain http://a:1\ndance http://b:1\nundrain b:1\n\nundrain http://c:1\n";
        let urls: Vec<_> = parse_orders(text).into_iter().map(|(url, _)| url.to_string()).collect();
        assert_eq!(urls, ["http://a:1", "http://c:1"]);
    }

    #[test]
    fn surplus_orders_are_cut_at_an_order_boundary() {
        let many = vec![order(1, OperatorOrder::Undrain); ORDERS_BYTES_MAX / 20];
        let text = format_orders(&many);
        assert!(text.len() <= ORDERS_BYTES_MAX && text.ends_with('\n'));
        assert_eq!(parse_orders(&text), many[..text.lines().count()]);
    }
}
