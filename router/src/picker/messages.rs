//! The messages of ext_proc v3: what the picker reads of them, and its replies. Pure.
//!
//! Source of names and rules: Gateway API inference extension, `docs/proposals/004-endpoint-picker-protocol`.

use std::net::{IpAddr, SocketAddr};

use baton_openai::ApiError;
use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue as PbHeader, HeaderValueOption, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpHeaders,
    ImmediateResponse, ProcessingRequest, ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use hyper::Method;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};

use super::protocol::{Direction, Event, Rest};
use crate::auth;
use crate::engines::health::FAILED_LEG;
use crate::engines::protocol::{RANK_HEADER, is_of_router};
use crate::metrics::Leg;

/// The endpoint that a request goes to: a header of the request, and a key of the metadata [`METADATA`].
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Namespace of the dynamic metadata that load balancers of Envoy read.
const METADATA: &str = "envoy.lb";
/// Namespace and key of the endpoints among which a gateway wants the choice.
const SUBSET: (&str, &str) = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
/// The prefill engine of a request, for the routing sidecar beside the decode engine (llm-d).
const PREFILLER: &str = "x-prefiller-host-port";
/// Why a request was refused (llm-d).
const DROPPED: &str = "x-llm-d-request-dropped-reason";

/// Headers that choose an engine or a rank behind the gateway. A client's own values never pass: a sidecar or an
/// engine would connect to an address of the client's choice.
const STRIPPED: [&str; 7] = [
    DESTINATION,
    PREFILLER,
    RANK_HEADER,
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
    "x-gateway-destination-endpoint-subset",
];

/// Maximum fields of one head. A head that Envoy accepts has 100 by default.
const FIELDS_MAX: usize = 256;

/// A head that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum PickHeadError {
    #[error("the request's head has no `:method` or no `:path`")]
    Incomplete,
    #[error("the request's head is larger than {0} bytes or {FIELDS_MAX} fields")]
    TooLarge(usize),
}

/// The head of a client's request.
#[derive(Debug)]
pub(super) struct PickHead {
    pub method: Method,
    /// Without the query.
    pub path: String,
    pub headers: HeaderMap,
    /// The endpoints among which the gateway wants the choice; `None`: all.
    pub subset: Option<Subset>,
}

/// Endpoints, with or without a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subset(Vec<(IpAddr, Option<u16>)>);

impl Subset {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains(&self, endpoint: SocketAddr) -> bool {
        let fits = |(ip, port): &(IpAddr, Option<u16>)| {
            *ip == endpoint.ip() && port.is_none_or(|port| port == endpoint.port())
        };
        self.0.iter().any(fits)
    }

    /// Entries that are no address fit no endpoint.
    fn read(entries: &str) -> impl Iterator<Item = (IpAddr, Option<u16>)> + '_ {
        entries.split(',').map(str::trim).filter_map(|entry| match entry.parse::<SocketAddr>() {
            Ok(address) => Some((address.ip(), Some(address.port()))),
            Err(_) => Some((entry.trim_matches(['[', ']']).parse().ok()?, None)),
        })
    }
}

impl PickHead {
    /// Reads the head of a request, up to `bytes_max` bytes of names and values.
    ///
    /// # Errors
    /// [`PickHeadError`]
    pub(super) fn read(
        headers: HttpHeaders,
        metadata: Option<&Metadata>,
        bytes_max: usize,
    ) -> Result<Self, PickHeadError> {
        let fields = headers.headers.unwrap_or_default().headers;
        let bytes = |field: &PbHeader| field.key.len() + field.raw_value.len().max(field.value.len());
        if fields.len() > FIELDS_MAX || fields.iter().map(bytes).sum::<usize>() > bytes_max {
            return Err(PickHeadError::TooLarge(bytes_max));
        }
        let (mut method, mut path, mut headers) = (None, None, HeaderMap::new());
        for field in fields {
            let value = if field.raw_value.is_empty() { field.value.into_bytes() } else { field.raw_value };
            match field.key.as_str() {
                ":method" => method = Method::from_bytes(&value).ok(),
                ":path" => path = String::from_utf8(value).ok(),
                // A name or a value that is not allowed in HTTP cannot come from a gateway that reads HTTP.
                name => {
                    if let (Ok(name), Ok(value)) =
                        (name.parse::<HeaderName>(), HeaderValue::from_bytes(&value))
                    {
                        headers.append(name, value);
                    }
                }
            }
        }
        let (Some(method), Some(mut path)) = (method, path) else { return Err(PickHeadError::Incomplete) };
        path.truncate(path.find('?').unwrap_or(path.len()));
        Ok(Self { method, path, headers, subset: metadata.and_then(subset) })
    }

