//! Tests of streams that are split in any way, compared with the standard's algorithm.

use super::*;
use crate::message::embedded_error::EmbeddedError;
use crate::message::usage::{FinishReason, Usage, UsageScan};

const STREAM: &[u8] = b"data: {\"a\":1}\n\n: keep-alive\n\ndata: {\"b\":2}\r\n\r\ndata: [DONE]\n\n";

#[test]
fn every_split_gives_the_same_bytes_and_only_whole_frames() {
    for first in 0..STREAM.len() {
        for second in first..STREAM.len() {
            let mut frames = FrameBuffer::default();
            let mut passed = Vec::new();
            for piece in [&STREAM[..first], &STREAM[first..second], &STREAM[second..]] {
                let out = frames.pass(Bytes::copy_from_slice(piece));
                let whole = out.is_empty() || out.ends_with(b"\n\n") || out.ends_with(b"\r\n\r\n");
                assert!(whole, "half a frame at {first}/{second}: {out:?}");
                passed.extend_from_slice(&out);
            }
            assert_eq!(passed, STREAM, "split at {first} and {second}");
            assert!(frames.is_done() && !frames.is_inside());
        }
    }
}

#[test]
fn whole_frames_pass_without_being_held_or_copied() {
    let chunk = Bytes::from_static(b"data: 1\n\n");
    let passed = FrameBuffer::default().pass(chunk.clone());
    assert_eq!(passed.as_ptr(), chunk.as_ptr());
}

#[test]
fn done_counts_only_as_a_frame() {
    let mut frames = FrameBuffer::default();
    frames.pass(Bytes::from_static(b"data: {\"text\":\"data: [DONE]\"}\n\n"));
    assert!(!frames.is_done());
    frames.pass(Bytes::from_static(b"data: [DONE]\n"));
    assert!(!frames.is_done());
    frames.pass(Bytes::from_static(b"\n"));
    assert!(frames.is_done());
}

/// The passed bytes, the usage and the error of a stream that comes in pieces of so many bytes.
fn streamed(
    stream: &str,
    piece: usize,
    reading: StreamReadOptions,
) -> (String, UsageScan, Option<EmbeddedError>) {
    let (mut frames, mut scan, mut passed) = (FrameBuffer::new(reading), UsageScan::default(), Vec::new());
    for piece in stream.as_bytes().chunks(piece.max(1)) {
        let whole = frames.pass(Bytes::copy_from_slice(piece));
        let FilteredFrames { forwarded: good, error } = frames.read(whole, &mut scan);
        passed.extend_from_slice(&good);
        if error.is_some() {
            return (String::from_utf8(passed).unwrap(), scan, error);
        }
    }
    (String::from_utf8(passed).unwrap(), scan, None)
}

