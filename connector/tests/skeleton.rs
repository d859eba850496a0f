//! The smallest transport that keeps the promises: between threads of one process, over a bounded channel. For who writes
//! one (`docs/reference/contract.md`) to begin with, and to see what each promise asks.
//!
//! ```text
//! consumer's thread                              producer's thread, one for each read
//!   read ── who are you? epoch, layout             read_begun: the ledger grants, or says gone or refused
//!   ◀── Bytes ◀── Bytes … ◀── End                  before every block: is the lease live, and is the block computed?
//!   finish ─────────────────────────────▶          read_done: the ledger's verdict
//! ```
//!
//! The consumer's thread alone writes into landing blocks, out of what it has received, and within `read`: so nothing writes
//! there any more when `read` returns, whatever it returns.

#[macro_use]
mod conformance;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::slice::{Cut, Run};
use baton_connector::transport::{
    Part, Peer, Producer, ReadOrder, Readiness, StopFlag, Transport, TransportError, Verdict,
};
use baton_connector::{BlockId, Handle, KvLayout, Reader};
use conformance::{Lender, Wire};

/// Pieces that a producer may be ahead of its reader.
const WINDOW: usize = 4;
/// How often a waiting thread looks up.
const SLICE: Duration = Duration::from_millis(20);
/// A producer that says nothing for so long has failed. `transport::SILENCE` outside of tests.
const SILENCE: Duration = Duration::from_millis(700);

/// What a producer sends.
enum Piece {
    Bytes(Vec<u8>),
    /// It lives, and the next block is not computed yet.
    NotYet,
    /// Nothing more comes.
    End(Result<(), TransportError>),
}

/// Which entries of the lease's table a read is for, and what of them where it is a slice.
type Asked = (Range<usize>, Option<(Cut, KvLayout)>);

/// The producer's end. A real one has a socket here.
struct Line {
    producer: Arc<dyn Producer>,
    alive: AtomicBool,
}

/// Why a consumer was not let in.
enum NotAdmitted {
    Gone,
    Other(TransportError),
}

impl Line {
    /// The handshake. A real one proves the cluster's secret first, both ways.
    fn admit(&self, peer: &Peer) -> Result<(), NotAdmitted> {
        if !self.alive.load(Ordering::Acquire) {
            let why = TransportError::Handshake(peer.address, "nobody is there".into());
            return Err(NotAdmitted::Other(why));
        }
        if peer.epoch != self.producer.epoch() {
            return Err(NotAdmitted::Gone);
        }
        if peer.fingerprint != self.producer.fingerprint() {
            return Err(NotAdmitted::Other(TransportError::Refused("another layout".into())));
        }
        Ok(())
    }

    /// One read, on a thread of its own.
    fn deliver(&self, order: &ReadOrder, out: &SyncSender<Piece>) {
        let (handle, reader) = (order.handle, order.reader);
        let begun = self.asked(order).and_then(|(entries, slice)| {
            let blocks = self.producer.read_begun(handle, reader, entries.start, entries.len())?;
            Ok((entries.start, blocks, slice))
        });
        let (first, blocks, slice) = match begun {
            Ok(begun) => begun,
            Err(why) => return drop(out.send(Piece::End(Err(why)))),
        };
        for (at, &block) in blocks.iter().enumerate() {
            let brought = loop {
                match self.producer.await_ready(handle, reader, first + at + 1, SLICE) {
                    Readiness::Ready => break self.producer.in_region(&[block]),
                    Readiness::Gone => break Err(TransportError::Gone),
                    Readiness::NotYet => {
                        if out.send(Piece::NotYet).is_err() {
                            return self.producer.read_failed(handle, reader);
                        }
                    }
                }
            };
            let sent = match brought {
                Ok(()) => out.send(Piece::Bytes(gather(self.producer.region(), &blocks, at, slice.as_ref()))),
                Err(why) => {
                    // What it has received it has copied, or never will: it is quiet.
                    self.producer.read_failed(handle, reader);
                    return drop(out.send(Piece::End(Err(why))));
                }
            };
            if sent.is_err() {
                return self.producer.read_failed(handle, reader);
            }
        }
        // Until it says done, or gives up, the reader is in flight, and the lease is not closed under it.
        if out.send(Piece::End(Ok(()))).is_err() {
            self.producer.read_failed(handle, reader);
        }
    }

