//! The smallest transport that meets the contract: between threads of one process, over a bounded channel. It is a
//! starting point for other transports (`docs/reference/contract.md`), and shows what each requirement needs.
//!
//! ```text
//! consumer's thread                              producer's thread, one for each read
//!   read ── epoch, layout match?                   begin_read: the ledger grants, or returns gone or refused
//!   ◀── Bytes ◀── Bytes … ◀── End                  before every block: is the lease live, and is the block computed?
//!   finish ─────────────────────────────▶          finish_read: the ledger's verdict
//! ```
//!
//! Only the consumer's thread writes into landing blocks, from received data, and only within `read`. So no thread
//! writes there after the return of `read`.

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
use baton_connector::slice::{Run, SliceRange};
use baton_connector::transport::{
    Part, Peer, Producer, ReadOrder, Readiness, StopFlag, Transport, TransportError, Verdict,
};
use baton_connector::{BlockId, Handle, KvLayout, Reader};
use conformance::{TestProducer, TransportHarness};

/// Pieces that a producer may be ahead of its reader.
const WINDOW: usize = 4;
/// How often a waiting thread checks for changes.
const SLICE: Duration = Duration::from_millis(20);
/// A producer that is silent for this long has failed. `transport::SILENCE` outside of tests.
const SILENCE: Duration = Duration::from_millis(700);

/// A message of a producer.
enum Message {
    Bytes(Vec<u8>),
    /// The producer is alive, but the next block is not computed yet.
    NotYet,
    /// No further message follows.
    End(Result<(), TransportError>),
}

/// The requested entries of the lease's table, and the range of a slice read.
type RequestedRange = (Range<usize>, Option<(SliceRange, KvLayout)>);

/// The producer's end. A real transport has a socket here.
struct ProducerEnd {
    producer: Arc<dyn Producer>,
    alive: AtomicBool,
}

/// Why a consumer was not admitted.
enum AdmitError {
    Gone,
    Other(TransportError),
}

impl ProducerEnd {
    /// The handshake. In a real transport both ends first prove the cluster's secret.
    fn admit(&self, peer: &Peer) -> Result<(), AdmitError> {
        if !self.alive.load(Ordering::Acquire) {
            let why = TransportError::Handshake(peer.address, "no producer".into());
            return Err(AdmitError::Other(why));
        }
        if peer.epoch != self.producer.epoch() {
            return Err(AdmitError::Gone);
        }
        if peer.fingerprint != self.producer.fingerprint() {
            return Err(AdmitError::Other(TransportError::Refused("another layout".into())));
        }
        Ok(())
    }

    /// One read, on a thread of its own.
    fn deliver(&self, order: &ReadOrder, out: &SyncSender<Message>) {
        let (handle, reader) = (order.handle, order.reader);
        let begun = self.requested_range(order).and_then(|(entries, slice)| {
            let blocks = self.producer.begin_read(handle, reader, entries.start, entries.len())?;
            Ok((entries.start, blocks, slice))
        });
        let (first, blocks, slice) = match begun {
            Ok(begun) => begun,
            Err(why) => return drop(out.send(Message::End(Err(why)))),
        };
        for (at, &block) in blocks.iter().enumerate() {
            let brought = loop {
                match self.producer.await_ready(handle, reader, first + at + 1, SLICE) {
                    Readiness::Ready => break self.producer.download_blocks(&[block]),
                    Readiness::Gone => break Err(TransportError::Gone),
                    Readiness::NotYet => {
                        if out.send(Message::NotYet).is_err() {
                            return self.producer.fail_read(handle, reader);
                        }
                    }
                }
            };
            let sent = match brought {
                Ok(()) => {
                    out.send(Message::Bytes(gather(self.producer.region(), &blocks, at, slice.as_ref())))
                }
                Err(why) => {
                    // The reader has copied what it received, or never will: the read is over.
                    self.producer.fail_read(handle, reader);
                    return drop(out.send(Message::End(Err(why))));
                }
            };
            if sent.is_err() {
                return self.producer.fail_read(handle, reader);
            }
        }
        // The reader is in flight until it is done or gives up. So the lease is not closed before that.
        if out.send(Message::End(Ok(()))).is_err() {
            self.producer.fail_read(handle, reader);
        }
    }

    /// The requested range of a read. The ledger checks it against the lease.
    fn requested_range(&self, order: &ReadOrder) -> Result<RequestedRange, TransportError> {
        let refused = |why: String| TransportError::Refused(why.into());
        match &order.part {
            Part::Blocks { first } => {
                let end = first.checked_add(order.into.len());
                let end = end.ok_or_else(|| refused("no table has so many entries".to_owned()))?;
                Ok((*first..end, None))
            }
            Part::Slice(slice) => {
                let layout = self.producer.layout().ok_or_else(|| refused("whole blocks only".to_owned()))?;
                slice.range.check(&layout).map_err(|why| refused(why.to_string()))?;
                Ok((slice.range.entries(&layout), Some((slice.range.clone(), layout))))
            }
        }
    }
}

/// The bytes of one block of a read, or the part of it that belongs to the slice.
fn gather(region: &Region, blocks: &[BlockId], at: usize, slice: Option<&(SliceRange, KvLayout)>) -> Vec<u8> {
    let block = region.read_block(blocks[at]);
    let Some((range, layout)) = slice else { return block };
    let mut runs = Vec::new();
    range.runs(layout, &range.piece(layout, at), &mut runs);
    // A piece of a slice lies in one block of the producer.
    runs.iter().flat_map(|run| &block[run.offset..][..run.len]).copied().collect()
}