#[test]
fn an_error_is_found_as_a_field_and_not_in_a_text() {
    for good in [
        "data: {\"choices\":[{\"text\":\"data: {\\\"error\\\": 1}\"}]}\n\n",
        "data: {\"id\":\"1\",\"error\":null}\n\ndata: [DONE]\n\n",
        "data: {\"error\": null, \"choices\":[]}\n\n",
        "data: {\"object\":\"chat.completion.chunk\"}\n\n",
        "data: {\"choices\":[{\"text\":\"error\",\"error\":1}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"error\":{}}}]}\n\n",
        "data: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n",
        "data: {\"choices\":[],\"error\":\"\"}\n\ndata: {\"choices\":[],\"error\":false}\n\n",
        ": {\"error\":1}\n\n",
        "id: {\"error\":{}}\ndata: 1\n\n",
        "event: error\n\n",
        "event: error\nevent: x\ndata: 1\n\n",
        ": data\n\n",
        "data:\n\n",
        "",
    ] {
        for piece in [1, 7, good.len()] {
            assert_eq!(streamed(good, piece, StreamReadOptions::default()).2, None, "{good}");
        }
        let whole = Bytes::from(good);
        assert_eq!(first_error(&whole), None, "{good}");
    }
    let first = "data: {\"choices\":[]}\n\n";
    for (event, status) in [
        ("data: {\"error\": {\"message\": \"x\", \"code\": 503}}\n\n", 503),
        ("data:{ \"error\":{\"message\":\"x\",\"code\":\"kv_gone\"}}\r\n\r\n", 500),
        ("data: {\"object\": \"error\", \"message\": \"x\", \"code\": 400}\n\n", 400),
        ("event: error\ndata: {\"error\":{\"code\":7}}\n\n", 500),
        ("data: {\"id\":\"1\",\"choices\":[],\"error\":{\"code\":502}}\n\n", 502),
        ("event: error\r\ndata: {\"type\":\"error\",\"code\":\"server_error\"}\r\n\r\n", 500),
        ("data: {\"error\":\"out of memory\"}\n\n", 500),
        ("data: {\"error\":{\"type\":\"service_unavailable_error\",\"code\":\"draining\"}}\n\n", 503),
        ("data: {\"error\":\ndata: {\"message\":\"x\",\ndata:\"code\":503}}\n\n", 503),
        ("data: {\"err\rdata: or\": 1, \"error\"\rdata\rdata: :{\"code\":\rid: 7\rdata:502}}\r\r", 500),
        ("data: {\"error\"\rdata\rdata: :{\"code\":\rid: 7\rdata:502}}\r\r", 502),
        ("event: error\ndata: 10.0.0.7 is gone\n\n", 500),
        (
            "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n",
            500,
        ),
    ] {
        for before in ["", first, ": c\r\rdata: 1\r\r"] {
            let stream = [before, event, "data: [DONE]\n\n"].concat();
            for piece in 1..stream.len() + 1 {
                let (passed, _, error) = streamed(&stream, piece, StreamReadOptions::default());
                let error = error.unwrap_or_else(|| panic!("in pieces of {piece}: {stream:?}"));
                assert_eq!((&*passed, error.status.as_u16()), (before, status), "{stream:?}");
            }
        }
        let found = first_error(&Bytes::from(event)).expect(event);
        assert_eq!(found.status.as_u16(), status, "{event}");
        assert_eq!(first_error(&Bytes::from([first, event].concat())), None, "{event}");
    }
}

#[test]
fn frames_after_done_are_dropped() {
    for (behind, end) in [(": ping\n\n", "\n\n"), ("data: {\"a\":1}\n\n: p", "\r\n\r\n"), (": half", "\n\n")]
    {
        let mut frames = FrameBuffer::default();
        let done = format!("data: 1\n\ndata: [DONE]{end}");
        assert_eq!(frames.pass(Bytes::from(format!("{done}{behind}"))), done);
        assert!(frames.pass(Bytes::from_static(b"data: 2\n\n")).is_empty());
        assert!(frames.is_done() && frames.is_whole());
    }
    let mut frames = FrameBuffer::default();
    assert_eq!(frames.pass(Bytes::from_static(b"data: 1\n\ndata: [DONE]\n")), "data: 1\n\n");
    assert!(!frames.is_done() && frames.ends_with_done());
}

#[test]
fn the_first_event_is_distinct_from_later_ones() {
    let both = Bytes::from_static(b": hi\n\nevent: x\r\ndata: {\"a\": 1} \r\n\r\ndata: 2\n\n");
    let end = FirstEvent::default().end(&both).expect("it has ended");
    assert_eq!((&both[end..], data_of(&both).as_deref()), (&b"data: 2\n\n"[..], Some(&b"{\"a\": 1} "[..])));
    for cut in 0..end {
        let mut first = FirstEvent::default();
        assert_eq!(first.end(&both[..cut]), None, "{cut}");
        assert_eq!(first.end(&both), Some(end), "{cut}, and then the rest");
    }
    assert_eq!(data_of(&Bytes::from_static(b": no data\n\n")), None);
}

#[test]
fn a_comment_is_no_event() {
    let has_event = |bytes: &[u8]| FirstEvent::default().end(bytes).is_some();
    assert!(!has_event(b": ping\n\n") && !has_event(b": ping\n\ndata: 1\n"));
    assert!(has_event(b": ping\n\ndata: 1\n\n") && has_event(b"event: x\ndata: 1\r\n\r\n"));
    assert!(
        has_event(b"data\r\r") && has_event("\u{feff}data:1\n\n".as_bytes()) && !has_event(b"datum: 1\n\n")
    );
}

