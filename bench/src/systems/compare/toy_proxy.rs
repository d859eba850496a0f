//! The behaviour of vLLM's `toy_proxy_server.py`, in Rust: the proxy that users start with.
//!
//! ```text
//! body ─▶ prefill engine, to its end, even after a cancel ─▶ 200 is sent ─▶ decode engine ─▶ its bytes
//! ```
//!
//! As in the original, the proxy does not detect a cancel while it waits for the prefill engine. It sends the
//! prefill engine neither aborts nor releases. After the response has begun, the connection to the decode engine is
//! closed with the client's. Status 200 is sent before the decode engine responds. There are two differences. A
//! stream has the content type of a stream: the original always sends `application/json`, and this benchmark's
//! client depends on the type. There is no overhead of Python.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;

use crate::systems::router::RouterBenchError;
use crate::systems::router::gateway::{self, Gateway};
use crate::systems::router::peers::EngineAddresses;

/// The kernel's name of the proxy's threads.
const THREADS: &str = "bench-toy";
/// Maximum bytes of a body that is read as a whole.
const BODY_BYTES_MAX: usize = 32 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type ProxyResponse = Response<BoxBody<Bytes, Failure>>;

struct ToyProxy {
    engines: EngineAddresses,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Starts the proxy on threads of this process.
pub(super) async fn start(engines: EngineAddresses) -> Result<Gateway, RouterBenchError> {
    let start = move || async move {
        let system = |error| RouterBenchError::System("no toy proxy", error);
        let listener = std::net::TcpListener::bind(gateway::any()).map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let address = listener.local_addr().map_err(system)?;
        Ok::<_, RouterBenchError>((address, serve(listener, engines)))
    };
    Gateway::threads("toy-proxy", THREADS, start).await
}

async fn serve(listener: std::net::TcpListener, engines: EngineAddresses) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let toy = Arc::new(ToyProxy { engines, client: Client::builder(TokioExecutor::new()).build_http() });
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let toy = Arc::clone(&toy);
        tokio::spawn(async move {
            let answers = service_fn(move |request| {
                let toy = Arc::clone(&toy);
                async move { Ok::<_, Infallible>(toy.answer(request).await) }
            });
            // An error means that the client closed the connection.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answers)
                .await;
        });
    }
}

impl ToyProxy {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> ProxyResponse {
        let path = request.uri().path().to_owned();
        if request.method() != Method::POST || !path.starts_with("/v1/") {
            return status(StatusCode::NOT_FOUND);
        }
        let Ok(body) = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await else {
            return status(StatusCode::INTERNAL_SERVER_ERROR);
        };
        let Ok(mut fields) = serde_json::from_slice::<Map<String, Value>>(&body.to_bytes()) else {
            return status(StatusCode::INTERNAL_SERVER_ERROR);
        };
        let id = format!("{:032x}", u128::from(crate::sim::engines::random()));
        // In a separate task, which continues after a cancel.
        let prefill = {
            let (toy, path, fields, id) = (Arc::clone(&self), path.clone(), fields.clone(), id.clone());
            tokio::spawn(async move { toy.prefill(&path, fields, &id).await })
        };
        let Ok(Ok(lent)) = prefill.await else { return status(StatusCode::INTERNAL_SERVER_ERROR) };
        if lent.as_object().is_some_and(|params| !params.is_empty()) {
            fields.insert("kv_transfer_params".into(), lent);
        }
        let streams = fields.get("stream").is_some_and(|stream| *stream == json!(true));
        let kind = if streams { "text/event-stream; charset=utf-8" } else { "application/json" };
        let decode = async move { self.post(self.engines.decode, &path, &fields, &id).await };
        let mut reply = Response::new(LazyBody::Begins(Box::pin(decode)).boxed());
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        reply
    }

