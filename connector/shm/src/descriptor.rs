//! Sends a file descriptor over a UNIX socket (SCM_RIGHTS), with a few bytes.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use baton_connector::transport::StopFlag;
use baton_connector_channel::socket::{self, ChannelError, ChannelSocket, SLICE, WaitLimit};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Capacity for the descriptors of one message. More than one violates the protocol, but must be closed.
const DESCRIPTORS_MAX: usize = 4;

/// Sends `bytes` and the descriptor in one message.
///
/// # Errors
/// A system error; `WouldBlock` if the socket accepts nothing now; `WriteZero` if it accepts only a part.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)? < bytes.len() {
        return Err(ErrorKind::WriteZero.into());
    }
    Ok(())
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(ErrorKind::InvalidData.into());
    }
    let descriptors = control.drain().filter_map(|control_message| match control_message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors: Vec<_> = descriptors.flatten().collect();
    // The alignment of the buffer may leave room for more.
    match descriptors.len() <= DESCRIPTORS_MAX {
        true => Ok((message.bytes, descriptors)),
        false => Err(ErrorKind::InvalidData.into()),
    }
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
    fn more_descriptors_than_the_limit_are_refused() {
        let null = File::open("/dev/null").expect("it is there");
        for count in 1..=DESCRIPTORS_MAX + 3 {
            let (here, there) = UnixStream::pair().expect("a pair");
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = vec![null.as_fd(); count];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&here, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("room");
            let received = receive(there.as_fd(), &mut [0; 16]);
            match count <= DESCRIPTORS_MAX {
                true => assert_eq!(received.expect("within the limit").1.len(), count),
                false => assert_eq!(received.expect_err("above it").kind(), ErrorKind::InvalidData),
            }
        }
    }

    #[test]
    fn bytes_without_a_descriptor_are_distinct_from_the_end() {
        let (mut here, there) = UnixStream::pair().expect("a pair");
        here.write_all(b"x").expect("room");
        let mut bytes = [0; 16];
        assert!(matches!(receive(there.as_fd(), &mut bytes), Ok((1, none)) if none.is_empty()));
        drop(here);
        assert!(matches!(receive(there.as_fd(), &mut bytes), Ok((0, none)) if none.is_empty()));
    }
}
