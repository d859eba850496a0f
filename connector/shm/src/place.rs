//! Where a producer's socket is, and whom the kernel says is at the other end of one.
#![allow(unsafe_code)] // getsockopt(SO_PEERCRED) and geteuid; each block says why it is sound

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use baton_connector::Epoch;
use socket2::{Domain, SockAddr, Socket, Type};

/// Connections that the kernel keeps for a producer that has not accepted them yet.
const BACKLOG: i32 = 128;

/// The user that stands for all users of other user namespaces (the kernel's default of `overflowuid`).
const OVERFLOW_USER: u32 = 65_534;

/// Why a process at the other end of a socket is not let in, or not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stranger {
    /// Neither our user nor root.
    #[error("the peer runs as user {theirs}, expected user {ours}")]
    User {
        /// Its user.
        theirs: u32,
        /// Our own.
        ours: u32,
    },
    /// Of another container, perhaps: an equal user there means nothing, and there is no secret.
    #[error("the peer is in another namespace and no cluster secret is set")]
    Namespace,
}

/// A process at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// 0 when our PID namespace does not show it.
    pub(crate) pid: i32,
    pub(crate) user: u32,
}

/// Whether both ends prove a secret besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    Secret,
    None,
}

impl Process {
    /// Who is there, as the kernel noted it when the connection was made (or the listener, seen from a client).
    pub(crate) fn at(socket: BorrowedFd<'_>) -> io::Result<Self> {
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

    /// Whether it may read our pool, or be believed about its own.
    pub(crate) fn check(self, proof: Proof) -> Result<(), Stranger> {
        // SAFETY: takes nothing and cannot fail.
        self.check_against(unsafe { libc::geteuid() }, proof)
    }

    fn check_against(self, ours: u32, proof: Proof) -> Result<(), Stranger> {
        if self.user != ours && self.user != 0 {
            return Err(Stranger::User { theirs: self.user, ours });
        }
        if proof == Proof::None && (self.pid == 0 || self.user == OVERFLOW_USER) {
            return Err(Stranger::Namespace);
        }
        Ok(())
    }
}

/// Checks who is at the other end.
pub(crate) fn check(socket: BorrowedFd<'_>, proof: Proof) -> io::Result<()> {
    Process::at(socket)?.check(proof).map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Whether the process at the other end is one that a pool of this host is for: of our user or root and, without a
/// secret that both prove, of our namespaces.
///
/// # Errors
/// `PermissionDenied` with the [`Stranger`] that it is; otherwise the system's.
pub fn meet(socket: BorrowedFd<'_>, with_secret: bool) -> io::Result<()> {
    check(socket, if with_secret { Proof::Secret } else { Proof::None })
}

/// The socket's address: an abstract name, which ends with its listener and is seen in one network namespace
/// only. The epoch makes it this engine start's, and the port of the TCP side channel this rank's.
pub(crate) fn address(epoch: Epoch, port: u16) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0baton-kv-{epoch}-{port}"))
}

pub(crate) fn socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::STREAM, None)
}

/// Takes the name of one engine start and of the port that its handoffs name, and listens there.
///
/// # Errors
/// The system's; `AddrInUse` when somebody has that name.
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

    fn process(pid: i32, user: u32) -> Process {
        Process { pid, user }
    }

    #[test]
    fn our_own_user_and_root_are_let_in_and_nobody_else() {
        for proof in [Proof::Secret, Proof::None] {
            assert_eq!(process(5, 1000).check_against(1000, proof), Ok(()));
            assert_eq!(process(5, 0).check_against(1000, proof), Ok(()));
            let other = Stranger::User { theirs: 1001, ours: 1000 };
            assert_eq!(process(5, 1001).check_against(1000, proof), Err(other));
            let not_root = Stranger::User { theirs: 1000, ours: 0 };
            assert_eq!(process(5, 1000).check_against(0, proof), Err(not_root));
        }
    }

    #[test]
    fn an_equal_user_of_another_namespace_needs_a_secret() {
        for stranger in [process(0, 1000), process(0, 0)] {
            assert_eq!(stranger.check_against(1000, Proof::None), Err(Stranger::Namespace));
            assert_eq!(stranger.check_against(1000, Proof::Secret), Ok(()));
        }
        let nobody = process(5, OVERFLOW_USER);
        assert_eq!(nobody.check_against(OVERFLOW_USER, Proof::None), Err(Stranger::Namespace));
        assert_eq!(nobody.check_against(OVERFLOW_USER, Proof::Secret), Ok(()));
    }

    #[test]
    fn the_kernel_says_who_is_there_and_a_name_is_taken_once() {
        let (epoch, port) = (Epoch(std::process::id().into()), 7);
        let listener = listen(epoch, port).expect("a free name");
        assert_eq!(listen(epoch, port).err().map(|e| e.kind()), Some(io::ErrorKind::AddrInUse));
        let client = socket().expect("a socket");
        client.connect(&address(epoch, port).expect("short")).expect("a listener");
        let (served, _) = listener.accept().expect("a client");
        let me = process(std::process::id().cast_signed(), {
            // SAFETY: takes nothing and cannot fail.
            unsafe { libc::geteuid() }
        });
        assert_eq!(Process::at(served.as_fd()).expect("a UNIX socket"), me);
        assert_eq!(Process::at(client.as_fd()).expect("a UNIX socket"), me);
        drop((listener, served, client));
        drop(listen(epoch, port).expect("a name ends with its listener"));
    }
}