    /// The prefill leg. Returns the handoff.
    async fn prefill(&self, path: &str, mut fields: Map<String, Value>, id: &str) -> Result<Value, Failure> {
        let produce = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null,
        });
        fields.insert("kv_transfer_params".into(), produce);
        fields.insert("stream".into(), json!(false));
        fields.insert("max_tokens".into(), json!(1));
        if fields.contains_key("max_completion_tokens") {
            fields.insert("max_completion_tokens".into(), json!(1));
        }
        for unsupported in ["stream_options", "min_tokens", "min_completion_tokens"] {
            fields.remove(unsupported);
        }
        let reply = self.post(self.engines.prefill, path, &fields, id).await?;
        let body = Limited::new(reply, BODY_BYTES_MAX).collect().await?.to_bytes();
        let reply: Value = serde_json::from_slice(&body)?;
        Ok(reply["kv_transfer_params"].clone())
    }

    async fn post(
        &self,
        to: SocketAddr,
        path: &str,
        fields: &Map<String, Value>,
        id: &str,
    ) -> Result<Incoming, Failure> {
        let body = Full::new(Bytes::from(serde_json::to_vec(fields)?));
        let request = Request::post(format!("http://{to}{path}"))
            .header(CONTENT_TYPE, "application/json")
            .header("x-request-id", id)
            .body(body)?;
        let reply = self.client.request(request).await?;
        if !reply.status().is_success() {
            return Err(format!("{to}: {}", reply.status()).into());
        }
        Ok(reply.into_body())
    }
}

fn status(status: StatusCode) -> ProxyResponse {
    let mut reply = Response::new(Full::default().map_err(|never: Infallible| match never {}).boxed());
    *reply.status_mut() = status;
    reply
}

/// The decode engine's response. The request is sent when the first byte is polled.
enum LazyBody<F> {
    Begins(Pin<Box<F>>),
    Streams(Incoming),
}

impl<F: Future<Output = Result<Incoming, Failure>>> Body for LazyBody<F> {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        if let Self::Begins(begins) = &mut *self {
            match ready!(begins.as_mut().poll(context)) {
                Ok(body) => *self = Self::Streams(body),
                // The status was already sent, so the connection can only be closed.
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        match &mut *self {
            Self::Streams(body) => Pin::new(body).poll_frame(context).map_err(Into::into),
            Self::Begins(_) => unreachable!("it has begun"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::engines::{EnginePlan, FleetPlan, SimFleet};
    use crate::systems::router::connection::{self, KeptConnection};

    #[tokio::test]
    async fn the_proxy_calls_prefill_and_then_decode() {
        let fleet = SimFleet::start(FleetPlan::new(1, 1, EnginePlan::instant())).expect("a fleet");
        let engines = EngineAddresses { prefill: fleet.prefill()[0], decode: fleet.decode()[0] };
        let toy = start(engines).await.expect("it starts");
        let ask =
            json!({"model": "sim", "prompt": "one two three", "max_tokens": 4, "min_tokens": 3, "user": "t"});
        let mut texts = Vec::new();
        for address in [toy.address, engines.decode] {
            let mut connection = KeptConnection::connect(address).await.expect("it listens");
            let answer = connection.post(&connection::request(&ask.to_string())).await.expect("an answer");
            let body = String::from_utf8_lossy(answer.bytes).into_owned();
            let json = body[body.find('{').expect("JSON")..=body.rfind('}').expect("JSON")].to_owned();
            texts.push(serde_json::from_str::<Value>(&json).expect("JSON")["choices"][0]["text"].clone());
        }
        assert_eq!(texts[0], texts[1]);
        let log = fleet.log(crate::sim::engines::Role::Decode, 0).expect("it lives");
        let fetched = log.page(0, 100).events.into_iter().filter(|event| event["kind"] == "fetched").count();
        assert_eq!(fetched, 1, "the first of them was handed over");
        tokio::task::spawn_blocking(|| toy.stop()).await.expect("it stops");
    }
}
