//! Two ways to the first token: through the router, and by both hops past it, with the same HTTP client.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_connector::handoff::KvIntent;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;

use super::RouterBenchError;

/// 64 tokens of prompt, more or less.
const PROMPT: &str = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
                      sixteen seventeen eighteen nineteen twenty one two three four five six seven eight nine ten";

/// One way to ask.
pub(super) trait Caller {
    /// Streams one answer and says how long its first byte took.
    async fn first_token(&mut self) -> Result<Duration, RouterBenchError>;
}

/// A kept connection.
struct Hop {
    sender: SendRequest<Full<Bytes>>,
}

/// Through the router.
pub(super) struct Through {
    router: Hop,
    streamed: Bytes,
    unary: Bytes,
}

/// To the prefill engine and then to the decode engine.
pub(super) struct Direct {
    prefill: Hop,
    decode: Hop,
    ask: Map<String, Value>,
    first: Bytes,
}

fn failed(error: impl std::fmt::Display) -> RouterBenchError {
    RouterBenchError::Request(error.to_string())
}

fn ask(stream: bool) -> Map<String, Value> {
    let ask = json!({"model": "sim", "prompt": PROMPT, "max_tokens": 64, "stream": stream});
    match ask {
        Value::Object(ask) => ask,
        _ => unreachable!("an object is written above"),
    }
}

fn bytes(body: &Map<String, Value>) -> Bytes {
    serde_json::to_vec(body).expect("JSON is written as JSON").into()
}

impl Hop {
    async fn connect(address: SocketAddr) -> Result<Self, RouterBenchError> {
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
        tokio::spawn(connection);
        Ok(Self { sender })
    }

    /// Sends, and gives the time of the first byte of the body and the whole body.
    async fn post(&mut self, body: Bytes) -> Result<(Instant, Bytes), RouterBenchError> {
        self.sender.ready().await.map_err(failed)?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = hyper::Uri::from_static("/v1/completions");
        request.headers_mut().insert(HOST, HeaderValue::from_static("bench"));
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let response = self.sender.send_request(request).await.map_err(failed)?;
        let status = response.status();
        let mut body = response.into_body();
        let (mut first, mut whole) = (None, Vec::new());
        while let Some(frame) = body.frame().await {
            first.get_or_insert_with(Instant::now);
            if let Ok(data) = frame.map_err(failed)?.into_data() {
                whole.extend_from_slice(&data);
            }
        }
        let first = first.filter(|_| status.is_success());
        let told = || failed(format!("{status}: {}", String::from_utf8_lossy(&whole)));
        Ok((first.ok_or_else(told)?, Bytes::from(whole)))
    }
}

impl Through {
    pub(super) async fn connect(router: SocketAddr) -> Result<Self, RouterBenchError> {
        let router = Hop::connect(router).await?;
        Ok(Self { router, streamed: bytes(&ask(true)), unary: bytes(&ask(false)) })
    }

    /// One whole answer.
    pub(super) async fn whole(&mut self, stream: bool) -> Result<(), RouterBenchError> {
        let body = if stream { &self.streamed } else { &self.unary };
        let (_, answer) = self.router.post(body.clone()).await?;
        let complete = if stream { answer.ends_with(b"data: [DONE]\n\n") } else { answer.ends_with(b"}") };
        if complete { Ok(()) } else { Err(failed("an answer is not complete")) }
    }
}

impl Caller for Through {
    async fn first_token(&mut self) -> Result<Duration, RouterBenchError> {
        let begun = Instant::now();
        let (first, _) = self.router.post(self.streamed.clone()).await?;
        Ok(first - begun)
    }
}

impl Direct {
    pub(super) async fn connect(prefill: SocketAddr, decode: SocketAddr) -> Result<Self, RouterBenchError> {
        let mut first = ask(false);
        first.insert("max_tokens".into(), json!(1));
        first.insert("kv_transfer_params".into(), KvIntent::produce_request());
        let (prefill, decode) = (Hop::connect(prefill).await?, Hop::connect(decode).await?);
        Ok(Self { prefill, decode, ask: ask(true), first: bytes(&first) })
    }
}

impl Caller for Direct {
    async fn first_token(&mut self) -> Result<Duration, RouterBenchError> {
        let begun = Instant::now();
        let (_, reply) = self.prefill.post(self.first.clone()).await?;
        let mut reply: Map<String, Value> = serde_json::from_slice(&reply).map_err(failed)?;
        let handoff = reply.remove("kv_transfer_params").ok_or_else(|| failed("no handoff"))?;
        self.ask.insert("kv_transfer_params".into(), handoff);
        let (first, _) = self.decode.post(bytes(&self.ask)).await?;
        Ok(first - begun)
    }
}
