//! Simulated engines with vLLM's prefill/decode protocol and almost no work, so that a benchmark measures only the
//! gateway in front of them. They speak HTTP/1.1, and HTTP/2 to a caller that begins with its preface.
//!
//! A prefill engine returns a complete handoff. A decode engine returns a number of tokens, streamed one write per
//! token, or in one piece. Only the framing of a request is checked. The server is written by hand, with one thread
//! per engine. It answers several times as many requests as any router under test can send
//! (`baton bench sim --self-test` measures this).
//!
//! ```text
//!           read a request ─▶ behaviour? ─┬ Answer: at once, whole or token by token ─▶ next request
//!   (verb: /abort_requests, /kv/release)  ├ Silent: no byte, until the caller disconnects
//!                                         ├ OneToken: head and first token, then as Silent
//!                                         └ Flood: tokens without end, until the caller disconnects
//! ```
//!
//! An [`EngineSignal`] reports what a caller does to an engine that holds its request, with the time at the engine's
//! socket.

pub(crate) mod connection;
mod http2;

pub(crate) use connection::{head_bytes, header};

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use connection::ServerConnection;

/// The leg that a simulated engine answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimRole {
    /// Leases blocks that do not exist.
    Prefill,
    /// Returns this many tokens, with a pause between two of them.
    Decode {
        /// Tokens per response.
        tokens: usize,
        /// With zero, the next token follows as soon as the thread has served its other connections.
        pause: Duration,
    },
}

/// What an engine does with new generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Behaviour {
    /// Answers.
    Answer,
    /// Sends nothing and keeps the connection.
    Silent,
    /// Sends the head and one token of a stream, then nothing.
    OneToken,
    /// Sends tokens without end.
    Flood,
}

/// An event at an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSignal {
    /// A decode engine holds a generation, or a prefill engine has answered one.
    Took,
    /// The caller has closed (FIN or RST) a connection with an unfinished generation.
    Closed,
    /// A request to `/abort_requests` or `/kv/release`.
    Verb,
}

/// Receives every [`EngineSignal`] with its time.
pub type SignalSender = mpsc::Sender<(Instant, EngineSignal)>;

/// A running engine. Dropping stops it.
pub struct SimEngine {
    address: SocketAddr,
    shared: Arc<EngineShared>,
    stop: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Maximum queued signals. Further ones are dropped.
const SIGNALS_MAX: usize = 4096;
/// Connections that an engine's listener queues.
const BACKLOG: i32 = 4096;

pub(crate) struct EngineShared {
    role: SimRole,
    behaviour: AtomicU8,
    held: AtomicUsize,
    signs: std::sync::Mutex<Option<SignalSender>>,
    answers: CannedResponses,
}

/// Prepared responses.
struct CannedResponses {
    lent: Vec<u8>,
    small: Vec<u8>,
    models: Vec<u8>,
    whole: Vec<u8>,
    stream_head: &'static [u8],
    token: Vec<u8>,
    end: &'static [u8],
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
const TOKEN: &str = concat!(
    r#"data: {"id":"cmpl-sim","object":"text_completion","created":0,"model":"sim","choices":[{"index":0,"#,
    r#""text":" word","finish_reason":null}]}"#,
    "\n\n"
);
const MODELS: &str =
    r#"{"object":"list","data":[{"id":"sim","object":"model","owned_by":"vllm","max_model_len":32768}]}"#;
const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    transfer-encoding: chunked\r\n\r\n";
/// The last event and the last chunk.
const END: &[u8] = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

fn json_response(body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: {length}\r\ncontent-type: application/json\r\n\r\n{body}"
    )
    .into_bytes()
}

impl CannedResponses {
    fn new(role: SimRole) -> Self {
        let tokens = match role {
            SimRole::Prefill => 1,
            SimRole::Decode { tokens, .. } => tokens,
        };
        let text = " word".repeat(tokens);
        let whole = format!(
            r#"{{"id":"cmpl-sim","object":"text_completion","created":0,"model":"sim","choices":[{{"index":0,"text":"{text}","finish_reason":"length"}}],"usage":{{"prompt_tokens":64,"completion_tokens":{tokens},"total_tokens":{}}}}}"#,
            64 + tokens
        );
        Self {
            lent: json_response(LENT),
            // The answer of the verbs, too.
            small: json_response(r#"{"result":"released","results":{}}"#),
            models: json_response(MODELS),
            whole: json_response(&whole),
            stream_head: STREAM_HEAD,
            token: format!("{:x}\r\n{TOKEN}\r\n", TOKEN.len()).into_bytes(),
            end: END,
        }
    }
}

impl SimEngine {
    /// Starts a server on a free port of loopback, on its own thread.
    ///
    /// # Errors
    /// If no port or thread is available.
    pub fn start(role: SimRole) -> std::io::Result<Self> {
        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(EngineShared {
            role,
            behaviour: AtomicU8::new(Behaviour::Answer as u8),
            held: AtomicUsize::new(0),
            signs: std::sync::Mutex::default(),
            answers: CannedResponses::new(role),
        });
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (serves, stopped) = (Arc::clone(&shared), stop.clone());
        let thread = std::thread::Builder::new().name("bench-sim".into()).spawn(move || {
            runtime.block_on(async {
                let Ok(listener) = TcpListener::from_std(listener) else { return };
                tokio::select! {
                    () = stopped.cancelled() => {}
                    () = serve(listener, serves) => {}
                }
            });
        })?;
        Ok(Self { address, shared, stop, thread: Some(thread) })
    }

