//! Another process in the same place without a moment in which nobody listens.
//!
//! Two ways, both of which pass on the listening sockets themselves, so that a connection that waits in their queue is
//! accepted by whoever comes next:
//!
//! - **From a router that runs** (`--takeover-socket PATH`): it waits at a Unix socket at PATH for its successor. The successor asks
//!   there, gets the sockets, reads its configuration, says that it serves, and only then does the old one stop accepting. Its
//!   last word is what operators have ordered it; the next one accepts nobody before it has heard that.
//!   The old one ends what it has in flight, and ends.
//! - **From a supervisor** (systemd's socket activation, `LISTEN_FDS`): the first socket is for clients, the second is the
//!   admin listener.
//!
//! What waits at PATH belongs to this user, and so must whoever asks.

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
use crate::engines::health::Order;

/// How long the other side of a handover may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long a successor may take from getting the sockets to serving: it reads its configuration and its keys.
const SERVES_WITHIN: Duration = Duration::from_secs(60);
/// How long a successor waits for the orders before it serves without: those that connect meanwhile wait, too.
const ORDERS_WITHIN: Duration = Duration::from_secs(2);
/// Text of orders: 8,192 of 512 bytes, as many as the fleet keeps for engines that are gone, and again for those of a full pool.
const ORDERS_BYTES_MAX: usize = 4 << 20;
/// What goes with the sockets.
const HERE: u8 = b'L';
/// What a successor says when it serves.
const SERVING: u8 = b'S';
/// Listeners: for clients, and the admin listener.
const LISTENERS: usize = 2;

/// Listening sockets that somebody else has opened, in place of our own.
#[derive(Debug, Default)]
pub struct Inherited {
    clients: Option<std::net::TcpListener>,
    admin: Option<std::net::TcpListener>,
    /// Who has to be told when we serve.
    from: Option<UnixStream>,
}

impl Inherited {
    /// From a supervisor, if it has left any (`LISTEN_FDS`).
    ///
    /// # Errors
    /// When what it has left are no listening TCP sockets.
    pub fn from_supervisor() -> io::Result<Self> {
        let mut left = listenfd::ListenFd::from_env();
        if left.len() > LISTENERS {
            return Err(io::Error::other(format!(
                "{} sockets were inherited, expected at most two: for clients and for the admin listener",
                left.len()
            )));
        }
        let mut take = |at| if at < left.len() { left.take_tcp_listener(at) } else { Ok(None) };
        Ok(Self { clients: take(0)?, admin: take(1)?, from: None })
    }

    /// From the router that waits at this path; nothing if nobody does.
    ///
    /// # Errors
    /// When somebody does, and something else comes of it than two listening sockets.
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
        let mut sockets = receive(&mut from)?.into_iter();
        let mut listener = || -> io::Result<_> {
            let socket = sockets.next().ok_or_else(|| io::Error::other("expected two listening sockets"))?;
            if !rustix::net::sockopt::socket_acceptconn(&socket)? {
                return Err(io::Error::other("an inherited socket does not listen"));
            }
            Ok(Some(std::net::TcpListener::from(socket)))
        };
        Ok(Self { clients: listener()?, admin: listener()?, from: Some(from) })
    }

    /// Whether there is anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.is_none() && self.admin.is_none()
    }

    pub(crate) fn take_clients(&mut self, configured: SocketAddr) -> io::Result<Option<TcpListener>> {
        taken(self.clients.take(), "listen", configured)
    }

    pub(crate) fn take_admin(&mut self, configured: SocketAddr) -> io::Result<Option<TcpListener>> {
        taken(self.admin.take(), "admin.listen", configured)
    }

    /// Tells the router that had them before, and hears what operators have ordered that one.
    pub(crate) async fn serving(&mut self) -> Vec<(EngineUrl, Order)> {
        let Some(mut from) = self.from.take() else { return Vec::new() };
        if let Err(error) = from.write_all(&[SERVING]) {
            tracing::warn!(%error, "cannot notify the previous router");
            return Vec::new();
        }
        match tokio::time::timeout(ORDERS_WITHIN, heard(from)).await {
            Ok(Ok(text)) => read(&text),
            Ok(Err(error)) => unheard(&error),
            Err(_) => unheard(&"no response in time"),
        }
    }
}

