//! A server that speaks RESP2 as Valkey and Redis do, and answers as the test wants. It does not run scripts: the
//! scripts are checked with a real server by `tests/peers/limits/run.sh`.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// The server's reaction to a script.
#[derive(Clone, Debug)]
pub(crate) enum StoreAnswer {
    /// Everything was taken: each bucket is full again after this many microseconds.
    Taken(i64),
    /// These numbers.
    Numbers(Vec<i64>),
    /// These bytes.
    Bytes(Vec<u8>),
    /// No answer.
    Silence,
    /// As `Taken(1)`, but no answer to renewals of leases.
    SilentRenewals,
}

struct StoreState {
    answer: StoreAnswer,
    /// Commands that are no part of a connection's start, as words.
    commands: Vec<Vec<String>>,
    connections: usize,
}

/// A scripted server.
pub(crate) struct TestStore {
    pub address: SocketAddr,
    state: Arc<Mutex<StoreState>>,
    server: AbortOnDropHandle<()>,
}

impl TestStore {
    pub(crate) async fn start(answer: StoreAnswer) -> Self {
        Self::listening(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer)
    }

    /// Starts a server at the address of a stopped one.
    pub(crate) async fn at(address: SocketAddr, answer: StoreAnswer) -> Self {
        loop {
            // The port may briefly belong to an outgoing connection.
            if let Ok(listener) = TcpListener::bind(address).await {
                return Self::listening(listener, answer);
            }
            tokio::task::yield_now().await;
        }
    }

    fn listening(listener: TcpListener, answer: StoreAnswer) -> Self {
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(StoreState { answer, commands: Vec::new(), connections: 0 }));
        let server = AbortOnDropHandle::new(tokio::spawn(accept(listener, Arc::clone(&state))));
        Self { address, state, server }
    }

    pub(crate) fn answers(&self, answer: StoreAnswer) {
        self.state.lock().unwrap().answer = answer;
    }

    /// Ends the server and its connections.
    pub(crate) async fn stop(self) -> SocketAddr {
        self.server.abort();
        // Its task owns the connections.
        let _ = self.server.await;
        self.address
    }

    /// The commands with this word among their first ones: `EVALSHA`, `ZREM`.
    pub(crate) fn commands(&self, verb: &str) -> Vec<Vec<String>> {
        let state = self.state.lock().unwrap();
        state.commands.iter().filter(|words| words[0] == verb).cloned().collect()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.lock().unwrap().connections
    }
}

async fn accept(listener: TcpListener, state: Arc<Mutex<StoreState>>) {
    let mut connections = Vec::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        state.lock().unwrap().connections += 1;
        connections.push(AbortOnDropHandle::new(tokio::spawn(serve(stream, Arc::clone(&state)))));
    }
}

async fn serve(stream: TcpStream, state: Arc<Mutex<StoreState>>) {
    let mut stream = BufReader::new(stream);
    while let Some(words) = command(&mut stream).await {
        let reply = match words[0].as_str() {
            "TIME" => b"*2\r\n$10\r\n1790000000\r\n$6\r\n000001\r\n".to_vec(),
            "SCRIPT" => {
                let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, words[2].as_bytes());
                let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
                format!("$40\r\n{hex}\r\n").into_bytes()
            }
            "AUTH" | "SELECT" => b"+OK\r\n".to_vec(),
            verb => {
                let is_script = verb == "EVALSHA";
                let answer = {
                    let mut state = state.lock().unwrap();
                    // The test of a new connection is none of a request.
                    if !words.iter().any(|word| word.ends_with(":test")) {
                        state.commands.push(words.clone());
                    }
                    state.answer.clone()
                };
                let answer = match answer {
                    // A question of a request names buckets first.
                    StoreAnswer::SilentRenewals if is_script && words[3].ends_with(":concurrent") => {
                        StoreAnswer::Silence
                    }
                    StoreAnswer::SilentRenewals => StoreAnswer::Taken(1),
                    other => other,
                };
                match answer {
                    StoreAnswer::Silence | StoreAnswer::SilentRenewals => continue,
                    StoreAnswer::Bytes(bytes) => bytes,
                    StoreAnswer::Numbers(numbers) if is_script => array(&numbers),
                    StoreAnswer::Taken(until_full) if is_script => {
                        let keys: usize = words[2].parse().unwrap();
                        let buckets = words.get(4 + keys).and_then(|word| word.parse().ok()).unwrap_or(0);
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
                        let mut numbers = vec![0, i64::try_from(now).unwrap()];
                        numbers.extend(std::iter::repeat_n(until_full, buckets));
                        array(&numbers)
                    }
                    StoreAnswer::Numbers(_) | StoreAnswer::Taken(_) => b":1\r\n".to_vec(),
                }
            }
        };
        if stream.write_all(&reply).await.is_err() {
            return;
        }
    }
}

fn array(numbers: &[i64]) -> Vec<u8> {
    let items: String = numbers.iter().map(|number| format!(":{number}\r\n")).collect();
    format!("*{}\r\n{items}", numbers.len()).into_bytes()
}

/// The words of one command; `None` at the end of the connection.
async fn command(stream: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let count = number(stream, '*').await?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut word = vec![0; number(stream, '$').await? + 2];
        stream.read_exact(&mut word).await.ok()?;
        word.truncate(word.len() - 2);
        words.push(String::from_utf8(word).unwrap());
    }
    words[0].make_ascii_uppercase();
    Some(words)
}

async fn number(stream: &mut BufReader<TcpStream>, sign: char) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok().filter(|bytes| *bytes > 0)?;
    Some(line.trim_end().strip_prefix(sign).unwrap().parse().unwrap())
}
