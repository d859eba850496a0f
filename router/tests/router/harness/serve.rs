//! The server side of a scripted engine's connection: HTTP/1.1, or HTTP/2 if the router sends its preface.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::BodyExt;
use http_body_util::combinators::BoxBody;
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::HttpService;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// The body of a response.
pub(crate) type Body = BoxBody<Bytes, std::io::Error>;

/// Serves a connection to its end. `streams`: the stream limit of HTTP/2.
pub(crate) async fn serve_connection<S, B>(stream: TcpStream, half_close: bool, streams: u32, service: S)
where
    S: HttpService<Incoming, ResBody = B>,
    <S as HttpService<Incoming>>::Error: Into<Box<dyn Error + Send + Sync>>,
    <S as HttpService<Incoming>>::Future: Send + 'static,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
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

/// A body of these frames.
pub(crate) fn channel(receiver: mpsc::Receiver<BodyFrame>) -> Body {
    ResponseBody(receiver).boxed()
}

type BodyFrame = Result<Frame<Bytes>, std::io::Error>;

struct ResponseBody(mpsc::Receiver<BodyFrame>);

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<BodyFrame>> {
        self.0.poll_recv(context)
    }
}
