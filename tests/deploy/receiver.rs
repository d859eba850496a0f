//! A receiver of traces: parses OTLP over HTTP with JSON by the protocol's own types, and stores every span.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;

/// Maximum bytes of a body.
const BODY_BYTES_MAX: usize = 16 << 20;

/// A span, and the service that sent it.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) resource: BTreeMap<String, String>,
    pub(crate) scope: String,
    pub(crate) span: Span,
}

#[derive(Default)]
struct Inbox {
    spans: Vec<ReceivedRequest>,
    /// Errors in what was received.
    wrong: Vec<String>,
}

/// A running receiver. Its thread ends with the test's process.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    inbox: Arc<Mutex<Inbox>>,
}

impl Receiver {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let (address, inbox) = (listener.local_addr().expect("it is bound"), Arc::<Mutex<Inbox>>::default());
        let to = Arc::clone(&inbox);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let to = Arc::clone(&to);
                std::thread::spawn(move || serve(&stream, &to));
            }
        });
        Self { address, inbox }
    }

    /// All spans so far.
    ///
    /// # Panics
    /// If any of it was not OTLP.
    pub(crate) fn spans(&self) -> Vec<ReceivedRequest> {
        let inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(inbox.wrong.is_empty(), "{:?}", inbox.wrong);
        inbox.spans.clone()
    }
}

/// The values of attributes by their names, as text.
pub(crate) fn attribute_map(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    attributes.iter().map(|pair| (pair.key.clone(), text(pair.value.as_ref()))).collect()
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::BoolValue(value)) => value.to_string(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::ArrayValue(list)) => {
            list.values.iter().map(|value| text(Some(value))).collect::<Vec<_>>().join(",")
        }
        other => panic!("no attribute of ours is {other:?}"),
    }
}

/// Hexadecimal digits, as `traceparent` has ids.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serve(stream: &TcpStream, inbox: &Mutex<Inbox>) {
    let mut reader = BufReader::new(stream);
    while let Ok(Some((head, body))) = request(&mut reader) {
        let outcome = read(&head, &body);
        let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let (status, answer) = match outcome {
            Ok(spans) => {
                inbox.spans.extend(spans);
                ("200 OK", serde_json::to_string(&ExportTraceServiceResponse::default()).expect("it is data"))
            }
            Err(why) => {
                inbox.wrong.push(why);
                ("400 Bad Request", "{}".to_owned())
            }
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{answer}",
            answer.len()
        );
        if { stream }.write_all(head.as_bytes()).is_err() {
            return;
        }
    }
}

/// The next request of a connection: its head, in lower case, and its body.
fn request(reader: &mut impl BufRead) -> std::io::Result<Option<(String, Vec<u8>)>> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(None);
        }
    }
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let length: usize = length.filter(|length| *length <= BODY_BYTES_MAX).ok_or_else(|| {
        std::io::Error::other("a body without a length, or a larger one than a receiver takes")
    })?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some((head, body)))
}

/// The spans of a request, by the protocol's own types.
fn read(head: &str, body: &[u8]) -> Result<Vec<ReceivedRequest>, String> {
    if !head.starts_with("post /v1/traces http/1.1\r\n") {
        return Err(format!("not a request for traces: {head}"));
    }
    if !head.contains("\r\ncontent-type: application/json\r\n") {
        return Err(format!("not JSON: {head}"));
    }
    let request: ExportTraceServiceRequest = serde_json::from_slice(body)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(body)))?;
    let mut spans = Vec::new();
    for resource in request.resource_spans {
        let of = attribute_map(&resource.resource.unwrap_or_default().attributes);
        for scope in resource.scope_spans {
            let name = scope.scope.unwrap_or_default().name;
            spans.extend(scope.spans.into_iter().map(|span| ReceivedRequest {
                resource: of.clone(),
                scope: name.clone(),
                span,
            }));
        }
    }
    Ok(spans)
}
