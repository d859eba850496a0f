//! A descriptor over a UNIX socket (SCM_RIGHTS), with the few bytes that it travels with.
#![allow(unsafe_code)] // sendmsg and recvmsg with control data; each block says why it is sound

use std::io::{self, ErrorKind};
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Instant;

use baton_connector::transport::StopFlag;
use baton_connector_channel::link::{self, Link, LinkError, SLICE, Until};

/// Room for the descriptors of one message: more than one is against the protocol, but must be closed if it comes.
const DESCRIPTORS_MAX: usize = 4;

/// Control data, aligned as the system wants it.
#[repr(C)]
union Control {
    _align: libc::cmsghdr,
    bytes: [u8; 64],
}

const fn space(descriptors: usize) -> usize {
    // SAFETY: arithmetic on a length; touches no memory.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as libc::c_uint) as usize }
}

const _: () = assert!(space(DESCRIPTORS_MAX) <= size_of::<Control>());

/// Sends all of `bytes`, and the descriptor with them.
///
/// # Errors
/// The system's; `WouldBlock` when the socket takes nothing now. A socket that takes only a part of so few bytes
/// is an error too.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut span = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control { bytes: [0; 64] };
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut span;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = space(1) as _;
    // SAFETY: the control data is zeroed, aligned, and has room for one descriptor, so there is a first header and
    // its data lies inside. `sendmsg` reads the bytes, the control data and the message, which all live.
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

/// As [`send`], and waits until the socket takes it.
///
/// # Errors
/// [`LinkError`].
pub fn send_all(
    link: &Link,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
    until: Until<'_>,
) -> Result<(), LinkError> {
    let begun = Instant::now();
    loop {
        match send(link.as_fd(), bytes, descriptor) {
            Ok(()) => return Ok(()),
            Err(error) => {
                link::transient(error)?;
                link::wait(link.as_fd(), libc::POLLOUT, SLICE).map_err(LinkError::Io)?;
                link.check(until, begun)?;
            }
        }
    }
}

/// Fills `bytes`, within the link's silence. The descriptor that came with them, if one did.
///
/// # Errors
/// [`LinkError`]; also when more than one descriptor came.
pub fn receive_all(link: &Link, bytes: &mut [u8], stop: &StopFlag) -> Result<Option<OwnedFd>, LinkError> {
    let begun = Instant::now();
    let until = Until::deadline(stop, begun + link.silence());
    let mut filled = 0;
    let mut descriptor = None;
    while filled < bytes.len() {
        match receive(link.as_fd(), &mut bytes[filled..]) {
            Ok((0, _)) => return Err(LinkError::Closed),
            Ok((received, mut descriptors)) => {
                filled += received;
                if descriptors.len() > 1 || (descriptor.is_some() && !descriptors.is_empty()) {
                    return Err(LinkError::Unexpected);
                }
                descriptor = descriptor.or(descriptors.pop());
            }
            Err(error) => link::transient(error)?,
        }
        link.check(until, begun)?;
    }
    Ok(descriptor)
}

/// Receives what is there now, up to `bytes.len()` bytes, and the descriptors that came with it. None is leaked,
/// whatever the peer sends.
///
/// # Errors
/// The system's; `WouldBlock` when nothing came within the socket's timeout, `InvalidData` when more descriptors
/// came than there is room for.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut span = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control { bytes: [0; 64] };
    // SAFETY: all zeros is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut span;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = space(DESCRIPTORS_MAX) as _;
    // SAFETY: the kernel writes into the bytes and the control data, both of the lengths given.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let mut descriptors = Vec::new();
    // SAFETY: the headers and data that the kernel has written lie inside the control data; each descriptor in
    // them is new and belongs to nobody else.
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
