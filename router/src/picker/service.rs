//! gRPC for gateways: the ext_proc service, the health services, and one HTTP/2 connection.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tonic::codegen::Service;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::stream::PickStream;
use crate::state::readiness;
use crate::state::shared::Shared;

/// Largest message of a gateway. Its head is bounded by `limits.head_bytes`, and a piece of a body has about 36 KiB.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Streams of one connection that were reset before they were accepted; with more the connection is closed (rapid reset).
/// A gateway resets a stream when its client leaves, and one connection carries the clients of a worker thread.
const PENDING_RESETS_MAX: usize = 1024;
/// Bytes of HTTP/2 headers. Those of gRPC have a few hundred.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// Bytes of one stream that are received before they are read: two pieces of a body.
const STREAM_WINDOW: u32 = 128 << 10;
/// The same for a connection. A stream that is not read holds its window, so this is many of them.
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Bytes that wait for a gateway that does not read, per stream.
const SEND_BUFFER: usize = 256 << 10;
/// A silent connection is probed after this time, and cut after as long again.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// The names of the health services, by what they mean.
const LIVENESS: &str = "liveness";
const READINESS: [&str; 3] =
    ["", "readiness", <ExternalProcessorServer<PickerService> as NamedService>::NAME];

/// Answers an HTTP/2 request of gRPC.
pub(crate) type GrpcResponse = hyper::Response<tonic::body::Body>;
type GrpcCall = BoxFuture<'static, Result<GrpcResponse, Infallible>>;

/// The health services.
#[derive(Clone)]
pub(crate) struct HealthService {
    reporter: HealthReporter,
    call: Arc<dyn Fn(hyper::Request<Incoming>) -> GrpcCall + Send + Sync>,
}

impl HealthService {
    /// Alive, and not ready.
    pub(crate) async fn new() -> Self {
        let (reporter, server) = tonic_health::server::health_reporter();
        reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
        for name in READINESS {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
        let call = move |request| -> GrpcCall { Box::pin(server.clone().call(request)) };
        Self { reporter, call: Arc::new(call) }
    }

    /// Publishes whether requests are accepted and have engines.
    pub(crate) async fn update(&self, shared: &Shared) {
        let status = match readiness::readiness(shared) {
            Ok(()) => ServingStatus::Serving,
            Err(_) => ServingStatus::NotServing,
        };
        for name in READINESS {
            self.reporter.set_service_status(name, status).await;
        }
    }
}

/// The ext_proc service for the connection of one gateway.
#[derive(Clone)]
pub(crate) struct PickerService {
    pub shared: Arc<Shared>,
    pub gateway: IpAddr,
}

#[tonic::async_trait]
impl ExternalProcessor for PickerService {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let stream = PickStream::new(&self.shared, self.gateway, request.into_inner());
        // `None` after an error: the stream and its reservations are dropped with it.
        let replies = stream::unfold(Some(stream), |stream| async move {
            let mut stream = stream?;
            match stream.next().await {
                Ok(reply) => Some((Ok(reply?), Some(stream))),
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(replies.boxed()))
    }
}

/// Serves one connection: the health services, and with a `picker` the ext_proc service. After `drain` it accepts no
/// stream and ends with its last one.
pub(crate) async fn serve_connection(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    health: HealthService,
    picker: Option<PickerService>,
    streams_max: u32,
    drain: CancellationToken,
) {
    let picker = picker
        .map(|picker| ExternalProcessorServer::new(picker).max_decoding_message_size(MESSAGE_BYTES_MAX));
    let answer = service_fn(move |request: hyper::Request<Incoming>| -> GrpcCall {
        let is_for =
            |name: &str| request.uri().path().strip_prefix('/').is_some_and(|path| path.starts_with(name));
        match &picker {
            _ if is_for("grpc.health.v1.Health/") => (health.call)(request),
            Some(picker) => picker.clone().call(request),
            None => Box::pin(async { Ok(Status::unimplemented("health only").into_http()) }),
        }
    });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(streams_max)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .serve_connection(TokioIo::new(io), answer);
    let mut connection = pin!(connection);
    tokio::select! {
        // A connection that breaks off is no error of the picker.
        _ = connection.as_mut() => return,
        () = drain.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
