//! The name of a producer's socket, and the kernel's record of the process at the other end of a socket.
#![allow(unsafe_code, reason = "getsockopt(SO_PEERCRED) and geteuid; each block states why it is sound")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use baton_connector::Epoch;
use baton_connector_channel::Secret;
use socket2::{Domain, SockAddr, Socket, Type};

/// Maximum number of connections that a producer has not accepted yet.
const BACKLOG: i32 = 128;

/// The user that represents all users of other user namespaces (the kernel's default of `overflowuid`).
const OVERFLOW_USER: u32 = 65_534;

/// Why a process at the other end of a socket is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The peer runs neither as the same user nor as root.
    #[error("the peer runs as user {theirs}, expected user {ours}")]
    User {
        /// The user of the peer.
        theirs: u32,
        /// The user of this process.
        ours: u32,
    },
    /// The peer may be in another container, where an equal user proves nothing, and there is no secret.
    #[error("the peer is in another namespace and no cluster secret is set")]
    Namespace,
}

/// A process at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerProcess {
    /// 0 for a process outside this PID namespace.
    pub(crate) pid: i32,
    pub(crate) user: u32,
}

/// Whether both ends also prove a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerProof {
    /// Both ends prove a secret.
    Secret,
    /// The process at the other end is trusted for its user and its namespaces only.
    None,
}

impl PeerProof {
    /// The proof with this secret.
    #[must_use]
    pub fn of(secret: Option<&Secret>) -> Self {
        secret.map_or(Self::None, |_| Self::Secret)
    }
}

impl PeerProcess {
    /// The process that the kernel recorded when it made the connection, or the listener if the caller is the client.
    pub(crate) fn of_socket(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: a `ucred` that lives through the call, and its length.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { pid: found.pid, user: found.uid })
        }
    }

    /// Checks whether the process is trusted with this process's pool, or as a producer.
    pub(crate) fn check(self, proof: PeerProof) -> Result<(), PeerError> {
        // SAFETY: the call has no arguments and cannot fail.
        self.check_against(unsafe { libc::geteuid() }, proof)
    }

    fn check_against(self, ours: u32, proof: PeerProof) -> Result<(), PeerError> {
        if self.user != ours && self.user != 0 {
            return Err(PeerError::User { theirs: self.user, ours });
        }
        if proof == PeerProof::None && (self.pid == 0 || self.user == OVERFLOW_USER) {
            return Err(PeerError::Namespace);
        }
        Ok(())
    }
}

/// Checks that the process at the other end runs as the same user or root and, without a secret, in the same
/// namespaces.
///
/// # Errors
/// `PermissionDenied` with a [`PeerError`]; otherwise a system error.
pub fn check_peer(socket: BorrowedFd<'_>, proof: PeerProof) -> io::Result<()> {
    PeerProcess::of_socket(socket)?
        .check(proof)
        .map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// The socket's address: an abstract name, which ends with its listener and is visible in one network namespace only.
/// The epoch identifies the engine start, and the port of the TCP side channel identifies the rank.
pub(crate) fn address(epoch: Epoch, port: u16) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0baton-kv-{epoch}-{port}"))
}

pub(crate) fn socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::STREAM, None)
}

/// Binds the name of an engine start and of the port in its handoffs, and listens there.
///
/// # Errors
/// A system error; `AddrInUse` if the name is taken.
pub fn listen(epoch: Epoch, port: u16) -> io::Result<Socket> {
    let listener = socket()?;
    listener.bind(&address(epoch, port)?)?;
    listener.listen(BACKLOG)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn process(pid: i32, user: u32) -> PeerProcess {
        PeerProcess { pid, user }
    }

    #[test]
    fn only_the_own_user_and_root_are_accepted() {
        for proof in [PeerProof::Secret, PeerProof::None] {
            assert_eq!(process(5, 1000).check_against(1000, proof), Ok(()));
            assert_eq!(process(5, 0).check_against(1000, proof), Ok(()));
            let other = PeerError::User { theirs: 1001, ours: 1000 };
            assert_eq!(process(5, 1001).check_against(1000, proof), Err(other));
            let not_root = PeerError::User { theirs: 1000, ours: 0 };
            assert_eq!(process(5, 1000).check_against(0, proof), Err(not_root));
        }
    }

    #[test]
    fn an_equal_user_of_another_namespace_needs_a_secret() {
        for hidden in [process(0, 1000), process(0, 0)] {
            assert_eq!(hidden.check_against(1000, PeerProof::None), Err(PeerError::Namespace));
            assert_eq!(hidden.check_against(1000, PeerProof::Secret), Ok(()));
        }
        let overflow = process(5, OVERFLOW_USER);
        assert_eq!(overflow.check_against(OVERFLOW_USER, PeerProof::None), Err(PeerError::Namespace));
        assert_eq!(overflow.check_against(OVERFLOW_USER, PeerProof::Secret), Ok(()));
    }

    #[test]
    fn peer_credentials_come_from_the_kernel_and_a_name_is_bound_once() {
        let (epoch, port) = (Epoch(std::process::id().into()), 7);
        let listener = listen(epoch, port).expect("a free name");
        assert_eq!(listen(epoch, port).err().map(|e| e.kind()), Some(io::ErrorKind::AddrInUse));
        let client = socket().expect("a socket");
        client.connect(&address(epoch, port).expect("short")).expect("a listener");
        let (served, _) = listener.accept().expect("a client");
        let me = process(std::process::id().cast_signed(), {
            // SAFETY: the call has no arguments and cannot fail.
            unsafe { libc::geteuid() }
        });
        assert_eq!(PeerProcess::of_socket(served.as_fd()).expect("a UNIX socket"), me);
        assert_eq!(PeerProcess::of_socket(client.as_fd()).expect("a UNIX socket"), me);
        drop((listener, served, client));
        drop(listen(epoch, port).expect("a name ends with its listener"));
    }
}