    /// The names of the headers that only a router may send. A gateway removes headers by their whole names.
    pub(super) fn names_of_router(&self) -> Vec<String> {
        self.headers
            .keys()
            .map(HeaderName::as_str)
            .filter(|name| is_of_router(name))
            .map(str::to_owned)
            .collect()
    }

    /// The value of a header, if it is text and not empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok().map(str::trim).filter(|text| !text.is_empty())
    }
}

/// The subset hint of a request. A hint of another type restricts the choice to no endpoint.
fn subset(metadata: &Metadata) -> Option<Subset> {
    let hint = metadata.filter_metadata.get(SUBSET.0)?.fields.get(SUBSET.1)?;
    let texts: Vec<&str> = match &hint.kind {
        Some(Kind::StringValue(text)) => vec![text],
        Some(Kind::ListValue(list)) => list
            .values
            .iter()
            .filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    Some(Subset(texts.into_iter().flat_map(Subset::read).collect()))
}

/// What the picker reads of a response's headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResponseResult {
    pub status: u16,
    /// The leg whose engine failed, as a routing sidecar names it.
    pub failed_leg: Option<Leg>,
}

impl ResponseResult {
    /// `None` without a status.
    pub(super) fn read(headers: &HttpHeaders) -> Option<Self> {
        let fields = &headers.headers.as_ref()?.headers;
        let text = |name: &str| {
            let field = fields.iter().find(|field| field.key == name)?;
            let value = if field.raw_value.is_empty() { field.value.as_bytes() } else { &field.raw_value };
            std::str::from_utf8(value).ok()
        };
        let status: u16 = text(":status")?.parse().ok()?;
        let failed_leg = text(FAILED_LEG).filter(|_| status >= 500);
        let failed_leg = failed_leg.and_then(|name| Leg::BOTH.into_iter().find(|leg| leg.label() == name));
        Some(Self { status, failed_leg })
    }
}

/// A processing mode under which the picker cannot work, in the words of Envoy's configuration.
pub(super) fn unusable_mode(message: &ProcessingRequest) -> Option<&'static str> {
    if message.observability_mode {
        return Some("`observability_mode` must be off: the gateway would ignore the endpoint");
    }
    let config = message.protocol_config.as_ref()?;
    let full_duplex = BodySendMode::FullDuplexStreamed as i32;
    if config.request_body_mode != full_duplex {
        return Some("`request_body_mode` must be FULL_DUPLEX_STREAMED: the choice depends on the body");
    }
    // Without response bodies the gateway sends none, and the stream still ends with the request.
    if config.response_body_mode != full_duplex && config.response_body_mode != BodySendMode::None as i32 {
        return Some("`response_body_mode` must be FULL_DUPLEX_STREAMED or NONE");
    }
    None
}

/// The event of a message other than request headers; `None` for one without content.
pub(super) fn event(request: Option<Request>) -> Option<Event> {
    let rest = |end: bool| if end { Rest::End } else { Rest::Follows };
    Some(match request? {
        Request::RequestHeaders(headers) => Event::RequestHeaders(rest(headers.end_of_stream)),
        Request::RequestBody(body) => Event::RequestBody(body.body.into(), rest(body.end_of_stream)),
        Request::RequestTrailers(_) => Event::RequestTrailers,
        Request::ResponseHeaders(headers) => Event::ResponseHeaders(rest(headers.end_of_stream)),
        Request::ResponseBody(body) => Event::ResponseBody(body.body.into(), rest(body.end_of_stream)),
        Request::ResponseTrailers(_) => Event::ResponseTrailers,
    })
}

