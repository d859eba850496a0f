//! Messages as bytes. Pure: without sockets.
//!
//! Every message after the handshake is a frame: one byte kind, four bytes length (little-endian), payload. A control
//! message has at most [`CONTROL_MESSAGE_MAX_BYTES`] bytes. The granted read bounds the length of a batch of blocks.
//! Decoding any bytes returns a message or a [`WireError`].

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::limits::{BLOCKS_PER_HANDOFF_MAX, CONTROL_MESSAGE_MAX_BYTES, HEARTBEAT_HANDLES_MAX};
use baton_connector::transport::Verdict;
use baton_connector::{Handle, Rank, Reader};

/// Bytes of a frame's header: kind and length.
pub const HEADER_BYTES: usize = 5;

/// Longest text (the reason of a release or refusal), in bytes. Longer texts are truncated.
pub(crate) const TEXT_MAX_BYTES: usize = 256;

const READ_BYTES: usize = 16 + 12 + 4 + 4;
const SLICE_BYTES: usize = 16 + 12 + 4 + 4 + 2 + 2;
const READER_BYTES: usize = 16 + 12;
const GRANTED_BYTES: usize = 4 + 8;

const _: () = assert!(HEARTBEAT_HANDLES_MAX * 16 <= CONTROL_MESSAGE_MAX_BYTES);
const _: () = assert!(16 + TEXT_MAX_BYTES <= CONTROL_MESSAGE_MAX_BYTES);
const _: () = assert!(BLOCKS_PER_HANDOFF_MAX <= u32::MAX as usize);

/// A request of a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Send `count` blocks from entry `first` of the lease's table.
    Read { handle: Handle, reader: Reader, first: u32, count: u32 },
    /// Send tokens `tokens.0..tokens.1` of heads `heads.0..heads.1`, in the order of [`baton_connector::slice`].
    Slice { handle: Handle, reader: Reader, tokens: (u32, u32), heads: (u16, u16) },
    /// This reader has every byte.
    Done { handle: Handle, reader: Reader },
    /// This reader gives up.
    Failed { handle: Handle, reader: Reader },
    /// End the lease.
    Release { handle: Handle, reason: Box<str> },
    /// This consumer of the lease does not read any more.
    Leave { handle: Handle, consumer: u64, reason: Box<str> },
    /// Renew these leases.
    Heartbeat { handles: Vec<Handle> },
}

/// A reply of a producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The read is granted. The transport's frames follow.
    Granted {
        /// Number of requested blocks, or of blocks that a slice touches.
        count: u32,
        /// Bytes of each block, or of the whole slice.
        bytes: u64,
    },
    /// The lease has ended. In place of a batch or of `Complete`, earlier batches are not valid.
    Gone,
    /// Every batch was sent while the lease was live.
    Complete,
    /// The next batch is not computed yet. Sent before a batch, any number of times.
    NotYet,
    /// The read does not fit the lease.
    Refused(Box<str>),
    /// The answer to `Done`.
    Verdict(Verdict),
    /// The answer to `Failed`.
    Noted,
    /// The answer to `Release` and `Leave`.
    Released(ReleaseReply),
    /// The answers to `Heartbeat`, in order.
    Renewed(Vec<HeartbeatReply>),
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The kind is not known.
    #[error("unknown message kind {0:#04x}")]
    Kind(u8),
    /// No message of this kind has this length.
    #[error("message of kind {kind:#04x} has an invalid length of {len} bytes")]
    Length {
        /// The message's kind.
        kind: u8,
        /// Bytes of its payload.
        len: usize,
    },
    /// A value is not valid.
    #[error("message of kind {0:#04x} has a field out of range")]
    Field(u8),
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message.
    pub kind: u8,
    /// Bytes of the payload.
    pub len: usize,
}

/// A batch with `len` bytes of blocks, or of block ids for a one-sided read. The transport defines the frames of a
/// granted read.
pub const KIND_BATCH: u8 = 0x42;

const KIND_READ: u8 = 0x01;
const KIND_DONE: u8 = 0x02;
const KIND_FAILED: u8 = 0x03;
const KIND_RELEASE: u8 = 0x04;
const KIND_HEARTBEAT: u8 = 0x05;
const KIND_SLICE: u8 = 0x06;
const KIND_LEAVE: u8 = 0x07;
const KIND_GRANTED: u8 = 0x81;
const KIND_GONE: u8 = 0x82;
const KIND_REFUSED: u8 = 0x83;
const KIND_VERDICT: u8 = 0x84;
const KIND_NOTED: u8 = 0x85;
const KIND_RELEASED: u8 = 0x86;
const KIND_RENEWED: u8 = 0x87;
const KIND_COMPLETE: u8 = 0x88;
const KIND_NOT_YET: u8 = 0x89;

impl Header {
    /// Decodes a header. The allowed length depends on the context and is not checked here.
    #[must_use]
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Self {
        let [kind, a, b, c, d] = bytes;
        Self { kind, len: u32::from_le_bytes([a, b, c, d]) as usize }
    }

