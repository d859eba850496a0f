//! Every order of messages up to a length, and the exact replies of the usual orders.

use super::*;

const BODY_BYTES_MAX: usize = 5;

/// The messages of a test, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Head,
    HeadEnd,
    Piece,
    PieceEnd,
    Trailers,
    Chosen,
    Refused,
    ResponseHead,
    ResponseHeadEnd,
    ResponsePiece,
    ResponsePieceEnd,
    ResponseTrailers,
    Closed,
}

const STEPS: [Step; 13] = [
    Step::Head,
    Step::HeadEnd,
    Step::Piece,
    Step::PieceEnd,
    Step::Trailers,
    Step::Chosen,
    Step::Refused,
    Step::ResponseHead,
    Step::ResponseHeadEnd,
    Step::ResponsePiece,
    Step::ResponsePieceEnd,
    Step::ResponseTrailers,
    Step::Closed,
];

fn event(step: Step, request: &Bytes) -> Event {
    let piece = || Bytes::from_static(b"ab");
    match step {
        Step::Head => Event::RequestHeaders(Rest::Follows),
        Step::HeadEnd => Event::RequestHeaders(Rest::End),
        Step::Piece => Event::RequestBody(piece(), Rest::Follows),
        Step::PieceEnd => Event::RequestBody(piece(), Rest::End),
        Step::Trailers => Event::RequestTrailers,
        Step::Chosen => Event::Chosen(request.clone().into()),
        Step::Refused => Event::Refused(ApiError::unauthorized()),
        Step::ResponseHead => Event::ResponseHeaders(Rest::Follows),
        Step::ResponseHeadEnd => Event::ResponseHeaders(Rest::End),
        Step::ResponsePiece => Event::ResponseBody(piece(), Rest::Follows),
        Step::ResponsePieceEnd => Event::ResponseBody(piece(), Rest::End),
        Step::ResponseTrailers => Event::ResponseTrailers,
        Step::Closed => Event::Closed,
    }
}

/// What a stream has sent so far, checked action by action.
#[derive(Clone, Debug, Default)]
struct Observed {
    chosen: Option<Bytes>,
    chosen_given: bool,
    request_headers: bool,
    request_ended: bool,
    request_body: Vec<u8>,
    response_headers: bool,
    response_ended: bool,
    response_body: Vec<u8>,
    /// Bytes of response pieces that the gateway sent and the stream accepted.
    response_received: Vec<u8>,
    ended: bool,
}

impl Observed {
    fn check(&mut self, action: Action, order: &[Step]) {
        assert!(!self.ended, "{order:?}: {action:?} after the end");
        match action {
            Action::Choose(body) => {
                assert!(self.chosen.replace(body).is_none(), "{order:?}: two choices");
            }
            Action::Headers(Direction::Request) => {
                assert!(self.chosen_given && !self.request_headers, "{order:?}: no endpoint");
                self.request_headers = true;
            }
            Action::Headers(Direction::Response) => {
                assert!(!self.response_headers, "{order:?}");
                self.response_headers = true;
            }
            Action::Body(direction, bytes, rest) => {
                assert!(bytes.len() <= PIECE_BYTES_MAX);
                let (headers, ended, body) = match direction {
                    Direction::Request => {
                        (self.request_headers, &mut self.request_ended, &mut self.request_body)
                    }
                    Direction::Response => {
                        (self.response_headers, &mut self.response_ended, &mut self.response_body)
                    }
                };
                assert!(headers && !*ended, "{order:?}: a body before its headers or after its end");
                body.extend_from_slice(&bytes);
                *ended = rest == Rest::End;
            }
            Action::Trailers(direction) => {
                let (headers, ended) = match direction {
                    Direction::Request => (self.request_headers, &mut self.request_ended),
                    Direction::Response => (self.response_headers, &mut self.response_ended),
                };
                assert!(headers && !*ended, "{order:?}: trailers before headers or after the end");
                *ended = true;
            }
            Action::Refuse(_) => {
                assert!(!self.request_headers && !self.response_headers, "{order:?}: a late refusal");
            }
            Action::End => self.ended = true,
        }
    }
}

/// Runs an order. `None` where a message was not allowed.
fn run(order: &[Step]) -> Option<Observed> {
    let mut protocol = StreamProtocol::new(BODY_BYTES_MAX);
    let mut observed = Observed::default();
    for step in order {
        let given = matches!(step, Step::Chosen) && observed.chosen.is_some();
        let body = observed.chosen.clone().unwrap_or_default();
        let was_open = !observed.ended;
        protocol.apply(event(*step, &body)).ok()?;
        observed.chosen_given |= given;
        if was_open && matches!(step, Step::ResponsePiece | Step::ResponsePieceEnd) {
            observed.response_received.extend_from_slice(b"ab");
        }
        while let Some(action) = protocol.next_action() {
            observed.check(action, order);
        }
    }
    Some(observed)
}

/// Every order of up to `length` messages that begins with one that is allowed.
fn orders(length: usize, visit: &mut impl FnMut(&[Step], &Observed)) -> usize {
    let mut allowed = 0;
    let mut open: Vec<Vec<Step>> = vec![Vec::new()];
    for _ in 0..length {
        let mut next = Vec::new();
        for order in open {
            for step in STEPS {
                let mut longer = order.clone();
                longer.push(step);
                let Some(observed) = run(&longer) else { continue };
                visit(&longer, &observed);
                allowed += 1;
                // After the end every message is ignored: one of them is enough.
                if !(observed.ended && order.len() > 1 && run(&order).is_some_and(|before| before.ended)) {
                    next.push(longer);
                }
            }
        }
        open = next;
    }
    allowed
}

