//! The server side of a scripted engine's connection: HTTP/1.1, or HTTP/2 if the router sends its preface.

use std::error::Error;

use hyper::body::{Body, Bytes, Incoming};
use hyper::service::HttpService;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

/// Serves a connection to its end. `streams`: the stream limit of HTTP/2.
pub(crate) async fn serve_connection<S, B>(stream: TcpStream, half_close: bool, streams: u32, service: S)
where
    S: HttpService<Incoming, ResBody = B>,
    <S as HttpService<Incoming>>::Error: Into<Box<dyn Error + Send + Sync>>,
    <S as HttpService<Incoming>>::Future: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let mut first = [0; 4];
    let _ = stream.peek(&mut first).await;
    let stream = TokioIo::new(stream);
    if &first == b"PRI " {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = builder.max_concurrent_streams(streams).serve_connection(stream, service).await;
    } else {
        let mut builder = hyper::server::conn::http1::Builder::new();
        let _ = builder.half_close(half_close).serve_connection(stream, service).await;
    }
}