/// The endpoints of a request, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Endpoints {
    /// `ip:port`, and those to use after it, separated by commas.
    pub destination: String,
    pub prefiller: Option<String>,
    pub rank: Option<u16>,
    /// The client's credentials are the router's own, and not for engines.
    pub without_authorization: bool,
    /// Headers of the client that only a router may send.
    pub of_router: Vec<String>,
}

/// The reply to a request's headers.
pub(super) fn destination(endpoints: &Endpoints) -> ProcessingResponse {
    let mut removed: Vec<String> = STRIPPED.map(str::to_owned).into();
    removed.extend(endpoints.of_router.iter().filter(|name| *name != RANK_HEADER).cloned());
    if endpoints.without_authorization {
        removed.extend(["authorization".to_owned(), auth::X_API_KEY.to_owned()]);
    }
    let mut set = vec![overwrite(DESTINATION, endpoints.destination.as_bytes())];
    set.extend(endpoints.prefiller.as_ref().map(|prefiller| overwrite(PREFILLER, prefiller.as_bytes())));
    set.extend(endpoints.rank.map(|rank| overwrite(RANK_HEADER, rank.to_string().as_bytes())));
    // A header that is set is overwritten, with every value that it has.
    removed.retain(|name| !set.iter().any(|field| field.header.as_ref().is_some_and(|h| h.key == *name)));
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let structure = |key: &str, value| Struct { fields: [(key.to_owned(), value)].into() };
    let inner = structure(DESTINATION, text(&endpoints.destination));
    let metadata = structure(METADATA, Value { kind: Some(Kind::StructValue(inner)) });
    let common = CommonResponse {
        header_mutation: Some(HeaderMutation { set_headers: set, remove_headers: removed }),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    let reply = Response::RequestHeaders(HeadersResponse { response: Some(common) });
    ProcessingResponse { dynamic_metadata: Some(metadata), ..response(reply) }
}

/// The reply to a response's headers: no change.
pub(super) fn response_headers() -> ProcessingResponse {
    response(Response::ResponseHeaders(HeadersResponse { response: Some(CommonResponse::default()) }))
}

/// A piece of a body, for the other side.
pub(super) fn piece(direction: Direction, bytes: Bytes, rest: Rest) -> ProcessingResponse {
    let streamed = StreamedBodyResponse {
        body: bytes.into(),
        end_of_stream: rest == Rest::End,
        ..StreamedBodyResponse::default()
    };
    let mutation = BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) };
    let common = CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() };
    let body = BodyResponse { response: Some(common) };
    response(match direction {
        Direction::Request => Response::RequestBody(body),
        Direction::Response => Response::ResponseBody(body),
    })
}

/// The reply to trailers: no change.
pub(super) fn trailers(direction: Direction) -> ProcessingResponse {
    let trailers = TrailersResponse::default();
    response(match direction {
        Direction::Request => Response::RequestTrailers(trailers),
        Direction::Response => Response::ResponseTrailers(trailers),
    })
}

/// The error as the whole response to the client.
pub(super) fn immediate(error: &ApiError) -> ProcessingResponse {
    let headers = error.headers();
    let mut set: Vec<_> = headers.iter().map(|(name, value)| overwrite(name, value.as_bytes())).collect();
    if matches!(error.status, 429 | 503) {
        let reason = error.code.as_deref().unwrap_or("overloaded");
        set.push(overwrite(DROPPED, reason.as_bytes()));
    }
    response(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(error.status) }),
        headers: Some(HeaderMutation { set_headers: set, ..HeaderMutation::default() }),
        body: error.to_bytes().into(),
        details: error.code.as_deref().unwrap_or_default().to_owned(),
        ..ImmediateResponse::default()
    }))
}

fn response(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}