#[test]
fn every_order_of_messages_keeps_the_invariants() {
    let (mut forwarded, mut responded, mut ended) = (0, 0, 0);
    let allowed = orders(6, &mut |order, observed| {
        let body_pieces = order.iter().filter(|step| matches!(step, Step::Piece | Step::PieceEnd)).count();
        if observed.request_ended {
            forwarded += 1;
            assert_eq!(Some(&*observed.request_body), observed.chosen.as_deref(), "{order:?}");
            assert!(
                observed.request_body.len() <= BODY_BYTES_MAX && body_pieces > 0
                    || observed.request_body.is_empty()
            );
        }
        assert_eq!(observed.response_body, observed.response_received, "{order:?}");
        responded += usize::from(observed.response_ended);
        ended += usize::from(observed.ended);
        if order.contains(&Step::Closed) || observed.response_ended {
            assert!(observed.ended, "{order:?}: the stream stays open");
        }
    });
    assert!(allowed > 10_000 && forwarded > 100 && responded > 100 && ended > 1_000, "{allowed} {forwarded}");
}

/// The actions of an order, by name.
fn actions(protocol: &mut StreamProtocol, events: Vec<Event>) -> Vec<String> {
    let mut names = Vec::new();
    for event in events {
        protocol.apply(event).expect("allowed");
        while let Some(action) = protocol.next_action() {
            names.push(match action {
                Action::Choose(body) => format!("choose {}", body.len()),
                Action::Body(direction, bytes, rest) => {
                    format!("{direction:?} body {} {rest:?}", bytes.len())
                }
                Action::Refuse(error) => format!("refuse {}", error.status),
                other => format!("{other:?}"),
            });
        }
    }
    names
}

#[test]
fn a_request_is_held_until_it_is_complete_and_then_sent_back_whole() {
    let mut protocol = StreamProtocol::new(1 << 20);
    let piece = Bytes::from(vec![b'x'; 36_000]);
    let mut events = vec![Event::RequestHeaders(Rest::Follows)];
    events.extend((0..4).map(|_| Event::RequestBody(piece.clone(), Rest::Follows)));
    assert!(actions(&mut protocol, events).is_empty(), "held");
    let last = Event::RequestBody(Bytes::new(), Rest::End);
    assert_eq!(actions(&mut protocol, vec![last]), ["choose 144000"]);
    let body = Payload::from(vec![Bytes::from(vec![b'y'; 100_000]), Bytes::from_static(b"z")]);
    assert_eq!(
        actions(&mut protocol, vec![Event::Chosen(body)]),
        [
            "Headers(Request)",
            "Request body 62000 Follows",
            "Request body 38000 Follows",
            "Request body 1 End"
        ]
    );
    let response = vec![
        Event::ResponseHeaders(Rest::Follows),
        Event::ResponseBody(Bytes::from_static(b"data"), Rest::Follows),
        Event::ResponseBody(Bytes::new(), Rest::End),
    ];
    assert_eq!(
        actions(&mut protocol, response),
        ["Headers(Response)", "Response body 4 Follows", "Response body 0 End", "End"]
    );
}

#[test]
fn a_request_without_a_body_gets_no_body_and_one_with_trailers_ends_with_them() {
    let mut protocol = StreamProtocol::new(100);
    let events = vec![Event::RequestHeaders(Rest::End), Event::Chosen(Bytes::new().into())];
    assert_eq!(actions(&mut protocol, events), ["choose 0", "Headers(Request)"]);
    let mut protocol = StreamProtocol::new(100);
    let events = vec![
        Event::RequestHeaders(Rest::Follows),
        Event::RequestBody(Bytes::from_static(b"ab"), Rest::Follows),
        Event::RequestTrailers,
        Event::Chosen(Bytes::from_static(b"ab").into()),
    ];
    let expected = ["choose 2", "Headers(Request)", "Request body 2 Follows", "Trailers(Request)"];
    assert_eq!(actions(&mut protocol, events), expected);
}

#[test]
fn a_body_over_the_limit_is_refused_at_its_first_excess_byte() {
    let mut protocol = StreamProtocol::new(3);
    let piece = || Event::RequestBody(Bytes::from_static(b"ab"), Rest::Follows);
    let events = vec![Event::RequestHeaders(Rest::Follows), piece(), piece(), piece()];
    assert_eq!(actions(&mut protocol, events), ["refuse 413", "End"]);
    let mut protocol = StreamProtocol::new(4);
    let events = vec![Event::RequestHeaders(Rest::Follows), piece(), piece()];
    assert!(actions(&mut protocol, events).is_empty());
}

#[test]
fn a_response_that_the_gateway_makes_itself_ends_the_choice() {
    let mut protocol = StreamProtocol::new(100);
    let events = vec![
        Event::RequestHeaders(Rest::End),
        Event::ResponseHeaders(Rest::Follows),
        Event::Chosen(Bytes::new().into()),
        Event::ResponseBody(Bytes::from_static(b"timeout"), Rest::End),
    ];
    let expected = ["choose 0", "Headers(Response)", "Response body 7 End", "End"];
    assert_eq!(actions(&mut protocol, events), expected);
}