/// What the router before says last; one of an older version says nothing.
async fn heard(from: UnixStream) -> io::Result<String> {
    from.set_nonblocking(true)?;
    let mut text = String::new();
    let from = tokio::net::UnixStream::from_std(from)?;
    from.take(ORDERS_BYTES_MAX as u64).read_to_string(&mut text).await?;
    Ok(text)
}

fn unheard(why: &dyn std::fmt::Display) -> Vec<(EngineUrl, Order)> {
    tracing::warn!(error = %why, "cannot read operator orders of the previous router, its drained engines get requests again");
    Vec::new()
}

/// Orders, a line each: `drain URL`.
fn written(orders: &[(EngineUrl, Order)]) -> String {
    let mut text = String::new();
    for (number, (url, order)) in orders.iter().enumerate() {
        let verb = match order {
            Order::None => continue,
            Order::Drain => "drain",
            Order::Undrain => "undrain",
        };
        let line = format!("{verb} {url}\n");
        if text.len() + line.len() > ORDERS_BYTES_MAX {
            tracing::warn!(left_out = orders.len() - number, "too many operator orders for the next router");
            break;
        }
        text += &line;
    }
    text
}

fn read(text: &str) -> Vec<(EngineUrl, Order)> {
    let order = |line: &str| {
        let (verb, url) = line.split_once(' ')?;
        let order = match verb {
            "drain" => Order::Drain,
            "undrain" => Order::Undrain,
            _ => return None,
        };
        Some((url.parse().ok()?, order))
    };
    let known = |line: &str| {
        let order = order(line);
        if order.is_none() {
            tracing::warn!(line, "unknown operator order from the previous router");
        }
        order
    };
    text.lines().filter_map(known).collect()
}

/// A router that has taken the sockets over, and waits for the last word of the one before.
pub(crate) struct Heir(tokio::net::UnixStream);

impl Heir {
    /// Says what operators have ordered.
    pub(crate) async fn hears(mut self, orders: &[(EngineUrl, Order)]) {
        let text = written(orders);
        let said = async {
            self.0.write_all(text.as_bytes()).await?;
            self.0.shutdown().await
        };
        let error = match tokio::time::timeout(ANSWER_WITHIN, said).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        // One of an older version does not listen any more.
        if !text.is_empty() {
            tracing::warn!(%error, orders = text.trim_end(), "cannot send operator orders to the next router; repeat them there");
        }
    }
}

/// An inherited socket serves where the configuration wants one: at the same address, or at any port.
fn taken(
    inherited: Option<std::net::TcpListener>,
    key: &str,
    configured: SocketAddr,
) -> io::Result<Option<TcpListener>> {
    let Some(inherited) = inherited else { return Ok(None) };
    let address = inherited.local_addr()?;
    if address.ip() != configured.ip() || (configured.port() != 0 && address.port() != configured.port()) {
        tracing::warn!(key, %address, %configured, "inherited socket does not match the configured address, socket closed");
        return Ok(None);
    }
    inherited.set_nonblocking(true)?;
    TcpListener::from_std(inherited).map(Some)
}

/// The sockets that come with one byte.
fn receive(from: &mut UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let told = recvmsg(&*from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if told.bytes != 1 || byte[0] != HERE {
        return Err(io::Error::other(
            "the peer at the takeover socket is not a router or runs as another user",
        ));
    }
    let sockets = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
        _ => None,
    });
    Ok(sockets.flatten().collect())
}

/// Waits at a path for the router that comes next.
pub(crate) struct Successor {
    path: PathBuf,
    /// Of the socket at the path, to know it again.
    inode: u64,
    listener: UnixListener,
    clients: OwnedFd,
    admin: OwnedFd,
}

