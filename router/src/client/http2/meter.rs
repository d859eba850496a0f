//! Counts a client's frames, and finds floods of cheap frames that make the router work. Pure: bytes and times in.
//!
//! `h2` bounds the memory of each kind of frame. The meter bounds the work: a frame without a request costs a part of an
//! allowance, which time and useful work fill again.
//!
//! | allowance | spent by | filled by |
//! |---|---|---|
//! | control | `PING`, `SETTINGS`, `PRIORITY`, `WINDOW_UPDATE`, `CONTINUATION`, empty `DATA`, unknown frames | time, `DATA` frames of responses |
//! | resets | `RST_STREAM` | time, complete responses |
//!
//! The meter also knows since when a block of headers is incomplete.

use std::time::Instant;

/// What every client sends first.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes of a frame's head.
const HEAD_BYTES: usize = 9;
/// Control frames at once. Browsers begin with fewer than ten, and gRPC clients send one `PING` per 64 KiB.
const CONTROL_BURST: u32 = 1_000;
/// Control frames per second, for ever: a client that probes its connection sends one in a second.
const CONTROL_PER_SECOND: u32 = 100;
/// `WINDOW_UPDATE` frames that one `DATA` frame of a response pays for: of the stream, and of the connection.
const CONTROL_PER_DATA_FRAME: u32 = 2;
/// The price of a `PING` answer: the router sends one `PING` in a connection's life, and `h2` logs each other answer.
const PONG_PRICE: u32 = CONTROL_BURST / 4;
/// Resets at once, in numbers of concurrent streams: all clients of a gateway may leave, twice.
const RESET_BURSTS: u32 = 2;
/// Fewest resets at once.
const RESET_BURST_MIN: u32 = 100;
/// Resets per second, for ever. With complete responses a client may reset half of its streams at any rate.
const RESETS_PER_SECOND: u32 = 100;

const DATA: u8 = 0x0;
const HEADERS: u8 = 0x1;
const RST_STREAM: u8 = 0x3;
const PING: u8 = 0x6;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

/// The flood that ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flood {
    /// Of control frames.
    Control,
    /// Of resets.
    Resets,
}

/// The frames of one connection.
#[derive(Debug)]
pub(super) struct FrameMeter {
    /// Bytes before the next frame's head.
    skip: usize,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Since when a block of headers is incomplete.
    block: Option<Instant>,
    /// The current frame ends the block.
    ends_block: bool,
    control: Allowance,
    resets: Allowance,
}

impl FrameMeter {
    /// For a client that may have so many concurrent streams.
    pub(super) fn new(streams_max: u32, now: Instant) -> Self {
        let resets = streams_max.saturating_mul(RESET_BURSTS).max(RESET_BURST_MIN);
        Self {
            skip: PREFACE.len(),
            head: [0; HEAD_BYTES],
            head_bytes: 0,
            block: None,
            ends_block: false,
            control: Allowance::new(CONTROL_BURST, CONTROL_PER_SECOND, now),
            resets: Allowance::new(resets, RESETS_PER_SECOND, now),
        }
    }

    /// Counts what the client has sent.
    ///
    /// # Errors
    /// [`Flood`] as soon as an allowance is spent.
    pub(super) fn read(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                self.end_frame();
                continue;
            }
            let taken = bytes.len().min(HEAD_BYTES - self.head_bytes);
            self.head[self.head_bytes..self.head_bytes + taken].copy_from_slice(&bytes[..taken]);
            self.head_bytes += taken;
            bytes = &bytes[taken..];
            if self.head_bytes == HEAD_BYTES {
                self.head_bytes = 0;
                self.begin_frame(now)?;
                self.end_frame();
            }
        }
        Ok(())
    }

    fn begin_frame(&mut self, now: Instant) -> Result<(), Flood> {
        let [a, b, c, kind, flags, ..] = self.head;
        self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        let price = match kind {
            DATA => u32::from(self.skip == 0 && flags & END_STREAM == 0),
            HEADERS => 0,
            RST_STREAM => return if self.resets.spend(1, now) { Ok(()) } else { Err(Flood::Resets) },
            PING if flags & ACK != 0 => PONG_PRICE,
            _ => 1,
        };
        if matches!(kind, HEADERS | CONTINUATION) {
            self.block.get_or_insert(now);
            self.ends_block = flags & END_HEADERS != 0;
        }
        if self.control.spend(price, now) { Ok(()) } else { Err(Flood::Control) }
    }

    fn end_frame(&mut self) {
        if self.skip == 0 && std::mem::take(&mut self.ends_block) {
            self.block = None;
        }
    }

    /// Since when a block of headers is incomplete.
    pub(super) fn block_since(&self) -> Option<Instant> {
        self.block
    }

    /// Counts useful work: `DATA` frames of responses, and complete responses.
    pub(super) fn earn(&mut self, data_frames: u32, responses: u32) {
        self.control.fill(data_frames.saturating_mul(CONTROL_PER_DATA_FRAME));
        self.resets.fill(responses);
    }
}

