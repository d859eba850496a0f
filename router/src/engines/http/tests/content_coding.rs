//! Tests of all codings, with the bytes split at any place.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Wake, Waker};

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

use super::*;

fn plain() -> Vec<u8> {
    (0..20_000_u32)
        .flat_map(|n| format!("{{\"n\":{}}}", n.wrapping_mul(2_654_435_761)).into_bytes())
        .collect()
}

/// Each coding's name and the data in it.
fn coded(data: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(data).unwrap();
    let gzip = gzip.finish().unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
    zlib.write_all(data).unwrap();
    let mut bare = DeflateEncoder::new(Vec::new(), Compression::fast());
    bare.write_all(data).unwrap();
    let mut brotli = Vec::new();
    let terms = brotli::enc::BrotliEncoderParams { quality: 3, ..Default::default() };
    brotli::BrotliCompress(&mut &*data, &mut brotli, &terms).unwrap();
    vec![
        ("gzip", gzip.clone()),
        ("X-GZIP", gzip),
        ("deflate", zlib.finish().unwrap()),
        ("deflate", bare.finish().unwrap()),
        ("br", brotli),
        ("identity, zstd", zstd::encode_all(data, 1).unwrap()),
    ]
}

fn decoder(name: &str) -> Box<Decoder> {
    Decoder::of(Coding::default().and(name.as_bytes())).expect("a coding")
}

/// Decodes pieces as reads would return them.
fn decode(decoder: &mut Decoder, pieces: &[&[u8]]) -> Result<Vec<u8>, CallError> {
    let mut pieces: VecDeque<_> = pieces.iter().map(|piece| Bytes::copy_from_slice(piece)).collect();
    let mut data = Vec::new();
    let woken = Arc::new(WakeFlag::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    loop {
        match decoder.poll_piece(&mut context, |_| Poll::Ready(pieces.pop_front().map(Ok))) {
            Poll::Ready(Some(piece)) => {
                let piece = piece?;
                assert!((1..=PIECE_BYTES).contains(&piece.len()), "{}", piece.len());
                data.extend_from_slice(&piece);
            }
            Poll::Ready(None) => {
                assert!(decoder.is_done());
                return Ok(data);
            }
            // Other tasks get a turn.
            Poll::Pending => assert!(woken.0.swap(false, Ordering::Relaxed), "no piece is waited for"),
        }
    }
}

/// Whether a task is to be polled again.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn members_without_data_take_a_bounded_part_of_each_poll() {
    const MEMBERS: usize = 1000;
    for (name, empty) in coded(b"").into_iter().filter(|(name, _)| name.contains('z')) {
        let mut decoder = decoder(name);
        let piece = Bytes::from(empty.repeat(MEMBERS));
        let mut pieces = VecDeque::from([piece.clone(), piece]);
        let woken = Arc::new(WakeFlag::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut left = 2 * MEMBERS * empty.len();
        loop {
            let poll = decoder
                .poll_piece(&mut Context::from_waker(&waker), |_| Poll::Ready(pieces.pop_front().map(Ok)));
            let now = decoder.input.len() + pieces.iter().map(Bytes::len).sum::<usize>();
            assert!(
                (left - now) / empty.len() <= MEMBERS_PER_POLL_MAX + 1,
                "{name}: {} members at once",
                (left - now) / empty.len()
            );
            left = now;
            match poll {
                Poll::Ready(end) => break assert!(end.is_none() && left == 0, "{name}"),
                Poll::Pending => assert!(woken.0.swap(false, Ordering::Relaxed), "{name}"),
            }
        }
    }
}

fn is_malformed(result: Result<Vec<u8>, CallError>) -> bool {
    matches!(result, Err(CallError::Undecodable(ContentCodingError::Malformed)))
}

#[test]
fn every_coding_gives_the_data_at_any_split() {
    let data = plain();
    for (name, coded) in coded(&data) {
        for size in [1, 7, 4096, coded.len()] {
            let pieces: Vec<_> = coded.chunks(size).collect();
            assert!(decode(&mut decoder(name), &pieces).unwrap() == data, "{name} {size}");
        }
    }
}

#[test]
fn flushed_data_is_returned_at_once() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(b"data: 1\n\n").unwrap();
    gzip.flush().unwrap();
    let mut zstd = zstd::Encoder::new(Vec::new(), 1).unwrap();
    zstd.write_all(b"data: 1\n\n").unwrap();
    zstd.flush().unwrap();
    let mut brotli = brotli::CompressorWriter::new(Vec::new(), 4096, 3, 18);
    brotli.write_all(b"data: 1\n\n").unwrap();
    brotli.flush().unwrap();
    for (name, flushed) in [("gzip", gzip.get_ref()), ("zstd", zstd.get_ref()), ("br", brotli.get_ref())] {
        let mut decoder = decoder(name);
        decoder.input = Bytes::copy_from_slice(flushed);
        assert_eq!(decoder.decode(&mut 0).unwrap(), "data: 1\n\n", "{name}");
        assert!(!decoder.is_done(), "{name} has an end that is still to come");
    }
}

