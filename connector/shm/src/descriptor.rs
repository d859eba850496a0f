//! Sends a file descriptor over a UNIX socket (SCM_RIGHTS), with a few bytes.
#![allow(unsafe_code, reason = "sendmsg and recvmsg with control data; each block states why it is sound")]

use std::io::{self, ErrorKind};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;

use baton_connector::transport::StopFlag;
use baton_connector_channel::socket::{self, ChannelError, ChannelSocket, SLICE, WaitLimit};

/// Capacity for the descriptors of one message. More than one violates the protocol, but must be closed.
const DESCRIPTORS_MAX: usize = 4;

/// Control data with the required alignment.
#[repr(C)]
union ControlBuffer {
    _align: libc::cmsghdr,
    bytes: [u8; 64],
}

const fn space(descriptors: usize) -> usize {
    // SAFETY: arithmetic on a length, without memory access.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as libc::c_uint) as usize }
}

const _: () = assert!(space(DESCRIPTORS_MAX) <= size_of::<ControlBuffer>());

/// Sends `bytes` and the descriptor in one message.
///
/// # Errors
/// A system error; `WouldBlock` if the socket accepts nothing now; `WriteZero` if it accepts only a part.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut span = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = ControlBuffer { bytes: [0; 64] };
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut span;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = space(1) as _;
    // SAFETY: the control data is zeroed, aligned and large enough for one descriptor, so there is a first header with
    // its data inside. `sendmsg` reads the bytes, the control data and the message, which are all alive.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as libc::c_uint) as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(sent) if sent < bytes.len() => Err(ErrorKind::WriteZero.into()),
        Ok(_) => Ok(()),
    }
}

/// As [`send`], and waits until the socket accepts the message.
///
/// # Errors
/// [`ChannelError`].
pub fn send_all(
    socket: &ChannelSocket,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
    until: WaitLimit<'_>,
) -> Result<(), ChannelError> {
    let begun = Instant::now();
    loop {
        match send(socket.as_fd(), bytes, descriptor) {
            Ok(()) => return Ok(()),
            Err(error) => {
                socket::transient(error)?;
                socket::wait(socket.as_fd(), libc::POLLOUT, SLICE).map_err(ChannelError::Io)?;
                socket.check(until, begun)?;
            }
        }
    }
}

/// Fills `bytes` within the socket's bound on silence, and returns the descriptor of the message, if any.
///
/// # Errors
/// [`ChannelError`], also for more than one descriptor.
pub fn receive_all(
    socket: &ChannelSocket,
    bytes: &mut [u8],
    stop: &StopFlag,
) -> Result<Option<OwnedFd>, ChannelError> {
    let begun = Instant::now();
    let until = WaitLimit::deadline(stop, begun + socket.silence());
    let mut filled = 0;
    let mut descriptor = None;
    while filled < bytes.len() {
        match receive(socket.as_fd(), &mut bytes[filled..]) {
            Ok((0, _)) => return Err(ChannelError::Closed),
            Ok((received, mut descriptors)) => {
                filled += received;
                if descriptors.len() > 1 || (descriptor.is_some() && !descriptors.is_empty()) {
                    return Err(ChannelError::Unexpected);
                }
                descriptor = descriptor.or(descriptors.pop());
            }
            Err(error) => socket::transient(error)?,
        }
        socket.check(until, begun)?;
    }
    Ok(descriptor)
}

/// Receives up to `bytes.len()` available bytes, and the descriptors of their message. No message of a peer can leak a
/// descriptor.
///
/// # Errors
/// A system error; `WouldBlock` if no byte arrived within the socket's timeout, `InvalidData` for more descriptors than
/// fit.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut span = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = ControlBuffer { bytes: [0; 64] };
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut span;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = space(DESCRIPTORS_MAX) as _;
    // SAFETY: the kernel writes into the bytes and the control data, within the given lengths.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    // SAFETY: the headers and data that the kernel has written are inside the control data. Each descriptor in them is
    // new and has no other owner.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..bytes / size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok((received, descriptors))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_descriptor_arrives_with_its_bytes() {
        let (here, there) = UnixStream::pair().expect("a pair");
        let null = File::open("/dev/null").expect("it is there");
        send(here.as_fd(), b"pool", null.as_fd()).expect("room");
        let mut bytes = [0; 16];
        let (received, mut descriptors) = receive(there.as_fd(), &mut bytes).expect("something came");
        assert_eq!((&bytes[..received], descriptors.len()), (&b"pool"[..], 1));
        let arrived = File::from(descriptors.remove(0)).metadata().expect("a file");
        assert_eq!(arrived.ino(), null.metadata().expect("a file").ino());
    }

    #[test]
    fn bytes_without_a_descriptor_and_the_end_are_told_apart() {
        let (mut here, there) = UnixStream::pair().expect("a pair");
        here.write_all(b"x").expect("room");
        let mut bytes = [0; 16];
        assert!(matches!(receive(there.as_fd(), &mut bytes), Ok((1, none)) if none.is_empty()));
        drop(here);
        assert!(matches!(receive(there.as_fd(), &mut bytes), Ok((0, none)) if none.is_empty()));
    }
}
