//! What vLLM's `toy_proxy_server.py` does with a request, in Rust: the proxy that people begin with.
//!
//! ```text
//!  body ─▶ prefill engine, to its end, whoever waits ─▶ 200 is sent ─▶ decode engine ─▶ its bytes, as they come
//! ```
//!
//! As there (read 2026-11-22): a client that leaves is not noticed while the prefill engine is waited for, and nobody tells
//! a prefill engine anything; once the answer has begun, the connection to the decode engine goes with the client's. The
//! status is 200 before the decode engine has said anything. Two things are otherwise: a stream is called one (there every
//! answer is `application/json`, and the client here goes by that), and Python's own cost is not in it.

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
use tokio_util::sync::CancellationToken;

use crate::systems::router::RouterBenchError;
use crate::systems::router::peers::Engines;
use crate::systems::router::subject::{self, Subject};

/// The kernel's name for its threads.
const THREADS: &str = "bench-toy";
/// Bodies in both directions, where one is read whole.
const BODY_BYTES_MAX: usize = 32 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Answer = Response<BoxBody<Bytes, Failure>>;

struct Toy {
    engines: Engines,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Starts it on threads of this process.
pub(super) async fn start(engines: Engines) -> Result<Subject, RouterBenchError> {
    let system = |error| RouterBenchError::System("no toy proxy", error);
    let listener = std::net::TcpListener::bind(subject::any()).map_err(system)?;
    listener.set_nonblocking(true).map_err(system)?;
    let address = listener.local_addr().map_err(system)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(THREADS)
        .enable_all()
        .build()
        .map_err(system)?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let ended = std::thread::spawn(move || {
        // The work is done on the runtime's threads, whose time is counted; this one waits.
        runtime.block_on(async {
            let serving = tokio::spawn(serve(listener, engines));
            stopped.cancelled().await;
            serving.abort();
        });
        runtime.shutdown_background();
    });
    Ok(Subject::threads("toy-proxy", THREADS, address, move || {
        stop.cancel();
        // A panic of it has been told on standard error.
        let _ = ended.join();
    }))
}

async fn serve(listener: std::net::TcpListener, engines: Engines) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let toy = Arc::new(Toy { engines, client: Client::builder(TokioExecutor::new()).build_http() });
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let toy = Arc::clone(&toy);
        tokio::spawn(async move {
            let answers = service_fn(move |request| {
                let toy = Arc::clone(&toy);
                async move { Ok::<_, Infallible>(toy.answer(request).await) }
            });
            // An error is the client's end of the connection.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answers)
                .await;
        });
    }
}

impl Toy {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
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
        // On a task of its own: it goes on when the client has left.
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
        let mut reply = Response::new(Lazy::Begins(Box::pin(decode)).boxed());
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        reply
    }

    /// The prefill leg, and what it lends.
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

fn status(status: StatusCode) -> Answer {
    let mut reply = Response::new(Full::default().map_err(|never: Infallible| match never {}).boxed());
    *reply.status_mut() = status;
    reply
}

/// The decode engine's answer; it is asked when the answer's first byte is.
enum Lazy<F> {
    Begins(Pin<Box<F>>),
    Streams(Incoming),
}

impl<F: Future<Output = Result<Incoming, Failure>>> Body for Lazy<F> {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        if let Self::Begins(begins) = &mut *self {
            match ready!(begins.as_mut().poll(context)) {
                Ok(body) => *self = Self::Streams(body),
                // The status has been sent: all that is left is to end the connection.
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
    use crate::systems::router::wire::{self, Wire};

    #[tokio::test]
    async fn it_asks_one_engine_and_then_the_other() {
        let fleet = SimFleet::start(FleetPlan::new(1, 1, EnginePlan::instant())).expect("a fleet");
        let engines = Engines { prefill: fleet.prefill()[0], decode: fleet.decode()[0] };
        let toy = start(engines).await.expect("it starts");
        let ask =
            json!({"model": "sim", "prompt": "one two three", "max_tokens": 4, "min_tokens": 3, "user": "t"});
        let mut texts = Vec::new();
        for address in [toy.address, engines.decode] {
            let mut wire = Wire::connect(address).await.expect("it listens");
            let answer = wire.post(&wire::request(&ask.to_string())).await.expect("an answer");
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