/// Writes received bytes into the landing blocks; false if their size is not the requested one.
fn scatter(region: &Region, order: &ReadOrder, at: usize, bytes: &[u8]) -> bool {
    let Part::Slice(slice) = &order.part else {
        let fits = at < order.into.len() && bytes.len() == region.block_bytes();
        if fits {
            region.write_block(order.into[at], bytes);
        }
        return fits;
    };
    let (piece, mut runs) = (slice.range.piece(&slice.producer, at), Vec::new());
    if at >= slice.range.entries(&slice.producer).len() || bytes.len() != slice.piece_bytes(&piece) {
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
struct InProcessTransport {
    producer_end: Arc<ProducerEnd>,
    /// An idle connection for the next call.
    idle: Mutex<Option<Arc<ProducerEnd>>>,
}

impl InProcessTransport {
    fn connect(&self, peer: &Peer) -> Result<Arc<ProducerEnd>, AdmitError> {
        self.producer_end.admit(peer)?;
        let mut idle = self.idle.lock().expect("no panic");
        Ok(Arc::clone(idle.get_or_insert_with(|| Arc::clone(&self.producer_end))))
    }

    /// Sends a message about a lease. `gone` is the answer of a producer of another epoch.
    fn ask<T>(
        &self,
        peer: &Peer,
        gone: T,
        ask: impl FnOnce(&dyn Producer) -> T,
    ) -> Result<T, TransportError> {
        match self.connect(peer) {
            Ok(producer_end) => Ok(ask(&*producer_end.producer)),
            Err(AdmitError::Gone) => Ok(gone),
            Err(AdmitError::Other(why)) => Err(why),
        }
    }
}

/// Receives the blocks of a read and writes them into the landing blocks.
fn land(
    producer_end: &ProducerEnd,
    pieces: &Receiver<Message>,
    order: &ReadOrder,
    region: &Region,
    stop: &StopFlag,
) -> Result<(), TransportError> {
    let pieces_of = match &order.part {
        Part::Blocks { .. } => order.into.len(),
        Part::Slice(slice) => slice.range.entries(&slice.producer).len(),
    };
    let (mut landed, mut last_message) = (0, Instant::now());
    let broken = |why: &str| Err(TransportError::Transfer(why.into()));
    loop {
        if stop.load(Ordering::Acquire) {
            return Err(TransportError::Stopped);
        }
        if !producer_end.alive.load(Ordering::Acquire) {
            return broken("the producer has died");
        }
        match pieces.recv_timeout(SLICE) {
            Ok(Message::Bytes(bytes)) if scatter(region, order, landed, &bytes) => landed += 1,
            Ok(Message::Bytes(_)) => return broken("the producer sends what was not asked for"),
            Ok(Message::NotYet) => {}
            Ok(Message::End(Ok(()))) if landed < pieces_of => return broken("blocks are missing"),
            Ok(Message::End(end)) => return end,
            Err(RecvTimeoutError::Timeout) if last_message.elapsed() < SILENCE => continue,
            Err(RecvTimeoutError::Timeout) => return broken("the producer is silent"),
            Err(RecvTimeoutError::Disconnected) => return broken("the connection has ended"),
        }
        last_message = Instant::now();
    }
}

impl Transport for InProcessTransport {
    fn carrier(&self, _: &Peer) -> &'static str {
        "in_process"
    }

    // This transport reports no landed blocks.
    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        let producer_end = self.connect(peer).map_err(|why| match why {
            AdmitError::Gone => TransportError::Gone,
            AdmitError::Other(why) => why,
        })?;
        if let Part::Slice(slice) = &order.part {
            slice.check(order.into.len()).map_err(|why| TransportError::Refused(why.to_string().into()))?;
        }
        let (out, pieces) = sync_channel(WINDOW);
        let (server, requested) = (Arc::clone(&producer_end), order.clone());
        thread::spawn(move || server.deliver(&requested, &out));
        let read = land(&producer_end, &pieces, order, region, stop);
        // The producer's thread notices the end of the read only when it sends again. It may have sent everything.
        let left = matches!(read, Err(TransportError::Stopped | TransportError::Transfer(_)));
        if left && producer_end.alive.load(Ordering::Acquire) {
            producer_end.producer.fail_read(order.handle, order.reader);
        }
        read
    }

    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        self.ask(peer, Verdict::Gone, |producer| producer.finish_read(handle, reader))
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        self.ask(peer, (), |producer| producer.fail_read(handle, reader))
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
        let mut idle = self.idle.lock().expect("no panic");
        idle.take_if(|producer_end| !producer_end.alive.load(Ordering::Acquire));
    }
}

/// What the suite needs: the memory of a producer's pool, and the two ends of the transport.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

struct InProcessHarness(Arc<InProcessTransport>);

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let producer_end = Arc::new(ProducerEnd { producer, alive: AtomicBool::new(true) });
    Box::new(InProcessHarness(Arc::new(InProcessTransport { producer_end, idle: Mutex::new(None) })))
}

impl TransportHarness for InProcessHarness {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.0) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        let producer = &self.0.producer_end.producer;
        Peer {
            address: ([127, 0, 0, 1], 1).into(),
            epoch: producer.epoch(),
            fingerprint: producer.fingerprint(),
        }
    }

    fn kill(&mut self) {
        self.0.producer_end.alive.store(false, Ordering::Release);
    }

    fn idle_connections(&self) -> usize {
        usize::from(self.0.idle.lock().expect("no panic").is_some())
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

transport_conformance!(start);