    /// The address of the engine.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the behaviour for new generations.
    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.shared.behaviour.store(behaviour as u8, Ordering::SeqCst);
    }

    /// Number of generations that are held without an end.
    #[must_use]
    pub fn open_generations(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }

    /// Sends further signals to this watcher.
    pub fn watch(&self, watcher: Option<SignalSender>) {
        *self.shared.signs() = watcher;
    }

    /// A watcher and its receiver, for [`Self::watch`].
    #[must_use]
    pub fn watcher() -> (SignalSender, mpsc::Receiver<(Instant, EngineSignal)>) {
        mpsc::channel(SIGNALS_MAX)
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic was already printed to standard error.
            let _ = thread.join();
        }
    }
}

impl EngineShared {
    fn signs(&self) -> std::sync::MutexGuard<'_, Option<SignalSender>> {
        self.signs.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn send_signal(&self, sign: EngineSignal) {
        let at = Instant::now();
        if let Some(watcher) = self.signs().as_ref() {
            let _ = watcher.try_send((at, sign));
        }
    }

    fn behaviour(&self) -> Behaviour {
        match self.behaviour.load(Ordering::SeqCst) {
            0 => Behaviour::Answer,
            1 => Behaviour::Silent,
            2 => Behaviour::OneToken,
            _ => Behaviour::Flood,
        }
    }
}

/// A listener with a long queue. Its address may have been in use just before.
pub(crate) fn listen(at: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(at), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(std::net::TcpListener::from(socket))
}

async fn serve(listener: TcpListener, shared: Arc<EngineShared>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        // Out of descriptors: wait until some are closed.
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        // Without this option the second of two small writes waits for a delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let mut first = [0; 4];
            if matches!(stream.peek(&mut first).await, Ok(4)) && &first == b"PRI " {
                return http2::serve(stream, &shared).await;
            }
            // An error means that the caller closed the connection.
            let _ = connection(stream, &shared).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn connection(stream: TcpStream, shared: &EngineShared) -> std::io::Result<()> {
    let mut connection = ServerConnection::new(stream);
    let answers = &shared.answers;
    loop {
        let Some(request) = connection.request().await? else { return Ok(()) };
        if !request.generates {
            if request.verb {
                shared.send_signal(EngineSignal::Verb);
            }
            connection.send(if request.models { &answers.models } else { &answers.small }).await?;
            continue;
        }
        match (shared.behaviour(), shared.role) {
            (Behaviour::Answer, SimRole::Prefill) => {
                connection.send(&answers.lent).await?;
                shared.send_signal(EngineSignal::Took);
            }
            (Behaviour::Answer, SimRole::Decode { tokens, pause }) if request.stream => {
                connection.send(answers.stream_head).await?;
                for token in 0..tokens {
                    if token > 0 && pause.is_zero() {
                        tokio::task::yield_now().await;
                    } else if token > 0 {
                        tokio::time::sleep(pause).await;
                    }
                    connection.send(&answers.token).await?;
                }
                connection.send(answers.end).await?;
            }
            (Behaviour::Answer, SimRole::Decode { .. }) => connection.send(&answers.whole).await?,
            (held, _) => {
                if held == Behaviour::OneToken {
                    connection.send(answers.stream_head).await?;
                    connection.send(&answers.token).await?;
                }
                shared.held.fetch_add(1, Ordering::SeqCst);
                shared.send_signal(EngineSignal::Took);
                if held == Behaviour::Flood {
                    connection.send(answers.stream_head).await?;
                    connection.flood(&answers.token).await;
                } else {
                    connection.drain_until_closed().await;
                }
                shared.send_signal(EngineSignal::Closed);
                shared.held.fetch_sub(1, Ordering::SeqCst);
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Streaming;
    use crate::systems::router::connection::{KeptConnection, default_request};

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    #[test]
    fn an_engine_answers_whole_and_token_by_token() {
        runtime().block_on(async {
            let decode =
                SimEngine::start(SimRole::Decode { tokens: 3, pause: Duration::ZERO }).expect("an engine");
            let mut connection = KeptConnection::connect(decode.address()).await.expect("it listens");
            for (streaming, tokens) in
                [(Streaming::Whole, 0), (Streaming::Streamed, 3), (Streaming::Streamed, 3)]
            {
                let answer = connection.post(&default_request(streaming)).await.expect("an answer");
                let text = String::from_utf8_lossy(answer.bytes).into_owned();
                assert_eq!(text.matches("finish_reason\":null").count(), tokens, "{text}");
            }
        });
    }

    #[test]
    fn a_held_request_reports_the_callers_disconnect() {
        runtime().block_on(async {
            let prefill = SimEngine::start(SimRole::Prefill).expect("an engine");
            for behaviour in [Behaviour::Silent, Behaviour::OneToken, Behaviour::Flood] {
                let (watcher, mut signals) = SimEngine::watcher();
                prefill.watch(Some(watcher));
                prefill.set_behaviour(behaviour);
                let mut connection = KeptConnection::connect(prefill.address()).await.expect("it listens");
                connection.send(Streaming::Streamed).await.expect("it is sent");
                assert_eq!(signals.recv().await.map(|(_, signal)| signal), Some(EngineSignal::Took));
                drop(connection);
                assert_eq!(signals.recv().await.map(|(_, signal)| signal), Some(EngineSignal::Closed));
            }
        });
    }
}
