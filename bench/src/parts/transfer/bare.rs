//! This machine's limits: a bare `writev`/`readv` loop over loopback, and `memcpy`.
#![allow(unsafe_code, reason = "blocks of a pool as slices, and poll(2); each block says why it is sound")]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread::{self, JoinHandle};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_tcp::SEND_BUFFER_BYTES;

/// Bytes of one `writev`, as in one batch of the transport.
const CALL_BYTES: usize = 1 << 20;

/// Maximum slices of one call. Linux accepts 1,024.
const SLICES_MAX: usize = 1_024;

/// How the writer waits for room in the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sender {
    /// Inside `writev`, the usual way.
    Blocking,
    /// In `poll`, as the transport does. This is faster, because `writev` then copies only what fits at once.
    Polling,
}

/// Blocks of a pool, in the order of a transfer.
#[derive(Clone, Copy)]
pub(super) struct BlockList<'a> {
    pub(super) region: &'a Region,
    pub(super) blocks: &'a [BlockId],
}

/// A connection that transfers the same blocks each time the reader sends one byte.
pub(super) struct LoopbackStream {
    socket: TcpStream,
    landing: Region,
    into: Vec<BlockId>,
    writer: Option<JoinHandle<io::Result<()>>>,
}

impl LoopbackStream {
    pub(super) fn start(sender: Sender, from: BlockList<'_>, into: BlockList<'_>) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        socket.set_nodelay(true)?;
        let (mut peer, _) = listener.accept()?;
        peer.set_nodelay(true)?;
        // The same buffer size as the transport's, so that only the transport's own overhead differs.
        socket2::SockRef::from(&peer).set_send_buffer_size(SEND_BUFFER_BYTES)?;
        peer.set_nonblocking(sender == Sender::Polling)?;
        let (source, from) = (from.region.clone(), from.blocks.to_vec());
        let writer = thread::spawn(move || {
            while wait(&peer, libc::POLLIN)? && peer.read(&mut [0])? == 1 {
                for batch in from.chunks(per_call(&source)) {
                    write_all(&mut peer, &source, batch)?;
                }
            }
            Ok(())
        });
        let (landing, into) = (into.region.clone(), into.blocks.to_vec());
        Ok(Self { socket, landing, into, writer: Some(writer) })
    }

    /// Moves every block once.
    pub(super) fn run(&mut self) -> io::Result<()> {
        self.socket.write_all(&[1])?;
        for batch in self.into.chunks(per_call(&self.landing)) {
            read_all(&mut self.socket, &self.landing, batch)?;
        }
        Ok(())
    }
}

impl Drop for LoopbackStream {
    fn drop(&mut self) {
        // The writer ends with its input. Its result does not matter.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Waits for an event. Always returns true.
fn wait(socket: &TcpStream, events: libc::c_short) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
    // SAFETY: one `pollfd` that outlives the call, and its count.
    let ready = unsafe { libc::poll(&raw mut poll, 1, -1) };
    if ready < 0 { Err(io::Error::last_os_error()) } else { Ok(true) }
}

fn per_call(region: &Region) -> usize {
    (CALL_BYTES / region.block_bytes()).clamp(1, SLICES_MAX)
}

fn write_all(socket: &mut TcpStream, region: &Region, blocks: &[BlockId]) -> io::Result<()> {
    let mut slices: Vec<_> = blocks
        .iter()
        // SAFETY: the region outlives this call, and its source blocks are not written during a benchmark.
        .map(|&block| unsafe { std::slice::from_raw_parts(region.block_ptr(block), region.block_bytes()) })
        .map(IoSlice::new)
        .collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match socket.write_vectored(rest) {
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(wait(socket, libc::POLLOUT)?),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_all(socket: &mut TcpStream, region: &Region, blocks: &[BlockId]) -> io::Result<()> {
    let mut slices: Vec<_> = blocks
        .iter()
        // SAFETY: the region outlives this call, the blocks of a table are all different, and during a repetition
        // only this thread accesses the landing blocks.
        .map(|&block| unsafe {
            std::slice::from_raw_parts_mut(region.block_ptr(block), region.block_bytes())
        })
        .map(IoSliceMut::new)
        .collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match socket.read_vectored(rest)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => IoSliceMut::advance_slices(&mut rest, read),
        }
    }
    Ok(())
}

/// Copies every block once, on this thread.
pub(super) fn memcpy(from: BlockList<'_>, into: BlockList<'_>) {
    for (&source, &landing) in from.blocks.iter().zip(into.blocks) {
        // SAFETY: two pools never overlap, both blocks have this length, and no other thread accesses them.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.region.block_ptr(source),
                into.region.block_ptr(landing),
                from.region.block_bytes(),
            );
        }
    }
}