/// A number of frames that time fills again.
#[derive(Debug)]
struct Allowance {
    most: u32,
    left: u32,
    per_second: u32,
    /// The time up to which it is filled.
    filled: Instant,
}

impl Allowance {
    fn new(most: u32, per_second: u32, now: Instant) -> Self {
        Self { most, left: most, per_second, filled: now }
    }

    /// Whether the price was left.
    fn spend(&mut self, price: u32, now: Instant) -> bool {
        if self.left < price {
            let waited = now.saturating_duration_since(self.filled).as_millis();
            let frames = waited.saturating_mul(u128::from(self.per_second)) / 1_000;
            self.fill(u32::try_from(frames).unwrap_or(u32::MAX));
            self.filled = now;
        }
        match self.left.checked_sub(price) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    fn fill(&mut self, frames: u32) {
        self.left = self.left.saturating_add(frames).min(self.most);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        frame.extend_from_slice(payload);
        frame
    }

    fn meter(now: Instant) -> FrameMeter {
        let mut meter = FrameMeter::new(8, now);
        meter.read(PREFACE, now).unwrap();
        meter
    }

    /// How many of these frames pass at once.
    fn passes(frame: &[u8]) -> u32 {
        let now = Instant::now();
        let mut meter = meter(now);
        (0..10_000).take_while(|_| meter.read(frame, now).is_ok()).count().try_into().unwrap()
    }

    #[test]
    fn frames_without_a_request_are_bounded_and_requests_are_not() {
        for (kind, flags, payload, most) in [
            (0x4, 0, 0, CONTROL_BURST),
            (PING, 0, 8, CONTROL_BURST),
            (PING, ACK, 8, 4),
            (0x2, 0, 5, CONTROL_BURST),
            (0x8, 0, 4, CONTROL_BURST),
            (CONTINUATION, 0, 0, CONTROL_BURST),
            (0xbe, 0, 7, CONTROL_BURST),
            (DATA, 0, 0, CONTROL_BURST),
            (DATA, END_STREAM, 0, 10_000),
            (DATA, 0, 1, 10_000),
            (HEADERS, END_HEADERS, 9, 10_000),
            (RST_STREAM, 0, 4, RESET_BURST_MIN),
        ] {
            assert_eq!(passes(&frame(kind, flags, &vec![0; payload])), most, "{kind} {flags} {payload}");
        }
    }

    #[test]
    fn time_and_useful_work_fill_an_allowance_up_to_its_size() {
        let now = Instant::now();
        let mut meter = meter(now);
        let reset = frame(RST_STREAM, 0, &[]);
        let drain = |meter: &mut FrameMeter, now| {
            (0..10_000).take_while(|_| meter.read(&reset, now) == Ok(())).count()
        };
        assert_eq!(drain(&mut meter, now), RESET_BURST_MIN as usize);
        assert_eq!(meter.read(&reset, now), Err(Flood::Resets));
        meter.earn(0, 3);
        assert_eq!(drain(&mut meter, now), 3);
        assert_eq!(drain(&mut meter, now + Duration::from_millis(50)), 5);
        let later = now + Duration::from_secs(3600);
        assert_eq!(drain(&mut meter, later), RESET_BURST_MIN as usize);
        let update = frame(0x8, 0, &[0; 4]);
        for _ in 0..10_000 {
            assert_eq!(meter.read(&update, later), Ok(()));
            assert_eq!(meter.read(&update, later), Ok(()));
            meter.earn(1, 0);
        }
    }

    #[test]
    fn a_block_of_headers_is_incomplete_until_its_last_byte() {
        let now = Instant::now();
        let mut meter = meter(now);
        let blocks = [frame(HEADERS, 0, &[1; 20]), frame(CONTINUATION, END_HEADERS, &[2; 20])].concat();
        for byte in &blocks[..blocks.len() - 1] {
            meter.read(&[*byte], now).unwrap();
        }
        assert_eq!(meter.block_since(), Some(now));
        meter.read(&[2], now + Duration::from_secs(1)).unwrap();
        assert_eq!(meter.block_since(), None);
        meter.read(&frame(HEADERS, END_HEADERS, &[]), now).unwrap();
        assert_eq!(meter.block_since(), None);
    }

    #[test]
    fn every_split_counts_the_same() {
        let now = Instant::now();
        let frames = [
            frame(HEADERS, 0, &[0; 3]),
            frame(PING, 0, &[0; 8]),
            frame(RST_STREAM, 0, &[9; 4]),
            frame(0x4, 0, &[]),
        ];
        let bytes = [PREFACE, &frames.concat(), &frame(CONTINUATION, END_HEADERS, &[0; 5])].concat();
        let counted = |size: usize| {
            let mut meter = FrameMeter::new(8, now);
            for piece in bytes.chunks(size) {
                meter.read(piece, now).unwrap();
            }
            format!("{meter:?}")
        };
        for size in 1..bytes.len() {
            assert_eq!(counted(size), counted(bytes.len()), "{size}");
        }
    }
}