    /// Encodes a header.
    ///
    /// # Panics
    /// When the payload is 4 GiB or longer, which senders avoid.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let len = u32::try_from(self.len).expect("senders keep frames below 4 GiB");
        let [a, b, c, d] = len.to_le_bytes();
        [self.kind, a, b, c, d]
    }

    /// The length, if it is allowed for a control message.
    ///
    /// # Errors
    /// [`WireError::Length`] above [`CONTROL_MESSAGE_MAX_BYTES`].
    pub fn control_len(self) -> Result<usize, WireError> {
        if self.len > CONTROL_MESSAGE_MAX_BYTES {
            return Err(WireError::Length { kind: self.kind, len: self.len });
        }
        Ok(self.len)
    }
}

impl Request {
    /// The whole frame.
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Read { handle, reader, first, count } => FrameWriter::new(KIND_READ)
                .handle(*handle)
                .reader(*reader)
                .bytes(&first.to_le_bytes())
                .bytes(&count.to_le_bytes()),
            Self::Slice { handle, reader, tokens, heads } => FrameWriter::new(KIND_SLICE)
                .handle(*handle)
                .reader(*reader)
                .bytes(&tokens.0.to_le_bytes())
                .bytes(&tokens.1.to_le_bytes())
                .bytes(&heads.0.to_le_bytes())
                .bytes(&heads.1.to_le_bytes()),
            Self::Done { handle, reader } => FrameWriter::new(KIND_DONE).handle(*handle).reader(*reader),
            Self::Failed { handle, reader } => FrameWriter::new(KIND_FAILED).handle(*handle).reader(*reader),
            Self::Release { handle, reason } => FrameWriter::new(KIND_RELEASE).handle(*handle).text(reason),
            Self::Leave { handle, consumer, reason } => {
                FrameWriter::new(KIND_LEAVE).handle(*handle).bytes(&consumer.to_le_bytes()).text(reason)
            }
            Self::Heartbeat { handles } => {
                handles.iter().fold(FrameWriter::new(KIND_HEARTBEAT), |frame, handle| frame.handle(*handle))
            }
        }
        .done()
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// [`WireError`]; the connection cannot be used any more.
    pub(crate) fn decode(kind: u8, payload: &[u8]) -> Result<Self, WireError> {
        let mut fields = FieldReader { kind, rest: payload };
        let request = match kind {
            KIND_READ => {
                fields.check_length(READ_BYTES)?;
                let (handle, reader) = (fields.handle()?, fields.reader()?);
                Self::Read { handle, reader, first: fields.u32()?, count: fields.u32()? }
            }
            KIND_SLICE => {
                fields.check_length(SLICE_BYTES)?;
                Self::Slice {
                    handle: fields.handle()?,
                    reader: fields.reader()?,
                    tokens: (fields.u32()?, fields.u32()?),
                    heads: (fields.u16()?, fields.u16()?),
                }
            }
            KIND_DONE | KIND_FAILED => {
                fields.check_length(READER_BYTES)?;
                let (handle, reader) = (fields.handle()?, fields.reader()?);
                if kind == KIND_DONE {
                    Self::Done { handle, reader }
                } else {
                    Self::Failed { handle, reader }
                }
            }
            KIND_RELEASE => Self::Release { handle: fields.handle()?, reason: fields.text()? },
            KIND_LEAVE => {
                Self::Leave { handle: fields.handle()?, consumer: fields.u64()?, reason: fields.text()? }
            }
            KIND_HEARTBEAT => {
                let count = payload.len() / 16;
                if !payload.len().is_multiple_of(16) || count > HEARTBEAT_HANDLES_MAX {
                    return Err(WireError::Length { kind, len: payload.len() });
                }
                Self::Heartbeat { handles: (0..count).map(|_| fields.handle()).collect::<Result<_, _>>()? }
            }
            _ => return Err(WireError::Kind(kind)),
        };
        Ok(request)
    }
}