#[test]
fn a_frame_without_an_end_is_bounded() {
    let mut frames = FrameBuffer::default();
    let piece = Bytes::from(vec![b'x'; FRAME_BYTES_MAX]);
    assert!(frames.pass(piece.clone()).is_empty());
    assert_eq!(frames.pass(piece).len(), 2 * FRAME_BYTES_MAX);
    assert!(frames.is_inside());
}

/// The events of a stream as the standard's algorithm gives them: name and data.
fn reference(stream: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(stream).into_owned();
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text).replace("\r\n", "\n").replace('\r', "\n");
    let (mut events, mut data, mut name) = (Vec::new(), Vec::new(), String::new());
    // The text behind the last line end is no line.
    let Some((lines, _)) = text.rsplit_once('\n') else { return events };
    for line in lines.split('\n') {
        if line.is_empty() {
            let name = std::mem::take(&mut name);
            if !data.is_empty() {
                events.push((name, std::mem::take(&mut data).join("\n")));
            }
            continue;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
        match field {
            "data" => data.push(value),
            "event" => name = value,
            _ => {}
        }
    }
    events
}

fn events_of(whole: &[u8]) -> Vec<(bool, String)> {
    let event = |frame: Frame| {
        frame.has_data().then(|| (frame.is_error(), String::from_utf8_lossy(&frame.data(whole)).into_owned()))
    };
    frames(whole).filter_map(event).collect()
}

proptest::proptest! {
    /// Line ends of every kind, comments, other fields, a byte order mark; in any pieces.
    #[test]
    fn events_match_a_conforming_parser_at_any_split(
        stream in "\u{feff}?((data|event|id|: x|data: 1|data:  2|data:\\{|event:error|event: error|datum:3|)(\n|\r|\r\n)){0,12}",
        cuts in proptest::collection::vec(1..9_usize, 1..40),
    ) {
        let expected: Vec<_> =
            reference(stream.as_bytes()).into_iter().map(|(name, data)| (name == "error", data)).collect();
        let (mut frames, mut rest, mut passed, mut found) = (FrameBuffer::default(), stream.as_bytes(), Vec::new(), Vec::new());
        for cut in cuts.iter().cycle() {
            let piece = rest.split_off(..rest.len().min(*cut)).unwrap();
            let whole = frames.pass(Bytes::copy_from_slice(piece));
            for frame in &frames.complete {
                if frame.has_data() {
                    found.push((frame.is_error(), String::from_utf8_lossy(&frame.data(&whole)).into_owned()));
                }
            }
            passed.extend_from_slice(&whole);
            if rest.is_empty() {
                break;
            }
        }
        proptest::prop_assert!(stream.as_bytes().starts_with(&passed));
        // A CR at the very end may be half of a line end.
        let waits = expected.len() == found.len() + 1 && stream.ends_with('\r');
        proptest::prop_assert!(expected == found || waits && expected.starts_with(&found), "{expected:?} {found:?}");
        proptest::prop_assert!(waits || events_of(stream.as_bytes()) == expected);
    }
}

#[test]
fn lines_may_end_with_cr_alone_and_nothing_waits_for_an_lf() {
    let stream = "data: {\"a\":1}\r\r: c\r\rdata: 2\r\rdata: [DONE]\r\r";
    let mut frames = FrameBuffer::default();
    assert_eq!(frames.pass(Bytes::from("data: {\"a\":1}\r\r")), "data: {\"a\":1}\r\r");
    for piece in 1..stream.len() {
        let (passed, scan, error) = streamed(stream, piece, StreamReadOptions::default());
        assert_eq!((&*passed, scan.streamed, error), (stream, 2, None));
    }
    // A later LF belongs to the CR before it.
    let mut frames = FrameBuffer::default();
    assert_eq!(frames.pass(Bytes::from("data: 1\r\r")), "data: 1\r\r");
    assert_eq!(frames.pass(Bytes::from("\n")), "\n");
    assert!(frames.is_whole());
    assert_eq!(frames.pass(Bytes::from("data: 2\n\n")), "data: 2\n\n");
}

const USED: &str = r#"data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
const TEXT: &str = "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}],\"usage\":null}\n\n";
const LAST: &str = "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\n";

