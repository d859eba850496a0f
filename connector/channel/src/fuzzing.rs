//! Entry points of the fuzzer: any bytes are allowed, and a panic means a defect of this crate. Not a public interface.

use crate::wire::{HEADER_BYTES, Header, Reply, Request};

/// Decodes a frame as a request and as a reply. A decoded message must encode to the same message.
pub fn frame(bytes: &[u8]) {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    let header = Header::decode(*header);
    assert_eq!(Header::decode(header.encode()).kind, header.kind);
    let _ = header.control_len();
    if let Ok(request) = Request::decode(header.kind, payload) {
        assert_eq!(decode_frame(&request.encode(), Request::decode), Ok(request));
    }
    if let Ok(reply) = Reply::decode(header.kind, payload) {
        assert_eq!(decode_frame(&reply.encode(), Reply::decode), Ok(reply));
    }
}

fn decode_frame<T, E>(written: &[u8], decode: fn(u8, &[u8]) -> Result<T, E>) -> Result<T, E> {
    let (header, payload) = written.split_first_chunk::<HEADER_BYTES>().expect("a frame has a header");
    let header = Header::decode(*header);
    assert_eq!(header.len, payload.len(), "a frame is as long as it says");
    decode(header.kind, payload)
}