impl Reply {
    /// The whole frame.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Granted { count, bytes } => {
                FrameWriter::new(KIND_GRANTED).bytes(&count.to_le_bytes()).bytes(&bytes.to_le_bytes())
            }
            Self::Gone => FrameWriter::new(KIND_GONE),
            Self::Complete => FrameWriter::new(KIND_COMPLETE),
            Self::NotYet => FrameWriter::new(KIND_NOT_YET),
            Self::Refused(why) => FrameWriter::new(KIND_REFUSED).text(why),
            Self::Verdict(verdict) => FrameWriter::new(KIND_VERDICT).bytes(&[verdict_byte(*verdict)]),
            Self::Noted => FrameWriter::new(KIND_NOTED),
            Self::Released(reply) => FrameWriter::new(KIND_RELEASED).bytes(&[release_byte(*reply)]),
            Self::Renewed(replies) => replies
                .iter()
                .fold(FrameWriter::new(KIND_RENEWED), |f, reply| f.bytes(&[heartbeat_byte(*reply)])),
        }
        .done()
    }

    /// Decodes a payload.
    ///
    /// # Errors
    /// [`WireError`]; the connection cannot be used any more.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, WireError> {
        let mut fields = FieldReader { kind, rest: payload };
        match kind {
            KIND_GRANTED => {
                fields.check_length(GRANTED_BYTES)?;
                Ok(Self::Granted { count: fields.u32()?, bytes: fields.u64()? })
            }
            KIND_GONE => fields.check_length(0).map(|()| Self::Gone),
            KIND_COMPLETE => fields.check_length(0).map(|()| Self::Complete),
            KIND_NOT_YET => fields.check_length(0).map(|()| Self::NotYet),
            KIND_REFUSED => Ok(Self::Refused(fields.text()?)),
            KIND_VERDICT => {
                fields.check_length(1)?;
                match fields.array()? {
                    [0] => Ok(Self::Verdict(Verdict::Gone)),
                    [1] => Ok(Self::Verdict(Verdict::Valid)),
                    [_] => Err(WireError::Field(kind)),
                }
            }
            KIND_NOTED => fields.check_length(0).map(|()| Self::Noted),
            KIND_RELEASED => {
                fields.check_length(1)?;
                let [byte] = fields.array()?;
                let known = ReleaseReply::ALL.into_iter().find(|reply| release_byte(*reply) == byte);
                known.map(Self::Released).ok_or(WireError::Field(kind))
            }
            KIND_RENEWED => {
                if payload.len() > HEARTBEAT_HANDLES_MAX {
                    return Err(WireError::Length { kind, len: payload.len() });
                }
                let reply = |byte: &u8| match byte {
                    0 => Ok(HeartbeatReply::Gone),
                    1 => Ok(HeartbeatReply::Renewed),
                    _ => Err(WireError::Field(kind)),
                };
                Ok(Self::Renewed(payload.iter().map(reply).collect::<Result<_, _>>()?))
            }
            _ => Err(WireError::Kind(kind)),
        }
    }
}

fn release_byte(reply: ReleaseReply) -> u8 {
    match reply {
        ReleaseReply::Released => 1,
        ReleaseReply::Draining => 2,
        ReleaseReply::Already => 3,
        ReleaseReply::Unknown => 4,
    }
}

fn verdict_byte(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Gone => 0,
        Verdict::Valid => 1,
    }
}

fn heartbeat_byte(reply: HeartbeatReply) -> u8 {
    match reply {
        HeartbeatReply::Gone => 0,
        HeartbeatReply::Renewed => 1,
    }
}

/// The longest prefix of at most [`TEXT_MAX_BYTES`] bytes that ends between two characters.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_MAX_BYTES)]
}

/// A frame being written.
struct FrameWriter(Vec<u8>);

impl FrameWriter {
    fn new(kind: u8) -> Self {
        Self(Header { kind, len: 0 }.encode().to_vec())
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn handle(self, handle: Handle) -> Self {
        self.bytes(&handle.0.to_le_bytes())
    }

    fn reader(self, reader: Reader) -> Self {
        self.bytes(&reader.consumer.to_le_bytes())
            .bytes(&reader.of.to_le_bytes())
            .bytes(&reader.rank.0.to_le_bytes())
    }

    fn text(self, text: &str) -> Self {
        self.bytes(truncated(text).as_bytes())
    }

    fn done(mut self) -> Vec<u8> {
        let header = Header { kind: self.0[0], len: self.0.len() - HEADER_BYTES };
        self.0[..HEADER_BYTES].copy_from_slice(&header.encode());
        self.0
    }
}

/// A payload being read.
struct FieldReader<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl FieldReader<'_> {
    fn check_length(&self, len: usize) -> Result<(), WireError> {
        if self.rest.len() == len { Ok(()) } else { Err(self.wrong_length()) }
    }

    fn wrong_length(&self) -> WireError {
        WireError::Length { kind: self.kind, len: self.rest.len() }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (head, rest) = self.rest.split_first_chunk().ok_or_else(|| self.wrong_length())?;
        self.rest = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    fn handle(&mut self) -> Result<Handle, WireError> {
        self.array().map(|bytes| Handle(u128::from_le_bytes(bytes)))
    }

    fn reader(&mut self) -> Result<Reader, WireError> {
        let (consumer, of, rank) = (self.u64()?, self.u16()?, Rank(self.u16()?));
        Reader::link(consumer, rank, of).ok_or(WireError::Field(self.kind))
    }

    fn text(&mut self) -> Result<Box<str>, WireError> {
        if self.rest.len() > TEXT_MAX_BYTES {
            return Err(self.wrong_length());
        }
        std::str::from_utf8(self.rest).map(Into::into).map_err(|_| WireError::Field(self.kind))
    }
}

#[cfg(test)]
mod tests;