#[test]
fn truncated_corrupt_or_trailing_data_is_an_error() {
    let data = plain();
    for (name, coded) in coded(&data) {
        assert!(is_malformed(decode(&mut decoder(name), &[&coded[..coded.len() - 3]])), "{name}: cut");
        let behind = decode(&mut decoder(name), &[&coded, b"behind"]);
        assert!(is_malformed(behind), "{name}: behind its end");
        let mut broken = coded.clone();
        broken.iter_mut().skip(40).step_by(97).for_each(|byte| *byte ^= 0x55);
        match decode(&mut decoder(name), &[&broken]) {
            Err(CallError::Undecodable(_)) => {}
            // Neither bare deflate nor brotli has a checksum.
            Ok(other) => assert!(other != data && matches!(name, "deflate" | "br"), "{name}"),
            Err(error) => panic!("{name}: {error}"),
        }
        assert!(is_malformed(decode(&mut decoder(name), &[b"\xff{\"plain\": 1}"])), "{name}: plain");
    }
    assert_eq!(decode(&mut decoder("gzip"), &[]).unwrap(), b"", "no body at all");
}

#[test]
fn consecutive_members_and_frames_form_one_response() {
    for (name, coded) in coded(b"twice").into_iter().filter(|(name, _)| name.contains('z')) {
        let twice = [&*coded, &*coded].concat();
        assert_eq!(decode(&mut decoder(name), &[&twice]).unwrap(), b"twicetwice", "{name}");
        assert_eq!(decode(&mut decoder(name), &[&coded, &coded]).unwrap(), b"twicetwice", "{name}");
    }
}

#[test]
fn a_window_over_the_bound_is_refused_and_every_window_is_released() {
    let mut wide = zstd::Encoder::new(Vec::new(), 1).unwrap();
    wide.window_log(ZSTD_WINDOW_LOG_MAX + 1).unwrap();
    wide.write_all(&plain()).unwrap();
    let wide = wide.finish().unwrap();
    assert!(is_malformed(decode(&mut decoder("zstd"), &[&wide])));
    for (first, log) in [(0x0c, 16), (0x0b, 22), (0x0f, 24), (0x21, 10), (0x71, 15), (0x01, 17)] {
        assert_eq!(brotli_window(first), 1 << log, "{first:#x}");
    }
}

#[test]
fn an_unknown_coding_or_two_of_them_are_not_guessed() {
    for name in ["snappy", "gzip, br", "gzip,gzip", "aws-chunked", "*"] {
        let error = decode(&mut decoder(name), &[b"x"]).unwrap_err();
        assert!(matches!(error, CallError::Undecodable(ContentCodingError::Unknown)), "{name}");
    }
    for name in ["", "identity", " Identity , ", ","] {
        assert_eq!(Coding::default().and(name.as_bytes()), Coding::Identity, "{name}");
    }
    assert_eq!(Coding::Gzip.and(b"br"), Coding::Unknown, "two fields");
}
