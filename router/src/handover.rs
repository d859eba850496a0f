//! Another process in the same place without a moment in which nobody listens.
//!
//! Two ways, both of which pass on the listening sockets themselves, so that a connection that waits in their queue is
//! accepted by whoever comes next:
//!
//! - **From a router that runs** (`--handover PATH`): it waits at a Unix socket at PATH for its successor. The successor asks
//!   there, gets the sockets, reads its configuration, begins to serve, says so, and only then does the old one stop
//!   accepting, ends what it has in flight, and ends.
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
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, UnixListener};

/// How long the other side of a handover may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long a successor may take from getting the sockets to serving: it reads its configuration and its keys.
const SERVES_WITHIN: Duration = Duration::from_secs(60);
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
                "{} sockets were left for this process; it knows what to do with two: for clients, and the admin listener",
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
            let socket =
                sockets.next().ok_or_else(|| io::Error::other("two listening sockets were expected"))?;
            if !rustix::net::sockopt::socket_acceptconn(&socket)? {
                return Err(io::Error::other("a socket that was handed over does not listen"));
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

    /// Tells the router that had them before.
    pub(crate) fn serving(&mut self) {
        if let Some(mut from) = self.from.take()
            && let Err(error) = from.write_all(&[SERVING])
        {
            tracing::warn!(%error, "the router before this one does not hear that it can end");
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
        tracing::warn!(key, %address, %configured, "the socket that was passed on is not where the configuration wants one; it is closed");
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
        return Err(io::Error::other("who waits there is no router, or does not know this user"));
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
    pub(crate) async fn serves(&self) {
        loop {
            match self.one().await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "a handover came to nothing; this router goes on"),
            }
        }
    }

    async fn one(&self) -> io::Result<()> {
        let (mut stream, _) = self.listener.accept().await?;
        let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
        if theirs != ours {
            return Err(io::Error::other(format!("user {theirs} asked for the sockets of user {ours}")));
        }
        stream.writable().await?;
        stream.try_io(tokio::io::Interest::WRITABLE, || {
            send(stream.as_fd(), [self.clients.as_fd(), self.admin.as_fd()])
        })?;
        tracing::info!("the sockets were handed over; waiting until the next router serves");
        let mut said = [0];
        tokio::time::timeout(SERVES_WITHIN, stream.read_exact(&mut said)).await??;
        if said[0] == SERVING { Ok(()) } else { Err(io::Error::other("it does not say that it serves")) }
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
