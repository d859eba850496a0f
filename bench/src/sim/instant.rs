//! Simulated engines: vLLM's prefill/decode protocol over HTTP/1.1 with almost no work behind it, so that what
//! a benchmark measures is what stands in front of them.
//!
//! A prefill engine answers with a complete handoff; a decode engine with so many tokens, streamed one write
//! per token, or in one piece. They check nothing of a request but its framing. The server is written by hand,
//! one thread per engine: one core answers more than 30,000 requests a second (`baton bench sim
//! --self-test` says how many), several times what any router under test can ask.
//!
//! ```text
//!          read a request ─▶ what now? ─┬ Answer: at once, whole or token by token ─▶ next request
//!  (verb: /abort_requests, /kv/release) ├ Silent: no byte, until the caller leaves
//!                                       ├ OneToken: head and first token, then as Silent
//!                                       └ Flood: tokens without end, until the caller leaves
//! ```
//!
//! What a caller does to an engine that holds its request is told as a [`Sign`], with the time at which the
//! engine's socket said it.

pub(crate) mod http;

pub(crate) use http::{head_bytes, header};

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use http::Inbox;

/// Which half of a request a simulated engine answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimRole {
    /// Lends blocks that do not exist.
    Prefill,
    /// Says this many tokens, with a pause between two of them.
    Decode {
        /// Tokens per answer.
        tokens: usize,
        /// Zero: the next token follows as soon as the thread has looked at its other connections.
        pause: Duration,
    },
}

/// What an engine does with the generations it is asked for from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Behaviour {
    /// Answers.
    Answer,
    /// Says nothing and keeps the connection.
    Silent,
    /// Sends the head and one token of a stream, and then nothing.
    OneToken,
    /// Sends tokens without end.
    Flood,
}

/// What an engine saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A generation is being held, or has been answered by a prefill engine.
    Took,
    /// The caller's end (FIN or RST) of a connection with a generation that is not finished.
    Closed,
    /// `/abort_requests` or `/kv/release`.
    Verb,
}

/// Who is told of every [`Sign`], with its time.
pub type Watcher = mpsc::Sender<(Instant, Sign)>;

/// A running engine. Stops when dropped.
pub struct SimEngine {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Signs that wait to be looked at; more are forgotten, since whoever measures looks at each.
const SIGNS_MAX: usize = 4096;
/// Connections that an engine's listener queues.
const BACKLOG: i32 = 4096;

pub(crate) struct Shared {
    role: SimRole,
    behaviour: AtomicU8,
    held: AtomicUsize,
    signs: std::sync::Mutex<Option<Watcher>>,
    answers: Answers,
}

/// What is said, ready to be sent.
struct Answers {
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

impl Answers {
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
            small: json_response("{}"),
            models: json_response(MODELS),
            whole: json_response(&whole),
            stream_head: STREAM_HEAD,
            token: format!("{:x}\r\n{TOKEN}\r\n", TOKEN.len()).into_bytes(),
            end: END,
        }
    }
}

impl SimEngine {
    /// Listens on a free port of loopback and serves on a thread of its own.
    ///
    /// # Errors
    /// When no port or no thread can be had.
    pub fn start(role: SimRole) -> std::io::Result<Self> {
        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            role,
            behaviour: AtomicU8::new(Behaviour::Answer as u8),
            held: AtomicUsize::new(0),
            signs: std::sync::Mutex::default(),
            answers: Answers::new(role),
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

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what it does with the generations that it is asked for from now on.
    pub fn behave(&self, behaviour: Behaviour) {
        self.shared.behaviour.store(behaviour as u8, Ordering::SeqCst);
    }

    /// Generations that it holds without an end.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }

    /// Sends every sign from now on to this watcher.
    pub fn watch(&self, watcher: Option<Watcher>) {
        *self.shared.signs() = watcher;
    }

    /// A watcher and its hand, for [`Self::watch`].
    #[must_use]
    pub fn watcher() -> (Watcher, mpsc::Receiver<(Instant, Sign)>) {
        mpsc::channel(SIGNS_MAX)
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic of it has been told on standard error.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn signs(&self) -> std::sync::MutexGuard<'_, Option<Watcher>> {
        self.signs.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn tell(&self, sign: Sign) {
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

/// A listener with a long queue, at the address of one that has just been closed if need be.
pub(crate) fn listen(at: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(at), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(std::net::TcpListener::from(socket))
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        // Out of descriptors: wait for some to be closed.
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        // Without it the second of two small writes waits for a delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            // An error is the caller's end of the connection.
            let _ = connection(stream, &shared).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn connection(stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut inbox = Inbox::new(stream);
    let answers = &shared.answers;
    loop {
        let Some(request) = inbox.request().await? else { return Ok(()) };
        if !request.generates {
            if request.verb {
                shared.tell(Sign::Verb);
            }
            inbox.send(if request.models { &answers.models } else { &answers.small }).await?;
            continue;
        }
        match (shared.behaviour(), shared.role) {
            (Behaviour::Answer, SimRole::Prefill) => {
                inbox.send(&answers.lent).await?;
                shared.tell(Sign::Took);
            }
            (Behaviour::Answer, SimRole::Decode { tokens, pause }) if request.stream => {
                inbox.send(answers.stream_head).await?;
                for token in 0..tokens {
                    if token > 0 && pause.is_zero() {
                        tokio::task::yield_now().await;
                    } else if token > 0 {
                        tokio::time::sleep(pause).await;
                    }
                    inbox.send(&answers.token).await?;
                }
                inbox.send(answers.end).await?;
            }
            (Behaviour::Answer, SimRole::Decode { .. }) => inbox.send(&answers.whole).await?,
            (held, _) => {
                if held == Behaviour::OneToken {
                    inbox.send(answers.stream_head).await?;
                    inbox.send(&answers.token).await?;
                }
                shared.held.fetch_add(1, Ordering::SeqCst);
                shared.tell(Sign::Took);
                if held == Behaviour::Flood {
                    inbox.send(answers.stream_head).await?;
                    inbox.flood(&answers.token).await;
                } else {
                    inbox.left().await;
                }
                shared.tell(Sign::Closed);
                shared.held.fetch_sub(1, Ordering::SeqCst);
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systems::router::wire::Wire;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    #[test]
    fn an_engine_answers_whole_and_token_by_token() {
        runtime().block_on(async {
            let decode =
                SimEngine::start(SimRole::Decode { tokens: 3, pause: Duration::ZERO }).expect("an engine");
            let mut wire = Wire::connect(decode.address()).await.expect("it listens");
            for (stream, tokens) in [(false, 0), (true, 3), (true, 3)] {
                let answer = wire.ask(stream).await.expect("an answer");
                let text = String::from_utf8_lossy(answer.bytes).into_owned();
                assert_eq!(text.matches("finish_reason\":null").count(), tokens, "{text}");
            }
        });
    }

    #[test]
    fn a_held_request_tells_when_its_caller_leaves() {
        runtime().block_on(async {
            let prefill = SimEngine::start(SimRole::Prefill).expect("an engine");
            for behaviour in [Behaviour::Silent, Behaviour::OneToken, Behaviour::Flood] {
                let (tells, mut signs) = SimEngine::watcher();
                prefill.watch(Some(tells));
                prefill.behave(behaviour);
                let mut wire = Wire::connect(prefill.address()).await.expect("it listens");
                wire.send(true).await.expect("it is sent");
                assert_eq!(signs.recv().await.map(|(_, sign)| sign), Some(Sign::Took));
                drop(wire);
                assert_eq!(signs.recv().await.map(|(_, sign)| sign), Some(Sign::Closed));
            }
        });
    }
}
