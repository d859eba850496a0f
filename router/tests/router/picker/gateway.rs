//! A picker in front of scripted engines, and a gateway that plays messages.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use baton_router::{Picker, RouterConfig};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HeaderMutation, HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use crate::harness::client::get;

/// Limit on a test's wait for a message.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The header that contains the choice.
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";

/// A running picker.
pub(crate) struct TestPicker {
    pub address: SocketAddr,
    pub health: SocketAddr,
    pub admin: SocketAddr,
    pub shutdown: CancellationToken,
    pub running: JoinHandle<()>,
    channel: Channel,
}

impl TestPicker {
    /// A picker with this model configuration (the lines below `models: - name: m`) and further lines of YAML.
    pub(crate) async fn start(model: &str, top: &str) -> Self {
        let quiet = if top.contains("health:") { "" } else { "health: {active: {interval_ms: 0}}\n" };
        let listeners = if top.contains("picker:") { "" } else { "picker: {}\n" };
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    aliases: [alias]\n{model}\n{top}\n{quiet}{listeners}"
        );
        let mut config =
            RouterConfig::from_yaml(&yaml, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{yaml}"));
        config.picker.listen.set_port(0);
        config.picker.health_listen.set_port(0);
        let picker = Picker::bind(config).await.unwrap();
        let (address, health, admin) = (picker.local_addr(), picker.health_addr(), picker.admin_addr());
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(picker.run(shutdown.clone()));
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        Self { address, health, admin, shutdown, running, channel }
    }

    /// A picker for one decode pool.
    pub(crate) async fn of(engines: &[SocketAddr], policy: &str, capacity: Option<u32>) -> Self {
        let model = format!("    decode: {}", pool(engines, policy, capacity));
        Self::start(&model, "").await
    }

    /// Opens a stream.
    pub(crate) async fn stream(&self) -> GatewayStream {
        GatewayStream::open(self.channel.clone()).await
    }

    /// A stream that has sent this request whole.
    pub(crate) async fn request(&self, headers: &[(&str, &str)], body: &str) -> GatewayStream {
        let mut stream = self.stream().await;
        stream.send(head(headers, None, false)).await;
        stream.send(piece(body.as_bytes(), false)).await;
        stream.send(piece(b"", true)).await;
        stream
    }

    /// The destination of a completion with this prompt.
    pub(crate) async fn destination(&self, prompt: &str) -> (String, GatewayStream) {
        let mut stream = self.request(&[], &completion(prompt)).await;
        let choice = stream.choice().await;
        (choice.destination, stream)
    }

