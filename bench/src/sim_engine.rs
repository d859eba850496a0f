//! Simulated engines: the prefill/decode protocol with almost no work behind it, so that what a benchmark
//! measures is what stands in front of them.
//!
//! A prefill engine answers at once with a complete handoff; a decode engine answers with so many tokens,
//! streamed one write per token, or in one piece. They check nothing.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

/// Which half of a request a simulated engine answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimRole {
    /// Lends blocks that do not exist.
    Prefill,
    /// Says this many tokens.
    Decode {
        /// Tokens per answer.
        tokens: usize,
    },
}

const LENT: &str = concat!(
    r#"{"id":"cmpl-sim","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"text":"","#,
    r#""finish_reason":"length"}],"usage":{"prompt_tokens":64,"completion_tokens":1,"total_tokens":65},"#,
    r#""kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"#,
    r#""remote_engine_id":"sim","remote_request_id":"cmpl-sim-0","remote_host":"127.0.0.1","remote_port":5600,"#,
    r#""tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":64,"remote_blocks_expiry_time":null,"#,
    r#""transfer_mode":"pull","remote_handle":"000000000000000000000000000000ff","#,
    r#""remote_epoch":"00000000000000ff","remote_lease_left_ms":30000,"remote_layout":"00000000000000ff"}}"#
);
const TOKEN: &[u8] = concat!(
    r#"data: {"id":"cmpl-sim","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"#,
    r#""text":" word","finish_reason":null}]}"#,
    "\n\n"
)
.as_bytes();
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Serves on `listener` until the future is dropped.
pub async fn serve(listener: TcpListener, role: SimRole) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        // Without it the second of two small writes waits for a delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let service = service_fn(move |request| answer(role, request));
        connections.spawn(async move {
            let http = hyper::server::conn::http1::Builder::new();
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Listens on a free port of loopback and serves on the current runtime until that ends.
///
/// # Errors
/// When no port can be had.
pub async fn start(role: SimRole) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(serve(listener, role));
    Ok(address)
}

async fn answer(role: SimRole, request: Request<Incoming>) -> Result<Response<SimBody>, hyper::Error> {
    let generates = request.uri().path().starts_with("/v1/");
    let body = request.into_body().collect().await?.to_bytes();
    let (kind, body) = match role {
        _ if !generates => ("application/json", SimBody::whole(Bytes::from_static(b"{}"))),
        SimRole::Prefill => ("application/json", SimBody::whole(Bytes::from_static(LENT.as_bytes()))),
        SimRole::Decode { tokens } if asks_for_a_stream(&body) => (
            "text/event-stream",
            SimBody { frames: tokens, rest: Some(Bytes::from_static(DONE)), rested: false },
        ),
        SimRole::Decode { tokens } => {
            let text = " word".repeat(tokens);
            let whole = format!(
                r#"{{"id":"cmpl-sim","object":"text_completion","choices":[{{"index":0,"text":"{text}"}}]}}"#
            );
            ("application/json", SimBody::whole(whole.into()))
        }
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

fn asks_for_a_stream(body: &[u8]) -> bool {
    const FIELD: &[u8] = b"\"stream\":true";
    body.windows(FIELD.len()).any(|window| window == FIELD)
}

/// So many token frames, then the rest. It pauses after each frame, so that each is a write of its own.
struct SimBody {
    frames: usize,
    rest: Option<Bytes>,
    rested: bool,
}

impl SimBody {
    fn whole(bytes: Bytes) -> Self {
        Self { frames: 0, rest: Some(bytes), rested: true }
    }
}

impl Body for SimBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.frames > 0 && !std::mem::replace(&mut self.rested, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.frames > 0 {
            self.frames -= 1;
            self.rested = false;
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(TOKEN)))));
        }
        Poll::Ready(self.rest.take().map(|rest| Ok(Frame::data(rest))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames == 0 && self.rest.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.rest, self.frames) {
            (Some(rest), 0) if self.rested => SizeHint::with_exact(rest.len() as u64),
            _ => SizeHint::default(),
        }
    }
}