#[test]
fn usage_is_parsed_at_any_split_and_before_any_tail() {
    let usage = Some(Usage { prompt: 7, cached: 0, completion: 2 });
    let long = "x".repeat(5000);
    for (line_end, behind) in [
        ("\n\n", ""),
        ("\r\n", ": c\r\n\r\n"),
        ("\n", &*format!(": {long}\n\n")),
        ("\n", &*format!("id: {long}\n\n")),
    ] {
        let stream = [TEXT, TEXT, LAST, USED, line_end, behind, "data: [DONE]\n\n"].concat();
        for piece in (1..400).chain([stream.len()]) {
            let (passed, scan, error) = streamed(&stream, piece, StreamReadOptions::default());
            assert_eq!((&passed, error), (&stream, None), "in pieces of {piece}");
            assert_eq!(
                scan,
                UsageScan { usage, finish: Some(FinishReason::Length), streamed: 0 },
                "in pieces of {piece}"
            );
        }
    }
}

#[test]
fn an_unrequested_usage_is_removed() {
    let reading = StreamReadOptions { without_usage: true, ..StreamReadOptions::default() };
    let usage = Some(Usage { prompt: 7, cached: 0, completion: 2 });
    for end in ["\n\n", "\r\n\r\n", "\r\r"] {
        let (text, last, done) =
            (TEXT.replace("\n\n", end), LAST.replace("\n\n", end), "data: [DONE]\n\n".replace("\n\n", end));
        let stream = [&*text, &last, USED, end, ": c", end, &done].concat();
        for piece in 1..stream.len() + 1 {
            let (passed, scan, _) = streamed(&stream, piece, reading);
            assert_eq!(scan.usage, usage);
            let expected = [&*text, &last, ": c", end, &done].concat();
            assert_eq!(events_of(passed.as_bytes()), events_of(expected.as_bytes()), "in pieces of {piece}");
        }
        assert_eq!(streamed(&stream, stream.len(), reading).0, [&*text, &last, ": c", end, &done].concat());
    }
    // With a choice it is part of the response.
    let counted =
        "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n";
    assert_eq!(streamed(counted, 9999, reading).0, counted);
}

#[test]
fn a_usage_requested_by_the_router_is_removed_even_if_unreadable() {
    let reading = StreamReadOptions { without_usage: true, ..StreamReadOptions::default() };
    for usage in ["{}", r#"{"prompt_tokens":-1}"#, "[]", "7", "\"none\"", r#"{"prompt_tokens":7}"#] {
        let event = format!("data: {{\"choices\":[],\"usage\": {usage}}}\n\n");
        let stream = [TEXT, &event, "data: [DONE]\n\n"].concat();
        for piece in [1, 7, stream.len()] {
            let (passed, scan, _) = streamed(&stream, piece, reading);
            assert_eq!((&*passed, scan.usage), (&*[TEXT, "data: [DONE]\n\n"].concat(), None), "{usage}");
        }
        assert_eq!(streamed(&stream, 9999, StreamReadOptions::default()).0, stream, "asked for");
    }
    let none = "data: {\"choices\":[],\"usage\":null}\n\n";
    assert_eq!(streamed(none, 9999, reading).0, none, "it has none");
}

#[test]
fn usage_is_summed_over_choices() {
    let event = |choice: usize, tokens: usize| {
        format!(
            "data: {{\"choices\":[{{\"text\":\"a\",\"index\": {choice},\"logprobs\":{{\"index\":9}}}}],\
             \"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":{tokens}}}}}\n\n"
        )
    };
    let early = [event(0, 3), event(11, 2), event(0, 5), event(11, 6)].concat();
    let total = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":12}}\n\n";
    for piece in [1, 7, early.len()] {
        let (_, scan, _) = streamed(&early, piece, StreamReadOptions::default());
        assert_eq!((scan.completion(), scan.cost(0)), (Some(11), Some(18)), "the stream ended early");
        let (_, scan, _) = streamed(&[&*early, total].concat(), piece, StreamReadOptions::default());
        assert_eq!(scan.completion(), Some(12), "the engine's own sum");
    }
    let alone = [event(0, 1), event(0, 4)].concat();
    assert_eq!(streamed(&alone, 50, StreamReadOptions::default()).1.completion(), Some(4));
    let many: String = (0..20_000).map(|choice| event(choice, 1)).collect();
    assert_eq!(streamed(&many, 65_536, StreamReadOptions::default()).1.completion(), Some(20_000));
}