    /// The value of a series of `/metrics`.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let text = get(self.admin, "/metrics").await.text();
        let value = |line: &str| line.strip_prefix(series)?.trim().parse::<f64>().ok();
        text.lines().filter_map(value).sum()
    }

    /// Waits until a series has a value.
    pub(crate) async fn counts(&self, series: &str, value: f64) {
        let begun = std::time::Instant::now();
        loop {
            let found = self.metric(series).await;
            if found == value {
                return;
            }
            assert!(begun.elapsed() < TIMEOUT, "{series} is {found}, not {value}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until no request is in flight.
    pub(crate) async fn settled(&self) {
        self.counts("baton_router_requests_in_flight", 0.0).await;
    }
}

impl Drop for TestPicker {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// A connection of a gateway.
pub(crate) async fn connect(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

/// A pool of these engines as YAML.
pub(crate) fn pool(engines: &[SocketAddr], policy: &str, capacity: Option<u32>) -> String {
    let most = capacity.map(|most| format!(", max_in_flight: {most}")).unwrap_or_default();
    let urls: Vec<_> = engines.iter().map(|address| format!("{{url: 'http://{address}'{most}}}")).collect();
    format!("{{policy: {policy}, engines: [{}]}}", urls.join(", "))
}

pub(crate) fn completion(prompt: &str) -> String {
    serde_json::json!({"model": "m", "prompt": prompt, "max_tokens": 4}).to_string()
}

/// One ext_proc stream from the gateway's side.
pub(crate) struct GatewayStream {
    sender: Option<mpsc::Sender<ProcessingRequest>>,
    replies: Streaming<ProcessingResponse>,
}

/// The picker's reply to a request.
#[derive(Debug)]
pub(crate) struct PickedEndpoint {
    pub destination: String,
    pub headers: BTreeMap<String, String>,
    pub removed: Vec<String>,
    pub metadata: String,
}

impl GatewayStream {
    pub(crate) async fn open(channel: Channel) -> Self {
        let (sender, receiver) = mpsc::channel(64);
        let messages = futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        });
        let mut client = ExternalProcessorClient::new(channel);
        let replies = client.process(messages).await.unwrap().into_inner();
        Self { sender: Some(sender), replies }
    }

    pub(crate) async fn send(&mut self, message: ProcessingRequest) {
        // The picker may have ended the stream.
        let _ = self.sender.as_ref().expect("the stream is open").send(message).await;
    }

    /// Ends the gateway's side.
    pub(crate) fn close(&mut self) {
        self.sender = None;
    }

    /// The next reply; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        tokio::time::timeout(TIMEOUT, self.replies.message()).await.expect("a reply in time")
    }

    pub(crate) async fn reply(&mut self) -> ProcessingResponse {
        self.next().await.expect("no error").expect("a reply")
    }

    /// The reply to the request's headers.
    pub(crate) async fn choice(&mut self) -> PickedEndpoint {
        let reply = self.reply().await;
        let Some(Response::RequestHeaders(headers)) = reply.response else { panic!("{reply:?}") };
        let common = headers.response.unwrap();
        assert!(common.clear_route_cache);
        let HeaderMutation { set_headers, remove_headers } = common.header_mutation.unwrap();
        let headers: BTreeMap<_, _> = set_headers
            .into_iter()
            .filter_map(|field| field.header)
            .map(|field| (field.key, String::from_utf8(field.raw_value).unwrap()))
            .collect();
        let metadata = reply.dynamic_metadata.unwrap();
        let Some(Kind::StructValue(inner)) = &metadata.fields["envoy.lb"].kind else {
            panic!("{metadata:?}")
        };
        let Some(Kind::StringValue(text)) = &inner.fields[DESTINATION].kind else { panic!("{metadata:?}") };
        let destination = headers[DESTINATION].clone();
        PickedEndpoint { destination, headers, removed: remove_headers, metadata: text.clone() }
    }

    /// The body that the picker sends back, to its end.
    pub(crate) async fn body(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let reply = self.reply().await;
            let common = match reply.response {
                Some(Response::RequestBody(body) | Response::ResponseBody(body)) => body.response.unwrap(),
                other => panic!("{other:?}"),
            };
            let Some(Mutation::StreamedResponse(piece)) = common.body_mutation.unwrap().mutation else {
                panic!("not streamed")
            };
            assert!(piece.body.len() <= 62_000);
            body.extend(piece.body);
            if piece.end_of_stream {
                return body;
            }
        }
    }

    /// The error that the client gets: status, headers and JSON.
    pub(crate) async fn refusal(&mut self) -> (i32, BTreeMap<String, String>, serde_json::Value) {
        let reply = self.reply().await;
        let Some(Response::ImmediateResponse(error)) = reply.response else { panic!("{reply:?}") };
        assert!(self.next().await.expect("no error").is_none(), "the stream ends with a refusal");
        let fields = error.headers.unwrap().set_headers.into_iter().filter_map(|field| field.header);
        let headers = fields.map(|field| (field.key, String::from_utf8(field.raw_value).unwrap())).collect();
        (error.status.unwrap().code, headers, serde_json::from_slice(&error.body).unwrap())
    }

    /// Plays a whole response of the engine.
    pub(crate) async fn respond(&mut self, status: &str) {
        self.send(response_head(status, false)).await;
        let reply = self.reply().await;
        assert!(matches!(reply.response, Some(Response::ResponseHeaders(_))), "{reply:?}");
        self.send(response_piece(b"data", true)).await;
        assert_eq!(self.body().await, b"data");
        assert!(self.next().await.unwrap().is_none(), "the stream ends with the response");
    }
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn fields(fields: &[(&str, &str)]) -> Option<HeaderMap> {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    Some(HeaderMap { headers: fields.iter().map(field).collect() })
}

/// The head of a completion; `headers` may replace `:method` and `:path`. `subset`: the gateway's hint.
pub(crate) fn head(headers: &[(&str, &str)], subset: Option<&str>, end: bool) -> ProcessingRequest {
    let mut all =
        vec![(":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json")];
    all.retain(|(name, _)| !headers.iter().any(|(other, _)| other == name));
    all.extend(headers);
    let mut message = message(Request::RequestHeaders(HttpHeaders {
        headers: fields(&all),
        end_of_stream: end,
        ..HttpHeaders::default()
    }));
    message.metadata_context = subset.map(|subset| {
        let value = Value { kind: Some(Kind::StringValue(subset.to_owned())) };
        let hint = Struct { fields: [("x-gateway-destination-endpoint-subset".to_owned(), value)].into() };
        Metadata {
            filter_metadata: [("envoy.lb.subset_hint".to_owned(), hint)].into(),
            ..Metadata::default()
        }
    });
    message
}

pub(crate) fn piece(body: &[u8], end: bool) -> ProcessingRequest {
    message(Request::RequestBody(HttpBody { body: body.to_vec(), end_of_stream: end, ..HttpBody::default() }))
}

pub(crate) fn trailers() -> ProcessingRequest {
    message(Request::RequestTrailers(HttpTrailers::default()))
}

pub(crate) fn response_head(status: &str, end: bool) -> ProcessingRequest {
    response_fields(&[(":status", status)], end)
}

/// The head of a response with these fields.
pub(crate) fn response_fields(all: &[(&str, &str)], end: bool) -> ProcessingRequest {
    message(Request::ResponseHeaders(HttpHeaders {
        headers: fields(all),
        end_of_stream: end,
        ..HttpHeaders::default()
    }))
}

pub(crate) fn response_piece(body: &[u8], end: bool) -> ProcessingRequest {
    message(Request::ResponseBody(HttpBody {
        body: body.to_vec(),
        end_of_stream: end,
        ..HttpBody::default()
    }))
}

pub(crate) fn response_trailers() -> ProcessingRequest {
    message(Request::ResponseTrailers(HttpTrailers::default()))
}