    /// What a read asks for. Whether the lease has so much is the ledger's to say.
    fn asked(&self, order: &ReadOrder) -> Result<Asked, TransportError> {
        let refused = |why: String| TransportError::Refused(why.into());
        match &order.part {
            Part::Blocks { first } => {
                let end = first.checked_add(order.into.len());
                let end = end.ok_or_else(|| refused("no table has so many entries".to_owned()))?;
                Ok((*first..end, None))
            }
            Part::Slice(slice) => {
                let layout = self.producer.layout().ok_or_else(|| refused("whole blocks only".to_owned()))?;
                slice.cut.check(&layout).map_err(|why| refused(why.to_string()))?;
                Ok((slice.cut.entries(&layout), Some((slice.cut.clone(), layout))))
            }
        }
    }
}

/// The bytes of one block of a read, or what a slice takes of it.
fn gather(region: &Region, blocks: &[BlockId], at: usize, slice: Option<&(Cut, KvLayout)>) -> Vec<u8> {
    let block = region.read_block(blocks[at]);
    let Some((cut, layout)) = slice else { return block };
    let mut runs = Vec::new();
    cut.runs(layout, &cut.piece(layout, at), &mut runs);
    // A piece of a slice lies in one block of the producer.
    runs.iter().flat_map(|run| &block[run.offset..][..run.len]).copied().collect()
}

/// Puts what was received where it goes; false if it is not what was asked for.
fn scatter(region: &Region, order: &ReadOrder, at: usize, bytes: &[u8]) -> bool {
    let Part::Slice(slice) = &order.part else {
        let fits = at < order.into.len() && bytes.len() == region.block_bytes();
        if fits {
            region.write_block(order.into[at], bytes);
        }
        return fits;
    };
    let (piece, mut runs) = (slice.cut.piece(&slice.producer, at), Vec::new());
    if at >= slice.cut.entries(&slice.producer).len() || bytes.len() != slice.piece_bytes(&piece) {
        return false;
    }
    slice.runs(&piece, &mut runs);
    let mut rest = bytes;
    let mut blocks: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
    for Run { entry, offset, len } in runs {
        let (now, later) = rest.split_at(len);
        let block = blocks.entry(entry).or_insert_with(|| region.read_block(order.into[entry]));
        block[offset..][..len].copy_from_slice(now);
        rest = later;
    }
    blocks.into_iter().for_each(|(entry, block)| region.write_block(order.into[entry], &block));
    true
}

/// The consumer's end.
struct InProcess {
    line: Arc<Line>,
    /// A connection that is kept for the next call.
    kept: Mutex<Option<Arc<Line>>>,
}

impl InProcess {
    fn meet(&self, peer: &Peer) -> Result<Arc<Line>, NotAdmitted> {
        self.line.admit(peer)?;
        Ok(Arc::clone(
            self.kept.lock().expect("nobody panics with it").get_or_insert_with(|| Arc::clone(&self.line)),
        ))
    }

    /// Asks about a lease; `gone` is the answer of a producer of another epoch.
    fn ask<T>(
        &self,
        peer: &Peer,
        gone: T,
        ask: impl FnOnce(&dyn Producer) -> T,
    ) -> Result<T, TransportError> {
        match self.meet(peer) {
            Ok(line) => Ok(ask(&*line.producer)),
            Err(NotAdmitted::Gone) => Ok(gone),
            Err(NotAdmitted::Other(why)) => Err(why),
        }
    }
}