impl Successor {
    /// Waits at this path from now on, in place of whoever did before.
    pub(crate) fn at(path: &Path, clients: &TcpListener, admin: &TcpListener) -> io::Result<Self> {
        let (clients, admin) = (clients.as_fd().try_clone_to_owned()?, admin.as_fd().try_clone_to_owned()?);
        // Made beside it and moved there: at no moment is nobody there, and nobody else may ever connect.
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

    /// Ends when a successor serves.
    pub(crate) async fn serves(&self) -> Heir {
        loop {
            match self.one().await {
                Ok(heir) => return heir,
                Err(error) => tracing::warn!(%error, "socket takeover failed; this router continues"),
            }
        }
    }

    async fn one(&self) -> io::Result<Heir> {
        let (mut stream, _) = self.listener.accept().await?;
        let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
        if theirs != ours {
            return Err(io::Error::other(format!("user {theirs} requested the sockets of user {ours}")));
        }
        stream.writable().await?;
        stream.try_io(tokio::io::Interest::WRITABLE, || {
            send(stream.as_fd(), [self.clients.as_fd(), self.admin.as_fd()])
        })?;
        tracing::info!("sockets passed to the next router");
        let mut said = [0];
        tokio::time::timeout(SERVES_WITHIN, stream.read_exact(&mut said)).await??;
        if said[0] == SERVING {
            Ok(Heir(stream))
        } else {
            Err(io::Error::other("the next router did not confirm that it serves"))
        }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        // Only if it is still ours: the next router may wait there by now.
        if std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn send(to: BorrowedFd<'_>, sockets: [BorrowedFd<'_>; LISTENERS]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&sockets)) {
        return Err(io::Error::other("no room for two sockets"));
    }
    match sendmsg(to, &[IoSlice::new(&[HERE])], &mut control, SendFlags::NOSIGNAL)? {
        1 => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u8, order: Order) -> (EngineUrl, Order) {
        (format!("http://engine-{n}:8000").parse().expect("an address"), order)
    }

    /// Both ends of a handover, as far as the last word of it.
    fn ends() -> (Inherited, tokio::net::UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        theirs.set_nonblocking(true).expect("a socket");
        let theirs = tokio::net::UnixStream::from_std(theirs).expect("a socket");
        (Inherited { from: Some(ours), ..Inherited::default() }, theirs)
    }

    #[tokio::test]
    async fn the_last_word_of_a_router_is_what_operators_have_ordered_it() {
        let (mut next, mut before) = ends();
        let orders = [order(1, Order::Drain), order(2, Order::Undrain), order(3, Order::None)];
        let heard = tokio::spawn(async move { next.serving().await });
        let mut said = [0];
        before.read_exact(&mut said).await.expect("it says that it serves");
        assert_eq!(said[0], SERVING);
        Heir(before).hears(&orders).await;
        assert_eq!(heard.await.expect("it hears"), orders[..2]);
    }

    #[tokio::test]
    async fn a_router_of_an_older_version_says_nothing_and_hears_nothing() {
        let (mut next, before) = ends();
        drop(before);
        assert_eq!(next.serving().await, []);
        let (next, before) = ends();
        drop(next);
        Heir(before).hears(&[order(1, Order::Drain)]).await;
    }

    #[test]
    fn orders_that_are_none_are_passed_over() {
        let text = "drain http://a:1\ndance http://b:1\nundrain b:1\n\nundrain http://c:1\n";
        let urls: Vec<_> = read(text).into_iter().map(|(url, _)| url.to_string()).collect();
        assert_eq!(urls, ["http://a:1", "http://c:1"]);
    }

    #[test]
    fn more_orders_than_a_successor_reads_are_cut_between_two() {
        let many = vec![order(1, Order::Undrain); ORDERS_BYTES_MAX / 20];
        let text = written(&many);
        assert!(text.len() <= ORDERS_BYTES_MAX && text.ends_with('\n'));
        assert_eq!(read(&text), many[..text.lines().count()]);
    }
}