#[test]
fn events_count_as_tokens_until_the_engine_reports_usage() {
    let many = TEXT.repeat(2000);
    for piece in [100, 65_536, many.len()] {
        assert_eq!(streamed(&many, piece, StreamReadOptions::default()).1.streamed, 2000);
    }
    let ids = "data: {\"choices\":[{\"text\":\"a\",\"token_ids\":[1, 2,3]}]}\n\ndata: {\"choices\":[{\"token_ids\":[]}]}\n\n";
    let reading = |counts| StreamReadOptions { counts, ..StreamReadOptions::default() };
    assert_eq!(streamed(ids, 7, reading(TokenCountRule::TokenIds)).1.streamed, 3);
    let responses = "event: response.created\ndata: {\"type\":\"response.created\"}\n\n\
        data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n\
        data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":7,\"output_tokens\":2}}}\n\n";
    let (passed, scan, _) = streamed(
        responses,
        50,
        StreamReadOptions {
            counts: TokenCountRule::Deltas,
            without_usage: true,
            ..StreamReadOptions::default()
        },
    );
    assert_eq!((&*passed, scan.usage), (responses, Some(Usage { prompt: 7, cached: 0, completion: 2 })));
    assert_eq!(streamed(&responses[..150], 50, reading(TokenCountRule::Deltas)).1.streamed, 1);
}

#[test]
fn a_frame_too_long_to_be_held_is_read_too() {
    let ids = "123456,".repeat(400_000);
    let usage = "\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}";
    for (stream, error) in [
        (format!("data: {{\"prompt_token_ids\":[{ids}1],{usage}}}\n\n"), false),
        (format!("data: {{{usage}}}\n: {ids}\n\n"), false),
        (format!("id: {ids}\r\ndata: {{\r\ndata: {usage}}}\r\n\r\n"), false),
        (format!("data: {{\"error\":{{\"code\":503}},\"x\":[{ids}1]}}\n\n"), true),
    ] {
        for piece in [777, 65_536, stream.len()] {
            let (passed, scan, found) = streamed(&stream, piece, StreamReadOptions::default());
            let is_held = error && piece == stream.len();
            assert!(if is_held { passed.is_empty() } else { passed == stream }, "in pieces of {piece}");
            assert_eq!(
                (scan.usage.map(|usage| usage.prompt), found.is_some()),
                ((!error).then_some(7), error)
            );
        }
    }
}