/// Receives the blocks of a read, and writes them where they go.
fn land(
    line: &Line,
    pieces: &Receiver<Piece>,
    order: &ReadOrder,
    region: &Region,
    stop: &StopFlag,
) -> Result<(), TransportError> {
    let pieces_of = match &order.part {
        Part::Blocks { .. } => order.into.len(),
        Part::Slice(slice) => slice.cut.entries(&slice.producer).len(),
    };
    let (mut landed, mut heard) = (0, Instant::now());
    let broken = |why: &str| Err(TransportError::Transfer(why.into()));
    loop {
        if stop.load(Ordering::Acquire) {
            return Err(TransportError::Stopped);
        }
        if !line.alive.load(Ordering::Acquire) {
            return broken("the producer has died");
        }
        match pieces.recv_timeout(SLICE) {
            Ok(Piece::Bytes(bytes)) if scatter(region, order, landed, &bytes) => landed += 1,
            Ok(Piece::Bytes(_)) => return broken("the producer sends what was not asked for"),
            Ok(Piece::NotYet) => {}
            Ok(Piece::End(Ok(()))) if landed < pieces_of => return broken("blocks are missing"),
            Ok(Piece::End(end)) => return end,
            Err(RecvTimeoutError::Timeout) if heard.elapsed() < SILENCE => continue,
            Err(RecvTimeoutError::Timeout) => return broken("the producer is silent"),
            Err(RecvTimeoutError::Disconnected) => return broken("the connection has ended"),
        }
        heard = Instant::now();
    }
}

impl Transport for InProcess {
    fn carrier(&self, _: &Peer) -> &'static str {
        "in_process"
    }

    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        let line = self.meet(peer).map_err(|why| match why {
            NotAdmitted::Gone => TransportError::Gone,
            NotAdmitted::Other(why) => why,
        })?;
        if let Part::Slice(slice) = &order.part {
            slice.check(order.into.len()).map_err(|why| TransportError::Refused(why.to_string().into()))?;
        }
        let (out, pieces) = sync_channel(WINDOW);
        let (server, asked) = (Arc::clone(&line), order.clone());
        thread::spawn(move || server.deliver(&asked, &out));
        let read = land(&line, &pieces, order, region, stop);
        // The producer's thread hears of it when it sends next, which may be never: it has sent everything, perhaps.
        let left = matches!(read, Err(TransportError::Stopped | TransportError::Transfer(_)));
        if left && line.alive.load(Ordering::Acquire) {
            line.producer.read_failed(order.handle, order.reader);
        }
        read
    }

    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        self.ask(peer, Verdict::Gone, |producer| producer.read_done(handle, reader))
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        self.ask(peer, (), |producer| producer.read_failed(handle, reader))
    }

    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError> {
        self.ask(peer, ReleaseReply::Already, |producer| producer.release(handle, reason))
    }

    fn leave(
        &self,
        peer: &Peer,
        handle: Handle,
        consumer: u64,
        reason: &str,
    ) -> Result<ReleaseReply, TransportError> {
        self.ask(peer, ReleaseReply::Already, |producer| producer.leave(handle, consumer, reason))
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        let gone = vec![HeartbeatReply::Gone; handles.len()];
        self.ask(peer, gone, |producer| handles.iter().map(|&handle| producer.heartbeat(handle)).collect())
    }

    fn sweep(&self) {
        self.kept.lock().expect("nobody panics with it").take_if(|line| !line.alive.load(Ordering::Acquire));
    }
}

/// What the suite needs: where a producer's pool lies, and both ends between a producer and its consumers.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

struct Pair(Arc<InProcess>);

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    let line = Arc::new(Line { producer: lender, alive: AtomicBool::new(true) });
    Box::new(Pair(Arc::new(InProcess { line, kept: Mutex::new(None) })))
}

impl Wire for Pair {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.0) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        let producer = &self.0.line.producer;
        Peer {
            address: ([127, 0, 0, 1], 1).into(),
            epoch: producer.epoch(),
            fingerprint: producer.fingerprint(),
        }
    }

    fn kill(&mut self) {
        self.0.line.alive.store(false, Ordering::Release);
    }

    fn kept(&self) -> usize {
        usize::from(self.0.kept.lock().expect("nobody panics with it").is_some())
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

transport_conformance!(start);
