//! The server side of one HTTP/2 connection: the same responses as over HTTP/1.1, each on a stream.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use hyper::{Request, Response};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::connection::{REQUEST_BYTES_MAX, RequestFlags, head_bytes};
use super::{Behaviour, EngineShared, EngineSignal, SimRole, TOKEN};

/// Streams of one connection: more than the router opens.
const STREAMS_MAX: u32 = 256;
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Serves a connection to its end.
pub(super) async fn serve(stream: TcpStream, shared: &Arc<EngineShared>) {
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(STREAMS_MAX);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    let mut streams = JoinSet::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        let shared = Arc::clone(shared);
        streams.spawn(async move {
            // An error means that the caller reset the stream, or closed the connection.
            let _ = answer(request, respond, &shared).await;
        });
        while streams.try_join_next().is_some() {}
    }
    drop(connection);
    // Each reports the end of its request.
    while streams.join_next().await.is_some() {}
}

async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    shared: &EngineShared,
) -> Result<(), h2::Error> {
    let request = read(request).await?;
    let answers = &shared.answers;
    if !request.generates {
        if request.verb {
            shared.send_signal(EngineSignal::Verb);
        }
        return send_whole(respond, if request.models { &answers.models } else { &answers.small });
    }
    match (shared.behaviour(), shared.role) {
        (Behaviour::Answer, SimRole::Prefill) => {
            send_whole(respond, &answers.lent)?;
            shared.send_signal(EngineSignal::Took);
        }
        (Behaviour::Answer, SimRole::Decode { tokens, pause }) if request.stream => {
            let mut stream = respond.send_response(head("text/event-stream; charset=utf-8"), false)?;
            for token in 0..tokens {
                if token > 0 && pause.is_zero() {
                    tokio::task::yield_now().await;
                } else if token > 0 {
                    tokio::time::sleep(pause).await;
                }
                stream.send_data(Bytes::from_static(TOKEN.as_bytes()), false)?;
            }
            stream.send_data(Bytes::from_static(DONE), true)?;
        }
        (Behaviour::Answer, SimRole::Decode { .. }) => send_whole(respond, &answers.whole)?,
        (held, _) => {
            shared.held.fetch_add(1, Ordering::SeqCst);
            shared.send_signal(EngineSignal::Took);
            hold(held, &mut respond).await;
            shared.send_signal(EngineSignal::Closed);
            shared.held.fetch_sub(1, Ordering::SeqCst);
        }
    }
    Ok(())
}

/// The whole request.
async fn read(request: Request<RecvStream>) -> Result<RequestFlags, h2::Error> {
    let (head, mut body) = request.into_parts();
    let mut text = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        if text.len() + piece.len() > REQUEST_BYTES_MAX {
            return Err(h2::Reason::CANCEL.into());
        }
        text.extend_from_slice(&piece);
    }
    let line = format!("{} {} HTTP/1.1\r\n\r\n", head.method, head.uri.path());
    Ok(RequestFlags::of(line.as_bytes(), &text))
}

/// Holds a request without an end, until the caller ends it.
async fn hold(held: Behaviour, respond: &mut SendResponse<Bytes>) {
    if held == Behaviour::Silent {
        let _ = poll_fn(|context| respond.poll_reset(context)).await;
        return;
    }
    let Ok(mut stream) = respond.send_response(head("text/event-stream; charset=utf-8"), false) else {
        return;
    };
    while send_token(&mut stream).await && held == Behaviour::Flood {
        tokio::task::yield_now().await;
    }
    let _ = poll_fn(|context| stream.poll_reset(context)).await;
}

/// Whether the caller has not ended the request.
async fn send_token(stream: &mut SendStream<Bytes>) -> bool {
    stream.reserve_capacity(TOKEN.len());
    let capacity = poll_fn(|context| match stream.poll_reset(context) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => stream.poll_capacity(context),
    });
    matches!(capacity.await, Some(Ok(_)))
        && stream.send_data(Bytes::from_static(TOKEN.as_bytes()), false).is_ok()
}

fn head(kind: &'static str) -> Response<()> {
    Response::builder().header("content-type", kind).body(()).expect("constant fields")
}

/// Sends the body of a prepared response of HTTP/1.1.
fn send_whole(mut respond: SendResponse<Bytes>, prepared: &[u8]) -> Result<(), h2::Error> {
    let body = &prepared[head_bytes(prepared).unwrap_or_default()..];
    let mut stream = respond.send_response(head("application/json"), false)?;
    stream.send_data(Bytes::copy_from_slice(body), true)
}