fn overwrite(name: &str, value: &[u8]) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(PbHeader { key: name.to_owned(), raw_value: value.to_vec(), ..PbHeader::default() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..HeaderValueOption::default()
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::HeaderMap as PbHeaders;
    use envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration;
    use envoy_types::pb::google::protobuf::ListValue;

    use super::*;

    fn head(fields: &[(&str, &str)]) -> HttpHeaders {
        let field = |(key, value): &(&str, &str)| PbHeader {
            key: (*key).to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..PbHeader::default()
        };
        let headers = PbHeaders { headers: fields.iter().map(field).collect() };
        HttpHeaders { headers: Some(headers), ..HttpHeaders::default() }
    }

    #[test]
    fn a_head_is_read_within_its_bounds() {
        let fields = [(":method", "POST"), (":path", "/v1/completions?x=1"), ("x-a", "1"), ("x-a", "2")];
        let read = PickHead::read(head(&fields), None, 100).expect("small");
        assert_eq!((read.method, read.path.as_str()), (Method::POST, "/v1/completions"));
        assert_eq!(read.headers.get_all("x-a").iter().count(), 2);
        assert!(matches!(PickHead::read(head(&fields), None, 20), Err(PickHeadError::TooLarge(20))));
        assert!(matches!(PickHead::read(head(&[("a", "1")]), None, 100), Err(PickHeadError::Incomplete)));
        let many: Vec<_> = (0..=FIELDS_MAX).map(|_| ("x", "")).collect();
        assert!(matches!(PickHead::read(head(&many), None, 1 << 20), Err(PickHeadError::TooLarge(_))));
        // Older gateways fill `value`, and a field that is no HTTP is left out.
        let mut old = head(&[(":method", ""), (":path", ""), ("bad name", "x")]);
        let fields = &mut old.headers.as_mut().expect("set").headers;
        (fields[0].value, fields[1].value) = ("GET".to_owned(), "/v1/models".to_owned());
        let read = PickHead::read(old, None, 100).expect("complete");
        assert_eq!((read.method, read.path.as_str(), read.headers.len()), (Method::GET, "/v1/models", 0));
    }

    #[test]
    fn headers_of_routers_are_found_by_their_beginning() {
        let fields = [
            (":method", "POST"),
            (":path", "/"),
            ("X-Override-Bootstrap-Host", "evil"),
            ("x-override-rid", "1"),
            ("x-override-rid", "2"),
            ("x-baton-router-settles", "1"),
            ("x-data-parallel-rank", "7"),
            ("x-overridden", "1"),
        ];
        let mut names = PickHead::read(head(&fields), None, 1000).expect("small").names_of_router();
        names.sort();
        let expected =
            ["x-baton-router-settles", "x-data-parallel-rank", "x-override-bootstrap-host", "x-override-rid"];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_sidecars_error_names_the_leg_that_failed() {
        let read = |fields: &[(&str, &str)]| ResponseResult::read(&head(fields));
        let result = |status, failed_leg| Some(ResponseResult { status, failed_leg });
        assert_eq!(read(&[(":status", "503"), (FAILED_LEG, "decode")]), result(503, Some(Leg::Decode)));
        assert_eq!(read(&[(":status", "502"), (FAILED_LEG, "prefill")]), result(502, Some(Leg::Prefill)));
        assert_eq!(read(&[(":status", "502"), (FAILED_LEG, "other")]), result(502, None));
        assert_eq!(read(&[(":status", "200"), (FAILED_LEG, "decode")]), result(200, None));
        assert_eq!(read(&[(FAILED_LEG, "decode")]), None);
    }

    #[test]
    fn a_subset_is_a_list_or_text_and_one_that_names_no_address_is_empty() {
        let of = |kind: Kind| {
            let hint = Struct { fields: [(SUBSET.1.to_owned(), Value { kind: Some(kind) })].into() };
            let metadata =
                Metadata { filter_metadata: [(SUBSET.0.to_owned(), hint)].into(), ..Metadata::default() };
            subset(&metadata).expect("a hint")
        };
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let text =
            of(Kind::StringValue("10.0.0.1:8000, 10.0.0.2,[fd00::1]:80,[fd00::2], nonsense".to_owned()));
        assert!(text.contains(address("10.0.0.1:8000")) && !text.contains(address("10.0.0.1:8001")));
        assert!(text.contains(address("10.0.0.2:9")) && text.contains(address("[fd00::2]:7")));
        let value = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let list = of(Kind::ListValue(ListValue { values: vec![value("10.0.0.3:1"), value("10.0.0.4")] }));
        assert!(list.contains(address("10.0.0.3:1")) && list.contains(address("10.0.0.4:5")));
        assert!(of(Kind::StringValue(String::new())).is_empty());
        assert!(of(Kind::NumberValue(1.0)).is_empty());
        assert_eq!(subset(&Metadata::default()), None);
    }

    #[test]
    fn header_and_metadata_contain_the_same_endpoints_and_client_headers_are_removed() {
        let endpoints = Endpoints {
            destination: "10.0.0.1:8000,10.0.0.2:8000".to_owned(),
            prefiller: Some("10.0.0.9:8000".to_owned()),
            of_router: vec!["x-override-rid".to_owned()],
            ..Endpoints::default()
        };
        let reply = destination(&endpoints);
        let Some(Response::RequestHeaders(headers)) = reply.response else { panic!("headers") };
        let common = headers.response.expect("a common response");
        assert!(common.clear_route_cache);
        let mutation = common.header_mutation.expect("a mutation");
        let set: Vec<_> = mutation.set_headers.iter().filter_map(|field| field.header.as_ref()).collect();
        assert_eq!(
            (set[0].key.as_str(), &*set[0].raw_value),
            (DESTINATION, endpoints.destination.as_bytes())
        );
        assert_eq!((set[1].key.as_str(), &*set[1].raw_value), (PREFILLER, b"10.0.0.9:8000".as_slice()));
        let overwrites = HeaderAppendAction::OverwriteIfExistsOrAdd as i32;
        assert!(mutation.set_headers.iter().all(|field| field.append_action == overwrites));
        let mut handled: Vec<_> = mutation.remove_headers.iter().map(String::as_str).collect();
        handled.extend(set.iter().map(|field| field.key.as_str()));
        for name in STRIPPED.into_iter().chain(["x-override-rid"]) {
            assert!(handled.contains(&name), "{name} of a client passes");
        }
        let metadata = reply.dynamic_metadata.expect("metadata");
        let Some(Kind::StructValue(inner)) = &metadata.fields[METADATA].kind else { panic!("a structure") };
        let Some(Kind::StringValue(text)) = &inner.fields[DESTINATION].kind else { panic!("text") };
        assert_eq!(*text, endpoints.destination);
    }

    #[test]
    fn a_refusal_has_its_retry_time_and_its_reason() {
        let error = ApiError::overloaded("full", std::time::Duration::from_secs(3));
        let Some(Response::ImmediateResponse(reply)) = immediate(&error).response else {
            panic!("immediate")
        };
        assert_eq!(reply.status.expect("a status").code, 429);
        let headers = reply.headers.expect("headers").set_headers;
        let value = |name: &str| {
            let mut fields = headers.iter().filter_map(|field| field.header.as_ref());
            fields.find(|field| field.key.eq_ignore_ascii_case(name)).map(|field| field.raw_value.clone())
        };
        assert_eq!(value("retry-after").as_deref(), Some(b"3".as_slice()));
        assert_eq!(value(DROPPED), error.code.as_deref().map(|code| code.as_bytes().to_vec()));
        assert_eq!(reply.body, error.to_bytes());
    }

    #[test]
    fn a_mode_that_hides_the_body_or_ignores_the_reply_is_named() {
        let with = |request: BodySendMode, response: BodySendMode| ProcessingRequest {
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: request as i32,
                response_body_mode: response as i32,
                ..ProtocolConfiguration::default()
            }),
            ..ProcessingRequest::default()
        };
        let full = BodySendMode::FullDuplexStreamed;
        assert_eq!(unusable_mode(&with(full, full)), None);
        assert_eq!(unusable_mode(&with(full, BodySendMode::None)), None);
        assert_eq!(unusable_mode(&ProcessingRequest::default()), None);
        assert!(unusable_mode(&with(BodySendMode::None, full)).is_some());
        assert!(unusable_mode(&with(full, BodySendMode::Buffered)).is_some());
        let observes = ProcessingRequest { observability_mode: true, ..ProcessingRequest::default() };
        assert!(unusable_mode(&observes).is_some());
    }
}