#[test]
fn a_messages_stream_ends_with_its_last_event_and_not_with_its_body() {
    let options = StreamReadOptions {
        counts: TokenCountRule::BlockDeltas,
        ending: StreamEnding::MessageStop,
        ..StreamReadOptions::default()
    };
    let event = |data: &str| {
        let name = serde_json::from_str::<serde_json::Value>(data).expect("JSON")["type"].clone();
        format!("event: {}\ndata: {data}\n\n", name.as_str().expect("a name"))
    };
    let start = event(r#"{"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":1}}}"#);
    let delta = event(r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#);
    let stop = event(r#"{"type":"message_stop"}"#);
    let mut frames = FrameBuffer::new(options);
    let mut scan = UsageScan::default();
    let whole = frames.pass((start + &delta + &delta + "data: [DONE]\n\n").into());
    let read = frames.read(whole, &mut scan);
    assert!(read.error.is_none() && !frames.is_done(), "only its own last event ends it");
    assert_eq!((scan.usage.map(|usage| usage.prompt), scan.streamed), (Some(7), 2));
    let (half, rest) = stop.split_at(stop.len() - 1);
    assert!(frames.pass(half.to_owned().into()).is_empty());
    assert!(!frames.is_done() && !frames.ends_with_done());
    let whole = frames.pass((rest.to_owned() + &delta).into());
    assert_eq!((&whole[..], frames.is_done()), (stop.as_bytes(), true));
}

fn named(data: &str) -> String {
    let name = serde_json::from_str::<serde_json::Value>(data).expect("JSON")["type"].clone();
    format!("event: {}\ndata: {data}\n\n", name.as_str().expect("a name"))
}

#[test]
fn a_message_that_ends_without_a_reason_is_an_abort() {
    let reading = StreamReadOptions {
        counts: TokenCountRule::BlockDeltas,
        ending: StreamEnding::MessageStop,
        ..StreamReadOptions::default()
    };
    let text = named(r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"stop_reason"}}"#);
    let stop = named(r#"{"type":"message_stop"}"#);
    for (delta, is_complete) in [
        (r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}"#, true),
        (r#"{"type":"message_delta","delta":{"stop_reason":"pause_turn"}}"#, true),
        (r#"{"type":"message_delta","delta":{"stop_reason":null},"usage":{"output_tokens":1}}"#, false),
        (r#"{"type":"message_delta","delta":{}}"#, false),
    ] {
        let before = text.clone() + &named(delta);
        for piece in [7, 4096] {
            let (passed, _, error) = streamed(&(before.clone() + &stop), piece, reading);
            assert_eq!(error.is_none(), is_complete, "{delta}");
            assert_eq!(passed, if is_complete { before.clone() + &stop } else { before.clone() }, "{delta}");
        }
    }
}

#[test]
fn a_response_ends_with_its_last_event_and_one_that_is_aborted_with_an_error() {
    let reading = StreamReadOptions {
        counts: TokenCountRule::Deltas,
        ending: StreamEnding::ResponseEnd,
        ..StreamReadOptions::default()
    };
    let created = named(r#"{"type":"response.created","response":{"status":"in_progress"}}"#);
    let delta = named(r#"{"type":"response.output_text.delta","delta":"\"type\":\"response.completed\""}"#);
    let last = |status: &str, tokens: u64| {
        format!(
            r#"{{"type":"response.completed","response":{{"status":"{status}","output":[],"usage":{{"input_tokens":7,"output_tokens":{tokens}}}}}}}"#
        )
    };
    for (begun, last, is_complete) in [
        (created.clone() + &delta, last("completed", 2), true),
        (created.clone() + &delta, last("completed", 0), true),
        (created.clone() + &delta, last("cancelled", 2), false),
        (created.clone(), last("completed", 0), false),
        // SGLang counts no tokens of some calls of tools.
        (created.clone(), last("completed", 0).replace("[]", "[{}]"), true),
        (created.clone(), r#"{"type": "response.incomplete","response":{"usage":null}}"#.to_owned(), true),
    ] {
        for end in [named(&last), format!("data: {last}\n\n")] {
            for piece in [7, 4096] {
                let mut frames = FrameBuffer::new(reading);
                frames.pass(begun.clone().into());
                assert!(!frames.is_done(), "{begun}");
                let (passed, scan, error) = streamed(&(begun.clone() + &end), piece, reading);
                assert_eq!(error.is_none(), is_complete, "{begun}{end}");
                let expected = if is_complete { begun.clone() + &end } else { begun.clone() };
                assert_eq!(passed, expected);
                if is_complete && last.contains("output_tokens") {
                    assert_eq!(scan.usage.map(|usage| usage.prompt), Some(7));
                }
                frames.pass(end.clone().into());
                assert!(frames.is_done(), "{end}");
            }
        }
    }
    let failed = named(r#"{"type":"response.failed","response":{"error":{"code":"server_error"}}}"#);
    assert!(streamed(&failed, 9, reading).2.is_some());
    assert_eq!(streamed(&(created + &delta + "data: [DONE]\n\n"), 9, reading).2, None);
}

#[test]
fn the_last_event_of_a_response_ends_it_although_it_is_too_long_to_be_held() {
    let reading = StreamReadOptions { ending: StreamEnding::ResponseEnd, ..StreamReadOptions::default() };
    let text = "x".repeat(2 * FRAME_BYTES_MAX);
    let last = named(&format!(
        r#"{{"type":"response.completed","response":{{"output":"{text}","usage":{{"input_tokens":7,"output_tokens":2}}}}}}"#
    ));
    let (mut frames, mut scan) = (FrameBuffer::new(reading), UsageScan::default());
    for piece in last.as_bytes().chunks(64 << 10) {
        assert!(!frames.is_done());
        let whole = frames.pass(Bytes::copy_from_slice(piece));
        assert_eq!(frames.read(whole, &mut scan).error, None);
    }
    assert!(frames.is_done());
    assert_eq!(scan.usage, Some(Usage { prompt: 7, cached: 0, completion: 2 }));
}
