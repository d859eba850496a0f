//! Tests of the codec with round trips and with random bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use baton_connector::limits::LINKS_MAX;

use super::*;

fn handle() -> impl Strategy<Value = Handle> {
    any::<u128>().prop_map(Handle)
}

fn reader() -> impl Strategy<Value = Reader> {
    (any::<u64>(), 1..=LINKS_MAX as u16).prop_flat_map(|(consumer, of)| {
        (0..of).prop_map(move |rank| Reader { consumer, of, rank: Rank(rank) })
    })
}

fn text() -> impl Strategy<Value = Box<str>> {
    vec(any::<char>(), 0..=TEXT_MAX_BYTES / 4).prop_map(|chars| chars.into_iter().collect::<String>().into())
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        (handle(), reader(), any::<u32>(), any::<u32>())
            .prop_map(|(handle, reader, first, count)| Request::Read { handle, reader, first, count }),
        (handle(), reader(), any::<(u32, u32)>(), any::<(u16, u16)>())
            .prop_map(|(handle, reader, tokens, heads)| Request::Slice { handle, reader, tokens, heads }),
        (handle(), any::<u64>(), text()).prop_map(|(handle, consumer, reason)| Request::Leave {
            handle,
            consumer,
            reason
        }),
        (handle(), reader()).prop_map(|(handle, reader)| Request::Done { handle, reader }),
        (handle(), reader()).prop_map(|(handle, reader)| Request::Failed { handle, reader }),
        (handle(), text()).prop_map(|(handle, reason)| Request::Release { handle, reason }),
        vec(handle(), 0..=HEARTBEAT_HANDLES_MAX).prop_map(|handles| Request::Heartbeat { handles }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let renewed = prop_oneof![Just(HeartbeatReply::Renewed), Just(HeartbeatReply::Gone)];
    prop_oneof![
        (any::<u32>(), any::<u64>()).prop_map(|(count, bytes)| Reply::Granted { count, bytes }),
        Just(Reply::Gone),
        Just(Reply::Complete),
        Just(Reply::NotYet),
        Just(Reply::Noted),
        Just(Reply::Verdict(Verdict::Valid)),
        Just(Reply::Verdict(Verdict::Gone)),
        text().prop_map(Reply::Refused),
        (0..ReleaseReply::ALL.len()).prop_map(|i| Reply::Released(ReleaseReply::ALL[i])),
        vec(renewed, 0..=HEARTBEAT_HANDLES_MAX).prop_map(Reply::Renewed),
    ]
}

fn split(frame: &[u8]) -> (Header, &[u8]) {
    let (header, payload) = frame.split_first_chunk().expect("a frame has a header");
    (Header::decode(*header), payload)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_request_round_trips_on_the_wire(request in request()) {
        let frame = request.encode();
        let (header, payload) = split(&frame);
        prop_assert_eq!(header.control_len(), Ok(payload.len()));
        prop_assert_eq!(Request::decode(header.kind, payload), Ok(request));
    }

    #[test]
    fn every_reply_round_trips_on_the_wire(reply in reply()) {
        let frame = reply.encode();
        let (header, payload) = split(&frame);
        prop_assert_eq!(header.control_len(), Ok(payload.len()));
        prop_assert_eq!(Reply::decode(header.kind, payload), Ok(reply));
    }

    #[test]
    fn noise_is_a_message_or_an_error(kind in any::<u8>(), payload in vec(any::<u8>(), 0..600)) {
        // A decoded message must encode to the same bytes: no byte of a message is ignored.
        if let Ok(request) = Request::decode(kind, &payload) {
            prop_assert_eq!(&request.encode()[HEADER_BYTES..], &payload[..]);
        }
        if let Ok(reply) = Reply::decode(kind, &payload) {
            prop_assert_eq!(&reply.encode()[HEADER_BYTES..], &payload[..]);
        }
    }

    #[test]
    fn a_truncated_or_extended_request_of_fixed_length_is_an_error(
        request in request(), cut in 1_usize..16, more in vec(any::<u8>(), 1..16),
    ) {
        let frame = request.encode();
        let (header, payload) = split(&frame);
        let fixed = !matches!(
            request,
            Request::Release { .. } | Request::Leave { .. } | Request::Heartbeat { .. }
        );
        prop_assume!(fixed);
        let shorter = &payload[..payload.len().saturating_sub(cut)];
        prop_assert!(Request::decode(header.kind, shorter).is_err());
        prop_assert!(Request::decode(header.kind, &[payload, &more].concat()).is_err());
    }
}

#[test]
fn a_reader_that_is_not_one_of_its_own_number_is_an_error() {
    let reader =
        |rank, of| Request::Done { handle: Handle(1), reader: Reader { consumer: 2, of, rank: Rank(rank) } };
    for (rank, of) in [(0, 0), (1, 1), (0, LINKS_MAX as u16 + 1), (u16::MAX, u16::MAX)] {
        let frame = reader(rank, of).encode();
        let (header, payload) = split(&frame);
        assert_eq!(Request::decode(header.kind, payload), Err(WireError::Field(KIND_DONE)));
    }
}

#[test]
fn a_control_message_has_a_greatest_length() {
    let header = Header { kind: 1, len: CONTROL_MESSAGE_MAX_BYTES + 1 };
    assert_eq!(
        Header::decode(header.encode()).control_len(),
        Err(WireError::Length { kind: 1, len: CONTROL_MESSAGE_MAX_BYTES + 1 })
    );
}

#[test]
fn a_long_reason_is_cut_between_two_characters() {
    let reason: Box<str> = "é".repeat(TEXT_MAX_BYTES).into();
    let frame = Request::Release { handle: Handle(1), reason }.encode();
    let (header, payload) = split(&frame);
    let Ok(Request::Release { reason, .. }) = Request::decode(header.kind, payload) else {
        panic!("a release");
    };
    assert_eq!(&*reason, "é".repeat(TEXT_MAX_BYTES / 2));
}
